"""Models that are trained with blocks as graphs and with eager blocks, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from tests.hf.tiny import llama_config, t5_config

PLACEMENTS = [
    Placement(),
    Placement(activations="checkpoint"),
    Placement(activations="offload"),
    Placement(weights="ram"),
    Placement(weights="ram", activations="checkpoint"),
    Placement(weights="vram", gradients="vram", states="vram", step="gpu"),
]


def t5(**changes: Any) -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(t5_config(dropout_rate=0.1, **changes))


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes))


def batches(kind: str, num: int, device: str = "cpu", length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows of `length` and two thirds of it, in turn."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for index in range(num):
        ids = torch.randint(3, 60, (2, length - length // 3 * (index % 2)), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        labels = ids[:, : length // 2].contiguous() if kind == "t5" else ids
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append({name: tensor.to(device) for name, tensor in batch.items()})
    return found


Trained = tuple[list[float], dict[str, torch.Tensor], int]
"""Losses, weights, number of graphs."""


def train(
    model: nn.Module,
    data: Sequence[Any],
    placement: Placement | None = None,
    change: Callable[[Any, int], Any] = lambda model, step: None,
    device: str = "cpu",
    **options: Any,
) -> Trained:
    """`change(model, step)` is called before each step; a context manager that it returns is open in forward."""

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for step, batch in enumerate(data):
            with change(model, step) or nullcontext():
                loss = engine(**batch).loss if isinstance(batch, dict) else engine(batch)
            yield loss

    return train_by(model.train(), forwards, placement, device, **options)


def train_by(
    model: nn.Module,
    forwards: Callable[[OffloadEngine], Iterable[torch.Tensor]],
    placement: Placement | None = None,
    device: str = "cpu",
    **options: Any,
) -> Trained:
    """One step for each loss of `forwards(engine)`, which is asked for the next one after the step."""
    config = OffloadConfig(learning_rate=1e-2, placement=placement, **{"working_dtype": "fp32", **options})
    torch.manual_seed(7)
    losses = []
    with OffloadEngine(model, config, device=device) as engine:
        for loss in forwards(engine):
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.synchronize()
        graphs = engine.placed.graphs
        num = 0 if graphs is None else graphs.num_graphs()
    return losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}, num


def assert_equals_eager(found: Trained, expected: Callable[[], Trained], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", set())
    losses, weights, num_graphs = expected()
    assert num_graphs == 0
    assert found[0] == losses
    different = [name for name, weight in weights.items() if not torch.equal(weight, found[1][name])]
    assert not different
