"""Activations of the repeated blocks: kept, recomputed in backward, or recomputed from inputs that wait in RAM."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from offloadkit.errors import ConfigError
from offloadkit.offload import host_memory
from offloadkit.offload.host_memory import HostSlab
from offloadkit.offload.layers import repeated_blocks
from offloadkit.offload.recomputation import changed_in_place, recomputed_in_backward
from offloadkit.offload.streams import CopyStream, Event, record_compute
from offloadkit.offload.waits import Waits
from offloadkit.offload.weights import LayerWeights

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
        slot = self._take(tensor.numel() * tensor.element_size())
        tensor = tensor.detach().contiguous()
        slot.put(tensor, name)
        self.d2h.wait(record_compute(self.device))
        if slot.returned is not None:
            self.d2h.wait(slot.returned)
        self.d2h.copy(slot.host, tensor.view(-1), name, timed=True)
        slot.arrived = self.d2h.record()
        self._copying.append((tensor, slot.arrived))
        self._order.append(slot)
        handle = _Handle(slot)
        weakref.finalize(handle, self._give_back, slot).atexit = False
        return handle

    def _let_go(self, num_left: int) -> None:
        """Give back the VRAM of all but the newest `num_left` inputs on their way; their memory is written again behind
        the copies, which the device waits for: Python may be far ahead of it."""
        self._copying = [(memory, event) for memory, event in self._copying if not event.done()]
        while len(self._copying) > num_left:
            _, event = self._copying.pop(0)
            self._waits.delay(event)

    def _give_back(self, slot: _Offloaded) -> None:
        """Autograd let go of the input: backward is past it, or its graph was dropped (and what was fetched ahead is
        not read)."""
        self._order.remove(slot)
        if slot.device is not None and slot.returned is not None:
            self._copying.append((slot.device, slot.returned))
        slot.device = None
        self._free.append(slot)

    def _take(self, num_bytes: int) -> _Offloaded:
        for slot in self._free:
            if slot.slab.num_bytes >= num_bytes:
                self._free.remove(slot)
                return slot
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
        saved = packed.slot
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

    slot: _Offloaded


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
