"""No code reads or writes weights during their update, whatever route it takes."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.device import watchdog
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, HangError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import update
from tests.models import TinyLM, tokens, train


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
    """Its blocks are plain lists: the model runs the modules inside them."""

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
    """A model with weight norm: its hooks, older than the engine's, read weights."""
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
    """Uses a parameter through its module, without its module, or like a C++ extension, unseen by Python."""

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
            """Number of calls of `disregard_newest` after two steps and `waits`."""
            disregarded.clear()
            for batch in batches[:2]:
                engine.backward(engine(batch) * factor)
                engine.step()
            waits()
            there = threading.Event()
            engine.step_thread.submit(there.set)
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


@pytest.fixture
def hung_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it to make the stepping thread hang from the next update on, and waits give up soon."""
    goes_on = threading.Event()

    def hang() -> None:
        monkeypatch.setattr(watchdog, "LIMIT_SECONDS", 0.1)
        monkeypatch.setattr(watchdog, "SLICE_SECONDS", 0.02)
        monkeypatch.setattr(watchdog.state, "ranks_seconds", 0.0)
        monkeypatch.setattr(update.LayerState, "step", lambda *_: goes_on.wait(60))

    yield hang
    goes_on.set()
    ends = time.monotonic() + 10
    while watchdog.state.progress == watchdog.state.hung_at and time.monotonic() < ends:
        time.sleep(0.01)  # until the hung thread has moved, or waits of later tests would give up at once


WAITS: dict[str, Callable[[OffloadEngine, torch.Tensor], object]] = {
    "forward": lambda engine, batch: engine(batch),
    "synchronize": lambda engine, batch: engine.synchronize(),
    "state_dict": lambda engine, batch: engine.module.state_dict(),
    "close": lambda engine, batch: engine.close(),
}


@pytest.mark.parametrize("placement", [Placement(), Placement(weights="ram")], ids=["vram", "ram"])
@pytest.mark.parametrize("wait", WAITS)
def test_an_update_that_hangs_is_an_error_with_stacks_and_the_last_checkpoint(
    wait: str, placement: Placement, hung_step: Callable[[], None], tmp_path: Path
) -> None:
    batch = tokens(1)[0]
    engine = OffloadEngine(TinyLM(), OffloadConfig(placement=placement), device="cpu")
    train(engine, [batch])
    engine.save_checkpoint(tmp_path / "saved")
    hung_step()
    engine.backward(engine(batch))
    engine.step()
    with pytest.raises(HangError, match="nothing has moved") as caught:
        WAITS[wait](engine, batch)
    said = str(caught.value)
    assert f"The last checkpoint is {str(tmp_path / 'saved')!r}" in said
    assert "thread 'offloadkit-step':" in said
    assert "goes_on.wait(60)" in said
    if wait != "close":
        with pytest.raises(HangError):
            engine.close()


@pytest.mark.parametrize("moves", [True, False])
def test_only_a_wait_in_which_nothing_moves_is_given_up(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LIMIT_SECONDS", 10.0)
    monkeypatch.setattr(watchdog, "SLICE_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "state", type(watchdog.state)())  # no state of earlier tests
    asked = []

    def arrives(seconds: float) -> bool:
        asked.append(seconds)
        if moves and len(asked) % 8 == 0:
            watchdog.progressed()
        return len(asked) == 40

    if moves:
        watchdog.until(arrives, "a test")
        assert len(asked) == 40
    else:
        with pytest.raises(HangError, match="waited 10"):
            watchdog.until(arrives, "a test")
        assert sum(asked) == 10


def test_a_call_that_cannot_be_interrupted_prints_the_stacks_and_aborts() -> None:
    script = """
import time
from pathlib import Path
from offloadkit.device import watchdog
watchdog.LIMIT_SECONDS, watchdog.SLICE_SECONDS = 0.2, 0.05
watchdog.state.last_checkpoint = Path("/runs/checkpoint-7")
def hangs_in_the_driver():
    with watchdog.uninterruptible("work of the GPU"):
        time.sleep(60)
hangs_in_the_driver()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode < 0
    assert "for work of the GPU, and nothing has moved" in done.stderr
    assert "The last checkpoint is '/runs/checkpoint-7'" in done.stderr
    assert "in hangs_in_the_driver" in done.stderr


def test_watching_such_calls_leaves_no_thread_that_a_program_counts() -> None:
    before = threading.enumerate()
    with watchdog.uninterruptible("work of the GPU"):
        pass
    assert threading.enumerate() == before


BEFORE_TRAINING = {"device/measure.py", "distributed/machine.py", "engine/python_time.py", "doors/engines/engine.py"}
"""Modules that time the GPU before training, or run another library's engine."""


def test_a_wait_for_the_whole_gpu_is_watched() -> None:
    package = Path(watchdog.__file__).parents[1]
    bare: list[str] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        watched = {
            id(call)
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "watchdog.uninterruptible" in ast.unparse(block.items[0])
            for call in ast.walk(block)
        }
        waits = [
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.Call) and "cuda.synchronize" in ast.unparse(each.func)
        ]
        if any(id(each) not in watched for each in waits):
            bare.append(path.relative_to(package).as_posix())
    assert set(bare) == BEFORE_TRAINING
