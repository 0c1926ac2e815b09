"""The declared table: which arrays an optimizer step reads and writes, by optimizer, precision and working dtype.

The plan, the allocation, the ring of states, checkpoints and kernels all read it. A precision is one entry of
`PRECISIONS`, an element-wise optimizer one of `OPTIMIZERS`; each has its kernels beside it, in C and in Triton. Where a
kernel is missing, `reference` does the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from offloadkit.config import Precision
from offloadkit.errors import ConfigError, shown
from offloadkit.optim import moments
from offloadkit.optim.adamw import adamw_scalars, adamw_update
from offloadkit.optim.lion import lion_scalars, lion_update

Dtype = Literal["bf16", "fp16", "fp32"]
"""Of working weights, as a plan names it."""
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REMAINDER_DTYPES: dict[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}
"""What the master weights hold beyond working weights of a dtype: the low half of a split master weight, all of an fp32
number, or nothing."""

MASTER_WEIGHTS, MOMENTS = "master weights", "moments"
"""Categories that a plan shows."""

ALIGNMENT = 256
"""Bytes. Arrays that share a buffer start at multiples of it."""


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to where the next array of a buffer starts."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StateArray:
    """One array of a flat layer's optimizer states."""

    name: str
    dtype: torch.dtype
    category: str
    block: int = 1
    """Elements of the layer that share one element of the array."""

    def numel(self, layer_numel: int) -> int:
        """Its elements in a layer of `layer_numel`."""
        return layer_numel if self.block == 1 else -(-layer_numel // self.block)

    def num_bytes(self, layer_numel: int) -> int:
        """Its bytes in a layer of `layer_numel`, padded to where the next array starts."""
        return aligned(self.numel(layer_numel) * self.dtype.itemsize)

    def part(self, start: int, stop: int) -> slice:
        """Where the layer's elements start .. stop are in it; `start` is a multiple of `block`."""
        return slice(start // self.block, -(-stop // self.block))


class Moment(NamedTuple):
    """A moving average that an optimizer keeps, one number for each element."""

    name: str
    is_signed: bool = True
    """False: it is never negative, which saves an 8-bit code its sign. The kernels round a signed moment with the lower
    random bits and one without a sign with the upper ones, so the signed one comes first."""


@dataclass(frozen=True)
class MomentPrecision:
    """How moments are kept between steps. A step computes in fp32 and rounds only what it stores."""

    dtype: torch.dtype
    block: int | None = None
    """Elements that share one fp32 scale."""
    encode: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]] | None = None
    """(fp32 values, random integers of 0 .. 65535, is_signed) -> (what is stored, scales). None: fp32 is stored as it
    is. What has an encoding is rounded stochastically, with random bits for two moments."""
    decode: Callable[[Tensor, Tensor | None, bool], Tensor] | None = None
    """(what is stored, scales, is_signed) -> fp32 values."""


PRECISIONS: dict[Precision, MomentPrecision] = {
    "exact": MomentPrecision(torch.float32),
    "compact": MomentPrecision(torch.bfloat16, encode=moments.encode_bf16, decode=moments.decode_bf16),
    "tiny": MomentPrecision(torch.uint8, block=moments.BLOCK, encode=moments.encode_8_bit, decode=moments.decode_8_bit),
}


_OFF: dict[str, Any] = {
    "amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True, "momentum": 0,
    "dampening": 0, "nesterov": False, "centered": False, "bias_correction": True,
}  # fmt: skip
"""Options of other optimizers that change the step, and the value at which they do not. (`foreach`, `fused` and
`capturable` choose an implementation, and names that no optimizer has are the user's own.)"""


def check_options(group: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a parameter group has an option of a torch optimizer that would change the step and is not built.
    """
    for name, off in _OFF.items():
        if name == "decoupled_weight_decay" and not group.get("weight_decay"):
            continue
        if name in group and group[name] != off:
            raise ConfigError(
                f"a parameter group has {name}={shown(group[name])}, which offloadkit's optimizers do not have: leave "
                "it out. A group's options are lr, betas, eps and weight_decay"
            )


@dataclass(frozen=True)
class GroupOptions:
    """One parameter group's options at the time of `step()`: what a scheduler may change between steps."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> GroupOptions:
        """The present options of one of the optimizer's param_groups.

        Raises:
            ConfigError: the group has an option of a torch optimizer that would change the step and is not built, or a
                value that is no number.
        """
        lr, eps, weight_decay = (_number(group.get(name), name) for name in ("lr", "eps", "weight_decay"))
        betas = group.get("betas")
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ConfigError(f"betas of a parameter group must be two numbers in [0, 1), got {shown(betas)}")
        first, second = (_number(beta, "betas") for beta in betas)
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ConfigError(f"betas of a parameter group must be two numbers in [0, 1), got {shown(betas)}")
        check_options(group)
        return cls(lr, (first, second), eps, weight_decay)


def _number(value: Any, name: str) -> float:
    """An option of a parameter group, as a float. Raises `ConfigError` for what is none, or not finite."""
    is_one = isinstance(value, Real) and not isinstance(value, bool)
    if is_one or (isinstance(value, Tensor) and value.numel() == 1):
        try:
            if math.isfinite(number := float(value)):
                return number
        except OverflowError:
            pass
    raise ConfigError(f"{name} of a parameter group must be a finite number, got {shown(value)}")


@dataclass(frozen=True)
class Optimizer:
    """An element-wise optimizer: a layer may be stepped in chunks, on any processor.

    The kernels bear its name: `offloadkit_NAME` in C, `NAME` in Triton.
    """

    name: str
    moments: tuple[Moment, ...]
    precisions: tuple[Precision, ...]
    """The largest first: a plan proposes those after the chosen one."""
    scalars: Callable[..., tuple[float, ...]]
    """(lr, betas, eps, weight_decay, step) -> at most 8 floats that fp32 holds exactly. `step` counts from 1."""
    update: Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[float]], None]
    """(master weights, gradient, moments, scalars): one step in place over fp32 tensors of one shape."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Where none are given."""
    trainer_names: tuple[str, ...] = ()
    """What `TrainingArguments.optim` calls it, where that is another name."""


OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            "adamw",
            (Moment("exp_avg"), Moment("exp_avg_sq", is_signed=False)),
            ("exact", "compact", "tiny"),
            adamw_scalars,
            adamw_update,
            trainer_names=("adamw_torch", "adamw_torch_fused"),
        ),
        Optimizer("lion", (Moment("exp_avg"),), ("exact",), lion_scalars, lion_update, (0.9, 0.99), ("lion_32bit",)),
    )
}

NEED_WHOLE_MATRICES = {
    "muon": "it orthogonalises the update of each whole matrix",
    "adafactor": "it keeps the means of each whole matrix's rows and columns",
    "shampoo": "it multiplies each whole matrix by preconditioners",
    "soap": "it rotates each whole matrix into a basis of its own",
}
"""Optimizers that cannot be cut into chunks of elements, and why."""


def trainer_names() -> dict[str, str]:
    """The optimizers by the names that `TrainingArguments.optim` has for them."""
    return {known: optimizer.name for optimizer in OPTIMIZERS.values() for known in optimizer.trainer_names}


def optimizer_named(name: str) -> Optimizer:
    """
    Raises:
        ConfigError: there is no such optimizer, or it cannot be cut.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    choices = ", ".join(map(repr, OPTIMIZERS))
    if str(name).lower() in NEED_WHOLE_MATRICES:
        why = NEED_WHOLE_MATRICES[str(name).lower()]
        raise ConfigError(
            f"optimizer={shown(name)} cannot be offloaded: {why}, and offloadkit steps layers in chunks of elements. "
            f"Choose one of {choices}"
        )
    raise ConfigError(f"optimizer must be one of {choices}; got {shown(name)}")


@dataclass(frozen=True, eq=False)
class StateTable:
    """The optimizer states of a flat layer: its arrays beside working weights and gradient, in the order in memory.

    Compared and hashed by identity: `state_table` makes each one once, and a step looks its kernel up by it.
    """

    optimizer: Optimizer
    precision: Precision
    weights_dtype: torch.dtype
    arrays: tuple[StateArray, ...]

    def __getitem__(self, name: str) -> StateArray:
        return next(array for array in self.arrays if array.name == name)

    @cached_property
    def is_rounded(self) -> bool:
        """Whether moments are rounded stochastically: then each parameter has random bits of its own."""
        return PRECISIONS[self.precision].encode is not None

    def num_bytes(self, layer_numel: int) -> dict[str, int]:
        """Bytes of a layer of `layer_numel` elements, by category."""
        found = {MASTER_WEIGHTS: 0, MOMENTS: 0}
        for array in self.arrays:
            found[array.category] += array.num_bytes(layer_numel)
        return found


@cache
def state_table(optimizer: str, precision: Precision, weights_dtype: torch.dtype) -> StateTable:
    """The states of working weights in bf16, fp16 or fp32.

    Raises:
        ConfigError: there is no such optimizer, or it does not keep its moments in that precision.
    """
    chosen, kept = optimizer_named(optimizer), PRECISIONS[precision]
    if precision not in chosen.precisions:
        raise ConfigError(
            f"optimizer={shown(optimizer)} with precision={shown(precision)}: its moments are kept in "
            f"{' or '.join(map(repr, chosen.precisions))} only; set precision={shown(chosen.precisions[0])}"
        )
    assert kept.encode is None or len(chosen.moments) <= 2, "there are random bits for two moments"
    remainder = REMAINDER_DTYPES[weights_dtype]
    arrays = [] if remainder is None else [StateArray("remainder", remainder, MASTER_WEIGHTS)]
    arrays += [StateArray(moment.name, kept.dtype, MOMENTS) for moment in chosen.moments]
    if kept.block is not None:
        arrays += [StateArray(f"{m.name}_scale", torch.float32, MOMENTS, kept.block) for m in chosen.moments]
    return StateTable(chosen, precision, weights_dtype, tuple(arrays))


@dataclass(frozen=True)
class LayerKind:
    """How the parameters of a flat layer are trained. The plan, the buffers, the states and the checkpoint read it.

    Parameters of different kinds are in different flat layers.
    """

    dtype: Dtype
    """dtype of the working weights."""
    optimizer: str = "adamw"
    """A name in `OPTIMIZERS`."""
    precision: Precision = "exact"
    """Precision of the optimizer's moments."""

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def states(self) -> StateTable:
        """The arrays of the optimizer states. Raises `ConfigError` as `state_table` does."""
        return state_table(self.optimizer, self.precision, self.weights_dtype)


