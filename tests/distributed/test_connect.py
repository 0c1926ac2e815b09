"""Ranks connect their GPUs once, and again when a plan needs another number of NCCL thread blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offloadkit.device import streams
from offloadkit.distributed import ranks as ranks_module
from offloadkit.distributed.ranks import Group
from offloadkit.facts import hardware, nvml
from offloadkit.facts.fitted import NCCL_BYTES, NCCL_BYTES_EACH
from tests.distributed.pool import RankPool

MIB = 1 << 20
_new_group, _destroy = dist.new_group, dist.destroy_process_group


class CpuAsGpu(str):
    """A device whose tensors are on the CPU."""

    type, index = "cuda", 0


class Library:
    """Simulates NCCL: gloo, and the VRAM that NCCL takes."""

    def __init__(self, taken: int) -> None:
        self.taken, self.outside = taken, 1000 * MIB
        self.most_ctas: list[int] = []
        self.made: list[Any] = []
        self.destroyed: list[Any] = []

    def new_group(self, *_: Any, backend: str, pg_options: Any = None, **options: Any) -> Any:
        group = _new_group(backend="gloo", **options)
        if backend == "nccl":
            self.made.append(group)
            self.most_ctas.append(pg_options.config.max_ctas)
            self.outside += self.taken
        return group

    def destroy(self, group: Any) -> None:
        if group in self.made:
            self.destroyed.append(group)
            self.outside -= self.taken
        _destroy(group)


def options() -> Any:
    return SimpleNamespace(config=SimpleNamespace(max_ctas=0), _timeout=None)


def all_gather(pieces: list[torch.Tensor], own: torch.Tensor, *, group: Any) -> None:
    """NCCL accepts pieces of different lengths, gloo does not."""
    pieces[dist.get_rank()].copy_(own)
    for owner, piece in enumerate(pieces):
        dist.broadcast(piece, owner, group=group)


def with_library(taken: int, do: Callable[[Group, Library], Any]) -> Any:
    """The result of `do` for ranks whose GPUs are connected by a `Library`."""
    library = Library(taken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", library.new_group)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(dist, "all_gather", all_gather)
        patch.setattr(hardware, "vram_outside_bytes", lambda _: library.outside)
        patch.setattr(ranks_module, "CONNECTING_BYTES", 3 << 10)
        patch.setattr(dist, "destroy_process_group", library.destroy)
        patch.setitem(streams.backends, "cuda", streams.backends["cpu"])
        device: Any = CpuAsGpu("cpu")
        try:
            return do(Group(device), library)
        finally:
            hardware.library_bytes.clear()


def connects_again(ranks: Group, library: Library) -> list[Any]:
    found: list[Any] = []
    for most_ctas in (4, 4, 0):
        ranks.connect(most_ctas)
        if not found:
            ranks.exchange(torch.empty(14, dtype=torch.uint8), torch.zeros(14, dtype=torch.uint8), [0, 7, 14])
        found.append((list(library.most_ctas), len(library.destroyed), hardware.library_bytes[0]))
    ranks.close()
    return [*found, hardware.library_bytes[0], ranks.take_received()]


def wants_another_number(ranks: Group, library: Library) -> Any:
    ranks.connect(4)
    try:
        ranks.connect(4 * dist.get_rank())
    finally:
        ranks.close()


def again(taken: int) -> Any:
    return with_library(taken, connects_again)


def connects_once(ranks: Group, library: Library) -> int:
    ranks.connect()
    found = hardware.library_bytes[0]
    ranks.close()
    return found


def once(taken: int) -> Any:
    return with_library(taken, connects_once)


def beside_a_neighbour() -> Any:
    """NVML counts 500 MiB more of this process once its GPUs are connected; the GPU has 2,000 MiB less."""

    def connects(ranks: Group, library: Library) -> int:
        def own_bytes(_: Any) -> int:
            return (700 + 500 * (len(library.made) - len(library.destroyed))) * MIB

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvml, "process_bytes", own_bytes)
            return connects_once(ranks, library)

    return with_library(2000 * MIB, connects)


def apart() -> Any:
    return with_library(0, wants_another_number)


def test_ranks_connect_once_for_a_number_of_thread_blocks(ranks: RankPool) -> None:
    """The group's VRAM counts until it is released; the bytes exchanged in connecting do not count."""
    for found in ranks.run(2, again, taken=500 * MIB):
        assert found[:3] == [([4], 0, 500 * MIB), ([4], 0, 500 * MIB), ([4, 0], 1, 500 * MIB)]
        assert found[3] == 0
        assert found[4] == {"exchange": 7, "agreement": found[4]["agreement"]}


def test_what_another_process_takes_meanwhile_is_not_the_ranks(ranks: RankPool) -> None:
    (first, *_), _ = ranks.run(2, again, taken=10_000 * MIB)
    assert first[2] == 2 * NCCL_BYTES


def test_nvml_tells_what_another_process_takes_from_the_ranks(ranks: RankPool) -> None:
    assert ranks.run(2, beside_a_neighbour) == [500 * MIB] * 2


def test_more_ranks_of_a_host_may_take_more(ranks: RankPool) -> None:
    taken = 2 * (NCCL_BYTES + 2 * NCCL_BYTES_EACH)
    assert ranks.run(4, once, taken=taken) == [taken] * 4


def test_ranks_with_plans_for_other_numbers_are_told_so(ranks: RankPool) -> None:
    for error in ranks.answers(2, apart):
        assert isinstance(error, ranks_module.RankError)
        assert "different numbers of NCCL thread blocks" in str(error)
