"""Trainer callbacks: progress, stopping on request, the monitor."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from offloadkit.errors import TrainingStoppedError
from offloadkit.facts.stopping import Stop
from offloadkit.facts.units import rounded
from offloadkit.hf.quiet import is_live, progress_bars
from offloadkit.monitor.monitor import Monitor


class StepEndCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Calls functions after each step, before its checkpoint is written."""

    def __init__(self, *calls: Callable[[], None]) -> None:
        self._calls = calls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for call in self._calls:
            call()


_SHOWN = {"loss": "loss", "grad_norm": "norm", "learning_rate": "lr"}


def show_progress(trainer: Trainer, *, monitored: bool = False) -> None:
    """Replace the Trainer's progress bar and printed dicts by `TrainingProgress`, on rank 0.

    Steps are shown by the monitor if `monitored`, by a bar if the output is live, or by lines.
    """
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # another callback in notebooks
    trainer.remove_callback(PrinterCallback)
    if not trainer.is_world_process_zero():
        return
    bar = not trainer.args.disable_tqdm and is_live()
    trainer.add_callback(TrainingProgress("monitor" if monitored else "bar" if bar else "lines"))


class TrainingProgress(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Shows steps, loss, gradient norm, learning rate and evaluation loss; with a monitor only evaluation loss."""

    def __init__(self, steps: Literal["bar", "lines", "monitor"]) -> None:
        self._bar: Any = None
        self._steps = steps
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        if self._steps == "bar":
            self._close()  # the old bar, if training restarts from a checkpoint
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
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, line: str) -> None:
        if self._bar is not None:
            tqdm.write(line)
        else:
            print(line, flush=True)


_ASKED, _DUE, _ENDS, _NO_TIME = 1, 2, 4, 8


class StopCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends training after the current step on request (monitor or signal), and saves every `save_minutes`.

    On a request it saves the checkpoint that an uninterrupted run would have after this step. It also saves if another
    callback stops training, unless `save_strategy="no"` or `load_best_model_at_end`, which needs the epoch's
    evaluation. After SIGTERM or SIGHUP it saves if the time left suffices, and skips evaluation.

    Add this callback last, because it overrides decisions of earlier callbacks.

    Attributes:
        stop: the request, from any rank.
        stopped: whether the request ended training.
        stop_signal: SIGTERM or SIGHUP if a signal ended training, else None.
        evaluation_skipped: an evaluation was skipped because of a signal.
        was_complete: the resumed checkpoint was at the last step, so no step ran.
    """

    def __init__(
        self,
        stop: Stop,
        any_flag: Callable[[int], int],
        *,
        grace_seconds: float = 25.0,
        save_minutes: float | None = None,
        save_seconds: Callable[[], float] = lambda: 0.0,
        resumes_weights: bool = False,
    ) -> None:
        """
        Args:
            any_flag: bitwise-or all-reduce of flags; every rank calls it.
            grace_seconds, save_minutes: see `OffloadConfig`.
            save_seconds: returns the seconds of the slowest save so far.
            resumes_weights: a checkpoint of the weights alone (`save_only_model`) can be resumed.
        """
        self.stop, self._any_flag = stop, any_flag
        self._grace_seconds, self._save_minutes, self._save_seconds = grace_seconds, save_minutes, save_seconds
        self._resumes_weights = resumes_weights
        self._saved_at = time.monotonic()
        self._is_cut_short = False
        self.stopped = self.evaluation_skipped = self.was_complete = False
        self.stop_signal: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_cut_short = self.stopped = self.evaluation_skipped = self.was_complete = False
        self.stop_signal = None
        self._saved_at = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop.is_polled = True  # until here a signal may abort the first step; now that would lose a step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_at = time.monotonic()

    def has_time_to_save(self) -> bool:
        if self.stop.signal is None:
            return True
        return self._save_seconds() <= self._grace_seconds - (time.monotonic() - self.stop.signal[1])

    def _flags(self, args: Any) -> int:
        flags = _ASKED if self.stop.requested else 0
        if self.stop.ends_process:
            flags |= _ENDS | (0 if self.has_time_to_save() else _NO_TIME)
        minutes = (time.monotonic() - self._saved_at) / 60
        if self._save_minutes is not None and args.process_index == 0 and minutes >= self._save_minutes:
            flags |= _DUE
        return self._any_flag(flags)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        flags = self._flags(args)
        if flags & _DUE:
            control.should_save = True
        if flags & _ENDS:
            self._end(args, state, control, saves=not flags & _NO_TIME)
            return
        asked = bool(flags & _ASKED)
        by_others = control.should_training_stop and args.save_strategy != "no" and not args.load_best_model_at_end
        if not (asked or by_others) or state.global_step >= state.max_steps:
            return
        self._is_cut_short = not float(state.epoch).is_integer()
        if not asked:  # by another callback
            control.should_save |= self._is_cut_short
            return
        self.stopped = control.should_training_stop = True
        control.should_save = self._is_cut_short
        self._keep_it(args, state)

    def _end(self, args: Any, state: Any, control: Any, *, saves: bool) -> None:
        here = self.stop.signal
        self.stop_signal = signal.SIGTERM if here is None else here[0]
        self.stopped = self._is_cut_short = control.should_training_stop = True
        self.evaluation_skipped = control.should_evaluate
        control.should_evaluate, control.should_save = False, saves
        self._keep_it(args, state)

    def _keep_it(self, args: Any, state: Any) -> None:
        args.save_only_model &= self._resumes_weights
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            args.save_total_limit = 2  # with 1 only the best model's checkpoint would be kept

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer also calls this for an epoch that was cut short; its checkpoint is already written. At a real end
        # of an epoch the checkpoint follows the evaluation, which may draw random numbers.
        if self._is_cut_short or self.was_complete:
            control.should_save = control.should_evaluate = False
        elif self.stopped:
            control.should_save = True


def stopped_by(trainer: Any, number: int) -> TrainingStoppedError:
    error = TrainingStoppedError(f"{signal.Signals(number).name} has ended training. {progress_of(trainer)}")
    error.signal = number
    return error


def progress_of(trainer: Any) -> str:
    """Steps done, and the checkpoint from which training can be resumed."""
    newest = None if trainer.engine is None else trainer.engine.last_checkpoint
    done = f"{trainer.state.global_step} of {trainer.state.max_steps} steps were done"
    if newest is None:
        return f"{done}, and there is no checkpoint"
    return f"{done}; the newest checkpoint is {newest}: resume from it (finetune: resume=True, --resume)"


class MonitorCallback(StopCallback):
    """Starts the monitor when training begins, and ends training when the monitor requests it.

    Progress bars of libraries are hidden while the monitor is drawn, until `close`.
    """

    def __init__(self, monitor: Monitor, any_flag: Callable[[int], int], **options: Any) -> None:
        super().__init__(monitor.stop, any_flag, **options)
        self._monitor, self._quiet = monitor, ExitStack()

    def close(self) -> None:
        self._quiet.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_train_begin(args, state, control, **more)
        self._monitor.total_steps, self._monitor.steps_before = state.max_steps, state.global_step
        if self._monitor.is_drawn:
            self._quiet.enter_context(progress_bars(False))
        self._monitor.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._monitor.reached(state.epoch, None if args.max_steps > 0 else state.num_train_epochs)
        super().on_step_end(args, state, control, **more)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is not None and "eval_loss" in logs:
            self._monitor.evaluated(state.global_step, logs["eval_loss"])


def _numbers(logs: dict[str, Any]) -> str:
    return "  ".join(f"{short} {rounded(logs[name])}" for name, short in _SHOWN.items() if name in logs)
