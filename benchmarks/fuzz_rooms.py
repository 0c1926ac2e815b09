"""The inputs of `fuzz`: a room makes an input from a number, and lists the words that an error must name."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import random
import shutil
import string
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

GIB = 2**30


class BeganError(BaseException):
    """The input was accepted: a training or measurement begins."""


class CommandLineError(Exception):
    """The command line ended with a nonzero exit status."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status, self.said = status, said

    def why_unnamed(self, words: Sequence[str]) -> str | None:
        """The reason why the message does not name the fault; None if it does."""
        from benchmarks.fuzz import why_unclear

        if self.status == 1 and "error: " not in self.said:
            return f"exit status 1 with {self.said[:100]!r}"
        return why_unclear(" ".join(self.said.replace("│", " ").split()), words)


@dataclass(frozen=True)
class Input:
    """One input.

    Attributes:
        words: an error's message must contain one of these.
        seconds: time limit.
    """

    what: str
    words: tuple[str, ...]
    call: Callable[[], object]
    seconds: float = 10.0


@dataclass(frozen=True)
class Room:
    """A kind of inputs."""

    num_inputs: int
    make: Callable[[random.Random, Path, Path], Input]


# -- values


def _deep(kind: str, depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found] if kind == "list" else {"a": found}
    return found


class _Odd:
    def __repr__(self) -> str:
        return "<an odd object>"


_JSON_VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: -1, lambda: 1, lambda: 3, lambda: 2**31,
    lambda: 2**63, lambda: 10**12, lambda: 10**400, lambda: -(10**400), lambda: 0.5, lambda: -0.0, lambda: math.nan,
    lambda: math.inf, lambda: -math.inf, lambda: 1e308, lambda: 5e-324, lambda: "", lambda: "x", lambda: " ",
    lambda: "auto", lambda: "None", lambda: "true", lambda: "8GiB", lambda: "1e400 GiB", lambda: "9" * 400,
    lambda: "9" * 400 + "GiB", lambda: "x" * 100_000, lambda: "\x00", lambda: "\ud800", lambda: "é" * 300,
    lambda: "../../etc/passwd", lambda: "/dev/zero", lambda: "$tuple", list, lambda: [1], lambda: [None, "a"],
    lambda: ["x"] * 1000, lambda: [[1, 2], [3]], dict, lambda: {"a": 1}, lambda: {"$tuple": 3},
    lambda: {"$tensor": ["float32", [2], "00"]}, lambda: _deep("list", 400), lambda: _deep("dict", 400),
]  # fmt: skip


def _python_values() -> list[Callable[[], Any]]:
    import numpy as np
    import torch

    return [
        *_JSON_VALUES, _Odd, lambda: _Odd, lambda: b"bytes", lambda: bytearray(b"x"), set, lambda: {1, 2},
        lambda: (1, 2), lambda: (0.9, 0.999, 0.5), lambda: ("a", "b"), lambda: complex(1, 2), lambda: Decimal("NaN"),
        lambda: Decimal("1e-3"), lambda: Fraction(1, 3), lambda: Fraction(10**400), lambda: range(3), lambda: Path("x"),
        lambda: int, lambda: print, lambda: lambda: None, lambda: torch.tensor(1.0), lambda: torch.ones(3),
        lambda: np.float32(0.5), lambda: np.int64(2), lambda: np.array([1, 2]), lambda: np.nan, lambda: object(),
        lambda: _deep("list", 50_000), lambda: io.StringIO("x"), lambda: iter([1]), lambda: Ellipsis,
        lambda: -(2**63), lambda: 2**64, lambda: 1e-400, lambda: "inf", lambda: "nan", lambda: "1_000", lambda: "٣GiB",
        lambda: "0x10", lambda: "-8GiB", lambda: "8 GiB GiB", lambda: torch.bfloat16, lambda: torch.device("cpu"),
    ]  # fmt: skip


def wild(draw: random.Random) -> Any:
    """A value of any type."""
    return draw.choice(_python_values())()


def wild_json(draw: random.Random) -> Any:
    """A random value of JSON's types."""
    return draw.choice(_JSON_VALUES)()


