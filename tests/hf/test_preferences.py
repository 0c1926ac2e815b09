"""TRL's DPO, KTO, GRPO and reward training with the engine mixed in: the numbers of a run without the engine, what
frozen models take, and generation with the weights in VRAM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from offloadkit import OffloadConfig, OffloadTrainerMixin, Placement
from offloadkit.engine import replanner
from offloadkit.offload.weight_ring import WeightRing
from offloadkit.planner import placed
from tests.hf.tiny import llama_config, word_tokenizer
from tests.hf.training import assert_close, logged

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

IN_RAM = Placement(weights="ram", states="ram", gradients="ram", activations="checkpoint")
PAIRS = [
    {"prompt": "the cat", "chosen": " sat on the mat", "rejected": " ran under"},
    {"prompt": "a dog", "chosen": " ran", "rejected": " sat on the good mat"},
] * 4
JUDGED = [
    {"prompt": "the cat", "completion": " sat on the mat", "label": True},
    {"prompt": "a dog", "completion": " ran", "label": False},
] * 4
PROMPTS = [{"prompt": prompt} for prompt in ("the cat", "a dog sat", "hello good", "bad cat ran on")] * 2
ROWS = {
    "DPO": PAIRS,
    "KTO": JUDGED,
    "GRPO": PROMPTS,
    "Reward": [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PAIRS],
}


def llama(kind: Any = LlamaForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    return kind(llama_config(**changes))


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of tokens with an even number, so that half of the vocabulary is rewarded."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(door: str, folder: Path, *, offload: OffloadConfig | None, **given: Any) -> Any:
    """A Trainer of fp32 for four steps of two micro-batches; plain TRL's without `offload`."""
    stock = getattr(trl, f"{door}Trainer")
    trainer_class = stock if offload is None else type(f"Offload{door}", (OffloadTrainerMixin, stock), {})
    more: dict[str, Any] = {} if offload is None else {"offload": offload}
    more |= {name: given.pop(name) for name in ("ref_model", "peft_config", "model") if name in given}
    usual: dict[str, Any] = {"per_device_train_batch_size": 2}
    if door == "GRPO":
        usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
        more["reward_funcs"] = even
    args = getattr(trl, f"{door}Config")(
        str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no", seed=1,
        logging_steps=1, adam_epsilon=1e-4,
        **{"max_steps": 4, "learning_rate": 1e-2, "gradient_accumulation_steps": 2, **usual, **given},
    )  # fmt: skip
    more.setdefault("model", llama(LlamaForSequenceClassification, num_labels=1) if door == "Reward" else llama())
    data = Dataset.from_list(ROWS[door])
    return trainer_class(args=args, train_dataset=data, processing_class=word_tokenizer(), **more)


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def saved(folder: Path) -> LlamaForCausalLM:
    """A model that remembers its folder, where GRPO finds the reference."""
    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("door", "how"),
    [
        ("DPO", "reference"),
        ("DPO", "before"),
        ("DPO", "lora"),
        ("KTO", "reference"),
        ("KTO", "before"),
        ("KTO", "lora"),
        ("GRPO", "none"),
        ("GRPO", "reference"),
        ("GRPO", "lora"),
        ("Reward", "none"),
    ],
)
def test_training_with_weights_and_states_in_ram_equals_trls(door: str, how: str, tmp_path: Path) -> None:
    done = []
    for offload in (None, OffloadConfig(placement=IN_RAM)):
        given: dict[str, Any] = {}
        if how == "before":
            given["precompute_ref_log_probs"] = True
        elif how == "lora":
            given["peft_config"] = lora()
        elif how == "reference" and door != "GRPO":
            given["ref_model"] = llama()
        if door == "GRPO" and how != "none":
            given["beta"] = 0.5
        if door == "GRPO" and how == "reference":
            given["model"] = saved(tmp_path / "base")
        trainer = trainer_of(door, tmp_path, offload=offload, **given)
        trainer.train()
        done.append(trainer)
    theirs, ours = done
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), abs=1e-6)
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), abs=1e-5)
    assert max(logged(theirs, "grad_norm")) > 1e-3
    assert_close(ours.model.state_dict(), theirs.model.state_dict(), 1e-6)
    assert (ours.frozen_models.models != []) == (how == "reference")


def test_the_reference_streams_and_has_a_line_in_the_plan(tmp_path: Path) -> None:
    reference = llama()
    before = {name: each.clone() for name, each in reference.state_dict().items()}
    trainer = trainer_of("DPO", tmp_path, offload=OffloadConfig(placement=IN_RAM), ref_model=reference)
    trainer.train()
    plan = trainer.engine.plan
    number = sum(each.numel() for each in reference.parameters())
    assert f"frozen ref_model: {number:,} parameters" in str(plan)
    of_reference = plan.basis.frozen_models[0]
    blocks = [plan.layers[at] for at in of_reference.layers if plan.layers[at].in_block]
    assert [plan.placements[at].weights for at in of_reference.layers if plan.layers[at].in_block] == ["ram"] * 2
    in_layers = sum(plan.layers[at].num_parameters for at in of_reference.layers)
    in_blocks = sum(each.num_parameters for each in blocks)
    assert in_blocks == sum(each.numel() for each in reference.model.layers.parameters())
    in_tables = sum(each.nbytes for each in reference.buffers())
    assert of_reference.rest_bytes == 4 * (number - in_layers) + in_tables
    assert plan.num_parameters == 2 * number  # the plan's bytes have both models
    assert plan.num_trainable_parameters == number
    trainer.close()
    for name, weight in reference.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_log_probabilities_before_training_are_those_of_the_untrained_model(tmp_path: Path) -> None:
    trainer = trainer_of("DPO", tmp_path, offload=OffloadConfig(placement=IN_RAM), precompute_ref_log_probs=True)
    before = trainer.train_dataset["ref_chosen_logps"][:]
    reference = trainer_of("DPO", tmp_path, offload=None, precompute_ref_log_probs=True)
    assert before == pytest.approx(reference.train_dataset["ref_chosen_logps"][:], abs=1e-5)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.693147, abs=1e-5)  # the first policy is the reference
    assert trainer.train_dataset["ref_chosen_logps"][:] == before


