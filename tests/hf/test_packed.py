"""Rows of a packed batch do not see each other: logits, losses and gradients are the same as without packing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import Tensor

from offloadkit import OffloadConfig, OffloadTrainer
from offloadkit.device.streams import Event
from offloadkit.errors import DataError, ModelError
from offloadkit.hf import packed
from offloadkit.hf.longest import longest_batch
from offloadkit.hf.masks import MaskFunctions, PaddingCollator
from offloadkit.hf.patches import patched
from tests.hf.training import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"attention_dropout": 0.0},
    "Gemma": {},
    "Gemma2": {"sliding_window": 4, "layer_types": MIXED},  # eager attention: its logits are capped
    "Gemma3": {"sliding_window": 4, "layer_types": MIXED},
    "Mistral": {"sliding_window": 4},
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS,
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
}
LENGTHS = (7, 12, 1, 6)


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 64} if family == "GPT2" else SHAPE
    config = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, kind)(config(**shape | FAMILIES.get(family, {}) | changes)).eval()


@pytest.fixture
def training() -> Iterator[Any]:
    """Applies the changes of training to a model."""
    undo: list[Any] = []

    def apply(model: Any) -> Any:
        undo.append(patched(model, OffloadConfig(), kernels=False))
        return model

    yield apply
    for each in undo:
        each()


def rows_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (length,), generator=generator) for length in lengths]


def packs(*groups: list[Tensor], without_labels: int = 0) -> dict[str, Tensor]:
    """Each group in one row, padded with a row of zeros; `without_labels` rows at the start teach nothing."""
    longest = max(sum(map(len, group)) for group in groups)
    batch: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for group in groups:
        padding = torch.zeros(longest - sum(map(len, group)), dtype=torch.int64)
        parts = [*group, padding] if len(padding) else group
        labels = [part.clone() for part in parts]
        for at, own in enumerate(labels):
            own[:1] = -100
            if at < without_labels or at == len(group):
                own[:] = -100
        batch["input_ids"].append(torch.cat(parts))
        batch["labels"].append(torch.cat(labels))
        batch["position_ids"].append(torch.cat([torch.arange(len(part)) for part in parts]))
    return {name: torch.stack(values) for name, values in batch.items()}


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True),
        "labels": pad(rows, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }


def gradients(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_rows_without_packing(family: str, training: Any) -> None:
    model, rows = training(model_of(family)), rows_of()
    loss, own = gradients(model, packs(rows[:3], rows[3:]))
    expected, theirs = gradients(model, padded(rows))
    assert loss == pytest.approx(expected, abs=1e-6)
    assert own.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (own[name] - gradient).abs().max() <= 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_another_first_row_leaves_the_second_rows_bits_alone(family: str, training: Any) -> None:
    """Logits of the second row, its loss, and the loss's gradients with respect to its embeddings. Experts multiply
    matrices of as many rows as tokens chose them, so that last bits may change.
    """
    model, (first, second, *_) = training(model_of(family)), rows_of()
    found = []
    for other in (first, rows_of(seed=2)[0]):
        batch = packs([other, second], without_labels=1)
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        output = model(inputs_embeds=embeds, **batch, use_cache=False)
        output.loss.backward()
        assert embeds.grad is not None
        assert not embeds.grad[:, : len(first)].any()  # nothing of the second row's loss reaches the first row
        found.append((output.logits[:, len(first) :], output.loss, embeds.grad[:, len(first) :]))
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-6) if "M" in family[1:] else torch.equal(one, two)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GPT2"])
def test_logits_of_a_packed_row_have_the_bits_of_the_row_alone(family: str, training: Any) -> None:
    """Attention is computed row by row; matmuls of other heights round otherwise, so attention alone is compared."""
    model, rows = training(model_of(family)), rows_of()
    attention: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = next(each for each in model.modules() if type(each).__name__.endswith("Attention"))
    module.num_key_value_groups = 2
    generator = torch.Generator().manual_seed(3)
    shape = 1, 4, sum(LENGTHS), 8
    query, key, value = (torch.randn(*shape, generator=generator) for _ in range(3))
    batch, options = packs(rows), {"scaling": 0.5, "dropout": 0.0}
    lines = packed.boundaries(batch["position_ids"])
    assert lines is not None
    own, _ = attention(module, query, key[:, :2], value[:, :2], lines[None, None], **options)
    begin = 0
    for length in LENGTHS:
        part = slice(begin, begin + length)
        alone, _ = attention(module, query[:, :, part], key[:, :2, part], value[:, :2, part], None, **options)
        assert torch.equal(own[:, part], alone)
        begin += length


@pytest.mark.parametrize("window", [None, 4])
def test_the_mask_from_boundaries_is_transformers_own(window: int | None) -> None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    batch = packs(rows_of((7, 12)), rows_of((5, 5, 5, 4)))
    config: Any = transformers.MistralConfig(**SHAPE, sliding_window=window, attn_implementation="sdpa")
    make: Any = create_causal_mask if window is None else create_sliding_window_causal_mask
    no_cache = {"cache" if "cache" in inspect.signature(make).parameters else "past_key_values": None}
    given = {"inputs_embeds": torch.empty(2, 19, 1), "position_ids": batch["position_ids"], "attention_mask": None}
    theirs = make(config=config, **given, **no_cache)
    lines = packed.boundaries(batch["position_ids"])
    assert lines is not None
    assert torch.equal(packed._block_diagonal(lines, torch.empty(2, 4, 19, 8), window), theirs)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_gets_the_rows_and_equals_row_by_row(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's kernel in plain operations, as its documentation describes it."""
    from torch.nn.attention import varlen

    def reference(
        query: Tensor, key: Tensor, value: Tensor, begins: Tensor, same: Tensor, most: int, most_keys: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        assert torch.equal(begins, same)
        assert enable_gqa
        found = []
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
            assert end - begin <= most == most_keys
            back = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = back >= 0
            if window_size[0] >= 0:
                seen &= back <= window_size[0]
            part = (each[begin:end].transpose(0, 1) for each in (query, key, value))
            own = F.scaled_dot_product_attention(*part, attn_mask=seen, scale=scale, enable_gqa=True)
            found.append(own.transpose(0, 1))
        return torch.cat(found)

    monkeypatch.setattr(varlen, "varlen_attn", reference)
    lines = packed.boundaries(packs(rows_of((7, 12)), rows_of((5, 5, 5, 4)))["position_ids"])
    assert lines is not None
    query, key, value = torch.randn(2, 4, 19, 8), torch.randn(2, 2, 19, 8), torch.randn(2, 2, 19, 8)
    own = packed._by_varlen(query, key, value, lines, window, 0.5)
    mask = packed._block_diagonal(lines, query, window)
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5, enable_gqa=True)
    assert torch.allclose(own, theirs.transpose(1, 2), atol=1e-6)


