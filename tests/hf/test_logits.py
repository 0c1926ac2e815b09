"""Logits computed on first read: numbers and gradients equal the head's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.loss import Logits, compute_loss_in_chunks
from tests.hf.training import causal_rows, t5

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_ROWS, LENGTH, VOCAB = 8, 10, 200
CHUNK = 80 * 64
BATCH = {key: torch.stack([row[key] for row in causal_rows()]) for key in ("input_ids", "labels")}
"""2 to 8 targets a row; the rest is -100."""


READERS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "log_softmax": lambda logits: logits.log_softmax(-1),
    "double": lambda logits: logits.double(),
    "shifted": lambda logits: logits[..., :-1, :].contiguous().view(-1, VOCAB),
    "last token": lambda logits: logits[:, -1, :],
    "rows": lambda logits: logits[1:, [0, 2]],
    "masked": lambda logits: logits[BATCH["labels"] != -100],
    "padding of the vocabulary": lambda logits: logits[..., : VOCAB - 3],
    "transposed": lambda logits: logits.transpose(1, 2),
    "other view": lambda logits: logits.view(NUM_ROWS, -1),
    "scaled": lambda logits: (2.0 * logits / 3 + 1).tanh() * torch.full((1, 1, 1), 5.0),
    "bias": lambda logits: logits + torch.arange(VOCAB, dtype=torch.float32) / VOCAB,
    "bias of a token": lambda logits: logits + torch.arange(LENGTH).view(1, -1, 1),
    "cast": lambda logits: logits.to(torch.float64).to(logits.device),
    "no row": lambda logits: F.cross_entropy(logits[:0].view(-1, VOCAB), BATCH["labels"][:0].view(-1), reduction="sum"),
    "joined": lambda logits: torch.cat([logits, logits]),
    "mean loss": lambda logits: F.cross_entropy(logits.flatten(0, 1), BATCH["labels"].flatten()),
    "each loss": lambda logits: F.cross_entropy(logits.reshape(-1, VOCAB), BATCH["labels"].flatten(), reduction="none"),
    "smoothed": lambda logits: F.cross_entropy(logits.view(-1, VOCAB), BATCH["labels"].view(-1), label_smoothing=0.1),
    "loss over positions": lambda logits: F.cross_entropy(logits.transpose(1, 2), BATCH["labels"]),
    "token out of -100": lambda logits: F.cross_entropy(
        logits.view(-1, VOCAB), BATCH["input_ids"].view(-1), ignore_index=int(BATCH["input_ids"][0, 0])
    ),
}


def write_to_some(logits: Any) -> Any:
    flat = logits.view(-1, VOCAB)
    logits[:, :, 7] = -5.0
    flat[:, 8] = -6.0
    return F.cross_entropy(flat, BATCH["labels"].flatten()) + logits.sum()


def divide_in_place(logits: Any) -> Any:
    also_logits = logits
    with torch.no_grad():
        logits /= 2
        logits.clamp_(max=0.1)
    return also_logits


@pytest.mark.parametrize("read", [*READERS.values(), write_to_some, divide_in_place], ids=[*READERS, "written", "/="])
def test_whoever_reads_logits_gets_them_with_their_gradients(read: Callable[[Any], Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_ROWS, LENGTH, 16), (VOCAB, 16), (VOCAB,)
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    own = read(F.linear(*inputs))
    result = read(Logits(*inputs, chunk_elements=CHUNK))
    assert (result.shape, result.dtype) == (own.shape, own.dtype)
    torch.testing.assert_close(result + 0 * own, own)
    if own.is_floating_point():
        weights = torch.randn(own.shape, generator=generator, dtype=own.dtype)
        own_gradients = torch.autograd.grad((own * weights).sum(), inputs)
        for ours, theirs in zip(torch.autograd.grad((result * weights).sum(), inputs), own_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_logits_that_are_read_after_the_step_are_an_error() -> None:
    model = t5()
    compute_loss_in_chunks(model, 64)
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        output = engine(**BATCH)
        engine.backward(output.loss)
        assert output.logits.argmax(-1).shape == (NUM_ROWS, LENGTH)
        engine.step()
        with pytest.raises(EngineStateError, match=r"before engine\.step"):
            output.logits.argmax(-1)


def test_a_custom_autograd_function_is_told_that_its_gradient_would_be_lost() -> None:
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            ctx.shape = logits.shape
            return logits.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0].expand(ctx.shape)

    model = t5()
    compute_loss_in_chunks(model, 64)
    apply: Any = Total.apply
    with pytest.raises(EngineStateError, match=r"logits\.clone"):
        apply(model(**BATCH).logits).backward()
    apply(model(**BATCH).logits.clone()).backward()
    assert model.shared.weight.grad is not None
