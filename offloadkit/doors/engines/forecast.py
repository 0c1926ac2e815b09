"""The plan's figures for a workload, and the least memory that other engines need for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from offloadkit.deepspeed.zero import dtype_of
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM
from offloadkit.doors.engines.timing import LEAST_STEPS
from offloadkit.doors.engines.work import Work, model_to_plan
from offloadkit.doors.planning import PlanRequest, plan_source
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.source import resolve
from offloadkit.planner import Plan
from offloadkit.planner.layout import activation_bytes
from offloadkit.planner.words import does_not_fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SURE_SHARE = 0.8
"""Share of the planned activations that counts when work is rejected without a run; the rest allows for errors."""


@dataclass(frozen=True)
class Forecast:
    """A plan in plain numbers.

    Attributes:
        lacking: {tier: (needed, available)} in bytes, for tiers that are too small.
        limits: {tier: bytes that may be used}.
        busy: seconds by resource; "GPU" is forward, backward and recomputation.
        kept_bytes, recomputed_bytes: of the activations, with no block and with every block recomputed.
    """

    num_parameters: int
    dtype: str
    on_cpu: bool
    lacking: dict[str, tuple[int, int]]
    limits: dict[str, int]
    vram_bytes: int
    ram_bytes: int
    num_tokens: int | None
    step_seconds: float | None
    large_gpu_seconds: float | None
    busy: dict[str, float]
    kept_bytes: int
    recomputed_bytes: int

    def steps_seconds(self, work: Work) -> float:
        """Planned seconds of a run of `work`; 0 if unknown."""
        return (self.step_seconds or 0.0) * (2 + work.warmup + (work.steps or LEAST_STEPS))

    @property
    def reason(self) -> str | None:
        return does_not_fit(self.lacking) if self.lacking else None


def forecast(work: Work, device: torch.device) -> Forecast:
    """Plan `work` on this machine. Runs kernels if the machine was never measured."""
    _, made = planned(model_to_plan(work.model), work, device)
    seconds = made.seconds
    busy = {} if seconds is None else {name: float(number) for name, number in seconds.busy.items()}
    return Forecast(
        num_parameters=made.num_parameters,
        dtype=dtype_of(made),
        on_cpu=made.on_cpu,
        lacking={tier: (made.needs()[tier], made.budgets[tier]) for tier in made.lacking()},
        limits=dict(made.budgets),
        vram_bytes=made.total_bytes("vram"),
        ram_bytes=made.total_bytes("ram") + (made.total_bytes("vram") if made.on_cpu else 0),
        num_tokens=made.num_tokens,
        step_seconds=None if seconds is None else seconds.step,
        large_gpu_seconds=made.large_gpu_seconds,
        busy={"GPU": busy.pop("forward", 0.0) + busy.pop("backward", 0.0)} | busy,
        kept_bytes=activation_bytes(made.basis.work, recomputed=False),
        recomputed_bytes=activation_bytes(made.basis.work, recomputed=True),
    )


def planned(model: PreTrainedModel, work: Work, device: torch.device) -> tuple[OffloadConfig, Plan]:
    config = OffloadConfig(
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        gradient_accumulation=work.accumulation,
        optimizer=work.optimizer,
        precision=work.precision,
        working_dtype=work.dtype_on(device),
        vram=None if device.type == "cpu" else work.vram,
        ram=work.ram,
        disk=work.disk,
        activation_checkpointing=work.recomputed,
        compile_blocks=work.compiled,
    )
    mask: Any = "absent" if work.mask == "full" else None
    request = PlanRequest(work.batch_size, work.input_length, work.target_length or None, device, mask=mask)
    return config, plan_source(resolve(model, init="random"), config, request)


def largest_batch(work: Work, most: int, device: torch.device) -> int | None:
    """The largest batch size up to `most` that fits by the plan, to within an eighth; None if none fits."""

    def fits(batch_size: int) -> bool:
        return not forecast(replace(work, batch_size=batch_size), device).lacking

    if fits(most):
        return most
    low, high = 0, most
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def as_row(made: Forecast) -> dict[str, Any]:
    return asdict(made)


def from_row(row: dict[str, Any]) -> Forecast:
    lacking = {tier: (int(needs), int(has)) for tier, (needs, has) in row["lacking"].items()}
    return Forecast(**{**row, "lacking": lacking})


def why_cannot_fit(engine: str, made: Forecast, *, recomputed: bool) -> str | None:
    """Why arithmetic rules out an engine without a plan ("baseline", "zero2", "zero3"), or None if it must be tried.

    Counts the working weights, fp32 master weights and moments (12 bytes per parameter; fp32 weights are their own
    master weights), the baseline's gradients, and most of the planned activations.
    """
    weights = made.num_parameters * (4 if made.dtype == "fp32" else 2)
    states = made.num_parameters * (8 if made.dtype == "fp32" and engine == "baseline" else 12)
    held = int(_SURE_SHARE * (made.recomputed_bytes if recomputed else made.kept_bytes))
    needs = {
        "baseline": {"vram": 2 * weights + states + held, "ram": 0},
        "zero2": {"vram": weights + held, "ram": states},
        "zero3": {"vram": held, "ram": states + weights},
    }[engine]
    if made.on_cpu:
        needs = {"ram": needs["ram"] + needs["vram"]}
    has = made.limits
    lacking = {tier: (need, has[tier]) for tier, need in needs.items() if tier in has and need > has[tier]}
    return does_not_fit(lacking, at_least=True) if lacking else None