def test_a_trainers_plan_counts_attention_within_rows(tmp_path: Path) -> None:
    rows = [{"input_ids": [3] * length} for length in (30, 24, 6, 5, 4, 3)]
    trainer = OffloadTrainer(
        model=model_of("Llama"),
        args=arguments(tmp_path, per_device_train_batch_size=3),
        train_dataset=Dataset.from_list(rows),
        data_collator=transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    call, *_, lines = longest_batch(trainer)
    assert lines is not None
    assert call.kwargs["position_ids"].shape == (1, 60)
    assert lines.shape == (5, 3)  # (30^2 + 24^2 + 6^2) / 60 is 25.2: two rows of 30


def test_boundaries_bound_number_and_length_by_their_shape() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    lines = packed.boundaries(positions)
    assert lines is not None
    assert lines[0, :4].tolist() == [0, 3, 5, 10]
    assert lines.shape == (7, 65)
    assert lines.dtype == torch.int32
    assert lines[0, 4:].eq(10).all()
    assert packed.boundaries(positions[1:]) is None
    many = packed.boundaries(torch.zeros(1, 100, dtype=torch.int64))
    assert many is not None
    assert many.shape == (7, 129)
    long = packed.boundaries(torch.cat([torch.arange(300), torch.arange(9)])[None])
    assert long is not None
    assert long.shape == (9, 65)


def test_block_diagonal_masks_are_made_for_eager_attention(training: Any) -> None:
    model, rows = training(model_of("Llama", attn_implementation="eager")), rows_of()
    loss, _ = gradients(model, packs(rows))
    assert loss == pytest.approx(gradients(model, padded(rows))[0], abs=1e-6)


def test_transformers_functions_are_as_before_after_training() -> None:
    """Also if another model is trained at the time."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = (ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS)
    before = [table["sdpa"] for table in tables]
    done = MaskFunctions().used()
    assert [table["sdpa"] for table in tables] != before
    done()
    assert [table["sdpa"] for table in tables] == before


@pytest.mark.parametrize(("kind", "calls"), [("plain", True), ("dropout", False), ("narrow", False), ("bias", False)])
def test_attention_that_the_kernel_lacks_runs_under_a_block_diagonal_mask(
    kind: str, calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, as on a GPU that is planned for."""
    undo = patched(model_of("Llama"), OffloadConfig(), kernels=False)
    attention: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen: list[str] = []
    for name in ("as_planned", "_block_diagonal"):
        own = getattr(packed, name)
        monkeypatch.setattr(packed, name, lambda *given, name=name, own=own: (seen.append(name), own(*given))[1])
    width = 12 if kind == "narrow" else 16
    parts = [torch.empty(2, heads, 64, width, dtype=torch.bfloat16, device="meta") for heads in (4, 4, 4)]
    given: dict[str, Any] = {"scaling": 0.5, "dropout": 0.1 if kind == "dropout" else 0.0}
    if kind == "bias":
        given["position_bias"] = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16, device="meta")
    lines = packed.planned_boundaries(2, 64, row=16)
    output, _ = attention(torch.nn.Module(), *parts, lines.expand(1, 1, -1, -1), **given)
    assert output.shape == (2, 64, 4, width)
    assert seen == ["as_planned" if calls else "_block_diagonal"]
    undo()


