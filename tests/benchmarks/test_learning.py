"""The learning benchmark: its figures come from training runs, and its verdict can be yes or no."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning, table
from benchmarks.learning_tasks import Trial, by_tenths, demo, run_trial, source_rows

pytestmark = pytest.mark.usefixtures("one_thread")


def row(precision: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    found = {"task": "llama", "precision": precision, "dtype": "auto", "seed": seed, "exact_match": None}
    return found | {"held_out_loss": loss, "train_loss": loss} | more


def precisions(**losses: list[float]) -> list[dict[str, Any]]:
    """Rows of every precision; a precision that is not named has the losses of `exact`."""
    return [
        row(precision, seed, loss)
        for precision in learning.PRECISIONS
        for seed, loss in enumerate(losses.get(precision, losses["exact"]))
    ]


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {summary["precision"]: summary["verdict"] for summary in learning.compare_precisions(rows)}


@pytest.mark.parametrize(
    ("off", "verdict"),
    [(1.9, "within"), (2.1, "NOT within"), (-1.9, "within"), (-2.1, "lower"), (math.nan, "NOT within")],
)
def test_a_precision_learns_within_two_standard_deviations_of_exact(off: float, verdict: str) -> None:
    exact = [1.0, 1.1, 1.2]  # sd 0.1
    found = verdicts(precisions(exact=exact, tiny=[loss + 0.1 * off for loss in exact]))
    assert found == {"exact": "reference", "compact": "within", "tiny": verdict}


def test_the_distance_is_in_deviations_of_exact_and_by_seed() -> None:
    rows = precisions(exact=[1.0, 2.0, 3.0], compact=[1.5, 2.5, 3.8])
    summary = next(found for found in learning.compare_precisions(rows) if found["precision"] == "compact")
    assert summary["difference_in_sds"] == pytest.approx(0.6)
    assert summary["paired_difference"] == pytest.approx(0.6)
    assert summary["paired_error"] == pytest.approx(0.1)
    assert summary["exact_sd"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_failed_training_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    rows = precisions(exact=[1.0, 1.1])
    rows[-1]["failed"] = "ValueError: what happened"
    assert verdicts(rows) == {"exact": "reference", "compact": "within", "tiny": "failed"}
    assert run_trial(Trial("llama", dtype="fp12", tiny=True))["failed"].startswith("ConfigError: working_dtype must be")


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([4.0, 2.03], "holds"), ([4.0, 2.2], "DOES NOT HOLD"), ([4.0, 1.8], "DOES NOT HOLD"), ([math.nan, 2.0], "failed")],
)
def test_fp16_stays_within_its_bound_without_a_nan(losses: list[float], verdict: str) -> None:
    def trained(dtype: str, losses: list[float]) -> dict[str, Any]:
        num_nan = sum(math.isnan(loss) for loss in losses)
        figures = {"first_loss": losses[0], "train_loss": losses[-1], "num_nan_losses": num_nan, "num_skipped": 1}
        return {"task": "t5 v1.0", "dtype": dtype, "losses": losses, **figures}

    full, half = learning.compare_dtypes([trained("fp32", [4.0, 2.0]), trained("fp16", losses)])
    assert full["verdict"] == "reference"
    assert half["verdict"] == ("DOES NOT HOLD" if verdict == "failed" else verdict)
    assert half["num_skipped"] == 1
    assert half["relative"] == pytest.approx(losses[-1] / 2 - 1)


@pytest.mark.slow
def test_a_training_that_learns_less_is_told_apart() -> None:
    """Real training runs: `tiny` for a quarter of the steps, `compact` for as many steps as `exact`."""
    rows = [
        run_trial(Trial("llama", precision, seed=seed, steps=10 if precision == "tiny" else 40, tiny=True))
        for precision in learning.PRECISIONS
        for seed in range(2)
    ]
    for found in rows:
        assert found["train_loss"] < found["first_loss"]
        assert found["curve"][-1] < found["curve"][0]
        assert found["num_nan_losses"] == found["num_skipped"] == 0
    assert rows[0]["first_loss"] != rows[1]["first_loss"], "the seed decides weights and order"
    assert rows[0]["first_loss"] == rows[2]["first_loss"], "and nothing else does"
    assert rows[0]["held_out_loss"] != rows[2]["held_out_loss"], "compact is another training"
    assert verdicts(rows)["tiny"] == "NOT within"


@pytest.mark.slow
def test_the_demo_task_counts_dates_that_are_right() -> None:
    found = run_trial(Trial("demo", "tiny", steps=8, tiny=True))
    assert found["train_loss"] < found["first_loss"]
    assert found["exact_match"] == 0
    assert found["held_out_loss"] < found["first_loss"]


@pytest.mark.slow(20)
def test_the_command_trains_side_by_side_and_writes_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.csv"
    command = "precisions --task llama --tiny --seeds 2 --steps 6 --jobs 2 --commit abc --out"
    made = learning.main([*command.split(), str(out)])
    rows = table.read(out)
    assert [found["engine"] for found in rows] == list(learning.PRECISIONS)
    assert all((found["case"], found["commit"]) == ("learning, llama", "abc") for found in rows)
    assert all(found["figures"]["num_seeds"] == 2 for found in rows)
    runs = made[3:]
    wanted = [(precision, seed) for seed in (0, 1) for precision in learning.PRECISIONS]
    assert [(found["precision"], found["seed"]) for found in runs] == wanted
    assert all(found["train_loss"] < found["first_loss"] for found in runs)
    assert "difference_in_sds" in capsys.readouterr().out


@pytest.mark.slow
def test_fp16_is_set_beside_fp32_and_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.csv"
    command = ["fp16", "--task", "t5 v1.1", "--tiny", "--steps", "8", "--jobs", "1", "--out", str(out)]
    rows = learning.main(command)
    assert [found.get("working_dtype") for found in rows[3:]] == ["float32", "float16", "bfloat16"]
    assert all(found["steps"] == 8 and found["train_loss"] < found["first_loss"] for found in rows[3:])
    full, half, brain = rows[:3]
    assert full["largest_relative"] == 0
    assert 0 < half["mean_relative"] <= half["largest_relative"] < learning.FP16_BOUND
    assert half["mean_relative"] < brain["mean_relative"]
    assert [found["dtype"] for found in table.read(out)] == ["fp32", "fp16", "bf16"]
    assert "DOES NOT HOLD" not in capsys.readouterr().out


def test_the_demo_task_is_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offloadkit.doors.demo import run

    class CalledError(Exception):
        """Raised in place of a call of `finetune`."""

    def finetune(model: Any, rows: Any, **arguments: Any) -> None:
        raise CalledError(model, rows, arguments)

    monkeypatch.setattr(run, "finetune", finetune)
    monkeypatch.setattr(run, "NUM_PREDICTED", 4)
    with pytest.raises(CalledError) as caught:
        run.run_demo(tmp_path, seed=3)
    model, rows, arguments = caught.value.args
    recipe = demo(Trial("demo", seed=3))
    assert model.config.to_dict() == recipe.model.config.to_dict()
    assert all((own == other).all() for own, other in zip(model.parameters(), recipe.model.parameters(), strict=True))
    assert len(rows) == len(recipe.train)
    ours = {name: value for name, value in recipe.arguments.items() if name != "per_device_eval_batch_size"}
    assert ours == {name: arguments[name] for name in ours}
    named = {"eval_dataset", "tokenizer", "output_dir", "seed", "save_strategy", "eval_strategy", "overwrite"}
    assert set(arguments) - named == set(recipe.arguments), "the demo says nothing that the task leaves out"


@pytest.mark.slow
def test_the_rows_of_the_llama_are_source_code_and_the_same_every_time() -> None:
    train, held_out = source_rows(64, 300, 20)
    assert [len(part) for part in (train, held_out)] == [300, 20]
    assert all(len(found["input_ids"]) == 64 for found in train + held_out)
    text = b"".join(bytes(token - 3 for token in found["input_ids"]) for found in train)
    assert text.count(b"self") > 10
    source_rows.cache_clear()
    assert source_rows(64, 300, 20) == (train, held_out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precisions", "--task", "t5 v1.0"], "--task of precisions is one of 'demo', 'llama'; got 't5 v1.0'"),
        (["precisions", "--seeds", "1"], "--seeds must be at least 2"),
        (["fp16", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["fp16", "--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_a_command_without_a_meaning(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        learning.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 2, 64])
def test_every_job_has_cores(jobs: int) -> None:
    shares = learning.core_shares(jobs)
    assert len(shares) == jobs
    assert all(shares)


def test_a_curve_has_the_means_of_tenths() -> None:
    assert by_tenths(list(range(20))) == [0.5 + 2 * tenth for tenth in range(10)]
    assert by_tenths([3.0, 5.0]) == [3.0, 5.0]
