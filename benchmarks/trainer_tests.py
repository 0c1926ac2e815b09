"""Transformers' own tests of its Trainer: how many pass with the Trainer replaced by offloadkit's.

    git clone --depth 1 https://github.com/huggingface/transformers && pip install parameterized sentencepiece protobuf
    python -m benchmarks.trainer_tests transformers [options of pytest]

The tests run on the CPU with the installed transformers: once unchanged, and once with `Trainer` and `Seq2SeqTrainer`
replaced before they are imported, so that subclasses in the tests derive from offloadkit's classes. Only tests that the
stock Trainer passes count; it may fail or skip tests for lack of the hub, a package or a GPU. The output is the number
of passed tests, and every failed test with its error. Options such as `-k resume` or `-n 2` are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import transformers

from offloadkit.errors import OffloadkitError

_LEFT_OUT = ("distributed", "fsdp", "tpu", "utils")
"""Test files that launch scripts (no class would be replaced there) or need no Trainer."""
_OTHER_OPTIMIZER = ("steps with its own optimizers", "steps with optimizers of its own")
"""Texts of offloadkit's errors about optimizers."""


class Outcome(NamedTuple):
    """The end of a test: "passed", "skipped", "failure" or "error", and the message."""

    status: str
    message: str


def pytest_configure() -> None:
    """As a plugin of pytest: replace transformers' Trainers by offloadkit's in later imports."""
    from transformers import trainer, trainer_seq2seq

    from offloadkit import OffloadSeq2SeqTrainer, OffloadTrainer

    package: Any = sys.modules["transformers"]  # importing its Trainer has replaced the module object
    package.Trainer = trainer.Trainer = OffloadTrainer
    package.Seq2SeqTrainer = trainer_seq2seq.Seq2SeqTrainer = OffloadSeq2SeqTrainer


def outcomes(written: Path) -> dict[str, Outcome]:
    """The outcome of each test by name, from a report of `pytest --junitxml`."""
    found = {}
    for case in ElementTree.parse(written).iter("testcase"):
        ended = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = Outcome("passed", "") if ended is None else Outcome(ended.tag, ended.get("message", ""))
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def reason(outcome: Outcome) -> str:
    """The reason why a test passes only with the stock Trainer."""
    if any(said in outcome.message for said in _OTHER_OPTIMIZER):
        return "wants another optimizer"
    raised = outcome.message.split(":")[0].rpartition(".")[2]
    ours = {error.__name__ for error in OffloadkitError.__subclasses__()}
    return "refused by name" if raised in ours else "other"


def report(stock: dict[str, Outcome], ours: dict[str, Outcome]) -> str:
    """The printed comparison of two runs of the same tests."""
    counted = [name for name, outcome in stock.items() if outcome.status == "passed"]
    rest: dict[str, list[str]] = {}
    for name in sorted(counted):
        outcome = ours.get(name, Outcome("not run", ""))
        if outcome.status != "passed":
            said = " ".join(outcome.message.split())[:200]
            rest.setdefault(reason(outcome), []).append(f"  {name}\n    {outcome.status}: {said}")
    passed = len(counted) - sum(map(len, rest.values()))
    version = transformers.__version__
    lines = [f"transformers {version}: of {len(counted)} tests that Trainer passes, {passed} pass with ours"]
    for why in sorted(rest, reverse=True):
        lines += [f"{why}: {len(rest[why])}", *rest[why]]
    return "\n".join(lines)


def run(checkout: Path, options: list[str], exchanged: bool) -> dict[str, Outcome]:
    """Run the tests in a fresh process and an empty folder, on the CPU."""
    files = sorted((checkout / "tests" / "trainer").glob("test_trainer*.py"))
    files = [file for file in files if not any(word in file.name for word in _LEFT_OUT)]
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "report.xml")
        plain = ["--noconftest", "-c", os.devnull, "--rootdir", checkout, "-p", "no:cacheprovider", "--tb=no", "-q"]
        given = [
            *plain,
            "--junitxml",
            written,
            *(["-p", "benchmarks.trainer_tests"] if exchanged else []),
            *options,
            *files,
        ]
        paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, "-m", "pytest", *map(str, given)], cwd=folder, env=environment, check=False)
        return outcomes(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of transformers, with its folder tests/trainer")
    arguments, options = parser.parse_known_args()
    checkout = arguments.checkout.resolve()
    print(report(*(run(checkout, options, exchanged) for exchanged in (False, True))))


if __name__ == "__main__":
    main()
