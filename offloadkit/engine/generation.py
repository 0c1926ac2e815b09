"""Generation of text between updates, as by TRL's GRPO: with all weights in VRAM while it runs, if they fit.

Each token reads all weights once. Weights in RAM would cross the bus for every token, so they are copied to VRAM once,
and freed afterwards; RAM keeps them. After the first generation the plan leaves room for them (`Replanner`). Graphs of
blocks are released, because only training uses them.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import nn

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.device.process_memory import phase
from offloadkit.engine.loop import TrainingLoop
from offloadkit.engine.replanner import Replanner
from offloadkit.facts import hardware
from offloadkit.facts.telemetry import Telemetry
from offloadkit.facts.units import format_bytes
from offloadkit.offload.buffers import Buffers
from offloadkit.planner.phases import forward_bytes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Generation:
    """Runs generations. After a GPU was full with the weights in VRAM, later generations stream them too."""

    def __init__(self, loop: TrainingLoop, replanner: Replanner, device: torch.device, telemetry: Telemetry) -> None:
        self._loop, self._replanner, self._device, self._telemetry = loop, replanner, device, telemetry
        self._was_full = self._has_said = False

    def run(self, run: Callable[[], _T], within: nn.Module, cache_bytes: int) -> _T:
        """See `OffloadEngine.run_generation`."""
        self._loop.synchronize()
        self._replanner.note_generation(cache_bytes, in_training=self._loop.placed.module.training)
        with phase("generation", self._telemetry.peaks, self._device):
            return self._replanner.run_eval(lambda: self._once(run, within, cache_bytes), together=True)

    def _once(self, run: Callable[[], _T], within: nn.Module, cache_bytes: int) -> _T:
        placed = self._loop.placed
        streamed = placed.streamed_bytes(within)
        if not streamed:
            return run()
        if self._fit(streamed + cache_bytes):
            states, buffers = random_states(), Buffers()
            if placed.module.training:
                buffers.keep(placed.module)
            try:
                return self._with_weights_in_vram(run, within)
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # releases the keys and values of the failed run
                self._was_full = True
            buffers.restore()
            set_random_states(states)
        self._say(streamed, cache_bytes)
        return run()

    def _fit(self, num_bytes: int) -> bool:
        plan = self._replanner.plan
        if self._was_full or not plan.generates_in_vram:
            return False
        if self._device.type != "cuda":
            return True
        return num_bytes + forward_bytes(plan.basis.work) <= hardware.vram_bytes(self._device)[0]

    def _with_weights_in_vram(self, run: Callable[[], _T], within: nn.Module) -> _T:
        took = self._telemetry.generation_moves
        began = time.perf_counter()
        with ExitStack() as resident:
            resident.enter_context(self._loop.placed.resident_weights(within))
            took.append(time.perf_counter() - began)
            found = run()
            began = time.perf_counter()
            resident.close()
            took.append(time.perf_counter() - began)
            return found

    def _say(self, streamed: int, cache_bytes: int) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "generation copies %s of weights from RAM for every token, because they do not fit in VRAM beside %s "
                "of keys and values: generate fewer or shorter rows at a time, or give the plan more VRAM (vram=)",
                format_bytes(streamed),
                format_bytes(cache_bytes),
            )
