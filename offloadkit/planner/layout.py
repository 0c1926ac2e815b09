"""Bytes of flat layers and of a whole run, by tier and category. The engine allocates exactly the layers' bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offloadkit.errors import ConfigError
from offloadkit.facts.config import Contents, Placement
from offloadkit.facts.fitted import NCCL_BYTES, NCCL_BYTES_EACH, NCCL_FEW_BYTES, NCCL_FEW_BYTES_EACH
from offloadkit.facts.hardware import Hardware
from offloadkit.optim.norm import NORM_BLOCK
from offloadkit.optim.table import MASTER_WEIGHTS, MOMENTS, Dtype, LayerKind, Matrix, StateTable, aligned
from offloadkit.planner.owners import matrix_owners
from offloadkit.planner.work import MicroBatch

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.intp]
"""[number, layers]: for each layer, the index of its placement in a sequence of placements."""
Tiers = dict[str, dict[str, Ints]]
"""Bytes by tier and category."""
TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
"""The kinds of memory, by the name in messages."""

NUM_GRADIENT_BUCKETS = 2
"""Layers whose gradients may be in VRAM at once on their way to RAM: autograd holds one layer's gradients until they
are complete, while a bucket holds another layer's.
"""
SMALL_BUCKET = 64
"""A gradient this many times smaller than the largest has its own bucket, because it may wait there for another
gradient.
"""
NUM_WEIGHT_BUFFERS = 3
"""Buffers in VRAM for working weights in RAM: the current, the previous and the next layer."""
NUM_STAGING = 2
"""Size of the staging ring, in which a micro-batch's gradients wait in RAM to be added: this many of the largest."""
NUM_STATE_BUFFERS = 3
"""Buffers in RAM for states on disk: one is read, one is stepped, one is written."""

NUM_STEP_BUFFERS = 3
"""Buffers in VRAM for states in RAM that the GPU steps: one is fetched, one is stepped, one is sent back."""
STEP_CHUNK = 1 << 23
"""Most elements of a flat layer that one step buffer takes; a multiple of 256."""

GRAPHS = "CUDA graphs"
CATEGORIES = (
    "working weights",
    "weight buffers",
    "frozen weights",
    "gradients",
    MASTER_WEIGHTS,
    MOMENTS,
    "state buffers",
    "activations",
    GRAPHS,
    "framework",
)


