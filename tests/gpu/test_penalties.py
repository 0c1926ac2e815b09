"""On a GPU: a penalty on weights that are in RAM counts as in torch, wherever it is taken."""

from __future__ import annotations

import pytest
import torch

from tests.test_penalties_and_hooks import PENALTIES, placements, trained

pytestmark = pytest.mark.gpu


@placements
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_counts_as_in_torch(name: str, when: str, placement: object) -> None:
    ours = trained(PENALTIES[name], placement, when, device="cuda")
    torch.testing.assert_close(ours, trained(PENALTIES[name], None, when, device="cuda"))
