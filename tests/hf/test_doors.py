"""One model through `finetune`, the Trainer and the bare loop: the same numbers, plan and budget."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, T5ForConditionalGeneration

from offloadkit import OffloadConfig, OffloadEngine, finetune
from offloadkit.doors import planning
from offloadkit.engine import outline, start
from offloadkit.engine.tracing import Call
from offloadkit.errors import DoesNotFitError
from offloadkit.facts.config import Placement
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.facts.hardware import ASSUMED_DISK
from offloadkit.facts.units import format_bytes
from offloadkit.hf import trainer_plan
from offloadkit.hf.longest import NotReadableError, longest_batch
from offloadkit.hf.masks import Padding
from offloadkit.hf.patches import NAME, patched
from offloadkit.hf.source import from_pretrained
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer
from offloadkit.offload.unread import is_unread
from offloadkit.planner.layout import ALLOCATOR_BYTES
from tests.hf.tiny import t5_config, word_tokenizer
from tests.hf.training import Row, arguments, attentions, causal_rows, llama, seq2seq_rows, t5, train
from tests.planner.machines import H200

pytestmark = pytest.mark.usefixtures("one_thread")

FIXED = H200.vram_context_bytes + LOADED_LATER_BYTES + ALLOCATOR_BYTES
TIGHT = OffloadConfig(vram=FIXED + (144 << 10), ram="8GiB")
OPTIONS: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": 1}
OPTIONS |= {"train_sampling_strategy": "sequential"}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a GPU; the plan runs on the CPU."""
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: H200)
    monkeypatch.setattr(planning, "measure", lambda *_, **__: H200)


def batches(rows: list[Row]) -> Iterator[dict[str, torch.Tensor]]:
    for at in (0, 2):
        yield {name: torch.stack([row[name] for row in rows[at : at + 2]]) for name in rows[0]}


def tuned(model: PreTrainedModel, rows: list[Row], folder: Path, **options: Any) -> Any:
    listed = [{name: values.tolist() for name, values in row.items()} for row in rows]
    options |= {"tokenizer": "byte", "batch_size": 2, "monitor": False, "use_cpu": True, "save_strategy": "no"}
    return finetune(model, listed, output_dir=folder, warmup_steps=0, **OPTIONS, **options)


@pytest.mark.parametrize(("make", "rows"), [(t5, seq2seq_rows(4)), (llama, causal_rows(4))], ids=["t5", "llama"])
def test_the_bits_are_the_same_behind_every_door(
    make: Callable[[], PreTrainedModel], rows: list[Row], tmp_path: Path
) -> None:
    weights = [tuned(make(), rows, tmp_path / "out", bf16=True).model.state_dict()]
    trainer = train(tmp_path, make(), rows, adam_epsilon=1e-8, bf16=True, **OPTIONS)
    weights.append(trainer.model.state_dict())
    given: Any = make()
    with OffloadEngine(given, OffloadConfig(learning_rate=1e-2, working_dtype="bf16"), device="cpu") as engine:
        for batch in batches(rows):
            engine.backward(engine(**batch).loss)
            engine.step()
    weights.append(given.state_dict())
    for name, weight in weights[0].items():
        assert all(other[name].equal(weight) for other in weights), name


@pytest.mark.parametrize("attention", ["ours", "keep"])
def test_an_open_engine_changes_what_is_computed_and_a_closed_one_leaves_nothing(attention: Any) -> None:
    model: Any = t5()
    names = [set(vars(module)) for module in model.modules()]
    with OffloadEngine(model, OffloadConfig(attention=attention), device="cpu"):
        assert attentions(model) == {"eager" if attention == "ours" else "sdpa"}
        assert "forward" in vars(model.lm_head)  # computes the loss in chunks
        assert model.lm_head._forward_hooks
    assert attentions(model) == {"sdpa"}
    assert [set(vars(module)) for module in model.modules()] == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_on_a_gpu_our_kernels_take_over_whatever_the_model_was_loaded_with() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(t5_config(d_kv=16))
    wishes: dict[Any, str] = {"ours": NAME, "keep": "sdpa"}
    for attention, used in wishes.items():
        undo = patched(torch.nn.ModuleDict({"inside another": model}), OffloadConfig(attention=attention))
        assert attentions(model) - {"eager"} == {used}
        undo()
        assert attentions(model) == {"sdpa"}


