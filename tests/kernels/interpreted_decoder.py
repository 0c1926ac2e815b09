"""Run with TRITON_INTERPRET=1 by test_fused_decoders.py: the kernels of decoder blocks and of the loss on CPU tensors,
in fp16 and fp32 (the interpreter rounds bf16 toward zero)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from offloadkit.kernels import decoder, decoder_triton, linear_cross_entropy_triton
from tests.kernels.decoder_reference import HEADS, SIZES, check_gated, check_norm, check_rotary, gates
from tests.kernels.loss_reference import check_loss

# mypy: ignore-errors


@triton.jit
def exp(x: Any) -> Any:
    return tl.exp(x)


@triton.jit
def tanh(x: Any) -> Any:
    return 2 * tl.sigmoid(2 * x) - 1


def main() -> None:
    decoder_triton.libdevice = SimpleNamespace(exp=exp, tanh=tanh)  # the interpreter has no libdevice
    linear_cross_entropy_triton.libdevice = SimpleNamespace(exp=exp)
    for dtype, error in ((torch.float16, 2e-3), (torch.float32, 4e-6)):
        for size in ((5, 100, 64), (3, 5000, 5000), (4, 4300, 2100)):
            check_loss(*size, dtype, "cpu")
        for shape in HEADS:
            check_rotary(shape, dtype, "cpu")
        for shape in ((3, 7, 24), (2, 5, 4100), (600, 40)):
            check_norm(shape, dtype, 1.0, "cpu")
        for shape in SIZES:
            for activation in decoder.ACTIVATIONS:
                check_gated(*gates(shape, dtype, "cpu"), activation, error)
