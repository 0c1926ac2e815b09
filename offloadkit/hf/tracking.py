"""What trackers (trackio, wandb, tensorboard) get beside the Trainer's own numbers."""

from __future__ import annotations

from itertools import islice

from offloadkit.facts.telemetry import Telemetry, mean_seconds
from offloadkit.monitor.figures import NUM_RECENT, Machine, slowdown

_GIB = 1 << 30


def memory_and_speed(telemetry: Telemetry) -> dict[str, float]:
    """Numbers of the newest steps that are complete, for one log entry.

    vram_gib and ram_gib are the process's memory, step_seconds and tokens_per_second means of at most `NUM_RECENT`
    steps, slowdown the step's seconds relative to a GPU that holds everything. Unknown numbers are left out.
    """
    newest = list(islice(reversed(telemetry.records), NUM_RECENT))
    if not newest:
        return {}
    found = {}
    for tier in ("vram", "ram"):
        if (used := newest[0].bytes.get(tier, {}).get("process")) is not None:
            found[f"{tier}_gib"] = used / _GIB
    seconds = mean_seconds(newest)
    if step := seconds.get("step"):
        found["step_seconds"] = step
        if tokens := sum(record.num_tokens or 0 for record in newest):
            found["tokens_per_second"] = tokens / (len(newest) * step)
    plan = telemetry.plan
    slow = None if plan is None or plan.on_cpu else slowdown(seconds, plan, Machine.of(plan), None)[0]
    if slow is not None:
        found["slowdown"] = slow.factor
    return found
