"""RAM mapped by several processes; in these tests one process maps it twice."""

from __future__ import annotations

import os

import pytest
import torch

from offloadkit.device.host_memory import SharedSlab, file_in_ram
from offloadkit.distributed.stepped import SteppedLayers
from offloadkit.errors import RankError

NUMEL = 5000


def two() -> tuple[list[SharedSlab], list[torch.Tensor]]:
    file = file_in_ram(4 * NUMEL)
    slabs = [SharedSlab(each, 4 * NUMEL) for each in (file, os.dup(file))]
    for slab in slabs:
        slab.populate(1, 2)
    return slabs, [slab.cut(NUMEL, torch.float32) for slab in slabs]


def test_what_one_writes_both_see_unless_it_has_parted() -> None:
    (first, second), (one, other) = two()
    one.fill_(1)
    assert other.eq(1).all()
    second.populate()  # keeps the contents
    first.part()
    one[100:].fill_(2)
    assert other.eq(1).all()
    first.publish(one[200:300])
    second.part()
    other[:50].fill_(3)
    second.rejoin()
    assert torch.equal(other, torch.ones(NUMEL).index_fill(0, torch.arange(200, 300), 2))
    first.rejoin()
    assert torch.equal(one, other)
    first.rejoin()
    assert torch.equal(one, other)


@pytest.mark.parametrize("has_parted", [False, True])
def test_a_slab_that_is_made_ordinary_is_nobody_elses(has_parted: bool) -> None:
    (first, second), (one, other) = two()
    one.fill_(1)
    if has_parted:
        first.part()
    one[:10].fill_(2)
    for slab in (first, second):
        slab.make_ordinary()
    one.add_(1)
    assert one.sum() == 2 * NUMEL + 10
    assert other.sum() == NUMEL + (0 if has_parted else 10)


def test_memory_and_files_go_with_the_last_tensor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    slabs, tensors = two()
    del slabs
    tensors[0].fill_(1)
    del tensors
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("end", ["says so", "dies", "is late"])
def test_waiting_for_a_rank_that_steps_nothing_any_more_is_an_error(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("offloadkit.distributed.stepped.CHECKS_EVERY", 0.0)
    file = file_in_ram(8 * 4)
    lost = 1 if end == "dies" else None
    ranks = [SteppedLayers(each, at, 2, 1, 0.0, lambda: lost) for at, each in enumerate((file, os.dup(file)))]
    (first,), (second,) = (rank.layers for rank in ranks)
    assert first.reached()
    for layer in (first, second):
        layer.begin()
    second.post()
    first.wait()
    first.begin()
    if end == "says so":
        ranks[1].end()
    with pytest.raises(RankError, match="within 0 seconds" if end == "is late" else "rank 1 has ended"):
        first.wait()
