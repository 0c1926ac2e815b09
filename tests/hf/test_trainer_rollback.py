"""`on_nonfinite="rollback"` under the Trainers and `finetune`: they resume from the last checkpoint by themselves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback

import offloadkit
from offloadkit import OffloadConfig, OffloadSeq2SeqTrainer
from offloadkit.checkpoint.one_run import one_run
from offloadkit.errors import ConfigError, DataError, NonFiniteGradientError, RolledBackError
from offloadkit.hf import trainer_run
from offloadkit.hf.trainer import OffloadTrainer
from tests.hf.test_trainer_run import run_state
from tests.hf.tiny import t5_config
from tests.hf.training import arguments, logged, seq2seq_rows, t5

pytestmark = pytest.mark.usefixtures("one_thread")

ROLLBACK = OffloadConfig(on_nonfinite="rollback")
STEPPED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


class Spoils(TrainerCallback):
    """Makes the loss of a step NaN, a given number of times."""

    def __init__(self, times: dict[int, int]) -> None:
        self.left, self.steps = Counter(times), list[int]()
        self._hook: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step = state.global_step + 1
        self.steps.append(step)
        self.left[step] -= 1
        if self.left[step] >= 0:
            self._hook = model.register_forward_hook(lambda module, given, output: spoiled(output))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def spoiled(output: Any) -> Any:
    output["loss"] = output["loss"] * float("nan")
    return output


def trainer(folder: Path, faults: dict[int, int], kind: type[Any] = OffloadSeq2SeqTrainer, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("offload", "model", "model_init", "callbacks") if name in options}
    own = {"offload": ROLLBACK, "callbacks": [], **own}
    own["callbacks"] = [*own["callbacks"], Spoils(faults)]
    if "model_init" not in own:
        own.setdefault("model", t5(dropout=0.1))
    rows = {"train_dataset": seq2seq_rows(12), "eval_dataset": seq2seq_rows(4)}
    return kind(args=arguments(folder, **(STEPPED | options)), **rows, **own)


def assert_same(one: Any, other: Any) -> None:
    found, expected = run_state(one), run_state(other)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_accumulation_steps": 2, "bf16": True, "warmup_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"max_grad_norm": 0.0, "train_sampling_strategy": "group_by_length"}, marks=pytest.mark.slow),
        pytest.param({"eval_strategy": "epoch", "gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
    ],
    ids=["accumulated, bf16", "unclipped, by length", "evaluated"],
)
def test_the_run_is_the_one_resumed_by_hand_from_that_checkpoint(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two or three steps an epoch with accumulation, six without; dropout, shuffled rows, a schedule.

    Evaluations at the end of an epoch come after its checkpoint.
    """
    run = trainer(tmp_path, {4: 1, 6: 2}, **options)
    run.train()
    said = [line for line in capsys.readouterr().out.splitlines() if "Training goes back" in line]
    assert len(said) == 3
    assert said[0].startswith("the gradient norm of step 4 is nan (from ")
    assert f"to step 2, {str(tmp_path / 'checkpoint-2')!r} (time 1 of 3" in said[0]
    assert f"to step 4, {str(tmp_path / 'checkpoint-4')!r} (time 2 of 3 before step 6" in said[2]
    by_hand = trainer(tmp_path / "by hand", {}, **options)
    by_hand.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert run.state.global_step == by_hand.state.global_step == 6
    assert_same(run, by_hand)
    whole = trainer(tmp_path / "whole", {}, **options)
    whole.train()
    assert_same(run, whole)
    assert logged(run, "loss") == logged(whole, "loss")
    assert logged(run, "eval_loss") == logged(whole, "eval_loss")
    assert logged(run, "grad_norm") == logged(whole, "grad_norm")


