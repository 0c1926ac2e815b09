"""Simulates the seconds of a step on the GPU, CPU, Python, disk and both directions of the bus, layer by layer.

A step has two phases, which do not overlap because clipping needs the whole norm: forward with the update of the last
step, and backward with the copies of gradients to RAM. Every resource works through its own queue. A layer's work
starts once its inputs have arrived and a buffer is free.

With several ranks, one rank is simulated. Gradients are exchanged over the link layer by layer in backward, and new
weights are all-gathered in forward, in a fixed order. Sums that are exchanged once a step go in the last backward; sums
in RAM are added before the norm. If the link is the bus, its traffic slows the copies of the same phase. The constants
are in `fitted`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import Any

from offloadkit.facts.config import Placement, Precision
from offloadkit.facts.fitted import (
    ADD_EFFICIENCY,
    AGREE_SECONDS,
    ATTENTION_EFFICIENCY,
    ATTENTION_LAUNCHES,
    BACKWARD_LAUNCHES,
    CHEAP_LAUNCHES,
    CHUNK_LAUNCHES,
    COMPILED_LAUNCHES,
    COMPILED_TRAFFIC,
    CPU_EFFICIENCY,
    DISK_OVERLAP,
    ELEMENTWISE_EFFICIENCY,
    ENGINE_LAUNCHES,
    EXCHANGE_EFFICIENCY,
    EXCHANGE_SECONDS,
    FEW_EXCHANGE_EFFICIENCY,
    FORWARD_LAUNCHES,
    GRAPH_CALLS,
    GRAPHED_LAUNCHES,
    KERNEL_SECONDS,
    LAYER_LAUNCHES,
    MATRIX_SECONDS,
    NORM_EFFICIENCY,
    OUTSIDE_LAUNCHES,
    PRODUCT_EFFICIENCY,
    PRODUCT_SECONDS,
    PYTHON_VARIES,
    RANKS_SLOW,
    RECOMPUTED_LAUNCHES,
    SDPA_EFFICIENCY,
    SDPA_KEYS,
    STEP_EFFICIENCY,
    STEP_LAUNCHES,
    STREAMED_LAUNCHES,
    THREAD_SLOWS,
)
from offloadkit.facts.hardware import CPU_STEP_RATES, Hardware
from offloadkit.optim.muon import PRODUCTS, STEPS
from offloadkit.optim.table import Dtype, Matrix
from offloadkit.planner.graphs import capturable
from offloadkit.planner.layout import (
    NUM_GRADIENT_BUCKETS,
    NUM_STAGING,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    LayerShape,
)
from offloadkit.planner.work import MicroBatch, Pass, Stage

FEW_CORES = 2
"""With at most this many cores, the CPU step and Python share the cores and do not run at the same time."""

IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", activations="keep", step="gpu")
RESOURCES = ("forward", "backward", "GPU step", "CPU step", "H2D", "D2H", "disk", "launches")


@dataclass(frozen=True)
class Seconds:
    """The predicted seconds of a step. Resources overlap, so their seconds do not add up to the step's.

    Attributes:
        update_phase: forward and the update. `update_phase + backward_phase == step`.
        busy: seconds of each resource: "forward", "backward" and "GPU step" (which share the GPU), "CPU step", "H2D",
            "D2H", "disk", "launches" (Python, starting kernels), and with several ranks "link".
    """

    step: float
    update_phase: float
    backward_phase: float
    busy: Mapping[str, float]

    @property
    def exposed(self) -> float:
        return max(0.0, self.step - sum(self.busy[name] for name in ("forward", "backward", "GPU step")))


WIDEST_RANGE = 1.4
"""Largest seconds of a step over its smallest, in the range that a plan gives if Python bounds the step."""


@dataclass(frozen=True)
class _StageCost:
    """Seconds of a stage on the GPU (`forward`, `backward`) and in Python (`..._launches`), and its flat layers."""

    forward: float
    backward: float
    forward_launches: float
    backward_launches: float
    operation_launches: float
    """Seconds of one bare launch for each operation of forward; our attention counts as one operation."""
    again: float
    """Seconds on the GPU of the operations that backward computes again if matmuls and attention are kept."""
    again_launches: float
    is_captured: bool
    """Whether the stage runs as CUDA graphs, unless it is cheap."""
    graphed_forward_launches: float
    graphed_backward_launches: float
    input_bytes: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True)
class _Bus:
    """Bytes per second in each direction, and the slowdown of the CPU step by copies (factor)."""

    h2d: float
    d2h: float
    slows_cores: float = 1.0


class StepModel:
    """Predicts the step of one model, with micro-batches of one shape, on one machine, for any placement.

    Attributes:
        stages, layers: the costs of each stage and flat layer, in forward order.
        num_trained: number of layers that are not frozen.
        cpu_rate: bytes per second of the CPU step.
        agreeing: seconds of the ranks' agreement before an update.
        link, link_in_backward: bytes per second that a rank receives from the other ranks.
        slowed_beside_cpu: Python's slowdown in forward while the CPU steps (fraction).
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch,
        hardware: Hardware,
        accumulation: int,
        *,
        compiled: bool = False,
        graphed: bool = False,
    ) -> None:
        """`compiled`, `graphed`: whether the repeated blocks are compiled, or run as CUDA graphs."""
        self._hardware, self._accumulation = hardware, accumulation
        launch = hardware.launch_seconds
        timed = work.operation_launches or (FORWARD_LAUNCHES, BACKWARD_LAUNCHES)
        forward, backward = (number * launch for number in timed)
        own = ENGINE_LAUNCHES * launch if work.operation_launches else 0.0
        slowness = sum(timed) / (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)  # of Python on this host
        captured = capturable(layers, work) if graphed else set[str]()
        as_graph = [(slowness * number + GRAPH_CALLS) * launch for number in GRAPHED_LAUNCHES]
        outside = [slowness * number * launch * bool(captured) for number in OUTSIDE_LAUNCHES]
        self.cpu_rate = cpu_step_rate(layers[0].kind.precision, hardware)
        self.slowed_beside_cpu = RANKS_SLOW if hardware.num_ranks > 1 else THREAD_SLOWS
        sizes: Counter[Dtype] = Counter()
        for layer in layers:
            sizes[layer.dtype] += layer.numel
        dtype = max(sizes, key=lambda name: sizes[name])
        members: list[list[LayerCost]] = [[] for _ in work.stages]
        for index, (layer, stage) in enumerate(zip(layers, place_in_stages(layers, work.stages), strict=True)):
            members[stage].append(layer_cost(index, layer, hardware, accumulation))
        self.stages: list[_StageCost] = []
        for of, its_layers in zip(work.stages, members, strict=True):
            is_compiled = compiled and bool(of.block)
            again = of.cheap.again if of.cheap else Pass()
            # Each is the last in its phase, because Python starts before the GPU has done the phase before it.
            ending = outside[0] * (len(self.stages) == len(work.stages) - 1), outside[1] * (not self.stages)
            cost = _StageCost(
                pass_seconds(of.forward, hardware, dtype, compiled=is_compiled),
                pass_seconds(of.backward, hardware, dtype, compiled=is_compiled),
                forward * weighed(of.forward, compiled=is_compiled) + own * bool(of.block) + ending[0],
                backward * weighed(of.backward, compiled=is_compiled) + ending[1],
                launch * weighed(of.forward, compiled=is_compiled, of_attention=0),
                pass_seconds(again, hardware, dtype),
                forward * weighed(again),
                of.block in captured,
                as_graph[0] + ending[0],
                as_graph[1] + ending[1],
                of.input_bytes if of.block else 0,
                tuple(its_layers),
            )
            self.stages.append(cost)
        self._blocks = [cost for cost, of in zip(self.stages, work.stages, strict=True) if of.block]
        self.layers = [layer for stage in self.stages for layer in stage.layers]
        self.num_trained = sum(layer.kind.is_trained for layer in layers)
        others = layers[0].num_ranks - 1
        meetings = (
            3 if any(layer.sums_whole(accumulation) for layer in layers) else 2
        )  # which gradients exist, sums in RAM, the norm
        self.agreeing = meetings * others * AGREE_SECONDS
        self._resources = (*RESOURCES, "link") if others else RESOURCES
        self.link = link_rate(hardware, layers[0].num_ranks)
        self.link_in_backward = exchange_rate(hardware, layers[0].num_ranks)

    def gains_by_cheap(self) -> bool:
        """Whether forward and backward of cheap blocks are faster than of recomputed ones. They are not where Python
        bounds them.
        """
        recomputed, cheap = [0.0, 0.0], [0.0, 0.0]
        for unit in self._blocks:
            recomputed[0] += unit.forward
            if unit.is_captured:
                recomputed[1] += unit.graphed_forward_launches + unit.graphed_backward_launches
                recomputed[1] -= unit.forward_launches + unit.backward_launches
            else:
                recomputed[1] += unit.forward_launches + sum(RECOMPUTED_LAUNCHES) * unit.operation_launches
            cheap[0] += unit.again
            cheap[1] += unit.again_launches + sum(CHEAP_LAUNCHES) * unit.operation_launches
        gpu = sum(unit.forward + unit.backward for unit in self.stages)
        python = sum(unit.forward_launches + unit.backward_launches for unit in self.stages)
        return max(gpu + cheap[0], python + cheap[1]) < max(gpu + recomputed[0], python + recomputed[1])

    def python_share(self) -> float:
        """Python's time in forward and backward of eager blocks by the GPU's, if nothing is recomputed."""
        gpu = sum(unit.forward + unit.backward for unit in self.stages)
        python = sum(unit.forward_launches + unit.backward_launches for unit in self.stages)
        return python / max(gpu, 1e-9)

    def on_large_gpu(self) -> float:
        """Seconds of a step with everything in VRAM and nothing recomputed."""
        return self.seconds([IN_VRAM] * len(self.layers)).step

    def gpu_share(self) -> float:
        """Fraction of the layers with states in RAM that the GPU should step to finish together with the CPU.

        While the CPU steps its layers, the bus copies their new weights and the states of the GPU's layers.
        """
        weights = sum(layer.stepped_bytes for layer in self.layers)
        states = sum(layer.state_bytes for layer in self.layers)
        h2d, _ = both_ways(states, states, self._hardware)
        cpu = max(0.0, sum(layer.cpu_step for layer in self.layers) - weights / h2d)
        return cpu / (cpu + states / h2d) if cpu else 0.0

    def seconds(self, placements: Sequence[Placement]) -> Seconds:
        others = self._accumulation - 1
        first, last = self._forward(placements, updates=True), self._backward(placements, is_last=True)
        update, backward = max(first.free.values()) + self.agreeing, max(last.free.values())
        busy = {name: first.busy[name] + last.busy[name] for name in self._resources}
        if others:
            forward, before = self._forward(placements, updates=False), self._backward(placements, is_last=False)
            between = max(forward.free.values())
            adding = before.free.pop("CPU step", 0.0)  # gradients are still being added during the next forward
            update += others * between
            backward += others * max(*before.free.values(), adding - between)
            for name in self._resources:
                busy[name] += others * (forward.busy[name] + before.busy[name])
        return Seconds(update + backward, update, backward, busy)

    def rates(self, placements: Sequence[Placement]) -> dict[str, float]:
        """Mean bytes per second of "H2D", "D2H" and "CPU step" while they work, if they do, in a step with these
        placements.
        """
        alone, beside = self._bus_in_update(placements, False), self._bus_in_update(placements, True)
        others = self._accumulation - 1
        passes = [
            (1, beside, self._forward(placements, updates=True)),
            (1, self._bus(placements, is_last=True), self._backward(placements, is_last=True)),
        ]
        if others:
            passes.append((others, alone, self._forward(placements, updates=False)))
            before = self._bus(placements, is_last=False), self._backward(placements, is_last=False)
            passes.append((others, *before))
        found: dict[str, float] = {}
        for name in ("H2D", "D2H"):
            busy = [(number * queues.busy[name], getattr(bus, name.lower())) for number, bus, queues in passes]
            if seconds := sum(each for each, _ in busy):
                found[name] = sum(each * rate for each, rate in busy) / seconds
        stepped = [layer for layer in self.layers if placements[layer.index].step == "cpu"]
        if stepped:
            seconds = beside.slows_cores * sum(layer.cpu_step for layer in stepped)
            found["CPU step"] = sum(layer.step_bytes for layer in stepped) / seconds
        return found

    def _forward(self, placements: Sequence[Placement], *, updates: bool) -> Queues:
        queues = Queues(self._hardware.num_cores)
        ring, bus = Ring(queues), self._bus_in_update(placements, updates)
        if updates:
            norm = 0.0
            for layer in self.layers:
                norm += layer.norm_in_ram if placements[layer.index].gradients == "ram" else 0.0
            queues.take("CPU step", norm, 0.0)
            queues.slowing = self._slowing(placements, bus, norm)
        before = resident = 0.0
        ends: list[float] = []
        for unit in self.stages:
            ready = on_gpu = cpu_done = gathered = 0.0
            recomputes, offloads, is_cheap, num_streamed, copied = False, False, False, 0, 0.0
            for layer in unit.layers:
                where, stepped, on_device = placements[layer.index], 0.0, 0.0
                if where.activations == "cheap":
                    is_cheap = True
                elif where.activations != "keep":
                    recomputes, offloads = True, where.activations == "offload"
                if updates and where.step == "cpu":
                    stepped = self._stepped(queues, layer, where, bus)
                    cpu_done = max(cpu_done, stepped)
                elif updates and where.states == "ram":
                    on_device, stepped = self._streamed(queues, ring, layer, where, bus)
                    ready = max(ready, on_device)
                elif updates:
                    on_gpu += layer.gpu_step
                    resident += layer.gpu_step
                    on_device = resident  # these steps precede all other work on the GPU
                in_ram, free = layer.is_streamed(where), 0.0
                fetched = (layer.weight_bytes if in_ram else layer.stepped_bytes) / bus.h2d
                if in_ram:
                    num_streamed += 1
                    copied += layer.copied
                    is_new = updates and where.states != "vram"
                    if not is_new and len(ends) < NUM_WEIGHT_BUFFERS:  # still in VRAM since backward
                        continue
                    free = max(before, ends[-NUM_WEIGHT_BUFFERS] if len(ends) >= NUM_WEIGHT_BUFFERS else 0.0)
                elif not (updates and where.step == "cpu"):
                    if updates and layer.gather:
                        gathered = max(gathered, queues.take("link", layer.gather, on_device))
                    continue
                arrived = queues.take("H2D", fetched, max(stepped, free))
                ring.give_way(arrived, fetched)
                ready = max(ready, arrived)
                if not in_ram and layer.gather:
                    gathered = max(gathered, queues.take("link", layer.gather, arrived))
            before = max(queues.free["GPU"], ready, gathered)
            queues.take("GPU", on_gpu, ready, "GPU step")
            if unit.is_captured and not is_cheap:
                queues.take("GPU", unit.forward + copied, max(ready, gathered), "forward")
                launches = unit.graphed_forward_launches
            else:
                queues.take("GPU", unit.forward, max(ready, gathered), "forward")
                launches = unit.forward_launches
                launches += recomputes * RECOMPUTED_LAUNCHES[0] * unit.operation_launches
                launches += is_cheap * CHEAP_LAUNCHES[0] * unit.operation_launches
            launches += num_streamed * STREAMED_LAUNCHES[0] * self._hardware.launch_seconds
            end = queues.launched(launches, cpu_done)
            if num_streamed:
                ends.append(end)
            if offloads:
                queues.take("D2H", unit.input_bytes / bus.d2h, before)
                ring.sent(unit.input_bytes / bus.d2h)
        return queues

    def _slowing(self, placements: Sequence[Placement], bus: _Bus, norm: float) -> tuple[tuple[float, float], ...]:
        """(end, factor) of Python's slowdown in forward by the update's threads, the earlier end first.

        Assumes that the threads never pause from the start, as if they waited for no disk and no other copy.
        """
        if self._hardware.num_cores <= FEW_CORES:  # Python and the CPU step alternate already
            return ()
        stepped, there, back = norm, 0.0, 0.0
        on_cpu = through_vram = 0.0
        for layer in self.layers:
            where = placements[layer.index]
            if where.step == "cpu":
                on_cpu, stepped = self.slowed_beside_cpu, stepped + bus.slows_cores * layer.cpu_step
            elif where.states == "ram":
                h2d_bytes, d2h_bytes = layer.transfer_bytes(where)
                through_vram, there, back = THREAD_SLOWS, there + h2d_bytes / bus.h2d, back + d2h_bytes / bus.d2h
        streamed, both = max(there, back), 1.0 + on_cpu + through_vram
        if stepped < streamed:
            return (stepped, both), (streamed, 1.0 + through_vram)
        return (streamed, both), (stepped, 1.0 + on_cpu)

    def _stepped(self, queues: Queues, layer: LayerCost, where: Placement, bus: _Bus) -> float:
        """When the CPU has stepped the layer. States on disk are read before the step and written after it."""
        read = 0.0
        if where.states == "disk":
            speeds = (self._hardware.disk_read_bytes_per_second, self._hardware.disk_write_bytes_per_second)
            read = queues.take("disk", DISK_OVERLAP * sum(layer.state_bytes / speed for speed in speeds), 0.0)
        return queues.take("CPU step", bus.slows_cores * layer.cpu_step, read)

    def _streamed(
        self, queues: Queues, ring: Ring, layer: LayerCost, where: Placement, bus: _Bus
    ) -> tuple[float, float]:
        h2d_bytes, d2h_bytes = layer.transfer_bytes(where)
        launches = CHUNK_LAUNCHES * layer.num_chunks * self._hardware.launch_seconds
        queues.take(queues.python, launches, 0.0, "launches")
        queues.take("GPU", layer.gpu_step, 0.0, "GPU step")
        return ring.step(h2d_bytes / bus.h2d, d2h_bytes / bus.d2h, layer.gpu_step, layer.num_chunks)

    def _bus_in_update(self, placements: Sequence[Placement], updates: bool) -> _Bus:
        """The bus during forward. Streamed states share it with the other copies, and DRAM with the CPU step, which
        slows both.
        """
        machine = self._hardware
        streams = any(where.step == "gpu" and where.states == "ram" for where in placements)
        if not updates or not (streams or machine.link_is_bus):
            return _Bus(machine.h2d_bytes_per_second, machine.d2h_bytes_per_second)
        h2d_bytes = d2h_bytes = cpu_seconds = linked = 0.0
        for unit in self.stages:
            for layer in unit.layers:
                where = placements[layer.index]
                if where.step == "cpu":
                    cpu_seconds += layer.cpu_step
                elif where.states == "ram":
                    there, back = layer.transfer_bytes(where)
                    h2d_bytes, d2h_bytes = h2d_bytes + there, d2h_bytes + back
                if layer.is_streamed(where):
                    h2d_bytes += layer.weight_bytes
                else:
                    h2d_bytes += layer.stepped_bytes if where.step == "cpu" else 0
                    linked += layer.gather
            if any(placements[layer.index].activations == "offload" for layer in unit.layers):
                d2h_bytes += unit.input_bytes
        bus = _Bus(machine.h2d_bytes_per_second, machine.d2h_bytes_per_second)
        if streams:
            h2d, d2h = both_ways(h2d_bytes, d2h_bytes, machine)
            bus_seconds = max(h2d_bytes / h2d, d2h_bytes / d2h)
            cores, slows = dram_slowdowns(cpu_seconds, self.cpu_rate, bus_seconds, h2d_bytes + d2h_bytes, machine)
            bus = _Bus(h2d / slows, d2h / slows, cores)
        return self._beside_link(bus, linked * self.link, h2d_bytes, d2h_bytes)

    def _backward(self, placements: Sequence[Placement], *, is_last: bool) -> Queues:
        queues, adds = Queues(self._hardware.num_cores), self._accumulation > 1
        python = queues.python
        bus = self._bus(placements, is_last=is_last)
        h2d, d2h = bus.h2d, bus.d2h
        before, drained, num_streamed = 0.0, 0.0, 0
        ends: list[float] = []
        sent: list[float] = []
        through_ram = [layer.sent_bytes for layer in self.layers if placements[layer.index].gradients == "ram"]
        staging = Staging(NUM_STAGING * max(through_ram, default=0))
        for unit in reversed(self.stages):
            ready = sent[-NUM_GRADIENT_BUCKETS] if len(sent) >= NUM_GRADIENT_BUCKETS else 0.0
            fetched, num_layers, seconds, copied = 0, 0, unit.backward, 0.0
            recomputes = offloads = is_cheap = False
            for layer in unit.layers:
                where = placements[layer.index]
                if layer.is_streamed(where):
                    fetched, num_layers = fetched + layer.weight_bytes, num_layers + 1
                    copied += layer.copied
                if where.activations == "cheap":
                    is_cheap = True
                elif where.activations != "keep":
                    recomputes, offloads = True, where.activations == "offload"
                seconds += layer.bucket
                if (adds or layer.exchange) if where.gradients == "vram" else (layer.exchange and not adds):
                    seconds += layer.adding_in_vram
                if is_last and where.gradients == "vram":
                    seconds += layer.summing_in_vram
            if fetched:
                num_streamed += 1
                if num_streamed > NUM_WEIGHT_BUFFERS:  # the first buffers still hold weights since forward
                    ready = max(ready, queues.take("H2D", fetched / h2d, max(before, ends[-NUM_WEIGHT_BUFFERS])))
            if offloads:
                ready = max(ready, queues.take("H2D", unit.input_bytes / h2d, before))
            before = max(queues.free["GPU"], ready)
            as_graph = unit.is_captured and not is_cheap
            launches = unit.graphed_backward_launches if as_graph else unit.backward_launches
            launches += num_layers * STREAMED_LAUNCHES[1] * self._hardware.launch_seconds
            if as_graph:
                seconds += copied
            if recomputes:
                seconds += unit.forward
            if recomputes and not as_graph:
                launches += unit.forward_launches
                launches += RECOMPUTED_LAUNCHES[1] * unit.operation_launches
            if is_cheap:
                seconds += unit.again
                launches += unit.again_launches
                launches += CHEAP_LAUNCHES[1] * unit.operation_launches
            queues.take("GPU", seconds, ready, "backward")
            end = queues.launched(launches, 0.0)
            if fetched:
                ends.append(end)
            for layer in unit.layers:
                in_ram, complete = placements[layer.index].gradients == "ram", end
                if is_last and layer.sums_exchange and not in_ram:
                    queues.take("link", layer.sums_exchange, end)
                if layer.exchange:  # a received gradient, or its sum, leaves the device before the next one arrives
                    complete = queues.take("link", layer.exchange, max(end, drained) if adds else end)
                    sent.append(complete)
                    if in_ram and not adds:
                        complete = queues.free["link"] = max(complete, drained)
                if in_ram:
                    if adds:  # Python waits for room
                        queues.free[python] = max(queues.free[python], staging.take(layer.sent_bytes))
                    drained = queues.take("D2H", layer.sent_bytes / d2h, max(complete, queues.free[python]))
                    if not layer.exchange:
                        sent.append(drained)
                    if adds:
                        staging.added(queues.take("CPU step", layer.adding_in_ram, drained), layer.sent_bytes)
        if is_last:
            done = queues.launched(LAYER_LAUNCHES * self.num_trained * self._hardware.launch_seconds, 0.0)
            done = max(done, queues.free["link"])
            for layer in self.layers:  # gradients that stayed in VRAM until now, of layers that the CPU steps
                where = placements[layer.index]
                if where.step == "cpu" and where.gradients == "vram":
                    queues.take("D2H", layer.gradient_bytes / d2h, done)
        return queues

    def _bus(self, placements: Sequence[Placement], *, is_last: bool) -> _Bus:
        machine = self._hardware
        h2d, d2h = machine.h2d_bytes_per_second, machine.d2h_bytes_per_second
        fetches = any(layer.is_streamed(placements[layer.index]) for layer in self.layers)
        fetches |= any(where.activations == "offload" for where in placements)
        sends = any(where.gradients == "ram" for where in placements)
        share = min(1.0, machine.both_bytes_per_second / (h2d + d2h)) if fetches and sends else 1.0
        bus = _Bus(h2d * share, d2h * share)
        if not machine.link_is_bus:
            return bus
        fetched = sent = linked = 0.0
        for unit in self.stages:
            for layer in unit.layers:
                where = placements[layer.index]
                fetched += layer.weight_bytes if layer.is_streamed(where) else 0
                sent += layer.sent_bytes if where.gradients == "ram" else 0
                linked += layer.exchange + (layer.sums_exchange if is_last and where.gradients == "vram" else 0.0)
            if any(placements[layer.index].activations == "offload" for layer in unit.layers):
                fetched += unit.input_bytes
        return self._beside_link(bus, linked * self.link_in_backward, fetched, sent)

    def _beside_link(self, bus: _Bus, num_bytes: float, h2d_bytes: float, d2h_bytes: float) -> _Bus:
        """The rest of the bus for these copies, if the link is the bus and carries `num_bytes`."""
        if not self._hardware.link_is_bus:
            return bus
        h2d, d2h = (own / (own + num_bytes) if own else 1.0 for own in (h2d_bytes, d2h_bytes))
        return _Bus(bus.h2d * h2d, bus.d2h * d2h, bus.slows_cores)


