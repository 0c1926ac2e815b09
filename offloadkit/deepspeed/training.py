"""HuggingFace's Trainer with DeepSpeed, configured from an `OffloadConfig` and a plan."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Seq2SeqTrainer, TrainingArguments
from transformers.integrations import deepspeed as of_transformers
from transformers.trainer_pt_utils import LengthGroupedSampler

from offloadkit.deepspeed.process import check_installed, prepare
from offloadkit.deepspeed.zero import BUCKET_ELEMENTS, ds_config, forecast_line, zero_for
from offloadkit.distributed import world
from offloadkit.errors import ConfigError
from offloadkit.facts.changes import configs_of
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.arguments import engine_config
from offloadkit.hf.freezing import freeze_parts
from offloadkit.hf.loss import num_targets, on_device, with_dummy_target
from offloadkit.hf.patches import choose_attention
from offloadkit.hf.ragged import OrderOfSeed
from offloadkit.hf.saving import save_whole
from offloadkit.hf.sharding import forward_epochs
from offloadkit.hf.source import ModelSource
from offloadkit.offload.unread import make_real
from offloadkit.optim.table import DTYPES, trainer_names
from offloadkit.planner import Dtype, Plan

_Arguments = TypeVar("_Arguments", bound=TrainingArguments)
_NAMES = {field.name for field in fields(TrainingArguments)}
_RECOMPUTATION = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"


def deepspeed_arguments(
    args: _Arguments, offload: OffloadConfig | None = None, plan: Plan | None = None, *, logits: int = 0
) -> _Arguments:
    """Return arguments with which HuggingFace's own Trainer runs DeepSpeed as `offload` specifies.

        args = offloadkit.deepspeed_arguments(args, OffloadConfig(vram="24GiB"), plan)
        trainer = transformers.Seq2SeqTrainer(model=model, args=args, ...)

    Sets environment variables for DeepSpeed permanently in this process. With `torchrun`, `accelerate launch` or the
    `deepspeed` launcher, each rank is bound to its share of the cores.

    Args:
        offload: its placement selects the ZeRO stage. Without a placement the fastest variant within the plan's limits.
        plan: offloadkit's plan for this model and these rows (`offloadkit.plan`); None: ZeRO-2 with states in RAM.
        logits: number of logits in a micro-batch, for the memory forecast.

    Raises:
        ConfigError: DeepSpeed is not installed, or does not support an option.
        DoesNotFitError: no variant is within the plan's limits.
    """
    check_installed()
    offload = engine_config(offload or OffloadConfig(), args)
    optim = str(getattr(args.optim, "value", args.optim))
    refused = {
        f"optim={optim!r}": (optim not in trainer_names(), "DeepSpeed uses its own AdamW here: leave it out"),
        "deepspeed": (args.deepspeed, "leave it out: `offload` and the plan determine the config"),
        "fsdp": (args.fsdp, "leave it out"),
        "torch_compile=True": (args.torch_compile, "leave it out"),
        "use_cpu=True": (
            args.use_cpu and torch.cuda.is_available(),
            ("DeepSpeed trains on the GPU that this process uses"),
        ),
    }
    if problems := [f"{name}: {advice}" for name, (given, advice) in refused.items() if given]:
        raise ConfigError("TrainingArguments that do not work with DeepSpeed here:\n  " + "\n  ".join(problems))
    if args.world_size > 1 and not torch.cuda.is_available():
        raise ConfigError(
            f"{args.world_size} processes on the CPU: accelerate runs DeepSpeed on several processes only with GPUs. "
            "Start one process"
        )
    zero = zero_for(offload, plan, logits=logits, num_ranks=args.world_size)
    if plan is not None and args.process_index == 0:
        print(forecast_line(zero, plan, logits=logits, num_ranks=args.world_size), flush=True)
    prepare(on_cpu_steps=zero.states != "vram", to_disk=zero.states == "disk")
    elements = BUCKET_ELEMENTS if plan is None else min(BUCKET_ELEMENTS, plan.num_parameters)
    sizes = {"batch_size": args.per_device_train_batch_size, "bucket_elements": elements}
    config = ds_config(zero, offload, _dtype(args), **sizes, pinned=torch.cuda.is_available())
    changes: dict[str, Any] = {"deepspeed": config, "use_cpu": False}  # accelerate ignores DeepSpeed if use_cpu is True
    if zero.recomputed:
        changes |= {f"{_RECOMPUTATION}": True, f"{_RECOMPUTATION}_kwargs": {"use_reentrant": False}}
    return replace(args, **changes)


def _dtype(args: TrainingArguments) -> Dtype:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


class ZeroTrainer(Seq2SeqTrainer):  # type: ignore[misc, unused-ignore]
    """HuggingFace's Trainer for a model that nobody else uses.

    A micro-batch's loss is weighted by its share of the update's targets on all ranks, as in offloadkit's Trainer.
    HuggingFace's Trainer instead sums the losses of models that ignore `num_items_in_batch`, such as T5.
    """

    loss_is_scaled_for_ga = True
    _mean_targets: Any = 1
    """Mean number of targets per update and rank."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Like the Trainer's, but the seed determines an order by length. No public hook exists."""
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        sampler.batch_size *= self.args.world_size
        return OrderOfSeed(sampler, self.args)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        forward_epochs(loader)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples = super().get_batch_samples(*args, **kwargs)
        total = sum(int(num_targets(self.model, batch)) for batch in samples[0])
        self._mean_targets = max(1, self._sum_over_ranks(total)) / world.size()
        return samples

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Like the Trainer's in evaluation; in training the micro-batch's mean loss times its share of targets."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs, count = with_dummy_target(inputs, num_targets(self.model, inputs))
        own = on_device(num_targets(self.model, inputs), self.args.device)
        found = super().compute_loss(model, inputs, return_outputs, own)
        share = count / self._mean_targets
        return (found[0] * share, found[1]) if return_outputs else found * share

    def save_whole(self, folder: Path, tokenizer: Any) -> None:
        """Write the trained model for `from_pretrained`. A collective call. Raises `OutputError` if it cannot be
        written.
        """
        state = self.accelerator.get_state_dict(self.deepspeed) if self.is_at_stage_3 else None
        world.run_on_rank_0("saving the model", partial(save_whole, self.model, tokenizer, folder, state_dict=state))

    @property
    def is_at_stage_3(self) -> bool:
        return bool(self.accelerator.state.deepspeed_plugin.zero_stage == 3)

    def any_rank(self, here: bool) -> bool:
        return self._sum_over_ranks(int(here)) > 0

    def any_flag(self, flags: int) -> int:
        """Bitwise or of `flags` (4 bits) over all ranks."""
        return sum(1 << bit for bit in range(4) if self.any_rank(bool(flags >> bit & 1)))

    def _sum_over_ranks(self, number: int) -> int:
        if world.size() == 1:
            return number
        found = torch.tensor(number, device=self.args.device)
        torch.distributed.all_reduce(found)
        return int(found)

    def close(self) -> None:
        """Destroy the engine and free its memory. The trainer's model is unusable afterwards."""
        if (engine := getattr(self, "deepspeed", None)) is not None:
            engine.destroy()
        for name in ("model", "model_wrapped", "deepspeed", "optimizer", "lr_scheduler"):
            setattr(self, name, None)
        self.accelerator.free_memory()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()


