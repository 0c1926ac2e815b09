"""How much memory activations take over a micro-batch, by what is kept, recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Mapping

from offloadkit.config import Placement
from offloadkit.plan.work import MicroBatch


def activation_bytes(work: MicroBatch, placements: Mapping[str, Placement]) -> tuple[int, int]:
    """(peak in VRAM, total in RAM) over one micro-batch.

    The stages' bytes are laid end to end in forward order. A stage adds what it keeps (recomputed: its outputs;
    offloaded: without its input, two of which are in VRAM at a time). On top of what lies below it comes what it needs
    for a while in forward and in backward: there its kept bytes, which a recomputation brings back, and the gradients
    of inputs that blocks share.

    Args:
        placements: by block name.
    """
    below = peak = in_ram = transit = 0
    for stage in work.stages:
        how = placements[stage.block].activations if stage.block in placements else "keep"
        if how == "offload":
            below -= stage.input_bytes
            in_ram += stage.input_bytes
            transit = max(transit, 2 * stage.input_bytes)
        if how == "keep":
            peak = max(peak, below + stage.forward_peak_bytes)
        backward = stage.kept_bytes + stage.backward_peak_bytes + stage.shared_bytes
        peak = max(peak, below + backward)
        below += stage.kept_bytes if how == "keep" else stage.output_bytes
    return peak + transit, in_ram
