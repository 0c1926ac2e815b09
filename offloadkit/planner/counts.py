"""Placements described by a few numbers (`Counts`), and the bytes of many placements at once.

Every formula of `layout` and `phases` is computed for an array of placement codes, with a row for each count and a
column for each layer. `Search.bytes` computes the same one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offloadkit.facts.config import Placement
from offloadkit.planner.layout import (
    ALLOCATOR_BYTES,
    FRAMEWORK_RAM_BYTES,
    NUM_GRADIENT_BUCKETS,
    NUM_STAGING,
    NUM_STATE_BUFFERS,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    SMALL_BUCKET,
    LayerShape,
    WeightsAlone,
    activations,
    gpu_can_step,
    is_built,
    is_small,
    workspace_bytes,
)
from offloadkit.planner.phases import forward_bytes, handed_over_bytes, ram_peak, staged_bytes
from offloadkit.planner.seconds import IN_VRAM
from offloadkit.planner.work import MicroBatch

Ints = NDArray[np.int64]
Codes = NDArray[np.intp]
"""[number of counts, number of layers]: index into `PLACEMENTS`, which ignores activations."""
InVram = Literal["none", "gpu", "all"]


class Counts(NamedTuple):
    """Number of layers with each placement option. The counts determine the layers:

    - The first blocks recompute, since backward needs the last blocks' activations first. The first of these offload.
    - Streamed blocks are spread evenly, so that their copies hide behind resident blocks.
    - States in VRAM are spread evenly over layers with weights in VRAM, starting with the first, so that backward sends
      gradients to RAM throughout and not all at once.
    - The last layers have their states on disk.
    - GPU steps are spread evenly over layers with states in RAM, so that CPU and GPU both advance with forward.
    - The GPU steps all layers of matrices. Small layers beside them (norms) stay in VRAM.
    - Frozen layers have no states. Weights of small layers beside them (adapters) stay in VRAM.
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


_STREAMED, _KEEPS, _ON_GPU, _ON_DISK, _IN_VRAM = 1, 2, 4, 8, 16
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
    WeightsAlone(weights="ram"),
)


def where_of(code: int, recomputation: Literal["keep", "checkpoint", "offload"]) -> Placement:
    return _with_activations()[recomputation][code]


@cache
def _with_activations() -> dict[str, list[Placement]]:
    options: tuple[Literal["keep", "checkpoint", "offload"], ...] = ("keep", "checkpoint", "offload")
    return {how: [replace(where, activations=how) for where in PLACEMENTS] for how in options}


