"""The chunked loss on the GPU: its memory, its numbers, and no synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from offloadkit.hf.loss import CHUNK_ELEMENTS, Logits
from offloadkit.kernels import linear_cross_entropy
from tests.kernels.loss_reference import check_loss

NUM_TOKENS, WIDTH, VOCAB = 2048, 1024, 128_256


def measured(
    make_logits: Callable[..., torch.Tensor], inputs: list[torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], int]:
    """Loss, gradients, and peak bytes allocated beyond the gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = F.cross_entropy(make_logits(*inputs), target)
        gradients = torch.autograd.grad(loss, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    return loss.detach(), gradients, torch.cuda.max_memory_allocated() - before - gradient_bytes


@pytest.mark.parametrize("dtype", linear_cross_entropy.DTYPES)
def test_kernels_are_torchs_operations(dtype: torch.dtype) -> None:
    assert linear_cross_entropy.available()
    for size in ((5, 100, 64), (3, 5000, 5000), (300, 32_128, 4096)):
        check_loss(*size, dtype, "cuda")


@pytest.mark.parametrize("steps", [lambda x: x, lambda x: (x.float() / 5).tanh() * 5, lambda x: (x / 5).tanh() * 5])
def test_steps_before_the_softmax(steps: Callable[[torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((64, 64), (40_000, 64))
    ]
    target = torch.randint(0, 40_000, (64,), generator=generator, device="cuda")
    own, ours = (
        torch.autograd.grad(
            F.cross_entropy(steps(Logits(*inputs, None, chunk_elements=2**17, fused=fused)), target), inputs
        )
        for fused in (False, True)
    )
    for mine, theirs in zip(ours, own, strict=True):
        assert float((mine.float() - theirs.float()).norm()) <= 4e-3 * float(theirs.float().norm())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_and_numbers(dtype: torch.dtype, fused: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, generator=generator, device="cuda") / 32).to(dtype).requires_grad_()
    target = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator, device="cuda")
    target[::3] = -100
    inputs = [hidden, weight]
    own_loss, own, own_bytes = measured(lambda *inputs: F.linear(*inputs).float(), inputs, target)
    loss, ours, our_bytes = measured(
        lambda *inputs: Logits(*inputs, None, chunk_elements=CHUNK_ELEMENTS, fused=fused).float(), inputs, target
    )
    assert our_bytes <= 16 * CHUNK_ELEMENTS + 16 * hidden.nbytes < own_bytes / 5
    assert float(loss) == pytest.approx(float(own_loss), rel=1e-5)
    for mine, theirs in zip(ours, own, strict=True):
        assert float((mine.float() - theirs.float()).norm()) <= 1e-2 * float(theirs.float().norm())


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_deterministic_and_allowed_where_only_deterministic_kernels_are(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((512, 64), (40_000, 64))
    ]
    target = torch.randint(0, 40_000, (512,), generator=generator, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(
                F.cross_entropy(Logits(*inputs, None, chunk_elements=2**20, fused=fused), target), inputs
            )
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
