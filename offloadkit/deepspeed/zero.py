"""DeepSpeed's ZeRO in our words: which stage does what a placement says, its configuration, and what it will take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, log2
from typing import Any, Literal

from offloadkit.config import DynamicLossScale, OffloadConfig, Placement
from offloadkit.errors import ConfigError, DoesNotFitError
from offloadkit.planner import Dtype, Plan
from offloadkit.planner.layout import activations
from offloadkit.planner.plan import does_not_fit
from offloadkit.units import format_bytes

BUCKET_ELEMENTS = 200_000_000
"""Gradients that travel together. DeepSpeed's own 500 million take 2 GB of VRAM, whatever the model's size."""
NEVER = 10**9
"""Updates between two of DeepSpeed's own lines."""

_LIVE_ELEMENTS = 10**9
"""`stage3_max_live_parameters` and `sub_group_size`, as DeepSpeed sets them."""
_PROCESS_BYTES = 2_350_000_000
"""RAM of a process with torch, CUDA and DeepSpeed. With it the RAM below is within 1.5 % of what ZeRO-2 took in five
runs on an H200, from T5-small to Llama-3.2-3B (benchmarks/results.csv)."""
_CPU_PROCESS_BYTES = 600_000_000
"""The same without CUDA: a T5 of 12 thousand parameters took 570 MB in all (torch 2.13 for the CPU, DeepSpeed 0.19)."""
_LOSS_BYTES = 8
"""An element of the logits takes them beside its own: its fp32 copy and that one's gradient."""
_OTHER_KERNELS = 1.3
"""Activations that HuggingFace's attention and norms keep, as a multiple of those with ours: 1.29 for T5-3B, 1.11 for
Llama-3.2-3B. With it the VRAM below was -0 to +10 % of what torch allocated (H200, ZeRO-2)."""


@dataclass(frozen=True)
class Zero:
    """One way to run DeepSpeed."""

    stage: Literal[1, 2, 3] = 2
    """1 shares states between the GPUs, 2 gradients too, 3 weights too."""
    states: Literal["vram", "ram", "disk"] = "ram"
    """Master weights and moments. The CPU steps them unless they are in VRAM."""
    weights: Literal["vram", "ram"] = "vram"
    """Working weights; "ram" needs stage 3."""
    recomputed: bool = False
    """Whether backward recomputes the blocks' activations."""

    def __str__(self) -> str:
        where = {"vram": "states in VRAM", "ram": "states in RAM", "disk": "states on disk"}[self.states]
        if self.weights == "ram":
            where = "states and weights in RAM" if self.states == "ram" else f"{where}, weights in RAM"
        return f"ZeRO-{self.stage}, {where}{', activations recomputed' if self.recomputed else ''}"


LADDER = (Zero(states="vram"), Zero(), Zero(recomputed=True), Zero(3, weights="ram", recomputed=True))
"""The fastest first, the leanest last."""


def zero_for(config: OffloadConfig, plan: Plan | None, *, logits: int = 0, num_ranks: int = 1) -> Zero:
    """How DeepSpeed does what `config` asks for: as its placement says, else the fastest way within the plan's budgets.

    Args:
        plan: offloadkit's own for the same work, whose budgets and activations count; None: states in RAM.
        logits: elements that the model's head computes for a micro-batch.
        num_ranks: processes, each with a GPU of its own.

    Raises:
        ConfigError: something in `config` has no counterpart in DeepSpeed.
        DoesNotFitError: no way fits.
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
    """
    Raises:
        ConfigError: names each option that has no counterpart in DeepSpeed, and what to do.
    """
    scale = config.loss_scale
    refused = {
        f"optimizer={config.optimizer!r}": (config.optimizer != "adamw", "DeepSpeed steps with its AdamW here"),
        f"precision={config.precision!r}": (config.precision != "exact", "DeepSpeed keeps fp32 moments: use 'exact'"),
        "compile_blocks=True": (config.compile_blocks, "leave it out"),
        "on_nonfinite='rollback'": (config.on_nonfinite == "rollback", "training there goes on; leave it out"),
        f"loss_scale={scale!r}": (
            isinstance(scale, DynamicLossScale) and (frexp(scale.start)[0] != 0.5 or scale.start < 1),
            "DeepSpeed begins with a power of two from 1: pass such a `start`",
        ),
    }
    problems = [f"{name}: {advice}" for name, (given, advice) in refused.items() if given]
    if problems:
        raise ConfigError("options that DeepSpeed has no counterpart of:\n  " + "\n  ".join(problems))


def _as_placed(placed: Placement, config: OffloadConfig) -> Zero:
    """
    Raises:
        ConfigError: DeepSpeed cannot place things so.
    """
    if placed.activations == "offload":
        raise ConfigError(
            "activations='offload' has no counterpart in DeepSpeed with HuggingFace's models: use 'checkpoint'"
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
    """DeepSpeed's configuration, without an optimizer: HuggingFace's Trainer makes the groups that do not decay.

    Args:
        dtype: of the working weights.
        batch_size: rows of a micro-batch of one GPU.
        bucket_elements: gradients that travel together; None: DeepSpeed's own number.
        pinned: whether RAM that is copied from is pinned.
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
    """Of the section fp16; its rule is that of `DynamicLossScale`."""
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