def step_range(
    layers: Sequence[LayerShape],
    work: MicroBatch,
    hardware: Hardware,
    accumulation: int,
    placements: Sequence[Placement],
    *,
    compiled: bool = False,
    graphed: bool = False,
) -> tuple[float, float] | None:
    """Seconds of a step with the smallest and with the largest time of Python; None unless Python is the busiest
    resource of the step. A range wider than `WIDEST_RANGE` is narrowed towards its middle and keeps the planned step.
    """

    def seconds(factor: float) -> Seconds:
        machine = replace(hardware, launch_seconds=factor * hardware.launch_seconds)
        return StepModel(layers, work, machine, accumulation, compiled=compiled, graphed=graphed).seconds(placements)

    planned = seconds(1.0)
    busy = dict(planned.busy)
    gpu, launches = sum(busy.pop(name) for name in ("forward", "backward", "GPU step")), busy.pop("launches")
    if launches <= max(gpu, *busy.values()):
        return None
    least, most = seconds(1 / PYTHON_VARIES).step, seconds(PYTHON_VARIES * work.python_spread).step
    too_wide = max(1.0, most / least / WIDEST_RANGE)
    least = min(planned.step, max(planned.step / WIDEST_RANGE, least * too_wide**0.5))
    return least, max(planned.step, min(most, least * WIDEST_RANGE))


