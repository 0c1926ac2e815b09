"""The trainings compared by `learning.py`: four tasks, each a small model with its rows and its recipe.

The text is the standard library of the running Python, so nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import random
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

LAST = 30
"""Number of last steps whose mean is the final training loss."""


Row = dict[str, Any]


class Trial(NamedTuple):
    task: str
    precision: str = "exact"
    dtype: str = "auto"
    """Dtype of the working weights; "auto": chosen by `finetune`."""
    seed: int = 0
    steps: int | None = None
    """None: the task's default."""
    tiny: bool = False
    optimizer: str = "adamw"


class Recipe(NamedTuple):
    """A model, its rows, and its training arguments."""

    model: Any
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]] | None
    tokenizer: Any
    arguments: dict[str, Any]
    """Arguments of `finetune`."""


def run_trial(trial: Trial) -> Row:
    """The row of one training; an error is stored under `failed`."""
    row: Row = {**trial._asdict(), "cores": len(os.sched_getaffinity(0))}
    began = time.perf_counter()
    try:
        row |= train(RECIPES[trial.task](trial), trial)
    except Exception as error:
        text = str(error).strip().splitlines()
        row["failed"] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    return {**row, "seconds": time.perf_counter() - began}


def train(recipe: Recipe, trial: Trial) -> Row:
    """Train with `offloadkit.finetune` and the default placement (states in RAM); returns the figures."""
    import torch

    import offloadkit
    from offloadkit.facts.config import OffloadConfig, Placement

    offload = OffloadConfig(
        optimizer=trial.optimizer,
        precision=trial.precision,  # type: ignore[arg-type]
        working_dtype=trial.dtype,  # type: ignore[arg-type]
        seed=trial.seed,
        placement=Placement(step="gpu" if trial.optimizer == "muon" else "cpu"),
        on_nonfinite="skip",  # counted here
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = offloadkit.finetune(
            recipe.model,
            recipe.train,
            eval_dataset=recipe.held_out,
            tokenizer=recipe.tokenizer,
            output_dir=folder,
            seed=trial.seed,
            offload=offload,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            **recipe.arguments,
        )
    losses = [record.loss for record in result.steps]
    return {
        "working_dtype": str(next(result.model.parameters()).dtype).removeprefix("torch."),
        "num_parameters": result.plan.num_parameters,
        "steps": len(losses),
        "first_loss": losses[0],
        "train_loss": fmean(losses[-LAST:]),
        "held_out_loss": result.metrics.get("eval_loss"),
        "exact_match": result.metrics.get("exact_match"),
        "curve": by_tenths(losses),
        "num_nan_losses": sum(not math.isfinite(loss) for loss in losses),
        "num_skipped": sum(record.skipped for record in result.steps),
        "losses": losses,
    }


def by_tenths(losses: Sequence[float]) -> list[float]:
    """Mean loss of each tenth of the steps."""
    cuts = [round(len(losses) * tenth / 10) for tenth in range(11)]
    return [fmean(losses[first:last]) for first, last in itertools.pairwise(cuts) if last > first]


def demo(trial: Trial) -> Recipe:
    """The demo's model and recipe (offloadkit/doors/demo/run.py), with more held-out dates for a finer figure."""
    from transformers import ByT5Tokenizer

    from offloadkit.doors.demo import run
    from offloadkit.doors.demo.dates import date_pairs

    num_train, num_held_out = (1000, 32) if trial.tiny else (run.NUM_TRAIN, 2048)
    steps = trial.steps or (60 if trial.tiny else run.NUM_STEPS)
    pairs, held_out = date_pairs(num_train, num_held_out, seed=0)
    arguments = run.recipe(steps) | {"per_device_eval_batch_size": min(256, num_held_out)}
    if trial.tiny:
        arguments["batch_size"] = 16
    rows = [[pair._asdict() for pair in part] for part in (pairs, held_out)]
    return Recipe(run.small_t5(trial.seed), rows[0], rows[1], ByT5Tokenizer(), arguments)


def llama(trial: Trial) -> Recipe:
    """A Llama of three million parameters over bytes: 4 blocks, 256 wide; each row is a piece of a source file."""
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    length, num_train, num_held_out, batch_size = (64, 512, 32, 8) if trial.tiny else (256, 20_000, 1024, 32)
    steps = trial.steps or (60 if trial.tiny else 600)
    width, depth = (64, 2) if trial.tiny else (256, 4)
    set_seed(trial.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=384,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=depth,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 64,
            max_position_embeddings=2 * length,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    train, held_out = source_rows(length, num_train, num_held_out)
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "batch_size": batch_size,
        "learning_rate": 1e-3 if not trial.tiny else 3e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": round(0.1 * steps),
        "max_input_length": length,
        "per_device_eval_batch_size": batch_size,
    }
    return Recipe(model, train, held_out, ByT5Tokenizer(), arguments)


@cache
def source_rows(length: int, num_train: int, num_held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of `length` bytes in ByT5's ids (byte + 3) from the standard library; a tenth of the files is held out.

    Each row is a piece of the concatenated files, drawn with a fixed seed.

    Raises:
        ValueError: there is too little text.
    """
    from recipes.docstrings import LEFT_OUT

    folder = Path(sysconfig.get_paths()["stdlib"])
    parts = {False: bytearray(), True: bytearray()}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not LEFT_OUT.intersection(name.parts):
            parts[zlib.crc32(name.as_posix().encode()) % 10 == 0] += path.read_bytes()
    rng = random.Random(0)
    rows = []
    for text, count in ((parts[False], num_train), (parts[True], num_held_out)):
        if len(text) < 8 * length:
            raise ValueError(f"{folder} holds too little Python source: {len(text):,} bytes of one part")
        starts = [rng.randrange(len(text) - length) for _ in range(count)]
        rows.append([{"input_ids": [byte + 3 for byte in text[start : start + length]]} for start in starts])
    return rows[0], rows[1]


def t5(trial: Trial) -> Recipe:
    """T5-base's width with four encoder and four decoder blocks, writing docstrings as in recipes/docstrings.py.

    v1.0: relu, head tied to the embeddings; v1.1: gated-gelu and an untied head. HuggingFace initialises that head for
    hidden states that v1.0 divides by the root of the width. v1.1 does not, so the head is scaled here.
    """
    import torch
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    from recipes.docstrings import SHAPES

    gated = trial.task == "t5 v1.1"
    pairs, tokenizer = docstring_rows(500 if trial.tiny else None)
    shape: dict[str, Any] = dict(SHAPES["tiny"]) if trial.tiny else SHAPES["base"] | {"num_layers": 4}
    if gated:
        shape |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        shape |= {} if trial.tiny else {"d_ff": 2048}
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    shape |= {"dropout_rate": 0.0, "attn_implementation": "eager"}
    set_seed(trial.seed)
    model: Any = T5ForConditionalGeneration(T5Config(**shape))
    if gated:
        with torch.no_grad():
            model.lm_head.weight.mul_(model.config.d_model**-0.5)
    steps = trial.steps or (60 if trial.tiny else 300)
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "batch_size": 8 if trial.tiny else 16,
        "learning_rate": 3e-3 if trial.tiny else 5e-4,
        "lr_scheduler_type": "linear",
        "warmup_steps": round(0.1 * steps),
        "max_input_length": 64 if trial.tiny else 384,
        "max_target_length": 48,
    }
    return Recipe(model, pairs, None, tokenizer, arguments)


@cache
def docstring_rows(num_pairs: int | None) -> tuple[list[dict[str, Any]], Any]:
    """The first `num_pairs` (or all) training pairs of the recipe, and a tokenizer trained on them."""
    from recipes.docstrings import docstring_pairs, split, train_tokenizer

    pairs, _ = split(list(itertools.islice(docstring_pairs(Path(sysconfig.get_paths()["stdlib"])), num_pairs)))
    return [{"input": pair.input, "target": pair.target} for pair in pairs], train_tokenizer(pairs)


RECIPES: dict[str, Callable[[Trial], Recipe]] = {"demo": demo, "llama": llama, "t5 v1.0": t5, "t5 v1.1": t5}
