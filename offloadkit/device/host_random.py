"""The random generators of the host, whose states are compared and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class HostRandom:
    """The random states of Python, numpy and torch's CPU generator."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        self._numpy: Any = np.random.get_state()

    def has_changed(self) -> bool:
        numpy: Any = np.random.get_state()
        same_numpy = numpy[2:] == self._numpy[2:] and np.array_equal(numpy[1], self._numpy[1])
        same_torch = torch.equal(torch.default_generator.get_state(), self._torch)
        return not (same_numpy and same_torch and random.getstate() == self._python)

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
