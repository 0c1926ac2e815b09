"""TRL's Trainers with the engine mixed in, with and without PEFT's adapters: the numbers of a run without the
engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, Seq2SeqTrainer

from offloadkit import OffloadConfig, OffloadSeq2SeqTrainer, OffloadTrainerMixin
from offloadkit.engine import outline
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.trainer_plan import TrainerPlan
from offloadkit.hf.trl_loss import plan_fused_head
from tests import images
from tests.hf.tiny import llama_config, word_tokenizer
from tests.hf.training import assert_close, logged, seq2seq_rows, t5, train
from tests.planner.machines import H200

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TEXTS = [{"text": text} for text in ("the cat sat on the mat", "a dog ran under the tree", "hello good cat", "bad")]
PREFERENCES = [
    {"prompt": "the cat", "chosen": " sat on the mat", "rejected": " ran under"},
    {"prompt": "a dog", "chosen": " ran", "rejected": " sat on the good mat"},
]
ROWS = {"SFT": TEXTS * 2, "DPO": PREFERENCES * 4}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config())


def trained(door: str, folder: Path, *, offloads: bool, adapts: bool) -> Any:
    """A TRL Trainer after four steps of two micro-batches, in fp32."""
    stock = getattr(trl, f"{door}Trainer")
    trainer_class = type(f"Offload{door}", (OffloadTrainerMixin, stock), {}) if offloads else stock
    args = getattr(trl, f"{door}Config")(
        str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no", seed=1,
        max_steps=4, logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-4, per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if adapts:
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    elif door == "DPO":
        more["ref_model"] = llama()
    model = llama()
    rows = Dataset.from_list(ROWS[door])
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=word_tokenizer(), **more)
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("door", ["SFT", "DPO"])
def test_training_equals_trls(door: str, adapts: bool, tmp_path: Path) -> None:
    theirs, ours = (trained(door, tmp_path, offloads=offloads, adapts=adapts) for offloads in (False, True))
    losses = logged(theirs, "loss")
    assert logged(ours, "loss") == pytest.approx(losses, abs=1e-6)
    assert losses[-1] < losses[0] - 1e-3
    assert_close(ours.model.state_dict(), theirs.model.state_dict(), 1e-5)


@pytest.mark.parametrize(
    "options", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 24}], ids=["free", "packed"]
)
def test_rows_that_trl_packs_are_learned_as_without_packing(options: dict[str, Any], tmp_path: Path) -> None:
    """One update of all rows; attention is transformers' `sdpa`, about which TRL warns."""

    class Mine(OffloadTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    losses, norms, weights = [], [], []
    for more in ({}, options):
        args = trl.SFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
            max_steps=1, logging_steps=1, per_device_train_batch_size=1 if more.get("packing") else 4,
            gradient_accumulation_steps=1, learning_rate=1e-2, adam_epsilon=1e-4, **more,
        )  # fmt: skip
        model = llama()
        rows = Dataset.from_list(TEXTS)
        trainer = Mine(model=model, args=args, train_dataset=rows, processing_class=word_tokenizer())
        if more.get("packing"):
            assert len(trainer.train_dataset) == 1
        trainer.train()
        losses += logged(trainer, "loss")
        norms += logged(trainer, "grad_norm")
        weights.append(model.state_dict())
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert norms[1] == pytest.approx(norms[0], abs=1e-5)
    assert_close(weights[1], weights[0], 1e-5)


