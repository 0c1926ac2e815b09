"""The loss in chunks of the vocabulary: the model's own numbers, without a tensor of the logits' size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf import loss as chunked_loss
from offloadkit.hf import patches
from offloadkit.hf.loss import Logits, compute_loss_in_chunks
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer
from tests.hf import training
from tests.hf.tiny import llama_config, t5_config, t5_v1_1_config

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 1003
NUM_ROWS, LENGTH = 4, 9
CHUNK = NUM_ROWS * LENGTH * 128
"""Eight chunks of 128 tokens of the vocabulary, the last of 107."""

SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
HEADS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2() -> GPT2LMHeadModel:
    no_dropout: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, **no_dropout)
    )


def bart() -> BartForConditionalGeneration:
    """A model that adds a bias to the output of its head."""
    names = (f"{stack}_{size}" for stack in ("encoder", "decoder") for size in ("layers", "attention_heads"))
    sizes: dict[str, Any] = dict.fromkeys(names, 2)
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=VOCAB, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0, **sizes)
    )
    model.final_logits_bias.normal_()
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: T5ForConditionalGeneration(t5_config(vocab_size=VOCAB, dropout_rate=0.0)),
    "t5 v1.1": lambda: T5ForConditionalGeneration(t5_v1_1_config(vocab_size=VOCAB, dropout_rate=0.0)),
    "llama": lambda: LlamaForCausalLM(llama_config(vocab_size=VOCAB)),
    "tied llama": lambda: LlamaForCausalLM(llama_config(vocab_size=VOCAB, tie_word_embeddings=True)),
    "gpt2": gpt2,
    "head with bias": lambda: PhiForCausalLM(PhiConfig(**SHAPE, **HEADS)),
    "bart": bart,
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, **HEADS, head_dim=8, final_logit_softcapping=0.2)),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SHAPE, **HEADS, logit_scale=0.3)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    return model.to(dtype).train()  # type: ignore[no-any-return]


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows with 5, 0, 9 and 9 targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(3, VOCAB, (NUM_ROWS, LENGTH), generator=generator)
    labels = inputs.clone()
    labels[0, :4] = -100
    labels[1] = -100
    return {"input_ids": inputs, "labels": labels}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def run(model: PreTrainedModel, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(**(inputs or batch())).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same(ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == own.keys()
    scale = max(float(gradient.norm()) for gradient in own.values())
    for name, gradient in own.items():
        assert float((ours[name] - gradient).norm()) <= tolerance * (float(gradient.norm()) + 1e-3 * scale), name


@pytest.fixture
def num_chunked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of logits of each chunked loss."""
    seen: list[int] = []
    losses = chunked_loss.token_losses

    def watched(hidden: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(len(hidden) * len(weight))
        return losses(hidden, weight, *args)

    monkeypatch.setattr(chunked_loss, "token_losses", watched)
    return seen


# ---- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_models_own_loss(name: str, num_chunked: list[int]) -> None:
    model = make(name)
    own_loss, own = run(model)
    undo = compute_loss_in_chunks(model, CHUNK)
    loss, ours = run(model)
    assert num_chunked == [NUM_ROWS * LENGTH * VOCAB]
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-6)
    assert_same(ours, own)
    undo()
    assert torch.equal(run(model)[0], own_loss)
    assert len(num_chunked) == 1


