"""An accumulation window that can be repeated: its micro-batches, and what they drew from and wrote to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class Window:
    """Remembers one window of a Trainer until the next begins. Weights are not remembered: a window changes none."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Any, _RandomStates]] = []
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []

    def begin(self, model: nn.Module) -> None:
        """A window begins: forget the last one, and copy the model's buffers (BatchNorm's means)."""
        self._micro_batches.clear()
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def add(self, inputs: Any, device: torch.device) -> None:
        """The next micro-batch begins; `device` has random states too."""
        self._micro_batches.append((inputs, _RandomStates(device)))

    def again(self) -> Iterator[Any]:
        """The micro-batches so far, one after the other, each with the random states that it had.

        The buffers are first as they were.
        """
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                module._buffers[name] = buffer.copy_(copy)
        for inputs, states in list(self._micro_batches):
            states.restore()
            yield inputs


class _RandomStates:
    """The states of Python's, numpy's and torch's generators, now."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._states = [generator.get_state() for generator in self._generators]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
