"""Working weights: flat buffers on the device, the parameters that are views of them, and the forward_hooks of forward.

A *gate* is a forward pre-hook that makes forward wait for a layer's newest weights: on the host until the stepping
thread has recorded the copy's event, then on the device by that event.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import dlpack

from offloadkit.device import trace
from offloadkit.device.streams import Event, Waits
from offloadkit.errors import EngineStateError
from offloadkit.hardware import trim_heap
from offloadkit.offload.layers import FlatLayer, ParameterView, stays_fp32
from offloadkit.optim.table import DTYPES, Dtype


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
    """The working weights of one flat layer, wherever they live; every view's parameter is a view of them.

    Attributes:
        pending: the update that forward has not waited for yet.
        num_updates: how many there were.
        stepped_on_gpu: whether that is a step, and not a copy, on the device.
    """

    def __init__(self, layer: FlatLayer, device: torch.device, waits: Waits) -> None:
        self.layer = layer
        self.device = device
        self.pending: PendingUpdate | None = None
        self.num_updates = 0
        self.stepped_on_gpu = False
        self._waits = waits
        self._bound: list[torch.Tensor] = []
        self._versions: list[int] = []

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Every view's part of `flat` (1-D, `layer.numel` elements) in its parameter's shape."""
        return [
            own_storage(flat[view.start : view.start + view.numel]).view(view.parameter.shape)
            for view in self.layer.views
        ]

    def bind(self, tensors: list[torch.Tensor]) -> None:
        """Make every view's parameter the view given for it."""
        for view, tensor in zip(self.layer.views, tensors, strict=True):
            view.parameter.data = tensor
        self._bound = tensors

    def start(self, flat: torch.Tensor) -> None:
        """Bind the parameters for the first time; gradients from before are dropped."""
        for view in self.layer.views:
            view.parameter.grad = None
        self.bind(self.tensors(flat))
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [view.parameter._version for view in self.layer.views]

    def wait(self) -> None:
        """Let the compute stream use the layer only after its pending update."""
        pending = self.pending
        if pending is None:
            return
        if not pending.recorded.is_set():
            with self._waits.blocking():
                pending.recorded.wait()
        if pending.arrived is not None:
            self._waits.delay(pending.arrived, "gpu_step_wait" if self.stepped_on_gpu else "bus_wait")
        self.pending = None

    def use(self) -> None:
        """Have the newest weights in VRAM for what the compute stream does next."""
        self.wait()

    def settle(self) -> None:
        """Have the newest weights where they live, for whoever reads or writes the parameters."""
        self.wait()

    def check_waited(self, views: Sequence[ParameterView]) -> None:
        """
        Raises:
            EngineStateError: gradients of `views`, which were stepped before, come though forward never waited for the
                update: it may have read weights that were being stepped.
        """
        if views and self.pending is not None:
            raise EngineStateError(
                f"forward read {views[0].name!r} while it was being stepped: in earlier steps its module ran, in this "
                "one the parameter was used without it (F.linear(x, module.weight)). Call the module in every step, "
                "or engine.synchronize() before such a forward"
            )

    def check_seen(self, num_updates: int) -> None:
        """
        Raises:
            EngineStateError: there were more updates than a forward had seen whose backward needs the weights.
        """
        if self.num_updates != num_updates:
            raise EngineStateError(
                f"the weights of {self.layer.name!r} were stepped since this loss was computed: call "
                "engine.backward(loss) before engine.step(), or compute the loss again"
            )

    def check_held(self, view: ParameterView) -> None:
        """A gradient of `view` arrives: what it was computed from must have been there until now."""

    def start_update(self, views: set[int]) -> PendingUpdate:
        """From here on forward waits; a graph that saved the old weights of `views` fails, as after any torch step."""
        torch.autograd.graph.increment_version([self.layer.views[index].parameter for index in views])
        self._versions = self._present_versions()
        self.pending, self.num_updates = PendingUpdate(), self.num_updates + 1
        return self.pending

    def written_outside(self) -> list[ParameterView]:
        """Views whose parameters were written in place since the last call (a reloaded checkpoint, an EMA).

        Raises:
            EngineStateError: a parameter lies elsewhere now: the model was moved or cast.
        """
        written = []
        for view, bound, old in zip(self.layer.views, self._bound, self._versions, strict=True):
            if view.parameter.data_ptr() != bound.data_ptr():
                raise EngineStateError(
                    f"parameter {view.name!r} was moved or cast after the engine was built (model.to(), .half(), "
                    "or an assignment to .data): close the engine first, then move the model and build a new one"
                )
            if view.parameter._version != old:
                written.append(view)
        self._versions = self._present_versions()
        return written


class ResidentWeights(LayerWeights):
    """The working weights of a flat layer that stays in VRAM.

    Attributes:
        flat: 1-D tensor on the device, `layer.numel` elements of its dtype.
    """

    def __init__(self, layer: FlatLayer, flat: torch.Tensor, waits: Waits) -> None:
        super().__init__(layer, flat.device, waits)
        self.flat = flat


