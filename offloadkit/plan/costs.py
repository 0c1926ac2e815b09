"""What one flat layer, and one pass of a stage, cost: bytes that move, seconds of each processor."""

from __future__ import annotations

from dataclasses import dataclass

from offloadkit.config import Placement, Precision
from offloadkit.hardware import Hardware
from offloadkit.plan.shapes import STEP_CHUNK, LayerShape
from offloadkit.plan.work import Pass

ELEMENTWISE_EFFICIENCY = 0.7
"""Share of the VRAM's measured rate that a model's operations reach which are no products (reductions, broadcasts,
strides)."""
OWN_EFFICIENCY = 0.4
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
    products = (work.flops + work.own_flops / OWN_EFFICIENCY) / flops + work.matmul_bytes / memory
    rest = work.moved_bytes * (COMPILED_TRAFFIC if compiled else 1.0) / (memory * ELEMENTWISE_EFFICIENCY)
    return products + rest + work.num_operations * KERNEL_SECONDS


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
    landing_bytes: int
    gradient_bytes: int
    state_bytes: int
    num_chunks: int
    """Pieces in which its states pass through VRAM."""
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

    def passing(self, where: Placement) -> tuple[int, int]:
        """Bytes to VRAM and back where the GPU steps it and its states are in RAM: of weights and gradient what is
        there too; the gradient does not come back."""
        back = self.state_bytes + (self.weight_bytes if where.weights == "ram" else 0)
        return back + (self.gradient_bytes if where.gradients == "ram" else 0), back


def layer_cost(index: int, layer: LayerShape, hardware: Hardware, accumulation: int) -> LayerCost:
    """The costs of a layer; what they do not depend on is where it is."""
    vram, dram = hardware.vram_bytes_per_second * STEP_EFFICIENCY, hardware.cpu_adamw_bytes_per_second
    gradient, landing = layer.gradient_bytes(accumulation), layer.landing_bytes()
    traffic = layer.step_bytes(accumulation)
    num_chunks = -(-layer.numel // STEP_CHUNK)
    return LayerCost(
        index=index,
        weight_bytes=layer.weight_bytes(),
        landing_bytes=landing,
        gradient_bytes=gradient,
        state_bytes=sum(layer.state_bytes().values()),
        num_chunks=num_chunks,
        cpu_step=traffic / cpu_step_rate(layer.precision, hardware) + STEP_LAUNCHES * hardware.launch_seconds,
        gpu_step=traffic / vram + KERNEL_SECONDS,
        landing=3 * landing / vram,
        adding_in_vram=(8 * layer.numel + landing) / vram,
        adding_in_ram=(8 * layer.numel + 2 * landing) / (dram * ADD_EFFICIENCY),
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
