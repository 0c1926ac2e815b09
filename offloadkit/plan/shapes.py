"""The plan: how many bytes of each kind a run needs, and where they live. Pure arithmetic over shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offloadkit.config import OffloadConfig, Placement

Dtype = Literal["bf16", "fp32"]
WEIGHT_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
REMAINDER_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 0}
"""Of the master weights, beside the working weights: 16 more bits to a bf16 (split master weights), none to fp32."""
MOMENT_BYTES = 4 + 4
"""exp_avg and exp_avg_sq in fp32."""

NUM_LANDINGS = 2
"""Layers whose gradients may be in VRAM at once: one being written, the other on its way to RAM."""
NUM_WEIGHT_BUFFERS = 3
"""Buffers in VRAM through which weights that live in RAM pass: the layer in use, the one before and the next."""
NUM_STAGING = 2
"""Layers of one micro-batch's gradients in RAM, waiting to be added to the accumulated ones."""

DEFAULT_PLACEMENT = Placement()


@dataclass(frozen=True)
class LayerShape:
    """What the arithmetic needs to know of a flat layer."""

    name: str
    num_parameters: int
    numel: int
    """Elements of its flat buffers, padding included."""
    dtype: Dtype
    """Working weights."""
    num_norm_blocks: int
    shared: bool
    """Whether it holds a tied weight, whose gradient is fp32."""
    in_block: bool = False
    """Whether it belongs to a repeated block: only then may its weights leave VRAM."""

    def landing_bytes(self) -> int:
        """One micro-batch's gradient."""
        return self.numel * (4 if self.shared else WEIGHT_BYTES[self.dtype])

    def gradient_bytes(self, accumulation: int) -> int:
        """The gradient that the step reads: fp32 when it is a sum of several, else the layer's dtype."""
        return self.numel * 4 if accumulation > 1 else self.landing_bytes()

    def weight_bytes(self) -> int:
        """The working weights."""
        return self.numel * WEIGHT_BYTES[self.dtype]

    def sums_bytes(self) -> int:
        """The norm's block sums, in fp64."""
        return aligned(8 * self.num_norm_blocks)

    def state_bytes(self) -> dict[str, int]:
        """Optimizer states by category, wherever they live."""
        return {
            "master weights": aligned(self.numel * REMAINDER_BYTES[self.dtype]),
            "exp_avg, exp_avg_sq": self.numel * MOMENT_BYTES,
        }

    def ram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        """Pinned RAM by category."""
        gradients = self.sums_bytes()
        if placement.step == "cpu" or placement.gradients == "ram":
            gradients += self.gradient_bytes(accumulation)
        parts = {"gradients": gradients}
        if placement.step == "cpu":  # a copy of resident weights, or the only ones
            parts["working weights"] = self.weight_bytes()
        if placement.states == "ram":
            parts |= self.state_bytes()
        return parts

    def vram_bytes(self, placement: Placement, accumulation: int) -> dict[str, int]:
        """VRAM by category that is this layer's alone; landings and weight buffers are shared by all."""
        parts = {"gradients": self.sums_bytes()}
        if placement.weights == "vram":
            parts["working weights"] = self.weight_bytes()
        if placement.states == "vram":
            parts |= self.state_bytes()
        if placement.gradients == "vram":
            parts["gradients"] += self.gradient_bytes(accumulation)
        return parts


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, computed from shapes alone.

    Attributes:
        tiers: bytes by tier ("vram", "ram") and category; activations and the framework's own memory come on top.
    """

    layers: tuple[LayerShape, ...]
    placements: tuple[Placement, ...]
    accumulation: int
    num_parameters: int
    num_trainable_parameters: int
    tiers: dict[str, dict[str, int]]

    def total_bytes(self, tier: str) -> int:
        """Planned bytes of a tier."""
        return sum(self.tiers[tier].values())

    def __str__(self) -> str:
        frozen = self.num_parameters - self.num_trainable_parameters
        kinds = Counter(layer.dtype for layer in self.layers)
        steppers = Counter(placement.step for placement in self.placements)
        lines = [
            f"{self.num_parameters:,} parameters"
            + (f" ({frozen:,} frozen)" if frozen else "")
            + f" in {len(self.layers)} flat layers, working weights {'+'.join(kinds)},\n"
            + ", ".join(f"{number} stepped on the {step.upper()}" for step, number in steppers.items()),
            f"  {'':22}{'VRAM':>12}{'RAM':>12}",
        ]
        categories = dict.fromkeys(category for tier in self.tiers.values() for category in tier)
        for category in categories:
            cells = [self.tiers[tier].get(category, 0) for tier in ("vram", "ram")]
            if any(cells):
                lines.append(
                    f"  {category:22}" + "".join(f"{format_bytes(cell) if cell else '-':>12}" for cell in cells)
                )
        totals = [format_bytes(self.total_bytes(tier)) for tier in ("vram", "ram")]
        lines.append(f"  {'in all':22}" + "".join(f"{total:>12}" for total in totals))
        lines.append("  (activations and the framework's own memory come on top;")
        lines.append("  without a GPU, VRAM is RAM too)")
        return "\n".join(lines)


def format_bytes(num_bytes: int) -> str:
    """ "1.23 GiB", "45.6 MiB" or "789 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the border at which the next array of a slab starts."""
    return -(-num_bytes // 256) * 256


def possible(placement: Placement, layer: LayerShape) -> Placement:
    """`placement`, with weights and activations kept where the layer is no repeated block of its own."""
    if layer.in_block and not layer.shared:
        return placement
    return replace(placement, weights="vram", activations=placement.activations if layer.in_block else "keep")


def make_plan(layers: Sequence[LayerShape], config: OffloadConfig, *, frozen: int = 0, frozen_bytes: int = 0) -> Plan:
    """The plan of a model cut into `layers`.

    Args:
        frozen, frozen_bytes: number and size of the parameters outside the flat layers, and buffers' bytes.
    """
    placement = config.placement or DEFAULT_PLACEMENT
    if config.activation_checkpointing and placement.activations == "keep":
        placement = replace(placement, activations="checkpoint")
    placements = tuple(possible(placement, layer) for layer in layers)
    num_trainable = sum(layer.num_parameters for layer in layers)
    tiers = tier_bytes(layers, placements, config.gradient_accumulation)
    tiers["vram"]["frozen weights"] = frozen_bytes
    return Plan(tuple(layers), placements, config.gradient_accumulation, num_trainable + frozen, num_trainable, tiers)


def tier_bytes(
    layers: Sequence[LayerShape], placements: Sequence[Placement], accumulation: int
) -> dict[str, dict[str, int]]:
    """Bytes by tier and category of layers placed so."""
    ram: Counter[str] = Counter()
    vram: Counter[str] = Counter()
    placed = list(zip(layers, placements, strict=True))
    for layer, placement in placed:
        ram.update(layer.ram_bytes(placement, accumulation))
        vram.update(layer.vram_bytes(placement, accumulation))
    through_ram = sorted((layer.landing_bytes() for layer, where in placed if where.gradients == "ram"), reverse=True)
    if accumulation > 1:
        ram["gradients"] += NUM_STAGING * max(through_ram, default=0)
        landings = sorted((layer.landing_bytes() for layer in layers), reverse=True)
    else:
        landings = through_ram
    vram["gradients"] += sum(landings[:NUM_LANDINGS])
    streamed = [layer.weight_bytes() for layer, where in placed if where.weights == "ram"]
    vram["weight buffers"] = NUM_WEIGHT_BUFFERS * max(streamed, default=0)
    order = ("working weights", "weight buffers", "gradients", "master weights", "exp_avg, exp_avg_sq")
    return {
        tier: {category: parts[category] for category in order if parts[category]}
        for tier, parts in (("vram", vram), ("ram", ram))
    }
