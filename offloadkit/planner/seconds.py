"""Seconds of a step: what each processor and each direction of the bus does, layer by layer, and who waits for whom.

Two phases follow each other, because clipping needs the whole norm before the first layer is stepped
(docs/design.md, section 2): forward beside the last step's update (CPU steps and uploads, and states streamed to the
GPU and back, each in forward order; forward waits layer by layer), and backward beside the gradients' way to RAM. Each
resource works through its queue; a layer starts where its inputs are there and a buffer is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from offloadkit.config import Placement, Precision
from offloadkit.hardware import Hardware
from offloadkit.planner.layout import (
    NUM_GRADIENT_BUCKETS,
    NUM_STAGING,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    STEP_CHUNK,
    LayerShape,
)
from offloadkit.planner.work import MicroBatch, Pass, Stage

ELEMENTWISE_EFFICIENCY = 0.7
"""Share of the VRAM's measured rate that a model's operations reach which are no products (reductions, broadcasts,
strides)."""
ATTENTION_EFFICIENCY = 0.4
"""Share of the measured rate of products that our kernels of T5's attention reach, beside their reading and writing."""
COMPILED_TRAFFIC = 0.6
"""What a compiled block's other operations read and write of what they do one by one."""
STEP_EFFICIENCY = 0.85
"""The same for the AdamW kernel on the GPU and the copies and norms of gradients."""
KERNEL_SECONDS = 4e-6
"""Of a kernel that has nothing to do."""
CPU_EFFICIENCY: dict[Precision, float] = {"exact": 0.97, "compact": 0.91, "tiny": 0.87}
"""Share of the CPU step's measured rate that is left while copies and Python go on beside it; the more a precision is
bound by arithmetic, the less."""
ADD_EFFICIENCY = 0.75
"""Share of the CPU step's rate at which gradients are added in RAM while others arrive."""
NORM_EFFICIENCY = 0.48
"""Share of the CPU step's rate at which the norm of gradients in RAM is taken (in fp64)."""
STEP_LAUNCHES = 50
"""What Python takes for a flat layer whose update the CPU computes, as a multiple of the time in which bare kernels can
be started."""
CHUNK_LAUNCHES = 25
"""The same for a chunk of states that the GPU steps: its copies, kernel and events."""


def pass_seconds(work: Pass, hardware: Hardware, dtype: str, *, compiled: bool = False) -> float:
    """Time on the GPU. A product's reading and writing is taken not to hide behind its computing: it does so only where
    the product is large and square."""
    flops: float = getattr(hardware, f"{dtype}_flops_per_second")
    memory = hardware.vram_bytes_per_second
    matmuls = (work.flops + work.fused_attention_flops / ATTENTION_EFFICIENCY) / flops + work.matmul_bytes / memory
    rest = work.moved_bytes * (COMPILED_TRAFFIC if compiled else 1.0) / (memory * ELEMENTWISE_EFFICIENCY)
    return matmuls + rest + work.num_operations * KERNEL_SECONDS


def cpu_step_rate(precision: Precision, hardware: Hardware) -> float:
    """Bytes a second of the CPU's step beside the rest of a training, but for states streamed to the GPU."""
    rates = {
        "exact": hardware.cpu_adamw_bytes_per_second,
        "compact": hardware.cpu_compact_bytes_per_second,
        "tiny": hardware.cpu_tiny_bytes_per_second,
    }
    return CPU_EFFICIENCY[precision] * rates[precision]


@dataclass(frozen=True)
class LayerCost:
    """One flat layer: bytes that move, and seconds of what is done with them."""

    index: int
    weight_bytes: int
    bucket_bytes: int
    gradient_bytes: int
    state_bytes: int
    num_chunks: int
    """Pieces in which its states pass through VRAM."""
    cpu_step: float
    gpu_step: float
    bucket: float
    """A gradient is copied to the bucket and read for the norm."""
    adding_in_vram: float
    """Into the fp32 sum, which is read and written."""
    adding_in_ram: float
    """The same; the gradient was written there first."""
    norm_in_ram: float
    """Of the sum, which the GPU has never seen."""

    def passing(self, where: Placement) -> tuple[int, int]:
        """Bytes to VRAM and back where the GPU steps it and its states are in RAM: of weights and gradient what is
        there too; the gradient does not come back."""
        back = self.state_bytes + (self.weight_bytes if where.weights == "ram" else 0)
        return back + (self.gradient_bytes if where.gradients == "ram" else 0), back


