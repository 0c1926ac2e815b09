"""Choosing placements: the fastest predicted step among those that fit VRAM and RAM."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

from offloadkit.config import Placement
from offloadkit.hardware import Hardware
from offloadkit.planner.layout import (
    ALLOCATOR_BYTES,
    FRAMEWORK_RAM_BYTES,
    LayerShape,
    activations,
    buffer_bytes,
    choices,
)
from offloadkit.planner.phases import forward_bytes, moved_bytes, ram_peak, staged_bytes
from offloadkit.planner.seconds import IN_VRAM, Seconds, StepModel
from offloadkit.planner.work import MicroBatch

GRID = 8
"""Number of steps of each count's grid in the first, coarse search."""
MAX_SHARED = 12
"""Most placements with steps shared between CPU and GPU that are tried before the best of them are refined."""

_InVram = Literal["none", "gpu", "all"]
_Found = tuple[Seconds, "Counts"] | None
_CHANGES: list[dict[str, int]] = [
    *({name: by} for name in ("recomputed", "offloaded", "streamed", "states_in_vram") for by in (-4, -2, -1, 1, 2, 4)),
    *(
        {"states_in_vram": by, other: against}
        for other in ("recomputed", "streamed", "offloaded")
        for by, against in ((1, 1), (2, 1), (1, 2), (4, 2), (-1, -1), (-1, -2), (-2, -1))
    ),
    *({"recomputed": by, "streamed": -by} for by in (-2, -1, 1, 2)),
]
"""Changes of counts that the refinement tries."""
_WITH_GPU = [
    *_CHANGES,
    *({"gpu_steps": by} for by in (-4, -2, -1, 1, 2, 4)),
    *({"gpu_steps": -by, "states_in_vram": by} for by in (-2, -1, 1, 2)),
]


@dataclass(frozen=True)
class Counts:
    """How many layers get each placement option. The counts fix which ones:

    - The first blocks recompute, since backward needs the last blocks' activations first. The first of these offload.
    - Streamed blocks are spread evenly, so that their copies hide behind the other blocks.
    - Of the layers with weights in VRAM, those with states in VRAM are spread evenly. The first is one. So
      backward sends gradients to RAM throughout, not all at once.
    - The last layers have their states on disk.
    - Of the layers with states in RAM, those that the GPU steps are spread evenly, so that CPU and GPU both advance
      with forward.
    """

    recomputed: int
    offloaded: int
    streamed: int
    states_in_vram: int
    states_on_disk: int = 0
    gpu_steps: int = 0
    """Layers with states in RAM that the GPU steps."""
    gradients_in_vram: _InVram = "none"
    """Of the layers with states outside VRAM: which keep their gradients in VRAM, and add them there.

    "none" of them, those that the "gpu" steps, or "all".
    """


@dataclass(frozen=True)
class _Room:
    """Bytes that may be used, by tier."""

    vram: int
    ram: int
    disk: int


