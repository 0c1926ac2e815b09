"""What training shows while it runs: a bar on a terminal or in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from offloadkit.hf.bars import is_live

_SHOWN = {"loss": "loss", "grad_norm": "norm", "learning_rate": "lr"}


def show_progress(trainer: Trainer) -> None:
    """Put `TrainingProgress` in the place of the Trainer's own bar and printed dicts."""
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainingProgress(bar=not trainer.args.disable_tqdm and is_live()))


class TrainingProgress(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Steps done, loss, gradient norm, learning rate, and evaluation losses."""

    def __init__(self, *, bar: bool) -> None:
        self._bar: Any = None
        self._shows_bar = bar
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        if self._shows_bar:
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc="training", unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            self._say(f"  after step {state.global_step}: evaluation loss {logs['eval_loss']:.4f}")
        elif "loss" in logs and self._bar is not None:
            self._bar.set_postfix_str(_numbers(logs))
        elif "loss" in logs:
            seconds = time.perf_counter() - self._began
            self._say(f"  step {state.global_step}/{state.max_steps}  {_numbers(logs)}  {seconds:.0f} s")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, line: str) -> None:
        if self._bar is not None:
            tqdm.write(line)
        else:
            print(line, flush=True)


def _numbers(logs: dict[str, Any]) -> str:
    return "  ".join(f"{short} {logs[name]:.3g}" for name, short in _SHOWN.items() if name in logs)
