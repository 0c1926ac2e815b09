"""The plan: how many bytes of each kind a run needs, and where they live. Pure arithmetic over shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offloadkit.config import OffloadConfig, Placement

Dtype = Literal["bf16", "fp32"]
WEIGHT_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
REMAINDER_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 0}
"""Of the master weights, beside the working weights: 16 more bits to a bf16 (split master weights), none to fp32."""
MOMENT_BYTES = 4 + 4
"""exp_avg and exp_avg_sq in fp32."""

NUM_LANDINGS = 3
"""Layers whose gradients may be in VRAM at once: one being written, the others on their way to RAM."""
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

    def landing_bytes(self) -> int:
        """One micro-batch's gradient."""
        return self.numel * (4 if self.shared else WEIGHT_BYTES[self.dtype])

    def gradient_bytes(self, accumulation: int) -> int:
        """The gradient that the step reads: fp32 when it is a sum of several, else the layer's dtype."""
        return self.numel * 4 if accumulation > 1 else self.landing_bytes()

    def host_bytes(self, accumulation: int) -> dict[str, int]:
        """Pinned RAM by category, for states in RAM and a step on the CPU."""
        return {
            "working weights": self.numel * WEIGHT_BYTES[self.dtype],
            "master weights": self.numel * REMAINDER_BYTES[self.dtype],
            "exp_avg, exp_avg_sq": self.numel * MOMENT_BYTES,
            "gradients": self.gradient_bytes(accumulation) + -(-8 * self.num_norm_blocks // 256) * 256,
        }


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, computed from shapes alone.

    Attributes:
        tiers: bytes by tier ("vram", "ram") and category; activations and the framework's own memory come on top.
    """

    layers: tuple[LayerShape, ...]
    placement: Placement
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
        lines = [
            f"{self.num_parameters:,} parameters"
            + (f" ({frozen:,} frozen)" if frozen else "")
            + f" in {len(self.layers)} flat layers, working weights {'+'.join(kinds)},\n"
            f"optimizer states in {self.placement.states.upper()}, step on the {self.placement.step.upper()}",
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


def make_plan(layers: Sequence[LayerShape], config: OffloadConfig, *, frozen: int = 0, frozen_bytes: int = 0) -> Plan:
    """The plan of a model cut into `layers`.

    Args:
        frozen, frozen_bytes: number and size of the parameters outside the flat layers, and buffers' bytes.
    """
    placement = config.placement or DEFAULT_PLACEMENT
    accumulation = config.gradient_accumulation
    ram: Counter[str] = Counter()
    for layer in layers:
        ram.update(layer.host_bytes(accumulation))
    largest = max((layer.landing_bytes() for layer in layers), default=0)
    if accumulation > 1 and placement.gradients == "ram":
        ram["gradients"] += NUM_STAGING * largest
    vram = {
        "working weights": sum(layer.numel * WEIGHT_BYTES[layer.dtype] for layer in layers),
        "frozen weights": frozen_bytes,
        "gradients": _landing_bytes(layers, placement, accumulation),
    }
    num_trainable = sum(layer.num_parameters for layer in layers)
    return Plan(
        tuple(layers), placement, accumulation, num_trainable + frozen, num_trainable, {"vram": vram, "ram": dict(ram)}
    )


def _landing_bytes(layers: Sequence[LayerShape], placement: Placement, accumulation: int) -> int:
    """Gradients in VRAM: landings that are reused, one more for each layer that stays open through backward."""
    sizes = sorted((layer.landing_bytes() for layer in layers), reverse=True)
    if placement.gradients == "ram":
        return sum(sizes[:NUM_LANDINGS])
    if accumulation == 1:
        return sum(sizes)
    return sum(sizes[:NUM_LANDINGS]) + sum(layer.gradient_bytes(accumulation) for layer in layers)
