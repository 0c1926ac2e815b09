"""What ranks do in tests of `finetune` and of the Trainers: each runs the same call, as a launcher starts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "user", "hello", "good", "bad"]


@contextmanager
def as_launched() -> Iterator[tuple[int, int]]:
    """A context with the environment that a launcher gives this rank; (rank, ranks). One rank is started without."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with pytest.MonkeyPatch.context() as patch:
        if size > 1:
            who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            for name, value in {**who, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}.items():
                patch.setenv(name, str(value))
        yield rank, size


def pairs(number: int, begin: int = 0) -> list[dict[str, str]]:
    """Rows of several lengths."""
    sentence = [
        " ".join(WORDS[(at * step + 1) % 14] for step in range(1, 2 + at * 5 % 9)) for at in range(begin, number)
    ]
    return [{"input": text, "target": " ".join(reversed(text.split()[:4]))} for text in sentence]


def model_named(name: str) -> tuple[Any, Any]:
    """A model without dropout, the same on all ranks, and its tokenizer."""
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    from tests.hf.tiny import llama_config, t5_config, word_tokenizer

    torch.manual_seed(0)
    if name == "t5":
        return T5ForConditionalGeneration(t5_config(dropout_rate=0.0)), word_tokenizer()
    return LlamaForCausalLM(llama_config()), word_tokenizer()


def right_tokens(prediction: Any) -> dict[str, float]:
    """Of the rows and order that it gets, too."""
    guessed = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    guessed = guessed.argmax(-1) if guessed.ndim == 3 else guessed
    weighed = float((np.where(labels >= 0, labels, 0).sum(1) * np.arange(1, len(labels) + 1)).sum())
    return {"labels": weighed, "rows": float(len(labels)), "guessed": float(guessed.shape[0])}


def finetuned(name: str, folder: Path, *, accumulation: int, rows: int = 11, **options: Any) -> dict[str, Any]:
    """`finetune` with `accumulation` micro-batches of all ranks an update.

    Returns:
        "weights", "losses", "metrics", "norms", "samples", "printed".
    """
    import offloadkit

    with as_launched() as (_, size):
        model, tokenizer = model_named(name)
        own: dict[str, Any] = {"batch_size": 2, "epochs": 2, "logging_steps": 1, "learning_rate": 1e-2}
        result = offloadkit.finetune(
            model,
            pairs(rows),
            tokenizer=tokenizer,
            output_dir=folder,
            gradient_accumulation=accumulation // size,
            use_cpu=True,
            **(own | options),
        )
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in result.model.named_parameters()},
        "losses": [entry["loss"] for entry in result.history if "loss" in entry],
        "norms": [record.grad_norm for record in result.steps],
        "metrics": {name: value for name, value in result.metrics.items() if name != "train_seconds"},
        "samples": result.samples,
    }
