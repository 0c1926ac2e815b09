"""Damaged or mixed checkpoints are refused by name, or training resumes bit for bit as from an intact one.

    python -m benchmarks.corruption                                   # 200 damages in a minute; needs no GPU

Bits are flipped, and files are cut, removed, added, and exchanged with files of another run, step or rank. The
checkpoints are saved by a loop on two ranks and by a Trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import table
from benchmarks.run import git_commit
from offloadkit.distributed import world
from offloadkit.distributed.launch import launch
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OffloadkitError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.quiet import progress_bars

DAMAGES = ("flip", "cut", "remove", "add", "of another run", "of another step", "of another rank", "blocks exchanged")
NUM_RANKS = 2
Numbers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Door:
    """A way to write and read checkpoints.

    Attributes:
        first, second: checkpoints of one run after one step and two steps.
        other: another run's checkpoint after two steps.
        load: resumes from a folder in a fresh model, takes one step, and returns all numbers.
    """

    name: str
    first: Path
    second: Path
    other: Path
    load: Callable[[Path], Numbers]


def small_engine(seed: int) -> OffloadEngine:
    """An engine over a small model."""
    torch.manual_seed(seed)
    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", placement=Placement())
    return OffloadEngine(module, config, device="cpu")


def step(engine: OffloadEngine) -> None:
    """One update on random rows."""
    rows = torch.randn(4, 16, dtype=torch.bfloat16)
    engine.backward(engine(rows).float().square().mean())
    engine.step()


def _on_two_ranks(folder: Path, seed: int) -> None:
    world.join()
    torch.set_num_threads(1)
    with small_engine(seed) as engine:
        torch.manual_seed(100 * seed + world.rank())
        for number in (1, 2):
            step(engine)
            engine.save_checkpoint(folder / f"checkpoint-{number}", position=number)


def _load_in_loop(folder: Path) -> Numbers:
    with small_engine(seed=7) as engine:
        engine.load_checkpoint(folder)
        step(engine)
        found = dict(engine.master_weights())
        for parameter, arrays in engine.state_dict()["optimizer"].items():
            found |= {f"{parameter} {name}": array.clone() for name, array in arrays.items()}
    return found


def loop(scratch: Path) -> Door:
    """A bare loop: two ranks have saved, one rank resumes."""
    for seed in (0, 1):
        launch(_on_two_ranks, {"folder": scratch / f"loop-{seed}", "seed": seed}, NUM_RANKS, folder=scratch)
    run, other = scratch / "loop-0", scratch / "loop-1"
    return Door("loop", run / "checkpoint-1", run / "checkpoint-2", other / "checkpoint-2", _load_in_loop)


def small_trainer(folder: Path, seed: int, max_steps: int) -> Any:
    """A Trainer of a small T5 with random rows, which saves after each step."""
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from offloadkit import OffloadSeq2SeqTrainer

    torch.manual_seed(seed)
    shape = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.1, decoder_start_token_id=0))
    rows = [{"input_ids": torch.randint(2, 40, (6,)), "labels": torch.randint(2, 40, (4,))} for _ in range(8)]
    args = Seq2SeqTrainingArguments(
        output_dir=str(folder), max_steps=max_steps, save_steps=1, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", disable_tqdm=True, logging_strategy="no", seed=seed,
    )  # fmt: skip
    return OffloadSeq2SeqTrainer(model=model, args=args, train_dataset=rows)


def trainer(scratch: Path) -> Door:
    """The Trainer; its weights are in HuggingFace's file."""
    for seed in (0, 1):
        made = small_trainer(scratch / f"trainer-{seed}", seed, 2)
        made.train()
        made.close()
    run, other = scratch / "trainer-0", scratch / "trainer-1"

    def load(folder: Path) -> Numbers:
        made = small_trainer(scratch / "resumed", 0, 3)
        try:
            made.train(resume_from_checkpoint=str(folder))
            found = dict(made.engine.master_weights())
            for parameter, arrays in made.engine.state_dict()["optimizer"].items():
                found |= {f"{parameter} {name}": array.clone() for name, array in arrays.items()}
        finally:
            made.close()
            shutil.rmtree(scratch / "resumed", ignore_errors=True)
        return found

    return Door("trainer", run / "checkpoint-1", run / "checkpoint-2", other / "checkpoint-2", load)