def place_in_stages(layers: Sequence[LayerShape], stages: Sequence[Stage]) -> list[int]:
    """Index of each flat layer's stage: the first use of its block.

    A layer outside the blocks belongs to the stage before the next block, or after the last block to the last stage.
    """
    of_block: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.block:
            of_block.setdefault(stage.block, index)
    found: list[int] = []
    following = len(stages) - 1
    for layer in reversed(layers):
        if layer.name in of_block:
            at = following = of_block[layer.name]
        else:
            at = following if not stages[following].block else max(0, following - 1)
        found.append(at)
    return found[::-1]


def weighed(work: Pass, *, compiled: bool = False, of_attention: int = ATTENTION_LAUNCHES) -> float:
    """Operations of a pass weighted by Python's time: less for compiled ones, more for our attention."""
    return work.num_operations * (COMPILED_LAUNCHES if compiled else 1.0) + work.num_attention * of_attention


def pass_seconds(work: Pass, hardware: Hardware, dtype: str, *, compiled: bool = False) -> float:
    """Seconds of a pass on the GPU.

    A matmul's memory time is added to its computing time, because the two overlap only in large, square matmuls.
    """
    flops: float = getattr(hardware, f"{dtype}_flops_per_second")
    memory = hardware.vram_bytes_per_second
    attention = work.fused_attention_flops / ATTENTION_EFFICIENCY
    attention += (work.sdpa_flops + SDPA_KEYS * work.sdpa_flops_of_a_key) / SDPA_EFFICIENCY
    matmuls = (work.flops + attention) / flops + work.matmul_bytes / memory
    rest = work.moved_bytes * (COMPILED_TRAFFIC if compiled else 1.0) / (memory * ELEMENTWISE_EFFICIENCY)
    return matmuls + rest + work.num_operations * KERNEL_SECONDS