def short(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = f"a huge {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} letters)"


# -- texts and files


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += _places(item, (*path, key))
    elif isinstance(value, list):
        for at, item in enumerate(value[:20]):
            found += _places(item, (*path, at))
    return found


def mutate(content: Any, draw: random.Random) -> tuple[Any, str]:
    """A changed copy of a JSON value, and a description of the change."""
    content = copy.deepcopy(content)
    places = _places(content)
    if not places:
        return wild_json(draw), "another value"
    *above, last = draw.choice(places)
    inside = content
    for key in above:
        inside = inside[key]
    what = draw.choice(["exchanged", "exchanged", "exchanged", "removed", "renamed", "added"])
    name = "/".join(map(str, (*above, last)))
    if what == "removed":
        del inside[last]
    elif what == "renamed" and isinstance(inside, dict):
        inside[draw.choice(["", "x" * 300, "\ud800", f"{last}s", last.upper()])] = inside.pop(last)
    elif what == "added" and isinstance(inside, dict):
        inside[draw.choice(["new", "__class__", "self", "$tuple", "type"])] = wild_json(draw)
    else:
        inside[last] = value = wild_json(draw)
        what = f"= {short(value)}"
    return content, f"{name} {what}"


def _written(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def break_text(text: bytes, draw: random.Random) -> tuple[bytes, str]:
    """The changed bytes of a text file, and a description."""
    how = draw.choice(
        ["cut", "empty", "deep lists", "deep objects", "BOM", "UTF-16", "Latin-1", "NULs", "a byte", "a long number",
         "NaN", "twice", "text", "a list", "spaces", "a key twice", "not UTF-8", "null", "a string", "garbage"]
    )  # fmt: skip
    depth = draw.choice([200, 990, 2_000, 100_000, 1_000_000])
    at = draw.randrange(max(len(text), 1))
    new = {
        "cut": text[:at], "empty": b"", "deep lists": b"[" * depth,
        "deep objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "BOM": b"\xef\xbb\xbf" + text, "UTF-16": text.decode("latin-1").encode("utf-16"), "Latin-1": text + b"\xe9",
        "NULs": b"\x00" * 1000, "a byte": text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :],
        "a long number": b'{"a": ' + b"9" * 5000 + b"}", "NaN": b"NaN", "twice": text + text, "text": b"hello",
        "a list": b"[1, 2]", "spaces": b" " * 100, "a key twice": b'{"a": 1, "a": 2}',
        "not UTF-8": b'{"a": "\xff\xfe"}',
        "null": b"null", "a string": b'"x"', "garbage": bytes(draw.randrange(256) for _ in range(300)),
    }[how]  # fmt: skip
    if how == "deep lists" and draw.random() < 0.5:
        new += b"]" * depth
    return new, how if "deep" not in how else f"{how}, {depth:,}"


def replace_file(path: Path, draw: random.Random) -> str:
    """Replace a file by something other than a plain file; returns a description."""
    how = draw.choice(
        ["gone", "a folder", "a pipe", "a device", "a dangling link", "a link to itself", "a link to a folder"]
    )
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how != "gone":
        to = {"a device": "/dev/zero", "a dangling link": "nowhere", "a link to itself": path.name}
        path.symlink_to(to.get(how, "/"))
    return how


def break_json(path: Path, draw: random.Random) -> str:
    """Damage a JSON file; returns a description."""
    kind = draw.random()
    if kind < 0.65:
        content, what = mutate(json.loads(path.read_text()), draw)
        path.write_bytes(_written(content))
    elif kind < 0.9:
        content, what = break_text(path.read_bytes(), draw)
        path.write_bytes(content)
    else:
        what = replace_file(path, draw)
    return f"{path.name}: {what}"


def break_safetensors(path: Path, draw: random.Random) -> str:
    """Damage the header of a safetensors file; returns a description."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, rest = whole[8 : 8 + length], whole[8 + length :]
    kind = draw.random()
    if kind < 0.6:
        content, what = mutate(json.loads(header), draw)
        header = _written(content)
    elif kind < 0.75:
        header, what = break_text(header, draw)
    elif kind < 0.85:
        length = draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, length + 1, length - 1])
        path.write_bytes(struct.pack("<Q", length) + header + rest)
        return f"{path.name}: a header of {length}"
    elif kind < 0.92:
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at])
        return f"{path.name}: cut at {at}"
    else:
        return f"{path.name}: {replace_file(path, draw)}"
    path.write_bytes(struct.pack("<Q", len(header)) + header + rest)
    return f"{path.name}: {what}"


def break_pickle(path: Path, draw: random.Random) -> str:
    """Damage a file of `torch.save`; returns a description."""
    if draw.random() < 0.2:
        return f"{path.name}: {replace_file(path, draw)}"
    content, what = break_text(path.read_bytes(), draw)
    path.write_bytes(content)
    return f"{path.name}: {what}"


def wild_name(draw: random.Random, inside: str = "") -> tuple[str, str]:
    """A path that most systems refuse, and a description."""
    how = draw.choice(
        ["long", "long folder", "NUL", "surrogate", "empty", "dots", "deep", "newline", "a device", "a file",
         "a link loop", "home of nobody", "long bytes", "spaces", "root", "proc"]
    )  # fmt: skip
    name = {
        "long": "x" * 300, "long folder": "y" * 256 + "/z", "NUL": "a\x00b", "surrogate": "a\ud800b", "empty": "",
        "dots": "../" * 3000, "deep": "d/" * 3000, "newline": "a\nb", "a device": "device", "a file": "file",
        "a link loop": "loop", "home of nobody": "~nobody-of-that-name/x", "long bytes": "é" * 130, "spaces": "   ",
        "root": "/", "proc": "/proc/self/x",
    }[how]  # fmt: skip
    Path(inside, "file").write_text("x")
    Path(inside, "loop").symlink_to("loop")
    Path(inside, "device").symlink_to("/dev/zero")
    if how in ("a file", "a device", "a link loop"):
        name = str(Path(inside, name))
    if draw.random() < 0.3 and how in ("long", "NUL", "surrogate", "long bytes"):
        name = f"{inside}/{name}{draw.choice(['', '.json', '.jsonl', '.csv', '/x'])}"
    return name, how


# -- models and files


def import_all() -> None:
    """Import all libraries of the rooms once, before processes are forked."""
    import datasets
    import torch
    import transformers
    import typer.testing  # noqa: F401
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        BertForSequenceClassification,
        ByT5Tokenizer,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Qwen2ForCausalLM,
        Seq2SeqTrainingArguments,
        T5ForConditionalGeneration,
    )

    import offloadkit.deepspeed.engine
    import offloadkit.doors.cli
    import offloadkit.doors.comparing.slowdown
    import offloadkit.doors.comparing.sweeping
    import offloadkit.doors.finetuning
    import offloadkit.hf.trainer  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def _configs() -> dict[str, Any]:
    from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, Qwen2Config, T5Config

    sizes: dict[str, Any] = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 48}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"vocab_size": 384, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    bart = {"vocab_size": 384, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24}
    bart |= {"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    return {
        "t5": T5Config(architectures=["T5ForConditionalGeneration"], decoder_start_token_id=0, **t5),
        "llama": LlamaConfig(architectures=["LlamaForCausalLM"], num_key_value_heads=2, **sizes, **ids),
        "qwen2": Qwen2Config(architectures=["Qwen2ForCausalLM"], num_key_value_heads=2, **sizes, **ids),
        "bert": BertConfig(architectures=["BertForSequenceClassification"], **sizes),
        "bart": BartConfig(architectures=["BartForConditionalGeneration"], **bart),
        "gpt2": GPT2Config(architectures=["GPT2LMHeadModel"], vocab_size=384, n_positions=48, **gpt2),
    }


def _rows(number: int = 8) -> list[dict[str, Any]]:
    return [{"input": f"add {n} and 2", "target": str(n + 2)} for n in range(number)]


_DS_CONFIG = {
    "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "gradient_clipping": 1.0, "bf16": {"enabled": True}, "steps_per_print": 10, "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "offloadkit": {"vram": "8GiB", "ram": "16GiB", "precision": "exact"},
}  # fmt: skip
_DS_FP16 = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 100, "hysteresis": 2},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 2}},
}


def small_engine(**options: Any) -> Any:
    """An engine over a small model on the CPU."""
    import torch
    from torch import nn

    from offloadkit import OffloadConfig, OffloadEngine, Placement

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return OffloadEngine(module, OffloadConfig(**({"placement": Placement()} | options)), device="cpu")


def _step(engine: Any) -> None:
    import torch

    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean())
    engine.step()


def _small_trainer(folder: Path, max_steps: int, **arguments: Any) -> Any:
    import torch
    from transformers import Seq2SeqTrainingArguments, T5ForConditionalGeneration

    from offloadkit import OffloadSeq2SeqTrainer

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(_configs()["t5"])
    rows = [{"input_ids": [5, 6, 7, 1], "labels": [8, 9, 1]} for _ in range(8)]
    given: dict[str, Any] = {"max_steps": max_steps, "save_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    given |= {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    args = Seq2SeqTrainingArguments(output_dir=str(folder), **(given | arguments))
    return OffloadSeq2SeqTrainer(model=model, args=args, train_dataset=rows)


def stock(folder: Path) -> None:
    """Write the models, checkpoints and files that inputs are made of."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
        ByT5Tokenizer,
        PreTrainedTokenizerFast,
    )

    from offloadkit import finetune

    autos = {"bert": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM, "bart": AutoModelForSeq2SeqLM}
    for name, config in _configs().items():
        model = autos.get(name, AutoModelForCausalLM).from_config(config)
        model.save_pretrained(folder / name, max_shard_size="4KB" if name == "llama" else "1GB")
        if name == "gpt2":
            torch.save(model.state_dict(), folder / name / "pytorch_model.bin")
            (folder / name / "model.safetensors").unlink()
    ByT5Tokenizer().save_pretrained(folder / "t5")
    words = {f"w{n}": n for n in range(300)} | {"<pad>": 300, "</s>": 301}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    for name in ("llama", "bert"):
        fast.save_pretrained(folder / name)
    for precision in ("exact", "tiny"):
        with small_engine(precision=precision) as engine:
            _step(engine)
            engine.save_checkpoint(folder / f"loop-{precision}" / "checkpoint-1", position={"row": 2})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, _rows())))
    trainer = _small_trainer(folder / "trainer", 1)
    trainer.train()
    trainer.close()
    finetune(
        str(folder / "t5"), _rows(), output_dir=folder / "finetune", max_steps=2, save_steps=1, batch_size=2,
        monitor=False, use_cpu=True,
    )  # fmt: skip


