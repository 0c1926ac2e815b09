"""A resumed run names the options that differ from the saved ones, and refuses checkpoints that lack files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit import OffloadConfig, OffloadEngine, OffloadSeq2SeqTrainer
from offloadkit.errors import ConfigError, ModelError
from tests.hf.tiny import t5_config
from tests.hf.training import Row, arguments, bert, logged, seq2seq_rows, t5, train

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


def trainer(folder: Path, *, offload: OffloadConfig | None = None, **options: Any) -> OffloadSeq2SeqTrainer:
    args = arguments(folder, **(STEPS | options))
    return OffloadSeq2SeqTrainer(model=t5(dropout=0.1), args=args, train_dataset=seq2seq_rows(), offload=offload)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The second of three checkpoints written by transformers' own Trainer."""
    args = arguments(tmp_path, **STEPS)
    Seq2SeqTrainer(model=t5(dropout=0.1), args=args, train_dataset=seq2seq_rows()).train()
    return tmp_path / "checkpoint-2"


def trained(one: OffloadSeq2SeqTrainer, checkpoint: Path) -> dict[str, torch.Tensor]:
    one.train(resume_from_checkpoint=str(checkpoint))
    found = {name: weight.clone() for name, weight in one.model.state_dict().items()}
    one.close()
    return found


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth"])
def test_a_checkpoint_of_transformers_without_a_file_is_refused_unless_asked(
    theirs: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(trainer(theirs.parent), theirs)
    (theirs / name).unlink()
    with pytest.raises(ConfigError, match=rf"checkpoint-2 lacks {name}.*resume_incomplete=True"):
        trainer(theirs.parent).train(resume_from_checkpoint=str(theirs))
    again = trained(trainer(theirs.parent, offload=OffloadConfig(resume_incomplete=True)), theirs)
    assert f"lacks {name}" in capsys.readouterr().out
    # The optimizer's states are loaded and the schedule continues at the step: only random states make a difference.
    same = all(torch.equal(weight, whole[key]) for key, weight in again.items())
    assert same == (name == "scheduler.pt")


def test_a_stray_loss_scale_of_transformers_is_ignored_with_a_line(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"scale": 65536.0}, theirs / "scaler.pt")
    trained(trainer(theirs.parent), theirs)
    assert "scaler.pt is ignored" in capsys.readouterr().out


def test_options_that_a_resumed_trainer_was_given_anew_are_named(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train()
    first.close()
    with pytest.warns(RuntimeWarning) as warned:
        trained(trainer(tmp_path, learning_rate=0.5, weight_decay=0.25, adam_beta2=0.5), tmp_path / "checkpoint-2")
    said = "\n".join(str(warning.message) for warning in warned)
    assert re.search(r"lr=0\.\d+ of group 0 \(given now: 0\.5\)", said)
    assert re.search(r"weight_decay=0\.0 of group 0 \(given now: 0\.25\)", said)
    assert re.search(r"betas=[^=]* of group 0 \(given now: [^=]*0\.5", said)


def test_a_trainer_resumed_with_the_same_options_says_nothing(tmp_path: Path) -> None:
    first = trainer(tmp_path, warmup_steps=2)
    first.train()
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trained(trainer(tmp_path, warmup_steps=2), tmp_path / "checkpoint-1")


def engine(**options: Any) -> OffloadEngine:
    torch.manual_seed(0)
    return OffloadEngine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), OffloadConfig(**options), device="cpu")


@pytest.mark.parametrize("way", ["checkpoint", "state_dict", "optimizer"])
def test_an_option_that_the_bare_loop_was_given_anew_is_named_and_the_saved_one_counts(
    tmp_path: Path, way: str
) -> None:
    with engine(learning_rate=0.1, weight_decay=0.5) as first:
        first.backward(first(torch.ones(2, 4)).sum())
        first.step()
        first.save_checkpoint(tmp_path / "saved")
        state, states = first.state_dict(), first.optimizer.state_dict()
        with engine(learning_rate=0.2, weight_decay=0.5) as second:
            load: dict[str, Any] = {
                "checkpoint": lambda: second.load_checkpoint(tmp_path / "saved"),
                "state_dict": lambda: second.load_state_dict(state),
                "optimizer": lambda: second.optimizer.load_state_dict(states),
            }
            with pytest.warns(RuntimeWarning, match=r"lr=0\.1 \(given now: 0\.2\)\. To change one"):
                load[way]()
            assert second.optimizer.param_groups[0]["lr"] == 0.1