def cpu_step_rate(precision: Precision, hardware: Hardware) -> float:
    """Bytes per second of the CPU step in training, while no states are streamed to the GPU."""
    rate: float = getattr(hardware, CPU_STEP_RATES[precision])
    return CPU_EFFICIENCY[precision] * rate


@dataclass(frozen=True)
class LayerCost:
    """Bytes moved for one flat layer, and seconds of the work on them."""

    index: int
    weight_bytes: int
    stepped_bytes: int
    """Working weights that this rank steps; 0 for a frozen layer."""
    sent_bytes: int
    """Bytes copied to RAM for one micro-batch if the gradient is in RAM."""
    gradient_bytes: int
    state_bytes: int
    step_bytes: int
    num_chunks: int
    cpu_step: float
    gpu_step: float
    bucket: float
    """Copying a gradient to the bucket, and reading it for the norm."""
    adding_in_vram: float
    """Adding a gradient to the fp32 sum in VRAM, which is read and written."""
    added_bytes: int
    """DRAM traffic of adding a gradient to the fp32 sum in RAM, with the copy's write."""
    adding_in_ram: float
    norm_in_ram: float
    """Computing the norm of a sum that is only in RAM, after adding up all ranks' sums if they are exchanged once a
    step.
    """
    exchange: float
    """Receiving all ranks' gradients of one micro-batch; 0 with world size 1, and if sums are exchanged."""
    sums_exchange: float
    """Receiving all ranks' sums of a window in VRAM; 0 if each micro-batch is exchanged."""
    summing_in_vram: float
    """Adding up all ranks' sums in VRAM."""
    looked_up: bool
    """Whether the layer holds frozen embeddings, which do not stream."""
    copied: float
    """Copying streamed weights to the memory that graphs read."""
    gather: float
    """Receiving the new weights that the other ranks have stepped."""

    def is_streamed(self, where: Placement) -> bool:
        """Whether the weights are fetched for each pass. The rows that are looked up in RAM are too few to count."""
        return where.weights == "ram" and not self.looked_up

    def transfer_bytes(self, where: Placement) -> tuple[int, int]:
        """Bytes to VRAM and back if the GPU steps the layer and its states are in RAM.

        Weights and gradient count if they are in RAM too. The gradient is not copied back.
        """
        back = self.state_bytes + (self.stepped_bytes if where.weights == "ram" else 0)
        return back + (self.gradient_bytes if where.gradients == "ram" else 0), back