def layer_cost(index: int, layer: LayerShape, hardware: Hardware, accumulation: int) -> LayerCost:
    """The costs of a layer; what they do not depend on is where it is."""
    vram, dram = hardware.vram_bytes_per_second * STEP_EFFICIENCY, hardware.cpu_adamw_bytes_per_second
    gradient, bucket = layer.gradient_bytes(accumulation), layer.bucket_bytes()
    traffic = layer.step_bytes(accumulation)
    num_chunks = -(-layer.numel // STEP_CHUNK)
    return LayerCost(
        index=index,
        weight_bytes=layer.weight_bytes(),
        bucket_bytes=bucket,
        gradient_bytes=gradient,
        state_bytes=sum(layer.state_bytes().values()),
        num_chunks=num_chunks,
        cpu_step=traffic / cpu_step_rate(layer.precision, hardware) + STEP_LAUNCHES * hardware.launch_seconds,
        gpu_step=traffic / vram + KERNEL_SECONDS,
        bucket=3 * bucket / vram,
        adding_in_vram=(8 * layer.numel + bucket) / vram,
        adding_in_ram=(8 * layer.numel + 2 * bucket) / (dram * ADD_EFFICIENCY),
        norm_in_ram=gradient / (dram * NORM_EFFICIENCY) if accumulation > 1 else 0.0,
    )


def both_ways(h2d_bytes: float, d2h_bytes: float, hardware: Hardware) -> tuple[float, float]:
    """Mean bytes a second of H2D and D2H where so many bytes go each way: as long as both go on they share
    `both_bytes_per_second`, and what is left of the longer one goes alone."""
    h2d, d2h = hardware.h2d_bytes_per_second, hardware.d2h_bytes_per_second
    share = min(1.0, hardware.both_bytes_per_second / (h2d + d2h))
    together = min(h2d_bytes / (h2d * share), d2h_bytes / (d2h * share))

    def mean(num_bytes: float, rate: float) -> float:
        return num_bytes / (together + (num_bytes - together * rate * share) / rate) if num_bytes else rate

    return mean(h2d_bytes, h2d), mean(d2h_bytes, d2h)


def times_slower(
    cpu_seconds: float, rate: float, bus_seconds: float, num_bytes: float, hardware: Hardware
) -> tuple[float, float]:
    """How many times longer the CPU's step, and the copies beside it, take because DRAM serves both, which share what
    it gives by what they ask for, as long as both go on.

    Args:
        cpu_seconds: of the step alone, at `rate` bytes a second.
        bus_seconds, num_bytes: of the copies alone, both directions together.
    """
    if not cpu_seconds or not bus_seconds:
        return 1.0, 1.0
    slower = max(1.0, (rate + num_bytes / bus_seconds) / hardware.cpu_and_bus_bytes_per_second)

    def mean(own: float, other: float) -> float:
        return min(slower, 1 + (slower - 1) * other / own)

    return mean(cpu_seconds, bus_seconds), mean(bus_seconds, cpu_seconds)


FEW_CORES = 2
"""With no more than these the CPU's step takes them from Python, which starts the GPU's operations."""


class Queues:
    """When each resource is free again, and how long it has worked for what."""

    def __init__(self, num_cores: int) -> None:
        self._launches = "CPU step" if num_cores <= FEW_CORES else "launches"
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)

    def take(self, resource: str, seconds: float, ready: float, purpose: str | None = None) -> float:
        """Work that can start at `ready`; the time of its end."""
        began = self.free[resource]
        end = self.free[resource] = (began if began > ready else ready) + seconds
        self.busy[purpose or resource] += seconds
        return end

    def launched(self, seconds: float, ready: float) -> float:
        """Python has started what the GPU does last, which ends no sooner; when that is."""
        end = self.free["GPU"] = max(self.free["GPU"], self.take(self._launches, seconds, ready, "launches"))
        return end

    def python(self, seconds: float) -> None:
        """Python does something else."""
        self.take(self._launches, seconds, 0.0, "launches")

    def python_waits(self, until: float) -> None:
        """Nothing is started before `until`."""
        self.free[self._launches] = max(self.free[self._launches], until)

    def python_goes_on(self) -> float:
        """When Python is free again."""
        return self.free[self._launches]


