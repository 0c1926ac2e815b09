"""The bound of a step: what it takes at least on one machine with a plan's placements.

Clipping needs the whole norm, so forward with the update of the last step and backward do not overlap. The slowest
resource of each counts: the GPU, DRAM beside the bus, the bus or the disk. Python, waits and the link between ranks
are left out. DRAM carries the step's traffic of layers whose states are in RAM: 26 bytes per parameter with exact
AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offloadkit.facts.config import Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.planner.layout import NUM_WEIGHT_BUFFERS, LayerShape
from offloadkit.planner.seconds import Seconds, layer_cost
from offloadkit.planner.work import MicroBatch


@dataclass(frozen=True)
class BoundPhase:
    name: str
    number: int
    """How often a step has the phase."""
    resources: Mapping[str, float]
    """Seconds of the "GPU", "DRAM", the "bus" and the "disk" in one such phase."""

    @property
    def slowest(self) -> str:
        return max(self.resources, key=lambda name: self.resources[name])

    @property
    def seconds(self) -> float:
        return self.number * self.resources[self.slowest]


@dataclass(frozen=True)
class Bound:
    phases: tuple[BoundPhase, ...]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases)


def bound_of(
    layers: Sequence[LayerShape],
    placements: Sequence[Placement],
    accumulation: int,
    work: MicroBatch,
    hardware: Hardware,
    seconds: Seconds,
) -> Bound:
    """`seconds`: the predicted step, which says how long the GPU and the disk work."""
    adds = accumulation > 1
    streamed: list[int] = []
    stepped = there = back = sent = sent_late = added = 0
    for index, (layer, where) in enumerate(zip(layers, placements, strict=True)):
        cost = layer_cost(index, layer, hardware, accumulation)
        if cost.is_streamed(where):
            streamed.append(cost.weight_bytes)
        if where.step == "cpu":
            stepped += cost.step_bytes
            there += 0 if cost.is_streamed(where) else cost.stepped_bytes
            sent_late += cost.gradient_bytes if where.gradients == "vram" else 0
        elif where.states == "ram":
            to_vram, to_ram = cost.transfer_bytes(where)
            stepped, there, back = stepped + to_vram + to_ram, there + to_vram, back + to_ram
        if where.gradients == "ram":
            sent += cost.sent_bytes
            if adds:
                stepped += cost.gradient_bytes  # the norm
                added += cost.added_bytes
    offloaded = {layer.name for layer, where in zip(layers, placements, strict=True) if where.activations == "offload"}
    inputs = sum(stage.input_bytes for stage in work.stages if stage.block in offloaded)
    again = sum(streamed[NUM_WEIGHT_BUFFERS:])  # weights that the buffers do not hold from the phase before
    dram, busy = hardware.cpu_and_bus_bytes_per_second, seconds.busy

    def bus(h2d: float, d2h: float) -> float:
        rates = hardware.h2d_bytes_per_second, hardware.d2h_bytes_per_second, hardware.both_bytes_per_second
        return max(h2d / rates[0], d2h / rates[1], (h2d + d2h) / rates[2])

    forward, backward = busy["forward"] / accumulation, busy["backward"] / accumulation
    update = {
        "GPU": forward + busy["GPU step"],
        "DRAM": stepped / dram,
        "bus": bus(sum(streamed) + there, inputs + back),
    }
    phases = (
        BoundPhase("forward and update", 1, update | {"disk": busy["disk"]}),
        BoundPhase("other forwards", accumulation - 1, {"GPU": forward, "bus": bus(again, inputs)}),
        BoundPhase(
            "backward",
            accumulation,
            {"GPU": backward, "DRAM": added / dram, "bus": bus(again + inputs, sent + sent_late / accumulation)},
        ),
    )
    return Bound(tuple(phase for phase in phases if phase.number))