def layer_cost(index: int, layer: LayerShape, hardware: Hardware, accumulation: int) -> LayerCost:
    """The costs of a layer, which are the same for every placement."""
    vram = hardware.vram_bytes_per_second * STEP_EFFICIENCY
    copied = 2 * layer.weight_bytes() / vram
    if not layer.kind.is_trained:
        no_cost: dict[str, Any] = dict.fromkeys((field.name for field in fields(LayerCost)), 0)
        no_cost |= {"index": index, "weight_bytes": layer.weight_bytes(), "num_chunks": 1}
        return LayerCost(**no_cost | {"looked_up": layer.looked_up, "copied": copied})
    dram = hardware.cpu_adamw_bytes_per_second
    gradient, bucket, received = (
        layer.gradient_bytes(accumulation),
        layer.bucket_bytes(),
        layer.staged_bytes(accumulation),
    )
    traffic, own, ranks = layer.step_bytes(accumulation), layer.own_numel, layer.num_ranks
    sums = layer.sums_whole(accumulation)
    added = layer.numel if sums else own * ranks  # elements added by one micro-batch
    orthogonalising = sum(newton_schulz_seconds(matrix, hardware) for matrix in layer.matrices) / ranks
    of_all = layer.received_bytes(accumulation)
    exchange = of_all // ranks * (ranks - 1) / exchange_rate(hardware, ranks) + EXCHANGE_SECONDS if ranks > 1 else 0.0
    if layer.matrices and ranks > 1:
        orthogonalising += layer.update_bytes() / link_rate(hardware, ranks) + 2 * EXCHANGE_SECONDS
    gathered = layer.weight_bytes() - layer.stepped_bytes()
    norm = gradient / (dram * NORM_EFFICIENCY) if accumulation > 1 else 0.0
    if sums:  # added to rank 0's sum, which the other ranks then copy
        norm += 4 * own * (3 * (ranks - 1) + 2) / (dram * ADD_EFFICIENCY)
    return LayerCost(
        index=index,
        weight_bytes=layer.weight_bytes(),
        stepped_bytes=layer.stepped_bytes(),
        sent_bytes=gradient if ranks > 1 and accumulation == 1 else received,
        gradient_bytes=gradient,
        state_bytes=sum(layer.state_bytes().values()),
        step_bytes=traffic,
        num_chunks=layer.num_chunks(),
        cpu_step=traffic / cpu_step_rate(layer.kind.precision, hardware)
        + orthogonalising
        + STEP_LAUNCHES * hardware.launch_seconds,
        gpu_step=traffic / vram + orthogonalising + KERNEL_SECONDS,
        bucket=3 * bucket / vram,
        adding_in_vram=(8 * added + received) / vram,
        added_bytes=8 * added + 2 * received,
        adding_in_ram=(8 * added + 2 * received) / (dram * ADD_EFFICIENCY),
        norm_in_ram=norm,
        exchange=0.0 if sums else exchange,
        sums_exchange=exchange if sums else 0.0,
        summing_in_vram=(8 * own * ranks + of_all) / vram if sums else 0.0,
        looked_up=False,
        copied=copied,
        gather=gathered / link_rate(hardware, ranks) + EXCHANGE_SECONDS if ranks > 1 else 0.0,
    )


