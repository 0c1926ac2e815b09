"""A function whose activations are not kept: backward runs it again when autograd asks for the first of them.

Autograd's graph is that of a plain run, so that gradients are added in its order, and the second run ends where the
last activation is there. `torch.utils.checkpoint(use_reentrant=False)` does the same, but makes 29 calls of Python
functions for each tensor that autograd saves, saves again and reads, where these are 3: a small model's step is Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from offloadkit.errors import ModelError


def recomputed_in_backward(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of whose activations backward keeps none but the tensors among `args` and `kwargs`.

    The second run sees the random states of the CPU and of `device`, autocast and the default device as the first did.

    Raises:
        ModelError: (in backward) the second run came to other tensors than the first, or something wrote to tensors
            among `args` and `kwargs`, or in lists and tuples there, or to those that it saved.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    again = _Recomputation(device, function, args, kwargs)
    with saved_tensors_hooks(again.pack, again.unpack):
        return function(*args, **kwargs)


class _Recomputation:
    """What the second run needs, and what it has found. Autograd's nodes hold it, until the last of them is done."""

    def __init__(
        self, device: torch.device, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function, self._kwargs = function, kwargs
        self._versions = [(tensor, tensor._version) for tensor in _tensors_in(kwargs.values())]
        self._inputs = _Inputs(args)
        self._surroundings = _Surroundings(device)
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        """Autograd saves, instead of `tensor`, how many it saved before."""
        saved = self._saved
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def unpack(self, index: int) -> torch.Tensor:
        """The tensor that autograd wants back, which is let go: to `unpack` it again is another run."""
        if index not in self._found:
            self._found = self._run_again()
        tensor, version = self._found.pop(index)
        if tensor._version != version:
            raise changed_in_place(tensor)
        return tensor

    def _run_again(self) -> dict[int, tuple[torch.Tensor, int]]:
        """What the second run saves, by its number, and how often it had been written to."""
        expected, found = self._saved, dict[int, tuple[torch.Tensor, int]]()
        num_saved = len(expected)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index = len(found)
            if (tensor.shape, tensor.dtype) != expected[index]:
                raise _changed(f"tensor {index} {_words(tensor.shape, tensor.dtype)}", _words(*expected[index]))
            if tensor.requires_grad:
                tensor = tensor.detach()  # else what autograd saves of an operation's output would hold itself
            found[index] = tensor, tensor._version
            if index + 1 == num_saved:
                raise _FoundAllError
            return tensor

        args = self._inputs.get()
        for tensor, version in self._versions:
            if tensor._version != version:
                raise changed_in_place(tensor)
        try:
            with self._surroundings.restored(), saved_tensors_hooks(pack, _as_it_is), torch.enable_grad():
                self._function(*args, **self._kwargs)
        except _FoundAllError:
            return found
        raise _changed(f"{len(found)} tensors", f"{num_saved}")


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those that count how often they were written to."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class _FoundAllError(Exception):
    """The second run may end: what backward needs is there."""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def changed_in_place(tensor: torch.Tensor) -> ModelError:
    """For a tensor that autograd saved, and something wrote to since."""
    return ModelError(
        f"a tensor {_words(tensor.shape, tensor.dtype)} that backward needs was written to after it had been saved. An "
        "in-place operation did (x.mul_(2): compute x = x * 2 instead), or engine.step() before engine.backward(loss)"
    )


def _changed(found: str, expected: str) -> ModelError:
    return ModelError(
        f"a block that was run again for its backward saved {found}, and in its forward {expected}: what it computes "
        "depends on something that changed in between (a cache, a counter). Train it with Placement(activations='keep')"
    )


class _Inputs:
    """Positional arguments. Tensors are saved as an operation's inputs are: hooks that are open around it see them, and
    in-place changes before backward are an error (autograd's, or the hooks' own)."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._at = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self._saved: Any = _save(_ANCHOR, *[args[index] for index in self._at])

    def get(self) -> list[Any]:
        """The arguments."""
        args = list(self._args)
        for index, tensor in zip(self._at, self._saved.grad_fn.saved_tensors, strict=True):
            args[index] = tensor
        return args


class _Save(torch.autograd.Function):
    """Saves tensors for a backward that is never run."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


_save: Any = _Save.apply
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
"""Has a `_Save` whose tensors need no gradient be a node of the graph."""


class _Surroundings:
    """What a run depends on beside its arguments: random states, autocast, the default device."""

    def __init__(self, device: torch.device) -> None:
        self._device_types: tuple[str, ...] = ("cpu",)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._device_types = ("cpu", "cuda")
            self._generators.append(torch.cuda.default_generators[device.index])
        self._random_states = self._present_random_states()
        self._autocast = self._present_autocast()
        self._default_device = _default_device()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """While it is open, all is as it was; random states afterwards as they were before."""
        now = self._present_random_states()
        self._set_random_states(self._random_states)
        try:
            with ExitStack() as contexts:
                if self._autocast != self._present_autocast():
                    for kind, enabled, dtype, cached in self._autocast:
                        contexts.enter_context(torch.autocast(kind, dtype, enabled, cached))
                if self._default_device != _default_device():
                    contexts.enter_context(self._default_device)
                yield
        finally:
            self._set_random_states(now)

    def _present_random_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_random_states(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _present_autocast(self) -> list[tuple[str, bool, torch.dtype, bool]]:
        """By device type: whether it is on, its dtype, whether it keeps what it has cast."""
        cached = torch.is_autocast_cache_enabled()
        return [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in self._device_types
        ]


def _default_device() -> torch.device:
    """As `torch.get_default_device()`, in a third of its time."""
    return torch.empty(0).device
