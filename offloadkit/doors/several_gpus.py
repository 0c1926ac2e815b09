"""`finetune(num_gpus=N)`: launch a rank per GPU, which calls `finetune` as under torchrun, and wait for the result.

This process shows one monitor with the ranks' records.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from offloadkit.distributed import world
from offloadkit.distributed.launch import launch, send_to_parent
from offloadkit.errors import ConfigError
from offloadkit.facts import hardware
from offloadkit.facts.calls import Asked, asked_by
from offloadkit.facts.telemetry import StepRecord
from offloadkit.facts.units import format_bytes
from offloadkit.monitor.monitor import Monitor, can_be_drawn
from offloadkit.offload.unread import make_real
from offloadkit.planner import Plan
from offloadkit.planner.layout import FRAMEWORK_RAM_BYTES

State = Literal["finished", "stopped", "failed"]


def check_num_gpus(num_gpus: Any, *, on_cpu: bool) -> None:
    """Raise `ConfigError` if the machine has fewer GPUs, or on the CPU no RAM for so many processes, or if a launcher
    started this process as one of several.
    """
    if type(num_gpus) is not int or num_gpus < 1:
        raise ConfigError(f"num_gpus must be a whole number >= 1, got {num_gpus!r}")
    num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
    if num_ranks > 1:
        raise ConfigError(
            f"num_gpus={num_gpus}: a launcher has started this process as one of {num_ranks}; leave num_gpus out"
        )
    found = torch.cuda.device_count()
    if not on_cpu and num_gpus > max(1, found):
        raise ConfigError(
            f"num_gpus={num_gpus}: this machine has {found} GPU{'' if found == 1 else 's'} that torch can use. Pass at "
            "most that number. use_cpu=True tries it with that many processes on the CPU"
        )
    each, total = FRAMEWORK_RAM_BYTES["cpu"], hardware.ram_limit_bytes()
    if on_cpu and num_gpus * each > total:
        raise ConfigError(
            f"num_gpus={num_gpus}: so many processes on the CPU take {format_bytes(num_gpus * each)} of RAM for Python "
            f"and torch alone, and this machine has {format_bytes(total)}. Pass at most {max(1, total // each)}"
        )


def on_several_gpus(finetune: Callable[..., Any], num_gpus: int, arguments: dict[str, Any], asked: Asked) -> Any:
    """The result of `finetune(**arguments)` on rank 0 of `num_gpus` ranks. A model that was passed in gets the trained
    weights.

    Raises `ConfigError` if an argument cannot be sent to other processes, `RankError` if a rank was killed, and the
    errors of `finetune`.
    """
    output = Path(arguments["output_dir"]).absolute()
    folder = next(each for each in (output, *output.parents) if each.is_dir())
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())  # rank 0 reports the unwritable output folder
    is_drawn = arguments["monitor"] and can_be_drawn()
    shown = SharedMonitor(num_gpus, is_drawn=is_drawn)
    given = arguments["model"] if isinstance(arguments["model"], torch.nn.Module) else None
    if given is not None:
        make_real(given.parameters())
    if arguments.get("lora"):  # the result has another model, with adapters on a copy of the weights
        given = None
    ranks_arguments = {"finetune": finetune, "is_given": given is not None, "asked": asked, **arguments}
    ranks_arguments["monitor"] = is_drawn
    try:
        (result, weights), *_ = launch(
            train_on_rank, ranks_arguments, num_gpus, folder=folder, on_message=shown.on_message, stops=shown.stops
        )
    except BaseException:
        shown.close("failed")
        raise
    if given is None:
        return result
    take_weights(given, weights)
    return replace(result, model=given)


def train_on_rank(
    finetune: Callable[..., Any], is_given: bool, asked: Asked, **arguments: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result and, if the model was passed in, its weights; (None, {}) on ranks other than 0."""
    with asked_by(asked):
        result = finetune(**arguments)
    if world.rank():
        return None, {}
    return (replace(result, model=None), result.model.state_dict()) if is_given else (result, {})


