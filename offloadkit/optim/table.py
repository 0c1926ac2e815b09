"""The arrays that an optimizer step reads and writes, by optimizer, precision and dtype of the working weights.

To add a precision, add an entry to `PRECISIONS`; to add an optimizer, add an entry to `OPTIMIZERS`. Kernels in C and
Triton are optional: `reference` steps without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from offloadkit.errors import ConfigError, shown
from offloadkit.facts.config import Contents, MuonOptions, Precision
from offloadkit.optim import moments
from offloadkit.optim.adamw import adamw_scalars, adamw_update
from offloadkit.optim.lion import lion_scalars, lion_update
from offloadkit.optim.muon import (
    muon_scalars,
    muon_update,
    newton_schulz_bytes,
    newton_schulz_flops,
    workspace_sizes,
)

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

REMAINDER_DTYPES: dict[torch.dtype, torch.dtype | None] = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}
"""dtype of the remainder by working dtype: the low half of a split master weight, a full fp32 number, or None."""

MASTER_WEIGHTS, MOMENTS = "master weights", "moments"

ALIGNMENT = 256
"""Alignment in bytes of the arrays in a shared buffer."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StateArray:
    name: str
    dtype: torch.dtype
    category: str
    block: int = 1

    def numel(self, layer_numel: int) -> int:
        return layer_numel if self.block == 1 else -(-layer_numel // self.block)

    def num_bytes(self, layer_numel: int) -> int:
        """Aligned bytes."""
        return aligned(self.numel(layer_numel) * self.dtype.itemsize)

    def part(self, start: int, stop: int) -> slice:
        """Slice of the array for elements start .. stop of the layer; `start` is a multiple of `block`."""
        return slice(start // self.block, -(-stop // self.block))


class Moment(NamedTuple):
    """A moving average of an optimizer, one number per element."""

    name: str
    is_signed: bool = True
    """False: never negative, which frees the sign bit of an 8-bit code. Signed moments come first, because kernels
    round them with the lower random bits and unsigned moments with the upper bits.
    """


@dataclass(frozen=True)
class MomentPrecision:
    """Storage format of moments between steps. A step computes in fp32 and rounds only the stored result."""

    dtype: torch.dtype
    block: int | None = None
    encode: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]] | None = None
    """(fp32 values, random integers of 0 .. 65535, is_signed) -> (stored values, scales). None stores fp32 unchanged.

    Encodings round stochastically, with random bits for at most two moments.
    """
    decode: Callable[[Tensor, Tensor | None, bool], Tensor] | None = None
    """(stored values, scales, is_signed) -> fp32 values."""


PRECISIONS: dict[Precision, MomentPrecision] = {
    "exact": MomentPrecision(torch.float32),
    "compact": MomentPrecision(torch.bfloat16, encode=moments.encode_bf16, decode=moments.decode_bf16),
    "tiny": MomentPrecision(torch.uint8, block=moments.BLOCK, encode=moments.encode_8_bit, decode=moments.decode_8_bit),
}


_OFF: dict[str, Any] = {
    "amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True, "momentum": 0,
    "dampening": 0, "nesterov": False, "centered": False, "bias_correction": True,
}  # fmt: skip
"""Options of torch optimizers that would change the step, and their neutral values. (`foreach`, `fused` and
`capturable` only choose an implementation; unknown names belong to the user.)
"""


def check_options(group: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an option of a torch optimizer in the group is unsupported and would change the step."""
    if group.get("optimizer") == "muon":
        return
    for name, off in _OFF.items():
        if name == "decoupled_weight_decay" and not group.get("weight_decay"):
            continue
        if name in group and group[name] != off:
            raise ConfigError(
                f"a parameter group has {name}={shown(group[name])}, which offloadkit's optimizers do not support: "
                "leave it out. A group's options are lr, betas, eps and weight_decay"
            )


@dataclass(frozen=True)
class GroupOptions:
    """Checked options of a group of AdamW or Lion, read at every `step()` because a scheduler may change them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> GroupOptions:
        """Read the present options of one of the optimizer's param_groups.

        Raises:
            ConfigError: an option is unsupported and would change the step, or a value is not a finite number.
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


@dataclass(frozen=True)
class MuonGroup:
    """Options of a parameter group of Muon at the time of `step()`."""

    lr: float
    options: MuonOptions
    """All but its `learning_rate`."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MuonGroup:
        """Read the present options of a group. Raises `ConfigError` if a value is missing or out of range."""
        lr, own = _number(group.get("lr"), "lr"), [field.name for field in fields(MuonOptions)[1:]]
        if lacking := [name for name in own if name not in group]:
            raise ConfigError(f"a parameter group of Muon lacks {lacking[0]}")
        return cls(lr, MuonOptions(**{name: group[name] for name in own}))


Options = GroupOptions | MuonGroup


def options_of(group: Mapping[str, Any]) -> Options:
    """Read the present options of a group, by its optimizer."""
    is_muon = optimizer_named(group.get("optimizer", "adamw")).name == "muon"
    return MuonGroup.of(group) if is_muon else GroupOptions.of(group)


def _number(value: Any, name: str) -> float:
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
    """An optimizer of elements or of matrices. Kernels of elements are named `offloadkit_NAME` in C and `NAME` in
    Triton.
    """

    name: str
    moments: tuple[Moment, ...]
    precisions: tuple[Precision, ...]
    """Supported precisions, largest first: a plan proposes the precisions after the chosen one."""
    scalars: Callable[..., tuple[float, ...]]
    """(options of the group, step) -> floats. `step` counts from 1. Optimizers of elements have at most 8 floats, which
    fp32 represents exactly.
    """
    update: Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[float]], None]
    """(master weights, gradient, moments, scalars): one step in place on fp32 tensors of one shape: a part of a layer
    or one matrix.
    """
    betas: tuple[float, float] = (0.9, 0.999)
    trainer_names: tuple[str, ...] = ()
    """Names of this optimizer in `TrainingArguments.optim`, if different."""
    step_unit: Literal["element", "matrix"] = "element"
    """ "element": a layer may be stepped in chunks, on the CPU or GPU. "matrix": every parameter is a matrix, which is
    stepped as a whole.
    """


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
        Optimizer("muon", (Moment("momentum_buffer"),), ("exact",), muon_scalars, muon_update, step_unit="matrix"),
    )
}

