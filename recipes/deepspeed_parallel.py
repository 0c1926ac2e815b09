"""One transformer on two GPUs through DeepSpeed: as a pipeline of layers, or with every matrix cut (AutoTP).

    torchrun --nproc-per-node=2 recipes/deepspeed_parallel.py pipeline
    torchrun --nproc-per-node=2 recipes/deepspeed_parallel.py tensor
    python recipes/deepspeed_parallel.py one     # the same training on one rank, in plain torch, to compare with

Without a GPU the ranks compute on the CPU over gloo. All three train the same small Llama, from the same random
weights, over the same micro-batches, and print the loss of each update. docs/pipeline-and-tensor-parallel.md says what
to change for a model of yours, and what the limits are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

MICRO_BATCHES, ROWS, LENGTH = 4, 2, 16
LEARNING_RATE, CLIPPING = 1e-2, 1.0
SEED = 0

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def small_llama() -> LlamaForCausalLM:
    """The numbers of heads are multiples of the number of ranks, as tensor parallelism requires."""
    torch.manual_seed(SEED)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, use_cache=False, **shape, **heads))


def micro_batches(device: torch.device) -> Iterator[torch.Tensor]:
    """The same token ids on all ranks, int64 [ROWS, LENGTH]: rows that count upwards, so that the model can learn."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        start = torch.randint(0, 64, (ROWS, 1), generator=generator)
        yield ((start + torch.arange(LENGTH)) % 64).to(device)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens except the first; fp32 for any dtype of the logits."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


# -- one rank, plain torch


def train_on_one(num_updates: int, dtype: str, device: torch.device) -> list[float]:
    """fp32 weights; in bf16 they are rounded for forward and backward, as in DeepSpeed."""
    model = small_llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    data, losses = micro_batches(device), []
    for _ in range(num_updates):
        total = 0.0
        for ids in (next(data) for _ in range(MICRO_BATCHES)):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
                loss = next_token_loss(model(input_ids=ids).logits, ids)
            (loss / MICRO_BATCHES).backward()
            total += loss.item() / MICRO_BATCHES
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


# -- DeepSpeed


def config_for(dtype: str, **more: Any) -> dict[str, Any]:
    """The config of both modes.

    A pipeline allows ZeRO stage 1 at most, and clipping by the norm of all stages needs it: without ZeRO, DeepSpeed
    0.19 clips each stage in fp32 by that stage's norm.
    """
    optimizer = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": True}}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIPPING,
        "optimizer": optimizer,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 10**9,
    } | more


class Embed(nn.Module):
    """The start of the first stage: token ids to vectors."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.tokens = model.model.embed_tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.tokens(ids)
        return vectors


class Block(nn.Module):
    """One layer. It computes the rotary angles itself, because only one tensor passes from stage to stage."""

    def __init__(self, model: LlamaForCausalLM, number: int) -> None:
        super().__init__()
        self.layer, self.angles = model.model.layers[number], model.model.rotary_emb

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        found = self.layer(hidden, position_embeddings=self.angles(hidden, positions))
        output: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return output


class Head(nn.Module):
    """The end of the last stage: vectors to logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.words = model.model.norm, model.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.words(self.norm(hidden))
        return logits


def train_as_pipeline(num_updates: int, dtype: str, device: torch.device) -> list[float]:
    """Each rank keeps only the layers of its stage; `train_batch` runs the micro-batches through all stages."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    model = small_llama()
    blocks = [Block(model, number) for number in range(model.config.num_hidden_layers)]
    layers = [Embed(model), *blocks, Head(model)]
    pipe = PipelineModule(
        layers=layers,
        num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=next_token_loss,
        partition_method="type:Block",  # the same number of blocks on each stage
        activation_checkpoint_interval=0,
    )
    parameters = [each for each in pipe.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=pipe, model_parameters=parameters, config=config_for(dtype))
    data = ((ids, ids) for ids in micro_batches(device))  # (inputs, labels)
    return [float(engine.train_batch(data)) for _ in range(num_updates)]


def train_with_cut_matrices(num_updates: int, dtype: str, device: torch.device) -> list[float]:
    """AutoTP cuts the layers by the model's `base_model_tp_plan`; each rank computes its part of every layer."""
    import deepspeed

    ranks = int(os.environ["WORLD_SIZE"])
    model = small_llama()
    config = config_for(dtype, tensor_parallel={"autotp_size": ranks})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data, losses = micro_batches(device), []
    for _ in range(num_updates):
        total = 0.0
        for ids in (next(data) for _ in range(MICRO_BATCHES)):
            loss = next_token_loss(engine(input_ids=ids).logits, ids)
            engine.backward(loss)
            engine.step()
            total += loss.item() / MICRO_BATCHES
        losses.append(total)
    return losses


TRAINS = {"one": train_on_one, "pipeline": train_as_pipeline, "tensor": train_with_cut_matrices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", nargs="+", choices=TRAINS, help="one after the other")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if together := args.how != ["one"]:
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # no extension is compiled here
        if not on_gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        if on_gpu:
            torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    for how in args.how:
        losses = TRAINS[how](args.updates, args.dtype, device)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps({"how": how, "dtype": args.dtype, "losses": losses}), flush=True)
    if together:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
