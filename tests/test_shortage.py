"""A full GPU is explained: planned against used, and what to do."""

from __future__ import annotations

import pytest
import torch

from offloadkit.config import OffloadConfig
from offloadkit.engine import OffloadEngine
from offloadkit.errors import OutOfVramError
from tests.models import TinyLM, tokens, train


class Hungry(TinyLM):
    """Runs out of memory while `hungry`."""

    hungry = False
    in_backward = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(batch)
        if self.hungry and not self.in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if self.hungry:
            loss.register_hook(_fail)
        return loss


def _fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_full_gpu_is_explained_and_training_can_go_on(in_backward: bool) -> None:
    torch.manual_seed(0)
    expected, model = TinyLM(), Hungry()
    model.load_state_dict(expected.state_dict())
    with OffloadEngine(expected, OffloadConfig(), device="cpu") as engine:
        train(engine, tokens(4))
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        train(engine, tokens(2))
        model.hungry, model.in_backward = True, in_backward
        with pytest.raises(OutOfVramError, match=r"Planned were .*working weights .*Take a smaller micro-batch"):
            engine.backward(engine(tokens(1)[0]))
        model.hungry = False
        train(engine, tokens(4)[2:])
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())


@pytest.mark.gpu
def test_a_gpu_that_is_really_full() -> None:
    class Grows(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).repeat(100_000_000, 1)

    engine = OffloadEngine(Grows(1000, 1000), OffloadConfig(), device="cuda")
    with engine, pytest.raises(OutOfVramError, match="the GPU's memory is full: torch held up to"):
        engine(torch.zeros(10, 1000, device="cuda"))
