"""`Prediction`: the placements, bytes and seconds of a run, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from offloadkit.facts.calls import BY_CONFIG, WrittenCall
from offloadkit.facts.config import Contents, OffloadConfig, Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.planner.bound import Bound, bound_of
from offloadkit.planner.graphs import Graphs
from offloadkit.planner.layout import LayerShape, communicated_bytes
from offloadkit.planner.phases import NEEDED, Phase, cache_bytes, phases_of
from offloadkit.planner.seconds import Seconds, step_range
from offloadkit.planner.work import MicroBatch, Rows


@dataclass(frozen=True)
class FrozenModel:
    """A whole frozen model that is called together with the trained model, such as the reference of DPO."""

    name: str
    num_parameters: int
    layers: tuple[int, ...]
    """Indices of its flat layers."""
    rest_bytes: int
    """VRAM of its parameters outside the flat layers, and of its buffers."""


@dataclass(frozen=True)
class Basis:
    """The inputs of a plan, kept to make changed plans."""

    config: OffloadConfig
    frozen: int
    """Number of parameters outside the flat layers."""
    frozen_bytes: int
    """Bytes of the parameters outside the flat layers, and of buffers."""
    work: MicroBatch | None
    hardware: Hardware | None
    assumed: bool
    chosen: str = ""
    """The option that keeps this micro-batch if it could depend on the VRAM budget: "batch_size=4"."""
    smaller: tuple[tuple[tuple[str, ...], MicroBatch], ...] = ()
    """Smaller micro-batches that the user could choose: (options, its work), such as (("batch_size=2",), ...)."""
    with_disk: Hardware | None = None
    """The machine with a folder for states at assumed rates, if the user has named none."""
    unsaved_bytes: int = 0
    """The part of `frozen_bytes` that no checkpoint has."""
    saves_adapters: bool = False
    """The trained model is saved without its frozen weights, as PEFT saves adapters."""
    held_bytes: int = 0
    """RAM of a model in memory, until the engine has taken over all of it."""
    eager: bool = False
    """Blocks do not run as CUDA graphs, because these did not fit."""
    cache_bytes: int | None = None
    """Most bytes of keys and values that a generation has kept; None: none is known."""
    generates: bool = False
    """Text is generated between updates: the search leaves room for all weights beside keys and values."""
    frozen_models: tuple[FrozenModel, ...] = ()
    """Whole models among the frozen parameters, each with its line in the plan."""
    beside: str = ""
    """A line about what the user could train instead, with its verdict."""
    call: WrittenCall = BY_CONFIG
    """The call that asked for the plan. Remedies are written as this call with other options."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """The memory of a run and the seconds of its steps, computed from shapes alone.

    With several GPUs all bytes are for one rank, with its equal share of the host's RAM.

    Attributes:
        tiers: a training step's bytes by tier ("vram", "ram", "disk") and category. Without a micro-batch to plan for,
            activations and the framework's own memory are not included.
        budgets: bytes that may be used, by tier; {} for an unknown machine. RAM is this rank's share.
        seconds: the predicted step. None without a micro-batch or a machine to plan for.
        large_gpu_seconds: seconds of a step on the same GPU with enough VRAM for everything, or None.
        num_tokens: positions of one step on all GPUs, padding included.
        basis: the inputs of the plan.
        graphs: CUDA graphs of repeated blocks. None: no block can be captured, or the micro-batch is unknown.
    """

    layers: tuple[LayerShape, ...]
    placements: tuple[Placement, ...]
    accumulation: int
    num_parameters: int
    num_trainable_parameters: int
    tiers: dict[str, dict[str, int]]
    budgets: dict[str, int] = field(compare=False)
    seconds: Seconds | None = field(compare=False)
    large_gpu_seconds: float | None = field(compare=False)
    num_tokens: int | None
    basis: Basis = field(compare=False)
    graphs: Graphs | None = None

    def total_bytes(self, tier: str) -> int:
        """Planned bytes of a tier in training steps."""
        return sum(self.tiers[tier].values())

    def checkpoint_bytes_of(self, contents: Contents) -> int:
        """Size on disk of one checkpoint with these contents."""
        outside = self.basis.frozen_bytes - self.basis.unsaved_bytes
        return outside + sum(layer.saved_bytes(contents) for layer in self.layers)

    @property
    def checkpoint_bytes(self) -> int:
        """Size on disk of one checkpoint with the config's contents."""
        return self.checkpoint_bytes_of(self.basis.config.checkpoint_contents)

    @property
    def model_bytes(self) -> int:
        """Size on disk of the trained model."""
        if self.basis.saves_adapters:
            return self.checkpoint_bytes_of("weights")
        return self.basis.frozen_bytes + sum(layer.weight_bytes() for layer in self.layers)

    @property
    def checkpoint_peak_bytes(self) -> int:
        """Peak on disk: two checkpoints, since the old one is deleted after the new one is written, and the model."""
        return 2 * self.checkpoint_bytes + self.model_bytes

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Peak memory of each phase of a run, from reading the model to closing. Omits the same bytes as `tiers`."""
        cache = self.basis.cache_bytes
        if cache is None:
            return tuple(map(self._with_fewer_rows, self._phases(None)))
        return self._phases(cache + self._streamed_bytes if self.generates_in_vram else cache)

    def _with_fewer_rows(self, phase: Phase) -> Phase:
        """Encoder-decoders generate for fewer rows at a time if the GPU is full (`hf.evaluate.predict`)."""
        work, budget = self.basis.work, self.budgets.get("vram")
        rows = work and (work.evaluation or work).rows
        if phase.name != "generation" or not budget or phase.vram <= budget or not (rows and rows.target_length):
            return phase
        of_one_row = self._phases(cache_bytes(work) // rows.batch_size)
        return replace(phase, vram=max(budget, *(each.vram for each in of_one_row if each.name == phase.name)))

    def _phases(self, generating: int | None) -> tuple[Phase, ...]:
        args = self.layers, self.placements, self.accumulation, self.tiers, self.basis.work
        return phases_of(*args, on_cpu=self.on_cpu, held_bytes=self.basis.held_bytes, generating=generating)

    @cached_property
    def generates_in_vram(self) -> bool:
        """Whether the weights that stream in training fit in VRAM while text is generated between updates."""
        generation = next(
            each
            for each in self._phases((self.basis.cache_bytes or 0) + self._streamed_bytes)
            if each.name == "generation"
        )
        return "vram" not in self.budgets or generation.vram <= self.budgets["vram"]

    @cached_property
    def _streamed_bytes(self) -> int:
        """Bytes of the trained model's weights that stream; a frozen model beside it does not generate."""
        beside = {at for model in self.basis.frozen_models for at in model.layers}
        return sum(
            layer.weight_bytes()
            for at, (layer, where) in enumerate(zip(self.layers, self.placements, strict=True))
            if where.weights == "ram" and layer.in_block and at not in beside
        )

    def needs(self) -> dict[str, int]:
        """Planned bytes by tier, of the phase that takes the most. Without a GPU, VRAM counts as RAM too.

        Generation is left out, because most runs do not generate. So is a model in memory while it is read: on the CPU
        it is freed layer by layer, and for a GPU the budget is what is free beside it.
        """
        phases, beside = [each for each in self.phases if each.name in NEEDED], {"reading": self.basis.held_bytes}
        vram = max(phase.vram for phase in phases)
        ram = max(phase.ram - beside.get(phase.name, 0) for phase in phases)
        return {"vram": vram, "ram": ram, "disk": self.total_bytes("disk")}

    def lacking(self) -> dict[str, int]:
        """Missing bytes by tier; {} if the plan fits. Without a GPU, VRAM has a budget only if the config gives one."""
        short = {tier: need - self.budgets[tier] for tier, need in self.needs().items() if tier in self.budgets}
        return {tier: number for tier, number in short.items() if number > 0}

    @property
    def fits(self) -> bool:
        """Whether the plan fits the known budgets."""
        return not self.lacking()

    @property
    def is_graphed(self) -> bool:
        """Whether repeated blocks run as CUDA graphs."""
        return self.graphs is not None and self.graphs.fit

    @property
    def on_cpu(self) -> bool:
        """Whether the plan is for a machine without a GPU."""
        return self.basis.hardware is not None and self.basis.hardware.device == "cpu"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that train together. A run on the CPU counts its ranks."""
        return self.layers[0].num_ranks

    @property
    def num_on_host(self) -> int:
        """Number of ranks that share a host's RAM."""
        return self.basis.hardware.num_ranks if self.basis.hardware else self.num_gpus

    @cached_property
    def communicated(self) -> dict[str, int]:
        """Bytes that a GPU receives from the other GPUs in an optimizer step, by kind: "exchange" of gradients,
        "gather" of new weights, "norm", and updates of Muon's "matrices". {} with one GPU.
        """
        return communicated_bytes(self.layers, self.placements, self.accumulation)

    @property
    def rows(self) -> Rows | None:
        """Batch size and lengths of a micro-batch, if known."""
        return self.basis.work.rows if self.basis.work else None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions per second, padding included."""
        return self.num_tokens / self.seconds.step if self.num_tokens and self.seconds else None

    @cached_property
    def step_range(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step that Python bounds (`seconds.step_range`); else None."""
        basis = self.basis
        if self.on_cpu or self.seconds is None or basis.work is None or basis.hardware is None:
            return None
        args = self.layers, basis.work, basis.hardware, self.accumulation, self.placements
        return step_range(*args, compiled=basis.config.compile_blocks, graphed=self.is_graphed)

    @cached_property
    def bound(self) -> Bound | None:
        """What a step takes at least on this machine with these placements; None without a GPU or a known step."""
        basis = self.basis
        if self.on_cpu or self.seconds is None or basis.work is None or basis.hardware is None:
            return None
        return bound_of(self.layers, self.placements, self.accumulation, basis.work, basis.hardware, self.seconds)

    @property
    def slowdown(self) -> float | None:
        """Seconds of a step relative to a GPU that holds everything."""
        return self.seconds.step / self.large_gpu_seconds if self.seconds and self.large_gpu_seconds else None