MOMENT_INDEX = {
    moment.name: index for optimizer in OPTIMIZERS.values() for index, moment in enumerate(optimizer.moments)
}
"""The place of a moment among those of its optimizer."""


class CheckpointContents(NamedTuple):
    """The optimizer states that a checkpoint holds beside the weights."""

    has_states: bool = True
    """Remainders of master weights, moments and step counts."""
    moments: Precision | None = None
    """Precision that fp32 moments are rounded to; None: no rounding."""


CHECKPOINT_CONTENTS: dict[Contents, CheckpointContents] = {
    "all": CheckpointContents(),
    "compact": CheckpointContents(moments="compact"),
    "weights": CheckpointContents(has_states=False),
}
"""With bf16 weights, AdamW and "exact": 12, 8 and 2 bytes per parameter."""


def saved_dtype(name: str, dtype: torch.dtype, contents: Contents) -> torch.dtype | None:
    """dtype in a checkpoint of an optimizer state with this name and dtype; None: the checkpoint does not have it."""
    saved = CHECKPOINT_CONTENTS[contents]
    if not saved.has_states:
        return None
    if saved.moments is not None and name in MOMENT_INDEX and dtype == torch.float32:
        return PRECISIONS[saved.moments].dtype
    return dtype


NEED_WHOLE_MATRICES = {
    "adafactor": "it keeps the means of each whole matrix's rows and columns",
    "shampoo": "it multiplies each whole matrix by preconditioners",
    "soap": "it rotates each whole matrix into a basis of its own",
}
"""Optimizers that cannot step chunks of elements and are not supported, with the reason."""


def trainer_names() -> dict[str, str]:
    return {known: optimizer.name for optimizer in OPTIMIZERS.values() for known in optimizer.trainer_names}


