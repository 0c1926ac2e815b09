"""Attention masks equal those made by transformers, with fewer questions to the GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
    masking_utils,
)
from transformers.masking_utils import causal_mask_function, eager_mask

from offloadkit import OffloadConfig, OffloadEngine, plan
from offloadkit.facts import changes
from offloadkit.hf import masks
from offloadkit.hf.masks import NOTE, Padding, PaddingCollator, added_mask
from offloadkit.hf.patches import patched
from offloadkit.hf.tokenize import IGNORED
from offloadkit.hf.trainer import OffloadTrainer
from tests.hf.tiny import bert_config, llama_config, t5_config
from tests.hf.training import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTIONS = ("fast_all", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices")
"""Functions of transformers that synchronise with the GPU."""
REPLACED = (*QUESTIONS, "_ignore_causal_mask_sdpa")
"""Functions of transformers that are replaced during training."""


@pytest.fixture(autouse=True)
def _transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore transformers' functions, which unclosed models of earlier tests may have replaced."""
    gc.collect()
    for name in REPLACED:
        monkeypatch.setattr(masking_utils, name, changes.unclaimed(masking_utils, name))
        assert getattr(masking_utils, name).__module__ == masking_utils.__name__
    monkeypatch.setattr(changes, "claims", {})
    monkeypatch.setattr(masks, "answers", masks.MaskFunctions())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(6, 6), (6, 2), None])
def test_our_attentions_masks_are_transformers_own(causal: bool, lengths: Any) -> None:
    mask = None if lengths is None else torch.arange(6) < torch.tensor(lengths)[:, None]
    given: dict[str, Any] = {"batch_size": 2, "q_length": 5, "kv_length": 6, "attention_mask": mask}
    given |= {"dtype": torch.bfloat16, "allow_is_bidirectional_skip": not causal}
    given["mask_function"] = causal_mask_function if causal else masking_utils.bidirectional_mask_function
    mine, theirs = added_mask(**given), eager_mask(**given)
    if theirs is None:
        assert (mine is None) == (mask is None)
        assert mine is None or not mine.any()
    else:
        assert mine is not None
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
        assert causal or mine.untyped_storage().nbytes() == theirs[:, :, :1].nbytes


def model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(llama_config(attn_implementation="sdpa"))
    if kind == "t5":
        return T5ForConditionalGeneration(t5_config())
    return BertForSequenceClassification(bert_config(attn_implementation="sdpa", num_labels=2))


