"""RAM and disk of the flat layers: bytes needed by each placement, and their allocation."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from offloadkit.device import host_memory
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.state_file import DiskStates, Region, StateFile
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.distributed.stepped import Stepped
from offloadkit.facts.config import Placement
from offloadkit.planner import NUM_STAGING, NUM_STATE_BUFFERS, LayerShape

Changes = Sequence[tuple[int, Placement]]
"""Layers, by index, with their new placements."""


class LayerMemory(NamedTuple):
    """RAM and disk of one layer.

    Attributes:
        slab: RAM for states and gradient, and for a copy of weights in VRAM.
        weights: RAM for weights that live in RAM, separate because it outlives the engine.
        sums: several ranks only: shared RAM for the gradient sums that they exchange in RAM.
        region: disk region for states that live on disk.
        stepped: several ranks with `weights` only: tracks which ranks have stepped the layer.
    """

    slab: HostSlab
    weights: HostSlab | None = None
    sums: HostSlab | None = None
    region: Region | None = None
    stepped: Stepped | None = None


class LayerAllocator:
    """Allocates RAM and disk for flat layers, which are given by index.

    Attributes:
        disk: the states on disk; None until a layer has some. A layer keeps its region until the engine is closed.
        stepped: several ranks only: one for each layer, once ranks share RAM.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        accumulation: int,
        folder: str | None,
        device: torch.device,
        ranks: Solo | Group,
    ) -> None:
        """folder: for states on disk; None: the system's temporary folder."""
        self._shapes, self._accumulation, self._folder = shapes, accumulation, folder
        self._device, self._ranks = device, ranks
        self.disk: DiskStates | None = None
        self.stepped: Sequence[Stepped] = ()
        self._regions: dict[int, Region] = {}
        self._weights: dict[int, HostSlab] = {}
        self._sums: dict[int, HostSlab] = {}
        """Shared RAM, by layer, between `reserve` and `allocate`."""

    def num_bytes(self, at: int, placement: Placement) -> int:
        """RAM of a layer at world size 1."""
        return self._own_bytes(at, placement) + (self._shapes[at].weight_bytes() if placement.weights == "ram" else 0)

    def _own_bytes(self, at: int, placement: Placement) -> int:
        """RAM of a layer's own slab. Norm sums, weights in RAM and exchanged gradient sums have separate slabs."""
        shape = self._shapes[at]
        total = sum(shape.ram_bytes(placement, self._accumulation).values()) - shape.sums_bytes()
        if shape.sums_whole(self._accumulation) and placement.gradients == "ram":
            total -= shape.window_bytes(self._accumulation)
        return total - (shape.stepped_bytes() if placement.weights == "ram" else 0)

    def buffer_bytes(self, placements: Sequence[Placement]) -> list[int]:
        """Sizes of the RAM buffers that layers share: for states on disk first, then the staging ring, if any."""
        placed = list(zip(self._shapes, placements, strict=True))
        on_disk = [sum(shape.state_bytes().values()) for shape, where in placed if where.states == "disk"]
        through_ram = [shape.staged_bytes(self._accumulation) for shape, where in placed if where.gradients == "ram"]
        staging = [NUM_STAGING * max(through_ram)] if self._accumulation > 1 and through_ram else []
        num_disk = NUM_STATE_BUFFERS if on_disk else 0
        return [max(on_disk, default=0)] * num_disk + staging

    def buffers(self, placements: Sequence[Placement]) -> list[HostSlab]:
        return host_memory.allocate(self.buffer_bytes(placements), self._device, "the buffers of gradients and states")

    def reserve(self, changes: Changes, present: Mapping[int, LayerMemory]) -> None:
        """Before `allocate`: give layers the regions of the disk, and the RAM shared by ranks, that their `present`
        memory lacks. A collective.

        Raises:
            OffloadkitError: the disk cannot be used, or a rank has too little RAM.
        """
        changes = sorted(changes, key=lambda change: change[0])  # the ranks' order
        self._reserve_disk([at for at, where in changes if where.states == "disk" and at not in self._regions])
        if self._ranks.size == 1:
            return
        weights, sums = {}, {}
        for at, where in changes:
            shape, now = self._shapes[at], present.get(at)
            if where.weights == "ram" and (now is None or now.weights is None):
                weights[at] = shape.weight_bytes()
            if where.gradients == "ram" and shape.sums_whole(self._accumulation) and (now is None or now.sums is None):
                sums[at] = shape.num_ranks * shape.window_bytes(self._accumulation)
        self._weights, self._sums = self._share(weights, "weights"), self._share(sums, "sums of gradients")

    def _reserve_disk(self, new: Sequence[int]) -> None:
        if not new:
            return
        sizes = [sum(self._shapes[at].state_bytes().values()) for at in new]
        if self.disk is None:
            self.disk = DiskStates(StateFile(self._folder or tempfile.gettempdir(), sizes), [])
            indices = list(range(len(sizes)))
        else:
            indices = self.disk.file.add(sizes)
        self._regions |= {at: Region(self.disk, index) for at, index in zip(new, indices, strict=True)}

    def _share(self, num_bytes: Mapping[int, int], what: str) -> dict[int, HostSlab]:
        """A collective: sizes must agree on all ranks."""
        if not isinstance(self._ranks, Group) or not num_bytes:
            return {}
        if not self.stepped:
            self.stepped = self._ranks.stepped(len(self._shapes))
        sizes = list(num_bytes.values())
        files, part = self._ranks.share(sizes), (self._ranks.rank, self._ranks.size)
        with self._ranks.together(f"taking RAM for {what}"):  # and no rank writes before all ranks have populated it
            slabs = host_memory.allocate_shared(files, sizes, self._device, f"the {what} in RAM", part)
        return dict(zip(num_bytes, slabs, strict=True))

    def allocate(
        self,
        changes: Changes,
        present: Mapping[int, LayerMemory],
        what: str,
        buffers: Sequence[int] = (),
    ) -> tuple[list[LayerMemory], list[HostSlab]]:
        """Allocate the layers' memory, and buffers of these sizes. RAM that ranks share is taken from `present` or
        from `reserve`.

        Args:
            what: the purpose, for errors.

        Raises:
            OffloadkitError: too little RAM. Nothing is allocated.
        """
        alone = [at for at, where in changes if where.weights == "ram" and self._ranks.size == 1]
        sizes = [*(self._own_bytes(at, where) for at, where in changes), *buffers]
        slabs = host_memory.allocate([*sizes, *(self._shapes[at].weight_bytes() for at in alone)], self._device, what)
        weights = dict(zip(alone, slabs[len(sizes) :], strict=True))
        found = []
        for (at, where), slab in zip(changes, slabs, strict=False):
            of_weights = of_sums = None
            if where.weights == "ram":
                of_weights = weights.get(at) or self._weights.pop(at, None) or present[at].weights
            if where.gradients == "ram":
                of_sums = self._sums.pop(at, None) or (present[at].sums if at in present else None)
            for each in (of_weights, of_sums):
                if each is not None:
                    each.clear()
            region = self._regions[at] if where.states == "disk" else None
            stepped = self.stepped[at] if self.stepped and of_weights is not None else None
            found.append(LayerMemory(slab, of_weights, of_sums, region, stepped))
        return found, slabs[len(changes) : len(sizes)]
