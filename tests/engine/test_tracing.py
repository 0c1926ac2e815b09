"""Facts about a micro-batch found on the meta device, compared with hand counts and a real run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

from offloadkit.engine import tracing
from offloadkit.engine.tracing import Call, trace_micro_batch
from offloadkit.hf.loss import compute_loss_in_chunks
from offloadkit.hf.patches import fuse_norms
from offloadkit.planner import MicroBatch
from tests.models import Residual

BATCH, WIDTH, HIDDEN = 8, 64, 256


class Stack(nn.Module):
    """Three blocks and a mean; fp32."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, HIDDEN) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def meta_stack(depth: int = 3) -> Stack:
    with torch.device("meta"):
        return Stack(depth)


def test_a_block_by_hand() -> None:
    x = torch.empty(BATCH, WIDTH, requires_grad=True)
    work = trace_micro_batch(meta_stack(), {"x": x})
    first, second, third, mean = work.stages
    assert [stage.block for stage in work.stages] == ["blocks.0", "blocks.1", "blocks.2", ""]
    hidden, output, matrix = 4 * BATCH * HIDDEN, 4 * BATCH * WIDTH, 4 * WIDTH * HIDDEN
    assert second.kept_bytes == hidden + output  # tanh's result, which `down` saves too; x + down(...)
    assert second.output_bytes == second.input_bytes == output
    assert second.forward_peak_bytes == 2 * hidden  # tanh's input and output
    assert second.forward.flops == 2 * 2 * BATCH * WIDTH * HIDDEN
    assert second.backward.flops == 2 * second.forward.flops
    assert second.forward.num_operations == 4  # two products with bias, tanh, addition
    assert output + matrix <= second.backward_peak_bytes <= output + matrix + 3 * hidden
    assert second.shared_bytes == 0
    assert third.kept_bytes == second.kept_bytes
    assert first.backward == second.backward
    assert mean.kept_bytes == 512 - output  # the loss, as torch's allocator rounds it; its input is freed


def test_the_first_block_has_no_gradient_to_hand_on_where_inputs_have_none() -> None:
    work = trace_micro_batch(meta_stack(), {"x": torch.empty(BATCH, WIDTH)})
    assert work.stages[0].backward.flops < work.stages[1].backward.flops


def test_frozen_blocks_keep_nothing() -> None:
    model = meta_stack()
    model.blocks[0].requires_grad_(False)
    first, second, *_ = trace_micro_batch(model, {"x": torch.empty(BATCH, WIDTH)}).stages
    assert first.kept_bytes == first.output_bytes < second.kept_bytes
    assert first.backward.flops == 0


def t5(**values: Any) -> T5ForConditionalGeneration:
    shape = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4, "vocab_size": 512}
    config = T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.0, use_cache=False, **values)
    config._attn_implementation = "eager"
    return T5ForConditionalGeneration(config).train()


def llama(num_key_value_heads: int = 2) -> LlamaForCausalLM:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=num_key_value_heads, vocab_size=512, use_cache=False)
    return LlamaForCausalLM(config).train()


def tokens(rows: int, length: int, **others: int) -> dict[str, torch.Tensor]:
    lengths = {"input_ids": length, "labels": length} | others
    return {name: torch.ones(rows, number, dtype=torch.int64) for name, number in lengths.items()}


