"""Engines that need packages which offloadkit does not install: torchao, RoundPipe and PEFT, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ours import Ours
from benchmarks.ragged import steps_of
from benchmarks.sub_models import AnyModel, AnyPlain
from offloadkit.deepspeed.process import building
from offloadkit.device.process_memory import VramCap
from offloadkit.doors.engines import worker
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine, EngineFactory
from offloadkit.doors.engines.plain import Baseline
from offloadkit.doors.engines.work import Batch, Work, lazy_model, plain_model
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.unread import become, leave_unread
from offloadkit.planner import Dtype

LORA_RANK = 16


class Torchao(Engine):
    """torchao's CPUOffloadOptimizer on bf16 parameters: no master weights, bf16 moments, no clipping."""

    master_weights = False

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        from torchao.optim import CPUOffloadOptimizer

        VramCap(work.vram, device)
        model: Any = plain_model(work, "fp32" if self.master_weights else dtype, device, device)
        self._model, self._num_micro_batches, self._device = model, work.accumulation, device
        self._num_parameters = model.num_parameters()
        self._optimizer = CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=work.accumulation == 1,  # not supported with accumulation
            lr=LEARNING_RATE,
            weight_decay=0.0,
            fused=True,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.master_weights):
            return super().forward(batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._num_micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self, is_boundary: bool) -> None:
        """At a boundary: step on the CPU."""
        if is_boundary:
            self._optimizer.step()
            self._optimizer.zero_grad()


class TorchaoFp32(Torchao):
    """torchao's optimizer on fp32 parameters under autocast: exact states, twice the weights and gradients on the
    device."""

    master_weights = True


class RoundPipe(Engine):
    """RoundPipe 0.1.1, for Llama: states in pinned RAM, layers streamed and recomputed, Adam on the CPU.

    Adam overlaps the next step, which computes with weights that are one step old. Gradients are not clipped.
    """

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        """
        Raises:
            ConfigError: there is no CUDA GPU, or the model is no Llama.
        """
        if device.type != "cuda":
            raise ConfigError("RoundPipe needs a CUDA GPU, and there is none here: leave roundpipe out")
        model: Any = plain_model(work, dtype, torch.device("cpu"), device)
        if model.config.model_type != "llama":
            raise ConfigError(f"RoundPipe runs Llama models, got {model.config.model_type}: leave roundpipe out")
        from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
        from roundpipe.models import llama
        from roundpipe.optim import Adam
        from roundpipe.optim.optim_builder import get_cpu_flags_hash, load_optim_function

        with building(f"roundpipe_optim_adam_{get_cpu_flags_hash()}"):
            load_optim_function("adam")
        self._num_parameters = model.num_parameters()
        llama.create_causal_mask = _with_new_names(llama.create_causal_mask)
        self._num_micro_batches, self._device = work.accumulation, device
        self._num_parts = 2 if work.batch_size % 2 == 0 else 1  # it computes one part while it moves the other
        self._model = wrap_model_to_roundpipe(
            model,
            use_sequential_preset=True,
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=self._num_parts, recompute_grain="layer"),
        )
        self._in_ram: dict[int, Batch] = {}
        self._optimizer = Adam(self._model.optim_parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Forward and backward, because RoundPipe streams only both together. The batch is sent from RAM."""
        share = 1 / (self._num_parts * self._num_micro_batches)
        if id(batch) not in self._in_ram:  # every step repeats the same batches
            masked = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}  # it requires a mask
            self._in_ram[id(batch)] = {name: tensor.cpu() for name, tensor in masked.items()}
        inputs = self._in_ram[id(batch)]
        loss: torch.Tensor = self._model.forward_backward(
            input_kwargs=inputs | {"return_logits": False}, loss_fn=lambda output, _: output.loss * share
        )
        return loss * self._num_micro_batches

    def backward(self, loss: torch.Tensor) -> None:
        """`forward` has done it."""

    def step(self, is_boundary: bool) -> None:
        """At a boundary: start Adam on the CPU."""
        if is_boundary:
            self._model.step(self._update)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settle(self) -> None:
        """Wait for Adam and the device."""
        from roundpipe.optim_stream import synchronize_optim

        synchronize_optim()
        super().settle()


def _with_new_names(create_causal_mask: Callable[..., Any]) -> Callable[..., Any]:
    """RoundPipe 0.1.1 uses argument names of transformers before 5.x."""

    def created(*, input_embeds: torch.Tensor, cache_position: Any = None, **others: Any) -> Any:
        return create_causal_mask(inputs_embeds=input_embeds, **others)

    return created


class Lora(Ours):
    """`OffloadEngine` with PEFT's adapters on a base of random weights, which are drawn layer by layer."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        """Raises `DoesNotFitError` if no plan fits."""
        model = adapted(lazy_model(work, dtype, device))
        leave_unread([each for name, each in model.named_parameters() if "lora_" in name], _draw_adapters)
        config = OffloadConfig(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_accumulation=work.accumulation,
            precision=work.precision,
            working_dtype="auto",
            vram=None if device.type == "cpu" else work.vram,
            ram=work.ram,
        )
        self._model = OffloadEngine(model, config, device=device, example=steps_of(work, device)[0][0])


class Peft(Baseline):
    """PEFT's adapters, trained in fp32 with everything on the device."""

    def model_of(self, work: Work, dtype: Dtype, device: torch.device) -> Any:
        return adapted(plain_model(work, dtype, device, device))


def adapted(model: Any) -> Any:
    """`model` with LoRA's adapters on all linear layers but the head, in fp32 and without dropout."""
    import peft

    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
    return peft.get_peft_model(model, config).train()


def _draw_adapters(parameters: Any) -> None:
    """On both sides small random numbers, so that every adapter has gradients in the first step."""
    for parameter in parameters:
        if parameter.is_meta:
            become(parameter, torch.empty(parameter.shape, dtype=parameter.dtype).normal_(0.0, 0.02))


ENGINES: dict[str, EngineFactory] = worker.ENGINES | {
    "offloadkit": Ours,
    "lora": Lora,
    "any": AnyModel,
    "any-plain": AnyPlain,
    "peft": Peft,
    "torchao": Torchao,
    "torchao-fp32": TorchaoFp32,
    "roundpipe": RoundPipe,
}
"""Every engine of `benchmarks run`, by the name in a task."""