@dataclass(slots=True)
class FlatState:
    """The arrays of one flat layer that a step reads and writes: 1-D, contiguous, on one device."""

    table: StateTable
    weights: Tensor
    """Working weights: bf16, fp16 or fp32 (then they are the master weights too)."""
    arrays: dict[str, Tensor]
    """The table's arrays, by name."""

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    @property
    def remainder(self) -> Tensor | None:
        """What the master weights hold beyond the working weights; None for fp32 weights."""
        return self.arrays.get("remainder")

    @classmethod
    def cut(cls, table: StateTable, weights: Tensor, cut: Callable[[int, torch.dtype], Tensor]) -> FlatState:
        """The states of `weights`, one after the other from `cut`, which gives the next so many elements of a dtype."""
        numel = weights.numel()
        return cls(table, weights, {array.name: cut(array.numel(numel), array.dtype) for array in table.arrays})


class Segment(NamedTuple):
    """Elements start .. start + length of a flat layer, stepped with one set of scalars.

    Where moments are rounded they belong to one parameter; else they may be several neighbours.
    """

    start: int
    """A multiple of 256 where moments have scales."""
    length: int
    scalars: tuple[float, ...]
    """The optimizer's, of this step."""
    random_key: int = 0
    """`moments.random_key` of the step and the parameter; unused where nothing is rounded."""
    offset: int = 0
    """Elements of the parameter that come before the segment, where it is cut: a multiple of 256."""


def check_state(state: FlatState, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Raises TypeError for a dtype and ValueError for a length, layout or device that a step cannot work with."""
    table, weights = state.table, state.weights
    numel, device = weights.numel(), weights.device
    if weights.dtype != table.weights_dtype:
        raise TypeError(f"weights are {weights.dtype}, the table's states are those of {table.weights_dtype}")
    if gradient.dtype not in REMAINDER_DTYPES:
        raise TypeError(f"the gradient is {gradient.dtype}: a step takes bf16, fp16 or fp32 gradients")
    _check_flat("weights", weights, numel, numel, device)
    _check_flat("gradient", gradient, numel, numel, device)
    for array in table.arrays:
        found = state.arrays.get(array.name)
        if found is None or found.dtype != array.dtype:
            raise TypeError(
                f"{array.name} is {None if found is None else found.dtype}: {table.optimizer.name} keeps it in "
                f"{array.dtype} where the precision is {table.precision!r} and the weights are {table.weights_dtype}"
            )
        if array.block > 1 and numel % array.block:
            raise ValueError(f"the flat layer has {numel} elements: 8-bit moments need a multiple of {array.block}")
        _check_flat(array.name, found, array.numel(numel), numel, device)
    for segment in segments:
        _check_segment(segment, numel, table)


def _check_flat(name: str, array: Tensor, length: int, numel: int, device: torch.device) -> None:
    if array.dim() != 1 or not array.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(array.shape)}, strides {array.stride()}: it must be flat")
    if array.numel() != length or array.device != device:
        raise ValueError(
            f"{name} has {array.numel()} elements on {array.device}; for {numel} weights on {device} it must have "
            f"{length} there"
        )


def _check_segment(segment: Segment, numel: int, table: StateTable) -> None:
    start, end = segment.start, segment.start + segment.length
    if start < 0 or segment.length < 0 or end > numel:
        raise ValueError(f"segment [{start}, {end}) leaves the flat layer of {numel} elements")
    if not table.is_rounded:
        return
    if not 0 <= segment.random_key < 2**64:
        raise ValueError(f"random_key is {segment.random_key}: a key has 64 bits, see moments.random_key")
    block = moments.BLOCK
    has_scales = PRECISIONS[table.precision].block is not None
    if segment.offset < 0 or segment.offset % block or (has_scales and start % block):
        raise ValueError(
            f"a segment starts at {start}, {segment.offset} elements into its parameter: moments in "
            f"{shown(table.precision)} are cut at multiples of {block} elements of a parameter"
            + (", which are multiples of the flat layer too" if has_scales else "")
        )