# -- what it will take


def zero_needs(zero: Zero, plan: Plan, *, logits: int = 0, num_ranks: int = 1) -> dict[str, int]:
    """About how many bytes training takes: "vram" of each GPU, "ram" of all ranks together, which are on one host.

    torch pins memory in powers of two, which is a third of ZeRO's RAM for some models. Memory that torch reserves and
    does not use is not counted.

    Args:
        plan: offloadkit's own for the same work.
        logits: elements that the model's head computes for a micro-batch.
    """
    weight = 4 if _dtype(plan) == "fp32" else 2
    size, share = plan.num_parameters, -(-plan.num_parameters // num_ranks)
    pinned = (lambda number: number) if plan.on_cpu else _power_of_two
    vram = 2 * weight * min(size, BUCKET_ELEMENTS) + logits * (weight + _LOSS_BYTES)
    vram += int(_OTHER_KERNELS * activation_bytes(plan, recomputed=zero.recomputed))
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
        vram += (weight + 16) * share  # gradients, and in fp32 masters, both moments and the gradients that are stepped
    elif zero.states == "ram":
        masters = _in_groups(share, pinned) if zero.stage == 3 else pinned(4 * share)
        ram += masters + pinned(4 * share) + 8 * share + (pinned(weight * share) if zero.stage < 3 else 0)
        vram += weight * size if zero.stage == 1 else 0
    else:
        ram += (
            pinned(4 * share) + 3 * 4 * min(share, _LIVE_ELEMENTS) * 2
        )  # gradients, and groups being read and written
    return {"vram": vram, "ram": ram * num_ranks}


def forecast_line(zero: Zero, plan: Plan, *, logits: int = 0, num_ranks: int = 1) -> str:
    """What `zero_needs` says, beside offloadkit's own plan."""
    needs, own = zero_needs(zero, plan, logits=logits, num_ranks=num_ranks), plan.needs()
    if plan.on_cpu:
        said = f"about {format_bytes(sum(needs.values()))} of RAM"
        return f"DeepSpeed {zero}: {said} (offloadkit: {format_bytes(own['ram'])})"
    each = "" if num_ranks == 1 else " a GPU"
    vram, ram = format_bytes(needs["vram"]), format_bytes(needs["ram"])
    own_plan = f"offloadkit: {format_bytes(own['vram'])} and {format_bytes(own['ram'])}"
    return f"DeepSpeed {zero}: about {vram} of VRAM{each}, {ram} of RAM ({own_plan})"


def _dtype(plan: Plan) -> Dtype:
    dtypes = [layer.dtype for layer in plan.layers]
    return max(dtypes, key=dtypes.count)


def activation_bytes(plan: Plan, *, recomputed: bool) -> int:
    """VRAM of a micro-batch's activations, 0 where the plan does not know the micro-batch."""
    work = plan.basis.work
    if work is None:
        return 0
    how = ["checkpoint" if recomputed and stage.block else "keep" for stage in work.stages]
    return activations(work, how).vram


def _in_groups(share: int, pinned: Callable[[int], int]) -> int:
    """Stage 3 keeps fp32 master weights in groups of `sub_group_size`."""
    whole, rest = divmod(share, _LIVE_ELEMENTS)
    return whole * pinned(4 * _LIVE_ELEMENTS) + (pinned(4 * rest) if rest else 0)


def _power_of_two(number: int) -> int:
    """The least one that is not less."""
    return 1 << max(0, number - 1).bit_length()
