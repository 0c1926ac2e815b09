"""Real input: a T5 learns to write the first line of a function's docstring from the function's source.

    python recipes/docstrings.py                         # T5-base shape, on a GPU
    python recipes/docstrings.py --shape tiny --steps 60 --batch-size 8    # anywhere, to try it

Several thousand pairs come out of the Python standard library of the interpreter that runs this; functions of one file
are all in training or all held out. A tokenizer is trained on the training text. Then the same model, from the same
random weights, over the same batches, is trained twice: by `offloadkit.finetune`, and by a plain `Seq2SeqTrainer` with
AdamW on the device (fp32 weights; on a GPU bf16 autocast), and plainly once more in another order of batches, which
shows how much is noise. The held-out loss curves, the loss of a unigram model of the targets, and what the reloaded
model writes go into a JSON file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import random
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}
VOCABULARY = 8192
MAX_SOURCE_CHARACTERS = 2000
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


@dataclass(frozen=True)
class Pair:
    """A function's source without its docstring, and the docstring's first line."""

    input: str
    target: str
    file: str


def docstring_pairs(folder: Path) -> Iterator[Pair]:
    """A pair for each documented function in the Python files under `folder`, sorted by file."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if LEFT_OUT.intersection(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                first = (ast.get_docstring(node) or "").strip().split("\n")[0].strip()
                source = _without_docstring(lines, node)
                if len(first) >= 12 and first[0].isalpha() and len(source) <= MAX_SOURCE_CHARACTERS:
                    yield Pair(source, first, name.as_posix())


