"""Tracks reads and writes of the weights by the program around the engine.

Between forwards, a trained parameter has a *watched* subclass whose `__torch_function__` sees every operation on it.
Before an operation, the layer's update is finished and streamed weights are bound to RAM. While a module runs, and in
backward, its parameters are plain; in backward, parameters of streamed blocks that are not in use are *guarded*
(`weight_ring.py`).

`.data`, `.detach()` and views taken between steps are watched too. They share the parameter's version counter, by which
a step finds written weights. If the write was seen here, weights whose bits did not change keep their master's lower
bits. Writes that bypass Python's torch (raw pointers, storages, DLPack) are not found; numpy arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offloadkit.errors import EngineStateError
from offloadkit.offload.layers import FlatLayer, ParameterView

unwatched: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which watched parameters behave as plain parameters."""
_is_watching: Any = torch._C._is_torch_function_enabled
set_data: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""`parameter.data = tensor`, bypassing the Python property of watched parameters."""

_detach: Any = torch.Tensor.detach
_register_hook: Any = torch.Tensor.register_post_accumulate_grad_hook
_get_data: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_requires_grad: Any = torch.Tensor.requires_grad
_grad: Any = torch.Tensor.grad
grad_of: Any = _grad.__get__
"""A parameter's gradient, past the Python properties of watched and guarded parameters, in `unwatched`."""


class WatchedLayer(Protocol):
    """A layer whose parameters can be watched."""

    layer: FlatLayer

    def open(self) -> None:
        """Have the newest weights in the tensors that `home` returns."""

    def use(self) -> None:
        """Have the newest weights in VRAM, for a computation."""

    def home(self, view: ParameterView) -> torch.Tensor:
        """The tensor that holds the parameter's weights, in the parameter's shape."""

    def described(self, view: ParameterView) -> torch.Tensor:
        """The tensor that has the parameter's device and layout."""

    def has_gradient(self, view: ParameterView) -> bool:
        """Whether a gradient of the parameter is pending for the next step."""

    def for_graph(self, view: ParameterView) -> torch.Tensor:
        """The tensor to use instead of the parameter in an operation that autograd records."""

    def before_write(self, view: ParameterView) -> torch.Tensor | None:
        """Called before an operation writes the parameter; the result is passed to `after_write`."""

    def after_write(self, view: ParameterView, before: torch.Tensor | None) -> None:
        """Called after an operation has written the parameter."""


@dataclass(eq=False, slots=True)
class _Place:
    external_writes: ExternalWrites
    layer: WatchedLayer | None
    """None after the engine is closed."""
    view: ParameterView
    plain: type
    watched: type
    guarded: type
    memory: int
    """Address of the weights' storage; 0 if it is empty."""

    def open(self) -> None:
        if self.layer is not None:
            self.layer.open()


_Touched = dict[_Place, torch.Tensor | None]
"""Parameters that an operation uses, with the alias through which it uses them."""


