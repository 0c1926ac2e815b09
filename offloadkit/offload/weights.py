"""Working weights: parameters as views of flat buffers, and the hooks that make forward wait for new weights.

Forward waits for a layer's pending update in two stages. The host waits until the stepping thread has recorded the
event of the upload (or of the GPU's step). Then the compute stream waits for that event.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils import dlpack

from offloadkit.device import trace, watchdog
from offloadkit.device.host_memory import on_device
from offloadkit.device.streams import Event, Waits, record_compute
from offloadkit.errors import EngineStateError
from offloadkit.facts.hardware import trim_heap
from offloadkit.offload.external_writes import ExternalWrites, Watched, moved_or_cast, set_data, unwatched
from offloadkit.offload.layers import FlatLayer, ParameterView, frozen_dtypes
from offloadkit.optim.table import Dtype

_version: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_num_forks = 0
"""Of this process and its ancestors. Asking for the process' number takes as long as the rest of a wait."""


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class PendingUpdate:
    """An update of a layer's weights. `arrived` is valid once `recorded` is set.

    Attributes:
        arrived: the compute stream may read the new weights after this event. None: nothing to wait for.
    """

    def __init__(self) -> None:
        self.recorded = threading.Event()
        self.arrived: Event | None = None

    def record(self, arrived: Event | None) -> None:
        """Set the event, and wake up waiting host threads."""
        self.arrived = arrived
        self.recorded.set()