def _seal(checkpoint: Path) -> None:
    """Write a manifest with the current checksums, so that errors past this check must be named too."""
    from offloadkit.checkpoint.folder import origin_of, write_manifest

    write_manifest(checkpoint, origin_of(checkpoint))


# -- rooms: checkpoints


_LOOP_FILES = ("run.json", "run.json", "random.json", "manifest.json", "states", "states", "weights.safetensors")


def _loop_checkpoint(draw: random.Random, scratch: Path, stock: Path) -> Input:
    precision = draw.choice(["exact", "tiny"])
    folder = Path(shutil.copytree(stock / f"loop-{precision}", scratch / "run")) / "checkpoint-1"
    what, name = _break_file(folder, draw.choice(_LOOP_FILES), draw)

    def call() -> None:
        with small_engine(precision=precision) as engine:
            engine.load_checkpoint(folder)
            _step(engine)

    return Input(f"load_checkpoint, {what}", (name, str(folder)), call)


def _break_file(folder: Path, name: str, draw: random.Random) -> tuple[str, str]:
    """Damage a file whose name begins with `name`; returns (description, file name)."""
    path = next(each for each in sorted(folder.iterdir()) if each.name.startswith(name))
    breaks = {".json": break_json, ".safetensors": break_safetensors}
    what = breaks.get(path.suffix, break_pickle)(path, draw)
    plain = all(stat_is_plain(each) for each in folder.iterdir())
    if path.name != "manifest.json" and plain and draw.random() < 0.7:
        _seal(folder)
        what += ", sealed"
    return what, path.name


def stat_is_plain(path: Path) -> bool:
    """Whether the path is a regular file of finite size."""
    return path.is_file() and not path.is_symlink()


_TRAINER_FILES = (
    "run.json", "random.json", "trainer_state.json", "trainer_state.json", "config.json", "generation_config.json",
    "training_args.json", "manifest.json", "states", "model.safetensors",
)  # fmt: skip


def _trainer_checkpoint(draw: random.Random, scratch: Path, stock: Path) -> Input:
    run = Path(shutil.copytree(stock / "trainer", scratch / "run"))
    folder = run / "checkpoint-1"
    names = [name for name in _TRAINER_FILES if any(each.name.startswith(name) for each in folder.iterdir())]
    what, name = _break_file(folder, draw.choice(names), draw)

    def call() -> None:
        trainer = _small_trainer(run, 2)
        try:
            trainer.train(resume_from_checkpoint=str(folder))
        finally:
            trainer.close()

    return Input(f"Trainer resumes, {what}", (name, str(folder)), call)


def _finetune_checkpoint(draw: random.Random, scratch: Path, stock: Path) -> Input:
    from offloadkit import finetune

    run = Path(shutil.copytree(stock / "finetune", scratch / "run"))
    shutil.rmtree(run / "model")
    folder = max(run.glob("checkpoint-*"), key=lambda each: int(each.name.rpartition("-")[2]))
    names = [name for name in _TRAINER_FILES if any(each.name.startswith(name) for each in folder.iterdir())]
    names += [each.name for each in folder.iterdir() if each.name.startswith(("order", "tokenizer"))]
    what, name = _break_file(folder, draw.choice(names), draw)

    def call() -> None:
        finetune(
            str(stock / "t5"), _rows(), output_dir=run, max_steps=3, batch_size=2, monitor=False, use_cpu=True,
            resume=True,
        )  # fmt: skip

    return Input(f"finetune resumes, {what}", (name, str(run)), call)


def _state_dict(draw: random.Random, scratch: Path, stock: Path) -> Input:
    engine = small_engine()
    state = dict(engine.state_dict())
    key = draw.choice(list(state))
    if draw.random() < 0.4:
        state[key], what = wild(draw), "another value"
    else:
        state[key], what = mutate(_plain(state[key]), draw)

    def call() -> None:
        with engine:
            engine.load_state_dict(state)
            _step(engine)

    return Input(f"load_state_dict, {key}: {what}", (key, "state", "parameter"), call)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# -- rooms: models


