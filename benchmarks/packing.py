"""Tokens/s of rows of 100 to 2,000 tokens: padded and packed by `finetune`, and packed by TRL.

    pip install trl
    python -m benchmarks.packing                             # a minute and a half on an H100
    python -m benchmarks.packing --engines packed --vram 24GiB
    python -m benchmarks.packing --tiny --out /tmp/rows.csv  # a try without a GPU

The model is a Llama of 1.2 billion random weights. The logarithms of the rows' lengths are evenly distributed. Packed
micro-batches are 4 x 2,048 tokens; padded updates have three micro-batches of 4 rows, about as many tokens. TRL trains
with torch's AdamW, everything on the GPU, and transformers' `sdpa`; `--attention flash_attention_2` needs flash-attn.
Each engine runs in its own process. Tokens/s count no padding and leave out the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import run, table
from benchmarks.table import Row

ENGINES = ("padded", "packed", "TRL's packing")
MODEL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
WHOLE: dict[str, Any] = {"model": MODEL | {"vocab_size": 128256}, "rows": 600, "lengths": (100, 2000), "most": 2048}
TINY_MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY: dict[str, Any] = {"model": TINY_MODEL | {"vocab_size": 96}, "rows": 160, "lengths": (4, 60), "most": 64}
WARM_UP = 10
"""Steps that are not counted: kernels are compiled, blocks are captured for each width."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure the engines, append their rows to the table, print them, and return them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--vram", help="budget of finetune, such as 24GiB")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of TRL's run")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for trying it without a GPU")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a process")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.alone:
        print(json.dumps(measured(options.engines[0], options)))
        return []
    commit, rows = options.commit or run.git_commit(), []
    size, (least, most) = ("tiny", TINY["lengths"]) if options.tiny else ("llama-3.2-1b", WHOLE["lengths"])
    for engine in options.engines:
        row: Row = {"case": f"packing, {size}, rows of {least} to {most:,} tokens", "engine": engine, "commit": commit}
        rows.append(row | {"date": table.now()} | _in_a_process(engine, options))
        table.append(rows[-1:], options.out)
        print(line_of(rows[-1]), flush=True)
    return rows


def line_of(row: Row) -> str:
    first = f"{row['case']}, {row['engine']}"
    if row["status"] != "measured":
        return f"{first}: {row['status']}, {row['reason']}"
    return f"{first}: {row['figures']['tokens_per_second']:,.0f} tokens/s, {row['seconds']:.4f} s a step"


def _in_a_process(engine: str, options: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "benchmarks.packing", "--alone", "--engines", engine]
    command += ["--attention", options.attention, *(["--tiny"] if options.tiny else [])]
    command += ["--vram", options.vram] if options.vram else []
    try:
        done = subprocess.run(
            command, cwd=run.ROOT, capture_output=True, text=True, check=False, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {options.timeout:.0f} s"}
    if done.returncode:
        return {"status": "failed", "reason": (done.stderr.strip() or "no message").splitlines()[-1]}
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measured(engine: str, options: argparse.Namespace) -> Row:
    """Train one epoch in this process. Returns columns of the table."""
    import torch
    import transformers

    from offloadkit.facts import hardware

    size = TINY if options.tiny else WHOLE
    draw, (least, most) = random.Random(0), size["lengths"]
    lengths = [round(least * (most / least) ** draw.random()) for _ in range(size["rows"])]
    rows = [{"input_ids": draw.choices(range(3, size["model"]["vocab_size"]), k=length)} for length in lengths]
    kinds = {"num_key_value_heads": size["model"]["num_attention_heads"] // 4, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**size["model"], **kinds, max_position_embeddings=size["most"], pad_token_id=0)
    train = by_trl if engine == ENGINES[2] else by_finetune
    with tempfile.TemporaryDirectory() as folder:
        steps = train(config, rows, engine, size["most"], folder, options)
    steps = steps[WARM_UP:]
    seconds, tokens = [each for each, _ in steps], sum(number for _, number in steps)
    return {
        "status": "measured",
        **table.of_machine(hardware.describe_machine(hardware.default_device())),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "tokens": round(tokens / len(steps)),
        "seconds": median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "warmup_steps": WARM_UP,
        "steps": len(steps),
        "figures": {"tokens_per_second": tokens / sum(seconds)},
    }


def _model(config: Any) -> Any:
    import torch

    from benchmarks.preferences import drawn
    from offloadkit.facts import hardware

    return drawn(config, torch.float32, hardware.default_device())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def by_finetune(
    config: Any, rows: Any, engine: str, most: int, folder: str, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds and tokens, without padding, of each step."""
    import offloadkit

    model, is_packed = _model(config), engine == "packed"
    with contextlib.redirect_stdout(sys.stderr):
        result = offloadkit.finetune(
            model,
            rows,
            tokenizer=_tokenizer(),
            output_dir=folder,
            packing=is_packed,
            batch_size=4,
            gradient_accumulation=1 if is_packed else 3,
            max_input_length=most,
            vram=options.vram,
            save_strategy="no",
            monitor=False,
            overwrite=True,
        )
    padded = sum(step.num_tokens or 0 for step in result.steps)
    share = sum(len(row["input_ids"]) for row in rows) / padded
    return [(step.seconds["step"], share * (step.num_tokens or 0)) for step in result.steps]


def by_trl(
    config: Any, rows: Any, engine: str, most: int, folder: str, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds and tokens of each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    trl: Any = importlib.import_module("trl")
    began: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began.append(time.perf_counter())

    on_gpu = torch.cuda.is_available()
    config._attn_implementation = options.attention
    with contextlib.redirect_stdout(sys.stderr):
        args = trl.SFTConfig(
            folder, packing=True, max_length=most, per_device_train_batch_size=4, num_train_epochs=1, bf16=on_gpu,
            use_cpu=not on_gpu, gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_steps=1000,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            _model(config),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            callbacks=[Clock()],
        )
        trainer.train()
        if on_gpu:
            torch.cuda.synchronize()
    began.append(time.perf_counter())
    lengths = sum(len(row["input_ids"]) for row in rows) / (len(began) - 1)
    return [(end - begin, lengths) for begin, end in pairwise(began)]


if __name__ == "__main__":
    main()
