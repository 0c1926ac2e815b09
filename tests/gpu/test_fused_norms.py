"""Norms as one kernel on the GPU: the chosen kernel, accurate and deterministic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from offloadkit.hf.patches import fuse_norms
from tests.hf.test_fused_decoders import Called

ROWS, WIDTH = 4096, 3072


def tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def gradients(norm: Any, weight: torch.Tensor, x: torch.Tensor, into: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of the input and the weight."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, weight], into)]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_one_kernel_whose_numbers_are_as_good_and_always_the_same(kind: Any, dtype: torch.dtype) -> None:
    x, into = tensor(ROWS, WIDTH, seed=0).to(dtype), tensor(ROWS, WIDTH, seed=1).to(dtype)
    norm = kind(WIDTH).cuda().to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * tensor(WIDTH, seed=2))
    weight = norm.weight.detach().double().requires_grad_()
    exact = gradients(
        lambda x: weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(), weight, x.double(), into.double()
    )
    own = gradients(norm, norm.weight, x, into)
    fuse_norms(norm)
    with Called() as called:
        fused = gradients(norm, norm.weight, x, into)
    assert called.names.count("_fused_rms_norm") == called.names.count("_fused_rms_norm_backward") == 1
    assert not {"pow", "mean", "rsqrt"} & set(called.names)
    for mine, theirs, right in zip(fused, own, exact, strict=True):
        error, theirs_error = (float((each.double() - right).norm()) for each in (mine, theirs))
        assert error <= 1.1 * theirs_error + 1e-6 * float(right.norm())
    again = gradients(norm, norm.weight, x, into)
    assert all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