class LayerWeights:
    """The working weights of one flat layer, in VRAM. The parameters are views of them.

    Attributes:
        flat: 1-D, `layer.numel` elements: the weights between steps.
        own: the part of `flat` that this rank steps; `flat` itself at world size 1.
        parameters: of the layer's views.
        pending: an update that forward has not waited for yet.
        num_updates: number of changes, by updates or by the user.
        stepped_on_gpu: the GPU steps the layer. Otherwise the CPU steps it, and the weights are copied to the device.
        bound: the tensors whose memory the parameters share, one for each view.
        used_outside: a parameter was used outside its module, so its gradient may be a sum over several uses.
        is_streamed: the weights visit VRAM, in several places.
    """

    is_streamed: ClassVar[bool] = False

    def __init__(
        self,
        layer: FlatLayer,
        flat: torch.Tensor,
        device: torch.device,
        waits: Waits,
        bring: Callable[[LayerWeights], None] | None = None,
    ) -> None:
        """`bring`: several ranks only: fetches the parts of a pending update that other ranks step."""
        self.layer, self.flat, self.device, self._bring = layer, flat, device, bring
        self.parameters = [view.parameter for view in layer.views]
        shard = layer.shard
        self.own = flat if shard is layer else flat[shard.begin : shard.begin + shard.numel]
        self.pending: PendingUpdate | None = None
        self.num_updates = 0
        self.stepped_on_gpu = self.used_outside = False
        self._waits, self._num_forks = waits, _num_forks
        self.bound: list[torch.Tensor] = []
        self._home: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` (1-D, `layer.numel` elements) in the parameters' shapes.

        Each view has its own storage object and version counter, because code that saves models takes tensors of one
        storage for tied weights, and pickles whole storages.
        """
        to_own: Any = dlpack
        parts = [to_own.from_dlpack(to_own.to_dlpack(flat[view.elements])) for view in self.layer.views]
        with unwatched():
            return [part.view(view.parameter.shape) for part, view in zip(parts, self.layer.views, strict=True)]

    def bind(self, tensors: list[torch.Tensor]) -> None:
        """Make each parameter share the memory of its tensor, one per view."""
        with unwatched():
            for parameter, tensor in zip(self.parameters, tensors, strict=True):
                set_data(parameter, tensor)
        self.bound = tensors

    def start(self) -> None:
        """Bind the parameters to `flat` for the first time, and drop their gradients."""
        for view in self.layer.views:
            view.parameter.grad = None
        self._home = self.tensors(self.flat)
        self._addresses = [tensor.data_ptr() for tensor in self._home]
        self.bind(self._home)
        self._versions = self._present_versions()

    def ignore_earlier_writes(self) -> None:
        """Take the present version counters as those of the settled weights."""
        self._versions = self._present_versions()

    def own_tensors(self) -> list[torch.Tensor]:
        """All known tensors that share the settled weights' memory: bound tensors first, then parameters."""
        bases = (tensor._base for tensor in self.bound)
        return [
            *self.bound,
            *(view.parameter for view in self.layer.views),
            *(each for each in bases if each is not None),
        ]

    def retire(self) -> None:
        """Release the weights, because the layer has new ones. Backward through a graph that saved them will raise."""
        torch.autograd.graph.increment_version([view.parameter for view in self.layer.views])
        self.num_updates += 1
        self.flat, self.bound, self._home, self._versions = torch.empty(0), [], [], []
        self.own = self.flat

    def _present_versions(self) -> list[int]:
        with unwatched():
            return list(map(_version, self.parameters))

    def home(self, view: ParameterView) -> torch.Tensor:
        """The part of `flat` of one parameter, in its shape."""
        return self._home[self.layer.views.index(view)]

    def known_version(self, view: ParameterView) -> int:
        """The parameter's version counter after the last write that was taken over."""
        return self._versions[self.layer.views.index(view)]

    def wait(self) -> None:
        """Make the compute stream wait for the pending update before it uses the layer.

        Raises:
            EngineStateError: in a forked process, which has neither the stepping thread nor pinned memory.
        """
        if self._num_forks != _num_forks:
            raise forked_error(f"the weights of {self.layer.name!r} were")
        pending = self.pending
        if pending is None:
            return
        if self._bring is not None:
            self._bring(self)
        if not pending.recorded.is_set():
            with self._waits.blocking():
                watchdog.wait(pending.recorded, f"the update of {self.layer.name!r}")
        self._wait_for_ranks()
        if pending.arrived is not None:
            self._waits.delay(pending.arrived, "gpu_step_wait" if self.stepped_on_gpu else "bus_wait")
        self.pending = None

    def _wait_for_ranks(self) -> None:
        """Block until other ranks have stepped their parts. Weights in VRAM are gathered instead."""

    def use(self, *, by_copy: bool = False) -> None:
        """Have the newest weights in VRAM. `by_copy`: a computation reads a copy of them, and keeps no views."""
        self.wait()

    def settle(self) -> None:
        self.wait()  # wait: an update before weights are read

    def open(self) -> None:
        """`settle`, when a parameter is accessed outside its module. Raises `EngineStateError` if the weights may not
        be moved now.
        """
        self.wait()  # wait: an update before weights are opened

    def described(self, view: ParameterView) -> torch.Tensor:
        """The tensor that has the parameter's device and layout."""
        return view.parameter

    def for_graph(self, view: ParameterView) -> torch.Tensor:
        """The tensor to use instead of the parameter in an operation outside its module that autograd records.

        It keeps the weights on the compute device until backward, and passes its gradient to the parameter. The
        parameter itself may be bound to other memory in backward if the weights are streamed.
        """
        self.used_outside = True
        return view.parameter

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copy the parameters, wherever they are, to `flat`: 1-D, `layer.numel` elements, on the device."""
        for view in self.layer.views:
            flat[view.elements].view(view.parameter.shape).copy_(view.parameter)

    def bind_to_ram(self) -> None:
        """Bind the parameters to RAM if the weights live there, before the RAM becomes ordinary memory."""

    def begin_write(self) -> None:
        """Called before a write from outside, after the layer's update is done."""

    def changed(self) -> None:
        """Called after a write: backward through results computed before it raises."""
        self.num_updates += 1

    def check_waited(self, views: Sequence[ParameterView]) -> None:
        """Called with the views that have new gradients while an update is pending.

        Raises `EngineStateError` if there are any: forward never waited for their last update, so it may have read
        weights while they were stepped.
        """
        if views:
            raise EngineStateError(
                f"forward read {views[0].name!r} while it was being stepped: in earlier steps its module ran, but in "
                "this step the parameter was used directly (F.linear(x, module.weight)). Call the module in every "
                "step, or engine.synchronize() before such a forward"
            )

    def check_seen(self, num_updates: int) -> None:
        """Raise `EngineStateError` if the weights have changed since this backward's forward."""
        if self.num_updates != num_updates:
            raise EngineStateError(
                f"the weights of {self.layer.name!r} were stepped, written or moved after this loss was computed: call "
                "engine.backward(loss) first, or compute the loss again"
            )

    def check_held(self, view: ParameterView) -> None:
        """Called when a gradient of `view` arrives. Weights that stay in VRAM need no check."""

    def start_update(self, views: set[int]) -> PendingUpdate:
        """Register a new update of `views` (indices). Forward waits for it from now on.

        A graph that saved the old weights raises in backward, as after a step of a torch optimizer.
        """
        torch.autograd.graph.increment_version([self.layer.views[index].parameter for index in views])
        self._versions = self._present_versions()
        self.changed()
        self.pending = PendingUpdate()
        return self.pending

    def external_writes_since(self) -> dict[ParameterView, int]:
        """Views whose parameters were written in place since the last call (a loaded checkpoint, an EMA), with their
        version counters.

        Raises:
            EngineStateError: a parameter has other memory, because the model was moved or cast.
        """
        with unwatched():
            at_home = self.bound is self._home  # bound tensors may have left `flat` if other tensors shared its memory
            addresses = self._addresses if at_home else list(map(torch.Tensor.data_ptr, self.bound))
            if list(map(torch.Tensor.data_ptr, self.parameters)) != addresses:
                views = zip(self.layer.views, addresses, strict=True)
                raise moved_or_cast(next(view for view, address in views if view.parameter.data_ptr() != address))
        before, self._versions = self._versions, self._present_versions()
        if self._versions == before:
            return {}
        versions = zip(self.layer.views, before, self._versions, strict=True)
        return {view: now for view, old, now in versions if now != old}


class LookedUpWeights(LayerWeights):
    """Frozen embeddings in pinned RAM. The parameters are tensors of the device over it, which kernels read."""

    def __init__(
        self, layer: FlatLayer, flat: torch.Tensor, device: torch.device, waits: Waits, *, is_shared: bool
    ) -> None:
        """is_shared: several ranks have the same memory."""
        super().__init__(layer, flat, device, waits)
        self._is_shared = is_shared

    def tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return super().tensors(on_device(flat, self.device))

    def bind_to_ram(self) -> None:
        record_compute(self.device).synchronize()  # wait: lookups before a write
        self.bind(super().tensors(self.flat))

    def begin_write(self) -> None:
        """
        Raises:
            EngineStateError: several ranks share the memory, so that each of them would write it.
        """
        if self._is_shared:
            raise EngineStateError(
                f"the frozen embeddings {self.layer.name!r} are in RAM that several ranks share, and cannot be "
                "written: close the engine before, or train with Placement(weights='vram')"
            )


def forked_error(what: str) -> EngineStateError:
    return EngineStateError(
        f"{what} used in a forked process, such as a DataLoader worker: the engine exists only in the training "
        "process. Copy the worker's data before it starts (parameter.detach().clone()), or load the data with "
        "num_workers=0"
    )


def _check_not_traced() -> None:
    """Raise `EngineStateError` if torch.compile traces, in training, a module whose weights the engine moves."""
    if torch.is_grad_enabled() and torch.compiler.is_dynamo_compiling():
        untyped: Any = torch.compiler
        untyped.disable(_refuse_compilation)()  # an error raised in a traced function would only make dynamo give up


def _refuse_compilation() -> None:
    raise EngineStateError(
        "torch.compile() of a trained model: its code for the hooks that wait for weights depends on the placement, "
        "and so would the numbers. OffloadConfig(compile_blocks=True) compiles the blocks; under torch.no_grad() the "
        "whole model may be compiled"
    )


class ForwardHooks:
    """Hooks that wait for a layer's weights before a module uses them, and record the layers' order of use.

    - The forward of a repeated block waits for the block's layers. In a list of modules, the members wait.
    - The forward of a module outside the blocks waits for the module's layer.
    - The forward of the whole model waits for layers that no other module waits for; without gradients, for all.
    - `state_dict` and `load_state_dict` of any module wait for its layers. On the whole model they also call `settle`.
    - While such a module runs, and while its weights are loaded, `external_writes` does not watch its parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Sequence[LayerWeights],
        settle: weakref.WeakMethod[Callable[[], None]],
        external_writes: ExternalWrites,
        reads_copies: Callable[[nn.Module], bool],
    ) -> None:
        """`reads_copies`: whether a module's forward reads copies of the weights, or calls `LayerWeights.use` before it
        reads them.
        """
        self._reads_copies = reads_copies
        self._model: nn.Module | None = model
        self._weights, self._settle, self._external_writes = weights, settle, external_writes
        self._order_of_use: dict[LayerWeights, int] = {}
        self._waited_at_root: set[LayerWeights] = set()
        self._ran: set[nn.Module] = set()
        self._layers_of: dict[nn.Module, list[LayerWeights]] = {}
        self._waiting_for: dict[nn.Module, list[LayerWeights]] = {}
        for weight in weights:
            for module in weight.layer.modules:
                self._layers_of.setdefault(module, []).append(weight)
            for module in _first_to_run(weight.layer):
                self._waiting_for.setdefault(module, []).append(weight)
        at_root, ask, wait = self._hook_functions()
        load, watch = self._loading(wait)
        # These hooks run first: another hook may read the weights (torch.nn.utils.weight_norm does).
        self._hooks = [module.register_forward_pre_hook(ask, prepend=True) for module in self._waiting_for]
        self._hooks += [module.register_forward_hook(watch, always_call=True) for module in self._waiting_for]
        self._hooks.append(model.register_forward_pre_hook(at_root, prepend=True))
        for module in dict.fromkeys([model, *self._layers_of]):
            untyped: Any = module
            self._hooks += [untyped.register_state_dict_pre_hook(wait), untyped.register_load_state_dict_pre_hook(load)]
            self._hooks.append(untyped.register_load_state_dict_post_hook(watch))

    def _hook_functions(self) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:

        def at_root(module: nn.Module, args: Any) -> None:
            _check_not_traced()
            training = torch.is_grad_enabled()
            pending = [weight for weight in (self._waited_at_root if training else self._weights) if weight.pending]
            for weight in pending:
                weight.wait()  # wait: updates before a forward reads weights by itself
            if pending and not training:
                wait(module)

        def ask(module: nn.Module, args: Any) -> None:
            _check_not_traced()
            by_copy = self._reads_copies(module)
            for weight in self._waiting_for.get(module, ()):
                self._ran.add(module)
                self._order_of_use.setdefault(weight, len(self._order_of_use))
                weight.use(by_copy=by_copy)
                self._external_writes.release(weight.layer)
                if (tracing := trace.active()) is not None:
                    tracing.reaches_layer(weight.layer.name)

        def wait(module: nn.Module, *args: Any) -> None:
            for weight in self._layers_of.get(module, ()):
                weight.settle()
            settle = self._settle() if module is self._model else None
            if settle is not None:
                settle()

        return at_root, ask, wait

    def _loading(self, wait: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks before loading a module's weights, and after loading or forward."""

        def load(module: nn.Module, *args: Any) -> None:
            wait(module)
            for weight in self._layers_of.get(module, ()):
                weight.begin_write()
                self._external_writes.release(weight.layer)

        def watch(module: nn.Module, *args: Any) -> None:
            for weight in self._layers_of.get(module, ()):
                self._external_writes.watch(weight.layer)

        return load, watch

    def got_gradient(self, weight: LayerWeights, view: ParameterView) -> None:
        """Called on the first gradient of `view`. If no hook waited for it, the whole model's forward will wait.

        This happens if neither the block nor all owner modules ran, as in `F.linear(x, self.embed.weight)`.
        """
        if weight.layer.block not in self._ran and any(owner not in self._ran for owner, _ in view.owners):
            self._waited_at_root.add(weight)

    def forward_order(self) -> list[LayerWeights]:
        """Layers in the order of use in forward. Layers that the whole model waits for come first."""
        asked = {weight: at for weight, at in self._order_of_use.items() if weight not in self._waited_at_root}
        return sorted(self._weights, key=lambda weight: asked.get(weight, -1))

    def exchange(self, old: LayerWeights, new: LayerWeights) -> None:
        """Replace `old` by `new`, the weights of the same layer in another placement."""
        self._weights = [new if weight is old else weight for weight in self._weights]
        for table in (self._layers_of, self._waiting_for):
            for module in new.layer.modules:
                if module in table:
                    table[module] = [new if weight is old else weight for weight in table[module]]
        if old in self._order_of_use:
            self._order_of_use[new] = self._order_of_use.pop(old)
        if old in self._waited_at_root:
            self._waited_at_root.remove(old)
            self._waited_at_root.add(new)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._layers_of.clear()
        self._waiting_for.clear()
        self._model, self._weights = None, ()


def _first_to_run(layer: FlatLayer) -> Sequence[nn.Module]:
    """The modules whose forward waits for the layer: its block if that has a forward, otherwise its modules."""
    is_list = isinstance(layer.block, nn.ModuleList | nn.ModuleDict)
    return layer.modules if layer.block is None or is_list else [layer.block]


class _Use(torch.autograd.Function):
    """One use of a tied weight. Its gradient goes to `sink`, because autograd would add the uses' gradients in bf16.

    If the user has hooks on the weight's gradient, autograd does add the gradients, because hooks must see the sum.
    Outside `engine.backward` autograd adds them too: `autograd.grad` returns the sum, and `loss.backward()` meets the
    engine's hook.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, view: ParameterView, sink: _Sink) -> torch.Tensor:
        ctx.view, ctx.sink = view, sink
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, None, None]:
        if has_hooks(ctx.view.parameter) or isinstance(ctx.view.parameter, Watched):
            return gradients[0], None, None
        ctx.sink(ctx.view, *gradients)
        return None, None, None


_Sink = Callable[[ParameterView, torch.Tensor], None]
_use: Any = _Use.apply


def has_hooks(parameter: Any) -> bool:
    """Whether the user has hooks on the parameter's gradient."""
    return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > 1


class TiedUses:
    """Hooks that pass the gradient of every use of a tied weight to `sink` separately, in the parameter's shape.

    While a module with a tied weight runs, its attribute is a `_Use` of the weight instead of the parameter.
    """

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
            for attribute, view in views.items():
                if torch.is_grad_enabled() and view.parameter.requires_grad:
                    use = _use(view.parameter, view, sink)
                    module.__dict__[attribute] = use  # Python looks here before nn.Module's _parameters

        def leave(left: nn.Module, args: Any, output: Any) -> None:
            for attribute in views:
                left.__dict__.pop(attribute, None)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.end()

    def end(self) -> None:
        """Restore the parameters as attributes. Needed after an interrupt, because torch skips forward hooks then."""
        for module, views in self._views_of.items():
            for attribute in views:
                module.__dict__.pop(attribute, None)


def move_rest(
    model: nn.Module,
    placed: set[nn.Parameter],
    device: torch.device,
    working_dtype: Dtype | Literal["auto"],
    make_real: Callable[[Sequence[nn.Parameter]], None],
) -> None:
    """Move parameters in no flat layer and buffers to `device`, and cast parameters to the working dtype unless "auto".

    Args:
        placed: the parameters in flat layers; they are left alone.
        make_real: reads or draws parameters on the meta device.
    """
    rest = [parameter for parameter in model.parameters() if parameter not in placed]
    for parameter, dtype in frozen_dtypes(model, rest, working_dtype).items():
        make_real([parameter])
        there = parameter.data.to(device, dtype)
        if there.data_ptr() != parameter.data_ptr() or there.is_meta:
            parameter.data = there
        trim_heap()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
