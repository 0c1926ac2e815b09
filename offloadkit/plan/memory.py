"""Bytes of a whole run by tier and category: the layers' own, activations, and what torch, CUDA and Python take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offloadkit.config import Placement
from offloadkit.plan.shapes import CATEGORIES, LayerShape, tier_bytes
from offloadkit.plan.work import MicroBatch

MIB = 1 << 20
ALLOCATOR_BYTES = 256 * MIB
"""cuBLAS's workspaces, small tensors, and what torch's allocator reserves beyond the peak of what is allocated, with
segments that grow (18 cases of benchmarks/results/plans-h200.json: 52 to 374 MiB)."""
FRAMEWORK_RAM_BYTES = {"cuda": 1700 * MIB, "cpu": 600 * MIB}
"""Python, torch and transformers, with and without CUDA's libraries (resident, measured)."""


@dataclass(frozen=True)
class Activations:
    """Memory of one micro-batch's activations.

    Attributes:
        vram: most that is alive at once, in bytes.
        ram: inputs of offloaded blocks, in bytes.
    """

    vram: int = 0
    ram: int = 0


def activations(work: MicroBatch, how: Sequence[str]) -> Activations:
    """Memory of the activations of a micro-batch.

    The stages' bytes are laid end to end in forward order. A stage adds what it keeps (recomputed: its outputs;
    offloaded: without its input, two of which are in VRAM at a time). On top of what lies below it comes what it needs
    for a while in forward and in backward: there its kept bytes, which a recomputation brings back, and the gradients
    of inputs that blocks share.

    Args:
        how: "keep", "checkpoint" or "offload" for each stage.
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