class Ring:
    """States that pass through VRAM in chunks, from the beginning of the update on: H2D, the GPU's step, D2H, each as
    soon as the one before is done with the chunk and a buffer is free; an H2D after the step of the chunk before.

    Other copies to VRAM go first, each when it can: the ring's wait for them, and not for what they wait for.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._h2d = self._d2h = 0.0
        self._others: list[tuple[float, float]] = []

    def give_way(self, end: float, seconds: float) -> None:
        """A copy of so many seconds to VRAM that is over at `end`."""
        heappush(self._others, (end - seconds, seconds))

    def sent(self, seconds: float) -> None:
        """A copy of so many seconds to RAM, some time or other."""
        self._d2h += seconds

    def step(self, h2d: float, d2h: float, kernel: float, num_chunks: int) -> tuple[float, float]:
        """When a layer is stepped, and when it is back in RAM.

        Args:
            h2d, d2h, kernel: seconds of the whole layer.
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


DISK_OVERLAP = 0.8
"""Of the times that states take to be read and to be written, as much remains when both are under way."""
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 5.4, 6.0
"""What Python takes for an operation of forward and of backward, hooks of the engine included, as a multiple of the
time in which bare kernels can be started."""
COMPILED_LAUNCHES = 0.44
"""Of that, what is left for an operation of a block that is compiled, counted as if it were not."""
OWN_OPERATIONS = 8
"""As many operations, beside the one that it counts as, take Python as long as an attention by kernels of our own does
in forward, and as many in backward; in compiled blocks, which do not make it shorter, too."""
RECOMPUTED_LAUNCHES = (1.1, 2.2)
"""What it takes beside that in forward and backward, for each operation of a block's forward (an attention of ours is
one), where the block is recomputed; what recomputing takes itself comes on top."""
STREAMED_LAUNCHES = (37, 33)
"""What it takes in forward and backward, as such a multiple, for a flat layer whose weights are streamed."""
LAYER_LAUNCHES = 28
"""The same for a flat layer whose update is started.

All but the last are what launches-h200.json has of Python's time alone, the mean of T5 and Llama (of our attention
launches-attention-h200.json); steps bear them out (docs/design.md, section 5). The last was fitted to steps."""

_IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", activations="keep", step="gpu")
RESOURCES = ("forward", "backward", "GPU step", "CPU step", "H2D", "D2H", "disk", "launches")


@dataclass(frozen=True)
class Seconds:
    """A step's prediction. Resources overlap: their seconds do not add up to the step's.

    Attributes:
        busy: by resource: "forward", "backward" and "GPU step" (which share the GPU), "CPU step", "H2D", "D2H", "disk",
            "launches" (Python, starting kernels).
        update_phase, backward_phase: the two parts of `step`; forward and the update are in the first.
    """

    step: float
    update_phase: float
    backward_phase: float
    busy: Mapping[str, float]

    @property
    def exposed(self) -> float:
        """Seconds in which the GPU waits."""
        return max(0.0, self.step - sum(self.busy[name] for name in ("forward", "backward", "GPU step")))


@dataclass(frozen=True)
class _Unit:
    """A stage's seconds on the GPU and of Python, and its flat layers."""

    forward: float
    backward: float
    forward_launches: float
    backward_launches: float
    operation_launches: float
    """Of forward, an attention of ours counted as one operation."""
    input_bytes: int
    layers: tuple[LayerCost, ...]


@dataclass(frozen=True)
class _Bus:
    """Bytes a second each way, and how many times longer the CPU's step takes beside that."""

    h2d: float
    d2h: float
    slows_cores: float = 1.0


