"""Searches the placements with the fastest predicted step that fits VRAM, RAM and disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import chain, combinations, product
from typing import Any

from offloadkit.facts.config import Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.planner.counts import Counts, InVram, Spread
from offloadkit.planner.layout import LayerShape, outside_bytes
from offloadkit.planner.quick import Phases, QuickSeconds
from offloadkit.planner.seconds import StepModel
from offloadkit.planner.work import MicroBatch

GRID = 8
STARTS = 4
"""Most placements of the coarse grid that are refined."""

_NUMBERS = ("recomputed", "streamed", "offloaded", "gpu_steps", "cheap")
_LEAST_GAIN = 5e-4
"""Least saving of step time (fraction) for which refining continues."""


def _changes(alone: Sequence[int], together: Sequence[int]) -> list[dict[str, int]]:
    """Changes of one number by `alone`, and of two numbers by `together`, up or down."""
    pairs = product(combinations(_NUMBERS, 2), together, (1, -1), (1, -1))
    return [
        *({name: sign * by} for name in _NUMBERS for by in alone for sign in (1, -1)),
        *({one: up * by, other: side * by} for (one, other), by, up, side in pairs),
    ]


_NEAR, _WIDER = _changes((1, 4), (1,)), _changes((1, 2, 4, 8), (1, 2, 4))


@dataclass(frozen=True)
class Room:
    vram: int
    ram: int
    disk: int

    def holds(self, needs: Room) -> bool:
        return needs.vram <= self.vram and needs.ram <= self.ram and needs.disk <= self.disk


class _Tried:
    """Counts that were tried for one room.

    Attributes:
        instead: in order of trial, the fastest counts that fit in place of each tried `Counts`; None if none fit.
        refined: counts whose neighbours were tried, with the changes that lead to them.
    """

    def __init__(self, search: Search, room: Room) -> None:
        self._search, self.room = search, room
        self.instead: dict[Counts, Counts | None] = {}
        self.refined: set[tuple[Counts, bool, bool]] = set()

    def add(self, some: Iterable[Counts]) -> list[Counts]:
        given = list(some)
        new = [counts for counts in dict.fromkeys(given) if counts not in self.instead]
        fitting = self._search.fitting(new, self.room)
        self._search.simulate(chain.from_iterable(fitting))
        for counts, options in zip(new, fitting, strict=True):
            self.instead[counts] = min(options, key=lambda fits: self._search.phases(fits).step, default=None)
        return given

    def step(self, counts: Counts) -> float:
        fits = self.instead[counts]
        return self._search.phases(fits).step if fits else float("inf")

    def fastest(self) -> Counts | None:
        fitting = filter(None, self.instead.values())
        return min(fitting, key=lambda fits: self._search.phases(fits).step, default=None)

    def ranked(self) -> list[Counts]:
        return sorted((counts for counts, fits in self.instead.items() if fits), key=self.step)


class Search:
    """Searches the placements of one model, with micro-batches of one shape, on one machine.

    Results for counts are cached, so searches with other budgets are faster.
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
        graphed: bool = False,
        generating: int | None = None,
        beside: Collection[int] = (),
    ) -> None:
        """
        Args:
            frozen_bytes: VRAM of frozen parameters and buffers.
            all_recomputed: every block is recomputed, because the user asked for it.
            generating, beside: as for `Spread`.
            graphed: blocks run as CUDA graphs.
        """
        self._layers, self._accumulation, self._all_recomputed = layers, accumulation, all_recomputed
        self.graphed = graphed
        self.model = StepModel(layers, work, hardware, accumulation, compiled=compiled, graphed=graphed)
        one_host = layers[0].num_ranks <= hardware.num_ranks
        memory: dict[str, Any] = {"frozen_bytes": frozen_bytes, "context_bytes": outside_bytes(layers, hardware)}
        options: dict[str, Any] = {"graphed": graphed, "generating": generating, "beside": beside}
        self._spread = Spread(layers, work, accumulation, one_host=one_host, **options, **memory)
        self._quick = QuickSeconds(self.model, self._spread, hardware, accumulation)
        self._num_blocks = len(self._spread.blocks)
        can = all(stage.cheap for stage in work.stages if stage.block) and not (all_recomputed or compiled)
        self._tries_cheap = can and self.model.gains_by_cheap()
        self._num_streamed = self._num_blocks if one_host else 0
        self._needs: dict[Counts, Room] = {}
        self._phases: dict[Counts, Phases] = {}
        self.placements, self.counts = cache(self._spread.placements), cache(self._fastest)
        self._short_of_ram: set[Room] = set()
        self._too_small: set[Room] = set()

    # -- bytes and seconds of counts

    def learn(self, some: Iterable[Counts]) -> None:
        if new := [counts for counts in dict.fromkeys(some) if counts not in self._needs]:
            found = self._spread.bytes(new, self._spread.codes(new)).tolist()
            self._needs |= {counts: Room(*needs) for counts, needs in zip(new, found, strict=True)}

    def needs(self, counts: Counts) -> Room:
        if counts not in self._needs:
            self.learn([counts])
        return self._needs[counts]

    def simulate(self, some: Iterable[Counts]) -> None:
        if new := [counts for counts in dict.fromkeys(some) if counts not in self._phases]:
            self._phases |= zip(new, self._quick.of(new), strict=True)

    def phases(self, counts: Counts) -> Phases:
        if counts not in self._phases:
            self.simulate([counts])
        return self._phases[counts]

    # -- the search

    def best(self, vram: int, ram: int, disk: int = 0) -> tuple[Placement, ...]:
        """The fastest placements within these bytes. If none fit, the placements that lack the least VRAM."""
        return self.placements(self.counts(vram, ram, disk))

    def _fastest(self, vram: int, ram: int, disk: int = 0) -> Counts:
        """The counts of `best`.

        1. If everything fits in VRAM, everything is in VRAM.
        2. Else a coarse grid covers the numbers of recomputed, offloaded and streamed blocks, each with several
        choices of who steps. The rest of VRAM is filled with states.
        3. The best of each such choice are refined: numbers change, and states fill VRAM again, while the step gets
        faster.
        4. If blocks gain by keeping matmuls and attention, such blocks are added to the coarse grid, and the best are
        refined with their number.
        5. The two best are refined with wider changes.
        """
        recomputed = self._num_blocks if self._all_recomputed else 0
        (everything,) = self.fitting([Counts(recomputed, 0, 0, len(self._layers))], Room(vram, ram, 0))
        if everything:
            return everything[0]
        tried = _Tried(self, Room(vram, ram, disk))
        tried.add(self._coarse(tried.room, self._levels(), _grid(self._num_streamed)))
        of_steppers: dict[tuple[bool, InVram], Counts] = {}
        for counts in tried.ranked():
            kind = counts.gpu_steps > 0 or counts.gradients_in_vram == "all", counts.gradients_in_vram
            of_steppers.setdefault(kind, counts)
        for counts in [*of_steppers.values()][:STARTS]:
            self._refine(counts, tried)
        if self._tries_cheap:
            streamed = sorted({0, *(counts.streamed for counts in tried.ranked()[:2])})
            grid = tried.add(self._coarse(tried.room, self._cheap_levels(), streamed))
            for counts in [*tried.ranked()[:1], *sorted(grid, key=tried.step)[:1]]:
                self._refine(counts, tried, cheap=True)
        for counts in tried.ranked()[:2]:
            self._refine(counts, tried, cheap=counts.cheap > 0, wider=True)
        if (fastest := tried.fastest()) is not None:
            return fastest
        self._too_small.add(tried.room)
        return self._leanest(tried.room)

    def adapted(self, counts: Counts, vram: int, ram: int, disk: int = 0) -> Counts | None:
        """The fastest within these bytes that refining finds from `counts`, the best of a search whose blocks take less
        VRAM. Takes a fraction of a search's time. None if nothing near `counts` fits.
        """
        room, more = Room(vram, ram, disk), (0, self._num_blocks // GRID, self._num_blocks // GRID * 2)
        blocks = counts._replace(states_in_vram=0, states_on_disk=0)
        leaner = [
            alike._replace(
                recomputed=min(counts.recomputed + recomputed, self._num_blocks - counts.cheap),
                streamed=min(counts.streamed + streamed, self._num_streamed),
            )
            for alike in (blocks, blocks._replace(gpu_steps=0, gradients_in_vram="none"))
            for recomputed in more
            for streamed in more
        ]
        tried = _Tried(self, room)
        most = self._most_states(leaner, room)
        tried.add([counts, *(each._replace(states_in_vram=n) for each, n in zip(leaner, most, strict=True) if n >= 0)])
        for start in tried.ranked()[:2]:
            self._refine(start, tried, cheap=counts.cheap > 0)
        return tried.fastest()

    def fits(self, vram: int, ram: int, disk: int = 0) -> bool:
        """Whether the placements of `best` fit."""
        self.counts(vram, ram, disk)
        return Room(vram, ram, disk) not in self._too_small

    def is_short_of_ram(self, vram: int, ram: int, disk: int = 0) -> bool:
        """Whether `best` met placements that lack RAM. If not, more RAM does not change its result."""
        self.counts(vram, ram, disk)
        return not self._short_of_ram.isdisjoint({Room(vram, ram, 0), Room(vram, ram, disk)})

    def _levels(self) -> list[tuple[int, int, int]]:
        """Numbers of recomputed, offloaded and cheap blocks."""
        numbers = _grid(self._num_blocks)
        recomputed = [(number, 0, 0) for number in (numbers[-1:] if self._all_recomputed else numbers)]
        return [*recomputed, *((self._num_blocks, number, 0) for number in numbers[1::2])]

    def _cheap_levels(self) -> list[tuple[int, int, int]]:
        numbers = _grid(self._num_blocks)[2::2]
        mixed = [(number, 0, self._num_blocks - number) for number in numbers[:-1]]
        return [*((0, 0, number) for number in numbers), *mixed]

    def _coarse(self, room: Room, levels: Sequence[tuple[int, int, int]], streamed: Sequence[int]) -> Iterator[Counts]:
        """Placements with these numbers that fit VRAM: without GPU steps, or with the GPU's share of the layers."""
        share, number = self.model.gpu_share(), len(self._layers)
        steps, modes = max(1, round(share * number)), self._gradients_in_vram()
        corners = [
            Counts(again, offloaded, number_streamed, 0, gpu_steps=gpu_steps, gradients_in_vram=in_vram, cheap=cheap)
            for again, offloaded, cheap in levels
            for number_streamed in streamed
            for in_vram in modes
            for gpu_steps in ((steps,) if in_vram == "gpu" else (0, steps))
        ]
        fewer = []
        for counts, most in zip(corners, self._most_states(corners, room), strict=True):
            if most >= 0:
                by_gpu = max(1, round(share * (number - most))) if counts.gpu_steps else 0
                yield counts._replace(states_in_vram=most, gpu_steps=by_gpu)
            elif counts.gradients_in_vram == "gpu":
                fewer.append(counts._replace(gpu_steps=max(1, round(0.75 * steps))))
        yield from self._filled(fewer, room)

    def _gradients_in_vram(self) -> tuple[InVram, ...]:
        return ("none", "gpu", "all") if self._accumulation > 1 else ("none", "gpu")

    def _filled(self, some: Iterable[Counts], room: Room) -> list[Counts]:
        """`some` with as many states in VRAM as fit, without counts that do not fit."""
        empty = list(dict.fromkeys(counts._replace(states_in_vram=0) for counts in some))
        most = self._most_states(empty, room)
        return [counts._replace(states_in_vram=n) for counts, n in zip(empty, most, strict=True) if n >= 0]

    def _most_states(self, some: Sequence[Counts], room: Room) -> list[int]:
        """For each of `some`, which have no states in VRAM: how many layers' states fit in the rest of VRAM; -1 if the
        counts alone do not fit.
        """

        def left(counts: Counts, number: int) -> int:
            return room.vram - self._needs[counts._replace(states_in_vram=number)].vram

        self.learn(some)
        unsure = [counts for counts in dict.fromkeys(some) if left(counts, 0) >= 0]
        mores = dict(zip(unsure, self._spread.more_vram(unsure), strict=True)) if unsure else {}
        found = {counts: int((more.cumsum() <= left(counts, 0)).sum()) for counts, more in mores.items()}
        while unsure:  # shared buffers change too
            near = [(counts, found[counts] + by) for counts in unsure for by in (0, 1)]
            self.learn(counts._replace(states_in_vram=number) for counts, number in near)
            changed = []
            for counts in unsure:
                number = found[counts]
                if left(counts, number) < 0:
                    found[counts] -= 1
                elif number < len(mores[counts]) and left(counts, number + 1) >= 0:
                    found[counts] += 1
                if found[counts] != number:
                    changed.append(counts)
            unsure = changed
        return [found.get(counts, -1) for counts in some]

    def _refine(self, counts: Counts, tried: _Tried, *, cheap: bool = False, wider: bool = False) -> None:
        while (counts, cheap, wider) not in tried.refined:
            tried.refined.add((counts, cheap, wider))
            near = tried.add(self._near(counts, tried.room, cheap=cheap, wider=wider))
            best = min(near, key=tried.step, default=counts)
            if tried.step(best) >= (1 - _LEAST_GAIN) * tried.step(counts):
                return
            counts = best

    def _near(self, counts: Counts, room: Room, *, cheap: bool, wider: bool) -> Iterator[Counts]:
        num_blocks, num_layers = self._num_blocks, len(self._layers)
        most = dict.fromkeys(_NUMBERS, num_blocks) | {"streamed": self._num_streamed, "gpu_steps": num_layers}
        least = {"recomputed": num_blocks} if self._all_recomputed else {}
        others = [self._by_others(counts)]
        if wider:
            more = min(counts.recomputed + 4, num_blocks - counts.cheap)
            leaner = counts._replace(recomputed=more, streamed=min(counts.streamed + 4, self._num_streamed))
            others.append(self._by_others(leaner))
        changed = list(chain.from_iterable(others))
        for change in _WIDER if wider else _NEAR:
            if "cheap" in change and not cheap:
                continue
            values = {name: getattr(counts, name) + by for name, by in change.items()}
            near = _with(counts, values)
            within = all(least.get(name, 0) <= value <= most[name] for name, value in values.items())
            if within and near.offloaded <= near.recomputed <= num_blocks - near.cheap:
                changed.append(near)
        yield from self._filled(changed, room)
        for by in (-4, -2, -1, 1, 2, 4):
            states = counts.states_in_vram + by
            if 0 <= states <= num_layers:
                yield counts._replace(states_in_vram=states)
                if counts.gpu_steps and 0 <= counts.gpu_steps - by <= num_layers:
                    yield counts._replace(states_in_vram=states, gpu_steps=counts.gpu_steps - by)

    def _by_others(self, counts: Counts) -> Iterator[Counts]:
        """`counts` with other numbers of GPU steps, and with other layers that keep gradients in VRAM."""
        share = max(1, round(self.model.gpu_share() * len(self._layers)))
        for in_vram in self._gradients_in_vram():
            for gpu_steps in dict.fromkeys((0, max(1, share // 2), share, counts.gpu_steps)):
                if gpu_steps or in_vram != "gpu":
                    yield counts._replace(gpu_steps=gpu_steps, gradients_in_vram=in_vram)

    def fitting(self, some: Sequence[Counts], room: Room) -> list[list[Counts]]:
        """For each of `some`: the counts alone if they fit, and an empty list if they lack VRAM.

        If only RAM is short, up to two variants replace them, with as few changed layers as RAM allows: one with more
        GPU steps, whose layers have neither gradients nor a copy of the weights in RAM, and one with more states on
        disk.
        """
        self.learn(some)
        enough = [counts for counts in some if self.needs(counts).vram <= room.vram]
        found = {counts: [counts] for counts in enough if self.needs(counts).ram <= room.ram}
        if short := [counts for counts in enough if counts not in found]:
            self._short_of_ram.add(room)
            leaner = {counts: counts._replace(gradients_in_vram=_at_least_gpu(counts)) for counts in short}
            by_gpu = {lean: lean._replace(gpu_steps=len(self._layers)) for lean in leaner.values()}
            self.learn(by_gpu.values())
            may_fit = [lean for lean, every in by_gpu.items() if self.needs(every).ram <= room.ram]
            stepped = self._with_least(may_fit, "gpu_steps", room)
            on_disk = self._with_least(short, "states_on_disk", room) if room.disk else {}
            for counts in short:
                found[counts] = list(filter(None, (stepped.get(leaner[counts]), on_disk.get(counts))))
        return [found.get(counts, []) for counts in some]

    def _with_least(self, some: Sequence[Counts], name: str, room: Room) -> dict[Counts, Counts]:
        """`some` with the smallest increase of the count `name` that fits RAM, left out if there is none, or if VRAM or
        disk is short.

        All are bisected together, so their bytes are computed at once. The last changed layer may need more RAM,
        because a large layer needs large buffers.
        """

        def changed(numbers: dict[Counts, int]) -> list[tuple[Counts, Counts]]:
            made = [(counts, _with(counts, {name: number})) for counts, number in numbers.items()]
            self.learn(lean for _, lean in made)
            return made

        low = {counts: getattr(counts, name) + 1 for counts in some}
        high = {counts: max(first, len(self._layers)) for counts, first in low.items()}
        while between := {counts: (low[counts] + high[counts]) // 2 for counts in high if low[counts] < high[counts]}:
            for counts, lean in changed(between):
                if self.needs(lean).ram <= room.ram:
                    high[counts] = between[counts]
                else:
                    low[counts] = between[counts] + 1
        return {counts: lean for counts, lean in changed(high) if room.holds(self.needs(lean))}

    def _leanest(self, room: Room) -> Counts:
        """If nothing fits: the placements that lack the least VRAM, since VRAM cannot be added to a card.

        Ties are resolved by the number of other tiers that lack bytes, then by the lacking bytes. Free VRAM is filled
        with states.
        """
        num_blocks, num_layers = self._num_blocks, len(self._layers)
        on_disk = num_layers if room.disk else 0
        extremes = [
            Counts(num_blocks, offloaded, streamed, 0, on_disk)
            for offloaded in (0, num_blocks)
            for streamed in _grid(self._num_streamed)
        ]
        numbers = self._most_states(extremes, room)
        filled = [counts._replace(states_in_vram=max(0, most)) for counts, most in zip(extremes, numbers, strict=True)]

        def lacking(counts: Counts) -> tuple[int, int, int]:
            pairs = zip(astuple(self.needs(counts)), astuple(room), strict=True)
            vram, *others = (max(0, need - have) for need, have in pairs)
            return vram, sum(map(bool, others)), sum(others)

        return min([*extremes, *filled], key=lacking)


def _grid(most: int) -> list[int]:
    return sorted({round(most * part / GRID) for part in range(GRID + 1)})


def _at_least_gpu(counts: Counts) -> InVram:
    return "gpu" if counts.gradients_in_vram == "none" else counts.gradients_in_vram


def _with(counts: Counts, values: dict[str, int]) -> Counts:
    changes: dict[str, Any] = dict(values)
    return counts._replace(**changes)
