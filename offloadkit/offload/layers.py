"""Flat layers: a model's parameters grouped into contiguous 1-D buffers.

A flat layer is the unit of placement, optimizer steps and waits. It holds the trainable parameters of one repeated
block (a T5Block, a LlamaDecoderLayer), or some of the parameters outside the blocks (embeddings, final norms, head). A
model without repeated blocks is cut by size. The frozen parameters of a block are a flat layer of their own, and so are
frozen embeddings; other frozen parameters outside the blocks are in no layer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getattr_static
from itertools import chain, count
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offloadkit.errors import ConfigError, ModelError, shown
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware
from offloadkit.offload.dict_versions import UnchangedContainers
from offloadkit.offload.matrices import matrices_of, one_optimizer_each, several_optimizers
from offloadkit.optim.norm import NORM_BLOCK
from offloadkit.optim.table import DTYPES, Dtype, LayerKind, Matrix, StateTable
from offloadkit.planner import FrozenModel, LayerShape, MicroBatch, Plan, make_plan

VIEW_ALIGNMENT = 256
"""In elements: every parameter view starts at a multiple of it, and so do blocks of 8-bit states."""
MAX_PIECE_NUMEL = 32 * 1024 * 1024
"""A layer outside the repeated blocks takes no further module beyond this many elements."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(eq=False)
class ParameterView:
    """The position of one parameter in a flat layer."""

    name: str
    """The parameter's (first) name in the model."""
    parameter: nn.Parameter
    order: int
    """Position among the model's trainable, or frozen, parameters. Norms are added in this order."""
    group: int
    """Index of the optimizer group; 0 for a frozen parameter."""
    owners: list[tuple[nn.Module, str]]
    """All (module, attribute) pairs that hold this tensor; more than one for tied weights."""
    matrix: Matrix | None = None
    """The shape in which an optimizer of matrices steps the parameter; None for an optimizer of elements."""
    start: int = 0
    first: int = 0
    """First element of the parameter in this view; not 0 in a shard that begins inside the parameter."""
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.numel = self.parameter.numel()

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + self.numel)

    @property
    def shared(self) -> bool:
        return len(self.owners) > 1


