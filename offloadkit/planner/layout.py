"""Bytes of a flat layer, of all of them, and of a whole run, by tier and category.

The layers' bytes are exact: the engine allocates what is said here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offloadkit.config import Placement
from offloadkit.hardware import Hardware
from offloadkit.optim.table import MASTER_WEIGHTS, MOMENTS, Dtype, LayerKind, StateTable, aligned
from offloadkit.planner.fitted import NCCL_BYTES, NCCL_FEW_BYTES
from offloadkit.planner.work import MicroBatch

NUM_GRADIENT_BUCKETS = 2
"""Layers whose gradients may be in VRAM at once on their way to RAM: autograd holds those of one layer until all are
there, a bucket holds those of another."""
SMALL_BUCKET = 64
"""A gradient so many times smaller than the largest one has a bucket of its own, because it may stay there for long: a
small norm's gradient may wait for another one."""
NUM_WEIGHT_BUFFERS = 3
"""Buffers in VRAM for working weights that live in RAM: the layer in use, the one before and the next."""
NUM_STAGING = 2
"""Buffers in RAM for one micro-batch's gradients that wait to be added to the accumulated ones."""
NUM_STATE_BUFFERS = 3
"""Buffers in RAM for states that live on disk: one being read, one being stepped, one being written."""

NUM_STEP_BUFFERS = 3
"""Buffers in VRAM for states in RAM that the GPU steps: one being fetched, one being stepped, one being sent back."""
STEP_CHUNK = 1 << 23
"""The most elements of a flat layer that one step buffer takes; a multiple of 256."""

CATEGORIES = (
    "working weights",
    "weight buffers",
    "frozen weights",
    "gradients",
    MASTER_WEIGHTS,
    MOMENTS,
    "state buffers",
    "activations",
    "framework",
)
"""In the order in which they are shown."""


