"""Options of a run and placements of a layer, as frozen dataclasses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from offloadkit.errors import ConfigError, shown
from offloadkit.facts.field_help import helps_with_fields
from offloadkit.facts.files import path_of
from offloadkit.facts.units import parse_bytes

Precision = Literal["exact", "compact", "tiny"]
Contents = Literal["all", "compact", "weights"]
"""What a checkpoint holds: see `optim/table.py`."""


@helps_with_fields
@dataclass(frozen=True)
class Placement:
    """Placement of a flat layer's parts, and the processor that steps it. Placements do not affect numerical results.

    Raises:
        ConfigError: an unknown choice, or incompatible `states` and `step`.
    """

    weights: Literal["vram", "ram"] = "vram"
    """Working weights, which forward and backward compute with. "ram" prefetches a repeated block's weights into one of
    a few reusable VRAM buffers before its forward and backward; weights outside the blocks stay in VRAM, but for frozen
    embeddings, whose rows are read from RAM."""

    gradients: Literal["vram", "ram"] = "ram"
    """Gradients between backward and the step. "ram" sends each layer's gradients to pinned RAM right after its
    backward; "vram" keeps gradients and their fp32 accumulation on the device until the last micro-batch."""

    states: Literal["vram", "ram", "disk"] = "ram"
    """Master weights (the part beyond the working weights) and moments. The GPU steps states in VRAM, the CPU states on
    disk, and either one states in RAM, which the GPU streams through VRAM."""

    activations: Literal["keep", "cheap", "checkpoint", "offload"] = "keep"
    """"checkpoint" recomputes a repeated block's activations in backward; "offload" recomputes them too and keeps the
    block's input in pinned RAM in between. "cheap" keeps results of matmuls and attention, and recomputes only
    element-wise operations and norms."""

    step: Literal["cpu", "gpu"] = "cpu"
    """The processor that steps this layer. For states in RAM with step="gpu", `gradients="vram"` keeps neither
    gradients nor copies of resident weights in RAM; `gradients="ram"` lets either processor step the layer."""

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


@helps_with_fields
@dataclass(frozen=True)
class DynamicLossScale:
    """Dynamic loss scaling, with DeepSpeed's rules and defaults.

    Raises:
        ConfigError: a number is not positive, or a count is not an integer.
    """

    start: float = 2.0**16
    """Initial scale. Powers of two scale gradients exactly."""

    window: int = 1000
    """The scale doubles after more than this many steps without overflow."""

    hysteresis: int = 2
    """Overflows since the last increase before the scale is halved; every later overflow halves it."""

    consecutive_hysteresis: bool = False
    """Whether a step without overflow resets the hysteresis."""

    minimum: float = 1.0
    """Lower bound of the scale. An overflow at the minimum counts as a non-finite gradient."""

    def __post_init__(self) -> None:
        for name in ("start", "minimum"):
            if not _is_number(value := getattr(self, name)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} of the loss scale must be a positive number, got {shown(value)}")
        for name in ("window", "hysteresis"):
            if type(value := getattr(self, name)) is not int or not 0 < value < 2**63:
                raise ConfigError(f"{name} of the loss scale must be a whole number >= 1, got {shown(value)}")
        _check_choices(self, " of the loss scale")


@helps_with_fields
@dataclass(frozen=True)
class MuonOptions:
    """Options of Muon, with the names and defaults of `torch.optim.Muon`, except `adjust_lr_fn` and `learning_rate`.

    Raises:
        ConfigError: a number is out of range.
    """

    learning_rate: float | None = None
    """Step size; None: that of AdamW, which suits "match_rms_adamw"."""

    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate; for all matrices, whatever the decay of AdamW."""

    momentum: float = 0.95
    """Decay rate of the momentum buffer."""

    nesterov: bool = True
    """Nesterov momentum: the update is a mean of the gradient and the momentum buffer."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Learning rate by shape: "match_rms_adamw" multiplies it by 0.2 * sqrt(max(rows, columns)), so that updates are as
    large as AdamW's; "original" by sqrt(max(1, rows / columns))."""

    eps: float = 1e-7
    """Least Frobenius norm by which an update is divided."""

    ns_steps: int = 5
    """Newton-Schulz iterations."""

    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the iteration's polynomial."""

    def __post_init__(self) -> None:
        _check_choices(self, " of Muon")
        for name in ("learning_rate", "weight_decay", "eps"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value < float("inf")) and (name, value) != ("learning_rate", None):
                raise ConfigError(f"{name} of Muon must be a number >= 0, got {shown(value)}")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum of Muon must be a number in [0, 1), got {shown(self.momentum)}")
        if type(self.ns_steps) is not int or not 0 < self.ns_steps < 100:
            raise ConfigError(f"ns_steps of Muon must be a whole number from 1 to 99, got {shown(self.ns_steps)}")
        some = self.ns_coefficients if isinstance(self.ns_coefficients, tuple | list) else ()
        if len(some) != 3 or not all(_is_number(each) and abs(each) < float("inf") for each in some):
            raise ConfigError(f"ns_coefficients of Muon must be three numbers, got {shown(self.ns_coefficients)}")
        object.__setattr__(self, "ns_coefficients", tuple(map(float, some)))