def damage(checkpoint: Path, kind: str, door: Door, draw: random.Random) -> str:
    """Damage `checkpoint`, a copy of the door's second checkpoint; returns a description."""
    path = draw.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    if kind == "flip":
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        content[at] ^= 1 << bit
        path.write_bytes(content)
        return f"bit {bit} of byte {at} of {path.name} flipped"
    if kind == "cut":
        size = draw.randrange(len(content))
        os.truncate(path, size)
        return f"{path.name} cut from {len(content)} to {size} bytes"
    if kind == "remove":
        path.unlink()
        return f"{path.name} removed"
    if kind == "add":
        name = draw.choice(
            ["random-00005.json", "states-00002-of-00003.safetensors", "model-00001-of-00001.safetensors"]
        )
        shutil.copy(path, checkpoint / name)
        return f"{path.name} copied to {name}"
    if kind == "blocks exchanged":
        size = draw.choice([1, 16, 64, 256])
        one, two = (draw.randrange(max(1, len(content) - size)) for _ in range(2))
        content[one : one + size], content[two : two + size] = content[two : two + size], content[one : one + size]
        path.write_bytes(content)
        return f"{size} bytes of {path.name} at {one} and {two} exchanged"
    if kind == "of another rank":
        one, two = draw.sample(sorted(path for path in checkpoint.rglob("*") if path.is_file()), 2)
        states = sorted(checkpoint.glob("states-*"))
        if len(states) > 1 and draw.random() < 0.5:
            one, two = states
        content = bytearray(one.read_bytes())
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
        return f"{one.name} and {two.name} exchanged"
    of = door.other if kind == "of another run" else door.first
    names = {path.name for path in of.iterdir() if path.is_file()}
    others = draw.sample(sorted(names), draw.randint(1, 3))
    if draw.random() < 0.2:  # every file except states, so the manifest matches the copied files
        others = sorted(name for name in names if not name.startswith("states-"))
    for name in others:
        shutil.copy(of / name, checkpoint / name)
    return f"{', '.join(others)} {kind}"


def run(times: int = 200, seed: int = 0, say: Callable[[str], object] = print) -> dict[str, Counter[str]]:
    """Damage checkpoints `times` times; returns the numbers of refused and of equal runs by kind of damage.

    Raises:
        AssertionError: a run continued with wrong numbers, or ended with an unnamed error.
    """
    draw, counts = random.Random(seed), {kind: Counter[str]() for kind in DAMAGES}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), contextlib.ExitStack() as quiet:
        warnings.simplefilter("ignore")
        scratch = Path(name)
        quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))  # hides plans
        quiet.enter_context(progress_bars(False))
        doors = [loop(scratch), trainer(scratch)]
        expected = [door.load(door.second) for door in doors]
        for number in range(times):
            at, kind = number % len(doors), DAMAGES[number // len(doors) % len(DAMAGES)]
            copy = shutil.copytree(doors[at].second, scratch / "damaged" / "checkpoint-2")
            done = f"{doors[at].name}: {damage(copy, kind, doors[at], draw)}"
            found, said = None, ""
            try:
                found = doors[at].load(copy)
            except OffloadkitError as error:
                said = str(error)
            if found is None:
                assert str(copy) in said, f"{done}: the error names no file ({said})"
                counts[kind]["refused"] += 1
            else:
                same = found.keys() == expected[at].keys()
                same = same and all(torch.equal(value, expected[at][name]) for name, value in found.items())
                assert same, f"{done}: SILENT, it goes on with other numbers"
                counts[kind]["bit for bit"] += 1
            shutil.rmtree(scratch / "damaged")
    for kind, count in counts.items():
        say(f"{kind}: {', '.join(f'{number} {what}' for what, number in count.items()) or 'none'}")
    say(f"{times} damages, 0 silent")
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corruption", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append a row to this table")
    given, commit = parser.parse_args(arguments), git_commit()
    torch.set_num_threads(1)
    counts = sum(run(given.times, given.seed).values(), Counter[str]())
    if given.out is not None:
        figures = {"damages": given.times, **counts, "silent": 0}
        table.append(
            [table.of_figures("damaged checkpoints", "a loop on 2 ranks, and the Trainer", figures, commit)], given.out
        )


if __name__ == "__main__":
    main()
