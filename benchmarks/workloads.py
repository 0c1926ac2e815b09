"""The work to be done: which model, how many tokens, how often. Every engine starts from the same random weights."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offloadkit.engines.work import Batch
from offloadkit.hf.hub import PRESETS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T5_MODELS = ("t5-tiny", "t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")
T5_TINY = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
LLAMA_SHAPES: dict[str, dict[str, int | bool]] = {
    "llama-tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
MODELS = (*T5_MODELS, *LLAMA_SHAPES)


@dataclass(frozen=True)
class Workload:
    """One training set-up. Sizes are per micro-batch; a step is `accumulation` micro-batches and one update."""

    model: str = "t5-3b"
    batch_size: int = 8
    """Sequences a micro-batch."""
    tokens: int = 512
    """Tokens a sequence that the model reads: the encoder's (T5), or all of them (Llama)."""
    target_tokens: int = 128
    """Tokens a sequence that T5's decoder writes; 0 for Llama."""
    accumulation: int = 1
    checkpointing: bool = False
    attention: str = "default"
    """Attention of offloadkit and gpu-ours: "default" is what `finetune` has: T5's eager, by our kernels on a GPU."""
    vram_budget_gib: float = 0.0
    """Device memory that offloadkit may plan with, context included; 0 leaves the plan out (states in RAM, the rest in
    VRAM)."""
    ram_budget_gib: float = 0.0
    """RAM that offloadkit may plan with; 0: what is available."""
    disk: str = ""
    """Folder for what fits no RAM; "": none."""
    precision: str = "exact"
    dtype: str = "bf16"
    """Of offloadkit's working weights."""
    compile_blocks: bool = False
    """Of offloadkit's plan."""
    vram_cap_gib: float = 0.0
    """Most VRAM that torch may allocate; 0 is no cap."""
    cores: int = 0
    """CPU cores the process is bound to; 0 leaves it alone."""
    steps: int = 6
    """Measured steps, after `warmup` others."""
    warmup: int = 2
    seed: int = 0


def is_t5(model: str) -> bool:
    """Whether `model` has an encoder and a decoder."""
    return model in T5_MODELS


def model_config(model: str) -> PretrainedConfig:
    """The architecture of `model`, without dropout and without a generation cache."""
    from transformers import LlamaConfig, T5Config

    if is_t5(model):
        values = PRESETS["t5-small" if model == "t5-tiny" else model].config_values()
        values |= T5_TINY if model == "t5-tiny" else {}
        config: PretrainedConfig = T5Config(**values, dropout_rate=0.0)
    else:
        config = LlamaConfig(max_position_embeddings=8192, pad_token_id=0, **LLAMA_SHAPES[model])
    config.use_cache = False
    return config


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_model(work: Workload, device: torch.device, weights_on: torch.device) -> PreTrainedModel:
    """The model with random bf16 weights: matrices N(0, 0.02), vectors 1.

    The numbers are drawn on `device` whichever device they end up on, so that every engine gets the same ones fast.
    """
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration
    from transformers.initialization import no_init_weights

    architecture = T5ForConditionalGeneration if is_t5(work.model) else LlamaForCausalLM
    config = model_config(work.model)
    with _default_dtype(torch.bfloat16), weights_on, no_init_weights():
        model: PreTrainedModel = architecture(config)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(work.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
                parameter.copy_(drawn.normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return model.train()


def build_lazily(work: Workload, device: torch.device) -> tuple[PreTrainedModel, Callable[[Any], None]]:
    """The model without memory, and what draws its parameters' weights, on `device`, into RAM when asked for."""
    from offloadkit.hf.models import build_model
    from offloadkit.hf.weight_files import become

    config = model_config(work.model)
    config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model, _ = build_model(folder, task="seq2seq" if is_t5(work.model) else "causal", init="random")
    generator = torch.Generator(device).manual_seed(work.seed)

    def draw(parameters: Any) -> None:
        for parameter in parameters:
            drawn = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
            become(parameter, (drawn.normal_(0.0, 0.02, generator=generator) if drawn.ndim > 1 else drawn).cpu())

    return model.train(), draw


def checkpoint_activations(model: PreTrainedModel, work: Workload) -> None:
    """HuggingFace's own activation checkpointing, where the work asks for it; offloadkit has a switch for it."""
    if work.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def use_our_compute(model: PreTrainedModel, work: Workload) -> None:
    """Have `model` compute as it does under offloadkit: the one difference between the baselines gpu and gpu-ours.

    Without a choice of the work's it is what `finetune` takes: our kernels of T5's attention, and norms of one kernel.
    """
    from offloadkit.hf.models import EAGER_ATTENTION
    from offloadkit.hf.patches import fuse, fuse_norms

    attention = work.attention
    if attention == "default":
        attention = "eager" if model.config.model_type in EAGER_ATTENTION else ""
    if attention:
        for module in model.modules():  # T5's stacks have configs of their own, which transformers 5.17 does not reach
            if hasattr(module, "config"):
                module.config._attn_implementation = attention
    (fuse if work.attention == "default" else fuse_norms)(model)


def random_tokens(work: Workload, index: int, batch_size: int) -> Batch:
    """Micro-batch (or sample) number `index`: int64 [batch_size, tokens] on the CPU, from the seed and `index`."""
    generator = torch.Generator().manual_seed(work.seed + 1 + index)
    num_words = model_config(work.model).vocab_size - 128
    inputs = torch.randint(1, num_words, (batch_size, work.tokens), generator=generator)
    if not is_t5(work.model):
        return {"input_ids": inputs, "labels": inputs}
    return {
        "input_ids": inputs,
        "labels": torch.randint(1, num_words, (batch_size, work.target_tokens), generator=generator),
    }


def fixed_batches(work: Workload, device: torch.device) -> list[Batch]:
    """The micro-batches of one step, on `device`; every step repeats them."""
    batches = [random_tokens(work, index, work.batch_size) for index in range(work.accumulation)]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]


class RandomTokens(torch.utils.data.Dataset[Batch]):
    """A map-style dataset of single sequences, drawn when they are asked for (by a DataLoader's workers)."""

    def __init__(self, work: Workload, num_samples: int) -> None:
        self.work, self.num_samples = work, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in random_tokens(self.work, index, 1).items()}


def loaded_batches(work: Workload, device: torch.device, num_workers: int, num_steps: int) -> Iterator[list[Batch]]:
    """The micro-batches of each of `num_steps` steps, through a DataLoader of `num_workers` forked workers."""
    dataset = RandomTokens(work, num_steps * work.accumulation * work.batch_size)
    context: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    loader = iter(torch.utils.data.DataLoader(dataset, work.batch_size, num_workers=num_workers, **context))
    for _ in range(num_steps):
        batches = [next(loader) for _ in range(work.accumulation)]
        yield [{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()} for batch in batches]