def saved_in_a_real_run(model: nn.Module, batch: dict[str, Any]) -> int:
    """Bytes of the distinct storages that autograd saves on the CPU, without weights and inputs."""
    given = [tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor)]
    own = {each.untyped_storage().data_ptr() for each in itertools.chain(model.parameters(), model.buffers(), given)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss = model(**batch).loss
    return sum(saved.values())


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def test_what_t5_keeps_is_what_autograd_saves() -> None:
    model, batch = t5(), tokens(4, 64, labels=32)
    saved = saved_in_a_real_run(model, batch)
    work = trace_micro_batch(on_meta(model), batch)
    kept = sum(stage.kept_bytes for stage in work.stages)
    assert saved <= kept <= 1.02 * saved + 4 * 4 * 32 * 512  # the logits count too, while the output lives
    assert work.num_tokens == 4 * (64 + 32)


def t5_classifier() -> nn.Module:
    config = T5Config(d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, vocab_size=512, dropout_rate=0.0)
    config.decoder_start_token_id, config._attn_implementation = 0, "eager"
    return T5ForSequenceClassification(config).train()


def bart_classifier() -> nn.Module:
    encoder = {"encoder_layers": 2, "encoder_ffn_dim": 256, "encoder_attention_heads": 4}
    decoder = {"decoder_layers": 2, "decoder_ffn_dim": 256, "decoder_attention_heads": 4}
    config = BartConfig(d_model=128, vocab_size=512, dropout=0.0, **encoder, **decoder)
    config._attn_implementation = "eager"
    return BartForSequenceClassification(config).train()


@pytest.mark.parametrize("make", [t5_classifier, bart_classifier])
def test_what_a_classifier_of_the_end_tokens_state_keeps_is_what_autograd_saves(make: Callable[[], Any]) -> None:
    """The model checks that all rows have equally many end tokens, and takes the states at these."""
    model = make()
    batch = {"input_ids": torch.full((4, 64), 5), "labels": torch.zeros(4, dtype=torch.int64)}
    batch["input_ids"][:, -1] = model.config.eos_token_id
    saved = saved_in_a_real_run(model, batch)
    work = trace_micro_batch(on_meta(model), batch)
    assert saved <= sum(stage.kept_bytes for stage in work.stages) <= 1.02 * saved
    states = 4 * 4 * 64 * 128
    assert work.stages[-1].kept_bytes < 1.1 * states  # T5's last norm keeps these; one state a row is taken


def test_llama_keeps_no_attention_weights() -> None:
    model = on_meta(llama())
    short, long = (trace_micro_batch(model, tokens(2, length)) for length in (64, 256))
    for before, after in zip(short.stages, long.stages, strict=True):
        assert after.kept_bytes <= 4.2 * before.kept_bytes
    assert short.num_tokens == 128


def test_a_cheap_block_keeps_its_matmuls_and_attention_and_recomputes_the_rest() -> None:
    hidden, feed_forward, rows = 512, 1536, 2 * 64
    shape = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": 2, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4, use_cache=False))
    fuse_norms(model)
    block = trace_micro_batch(on_meta(model.bfloat16().train()), tokens(2, 64)).stages[1]
    assert block.cheap is not None
    results = hidden + 2 * (hidden // 2) + hidden + hidden + 2 * feed_forward + hidden  # down_proj's gives the output
    assert 2 * rows * results <= block.cheap.kept_bytes <= 1.05 * 2 * rows * results < block.kept_bytes
    assert block.cheap.kept_bytes + block.cheap.backward_peak_bytes <= block.kept_bytes + block.backward_peak_bytes
    assert block.cheap.again.flops == 0
    assert 0.5 * block.forward.moved_bytes < block.cheap.again.moved_bytes < block.forward.moved_bytes


def test_blocks_that_cannot_run_again_have_no_cheap_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of keys and values, which the blocks extend, is among their arguments."""
    model, batch = on_meta(llama()), {**tokens(2, 64), "use_cache": True}
    traced = trace_micro_batch(model, batch)
    assert not any(stage.cheap for stage in traced.stages)
    monkeypatch.setattr(tracing._Stages, "_follow", tracing._Stages._passes)
    without = trace_micro_batch(model, batch)

    def work(micro_batch: MicroBatch) -> list[Any]:
        """Without peaks, since the cache keeps tensors of the failed run alive until the collector runs."""
        return [(stage.forward, stage.backward, stage.kept_bytes, stage.cheap) for stage in micro_batch.stages]

    assert work(traced) == work(without)


def test_results_of_repeated_operations_change_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = on_meta(llama(2)), tokens(2, 16)
    traced = trace_micro_batch(model, batch)
    assert tracing._results
    monkeypatch.setattr(tracing, "_results", {})
    monkeypatch.setattr(tracing, "_is_empty_like", lambda *_: False)  # no result is kept
    assert trace_micro_batch(model, batch) == traced


def test_queries_that_share_keys_are_counted_by_torch_2_11_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's formulas require as many heads of keys as of queries."""
    asked = []

    def strict(formula: Callable[..., int], first: int) -> Callable[..., int]:
        def count(*args: torch.Tensor, **options: Any) -> int:
            query, key, value = args[first : first + 3]
            assert query.shape[1] == key.shape[1] == value.shape[1]
            asked.append(tuple(query.shape))
            return formula(*args, **options)

        return count

    monkeypatch.setattr(tracing, "_results", {})
    every, shared = (on_meta(llama(heads).bfloat16()) for heads in (4, 2))
    with_all = trace_micro_batch(every, tokens(2, 64)).stages[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward
    for operation, first in ((flash, 0), (back, 1)):
        monkeypatch.setitem(flop_registry, operation, strict(flop_registry[operation], first))
    with_half = trace_micro_batch(shared, tokens(2, 64)).stages[1]
    assert set(asked) == {(2, 4, 64, 32)}
    products = 2 * (2 * (2 * 64) * 128 * 64)  # for the other half of keys and values
    assert with_all.forward.flops - with_half.forward.flops == products
    assert with_all.backward.flops - with_half.backward.flops == 2 * products


def test_keys_that_a_causal_mask_hides_are_not_counted() -> None:
    """Two rows of 64 tokens, four heads of width 32: two products of each query with the keys it sees, five in
    backward."""
    model, batch = on_meta(llama().bfloat16()), tokens(2, 64)
    seen, of_a_key = 64 * 65 // 2, 2 * 2 * 4 * 32
    causal = trace_micro_batch(model, batch).stages[1]
    assert causal.forward.sdpa_flops == 2 * of_a_key * seen
    assert causal.backward.sdpa_flops == 5 * of_a_key * seen
    assert causal.forward.sdpa_flops_of_a_key == 2 * of_a_key * 64
    masked = trace_micro_batch(model, batch | {"attention_mask": torch.zeros(2, 64)}).stages[1]
    assert masked.forward.sdpa_flops == 2 * of_a_key * 64 * 64
    assert masked.forward.flops == causal.forward.flops


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_backward_of_attention_takes_scratch_memory(kv_heads: int) -> None:
    """Kernels round 100 queries to 128, and heads of 40 numbers to 64."""
    shapes = [(2, heads, 100, 40) for heads in (4, kv_heads, kv_heads)]
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for shape in shapes]
    with tracing.AsOnGpu(), tracing.OpCounter(given, mask_is_full=True) as counter:
        output = nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        d_output = torch.empty_like(output)
        before = counter.peak = counter.live
        gradients = torch.autograd.grad(output, given, d_output)
    of_queries = 4 * 2 * 4 * 128 * 64
    # in bf16, of keys and values for every query's head
    of_shared_keys = 0 if kv_heads == 4 else 2 * 2 * 2 * 4 * 100 * 40
    own = sum(tracing.allocated_bytes(each.nbytes) for each in gradients)
    assert counter.peak - before == own + of_queries + of_shared_keys


def test_blocks_of_one_kind_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = on_meta(t5()), tokens(4, 64, labels=32)
    together = trace_micro_batch(model, batch)
    serial = itertools.count()
    monkeypatch.setattr(tracing, "kind_of", lambda *_: next(serial))
    each = trace_micro_batch(model, batch)
    assert next(serial) == 6
    assert each == together


def test_t5s_later_blocks_share_the_position_bias() -> None:
    stages = {stage.block: stage for stage in trace_micro_batch(on_meta(t5()), tokens(4, 64, labels=32)).stages}
    bias = 4 * 4 * 64 * 64
    assert stages["encoder.block.0"].output_bytes == stages["encoder.block.1"].output_bytes + bias
    assert stages["encoder.block.0"].shared_bytes == 0
    assert stages["encoder.block.1"].shared_bytes == bias


def test_padding_makes_a_mask() -> None:
    model, batch = on_meta(llama()), tokens(2, 64)
    whole = trace_micro_batch(model, batch)
    padded = trace_micro_batch(model, batch | {"attention_mask": torch.empty(2, 64, device="meta")})
    assert padded.stages[1].kept_bytes > whole.stages[1].kept_bytes  # keys and values are repeated for each head
    with_ones = batch | {"attention_mask": torch.ones(2, 64)}
    assert trace_micro_batch(model, with_ones).stages[1] == padded.stages[1]  # later rows may be padded
    full = Call((), with_ones, masks_nothing=True)
    assert trace_micro_batch(model, full).stages[1] == whole.stages[1]


class Wrapper(nn.Module):
    """Passes its unnamed arguments on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor) -> Any:
        return self.inner(*given)


def test_a_mask_by_position_is_found() -> None:
    model, ids, ones = on_meta(llama()), tokens(2, 64)["input_ids"], torch.ones(2, 64)
    whole, padded = (trace_micro_batch(model, given).stages[1] for given in (ids, (ids, ones)))
    assert padded.kept_bytes > whole.kept_bytes
    assert padded == trace_micro_batch(model, {"input_ids": ids, "attention_mask": ones}).stages[1]
    assert trace_micro_batch(model, (ids, None)).stages[1] == whole
    unnamed = Wrapper(model)
    assert trace_micro_batch(unnamed, (ids,)).stages[1].kept_bytes == whole.kept_bytes
    assert trace_micro_batch(unnamed, (ids, ones)).stages[1].kept_bytes == padded.kept_bytes


def test_a_loss_in_chunks_keeps_no_logits() -> None:
    model, batch = on_meta(llama()), tokens(4, 64)
    whole = trace_micro_batch(model, batch).stages[-1]
    compute_loss_in_chunks(model, chunk_elements=2**13)
    chunked = trace_micro_batch(model, batch).stages[-1]
    assert chunked.kept_bytes < whole.kept_bytes - 4 * 4 * 64 * 512 + 2 * 4 * 64 * 128 * 4
    assert chunked.forward_peak_bytes < whole.forward_peak_bytes


def test_the_kernels_of_the_loss_move_each_logit_seldom() -> None:
    """Beside the matmuls, two bytes are read in forward, and two read and two written in backward, for bf16."""
    model, (rows, length), moved = on_meta(llama()).bfloat16(), (4, 64), []
    for fused in (False, True):
        undo = compute_loss_in_chunks(model, chunk_elements=2**13, fused=fused)
        stage = trace_micro_batch(model, tokens(rows, length)).stages[-1]
        moved.append(stage.forward.moved_bytes + stage.backward.moved_bytes)
        undo()
    assert 50 < (moved[0] - moved[1]) / (rows * (length - 1) * model.config.vocab_size) < 75


def test_dropout_saves_a_mask_of_bytes_as_on_a_gpu() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Residual(WIDTH, HIDDEN, dropout) for dropout in (0.0, 0.1)])
    without, with_dropout = (
        trace_micro_batch(nn.Sequential(block, _Mean()), {"input": torch.empty(BATCH, WIDTH)}) for block in model
    )
    kept = [sum(stage.kept_bytes for stage in work.stages) for work in (without, with_dropout)]
    assert kept[1] - kept[0] == 4 * BATCH * HIDDEN + BATCH * HIDDEN  # the input of `down`, and the mask


def test_numbers_that_are_known_are_read() -> None:
    """transformers draws on the CPU whether to leave out a layer."""

    class Drops(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean() if torch.rand([]) < 0 else super().forward(x)

    with torch.device("meta"):
        model = Drops()
    work = trace_micro_batch(model, {"x": torch.empty(BATCH, WIDTH)})
    assert [stage.block for stage in work.stages if stage.block] == ["blocks.0", "blocks.1", "blocks.2"]


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


class Grouped(nn.Module):
    """Experts that a grouped matmul runs: each row is multiplied with one expert's weights."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, len(self.up) + 1, device=x.device, dtype=torch.int32) * (BATCH // len(self.up))
        return nn.functional.grouped_mm(x, self.up, offs=ends).float().pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_grouped_matmul_counts_one_expert_for_each_row_in_any_dtype(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = Grouped(4).to(dtype)
    (work,) = trace_micro_batch(model, torch.empty(BATCH, WIDTH, dtype=dtype, requires_grad=True)).stages
    product = 2 * BATCH * WIDTH * HIDDEN
    assert (work.forward.flops, work.backward.flops) == (product, 2 * product)
    assert work.forward.matmul_bytes == dtype.itemsize * (BATCH * WIDTH + 4 * WIDTH * HIDDEN + BATCH * HIDDEN) + 16


class WithoutAutocast(Stack):
    """Switches autocast off for its device, as PEFT's adapters on experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def test_a_model_that_switches_autocast_off_is_traced() -> None:
    x = torch.empty(BATCH, WIDTH)
    with torch.device("meta"):
        model = WithoutAutocast()
    assert trace_micro_batch(model, {"x": x}) == trace_micro_batch(meta_stack(), {"x": x})
    with pytest.raises(RuntimeError, match=r"scalarType|device_type"):
        model(x.to("meta"))


def test_the_model_is_left_as_it_was() -> None:
    model = on_meta(llama())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    work = trace_micro_batch(model, tokens(2, 64))
    assert isinstance(work, MicroBatch)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(parameter.grad is None and not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