class ExternalWrites:
    """Watches the trained parameters of one engine, across moves of their layers."""

    def __init__(
        self,
        layers: Sequence[WatchedLayer],
        finish_updates: Callable[[], None],
        got_hook: Callable[[torch.Tensor], None],
        device: torch.device,
    ) -> None:
        """
        Args:
            finish_updates: waits until no layer is being stepped; called before a write.
            got_hook: called when a post-accumulate hook is registered on a parameter.
        """
        self._finish_updates, self._released, self.device = finish_updates, False, device
        self.got_hook = got_hook
        kinds: dict[type, tuple[type, type]] = {}
        self._places: dict[int, _Place] = {}
        self._of_layer: dict[FlatLayer, list[_Place]] = {}
        for layer in layers:
            places = self._of_layer[layer.layer] = []
            for view in layer.layer.views:
                plain = type(view.parameter)
                if plain not in kinds:
                    kinds[plain] = _kind_of(Watched, plain, self), _kind_of(Guarded, plain, self)
                place = _Place(self, layer, view, plain, *kinds[plain], _memory(layer.home(view)))
                self._places[id(view.parameter)] = place
                places.append(place)
        self.watch_all()

    def watch(self, layer: FlatLayer) -> None:
        """Watch the layer's parameters, after the module that used them has run."""
        if not self._released:
            for place in self._of_layer[layer]:
                place.view.parameter.__class__ = place.watched

    def release(self, layer: FlatLayer) -> None:
        """Make the layer's parameters plain, before a module uses them. Their newest weights must be ready."""
        for place in self._of_layer.get(layer, ()):
            place.view.parameter.__class__ = place.plain

    def guard(self, layer: FlatLayer) -> None:
        """In backward: any computation with the layer's parameters fetches them to VRAM first, until `release`."""
        for place in self._of_layer.get(layer, ()):
            place.view.parameter.__class__ = place.guarded

    @contextmanager
    def released(self) -> Iterator[None]:
        """While open, no parameter is watched, and the engine itself waits for updates."""
        before, self._released = self._released, True
        for layer in self._of_layer:
            self.release(layer)
        try:
            yield
        finally:
            self._released = before
            self.watch_all()

    def moved(self, layer: WatchedLayer) -> None:
        """Register a layer's new state after a move. Aliases taken before the move raise from now on."""
        for place in self._of_layer[layer.layer]:
            place.layer, place.memory = layer, _memory(layer.home(place.view))

    def close(self) -> None:
        """Stop watching. Tensors that were handed out remain usable and hold no layer."""
        for layer in self._of_layer:
            self.release(layer)
        for place in self._places.values():
            place.layer = None
        self._of_layer.clear()
        self._places.clear()
        del self._finish_updates, self.got_hook

    def watch_all(self) -> None:
        for layer in self._of_layer:
            self.watch(layer)

    def place_of(self, parameter: torch.Tensor) -> _Place:
        return self._places[id(parameter)]

    def finish_updates(self) -> None:
        self._finish_updates()

    def check_gradient(self, parameter: Any) -> None:
        """Raise `EngineStateError`, because the engine holds the gradient, so `.grad` must not be used."""
        place = self._places[id(parameter)]
        if place.layer is not None and place.layer.has_gradient(place.view):
            raise EngineStateError(
                f"the engine holds the gradient of {place.view.name!r}, so .grad does not. To clip, set "
                "OffloadConfig(max_grad_norm=...) instead of calling clip_grad_norm_; engine.grad_norm() returns the "
                "norm after step(). To drop the gradients, call engine.drop_gradients() or "
                "engine.optimizer.zero_grad(). torch.amp.GradScaler is not needed: the engine scales the loss of fp16 "
                "itself"
            )


