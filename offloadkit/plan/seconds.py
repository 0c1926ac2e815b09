"""Seconds of a step: what each processor and each direction of the bus does, layer by layer, and who waits for whom.

Two phases follow each other, because clipping needs the whole norm before the first layer is stepped
(docs/design.md, section 2): forward beside the last step's update (CPU steps and uploads in forward order, forward
waits layer by layer), and backward beside the gradients' way to RAM. Each resource works through its queue; a layer
starts where its inputs are there and a buffer is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offloadkit.config import Placement, Precision
from offloadkit.hardware import Hardware
from offloadkit.plan.shapes import NUM_LANDINGS, NUM_STAGING, NUM_WEIGHT_BUFFERS, LayerShape
from offloadkit.plan.work import MicroBatch, Pass, Stage

MATMUL_EFFICIENCY = 0.9
"""Share of the measured product's rate that a model's products reach."""
ELEMENTWISE_EFFICIENCY = 0.77
"""Share of the VRAM's measured rate that a model's other operations reach (reductions, broadcasts, strides)."""
STEP_EFFICIENCY = 0.85
"""The same for the AdamW kernel on the GPU and the copies and norms of gradients."""
KERNEL_SECONDS = 4e-6
"""Of a kernel that has nothing to do."""
CPU_EFFICIENCY: dict[Precision, float] = {"exact": 0.97, "compact": 0.91, "tiny": 0.87}
"""Share of the CPU step's measured rate that is left while copies and Python go on beside it; the more a precision is
bound by arithmetic, the less."""
ADD_EFFICIENCY = 0.75
"""Share of the CPU step's rate at which gradients are added in RAM while others arrive."""
DISK_OVERLAP = 0.8
"""Of the times that states take to be read and to be written, as much remains when both are under way."""
FEW_CORES = 2
"""With no more than these the CPU's step takes them from Python, which starts the GPU's operations."""
NORM_EFFICIENCY = 0.48
"""Share of the CPU step's rate at which the norm of gradients in RAM is taken (in fp64)."""
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 4.9, 3.9
"""What Python takes for an operation of forward and of backward, hooks of the engine included, as a multiple of the
time in which bare kernels can be started."""
LAYER_LAUNCHES, STEP_LAUNCHES = 28, 50
"""The same for a flat layer whose update is started, and for one whose update the CPU computes."""
STREAMED_LAUNCHES = (3.6, 0.4)
"""What it takes beside that in forward and backward, for each operation, where weights are streamed: every tensor that
autograd saves is looked at."""
RECOMPUTED_LAUNCHES = (1.4, 4.0)
"""The same where a block is recomputed, for each operation of its forward; what recomputing takes itself comes on top.

These constants were fitted to the steps of benchmarks/results/plans-h200.json."""

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


def pass_seconds(work: Pass, hardware: Hardware, dtype: str) -> float:
    """Time on the GPU; products take what computing or reading takes, whichever is longer."""
    flops: float = getattr(hardware, f"{dtype}_flops_per_second")
    memory = hardware.vram_bytes_per_second
    products = max(work.flops / (flops * MATMUL_EFFICIENCY), work.matmul_bytes / memory)
    rest = work.moved_bytes / (memory * ELEMENTWISE_EFFICIENCY)
    return products + rest + work.num_operations * KERNEL_SECONDS


@dataclass(frozen=True)
class _Layer:
    """One flat layer: bytes that move, and seconds of what is done with them."""

    index: int
    weight_bytes: int
    landing_bytes: int
    gradient_bytes: int
    state_bytes: int
    cpu_step: float
    gpu_step: float
    landing: float
    """A gradient is copied to the landing and read for the norm."""
    adding_in_vram: float
    """Into the fp32 sum, which is read and written."""
    adding_in_ram: float
    """The same; the gradient was written there first."""
    norm_in_ram: float
    """Of the sum, which the GPU has never seen."""


@dataclass(frozen=True)
class _Unit:
    """A stage's seconds on the GPU and of Python, and its flat layers."""

    forward: float
    backward: float
    forward_launches: float
    backward_launches: float
    input_bytes: int
    layers: tuple[_Layer, ...]


