"""Seconds of many placements at once: `StepModel.seconds` in C (kernels/cpu_plan.h), bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offloadkit.facts import fitted
from offloadkit.facts.hardware import Hardware
from offloadkit.kernels import cpu
from offloadkit.planner.counts import Counts, Spread
from offloadkit.planner.layout import NUM_GRADIENT_BUCKETS, NUM_STAGING, NUM_STEP_BUFFERS, NUM_WEIGHT_BUFFERS
from offloadkit.planner.seconds import FEW_CORES, StepModel


class Phases(NamedTuple):
    """The part of a step's `Seconds` that a search needs."""

    update: float
    backward: float
    busy_forward: float
    busy_cpu: float

    @property
    def step(self) -> float:
        return self.update + self.backward


class QuickSeconds:
    def __init__(self, model: StepModel, spread: Spread, hardware: Hardware, accumulation: int) -> None:
        self._model, self._spread = model, spread
        self._order = [layer.index for layer in model.layers]
        constants = (
            *(fitted.CHUNK_LAUNCHES, fitted.DISK_OVERLAP, *fitted.RECOMPUTED_LAUNCHES, *fitted.STREAMED_LAUNCHES),
            *fitted.CHEAP_LAUNCHES,
            *(fitted.LAYER_LAUNCHES, fitted.THREAD_SLOWS, model.slowed_beside_cpu),
            *(NUM_WEIGHT_BUFFERS, NUM_GRADIENT_BUCKETS, NUM_STAGING, NUM_STEP_BUFFERS),
            *(hardware.num_cores <= FEW_CORES, accumulation, model.agreeing),
            *(hardware.link_is_bus, model.link, model.num_trained, model.link_in_backward),
        )
        rates = (
            *(hardware.h2d_bytes_per_second, hardware.d2h_bytes_per_second, hardware.both_bytes_per_second),
            *(hardware.cpu_and_bus_bytes_per_second, hardware.launch_seconds),
            *(hardware.disk_read_bytes_per_second, hardware.disk_write_bytes_per_second, model.cpu_rate),
        )
        stages = [
            (
                *(of.forward, of.backward, of.forward_launches, of.backward_launches),
                *(of.operation_launches, of.again, of.again_launches, of.is_captured),
                *(of.graphed_forward_launches, of.graphed_backward_launches, of.input_bytes),
            )
            for of in model.stages
        ]
        layers = [
            (
                *(of.weight_bytes, of.stepped_bytes, of.sent_bytes, of.gradient_bytes, of.state_bytes, of.num_chunks),
                *(of.cpu_step, of.gpu_step, of.bucket, of.adding_in_vram, of.adding_in_ram, of.norm_in_ram),
                *(of.exchange, of.sums_exchange, of.summing_in_vram, of.copied, of.gather),
            )
            for of in model.layers
        ]
        self._arrays: dict[str, NDArray[np.float64] | NDArray[np.int64]] = {
            "machine": np.array([*rates, *constants], dtype=np.float64),
            "stages": np.array(stages, dtype=np.float64),
            "layers": np.array(layers, dtype=np.float64),
            "ends": np.cumsum([len(of.layers) for of in model.stages], dtype=np.int64),
            "blocks": spread.block_of[self._order].astype(np.int64),
        }

    def of(self, some: Sequence[Counts]) -> list[Phases]:
        codes = self._spread.codes(some)[:, self._order]
        levels = np.array([(counts.recomputed, counts.offloaded, counts.cheap) for counts in some], dtype=np.int64)
        found = cpu.step_seconds(self._arrays, codes, levels)
        if found is None:
            return [self._in_python(counts) for counts in some]
        return [Phases(*each) for each in found.tolist()]

    def _in_python(self, counts: Counts) -> Phases:
        whole = self._model.seconds(self._spread.placements(counts))
        return Phases(whole.update_phase, whole.backward_phase, whole.busy["forward"], whole.busy["CPU step"])
