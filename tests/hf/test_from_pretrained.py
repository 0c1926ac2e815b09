"""`offloadkit.from_pretrained`: every door reads weights into place, and trains as with transformers' own loading."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    Trainer,
)

import offloadkit
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.saving import read_later
from offloadkit.hf.source import from_pretrained
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer, OffloadTrainerMixin
from offloadkit.offload.states import LayerState
from offloadkit.offload.unread import is_unread, make_real
from tests.hf import tiny
from tests.hf.test_loading import assert_same
from tests.hf.test_loading_engine import numbers, written
from tests.hf.tiny import load_model
from tests.hf.training import arguments, causal_rows, seq2seq_rows

TOKENS = torch.arange(8).view(2, 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tiny.llama_config(tie_word_embeddings=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tiny.t5_config(dropout_rate=0.0), tmp_path_factory.mktemp("t5"))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> dict[nn.Module, list[int]]:
    """Maps a model to the bytes of its real weights outside the engine, noted before every layer is taken over."""
    found: dict[nn.Module, list[int]] = {}
    taken: set[nn.Parameter] = set()
    real = LayerState.take_parameters

    def take(state: LayerState) -> None:
        own = {view.parameter for view in state.layer.views}
        taken.update(own)
        for model, each in found.items():
            if own & set(model.parameters()):
                each.append(sum(p.nbytes for p in model.parameters() if not p.is_meta and p not in taken))
        real(state)

    monkeypatch.setattr(LayerState, "take_parameters", take)
    return found


class Wrapped(nn.Module):
    """A user's module around a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def loop(model: nn.Module, folder: Path) -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", placement=Placement(weights="ram"))
    with OffloadEngine(Wrapped(model), config, device="cpu", example={"input_ids": TOKENS, "labels": TOKENS}) as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
            engine.step()