@pytest.mark.parametrize("name", ["t5", "llama", "soft cap"])
def test_bf16_is_no_further_from_the_truth_than_the_models_own(name: str) -> None:
    model = make(name, torch.bfloat16)
    truth_loss, truth = run(copy.deepcopy(model).float())
    own_loss, own = run(model)
    compute_loss_in_chunks(model, CHUNK)
    loss, ours = run(model)
    assert loss.dtype == torch.float32
    assert abs(float(loss - truth_loss)) <= max(1.2 * abs(float(own_loss - truth_loss)), 1e-3)

    def error(those: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([(those[key] - truth[key]).norm() for key in truth]).norm())

    assert error(ours) <= 1.1 * error(own)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_rounding_of_the_heads_gradients(scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(36, 16, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, 16, generator=generator).to(dtype)
    target = torch.randint(0, VOCAB, (36,), generator=generator)

    def of(logits: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        loss = F.cross_entropy(logits(*inputs), target) * scale
        return tuple(gradient.double() for gradient in torch.autograd.grad(loss, inputs))

    truth = of(F.linear, torch.float64)
    own = of(lambda *inputs: F.linear(*inputs).float(), dtype)
    ours = of(lambda *inputs: Logits(*inputs, None, chunk_elements=CHUNK), dtype)
    for mine, theirs, true in zip(ours, own, truth, strict=True):
        assert float((mine - true).norm()) <= 1.2 * float((theirs - true).norm())


@pytest.mark.parametrize("shape", [(), (VOCAB,)], ids=["one number", "one a token"])
def test_a_learned_scale_of_the_logits_gets_its_gradient(shape: tuple[int, ...]) -> None:
    """Like CLIP's logit_scale."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(36, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator)
    target = torch.randint(0, VOCAB, (36,), generator=generator)
    found = []
    for logits in (Logits(hidden, weight, None, chunk_elements=CHUNK), F.linear(hidden, weight)):
        scale = torch.full(shape, 0.7, requires_grad=True)
        F.cross_entropy(logits * scale, target).backward()
        found.append(scale.grad)
    torch.testing.assert_close(found[0], found[1])


def test_num_items_in_batch_divides_the_sum() -> None:
    model = make("llama")
    inputs = {**batch(), "num_items_in_batch": torch.tensor(7)}
    own_loss, own = run(model, **inputs)
    compute_loss_in_chunks(model, CHUNK)
    loss, ours = run(model, **inputs)
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-6)
    assert_same(ours, own)


def test_a_batch_without_targets_has_the_loss_that_torch_gives_it() -> None:
    model = make("t5")
    compute_loss_in_chunks(model, CHUNK)
    assert model(input_ids=batch()["input_ids"], labels=torch.full((NUM_ROWS, LENGTH), -100)).loss.isnan()


def test_a_label_outside_the_vocabulary_is_torchs_error() -> None:
    model = make("t5 v1.1")
    compute_loss_in_chunks(model, CHUNK)
    inputs = batch()
    inputs["decoder_input_ids"] = inputs["labels"].clamp(min=0)
    inputs["labels"][2, 2] = VOCAB
    with pytest.raises((IndexError, RuntimeError), match=f"index {VOCAB} is out of bounds"):
        model(**inputs)


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head") != (frozen == "head"))
    _, own = run(model)
    compute_loss_in_chunks(model, CHUNK)
    assert_same(run(model)[1], own)


def test_without_gradients_the_loss_alone_is_computed() -> None:
    model = make("t5").eval()
    own = model(**batch())
    compute_loss_in_chunks(model, CHUNK)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            output = model(**batch())
            assert float(output.loss) == pytest.approx(float(own.loss), rel=1e-6)
            torch.testing.assert_close(output.logits.clone(), own.logits)


def test_under_autocast_the_head_computes_in_bf16() -> None:
    model = make("llama")
    with torch.autocast("cpu", torch.bfloat16):
        own_loss, own = run(model)
        compute_loss_in_chunks(model, CHUNK)
        loss, ours = run(model)
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-5)
    assert_same(ours, own, 1e-2)


# ---- memory --------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest storage made by any operation."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                stored = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.num_elements = max(self.num_elements, stored)
        return result


@pytest.mark.parametrize("name", ["t5", "tied llama", "soft cap", "bart"])
def test_the_logits_never_exist_whole(name: str) -> None:
    model = make(name)
    inputs = {key: value.repeat(4, 1) for key, value in batch().items()}
    compute_loss_in_chunks(model, 4 * CHUNK)
    with Largest() as largest:
        output = model(**inputs)
        output.loss.backward()
        assert largest.num_elements <= max(4 * CHUNK, *(p.numel() for p in model.parameters()))
        output.logits.argmax(-1)
    assert largest.num_elements == 4 * NUM_ROWS * LENGTH * VOCAB


def test_small_logits_are_left_whole() -> None:
    model = make("t5")
    compute_loss_in_chunks(model)
    assert type(model(**batch()).logits) is torch.Tensor


# ---- attaching -----------------------------------------------------------------------------------------------------


def test_a_copy_of_the_model_uses_its_own_head() -> None:
    model = make("t5 v1.1")
    compute_loss_in_chunks(model, CHUNK)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert float(other(**batch()).loss.detach()) == pytest.approx(float(torch.tensor(VOCAB).log()), rel=1e-6)


def test_heads_that_are_no_plain_linear_layer_are_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = make("llama")
    model.lm_head = Adapted(16, VOCAB)
    compute_loss_in_chunks(model, CHUNK)()
    assert type(model(**batch()).logits) is torch.Tensor
    compute_loss_in_chunks(nn.Linear(2, 2))()


def test_generation_is_the_same() -> None:
    model = make("t5").eval()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 2}
    own = model.generate(batch()["input_ids"], **options)
    compute_loss_in_chunks(model, 1)
    assert torch.equal(model.generate(batch()["input_ids"], **options), own)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["t5", "t5 v1.1", "tied llama"])
def test_training_through_the_engine(name: str, checkpointing: bool, num_chunked: list[int]) -> None:
    """Also with tied weights, whose uses have separate gradients."""
    masters = []
    for chunks in (False, True):
        model = make(name)
        if chunks:
            compute_loss_in_chunks(model, CHUNK)
        config = OffloadConfig(
            learning_rate=1e-2, eps=1e-4, gradient_accumulation=2, activation_checkpointing=checkpointing
        )
        with OffloadEngine(model, config, device="cpu") as engine:
            for seed in range(6):
                engine.backward(engine(**batch(seed)).loss)
                engine.step()
            masters.append(engine.master_weights())
    assert len(num_chunked) == 6
    training.assert_close(masters[1], masters[0])


# ---- under the Trainer ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for the trainers' logits, whatever the micro-batch."""
    monkeypatch.setattr(patches, "compute_loss_in_chunks", partial(compute_loss_in_chunks, chunk_elements=64))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("model", "rows", "options"),
    [
        (training.t5, training.seq2seq_rows(), {}),
        (training.llama, training.causal_rows(), {}),
        (training.t5, training.seq2seq_rows(), {"label_smoothing_factor": 0.1}),
    ],
)
def test_however_they_are_accumulated_the_samples_give_the_norm_of_the_models_own_loss(
    tmp_path: Path, model: Any, rows: Any, options: Any, num_chunked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options:
        rows = [{**row, "decoder_input_ids": row["labels"].clamp(min=0)} for row in rows]
    runs = []
    for batch_size in (8, 2, 1):
        split = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size}
        runs.append(training.train(tmp_path, model(), rows, OffloadSeq2SeqTrainer, **split, **options))
    assert len(num_chunked) == (0 if options else 3 * (1 + 4 + 8))
    monkeypatch.setattr(patches, "compute_loss_in_chunks", lambda model, fused: lambda: None)
    runs.append(training.train(tmp_path, model(), rows, per_device_train_batch_size=8, **options))
    norms, losses = ([training.logged(run, key) for run in runs] for key in ("grad_norm", "loss"))
    for index in range(3):
        assert norms[index] == pytest.approx(norms[3], rel=1e-5)
        assert losses[index] == pytest.approx(losses[3], rel=1e-5)
        training.assert_close(runs[index].engine.master_weights(), runs[3].engine.master_weights())


@pytest.mark.usefixtures("small_chunks")
def test_evaluation_and_prediction_see_logits(tmp_path: Path) -> None:
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"mean": float(prediction.predictions.mean())}

    rows = training.causal_rows()
    trainer = training.train(tmp_path, training.llama(), rows, OffloadTrainer, {"compute_metrics": metrics})
    ours = trainer.evaluate(rows)
    trainer.close()
    assert "forward" not in vars(trainer.model.lm_head)
    own = trainer.evaluate(rows)
    assert shapes == [(8, 10, training.VOCAB)] * 2
    for key in ("eval_loss", "eval_mean"):
        assert ours[key] == pytest.approx(own[key], rel=1e-6)


def test_fp64_logits_are_not_left_to_kernels_of_fp32() -> None:
    hidden, weight = (torch.empty(rows, 8, dtype=torch.bfloat16, device="meta") for rows in (16, 256))
    logits = Logits(hidden, weight, None, chunk_elements=512, fused=True)
    target = torch.zeros(16, dtype=torch.int64, device="meta")
    for dtype in (torch.float32, torch.float64):
        assert F.cross_entropy(logits.to(dtype), target).dtype == dtype