def newton_schulz_seconds(matrix: Matrix, hardware: Hardware) -> float:
    """Seconds of orthogonalizing the update of a matrix on the GPU."""
    products = matrix.flops / (hardware.bf16_flops_per_second * PRODUCT_EFFICIENCY) + STEPS * PRODUCTS * PRODUCT_SECONDS
    return MATRIX_SECONDS + products + matrix.traffic / (hardware.vram_bytes_per_second * STEP_EFFICIENCY)


def exchange_rate(hardware: Hardware, num_ranks: int) -> float:
    """`link_rate` of an exchange of gradients beside backward."""
    return link_rate(hardware, num_ranks, FEW_EXCHANGE_EFFICIENCY if hardware.has_few_ctas else EXCHANGE_EFFICIENCY)


def link_rate(hardware: Hardware, num_ranks: int, efficiency: float = 1.0) -> float:
    """Bytes per second that a rank receives, in equal parts from all other ranks.

    Args:
        efficiency: fraction of its rate that the link within a host reaches.
    """
    link = efficiency * (hardware.link_bytes_per_second or hardware.h2d_bytes_per_second)
    network = hardware.network_bytes_per_second
    elsewhere = num_ranks - hardware.num_ranks
    if elsewhere <= 0 or not network:
        return link
    return (num_ranks - 1) / ((hardware.num_ranks - 1) / link + elsewhere / network)


