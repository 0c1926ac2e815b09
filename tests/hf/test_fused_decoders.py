"""Gated activations, rotary embeddings and Gemma's norms as one kernel: eligible classes, the plan's bytes, and
restoring the model's own operations."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from offloadkit.engine.tracing import META, AsOnGpu, OpCounter, trace_micro_batch
from offloadkit.facts import changes
from offloadkit.hf.patches import fuse, fuse_decoders, fuse_norms
from offloadkit.kernels import decoder
from offloadkit.planner import Pass
from tests.hf.tiny import llama_config, t5_v1_1_config

INTERPRETED = "from tests.kernels.interpreted_decoder import main; main()"
NUM_NORMS = {"llama": 0, "qwen2": 0, "qwen3": 0, "mistral": 0, "gemma2": 5, "gemma3_text": 7, "phi3": 0}
"""Norms that run on our kernel, of one block and the last norm. torch's kernel has the others."""
FAMILIES = tuple(NUM_NORMS)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


@pytest.fixture(autouse=True)
def nothing_stays_changed() -> Iterator[None]:
    before = set(changes.claims)
    yield
    assert set(changes.claims) <= before


def tiny(model_type: str, device: str = "meta", **changes: Any) -> Any:
    """A model of one block in training mode."""
    values = {"vocab_size": 64, "num_hidden_layers": 1, "pad_token_id": 0, "use_cache": False, **SIZES, **changes}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).train()