@pytest.mark.usefixtures("on_a_card")
def test_the_trainer_plans_as_finetune_for_the_same_rows_and_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = seq2seq_rows(4)
    planned = tuned(t5(), rows, tmp_path / "out", offload=TIGHT).plan
    shown = capsys.readouterr().out
    trainer = train(tmp_path, t5(), rows, more={"offload": TIGHT}, **OPTIONS)
    assert trainer.engine.plan == planned
    assert len(set(planned.placements)) > 1
    assert str(planned).splitlines()[:3] == str(trainer.engine.plan).splitlines()[:3]
    assert ", 2 x (6+10) tokens a step\n" in shown
    assert str(trainer.engine.plan) in capsys.readouterr().out


class PlannedError(Exception):
    """Ends `finetune` once its plan is made."""


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("size", "strategy", "rows"), [(9, "epoch", 3), (9, "no", None)])
def test_evaluation_counts_with_the_rows_that_it_takes_at_once(
    size: int, strategy: str, rows: int | None, tmp_path: Path
) -> None:
    """The evaluation set has three rows, a training micro-batch two."""
    args = arguments(tmp_path, eval_strategy=strategy, per_device_eval_batch_size=size)
    sets: dict[str, Any] = {"train_dataset": seq2seq_rows(4), "eval_dataset": seq2seq_rows(3)}
    config = OffloadConfig(vram="8GiB", ram="8GiB", placement=Placement())
    trainer = OffloadSeq2SeqTrainer(model=t5(), args=args, offload=config, **sets)
    trainer.create_optimizer()
    assert trainer.engine is not None
    plan = trainer.engine.plan
    trainer.close()
    evaluation, work = plan.basis.work and plan.basis.work.evaluation, plan.basis.work
    assert work is not None
    assert work.rows is not None
    assert (evaluation and evaluation.rows) == (rows and replace(work.rows, batch_size=rows))


@pytest.mark.usefixtures("on_a_card")
def test_finetune_plans_for_the_rows_of_its_evaluation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def plan(*args: Any, **how: Any) -> None:
        found.append(planning.shown_plan(*args, **how).basis.work)
        raise PlannedError

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "shown_plan", plan)
    held_out = [{name: values.tolist() for name, values in row.items()} for row in seq2seq_rows(3)]
    given: dict[str, Any] = {"eval_dataset": held_out, "eval_strategy": "no", "per_device_eval_batch_size": 9}
    with pytest.raises(PlannedError):
        tuned(t5(), seq2seq_rows(4), tmp_path / "out", **given)
    assert [work.evaluation.rows.batch_size for work in found] == [3]


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_model_that_others_have_changed_is_planned_too() -> None:
    """A model that recomputes by itself, and a model whose forward TRL has replaced."""
    example = next(batches(causal_rows(4)))
    plans = []
    for how in ("plain", "recomputes", "another forward"):
        model: Any = llama()
        if how == "recomputes":
            model.gradient_checkpointing_enable()
        elif how == "another forward":
            model.forward = MethodType(calling(model.forward), model)
        plans.append(outline.plan_for(model, TIGHT, torch.device("cpu"), example))
    assert plans[0] is not None
    assert plans[0] == plans[1] == plans[2]


