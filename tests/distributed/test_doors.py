"""`finetune` and the Trainers under several ranks: the same numbers, files and errors as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit.distributed import world
from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.resumed import other_rows
from offloadkit.hf.trainer import OffloadTrainer
from tests.distributed.doors import (
    error_of,
    fails_on_first,
    finetuned,
    finetuned_on_full_gpus,
    finetuned_until_one_fails,
    first_never_comes,
    model_named,
    pairs,
    trained,
    trained_from_folder,
    trained_on_own_rows,
)
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, LEAST
from tests.hf.training import arguments, llama


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for each in found:
        for name, weights in expected["weights"].items():
            assert torch.equal(each["weights"][name], weights), name
        assert each["norms"] == expected["norms"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert each["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        assert each["samples"] == expected["samples"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("placement", [CPU_STEP, LEAST])
def test_finetune_on_two_ranks_is_that_on_one(ranks: RankPool, tmp_path: Path, placement: Placement) -> None:
    """Eleven rows are six micro-batches, the last one short: the third update of an epoch has a filler."""
    options: dict[str, Any] = {"accumulation": 4, "eval_dataset": pairs(16, 11), "per_device_eval_batch_size": 2}
    offload = OffloadConfig(placement=placement, exchange="micro_batch")
    found = ranks.run(2, finetuned, name="t5", folder=tmp_path / "two", offload=offload, **options)
    assert_same(found, finetuned("t5", tmp_path / "one", **options))
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_gpus_that_are_full_in_the_evaluation_after_training_end_no_run(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(2, finetuned_on_full_gpus, folder=tmp_path / "whole", full=0, room=9)
    found = ranks.run(2, finetuned_on_full_gpus, folder=tmp_path / "found", full=1, room=1)
    assert_same(found, whole[0])
    assert (whole[0]["tried"], found[0]["tried"]) == ([2, 2, 1], [2, 1, 1, 1, 1, 1])
    for run in found:
        assert any(
            "the memory of rank 1's GPU was full in an evaluation after step 2" in each for each in run["warned"]
        )
    none = ranks.run(2, finetuned_on_full_gpus, folder=tmp_path / "none", full=-1, room=9)
    assert [run["samples"] for run in none] == [[], []]
    for run in none:
        assert not any("eval" in name for name in run["metrics"])
        assert any("the model is trained and saved, but its evaluation is incomplete" in each for each in run["warned"])
        assert all(torch.equal(run["weights"][name], weights) for name, weights in whole[0]["weights"].items())
    assert (tmp_path / "none" / "model" / "model.safetensors").exists()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_stream_on_two_ranks_is_that_on_one_and_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """Eleven rows are not a whole number of updates: passes begin in the middle of an update, and of a micro-batch."""
    options: dict[str, Any] = {
        "accumulation": 4,
        "max_steps": 5,
        "max_input_length": 32,
        "lr_scheduler_type": "constant",
    }
    stream: dict[str, Any] = {**options, "streams": "again", "save_steps": 3, "warmup_steps": 0}
    alone = finetuned(name, tmp_path / "one", **stream)
    found = ranks.run(2, finetuned, name=name, folder=tmp_path / "two", **stream)
    assert_same(found, alone)
    ranks.run(2, finetuned, name=name, folder=tmp_path / "cut", **stream | {"max_steps": 3})
    resumed = ranks.run(2, finetuned, name=name, folder=tmp_path / "cut", resume=True, **stream)
    for each in resumed:
        assert all(torch.equal(each["weights"][name], weights) for name, weights in alone["weights"].items())
        assert each["losses"][-2:] == found[0]["losses"][-2:]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_stream_on_two_ranks_has_the_losses_of_its_rows_in_a_list(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulation": 4, "rows": 16, "max_steps": 4, "warmup_steps": 0}
    options["train_sampling_strategy"] = "sequential"
    streamed = ranks.run(2, finetuned, name="llama", folder=tmp_path / "stream", streams="again", **options)
    listed = ranks.run(2, finetuned, name="llama", folder=tmp_path / "list", **options)
    assert len(set(listed[0]["losses"])) == 4
    assert streamed[0]["losses"] == pytest.approx(listed[0]["losses"], abs=1e-5)


@pytest.mark.slow
def test_a_stream_that_ends_ends_all_ranks_with_its_error(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulation": 2, "rows": 75, "max_steps": 9, "streams": "once"}
    found = ranks.run(2, error_of, call=finetuned, name="llama", folder=tmp_path, **options)
    assert all("DataError: the stream of rows ended after 11 rows and cannot be read again" in each for each in found)


@pytest.mark.slow
def test_a_used_output_folder_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    found = ranks.run(2, error_of, call=finetuned, name="t5", folder=tmp_path, accumulation=2)
    assert all(each.startswith("ConfigError: the output folder") for each in found)
    assert len(set(found)) == 1


@pytest.mark.usefixtures("one_thread")
def test_ranks_read_weights_into_place(ranks: RankPool, tmp_path: Path) -> None:
    model_named("llama")[0].save_pretrained(tmp_path)
    found = [ranks.run(2, trained_from_folder, folder=tmp_path, unread=unread) for unread in (True, False)]
    for each in (*found[0], found[1][1]):
        assert each.keys() == found[1][0].keys()
        assert all(value.equal(found[1][0][name]) for name, value in each.items())


@pytest.mark.usefixtures("one_thread")
def test_ranks_with_other_rows_are_told_before_they_train(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, error_of, call=trained_on_own_rows, folder=tmp_path)
    assert all("steps: rank 0: 8, 2, 2; rank 1: 6, 2, 2)" in each for each in found), found


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("meets", "what"), [(False, "comparing notes"), (True, "an operation")])
def test_a_rank_that_fails_ends_the_others(ranks: RankPool, tmp_path: Path, meets: bool, what: str) -> None:
    """The surviving rank waits in an operation of the engine or in the script's own barrier."""
    survivor, failed = ranks.run(2, error_of, call=finetuned_until_one_fails, folder=tmp_path, meets=meets)
    assert failed == "MemoryError: no room here"
    assert survivor.startswith(f"RankError: {what}")
    assert "rank 1 has died or raised an error" in survivor


