"""Run with TRITON_INTERPRET=1 by test_fused_attention.py: the kernels of attention on CPU tensors, in fp16 (the
interpreter multiplies no bf16)."""

from __future__ import annotations

import torch

from offloadkit.kernels import attention as attention_op
from tests.kernels.attention_reference import check


def main() -> None:
    check((2, 3, 40, 40, 16), torch.float16, "keys", 0.0, "cpu")
    attention_op.SCRATCH_BYTES = 2 * 2 * 40 * 40 * 2  # two heads, then one
    check((2, 3, 40, 40, 16), torch.float16, "keys", 0.1, "cpu")
    check((2, 2, 33, 70, 32), torch.float16, "pairs", 0.1, "cpu")
    check((1, 2, 64, 16, 64), torch.float16, "none", 0.3, "cpu")
    check((3, 2, 17, 19, 16), torch.float16, "a whole row", 0.0, "cpu")
    check((1, 2, 20, 70, 16), torch.float16, "the first half, -inf", 0.6, "cpu")