def replaced(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


def file_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_is_one_operation_in_each_family(model_type: str) -> None:
    model = tiny(model_type)
    own = file_of(model).apply_rotary_pos_emb
    undo = fuse(model)
    with AsOnGpu(), OpCounter([], mask_is_full=True), Called() as called:
        model(torch.zeros((2, 5), dtype=torch.long, device=META)).logits.sum().backward()
    number = Counter(called.names)
    assert [number[name] for name in ("rotary", "gated", "gated_backward")] == [2, 1, 1]
    assert number["norm"] == number["norm_backward"] == NUM_NORMS[model_type]
    assert not {"silu", "gelu", "neg"} & set(called.names)
    assert number["rsqrt"] == 0
    undo()
    assert not replaced(model)
    assert file_of(model).apply_rotary_pos_emb is own


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of torch operations called while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", ["cohere", "gptj", "gpt2"])
def test_other_rotary_embeddings_stay(model_type: str) -> None:
    model = tiny(model_type)
    before = vars(file_of(model)).get("apply_rotary_pos_emb")
    fuse_decoders(model)
    assert vars(file_of(model)).get("apply_rotary_pos_emb") is before


def test_queries_without_a_batch_are_rotated_as_before() -> None:
    model = tiny("llama")
    own = file_of(model).apply_rotary_pos_emb
    tensors = [torch.randn(shape, device=META) for shape in ((5, 3, 8), (5, 3, 8), (5, 8), (5, 8))]
    with AsOnGpu():
        undo = fuse(model)
        patched = file_of(model).apply_rotary_pos_emb
        assert patched is not own
        assert [each.shape for each in patched(*tensors)] == [each.shape for each in own(*tensors)]
    undo()


class Raises(nn.Module):
    """A gated layer by its attributes that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))  # type: ignore[no-any-return]


class InFp32(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(product.to(x.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [Raises(), InFp32(), nn.Linear(2, 2), T5DenseGatedActDense(t5_v1_1_config())])
def test_other_modules_stay(module: nn.Module) -> None:
    fuse_decoders(module)
    assert not replaced(module)


def test_a_forward_or_a_function_that_other_code_replaced_stays() -> None:
    model: Any = LlamaForCausalLM(llama_config())
    mlp = model.model.layers[0].mlp
    mlp.forward = theirs = lambda x: x
    undo = fuse_decoders(model)
    assert mlp.forward is theirs
    undo()
    assert mlp.forward is theirs


def test_an_activation_with_hooks_or_of_another_function_is_called() -> None:
    """On a GPU; the meta device stands for it."""
    mlp = modeling_llama.LlamaMLP(llama_config()).to(META)
    undo = fuse_decoders(mlp)
    x = torch.empty(2, 16, device=META)

    def names() -> list[str]:
        with Called() as called:
            mlp(x)
        return [name for name in called.names if name in ("gated", "silu", "relu")]

    assert names() == ["gated"]
    hook = mlp.act_fn.register_forward_hook(lambda *_: None)
    assert names() == ["silu"]
    hook.remove()
    mlp.act_fn = nn.ReLU()
    assert names() == ["relu"]
    undo()


def test_a_norm_of_one_plus_weight_is_one_operation() -> None:
    x = torch.empty(8, 1024, device=META, dtype=torch.bfloat16, requires_grad=True)
    norm = Gemma3RMSNorm(1024).bfloat16().to(META)
    undo = fuse_decoders(norm)
    with OpCounter([x, norm.weight], mask_is_full=True) as counter:
        y = norm(x)
        assert counter.total == Pass(moved_bytes=2 * x.nbytes + norm.weight.nbytes + 8 * 4, num_operations=1)
        assert counter.live == y.nbytes + 512  # one fp32 number a row, rounded to the allocator's minimum
        counter.total = Pass()
        torch.autograd.grad(y, [x, norm.weight], torch.empty_like(y))
        assert counter.total.num_operations == 1
    undo()
    assert not replaced(norm)


def test_two_models_of_a_file_share_the_change() -> None:
    own = modeling_llama.apply_rotary_pos_emb
    first, second = (fuse_decoders(LlamaForCausalLM(llama_config())) for _ in range(2))
    assert modeling_llama.apply_rotary_pos_emb is not own
    first()
    assert modeling_llama.apply_rotary_pos_emb is not own
    second()
    assert modeling_llama.apply_rotary_pos_emb is own


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_on_the_cpu_the_numbers_are_the_models_own(model_type: str) -> None:
    torch.manual_seed(0)
    model, ids = tiny(model_type, "cpu"), torch.arange(3, 13).view(2, 5)

    def run() -> list[torch.Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    own, undo = run(), fuse_decoders(model)
    assert all(map(torch.equal, run(), own))
    undo()


def test_an_old_gpu_keeps_the_models_own() -> None:
    model = tiny("llama")
    undo = fuse_decoders(model, (7, 5))
    assert not uses_kernels(model)
    undo()
    undo = fuse_decoders(model, (8, 0))
    assert uses_kernels(model)
    undo()


def uses_kernels(model: Any) -> bool:
    with AsOnGpu(), OpCounter([], mask_is_full=True), Called() as called:
        model(torch.zeros((2, 5), dtype=torch.long, device=META))
    return not {"gated", "rotary", "norm"}.isdisjoint(called.names)


def test_backward_reads_what_forward_kept() -> None:
    gate, up = (torch.empty(8, 512, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with OpCounter([gate, up], mask_is_full=True) as counter:
        output = decoder.gated(gate, up, "silu")
        assert counter.total == Pass(moved_bytes=3 * gate.nbytes, num_operations=1)
        assert counter.live == output.nbytes
        counter.total = Pass()
        output.backward(torch.empty_like(output))
        assert counter.total == Pass(moved_bytes=5 * gate.nbytes, num_operations=1)


def test_a_micro_batch_keeps_and_moves_less() -> None:
    def block(*, fused: bool) -> Any:
        model = tiny("llama", intermediate_size=512, attn_implementation="sdpa").bfloat16()
        undo = fuse(model) if fused else fuse_norms(model)
        ids = torch.empty(4, 64, dtype=torch.long)
        found = next(each for each in trace_micro_batch(model, {"input_ids": ids, "labels": ids}).stages if each.block)
        undo()
        return found

    own, fused = (block(fused=each) for each in (False, True))
    width = 4 * 64 * 512 * 2
    assert own.kept_bytes - fused.kept_bytes == width  # the activation
    assert own.forward.moved_bytes - fused.forward.moved_bytes > 2 * width
    assert own.backward.moved_bytes - fused.backward.moved_bytes > 4 * width
    assert fused.forward.flops == own.forward.flops


def test_the_compiler_keeps_the_models_own() -> None:
    model = tiny("llama")
    fuse(model, compiled=True)
    assert not replaced(model)


class Emulated:
    """A kernel by torch's operations: `function(*inputs)` gives the outputs."""

    def __init__(self, function: Any, num_inputs: int) -> None:
        self.function, self.num_inputs = function, num_inputs

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **_: Any) -> None:
            arrays = [each for each in given if isinstance(each, torch.Tensor)]
            outputs = self.function(*arrays[: self.num_inputs])
            for array, output in zip(arrays[self.num_inputs :], outputs, strict=True):
                array.copy_(output)

        return launch


def test_second_derivatives_are_those_of_the_eager_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.silu(gate) * up,)

    def backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sigmoid = gate.sigmoid()
        return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid

    kernels = SimpleNamespace(gated=Emulated(forward, 2), gated_backward=Emulated(backward, 3))
    monkeypatch.setattr(decoder, "KERNELS", kernels)
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def second(gated: Any) -> Any:
        (first,) = torch.autograd.grad(gated(gate, up).square().sum(), gate, create_graph=True)
        return torch.autograd.grad(first.sum(), (gate, up))

    found = second(lambda *given: decoder.gated(*given, "silu"))
    torch.testing.assert_close(found, second(lambda *given: forward(*given)[0]))


def test_without_triton_or_a_gpu_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "KERNELS", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    decoder.available.cache_clear()
    model = tiny("llama")
    undo = fuse_decoders(model)
    assert not uses_kernels(model)
    undo()
    decoder.available.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(
    tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason="Triton's interpreter takes arrays of one number for numbers, which numpy 2.4 refuses",
)
def test_the_kernels_interpreted_on_the_cpu_equal_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
