"""DeepSpeed's schedules by their formulas, and by DeepSpeed itself if it is installed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.errors import ConfigError
from offloadkit.optim.schedules import schedule_named

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 1e-4, "warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_min_lr": [1e-5, 2e-5], "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 25, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 25, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 7}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": [1e-3, 2e-3],
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 9,
            "cycle_first_stair_count": 3,
            "decay_step_size": 2,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
            "cycle_min_mom": 0.7,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 5, "cycle_momentum": False}),
]


def optimizer() -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 3e-3}], lr=1e-3)


def values(schedule: Any, groups: list[dict[str, Any]], steps: int = 30) -> list[list[Any]]:
    """The groups' values before each update."""
    found = []
    for _ in range(steps):
        found.append([(group["lr"], tuple(group["betas"])) for group in groups])
        schedule.step()
    return found


def test_a_logarithmic_warmup_by_its_formula() -> None:
    """lr = min + (max - min) * log(n + 1) / log(warmup_num_steps); DeepSpeed's first two updates have n = 0."""
    own = optimizer()
    schedule = schedule_named("WarmupLR", own, {"warmup_max_lr": 1e-4, "warmup_num_steps": 1000})
    rates = [rate for ((rate, _), _) in values(schedule, own.param_groups, 1005)]
    expected = [1e-4 * math.log(max(update, 1)) / math.log(1000) for update in range(1001)]
    assert rates[:1001] == pytest.approx(expected)
    assert rates[1001:] == [1e-4] * 4
    assert schedule.get_last_lr() == [1e-4, 1e-4]


def test_a_decay_ends_at_the_least_rate() -> None:
    own = optimizer()
    schedule = schedule_named("WarmupDecayLR", own, {"total_num_steps": 20, "warmup_num_steps": 10})
    schedule.step(15)
    assert schedule.get_lr() == [5e-4, 5e-4]
    schedule.step(25)
    assert schedule.get_lr() == [0, 0]


def test_a_range_test_rises_in_stairs_or_evenly() -> None:
    """Update n has min * (1 + n / step_size), the quotient rounded down for stairs."""
    for stairs, expected in ((True, [1, 1, 1, 2, 2, 2]), (False, [1, 4 / 3, 5 / 3, 2, 7 / 3, 8 / 3])):
        own = optimizer()
        arguments = {"lr_range_test_step_size": 3, "lr_range_test_staircase": stairs}
        schedule = schedule_named("LRRangeTest", own, {"lr_range_test_min_lr": 1e-4, **arguments})
        rates = [rate for (rate, _), _ in values(schedule, own.param_groups, 6)]
        assert [rate / 1e-4 for rate in rates] == pytest.approx(expected)


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    first, second = (schedule_named(*SCHEDULES[7][:1], optimizer(), SCHEDULES[7][1]) for _ in range(2))
    first.step(4)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_torchs_schedules_by_name() -> None:
    schedule = schedule_named("StepLR", optimizer(), {"step_size": 1})
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("WarmUpLR", {}, "no schedule 'WarmUpLR': use one of LRRangeTest, OneCycle, WarmupLR"),
        ("WarmupLR", {"warmup_steps": 3}, "does not take .*'warmup_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "whole number >= 1, got 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "'log' or 'linear', got 'cosine'"),
        ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "3 values, the optimizer 2 parameter groups"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be positive"),
    ],
)
def test_a_schedule_without_a_meaning(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_named(name, optimizer(), arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), SCHEDULES)
def test_schedules_equal_deepspeeds(name: str, arguments: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime import lr_schedules

    own, theirs = optimizer(), optimizer()
    found = values(schedule_named(name, own, arguments), own.param_groups)
    assert found == values(getattr(lr_schedules, name)(theirs, **arguments), theirs.param_groups)
