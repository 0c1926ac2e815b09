"""Tasks in this process instead of fresh ones, where a test is not about processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offloadkit.doors.engines import runner, worker

Row = dict[str, Any]
Answer = Callable[[dict[str, Any]], Row]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[dict[str, Any]]]:
    """Have `answer` give the row of each task that is not kept; the list that comes back fills with the tasks."""
    asked: list[dict[str, Any]] = []

    def install(answer: Answer) -> list[dict[str, Any]]:
        def run(task: dict[str, Any], **_: Any) -> Row:
            asked.append(task)
            return answer(task)

        monkeypatch.setattr(runner, "in_fresh_process", run)
        return asked

    return install


def here(task: dict[str, Any]) -> Row:
    """What worker.py does, but in this process."""
    try:
        return {"status": "measured"} | worker.do(task)
    except Exception as error:
        return worker.why(error, None)


@pytest.fixture
def in_this_process(answers: Callable[[Answer], list[dict[str, Any]]], one_thread: None) -> list[dict[str, Any]]:
    """The tasks that were done, all of them here."""
    return answers(here)
