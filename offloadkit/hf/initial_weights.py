"""HuggingFace's initial weights, drawn parameter by parameter, in any order.

The numbers of a parameter come from a generator of its own, seeded by the run's seed and the parameter's name. So they
depend neither on what else is drawn, nor when, nor where the parameter will live; and several threads may draw.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.hf.weight_files import ByteBar, become

_Draw = Callable[[], object]
_ALL_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ConstructorNeededError(Exception):
    """The model's `_init_weights` leaves a tensor as its constructor made it, or draws where no seed can be given."""


class InitialWeights:
    """Draws the initial weights of a model on the meta device, as its `_init_weights` defines them."""

    def __init__(self, model: nn.Module, seed: int, own: Mapping[nn.Parameter, _Draw]) -> None:
        """Make the buffers real, and check that all else can be drawn.

        Args:
            model: a `PreTrainedModel` on the meta device.
            own: what draws a parameter in place, for those that `_init_weights` does not know.

        Raises:
            ConstructorNeededError: its constructor knows more initial values; the model is of no use then.
        """
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._model, self._seed = model, seed
        self._draws = _draws(model) | {parameter: [draw] for parameter, draw in own.items()}
        self._bar = ByteBar("Drawing weights", sum(p.numel() * p.element_size() for p in self._names))
        for parameter in self._names:
            self._draw(parameter, set())
        self._make_buffers()

    def materialise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Draw those of `parameters` that have no memory yet; a `weight_files.Materialise`."""
        waiting = [parameter for parameter in parameters if parameter.is_meta]
        for parameter in waiting:
            become(parameter, torch.empty_like(parameter, device="cpu"))
        tensors = [*self._names, *self._model.buffers()]
        others = {_storage(tensor) for tensor in tensors if not tensor.is_meta}

        def draw(parameter: nn.Parameter) -> None:
            self._draw(parameter, others)
            self._bar.advance(parameter.numel() * parameter.element_size())

        with ThreadPoolExecutor(_ALL_THREADS, "offloadkit-draw") as pool:
            list(pool.map(draw, waiting))

    def _draw(self, parameter: nn.Parameter, others: set[int]) -> None:
        self._write(parameter, self._names[parameter], others, self._draws.get(parameter, []))

    def _make_buffers(self) -> None:
        draws = _draws(self._model, of_buffers=True)
        for prefix, module in self._model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    real = module._buffers[attribute] = torch.empty_like(buffer, device="cpu")
                    self._write(real, f"{prefix}.{attribute}", set(), draws.get(buffer, []))

    def _write(self, tensor: torch.Tensor, name: str, others: set[int], draws: Sequence[_Draw]) -> None:
        with torch.no_grad(), _OnlyInto(tensor, f"{self._seed} {name}", others) as only:
            for draw in draws:
                draw()
        if not only.written:
            raise ConstructorNeededError(f"{type(self._model).__name__}._init_weights does not initialise {name!r}")


def _draws(model: Any, *, of_buffers: bool = False) -> dict[torch.Tensor, list[_Draw]]:
    """By parameter (or buffer): the calls of `_init_weights` that may write it, in the order of
    `PreTrainedModel.initialize_weights`: children first, each with the `_init_weights` of the model that it is part of.
    """
    from transformers import PreTrainedModel

    draws: dict[torch.Tensor, list[_Draw]] = {}

    def visit(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
        for child in module.children():
            visit(child, child._init_weights if isinstance(child, PreTrainedModel) else init)
        for tensor in module.buffers() if of_buffers else module.parameters():
            draws.setdefault(tensor, []).append(lambda: init(module))

    visit(model, model._init_weights)
    return draws


class _OnlyInto(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In-place operations reach one tensor, and scratch memory; random numbers come from two generators of its own.

    Scratch memory has a generator for itself, because how much of it is drawn depends on what else is real.
    """

    def __init__(self, target: torch.Tensor, seed: str, others: set[int]) -> None:
        """`others`: storages, by `_storage`, that are left as they are, as is whatever has no memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._target, self._others = _storage(target), others
        self._generator, self._scratch_generator = _generator(seed), _generator(f"{seed} scratch")
        self.written = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = self._scratch_generator
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            storage = _storage(args[0])
            if storage == self._target:
                self.written, generator = True, self._generator
            if args[0].is_meta or (storage != self._target and storage in self._others):
                return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            func, kwargs = _seeded(func), {**kwargs, "generator": generator}
        return func(*args, **kwargs)


def _seeded(func: Any) -> Any:
    """The overload of a random operation that takes a generator."""
    for overload in (func, getattr(func.overloadpacket, "generator", None)):
        if overload is not None and any(argument.name == "generator" for argument in overload._schema.arguments):
            return overload
    raise ConstructorNeededError(f"{func} takes no generator")


def _generator(seed: str) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