@dataclass(eq=False)
class FlatLayer:
    """Parameters that share one buffer, and the modules whose forward needs them."""

    index: int
    name: str
    kind: LayerKind
    views: list[ParameterView]
    modules: list[nn.Module]
    """The layer's weights must be up to date before the forward of any of these modules."""
    block: nn.Module | None = None
    """The repeated block that holds these parameters; it is one of `modules`."""
    exchange: str = "step"
    """As in `OffloadConfig`."""
    rank: int = 0
    cuts: tuple[int, ...] = ()
    """Boundaries of the ranks' ranges, num_ranks + 1 elements; () at world size 1."""
    begin: int = 0
    """Shards only: first element in the whole layer."""
    first_view: int = 0
    """Shards only: index of the shard's first view in the whole layer."""
    numel: int = field(init=False)
    """Elements of the flat buffers, including padding."""
    _shard: FlatLayer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.views.sort(key=lambda view: (view.group, view.order))
        self.numel = 0
        for view in self.views:
            view.start = self.numel
            self.numel += -(-view.numel // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        self.numel = max(self.numel, VIEW_ALIGNMENT)  # a layer of empty parameters needs a buffer too

    @property
    def shard(self) -> FlatLayer:
        """The part that this rank steps, with pieces of parameters as views; the layer itself at world size 1."""
        return self._shard or self

    def cut_for(self, rank: int, num_ranks: int) -> None:
        """Divide the layer between ranks: each rank owns a range, with its optimizer states and gradient.

        The ranges are as equal as possible with ends at norm blocks (every 65,536 elements of a parameter), so block
        sums, random bits and 8-bit blocks do not depend on the number of ranks. A small layer's range may be empty.
        """
        ends = [view.start + at for view in self.views for at in range(0, view.numel, NORM_BLOCK)] + [self.numel]
        self.rank = rank
        self.cuts = (0, *(_nearest(ends, self.numel * k / num_ranks) for k in range(1, num_ranks)), self.numel)
        start, end = self.cuts[rank], self.cuts[rank + 1]
        inside = [at for at, view in enumerate(self.views) if view.start < end and view.start + view.numel > start]
        inside = inside if start < end else []  # not the parameter in which an empty range is
        pieces = []
        for view in (self.views[at] for at in inside):
            piece = copy(view)
            piece.first = max(start - view.start, 0)
            piece.numel = min(end - view.start, view.numel) - piece.first
            pieces.append(piece)
        first_view = inside[0] if inside else len(self.views)
        self._shard = replace(self, views=pieces, cuts=(), begin=start, first_view=first_view)
        self._shard.numel = end - start

    def shape(self) -> LayerShape:
        shard = self.shard
        is_cut = shard is not self
        return LayerShape(
            self.name,
            num_parameters=sum(view.numel for view in self.views),
            numel=self.numel,
            kind=self.kind,
            num_norm_blocks=shard.num_norm_blocks,
            shared=self.shared,
            in_block=self.block is not None,
            own=shard.numel if is_cut else None,
            num_ranks=max(len(self.cuts) - 1, 1),
            exchanges_sums=self.exchange == "step",
            norm_blocks_of_all=self.num_norm_blocks if is_cut else None,
            looked_up=self.looked_up,
            matrices=tuple(sorted(view.matrix for view in self.views if view.matrix is not None)),
        )

    @property
    def looked_up(self) -> bool:
        """Whether the layer holds frozen embeddings, whose rows the device can read from RAM."""
        return self.block is None and not self.kind.is_trained

    @property
    def num_norm_blocks(self) -> int:
        """Number of block sums for the gradient norm; 0 without a gradient."""
        return self.kind.is_trained and sum(-(-view.numel // NORM_BLOCK) for view in self.views)

    @property
    def dtype(self) -> torch.dtype:
        return self.kind.weights_dtype

    @property
    def states(self) -> StateTable:
        return self.kind.states

    @property
    def shared(self) -> bool:
        """Whether a view is a tied weight; gradients of its uses are then added in fp32."""
        return any(view.shared for view in self.views)


def _nearest(ends: Sequence[int], target: float) -> int:
    at = bisect_left(ends, target)
    return min(ends[max(at - 1, 0) : at + 1], key=lambda end: abs(end - target))


def flat_layers(
    model: nn.Module,
    config: OffloadConfig,
    param_groups: Sequence[dict[str, Any]] | None = None,
    apart: Collection[nn.Parameter] = (),
) -> list[FlatLayer]:
    """The flat layers of `model`'s parameters, in definition order; works on the meta device.

    Args:
        param_groups: as `divided_groups` returns them.
        apart: frozen parameters that are in no layer.

    Raises:
        ModelError: nothing can be trained, or a parameter's dtype or group is not supported.
        ConfigError: the optimizer is not supported, or not with this precision.
    """
    matrices = matrices_of(model, repeated_blocks(model)) if several_optimizers(config, param_groups) else {}
    param_groups = divided_groups(model, config, param_groups)
    groups = group_indices(model, param_groups)
    dtypes = _working_dtypes(model, groups, config.working_dtype)
    optimizers = [group.get("optimizer", config.optimizer) for group in param_groups or [{}]]
    kinds = {
        parameter: LayerKind(DTYPE_NAMES[dtype], optimizers[groups[parameter]], config.precision)
        for parameter, dtype in dtypes.items()
    }
    frozen = frozen_dtypes(model, _frozen_in_layers(model, groups, apart), config.working_dtype)
    for parameter, dtype in frozen.items():
        if dtype in DTYPE_NAMES:
            kinds[parameter] = LayerKind(DTYPE_NAMES[dtype], precision=config.precision, trains="frozen")
    for kind in dict.fromkeys(kinds.values()):
        _ = kind.states  # raises if the optimizer does not support the precision
    layers = cut(model, groups, kinds)
    for layer in layers:
        layer.exchange = config.exchange
        if layer.kind.step_unit == "matrix":
            for view in layer.views:
                view.matrix = matrices[view.parameter]
    return layers


def _frozen_in_layers(
    model: nn.Module, groups: Mapping[nn.Parameter, int], apart: Collection[nn.Parameter]
) -> list[nn.Parameter]:
    """The frozen parameters of blocks and embeddings that can be views of a flat layer.

    Left out are tied, quantised and non-contiguous weights, and weights of scripted and compiled modules and of modules
    in several blocks.
    """
    used = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    without_hooks = {
        inner
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
        for inner in module.modules()
    }
    in_blocks = (each for _, block in repeated_blocks(model) for each in block.modules() if places[each] == 1)
    embeddings = (each for each in model.modules() if isinstance(each, nn.Embedding) and each.max_norm is None)
    found = []
    for module in dict.fromkeys(chain(in_blocks, embeddings)):
        for parameter in module._parameters.values():
            if parameter is None or parameter in groups or parameter in apart or used[parameter] > 1:
                continue
            if (
                _is_plain(parameter)
                and not is_lazy(parameter)
                and parameter.is_contiguous()
                and module not in without_hooks
            ):
                found.append(parameter)
    return found


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether the elements are the weights. Quantisers have parameters of their own classes, whose bits mean more."""
    return type(parameter).__module__.partition(".")[0] in ("torch", "offloadkit")


def frozen_dtypes(
    model: nn.Module, parameters: Iterable[nn.Parameter], choice: Dtype | Literal["auto"]
) -> dict[nn.Parameter, torch.dtype]:
    """dtype that each frozen parameter has in training: the working dtype, unless "auto". Integers and quantised
    parameters keep theirs.
    """
    in_fp32 = stays_fp32(model) if choice == "fp16" else set()

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        if choice == "auto" or not parameter.dtype.is_floating_point or not _is_plain(parameter):
            return parameter.dtype
        return torch.float32 if parameter in in_fp32 else DTYPES[choice]

    return {parameter: dtype_of(parameter) for parameter in parameters}


def divided_groups(
    model: nn.Module, config: OffloadConfig, param_groups: Sequence[dict[str, Any]] | None
) -> Sequence[dict[str, Any]] | None:
    """`param_groups`, divided if there are several optimizers: one optimizer for each group, under "optimizer".

    Raises `ConfigError` as `one_optimizer_each`.
    """
    if not several_optimizers(config, param_groups):
        return param_groups
    return one_optimizer_each(model, matrices_of(model, repeated_blocks(model)), config, param_groups)


def plan_of(
    model: nn.Module,
    layers: Sequence[FlatLayer],
    config: OffloadConfig,
    *,
    work: MicroBatch | None = None,
    hardware: Hardware | None = None,
    assumed: bool = False,
    num_ranks: int = 1,
) -> Plan:
    """The plan of `model` for `layers`; see `make_plan`. The model may be on the meta device.

    `num_ranks`: the number of ranks, if the layers are not cut for ranks yet.
    """
    placed = {view.parameter for layer in layers for view in layer.views}
    frozen = [parameter for parameter in model.parameters() if parameter not in placed]
    return make_plan(
        [layer.shape() if num_ranks == 1 else layer.shape().shared_by(num_ranks) for layer in layers],
        config,
        frozen=sum(map(_num_weights, frozen)),
        frozen_bytes=sum(map(_num_bytes, (*frozen, *model.buffers()))),
        work=work,
        hardware=hardware,
        assumed=assumed,
        unsaved_bytes=sum(map(_num_bytes, frozen)),
        saves_adapters=bool(getattr(model, "peft_config", None)),
        frozen_models=_frozen_models(model, layers),
    )


def _num_weights(parameter: nn.Parameter) -> int:
    """bitsandbytes packs two 4-bit weights in an element."""
    packed = getattr(parameter, "quant_state", None)
    return parameter.numel() if packed is None else math.prod(packed.shape)


def _num_bytes(tensor: torch.Tensor) -> int:
    """With the scales of bitsandbytes' 4-bit weights, which may be quantised themselves."""
    number, packed = tensor.nbytes, getattr(tensor, "quant_state", None)
    while packed is not None:
        number, packed = number + packed.absmax.nbytes, packed.state2
    return number


def _frozen_models(model: nn.Module, layers: Sequence[FlatLayer]) -> tuple[FrozenModel, ...]:
    """The whole frozen models in `model`, which says them by a method `frozen_models()`."""
    named: Mapping[str, nn.Module] = model.frozen_models() if hasattr(model, "frozen_models") else {}  # type: ignore[operator]
    found = []
    for name, each in named.items():
        parameters = set(each.parameters())
        own = [at for at, layer in enumerate(layers) if layer.views[0].parameter in parameters]
        placed = {view.parameter for at in own for view in layers[at].views}
        rest = [*(parameters - placed), *each.buffers()]
        number = sum(parameter.numel() for parameter in parameters)
        found.append(FrozenModel(name, number, tuple(own), sum(tensor.nbytes for tensor in rest)))
    return tuple(found)


def check_is_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ConfigError(f"plan must be what offloadkit.plan() returns, or an engine's plan, got {shown(plan)}")


def check_plan(plan: Plan, layers: Sequence[FlatLayer], config: OffloadConfig) -> None:
    """Check that the plan was made for these `layers` and this `config`.

    Raises:
        ModelError: it was made for other layers.
        ConfigError: it was made for another accumulation, recomputation or placement.
    """
    if not is_of(plan, layers):
        raise ModelError(
            "the plan was made for another model, other parameter groups, or another optimizer, precision or working "
            "dtype"
        )
    made_for: dict[str, Any] = {"gradient_accumulation": plan.accumulation}
    for name in ("activation_checkpointing", "placement"):
        made_for[name] = getattr(plan.basis.config, name)
    differing = [
        f"{name}: {planned!r} in the plan, {getattr(config, name)!r} in OffloadConfig"
        for name, planned in made_for.items()
        if planned != getattr(config, name)
    ]
    if differing:
        raise ConfigError(
            "the plan was made for another config; make a plan for this config, or train with the plan's config:\n  "
            + "\n  ".join(differing)
        )


def is_of(plan: Plan, layers: Sequence[FlatLayer]) -> bool:
    """Whether the plan was made for these layers, for any number of ranks."""
    return [shape.shared_by(1) for shape in plan.layers] == [layer.shape().shared_by(1) for layer in layers]


def check_memory(model: nn.Module) -> None:
    """Raise `ModelError` if a trained parameter shares memory with another parameter or a buffer, which would be lost
    silently when the parameter moves into its flat layer.
    """
    placed: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            size = tensor.element_size()
            first = int(tensor.storage_offset()) * size
            last = sum(stride * (length - 1) for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
            found = placed.setdefault(tensor.untyped_storage().data_ptr(), [])
            found.append((first, first + (int(last) + 1) * size, name, tensor))
    for found in placed.values():
        found.sort(key=lambda each: each[:3])
        for at, (_, end, name, tensor) in enumerate(found):
            for first, _, other, second in found[at + 1 :]:
                if first >= end:
                    break
                if (tensor.requires_grad or second.requires_grad) and _overlap(tensor, second):
                    raise ModelError(
                        f"{name!r} and {other!r} are two tensors in the same memory, and would diverge in training. To "
                        "tie them, make them one nn.Parameter (a.weight = b.weight); otherwise give one its own memory "
                        "by .clone()"
                    )


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors with overlapping ranges in one storage have an element in common."""
    if (one.is_contiguous() and two.is_contiguous()) or one.element_size() != two.element_size():
        return True
    seen = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    seen.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(seen.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def listed_groups(param_groups: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """`param_groups` with parameters in lists. Like torch, accepts generators and single tensors.

    Raises:
        ConfigError: `param_groups` are invalid.
    """
    if param_groups is None:
        return None
    if not isinstance(param_groups, Iterable) or isinstance(param_groups, str | Mapping | torch.Tensor):
        raise ConfigError(f"param_groups must be a list of dicts, got {shown(param_groups)}: {_AS_IN_TORCH}")
    return [_listed(at, group) for at, group in enumerate(param_groups)]


_AS_IN_TORCH = "give them as to a torch optimizer, such as [{'params': model.parameters(), 'lr': 1e-4}]"


def _listed(at: int, group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ConfigError(f"param_groups[{at}] must be a dict with 'params', got {shown(group)}: {_AS_IN_TORCH}")
    some = group["params"]
    found = [some] if isinstance(some, torch.Tensor) else list(some) if isinstance(some, Iterable) else None
    if found is None or isinstance(some, str) or not all(isinstance(each, torch.Tensor) for each in found):
        raise ConfigError(f"params of param_groups[{at}] must be parameters, got {shown(some)}: {_AS_IN_TORCH}")
    return {**group, "params": found}


def group_indices(model: nn.Module, param_groups: Sequence[dict[str, Any]] | None) -> dict[nn.Parameter, int]:
    """Index of each trainable parameter's optimizer group; 0 without `param_groups`.

    Raises:
        ModelError: there is nothing to train, or a trainable parameter is not floating-point.
        ModelError: a group has a foreign tensor, or a trainable parameter is in no group or in two groups.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter, name in names.items():
        if not parameter.dtype.is_floating_point:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}: only floating-point parameters can be trained; "
                "freeze it with requires_grad_(False), or store it as a buffer"
            )
    if not names:
        raise ModelError(
            "the model has no trainable parameters: call requires_grad_(True) on the parameters to train, then build "
            "the engine"
        )
    if param_groups is None:
        return dict.fromkeys(names, 0)
    groups: dict[nn.Parameter, int] = {}
    for index, group in enumerate(param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and parameter not in names:
                raise ModelError(
                    f"param_groups[{index}] contains a tensor of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the model: pass parameters of the trained model"
                )
            if parameter in groups:
                raise ModelError(f"parameter {names[parameter]!r} is in two of the param_groups")
            if parameter.requires_grad:
                groups[parameter] = index
    missing = [name for parameter, name in names.items() if parameter not in groups]
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(f"trainable parameters in no optimizer group: {listed}; add them, or freeze them")
    return groups


def _working_dtypes(
    model: nn.Module, groups: dict[nn.Parameter, int], choice: Dtype | Literal["auto"]
) -> dict[nn.Parameter, torch.dtype]:
    """dtype of each trainable parameter's working weight. fp16 parameters that would overflow become fp32.

    Raises:
        ModelError: a parameter's dtype is not supported.
    """
    dtypes = {parameter: parameter.dtype if choice == "auto" else DTYPES[choice] for parameter in groups}
    for dtype in dtypes.values():
        if dtype not in DTYPE_NAMES:
            raise ModelError(
                f"the model has {dtype} parameters: offloadkit trains bf16, fp16 and fp32 parameters. Convert it with "
                "model.bfloat16() or model.float(), or pass OffloadConfig(working_dtype='bf16')"
            )
    for parameter in stays_fp32(model):
        if dtypes.get(parameter) == torch.float16:
            dtypes[parameter] = torch.float32
    return dtypes


def stays_fp32(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that overflow in fp16. HuggingFace models list them in `_keep_in_fp32_modules` (T5's `wo`)."""
    names = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {parameter for name, parameter in model.named_parameters() if names.intersection(name.split("."))}


class UntrainedParameters:
    """Detects parameters that require a gradient but are in no flat layer."""

    def __init__(self, model: nn.Module, trained: set[nn.Parameter]) -> None:
        self._model, self._trained = model, trained
        tables = [table for module in model.modules() for table in (module._parameters, module._modules)]
        self._frozen = [parameter for parameter in model.parameters() if parameter not in trained]
        self._tables = UnchangedContainers(tables)
        """All parameters and submodules, as they are now."""

    def check(self) -> None:
        """Raise `ModelError` if a parameter was added, replaced or unfrozen."""
        if self._tables.first_changed() is None and not any(p.requires_grad for p in self._frozen):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter not in self._trained:
                raise ModelError(
                    f"parameter {name!r} was added, replaced or unfrozen after the engine was built (by an adapter, a "
                    "new head, .to('meta'), ...), so the engine would not train it: close this engine and build a new "
                    "one (parameters that existed when the engine was built may be frozen and unfrozen)"
                )


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the model's repeated blocks, in definition order, without nested blocks.

    HuggingFace models list their block classes in `_no_split_modules`. In other models, blocks are the members of every
    `ModuleList` or `Sequential` of two or more modules of one class. If each member has one listed module, as the
    layers of SmolVLM's vision tower have an attention, the member is the block.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    listed: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if type(module).__name__ in classes and not _inside(name, listed):
            listed.append((name, module))
    blocks = dict(listed)
    for name, module in model.named_modules():
        members = _of_one_class(name, module)
        if not members or _inside(name, [*blocks.items()]):
            continue
        held = [[block for block, _ in listed if _inside(block, [member])] for member in members]
        if not listed or all(len(each) == 1 for each in held):
            replaced = {block for each in held for block in each}
            blocks = {block: each for block, each in blocks.items() if block not in replaced} | dict(members)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return [(name, blocks[name]) for name in sorted(blocks, key=order.__getitem__) if _has_parameters(blocks[name])]


def _of_one_class(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the members of a list of two or more modules of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2 or len({*map(type, module)}) > 1:
        return []
    return [(f"{name}.{child}" if name else child, block) for child, block in module.named_children()]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The module's own tables of forward and backward hooks; they change with the module."""
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """`module.forward` without what replaces it later. A class's is looked up in each call, as the class may change."""
    if "forward" in vars(module) or not isinstance(getattr_static(type(module), "forward", None), FunctionType):
        return module.forward
    return partial(_forward_of_class, module)


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def replace_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Callable[[], None]:
    """Replace the modules' `forward`. Returns a function that restores them."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward

    def restore() -> None:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward

    return restore


def _inside(name: str, blocks: list[tuple[str, nn.Module]]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block, _ in blocks)


def cut(model: nn.Module, groups: dict[nn.Parameter, int], kinds: dict[nn.Parameter, LayerKind]) -> list[FlatLayer]:
    """The flat layers of `model`, in definition order.

    Args:
        groups: optimizer group of each trainable parameter.
        kinds: the kind of each parameter that is in a layer. A flat layer holds parameters of one kind.
    """
    blocks = repeated_blocks(model)
    inside = {module: name for name, block in blocks for module in block.modules()}
    block_of = dict(blocks)
    pieces: dict[tuple[str, LayerKind], list[ParameterView]] = {}
    current: dict[LayerKind, str] = {}
    for view in _views(model, groups, kinds):
        homes = {inside.get(owner) for owner, _ in view.owners}
        home, kind = homes.pop() if len(homes) == 1 else None, kinds[view.parameter]
        if home is None:
            home = _piece(pieces, current, view, kind)
        pieces.setdefault((home, kind), []).append(view)
    layers: list[FlatLayer] = []
    for (name, kind), members in pieces.items():
        owners = [owner for view in members for owner, _ in view.owners]
        block = block_of.get(name)
        modules = list(dict.fromkeys(owners if block is None else [block, *owners]))
        layers.append(FlatLayer(len(layers), name, kind, members, modules, block))
    return layers


def _views(
    model: nn.Module, groups: dict[nn.Parameter, int], kinds: dict[nn.Parameter, LayerKind]
) -> Iterator[ParameterView]:
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, attribute))
    names = {parameter: name for name, parameter in model.named_parameters()}
    numbers = {True: count(), False: count()}
    for parameter in (parameter for parameter in names if parameter in kinds):
        order, group = next(numbers[parameter in groups]), groups.get(parameter, 0)
        yield ParameterView(names[parameter], parameter, order, group, owners[parameter])


def _piece(
    pieces: dict[tuple[str, LayerKind], list[ParameterView]],
    current: dict[LayerKind, str],
    view: ParameterView,
    kind: LayerKind,
) -> str:
    """Name of the layer outside the blocks that `view` joins: the newest of its kind, or a new one if that is full.

    Parameters of one module stay together.
    """
    name = current.get(kind)
    if name is not None:
        begun = pieces[name, kind]
        numel = sum(other.numel for other in begun) + view.numel
        if begun[0].owners[0][0] is view.owners[0][0] or numel <= MAX_PIECE_NUMEL:
            return name
    current[kind] = view.name.rpartition(".")[0] or view.name
    while (current[kind], kind) in pieces:
        current[kind] += "'"
    return current[kind]
