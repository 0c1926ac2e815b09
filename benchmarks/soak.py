"""Memory growth of a run: many steps of a small model, and KiB of RSS a step.

python -m benchmarks.soak                       # 20,000 steps of a loop on the CPU
python -m benchmarks.soak --door trainer --steps 20000

The slope is a least-squares fit over the second half of the run, because bounded caches fill in the first half.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from benchmarks import table
from benchmarks.run import git_commit
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement

SAMPLES = 200
"""Number of RSS samples over all steps."""


def slope_kib(rss: list[int], steps_between: int) -> float:
    """KiB a step, by least squares over the second half of the samples (bytes)."""
    half = np.array(rss[len(rss) // 2 :]) / 1024
    return float(np.polyfit(np.arange(len(half)) * steps_between, half, 1)[0])


def _sample(rss: list[int]) -> None:
    if not rss:
        gc.freeze()  # imported modules; otherwise a collection takes longer than the steps
    gc.collect()
    rss.append(int(psutil.Process().memory_info().rss))


def loop(num_steps: int, folder: Path) -> list[int]:
    """RSS while a bare loop trains, with weights in RAM."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    rows, rss = torch.randn(4, 16), list[int]()
    config = OffloadConfig(placement=Placement(weights="ram", activations="checkpoint"))
    with OffloadEngine(model, config, device="cpu") as engine:
        for step in range(num_steps):
            engine.backward(engine(rows).square().mean())
            engine.step()
            if step % (num_steps // SAMPLES) == 0:
                _sample(rss)
    return rss


def trainer(num_steps: int, folder: Path) -> list[int]:
    """RSS while a Trainer trains, logging, evaluating and saving now and then."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

    from offloadkit import OffloadTrainer

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = [torch.randint(3, 40, (8,)) for _ in range(64)]
    data = [{"input_ids": each, "labels": each.clone()} for each in ids]
    rss = list[int]()

    class Sample(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (num_steps // SAMPLES) == 0:
                _sample(rss)

    # log_history is the Trainer's own and grows by each logged line: it is left out here.
    args = TrainingArguments(
        str(folder), max_steps=num_steps, report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        save_steps=num_steps // 4, save_total_limit=1, per_device_train_batch_size=4,
    )  # fmt: skip
    OffloadTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=40, **shape)), args=args, train_dataset=data, callbacks=[Sample()]
    ).train()
    return rss


def main(arguments: list[str] | None = None) -> None:
    """Measure the growth of memory and append it to the table.

    Raises:
        AssertionError: memory grows by more than allowed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=["loop", "trainer"], default="loop")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--most", type=float, default=0.1, help="KiB a step that are allowed")
    parser.add_argument("--out", type=Path, help="append a row to this table")
    chosen, commit = parser.parse_args(arguments), git_commit()
    with tempfile.TemporaryDirectory() as folder:
        rss = {"loop": loop, "trainer": trainer}[chosen.door](chosen.steps, Path(folder))
    slope = slope_kib(rss, chosen.steps // SAMPLES)
    first, last = (round(each / 2**20) for each in (rss[0], rss[-1]))
    print(f"{chosen.door}: {chosen.steps} steps, {first} to {last} MiB, {slope:.3f} KiB a step")
    if chosen.out is not None:
        figures = {"steps": chosen.steps, "MiB at first": first, "MiB at last": last, "KiB a step": round(slope, 3)}
        table.append([table.of_figures("soak", chosen.door, figures, commit)], chosen.out)
    assert slope <= chosen.most, f"memory grows by {slope:.3f} KiB a step, and {chosen.most} are allowed"


if __name__ == "__main__":
    main()