def test_random_numbers_that_a_callback_draws_change_no_order_of_rows(tmp_path: Path) -> None:
    """A seed set during training must not change the order of rows."""

    class Seeds(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            torch.manual_seed(state.global_step)

    run = trainer(tmp_path / "run", {3: 1}, callbacks=[Seeds()])
    run.train()
    whole = trainer(tmp_path / "whole", {}, callbacks=[Seeds()])  # this callback seeds
    whole.train()
    assert_same(run, whole)


def test_nan_that_comes_again_ends_training_after_three_times(tmp_path: Path) -> None:
    run = trainer(tmp_path, {4: 100})
    with pytest.raises(NonFiniteGradientError, match=r"3 times without passing step 4.*checkpoint-2'"):
        run.train()
    (spoils,) = (each for each in run.callback_handler.callbacks if isinstance(each, Spoils))
    assert spoils.steps == [1, 2, *[3, 4] * 4]


@pytest.mark.slow
def test_three_times_are_counted_through_a_model_init_and_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    """`model_init` would bring a new engine, and a checkpoint of transformers' Trainer holds no number of updates."""
    with pytest.raises(NonFiniteGradientError, match="3 times without passing step 4"):
        trainer(tmp_path / "init", {4: 100}, model_init=lambda: t5(dropout=0.1)).train()
    theirs = Trainer(
        t5(), arguments(tmp_path / "theirs", **(STEPPED | {"max_steps": 2})), train_dataset=seq2seq_rows(12)
    )
    theirs.train()
    run = trainer(tmp_path / "ours", {4: 100})
    with pytest.raises(NonFiniteGradientError, match="3 times without passing step 2"):
        run.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-2"))


def test_without_a_checkpoint_of_this_run_the_error_says_so(tmp_path: Path) -> None:
    """A checkpoint of an earlier `train()` does not count."""
    run = trainer(tmp_path, {1: 1})
    with pytest.raises(NonFiniteGradientError, match=r"no checkpoint to go back to\. No checkpoint was saved"):
        run.train()
    run.train()
    assert run.state.global_step == 6
    run.add_callback(Spoils({1: 1}))
    with pytest.raises(NonFiniteGradientError, match="no checkpoint to go back to"):
        run.train()


def test_the_folder_stays_claimed_and_the_engine_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append((state.global_step, id(run.engine)))

    claims, seen = list[Path](), list[tuple[int, int]]()
    monkeypatch.setattr(trainer_run, "one_run", lambda folder: (claims.append(folder), one_run(folder))[1])
    run = trainer(tmp_path, {4: 1}, callbacks=[Looks()], model_init=lambda: t5(dropout=0.1))
    run.train()
    assert claims == [tmp_path]
    assert seen == [(0, id(run.engine)), (2, id(run.engine))]
    assert run.model_init is not None


def test_in_a_loop_after_training_the_engine_goes_back_by_itself(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", {})
    run.train()
    batch = run.data_collator(seq2seq_rows(2))
    before = run_state(run)
    run.engine.save_checkpoint(tmp_path / "saved", position=7)
    run.engine.backward(run.engine(**batch).loss)
    run.engine.step()
    run.engine.backward(run.engine(**batch).loss * float("nan"))
    with pytest.raises(RolledBackError) as back:
        run.engine.step()
    assert back.value.position == 7
    found = run_state(run)
    assert [name for name, value in before.items() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize(
    ("options", "why"),
    [({"save_strategy": "no"}, "writes none: pass save_strategy"), ({"save_only_model": True}, "save_only_model=True")],
)
def test_a_run_that_could_not_go_back_is_refused_at_once(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        trainer(tmp_path, {}, **options).train()


def test_minutes_or_a_checkpoint_to_resume_are_enough(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, {3: 1}, save_strategy="no", offload=OffloadConfig(on_nonfinite="rollback", save_minutes=1e-9)
    )
    run.train()
    resumed = trainer(tmp_path / "resumed", {6: 2}, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(run, resumed)


def test_a_nan_of_the_loss_alone_is_still_an_error_of_the_data(tmp_path: Path) -> None:
    rows = seq2seq_rows(2)
    for row in rows:
        row["labels"][:] = -100
    run = OffloadTrainer(t5(), arguments(tmp_path, **STEPPED), train_dataset=rows, offload=ROLLBACK)
    with pytest.raises(DataError, match="no target"):
        run.train()


def test_an_overflow_in_fp16_is_left_out_as_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, {4: 1}, fp16=True)
    run.train()
    assert [record.skipped for record in run.telemetry.records] == [False] * 3 + [True] + [False] * 2
    assert "goes back" not in capsys.readouterr().out


@pytest.mark.slow
def test_finetune_goes_on_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(12)]
    options: dict[str, Any] = {"tokenizer": "byte", "batch_size": 2, "use_cpu": True, "max_steps": 5, "save_steps": 2}
    models = []
    for faults in ({4: 1}, {}):
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**t5_config().to_dict()))
        result = offloadkit.finetune(
            model,
            pairs,
            output_dir=tmp_path / str(len(models)),
            offload=ROLLBACK,
            callbacks=[Spoils(faults)],
            **options,
        )
        models.append(result.model.state_dict())
        assert [entry["step"] for entry in result.history if "loss" in entry] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("Training goes back to step 2") == 1
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())