class _Queues:
    """When each resource is free again, and how long it has worked for what."""

    def __init__(self, num_cores: int) -> None:
        self._launches = "CPU step" if num_cores <= FEW_CORES else "launches"
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)

    def take(self, resource: str, seconds: float, ready: float, purpose: str | None = None) -> float:
        """Work that can start at `ready`; the time of its end."""
        end = max(self.free[resource], ready) + seconds
        self.free[resource] = end
        self.busy[purpose or resource] += seconds
        return end

    def launched(self, seconds: float, ready: float) -> float:
        """Python has started what the GPU does last, which ends no sooner; when that is."""
        end = self.free["GPU"] = max(self.free["GPU"], self.take(self._launches, seconds, ready, "launches"))
        return end

    def python_waits(self, until: float) -> None:
        """Nothing is started before `until`."""
        self.free[self._launches] = max(self.free[self._launches], until)

    def python_goes_on(self) -> float:
        """When Python is free again."""
        return self.free[self._launches]


class StepModel:
    """The step of one model over micro-batches of one shape on one machine, for any placement."""

    def __init__(self, layers: Sequence[LayerShape], work: MicroBatch, hardware: Hardware, accumulation: int) -> None:
        self._hardware, self._accumulation = hardware, accumulation
        self._vram = hardware.vram_bytes_per_second * STEP_EFFICIENCY
        self._dram = hardware.cpu_adamw_bytes_per_second
        sizes = {layer.dtype: sum(other.numel for other in layers if other.dtype == layer.dtype) for layer in layers}
        dtype = max(sizes, key=lambda name: sizes[name])
        members: list[list[_Layer]] = [[] for _ in work.stages]
        for index, (layer, stage) in enumerate(zip(layers, place_in_stages(layers, work.stages), strict=True)):
            members[stage].append(self._numbers(index, layer))
        self._units = []
        for of, its_layers in zip(work.stages, members, strict=True):
            self._units.append(
                _Unit(
                    pass_seconds(of.forward, hardware, dtype),
                    pass_seconds(of.backward, hardware, dtype),
                    of.forward.num_operations * hardware.launch_seconds,
                    of.backward.num_operations * hardware.launch_seconds,
                    of.input_bytes if of.block else 0,
                    tuple(its_layers),
                )
            )

    def _numbers(self, index: int, layer: LayerShape) -> _Layer:
        gradient, landing = layer.gradient_bytes(self._accumulation), layer.landing_bytes()
        traffic = layer.step_bytes(self._accumulation)
        return _Layer(
            index=index,
            weight_bytes=layer.weight_bytes(),
            landing_bytes=landing,
            gradient_bytes=gradient,
            state_bytes=sum(layer.state_bytes().values()),
            cpu_step=traffic / self._cpu_step_rate(layer) + STEP_LAUNCHES * self._hardware.launch_seconds,
            gpu_step=traffic / self._vram + KERNEL_SECONDS,
            landing=3 * landing / self._vram,
            adding_in_vram=(8 * layer.numel + landing) / self._vram,
            adding_in_ram=(8 * layer.numel + 2 * landing) / (self._dram * ADD_EFFICIENCY),
            norm_in_ram=gradient / (self._dram * NORM_EFFICIENCY) if self._accumulation > 1 else 0.0,
        )

    def _cpu_step_rate(self, layer: LayerShape) -> float:
        machine = self._hardware
        rates = {
            "exact": machine.cpu_adamw_bytes_per_second,
            "compact": machine.cpu_compact_bytes_per_second,
            "tiny": machine.cpu_tiny_bytes_per_second,
        }
        return CPU_EFFICIENCY[layer.precision] * rates[layer.precision]

    def on_large_gpu(self) -> float:
        """Seconds of a step where everything is kept in VRAM and nothing is recomputed."""
        return self.seconds([_IN_VRAM] * sum(len(unit.layers) for unit in self._units)).step

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

    def _forward(self, placements: Sequence[Placement], *, updates: bool) -> _Queues:
        """Forward, and beside it the update of the step before: CPU steps, uploads, steps on the GPU."""
        machine, queues = self._hardware, _Queues(self._hardware.num_cores)
        streams = any(where.weights == "ram" for where in placements)
        if updates:
            layers = (layer for unit in self._units for layer in unit.layers)
            norm = sum(layer.norm_in_ram for layer in layers if placements[layer.index].gradients == "ram")
            queues.take("CPU step", norm, 0.0)
        before = 0.0
        ends: list[float] = []
        for unit in self._units:
            ready, on_gpu, known, leaves, streamed = 0.0, 0.0, 0.0, False, False
            launches = FORWARD_LAUNCHES + streams * STREAMED_LAUNCHES[0]
            if any(placements[layer.index].activations != "keep" for layer in unit.layers):
                launches += RECOMPUTED_LAUNCHES[0]
            for layer in unit.layers:
                where = placements[layer.index]
                leaves |= where.activations == "offload"
                stepped = self._stepped(queues, layer, where) if updates and where.step == "cpu" else 0.0
                on_gpu += layer.gpu_step if updates and where.step == "gpu" else 0.0
                known = max(known, stepped)
                fetched = layer.weight_bytes / machine.h2d_bytes_per_second
                if where.weights == "ram":
                    streamed = True
                    if updates or len(ends) >= NUM_WEIGHT_BUFFERS:  # else it is there since backward
                        free = ends[-NUM_WEIGHT_BUFFERS] if len(ends) >= NUM_WEIGHT_BUFFERS else 0.0
                        ready = queues.take("H2D", fetched, max(stepped, before, free))
                elif updates and where.step == "cpu":
                    ready = max(ready, queues.take("H2D", fetched, stepped))
            before = max(queues.free["GPU"], ready)
            queues.take("GPU", on_gpu, ready, "GPU step")
            queues.take("GPU", unit.forward, ready, "forward")
            end = queues.launched(launches * unit.forward_launches, known)
            if streamed:
                ends.append(end)
            if leaves:
                queues.take("D2H", unit.input_bytes / machine.d2h_bytes_per_second, before)
        return queues

    def _stepped(self, queues: _Queues, layer: _Layer, where: Placement) -> float:
        """When the CPU has stepped the layer; states on disk are read before and written after."""
        read = 0.0
        if where.states == "disk":
            speeds = (self._hardware.disk_read_bytes_per_second, self._hardware.disk_write_bytes_per_second)
            read = queues.take("disk", DISK_OVERLAP * sum(layer.state_bytes / speed for speed in speeds), 0.0)
        return queues.take("CPU step", layer.cpu_step, read)

    def _backward(self, placements: Sequence[Placement], *, is_last: bool) -> _Queues:
        """Backward, and beside it recomputation, weights and inputs from RAM, gradients to RAM and their addition."""
        queues, adds = _Queues(self._hardware.num_cores), self._accumulation > 1
        streams = any(where.weights == "ram" for where in placements)
        h2d, d2h = self._bus(placements)
        before, num_streamed = 0.0, 0
        ends: list[float] = []
        sent: list[float] = []
        added: list[float] = []
        for unit in reversed(self._units):
            wheres = [placements[layer.index] for layer in unit.layers]
            ready = sent[-NUM_LANDINGS] if len(sent) >= NUM_LANDINGS else 0.0
            fetched = [layer for layer, where in zip(unit.layers, wheres, strict=True) if where.weights == "ram"]
            if fetched:
                num_streamed += 1
                if num_streamed > NUM_WEIGHT_BUFFERS:  # else it is there since forward
                    num_bytes = sum(layer.weight_bytes for layer in fetched)
                    ready = max(ready, queues.take("H2D", num_bytes / h2d, max(before, ends[-NUM_WEIGHT_BUFFERS])))
            if any(where.activations == "offload" for where in wheres):
                ready = max(ready, queues.take("H2D", unit.input_bytes / h2d, before))
            before = max(queues.free["GPU"], ready)
            seconds = unit.backward + sum(layer.landing for layer in unit.layers)
            launches = (BACKWARD_LAUNCHES + streams * STREAMED_LAUNCHES[1]) * unit.backward_launches
            if any(where.activations != "keep" for where in wheres):
                seconds += unit.forward
                launches += (FORWARD_LAUNCHES + RECOMPUTED_LAUNCHES[1]) * unit.forward_launches
            if adds:
                seconds += sum(
                    layer.adding_in_vram
                    for layer, where in zip(unit.layers, wheres, strict=True)
                    if where.gradients == "vram"
                )
            queues.take("GPU", seconds, ready, "backward")
            end = queues.launched(launches, 0.0)
            if fetched:
                ends.append(end)
            for layer, where in zip(unit.layers, wheres, strict=True):
                if where.gradients == "ram":
                    if len(added) >= NUM_STAGING:  # Python waits until a staging buffer is free
                        queues.python_waits(added[-NUM_STAGING])
                    sent.append(queues.take("D2H", layer.landing_bytes / d2h, max(end, queues.python_goes_on())))
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

    def _send_at_boundary(self, queues: _Queues, placements: Sequence[Placement], d2h: float) -> None:
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
