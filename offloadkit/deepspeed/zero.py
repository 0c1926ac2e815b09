"""Translate an `OffloadConfig` to DeepSpeed's ZeRO: stage, configuration, and memory forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, log2
from typing import Any, Literal

from offloadkit.errors import ConfigError, DoesNotFitError
from offloadkit.facts.config import DynamicLossScale, OffloadConfig, Placement
from offloadkit.facts.units import format_bytes
from offloadkit.planner import Dtype, Plan
from offloadkit.planner.layout import activation_bytes
from offloadkit.planner.words import does_not_fit

BUCKET_ELEMENTS = 200_000_000
"""Elements per gradient bucket. DeepSpeed's default of 500 million takes 2 GB of VRAM for any model size."""
NEVER = 10**9
"""steps_per_print that disables DeepSpeed's lines."""

_LIVE_ELEMENTS = 10**9
"""DeepSpeed's defaults of `stage3_max_live_parameters` and `sub_group_size`."""
_PROCESS_BYTES = 2_350_000_000
"""RAM of a process with torch, CUDA and DeepSpeed. Forecast RAM is then within 1.5 % of the RAM of ZeRO-2 in five runs
on an H200, from T5-small to Llama-3.2-3B (benchmarks/results.csv).
"""
_CPU_PROCESS_BYTES = 600_000_000
"""RAM of a process without CUDA: a T5 with 12,000 parameters took 570 MB in all (CPU torch 2.13, DeepSpeed 0.19)."""
_LOSS_BYTES = 8
"""Bytes per logit beyond the logit itself: its fp32 copy and that copy's gradient."""
_OTHER_KERNELS = 1.3
"""Activations kept by HuggingFace's attention and norms relative to ours: 1.29 for T5-3B, 1.11 for Llama-3.2-3B.
Forecast VRAM was then -0 to +10 % of torch's allocation (H200, ZeRO-2).
"""


@dataclass(frozen=True)
class Zero:
    stage: Literal[1, 2, 3] = 2
    """1 shards states over the GPUs, 2 also gradients, 3 also weights."""
    states: Literal["vram", "ram", "disk"] = "ram"
    """Location of master weights and moments. The CPU steps them unless they are in VRAM."""
    weights: Literal["vram", "ram"] = "vram"
    """Location of working weights; "ram" needs stage 3."""
    recomputed: bool = False

    def __str__(self) -> str:
        where = {"vram": "states in VRAM", "ram": "states in RAM", "disk": "states on disk"}[self.states]
        if self.weights == "ram":
            where = "states and weights in RAM" if self.states == "ram" else f"{where}, weights in RAM"
        return f"ZeRO-{self.stage}, {where}{', activations recomputed' if self.recomputed else ''}"


LADDER = (Zero(states="vram"), Zero(), Zero(recomputed=True), Zero(3, weights="ram", recomputed=True))


def zero_for(config: OffloadConfig, plan: Plan | None, *, logits: int = 0, num_ranks: int = 1) -> Zero:
    """Choose a ZeRO variant for `config`: the one of its placement, else the fastest within the plan's limits.

    Args:
        plan: offloadkit's plan for the same work, for its limits and activations; None: states in RAM.
        logits: number of logits in a micro-batch.
        num_ranks: number of processes, one per GPU.
    """
    check(config)
    if config.placement is not None:
        return _as_placed(config.placement, config)
    ways = [way for way in LADDER if way.recomputed or not config.activation_checkpointing]
    if config.disk is not None:
        ways.append(Zero(3, "disk", "ram", True))
    if plan is None:
        return next(way for way in ways if way.states == "ram")
    if plan.on_cpu:
        ways = [way for way in ways if way.states != "vram"]
    has = plan.budgets
    for way in ways:
        needs = zero_needs(way, plan, logits=logits, num_ranks=num_ranks)
        if plan.on_cpu:
            needs = {"ram": sum(needs.values())}
        lacking = {tier: (need, has[tier]) for tier, need in needs.items() if tier in has and need > has[tier]}
        if not lacking:
            return way
    raise DoesNotFitError(
        f"DeepSpeed by {way} {does_not_fit(lacking)}. Train with offloadkit's own engine, shorter rows or a smaller "
        f"batch_size{'' if config.disk else ', or name a folder for states on a disk: OffloadConfig(disk=...)'}"
    )