def calling(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, **kwargs: original(**kwargs)


class OwnLoss(OffloadTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        return (output.loss, output) if return_outputs else output.loss


@pytest.mark.usefixtures("on_a_card")
def test_where_rows_cannot_be_read_the_first_update_is_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(4), OwnLoss, {"offload": TIGHT}, **OPTIONS)
    said = capsys.readouterr().out
    assert "OwnLoss.compute_loss computes the loss in a custom way" in said
    (move,) = trainer.telemetry.moves
    begins = f"the first update runs with little in VRAM and {format_bytes(move.before['ram'])} in RAM"
    assert said.index(begins) < said.index("'loss'") < said.index(str(trainer.engine.plan))


def test_without_a_gpu_too_a_budget_is_kept_or_refused_where_rows_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, Any] = {"train_dataset": seq2seq_rows(4), "eval_dataset": seq2seq_rows(4)}
    trainer = OwnLoss(t5(), arguments(tmp_path, **OPTIONS), offload=OffloadConfig(vram="96KiB"), **rows)
    trainer.create_optimizer()  # as for an evaluation whose weights exceed half of the budget
    trainer.evaluate()
    assert "the first update" not in capsys.readouterr().out
    for _ in range(2):
        with pytest.raises(DoesNotFitError, match=r"needs .* of VRAM, has 96 KiB"):
            trainer.train()
    assert "custom way): the budget is checked for the micro-batches of the first update" in capsys.readouterr().out
    trainer.close()
    trainer = train(tmp_path, t5(), seq2seq_rows(4), OwnLoss, {"offload": OffloadConfig(vram="8MiB")}, **OPTIONS)
    assert str(trainer.engine.plan) in capsys.readouterr().out
    assert trainer.engine.plan.basis.work is not None