class Spread:
    """The layers of one model, with the placements that counts assign to them.

    Attributes:
        blocks: the names of the repeated blocks.
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
    ) -> None:
        """
        Args:
            one_host: whether all ranks are on one host.
            frozen_bytes: VRAM of frozen parameters and buffers.
            context_bytes: VRAM of the process outside torch's allocator.
        """
        self._layers, self._work, self._accumulation = layers, work, accumulation
        self.blocks = list(dict.fromkeys(layer.name for layer in layers if layer.in_block))
        self._number = {name: index for index, name in enumerate(self.blocks)}
        self.block_of = np.array([self._number.get(layer.name, -1) for layer in layers])
        self._shared = np.array([layer.shared for layer in layers])
        self._exchanges = layers[0].num_ranks > 1
        self._frozen = np.array([not layer.kind.is_trained for layer in layers])
        self._may_stream = (self.block_of >= 0) & ~self._shared & ~_beside(layers, self._frozen) & one_host
        in_ram = Placement(gradients="ram")
        self._must_keep = ~np.array([is_built(in_ram, layer, accumulation, one_host=one_host) for layer in layers])
        self._columns = np.arange(len(layers))
        self._matrices = np.array([bool(layer.matrices) for layer in layers])
        self._stay = _beside(layers, self._matrices) & ~self._frozen
        self._workspace = workspace_bytes(layers)
        self._fixed_vram = frozen_bytes + context_bytes + ALLOCATOR_BYTES
        self._frozen_bytes = frozen_bytes
        self._staged, self._forward = staged_bytes(layers), forward_bytes(work)
        self._activations = cache(self._activations_of)
        self._take_tables()

    def _take_tables(self) -> None:
        layers, accumulation = self._layers, self._accumulation

        @cache
        def by_code(layer: LayerShape) -> list[list[int]]:
            states = sum(layer.state_bytes().values())
            return [
                [
                    sum(layer.vram_bytes(where, accumulation).values()),
                    sum(layer.ram_bytes(where, accumulation).values()),
                    states * (where.states == "disk"),
                    layer.passing_bytes(where, accumulation) * (where.states == "ram" and gpu_can_step(where)),
                ]
                for where in PLACEMENTS
            ]

        tables = np.array([by_code(replace(layer, name="")) for layer in layers], dtype=np.int64)
        self._vram, self._ram, self._disk, self._passing = (tables[:, :, kind] for kind in range(4))
        self._bucket = np.array([layer.bucket_bytes() for layer in layers], dtype=np.int64)
        self._received = np.array([layer.received_bytes(accumulation) for layer in layers], dtype=np.int64)
        self._sums_whole = np.array([layer.sums_whole(accumulation) for layer in layers])
        self._on_the_way = np.array([layer.staged_bytes(accumulation) for layer in layers], dtype=np.int64)
        summed = self._exchanges and accumulation == 1
        self._summed = np.array([layer.gradient_bytes(accumulation) * summed for layer in layers], dtype=np.int64)
        self._weights = np.array([layer.weight_bytes() for layer in layers], dtype=np.int64)
        self._from_ram = np.array([handed_over_bytes(layer, "ram") for layer in layers], dtype=np.int64)
        self._by_block = np.argsort(self.block_of, kind="stable")
        self._first_of_block = np.unique(self.block_of[self._by_block], return_index=True)[1]

    # -- placements

    def placements(self, counts: Counts) -> tuple[Placement, ...]:
        return tuple(
            where_of(code, _recomputation(block, counts.recomputed, counts.offloaded))
            for code, block in zip(self.codes([counts])[0].tolist(), self.block_of.tolist(), strict=True)
        )

    def codes(self, some: Sequence[Counts]) -> Codes:
        def column(name: str) -> Ints:
            return np.array([getattr(counts, name) for counts in some], dtype=np.int64)[:, None]

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
        return np.where(in_vram, _IN_VRAM, np.where(self._frozen, streamed * _STREAMED + _IN_VRAM, codes))

    # -- bytes

    def more_vram(self, some: Sequence[Counts]) -> list[Ints]:
        """For each of `some`: the additional VRAM of each resident layer if its states are in VRAM too."""
        codes = self.codes(some)
        more = self._vram[:, [_IN_VRAM]].T - self._vram[self._columns, codes]
        resident = ~each(codes, lambda where: where.weights == "ram") & ~self._stay & ~self._frozen
        return [of[kept] for of, kept in zip(more, resident, strict=True)]

    def bytes(self, some: Sequence[Counts], codes: Codes) -> Ints:
        """[number, 3] bytes of VRAM, RAM and disk that a plan needs. `codes` are the codes of `some`."""
        shared_vram, shared_ram, gradients = self._buffer_bytes(codes)
        held = np.array([self._activations(counts.recomputed, counts.offloaded) for counts in some], dtype=np.int64)
        vram = self._fixed_vram + self._vram[self._columns, codes].sum(1) + shared_vram
        vram = np.maximum(vram + held[:, 0], vram - gradients + self._forward)
        slabs = self._ram[self._columns, codes].sum(1) + shared_ram
        streamed = each(codes, lambda where: where.weights == "ram")
        moved = streamed.any(1) * (self._frozen_bytes + np.where(streamed, self._from_ram, self._weights).sum(1))
        ram = FRAMEWORK_RAM_BYTES["cuda"] + np.maximum(slabs + held[:, 1], moved)
        return np.stack([vram, ram, self._disk[self._columns, codes].sum(1)], 1)

    def _activations_of(self, recomputed: int, offloaded: int) -> tuple[int, int]:
        """VRAM of the activations, and RAM beyond the slabs: the larger of activations and the layer staged before."""
        how = [_recomputation(self._number.get(stage.block, -1), recomputed, offloaded) for stage in self._work.stages]
        held = activations(self._work, how)
        return held.vram, ram_peak(0, held.ram, self._staged, 0)

    def _buffer_bytes(self, codes: Codes) -> tuple[Ints, Ints, Ints]:
        through_ram = each(codes, lambda where: where.gradients == "ram")
        has_bucket = np.ones_like(through_ram) if self._accumulation > 1 or self._exchanges else through_ram
        sizes = np.where(has_bucket & ~self._shared, self._bucket, 0)
        largest = sizes.max(1)
        small = sizes * SMALL_BUCKET <= largest[:, None]
        pooled = np.minimum(NUM_GRADIENT_BUCKETS - 1, (has_bucket & ~self._shared & ~small).sum(1))
        own = np.where(has_bucket & self._shared, self._bucket, 0).sum(1)
        autograds = np.where(self._shared, 0, self._bucket).max()
        gradients = autograds + pooled * largest + own + np.where(small, sizes, 0).sum(1)
        if self._exchanges:
            received = np.where(through_ram & self._sums_whole, 0, self._received).max(1)
            gradients = gradients + received + np.where(through_ram, self._summed, 0).max(1)
        streamed = np.where(each(codes, lambda where: where.weights == "ram"), self._weights, 0)
        of_block = np.add.reduceat(streamed[:, self._by_block], self._first_of_block, axis=1)
        passes = _any(codes, lambda where: where.states == "ram" and where.step == "gpu")
        passing = self._passing[self._columns, codes].max(1) * passes
        vram = gradients + NUM_WEIGHT_BUFFERS * of_block.max(1) + NUM_STEP_BUFFERS * passing + self._workspace
        adds = NUM_STAGING * (self._accumulation > 1)
        ram = adds * np.where(through_ram, self._on_the_way, 0).max(1)
        return vram, ram + NUM_STATE_BUFFERS * self._disk[self._columns, codes].max(1), gradients


def _beside(layers: Sequence[LayerShape], some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each layer is not among `some` and small in comparison with the layers of its block that are."""
    of_block: dict[str, int] = {}
    for layer, is_one in zip(layers, some, strict=True):
        if is_one:
            of_block[layer.name] = of_block.get(layer.name, 0) + layer.numel
    small = [is_small(layer.numel, of_block.get(layer.name, 0)) for layer in layers]
    return np.array([is_one and not among for is_one, among in zip(small, some, strict=True)])


def _recomputation(block: int, recomputed: int, offloaded: int) -> Literal["keep", "checkpoint", "offload"]:
    if block < 0 or block >= recomputed:
        return "keep"
    return "offload" if block < offloaded else "checkpoint"


def _is_among(number: Ints, place: Any, total: Any) -> NDArray[np.bool_]:
    """Whether `place` (0 to `total` - 1) is one of `number` evenly spread places. The last place is included."""
    among: NDArray[np.bool_] = (place + 1) * number // total > place * number // total
    return among


def each(codes: Codes, holds: Callable[[Placement], bool]) -> NDArray[np.bool_]:
    table: NDArray[np.bool_] = np.array([holds(where) for where in PLACEMENTS])[codes]
    return table


def _any(codes: Codes, holds: Callable[[Placement], bool]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.any(each(codes, holds), axis=1)
    return found
