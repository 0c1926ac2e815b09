"""In the steady state no call on the caller's threads waits for the device, under any placement."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from offloadkit.device.streams import Event, record_compute
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import compile as compiled
from offloadkit.offload.gradient_buffers import BucketPool
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import Plan, possible, tier_bytes
from offloadkit.planner import layout as shapes
from tests.models import tokens
from tests.offload.test_placements import PLACEMENTS
from tests.offload.test_state_ring import lm
from tests.synchronisations import Synchronisation, of_the_callers, synchronisations

NUM_WARM, NUM_COUNTED = 3, 3
"""Steps. During the first ones memory is pinned and the order of layers is learned."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def several_chunks_to_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "STEP_CHUNK", 4096)


def in_steady_state(
    device: str, accumulation: int, plan: Plan | None = None, depth: int = 3, **options: Any
) -> list[Synchronisation]:
    """Calls that waited, on all threads, in steps after the first ones."""
    config = OffloadConfig(learning_rate=1e-3, gradient_accumulation=accumulation, loss_scale=1024.0, **options)
    warm, counted = NUM_WARM * accumulation, NUM_COUNTED * accumulation
    with OffloadEngine(lm(depth), config, device=device, plan=plan) as engine:
        engine.train()
        batches = tokens(warm + counted, device)

        def steps(some: Sequence[torch.Tensor]) -> None:
            for batch in some:
                engine.backward(engine(batch))
                engine.step()

        steps(batches[:warm])
        engine.synchronize()
        with synchronisations() as found:
            steps(batches[warm:])
        engine.synchronize()
        assert engine.num_updates == NUM_WARM + NUM_COUNTED
    return found


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_main_thread_synchronises_nothing(dtype: Any, accumulation: int, device: str) -> None:
    for placement in PLACEMENTS:
        found = in_steady_state(device, accumulation, working_dtype=dtype, placement=placement)
        assert of_the_callers(found) == [], placement
        assert found, "the stepping thread's wait for gradients was not recorded"


@pytest.mark.parametrize("accumulation", [1, 3])
def test_nor_where_every_layer_lies_elsewhere_and_changes_the_processor(
    accumulation: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, draw = len(PLACEMENTS) - 1, random.Random(0)
    config = OffloadConfig(gradient_accumulation=accumulation, working_dtype="bf16")
    model = lm(depth)
    base = plan_of(model, flat_layers(model, config), config)
    mixed = tuple(possible(place, layer) for place, layer in zip(PLACEMENTS, base.layers, strict=True))
    plan = replace(base, placements=mixed, tiers=tier_bytes(base.layers, mixed, accumulation))
    switched = []

    def correct(self: StepBalancer, layers: Sequence[Any]) -> None:
        for layer in layers:
            if layer.switchable:
                layer.on_gpu = draw.random() < 0.5
                switched.append(layer.on_gpu)

    monkeypatch.setattr(StepBalancer, "correct", correct)
    assert of_the_callers(in_steady_state(device, accumulation, plan, depth, working_dtype="bf16")) == []
    assert len(set(switched)) == 2


@pytest.fixture
def compiles(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device == "cpu":  # traced, cut into forward and backward, and run uncompiled
        monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "level", logging.WARNING)  # pytest would keep all messages
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize(
    ("placement", "accumulation"),
    [
        (Placement(), 1),
        pytest.param(Placement(weights="ram", activations="offload"), 3, marks=pytest.mark.slow),
        (Placement(gradients="vram", states="vram", step="gpu", activations="checkpoint"), 1),
    ],
)
def test_nor_with_compiled_blocks(placement: Placement, accumulation: int, device: str) -> None:
    options: dict[str, Any] = {"working_dtype": "bf16", "placement": placement, "compile_blocks": True}
    assert of_the_callers(in_steady_state(device, accumulation, **options)) == []


# -- checks of the check


def test_a_wait_in_backward_is_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host waited for a bucket's copy to RAM before writing the bucket again."""
    give_back = BucketPool.give_back

    def waits(pool: BucketPool, buffer: torch.Tensor, busy: Event | None) -> None:
        if busy is not None:
            busy.synchronize()
        give_back(pool, buffer, busy)

    monkeypatch.setattr(BucketPool, "give_back", waits)
    found = of_the_callers(in_steady_state(device, 1))
    assert all("in waits" in each.stack for each in found)
    assert [each.what for each in found].count("Event.synchronize") == 3 * NUM_COUNTED  # three blocks share buckets


def test_only_the_engines_own_threads_may_wait(device: str) -> None:
    event: Event = record_compute(torch.device(device))
    with synchronisations() as found:
        event.synchronize()
        for name in ("offloadkit-step", "Thread-1"):
            thread = threading.Thread(target=event.synchronize, name=name)
            thread.start()
            thread.join()
    event.synchronize()
    assert [each.thread for each in found if each.what == "Event.synchronize"] == [
        threading.main_thread().name,
        "offloadkit-step",
        "Thread-1",
    ]
    assert {each.thread for each in of_the_callers(found)} == {threading.main_thread().name, "Thread-1"}


@pytest.mark.gpu
def test_what_torch_waits_for_inside_is_seen() -> None:
    there, pinned = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()
    torch.cuda.synchronize()
    waits = {
        "item": lambda: there.sum().item(),
        "unpinned": lambda: torch.ones(8).to("cuda"),
        "pinned, blocking": lambda: pinned.to("cuda"),
        "to RAM": lambda: there.cpu(),
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "device": lambda: torch.cuda.synchronize(),
    }
    for name, wait in waits.items():
        with synchronisations() as found:
            wait()
        assert found, name
        assert {each.thread for each in found} == {threading.main_thread().name}, name
    with synchronisations() as found:
        pinned.to("cuda", non_blocking=True)
        there.mul_(2.0)
    assert found == []
    assert torch.cuda.get_sync_debug_mode() == 0
