"""Nobody reads or writes weights while their update is on its way, however a model comes to them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.config import OffloadConfig
from offloadkit.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.offload import update
from tests.models import TinyLM, tokens, train


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = update.LayerState.step

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.02)
        real(self, *args)

    monkeypatch.setattr(update.LayerState, "step", slow)


class EmbedsByHand(TinyLM):
    """Reads the embedding's weight before any module that holds it runs."""

    def __init__(self, tied: bool) -> None:
        super().__init__(tied=tied, depth=2)
        del self.unused

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(tokens, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flip(-1).flatten())


class BlocksByHand(TinyLM):
    """Its blocks are mere lists: the model runs what is inside them."""

    def __init__(self) -> None:
        super().__init__(tied=False, depth=2)
        del self.unused
        self.blocks = nn.ModuleList([nn.ModuleDict(dict(block.named_children())) for block in self.blocks])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flip(-1).flatten())


def weight_normed() -> nn.Module:
    """A model with a hook of its own, older than the engine's, that reads weights."""
    model = TinyLM(tied=False, depth=2)
    del model.unused
    model.embed = nn.utils.weight_norm(model.embed)
    model.blocks[0].up = nn.utils.weight_norm(model.blocks[0].up)
    return model


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "build",
    [lambda: EmbedsByHand(tied=False), lambda: EmbedsByHand(tied=True), weight_normed, BlocksByHand],
    ids=["read by the parent", "read by the parent, tied", "read by an older hook", "in a block that never runs"],
)
def test_weights_that_are_read_before_their_module_runs_are_waited_for(
    device: str, build: Callable[[], nn.Module]
) -> None:
    results = []
    for settled in (True, False):
        torch.manual_seed(0)
        with OffloadEngine(build(), OffloadConfig(learning_rate=0.1), device=device) as engine:
            for batch in tokens(5, device):
                engine.backward(engine(batch))
                engine.step()
                if settled:
                    engine.synchronize()
            results.append(engine.master_weights())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_modules_inside_a_block_have_no_hook_in_their_forward(device: str) -> None:
    model = TinyLM(tied=False)
    with OffloadEngine(model, device=device):
        hooked = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    assert hooked == {"", "embed", "norm", "head", *(f"blocks.{index}" for index in range(4))}


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("part", ["", "blocks", "blocks.1.up"])
def test_saving_and_loading_right_after_a_step(device: str, part: str) -> None:
    best = TinyLM().get_submodule(part).state_dict()
    with OffloadEngine(TinyLM(), OffloadConfig(learning_rate=0.1), device=device) as engine:
        module = engine.module.get_submodule(part)
        engine.backward(engine(tokens(1, device)[0]))
        engine.step()
        saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        engine.synchronize()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())
        engine.backward(engine(tokens(1, device)[0]))
        engine.step()
        module.load_state_dict(best)
        masters = engine.master_weights()
        for name, tensor in best.items():
            name = f"{part}.{name}" if part else name
            assert torch.equal(tensor.cpu(), masters["embed.weight" if name == "head.weight" else name]), name


@pytest.mark.usefixtures("slow_steps")
def test_a_deepcopy_while_an_update_is_on_its_way_shares_nothing(device: str) -> None:
    model = TinyLM()
    with OffloadEngine(model, device=device) as engine:
        engine.backward(engine(tokens(1, device)[0]))
        engine.step()
        other = copy.deepcopy(model)
    other(tokens(1, device)[0]).backward()
    assert other.norm.weight.grad is not None
    assert set(other.state_dict()) == set(model.state_dict())


def test_a_graph_older_than_the_step_fails_as_it_does_in_torch(device: str) -> None:
    batch = tokens(1, device)[0]
    with OffloadEngine(TinyLM(tied=False), device=device) as engine:
        first, second = engine(batch), engine(batch)
        engine.backward(first)
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(second)
        train(engine, [batch])


class ByModuleOrByHand(nn.Module):
    """Uses a parameter through its module, without it, or as an extension in C++ does: Python never sees that."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass() if how == "in C++" else nullcontext():
            x = self.big(x) if how == "by module" else nn.functional.linear(x, self.big.weight)
        return x.float().pow(2).mean()


@pytest.mark.usefixtures("slow_steps")
def test_weights_read_while_they_are_stepped_are_an_error(device: str) -> None:
    x = torch.randn(2, 64, device=device)
    with OffloadEngine(ByModuleOrByHand(), OffloadConfig(), device=device) as engine:
        engine.backward(engine(x, "by module"))
        engine.step()
        with pytest.raises(EngineStateError, match=r"forward read 'big\.weight' while it was being stepped"):
            engine.backward(engine(x, "in C++"))
        engine.synchronize()
        engine.backward(engine(x, "in C++"))
        engine.step()


@pytest.mark.usefixtures("slow_steps")
def test_weights_used_without_their_module_are_waited_for(device: str) -> None:
    x = torch.randn(2, 64, device=device)
    losses = []
    for waits in (False, True):
        torch.manual_seed(0)
        with OffloadEngine(ByModuleOrByHand(), OffloadConfig(learning_rate=0.1), device=device) as engine:
            for how in ("by module", "by hand", "by hand"):
                loss = engine(x, how)
                engine.backward(loss)
                engine.step()
                if waits:
                    engine.synchronize()
            losses.append(loss.item())
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:the gradient norm")
def test_updates_that_are_waited_for_say_nothing_of_those_beside_a_forward(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disregarded = []
    monkeypatch.setattr(update.StepBalancer, "disregard_newest", lambda split: disregarded.append(split))
    batches = tokens(8, device)
    with OffloadEngine(TinyLM(), OffloadConfig(on_nonfinite="skip"), device=device) as engine:

        def num_after(waits: Callable[[], object], factor: float = 1.0) -> int:
            """How often it is called after two steps and `waits`."""
            disregarded.clear()
            for batch in batches[:2]:
                engine.backward(engine(batch) * factor)
                engine.step()
            waits()
            there = threading.Event()
            engine._thread.submit(there.set)
            there.wait()
            return len(disregarded)

        def evaluate() -> None:
            with torch.no_grad():
                engine.module(batches[0])
                engine.module(batches[1])

        assert num_after(lambda: None) == 0
        assert num_after(engine.synchronize) == 1
        assert num_after(engine.module.state_dict) == 1
        assert num_after(evaluate) == 1
        assert num_after(engine.synchronize, float("nan")) == 0  # skipped: nothing was stepped