class Watched:
    """A trained parameter while no module uses it and no backward runs."""

    __slots__ = ()
    external_writes: ExternalWrites

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _touch(func, args, kwargs or {})

    # Trainers and weight averages use these members on every parameter in every step, and `__torch_function__` takes
    # two to three times as long.

    def numel(self) -> int:
        parameter: Any = self
        return self.external_writes.place_of(parameter).view.numel

    @property
    def requires_grad(self) -> bool:
        with unwatched():
            return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with unwatched():
            _requires_grad.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        self.external_writes.check_gradient(self)
        with unwatched():
            gradient: torch.Tensor | None = _grad.__get__(self)
            return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.external_writes.check_gradient(self)
        with unwatched():
            _grad.__set__(self, value)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        parameter: Any = self
        watching = _is_watching()
        with unwatched():
            handle = _register_hook(parameter, hook)
            if watching:
                self.external_writes.got_hook(parameter)
        return handle

    def detach(self) -> torch.Tensor:
        parameter: Any = self
        detached: torch.Tensor
        if not _is_watching():
            detached = _detach(parameter)
            return detached
        place = self.external_writes.place_of(parameter)
        place.open()
        with unwatched():
            detached = _aliased(_detach(parameter), {place.memory: place})
            return detached

    @property
    def data(self) -> torch.Tensor:
        """Shares the version counter, as `.detach()` does."""
        return self.detach() if _is_watching() else _get_data(self)

    @data.setter
    def data(self, value: Any) -> None:
        if _is_watching():
            _touch(set_data, (self, value), {})
        else:
            set_data(self, value)

    def share_memory_(self) -> Any:
        parameter: Any = self
        raise moved_or_cast(self.external_writes.place_of(parameter).view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._opened() as parameter:
            return deepcopy(parameter, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain parameter with the newest weights."""
        with self._opened() as parameter:
            return parameter.__reduce_ex__(protocol)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        parameter: Any = self
        place = self.external_writes.place_of(parameter)
        place.open()
        parameter.__class__ = place.plain
        try:
            yield parameter
        finally:
            parameter.__class__ = place.watched


class Guarded:
    """A trained parameter in backward, while its block is not in use. `torch.utils.checkpoint` may use it without
    running the block's hooks.
    """

    __slots__ = ()
    external_writes: ExternalWrites

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _kind(func) != "fact":
            for parameter in _guarded_in((args, kwargs)):
                layer = parameter.external_writes.place_of(parameter).layer
                assert layer is not None  # no engine closes in backward
                layer.use()
        with unwatched():
            return func(*args, **kwargs)

    # The engine's hook asks for the gradient of every parameter.

    @property
    def grad(self) -> torch.Tensor | None:
        with unwatched():
            gradient: torch.Tensor | None = _grad.__get__(self)
            return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with unwatched():
            _grad.__set__(self, value)


def _guarded_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Guarded):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _guarded_in(item)
    elif isinstance(value, dict):
        yield from _guarded_in(list(value.values()))


def _kind_of(seen: type, plain: type, external_writes: ExternalWrites) -> type:
    body = {"external_writes": external_writes, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    kind: type = type(plain)(plain.__name__, (seen, plain), body)
    return kind


class Alias(torch.Tensor):
    """A tensor that shares a watched parameter's memory (`.data`, `.detach()`, a view) and wraps the tensor
    `_plain`.
    """

    _place: _Place
    _plain: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _touch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        self._place.open()
        return deepcopy(self._plain, memo)


_FACTS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "is_shared", "is_inference"),
        *("requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "get_device"),
        *("_is_view", "has_names", "__dlpack_device__"),
        "grad",  # of torch.autograd: it needs the parameters themselves, where the forward left them
    )
)
"""Functions that neither read nor write the weights."""
_OF_LAYOUT = frozenset(
    (
        *("device", "is_cuda", "is_cpu", "get_device", "__dlpack_device__", "is_pinned", "is_shared"),
        *("stride", "is_contiguous", "storage_offset"),
    )
)
"""Those of them, and the attributes, that depend on where the weights are."""
_READING_GETTERS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)}


@cache
def _kind(func: Any) -> str:
    """The effect of a function on the weights: "fact" (neither reads nor writes), "reads" or "writes"."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        if attribute == "data":
            return "reads" if name == "__get__" else "writes"
        return "reads" if attribute in _READING_GETTERS else "fact"
    if name in _FACTS:
        return "fact"
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return "writes" if in_place else "reads"


@cache
def _is_of_layout(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (func.__self__.__name__ if name == "__get__" else name) in _OF_LAYOUT


def _touch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on watched parameters and aliases with the newest weights, and record writes."""
    kind = _kind(func)
    first = args[0] if args else None
    if kind == "fact":
        if type(first) is not Alias:
            with unwatched():
                if isinstance(first, Watched) and _is_of_layout(func):
                    place = first.external_writes.place_of(args[0])
                    if place.layer is not None:
                        args = (place.layer.described(place.view), *args[1:])
                return func(*args, **kwargs)
        with unwatched():
            result = func(first._plain, *args[1:], **kwargs)
        return first if result is first._plain else result
    read: _Touched = {}
    written: _Touched = {}
    writes = kind == "writes"
    args = (_plain(first, written), *_plain(args[1:], read)) if writes and args else _plain(args, read)
    if kwargs:
        kwargs = _plain(kwargs, written if "out" in kwargs or (writes and not args) else read)
    with unwatched():
        _have_newest(read)
        if written:
            _have_newest(written)
        if func == _get_data:
            func = torch.Tensor.detach
        elif func == set_data:
            func, args = _assignment(args[0], args[1], written)
        elif func is torch.Tensor.__repr__ and isinstance(first, Watched):
            args = (args[0].detach().requires_grad_(args[0].requires_grad), *args[1:])
        before = _begin_writes(written) if written else ()
        if written:
            args, kwargs = _at_home(args, written), _at_home(kwargs, written)
        result = _recorded(func, args, kwargs, read) if read and not writes else None
        if result is None:
            result = func(*args, **kwargs)
        if func is torch._has_compatible_shallow_copy_type and not result:  # `nn.Module.to` would replace the parameter
            raise moved_or_cast(next(iter(read)).view)
        for layer, view, old in before:
            layer.after_write(view, old)
        if result is None or result is first:
            return result
        if type(first) is Alias and result is first._plain:
            return first
        return _aliased(result, {place.memory: place for place in (*read, *written) if place.layer is not None})


_UNRECORDED = frozenset(
    (
        *("detach", "data_ptr", "untyped_storage", "storage", "_typed_storage", "is_set_to", "__dlpack__", "__repr__"),
        *("__reduce_ex__", "__deepcopy__", "_has_compatible_shallow_copy_type"),
    )
)
"""Functions that need the parameter itself and that autograd does not record."""


def _recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: _Touched) -> Any:
    """Run an operation that autograd records on parameters whose memory has other contents in backward.

    Returns None if the operation is not such a case, and was not run.
    """
    if not torch.is_grad_enabled() or getattr(func, "__name__", "") in _UNRECORDED:
        return None
    uses: dict[int, torch.Tensor] = {}
    for place, alias in read.items():
        parameter = place.view.parameter
        if alias is not None or place.layer is None:
            continue
        if parameter.requires_grad or not place.layer.layer.kind.is_trained:
            use = place.layer.for_graph(place.view)
            if use is not parameter:
                uses[id(parameter)] = use
    if not uses:
        return None
    result = func(*_exchanged(args, uses), **_exchanged(kwargs, uses))
    copies = {_memory(use) for use in uses.values()} - {place.memory for place in read}
    return _copied(result, copies, lambda: _touch(func, args, kwargs))


def _copied(result: Any, copies: set[int], live: Callable[[], Any]) -> Any:
    """`result`, with each tensor in the memory of a weight's copy wrapped in `Copied`.

    `live` returns the same views of the weights themselves.
    """
    results = result if isinstance(result, list | tuple) else [result]
    shares = [
        type(each) is torch.Tensor and each.layout is torch.strided and _memory(each) in copies for each in results
    ]
    if not any(shares):
        return result
    with torch.no_grad(), torch._C._EnableTorchFunction():
        found = live()
    views = found if isinstance(found, list | tuple) else [found]
    both = [
        Copied.of(each, view) if is_copy else each for each, view, is_copy in zip(results, views, shares, strict=True)
    ]
    return type(result)(both) if isinstance(result, list | tuple) else both[0]


class Read(torch.autograd.Function):
    """A use of a streamed weight outside its block: autograd saves `value`, which does not change until backward."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


read: Any = Read.apply


class Copied(torch.Tensor):
    """A view of a streamed weight that autograd records, on the compute device.

    Operations that autograd records use the newest weights on that device. All other operations run on `_live`.
    """

    _graph: torch.Tensor
    """Routes gradients to the weight; has the numbers of the time of the view."""
    _live: Alias
    """The same view of the weights where they live."""

    @staticmethod
    def of(graph: torch.Tensor, live: Alias) -> torch.Tensor:
        copied: Any = graph.as_subclass(Copied)
        copied._graph, copied._live = graph, live
        return copied  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, found = kwargs or {}, dict[int, Copied]()
        _find_copied((args, kwargs), found)
        kind, name = _kind(func), getattr(func, "__name__", "")
        if kind == "fact":
            graphs = {at: each._graph for at, each in found.items()}
            with unwatched():
                return func(*_exchanged(args, graphs), **_exchanged(kwargs, graphs))
        lives: dict[int, torch.Tensor] = {at: each._live for at, each in found.items()}
        of_live = partial(_touch, func, _exchanged(args, lives), _exchanged(kwargs, lives))
        if kind == "writes" or not torch.is_grad_enabled() or name in _UNRECORDED or func == _get_data:
            return of_live()
        uses = {at: each._use() for at, each in found.items()}
        result = _touch(func, _exchanged(args, uses), _exchanged(kwargs, uses))
        with unwatched():
            return _copied(result, {_memory(use) for use in uses.values()}, of_live)

    def _use(self) -> torch.Tensor:
        with unwatched():
            _have_newest({self._live._place: self._live._plain})
            with torch.no_grad():
                value = self._live._plain.detach().to(self._graph.device)
            use: torch.Tensor = read(self._graph, value)
            return use


def _find_copied(value: Any, found: dict[int, Copied]) -> None:
    if type(value) is Copied:
        found[id(value)] = value
    elif isinstance(value, list | tuple):
        for item in value:
            _find_copied(item, found)
    elif isinstance(value, dict):
        _find_copied(list(value.values()), found)


def _exchanged(value: Any, uses: dict[int, torch.Tensor]) -> Any:
    """`value` with the parameters in `uses` (by id) replaced, also in nested lists, tuples and dicts."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_exchanged(item, uses) for item in value])
    if kind is dict:
        return {name: _exchanged(item, uses) for name, item in value.items()}
    return uses.get(id(value), value)


def _have_newest(touched: _Touched) -> None:
    """Open the layers of these parameters. Raises `EngineStateError` for an alias of memory that the weights have
    left.
    """
    opened = None
    for place, alias in touched.items():
        layer = place.layer
        if layer is None:
            continue
        if layer is not opened:
            layer.open()
            opened = layer
        if alias is not None and _memory(alias) != place.memory and alias.numel():
            raise EngineStateError(
                f"this tensor was taken from parameter {place.view.name!r} before its layer moved, and no longer has "
                "the weights: take it from the parameter again"
            )


def _begin_writes(written: _Touched) -> list[tuple[WatchedLayer, ParameterView, torch.Tensor | None]]:
    """Call before writes: wait until no layer is being stepped. Returns the arguments of `after_write`."""
    for external_writes in {place.external_writes for place in written if place.layer is not None}:
        external_writes.finish_updates()
    return [
        (place.layer, place.view, place.layer.before_write(place.view)) for place in written if place.layer is not None
    ]


def _at_home(value: Any, written: _Touched) -> Any:
    """`value` with all tensors brought to the device where the written weights live, if that is another one."""
    place = next(iter(written))
    home = place.view.parameter.device
    return (
        value
        if home == place.external_writes.device
        else tree_map_only(torch.Tensor, lambda each: each.to(home), value)
    )


def _plain(value: Any, places: _Touched) -> Any:
    """`value` with aliases replaced by plain tensors. Adds the places of all watched tensors in it to `places`."""
    kind = type(value)
    if kind is Alias:
        places[value._place] = value._plain
        return value._plain
    if isinstance(value, Watched):
        parameter: Any = value
        places.setdefault(value.external_writes.place_of(parameter), None)
        return value
    if kind is list or kind is tuple:
        return kind([_plain(item, places) for item in value])
    if kind is dict:
        return {name: _plain(item, places) for name, item in value.items()}
    return value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _assignment(tensor: Any, value: Any, written: _Touched) -> tuple[Any, tuple[Any, ...]]:
    """`tensor.data = value` as an operation. It copies, because the memory belongs to the engine. Assigning a tensor on
    the compute device is allowed even if the weights live in RAM.

    Raises:
        EngineStateError: a parameter would get another shape, dtype or device.
    """
    place = next(iter(written), None)  # None: only `value` is watched
    devices = (tensor.device, tensor.device if place is None else place.external_writes.device)
    same = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
    if same and value.device in devices:
        return torch.no_grad()(torch.Tensor.copy_), (tensor, value)
    if place is not None:
        raise moved_or_cast(place.view)
    return set_data, (tensor, value)


def moved_or_cast(view: ParameterView) -> EngineStateError:
    """The error for an operation that would replace the parameter's memory."""
    return EngineStateError(
        f"parameter {view.name!r} would get new memory, but its memory belongs to the engine: model.to(), .half(), "
        "to_empty(), resize_token_embeddings(), share_memory() and similar calls need a closed engine. Call "
        "engine.close() (or trainer.close()), change the model, and build a new engine or train() again. state_dict(), "
        "deepcopy() and torch.save() work with an open engine"
    )


def refuse_to_empty(model: nn.Module) -> Callable[[], None]:
    """Make `to_empty` of `model` and its submodules raise; returns a function that undoes this.

    `to_empty` replaces a parameter by an empty one on the same device, which no other check notices.
    """
    modules = [module for module in model.modules() if "to_empty" not in vars(module)]
    for module in modules:
        vars(module)["to_empty"] = MethodType(_to_empty, module)

    def end() -> None:
        for module in modules:
            vars(module).pop("to_empty", None)

    return end


def _to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    for parameter in module.parameters(recurse):
        if isinstance(parameter, Watched):
            raise moved_or_cast(parameter.external_writes.place_of(parameter).view)
    kind: Any = type(module)
    emptied: nn.Module = kind.to_empty(module, device=device, recurse=recurse)
    return emptied


def _aliased(result: Any, living: dict[int, _Place]) -> Any:
    """`result`, with each tensor in a parameter's memory wrapped in `Alias`, and numpy arrays made read-only.

    `living`: the parameters by the address of their storage.
    """
    kind = type(result)
    if kind is list or kind is tuple:
        return kind([_aliased(item, living) for item in result])
    if kind is not torch.Tensor:
        if kind.__name__ == "ndarray":
            result.flags.writeable = False
        return result
    memory = _memory(result) if result.layout is torch.strided else 0
    place = living.get(memory) if memory else None
    if place is None:
        return result
    alias: Any = result.as_subclass(Alias)
    alias._place, alias._plain = place, result
    return alias
