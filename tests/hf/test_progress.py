"""The display during training, on a terminal and elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging

from offloadkit.hf import callbacks
from offloadkit.hf.callbacks import TrainingProgress, show_progress
from offloadkit.hf.quiet import bars_where_live, is_live
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from tests.hf.training import arguments, seq2seq_rows, t5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadkit.hf.callbacks.is_live", lambda: True)


def trained(folder: Path, **options: Any) -> None:
    rows = seq2seq_rows()
    more = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "logging_steps": 2, "disable_tqdm": False}
    args = arguments(folder, **(more | options))
    trainer = OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=rows, eval_dataset=rows[:2])
    show_progress(trainer)
    trainer.train()
    trainer.close()


def test_away_from_a_terminal_each_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["step", "2/4"],
        ["after", "step"],
        ["step", "4/4"],
        ["after", "step"],
    ]
    assert all(part in lines[0] for part in ("loss ", "norm ", "lr "))
    assert "evaluation loss" in lines[1]
    assert "training:" not in shown.err


def test_on_a_terminal_a_bar_counts_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_a_terminal: None
) -> None:
    trained(tmp_path)
    shown = capsys.readouterr()
    assert "training: 100%" in shown.err
    assert "4/4" in shown.err
    assert "loss " in shown.err
    assert "after step 4: evaluation loss" in shown.out


def test_a_training_that_goes_back_to_a_checkpoint_has_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, bars = TrainingProgress("bar"), list[Any]()
    tqdm = callbacks.tqdm
    monkeypatch.setattr(callbacks, "tqdm", lambda **options: bars.append(tqdm(**options)) or bars[-1])
    for done in (0, 2):
        progress.on_train_begin(None, SimpleNamespace(max_steps=4, global_step=done), None)
    assert [bar.disable for bar in bars] == [True, False]  # a closed bar is disabled
    progress.on_train_end(None, None, None)
    assert bars[1].disable


def test_a_user_who_wants_no_bar_gets_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_a_terminal: None
) -> None:
    trained(tmp_path, disable_tqdm=True)
    shown = capsys.readouterr()
    assert "training:" not in shown.err
    assert "step 4/4" in shown.out


def bars() -> tuple[bool, bool, bool]:
    """Whether progress bars of datasets, the hub's client and transformers are enabled."""
    disabled = datasets.are_progress_bars_disabled(), are_progress_bars_disabled()
    return not disabled[0], not disabled[1], logging.is_progress_bar_enabled()


def test_a_kernel_is_live_and_its_library_alone_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not is_live()
    shell.kernel = object()
    assert is_live()


def test_bars_of_the_libraries_are_for_terminals_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bars()
    assert any(before)
    with bars_where_live():
        assert bars() == (False, False, False)
    assert bars() == before
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bars_where_live():
        assert bars() == before
    datasets.disable_progress_bars()
    try:
        with bars_where_live():
            pass
        assert not bars()[0]
    finally:
        datasets.enable_progress_bars()