@runtime_checkable
class ConfigFile(Protocol):
    """A parsed DeepSpeed config file. A Trainer's arguments must not contradict it."""

    @property
    def options(self) -> dict[str, Any]:
        """Fields of `OffloadConfig`."""

    @property
    def written(self) -> dict[str, Any]:
        """Keys of the file that have an effect, by dotted name."""

    def check_decay(self, weight_decay: float, by: str) -> None:
        """Raise `ConfigError` if the file asks for coupled weight decay. `by` names who sets the decay."""


@helps_with_fields
@dataclass(frozen=True)
class OffloadConfig:
    """Options of an `OffloadEngine`. Every field except `placement` may affect the results of a run."""

    optimizer: str = "adamw"
    """"adamw", or "lion": one moment instead of two (6 instead of 10 bytes of RAM per parameter), precision "exact"
    only. "muon": Muon for the matrices of the model's blocks (6 bytes), AdamW for all other parameters; precision
    "exact" only. A parameter group's `optimizer` overrides it.
    """

    muon: MuonOptions = field(default_factory=MuonOptions)
    """Options of Muon. The other fields are AdamW's, and Muon's learning rate by default."""

    learning_rate: float = 1e-4
    """Step size; a parameter group's `lr` overrides it."""

    betas: tuple[float, float] | None = None
    """Decay rates of exp_avg and exp_avg_sq. None: the optimizer's defaults, (0.9, 0.999) for AdamW and (0.9, 0.99) for
    Lion. The Trainer and `finetune` use `adam_beta1` and `adam_beta2`, for Lion too, as HuggingFace does."""

    eps: float = 1e-8
    """Added to the square root of exp_avg_sq (AdamW)."""

    weight_decay: float = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""

    max_grad_norm: float | None = 1.0
    """Global gradient norm above which gradients are clipped; None disables clipping."""

    gradient_accumulation: int = 1
    """Micro-batches per update; their gradients are added in fp32."""

    exchange: Literal["step", "micro_batch"] = "step"
    """When ranks exchange gradients under accumulation. "step": each rank adds its micro-batches, and ranks exchange
    the fp32 sums once per update. "micro_batch": ranks exchange every micro-batch's gradients in their own dtype, so a
    rank keeps fp32 sums only for its shard, and N ranks are bit-identical to one rank with N times the micro-batches.
    The two orders of addition differ in the last bits. Without accumulation they are identical."""

    precision: Precision = "exact"
    """Precision of the moments: "exact" is fp32, "compact" is bf16 with stochastic rounding, "tiny" is 8 bits with a
    scale per block of 256. Master weights are always fp32."""

    working_dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of the forward and backward computation; "auto" keeps each parameter's dtype."""

    loss_scale: Literal["dynamic"] | float | DynamicLossScale = "dynamic"
    """Loss scale for working dtype fp16, whose gradients would underflow otherwise. "dynamic" starts at 65,536 and
    adapts to overflows; `DynamicLossScale` sets the details."""

    disk: str | None = None
    """Folder on a local disk for optimizer states; None: the system's temporary folder."""

    seed: int = 0
    """Seed of the stochastic rounding of "compact" and "tiny"."""

    activation_checkpointing: bool = False
    """Recompute each layer's activations in backward: less VRAM for about a third more compute."""

    compile_blocks: bool = False
    """Compile repeated blocks with `torch.compile`, equal blocks once, in place of CUDA graphs and of the kernels for
    decoders. Steps are seldom faster, and their results are rounded differently. The first step takes minutes on a
    machine without cached compilations."""

    attention: Literal["ours", "keep"] = "ours"
    """Attention implementation of transformers models: "ours" selects the implementation used to train the model's
    family (see docs/design.md), "keep" the one the model was loaded with."""

    placement: Placement | None = None
    """One placement for all layers; None lets the plan decide, and change it when memory runs out."""

    vram: int | str | None = None
    """Total VRAM of the process, including CUDA's context, in bytes or as "8GiB"; None: free VRAM."""

    ram: int | str | None = None
    """Total RAM of the process, or of all ranks of a host, in bytes or as "8GiB"; None: available RAM."""

    on_nonfinite: Literal["raise", "skip", "rollback"] = "raise"
    """Reaction to NaN or Inf in the gradients. The step is never applied. "raise" ends training with an error at the
    next step boundary, "skip" warns and continues.

    "rollback" restores the last checkpoint: weights, optimizer states, schedule and random states. A Trainer and
    `finetune` continue from there; in a custom loop `step` raises `RolledBackError`, whose `position` says where to
    continue. All rows since the checkpoint are repeated, including those that gave NaN. After a transient fault (of a
    GPU or memory) the run is bit-identical to one without the fault. A NaN after three rollbacks is an error. If the
    rows themselves cause NaN, use "skip". Each `step` waits for its gradient norm, so that no checkpoint is written
    after an undetected NaN. Overflows that the fp16 loss scale handles are skipped as usual."""

    grace_seconds: float = field(default=25.0, compare=False)
    """Seconds from SIGTERM or SIGHUP until the process is killed. A Trainer saves if earlier saves were fast enough,
    and otherwise names the newest checkpoint."""

    save_minutes: float | None = field(default=None, compare=False)
    """Minutes between additional saves of a Trainer, by rank 0's clock."""

    save_only_model: bool = False
    """Checkpoints have no optimizer states: 2 instead of 12 bytes per parameter with bf16 weights, AdamW and "exact".

    A resumed run goes on with the step, schedule, data and random states. Its moments are zero, their bias correction
    begins again, and its master weights are the saved working weights. A Trainer and `finetune` take the argument of
    `TrainingArguments`."""

    checkpoint_precision: Literal["compact"] | None = None
    """Precision of fp32 moments in checkpoints. "compact" writes bf16 with stochastic rounding: 8 instead of 12 bytes
    per parameter. A run that is resumed or rolled back has the rounded moments; RAM keeps `precision`. None: no
    rounding."""

    resume_incomplete: bool = field(default=False, compare=False)
    """Allow a Trainer to resume from a checkpoint without weights, or from a transformers checkpoint without scheduler
    state or random states. Such a checkpoint is refused by default, because the resumed run would differ."""

    deepspeed: ConfigFile | None = field(default=None, compare=False, repr=False)
    """Config file read by `from_deepspeed`. A Trainer checks that its arguments agree with it."""

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
        if not isinstance(self.muon, MuonOptions):
            raise ConfigError(f"muon must be an offloadkit.MuonOptions, got {shown(self.muon)}")
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
        if self.compile_blocks and self.placement is not None and self.placement.activations == "cheap":
            raise ConfigError(
                "activations='cheap' with compile_blocks=True: the compiler itself recomputes element-wise operations: "
                "use activations='keep'"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be a whole number from 0 to 2**32 - 1, got {shown(self.seed)}")
        if self.checkpoint_precision not in (None, "compact"):
            raise ConfigError(f"checkpoint_precision must be 'compact' or None, got {shown(self.checkpoint_precision)}")
        if self.checkpoint_precision is not None and self.precision == "tiny":
            raise ConfigError(
                "checkpoint_precision='compact' with precision='tiny': the moments already have fewer bits: leave "
                "checkpoint_precision out"
            )
        if self.save_only_model and self.on_nonfinite == "rollback":
            raise ConfigError(
                "on_nonfinite='rollback' goes back to checkpoints, and save_only_model=True leaves out what they need: "
                "leave one of them out"
            )
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
        """Folder for optimizer states on disk; None if neither `disk` nor `placement` asks for any."""
        on_disk = self.placement is not None and self.placement.states == "disk"
        return self.disk or (tempfile.gettempdir() if on_disk else None)

    @property
    def checkpoint_contents(self) -> Contents:
        if self.save_only_model:
            return "weights"
        return "compact" if self.checkpoint_precision == "compact" and self.precision == "exact" else "all"

    @property
    def smaller_checkpoints(self) -> dict[Contents, str]:
        """The contents that take fewer bytes than `checkpoint_contents`, with the option that chooses each."""
        found: dict[Contents, str] = {}
        if self.checkpoint_contents == "all" and self.precision == "exact":
            found["compact"] = "OffloadConfig(checkpoint_precision='compact')"
        if self.checkpoint_contents != "weights" and self.on_nonfinite != "rollback":
            found["weights"] = "save_only_model=True"
        return found

    @classmethod
    def from_deepspeed(
        cls, source: str | Path | dict[str, Any] | ConfigFile, *, num_gpus: int | None = None
    ) -> OffloadConfig:
        """Read the optimizer options of a ds_config.json. docs/from-deepspeed.md lists every key.

        ZeRO stages and offload_* have no effect: the plan decides, within the limits in the file's section
        "offloadkit", which holds fields of this class such as "vram". `offloadkit.initialize` handles the schedule and
        the micro-batch size. Values "auto" and missing values stay at their defaults, which a Trainer's arguments
        replace. The arguments must not contradict values of the file.

        Args:
            source: the file, its content, or the result of `offloadkit.deepspeed.config.read_deepspeed`.
            num_gpus: for the product of the batch sizes; None: torchrun's WORLD_SIZE, else 1.

        Raises:
            ConfigError: a value is invalid or not supported.
        """
        return _load_reader()(source, num_gpus)


def _is_number(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _check_choices(options: Placement | DynamicLossScale | MuonOptions | OffloadConfig, of: str = "") -> None:
    """Raise `ConfigError` for the first flag or name that its annotation does not allow. `of`: ends the option's name
    in the message.
    """
    for name, hint in get_type_hints(type(options)).items():
        value, choices = getattr(options, name), get_args(hint)
        if hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{name}{of} must be True or False, got {shown(value)}")
        if get_origin(hint) is Literal and not (isinstance(value, str) and value in choices):
            raise ConfigError(f"{name}{of} must be one of {', '.join(map(repr, choices))}; got {shown(value)}")


Reader = Callable[[Any, int | None], OffloadConfig]
"""Makes an `OffloadConfig` from the arguments of `from_deepspeed`."""

_load_reader: Callable[[], Reader]


def register_reader(load: Callable[[], Reader]) -> None:
    """Register a function that imports and returns the reader for `OffloadConfig.from_deepspeed`."""
    global _load_reader
    _load_reader = load


def check_counts(counts: Mapping[str, Any], *, least: int = 1, optional: Collection[str] = ()) -> None:
    """Raise `ConfigError` for the first count that is not a whole number >= `least`. `optional` counts may be None."""
    for name, value in counts.items():
        left_out = value is None and name in optional
        if not left_out and (type(value) is not int or not least <= value < 2**31):
            raise ConfigError(f"must be a whole number >= {least}, got {shown(value)}", option=name)


def given_size(batch_size: object) -> dict[str, object]:
    """`batch_size` as a count by name; {} for "auto"."""
    return {} if isinstance(batch_size, str) and batch_size == "auto" else {"batch_size": batch_size}


def with_wishes(offload: OffloadConfig | None, **wishes: Any) -> OffloadConfig:
    """The config with all `wishes` that are not None.

    Raises:
        ConfigError: a value is invalid, or `offload` is no config.
    """
    if offload is not None and not isinstance(offload, OffloadConfig):
        raise ConfigError(f"offload must be an OffloadConfig, such as OffloadConfig(vram='8GiB'), got {shown(offload)}")
    return replace(offload or OffloadConfig(), **{name: wish for name, wish in wishes.items() if wish is not None})
