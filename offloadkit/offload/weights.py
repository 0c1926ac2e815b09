"""Working weights: flat buffers on the device, the parameters that are views of them, and the gates of forward.

A *gate* is a forward pre-hook that makes forward wait for a layer's newest weights: on the host until the stepping
thread has recorded the copy's event, then on the device by that event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

from offloadkit.errors import EngineStateError
from offloadkit.offload.layers import FlatLayer, Slot
from offloadkit.offload.streams import Event, compute_stream


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as `view`, as a tensor with a storage and a version counter of its own.

    Saving code takes tensors of one storage for tied weights, and pickles whole storages; a flat layer's parameters
    must look like separate tensors to it.
    """
    conversions: Any = dlpack
    tensor: torch.Tensor = conversions.from_dlpack(conversions.to_dlpack(view))
    return tensor


class PendingUpdate:
    """A layer's new weights, on their way. `recorded` is set once `arrived` may be waited for."""

    def __init__(self) -> None:
        self.recorded = threading.Event()
        self.arrived: Event | None = None

    def record(self, arrived: Event | None) -> None:
        self.arrived = arrived
        self.recorded.set()


class LayerWeights:
    """The working weights of one flat layer on the device.

    Attributes:
        flat: 1-D tensor of the layer's dtype, `layer.numel` elements; every slot's parameter is a view of it.
        pending: the update that forward has not waited for yet.
    """

    def __init__(self, layer: FlatLayer, device: torch.device) -> None:
        self.layer = layer
        self.device = device
        self.flat = torch.zeros(layer.numel, dtype=layer.dtype, device=device)
        self.pending: PendingUpdate | None = None
        self.waited_seconds = 0.0
        self._places: list[tuple[int, int]] = []

    def bind(self) -> None:
        """Make every slot's parameter a view of `flat`."""
        for slot in self.layer.slots:
            view = own_storage(self.flat[slot.start : slot.start + slot.numel])
            slot.parameter.data = view.view(slot.parameter.shape)
        self._places = self._placed()

    def _placed(self) -> list[tuple[int, int]]:
        return [(slot.parameter.data_ptr(), slot.parameter._version) for slot in self.layer.slots]

    def wait(self) -> None:
        """Let the compute stream use the layer only after its pending update."""
        pending = self.pending
        if pending is None:
            return
        if not pending.recorded.is_set():
            started = time.perf_counter()
            pending.recorded.wait()
            self.waited_seconds += time.perf_counter() - started
        if pending.arrived is not None:
            pending.arrived.delay(compute_stream(self.device))
        self.pending = None

    def take_waited_seconds(self) -> float:
        """Seconds that forward was blocked here since the last call."""
        waited, self.waited_seconds = self.waited_seconds, 0.0
        return waited

    def written_outside(self) -> list[Slot]:
        """Slots whose parameters were written in place since the last call (a reloaded checkpoint, an EMA).

        Raises:
            EngineStateError: a parameter lies elsewhere now: the model was moved or cast.
        """
        places, written = self._placed(), []
        for slot, (address, version), (old_address, old_version) in zip(
            self.layer.slots, places, self._places, strict=True
        ):
            if address != old_address:
                raise EngineStateError(
                    f"parameter {slot.name!r} was moved or cast after the engine was built (model.to(), .half(), "
                    "or an assignment to .data): close the engine first, then move the model and build a new one"
                )
            if version != old_version:
                written.append(slot)
        self._places = places
        return written


class Gates:
    """Forward pre-hooks that wait for layers, and notice in which order forward asks for them."""

    def __init__(self, model: nn.Module, weights: Sequence[LayerWeights]) -> None:
        self._weights = weights
        self._asked: dict[int, int] = {}
        self._hooks = [model.register_forward_pre_hook(self._at_root)]
        layers_of: dict[nn.Module, list[LayerWeights]] = {}
        for weight in weights:
            for module in weight.layer.modules:
                layers_of.setdefault(module, []).append(weight)
        for module, layers in layers_of.items():
            self._hooks.append(module.register_forward_pre_hook(self._gate(layers)))
        self._at_root_too: set[LayerWeights] = set()

    def _gate(self, layers: list[LayerWeights]) -> Callable[..., None]:
        def wait(module: nn.Module, args: Any) -> None:
            for weight in layers:
                self._asked.setdefault(weight.layer.index, len(self._asked))
                weight.wait()

        return wait

    def _at_root(self, module: nn.Module, args: Any) -> None:
        for weight in self._weights if not torch.is_grad_enabled() else self._at_root_too:
            weight.wait()

    def used_without_forward(self, weight: LayerWeights) -> None:
        """A gradient came for a layer none of whose modules ran: from now on the whole model's forward waits for it."""
        if weight.layer.index not in self._asked:
            self._at_root_too.add(weight)

    def forward_order(self) -> list[LayerWeights]:
        """The layers in the order in which forward first asked for them; those never asked for come first."""
        return sorted(self._weights, key=lambda weight: self._asked.get(weight.layer.index, -1))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Use(torch.autograd.Function):
    """One use of a tied weight: its gradient goes to `sink` and not into autograd's sum, which would round to bf16."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sink: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.sink = sink
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.sink(*gradients)
        return None, None


_use: Any = _Use.apply


class TiedUses:
    """While a module that holds a tied weight runs, its attribute is one use of it, with a gradient of its own."""

    def __init__(self, layers: Sequence[FlatLayer], sink: Callable[[Slot, torch.Tensor], None]) -> None:
        self._hooks: list[Any] = []
        slots_of: dict[nn.Module, dict[str, Slot]] = {}
        for slot in (slot for layer in layers for slot in layer.slots if slot.shared):
            for module, attribute in slot.owners:
                slots_of.setdefault(module, {})[attribute] = slot
        for module, slots in slots_of.items():
            self._hooks += self._watch(module, slots, sink)

    def _watch(
        self, module: nn.Module, slots: dict[str, Slot], sink: Callable[[Slot, torch.Tensor], None]
    ) -> list[Any]:
        def enter(entered: nn.Module, args: Any) -> None:
            if entered is not module:  # a deepcopy, which took the hook along
                return
            for attribute, slot in slots.items():
                if torch.is_grad_enabled() and slot.parameter.requires_grad:
                    use = _use(slot.parameter, lambda gradient, slot=slot: sink(slot, gradient))
                    module.__dict__[attribute] = use  # found before nn.Module's own _parameters

        def leave(left: nn.Module, args: Any, output: Any) -> None:
            for attribute in slots:
                left.__dict__.pop(attribute, None)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def move_rest(model: nn.Module, trained: set[nn.Parameter], device: torch.device, working_dtype: str) -> None:
    """Bring frozen parameters and buffers to `device`; frozen ones take the working dtype where one was chosen."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(working_dtype)
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.data = parameter.data.to(device, dtype if parameter.dtype.is_floating_point else None)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
