"""Copy streams select the current stream by torch's C functions, as `torch.cuda.stream` does. No two are the same."""

from __future__ import annotations

import weakref
from contextlib import suppress
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("number", [0, 1, 3])
def test_copies_on_a_stream_are_one_call_of_torch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch_with_two_devices(0)
    monkeypatch.setattr(streams, "_c", cuda)
    found, copy = [], torch._foreach_copy_

    def noted(into: Any, source: Any, *, non_blocking: bool) -> None:
        found.append((cuda.current[1], non_blocking))
        copy(into, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    dtypes = (torch.bfloat16, torch.uint8, torch.float32)[:number]
    pairs = [(torch.zeros(size, dtype=dtype), torch.full((size,), 7, dtype=dtype)) for size, dtype in enumerate(dtypes)]
    streams._CudaStream(SimpleNamespace(stream_id=3, device_index=1, device_type=1)).copy(pairs)  # type: ignore[arg-type]
    assert all(torch.equal(into, source) for into, source in pairs)
    assert found == [((3, 1, 1), True)] * (number > 0)
    assert (cuda.device, cuda.current) == (0, [(0, 0, 1), (7, 1, 1)])


def test_a_stream_is_no_other_living_one_although_torch_hands_out_few_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after many moves, each with new streams."""
    numbers = cycle(range(32))

    def of_torch(device: torch.device, priority: int) -> SimpleNamespace:
        return SimpleNamespace(device_index=device.index, stream_id=next(numbers), device_type=1)

    monkeypatch.setattr(streams, "_cuda", SimpleNamespace(Stream=of_torch))
    monkeypatch.setattr(streams, "_owners", weakref.WeakValueDictionary())
    device, make = torch.device("cuda", 0), streams.backends["cuda"].stream
    kept = [make(device, False) for _ in range(8)]
    for _ in range(40):
        passing = [make(device, False) for _ in range(3)]
        assert len({each._id for each in [*kept, *passing]}) == 11
    assert len([make(device, False) for _ in range(40)]) == 40  # there are no more


def test_only_events_of_dropped_objects_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded again on its device alone, and with timing only if it was made for it."""

    class OfTorch:
        def __new__(cls, enable_timing: bool) -> OfTorch:
            made = object.__new__(cls)
            made.enable_timing, made.streams = enable_timing, []  # type: ignore[attr-defined]
            return made

        def record(self: Any, stream: Any) -> None:
            assert all(each.device_index == stream.device_index for each in self.streams)
            self.streams.append(stream)

    monkeypatch.setattr(streams, "_c", SimpleNamespace(_CudaEventBase=OfTorch))
    monkeypatch.setattr(streams, "_cuda", SimpleNamespace(Event=OfTorch))
    monkeypatch.setattr(streams.CudaEvent, "_spares", {})
    first, other, third = (SimpleNamespace(device_index=index) for index in (0, 1, 0))

    def events() -> list[streams.CudaEvent]:
        on: list[Any] = [first, first, other, third]
        return [streams.CudaEvent(stream, timing) for stream, timing in zip(on, (True, False, True, True), strict=True)]

    kept, passing = events(), events()
    of_kept, of_passing = ({id(each.event) for each in some} for some in (kept, passing))
    del passing
    again = events()
    assert {id(each.event) for each in again} == of_passing
    assert not of_passing & of_kept
    assert [each.event.streams[-1].device_index for each in again] == [0, 0, 1, 0]
    assert [each.event.enable_timing for each in again] == [True, False, True, True]