class StepModel:
    """The step of one model over micro-batches of one shape on one machine, for any placement."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch,
        hardware: Hardware,
        accumulation: int,
        *,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            compiled: the repeated blocks are.
        """
        self._hardware, self._accumulation = hardware, accumulation
        self._cpu_rate = cpu_step_rate(layers[0].precision, hardware) if layers else 1.0
        sizes = {layer.dtype: sum(other.numel for other in layers if other.dtype == layer.dtype) for layer in layers}
        dtype = max(sizes, key=lambda name: sizes[name])
        members: list[list[LayerCost]] = [[] for _ in work.stages]
        for index, (layer, stage) in enumerate(zip(layers, place_in_stages(layers, work.stages), strict=True)):
            members[stage].append(layer_cost(index, layer, hardware, accumulation))
        self._units = []
        for of, its_layers in zip(work.stages, members, strict=True):
            is_compiled = compiled and bool(of.block)
            self._units.append(
                _Unit(
                    pass_seconds(of.forward, hardware, dtype, compiled=is_compiled),
                    pass_seconds(of.backward, hardware, dtype, compiled=is_compiled),
                    self._launches(of.forward, is_compiled, OWN_OPERATIONS),
                    self._launches(of.backward, is_compiled, OWN_OPERATIONS),
                    self._launches(of.forward, is_compiled, 0),
                    of.input_bytes if of.block else 0,
                    tuple(its_layers),
                )
            )

    def _launches(self, work: Pass, is_compiled: bool, of_own: int) -> float:
        """Seconds of a bare launch for each operation, and of `of_own` more for each attention of ours."""
        operations = work.num_operations * (COMPILED_LAUNCHES if is_compiled else 1.0) + work.num_attention * of_own
        return operations * self._hardware.launch_seconds

    def on_large_gpu(self) -> float:
        """Seconds of a step where everything is kept in VRAM and nothing is recomputed."""
        return self.seconds([_IN_VRAM] * sum(len(unit.layers) for unit in self._units)).step

    def gpu_share(self) -> float:
        """Share of the layers with states in RAM that the GPU steps where both processors are done together: as long as
        the CPU steps its layers, states of the others and the stepped weights are on the bus."""
        layers = [layer for unit in self._units for layer in unit.layers]
        weights = sum(layer.weight_bytes for layer in layers)
        states = sum(layer.state_bytes for layer in layers)
        h2d, _ = both_ways(states, states, self._hardware)
        cpu = max(0.0, sum(layer.cpu_step for layer in layers) - weights / h2d)
        return cpu / (cpu + states / h2d) if cpu else 0.0

    def seconds(self, placements: Sequence[Placement]) -> Seconds:
        """The step with `placements`, one for each layer."""
        others = self._accumulation - 1
        first, last = self._forward(placements, updates=True), self._backward(placements, is_last=True)
        update, backward = max(first.free.values()), max(last.free.values())
        busy = {name: first.busy[name] + last.busy[name] for name in RESOURCES}
        if others:
            forward, before = self._forward(placements, updates=False), self._backward(placements, is_last=False)
            between = max(forward.free.values())
            adding = before.free.pop("CPU step", 0.0)  # goes on beside the next forward
            update += others * between
            backward += others * max(*before.free.values(), adding - between)
            for name in RESOURCES:
                busy[name] += others * (forward.busy[name] + before.busy[name])
        return Seconds(update + backward, update, backward, busy)

    def _forward(self, placements: Sequence[Placement], *, updates: bool) -> Queues:
        """Forward, and beside it the update of the step before: CPU steps, uploads, steps on the GPU."""
        queues = Queues(self._hardware.num_cores)
        ring, bus = Ring(queues), self._bus_in_update(placements, updates)
        if updates:
            layers = (layer for unit in self._units for layer in unit.layers)
            norm = sum(layer.norm_in_ram for layer in layers if placements[layer.index].gradients == "ram")
            queues.take("CPU step", norm, 0.0)
        before = 0.0
        ends: list[float] = []
        for unit in self._units:
            ready, on_gpu, known, again, leaves, num_layers = 0.0, 0.0, 0.0, False, False, 0
            for layer in unit.layers:
                where, stepped = placements[layer.index], 0.0
                if where.activations != "keep":
                    again, leaves = True, where.activations == "offload"
                if updates and where.step == "cpu":
                    stepped = self._stepped(queues, layer, where, bus)
                    known = max(known, stepped)
                elif updates and where.states == "ram":
                    there, stepped = self._streamed(queues, ring, layer, where, bus)
                    ready = max(ready, there)
                elif updates:
                    on_gpu += layer.gpu_step
                fetched, free = layer.weight_bytes / bus.h2d, 0.0
                if where.weights == "ram":
                    num_layers += 1
                    if not updates and len(ends) < NUM_WEIGHT_BUFFERS:  # it is there since backward
                        continue
                    free = max(before, ends[-NUM_WEIGHT_BUFFERS] if len(ends) >= NUM_WEIGHT_BUFFERS else 0.0)
                elif not (updates and where.step == "cpu"):
                    continue
                arrived = queues.take("H2D", fetched, max(stepped, free))
                ring.give_way(arrived, fetched)
                ready = max(ready, arrived)
            before = max(queues.free["GPU"], ready)
            queues.take("GPU", on_gpu, ready, "GPU step")
            queues.take("GPU", unit.forward, ready, "forward")
            launches = FORWARD_LAUNCHES * unit.forward_launches
            launches += again * RECOMPUTED_LAUNCHES[0] * unit.operation_launches
            launches += num_layers * STREAMED_LAUNCHES[0] * self._hardware.launch_seconds
            end = queues.launched(launches, known)
            if num_layers:
                ends.append(end)
            if leaves:
                queues.take("D2H", unit.input_bytes / bus.d2h, before)
                ring.sent(unit.input_bytes / bus.d2h)
        return queues

    def _stepped(self, queues: Queues, layer: LayerCost, where: Placement, bus: _Bus) -> float:
        """When the CPU has stepped the layer; states on disk are read before and written after."""
        read = 0.0
        if where.states == "disk":
            speeds = (self._hardware.disk_read_bytes_per_second, self._hardware.disk_write_bytes_per_second)
            read = queues.take("disk", DISK_OVERLAP * sum(layer.state_bytes / speed for speed in speeds), 0.0)
        return queues.take("CPU step", bus.slows_cores * layer.cpu_step, read)

    def _streamed(
        self, queues: Queues, ring: Ring, layer: LayerCost, where: Placement, bus: _Bus
    ) -> tuple[float, float]:
        """When the GPU has stepped a layer whose states are in RAM, and when those are back."""
        h2d_bytes, d2h_bytes = layer.passing(where)
        queues.python(CHUNK_LAUNCHES * layer.num_chunks * self._hardware.launch_seconds)
        queues.take("GPU", layer.gpu_step, 0.0, "GPU step")
        return ring.step(h2d_bytes / bus.h2d, d2h_bytes / bus.d2h, layer.gpu_step, layer.num_chunks)

    def _bus_in_update(self, placements: Sequence[Placement], updates: bool) -> _Bus:
        """The bus beside forward. Streamed states share both directions with what else moves, and DRAM with the CPU's
        step, which that slows as long as both go on."""
        machine = self._hardware
        alone = _Bus(machine.h2d_bytes_per_second, machine.d2h_bytes_per_second)
        if not updates or not any(where.step == "gpu" and where.states == "ram" for where in placements):
            return alone
        h2d_bytes = d2h_bytes = cpu_seconds = 0.0
        for unit in self._units:
            for layer in unit.layers:
                where = placements[layer.index]
                if where.step == "cpu":
                    cpu_seconds += layer.cpu_step
                elif where.states == "ram":
                    passing = layer.passing(where)
                    h2d_bytes, d2h_bytes = h2d_bytes + passing[0], d2h_bytes + passing[1]
                if where.step == "cpu" or where.weights == "ram":
                    h2d_bytes += layer.weight_bytes
            if any(placements[layer.index].activations == "offload" for layer in unit.layers):
                d2h_bytes += unit.input_bytes
        h2d, d2h = both_ways(h2d_bytes, d2h_bytes, machine)
        bus_seconds = max(h2d_bytes / h2d, d2h_bytes / d2h)
        cores, bus = times_slower(cpu_seconds, self._cpu_rate, bus_seconds, h2d_bytes + d2h_bytes, machine)
        return _Bus(h2d / bus, d2h / bus, cores)

    def _backward(self, placements: Sequence[Placement], *, is_last: bool) -> Queues:
        """Backward, and beside it recomputation, weights and inputs from RAM, gradients to RAM and their addition."""
        queues, adds = Queues(self._hardware.num_cores), self._accumulation > 1
        h2d, d2h = self._bus(placements)
        before, num_streamed = 0.0, 0
        ends: list[float] = []
        sent: list[float] = []
        added: list[float] = []
        for unit in reversed(self._units):
            ready = sent[-NUM_GRADIENT_BUCKETS] if len(sent) >= NUM_GRADIENT_BUCKETS else 0.0
            fetched, num_layers, again, leaves, seconds = 0, 0, False, False, unit.backward
            for layer in unit.layers:
                where = placements[layer.index]
                if where.weights == "ram":
                    fetched, num_layers = fetched + layer.weight_bytes, num_layers + 1
                if where.activations != "keep":
                    again, leaves = True, where.activations == "offload"
                seconds += layer.bucket
                if adds and where.gradients == "vram":
                    seconds += layer.adding_in_vram
            if fetched:
                num_streamed += 1
                if num_streamed > NUM_WEIGHT_BUFFERS:  # else it is there since forward
                    ready = max(ready, queues.take("H2D", fetched / h2d, max(before, ends[-NUM_WEIGHT_BUFFERS])))
            if leaves:
                ready = max(ready, queues.take("H2D", unit.input_bytes / h2d, before))
            before = max(queues.free["GPU"], ready)
            launches = BACKWARD_LAUNCHES * unit.backward_launches
            launches += num_layers * STREAMED_LAUNCHES[1] * self._hardware.launch_seconds
            if again:
                seconds += unit.forward
                launches += FORWARD_LAUNCHES * unit.forward_launches
                launches += RECOMPUTED_LAUNCHES[1] * unit.operation_launches
            queues.take("GPU", seconds, ready, "backward")
            end = queues.launched(launches, 0.0)
            if fetched:
                ends.append(end)
            for layer in unit.layers:
                if placements[layer.index].gradients == "ram":
                    if len(added) >= NUM_STAGING:  # Python waits until a staging buffer is free
                        queues.python_waits(added[-NUM_STAGING])
                    sent.append(queues.take("D2H", layer.bucket_bytes / d2h, max(end, queues.python_goes_on())))
                    if adds:
                        added.append(queues.take("CPU step", layer.adding_in_ram, sent[-1]))
        if is_last:
            queues.launched(LAYER_LAUNCHES * len(placements) * self._hardware.launch_seconds, 0.0)
            self._send_at_boundary(queues, placements, d2h)
        return queues

    def _bus(self, placements: Sequence[Placement]) -> tuple[float, float]:
        """Bytes a second of H2D and D2H in backward; less where both directions are in use."""
        machine = self._hardware
        h2d, d2h = machine.h2d_bytes_per_second, machine.d2h_bytes_per_second
        fetches = any(where.weights == "ram" or where.activations == "offload" for where in placements)
        sends = any(where.gradients == "ram" for where in placements)
        share = min(1.0, machine.both_bytes_per_second / (h2d + d2h)) if fetches and sends else 1.0
        return h2d * share, d2h * share

    def _send_at_boundary(self, queues: Queues, placements: Sequence[Placement], d2h: float) -> None:
        """Gradients that waited in VRAM for the last micro-batch and are stepped by the CPU."""
        done = queues.free["GPU"]
        for unit in self._units:
            for layer in unit.layers:
                where = placements[layer.index]
                if where.step == "cpu" and where.gradients == "vram":
                    queues.take("D2H", layer.gradient_bytes / d2h, done)


def place_in_stages(layers: Sequence[LayerShape], stages: Sequence[Stage]) -> list[int]:
    """The stage of each flat layer: its block's (the first use), or what is computed before the next block; for layers
    after the last block the last stage."""
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