# -- collators that give something else


def test_flattened_rows_with_flash_arguments_are_exact(training: Any) -> None:
    model, rows = training(model_of("Llama")), rows_of()
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch: Any = collate([{"input_ids": row.tolist()} for row in rows])
    assert "cu_seq_lens_q" in batch
    loss, _ = gradients(model, dict(batch))
    assert loss == pytest.approx(gradients(model, padded(rows))[0], abs=1e-6)


def test_boundaries_without_positions_are_refused(training: Any) -> None:
    model, rows = training(model_of("Llama")), rows_of()
    collate = transformers.DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)
    batch: Any = collate([{"input_ids": row.tolist()} for row in rows])
    with pytest.raises(DataError, match="gives cu_seq_lens_q, cu_seq_lens_k without position_ids"):
        model(**batch)


def test_packed_rows_under_an_attention_mask_are_refused(training: Any) -> None:
    model, batch = training(model_of("Llama")), packs(rows_of())
    with pytest.raises(DataError, match="let the collator leave attention_mask out"):
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
    # positions of left padding begin again too
    model(torch.ones(1, 4, dtype=torch.int64), torch.tensor([[0, 0, 1, 1]]), torch.tensor([[1, 1, 0, 1]]))


def test_models_that_mix_rows_are_refused_by_name(training: Any) -> None:
    types = ["linear_attention", "full_attention"]
    hybrid = model_of("Qwen3Next", layer_types=types, linear_num_value_heads=4, linear_num_key_heads=2, **EXPERTS)
    with pytest.raises(
        DataError, match=r"Qwen3NextForCausalLM has convolution, linear_attention layers.*Take a collator that pads"
    ):
        training(hybrid)(**packs(rows_of()))
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1))
    assert "T5ForConditionalGeneration is an encoder-decoder" in str(packed.why_not_packed(t5))
    roberta = transformers.RobertaForCausalLM(
        transformers.RobertaConfig(vocab_size=9, hidden_size=12, intermediate_size=8, num_hidden_layers=1)
    )
    assert packed.why_not_packed(roberta) == "positions of RobertaForCausalLM begin at 2, not at 0"
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=9, hidden_size=16, n_layer=1, n_head=2))
    assert "BloomForCausalLM takes no position_ids" in str(packed.why_not_packed(bloom))
    with_router_loss = model_of("Mixtral", output_router_logits=True)
    assert "router's loss" in str(packed.why_not_packed(with_router_loss))
    xlm = transformers.XLMWithLMHeadModel(transformers.XLMConfig(vocab_size=9, emb_dim=8, n_layers=1, n_heads=2))
    assert "XLMWithLMHeadModel makes its attention masks by itself" in str(packed.why_not_packed(xlm))


