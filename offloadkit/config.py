"""What a run may be told: one frozen dataclass, and where each part of a layer lives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from offloadkit.errors import ConfigError, shown
from offloadkit.files import path_of
from offloadkit.units import parse_bytes

Precision = Literal["exact", "compact", "tiny"]


@dataclass(frozen=True)
class Placement:
    """Where the four parts of a flat layer live and who steps it. A placement never changes a number.

    Raises:
        ConfigError: an unknown choice, or states and step that do not go together.
    """

    weights: Literal["vram", "ram"] = "vram"
    """Working weights: the copy that forward and backward compute with. "ram" brings a repeated block's to one of a few
    reusable buffers in VRAM ahead of its forward and its backward; what is outside the blocks stays in VRAM."""

    gradients: Literal["vram", "ram"] = "ram"
    """Gradients between backward and the step: "ram" sends each layer's to pinned RAM as soon as backward is done
    with it; "vram" keeps them (and their fp32 accumulation) on the device until the last micro-batch."""

    states: Literal["vram", "ram", "disk"] = "ram"
    """What the master weights hold beyond the working weights, and the moments. The GPU steps states in VRAM, the CPU
    states on disk, either of them states in RAM: for the GPU these are streamed through VRAM."""

    activations: Literal["keep", "checkpoint", "offload"] = "keep"
    """"checkpoint" recomputes a repeated block's activations in backward instead of keeping them; "offload" also keeps
    the block's input in pinned RAM meanwhile."""

    step: Literal["cpu", "gpu"] = "cpu"
    """The processor that steps this layer. With states in RAM and step="gpu", `gradients="vram"` keeps neither
    gradients nor a copy of resident weights in RAM; with `gradients="ram"` both processors can step the layer."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.states == "vram" and self.step == "cpu":
            raise ConfigError(
                "states='vram' with step='cpu': states in VRAM are stepped by the GPU (step='gpu'); for the CPU put "
                "them in RAM or on disk (states='ram', states='disk')"
            )
        if self.states == "disk" and self.step == "gpu":
            raise ConfigError(
                "states='disk' with step='gpu': states on disk are stepped by the CPU (step='cpu'); for the GPU put "
                "them in RAM or in VRAM (states='ram', states='vram')"
            )
        if self.states == "vram" and "ram" in (self.weights, self.gradients):
            raise ConfigError(
                f"states='vram' with weights={self.weights!r} and gradients={self.gradients!r}: where the states are "
                "in VRAM, the working weights and the gradients are too (weights='vram', gradients='vram')"
            )


@dataclass(frozen=True)
class DynamicLossScale:
    """How a loss scale follows the overflows: as DeepSpeed's, and with its defaults.

    Raises:
        ConfigError: a number is not positive, or a count is not whole.
    """

    start: float = 2.0**16
    """The first scale. Powers of two change no digit of a gradient."""

    window: int = 1000
    """The scale doubles after more than so many steps without an overflow."""

    hysteresis: int = 2
    """Overflows, since the scale last rose, until it is halved; from then on every one halves it."""

    consecutive_hysteresis: bool = False
    """Whether a step without an overflow gives all of the hysteresis back."""

    minimum: float = 1.0
    """The scale is not halved below it. A step that overflows there is not the scale's fault."""

    def __post_init__(self) -> None:
        for name in ("start", "minimum"):
            if not _is_number(value := getattr(self, name)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} of the loss scale must be a positive number, got {shown(value)}")
        for name in ("window", "hysteresis"):
            if type(value := getattr(self, name)) is not int or not 0 < value < 2**63:
                raise ConfigError(f"{name} of the loss scale must be a whole number >= 1, got {shown(value)}")
        if not isinstance(self.consecutive_hysteresis, bool):
            given = shown(self.consecutive_hysteresis)
            raise ConfigError(f"consecutive_hysteresis of the loss scale must be True or False, got {given}")