def both_ways(h2d_bytes: float, d2h_bytes: float, hardware: Hardware) -> tuple[float, float]:
    """Mean bytes per second of H2D and D2H for so many bytes in each direction.

    While both directions are in use they share `both_bytes_per_second`. The rest of the longer copy has its full rate.
    """
    h2d, d2h = hardware.h2d_bytes_per_second, hardware.d2h_bytes_per_second
    share = min(1.0, hardware.both_bytes_per_second / (h2d + d2h))
    together = min(h2d_bytes / (h2d * share), d2h_bytes / (d2h * share))

    def mean(num_bytes: float, rate: float) -> float:
        return num_bytes / (together + (num_bytes - together * rate * share) / rate) if num_bytes else rate

    return mean(h2d_bytes, h2d), mean(d2h_bytes, d2h)


def dram_slowdowns(
    cpu_seconds: float, rate: float, bus_seconds: float, num_bytes: float, hardware: Hardware
) -> tuple[float, float]:
    """Slowdown factors of the CPU step and of concurrent copies, because they share the DRAM.

    While both run, they share its bandwidth in proportion to their rates alone: `rate` bytes per second for
    `cpu_seconds`, and `num_bytes` of copies in both directions in `bus_seconds`.
    """
    if not cpu_seconds or not bus_seconds:
        return 1.0, 1.0
    slower = max(1.0, (rate + num_bytes / bus_seconds) / hardware.cpu_and_bus_bytes_per_second)

    def mean(own: float, other: float) -> float:
        return min(slower, 1 + (slower - 1) * other / own)

    return mean(cpu_seconds, bus_seconds), mean(bus_seconds, cpu_seconds)


