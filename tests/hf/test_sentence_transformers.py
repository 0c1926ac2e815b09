"""sentence-transformers' Trainer with the engine mixed in: the same numbers, also for the weights of its losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertModel

from offloadkit import OffloadConfig, OffloadTrainerMixin
from offloadkit.errors import ModelError
from offloadkit.facts.config import Placement
from tests.hf.tiny import word_tokenizer
from tests.hf.training import assert_close, logged

sentence_transformers = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.losses")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

FIRST = [
    "the cat sat on the mat",
    "a dog",
    "a dog ran under the tree",
    "hello good cat",
    "bad",
    "the good",
    "a",
    "hello",
]
SECOND = [
    "a cat",
    "the dog ran under a tree on the mat",
    "good",
    "hello cat dog",
    "bad dog",
    "the",
    "mat tree",
    "good bad",
]
CLASSES, SCORES = [0, 1, 2, 1, 0, 2, 1, 0], [0.0, 0.5, 1.0, 0.3, 0.2, 0.9, 0.4, 0.7]
LABELS: dict[str, dict[str, Any]] = {"SoftmaxLoss": {"label": CLASSES}, "CosineSimilarityLoss": {"score": SCORES}}
IN_RAM = OffloadConfig(placement=Placement(weights="ram", activations="checkpoint"))


class Ours(OffloadTrainerMixin, sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
    """The class under test."""


def rows(kind: str) -> Dataset:
    return Dataset.from_dict({"a": FIRST, "b": SECOND, **LABELS.get(kind, {})})


def make_loss(kind: str, model: Any) -> Any:
    more = [model.get_embedding_dimension(), 3] if kind == "SoftmaxLoss" else []
    return getattr(losses, kind)(model, *more)


def trained(folder: Path, kinds: list[str], door: Any = Ours, resume: bool | str = False, **given: Any) -> Any:
    """A Trainer after four steps of two micro-batches. Several kinds of losses have one data set each."""
    path = folder / "bert"
    if not path.exists():
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        BertModel(BertConfig(vocab_size=64, max_position_embeddings=48, **shape)).save_pretrained(path)
        word_tokenizer().save_pretrained(path)
    torch.manual_seed(0)
    model = sentence_transformers.SentenceTransformer(str(path), device="cpu")
    more = {"offload": given.pop("offload")} if "offload" in given else {}
    options: dict[str, Any] = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 1, "max_steps": 4,
        "logging_steps": 1, "learning_rate": 1e-2, "adam_epsilon": 1e-4, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.0,
    }  # fmt: skip
    args = sentence_transformers.SentenceTransformerTrainingArguments(str(folder / door.__name__), **(options | given))
    own = {kind: make_loss(kind, model) for kind in kinds}
    data = DatasetDict({kind: rows(kind) for kind in kinds})
    alone = len(kinds) == 1
    trainer = door(
        model=model, args=args, train_dataset=data[kinds[0]] if alone else data, loss=own[kinds[0]] if alone else own,
        **more,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights of the losses, which contain the model."""
    found = trainer.loss if isinstance(trainer.loss, dict) else {"loss": trainer.loss}
    return {f"{at}.{name}": value for at, loss in found.items() for name, value in loss.state_dict().items()}


@pytest.mark.parametrize("offload", [OffloadConfig(), IN_RAM], ids=["vram", "ram"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["SoftmaxLoss"],
        ["CosineSimilarityLoss"],
        ["MultipleNegativesRankingLoss"],
        ["CachedMultipleNegativesRankingLoss"],
        ["SoftmaxLoss", "CosineSimilarityLoss"],
    ],
    ids="+".join,
)
def test_training_equals_sentence_transformers(kinds: list[str], offload: OffloadConfig, tmp_path: Path) -> None:
    theirs = trained(tmp_path, kinds, sentence_transformers.SentenceTransformerTrainer)
    before = weights(theirs) if False else None
    ours = trained(tmp_path, kinds, offload=offload)
    assert before is None
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), abs=2e-6)
    assert_close(weights(ours), weights(theirs), 1e-5)


def test_a_losss_own_weights_have_their_own_rate_and_are_saved_and_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "learning_rate_mapping": {"classifier": 3e-2}}
    theirs = trained(tmp_path, ["SoftmaxLoss"], sentence_transformers.SentenceTransformerTrainer, **options)
    ours = trained(tmp_path, ["SoftmaxLoss"], **options)
    assert_close(weights(ours), weights(theirs), 1e-5)
    assert not list((tmp_path / "Ours").rglob("*.bin"))
    shutil.rmtree(tmp_path / "Ours" / "checkpoint-4")
    again = trained(tmp_path, ["SoftmaxLoss"], resume=True, **options)
    for name, value in weights(ours).items():
        assert torch.equal(weights(again)[name], value), name
    stock = tmp_path / "SentenceTransformerTrainer" / "checkpoint-2"
    with pytest.raises(ModelError, match=r"lacks losses\.safetensors, the losses' own weights \(loss\.classifier"):
        trained(tmp_path, ["SoftmaxLoss"], resume=str(stock), **options)


def test_the_best_model_is_loaded_with_its_losses_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "learning_rate": 0.5, "metric_for_best_model": "eval_loss"}
    options["greater_is_better"] = True  # the best checkpoint is not the newest

    class Evaluated(Ours):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, eval_dataset=kwargs["train_dataset"], **kwargs)

    trainer = trained(tmp_path, ["SoftmaxLoss"], Evaluated, **options)
    each = logged(trainer, "eval_loss")
    assert max(each) > each[-1] + 1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(each), rel=1e-5)
