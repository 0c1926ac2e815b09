from __future__ import annotations

import pytest

from offloadkit.facts import graphs


@pytest.fixture(autouse=True)
def eager_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count no CUDA graphs; test_graphs.py switches them on."""
    monkeypatch.setattr(graphs, "device_types", set())
