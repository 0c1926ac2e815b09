"""Placements described by a few numbers (`Counts`), and the bytes of many placements at once.

A placement code is an index into `PLACEMENTS`, which leave activations out. Codes have a row for each `Counts`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from offloadkit.facts.config import Placement
from offloadkit.planner.graphs import GraphBytes
from offloadkit.planner.layout import (
    ALLOCATOR_BYTES,
    FRAMEWORK_RAM_BYTES,
    TIERS,
    Bools,
    Codes,
    Ints,
    LayerBytes,
    LayerShape,
    WeightsAlone,
    activations,
    is_built,
    is_small,
)
from offloadkit.planner.phases import NEEDED, PHASES, PhasesOnGpu
from offloadkit.planner.seconds import IN_VRAM
from offloadkit.planner.work import MicroBatch

InVram = Literal["none", "gpu", "all"]


class Counts(NamedTuple):
    """Number of layers with each placement option. The counts determine the layers:

    - The first blocks recompute, since backward needs the last blocks' activations first. The first of these offload.
      The blocks after them keep results of matmuls and attention (`cheap`), the last ones everything.
    - Streamed blocks are spread evenly, so that their copies hide behind resident blocks.
    - States in VRAM are spread evenly over layers with weights in VRAM, starting with the first, so that backward sends
      gradients to RAM throughout and not all at once.
    - The last layers have their states on disk.
    - GPU steps are spread evenly over layers with states in RAM, so that CPU and GPU both advance with forward.
    - The GPU steps all layers of matrices. Small other layers (norms) stay in VRAM.
    - Frozen layers have no states. Weights of small trained layers (adapters) stay in VRAM. Frozen embeddings are
      in RAM if any block is streamed.
    """

    recomputed: int
    offloaded: int
    streamed: int
    states_in_vram: int
    states_on_disk: int = 0
    gpu_steps: int = 0
    """Layers with states in RAM that the GPU steps."""
    gradients_in_vram: InVram = "none"
    """Which layers with states outside VRAM keep and add their gradients in VRAM: "none", the layers that the "gpu"
    steps, or "all".
    """
    cheap: int = 0


_NUM_STEPS = Counts._fields.index("gpu_steps") + 1
Recomputation = Literal["keep", "cheap", "checkpoint", "offload"]
_STREAMED, _KEEPS, _ON_GPU, _ON_DISK, _IN_VRAM = 1, 2, 4, 8, 16
_LOOKED_UP = _IN_VRAM | _KEEPS
"""Frozen embeddings in RAM, which are not fetched."""
PLACEMENTS: tuple[Placement, ...] = (
    *(
        Placement(
            weights="ram" if code & _STREAMED else "vram",
            gradients="vram" if code & _KEEPS else "ram",
            states="disk" if code & _ON_DISK else "ram",
            step="gpu" if code & _ON_GPU and not code & _ON_DISK else "cpu",
        )
        for code in range(_IN_VRAM)
    ),
    IN_VRAM,
    WeightsAlone(weights="ram"),  # streamed
    WeightsAlone(weights="ram"),  # looked up
)


@cache
def where_of(code: int, recomputation: Recomputation) -> Placement:
    return replace(PLACEMENTS[code], activations=recomputation)


class Spread:
    """The layers of one model, with the placements that counts assign to them.

    Attributes:
        block_of: for each layer, the index of its block; -1: none.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch,
        accumulation: int,
        *,
        frozen_bytes: int,
        context_bytes: int,
        one_host: bool = True,
        graphed: bool = False,
        generating: int | None = None,
        beside: Collection[int] = (),
    ) -> None:
        """
        Args:
            generating: bytes of keys and values while text is generated, with all weights in VRAM; None: plans need no
                room for them.
            beside: layers of frozen models beside the one that generates.
            one_host: whether all ranks are on one host.
            frozen_bytes: VRAM of frozen parameters and buffers.
            context_bytes: VRAM of the process outside torch's allocator.
            graphed: whether blocks run as CUDA graphs.
        """
        self._layers, self._work = layers, work
        self.blocks = list(dict.fromkeys(layer.name for layer in layers if layer.in_block))
        self._number = {name: index for index, name in enumerate(self.blocks)}
        self.block_of = np.array([self._number.get(layer.name, -1) for layer in layers])
        self._shared = np.array([layer.shared for layer in layers])
        self._frozen = np.array([not layer.kind.is_trained for layer in layers])
        self._may_stream = (self.block_of >= 0) & ~self._shared & ~_beside(layers, self._frozen) & one_host
        in_ram = Placement(gradients="ram")
        self._must_keep = ~np.array([is_built(in_ram, layer, accumulation, one_host=one_host) for layer in layers])
        self._columns = np.arange(len(layers))
        self._matrices = np.array([bool(layer.matrices) for layer in layers])
        self._looked_up = np.array([layer.looked_up and not layer.shared for layer in layers])
        self._stay = _beside(layers, self._matrices) & ~self._frozen
        self._fixed_vram = frozen_bytes + context_bytes + ALLOCATOR_BYTES
        self._frozen_bytes = frozen_bytes
        self._sizes = LayerBytes(layers, PLACEMENTS, accumulation)
        self._phases = PhasesOnGpu(layers, work, FRAMEWORK_RAM_BYTES["cuda"], generating=generating)
        self._needed = NEEDED if generating is None else PHASES
        own = [layer.weight_bytes() if layer.in_block and at not in beside else 0 for at, layer in enumerate(layers)]
        self._brought: Ints = np.array(own, dtype=np.int64)
        self._graphs = GraphBytes(layers, work) if graphed else None
        self._activations = cache(self._activations_of)

    # -- placements

    def placements(self, counts: Counts) -> tuple[Placement, ...]:
        return tuple(
            where_of(code, _recomputation(block, counts.recomputed, counts.offloaded, counts.cheap))
            for code, block in zip(self.codes([counts])[0].tolist(), self.block_of.tolist(), strict=True)
        )

    def codes(self, some: Sequence[Counts]) -> Codes:
        numbers = np.array([counts[:_NUM_STEPS] for counts in some], dtype=np.int64).reshape(-1, _NUM_STEPS, 1)

        def column(name: str) -> Ints:
            found: Ints = numbers[:, Counts._fields.index(name)]
            return found

        number = len(self._layers)
        streamed = self._may_stream & _is_among(column("streamed"), self.block_of, max(1, len(self.blocks)))
        streamed &= ~self._stay
        resident = ~streamed & ~self._stay & ~self._frozen
        may_hold = np.maximum(1, resident.sum(1))[:, None]
        from_the_end = may_hold - np.cumsum(resident, 1)
        in_vram = self._stay | (resident & _is_among(column("states_in_vram"), from_the_end, may_hold))
        on_disk = ~in_vram & (self._columns >= number - column("states_on_disk")) & ~self._matrices & ~self._frozen
        in_ram = ~in_vram & ~on_disk & ~self._frozen
        either = in_ram & ~self._matrices
        before = np.cumsum(either, 1) - either
        on_gpu = either & _is_among(column("gpu_steps"), before, np.maximum(1, either.sum(1))[:, None])
        on_gpu |= in_ram & self._matrices
        kept = np.array([counts.gradients_in_vram for counts in some])[:, None]
        keeps = (kept == "all") | (on_gpu & (kept == "gpu")) | self._must_keep
        codes = streamed * _STREAMED + keeps * _KEEPS + on_gpu * _ON_GPU + on_disk * _ON_DISK
        codes = np.where(in_vram, _IN_VRAM, np.where(self._frozen, streamed * _STREAMED + _IN_VRAM, codes))
        return np.where(self._looked_up & (column("streamed") > 0), _LOOKED_UP, codes)

    # -- bytes

    def more_vram(self, some: Sequence[Counts]) -> list[Ints]:
        """For each of `some`: the additional VRAM of each resident layer if its states are in VRAM too."""
        codes = self.codes(some)
        more = self._sizes.own("vram", np.full_like(codes[:1], _IN_VRAM)) - self._sizes.own("vram", codes)
        in_ram = self._sizes.each(codes, lambda where: where.weights == "ram")
        return [of[kept] for of, kept in zip(more, ~in_ram & ~self._stay & ~self._frozen, strict=True)]

    def bytes(self, some: Sequence[Counts], codes: Codes) -> Ints:
        """[number, 3] bytes of VRAM, RAM and disk that a plan needs. `codes` are the codes of `some`."""
        buffers = self._sizes.buffers(codes)
        vram, ram, disk = (self._sizes.own(tier, codes).sum(1) for tier in TIERS)
        kept = [self._activations(counts.recomputed, counts.offloaded, counts.cheap) for counts in some]
        held, held_in_ram = np.array(kept).T
        if self._graphs is not None:
            in_ram = self._sizes.each(codes, lambda where: where.weights == "ram") & (self.block_of >= 0)
            held = held + in_ram.any(1) * self._graphs.of_weights
        peaks = self._phases.of(
            ram + sum(buffers["ram"].values()),
            self._fixed_vram + vram + sum(buffers["vram"].values()),
            buffers["vram"]["gradients"],
            held=held,
            held_in_ram=held_in_ram,
            moved=self._sizes.moved(codes, self._frozen_bytes),
            brought=(self._sizes.each(codes, lambda where: where.weights == "ram") * self._brought).sum(1),
        )
        needs = np.max(np.array([peaks[name] for name in self._needed], dtype=np.int64), axis=0)
        return np.stack([*needs, disk], 1)

    def _activations_of(self, recomputed: int, offloaded: int, cheap: int) -> tuple[int, int]:
        blocks = [self._number.get(stage.block, -1) for stage in self._work.stages]
        how = [_recomputation(block, recomputed, offloaded, cheap) for block in blocks]
        held, graphs = activations(self._work, how), self._graphs
        return held.vram + (graphs.of(how) if graphs else 0), held.ram


def _beside(layers: Sequence[LayerShape], some: Bools) -> Bools:
    """Whether each layer is not among `some` and small in comparison with the layers of its block that are."""
    of_block: dict[str, int] = {}
    for layer, is_one in zip(layers, some, strict=True):
        if is_one:
            of_block[layer.name] = of_block.get(layer.name, 0) + layer.numel
    small = [is_small(layer.numel, of_block.get(layer.name, 0)) for layer in layers]
    return np.array([is_one and not among for is_one, among in zip(small, some, strict=True)])


def _recomputation(block: int, recomputed: int, offloaded: int, cheap: int) -> Recomputation:
    if block < 0 or block >= recomputed + cheap:
        return "keep"
    if block >= recomputed:
        return "cheap"
    return "offload" if block < offloaded else "checkpoint"


def _is_among(number: Ints, place: Any, total: Any) -> Bools:
    """Whether `place` (0 to `total` - 1) is one of `number` evenly spread places. The last place is included."""
    among: Bools = (place + 1) * number // total > place * number // total
    return among
