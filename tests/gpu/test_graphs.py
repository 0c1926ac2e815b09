"""CUDA graphs of blocks compute the bits of eager blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, cast

import pytest
import torch

from offloadkit.device.graphs import CudaPool
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.graphs import _Entry, _FirstRun
from tests.graphs import PLACEMENTS, assert_equals_eager, batches, llama, t5, train, train_by
from tests.offload.test_graph_order import USES, Seen, Use, forwards_with

SIZES = {
    "t5": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 3},
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3},
}


@pytest.fixture(autouse=True)
def graphs_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cuda"})


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_graphs_train_the_bits_of_eager_blocks(
    kind: str, placement: Placement, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, two lengths of rows and accumulation."""
    make, data = {"t5": t5, "llama": llama}[kind], batches(kind, 8, "cuda", length=96)
    options: dict[str, Any] = {"device": "cuda", "gradient_accumulation": 2, "working_dtype": "bf16"}

    def run() -> Any:
        return train(make(**SIZES[kind]), data, placement, **options)

    found = run()
    assert found[2] >= 2 * 3 * 2  # forward and backward, three blocks, two lengths
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize(("kind", "use", "num_eager"), USES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[4]], ids=str)
def test_losses_use_hidden_states(
    kind: str, use: Use, num_eager: int, placement: Placement, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, seen = {"t5": t5, "llama": llama}[kind], Seen()
    forwards = forwards_with(kind, use, [0.3, 0.7] * 4, seen, "cuda")

    def run() -> Any:
        return train_by(make(**SIZES[kind]).train(), forwards, placement, device="cuda", working_dtype="bf16")

    found = run()
    assert found[2] > 0
    assert seen.num_used_after == num_eager
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_without_deterministic_mode_graphs_are_as_near_to_eager_runs_as_these_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = {"t5": t5, "llama": llama}[kind], batches(kind, 8, "cuda", length=96)

    def run(device_types: set[str]) -> Any:
        monkeypatch.setattr(facts_graphs, "device_types", device_types)
        return train(make(**SIZES[kind]), data, Placement(), device="cuda", working_dtype="bf16")

    def apart(one: Any, other: Any) -> float:
        return max(float((weight - other[1][name]).abs().max()) for name, weight in one[1].items())

    graphed, eager = run({"cuda"}), [run(set()) for _ in range(3)]
    assert graphed[2] > 0
    assert min(apart(graphed, each) for each in eager) <= 2 * max(apart(*pair) for pair in combinations(eager, 2))


_sleep: Any = torch.cuda._sleep
LATE = 100_000_000
"""Cycles of the GPU, some 60 ms: longer than Python takes to capture a block."""


@pytest.mark.parametrize("late", ["replays", "captures"])
def test_a_capture_leaves_the_random_numbers_of_replays_alone(late: str) -> None:
    """torch writes the seed and offset that all graphs read at the start of a capture, on the capture's stream."""
    drawn = torch.zeros(1 << 16, device="cuda")
    pool = CudaPool(drawn.device)

    def draw() -> tuple[torch.Tensor]:
        _sleep(LATE)  # after the replay has written the offset
        return (drawn.uniform_(),)

    graph = pool.capture(draw)

    def drawn_by(work: Callable[[], None]) -> torch.Tensor:
        torch.manual_seed(3)
        torch.rand(8, device="cuda")  # so that the offset is not that of a capture
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
        return drawn.clone()

    def with_a_capture() -> None:
        if late == "replays":
            graph.replay()
        else:
            with torch.cuda.stream(pool._stream):
                _sleep(LATE // 2)
        pool.capture(lambda: (drawn.neg(),))
        if late == "captures":
            graph.replay()

    assert torch.equal(drawn_by(with_a_capture), drawn_by(graph.replay))


def test_graphs_train_the_bits_of_eager_blocks_on_a_busy_gpu(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are captured while the GPU is far behind Python."""
    data, own = batches("t5", 4, "cuda", length=96), _Entry._work_of_forward

    def late(entry: _Entry) -> list[torch.Tensor]:
        _sleep(LATE // 4)
        return own(entry)

    def run() -> Any:
        return train(t5(**SIZES["t5"]), data, Placement(weights="ram"), device="cuda", working_dtype="bf16")

    monkeypatch.setattr(_Entry, "_work_of_forward", late)
    found = run()
    assert found[2] > 0
    assert_equals_eager(found, run, monkeypatch)


def waiting() -> Any:
    """T5, with a block that waits for the device."""
    model = t5(**SIZES["t5"])
    block = model.encoder.block[1]
    own = block.forward

    def reads(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        return found if float(found[0].detach().sum()) != 0.5 else None

    block.forward = reads
    return model


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_block_that_waits_for_the_device_runs_eagerly(
    is_seen: bool, deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If nobody sees it, its capture fails, and all blocks run eagerly, with the same random numbers."""
    caplog.set_level("INFO", "offloadkit")
    if not is_seen:
        monkeypatch.setattr(_FirstRun, "_watched", lambda *_: None)
    data = batches("t5", 6, "cuda", length=96)
    found = train(waiting(), data, device="cuda")
    assert (found[2] > 0) == is_seen
    why = "it waits for the device" if is_seen else "it cannot be captured"
    assert f"encoder.block.1 runs eagerly: {why}" in caplog.text
    assert_equals_eager(found, lambda: train(waiting(), data, device="cuda"), monkeypatch)


WIDE = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 4}


def of_length(length: int, num: int = 1) -> list[dict[str, torch.Tensor]]:
    return batches("t5", 2 * num, "cuda", length=length)[::2]


def test_kinds_of_batches_share_the_memory_of_activations(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths in turn, the longest in the middle; two lengths before one backward."""
    lengths = [384, 512, 448]
    data = [batch for _ in range(3) for length in lengths for batch in of_length(length)]
    bytes_of = {}

    def run(name: str, data: list[Any]) -> Any:
        def note(model: Any, step: int) -> None:
            if step == len(data) - 1:
                (engine,) = engines
                bytes_of[name] = engine.placed.graphs.pool.num_bytes if engine.placed.graphs else 0

        own, engines = OffloadEngine.__init__, list[Any]()

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            engines[:] = [self]

        with monkeypatch.context() as patch:
            patch.setattr(OffloadEngine, "__init__", init)
            return train(t5(**WIDE), data, Placement(), note, device="cuda", working_dtype="bf16")

    run("longest", of_length(512, 4))
    found = run("all", data)
    assert 0 < bytes_of["longest"] <= bytes_of["all"] <= 1.15 * bytes_of["longest"]
    assert_equals_eager(found, lambda: run("eager", data), monkeypatch)


@pytest.mark.parametrize("place", ["keep", "checkpoint"])
def test_two_lengths_before_one_backward(place: Any, deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for step in range(9):
            short, long = of_length(96)[0], of_length(128)[0]
            # First apart, then together, then apart again.
            for together in ((short,), (long,)) if step < 3 or step > 6 else ((short, long),):
                yield cast(torch.Tensor, sum(engine(**each).loss for each in together))

    def run() -> Any:
        return train_by(t5(**WIDE), forwards, Placement(activations=place), "cuda")

    found = run()
    assert found[2] > 0
    assert_equals_eager(found, run, monkeypatch)


def test_gradients_of_a_loss_are_computed_twice_with_another_length_between(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backward, and the second length, would overwrite the activations that the second backward reads."""

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        short, long = of_length(96)[0], of_length(128)[0]
        weights = [each for each in engine.module.parameters() if each.requires_grad]
        for step in range(8):
            loss = engine(**short).loss
            if step > 3:
                found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
                loss = loss + sum(float(each.norm()) for each in found if each is not None)
            if step > 5:
                engine(**long)
            yield loss
            yield engine(**long).loss

    def run() -> Any:
        return train_by(t5(**WIDE), forwards, Placement(), "cuda")

    found = run()
    assert found[2] > 0
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("after", [0, 3])
def test_a_gpu_that_is_full_in_a_capture_trains_on_eagerly(
    after: int, deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offloadkit")
    own, num_captures = _Entry._work_of_forward, 0

    def full(self: _Entry) -> Any:
        nonlocal num_captures
        num_captures += 1
        if num_captures > after:
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        return own(self)

    monkeypatch.setattr(_Entry, "_work_of_forward", full)
    data = of_length(96, 5)
    found = train(t5(**WIDE), data, Placement(), device="cuda")
    assert found[2] == 0
    assert "without CUDA graphs: the GPU was full while they were captured" in caplog.text
    assert_equals_eager(found, lambda: train(t5(**WIDE), data, Placement(), device="cuda"), monkeypatch)


def test_too_little_vram_for_graphs_trains_eagerly(
    deterministic: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offloadkit")
    monkeypatch.setattr(CudaPool, "missing_bytes", lambda *_: 5 << 20)
    data = of_length(96, 5)
    found = train(t5(**WIDE), data, Placement(), device="cuda")
    assert found[2] == 0
    assert "graphs need 5 MiB more VRAM than is free" in caplog.text
    assert_equals_eager(found, lambda: train(t5(**WIDE), data, Placement(), device="cuda"), monkeypatch)


def test_evaluation_frees_the_memory_of_graphs() -> None:
    model, data = t5(**SIZES["t5"]), batches("t5", 4, "cuda", length=96)[::2]
    with OffloadEngine(model, OffloadConfig(placement=Placement()), device="cuda") as engine:
        for batch in data * 2:
            engine.backward(engine(**batch).loss)
            engine.step()
        graphs = engine.placed.graphs
        assert graphs is not None
        assert graphs.num_graphs() > 0
        with torch.no_grad():
            engine(**data[0])
        assert graphs.num_graphs() == 0
        for batch in data * 2:
            engine.backward(engine(**batch).loss)
            engine.step()
        assert graphs.num_graphs() > 0


def test_python_takes_less_time_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches("t5", 1, "cuda", length=96) * 20
    seconds = {}
    for device_types in ({"cuda"}, set[str]()):
        monkeypatch.setattr(facts_graphs, "device_types", device_types)
        model = t5(**SIZES["t5"] | {"num_layers": 12}).train()
        with OffloadEngine(
            model, OffloadConfig(placement=Placement(activations="checkpoint")), device="cuda"
        ) as engine:
            for step, batch in enumerate(data):
                if step == 5:
                    began = time.perf_counter()
                engine.backward(engine(**batch).loss)
                engine.step()
            seconds[len(device_types)] = time.perf_counter() - began
    assert seconds[1] < 0.6 * seconds[0]


def test_a_block_that_makes_a_list_runs_eagerly_and_the_rest_as_graphs(
    deterministic: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As vision towers do with the ends of images. A failed capture would make all blocks eager."""
    caplog.set_level("INFO", "offloadkit")
    model = t5(**SIZES["t5"])
    block = model.encoder.block[1]
    own = block.forward

    def lists(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return made if made[0].detach()[0, 0, :2].tolist() else None

    block.forward = lists
    found = train(model, batches("t5", 6, "cuda", length=96), device="cuda")
    assert found[2] > 0
    assert "encoder.block.1 runs eagerly: it waits for the device (a copy to the cpu)" in caplog.text