def optimizer_named(name: str) -> Optimizer:
    """Look up an optimizer. Raises `ConfigError` if it is unknown or not supported."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    choices = ", ".join(map(repr, OPTIMIZERS))
    if str(name).lower() in NEED_WHOLE_MATRICES:
        why = NEED_WHOLE_MATRICES[str(name).lower()]
        raise ConfigError(
            f"optimizer={shown(name)} cannot be offloaded: {why}, and offloadkit steps layers in chunks. "
            f"Choose one of {choices}"
        )
    raise ConfigError(f"optimizer must be one of {choices}; got {shown(name)}")


@dataclass(frozen=True, eq=False)
class StateTable:
    """The optimizer states of a flat layer, in the order in memory, without working weights and gradient.

    Compared and hashed by identity, because `state_table` caches its results and kernels are looked up by table.
    """

    optimizer: Optimizer
    precision: Precision
    weights_dtype: torch.dtype
    arrays: tuple[StateArray, ...]

    def __getitem__(self, name: str) -> StateArray:
        return next(array for array in self.arrays if array.name == name)

    @cached_property
    def is_rounded(self) -> bool:
        """Whether moments are rounded stochastically, with separate random bits for every parameter."""
        return PRECISIONS[self.precision].encode is not None

    def num_bytes(self, layer_numel: int) -> dict[str, int]:
        """Bytes by category."""
        found = {MASTER_WEIGHTS: 0, MOMENTS: 0}
        for array in self.arrays:
            found[array.category] += array.num_bytes(layer_numel)
        return found

    def saved_bytes(self, layer_numel: int, contents: Contents) -> int:
        """Bytes in a checkpoint, aligned as in memory."""
        dtypes = [(array, saved_dtype(array.name, array.dtype, contents)) for array in self.arrays]
        return sum(aligned(array.numel(layer_numel) * dtype.itemsize) for array, dtype in dtypes if dtype is not None)


@cache
def state_table(optimizer: str, precision: Precision, weights_dtype: torch.dtype) -> StateTable:
    """The (cached) states of bf16, fp16 or fp32 working weights."""
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


@cache
def _no_states(optimizer: str, precision: Precision, weights_dtype: torch.dtype) -> StateTable:
    return StateTable(optimizer_named(optimizer), precision, weights_dtype, ())


@dataclass(frozen=True)
class LayerKind:
    """How a flat layer's parameters are trained. The plan, buffers, states and checkpoint read it.

    Parameters of different kinds are in different flat layers.
    """

    dtype: Dtype
    optimizer: str = "adamw"
    precision: Precision = "exact"
    trains: Literal["yes", "frozen"] = "yes"
    """"frozen": the layer has weights alone: no gradient, no optimizer states, no step."""

    @property
    def weights_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def is_trained(self) -> bool:
        return self.trains == "yes"

    @property
    def step_unit(self) -> Literal["element", "matrix"]:
        """The smallest part of the layer that can be stepped."""
        return self.states.optimizer.step_unit

    @property
    def states(self) -> StateTable:
        found = state_table if self.is_trained else _no_states
        return found(self.optimizer, self.precision, self.weights_dtype)


@dataclass(slots=True)
class FlatState:
    """Arrays of one flat layer that a step reads and writes: 1-D, contiguous, on one device.

    Attributes:
        is_checked: a step has checked the arrays, which are not exchanged afterwards.
        of_kernel: the arrays as a kernel gets them, kept by its first launch.
    """

    table: StateTable
    weights: Tensor
    """bf16, fp16 or fp32. fp32 weights are the master weights."""
    arrays: dict[str, Tensor]
    is_checked: bool = field(default=False, compare=False)
    of_kernel: Sequence[Tensor] = field(default=(), compare=False, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    @property
    def remainder(self) -> Tensor | None:
        """Part of the master weights that the working weights do not hold; None for fp32 weights."""
        return self.arrays.get("remainder")

    @classmethod
    def cut(cls, table: StateTable, weights: Tensor, cut: Callable[[int, torch.dtype], Tensor]) -> FlatState:
        """Cut states for `weights`: `cut(numel, dtype)` returns the next elements of a buffer."""
        numel = weights.numel()
        return cls(table, weights, {array.name: cut(array.numel(numel), array.dtype) for array in table.arrays})


class Matrix(NamedTuple):
    """The shape in which Muon steps a parameter, and the memory and FLOPs of the step."""

    rows: int
    columns: int
    is_transposed: bool = False
    """Whether the parameter, [columns, rows], holds the transpose of the matrix."""

    @property
    def row(self) -> int:
        return self.rows if self.is_transposed else self.columns

    @property
    def flops(self) -> int:
        return newton_schulz_flops(self.rows, self.columns)

    @property
    def traffic(self) -> int:
        """Bytes that the step moves in VRAM, in addition to gradient, states and weights."""
        return newton_schulz_bytes(self.rows, self.columns)

    @property
    def workspace(self) -> dict[str, int]:
        """Aligned bytes of the arrays that the step takes in addition to the states, by name."""
        sizes = workspace_sizes(self.rows, self.columns, self.row)
        return {name: aligned(size) for name, size in sizes.items()}

    @property
    def workspace_bytes(self) -> int:
        return sum(self.workspace.values())

    def of(self, flat: Tensor) -> Tensor:
        return flat.view(self.columns, self.rows).T if self.is_transposed else flat.view(self.rows, self.columns)


class Segment(NamedTuple):
    """Elements start .. start + length of a flat layer, stepped with one set of scalars.

    With stochastic rounding or matrices a segment belongs to one parameter; otherwise it may span neighbouring
    parameters.
    """

    start: int
    """A multiple of 256 if moments have scales."""
    length: int
    scalars: tuple[float, ...]
    random_key: int = 0
    """`moments.random_key` of the step and parameter; unused without stochastic rounding."""
    offset: int = 0
    """Elements of the parameter before the segment, a multiple of 256."""
    matrix: Matrix | None = None
    """None for optimizers of elements."""


def check_state(state: FlatState, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Check arrays and segments of a step.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong length, layout, device or segment.
    """
    weights = state.weights
    numel, device = weights.numel(), weights.device
    if not state.is_checked:
        _check_arrays(state)
        state.is_checked = True
    if gradient.dtype not in REMAINDER_DTYPES:
        raise TypeError(f"the gradient is {gradient.dtype}: a step takes bf16, fp16 or fp32 gradients")
    _check_flat("gradient", gradient, numel, numel, device)
    for segment in segments:
        _check_segment(segment, numel, state.table)


def _check_arrays(state: FlatState) -> None:
    table, weights = state.table, state.weights
    numel, device = weights.numel(), weights.device
    if weights.dtype != table.weights_dtype:
        raise TypeError(f"weights are {weights.dtype}, but the table's states are for {table.weights_dtype}")
    _check_flat("weights", weights, numel, numel, device)
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
    if table.optimizer.step_unit == "matrix":
        if segment.matrix is None or segment.matrix.rows * segment.matrix.columns != segment.length:
            raise ValueError(
                f"{table.optimizer.name} steps matrices: {segment.matrix} has not {segment.length} elements"
            )
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
