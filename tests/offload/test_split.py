"""Layers move from the processor that ends later to the other one until both end together."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from offloadkit.offload.update import MAX_AVERAGED, MAX_MOVES, WARM_UP, StepBalancer, StepTimes


class Point:
    """An event with a given time."""

    def __init__(self, at: float, done: bool = True) -> None:
        self.at, self._done = at, done

    def done(self) -> bool:
        return self._done

    def reach(self) -> None:
        self._done = True

    def seconds_since(self, earlier: Point) -> float:
        return self.at - earlier.at


def layers(num: int, on_gpu: int, switchable: bool = True) -> list[Any]:
    return [
        SimpleNamespace(switchable=switchable, on_gpu=index < on_gpu, layer=SimpleNamespace(numel=100 + index % 3))
        for index in range(num)
    ]


def took(model: list[Any], cpu: float, gpu: float, done: bool = True) -> StepTimes:
    """The times of an update of these layers at `cpu` and `gpu` seconds an element."""
    by_gpu = sum(layer.layer.numel for layer in model if layer.on_gpu)
    by_cpu = sum(layer.layer.numel for layer in model if not layer.on_gpu)
    events: Any = (Point(1.0), Point(1.0 + gpu * by_gpu, done)) if by_gpu else None
    return StepTimes(cpu * by_cpu, by_cpu, events, by_gpu)


def run(model: list[Any], cpu: float, gpu: float, updates: int = 40) -> tuple[list[int], StepBalancer]:
    """Number of layers stepped by the GPU in each update."""
    split, found = StepBalancer(), []
    for _ in range(updates):
        split.correct(model)
        found.append(sum(layer.on_gpu for layer in model))
        split.add(took(model, cpu, gpu))
    return found, split


@pytest.mark.parametrize("start", [0, 10, 30, 48])
@pytest.mark.parametrize(("cpu", "gpu", "balanced"), [(2e-3, 1e-3, 32), (1e-3, 1e-3, 24), (1e-3, 5e-3, 8)])
def test_both_processors_end_together(start: int, cpu: float, gpu: float, balanced: int) -> None:
    model = layers(48, start)
    found, _ = run(model, cpu, gpu)
    assert found[: WARM_UP + 1] == [start] * (WARM_UP + 1)
    assert all(abs(after - before) <= MAX_MOVES for before, after in pairwise(found))
    assert abs(found[-1] - balanced) <= 1
    assert len(set(found[20:])) == 1


def test_noise_moves_nothing_once_both_end_together() -> None:
    model = layers(48, 24)
    _, split = run(model, 1e-3, 1e-3, 10)
    before = [layer.on_gpu for layer in model]
    for gpu in (1.12e-3, 0.9e-3, 1.05e-3, 0.95e-3) * 5:
        split.add(took(model, 1e-3, gpu))
        split.correct(model)
        assert [layer.on_gpu for layer in model] == before
    split.add(took(model, 1e-3, 4e-3))
    split.correct(model)
    assert sum(layer.on_gpu for layer in model) < 24


@pytest.mark.parametrize("start", [0, 80])
def test_many_layers_move_though_one_alone_is_not_worth_it(start: int) -> None:
    found, _ = run(layers(80, start), 2e-3, 1e-3)
    assert abs(found[-1] - 53) <= 2
    assert len(set(found[25:])) == 1


def test_a_small_difference_that_stays_moves_a_layer() -> None:
    model, split = layers(48, 24), StepBalancer()
    for _ in range(WARM_UP + 1):
        split.add(took(model, 1e-3, 1.1e-3))
    split.correct(model)
    assert sum(layer.on_gpu for layer in model) == 24
    split.add(took(model, 1e-3, 1.1e-3))
    split.correct(model)
    assert sum(layer.on_gpu for layer in model) == 23


def test_a_difference_that_is_no_noise_moves_layers_at_once() -> None:
    model, split = layers(48, 24), StepBalancer()
    for _ in range(WARM_UP + 1):
        split.add(took(model, 1e-3, 1.25e-3))
    split.correct(model)
    assert sum(layer.on_gpu for layer in model) < 24


@pytest.mark.parametrize(("gpu", "moved"), [(1.015e-3, 0), (1.06e-3, 3)])
def test_a_gain_below_two_percent_moves_nothing(gpu: float, moved: int) -> None:
    model = layers(200, 100)
    for layer in model:
        layer.layer.numel = 100
    found, _ = run(model, 1e-3, gpu, WARM_UP + 3)
    assert found[-1] == 100 - moved


def test_only_the_newest_updates_count() -> None:
    model = layers(48, 24)
    _, split = run(model, 1e-3, 1e-3, 20)
    for _ in range(MAX_AVERAGED):
        split.add(took(model, 1e-3, 1.1e-3))
        split.correct(model)
    assert sum(layer.on_gpu for layer in model) == 23


def test_an_update_that_was_waited_for_says_nothing_unless_all_are() -> None:
    model = layers(48, 24)
    _, split = run(model, 1e-3, 1e-3, 10)
    for _ in range(3):
        for alone in (False, False, True):
            split.add(took(model, 1e-3, 0.5e-3 if alone else 1e-3))
            if alone:
                split.disregard_newest()
            split.correct(model)
            assert sum(layer.on_gpu for layer in model) == 24
    found = []
    for _ in range(20):
        split.add(took(model, 1e-3, 0.5e-3))
        split.disregard_newest()
        split.correct(model)
        found.append(sum(layer.on_gpu for layer in model))
    assert abs(found[-1] - 32) <= 1


def test_waiting_twice_disregards_one_update_the_newest() -> None:
    model, split = layers(48, 24), StepBalancer()
    split.disregard_newest()  # there is no update yet
    for gpu in (1e-3,) * (WARM_UP + 2) + (2e-3, 0.1e-3):
        split.add(took(model, 1e-3, gpu, done=False))
    split.disregard_newest()
    split.disregard_newest()
    for before in split.unread:
        assert before.gpu is not None
        before.gpu[1].reach()  # type: ignore[attr-defined]
    split.correct(model)  # without the newest update, the GPU takes a third longer than the CPU
    assert sum(layer.on_gpu for layer in model) < 24


def test_the_last_of_equal_layers_moves_first() -> None:
    model = layers(12, 12)
    for layer in model:
        layer.layer.numel = 100
    found, _ = run(model, 1e-3, 1e-3, WARM_UP + 2)
    assert found[-1] == 12 - MAX_MOVES
    assert [layer.on_gpu for layer in model] == [True] * 8 + [False] * 4


def test_layers_that_one_processor_alone_can_step_stay() -> None:
    model = [*layers(6, 6, switchable=False), *layers(2, 0)]
    found, _ = run(model, 1e-3, 1e-1)
    assert set(found) == {6}
    assert set(run(layers(6, 6, switchable=False), 1e-3, 1.0)[0]) == {6}


def test_an_update_that_is_not_over_yet_says_nothing() -> None:
    model, split = layers(12, 12), StepBalancer()
    for _ in range(10):
        split.add(took(model, 1e-3, 1e-3, done=False))
        split.correct(model)
    assert all(layer.on_gpu for layer in model)


def test_python_may_always_be_a_step_ahead_of_the_gpu() -> None:
    """Then an update's times arrive in the step after the next, and exclude layers that moved since."""
    model, split, found = layers(48, 48), StepBalancer(), []
    under_way: list[StepTimes] = []
    for _ in range(60):
        split.correct(model)
        found.append(sum(layer.on_gpu for layer in model))
        for before in under_way:
            if before.gpu is not None:
                before.gpu[1].reach()  # type: ignore[attr-defined]
        under_way = [took(model, 2e-3, 1e-3, done=False)]
        split.add(under_way[0])
    assert all(abs(after - before) <= MAX_MOVES for before, after in pairwise(found))
    assert min(found) >= 31, "moved too far"
    assert abs(found[-1] - 32) <= 1
    assert len(set(found[40:])) == 1
