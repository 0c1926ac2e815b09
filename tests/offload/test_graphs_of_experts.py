"""Blocks with experts as graphs: grouped and batched matmuls are captured, loops over experts run eagerly."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import MixtralForCausalLM

from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import Placement
from tests.graphs import assert_equals_eager, batches, train
from tests.hf import families

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STREAMED = Placement(weights="ram", activations="checkpoint")


@pytest.fixture(autouse=True)
def blocks_run_as_graphs(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu", "cuda"})


def mixtral(implementation: str, *, router_loss: bool = False) -> Any:
    torch.manual_seed(0)
    config: Any = families.tiny_config("MixtralForCausalLM")
    config.output_router_logits = router_loss
    config._experts_implementation = implementation
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", [Placement(), STREAMED])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_are_captured_where_the_host_does_not_wait(
    implementation: str, placement: Placement, device: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    data, options = batches("llama", 5, device), {"working_dtype": "bf16" if device == "cuda" else "fp32"}
    with torch.device("meta"):
        stages = trace_micro_batch(mixtral(implementation), data[0]).stages if implementation != "eager" else ()
    assert not any(stage.waits for stage in stages)
    found = train(mixtral(implementation), data, placement, device=device, **options)
    assert (found[2] > 0) == (implementation != "eager"), caplog.text
    assert ("runs eagerly: it waits for the device" in caplog.text) == (implementation == "eager")
    assert_equals_eager(
        found, lambda: train(mixtral(implementation), data, placement, device=device, **options), monkeypatch
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("placement", [Placement(), STREAMED])
def test_the_loss_of_routers_is_learned_whose_logits_leave_blocks_by_hooks(
    placement: Placement, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, options = batches("llama", 5, device), {"working_dtype": "bf16" if device == "cuda" else "fp32"}
    model = mixtral("grouped_mm", router_loss=True)
    found = train(model, data, placement, device=device, **options)
    assert_equals_eager(
        found,
        lambda: train(mixtral("grouped_mm", router_loss=True), data, placement, device=device, **options),
        monkeypatch,
    )
