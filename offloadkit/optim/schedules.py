"""Learning rates of DeepSpeed's schedules.

A schedule starts at iteration -1, and every `step()` advances it by one, so the first two updates use the initial rate
of a warmup. The formulas come from DeepSpeed 0.19's `runtime/lr_schedules.py`; `tests/optim/test_schedules.py` compares
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

import torch
from torch.optim import Optimizer

from offloadkit.errors import ConfigError, shown

Rates = Callable[[int], list[float]]


class Schedule:
    """A schedule of DeepSpeed: `step()`, after every update, sets learning rates, and first betas if cycled."""

    def __init__(self, optimizer: Optimizer, rates: Rates, momenta: Rates | None = None) -> None:
        """`momenta`: schedule of the first betas. The second betas are then 0.99, as in DeepSpeed."""
        self.optimizer, self.last_batch_iteration = optimizer, -1
        self._rates, self._momenta = rates, momenta
        self._write()

    def get_lr(self) -> list[float]:
        return self._rates(self.last_batch_iteration)

    get_last_lr = get_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The iteration. The optimizer's state holds the learning rates."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = int(state["last_batch_iteration"])

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        if self._momenta is not None:
            momenta = self._momenta(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)


def schedule_named(name: str, optimizer: Optimizer, arguments: dict[str, Any]) -> Any:
    """Create a schedule of DeepSpeed or torch.optim.lr_scheduler by its name in ds_config.json.

    Raises:
        ConfigError: the name is unknown, or the schedule does not take these arguments.
    """
    make = _SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not callable(make):
        raise ConfigError(f"no schedule {name!r}: use one of {', '.join(_SCHEDULES)}, or of torch.optim.lr_scheduler")
    try:
        if name in _SCHEDULES:
            _check_arguments(make, arguments)
        return make(optimizer, **arguments)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"the schedule {name} does not take {shown(arguments)}: {error}") from error


def _check_arguments(make: Callable[..., Schedule], arguments: dict[str, Any]) -> None:
    """Raise `ValueError` for the first argument of a wrong type. Unknown names are ignored."""
    for name, hint in get_type_hints(make).items():
        if name not in arguments:
            continue
        value, kinds = arguments[name], get_args(hint) or (hint,)
        if (value is None and type(None) in kinds) or (isinstance(value, str) and str in kinds):
            continue
        many = isinstance(value, list | tuple) and len(kinds) > 1
        numbers = value if many else [value]
        if bool in kinds and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {shown(value)}")
        fine = all(isinstance(each, int | float) and -(2**63) < each < 2**63 for each in numbers)
        if not fine or (bool not in kinds and any(isinstance(each, bool) for each in numbers)):
            raise ValueError(f"{name} must be {_WORDS.get(hint, 'a number')}, got {shown(value)}")
        if float not in kinds and bool not in kinds and type(value) is not int:
            raise ValueError(f"{name} must be a whole number, got {shown(value)}")


_WORDS: dict[Any, str] = {int: "a whole number", float | Sequence[float]: "a number, or one for each group"}


def _by_group(optimizer: Optimizer, value: float | Sequence[float], name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * groups  # type: ignore[list-item]
    if len(value) != groups:
        raise ValueError(f"{name} has {len(value)} values, the optimizer {groups} parameter groups")
    return list(value)


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    if kind == "linear":
        return iteration / num_steps
    return (1 / math.log(num_steps)) * math.log(iteration + 1)


def _check_warmup(num_steps: int, kind: str) -> int:
    if type(num_steps) is not int or num_steps < 1:
        raise ValueError(f"warmup_num_steps must be a whole number >= 1, got {shown(num_steps)}")
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', got {shown(kind)}")
    return max(2, num_steps)


def _warmup_lr(
    optimizer: Optimizer,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    highest = [float(group["lr"]) for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
    return _warmed_up(optimizer, warmup_min_lr, highest, warmup_num_steps, warmup_type, lambda _iteration: 1.0)


def _warmup_decay_lr(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    length = max(1.0, total_num_steps - max(2, warmup_num_steps))

    def after(iteration: int) -> float:
        return max(0.0, (total_num_steps - iteration) / length)

    return _warmed_up(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, after)


def _warmed_up(
    optimizer: Optimizer,
    least: float | Sequence[float],
    highest: float | Sequence[float],
    warmup_num_steps: int,
    warmup_type: str,
    after: Callable[[int], float],
) -> Schedule:
    """Warm up, then follow `after(iteration)`: the fraction between the lowest and the highest rate."""
    num_steps = _check_warmup(warmup_num_steps, warmup_type)
    lows, highs = _by_group(optimizer, least, "warmup_min_lr"), _by_group(optimizer, highest, "warmup_max_lr")

    def rates(iteration: int) -> list[float]:
        if iteration < 0:
            return lows
        share = _warmup(iteration, num_steps, warmup_type) if iteration < num_steps else after(iteration)
        return [low + (high - low) * share for low, high in zip(lows, highs, strict=True)]

    return Schedule(optimizer, rates)


def _warmup_cosine_lr(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    """Scale the groups' rates by a warmup and then by half a period of a cosine."""
    num_steps = _check_warmup(warmup_num_steps, warmup_type)
    own = [float(group["lr"]) for group in optimizer.param_groups]

    def rates(iteration: int) -> list[float]:
        if iteration < 0:
            ratio = 0.0
        elif iteration < num_steps:
            ratio = warmup_min_ratio + (1 - warmup_min_ratio) * _warmup(iteration, num_steps, warmup_type)
        else:
            progress = min(1.0, (iteration - num_steps + 1) / max(1, total_num_steps - num_steps))
            ratio = max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
        return [rate * ratio for rate in own]

    return Schedule(optimizer, rates)