@pytest.mark.usefixtures("on_a_card")
def test_finetune_plans_for_the_whole_logits_of_label_smoothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 positions x 50,000 tokens of vocabulary; a chunk is two fifths of the logits."""
    found: list[Any] = []

    def plan(source: Any, config: OffloadConfig, request: planning.PlanRequest, **how: Any) -> None:
        request = replace(request, batch_size=8, max_target_length=64)
        found.append(planning.shown_plan(source, config, request, **how).basis.work)
        raise PlannedError

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "shown_plan", plan)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(t5_config(vocab_size=50_000))
    for factor in (0.0, 0.1):
        with pytest.raises(PlannedError):
            tuned(model, seq2seq_rows(2), tmp_path / "out", label_smoothing_factor=factor, bf16=True)
    logits = 4 * 8 * 64 * 50_000
    chunked, whole = (work.stages[-1] for work in found)
    assert chunked.forward_peak_bytes < 1.2 * logits
    assert 1.9 * logits < whole.forward_peak_bytes < 3 * logits
    assert found[0].num_tokens == found[1].num_tokens == 8 * (6 + 64)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_plan_after_the_first_update_counts_the_rows_of_evaluation(is_stream: bool, tmp_path: Path) -> None:
    held_out: Any = Stream() if is_stream else seq2seq_rows(3)
    options = OPTIONS | {"max_steps": 1, "eval_strategy": "epoch", "per_device_eval_batch_size": 9}
    more = {"offload": replace(TIGHT, vram=FIXED + (1 << 20)), "eval_dataset": held_out}
    trainer = train(tmp_path, t5(), seq2seq_rows(4), OwnLoss, more, **options)
    work = trainer.engine.plan.basis.work
    assert (work.rows.batch_size, work.evaluation.rows.batch_size) == (2, 9 if is_stream else 3)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_a_budget_that_is_too_small_is_refused_before_training(tmp_path: Path, run: str) -> None:
    rows = seq2seq_rows(4)
    trainer = OffloadSeq2SeqTrainer(
        model=t5(), args=arguments(tmp_path), train_dataset=rows, eval_dataset=rows, offload=OffloadConfig(vram="64KiB")
    )
    with pytest.raises(DoesNotFitError, match=r"needs .* VRAM, has 64 KiB(.|\n)*1\. .* would fit"):
        getattr(trainer, run)()


@pytest.mark.usefixtures("on_a_card")
def test_the_trainer_and_the_engine_propose_the_disk_as_finetune_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(plan: Any) -> None:
        proposed = plan.basis.with_disk
        raise PlannedError(proposed and (proposed.disk_folder, proposed.disk_read_bytes_per_second))

    for module in (start, trainer_plan):
        monkeypatch.setattr(module, "check_fits", refused)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    for vram, proposed in (("64KiB", (str(tmp_path), ASSUMED_DISK)), ("64GiB", None)):
        config = OffloadConfig(vram=vram)
        sets: dict[str, Any] = {"args": arguments(tmp_path), "train_dataset": seq2seq_rows(4)}
        with pytest.raises(PlannedError) as raised:
            OffloadSeq2SeqTrainer(model=t5(), offload=config, **sets).train()
        assert raised.value.args == (proposed,)
        with pytest.raises(PlannedError) as raised:
            OffloadEngine(t5(), config, device="cpu", example=next(batches(seq2seq_rows(4))))
        assert raised.value.args == (proposed,)


@pytest.mark.usefixtures("on_a_card")
def test_fewer_rows_are_proposed_by_the_doors_own_name_for_them() -> None:
    example = {name: torch.zeros(16, 256, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    config = replace(TIGHT, vram=FIXED - LOADED_LATER_BYTES + (8 << 20))
    planned = outline.plan_for(t5(), config, torch.device("cpu"), example, rows_option="batch")
    assert planned is not None
    assert [options for options, _ in planned.basis.smaller] == [(f"batch={size}",) for size in (8, 4, 2, 1)]
    assert re.match(r"1\. batch=\d+ would fit", planned.explain())


@pytest.mark.usefixtures("on_a_card")
def test_an_evaluation_before_training_streams_weights_that_are_larger_than_half_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, losses = seq2seq_rows(4), []
    for half in (1 << 10, 1 << 40):
        trainer = OffloadSeq2SeqTrainer(
            model=t5(), args=arguments(tmp_path), train_dataset=rows, eval_dataset=rows, offload=TIGHT
        )
        monkeypatch.setattr("offloadkit.hf.evaluations.parse_bytes", lambda _, half=half: half)
        losses.append(trainer.evaluate()["eval_loss"])
        assert (trainer.engine is not None) == (half == 1 << 10)
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_evaluation_before_training_keeps_the_budget_and_reads_the_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t5().save_pretrained(tmp_path)
    model, done = from_pretrained(tmp_path), list[Any]()

    class Cap:
        def __init__(self, limit: int | None, device: torch.device) -> None:
            done.append((limit, is_unread(model)))

        def remove(self) -> None:
            done.append("uncapped")

    monkeypatch.setattr("offloadkit.hf.evaluations.VramCap", Cap)
    more: Any = {"offload": OffloadConfig(vram="8GiB")}
    trainer = OffloadSeq2SeqTrainer(model=model, args=arguments(tmp_path), eval_dataset=seq2seq_rows(2), **more)
    for _ in range(2):
        trainer.evaluate()
    assert done == [(8 << 30, True), "uncapped", (8 << 30, False), "uncapped"]


# -- the longest rows


class Counted(list[Any]):
    """Counts reads of its rows; each read draws a random number."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        torch.rand(1)
        return super().__getitem__(at)


class Pads:
    """Pads to the longest row and draws numbers from a private generator."""

    def __init__(self) -> None:
        self.generator, self.calls = torch.Generator().manual_seed(0), 0

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        self.calls += 1
        torch.rand(1, generator=self.generator)
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad([row[name] for row in rows], batch_first=True) for name in rows[0]}