@contextmanager
def fetches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The blocks that are copied to VRAM, one name each."""
    names: list[str] = []
    own = WeightRing.fetch

    def fetch(self: WeightRing, block: Any) -> Any:
        names.append(block.layers[0].layer.name)
        return own(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(WeightRing, "fetch", fetch)
        yield names


def generated(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Train; returns the blocks that were copied while `generate` of the model ran, for each call."""
    copied: list[list[str]] = []
    with fetches(monkeypatch) as names:
        own = trainer.model.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            begin = len(names)
            found = own(*args, **kwargs)
            copied.append(names[begin:])
            return found

        monkeypatch.setattr(trainer.model, "generate", generate)
        trainer.train()
    return copied


def test_no_block_is_copied_while_text_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("GRPO", tmp_path, offload=OffloadConfig(placement=IN_RAM))
    assert generated(trainer, monkeypatch) == [[]] * 4
    plan = trainer.engine.plan
    assert len(trainer.telemetry.generation_moves) == 2 * 4
    longest = plan.basis.cache_bytes
    assert longest == 2 * 2 * 16 * 4 * 8 * (5 + 6)  # keys and values, blocks, width, fp32, rows, tokens
    streamed = sum(plan.layers[at].weight_bytes() for at, where in enumerate(plan.placements) if where.weights == "ram")
    without_gradients = plan.total_bytes("vram") - plan.tiers["vram"]["gradients"]
    (generation,) = (phase for phase in plan.phases if phase.name == "generation")
    assert 0 <= generation.vram - (without_gradients + longest + streamed) < 1000  # sums of squares
    assert "generation: weights in VRAM" in str(plan)
    assert "generation" in trainer.telemetry.peaks


def test_generation_streams_and_says_so_once_where_weights_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)  # else a tile is larger than the model
    offload = OffloadConfig(placement=IN_RAM, vram="1.25MiB")
    torch.manual_seed(0)
    trainer = trainer_of("GRPO", tmp_path, offload=offload, model=LlamaForCausalLM(config))
    with caplog.at_level(logging.WARNING):
        copied = generated(trainer, monkeypatch)
    assert all(len(names) > 8 for names in copied)
    assert [record.message for record in caplog.records].count(
        next(record.message for record in caplog.records if "for every token" in record.message)
    ) == 1
    assert not trainer.engine.plan.generates_in_vram
    torch.manual_seed(0)
    theirs = trainer_of("GRPO", tmp_path, offload=None, model=LlamaForCausalLM(config))
    theirs.train()
    assert_close(trainer.model.state_dict(), theirs.model.state_dict(), 1e-5)


def test_the_first_generation_moves_to_a_plan_with_room_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search, which plans for GPUs alone, is replaced."""
    asked = []

    def found(plan: Any) -> Any:
        asked.append((plan.basis.generates, plan.basis.cache_bytes))
        return None if len(asked) > 1 else placed(plan, [IN_RAM] * len(plan.layers))

    monkeypatch.setattr(replanner, "generating_in_vram", found)
    trainer = trainer_of("GRPO", tmp_path, offload=OffloadConfig(placement=Placement()))
    with pytest.warns(RuntimeWarning, match="text is generated with all weights in VRAM after step 0: the plan has"):
        trainer.train()
    assert all(generates and cached > 0 for generates, cached in asked)
    assert trainer.engine.plan.placements[1].weights == "ram"
    theirs = trainer_of("GRPO", tmp_path, offload=None)
    theirs.train()
    assert_close(trainer.model.state_dict(), theirs.model.state_dict(), 1e-5)


def test_a_gpu_that_is_full_with_the_weights_streams_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of("GRPO", tmp_path, offload=OffloadConfig(placement=IN_RAM))
    calls = []

    @contextmanager
    def full(self: WeightRing, blocks: Any) -> Iterator[None]:
        calls.append(len(blocks))
        torch.rand(3)  # what a run that failed has drawn is drawn again
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(WeightRing, "resident", full)
    assert all(generated(trainer, monkeypatch))
    assert len(calls) == 1
    theirs = trainer_of("GRPO", tmp_path, offload=None)
    theirs.train()
    assert_close(trainer.model.state_dict(), theirs.model.state_dict(), 1e-6)


def test_the_reward_rises(tmp_path: Path) -> None:
    """24 steps raise the mean reward, the share of even tokens, from about 0.5 to more than 0.7."""
    trainer = trainer_of(
        "GRPO", tmp_path, offload=OffloadConfig(placement=IN_RAM), max_steps=24, gradient_accumulation_steps=1,
        per_device_train_batch_size=16, num_generations=8, learning_rate=3e-2,
    )  # fmt: skip
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:4]) / 4 < 0.6
    assert sum(rewards[-4:]) / 4 > 0.7