class Queues:
    """Simulates the resources of a step: GPU, CPU step, Python, copies ("H2D", "D2H"), "disk" and "link" between ranks.

    Work on one resource runs in the order of its `take` calls. `free`: when each resource is free again; `busy`: its
    seconds of work by purpose.

    Attributes:
        python: the resource that Python occupies.
        slowing: (end, factor) of consecutive periods with a slower Python.
    """

    def __init__(self, num_cores: int) -> None:
        self.python = "CPU step" if num_cores <= FEW_CORES else "launches"
        self.slowing: tuple[tuple[float, float], ...] = ()
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)

    def take(self, resource: str, seconds: float, ready: float, purpose: str | None = None) -> float:
        began = self.free[resource]
        end = self.free[resource] = (began if began > ready else ready) + seconds
        self.busy[purpose or resource] += seconds
        return end

    def launched(self, seconds: float, ready: float) -> float:
        """Queue the Python launches of the GPU's newest work, which cannot end before its launches. Returns the end of
        that work.
        """
        took = self._slowed(seconds, max(self.free[self.python], ready))
        end = self.free["GPU"] = max(self.free["GPU"], self.take(self.python, took, ready, "launches"))
        return end

    def _slowed(self, seconds: float, began: float) -> float:
        took = 0.0
        for until, factor in self.slowing:
            room = until - (began + took)
            if room > 0.0:
                if factor * seconds <= room:
                    return took + factor * seconds
                took += room
                seconds -= room / factor
        return took + seconds


class Staging:
    """The ring in RAM in which gradients wait to be added."""

    def __init__(self, num_bytes: int) -> None:
        self._free = num_bytes
        self._added: deque[tuple[float, int]] = deque()
        """(when a gradient is added, its bytes), oldest first."""

    def take(self, num_bytes: int) -> float:
        """Reserve bytes of the ring. Returns when they are free."""
        free = 0.0
        while self._free < num_bytes:
            free, freed = self._added.popleft()
            self._free += freed
        self._free -= num_bytes
        return free

    def added(self, end: float, num_bytes: int) -> None:
        self._added.append((end, num_bytes))


class Ring:
    """States that pass through VRAM in chunks, from the start of the update.

    Each chunk has an H2D copy, a GPU step and a D2H copy, in this order. The H2D copy also waits for a free buffer and
    for the step of the previous chunk. Other copies to VRAM have priority: the ring waits for a running copy, but not
    for a copy that cannot start yet.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._h2d = self._d2h = 0.0
        self._others: list[tuple[float, float]] = []

    def give_way(self, end: float, seconds: float) -> None:
        heappush(self._others, (end - seconds, seconds))

    def sent(self, seconds: float) -> None:
        self._d2h += seconds

    def step(self, h2d: float, d2h: float, kernel: float, num_chunks: int) -> tuple[float, float]:
        """Stream a layer whose copies and step take these seconds in total.

        Returns when the layer is stepped, and when its states are back in RAM.
        """
        began = self._h2d
        stepped = began + h2d + kernel
        while self._others and self._others[0][0] <= stepped:
            stepped += heappop(self._others)[1]
        back = max(max(self._d2h, began + (h2d + kernel) / num_chunks) + d2h, stepped + d2h / num_chunks)
        self._h2d = max(stepped, back - (NUM_STEP_BUFFERS - 1) * d2h / num_chunks)
        self._d2h = back
        self._queues.busy["H2D"] += h2d
        self._queues.busy["D2H"] += d2h
        return stepped, back
