"""Activations of the repeated blocks: kept, recomputed in backward, or recomputed from inputs that wait in RAM."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offloadkit.device import host_memory
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.errors import ConfigError, ModelError
from offloadkit.offload.layers import repeated_blocks
from offloadkit.offload.weights import LayerWeights


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


Checkpoint = Literal["checkpoint", "offload"]


def checkpoint_activations(
    model: nn.Module,
    choices: Mapping[nn.Module, Checkpoint],
    weights: Mapping[nn.Module, Sequence[LayerWeights]],
    offloaded: OffloadedInputs,
    *,
    compiled: bool = False,
) -> Callable[[], None]:
    """Have backward recompute the activations of the blocks in `choices`; returns what switches it off again.

    HuggingFace models use their own switch; the forward of other modules' blocks is replaced. Random numbers (dropout)
    are the same in the recomputation.

    Args:
        weights: by block, what a recomputation needs in VRAM.
        compiled: the blocks run compiled, past HuggingFace's switch (which would have T5 compute other gradients too).

    Raises:
        ConfigError: the model has no repeated blocks to recompute.
    """
    names = {block: name for name, block in repeated_blocks(model)}
    if not names:
        raise ConfigError(
            f"activation_checkpointing=True, but {type(model).__name__} has no repeated blocks to recompute: "
            "put its layers in an nn.ModuleList, or leave the switch off"
        )

    def recompute(block: nn.Module) -> Callable[..., Any]:
        """A function, not a partial: a deepcopy of the model must not copy what it refers to."""
        offload = partial(offloaded.checkpoint, f"{names[block]} input")
        run = offload if choices[block] == "offload" else partial(_checkpoint, offloaded.device)
        return lambda forward, *args, **kwargs: run(weights.get(block, ()), forward, *args, **kwargs)

    if getattr(model, "supports_gradient_checkpointing", False) and not compiled:
        return _as_huggingface_does(model, list(names), choices, recompute)
    before = {block: vars(block).get("forward") for block in choices}
    for block in choices:
        block.forward = partial(recompute(block), block.forward)

    def restore() -> None:
        for block, forward in before.items():
            del block.forward
            if forward is not None:
                block.forward = forward

    return restore


def _as_huggingface_does(
    model: Any, blocks: Sequence[Any], choices: Mapping[nn.Module, Checkpoint], recompute: Callable[[nn.Module], Any]
) -> Callable[[], None]:
    """Newer transformers say activation_checkpointing, older ones gradient_checkpointing."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable, disable = (getattr(model, f"{word}_checkpointing_{end}") for end in ("enable", "disable"))
    enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
    for block in blocks:
        if block in choices:
            block._gradient_checkpointing_func = recompute(block)
        else:
            block.gradient_checkpointing = False
    switch_off: Callable[[], None] = disable
    return switch_off


