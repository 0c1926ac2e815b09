"""Choosing placements: the fastest predicted step among those that fit VRAM and RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from offloadkit.config import Placement
from offloadkit.hardware import Hardware
from offloadkit.plan.memory import ALLOCATOR_BYTES, FRAMEWORK_RAM_BYTES, Activations, activations, choices
from offloadkit.plan.seconds import StepModel
from offloadkit.plan.shapes import LayerShape, buffer_bytes
from offloadkit.plan.work import MicroBatch

GRID = 8
"""Parts into which each count is cut for the first, coarse search."""


@dataclass(frozen=True)
class Counts:
    """How many layers get each relaxation. Which ones is fixed:

    the first blocks recompute (the last ones' activations are needed first), the first of them offload; streamed blocks
    are spread evenly (so that their copies hide behind the others); of the layers whose weights stay in VRAM the
    first hold their states there (forward waits for those first), and the last in RAM or on disk.
    """

    recomputed: int
    offloaded: int
    streamed: int
    states_in_vram: int
    states_on_disk: int = 0
    gradients_in_vram: bool = False


class Search:
    """Placements of one model over one micro-batch shape on one machine."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch,
        hardware: Hardware,
        accumulation: int,
        *,
        frozen_bytes: int = 0,
        all_recomputed: bool = False,
    ) -> None:
        """
        Args:
            all_recomputed: every block is recomputed, as the user has asked.
        """
        self._layers, self._work, self._hardware, self._accumulation = layers, work, hardware, accumulation
        self._frozen_bytes, self._all_recomputed = frozen_bytes, all_recomputed
        self.model = StepModel(layers, work, hardware, accumulation)
        self._blocks = list(dict.fromkeys(layer.name for layer in layers if layer.in_block))
        self._own_bytes = cache(self._bytes_of_layer)
        self._activations = cache(self._activations_of)

    # -- what counts mean

    def placements(self, counts: Counts) -> tuple[Placement, ...]:
        """A placement for each layer."""
        number = {name: index for index, name in enumerate(self._blocks)}
        total, first_on_disk = max(1, len(self._blocks)), len(self._layers) - counts.states_on_disk
        left_in_vram, found = counts.states_in_vram, []
        for index, layer in enumerate(self._layers):
            block = number.get(layer.name, -1)
            streamed = (
                block >= 0
                and not layer.shared
                and (block + 1) * counts.streamed // total > block * counts.streamed // total
            )
            states: Literal["vram", "ram", "disk"] = "disk" if index >= first_on_disk else "ram"
            if not streamed and left_in_vram > 0:
                states = "vram"
                left_in_vram -= 1
            found.append(_placement(self._recompute(block, counts), streamed, states, counts.gradients_in_vram))
        return tuple(found)

    def _recompute(self, block: int, counts: Counts) -> Literal["keep", "checkpoint", "offload"]:
        if block < 0 or block >= counts.recomputed:
            return "keep"
        return "offload" if block < counts.offloaded else "checkpoint"

    # -- what they cost

    def bytes(self, placements: Sequence[Placement]) -> tuple[int, int, int]:
        """VRAM, RAM and disk in all; what `memory.run_bytes` adds up to."""
        vram, ram, disk = self._frozen_bytes, 0, 0
        for index, where in enumerate(placements):
            own = self._own_bytes(index, where)
            vram, ram, disk = vram + own[0], ram + own[1], disk + own[2]
        buffers = buffer_bytes(list(zip(self._layers, placements, strict=True)), self._accumulation)
        held = self._activations(tuple(choices(self._layers, placements, self._work)))
        vram += sum(buffers["vram"].values()) + held.vram + self._hardware.vram_context_bytes + ALLOCATOR_BYTES
        return vram, ram + sum(buffers["ram"].values()) + held.ram + FRAMEWORK_RAM_BYTES["cuda"], disk

    def _bytes_of_layer(self, index: int, where: Placement) -> tuple[int, int, int]:
        layer = self._layers[index]
        vram, ram = layer.vram_bytes(where, self._accumulation), layer.ram_bytes(where, self._accumulation)
        disk = sum(layer.state_bytes().values()) if where.states == "disk" else 0
        return sum(vram.values()), sum(ram.values()), disk

    def _activations_of(self, how: tuple[str, ...]) -> Activations:
        return activations(self._work, how)

    # -- choosing

    def best(self, vram: int, ram: int, disk: int = 0) -> tuple[Placement, ...]:
        """The fastest placements within these bytes; where none fit, those that lack the least.

        What fits is trained as on a large GPU. Else all numbers of recomputed, streamed and GPU-stepped layers are
        tried on a coarse grid, and from the two best on one number, or two against each other, is changed by 1, 2 or 4
        as long as that makes the step faster.
        """
        everything = self._fitting(self._fullest(), _Room(vram, ram, 0))
        if everything:
            return everything
        room = _Room(vram, ram, disk)
        found: dict[Counts, float] = {}

        def seconds(counts: Counts) -> float:
            if counts not in found:
                placements = self._fitting(counts, room)
                found[counts] = self.model.seconds(placements).step if placements else float("inf")
            return found[counts]

        for counts in self._coarse(room):
            seconds(counts)
        ranked = sorted((step, order, counts) for order, (counts, step) in enumerate(found.items()))
        refined = [self._refined(counts, seconds) for step, _, counts in ranked[:2] if step != float("inf")]
        if not refined:
            return self._leanest(room)
        chosen = self._fitting(min(refined, key=lambda counts: found[counts]), room)
        assert chosen is not None
        return chosen

    def _fullest(self) -> Counts:
        least = len(self._blocks) if self._all_recomputed else 0
        return Counts(least, 0, 0, len(self._layers), gradients_in_vram=self._accumulation > 1)

    def _coarse(self, room: _Room) -> Iterator[Counts]:
        """The grid, with most in VRAM first; without what cannot fit whatever else is chosen."""
        num_blocks = len(self._blocks)
        recomputed = [(number, 0) for number in _grid(num_blocks) if number or not self._all_recomputed]
        if self._all_recomputed:
            recomputed = recomputed[-1:]
        for kept, offloaded in [*recomputed, *((num_blocks, number) for number in _grid(num_blocks)[1:])]:
            for in_vram in (True, False) if self._accumulation > 1 else (False,):
                for streamed in _grid(num_blocks):
                    counts = Counts(kept, offloaded, streamed, 0, gradients_in_vram=in_vram)
                    most = self._most_states(counts, room)
                    states = [number for number in _grid(len(self._layers)) if number < most]
                    for number in [*states, most][-GRID // 2 :] if most >= 0 else ():
                        yield replace(counts, states_in_vram=number)

    def _most_states(self, counts: Counts, room: _Room) -> int:
        """How many layers' states VRAM has room for beside what else is in it; -1: not even for that."""
        low, high = -1, len(self._layers)
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes(self.placements(replace(counts, states_in_vram=middle)))[0] <= room.vram:
                low = middle
            else:
                high = middle - 1
        return low

    def _refined(self, counts: Counts, seconds: Callable[[Counts], float]) -> Counts:
        while True:
            nearby = min(self._near(counts), key=seconds, default=counts)
            if seconds(nearby) >= seconds(counts):
                return counts
            counts = nearby

    def _near(self, counts: Counts) -> Iterator[Counts]:
        num_blocks = len(self._blocks)
        most = {
            "recomputed": num_blocks,
            "offloaded": num_blocks,
            "streamed": num_blocks,
            "states_in_vram": len(self._layers),
        }
        least = {"recomputed": num_blocks} if self._all_recomputed else {}
        changes = [{name: by} for name in most for by in (-4, -2, -1, 1, 2, 4)]
        changes += [
            {"states_in_vram": by, other: against}
            for other in ("recomputed", "streamed", "offloaded")
            for by, against in ((1, 1), (2, 1), (1, 2), (4, 2), (-1, -1), (-1, -2), (-2, -1))
        ]
        changes += [{"recomputed": by, "streamed": -by} for by in (-2, -1, 1, 2)]
        for change in changes:
            values = {name: getattr(counts, name) + by for name, by in change.items()}
            near = replace(counts, **values)
            within = all(least.get(name, 0) <= value <= most[name] for name, value in values.items())
            if within and near.offloaded <= near.recomputed:
                yield near

    def _fitting(self, counts: Counts, room: _Room) -> tuple[Placement, ...] | None:
        """The placements of `counts` where they fit, with as many states on disk as RAM lacks."""
        placements = self.placements(counts)
        vram, ram, _ = self.bytes(placements)
        if vram > room.vram:
            return None
        if ram <= room.ram:
            return placements
        return self._on_disk(counts, room) if room.disk else None

    def _on_disk(self, counts: Counts, room: _Room) -> tuple[Placement, ...] | None:
        """The placements with the fewest layers' states on disk that RAM allows."""
        low, high = 1, len(self._layers)
        while low < high:
            middle = (low + high) // 2
            if self.bytes(self.placements(replace(counts, states_on_disk=middle)))[1] <= room.ram:
                high = middle
            else:
                low = middle + 1
        placements = self.placements(replace(counts, states_on_disk=low))
        vram, ram, disk = self.bytes(placements)
        return placements if vram <= room.vram and ram <= room.ram and disk <= room.disk else None

    def _leanest(self, room: _Room) -> tuple[Placement, ...]:
        """Where nothing fits: the placements that lack the least VRAM (a card does not grow), of these those that lack
        it in the fewest other tiers, then the fewest bytes. Room that is left in VRAM is used."""
        num_blocks, num_layers = len(self._blocks), len(self._layers)
        on_disk = num_layers if room.disk else 0
        extremes = [
            Counts(num_blocks, offloaded, streamed, 0, on_disk)
            for offloaded in (0, num_blocks)
            for streamed in _grid(num_blocks)
        ]
        filled = [replace(counts, states_in_vram=max(0, self._most_states(counts, room))) for counts in extremes]

        def lacking(placements: tuple[Placement, ...]) -> tuple[int, int, int]:
            needs = zip(self.bytes(placements), (room.vram, room.ram, room.disk), strict=True)
            vram, *others = (max(0, need - have) for need, have in needs)
            return vram, sum(map(bool, others)), sum(others)

        return min(map(self.placements, [*extremes, *filled]), key=lacking)


@dataclass(frozen=True)
class _Room:
    """Bytes that may be used."""

    vram: int
    ram: int
    disk: int


def _grid(most: int, parts: int = GRID) -> list[int]:
    """0 to `most` in at most `parts` steps."""
    return sorted({round(most * part / parts) for part in range(parts + 1)})


@cache
def _placement(
    activations: Literal["keep", "checkpoint", "offload"],
    streamed: bool,
    states: Literal["vram", "ram", "disk"],
    gradients_in_vram: bool,
) -> Placement:
    if states == "vram":
        return Placement(weights="vram", gradients="vram", states="vram", activations=activations, step="gpu")
    return Placement(
        weights="ram" if streamed else "vram",
        gradients="vram" if gradients_in_vram else "ram",
        states=states,
        activations=activations,
        step="cpu",
    )
