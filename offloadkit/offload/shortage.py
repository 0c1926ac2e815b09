"""A GPU whose memory is full, in words: what was planned, what is used, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offloadkit import hardware
from offloadkit.errors import OutOfVramError
from offloadkit.plan import Plan, format_bytes


@contextmanager
def explained_shortage(
    plan: Plan, device: torch.device, drop_gradients: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """
    Raises:
        OutOfVramError: in the place of torch's error; `drop_gradients` was called.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        explained = _explain(plan, device)
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep the activations
        drop_gradients()
        raise OutOfVramError(explained) from error


def leaner_budget(plan: Plan, device: torch.device) -> int:
    """Bytes of VRAM for another plan of a run that `plan` was too small for.

    It is an eighth below what was planned, or below what there was to be had if that is less; and below what was
    planned by twice as much as was used beyond it, since what did not fit any more was not even counted.
    """
    planned = plan.total_bytes("vram")
    used = planned
    if device.type == "cuda":
        used = hardware.vram_context_bytes(device) + torch.cuda.max_memory_reserved(device)
    return max(1, min(planned, used) - max(planned // 8, 2 * (used - planned)))


def _explain(plan: Plan, device: torch.device) -> str:
    planned = plan.tiers["vram"]
    parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in planned.items() if size)
    free, total = hardware.vram_bytes(device)
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    fixed = sum(size for category, size in planned.items() if category not in ("activations", "framework"))
    others = "" if "activations" in planned else "; activations were not planned, the micro-batch's size was not known"
    return (
        f"the GPU's memory is full: torch held up to {format_bytes(used)}, {format_bytes(free)} of "
        f"{format_bytes(total)} are free. Planned were {format_bytes(sum(planned.values()))} ({parts}){others}; "
        f"activations and what torch needs for itself took {format_bytes(max(0, used - fixed))}. Take a smaller "
        "micro-batch and more gradient accumulation, or give the plan less VRAM than there is (vram=...), so that "
        "more lives in RAM"
    )