def check(config: OffloadConfig) -> None:
    """Raise a `ConfigError` that lists options unsupported by DeepSpeed, with advice."""
    scale = config.loss_scale
    refused = {
        f"optimizer={config.optimizer!r}": (config.optimizer != "adamw", "DeepSpeed uses its own AdamW here"),
        f"precision={config.precision!r}": (config.precision != "exact", "DeepSpeed keeps fp32 moments: use 'exact'"),
        f"checkpoint_precision={config.checkpoint_precision!r}": (
            config.checkpoint_precision is not None,
            "DeepSpeed's checkpoints have fp32 moments: leave it out",
        ),
        "compile_blocks=True": (config.compile_blocks, "leave it out"),
        "on_nonfinite='rollback'": (config.on_nonfinite == "rollback", "training continues there; leave it out"),
        f"loss_scale={scale!r}": (
            isinstance(scale, DynamicLossScale) and (frexp(scale.start)[0] != 0.5 or scale.start < 1),
            "DeepSpeed starts from a power of two >= 1: pass such a `start`",
        ),
    }
    problems = [f"{name}: {advice}" for name, (given, advice) in refused.items() if given]
    if problems:
        raise ConfigError("options that DeepSpeed does not have:\n  " + "\n  ".join(problems))


def _as_placed(placed: Placement, config: OffloadConfig) -> Zero:
    if placed.activations in ("cheap", "offload"):
        raise ConfigError(
            f"activations={placed.activations!r} has no equivalent in DeepSpeed with HuggingFace's models: use "
            "'checkpoint'"
        )
    if placed.states == "ram" and placed.step == "gpu":
        raise ConfigError("states='ram' with step='gpu': DeepSpeed steps states in RAM on the CPU: use step='cpu'")
    if placed.states == "disk" and config.disk is None:
        raise ConfigError("states='disk': name the folder, OffloadConfig(disk=...)")
    stage: Literal[1, 2, 3] = 2
    if placed.weights == "ram" or placed.states == "disk":
        stage = 3
    elif placed.states == "ram" and placed.gradients == "vram":
        stage = 1
    recomputed = placed.activations == "checkpoint" or config.activation_checkpointing
    return Zero(stage, placed.states, placed.weights, recomputed)


def ds_config(
    zero: Zero, config: OffloadConfig, dtype: Dtype, *, batch_size: int, bucket_elements: int | None, pinned: bool
) -> dict[str, Any]:
    """A DeepSpeed config without an optimizer, because HuggingFace's Trainer makes the no-decay groups.

    `dtype`: of the working weights; `batch_size`: rows of a micro-batch of one GPU; `bucket_elements`: None:
    DeepSpeed's default.
    """
    section: dict[str, Any] = {"stage": zero.stage, "contiguous_gradients": True, "overlap_comm": True}
    in_ram = {"device": "cpu", "pin_memory": pinned}
    if zero.states == "ram":
        section["offload_optimizer"] = in_ram
    elif zero.states == "disk":
        section["offload_optimizer"] = {"device": "nvme", "nvme_path": config.disk, "pin_memory": pinned}
    if zero.weights == "ram":
        section["offload_param"] = in_ram
    if zero.stage == 3:
        section["stage3_gather_16bit_weights_on_model_save"] = True
    if bucket_elements is not None:
        gathered = "stage3_prefetch_bucket_size" if zero.stage == 3 else "allgather_bucket_size"
        section |= {"reduce_bucket_size": bucket_elements, gathered: bucket_elements}
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16"} | (_loss_scale(config) if dtype == "fp16" else {}),
        "zero_optimization": section,
        "steps_per_print": NEVER,
    }