class Search:
    """Searches the placements of one model, with micro-batches of one shape, on one machine.

    What it finds out about counts is kept, so that other budgets take less time.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch,
        hardware: Hardware,
        accumulation: int,
        *,
        frozen_bytes: int = 0,
        all_recomputed: bool = False,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            frozen_bytes: VRAM of frozen parameters and buffers.
            all_recomputed: whether every block is recomputed, because the user asked for it.
            compiled: whether the repeated blocks are compiled.
        """
        self._layers, self._work, self._hardware, self._accumulation = layers, work, hardware, accumulation
        self._frozen_bytes, self._all_recomputed = frozen_bytes, all_recomputed
        self._staged = staged_bytes(layers)
        self._all_weights = frozen_bytes + sum(layer.weight_bytes() for layer in layers)
        self.model = StepModel(layers, work, hardware, accumulation, compiled=compiled)
        self._blocks = list(dict.fromkeys(layer.name for layer in layers if layer.in_block))
        number = {name: index for index, name in enumerate(self._blocks)}
        blocks = [number.get(layer.name, -1) for layer in layers]
        self._places = [(at, at >= 0 and not layer.shared) for at, layer in zip(blocks, layers, strict=True)]
        """For each layer: the number of its block (-1: none), and whether its weights may be streamed."""
        self.best, self.placements = cache(self._best), cache(self._placements)
        self._bytes_of, self._seconds = cache(self._bytes_of_counts), cache(self._seconds_of_counts)
        self._short_of_ram: set[_Room] = set()
        self._own_bytes = cache(self._bytes_of_layer)
        self._activations = cache(partial(activations, work))
        self._forward_bytes = forward_bytes(work)

    # -- the placements that counts stand for

    def _placements(self, counts: Counts) -> tuple[Placement, ...]:
        """A placement for each layer."""
        total, first_on_disk = max(1, len(self._blocks)), len(self._layers) - counts.states_on_disk
        streams = [may_stream and _is_among(counts.streamed, block, total) for block, may_stream in self._places]
        may_hold, held = max(1, len(streams) - sum(streams)), 0
        in_ram, found = 0, []
        for index, ((block, _), streamed) in enumerate(zip(self._places, streams, strict=True)):
            states: Literal["vram", "ram", "disk"] = "disk" if index >= first_on_disk else "ram"
            if not streamed:
                held += 1
                if _is_among(counts.states_in_vram, may_hold - held, may_hold):  # counted from the end
                    states = "vram"
            in_ram += states == "ram"
            found.append((self._recompute(block, counts), streamed, states))
        at = 0
        placements = []
        for how, streamed, states in found:
            on_gpu = states == "ram" and _is_among(counts.gpu_steps, at, in_ram)
            at += states == "ram"
            keeps = counts.gradients_in_vram == "all" or (on_gpu and counts.gradients_in_vram == "gpu")
            placements.append(_placement(how, streamed, states, on_gpu, keeps))
        return tuple(placements)

    def _recompute(self, block: int, counts: Counts) -> Literal["keep", "checkpoint", "offload"]:
        if block < 0 or block >= counts.recomputed:
            return "keep"
        return "offload" if block < counts.offloaded else "checkpoint"

    # -- the memory that placements need

    def bytes(self, placements: Sequence[Placement]) -> tuple[int, int, int]:
        """Bytes of VRAM, RAM and disk that a plan needs: those of `layout.run_bytes` and `phases`, computed faster."""
        vram, ram, disk = self._frozen_bytes, 0, 0
        for index, where in enumerate(placements):
            own = self._own_bytes(index, where)
            vram, ram, disk = vram + own[0], ram + own[1], disk + own[2]
        buffers = buffer_bytes(list(zip(self._layers, placements, strict=True)), self._accumulation)
        held = self._activations(tuple(choices(self._layers, placements, self._work)))
        vram += sum(buffers["vram"].values()) + self._hardware.vram_context_bytes + ALLOCATOR_BYTES
        vram = max(vram + held.vram, vram - buffers["vram"]["gradients"] + self._forward_bytes)
        slabs, moved = ram + sum(buffers["ram"].values()), moved_bytes(self._all_weights, placements)
        return vram, FRAMEWORK_RAM_BYTES["cuda"] + ram_peak(slabs, held.ram, self._staged, moved), disk

    def _bytes_of_counts(self, counts: Counts) -> tuple[int, int, int]:
        return self.bytes(self.placements(counts))

    def _seconds_of_counts(self, counts: Counts) -> Seconds:
        return self.model.seconds(self.placements(counts))

    def _bytes_of_layer(self, index: int, where: Placement) -> tuple[int, int, int]:
        layer = self._layers[index]
        vram, ram = layer.vram_bytes(where, self._accumulation), layer.ram_bytes(where, self._accumulation)
        disk = sum(layer.state_bytes().values()) if where.states == "disk" else 0
        return sum(vram.values()), sum(ram.values()), disk

    # -- the search

    def _best(self, vram: int, ram: int, disk: int = 0) -> tuple[Placement, ...]:
        """The fastest placements within these bytes. If none fit, those that lack the least (see `_leanest`).

        1. If everything fits in VRAM, everything is there.
        2. Else the numbers of recomputed, offloaded and streamed blocks and of states in VRAM are tried on a coarse
           grid.
        3. The two best are refined: one number, or two against each other, changes by 1, 2 or 4 while that makes the
           step faster.
        4. In the best of these, and in the most promising of step 2, the GPU steps its share of the layers with
           states in RAM. The three best are refined in the same way.
        """
        recomputed = len(self._blocks) if self._all_recomputed else 0
        everything = self._fitting(Counts(recomputed, 0, 0, len(self._layers)), _Room(vram, ram, 0))
        if everything:
            return self.placements(everything[0])
        room = _Room(vram, ram, disk)
        found: dict[Counts, _Found] = {}

        def step(counts: Counts) -> float:
            if counts not in found:
                options = [(self._seconds(fits), fits) for fits in self._fitting(counts, room)]
                found[counts] = min(options, key=lambda option: option[0].step, default=None)
            best = found[counts]
            return best[0].step if best else float("inf")

        for counts in self._coarse(room):
            step(counts)
        promising = _ranked(found, self._promise)
        for counts in _ranked(found, lambda best: best.step)[:2]:
            self._refine(counts, step)
        starts = [*_ranked(found, lambda best: best.step)[:2], *promising]
        others = (replace(counts, states_in_vram=0, states_on_disk=0) for counts in starts)
        shared = islice((other for counts in dict.fromkeys(others) for other in self._shared(counts, room)), MAX_SHARED)
        for counts in sorted(shared, key=step)[:3]:
            self._refine(counts, step)
        chosen = min(filter(None, found.values()), key=lambda option: option[0].step, default=None)
        return self.placements(chosen[1]) if chosen else self._leanest(room)

    def is_short_of_ram(self, vram: int, ram: int, disk: int = 0) -> bool:
        """Whether `best` met placements that lack RAM. If not, it finds the same with more RAM."""
        self.best(vram, ram, disk)
        return not self._short_of_ram.isdisjoint({_Room(vram, ram, 0), _Room(vram, ram, disk)})

    def _promise(self, seconds: Seconds) -> float:
        """Estimate of a step's seconds after the GPU takes over its share of the CPU's steps."""
        least = seconds.backward_phase + seconds.busy["forward"]
        return max(least, seconds.step - self.model.gpu_share() * seconds.busy["CPU step"])

    def _shared(self, counts: Counts, room: _Room) -> Iterator[Counts]:
        """`counts` with the GPU stepping its share of the layers, with and without their gradients in VRAM.

        As many states are in VRAM as the buffers leave room for.
        """
        share, number = self.model.gpu_share(), len(self._layers)
        for in_vram in dict.fromkeys((counts.gradients_in_vram, _at_least_gpu(counts))):
            shared = replace(counts, gpu_steps=max(1, round(share * number)), gradients_in_vram=in_vram)
            most = self._most_states(shared, room)
            if most >= 0:
                yield replace(shared, states_in_vram=most, gpu_steps=max(1, round(share * (number - most))))

    def _coarse(self, room: _Room) -> Iterator[Counts]:
        """The counts of the coarse grid, those with the most in VRAM first. What cannot fit is left out."""
        num_blocks = len(self._blocks)
        numbers, more = _grid(num_blocks), _grid(num_blocks)[1:]
        recomputed = [(number, 0) for number in (more[-1:] if self._all_recomputed else numbers)]
        options: list[_InVram] = ["all", "none"] if self._accumulation > 1 else ["none"]
        for again, offloaded in [*recomputed, *((num_blocks, number) for number in more)]:
            for in_vram in options:
                for streamed in numbers:
                    counts = Counts(again, offloaded, streamed, 0, gradients_in_vram=in_vram)
                    most = self._most_states(counts, room)
                    states = [number for number in _grid(len(self._layers)) if number < most]
                    for number in [*states, most][-GRID // 2 :] if most >= 0 else ():
                        yield replace(counts, states_in_vram=number)

    def _most_states(self, counts: Counts, room: _Room) -> int:
        """Number of layers whose states VRAM has room for besides everything else in it. -1: not even that fits."""

        def left(number: int) -> int:
            return room.vram - self._bytes_of(replace(counts, states_in_vram=number))[0]

        number, space = 0, left(0)
        if space < 0:
            return -1
        resident = [(index, where) for index, where in enumerate(self.placements(counts)) if where.weights == "vram"]
        for index, where in resident:  # an estimate, corrected below: shared buffers change too
            space -= self._own_bytes(index, IN_VRAM)[0] - self._own_bytes(index, where)[0]
            number += space >= 0
        while number < len(resident) and left(number + 1) >= 0:
            number += 1
        while number and left(number) < 0:
            number -= 1
        return number

    def _refine(self, counts: Counts, step: Callable[[Counts], float]) -> None:
        """Go to the best neighbour while it makes the step faster. `step` keeps what it finds."""
        while step(nearby := min(self._near(counts), key=step, default=counts)) < step(counts):
            counts = nearby

    def _near(self, counts: Counts) -> Iterator[Counts]:
        num_blocks, num_layers = len(self._blocks), len(self._layers)
        most = dict.fromkeys(("recomputed", "offloaded", "streamed"), num_blocks)
        most |= dict.fromkeys(("states_in_vram", "gpu_steps"), num_layers)
        least = {"recomputed": num_blocks} if self._all_recomputed else {}
        for change in _WITH_GPU if counts.gpu_steps else _CHANGES:
            values = {name: getattr(counts, name) + by for name, by in change.items()}
            near = _with(counts, values)
            within = all(least.get(name, 0) <= value <= most[name] for name, value in values.items())
            if within and near.offloaded <= near.recomputed:
                yield near

    def _fitting(self, counts: Counts, room: _Room) -> list[Counts]:
        """`counts`, if their placements fit.

        If only RAM is short, there are up to two others, each with as few changed layers as RAM allows. In one the GPU
        steps more layers: these have neither gradients nor a copy of the weights in RAM. In the other more states are
        on disk.
        """
        vram, ram, _ = self._bytes_of(counts)
        if vram > room.vram:
            return []
        if ram <= room.ram:
            return [counts]
        self._short_of_ram.add(room)
        lean, options = replace(counts, gradients_in_vram=_at_least_gpu(counts)), []
        if self._bytes_of(replace(lean, gpu_steps=len(self._layers)))[1] <= room.ram:
            options.append(self._with_least(lean, "gpu_steps", room))
        if room.disk:
            options.append(self._with_least(counts, "states_on_disk", room))
        return [option for option in options if option]

    def _with_least(self, counts: Counts, name: str, room: _Room) -> Counts | None:
        """`counts` with the smallest increase of that count that fits RAM. None if VRAM or disk is too small."""

        def fits(number: int) -> bool:
            return self._bytes_of(_with(counts, {name: number}))[1] <= room.ram

        numbers = range(getattr(counts, name) + 1, len(self._layers))
        least = numbers.start + bisect_left(numbers, True, key=fits)
        lean = _with(counts, {name: least})
        vram, ram, disk = self._bytes_of(lean)
        return lean if vram <= room.vram and ram <= room.ram and disk <= room.disk else None

    def _leanest(self, room: _Room) -> tuple[Placement, ...]:
        """If nothing fits: the placements that lack the least VRAM, since VRAM cannot be added to a card.

        Among these: those that lack bytes in the fewest other tiers, then the fewest bytes. Free VRAM is filled with
        states.
        """
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


def _grid(most: int) -> list[int]:
    """Numbers from 0 to `most` in at most `GRID` equal steps."""
    return sorted({round(most * part / GRID) for part in range(GRID + 1)})


def _is_among(number: int, place: int, total: int) -> bool:
    """Whether `place` (0 to `total` - 1) is one of `number` places that are spread evenly. The last place always is."""
    return (place + 1) * number // total > place * number // total


def _at_least_gpu(counts: Counts) -> _InVram:
    return "gpu" if counts.gradients_in_vram == "none" else counts.gradients_in_vram


def _with(counts: Counts, values: dict[str, int]) -> Counts:
    changes: dict[str, Any] = dict(values)
    return replace(counts, **changes)


def _ranked(found: dict[Counts, _Found], cost: Callable[[Seconds], float]) -> list[Counts]:
    """The counts that fit, by `cost`, least first."""
    costs = {counts: cost(option[0]) for counts, option in found.items() if option}
    return sorted(costs, key=lambda counts: costs[counts])


@cache
def _placement(
    activations: Literal["keep", "checkpoint", "offload"],
    streamed: bool,
    states: Literal["vram", "ram", "disk"],
    on_gpu: bool,
    keeps_gradients: bool,
) -> Placement:
    if states == "vram":
        return replace(IN_VRAM, activations=activations)
    return Placement(
        weights="ram" if streamed else "vram",
        gradients="vram" if keeps_gradients else "ram",
        states=states,
        activations=activations,
        step="gpu" if on_gpu else "cpu",
    )
