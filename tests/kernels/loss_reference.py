"""The kernels of the loss beside torch's operations, on any device."""

from __future__ import annotations

import torch

from offloadkit.kernels import linear_cross_entropy as loss


def check_loss(rows: int, vocabulary: int, chunk: int, dtype: torch.dtype, device: str) -> None:
    """Log-sum-exp and targets' logits over chunks of `chunk` columns; then the gradients' bits, in place and not."""
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype).to(device)
    logits[0, : vocabulary // 2] = float("-inf")
    logits[1] = -60000.0
    target = torch.randint(0, vocabulary, (rows,), generator=generator).to(device)
    target[0] = vocabulary - 1
    d_losses = torch.rand(rows, generator=generator).to(device)
    found = own = (None, None)
    chunks = [slice(first, min(first + chunk, vocabulary)) for first in range(0, vocabulary, chunk)]
    for columns in chunks:
        found = loss._added_fused(logits[:, columns], target, columns, *found)
        own = loss._added(logits[:, columns], target, columns, *own)
    torch.testing.assert_close(found[0], own[0], rtol=1e-6, atol=1e-6)
    assert found[1] is not None
    assert own[1] is not None
    assert torch.equal(found[1], own[1])
    logsumexp = own[0]
    assert logsumexp is not None
    for columns in chunks:
        part = logits[:, columns].clone()
        here = target - columns.start == torch.arange(part.shape[1], device=device).unsqueeze(1)
        softmax = (part.float() - logsumexp.unsqueeze(1)).exp()
        expected = ((softmax - here.t().float()) * d_losses.unsqueeze(1)).to(dtype)
        out = torch.empty_like(part)
        loss._gradient_of_logits(part, target, logsumexp, d_losses, out, columns.start)
        loss._gradient_of_logits(part, target, logsumexp, d_losses, part, columns.start)
        assert torch.equal(part, out)
        if device == "cpu":  # the interpreter's exp is not torch's
            torch.testing.assert_close(out, expected)
        else:
            assert torch.equal(out, expected)