class PadsWithMask(Pads):
    """Pads to a multiple, with an attention mask."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiple = multiple

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        batch = super().__call__([*rows, {name: row[:0] for name, row in rows[0].items()}])
        ids = batch["input_ids"][:-1]
        ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % self.multiple))
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": ids, "labels": batch["labels"][:-1], "attention_mask": mask}


def of_lengths(lengths: list[tuple[int, int]]) -> Counted:
    return Counted({"input_ids": torch.arange(read), "labels": torch.arange(written)} for read, written in lengths)


def shapes(call: Call) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in call.kwargs.items()}


def test_the_longest_rows_are_read_without_a_trace(tmp_path: Path) -> None:
    """The longest input and target may come from different rows, also from the evaluation set."""
    rows, held_out = of_lengths([(3, 2), (9, 1), (4, 7), (5, 5)]), of_lengths([(2, 8)])
    collator = Pads()
    options: dict[str, Any] = {"model": t5(), "train_dataset": rows, "eval_dataset": held_out}
    state = torch.get_rng_state()
    found = []
    for strategy in ("no", "epoch"):
        args = arguments(tmp_path, eval_strategy=strategy, per_device_train_batch_size=1)
        trainer = OffloadTrainer(args=args, data_collator=collator, **options)
        torch.set_rng_state(state)
        found.append(shapes(longest_batch(trainer)[0]))
    assert found == [{"input_ids": (1, 9), "labels": (1, written)} for written in (7, 8)]
    assert (rows.reads, held_out.reads, collator.calls) == (0, 0, 0)
    assert collator.generator.get_state().equal(torch.Generator().manual_seed(0).get_state())
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "multiple", "full"),
    [
        ((8, 5, 3, 1), 1, 1, True),
        ((8, 8, 8, 8), 2, 1, True),
        ((8, 8, 3, 3), 2, 1, False),
        ((8, 6, 4, 2), 1, 8, False),
    ],
)
def test_masks_of_other_than_the_longest_rows_are_read(
    lengths: tuple[int, ...], batch_size: int, multiple: int, full: bool, tmp_path: Path
) -> None:
    """One row is padded only to a multiple. The two longest of four rows have the same length."""
    rows = of_lengths([(length, 2) for length in lengths])
    args = arguments(tmp_path, per_device_train_batch_size=batch_size)
    trainer = OffloadTrainer(model=t5(), args=args, train_dataset=rows, data_collator=PadsWithMask(multiple))
    call, *_ = longest_batch(trainer)
    assert shapes(call)["attention_mask"] == (batch_size, 8)
    assert call.masks_nothing == full


@pytest.mark.parametrize(
    ("batch_size", "is_dataset", "column", "padded", "full"),
    [
        (1, True, True, 37, False),
        (2, False, True, 37, False),
        (2, True, True, None, True),
        (2, True, False, None, True),
    ],
)
def test_masks_of_rows_that_were_padded_beforehand_are_all_read(
    batch_size: int, is_dataset: bool, column: bool, padded: int | None, full: bool, tmp_path: Path
) -> None:
    """All rows have the same length. One row of the 50 may be padded."""
    rows = [{"input_ids": [1] * 8, "labels": [1] * 8} for _ in range(50)]
    if column:
        rows = [row | {"attention_mask": [1] * 7 + [int(at != padded)]} for at, row in enumerate(rows)]

    def collate(some: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = {name: torch.tensor([row[name] for row in some]) for name in some[0]}
        return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}

    trainer = OffloadTrainer(
        model=t5(),
        args=arguments(tmp_path, per_device_train_batch_size=batch_size),
        train_dataset=datasets.Dataset.from_list(rows) if is_dataset else rows,
        data_collator=collate,
    )
    assert longest_batch(trainer)[0].masks_nothing == full


def test_rows_that_were_not_all_read_may_be_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, collate = of_lengths([(8, 2)] * 5), PadsWithMask(1)
    trainer = OffloadTrainer(model=t5(), args=arguments(tmp_path), train_dataset=rows, data_collator=collate)
    assert longest_batch(trainer)[0].masks_nothing
    monkeypatch.setattr("offloadkit.hf.longest.MOST_ROWS", 4)
    assert not longest_batch(trainer)[0].masks_nothing


def test_evaluation_may_pad_rows_that_training_reads_one_by_one(tmp_path: Path) -> None:
    sets: Any = dict.fromkeys(("train_dataset", "eval_dataset"), of_lengths([(8, 2), (5, 2)]))
    options: dict[str, Any] = {"per_device_train_batch_size": 1, "eval_strategy": "epoch"}
    for size in (1, 2):
        args = arguments(tmp_path, per_device_eval_batch_size=size, **options)
        trainer = OffloadTrainer(model=t5(), args=args, data_collator=PadsWithMask(1), **sets)
        assert longest_batch(trainer)[0].masks_nothing == (size == 1)


def test_a_trainers_plan_counts_no_mask_of_unread_padding(tmp_path: Path) -> None:
    def kept(shortest: int, side: str) -> tuple[Padding, int]:
        tokenizer = word_tokenizer()
        tokenizer.padding_side = side
        rows = [{"input_ids": [5] * length, "labels": [5] * length} for length in (8, 8, 8, shortest)]
        config, collate = OffloadConfig(ram="900GiB"), DataCollatorForSeq2Seq(tokenizer)
        args = arguments(tmp_path, per_device_train_batch_size=2)
        trainer = OffloadTrainer(model=llama(), args=args, train_dataset=rows, data_collator=collate, offload=config)
        made = trainer_plan.TrainerPlan(None).make(trainer, config)
        assert made is not None
        assert made.basis.work is not None
        return longest_batch(trainer)[1], made.basis.work.stages[1].kept_bytes

    (full, without), (unread, right), (read, left) = kept(8, "right"), kept(5, "right"), kept(5, "left")
    assert (full, unread, read) == tuple(Padding)
    assert without == right < left


def test_a_loss_that_labels_are_smoothed_in_is_not_planned_as_the_models_own(tmp_path: Path) -> None:
    """Label smoothing needs the whole logits."""
    args = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(NotReadableError, match="label_smoothing_factor"):
        longest_batch(OffloadTrainer(model=t5(), args=args, train_dataset=seq2seq_rows(2)))


def test_of_many_rows_some_thousand_are_read_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadkit.hf.longest.MOST_ROWS", 4)
    rows = of_lengths([(2 + at, 3) for at in range(10)])
    batch, _, said, _ = longest_batch(
        OffloadTrainer(model=t5(), args=arguments(tmp_path), train_dataset=rows, data_collator=Pads())
    )
    assert shapes(batch) == {"input_ids": (2, 11), "labels": (2, 3)}
    assert said == "lengths of 4 of the 10 rows were read, evenly spaced"


class Stream(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        return iter(seq2seq_rows(3))


class Endless(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        return iter(())


def refuses(rows: Any) -> Any:
    raise RuntimeError("these rows\ncannot be put together")


@pytest.mark.parametrize(
    ("rows", "collator", "why"),
    [
        (None, None, "no training rows"),
        (Endless(), None, "a stream"),
        ([], None, "no rows"),
        (seq2seq_rows(2), refuses, "cannot be put together"),
    ],
)
def test_rows_that_cannot_be_read_are_said_to_be_so(tmp_path: Path, rows: Any, collator: Any, why: str) -> None:
    trainer = OffloadTrainer(model=t5(), args=arguments(tmp_path), train_dataset=rows, data_collator=collator)
    before = {*multiprocessing.active_children()}  # ranks of other tests
    with pytest.raises(NotReadableError, match=why):
        longest_batch(trainer)
    assert {*multiprocessing.active_children()} <= before


def test_a_model_in_eval_mode_that_should_be_recomputed_is_told_of() -> None:
    config = OffloadConfig(placement=Placement(activations="checkpoint"))
    warned = pytest.warns(RuntimeWarning, match=r"the model is in eval mode.*call model.train\(\) first")
    with OffloadEngine(t5().eval(), config, device="cpu") as engine, warned:
        engine(**next(batches(seq2seq_rows(2))))


def test_a_model_in_memory_counts_while_it_is_read() -> None:
    model = t5()
    size = sum(parameter.nbytes for parameter in model.parameters())
    config, example = OffloadConfig(ram="900GiB"), next(batches(seq2seq_rows(2)))
    with OffloadEngine(model, config, device="cpu", example=example) as engine:
        plan = engine.plan
    assert plan.basis.held_bytes == size
    alone = replace(plan, basis=replace(plan.basis, held_bytes=0))
    (reading, *others), (read_alone, *others_alone) = plan.phases, alone.phases
    assert read_alone.ram != reading.ram < read_alone.ram + size, "its layers are freed one by one"
    assert others == others_alone
    assert plan.needs() == alone.needs()