def _model_config(draw: random.Random, scratch: Path, stock: Path) -> Input:
    name = draw.choice(list(_configs()))
    folder = Path(shutil.copytree(stock / name, scratch / "model"))
    what = break_json(folder / "config.json", draw)
    words = ("config.json", "is an encoder", "an encoder-decoder", "does not fit")  # or: rows of another model
    return Input(what, words, _model_door(name, folder, draw))


def _model_door(name: str, folder: Path, draw: random.Random) -> Callable[[], object]:
    import offloadkit

    def train() -> None:
        rows = [{"text": f"a {n}", "label": str(n % 2)} for n in range(8)] if name == "bert" else _rows()
        offloadkit.finetune(
            folder, rows, output_dir=folder.parent / "out", max_steps=1, batch_size=2, monitor=False, use_cpu=True,
            tokenizer="byte", callbacks=[_began_callback()], init=draw.choice(["pretrained", "random"]),
        )  # fmt: skip

    return draw.choice(
        [
            lambda: offloadkit.plan(folder, batch_size=2),
            lambda: offloadkit.from_pretrained(folder),
            lambda: offloadkit.from_pretrained(folder, init="random"),
            train,
        ]
    )


_SIZE_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "d_model",
              "d_ff", "d_kv", "num_layers", "num_heads", "num_decoder_layers", "n_embd", "n_layer", "n_head",
              "n_positions", "max_position_embeddings", "num_key_value_heads", "head_dim", "type_vocab_size",
              "encoder_layers", "relative_attention_num_buckets", "num_labels", "n_inner",
              "encoder_ffn_dim")  # fmt: skip


def _absurd_size(draw: random.Random, scratch: Path, stock: Path) -> Input:
    name = draw.choice(list(_configs()))
    folder = Path(shutil.copytree(stock / name, scratch / "model"))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    key = draw.choice([key for key in _SIZE_KEYS if key in content])
    content[key] = value = draw.choice([10**9, 10**12, 2**31, 2**63 - 1, 2**63, 10**30, 10**400])
    if key.endswith(("layer", "layers")):
        value = content[key] = draw.choice([5_000, 10**6, value])
    path.write_bytes(_written(content))
    made = _model_door(name, folder, draw)
    words = (key, key.replace("num_", "").replace("_", " "), "config.json", "does not fit", "RAM", "memory")
    return Input(f"{name} with {key} {short(value)}", words, made, seconds=5.0)


