"""What training shows while it runs: the monitor, or a bar where one can be redrawn, or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from offloadkit.hf.quiet import is_live, progress_bars
from offloadkit.monitor.monitor import Monitor


class AfterAStep(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Calls a function after each step, before a checkpoint of it is written."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._call()


_SHOWN = {"loss": "loss", "grad_norm": "norm", "learning_rate": "lr"}


def show_progress(trainer: Trainer, *, monitored: bool = False) -> None:
    """Replace the Trainer's own bar and printed dicts by `TrainingProgress`, on rank 0.

    Args:
        monitored: whether a monitor shows the steps.
    """
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # another one in a notebook
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_world_process_zero():
        return
    bar = not trainer.args.disable_tqdm and is_live()
    trainer.add_callback(TrainingProgress("monitor" if monitored else "bar" if bar else "lines"))


class TrainingProgress(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows steps, loss, gradient norm, learning rate and evaluation losses; beside a monitor the last alone."""

    def __init__(self, steps: Literal["bar", "lines", "monitor"]) -> None:
        self._bar: Any = None
        self._steps = steps
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        if self._steps == "bar":
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
        elif "loss" in logs and self._steps == "lines":
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


class AsksTheMonitor(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Starts the monitor when the weights are in place, and ends training when the monitor requests it.

    Training then writes the checkpoint that an uninterrupted run would write after the current step. So it does where
    another callback ends training after a step, unless no checkpoints are wanted, or the best model: then that epoch's
    evaluation counts. Add this callback last: those before it decide what happens at the end of a step and of an epoch.
    While a monitor is drawn, libraries show no progress bars; `close` ends that.

    Attributes:
        stopped: whether training ended by that request.
    """

    def __init__(self, monitor: Monitor, any_rank: Callable[[bool], bool]) -> None:
        """any_rank: whether something is so on any rank: an interrupt may reach one of them a step earlier."""
        self._monitor, self._any_rank = monitor, any_rank
        self._quiet = ExitStack()
        self._is_cut_short = False
        self.stopped = False

    def close(self) -> None:
        """Show progress bars again as before."""
        self._quiet.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_cut_short = self.stopped = False
        self._monitor.total_steps, self._monitor.steps_before = state.max_steps, state.global_step
        if self._monitor.is_drawn:
            self._quiet.enter_context(progress_bars(False))
        self._monitor.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        asked = self._any_rank(self._monitor.stop_requested)
        by_others = control.should_training_stop and args.save_strategy != "no" and not args.load_best_model_at_end
        if not (asked or by_others) or state.global_step >= state.max_steps:
            return
        self._is_cut_short = not float(state.epoch).is_integer()
        if not asked:  # by another callback
            control.should_save |= self._is_cut_short
            return
        self.stopped = control.should_training_stop = True
        control.should_save = self._is_cut_short
        args.save_only_model = False  # a checkpoint of weights alone cannot be resumed
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            args.save_total_limit = 2  # else only the best model's checkpoint would be kept

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer calls this for an epoch that is cut short, too; its checkpoint is written already. At a true end
        # the checkpoint follows the evaluation, as in an uninterrupted run: evaluating draws random numbers.
        if self._is_cut_short:
            control.should_save = control.should_evaluate = False
        elif self.stopped:
            control.should_save = True


def _numbers(logs: dict[str, Any]) -> str:
    return "  ".join(f"{short} {logs[name]:.3g}" for name, short in _SHOWN.items() if name in logs)