def _without_docstring(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    docstring = node.body[0]
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    indent = " " * node.col_offset
    return "".join(line.removeprefix(indent) for line in kept).strip()


def split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs (a tenth of the files), without repeated sources and targets."""
    train: dict[str, Pair] = {}
    held_out: dict[str, Pair] = {}
    for pair in pairs:
        part = held_out if hashlib.sha256(pair.file.encode()).digest()[0] < 26 else train
        part.setdefault(pair.input, pair)
    known = {pair.target for pair in train.values()}
    unseen = [pair for pair in held_out.values() if pair.input not in train and pair.target not in known]
    return list(train.values()), unseen


def train_tokenizer(pairs: list[Pair]) -> Any:
    """Byte-level BPE over the training text, with T5's padding and end tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in (pair.input, pair.target)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def unigram_loss(train: Any, held_out: Any, vocabulary: int) -> float:
    """Nats a token on the held-out targets under add-one counts of the training targets."""
    counts = Counter(token for labels in train["labels"] for token in labels)
    total = sum(counts.values()) + vocabulary
    tokens = [token for labels in held_out["labels"] for token in labels]
    return -sum(math.log((counts[token] + 1) / total) for token in tokens) / len(tokens)


def random_t5(shape: str, vocabulary: int, seed: int) -> Any:
    """The initial model of both runs."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(seed)
    tokens: dict[str, Any] = {
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**SHAPES[shape], **tokens, attn_implementation="eager"))


def evaluation_curve(history: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, held-out loss) of each evaluation."""
    return [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]


def plain_run(model: Any, folder: Path, data: Any, evaluation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same training with transformers alone, with AdamW and fp32 states on the device."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(folder), **arguments),
        train_dataset=data.dataset,
        eval_dataset=evaluation.dataset,
        data_collator=data.collator,
    )
    seconds = trainer.train().metrics["train_runtime"]
    return {"evaluations": evaluation_curve(trainer.state.log_history), "train_seconds": seconds}


def main() -> None:
    options = parse_options()
    began = time.perf_counter()
    from offloadkit.hf.data import load_dataset_like, prepare

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.output or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        train, held_out = split(list(docstring_pairs(Path(sysconfig.get_paths()["stdlib"]))))
        held_out = random.Random(options.seed).sample(held_out, min(options.held_out, len(held_out)))
        files = [write(pairs, folder / name) for pairs, name in ((train, "train.jsonl"), (held_out, "held_out.jsonl"))]
        tokenizer = train_tokenizer(train)
        print(f"{len(train):,} pairs to learn, {len(held_out):,} held out; {len(tokenizer):,} tokens\n", flush=True)

        model = random_t5(options.shape, len(tokenizer), options.seed)
        data, evaluation = (
            prepare(load_dataset_like(str(file)), tokenizer, model.config, **lengths(options)) for file in files
        )
        unigram = unigram_loss(data.dataset, evaluation.dataset, len(tokenizer))
        results: dict[str, Any] = {"options": vars(options), "num_train": len(train), "num_held_out": len(held_out)}
        results["unigram_loss"] = unigram
        results |= ours(model, files, tokenizer, folder, options)
        del model
        if not options.without_plain:
            for name, seed in (("plain", options.seed), ("plain, other order", options.seed + 1)):
                print(f"\n{name}: Seq2SeqTrainer, AdamW on the device", flush=True)
                model = random_t5(options.shape, len(tokenizer), options.seed)
                arguments = training_arguments(options) | {"seed": seed}
                results[name] = plain_run(model, folder / "plain", data, evaluation, arguments)
        results["seconds"] = time.perf_counter() - began
    report(results, Path(options.results))


def ours(model: Any, files: list[Path], tokenizer: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train with `finetune`, and generate with the saved and reloaded model."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import offloadkit
    from offloadkit.facts import hardware

    arguments = training_arguments(options)
    own = {"per_device_train_batch_size": "batch_size", "max_steps": "max_steps", "learning_rate": "learning_rate"}
    own |= {"seed": "seed"}
    rest = {own.get(name, name): value for name, value in arguments.items() if name != "bf16"}
    result = offloadkit.finetune(
        model,
        str(files[0]),
        eval_dataset=str(files[1]),
        tokenizer=tokenizer,
        output_dir=folder / "offloadkit",
        **lengths(options),
        **rest,
    )
    loaded = AutoModelForSeq2SeqLM.from_pretrained(result.model_dir).eval()
    words = AutoTokenizer.from_pretrained(result.model_dir)
    rows = [json.loads(line) for line in files[1].read_text().splitlines()[: options.samples]]
    samples = []
    for row in rows:
        ids = words(row["input"], return_tensors="pt", truncation=True, max_length=options.max_input_length)
        written = loaded.generate(**{k: ids[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=40)
        samples.append({**row, "prediction": words.decode(written[0], skip_special_tokens=True)})
    saved, trained = loaded.state_dict(), result.model.state_dict()
    return {
        "offloadkit": {"evaluations": evaluation_curve(result.history), **result.metrics},
        "num_parameters": result.plan.num_parameters,
        "planned_bytes": result.plan.tiers,
        "reloaded_equal": all(torch.equal(saved[name], trained[name].cpu()) for name in saved),
        "samples": samples,
        "last_step": asdict(result.steps[-1]),
        "machine": hardware.describe_machine(hardware.default_device()),
    }


def training_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of both runs."""
    return {
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": 2 * options.batch_size,
        "max_steps": options.steps,
        "learning_rate": options.learning_rate,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,
        "bf16": torch.cuda.is_available(),
        "eval_strategy": "steps",
        "eval_steps": max(1, options.steps // 10),
        "logging_steps": max(1, options.steps // 20),
        "prediction_loss_only": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "seed": options.seed,
    }


def lengths(options: argparse.Namespace) -> dict[str, Any]:
    return {"max_input_length": options.max_input_length, "max_target_length": 48}


def write(pairs: list[Pair], path: Path) -> Path:
    path.write_text("".join(json.dumps({"input": pair.input, "target": pair.target}) + "\n" for pair in pairs))
    return path


def report(results: dict[str, Any], path: Path) -> None:
    """Print both curves and the samples, and write the file."""
    others = [dict(results[name]["evaluations"]) for name in ("plain", "plain, other order") if name in results]
    print(f"\nheld-out loss, nats a token (a unigram model: {results['unigram_loss']:.3f})")
    print(f"  {'step':>6}{'offloadkit':>12}{'plain':>12}{'other order':>14}")
    for step, loss in results["offloadkit"]["evaluations"]:
        print(f"  {step:6}{loss:12.4f}" + "".join(f"{other[step]:13.4f}" for other in others))
    print("\nwritten by the model loaded from disk:")
    for sample in results["samples"]:
        print(f"  {sample['input'].splitlines()[0][:70]}\n    {sample['prediction']}\n    (was: {sample['target']})")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nreloaded weights equal the trained ones: {results['reloaded_equal']}; numbers in {path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="base")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-input-length", type=int, default=384, help="tokens")
    parser.add_argument("--held-out", type=int, default=512, help="pairs at most")
    parser.add_argument("--samples", type=int, default=8, help="predictions shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-plain", action="store_true", help="train with offloadkit alone")
    parser.add_argument("--output", help="folder for the pairs and the model; left out: a temporary one")
    parser.add_argument("--results", default="docstrings.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