class ForwardHooks:
    """Hooks that wait for layers, and notice in which order forward asks for them.

    A repeated block's forward waits for its layers, that of a module outside the blocks for its own; modules inside a
    block have no hook, unless the block is a mere list, which never runs. Forward of the whole model waits for layers
    that nothing else waits for, and without gradients (evaluation) for all. `state_dict` and `load_state_dict` of any
    module wait for its layers.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[LayerWeights], settle: weakref.WeakMethod[Callable[[], None]]
    ) -> None:
        """
        Args:
            settle: called before the whole model's weights are saved or loaded.
        """
        self._model: nn.Module | None = model
        self._weights, self._settle = weights, settle
        self._asked: dict[LayerWeights, int] = {}
        self._at_root_too: set[LayerWeights] = set()
        self._ran: set[nn.Module] = set()
        self._safe: set[ParameterView] = set()
        self._layers_of: dict[nn.Module, list[LayerWeights]] = {}
        self._asking: dict[nn.Module, list[LayerWeights]] = {}
        for weight in weights:
            for module in weight.layer.modules:
                self._layers_of.setdefault(module, []).append(weight)
            for module in _first_to_run(weight.layer):
                self._asking.setdefault(module, []).append(weight)
        at_root, ask, wait = self._hook_functions()
        # First in line: another hook may read the weights (torch.nn.utils.weight_norm does).
        self._hooks = [module.register_forward_pre_hook(ask, prepend=True) for module in self._asking]
        self._hooks.append(model.register_forward_pre_hook(at_root, prepend=True))
        for module in dict.fromkeys([model, *self._layers_of]):
            untyped: Any = module
            self._hooks += [
                untyped.register_state_dict_pre_hook(wait),
                untyped.register_load_state_dict_pre_hook(wait),
            ]

    def _hook_functions(self) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
        """Functions, not methods: a deepcopy of the model takes them along, and must not copy this object."""

        def at_root(module: nn.Module, args: Any) -> None:
            if module is not self._model:
                return
            training = torch.is_grad_enabled()
            pending = [weight for weight in (self._at_root_too if training else self._weights) if weight.pending]
            for weight in pending:
                weight.wait()
            if pending and not training:
                wait(module)

        def ask(module: nn.Module, args: Any) -> None:
            for weight in self._asking.get(module, ()):
                self._ran.add(module)
                self._asked.setdefault(weight, len(self._asked))
                weight.use()
                if (tracing := trace.active()) is not None:
                    tracing.asks_for(weight.layer.name)

        def wait(module: nn.Module, *args: Any) -> None:
            for weight in self._layers_of.get(module, ()):
                weight.settle()
            settle = self._settle() if module is self._model else None
            if settle is not None:
                settle()

        return at_root, ask, wait

    def got_gradient(self, weight: LayerWeights, view: ParameterView) -> None:
        """`view` was used: if a module that holds it never ran, nor its block, the whole model's forward waits for the
        layer from now on (`F.linear(x, self.embed.weight)`)."""
        if view not in self._safe:
            self._safe.add(view)
            if weight.layer.block not in self._ran and any(owner not in self._ran for owner, _ in view.owners):
                self._at_root_too.add(weight)

    def forward_order(self) -> list[LayerWeights]:
        """The layers in the order in which forward asks for them; first those that the whole model waits for."""
        asked = {weight: at for weight, at in self._asked.items() if weight not in self._at_root_too}
        return sorted(self._weights, key=lambda weight: asked.get(weight, -1))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._layers_of.clear()  # a deepcopy of the model may keep the hooks alive
        self._asking.clear()
        self._model, self._weights = None, ()


def _first_to_run(layer: FlatLayer) -> Sequence[nn.Module]:
    """The modules before whose forward the layer is waited for: its block, where that has a forward."""
    is_list = isinstance(layer.block, nn.ModuleList | nn.ModuleDict)
    return layer.modules if layer.block is None or is_list else [layer.block]


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

    def __init__(self, layers: Sequence[FlatLayer], sink: Callable[[ParameterView, torch.Tensor], None]) -> None:
        self._hooks: list[Any] = []
        self._views_of = views_of = dict[nn.Module, dict[str, ParameterView]]()
        for view in (view for layer in layers for view in layer.views if view.shared):
            for module, attribute in view.owners:
                views_of.setdefault(module, {})[attribute] = view
        for module, views in views_of.items():
            self._hooks += self._watch(module, views, sink)

    def _watch(
        self, module: nn.Module, views: dict[str, ParameterView], sink: Callable[[ParameterView, torch.Tensor], None]
    ) -> list[Any]:
        def enter(entered: nn.Module, args: Any) -> None:
            if entered is not module:  # a deepcopy, which took the hook along
                return
            for attribute, view in views.items():
                if torch.is_grad_enabled() and view.parameter.requires_grad:
                    use = _use(view.parameter, lambda gradient, view=view: sink(view, gradient))
                    module.__dict__[attribute] = use  # found before nn.Module's own _parameters

        def leave(left: nn.Module, args: Any, output: Any) -> None:
            for attribute in views:
                left.__dict__.pop(attribute, None)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, views in self._views_of.items():
            for attribute in views:  # left there by a KeyboardInterrupt, for which torch runs no forward hook
                module.__dict__.pop(attribute, None)


def move_rest(
    model: nn.Module,
    trained: set[nn.Parameter],
    device: torch.device,
    working_dtype: Dtype | Literal["auto"],
    materialise: Callable[[Sequence[nn.Parameter]], None] | None = None,
) -> None:
    """Bring frozen parameters and buffers to `device`; frozen ones take the working dtype where one was chosen."""
    dtype = None if working_dtype == "auto" else DTYPES[working_dtype]
    in_fp32 = stays_fp32(model) if dtype == torch.float16 else set()
    for parameter in model.parameters():
        if parameter not in trained:
            if materialise is not None:
                materialise([parameter])
            wanted = None if not parameter.dtype.is_floating_point else torch.float32 if parameter in in_fp32 else dtype
            parameter.data = parameter.data.to(device, wanted)
            trim_heap()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