@dataclass(frozen=True)
class WeightsAlone(Placement):
    """The placement of a frozen layer. The fields other than `weights` and `activations` say that nothing is outside
    VRAM.
    """

    gradients: Literal["vram", "ram"] = "vram"
    states: Literal["vram", "ram", "disk"] = "vram"
    step: Literal["cpu", "gpu"] = "gpu"

    def __post_init__(self) -> None:
        """Allows weights in RAM without states in RAM."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes and kind of a flat layer (`FlatLayer`), without tensors: the input of a plan."""

    name: str
    num_parameters: int
    numel: int
    """Padded elements of the flat buffers; a multiple of 256."""
    kind: LayerKind
    num_norm_blocks: int
    """Norm blocks of the elements that this rank steps."""
    shared: bool
    """Whether the layer holds a tied weight, whose gradient is fp32."""
    in_block: bool = False
    """Whether the layer belongs to a repeated block. Only then may its weights stream."""
    looked_up: bool = False
    """Whether the layer holds frozen embeddings, which may be in RAM and do not stream."""
    own: int | None = None
    """Elements that this rank steps; None: all."""
    num_ranks: int = 1
    exchanges_sums: bool = False
    """Whether several ranks exchange sums of several micro-batches, instead of every micro-batch."""
    norm_blocks_of_all: int | None = None
    """Norm blocks of the elements that all ranks step; None with world size 1."""
    matrices: tuple[Matrix, ...] = ()
    """The matrices that are stepped as a whole, if that is the step unit."""

    def shared_by(self, num_ranks: int) -> LayerShape:
        """An equal part of the layer, for planning before the layer is cut (`FlatLayer.cut_for`).

        Real parts end at norm blocks, so their size differs by less than a block.
        """
        blocks = self.num_norm_blocks if self.norm_blocks_of_all is None else self.norm_blocks_of_all
        if num_ranks == 1:
            return replace(self, own=None, num_norm_blocks=blocks, num_ranks=1, norm_blocks_of_all=None)
        own = -(-self.numel // (_PART * num_ranks)) * _PART
        part = -(-blocks // num_ranks)
        return replace(self, own=own, num_norm_blocks=part, num_ranks=num_ranks, norm_blocks_of_all=blocks)

    @property
    def own_numel(self) -> int:
        return self.numel if self.own is None else self.own

    @property
    def states(self) -> StateTable:
        return self.kind.states

    @property
    def dtype(self) -> Dtype:
        return self.kind.dtype

    def bucket_bytes(self) -> int:
        return 0 if not self.kind.is_trained else self.numel * (4 if self.shared else self.kind.weights_dtype.itemsize)

    def sums_whole(self, accumulation: int) -> bool:
        """Whether each of several ranks sums the whole layer's gradient before the exchange."""
        return self.exchanges_sums and self.num_ranks > 1 and accumulation > 1 and self.kind.is_trained

    def received_bytes(self, accumulation: int) -> int:
        """Bytes that an exchange with several ranks gathers: every rank's gradient of this rank's elements."""
        each = 4 if self.sums_whole(accumulation) else self.bucket_bytes() // self.numel
        return each * self.own_numel * self.num_ranks

    def staged_bytes(self, accumulation: int) -> int:
        return self.bucket_bytes() if self.sums_whole(accumulation) else self.received_bytes(accumulation)

    def window_bytes(self, accumulation: int) -> int:
        return 4 * self.numel if self.sums_whole(accumulation) else self.gradient_bytes(accumulation)

    def exchanged_bytes(self, placement: Placement, accumulation: int) -> int:
        """Bytes that the other ranks send over the link in an update. Sums in RAM do not use the link."""
        sums = self.sums_whole(accumulation)
        if sums and placement.gradients == "ram":
            return 0
        return (
            self.received_bytes(accumulation) // self.num_ranks * (self.num_ranks - 1) * (1 if sums else accumulation)
        )

    def gathered_bytes(self, placement: Placement) -> int:
        is_gathered = placement.weights == "vram" and self.kind.is_trained
        return self.weight_bytes() - self.stepped_bytes() if is_gathered else 0

    def update_bytes(self) -> int:
        """Bytes of matrices' updates that the other ranks send in a step, as much to the owner of a matrix as back. An
        estimate: the mean over the ranks, if the owners had no larger parts of their matrices than other ranks.
        """
        return 2 * MATRIX_BYTES * (self.own_numel * (self.num_ranks - 1) // self.num_ranks) if self.matrices else 0

    def gradient_bytes(self, accumulation: int) -> int:
        """Bytes of the gradient that the step reads: fp32 if it is a sum of several, else the layer's dtype."""
        is_sum = accumulation * self.num_ranks > 1 and self.kind.is_trained
        return self.own_numel * 4 if is_sum else self.bucket_bytes()

    def weight_bytes(self) -> int:
        return self.numel * self.kind.weights_dtype.itemsize

    def stepped_bytes(self) -> int:
        """Bytes of the working weights that this rank steps; its equal share of frozen weights."""
        return self.own_numel * self.kind.weights_dtype.itemsize

    @property
    def _weights_category(self) -> str:
        return "working weights" if self.kind.is_trained else "frozen weights"

    def sums_bytes(self) -> int:
        return aligned(8 * self.num_norm_blocks)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the optimizer states by category, wherever they live."""
        return self.states.num_bytes(self.own_numel)

    def saved_bytes(self, contents: Contents) -> int:
        """Bytes in a checkpoint: the working weights and optimizer states of a trained layer."""
        weights = self.weight_bytes() if self.kind.is_trained else 0
        return weights + self.states.saved_bytes(self.own_numel, contents)

    def step_bytes(self, accumulation: int) -> int:
        """Memory traffic of a step: the gradient is read, states and working weights are read and written."""
        if not self.kind.is_trained:
            return 0
        return self.gradient_bytes(accumulation) + 2 * (sum(self.state_bytes().values()) + self.stepped_bytes())

    def chunk_numel(self) -> int:
        if self.matrices and self.num_ranks == 1:
            return max(-(-each.rows * each.columns // _PART) * _PART for each in self.matrices)
        return self.own_numel if self.matrices else chunk_numel(self.own_numel)

    def num_chunks(self) -> int:
        if self.matrices:
            return len(self.matrices) if self.num_ranks == 1 else 1
        return max(1, -(-self.own_numel // STEP_CHUNK))

    def passing_bytes(self, placement: Placement, accumulation: int) -> int:
        """Bytes of a full chunk in a step buffer: the states, and the weights and gradient if they live in RAM."""
        size = self.chunk_numel()
        chunk = replace(self, numel=size, own=None if self.own is None else size)
        passing = sum(chunk.state_bytes().values())
        if placement.weights == "ram":
            passing += chunk.weight_bytes()
        if placement.gradients == "ram":
            passing += chunk.gradient_bytes(accumulation)
        return passing

    def ram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        parts = {"gradients": self.sums_bytes()}
        if reaches_ram(placement):
            in_ram = placement.gradients == "ram"
            parts["gradients"] += self.window_bytes(accumulation) if in_ram else self.gradient_bytes(accumulation)
        keeps_copy = cpu_can_step(placement, self.kind)
        if keeps_copy or placement.weights == "ram":  # the copy of resident weights, or the only copy
            parts[self._weights_category] = self.stepped_bytes()
        if placement.states == "ram":
            parts |= self.state_bytes()
        return parts

    def vram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        """VRAM by category of this layer alone. All layers share the buckets and weight buffers."""
        parts = {"gradients": self.sums_bytes()}
        if placement.weights == "vram":
            parts[self._weights_category] = self.weight_bytes()
        if placement.states == "vram":
            parts |= self.state_bytes()
        if placement.gradients == "vram":
            parts["gradients"] += self.window_bytes(accumulation)
        return parts


def communicated_bytes(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> dict[str, int]:
    """Bytes that a rank receives in an optimizer step, by kind, if every parameter has a gradient; {} with world size
    1.

    "exchange": gradients of the other ranks. "gather": new weights of the other ranks. "norm": sum of the block sums.
    "matrices": updates of matrices (see `LayerShape.update_bytes`). `Ranks` counts the same bytes, but for "matrices".
    """
    if layers[0].num_ranks == 1:
        return {}
    placed = list(zip(layers, placements, strict=True))
    found = {
        "exchange": sum(layer.exchanged_bytes(where, accumulation) for layer, where in placed),
        "gather": sum(layer.gathered_bytes(where) for layer, where in placed),
        "norm": 8 * sum(layer.norm_blocks_of_all or 0 for layer in layers),
    }
    updates = sum(layer.update_bytes() for layer in layers)
    return found | ({"matrices": updates} if updates else {})


def is_built(placement: Placement, layer: LayerShape, accumulation: int, *, one_host: bool) -> bool:
    """Whether the engine supports this placement: without `one_host`, ranks share no RAM for weights, or for sums that
    are exchanged once a step.
    """
    sums_in_ram = placement.gradients == "ram" and layer.sums_whole(accumulation)
    return one_host or not (placement.weights == "ram" or sums_in_ram)


def reaches_ram(placement: Placement) -> bool:
    return placement.step == "cpu" or placement.gradients == "ram"


def cpu_can_step(placement: Placement, kind: LayerKind) -> bool:
    """Whether the CPU steps the layer, or may take it over from the GPU."""
    return placement.step == "cpu" or (kind.step_unit == "element" and reaches_ram(placement))


def gpu_can_step(placement: Placement) -> bool:
    """Whether the states are in VRAM, or can pass through VRAM with everything that the step needs."""
    return placement.step == "gpu" or (placement.states == "ram" and placement.gradients == "ram")


def chunk_numel(numel: int) -> int:
    return min(STEP_CHUNK, numel)


def possible(placement: Placement, layer: LayerShape) -> Placement:
    """`placement`, with weights in VRAM unless the layer is a repeated block, or looked up, without tied weights, and
    with activations kept outside blocks. Frozen layers have weights alone.
    """
    if not layer.in_block:
        placement = replace(placement, weights=placement.weights if layer.looked_up else "vram", activations="keep")
    if layer.shared:
        placement = replace(placement, weights="vram")
    return of_kind(placement, layer)


def of_kind(placement: Placement, layer: LayerShape) -> Placement:
    if layer.kind.is_trained:
        return placement
    return WeightsAlone(weights=placement.weights, activations=placement.activations)


def for_matrices(placement: Placement, layer: LayerShape) -> Placement:
    """`placement`, with the step on the GPU and without the disk if the layer's step unit is a matrix."""
    if not layer.matrices or placement.states == "vram":
        return placement
    return replace(placement, states="ram", step="gpu")


def check_matrices(layers: Sequence[LayerShape], placements: Sequence[Placement]) -> None:
    """Check placements for a machine with a GPU, or for several ranks.

    Raises:
        ConfigError: the CPU would step matrices, or their states are on disk.
    """
    for layer, where in zip(layers, placements, strict=True):
        if for_matrices(where, layer) != where:
            what = "states='disk'" if where.states == "disk" else "step='cpu'"
            raise ConfigError(
                f"Placement({what}) for {layer.name!r}, whose matrices {layer.kind.optimizer.capitalize()} steps: a "
                "step of matrices is too slow on the CPU. Choose step='gpu' and states in RAM or VRAM, or leave the "
                "placement out"
            )


def workspace_bytes(layers: Sequence[LayerShape]) -> int:
    own = max((each.workspace_bytes for layer in layers for each in layer.matrices), default=0)
    pieces, matrices = exchange_sizes(layers)
    return own + NUM_PIECE_BUFFERS * pieces + NUM_MATRIX_BUFFERS * matrices


NUM_PIECE_BUFFERS = 3
NUM_MATRIX_BUFFERS = 2
"""Layers of matrices whose updates several ranks exchange at the same time."""
MATRIX_BYTES = 2
"""Bytes of an element of an update, which is bf16."""


def exchange_sizes(layers: Sequence[LayerShape]) -> tuple[int, int]:
    """Bytes of a buffer for a rank's pieces of a layer's updates, and of a buffer for the matrices that a rank owns;
    (0, 0) with world size 1. They fit every layer and rank.
    """
    num_ranks = layers[0].num_ranks
    with_matrices = [layer for layer in layers if layer.matrices]
    if num_ranks == 1 or not with_matrices:
        return 0, 0
    pieces = max(-(-layer.numel // num_ranks) + NORM_BLOCK for layer in with_matrices)
    owned = Counter[tuple[int, int]]()
    owners = matrix_owners([layer.matrices for layer in with_matrices], num_ranks)
    for at, (layer, of_layer) in enumerate(zip(with_matrices, owners, strict=True)):
        for matrix, owner in zip(layer.matrices, of_layer, strict=True):
            owned[at, owner] += matrix.rows * matrix.columns
    return aligned(MATRIX_BYTES * pieces), aligned(MATRIX_BYTES * max(owned.values()))


def is_small(bucket_bytes: int, largest: int) -> bool:
    return bucket_bytes * SMALL_BUCKET <= largest


class LayerBytes:
    """Bytes of layers and of the buffers that they share, for many placements at once.

    `codes` are [number, layers]: for each layer the index of its placement in `options`. Results are [number].
    """

    def __init__(self, layers: Sequence[LayerShape], options: Sequence[Placement], accumulation: int) -> None:
        self._options, self._accumulation = options, accumulation
        self._exchanges = layers[0].num_ranks > 1
        self._columns = np.arange(len(layers))
        self._workspace = workspace_bytes(layers)
        self._shared = np.array([layer.shared for layer in layers])
        self._looked_up = np.array([layer.looked_up for layer in layers])
        self._sums_whole = np.array([layer.sums_whole(accumulation) for layer in layers])
        names = {name: number for number, name in enumerate(dict.fromkeys(layer.name for layer in layers))}
        of_layer = np.array([names[layer.name] for layer in layers])
        self._by_name = np.argsort(of_layer, kind="stable")
        self._first_of_name = np.unique(of_layer[self._by_name], return_index=True)[1]

        @cache
        def sizes(layer: LayerShape) -> tuple[int, ...]:
            summed = layer.gradient_bytes(accumulation) if self._exchanges and accumulation == 1 else 0
            received = layer.received_bytes(accumulation) if self._exchanges else 0
            staged = layer.staged_bytes(accumulation) if accumulation > 1 else 0
            return layer.bucket_bytes(), received, staged, summed, layer.weight_bytes(), layer.stepped_bytes()

        @cache
        def own(layer: LayerShape) -> list[list[list[int]]]:
            return [
                [
                    [parts.get(category, 0) for category in CATEGORIES]
                    for parts in (
                        layer.vram_bytes(where, accumulation),
                        layer.ram_bytes(where, accumulation),
                        layer.state_bytes() if where.states == "disk" else {},
                    )
                ]
                for where in options
            ]

        @cache
        def passing(layer: LayerShape) -> list[int]:
            return [
                layer.passing_bytes(where, accumulation) if where.states == "ram" and gpu_can_step(where) else 0
                for where in options
            ]

        kinds = [replace(layer, name="") for layer in layers]  # a model has few kinds
        self._own: Ints = np.array([own(layer) for layer in kinds], dtype=np.int64)
        self._totals = {tier: self._own[:, :, number].sum(2) for number, tier in enumerate(TIERS)}
        self._passing: Ints = np.array([passing(layer) for layer in kinds], dtype=np.int64)
        columns: Ints = np.array([sizes(layer) for layer in kinds], dtype=np.int64)
        self._bucket, self._received, self._staged, self._summed, self._weights, self._stepped = columns.T

    def each(self, codes: Codes, holds: Callable[[Placement], bool]) -> Bools:
        """Whether each layer's placement satisfies `holds`, as an array like `codes`."""
        table: Bools = np.array([holds(where) for where in self._options])[codes]
        return table

    def own(self, tier: str, codes: Codes) -> Ints:
        """[number, layers] bytes of each layer alone."""
        totals: Ints = self._totals[tier][self._columns, codes]
        return totals

    def tiers(self, codes: Codes) -> Tiers:
        """Bytes of layers and buffers by tier and category."""
        own, buffers = self._own[self._columns, codes].sum(1), self.buffers(codes)
        return {
            tier: {
                category: own[:, number, at] + buffers[tier].get(category, 0) for at, category in enumerate(CATEGORIES)
            }
            for number, tier in enumerate(TIERS)
        }

    def buffers(self, codes: Codes) -> Tiers:
        """Bytes of buffers that layers share: gradient buckets, weight, staging and state buffers.

        Tied weights, which hold a bucket until the end of backward, and small layers have their own buckets; all other
        layers share a bucket of the largest size. In addition autograd holds one layer's gradients. The step buffers
        fit every layer with states in RAM that the GPU might step. With several ranks all gradients pass through
        buckets, and one buffer receives the other ranks' gradients, except sums of several micro-batches in RAM.
        """
        through_ram = self.each(codes, lambda where: where.gradients == "ram")
        has_bucket = np.ones_like(through_ram) if self._accumulation > 1 or self._exchanges else through_ram
        sizes = np.where(has_bucket & ~self._shared, self._bucket, 0)
        largest = sizes.max(1)
        small = sizes * SMALL_BUCKET <= largest[:, None]
        pooled = np.minimum(NUM_GRADIENT_BUCKETS - 1, (has_bucket & ~self._shared & ~small).sum(1))
        own = np.where(has_bucket & self._shared, self._bucket, 0).sum(1)
        autograds = np.where(self._shared, 0, self._bucket).max()
        received = np.where(through_ram & self._sums_whole, 0, self._received).max(1)
        summed = np.where(through_ram, self._summed, 0).max(1)
        buckets = autograds + pooled * largest + own + np.where(small, sizes, 0).sum(1) + received + summed
        in_ram = self.each(codes, lambda where: where.weights == "ram")
        streamed = np.where(in_ram & ~self._looked_up, self._weights, 0)
        of_block = np.add.reduceat(streamed[:, self._by_name], self._first_of_name, axis=1)  # one layer for each dtype
        return {
            "vram": {
                "gradients": buckets,
                "weight buffers": NUM_WEIGHT_BUFFERS * of_block.max(1),
                "state buffers": NUM_STEP_BUFFERS * self.step_buffer(codes) + self._workspace,
            },
            "ram": {
                "gradients": NUM_STAGING * np.where(through_ram, self._staged, 0).max(1),
                "state buffers": NUM_STATE_BUFFERS * self.own("disk", codes).max(1),
            },
            "disk": {},
        }

    def step_buffer(self, codes: Codes) -> Ints:
        """Bytes of one step buffer; 0 if the GPU steps no layer with states in RAM."""
        streams = self.each(codes, lambda where: where.states == "ram" and where.step == "gpu").any(1)
        found: Ints = self._passing[self._columns, codes].max(1) * streams
        return found

    def moved(self, codes: Codes, frozen: int) -> Ints:
        """RAM of the model when its engine is closed: all weights if some layer has its weights in RAM, else 0.

        Weights that ranks share count with this rank's part only, because they are copy-on-write. `frozen`: bytes of
        frozen parameters and buffers that are in no layer.
        """
        in_ram = self.each(codes, lambda where: where.weights == "ram")
        found: Ints = in_ram.any(1) * (frozen + np.where(in_ram, self._stepped, self._weights).sum(1))
        return found


def of_one(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> tuple[LayerBytes, Codes]:
    """`LayerBytes` for one placement of each layer, and its codes."""
    number = {where: code for code, where in enumerate(dict.fromkeys(placements))}
    return LayerBytes(layers, list(number), accumulation), np.array([[number[where] for where in placements]])


def tier_bytes(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> dict[str, dict[str, int]]:
    """Bytes of the layers' own memory by tier ("vram", "ram", "disk") and category."""
    sizes, codes = of_one(layers, placements, accumulation)
    return {
        tier: {category: int(size.item()) for category, size in parts.items() if size.any()}
        for tier, parts in sizes.tiers(codes).items()
    }


def step_buffer_bytes(placed: Sequence[tuple[LayerShape, Placement]], accumulation: int) -> int:
    sizes, codes = of_one([layer for layer, _ in placed], [where for _, where in placed], accumulation)
    return int(sizes.step_buffer(codes).item())


MIB = 1 << 20
_PART = 256
ALLOCATOR_BYTES = 256 * MIB
"""cuBLAS's workspaces, small tensors, and memory that torch's allocator reserves beyond the allocated peak, with
expandable segments (18 cases of benchmarks/results.csv: 52 to 374 MiB).
"""
FRAMEWORK_RAM_BYTES = {"cuda": 1700 * MIB, "cpu": 600 * MIB}
"""Resident RAM of Python, torch and transformers, with and without CUDA's libraries (measured)."""


def outside_bytes(layers: Sequence[LayerShape], hardware: Hardware) -> int:
    """VRAM of the process outside torch's allocator: the CUDA context, and NCCL with several ranks."""
    if layers[0].num_ranks == 1:
        return hardware.vram_context_bytes
    two, each = (NCCL_FEW_BYTES, NCCL_FEW_BYTES_EACH) if hardware.has_few_ctas else (NCCL_BYTES, NCCL_BYTES_EACH)
    return hardware.vram_context_bytes + two + max(0, hardware.num_ranks - 2) * each


@dataclass(frozen=True)
class Activations:
    vram: int = 0
    ram: int = 0
    """Inputs of offloaded blocks."""


def activations(work: MicroBatch, how: Sequence[str]) -> Activations:
    """Memory of the activations of a micro-batch.

    A stage adds the activations that it keeps until its backward: all of them; its outputs if it is recomputed; without
    its input if the input is offloaded (two offloaded inputs are in VRAM at a time). Temporary memory in forward and
    backward comes on top; in backward it includes recomputed activations and gradients of inputs that blocks share.

    Args:
        how: "keep", "cheap", "checkpoint" or "offload" for each stage.
    """
    below = peak = in_ram = moving = 0
    for stage, choice in zip(work.stages, how, strict=True):
        if choice == "offload":
            below -= stage.input_bytes
            in_ram += stage.input_bytes
            moving = max(moving, 2 * stage.input_bytes)
        kept, of_backward = stage.kept_bytes, stage.backward_peak_bytes
        if choice == "cheap" and stage.cheap is not None:
            kept, of_backward = stage.cheap.kept_bytes, stage.cheap.backward_peak_bytes
        if choice in ("keep", "cheap"):
            peak = max(peak, below + stage.forward_peak_bytes)
        peak = max(peak, below + kept + of_backward + stage.shared_bytes)
        below += kept if choice in ("keep", "cheap") else stage.output_bytes
    return Activations(peak + moving, in_ram)


def activation_bytes(work: MicroBatch | None, *, recomputed: bool) -> int:
    """VRAM of a micro-batch's activations, with every block recomputed or with no block; 0 if it is unknown."""
    if work is None:
        return 0
    return activations(work, ["checkpoint" if recomputed and stage.block else "keep" for stage in work.stages]).vram


def choices(layers: Sequence[LayerShape], placements: Sequence[Placement], work: MicroBatch) -> list[str]:
    """How each stage's activations are kept: "keep", "cheap", "checkpoint" or "offload"."""
    of_block = {layer.name: where.activations for layer, where in zip(layers, placements, strict=True)}
    return [of_block.get(stage.block, "keep") if stage.block else "keep" for stage in work.stages]


def run_bytes(
    layers: Sequence[LayerShape],
    placements: Sequence[Placement],
    accumulation: int,
    *,
    frozen_bytes: int = 0,
    held: Activations | None = None,
    graph_bytes: int = 0,
    context_bytes: int = 0,
    device_type: str = "cuda",
) -> dict[str, dict[str, int]]:
    """Bytes by tier ("vram", "ram", "disk") and category.

    Args:
        held: the activations; None leaves activations and the framework out.
        graph_bytes: VRAM of CUDA graphs.
        context_bytes: VRAM of the process outside torch's allocator.
        device_type: with "cpu" there is no VRAM, and bytes of the "vram" tier are in RAM too.
    """
    tiers = tier_bytes(layers, placements, accumulation)
    tiers["vram"]["frozen weights"] = tiers["vram"].get("frozen weights", 0) + frozen_bytes
    if held is not None:
        tiers["vram"]["activations"], tiers["vram"][GRAPHS] = held.vram, graph_bytes
        tiers["ram"]["activations"] = held.ram
        tiers["ram"]["framework"] = FRAMEWORK_RAM_BYTES[device_type]
        if device_type != "cpu":
            tiers["vram"]["framework"] = context_bytes + ALLOCATOR_BYTES
    return {
        tier: {category: parts[category] for category in CATEGORIES if parts.get(category)}
        for tier, parts in tiers.items()
    }