@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "lora"])
def test_the_plan_of_sft_counts_the_fused_head(adapts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU, backward has a tile of logits of TRL's size, fp32 sums of the gradients of head and hidden states, and
    their bf16 copies."""
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: H200)
    vocabulary, width, tokens = 1 << 16, 64, 40
    model = LlamaForCausalLM(llama_config(vocab_size=vocabulary, hidden_size=width)).bfloat16()
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2)
    rows = Dataset.from_list([{"input_ids": [5] * tokens}] * 4)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if adapts else None
    mine = type("Mine", (OffloadTrainerMixin, trl.SFTTrainer), {})
    trainer = mine(
        model=model, args=args, train_dataset=rows, processing_class=word_tokenizer(), peft_config=adapters,
        offload=OffloadConfig(vram="20GiB"),
    )  # fmt: skip
    plan = TrainerPlan(None).make(trainer, OffloadConfig(vram="20GiB"))
    assert plan is not None
    assert plan.basis.work is not None
    *_, block, head = plan.basis.work.stages
    assert block.block
    positions = 2 * (tokens - 1)
    tile, hidden, trained = 2 * positions * 32768, positions * width, 0 if adapts else vocabulary * width
    assert head.backward_peak_bytes == pytest.approx(tile + 6 * (hidden + trained), rel=0.01)
    assert head.forward.flops == pytest.approx(2 * hidden * vocabulary, rel=0.01)
    assert head.backward.flops == pytest.approx((2 if adapts else 3) * head.forward.flops, rel=0.01)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy", "is_top1")])
def test_the_planned_head_has_the_outputs_and_gradients_of_trls(outputs: tuple[str, ...]) -> None:
    theirs = trl.trainer.utils._ChunkedLogProbFunction
    undo = plan_fused_head()
    try:
        head = trl.trainer.utils._ChunkedLogProbFunction
        found = []
        for device in ("cpu", "meta"):
            given = [torch.zeros(*shape, dtype=torch.bfloat16, device=device) for shape in ((5, 8), (70, 8), (70,))]
            given = [each.requires_grad_() for each in given]
            targets = torch.zeros(5, dtype=torch.long, device=device)
            made = head.apply(*given, targets, 1.0, 32, None, 1.0, outputs)
            made[0].sum().backward()
            tensors = [*made, *(each.grad for each in given)]
            found.append([None if each is None else (each.shape, each.dtype, each.requires_grad) for each in tensors])
    finally:
        undo()
    assert found[0] == found[1]
    assert trl.trainer.utils._ChunkedLogProbFunction is theirs


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_row_are_in_the_tokens_of_trls_trainer(as_text: bool, tmp_path: Path) -> None:
    class Mine(OffloadTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    tokenizer = images.qwen()[1].tokenizer
    tokenizer.chat_template = template.read_text()
    model = LlamaForCausalLM(llama_config(vocab_size=384, max_position_embeddings=4096))
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "add")]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    asked, said = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
    tools: Any = json.dumps(schemas) if as_text else schemas
    rows = [{"messages": [asked, call, {"role": "tool", "content": "2"}, said], "tools": tools}]
    args = trl.SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", assistant_only_loss=True, max_length=None
    )
    table = Dataset.from_list(rows, on_mixed_types="use_json")
    (theirs,) = Mine(model=model, args=args, train_dataset=table, processing_class=tokenizer).train_dataset
    (ours,) = prepare(load_dataset_like(rows), tokenizer, model.config, max_input_length=4096).dataset
    assert '"name": "weather"' in tokenizer.decode(ours["input_ids"])
    assert ours["input_ids"] == theirs["input_ids"]
    assert ours["labels"] == theirs["labels"]


def test_batches_of_trls_collator_have_few_widths(tmp_path: Path) -> None:
    class Mine(OffloadTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    rows = Dataset.from_list([{"input_ids": [3 + at % 40] * (1 + at)} for at in range(30)])
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2)
    trainer = Mine(model=llama(), args=args, train_dataset=rows, processing_class=word_tokenizer())
    batches = list(trainer.get_train_dataloader())
    widths = trainer.widths.chosen
    assert {(batch["input_ids"].shape[1],) for batch in batches} <= {*widths.pairs}
    for batch in batches:
        lengths = batch["attention_mask"].sum(1)
        padding = torch.arange(batch["input_ids"].shape[1]) >= lengths[:, None]
        assert (batch["input_ids"].shape[1],) == widths.fit([int(lengths.max())])
        assert batch["labels"][padding].eq(-100).all()
        assert batch["input_ids"][padding].eq(trainer.data_collator.pad_token_id).all()


def test_adapters_of_a_t5_are_trained_as_by_the_stock_trainer(tmp_path: Path) -> None:
    models, losses = [], []
    for trainer_class in (Seq2SeqTrainer, OffloadSeq2SeqTrainer):
        config = peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
        model: Any = peft.get_peft_model(t5(), config)
        trainer = train(tmp_path, model, seq2seq_rows(), trainer_class)
        losses.append(logged(trainer, "loss"))
        models.append(model.state_dict())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert_close(models[1], models[0])