def _lr_range_test(
    optimizer: Optimizer,
    lr_range_test_min_lr: float | Sequence[float] = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    """Rates that rise without end (Smith, "A disciplined approach to neural network hyper-parameters")."""
    if type(lr_range_test_step_size) is not int or lr_range_test_step_size < 1:
        raise ValueError(f"lr_range_test_step_size must be a whole number >= 1, got {shown(lr_range_test_step_size)}")
    least = _by_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")

    def rates(iteration: int) -> list[float]:
        interval = (iteration + 1) / lr_range_test_step_size
        if lr_range_test_staircase:
            interval = math.floor(interval)
        return [rate * (1 + lr_range_test_step_rate * interval) for rate in least]

    return Schedule(optimizer, rates)


def _one_cycle(
    optimizer: Optimizer,
    cycle_min_lr: float | Sequence[float],
    cycle_max_lr: float | Sequence[float],
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float | Sequence[float] = 0.8,
    cycle_max_mom: float | Sequence[float] = 0.9,
    decay_mom_rate: float = 0.0,
) -> Schedule:
    """One cycle of rates up and down with momenta in the opposite direction, then a decay (Smith, as above)."""
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if first <= 0 or second < 0:
        raise ValueError("cycle_first_step_size must be positive, and cycle_second_step_size not negative")
    up, down = cycle_first_stair_count, cycle_second_stair_count
    stairs = (up, up if down is None else down)
    total, ratio = first + second, first / (first + second)
    least = _by_group(optimizer, cycle_min_lr, "cycle_min_lr")
    highest = _by_group(optimizer, cycle_max_lr, "cycle_max_lr")
    low = _by_group(optimizer, cycle_min_mom, "cycle_min_mom")
    high = _by_group(optimizer, cycle_max_mom, "cycle_max_mom")

    def share(iteration: int) -> float:
        """Position in the cycle, from 0 (lowest rate) to 1 (highest rate)."""
        at = iteration + 1
        x = 1.0 + at / total - math.floor(1 + at / total)
        rising = x <= ratio
        found = x / ratio if rising else (x - 1) / (ratio - 1)
        count = stairs[0] if rising else stairs[1]
        if count > 0:
            inside = at % total
            position = inside * count / first if inside <= first else (total - inside) * count / second
            found = math.floor(position) / count
        return found

    def rates(iteration: int) -> list[float]:
        if iteration < total:
            part = share(iteration)
            return [start + (end - start) * part for start, end in zip(least, highest, strict=True)]
        if not decay_step_size or not decay_lr_rate:
            return least
        fall = 1 + decay_lr_rate * (iteration - total + 1) / decay_step_size
        return [rate / fall for rate in least]

    def momenta(iteration: int) -> list[float]:
        if iteration < 0:
            return low
        if iteration < total:
            part = share(iteration)
            return [end - (end - start) * part for start, end in zip(low, high, strict=True)]
        if not decay_step_size or not decay_mom_rate:
            return high
        rise = 1 + decay_mom_rate * (iteration - total + 1) / decay_step_size
        return [momentum * rise for momentum in high]

    return Schedule(optimizer, rates, momenta if cycle_momentum else None)


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "LRRangeTest": _lr_range_test,
    "OneCycle": _one_cycle,
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
}