def take_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of `model` with the trained ones, keeping devices but not dtypes."""
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if name in weights:
            own.data = weights[name].to(own.device)


class RankMonitor(Monitor):
    def __init__(self, plan: Plan, *, baseline_seconds: float | None, is_drawn: bool) -> None:
        """`is_drawn`: whether the launching process draws."""
        super().__init__(plan, baseline_seconds=baseline_seconds, display="none")
        self._is_drawn = is_drawn
        self._sent_plan: Plan | None = None

    @property
    def is_drawn(self) -> bool:
        return self._is_drawn

    def start(self) -> RankMonitor:
        super().start()
        if world.rank() == 0:
            send_to_parent(
                ("begins", self.plan, self.total_steps, self.steps_before, self.baseline_seconds, self.machine)
            )
        self.telemetry.subscribe(self._tell)
        return self

    def evaluated(self, step: int, loss: float) -> None:
        super().evaluated(step, loss)
        if world.rank() == 0:
            send_to_parent(("evaluated", step, loss))

    def reached(self, epoch: float, num_epochs: int | None = None) -> None:
        super().reached(epoch, num_epochs)
        if world.rank() == 0:
            send_to_parent(("reached", epoch, num_epochs))

    def _tell(self, record: StepRecord) -> None:
        if world.rank() == 0 and self.telemetry.plan is not self._sent_plan:
            self._sent_plan = self.telemetry.plan  # the plan has changed
            send_to_parent(("plans", self._sent_plan))
        send_to_parent(("did", record))

    def close(self, state: State | None = None) -> None:
        if world.rank() == 0 and not self._ended.is_set():
            send_to_parent(("ends", state or "finished"))
        super().close(state)


class SharedMonitor:
    """One monitor for all ranks, in the launching process.

    Attributes:
        monitor: None until rank 0 starts training.
    """

    def __init__(self, num_ranks: int, *, is_drawn: bool) -> None:
        self._num_ranks, self._is_drawn = num_ranks, is_drawn
        self.monitor: Monitor | None = None
        self._steps: dict[int, dict[int, StepRecord]] = {}

    def on_message(self, rank: int, message: tuple[Any, ...]) -> None:
        kind, *what = message
        if kind == "begins":
            plan, total_steps, steps_before, baseline_seconds, machine = what
            options: dict[str, Any] = {"total_steps": total_steps, "baseline_seconds": baseline_seconds}
            self.monitor = Monitor(plan, display="auto" if self._is_drawn else "none", **options)
            self.monitor.steps_before, self.monitor.machine = steps_before, machine
            self.monitor.start()
        elif kind == "plans" and self.monitor is not None:
            self.monitor.plan = what[0]
        elif kind in ("evaluated", "reached"):
            if self.monitor is not None:
                getattr(self.monitor, kind)(*what)
        elif kind == "ends":
            self.close(what[0])
        else:
            self._add(rank, what[0])

    def _add(self, rank: int, record: StepRecord) -> None:
        """Show a step once all ranks have sent it: rank 0's record with the tokens of all ranks and the mean loss."""
        of_step = self._steps.setdefault(record.step, {})
        of_step[rank] = record
        if self.monitor is None or len(of_step) < self._num_ranks:
            return
        del self._steps[record.step]
        tokens = [each.num_tokens for each in of_step.values()]
        self.monitor.ranks = of_step
        self.monitor.telemetry.add(
            replace(
                of_step[0],
                loss=sum(each.loss for each in of_step.values()) / self._num_ranks,
                num_tokens=None if None in tokens else sum(filter(None, tokens)),
            )
        )

    def stops(self) -> bool:
        stop = None if self.monitor is None else self.monitor.stop
        return stop is not None and stop.requested and not stop.ends_process  # `launch` forwards other signals

    def close(self, state: State) -> None:
        if self.monitor is not None:
            self.monitor.close(state)
