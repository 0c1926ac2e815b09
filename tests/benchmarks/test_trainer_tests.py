"""The report on transformers' own tests: the Trainer class is really replaced, and a failed test is listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import trainer, trainer_seq2seq

from benchmarks import trainer_tests
from offloadkit import OffloadSeq2SeqTrainer, OffloadTrainer

OURS = """<testsuites><testsuite>
<testcase classname="a.B" name="passes"/>
<testcase classname="a.B" name="asks"><failure message="offloadkit.errors.ConfigError: optim='sgd': use one of
adamw_torch: the engine steps with its own optimizers"/></testcase>
<testcase classname="a.B" name="is_refused"><failure message="offloadkit.errors.DataError: no rows"/></testcase>
<testcase classname="a.B" name="differs"><failure message="AssertionError: 1 != 2"/></testcase>
<testcase classname="a.B" name="needs_a_gpu"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_whoever_imports_a_trainer_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["transformers"]
    for module, name in ((package, "Trainer"), (trainer, "Trainer")):
        monkeypatch.setattr(module, name, trainer.Trainer)
    for module, name in ((package, "Seq2SeqTrainer"), (trainer_seq2seq, "Seq2SeqTrainer")):
        monkeypatch.setattr(module, name, trainer_seq2seq.Seq2SeqTrainer)
    trainer_tests.pytest_configure()
    from transformers import Seq2SeqTrainer, Trainer

    assert Trainer is trainer.Trainer is OffloadTrainer
    assert Seq2SeqTrainer is trainer_seq2seq.Seq2SeqTrainer is OffloadSeq2SeqTrainer


def test_what_the_stock_trainer_passes_is_counted_and_the_rest_listed_by_reason(tmp_path: Path) -> None:
    written = tmp_path / "report.xml"
    written.write_text(OURS)
    ours = trainer_tests.outcomes(written)
    stock = dict.fromkeys([*ours, "a.B.is_gone"], trainer_tests.Outcome("passed", ""))
    stock["a.B.needs_a_gpu"] = ours["a.B.needs_a_gpu"]
    lines = trainer_tests.report(stock, ours).splitlines()
    assert "of 5 tests that Trainer passes, 1 pass" in lines[0]
    assert [line for line in lines[1:] if not line.startswith("    ")] == [
        "wants another optimizer: 1",
        "  a.B.asks",
        "refused by name: 1",
        "  a.B.is_refused",
        "other: 2",
        "  a.B.differs",
        "  a.B.is_gone",
    ]
    assert "    failure: AssertionError: 1 != 2" in lines