def rows(kind: str, lengths: list[int], ignored: bool = False) -> list[dict[str, Any]]:
    made = []
    for length in lengths:
        row: dict[str, Any] = {"input_ids": torch.arange(8) + 3, "attention_mask": (torch.arange(8) < length).long()}
        row["labels"] = row["input_ids"] if kind == "llama" else torch.tensor(length % 2)
        if ignored:
            row["labels"] = row["labels"].where(row["attention_mask"].bool(), IGNORED)
        made.append(row)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions in `QUESTIONS`, and `padding_of` in a forward, that are called."""
    found: list[str] = []
    padding_of = masks.padding_of

    def ask_once(*args: Any) -> Padding:
        found.extend(["padding_of"] if masks._known.mask is not None else [])
        return padding_of(*args)

    monkeypatch.setattr(masks, "padding_of", ask_once)
    for name in QUESTIONS:
        own = getattr(masking_utils, name)

        def ask(*args: Any, own: Any = own, name: str = name) -> Any:
            looks = name != "_ignore_bidirectional_mask_sdpa" or args[0] is not None
            found.extend([name] if looks else [])
            return own(*args)

        monkeypatch.setattr(masking_utils, name, ask)
    return found


LENGTHS = {"full": [8, 8, 8, 8], "ragged": [8, 3, 5, 8], "mixed": [8, 8, 3, 8]}


@pytest.mark.parametrize(
    ("kind", "lengths", "ignored"),
    [("llama", "full", False), ("bert", "ragged", False), ("llama", "mixed", False), ("llama", "mixed", True)],
)
def test_a_trainer_asks_nothing_and_computes_the_same(
    kind: str, lengths: str, ignored: bool, asked: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 2, "train_sampling_strategy": "sequential"}

    class Asks(OffloadTrainer):
        def compute_loss(self, *args: Any, **more: Any) -> Any:  # it may ask about its own masks
            return super().compute_loss(*args, **more)

    found = []
    for trainer in (OffloadTrainer, Asks):
        asked.clear()
        trained = trainer(
            model=model(kind), args=arguments(tmp_path, **options), train_dataset=rows(kind, LENGTHS[lengths], ignored)
        )
        trained.train()
        trained.close()
        found.append((list(asked), [weight.detach().clone() for weight in trained.model.parameters()]))
    (none, mine), (some, theirs) = found
    assert none == []
    assert some
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_loop_without_masks_and_positions_is_not_asked_whether_rows_are_packed(asked: list[str]) -> None:
    batch = {"input_ids": torch.arange(8)[None] + 3, "labels": torch.arange(8)[None] + 3}
    with OffloadEngine(model("llama"), OffloadConfig(), device="cpu") as engine:
        alone = engine(**batch).loss
        assert asked == []
        engine.backward(alone)
        engine.step()
        packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
        assert not torch.equal(engine(**batch, position_ids=packed).loss, alone)
        assert asked == []  # `packed.py` has found the rows


@torch.no_grad()
def test_what_an_interrupted_forward_knew_is_forgotten_when_the_engine_closes() -> None:
    """torch runs no forward hook after an interrupt. Packed rows would attend to each other."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    trained = model("llama")
    packed: dict[str, Any] = {"input_ids": torch.arange(6)[None] + 3, "use_cache": False}
    packed["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2]])
    before = trained(**packed).logits
    with OffloadEngine(trained, OffloadConfig(), device="cpu") as engine:
        hook = trained.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(input_ids=packed["input_ids"])
        hook.remove()
    assert torch.equal(trained(**packed).logits, before)


def questions() -> list[Any]:
    return [getattr(masking_utils, name) for name in REPLACED]


@pytest.mark.parametrize(("kind", "budget"), [("llama", None), ("t5", "1GiB")])
def test_transformers_has_its_own_functions_when_the_last_engine_closes(kind: str, budget: str | None) -> None:
    """With a budget the engine plans, and traces the model."""
    own, config = questions(), OffloadConfig(vram=budget)
    first = OffloadEngine(model(kind), config, device="cpu")
    ours = questions()
    assert not set(ours) & set(own)
    second = OffloadEngine(model(kind), config, device="cpu", example=rows_of_one(kind))
    for engine in (first, second):
        engine.backward(engine(**rows_of_one(kind)).loss)
        engine.step()
    first.close()
    assert questions() == ours
    third = OffloadEngine(model(kind), config, device="cpu")
    second.close()
    assert questions() == ours
    third.close()
    assert questions() == own


def rows_of_one(kind: str) -> dict[str, torch.Tensor]:
    row = {"input_ids": torch.arange(8)[None] + 3, "labels": torch.arange(8)[None] + 3}
    return row | {"attention_mask": torch.ones(1, 8, dtype=torch.int64)} if kind == "t5" else row


def test_a_plan_leaves_transformers_functions_as_they_were() -> None:
    own = questions()
    plan(model("llama"), vram="1GiB", batch_size=1, max_input_length=8)
    assert questions() == own


def test_what_others_have_put_in_the_place_of_transformers_functions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = masking_utils.fast_all, []
    monkeypatch.setattr(masking_utils, "fast_all", own)  # to restore it afterwards
    first = OffloadEngine(model("llama"), OffloadConfig(), device="cpu")
    ours: Any = masking_utils.fast_all

    def theirs(mask: torch.Tensor) -> Any:
        asked.append(mask.shape)
        return ours(mask)

    masking_utils.fast_all = theirs
    second = OffloadEngine(model("llama"), OffloadConfig(), device="cpu")
    assert masking_utils.fast_all is theirs
    first.close()
    second.close()
    assert masking_utils.fast_all is theirs
    assert masking_utils.fast_all(torch.ones(2, 2))
    with OffloadEngine(model("llama"), OffloadConfig(), device="cpu"):
        assert not masking_utils.fast_all(torch.zeros(2, 2))
    assert masking_utils.fast_all is theirs
    assert asked == [(2, 2), (2, 2)]


def test_a_note_is_only_made_where_masks_agree() -> None:
    def noted(*masks: Any) -> Any:
        batch = {f"{number}_attention_mask": mask for number, mask in enumerate(masks)}
        return PaddingCollator(lambda rows: batch)([]).get(NOTE)

    ones, some = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert noted(ones) is Padding.NONE
    assert noted(some) is Padding.READ
    assert noted(ones, ones) is Padding.NONE
    assert noted(ones, some) is None
    assert noted(ones[None]) is None
    assert noted([1]) is None
    assert noted() is None
    assert PaddingCollator(tuple)([1]) == (1,)


# -- padding that no label reads

LEFT, HOLES = [[0, 0, 1, 1, 1, 1], [1] * 6], [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
RIGHT = [[1, 1, 1, 1, 0, 0], [1] * 6]


def padded(mask: list[list[int]], **changes: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6) + 3
    found = {"input_ids": ids, "attention_mask": torch.tensor(mask)}
    return found | {"labels": ids.where(found["attention_mask"].bool(), IGNORED)} | changes


@pytest.fixture
def given_masks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Masks that attention gets."""
    found, own = [], F.scaled_dot_product_attention

    def attend(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        found.append(attn_mask)
        return own(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return found


def results(trained: PreTrainedModel, batch: dict[str, Any]) -> list[torch.Tensor]:
    """The loss and the gradients."""
    loss = trained(**batch).loss
    return [loss, *torch.autograd.grad(loss, list(trained.parameters()))]


@pytest.mark.parametrize(
    ("batch", "window", "unread"),
    [
        (padded(RIGHT), None, True),
        (padded([[1, 1, 0, 0, 0, 0], [0] * 6]), None, True),
        (padded(RIGHT, position_ids=torch.arange(6)[None]), None, True),
        (padded(RIGHT), 7, True),
        (padded(RIGHT), 3, False),
        (padded(LEFT), None, False),
        (padded(HOLES), None, False),
        (padded(RIGHT, labels=torch.arange(12).view(2, 6)), None, False),
        (padded(RIGHT, shift_labels=torch.arange(12).view(2, 6)), None, False),
    ],
)
def test_masks_of_unread_padding_are_left_out_and_losses_and_gradients_stay(
    batch: dict[str, Any], window: int | None, unread: bool, given_masks: list[Any], asked: list[str]
) -> None:
    sizes = {name: number for name, number in llama_config().to_dict().items() if name in vars(MistralConfig())}
    made = model("llama") if window is None else MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    theirs = results(made, batch)
    assert all(mask is not None for mask in given_masks)
    for attention in ("keep", "ours"):
        given_masks.clear()
        asked.clear()
        undo = patched(made, OffloadConfig(attention=attention))
        mine = results(made, batch)
        undo()
        assert {mask is None for mask in given_masks} == {unread and attention == "ours"}
        assert attention == "keep" or "shift_labels" in batch or asked == ["padding_of"]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
