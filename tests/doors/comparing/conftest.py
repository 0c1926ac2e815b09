"""Run tasks in this process instead of fresh ones, for tests that are not about processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offloadkit.doors.engines import runner, worker

Row = dict[str, Any]
Answer = Callable[[dict[str, Any]], Row]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Makes `answer` supply the row of each task that is not cached; the returned list collects the tasks."""
    asked: list[dict[str, Any]] = []

    def install(answer: Answer) -> list[dict[str, Any]]:
        def run(task: dict[str, Any], **_: Any) -> Row:
            asked.append(task)
            return answer(task)

        monkeypatch.setattr(runner, "in_fresh_process", run)
        return asked

    return install


def here(task: dict[str, Any]) -> Row:
    """worker.py's work, in this process."""
    try:
        return {"status": "measured"} | worker.do(task)
    except Exception as error:
        return worker.why(error, None)


@pytest.fixture
def in_this_process(answers: Callable[[Answer], list[dict[str, Any]]], one_thread: None) -> list[dict[str, Any]]:
    """Runs all tasks here and collects them."""
    return answers(here)