def _checkpoint(
    device: torch.device, weights: Sequence[LayerWeights], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`forward` with its activations recomputed in backward, for which `weights` are brought to VRAM.

    Raises:
        EngineStateError: (in backward) `weights` were stepped since.
    """
    seen = [layer.num_updates for layer in weights]
    if isinstance(forward, partial):  # HuggingFace's: what its tensors are must be seen
        args, kwargs, forward = (*forward.args, *args), {**forward.keywords, **kwargs}, forward.func

    def run(*args: Any, **kwargs: Any) -> Any:
        for layer, num_updates in zip(weights, seen, strict=True):
            layer.check_seen(num_updates)
            layer.use()
        return forward(*args, **kwargs)

    return recomputed_in_backward(device, run, *args, **kwargs)


class OffloadedInputs:
    """Inputs of checkpointed blocks that wait for backward in pinned RAM.

    Only a block's first argument goes there (the hidden states); what many blocks share (masks, a position bias, an
    encoder's output) stays in VRAM. The memory is used again in every micro-batch.
    """

    def __init__(self, device: torch.device, waits: Waits) -> None:
        self.device, self._waits = device, waits
        self.d2h, self.h2d = CopyStream(device, "D2H"), CopyStream(device, "H2D")
        self._free: list[_Offloaded] = []
        self._copying: list[tuple[torch.Tensor, Event]] = []
        """VRAM that a copy still reads or writes, and the copy's end."""
        self._order: list[_Offloaded] = []

    def checkpoint(
        self, name: str, weights: Sequence[LayerWeights], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As `_checkpoint`, with the first argument, by `name` in a trace, in RAM until backward.

        Raises:
            ModelError: the block wrote to it, while it was copied.
        """
        if not torch.is_grad_enabled():
            return _checkpoint(self.device, weights, forward, *args, **kwargs)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        hidden, version = (None, 0) if first is None else (first.data_ptr(), first._version)  # autograd keeps `pack`

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | _Handle:
            sent = tensor.data_ptr() == hidden and tensor.is_floating_point()
            return self._send(tensor, name) if sent else (tensor, tensor._version)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._bring_back):
            output = _checkpoint(self.device, weights, forward, *args, **kwargs)
        if first is not None and first._version != version:
            raise changed_in_place(first)
        return output

    def _send(self, tensor: torch.Tensor, name: str) -> _Handle:
        self._let_go(1)
        view = self._take(tensor.numel() * tensor.element_size())
        tensor = tensor.detach().contiguous()
        view.put(tensor, name)
        self.d2h.wait(record_compute(self.device))
        if view.returned is not None:
            self.d2h.wait(view.returned)
        self.d2h.copy(view.host, tensor.view(-1), name, timed=True)
        view.arrived = self.d2h.record()
        self._copying.append((tensor, view.arrived))
        self._order.append(view)
        handle = _Handle(view)
        weakref.finalize(handle, self._give_back, view).atexit = False
        return handle

    def _let_go(self, num_left: int) -> None:
        """Give back the VRAM of all but the newest `num_left` inputs on their way; their memory is written again behind
        the copies, which the device waits for: Python may be far ahead of it."""
        self._copying = [(memory, event) for memory, event in self._copying if not event.done()]
        while len(self._copying) > num_left:
            _, event = self._copying.pop(0)
            self._waits.delay(event)

    def _give_back(self, view: _Offloaded) -> None:
        """Autograd let go of the input: backward is past it, or its graph was dropped (and what was fetched ahead is
        not read)."""
        self._order.remove(view)
        if view.device is not None and view.returned is not None:
            self._copying.append((view.device, view.returned))
        view.device = None
        self._free.append(view)

    def _take(self, num_bytes: int) -> _Offloaded:
        for view in self._free:
            if view.slab.num_bytes >= num_bytes:
                self._free.remove(view)
                return view
        (slab,) = host_memory.allocate([num_bytes], self.device, "inputs of recomputed blocks")
        return _Offloaded(slab)

    def _bring_back(self, packed: tuple[torch.Tensor, int] | _Handle) -> torch.Tensor:
        """The input of the block that backward has reached; the one before it is fetched meanwhile."""
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise changed_in_place(tensor)
            return tensor
        self._let_go(0)
        saved = packed.view
        here = self._fetch(saved)
        at = self._order.index(saved)
        if at > 0:
            self._fetch(self._order[at - 1])
        assert saved.returned is not None
        self._waits.delay(saved.returned)
        saved.device = None
        return here

    def _fetch(self, saved: _Offloaded) -> torch.Tensor:
        if saved.device is None:
            saved.device = torch.empty(saved.shape, dtype=saved.host.dtype, device=self.device)
            self.h2d.wait(record_compute(self.device))  # its memory may just have been freed by the compute stream
            assert saved.arrived is not None
            self.h2d.wait(saved.arrived)
            self.h2d.copy(saved.device.view(-1), saved.host, saved.name, timed=True)
            saved.returned = self.h2d.record()
        return saved.device


@dataclass(eq=False)
class _Handle:
    """What autograd holds of an input; the memory is free again when it is gone."""

    view: _Offloaded


class _Offloaded:
    """One input: its memory in RAM, and its way there and back."""

    def __init__(self, slab: HostSlab) -> None:
        self.slab, self.name = slab, ""
        self.host = torch.empty(0)
        self.shape = torch.Size()
        self.device: torch.Tensor | None = None
        self.arrived: Event | None = None
        self.returned: Event | None = None

    def put(self, tensor: torch.Tensor, name: str) -> None:
        """Make `host` of the tensor's size and dtype."""
        self.name = name
        self.slab.clear()
        self.host = self.slab.cut(tensor.numel(), tensor.dtype)
        self.shape, self.device = tensor.shape, None