def _loss_scale(config: OffloadConfig) -> dict[str, Any]:
    scale = config.loss_scale
    if not isinstance(scale, DynamicLossScale) and scale != "dynamic":
        return {"loss_scale": scale}
    dynamic = scale if isinstance(scale, DynamicLossScale) else DynamicLossScale()
    return {
        "loss_scale": 0,
        "initial_scale_power": int(log2(dynamic.start)),
        "loss_scale_window": dynamic.window,
        "hysteresis": dynamic.hysteresis,
        "consecutive_hysteresis": dynamic.consecutive_hysteresis,
        "min_loss_scale": dynamic.minimum,
    }


# -- memory forecast


def zero_needs(zero: Zero, plan: Plan, *, logits: int = 0, num_ranks: int = 1) -> dict[str, int]:
    """Forecast the bytes of training: "vram" per GPU, "ram" over all ranks of one host.

    torch pins memory in powers of two, which accounts for a third of ZeRO's RAM for some models. Reserved but unused
    memory is not included. `plan` is offloadkit's for the same work; `logits`: logits in a micro-batch.
    """
    weight = 4 if dtype_of(plan) == "fp32" else 2
    size, share = plan.num_parameters, -(-plan.num_parameters // num_ranks)
    pinned = (lambda number: number) if plan.on_cpu else _power_of_two
    vram = 2 * weight * min(size, BUCKET_ELEMENTS) + logits * (weight + _LOSS_BYTES)
    vram += int(_OTHER_KERNELS * activation_bytes(plan.basis.work, recomputed=zero.recomputed))
    if plan.basis.hardware is not None:
        vram += plan.basis.hardware.vram_context_bytes
    ram = _CPU_PROCESS_BYTES if plan.on_cpu else _PROCESS_BYTES
    if zero.weights == "vram":
        vram += weight * (share if zero.stage == 3 else size)
    else:
        vram += weight * min(size, _LIVE_ELEMENTS)
        ram += 2 * pinned(weight * share)
    if zero.stage == 3:
        vram += weight * min(size, _LIVE_ELEMENTS) if zero.weights == "vram" else 0
    if zero.states == "vram":
        vram += (weight + 16) * share  # gradients; for fp32 master weights, two moments and the stepped gradients
    elif zero.states == "ram":
        masters = _in_groups(share, pinned) if zero.stage == 3 else pinned(4 * share)
        ram += masters + pinned(4 * share) + 8 * share + (pinned(weight * share) if zero.stage < 3 else 0)
        vram += weight * size if zero.stage == 1 else 0
    else:
        ram += (
            pinned(4 * share) + 3 * 4 * min(share, _LIVE_ELEMENTS) * 2
        )  # gradients, and groups in transfer from and to disk
    return {"vram": vram, "ram": ram * num_ranks}


def forecast_line(zero: Zero, plan: Plan, *, logits: int = 0, num_ranks: int = 1) -> str:
    needs, own = zero_needs(zero, plan, logits=logits, num_ranks=num_ranks), plan.needs()
    if plan.on_cpu:
        said = f"about {format_bytes(sum(needs.values()))} of RAM"
        return f"DeepSpeed {zero}: {said} (offloadkit: {format_bytes(own['ram'])})"
    each = "" if num_ranks == 1 else " a GPU"
    vram, ram = format_bytes(needs["vram"]), format_bytes(needs["ram"])
    own_plan = f"offloadkit: {format_bytes(own['vram'])} and {format_bytes(own['ram'])}"
    return f"DeepSpeed {zero}: about {vram} of VRAM{each}, {ram} of RAM ({own_plan})"


def dtype_of(plan: Plan) -> Dtype:
    """The working dtype of most layers."""
    dtypes = [layer.dtype for layer in plan.layers]
    return max(dtypes, key=dtypes.count)


def _in_groups(share: int, pinned: Callable[[int], int]) -> int:
    """Bytes of stage 3's fp32 master weights, which are pinned in groups of `sub_group_size`."""
    whole, rest = divmod(share, _LIVE_ELEMENTS)
    return whole * pinned(4 * _LIVE_ELEMENTS) + (pinned(4 * rest) if rest else 0)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
