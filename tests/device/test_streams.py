"""Copy streams select the current stream by torch's C functions, as `torch.cuda.stream` does."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from offloadkit.device import streams


def torch_with_two_devices(device: int) -> Any:
    """Its state is `device`, the current one, and `current`, the stream of each device as (number, device, type)."""
    state: Any = SimpleNamespace(device=device, current=[(0, 0, 1), (7, 1, 1)])

    def set_stream(number: int, device: int, kind: int) -> None:
        state.current[device], state.device = (number, device, kind), device

    state._cuda_getDevice = lambda: state.device
    state._cuda_setDevice = lambda device: setattr(state, "device", device)
    state._cuda_getCurrentStream = state.current.__getitem__
    state._cuda_setStream = set_stream
    return state


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_work_on_a_stream_leaves_device_and_streams_as_they_were(
    device: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch_with_two_devices(device)
    monkeypatch.setattr(streams, "_c", cuda)
    own: Any = SimpleNamespace(stream_id=3, device_index=1, device_type=1)
    found = []

    def work() -> None:
        found.append((cuda.device, cuda.current[1]))
        if fails:
            raise RuntimeError

    with suppress(RuntimeError):
        streams._CudaStream(own).run(work)
    assert found == [(1, (3, 1, 1))]
    assert (cuda.device, cuda.current) == (device, [(0, 0, 1), (7, 1, 1)])