def test_a_model_that_asks_for_no_mask_is_refused_in_its_forward(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    with pytest.raises(ModelError, match="makes its attention masks by itself"):
        training(model_of("Llama"))(**packs(rows_of()))


# -- loss functions and attention of the user's choice


class InHalves(OffloadTrainer):
    """Calls the model with each half of a batch, the later half first."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        half = len(inputs["input_ids"]) // 2
        parts = [{name: each[at] for name, each in inputs.items()} for at in (slice(half, None), slice(half))]
        return sum(model(**part, num_items_in_batch=num_items_in_batch).loss for part in parts)


def test_a_loss_of_parts_of_a_batch_has_the_boundaries_of_its_parts(tmp_path: Path) -> None:
    rows = rows_of((7, 12, 5, 5, 6, 3, 9, 10))
    whole = packs(rows[:2], rows[2:5], rows[5:7], rows[7:])

    def collate(given: list[dict[str, int]]) -> dict[str, Tensor]:
        return {name: each[[row["at"] for row in given]] for name, each in whole.items()}

    found = []
    for kind in (OffloadTrainer, InHalves):
        options = {"per_device_train_batch_size": 4, "max_steps": 2, "remove_unused_columns": False}
        trainer = kind(
            model=model_of("Llama"),
            args=arguments(tmp_path / kind.__name__, logging_steps=1, **options),
            train_dataset=Dataset.from_list([{"at": at} for at in range(4)]),
            data_collator=collate,
        )
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["packed", "apart", "masked"])
def test_a_training_batch_is_looked_at_once_by_its_collator(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    for name in ("boundaries", "_crossing"):
        own = getattr(packed, name)
        monkeypatch.setattr(packed, name, lambda *given, own=own: (asked.append(given), own(*given))[1])

    def collate(rows: list[Any]) -> Any:
        batch: Any = transformers.DataCollatorWithFlattening()(rows)
        if kind == "masked":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        return batch

    size = 2 if kind == "packed" else 1
    trainer = OffloadTrainer(
        model=model_of("Llama"),
        args=arguments(tmp_path, per_device_train_batch_size=size, max_steps=3),
        train_dataset=Dataset.from_list(
            [{"input_ids": row.tolist()} for row in rows_of((7, 5, 6, 4, 3, 8)[: 3 * size])]
        ),
        data_collator=collate,
    )
    trainer.train()
    assert len(asked) == 3
    if kind == "masked":
        with pytest.raises(DataError, match="let the collator leave attention_mask out"):
            PaddingCollator(collate)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])


def test_a_bare_loop_does_not_wait_to_learn_that_a_mask_hides_no_rows(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes with the first forward after the GPU has answered."""
    model, event = training(model_of("Llama")), Event()
    monkeypatch.setattr(event, "done", lambda: False)
    monkeypatch.setattr(packed, "record_compute", lambda _: event)
    batch = packs(rows_of())
    for _ in range(2):
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
    monkeypatch.undo()
    with pytest.raises(DataError, match="let the collator leave attention_mask out"):
        model(**padded(rows_of()))
    model(**padded(rows_of()))


def test_flash_attention_is_refused_for_several_packed_rows(training: Any) -> None:
    model, rows = training(model_of("Llama")), rows_of()
    model.config._attn_implementation_internal = "flash_attention_2"  # the package is not needed
    with pytest.raises(DataError, match=r"a batch of 2 packed rows, and attn_implementation='flash_attention_2'"):
        model(**packs(rows[:2], rows[2:]))
