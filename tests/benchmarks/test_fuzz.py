"""A sample of meaningless inputs: each one is refused by name or is harmless. The judge detects bad outcomes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks import fuzz, fuzz_rooms
from offloadkit.errors import ConfigError


def _error(raise_it: object) -> BaseException:
    try:
        raise_it()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_judge_tells_named_errors_from_others() -> None:
    from offloadkit import OffloadConfig

    named = _error(lambda: OffloadConfig(seed=-1))
    assert fuzz.why_unnamed(named, ("seed",)) is None
    assert fuzz.why_unnamed(named, ("vram",)) is not None
    assert "JSONDecodeError" in str(fuzz.why_unnamed(_error(lambda: json.loads("{")), ("json",)))

    def raised_here() -> None:
        raise ConfigError("seed")

    assert fuzz.why_unnamed(_error(raised_here), ("seed",)) is not None, "no line of the package"
    assert fuzz.why_unclear("seed " + "x" * 5000, ("seed",)) is not None
    assert fuzz.why_unclear("seed \ud800", ("seed",)) is not None


@pytest.mark.slow
def test_an_input_that_hangs_or_ends_its_process_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def make(draw: random.Random, scratch: Path, stock: Path) -> fuzz_rooms.Input:
        kind = draw.choice(["hangs", "dies", "fine"])
        call = {
            "hangs": lambda: time.sleep(60),
            "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "fine": lambda: None,
        }[kind]
        return fuzz_rooms.Input(kind, ("x",), call)

    monkeypatch.setitem(fuzz_rooms.ROOMS, "room", fuzz_rooms.Room(5, make))
    monkeypatch.setattr(fuzz_rooms, "stock", lambda folder: None)
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "GRACE", 0.2)
    found = fuzz.run(["room"], jobs=2, say=lambda text: None)
    assert sorted(each.number for each in found) == list(range(5))
    assert {each.verdict for each in found} == {"slow", "died", "accepted"}


@pytest.mark.slow(15)
def test_a_sample_of_inputs_is_refused_by_name() -> None:
    fuzz_rooms.import_all()
    found = fuzz.run(share=0.01, seed=1, say=lambda text: None)
    assert len(found) > 200
    assert [each for each in found if not each.is_good] == []