@dataclass(frozen=True)
class LayerShape:
    """What the arithmetic needs to know of a flat layer."""

    name: str
    num_parameters: int
    numel: int
    """Elements of its flat buffers, padding included; a multiple of 256."""
    kind: LayerKind
    num_norm_blocks: int
    """Of the elements that this rank steps."""
    shared: bool
    """Whether it holds a tied weight, whose gradient is fp32."""
    in_block: bool = False
    """Whether it belongs to a repeated block: only then may its weights leave VRAM."""
    own: int | None = None
    """Elements that this rank steps; None: all."""
    num_ranks: int = 1
    exchanges_sums: bool = False
    """Whether several ranks exchange sums of several micro-batches, not each micro-batch."""
    norm_blocks_of_all: int | None = None
    """Of the elements that all ranks step; None: there is one rank."""

    def shared_by(self, num_ranks: int) -> LayerShape:
        """The shape of an equal part of the layer, to plan by where nobody has cut it (`FlatLayer.cut_for` does).

        Real parts end where blocks of the norm do: they are larger or smaller by less than a block.
        """
        blocks = self.num_norm_blocks if self.norm_blocks_of_all is None else self.norm_blocks_of_all
        if num_ranks == 1:
            return replace(self, own=None, num_norm_blocks=blocks, num_ranks=1, norm_blocks_of_all=None)
        own = -(-self.numel // (_PART * num_ranks)) * _PART
        part = -(-blocks // num_ranks)
        return replace(self, own=own, num_norm_blocks=part, num_ranks=num_ranks, norm_blocks_of_all=blocks)

    @property
    def own_numel(self) -> int:
        """Elements whose states and gradient this rank keeps."""
        return self.numel if self.own is None else self.own

    @property
    def states(self) -> StateTable:
        """The arrays of its optimizer states."""
        return self.kind.states

    @property
    def dtype(self) -> Dtype:
        """dtype of the working weights."""
        return self.kind.dtype

    def bucket_bytes(self) -> int:
        """One micro-batch's gradient."""
        return self.numel * (4 if self.shared else self.kind.weights_dtype.itemsize)

    def sums_whole(self, accumulation: int) -> bool:
        """Whether each of several ranks adds up the whole layer's gradient, before they exchange it."""
        return self.exchanges_sums and self.num_ranks > 1 and accumulation > 1

    def received_bytes(self, accumulation: int) -> int:
        """With several ranks, what an exchange brings: each one's gradient of the own range."""
        each = 4 if self.sums_whole(accumulation) else self.bucket_bytes() // self.numel
        return each * self.own_numel * self.num_ranks

    def staged_bytes(self, accumulation: int) -> int:
        """What is added to the window in RAM for one micro-batch."""
        return self.bucket_bytes() if self.sums_whole(accumulation) else self.received_bytes(accumulation)

    def window_bytes(self, accumulation: int) -> int:
        """A window's gradient while it is gathered."""
        return 4 * self.numel if self.sums_whole(accumulation) else self.gradient_bytes(accumulation)

    def exchanged_bytes(self, placement: Placement, accumulation: int) -> int:
        """What the other ranks send over the link in an update; sums in RAM are added there."""
        sums = self.sums_whole(accumulation)
        if sums and placement.gradients == "ram":
            return 0
        return (
            self.received_bytes(accumulation) // self.num_ranks * (self.num_ranks - 1) * (1 if sums else accumulation)
        )

    def gathered_bytes(self, placement: Placement) -> int:
        """New weights that the other ranks send for an update."""
        return self.weight_bytes() - self.stepped_bytes() if placement.weights == "vram" else 0

    def gradient_bytes(self, accumulation: int) -> int:
        """The gradient that the step reads: fp32 when it is a sum of several, else the layer's dtype."""
        return self.own_numel * 4 if accumulation * self.num_ranks > 1 else self.bucket_bytes()

    def weight_bytes(self) -> int:
        """The working weights."""
        return self.numel * self.kind.weights_dtype.itemsize

    def stepped_bytes(self) -> int:
        """The working weights that this rank steps."""
        return self.own_numel * self.kind.weights_dtype.itemsize

    def sums_bytes(self) -> int:
        """The norm's block sums, in fp64."""
        return aligned(8 * self.num_norm_blocks)

    def state_bytes(self) -> dict[str, int]:
        """Optimizer states by category, wherever they live."""
        return self.states.num_bytes(self.own_numel)

    def step_bytes(self, accumulation: int) -> int:
        """Memory traffic of a step: the gradient is read, states and working weights are read and written."""
        return self.gradient_bytes(accumulation) + 2 * (sum(self.state_bytes().values()) + self.stepped_bytes())

    def passing_bytes(self, placement: Placement, accumulation: int) -> int:
        """What a full chunk takes of a step buffer: the states, and of weights and gradient what lives in RAM."""
        size = chunk_numel(self.own_numel)
        chunk = replace(self, numel=size, own=None if self.own is None else size)
        passing = sum(chunk.state_bytes().values())
        if placement.weights == "ram":
            passing += chunk.weight_bytes()
        if placement.gradients == "ram":
            passing += chunk.gradient_bytes(accumulation)
        return passing

    def ram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        """Pinned RAM by category."""
        parts = {"gradients": self.sums_bytes()}
        on_cpu = cpu_can_step(placement)
        if on_cpu:
            in_ram = placement.gradients == "ram"
            parts["gradients"] += self.window_bytes(accumulation) if in_ram else self.gradient_bytes(accumulation)
        if on_cpu or placement.weights == "ram":  # a copy of resident weights, or the only ones
            parts["working weights"] = self.stepped_bytes()
        if placement.states == "ram":
            parts |= self.state_bytes()
        return parts

    def vram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        """VRAM by category that is this layer's alone; buckets and weight buffers are shared by all."""
        parts = {"gradients": self.sums_bytes()}
        if placement.weights == "vram":
            parts["working weights"] = self.weight_bytes()
        if placement.states == "vram":
            parts |= self.state_bytes()
        if placement.gradients == "vram":
            parts["gradients"] += self.window_bytes(accumulation)
        return parts


def communicated_bytes(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> dict[str, int]:
    """Bytes that a rank receives in an optimizer step, by kind, where every parameter gets a gradient; {} of one rank.

    "exchange": gradients of the other ranks. "gather": new weights of the other ranks. "norm": block sums, added up.
    `Ranks` counts the same.
    """
    if layers[0].num_ranks == 1:
        return {}
    placed = list(zip(layers, placements, strict=True))
    return {
        "exchange": sum(layer.exchanged_bytes(where, accumulation) for layer, where in placed),
        "gather": sum(layer.gathered_bytes(where) for layer, where in placed),
        "norm": 8 * sum(layer.norm_blocks_of_all or 0 for layer in layers),
    }


def is_built(placement: Placement, layer: LayerShape, accumulation: int, *, one_host: bool) -> bool:
    """Whether the engine has such a placement of the layer: several hosts share no RAM, neither for weights nor for
    sums that are exchanged once.

    Args:
        one_host: whether all ranks are on one.
    """
    sums_in_ram = placement.gradients == "ram" and layer.sums_whole(accumulation)
    return one_host or not (placement.weights == "ram" or sums_in_ram)


def cpu_can_step(placement: Placement) -> bool:
    """Whether gradients and weights reach RAM."""
    return placement.step == "cpu" or (placement.states == "ram" and placement.gradients == "ram")


def gpu_can_step(placement: Placement) -> bool:
    """Whether the states are in VRAM, or may pass through it with what else the step needs."""
    return placement.step == "gpu" or (placement.states == "ram" and placement.gradients == "ram")


def chunk_numel(numel: int) -> int:
    """Elements of a layer's chunks; the last one may be shorter."""
    return min(STEP_CHUNK, numel)


def possible(placement: Placement, layer: LayerShape) -> Placement:
    """`placement`, with weights and activations kept where the layer is no repeated block of its own."""
    if layer.in_block and not layer.shared:
        return placement
    return replace(placement, weights="vram", activations=placement.activations if layer.in_block else "keep")


def tier_bytes(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> dict[str, dict[str, int]]:
    """Bytes of the layers' own memory by tier ("vram", "ram", "disk") and category, placed so."""
    tiers: dict[str, Counter[str]] = {"vram": Counter(), "ram": Counter(), "disk": Counter()}
    placed = list(zip(layers, placements, strict=True))
    for layer, placement in placed:
        tiers["ram"].update(layer.ram_bytes(placement, accumulation))
        tiers["vram"].update(layer.vram_bytes(placement, accumulation))
        if placement.states == "disk":
            tiers["disk"].update(layer.state_bytes())
    for tier, parts in buffer_bytes(placed, accumulation).items():
        tiers[tier].update(parts)
    return {
        tier: {category: parts[category] for category in CATEGORIES if parts[category]} for tier, parts in tiers.items()
    }


def is_small(bucket_bytes: int, largest: int) -> bool:
    """Whether a gradient has a bucket of its own, beside one of the largest size."""
    return bucket_bytes * SMALL_BUCKET <= largest


def buffer_bytes(placed: Sequence[tuple[LayerShape, Placement]], accumulation: int) -> dict[str, dict[str, int]]:
    """Bytes of what layers share, by tier and category: buckets, weight buffers, staging, buffers of states.

    A tied weight's bucket is taken until the end of backward, and small layers have their own; the others share one of
    the largest one's size. Beside it autograd has the gradients of one layer, whoever steps it. Where the GPU steps a
    layer whose states are in RAM, the step buffers are wide enough for every layer that it might step too. With several
    ranks all gradients pass through buckets, and one buffer receives what the others send, but for sums of several
    micro-batches that wait in RAM.
    """
    through_ram = [layer for layer, where in placed if where.gradients == "ram"]
    exchanged = [layer for layer, _ in placed if layer.num_ranks > 1]
    bucket = [layer for layer, _ in placed] if accumulation > 1 or exchanged else through_ram
    sizes = [layer.bucket_bytes() for layer in bucket if not layer.shared]
    own = sum(layer.bucket_bytes() for layer in bucket if layer.shared)
    largest = max(sizes, default=0)
    pooled = min(NUM_GRADIENT_BUCKETS - 1, sum(not is_small(size, largest) for size in sizes))
    autograds = max((layer.bucket_bytes() for layer, _ in placed if not layer.shared), default=0)
    buckets_bytes = autograds + pooled * largest + own + sum(size for size in sizes if is_small(size, largest))
    streamed: dict[str, int] = defaultdict(int)  # a block has a flat layer for each of its dtypes
    for layer, where in placed:
        if where.weights == "ram":
            streamed[layer.name] += layer.weight_bytes()
    on_disk = [sum(layer.state_bytes().values()) for layer, where in placed if where.states == "disk"]
    staging = max((layer.staged_bytes(accumulation) for layer in through_ram), default=0) if accumulation > 1 else 0
    in_vram = [
        layer
        for layer, where in placed
        if layer.num_ranks > 1 and not (layer.sums_whole(accumulation) and where.gradients == "ram")
    ]
    received = max((layer.received_bytes(accumulation) for layer in in_vram), default=0)
    summed = [layer.gradient_bytes(accumulation) for layer in through_ram] if exchanged and accumulation == 1 else []
    return {
        "vram": {
            "gradients": buckets_bytes + received + max(summed, default=0),
            "weight buffers": NUM_WEIGHT_BUFFERS * max(streamed.values(), default=0),
            "state buffers": NUM_STEP_BUFFERS * step_buffer_bytes(placed, accumulation),
        },
        "ram": {"gradients": NUM_STAGING * staging, "state buffers": NUM_STATE_BUFFERS * max(on_disk, default=0)},
    }


def step_buffer_bytes(placed: Sequence[tuple[LayerShape, Placement]], accumulation: int) -> int:
    """Bytes of one step buffer; 0 where the GPU steps no layer whose states are in RAM."""
    if not any(where.states == "ram" and where.step == "gpu" for _, where in placed):
        return 0
    passing = [item for item in placed if item[1].states == "ram" and gpu_can_step(item[1])]
    kinds = {  # a model has few, and is planned over and over
        (layer.numel, layer.own, layer.kind, layer.shared, where.weights, where.gradients): (layer, where)
        for layer, where in passing
    }
    return max(layer.passing_bytes(where, accumulation) for layer, where in kinds.values())


MIB = 1 << 20
_PART = 256
"""A part of a layer is a multiple of so many elements, as the starts of parameters are."""
ALLOCATOR_BYTES = 256 * MIB
"""cuBLAS's workspaces, small tensors, and what torch's allocator reserves beyond the peak of what is allocated, with
segments that grow (18 cases of benchmarks/results.csv: 52 to 374 MiB)."""
FRAMEWORK_RAM_BYTES = {"cuda": 1700 * MIB, "cpu": 600 * MIB}
"""Python, torch and transformers, with and without CUDA's libraries (resident, measured)."""


def outside_bytes(layers: Sequence[LayerShape], hardware: Hardware) -> int:
    """VRAM of the process that is not torch's: the CUDA context, and NCCL where there are several ranks."""
    if layers[0].num_ranks == 1:
        return hardware.vram_context_bytes
    by_buses_alone = hardware.link_is_bus and not hardware.network_bytes_per_second
    takes_few = hardware.most_ctas > 0 or by_buses_alone
    return hardware.vram_context_bytes + (NCCL_FEW_BYTES if takes_few else NCCL_BYTES)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch's activations."""

    vram: int = 0
    """Most that is alive at once."""
    ram: int = 0
    """Inputs of offloaded blocks."""


def activations(work: MicroBatch, how: Sequence[str]) -> Activations:
    """Memory of the activations of a micro-batch.

    Stages are added up in forward order. Each adds what it keeps until its backward: all of it, its outputs alone where
    it is recomputed, and not its input where that is offloaded (two such inputs are in VRAM at a time). Above this
    comes what the stage needs for a while, in forward and in backward. Backward's part includes what a recomputation
    brings back, and the gradients of inputs that blocks share. `how`: "keep", "checkpoint" or "offload" for each stage.
    """
    below = peak = in_ram = moving = 0
    for stage, choice in zip(work.stages, how, strict=True):
        if choice == "offload":
            below -= stage.input_bytes
            in_ram += stage.input_bytes
            moving = max(moving, 2 * stage.input_bytes)
        if choice == "keep":
            peak = max(peak, below + stage.forward_peak_bytes)
        peak = max(peak, below + stage.kept_bytes + stage.backward_peak_bytes + stage.shared_bytes)
        below += stage.kept_bytes if choice == "keep" else stage.output_bytes
    return Activations(peak + moving, in_ram)


def choices(layers: Sequence[LayerShape], placements: Sequence[Placement], work: MicroBatch) -> list[str]:
    """What happens to each stage's activations."""
    of_block = {layer.name: where.activations for layer, where in zip(layers, placements, strict=True)}
    return [of_block.get(stage.block, "keep") if stage.block else "keep" for stage in work.stages]


def run_bytes(
    layers: Sequence[LayerShape],
    placements: Sequence[Placement],
    accumulation: int,
    *,
    frozen_bytes: int = 0,
    held: Activations | None = None,
    context_bytes: int = 0,
    device_type: str = "cuda",
) -> dict[str, dict[str, int]]:
    """Bytes by tier ("vram", "ram", "disk") and category.

    Args:
        held: the activations; None leaves them and the framework out.
        context_bytes: VRAM of the process that is not torch's.
        device_type: "cpu": there is no VRAM, and what would be there is in RAM too.
    """
    tiers = tier_bytes(layers, placements, accumulation)
    tiers["vram"]["frozen weights"] = frozen_bytes
    if held is not None:
        tiers["vram"]["activations"] = held.vram
        tiers["ram"]["activations"] = held.ram
        tiers["ram"]["framework"] = FRAMEWORK_RAM_BYTES[device_type]
        if device_type != "cpu":
            tiers["vram"]["framework"] = context_bytes + ALLOCATOR_BYTES
    return {
        tier: {category: parts[category] for category in CATEGORIES if parts.get(category)}
        for tier, parts in tiers.items()
    }