def _absurd_length(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    name = draw.choice(["t5", "llama", "gpt2", "bert"])
    key = draw.choice(["batch_size", "max_input_length", "max_target_length", "gradient_accumulation"])
    value = draw.choice([10**6, 10**9, 10**12, 2**31, 2**63, 10**30, 10**400])
    vram = draw.choice([None, "8GiB", 10**400, "9" * 400 + "GiB"])
    call = lambda: offloadkit.plan(stock / name, **({"batch_size": 2, "vram": vram} | {key: value}))  # noqa: E731
    return Input(
        f"plan of {name}, {key} {short(value)}, vram {short(vram)}", (key, "vram", "tokens"), call, seconds=5.0
    )


def _many_tensors(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    folder = Path(shutil.copytree(stock / "t5", scratch / "model"))
    number = draw.choice([100_000, 1_000_000])
    begin, end = struct.pack("<Q", 0), b""
    shape = draw.choice(["[0]", "[]"])
    size = 0 if shape == "[0]" else 4
    entries = ",".join(
        f'"t{n}":{{"dtype":"F32","shape":{shape},"data_offsets":[{n * size},{(n + 1) * size}]}}' for n in range(number)
    )
    header = f"{{{entries}}}".encode()
    begin, end = struct.pack("<Q", len(header)), b"\0" * (size * number)
    (folder / "model.safetensors").write_bytes(begin + header + end)
    what = f"{number:,} tensors of shape {shape}"
    return Input(what, ("model.safetensors", str(folder)), lambda: offloadkit.from_pretrained(folder), seconds=5.0)


def _weights(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    name = draw.choice(["llama", "llama", "t5", "bert", "gpt2"])
    folder = Path(shutil.copytree(stock / name, scratch / "model"))
    if name == "llama" and draw.random() < 0.6:
        path = folder / "model.safetensors.index.json"
        what = _break_index(path, draw) if draw.random() < 0.5 else break_json(path, draw)
    elif name == "gpt2":
        path = folder / "pytorch_model.bin"
        what = break_pickle(path, draw)
    else:
        path = draw.choice(sorted(folder.glob("*.safetensors")))
        what = break_safetensors(path, draw)

    def call() -> None:
        model = offloadkit.from_pretrained(folder)
        from offloadkit.offload.unread import make_real

        make_real(list(model.parameters()))

    return Input(what, (path.name, str(folder)), call)


def _break_index(path: Path, draw: random.Random) -> str:
    """Make an index name a wrong file."""
    content = json.loads(path.read_text())
    folder = path.parent
    key = draw.choice(list(content["weight_map"]))
    how = draw.choice(
        ["../x", "absolute", "a/../../x", "a folder", "a pipe", "a device", "NUL", "long", "a number", "~"]
    )
    (folder / "inner").mkdir()
    if how == "a pipe":
        os.mkfifo(folder / "pipe.safetensors")
    elif how in ("a device", "a folder"):
        name = "device.safetensors" if how == "a device" else "link.safetensors"
        (folder / name).symlink_to("/dev/zero" if how == "a device" else "inner")
    shutil.copy(folder / content["weight_map"][key], folder.parent / "x.safetensors")
    name: Any
    name = {
        "../x": "../x.safetensors", "absolute": str(folder.parent / "x.safetensors"), "a folder": "link.safetensors",
        "a/../../x": "inner/../../x.safetensors", "a pipe": "pipe.safetensors", "a device": "device.safetensors",
        "NUL": "a\x00.safetensors", "long": "x" * 300 + ".safetensors", "a number": 3, "~": "~/x.safetensors",
    }[how]  # fmt: skip
    content["weight_map"][key] = name
    path.write_bytes(_written(content))
    return f"{path.name}: a name that is {how}"


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def _tokenizer(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    name = draw.choice(["t5", "llama"])
    folder = Path(shutil.copytree(stock / name, scratch / "model"))
    path = folder / draw.choice([each for each in _TOKENIZER_FILES if (folder / each).is_file()])
    what = break_json(path, draw)
    rows: Any = (
        _rows()
        if name == "t5"
        else [{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}] * 4
    )

    def call() -> None:
        offloadkit.finetune(
            folder, rows, output_dir=scratch / "out", max_steps=1, batch_size=2, monitor=False, use_cpu=True,
            callbacks=[_began_callback()],
        )  # fmt: skip

    return Input(f"{name}, {what}", (path.name, str(folder), "tokenizer"), call)


def _generation_config(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    folder = Path(shutil.copytree(stock / draw.choice(["t5", "llama"]), scratch / "model"))
    what = break_json(folder / "generation_config.json", draw)
    return Input(what, ("generation_config.json", str(folder)), lambda: offloadkit.from_pretrained(folder))


def _began_callback() -> Any:
    from transformers import TrainerCallback

    class Begin(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise BeganError

    return Begin


# -- rooms: options


def _sizes(draw: random.Random, scratch: Path, stock: Path) -> Input:
    from offloadkit import OffloadConfig

    digits = "".join(draw.choice(string.digits + ".eE+-_ ٣²") for _ in range(draw.choice([1, 3, 8, 400])))
    unit = draw.choice(["", "B", "KiB", "GiB", "gb", "TB", "PiB", "GiBGiB", "G", "é", "\x00", "\ud800"])
    size: Any = draw.choice([digits, digits + unit, digits + " " + unit, unit])
    if draw.random() < 0.1:
        size = draw.choice([10**400, -(10**400), 0, 2**63, 10**5000])
    key = draw.choice(["vram", "ram"])
    return Input(f"{key}={short(size)}", (key, "size", "bytes"), lambda: OffloadConfig(**{key: size}))


def _options(draw: random.Random, scratch: Path, stock: Path) -> Input:
    from offloadkit import DynamicLossScale, OffloadConfig, Placement

    kind = draw.choice([OffloadConfig] * 6 + [Placement, DynamicLossScale])
    key = draw.choice([each.name for each in fields(kind)])
    value = wild(draw)

    def call() -> None:
        made = kind(**{key: value})
        options = {key: value} if kind is OffloadConfig else {"placement": made} if kind is Placement else {}
        if kind is DynamicLossScale:
            options = {"loss_scale": made, "working_dtype": "fp16"}
        with small_engine(**options) as engine:
            _step(engine)

    return Input(f"{kind.__name__}({key}={short(value)})", (key, key.split("_")[0]), call)


def _groups(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import torch

    from offloadkit import OffloadConfig, OffloadEngine, Placement

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    one, two = list(module[0].parameters()), list(module[1].parameters())
    groups: Any = [{"params": one, "lr": 1e-3}, {"params": two, "weight_decay": 0.1}]
    place = draw.choice(["option", "option", "option", "params", "group", "all"])
    key, value = draw.choice(["lr", "betas", "eps", "weight_decay", "foreach", "maximize", "new"]), wild(draw)
    if place == "option":
        groups[0][key] = value
    elif place == "params":
        key = "params"
        groups[0]["params"] = value
    elif place == "group":
        key, groups[0] = "group", value
    else:
        key, groups = "param_groups", value

    def call() -> None:
        config = OffloadConfig(placement=Placement())
        with OffloadEngine(module, config, param_groups=groups, device="cpu") as engine:
            _step(engine)

    return Input(f"param_groups, {place} {key}={short(value)}", (key, "group", "parameter"), call)


def _finetune(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import inspect

    import offloadkit
    from offloadkit.hf.arguments import argument_names

    own = [name for name in inspect.signature(offloadkit.finetune).parameters if name != "training_arguments"]
    key = draw.choice(own) if draw.random() < 0.6 else draw.choice(argument_names())
    value = wild(draw)
    given: dict[str, Any] = {"output_dir": scratch / "out", "max_steps": 1, "batch_size": 2, "monitor": False}
    given |= {"tokenizer": "byte", "use_cpu": True, "callbacks": [_began_callback()]}
    given |= {"model": stock / draw.choice(["t5", "llama"]), "train_dataset": _rows()}
    if key == "num_gpus" and type(value) is int and value > 1:
        value = -value  # otherwise processes would be started, which is slow
    given[key] = value
    if key in ("output_dir", "logging_dir") and isinstance(value, str) and value.startswith("/"):
        given[key] = str(scratch)
    return Input(f"finetune({key}={short(value)})", _option_words(key), lambda: offloadkit.finetune(**given))


def _option_words(key: str) -> tuple[str, ...]:
    more = {
        "train_dataset": ("dataset", "row", "file"),
        "model": ("model", "folder"),
        "torch_compile_backend": ("torch_compile",),
        "torch_compile_mode": ("torch_compile",),
        "eval_dataset": ("dataset", "row", "file"),
    }
    more |= {
        "max_input_length": ("tokens",),
        "input_column": ("column",),
        "target_column": ("column",),
        "callbacks": ("callback",),
        "vram": ("size", "VRAM"),
        "ram": ("size", "RAM"),
    }
    return (key, key.replace("_", "-"), *more.get(key, ()))


def _plan(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import inspect

    import offloadkit

    key, value = draw.choice(list(inspect.signature(offloadkit.plan).parameters)), wild(draw)
    given: dict[str, Any] = {"model": stock / draw.choice(["t5", "llama", "bert"]), key: value}
    if draw.random() < 0.5:
        given.setdefault("vram", "8GiB")
    return Input(f"plan({key}={short(value)})", (*_option_words(key), "card"), lambda: str(offloadkit.plan(**given)))


def _measuring(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import inspect

    import offloadkit
    from offloadkit.doors.engines import runner

    door = draw.choice(["compare", "sweep", "measure_slowdown"])
    function = getattr(offloadkit, door)
    keys = [name for name in inspect.signature(function).parameters if name != "finetune_arguments"]
    key, value = draw.choice(keys), wild(draw)
    first = "models" if door == "compare" else "model"
    given: dict[str, Any] = {first: [str(stock / "t5")] if door == "compare" else str(stock / "t5")}
    given |= {"output_dir": scratch / "out", key: value}

    def call() -> None:
        with mock.patch.object(runner.subprocess, "Popen", side_effect=BeganError):
            function(**given)

    return Input(f"{door}({key}={short(value)})", (*_option_words(key), key.rstrip("s")), call)


def _from_pretrained(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit

    key, value = draw.choice(["name_or_path", "dtype", "init", "task", "num_labels", "allow_missing"]), wild(draw)
    given: dict[str, Any] = {"name_or_path": stock / draw.choice(["t5", "llama", "bert"]), key: value}
    return Input(
        f"from_pretrained({key}={short(value)})", (key, "model", "name"), lambda: offloadkit.from_pretrained(**given)
    )


def _engine_calls(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import torch

    from offloadkit import OffloadConfig, OffloadEngine, Placement, Telemetry

    value = wild(draw)
    door = draw.choice(["model", "config", "device", "plan", "example", "backward", "save", "position", "scheduler",
                        "profile", "telemetry", "evaluation_rows", "param_groups", "move", "load"])  # fmt: skip
    config = OffloadConfig(placement=Placement())
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def call() -> None:
        if door in ("model", "config"):
            given = {"model": module, "config": config, door: value}
            OffloadEngine(**given, device="cpu").close()
        elif door in ("device", "plan", "example", "evaluation_rows", "param_groups"):
            OffloadEngine(module, config, **({"device": "cpu"} | {door: value})).close()
        elif door == "telemetry":
            Telemetry(value)
        else:
            with OffloadEngine(module, config, device="cpu") as engine:
                if door == "backward":
                    engine.backward(value)
                elif door == "save":
                    engine.save_checkpoint(value if not isinstance(value, str) else scratch / "save")
                elif door == "load":
                    engine.load_checkpoint(value)
                elif door == "profile":
                    engine.profile(steps=value)
                elif door == "move":
                    engine.move(value)
                else:
                    engine.save_checkpoint(scratch / "save", **{door: value})

    words = {
        "save": ("folder", "path"),
        "load": ("folder", "checkpoint", "training cannot resume from"),
        "telemetry": ("log", "telemetry"),
    }
    words |= {"backward": ("loss",), "profile": ("steps",), "move": ("plan",), "evaluation_rows": ("evaluation_rows",)}
    return Input(f"engine: {door} {short(value)}", (door, *words.get(door, ())), call)


def _deepspeed(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import torch

    from offloadkit import OffloadConfig, initialize

    content: Any = draw.choice([_DS_CONFIG, _DS_FP16])
    what = "whole"
    path = scratch / "ds_config.json"
    given: Any = path
    words: tuple[str, ...] = ("ds_config.json", "DeepSpeed config")
    if draw.random() < 0.5:
        path.write_bytes(_written(content))
        what = break_json(path, draw)
    else:
        for _ in range(draw.choice([1, 1, 2])):
            content, what = mutate(content, draw)
        if draw.random() < 0.2:
            key, value = draw.choice(list(_DS_CONFIG)), wild(draw)
            content = {**_DS_CONFIG, key: value}
            what = f"{key} = {short(value)}"
        given = content
        words = ("DeepSpeed config", *what.split(" ")[0].split("/"), "offloadkit")

    def call() -> None:
        if draw.random() < 0.5:
            OffloadConfig.from_deepspeed(given)
            return
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
        engine, *_ = initialize(model=module, config=given, dist_init_required=False)
        try:
            for _ in range(2):
                rows = torch.ones(2, 8, dtype=next(module.parameters()).dtype)
                engine.backward(engine(rows).float().square().mean())
                engine.step()
        finally:
            engine.destroy()

    return Input(f"ds_config, {what}", words, call)


# -- rooms: the command line


_COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": ("--vram", "--ram", "--precision", "--batch-size", "--max-input-length", "--max-target-length", "--gpu",
             "--gradient-accumulation", "--disk", "--dtype", "--num-gpus", "MODEL"),
    "train": ("--eval-dataset", "--output", "--tokenizer", "--epochs", "--max-steps", "--batch-size", "--learning-rate",
              "--max-input-length", "--precision", "--vram", "--ram", "--disk", "--dtype", "--grace-seconds", "--set",
              "--save-minutes", "--seed", "--input-column", "--target-column", "--template", "--set", "MODEL",
              "DATASET"),
    "doctor": ("--folder",),
    "compare": ("--engine", "--num-samples", "--batch-size", "--steps", "--timeout", "--output", "--vram", "MODEL"),
    "sweep": ("--batch-sizes", "--gradient-accumulation", "--scale-learning-rate", "--steps", "--output", "--vram"),
}  # fmt: skip


def _command_line(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import typer.testing

    from offloadkit.doors.cli import app
    from offloadkit.doors.engines import runner
    from offloadkit.hf.arguments import argument_names
    from offloadkit.hf.trainer import OffloadTrainerMixin

    command = draw.choice(["plan", "plan", "train", "train", "train", "compare", "sweep", "doctor"])
    option = draw.choice(_COMMANDS[command])
    value = wild_json(draw)
    text = value if isinstance(value, str) else json.dumps(value) if draw.random() < 0.5 else f"{value}"
    if draw.random() < 0.3:
        text, _ = wild_name(draw, str(scratch))
    if command == "doctor" and text.startswith("/"):
        text = str(scratch / "nowhere")
    words = [option, option.strip("-").replace("-", "_"), option.strip("-")]
    if option == "--set":
        key = draw.choice([*argument_names(), "new", ""])
        words.append(key or "--set")
        text = f"{key}={text}" if draw.random() < 0.9 else text
    places = {"MODEL": str(stock / "t5"), "DATASET": str(stock / "rows.jsonl")}
    if option in places:
        places[option] = text
        words += [option, "model", "dataset", "file", "folder"]
    given = [
        command,
        *([places["MODEL"]] if command != "doctor" else []),
        *([places["DATASET"]] if command == "train" else []),
    ]
    if option.startswith("--"):
        given.append(f"{option}={text}")
    if command == "train":
        defaults = {"--tokenizer": "byte", "--max-steps": "1", "--batch-size": "2", "--output": str(scratch / "out")}
        given += [f"{name}={default}" for name, default in defaults.items() if name != option]
    if command in ("compare", "sweep") and option != "--output":
        given.append(f"--output={scratch / 'out'}")
    words += {"--vram": ["VRAM", "size"], "--ram": ["RAM", "size"], "--eval-dataset": ["dataset", "file"]}.get(
        option, []
    )
    words += _option_words(option.strip("-").replace("-", "_"))
    words += {"--gpu": ["card"], "--num-samples": ["num_samples"], "--dtype": ["working_dtype"]}.get(option, [])

    def call() -> None:
        with (
            mock.patch.object(runner.subprocess, "Popen", side_effect=BeganError),
            mock.patch.object(OffloadTrainerMixin, "train", side_effect=BeganError),
        ):
            result = typer.testing.CliRunner().invoke(app, given, catch_exceptions=True)
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            raise error
        if result.exit_code:
            if (result.exit_code == 1 and "does not fit" in result.output) or (
                command == "doctor" and "stop" in result.output
            ):
                return  # a plan and the doctor report this by the exit status
            raise CommandLineError(result.exit_code, result.output)

    return Input(f"{command} {option} {short(text)}", tuple(words), call)


# -- rooms: names


def _names(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import offloadkit
    from offloadkit import OffloadConfig, Placement, Telemetry
    from offloadkit.doors import doctor

    name, how = wild_name(draw, str(scratch))
    given: Any = Path(name) if draw.random() < 0.3 else name
    t5, out = stock / "t5", scratch / "out"
    base: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "monitor": False, "tokenizer": "byte", "use_cpu": True}
    base |= {"callbacks": [_began_callback()]}
    doors: dict[str, Callable[[], object]] = {
        "model": lambda: offloadkit.finetune(given, _rows(), output_dir=out, **base),
        "train_dataset": lambda: offloadkit.finetune(t5, given, output_dir=out, **base),
        "eval_dataset": lambda: offloadkit.finetune(t5, _rows(), eval_dataset=given, output_dir=out, **base),
        "tokenizer": lambda: offloadkit.finetune(t5, _rows(), output_dir=out, **(base | {"tokenizer": given})),
        "output_dir": lambda: offloadkit.finetune(t5, _rows(), output_dir=given, **base),
        "resume": lambda: offloadkit.finetune(t5, _rows(), output_dir=given, resume=True, **base),
        "overwrite": lambda: offloadkit.finetune(t5, _rows(), output_dir=given, overwrite=True, **base),
        "plan": lambda: offloadkit.plan(given),
        "from_pretrained": lambda: offloadkit.from_pretrained(given),
        "from_deepspeed": lambda: OffloadConfig.from_deepspeed(given),
        "disk": lambda: offloadkit.plan(t5, batch_size=2, offload=OffloadConfig(disk=given)),
        "telemetry": lambda: Telemetry(given),
        "doctor": lambda: doctor.gather(Path(given)),
    }  # fmt: skip

    def with_engine(use: Callable[[Any], object]) -> Callable[[], None]:
        def call() -> None:
            with small_engine() as engine:
                use(engine)

        return call

    doors |= {
        "save": with_engine(lambda engine: engine.save_checkpoint(given)),
        "load": with_engine(lambda engine: engine.load_checkpoint(given)),
        "profile": with_engine(lambda engine: engine.profile(path=given)),
        "states on disk": lambda: small_engine(disk=given, placement=Placement(states="disk")).close(),
    }
    door = draw.choice(list(doors))
    if how in ("root", "a device", "proc", "spaces", "newline") and door in (
        "output_dir",
        "overwrite",
        "resume",
        "doctor",
    ):
        name, given, how = "", "", "empty"
    words = (
        door,
        "output_dir",
        "folder",
        "file",
        "disk",
        "model",
        "dataset",
        "path",
        "checkpoint",
        "training cannot resume from",
        name[:20] or "''",
    )
    return Input(f"{door}: a name, {how}", words, doors[door])


# -- rooms: rows


def _cell(draw: random.Random) -> Any:
    return draw.choice(
        [None, 1, 2.5, True, "", "w1 w2", " ", "x" * 5000, "\ud800", "\x00", "é", [1, 2], [[1], [2]], {"a": 1}, [],
         ["a"], math.nan, math.inf, 10**30, -1, {}, [None], "\n"]
    )  # fmt: skip


_COLUMNS = ("input", "target", "text", "label", "messages", "prompt", "completion", "input_ids", "labels", "question",
            "answer", "x", "", "é")  # fmt: skip


_PAIRS = [
    {"input": "w1", "target": "w2"},
    {"prompt": "w1", "completion": "w2"},
    {"input_ids": [5, 6], "labels": [7, 8]},
]
_GOOD: dict[str, list[dict[str, Any]]] = {
    "t5": _PAIRS,
    "llama": [
        *_PAIRS,
        {"text": "w1 w2"},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]},
    ],
    "bert": [{"text": "w1", "label": "good"}],
}
"""Rows that each model can learn from."""


def _wild_rows(name: str, draw: random.Random) -> Any:
    good = draw.choice(_GOOD[name])
    rows: list[Any] = [copy.deepcopy(good) for _ in range(draw.choice([2, 3, 5]))]
    if "label" in good:
        rows[0]["label"] = "bad"
    if draw.random() < 0.05:
        return rows
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(rows))
        how = draw.random()
        if how < 0.6 and isinstance(rows[at], dict) and rows[at]:
            rows[at][draw.choice(list(rows[at]))] = _cell(draw)
        elif how < 0.7 and isinstance(rows[at], dict) and rows[at]:
            del rows[at][draw.choice(list(rows[at]))]
        elif how < 0.8 and isinstance(rows[at], dict):
            rows[at][draw.choice(_COLUMNS)] = _cell(draw)
        elif how < 0.9:
            rows, _ = mutate(rows, draw)
        else:
            rows[at] = draw.choice([None, 3, "x", [], {}])
        if not rows:
            break
    return rows


def _prepare(name: str, data: Any, stock: Path, draw: random.Random) -> Callable[[], object]:
    from offloadkit.hf.columns import ColumnOptions
    from offloadkit.hf.data import prepare_both
    from offloadkit.hf.source import resolve

    column_options = ColumnOptions(input="question", target="answer") if draw.random() < 0.1 else ColumnOptions()
    share = draw.choice([None, None, 0.5, 0.1])

    def call() -> None:
        source = resolve(stock / name)
        tokenizer = source.load_tokenizer()
        sizes: dict[str, Any] = {"max_input_length": 32, "max_target_length": 8}
        made, _ = prepare_both(data, share, tokenizer, source.config, column_options=column_options, **sizes)
        made.collator([made.dataset[at] for at in range(min(2, len(made.dataset)))])

    return call


def _rows_in_memory(draw: random.Random, scratch: Path, stock: Path) -> Input:
    import datasets
    import pandas

    name = draw.choice(list(_GOOD))
    rows = _wild_rows(name, draw) if draw.random() < 0.9 else wild(draw)
    kind = draw.choice(["list", "list", "pandas", "dataset"])
    data = rows
    if kind != "list" and isinstance(rows, list):
        try:
            data = pandas.DataFrame(rows) if kind == "pandas" else datasets.Dataset.from_list(rows)
        except Exception:  # another library cannot make a data set of these rows
            kind = "list"
    words = ("row", "column", "dataset", "labels", "tokens", "file")
    return Input(f"{kind} of rows {short(rows)}", words, _prepare(name, data, stock, draw))


def _rows_in_file(draw: random.Random, scratch: Path, stock: Path) -> Input:
    kind = draw.choice([".jsonl", ".jsonl", ".json", ".csv", ".csv", ".parquet", ".txt"])
    path = scratch / f"rows{kind}"
    name = draw.choice(list(_GOOD))
    rows = _wild_rows(name, draw)
    if kind in (".jsonl", ".txt"):
        text = b"\n".join(_written(row) for row in rows)
    elif kind == ".json":
        text = _written(rows)
    elif kind == ".csv":
        text = _as_csv(draw)
    else:
        text = _as_parquet(path, draw)
    what = short(rows)
    path.write_bytes(text)
    if draw.random() < 0.4:
        text, what = break_text(text, draw)
        path.write_bytes(text)
    elif draw.random() < 0.1:
        what = replace_file(path, draw)
    return Input(f"{path.name}: {what}", (path.name, "row", "column", "tokens"), _prepare(name, path, stock, draw))


def _as_csv(draw: random.Random) -> bytes:
    header = draw.choice(["input,target", "text,label", "text", "input;target", "a,a", "", "input,target,"])
    cells = ["w1,w2", "w1", "w1,w2,w3", '"w1,w2', "é,ü", ",", "", '"a""b",c', "\x00,x", "1,2.5"]
    lines = [header, *draw.choices(cells, k=draw.choice([0, 1, 4]))]
    encoding = draw.choice(["utf-8", "utf-8", "latin-1", "utf-16", "cp1252"])
    return draw.choice(["\n", "\r\n", "\r"]).join(lines).encode(encoding)


def _as_parquet(path: Path, draw: random.Random) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "input": draw.choice([["w1", "w2"], [1, 2], [None, None], [b"\xff", b"x"], [["a"], ["b"]], [1.5, None]]),
        draw.choice(_COLUMNS): draw.choice([["w1", "w2"], [1, 2], [None, None], [{"a": 1}, {"a": 2}], [True, False]]),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    whole = path.read_bytes()
    if draw.random() < 0.3:
        at = draw.randrange(len(whole))
        whole = whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :]
    return whole


# -- rooms: refusals by the system


def _threads(draw: random.Random, scratch: Path, stock: Path) -> Input:
    from offloadkit.checkpoint.folder import write_manifest  # noqa: F401

    number = draw.randrange(6)
    door = draw.choice(["engine", "save", "load", "trainer", "finetune"])
    folder = Path(shutil.copytree(stock / "loop-exact", scratch / "run")) / "checkpoint-1"

    def call() -> None:
        left = [number]
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        trainer = _small_trainer(scratch / "trainer", 2) if door == "trainer" else None
        threading.Thread.start = limited  # type: ignore[method-assign]
        try:
            if trainer is not None:
                trainer.train()
            elif door == "finetune":
                import offloadkit

                offloadkit.finetune(
                    stock / "t5", _rows(), output_dir=scratch / "out", max_steps=1, batch_size=2, monitor=False,
                    use_cpu=True, init="random",
                )  # fmt: skip
            else:
                with small_engine() as engine:
                    _step(engine)
                    if door == "save":
                        engine.save_checkpoint(scratch / "new")
                    elif door == "load":
                        engine.load_checkpoint(folder)
                    _step(engine)
        finally:
            threading.Thread.start = start  # type: ignore[method-assign]

    return Input(f"{door} with {number} threads", ("thread",), call)


class _KillsItsWorker:
    """Rows; reading one of them ends the process."""

    def __init__(self, at: int, signal: int) -> None:
        self.at, self.signal = at, signal

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch.utils.data

        if index == self.at and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), self.signal)
        return {"input_ids": [5, 6, 1], "labels": [7, 1]}


def _workers(draw: random.Random, scratch: Path, stock: Path) -> Input:
    at, signal = draw.randrange(8), draw.choice([9, 9, 11, 7])
    evaluates = draw.random() < 0.3

    def call() -> None:
        trainer = _small_trainer(scratch / "trainer", 4, dataloader_num_workers=draw.choice([1, 2]))
        try:
            if evaluates:
                trainer.evaluate(_KillsItsWorker(at, signal))
            else:
                trainer.train_dataset = _KillsItsWorker(at, signal)
                trainer.train()
        finally:
            trainer.close()

    return Input(f"a worker killed by signal {signal} at row {at}", ("DataLoader worker",), call)


ROOMS: dict[str, Room] = {
    "loop": Room(2_600, _loop_checkpoint),
    "trainer": Room(1_000, _trainer_checkpoint),
    "resume": Room(500, _finetune_checkpoint),
    "state_dict": Room(700, _state_dict),
    "configs": Room(2_600, _model_config),
    "absurd": Room(300, _absurd_size),
    "lengths": Room(200, _absurd_length),
    "tensors": Room(4, _many_tensors),
    "weights": Room(1_300, _weights),
    "tokenizer": Room(700, _tokenizer),
    "generation": Room(300, _generation_config),
    "units": Room(1_000, _sizes),
    "options": Room(1_600, _options),
    "groups": Room(700, _groups),
    "finetune": Room(1_000, _finetune),
    "plan": Room(600, _plan),
    "measuring": Room(500, _measuring),
    "from_pretrained": Room(300, _from_pretrained),
    "engine": Room(700, _engine_calls),
    "deepspeed": Room(1_600, _deepspeed),
    "command": Room(900, _command_line),
    "names": Room(900, _names),
    "rows": Room(1_400, _rows_in_memory),
    "files": Room(1_400, _rows_in_file),
    "threads": Room(100, _threads),
    "workers": Room(30, _workers),
}
