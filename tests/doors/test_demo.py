"""The demo: its dates, and that it runs. (README's command shows that it learns.)"""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM
from typer.testing import CliRunner

from offloadkit.doors.cli import app
from offloadkit.doors.demo.dates import FIRST_YEAR, LAST_YEAR, date_pairs, spellings
from offloadkit.doors.demo.run import run_demo
from offloadkit.errors import OutputError


def test_held_out_dates_are_in_no_training_pair() -> None:
    train, held_out = date_pairs(3000, 200)
    assert len(train) == 3000
    assert len({pair.target for pair in held_out}) == len(held_out) == 200
    assert {pair.target for pair in train}.isdisjoint(pair.target for pair in held_out)


def test_the_seed_decides_the_pairs() -> None:
    assert date_pairs(50, 5, seed=3) == date_pairs(50, 5, seed=3)
    assert date_pairs(50, 5, seed=3) != date_pairs(50, 5, seed=4)


def test_targets_are_iso_dates_in_range_and_end_of_months_occur() -> None:
    pairs = [pair for part in date_pairs(5000, 100) for pair in part]
    days = [date.fromisoformat(pair.target) for pair in pairs]
    assert {day.year for day in days} == set(range(FIRST_YEAR, LAST_YEAR + 1))
    assert {day.day for day in days} == set(range(1, 32))


@pytest.mark.parametrize("first", [date(1950, 1, 1), date(1999, 6, 1), date(2026, 11, 1)])
def test_no_spelling_stands_for_two_dates(first: date) -> None:
    """Every text of a year of dates, and of a hundred 20ths of November, has one meaning."""
    year = [date.fromordinal(first.toordinal() + offset) for offset in range(365)]
    days = {*year, *(date(other, 11, 20) for other in range(FIRST_YEAR, LAST_YEAR + 1))}
    meanings: dict[str, set[date]] = {}
    for day in days:
        for spelling in spellings(day):
            meanings.setdefault(spelling.lower(), set()).add(day)
    assert {text: found for text, found in meanings.items() if len(found) > 1} == {}


def test_the_spelling_of_the_readme_is_among_them() -> None:
    assert "Friday the 20th of November, 2026" in spellings(date(2026, 11, 20))


def test_slashes_are_unambiguous() -> None:
    for offset in range(0, 36_000, 7):
        day = date.fromordinal(date(FIRST_YEAR, 1, 1).toordinal() + offset)
        text = spellings(day)[-1]
        first, second = map(int, re.fullmatch(r"(\d+)/(\d+)/\d+", text).groups())  # type: ignore[union-attr]
        assert first > 1000 or max(first, second) > 12


@pytest.mark.slow
def test_a_short_demo_shows_itself_and_leaves_a_model_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_demo(tmp_path / "demo", num_steps=2)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["exact_match_before"] == 0.0
    assert 0.0 <= summary["exact_match_after"] <= 1.0
    assert summary["peak_ram_bytes"] > 50 * 2**20
    assert summary["seconds"] > summary["train_seconds"] > 0
    assert len(summary["predictions"]) == 5
    assert summary["mean_step_seconds"]["cpu_step"] > 0
    assert {"torch", "transformers", "cpu"} <= set(summary["machine"])
    shown = capsys.readouterr().out
    for command in ("offloadkit plan", "offloadkit train", "offloadkit doctor"):
        assert command in shown.partition("what next:")[2]
    for part in ("FITS (on the CPU): ", "loss", "peak RAM", "AdamW in RAM", "before", "after", "demo/model"):
        assert part in shown, part
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "demo" / "model").num_parameters() == 968_704


def test_the_demo_finds_an_unwritable_folder_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        run_demo(tmp_path / "file" / "demo", num_steps=1)


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_that_numpy_does_not_take_is_refused(tmp_path: Path, seed: str) -> None:
    done = CliRunner().invoke(app, ["demo", "--seed", seed, "--output", str(tmp_path / "demo")])
    assert done.exit_code == 2
    assert "--seed" in done.stderr
    assert list(tmp_path.iterdir()) == []
