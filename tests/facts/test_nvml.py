"""This process's VRAM: by NVML where its figure is plausible, else within a bound."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from offloadkit.facts import hardware, nvml
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from tests.nvml import Library, nvml_is

MIB, GIB = 1 << 20, 1 << 30
CARD = torch.device("cuda", 0)


class Gpu:
    """A GPU of 80 GiB: what torch, this process's context, and other processes hold."""

    def __init__(self) -> None:
        self.reserved, self.context, self.others = 2 * GIB, 500 * MIB, 0

    @property
    def outside(self) -> int:
        return self.context + self.others

    def info(self, _: object) -> tuple[int, int]:
        return 80 * GIB - self.reserved - self.outside, 80 * GIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A process that has loaded CUDA's libraries, with no NVML."""
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", found.info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: found.reserved)
    monkeypatch.setattr(hardware, "_loaded_bytes", {})
    with nvml_is(None):
        yield found


def test_a_neighbour_is_no_context_by_nvml(gpu: Gpu) -> None:
    library = Library()
    gpu.others = GIB
    library.processes[0] = [(os.getpid() + 1, GIB), (os.getpid(), gpu.reserved + gpu.context)]
    with nvml_is(library):
        assert hardware.vram_context_bytes(CARD) == gpu.context
        assert hardware.vram_of_others_bytes(CARD) == GIB
        assert hardware.vram_context_bytes(CARD, growth_bytes=MIB) == gpu.context + MIB
        gpu.context = 3 * GIB  # more than any bound: NVML knows
        library.processes[0][1] = os.getpid(), gpu.reserved + gpu.context
        assert hardware.vram_context_bytes(CARD) == gpu.context


@pytest.mark.parametrize(
    "of_this_pid", [None, 0, GIB, 2 * GIB + MIB, 4 * GIB], ids=["not counted", "0", "< torch's", "tiny", "> all"]
)
def test_an_implausible_figure_of_nvml_does_not_count(of_this_pid: int | None, gpu: Gpu) -> None:
    """Another process of the host may have this process's number within its container."""
    library, expected = Library(), hardware.vram_context_bytes(CARD)
    library.processes[0] = [(os.getpid(), of_this_pid)]
    with nvml_is(library):
        assert hardware.vram_context_bytes(CARD) == expected


def test_without_nvml_a_neighbour_counts_no_more_than_a_context_may_grow(gpu: Gpu) -> None:
    hardware.note_loaded_libraries(CARD)
    most = gpu.context + LOADED_LATER_BYTES
    gpu.context += 50 * MIB  # kernels that training loads
    assert hardware.vram_context_bytes(CARD) == gpu.context
    assert hardware.vram_context_bytes(CARD, growth_bytes=LOADED_LATER_BYTES) == most
    for others in (GIB, 20 * GIB):
        gpu.others = others
        assert hardware.vram_context_bytes(CARD) == most
        assert hardware.vram_context_bytes(CARD, growth_bytes=LOADED_LATER_BYTES) == most
        assert others - LOADED_LATER_BYTES <= hardware.vram_of_others_bytes(CARD) <= others
    gpu.others = 0
    assert hardware.vram_context_bytes(CARD) == gpu.context


def test_without_nvml_a_neighbour_at_the_start_is_found_out_when_it_leaves(gpu: Gpu) -> None:
    gpu.others = 2 * GIB
    assert hardware.vram_context_bytes(CARD) == 3 * GIB // 2, "at most 1.5 GiB before the libraries are loaded"
    hardware.note_loaded_libraries(CARD)
    gpu.others = 0
    assert hardware.vram_context_bytes(CARD) == gpu.context
    gpu.others = GIB
    assert hardware.vram_context_bytes(CARD) == gpu.context + LOADED_LATER_BYTES


def test_a_context_of_another_time_bounds_this_one_and_is_bounded_by_it(gpu: Gpu) -> None:
    hardware.note_loaded_libraries(CARD)
    beside_a_neighbour = gpu.context + GIB
    assert hardware.context_of_another_time(CARD, beside_a_neighbour) == gpu.context + LOADED_LATER_BYTES
    assert hardware.context_of_another_time(CARD, gpu.context + MIB) == gpu.context + MIB
    hardware._loaded_bytes.clear()
    gpu.others = GIB
    hardware.note_loaded_libraries(CARD)
    assert hardware.context_of_another_time(CARD, gpu.context) == gpu.context
    assert hardware.vram_context_bytes(CARD) == gpu.context + LOADED_LATER_BYTES


def test_libraries_between_gpus_count_beside_the_bound(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.note_loaded_libraries(CARD)
    monkeypatch.setitem(hardware.library_bytes, 0, GIB)
    gpu.context += GIB
    assert hardware.vram_context_bytes(CARD) == gpu.context


def test_without_the_library_or_if_it_fails_nothing_is_known() -> None:
    library = Library()
    library.used[0], library.processes[0] = 5, [(os.getpid(), 3), (1, 4)]
    cases: tuple[tuple[Library | None, tuple[int | None, int | None]], ...]
    cases = (library, (5, 3)), (None, (None, None))
    for found, expected in cases:
        with nvml_is(found):
            assert (nvml.used_bytes(CARD), nvml.process_bytes(CARD)) == expected
    library.error = 3
    with nvml_is(library):
        assert (nvml.used_bytes(CARD), nvml.process_bytes(CARD)) == (None, None)


def test_an_old_library_lacks_the_function() -> None:
    class Old(Library):
        def __getattribute__(self, name: str) -> object:
            if name.endswith("_v3"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    with nvml_is(Old()):
        assert nvml.used_bytes(CARD) == 0
        assert nvml.process_bytes(CARD) is None
