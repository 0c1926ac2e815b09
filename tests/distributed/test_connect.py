"""Ranks that connect their GPUs: once, and anew where a plan wants another number of NCCL's thread blocks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offloadkit import hardware
from offloadkit.distributed import ranks as ranks_module
from offloadkit.distributed.ranks import Group
from tests.distributed.pool import RankPool

MIB = 1 << 20
_new_group = dist.new_group


class CpuAsGpu(str):
    """A device whose tensors are on the CPU."""

    type, index = "cuda", 0


class Library:
    """Stands in for NCCL: gloo, and what it takes of VRAM."""

    def __init__(self, taken: int) -> None:
        self.taken, self.outside = taken, 1000 * MIB
        self.most_ctas: list[int] = []
        self.destroyed: list[Any] = []

    def new_group(self, *_: Any, backend: str, pg_options: Any = None, **options: Any) -> Any:
        if backend == "nccl":
            self.most_ctas.append(pg_options.config.max_ctas)
            self.outside += self.taken
        return _new_group(backend="gloo", **options)

    def destroy(self, group: Any) -> None:
        self.destroyed.append(group)
        self.outside -= self.taken


def options() -> Any:
    return SimpleNamespace(config=SimpleNamespace(max_ctas=0), _timeout=None)


def all_gather(pieces: list[torch.Tensor], own: torch.Tensor, *, group: Any) -> None:
    """As NCCL does it, and gloo does not: of pieces that differ in length too."""
    pieces[dist.get_rank()].copy_(own)
    for owner, piece in enumerate(pieces):
        dist.broadcast(piece, owner, group=group)


def with_library(taken: int, do: Callable[[Group, Library], Any]) -> Any:
    """What `do` returns, for ranks whose GPUs are connected by a `Library`."""
    library = Library(taken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", library.new_group)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(dist, "all_gather", all_gather)
        patch.setattr(hardware, "vram_outside_bytes", lambda _: library.outside)
        patch.setattr(ranks_module, "_CONNECTING_BYTES", 3 << 10)
        group = Group(torch.device("cpu"))
        dist.destroy_process_group(group._between_devices)
        patch.setattr(dist, "destroy_process_group", library.destroy)
        device: Any = CpuAsGpu("cpu")
        group._device, group._between_devices = device, None
        try:
            return do(group, library)
        finally:
            hardware.library_bytes.clear()


def connects_again(ranks: Group, library: Library) -> list[Any]:
    ranks._received["exchange"] = 7
    found: list[Any] = []
    for most_ctas in (4, 4, 0):
        ranks.connect(most_ctas)
        found.append((list(library.most_ctas), len(library.destroyed), hardware.library_bytes[0]))
    ranks._took_vram(-ranks._library_bytes)
    return [*found, hardware.library_bytes[0], ranks.take_received()]


def wants_another_number(ranks: Group, library: Library) -> Any:
    ranks.connect(4)
    ranks.connect(4 * dist.get_rank())


def again(taken: int) -> Any:
    return with_library(taken, connects_again)


def apart() -> Any:
    return with_library(0, wants_another_number)


def test_ranks_connect_once_for_a_number_of_thread_blocks(ranks: RankPool) -> None:
    """What it takes of VRAM is counted until it is given back, and what goes between them is not."""
    for found in ranks.run(2, again, taken=500 * MIB):
        assert found[:3] == [([4], 0, 500 * MIB), ([4], 0, 500 * MIB), ([4, 0], 1, 500 * MIB)]
        assert found[3] == 0
        assert found[4] == {"exchange": 7, "agreement": found[4]["agreement"]}


def test_what_another_process_takes_meanwhile_is_not_the_ranks(ranks: RankPool) -> None:
    (first, *_), _ = ranks.run(2, again, taken=10_000 * MIB)
    assert first[2] == 2 * ranks_module.NCCL_BYTES


def test_ranks_with_plans_for_other_numbers_are_told_so(ranks: RankPool) -> None:
    for error in ranks.answers(2, apart):
        assert isinstance(error, ranks_module.RankError)
        assert "different numbers of NCCL's thread blocks" in str(error)