@pytest.mark.parametrize("timeout", [0, "1"])
def test_a_timeout_without_a_meaning_is_refused(timeout: Any) -> None:
    with pytest.raises(ConfigError, match="ddp_timeout must be a number of seconds > 0, got"):
        offloadkit.finetune("t5-small", [], ddp_timeout=timeout)


def test_the_timeout_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The timeout is set before any rank waits for another."""
    told: list[Any] = []
    monkeypatch.setattr(world, "join", lambda timeout=None: told.append(timeout))
    OffloadTrainer(model=llama(), args=arguments(tmp_path, ddp_timeout=7))
    with pytest.raises(ConfigError, match="epochs"):
        offloadkit.finetune("t5-small", [], ddp_timeout=8, epochs=-1)
    assert [each for each in told if each is not None] == [7, 8]


def test_who_waits_for_a_rank_that_never_comes_is_told(ranks: RankPool) -> None:
    first, second = ranks.run(2, error_of, call=first_never_comes)
    assert first == "ValueError: nothing left"
    assert second.startswith("RankError: trying failed: another process has died")


def test_an_error_that_cannot_be_sent_is_told(ranks: RankPool) -> None:
    own, others = ranks.run(2, error_of, call=fails_on_first)
    assert own == "UnsendableError: no luck"
    assert others == "RankError: trying failed on rank 0: UnsendableError: no luck"


def test_going_on_with_fewer_micro_batches_in_all_says_so(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"train_batch_size": 2}')
    (tmp_path / "training_args.json").write_text('{"gradient_accumulation_steps": 2}')
    for name in ("random.json", "random-00001.json", "random-00002.json"):  # checkpoints of weights alone have them too
        (tmp_path / name).touch()
    assert other_rows(tmp_path, 2, 6, 1) is other_rows(tmp_path, 2, 2, 3) is None
    assert "3 micro-batches of all ranks now and had 6" in (warning := str(other_rows(tmp_path, 2, 1, 3)))
    assert warning.endswith("gradient_accumulation=2 continues exactly")
    assert str(other_rows(tmp_path, 2, 2, 4)).endswith("6 in all continue exactly")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "size"), [("t5", 3), ("llama", 2)])
def test_a_trainer_on_several_ranks_is_that_on_one(ranks: RankPool, tmp_path: Path, kind: str, size: int) -> None:
    """Losses, metrics over all rows in order, the best checkpoint, and the checkpoints that are kept."""
    options: dict[str, Any] = {"kind": kind, "accumulation": 6, "save_steps": 1, "save_strategy": "steps"}
    options |= {"save_total_limit": 1, "load_best_model_at_end": True, "eval_steps": 1, "max_steps": 3}
    found = ranks.run(size, trained, folder=tmp_path / "several", **options)
    assert_same(found, trained(folder=tmp_path / "one", **options))
    kept = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "several")]
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("more", [{"streams": True, "rows": 8}, {"scales_loss": True}])
def test_streams_and_losses_of_the_users_own(ranks: RankPool, tmp_path: Path, more: dict[str, Any]) -> None:
    """At the end of a stream accelerate repeats rows to fill the batch; eight rows leave no remainder."""
    options: dict[str, Any] = {"kind": "llama", "accumulation": 2, "eval_strategy": "no", **more}
    found = ranks.run(2, trained, folder=tmp_path / "two", **options)
    assert_same(found, trained(folder=tmp_path / "one", **options))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_finetune_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Thirteen micro-batches are three updates an epoch: the first two runs end in mid-epoch.

    One rank gets an interrupt; all ranks stop after the same step.
    """
    options: dict[str, Any] = {"accumulation": 6, "rows": 26, "max_steps": 5, "eval_dataset": pairs(7)}
    for size, interrupted_at in ((2, 2), (1, 4), (3, None)):
        more = {"folder": tmp_path / "legs", "resume": size != 2, "interrupted_at": interrupted_at, **options}
        found = ranks.run(size, finetuned, name="llama", **more)
        (checkpoint,) = (tmp_path / "legs").glob("checkpoint-*")
        assert checkpoint.name == f"checkpoint-{interrupted_at or 5}"
        assert len(list(checkpoint.glob("states-*"))) == len(list(checkpoint.glob("random*"))) == size
        assert all(each["stopped"] == (interrupted_at is not None) for each in found)
    expected = finetuned("llama", tmp_path / "whole", **options)
    for each in found:
        for name, weights in expected["weights"].items():
            assert torch.equal(each["weights"][name], weights), name
        assert each["samples"] == expected["samples"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the checkpoint has the weights alone")
def test_finetune_goes_on_from_weights_alone_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulation": 6, "rows": 26, "max_steps": 5, "save_only_model": True}
    found = []
    for saved, now in ((1, 1), (2, 3)):
        more = {"name": "llama", "folder": tmp_path / f"of {saved}", **options}
        ranks.run(saved, finetuned, interrupted_at=2, **more)
        assert not list((tmp_path / f"of {saved}" / "checkpoint-2").glob("states-*"))
        found += ranks.run(now, finetuned, resume=True, **more)
    assert_same(found[1:], found[0])
