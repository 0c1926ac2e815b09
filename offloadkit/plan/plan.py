"""`make_plan` and the `Plan` it gives: what lives where, whether that fits, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offloadkit.config import OffloadConfig, Placement, parse_bytes
from offloadkit.hardware import Hardware
from offloadkit.plan.memory import activations, choices, run_bytes
from offloadkit.plan.search import Search
from offloadkit.plan.seconds import Seconds, StepModel
from offloadkit.plan.shapes import DEFAULT_PLACEMENT, LayerShape, possible
from offloadkit.plan.work import MicroBatch, Rows

TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}


@dataclass(frozen=True)
class Basis:
    """What a plan was made from: enough to make another one."""

    config: OffloadConfig
    frozen: int
    frozen_bytes: int
    work: MicroBatch | None
    hardware: Hardware | None
    assumed: bool
    """Whether the machine was not measured: its rates are assumptions."""
    smaller: tuple[tuple[str, MicroBatch], ...] = ()
    """Smaller micro-batches that the user could choose, and how: ("batch_size=2", its work)."""
    with_disk: Hardware | None = None
    """The machine with a folder that states could go to, where the user has named none; its rates are assumed."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Sizes of a run and seconds of its steps, computed from shapes alone.

    Attributes:
        tiers: bytes by tier ("vram", "ram", "disk") and category. Without a micro-batch to plan for, activations and
            the framework's own memory come on top.
        budgets: bytes that may be used, by tier; {} where nothing is known of the machine.
        seconds: the step's prediction, and `large_gpu_seconds` a step's on a GPU that holds everything; None without
            a micro-batch or a machine to plan for.
        num_tokens: of one step, padding included.
        checkpoint_bytes: of one checkpoint on disk; `checkpoint_peak_bytes` while a second one is written before the
            first goes, and the trained model beside them.
        basis: what it was made from.
    """

    layers: tuple[LayerShape, ...]
    placements: tuple[Placement, ...]
    accumulation: int
    num_parameters: int
    num_trainable_parameters: int
    tiers: dict[str, dict[str, int]]
    checkpoint_bytes: int
    checkpoint_peak_bytes: int
    budgets: dict[str, int] = field(default_factory=dict, compare=False)
    seconds: Seconds | None = field(default=None, compare=False)
    large_gpu_seconds: float | None = field(default=None, compare=False)
    num_tokens: int | None = None
    basis: Basis | None = field(default=None, compare=False)

    def total_bytes(self, tier: str) -> int:
        """Planned bytes of a tier."""
        return sum(self.tiers[tier].values())

    def needs(self) -> dict[str, int]:
        """Planned bytes by tier. Without a GPU, what would be in VRAM is in RAM, and counts there too."""
        needs = {tier: self.total_bytes(tier) for tier in TIERS}
        if self.on_cpu:
            needs["ram"] += needs["vram"]
        return needs

    def lacking(self) -> dict[str, int]:
        """Bytes that are missing, by tier; {} where the plan fits. Without a GPU VRAM has a wished budget only."""
        short = {tier: need - self.budgets[tier] for tier, need in self.needs().items() if tier in self.budgets}
        return {tier: number for tier, number in short.items() if number > 0}

    @property
    def fits(self) -> bool:
        """Whether it fits the budgets, as far as there are any."""
        return not self.lacking()

    @property
    def on_cpu(self) -> bool:
        """Whether it was made for a machine without a GPU."""
        hardware = self.basis.hardware if self.basis else None
        return hardware is not None and hardware.device == "cpu"

    @property
    def rows(self) -> Rows | None:
        """Batch size and lengths of a micro-batch; None without one to plan for."""
        work = self.basis.work if self.basis else None
        return work.rows if work else None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second, padding included."""
        return self.num_tokens / self.seconds.step if self.num_tokens and self.seconds else None

    @property
    def slowdown(self) -> float | None:
        """Seconds of a step over those on a GPU that holds everything and is otherwise the same."""
        return self.seconds.step / self.large_gpu_seconds if self.seconds and self.large_gpu_seconds else None

    def explain(self) -> str:
        """In sentences: whether it fits, what limits the step, and what would help, with numbers."""
        from offloadkit.plan.explain import explained

        return explained(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was predicted, for JSON."""
        from offloadkit.plan.text import as_dict

        return as_dict(self)

    def __repr__(self) -> str:
        from offloadkit.plan.text import in_short

        return f"Plan({in_short(self)})"

    def __str__(self) -> str:
        from offloadkit.plan.text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from offloadkit.plan.text import as_html

        return as_html(self)


def make_plan(
    layers: Sequence[LayerShape],
    config: OffloadConfig,
    *,
    frozen: int = 0,
    frozen_bytes: int = 0,
    work: MicroBatch | None = None,
    hardware: Hardware | None = None,
    assumed: bool = False,
) -> Plan:
    """The plan of a model cut into `layers`.

    With `work` and `hardware` the placements are those with the fastest predicted step within the budgets, unless the
    config names one; the budgets are the config's `vram` and `ram`, else what the machine has free. Without a GPU, and
    without knowing work and machine, every layer has its states in RAM.

    Args:
        frozen, frozen_bytes: number and size of the parameters outside the flat layers, and buffers' bytes.
        assumed: whether `hardware` is an assumption.
    """
    layers = tuple(replace(layer, precision=config.precision) for layer in layers)
    basis = Basis(config, frozen, frozen_bytes, work, hardware, assumed)
    budgets = _budgets(config, hardware)
    placements = _placements(layers, basis, budgets)
    held = activations(work, choices(layers, placements, work)) if work else None
    tiers = run_bytes(
        layers,
        placements,
        config.gradient_accumulation,
        frozen_bytes=frozen_bytes,
        held=held,
        context_bytes=hardware.vram_context_bytes if hardware else 0,
        device_type="cpu" if hardware is not None and hardware.device == "cpu" else "cuda",
    )
    model = None
    if work and hardware:
        model = StepModel(layers, work, hardware, config.gradient_accumulation, compiled=config.compile_blocks)
    weights = frozen_bytes + sum(layer.weight_bytes() for layer in layers)
    checkpoint = weights + sum(sum(layer.state_bytes().values()) for layer in layers)
    num_trainable = sum(layer.num_parameters for layer in layers)
    return Plan(
        layers,
        placements,
        config.gradient_accumulation,
        num_trainable + frozen,
        num_trainable,
        tiers,
        checkpoint,
        2 * checkpoint + weights,
        budgets,
        model.seconds(placements) if model else None,
        model.on_large_gpu() if model else None,
        config.gradient_accumulation * work.num_tokens if work else None,
        basis,
    )


def _budgets(config: OffloadConfig, hardware: Hardware | None) -> dict[str, int]:
    """Bytes that may be used: what the config says, else what is free; this process's CUDA context counts as used."""
    found: dict[str, int] = {}
    if hardware is not None:
        found = {"ram": hardware.ram_available_bytes, "disk": hardware.disk_free_bytes}
        if hardware.device != "cpu":
            found["vram"] = hardware.vram_free_bytes + hardware.vram_context_bytes
    for tier, wish in (("vram", config.vram), ("ram", config.ram)):
        if wish is not None:
            found[tier] = parse_bytes(wish)
    return found


def _placements(layers: Sequence[LayerShape], basis: Basis, budgets: dict[str, int]) -> tuple[Placement, ...]:
    config, work, hardware = basis.config, basis.work, basis.hardware
    free = config.placement is None and work is not None and hardware is not None and hardware.device != "cpu"
    if free and work is not None and hardware is not None:
        search = Search(
            layers,
            work,
            hardware,
            config.gradient_accumulation,
            frozen_bytes=basis.frozen_bytes,
            all_recomputed=config.activation_checkpointing,
            compiled=config.compile_blocks,
        )
        disk = budgets["disk"] if hardware.disk_read_bytes_per_second else 0
        return search.best(budgets["vram"], budgets["ram"], disk)
    placement = config.placement or DEFAULT_PLACEMENT
    if config.activation_checkpointing and placement.activations == "keep":
        placement = replace(placement, activations="checkpoint")
    return tuple(possible(placement, layer) for layer in layers)