def deepspeeds(model: nn.Module, folder: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_batch_size": 2, "optimizer": optimizer}
    engine, *_ = offloadkit.initialize(model=model, config=config, dist_init_required=False)
    for _ in range(2):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
    engine.destroy()


def trainers(kind: type[Any], rows: Any) -> Callable[[nn.Module, Path], None]:
    def train(model: nn.Module, folder: Path) -> None:
        offload = OffloadConfig(vram="4GiB")
        with closing(kind(model=model, args=arguments(folder), train_dataset=rows, offload=offload)) as trainer:
            trainer.train()

    return train


class OfSomebodyElse(OffloadTrainerMixin, Trainer):  # type: ignore[misc, unused-ignore]
    """Like `class Mine(OffloadTrainerMixin, SFTTrainer)`."""

    def __init__(self, *, model: Any, **options: Any) -> None:
        model.config.use_cache = False
        model.generation_config.max_length = 9
        assert sum(parameter.numel() for parameter in model.parameters())
        super().__init__(model=model, **options)


@pytest.mark.parametrize(
    ("model", "train"),
    [
        pytest.param("llama", trainers(OffloadTrainer, causal_rows()), marks=pytest.mark.slow),
        ("llama", trainers(OfSomebodyElse, causal_rows())),
        ("t5", trainers(OffloadSeq2SeqTrainer, seq2seq_rows())),
        ("llama", loop),
        ("llama", deepspeeds),
    ],
    ids=["OffloadTrainer", "mixin", "OffloadSeq2SeqTrainer", "OffloadEngine", "initialize"],
)
def test_every_door_reads_into_place_and_trains_the_same(
    model: str,
    train: Callable[[nn.Module, Path], None],
    tmp_path: Path,
    beside: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = request.getfixturevalue(model)
    theirs = (AutoModelForSeq2SeqLM if model == "t5" else AutoModelForCausalLM).from_pretrained(folder)
    ours = from_pretrained(folder)
    assert is_unread(ours)
    assert type(ours) is type(theirs)
    assert ours.training == theirs.training
    before = {name: each for name, each in theirs.generation_config.to_dict().items() if each is not None}
    assert before.items() <= ours.generation_config.to_dict().items()
    for each in (ours, theirs):
        beside[each] = []
        each.train()
        train(each, tmp_path)
    assert len(beside[ours]) == len(beside[theirs]) > 1
    assert max(beside[ours]) == 0 < max(beside[theirs])
    assert not is_unread(ours)
    assert_same(ours, theirs)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_weights_are_those_of_a_whole_model(init: Any, t5: Path) -> None:
    torch.manual_seed(0)
    model = from_pretrained(t5, dtype=torch.bfloat16, init=init)
    make_real(model.parameters())
    torch.manual_seed(0)
    assert_same(model, load_model(t5, dtype=torch.bfloat16, init=init))


def test_a_head_that_the_checkpoint_lacks_is_drawn_as_by_transformers(tmp_path: Path) -> None:
    BertForMaskedLM(tiny.bert_config()).save_pretrained(tmp_path)
    torch.manual_seed(0)
    model: Any = from_pretrained(tmp_path, task="classification", num_labels=3)
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert not model.classifier.weight.is_meta
    make_real(model.parameters())
    assert_same(model, theirs)
    assert model.config.num_labels == 3
    theirs.config.id2label = {0: "bad", 1: "so-so", 2: "good"}
    theirs.save_pretrained(tmp_path / "named")
    named = from_pretrained(tmp_path / "named", task="classification", num_labels=3)
    assert named.config.id2label == theirs.config.id2label


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dtype": "bfloat16"}, "dtype must be a torch.dtype"),
        ({"init": "none"}, "init must be 'pretrained' or 'random'"),
        ({"num_labels": 0}, "num_labels must be a whole number >= 1"),
        ({"num_labels": 3}, "num_labels=3 is for task='classification'; this model's is 'seq2seq'"),
    ],
)
def test_wrong_options_are_refused(options: Any, what: str, t5: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        from_pretrained(t5, **options)


USES: dict[str, Callable[[Any, Path], object]] = {
    "forward": lambda model, _: model(input_ids=TOKENS),
    "generate": lambda model, _: model.generate(TOKENS, max_new_tokens=1),
    "move": lambda model, _: model.to("cpu"),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.dumps(model),
    "save": lambda model, folder: torch.save(model.state_dict(), folder / "saved"),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "write": lambda model, _: nn.init.zeros_(model.lm_head.weight),
    "write data": lambda model, _: model.lm_head.weight.data.normal_(),
    "write an element": lambda model, _: model.lm_head.weight.data.__setitem__(0, 1.0),
    "write a view": lambda model, _: model.lm_head.weight.detach().view(-1).mul_(5),
    "write a view of data": lambda model, _: model.lm_head.weight.data[0].zero_(),
    "load": lambda model, _: model.load_state_dict({"lm_head.weight": torch.ones(64, 16)}, strict=False),
}


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
def test_using_weights_that_are_not_read_yet_says_what_to_do(llama: Path, tmp_path: Path) -> None:
    model: Any = from_pretrained(llama)
    for use in USES.values():
        with pytest.raises((ModelError, RuntimeError), match="not read yet"):
            use(model, tmp_path)
    assert is_unread(model)
    model.to(torch.bfloat16)
    make_real(model.parameters())
    assert_same(model, load_model(llama).bfloat16())
    assert pickle.loads(pickle.dumps(model)).lm_head.weight.equal(model.lm_head.weight)


def test_an_embedding_is_not_resized_before_it_is_read(llama: Path) -> None:
    model: Any = from_pretrained(llama)
    with pytest.raises(ModelError, match="not read yet"):
        model.resize_token_embeddings(70, mean_resizing=False)


def test_an_engine_that_could_not_be_built_leaves_all_numbers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 on disk, bf16 in the engine: the bits beyond bf16 survive until another engine takes the model."""
    config, found = OffloadConfig(working_dtype="bf16"), []
    for fails in (False, True):
        model = from_pretrained(llama)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(LayerState, "take_parameters", failing(LayerState.take_parameters, 3))
                with pytest.raises(ModelError, match="no RAM"):
                    OffloadEngine(model, config, device="cpu")
        with OffloadEngine(model, config, device="cpu") as engine:
            found.append(numbers(engine))
        with OffloadEngine(model, config, device="cpu"):  # the weights are real now
            pass
    assert found[0].keys() == found[1].keys()
    assert all(value.equal(found[1][name]) for name, value in found[0].items())
    assert any(value.any() for name, value in found[0].items() if name.endswith("remainder"))


def failing(real: Any, number: int) -> Any:
    calls: list[Any] = []

    def take(state: LayerState) -> None:
        calls.append(state)
        if len(calls) == number:
            raise ModelError("no RAM")
        real(state)

    return take


@pytest.mark.parametrize("renamed", [False, True])
def test_a_resumed_trainer_reads_the_checkpoints_weights_instead(
    renamed: bool, llama: Path, tmp_path: Path, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tensors in the checkpoint have other names, transformers must map them, so the weights are read before."""

    def trained(checkpoint: str | None) -> Any:
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, bf16=True)
        model = from_pretrained(llama)
        beside[model] = []
        with closing(OffloadTrainer(model=model, args=args, train_dataset=causal_rows())) as trainer:
            trainer.train(resume_from_checkpoint=checkpoint)
        return model

    straight = trained(None)
    if renamed:
        monkeypatch.setattr("offloadkit.hf.checkpoints.read_later", lambda model, folder: False)
    resumed = trained(str(tmp_path / "checkpoint-2"))
    assert (max(beside[resumed]) == 0) != renamed
    assert_same(straight, resumed)


def test_a_checkpoint_in_the_working_directory_takes_the_place_of_drawn_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama)
    model = from_pretrained(llama, init="random")
    assert read_later(model, Path())
    make_real(model.parameters())
    assert_same(model, load_model(llama))


def test_a_checkpoint_of_other_tensors_is_not_read_later(llama: Path, t5: Path) -> None:
    model: Any = from_pretrained(llama)
    assert not read_later(model, t5)
    make_real(model.parameters())
    assert_same(model, load_model(llama))


def test_a_plan_of_such_a_model_reads_nothing(t5: Path) -> None:
    model = from_pretrained(t5)
    sizes: dict[str, Any] = {"batch_size": 2, "max_input_length": 8, "max_target_length": 8}
    assert offloadkit.plan(model, **sizes).total_bytes("ram") == offloadkit.plan(str(t5), **sizes).total_bytes("ram")
    assert is_unread(model)
