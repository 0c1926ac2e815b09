"""docs/minimal_offload.py trains to the engine's bits, and is as short as it says."""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit import OffloadConfig, OffloadEngine
from tests.models import Residual

SCRIPT = Path(__file__).parents[2] / "docs" / "minimal_offload.py"
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.03}


@pytest.fixture(scope="module")
def minimal() -> Any:
    spec = importlib.util.spec_from_file_location("minimal_offload", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(nn.Module):
    """A language model with padded rows: targets of -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 33)
        self.blocks = nn.ModuleList([Residual(33, 67) for _ in range(3)])
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(33)
        self.head = nn.Linear(33, 61, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(self.dropout(x)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of several widths with rows of several lengths."""
    found = []
    for index in range(num):
        tokens = torch.randint(61, (3, 5 + 4 * (index % 3)))
        lengths = torch.tensor([tokens.shape[1], 4, 2 + index % 3])
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        found.append((tokens.masked_fill(padding, 0), tokens.flip(-1).masked_fill(padding, -100)))
    return found


def test_it_trains_to_the_bits_of_the_engine(minimal: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    twin, initial, data = copy.deepcopy(model), copy.deepcopy(model), batches(7)

    torch.manual_seed(1)
    optimizer = minimal.MinimalOffload(model, "cpu", lr=3e-3, **OPTIONS)
    losses = []
    for batch in data:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()

    torch.manual_seed(1)
    config = OffloadConfig(working_dtype="bf16", max_grad_norm=None, learning_rate=3e-3, **OPTIONS)
    with OffloadEngine(twin, config) as engine:
        for batch, expected in zip(data, losses, strict=True):
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            assert loss.item() == expected
        masters = engine.master_weights()

    for layer in optimizer.layers:
        sizes = [parameter.numel() for parameter in layer.parameters]
        for parameter, master in zip(
            layer.parameters, minimal.join(layer.weights, layer.remainder).split(sizes), strict=True
        ):
            (name,) = [name for name, other in model.named_parameters() if other is parameter]
            assert torch.equal(masters.pop(name).flatten(), master), name
            assert torch.equal(parameter, twin.get_parameter(name)), name
            assert not torch.equal(parameter, initial.get_parameter(name).bfloat16()), name
    assert not masters


def test_each_forward_waits_for_its_own_layer(minimal: Any) -> None:
    """Forward of the first layer does not wait for the second layer's update, and forward of the second does."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = minimal.MinimalOffload(model, "cpu")
    first, second = optimizer.layers
    model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum().backward()
    arrived = minimal.Future()
    optimizer.step()
    optimizer.thread.shutdown()
    second.pending = arrived
    model[0](torch.ones(1, 3, dtype=torch.bfloat16))
    assert first.pending is None
    arrived.set_exception(ArithmeticError("of the second layer"))
    with pytest.raises(ArithmeticError, match="of the second layer"):
        model[1](torch.ones(1, 4, dtype=torch.bfloat16))


def test_it_refuses_what_it_would_train_wrongly(minimal: Any) -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="exactly one layer"):
        minimal.MinimalOffload(tied, "cpu")
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = minimal.MinimalOffload(model, "cpu")
    for _ in range(2):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match="one backward pass per step"):
        optimizer.step()


def test_the_script_learns(minimal: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert minimal.main(12) < 0.5
    assert capsys.readouterr().out.count("loss") == 12


def test_it_is_short_and_imports_torch_alone() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    imported = {
        name.name if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names} == {"torch"}