def model_of_its_own(source: ModelSource, config: OffloadConfig, args: TrainingArguments) -> Any:
    """Load, initialize or copy a model for DeepSpeed to modify. For stage 3 it is in RAM.

    Attention is offloadkit's choice without its kernels, because T5's default gave NaN gradients.
    """
    settings: Any = of_transformers
    dtype, ours = DTYPES[_dtype(args)], args.hf_deepspeed_config
    device = torch.device("cpu") if ours.is_zero3() else args.device
    settings.unset_hf_deepspeed_config()  # otherwise transformers would shard the weights while loading
    try:
        given: Any = source.model
        if given is not None:
            make_real(given.parameters())
            model: Any = copy.deepcopy(given).to(device=device, dtype=dtype)
            freeze_parts(model, source.freeze)
        else:
            model = source.load(dtype=dtype, device=device)
    finally:
        settings.set_hf_deepspeed_config(ours)
    if config.attention == "ours":
        for own in (own for own in configs_of(model) if hasattr(own, "model_type")):
            choose_attention(own)
    return model


def give_weights(trained: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """Put the parameters and buffers of `trained` into `model`, with their device and dtype."""
    found = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if name in found:
            own.data = found[name].data
    return model


def newest_of_deepspeed(folder: Path) -> Path:
    """The newest checkpoint of a DeepSpeed run. Raises `ConfigError` if none exists."""
    found = [each for each in folder.glob("checkpoint-*") if (each / "trainer_state.json").is_file()]
    whole = [each for each in found if (each / "latest").is_file()]
    if not whole:
        other = "; the checkpoints there are offloadkit's: leave engine='deepspeed' out" if found else ""
        raise ConfigError(f"resume=True: no DeepSpeed checkpoint in {folder}{other}. Leave resume out to start over")
    return max(whole, key=lambda each: int(each.name.rpartition("-")[2]))