@runtime_checkable
class ConfigFile(Protocol):
    """A config file of DeepSpeed that was read. A Trainer's arguments must not contradict it."""

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `OffloadConfig`."""

    @property
    def written(self) -> dict[str, Any]:
        """The keys that count and are in the file, by dotted name."""

    def check_decay(self, weight_decay: float, by: str) -> None:
        """Raise `ConfigError` if the file asks for another kind of weight decay. `by` names who sets it."""


@dataclass(frozen=True)
class OffloadConfig:
    """Options of an `OffloadEngine`. All of them belong to the run except `placement`, which changes no number."""

    optimizer: str = "adamw"
    """"adamw", or "lion": one moment instead of two (6 bytes of RAM a parameter instead of 10), precision "exact" only.
    """

    learning_rate: float = 1e-4
    """Step size; a parameter group's own `lr` goes before it."""

    betas: tuple[float, float] | None = None
    """Decay of the moments: of exp_avg and exp_avg_sq for AdamW. None: the optimizer's usual ones, (0.9, 0.999) for
    AdamW and (0.9, 0.99) for Lion. The Trainer and `finetune` take `adam_beta1` and `adam_beta2` of their arguments,
    for Lion too, as HuggingFace does."""

    eps: float = 1e-8
    """Added to the root of exp_avg_sq (AdamW)."""

    weight_decay: float = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""

    max_grad_norm: float | None = 1.0
    """Global gradient norm above which gradients are scaled down; None clips nothing."""

    gradient_accumulation: int = 1
    """Micro-batches whose gradients are added, in fp32, before each update."""

    exchange: Literal["step", "micro_batch"] = "step"
    """When several ranks that accumulate exchange gradients. "step": each adds up its micro-batches, and the fp32 sums
    are exchanged once an update. "micro_batch": each micro-batch's are exchanged in their own dtype, so a rank keeps
    fp32 sums of what it owns only, and N ranks equal one rank with N times the micro-batches, bit for bit. The two add
    in different orders, so their last bits differ. Without accumulation they are the same."""

    precision: Precision = "exact"
    """Precision of the moments: "exact" keeps them in fp32, "compact" in stochastically rounded bf16, "tiny" in 8 bits
    with a scale for each block of 256. Master weights are fp32 in all three."""

    working_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype the model computes with; "auto" takes each parameter's own."""

    loss_scale: Literal["dynamic"] | float | DynamicLossScale = "dynamic"
    """What the loss is multiplied by before backward where the working dtype is fp16, whose gradients would underflow
    otherwise; the step divides by it. "dynamic" starts at 65,536 and follows the overflows; a `DynamicLossScale` says
    how."""

    disk: str | None = None
    """Folder on a local disk for optimizer states on disk; None: the system's folder for temporary files."""

    seed: int = 0
    """Of the stochastic rounding of "compact" and "tiny"."""

    activation_checkpointing: bool = False
    """Recompute each layer's activations in backward: less VRAM, about a third more compute."""

    compile_blocks: bool = False
    """Compile what repeated blocks compute (`torch.compile`), once for all equal ones. Steps may be faster, and
    round otherwise. The first step takes minutes on a machine that has not compiled them before."""

    attention: Literal["ours", "keep"] = "ours"
    """What transformers' models compute attention with: "ours" takes what their family is trained with (see
    docs/design.md), "keep" leaves what the model was loaded with."""

    placement: Placement | None = None
    """One placement for all layers; None lets the plan decide, and move where memory runs out."""

    vram: int | str | None = None
    """VRAM that the process may take in all, CUDA's context included, as bytes or "8GiB"; None: what is free."""

    ram: int | str | None = None
    """RAM that the process may take in all, or all ranks of a host together; None: what is available."""

    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise"
    """What a NaN or Inf in the gradients does. The step is never applied; "raise" ends training with an error at the
    next boundary, "skip" warns and goes on.

    "rollback" goes back to the last checkpoint: weights, states, schedule and random numbers. A Trainer and `finetune`
    train on from there; in a loop `step` raises a `RolledBackError`, whose `position` says where the loop goes on. The
    rows since the checkpoint come again, the ones that gave NaN too: after a fault that does not come again (of a GPU,
    of memory) the run is the one without it, bit for bit. NaN that comes again after three returns is an error. Where
    the rows themselves give NaN, "skip" leaves them out. Each `step` waits for its gradient norm, so that no checkpoint
    is later than an unseen NaN. Overflows that an fp16 loss scale can fall for are skipped as ever."""

    grace_seconds: float = field(default=25.0, compare=False)
    """Seconds from SIGTERM or SIGHUP to the end of the process. A Trainer saves within them where saves so far were
    fast enough, and else names the newest checkpoint."""

    save_minutes: float | None = field(default=None, compare=False)
    """Minutes after which a Trainer saves, beside its `save_strategy`; by rank 0's clock."""

    resume_incomplete: bool = field(default=False, compare=False)
    """Whether a Trainer may go on from a checkpoint that lacks weights, or from one of transformers' Trainer that lacks
    the scheduler's state or the random states. Otherwise such a checkpoint is refused: the run that goes on would not
    be the run that was saved."""

    deepspeed: ConfigFile | None = field(default=None, compare=False, repr=False)
    """What `from_deepspeed` has read, for a Trainer, whose arguments must not say otherwise."""

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("learning_rate", "eps", "weight_decay"):
            if not _is_number(value := getattr(self, name)) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a number >= 0, got {shown(value)}")
        if not _is_number(self.grace_seconds) or not 0 <= self.grace_seconds < float("inf"):
            raise ConfigError(f"grace_seconds must be a number of seconds >= 0, got {shown(self.grace_seconds)}")
        minutes = self.save_minutes
        if minutes is not None and not (_is_number(minutes) and 0 < minutes < float("inf")):
            raise ConfigError(f"save_minutes must be a positive number of minutes, or None; got {shown(minutes)}")
        if not isinstance(self.optimizer, str):
            raise ConfigError(f"optimizer must be a name such as 'adamw' or 'lion', got {shown(self.optimizer)}")
        if self.betas is not None:
            betas = self.betas if isinstance(self.betas, tuple | list) else ()
            if len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
                raise ConfigError(f"betas must be two numbers in [0, 1), or None; got {shown(self.betas)}")
            object.__setattr__(self, "betas", tuple(map(float, betas)))
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            norm = shown(self.max_grad_norm)
            raise ConfigError(f"max_grad_norm must be positive, or None to clip nothing; got {norm}")
        if type(self.gradient_accumulation) is not int or not 0 < self.gradient_accumulation < 2**31:
            given = shown(self.gradient_accumulation)
            raise ConfigError(f"gradient_accumulation must be a whole number >= 1, got {given}")
        scale = self.loss_scale
        fixed = _is_number(scale) and 0 < scale < float("inf")  # type: ignore[operator]
        if not (fixed or scale == "dynamic" or isinstance(scale, DynamicLossScale)):
            given = shown(scale)
            raise ConfigError(f'loss_scale must be "dynamic" or a positive number or a DynamicLossScale, got {given}')
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be a whole number from 0 to 2**32 - 1, got {shown(self.seed)}")
        for name in ("activation_checkpointing", "compile_blocks", "resume_incomplete"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        if self.disk is not None:
            path_of(self.disk, "disk")
        for name in ("vram", "ram"):
            if (budget := getattr(self, name)) is not None:
                parse_bytes(budget, name)
        if not isinstance(self.placement, Placement | None):
            raise ConfigError(f"placement must be an offloadkit.Placement or None, got {shown(self.placement)}")
        if not isinstance(self.deepspeed, ConfigFile | None):
            raise ConfigError(
                f"deepspeed={shown(self.deepspeed)}: leave it out, and write "
                "OffloadConfig.from_deepspeed('ds_config.json')"
            )

    @property
    def states_folder(self) -> str | None:
        """Where optimizer states on disk go; None where neither `disk` nor `placement` asks for any."""
        on_disk = self.placement is not None and self.placement.states == "disk"
        return self.disk or (tempfile.gettempdir() if on_disk else None)

    @classmethod
    def from_deepspeed(
        cls, source: str | Path | dict[str, Any] | ConfigFile, *, num_gpus: int | None = None
    ) -> OffloadConfig:
        """What a ds_config.json says, as far as it is about the optimizer's step. docs/from-deepspeed.md has every key.

        ZeRO's stages and offload_* choose nothing here: the plan does, within the section "offloadkit" of the file,
        which holds fields of this class such as "vram". A schedule and the micro-batch are `offloadkit.initialize`'s.
        A value "auto" is left at its default here, which is what a Trainer's arguments fill in, as they do with values
        that the file does not write. They must not contradict what it does.

        Args:
            source: the file, its content, or the result of `offloadkit.deepspeed.config.read_deepspeed`.
            num_gpus: for the product of the batch sizes; None: the WORLD_SIZE of torchrun, else 1.

        Raises:
            ConfigError: something in it has no meaning, or offloadkit cannot do it.
        """
        return _load_reader()(source, num_gpus)


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _check_choices(options: Placement | OffloadConfig) -> None:
    """Raise `ConfigError` for a Literal field with a value outside its choices."""
    hints = get_type_hints(type(options))
    for each in fields(options):
        value, choices = getattr(options, each.name), get_args(hints[each.name])
        if get_origin(hints[each.name]) is Literal and not (isinstance(value, str) and value in choices):
            named = ", ".join(map(repr, choices))
            raise ConfigError(f"{each.name} must be one of {named}; got {shown(value)}")


Reader = Callable[[Any, int | None], OffloadConfig]
"""Makes an `OffloadConfig` from the arguments of `from_deepspeed`."""

_load_reader: Callable[[], Reader]


def register_reader(load: Callable[[], Reader]) -> None:
    """Have `OffloadConfig.from_deepspeed` call the reader that `load` imports."""
    global _load_reader
    _load_reader = load