def test_a_resumed_trainer_names_keys_of_the_config_that_differ_and_refuses_other_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trainer(tmp_path)
    first.train()
    first.close()
    capsys.readouterr()
    trained(trainer(tmp_path), tmp_path / "checkpoint-1")
    assert "differs" not in capsys.readouterr().out
    args = arguments(tmp_path, **STEPS)
    other = OffloadSeq2SeqTrainer(model=t5(dropout=0.3), args=args, train_dataset=seq2seq_rows())
    trained(other, tmp_path / "checkpoint-1")
    assert "dropout_rate 0.1 (now 0.3). The run goes on with this model's" in capsys.readouterr().out
    larger = T5ForConditionalGeneration(T5Config(**{**t5().config.to_dict(), "num_heads": 4}))
    with pytest.raises(ConfigError, match="from another model, with num_attention_heads 2, but this model has 4"):
        OffloadSeq2SeqTrainer(model=larger, args=args, train_dataset=seq2seq_rows()).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )


def without(folder: Path, word: str) -> None:
    """Remove the tensors with `word` in their names from the weights in `folder`."""
    kept = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if word not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_that_lacks_weights_is_refused_by_name_unless_asked(theirs: Path) -> None:
    without(theirs, "decoder.block.1")
    with pytest.raises(ModelError, match=r"lacks 13 of the model's \d+ tensors, such as 'decoder\.block\.1\."):
        trainer(theirs.parent).train(resume_from_checkpoint=str(theirs))
    trained(trainer(theirs.parent, offload=OffloadConfig(resume_incomplete=True)), theirs)


@pytest.mark.parametrize("word", ["decoder.block.1", ""])
def test_a_folder_that_lacks_tensors_is_refused_by_name_unless_asked(tmp_path: Path, word: str) -> None:
    whole = T5ForConditionalGeneration(T5Config(**t5_config().to_dict()))
    whole.save_pretrained(tmp_path / "model")
    without(tmp_path / "model", word)
    said = r"model lacks \d+ of \d+ tensors of T5ForConditionalGeneration, such as '.*allow_missing=True"
    with pytest.raises(ModelError, match=said):
        offloadkit.from_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match=said):
        offloadkit.finetune(
            tmp_path / "model", [{"input": "a", "target": "b"}], tokenizer="byte", batch_size=1, max_steps=1,
            use_cpu=True, output_dir=tmp_path / "out",
        )  # fmt: skip
    drawn = offloadkit.from_pretrained(tmp_path / "model", allow_missing=True)
    assert len(list(drawn.parameters())) == len(list(whole.parameters()))


def test_a_classifier_may_begin_with_a_new_head_but_not_without_its_base(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    without(tmp_path, "classifier")
    offloadkit.from_pretrained(tmp_path, task="classification")
    without(tmp_path, "encoder.layer.1")
    with pytest.raises(ModelError, match=r"lacks 16 of \d+ tensors of BertForSequenceClassification"):
        offloadkit.from_pretrained(tmp_path, task="classification")


class Stream(IterableDataset[Row]):
    """Four micro-batches a pass."""

    def __iter__(self) -> Iterator[Row]:
        return iter(seq2seq_rows(8))


@pytest.mark.parametrize(("saved_at", "warns"), [(3, False), (4, False), (5, True)])
def test_a_stream_that_goes_on_at_other_rows_in_its_second_pass_is_warned_of(
    tmp_path: Path, saved_at: int, warns: bool
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": saved_at, "lr_scheduler_type": "constant"}
    whole = train(tmp_path / "whole", t5(), Stream(), max_steps=6, **options)
    args = arguments(tmp_path / "whole", max_steps=6, **options)
    resumed = OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=Stream())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved_at}"))
    said = [str(each.message) for each in caught if "pass 2 over the stream of rows" in str(each.message)]
    assert len(said) == warns
    assert (logged(resumed, "loss")[-1] == logged(whole, "loss")[-1]) != warns
