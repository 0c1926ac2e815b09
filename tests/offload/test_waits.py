"""Every wait that orders memory is needed: without races as the code is, and with one, or an error, where it is gone.

`tests/happens_before.py` finds the races. A wait that nothing can miss is named in `NEVER_MISSED`, with the reason.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offloadkit.config import OffloadConfig, Placement
from offloadkit.device.host_memory import SharedSlab
from offloadkit.device.state_file import StateFile
from offloadkit.engine import engine as engine_module
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, RepeatWindowError
from offloadkit.offload import states, update
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import layout, placed, possible, tier_bytes
from tests.distributed.mirrored import MirroredRanks
from tests.happens_before import Wait, Watched, waits, without
from tests.models import Residual, TinyLM, tokens, train
from tests.offload.test_state_ring import EVERYWHERE, IN_VRAM, LEAST_RAM, at_random, lm, mixed, numbers, trained
from tests.test_engine_waits import EmbedsByHand

DEPTH = len(EVERYWHERE) - 1


def everywhere(accumulation: int) -> None:
    """All placements at once, and layers that go from one processor to the other."""
    options: dict[str, Any] = {"working_dtype": "bf16", "gradient_accumulation": accumulation}
    trained("cpu", 3, mixed(OffloadConfig(**options), EVERYWHERE, DEPTH), depth=DEPTH, **options)


def moved(accumulation: int) -> None:
    """Layers move while what a skipped step fetched and what a dropped window sent are under way."""
    options: dict[str, Any] = {"working_dtype": "bf16", "gradient_accumulation": accumulation}
    config = OffloadConfig(on_nonfinite="skip", **options)
    places = [Placement(weights="ram"), Placement(step="gpu"), LEAST_RAM, IN_VRAM]
    plans = [mixed(config, placements) for placements in (places[::-1], places)]
    batch = tokens(1)[0]
    with warnings.catch_warnings(), OffloadEngine(lm(), config, device="cpu") as engine:
        warnings.simplefilter("ignore")
        for plan in plans:
            for factor in (1.0, float("nan")):
                for _ in range(accumulation):
                    engine.backward(engine(batch) * factor)
                    engine.step()
            engine.backward(engine(batch))
            engine.drop_gradients()
            engine.move(plan)
        train(engine, [batch] * accumulation)


def saved_at_once() -> None:
    """Each layer's weights are read right after the step, by whoever saves a part of the model."""
    plan = mixed(OffloadConfig(), EVERYWHERE, DEPTH)
    torch.manual_seed(0)
    model = TinyLM(depth=DEPTH, width=33, hidden=257)
    with OffloadEngine(model, OffloadConfig(), device="cpu", plan=plan) as engine:
        for batch in tokens(3):
            engine.backward(engine(batch))
            engine.step()
            for block in (*model.blocks, model.embed):
                for tensor in block.state_dict().values():
                    tensor.clone()


class _Branches(nn.Module):
    """Uses one of its blocks, or the weight of a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(33, 33) for _ in range(3)])
        self.first, self.second = nn.Linear(33, 33, bias=False), nn.Linear(33, 33, bias=False)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        if branch == "by hand":  # as an extension in C++ does it, which torch's Python does not see
            with torch._C.DisableTorchFunctionSubclass():
                return nn.functional.linear(x, self.second.weight).float().pow(2).mean()
        module = self.first if branch == "first" else self.blocks[int(branch)]
        return module(x).float().pow(2).mean()  # type: ignore[no-any-return]


def branches(*names: str, **options: Any) -> None:
    """Nothing that one step updates is used by the next, which loads the block that it uses."""
    config, x, real = OffloadConfig(placement=Placement(**options)), torch.randn(4, 33), update._norm
    step = states.optimizer_step
    model = _Branches()
    best = {index: block.state_dict() for index, block in enumerate(model.blocks)}
    with pytest.MonkeyPatch.context() as patch, OffloadEngine(model, config, device="cpu") as engine:
        if options:
            patch.setattr(states, "optimizer_step", lambda *args: (time.sleep(0.2), step(*args))[1])
        else:
            patch.setattr(update, "_norm", lambda *args: (time.sleep(0.2), real(*args))[1])
        for name in names:
            if name.isdigit() and options:
                model.blocks[int(name)].load_state_dict(best[int(name)])
            engine.backward(engine(x, name))
            engine.step()


def closed_after_backward() -> None:
    """Gradients are on their way when their memory goes."""
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement()), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))


class Twice(TinyLM):
    """Runs its blocks twice, recomputed by torch's older checkpointing, whose backward
    brings a gradient for each."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(65, size) for size in hidden])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())


class InPairs(TinyLM):
    """Has torch recompute two blocks as one: the first is read when the second was used last."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for at in range(0, len(self.blocks), 2):
            x = checkpoint(nn.Sequential(*self.blocks[at : at + 2]), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())


def recomputed_by_torch() -> None:
    with OffloadEngine(InPairs(depth=6), OffloadConfig(placement=Placement(weights="ram")), device="cpu") as engine:
        train(engine, tokens(2))


def used_twice() -> None:
    """A small block's gradient, which has a bucket of its own, comes again after it was sent."""
    with OffloadEngine(Twice(1027, 3), OffloadConfig(placement=Placement()), device="cpu") as engine:
        train(engine, tokens(3))


def read_by_the_parent() -> None:
    """A weight that is used without its module; and an evaluation right after a step."""
    with OffloadEngine(EmbedsByHand(tied=False), OffloadConfig(placement=Placement()), device="cpu") as engine:
        for batch in tokens(3):
            engine.backward(engine(batch))
            engine.step()


class _Shuffled(TinyLM):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for index in torch.randperm(len(self.blocks)).tolist():
            x = self.blocks[index](x)
        return self.head(self.norm(x)).float().pow(2).mean()


def shuffled(**options: Any) -> None:
    """Blocks whose weights were fetched ahead are not used before the step."""
    torch.manual_seed(1)
    placement = Placement(weights="ram", **options)
    model = _Shuffled(depth=6, width=33, hidden=257)
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
        for batch in tokens(5):
            engine.backward(engine(batch))
            engine.step()


def one_chunk() -> None:
    """What passes through VRAM is one chunk: the next step fetches it before anything else."""
    config = OffloadConfig()
    plan = mixed(config, [IN_VRAM])
    there = (LEAST_RAM if layer.name == "blocks.1" else IN_VRAM for layer in plan.layers)
    placements = tuple(starmap(possible, zip(there, plan.layers, strict=True)))
    plan = replace(plan, placements=placements, tiers=tier_bytes(plan.layers, placements, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "STEP_CHUNK", 1 << 23)
        trained("cpu", 3, plan)


class _Tapering(TinyLM):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x[:, :1] if block is self.blocks[-1] else x)
        return self.head(self.norm(x)).float().pow(2).mean()


def backward_that_fails() -> None:
    """An input was fetched ahead for a backward that does not come to it; the next forward takes its memory first,
    since that of the last block is too small."""
    model = _Tapering(depth=5, width=33, hidden=257)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    with OffloadEngine(model, OffloadConfig(placement=Placement(activations="offload")), device="cpu") as engine:
        for batch in tokens(3, shape=(1, 64)):
            watched = model.blocks[-1].up
            hook = watched.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
            with suppress(ZeroDivisionError):
                engine.backward(engine(batch))
            hook.remove()
            engine.backward(engine(batch))
            engine.step()


def step_that_fails() -> None:
    """The engine is closed, unsettled, while weights are fetched."""
    engine = OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(weights="ram")), device="cpu")
    batch = tokens(1)[0]
    train(engine, [batch])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "optimizer_step", lambda *args: 1 / 0)
        engine.backward(engine(batch))
        engine.step()
        engine.newest_update.done.wait()  # type: ignore[union-attr]
    engine(batch)
    with suppress(EngineStateError):
        engine.close()


def touched_between_steps() -> None:
    """A program around the engine reads and writes weights that are stepped, or on their way to VRAM."""
    for placement in (Placement(), Placement(weights="ram")):
        model = TinyLM()
        with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
            for batch in tokens(3):
                engine.backward(engine(batch))
                engine.step()
                with torch.no_grad():
                    model.embed.weight.norm()
                    model.blocks[3].up.weight.clamp_(-0.1, 0.1)
                    model.blocks[0](torch.ones(1, 65))  # the next block is fetched ahead
                    model.blocks[1].up.weight.data.mul_(0.5)


def slow_disk() -> None:
    """No race but numbers: weights are loaded while states are on their way to the disk and from it."""

    def run(placement: Placement) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TinyLM(depth=2)
        best = model.blocks[1].state_dict()
        config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", placement=placement)
        with OffloadEngine(model, config, device="cpu") as engine:
            for number, batch in enumerate(tokens(3)):
                engine.backward(engine(batch))
                engine.step()
                if number == 0:
                    model.blocks[1].load_state_dict(best)
            return numbers(engine)

    real = StateFile._move

    def slow(file: StateFile, move: Any, *args: Any) -> None:
        time.sleep(0.1 * (move is os.pwritev))
        real(file, move, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateFile, "_move", slow)
        found = run(Placement(states="disk"))
    expected = run(Placement())
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def an_update_that_takes_long() -> None:
    thread, newest = update.StepThread(torch.device("cpu")), update.Update(1, [], [], None, update.Event())
    waiting = threading.Thread(target=thread.finish, args=(newest,), daemon=True)
    waiting.start()
    waiting.join(0.1)
    is_waiting = waiting.is_alive()
    newest.done.set()
    waiting.join(10)
    thread.close()
    assert is_waiting


def several_ranks(accumulation: int, exchange: str = "micro_batch") -> None:
    """What one rank does; weights are gathered as soon as they are stepped, and at the gates."""
    places = [Placement(), Placement(step="gpu"), LEAST_RAM, IN_VRAM]
    places = places if exchange == "micro_batch" else [IN_VRAM]
    for at, placement in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "joined_ranks", MirroredRanks)
            options: dict[str, Any] = {"working_dtype": "bf16", "gradient_accumulation": accumulation}
            options |= {"exchange": exchange, "placement": placement}
            engine = OffloadEngine(lm(), OffloadConfig(**options), device="cpu")
        with engine:
            assert engine.placed._gathers is not None
            engine.placed._gathers.looks_ahead = at % 2 == 0
            for batch in tokens(3 * accumulation):
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
            assert isinstance(engine.ranks, MirroredRanks)
            assert engine.ranks.num_gathers == 3 * len(engine.placed.states)


def a_full_rank() -> None:
    """The GPU is full in mid-backward: what was sent to other ranks is under way while layers move."""
    config, batch, model = OffloadConfig(working_dtype="bf16"), tokens(1)[0], lm()

    def fail(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(engine_module, "joined_ranks", MirroredRanks)
        with OffloadEngine(model, config, device="cpu", plan=mixed(config, [IN_VRAM])) as engine:
            train(engine, [batch])
            hook = model.blocks[1].register_forward_hook(
                lambda module, given, output: output.register_hook(fail) and None
            )
            with pytest.raises(RepeatWindowError):
                engine.backward(engine(batch))
            hook.remove()
            train(engine, [batch] * 2)


def ranks_that_share_weights() -> None:
    """Other ranks step parts of weights in RAM, and fetch what this one steps. Some of them are written or loaded while
    blocks that were fetched ahead are on their way."""
    torch.manual_seed(1)
    model, part = _Shuffled(depth=6, width=65, hidden=1100), SharedSlab.part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "joined_ranks", MirroredRanks)
        engine = OffloadEngine(model, OffloadConfig(placement=Placement(weights="ram")), device="cpu")
        ranks = engine.ranks
        assert isinstance(ranks, MirroredRanks)

        def others_have_read() -> None:
            """They have a mapping of their own: neither a copy nor what becomes of freed memory is anything to them."""
            told = threading.Event()
            engine.step_thread._gpu_worker.jobs.put(told.set)
            told.wait()
            ranks.others.record().synchronize()

        patch.setattr(SharedSlab, "part", lambda slab: (others_have_read(), part(slab)))
        with engine:
            where = [Placement(weights="ram", step="gpu"), LEAST_RAM, Placement(weights="ram")]
            layers = engine.plan.layers
            engine.move(placed(engine.plan, [possible(where[at % 3], layer) for at, layer in enumerate(layers)]))
            shared = [state for state in engine.placed.states if state.weights_slab is not None]
            ranks.watch([(each.layer.index, each.weights.flat, each.layer.cuts) for each in shared])
            best = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
            for number, batch in enumerate(tokens(5)):
                engine.backward(engine(batch))
                engine.step()
                if number == 1:
                    engine.synchronize()
                    with torch.no_grad():
                        model.blocks[1](torch.ones(1, 65))  # the next block is fetched ahead
                    for block in model.blocks:
                        block.load_state_dict(best)
                if number == 2:
                    with torch.no_grad():
                        model.blocks[2].up.weight.clamp_(-0.1, 0.1)
            engine.synchronize()
            others_have_read()


RUNS: dict[str, Callable[[], None]] = {
    "everywhere": lambda: everywhere(1),
    "accumulating": lambda: everywhere(2),
    "moved": lambda: moved(1),
    "moved, accumulating": lambda: moved(2),
    "saved at once": saved_at_once,
    "branches": lambda: branches("0", "1", "2", "0"),
    "branches on disk": lambda: branches("0", "1", "2", states="disk"),
    "by hand": lambda: branches("first", "by hand"),
    "closed": closed_after_backward,
    "used twice": used_twice,
    "recomputed by torch": recomputed_by_torch,
    "read by the parent": read_by_the_parent,
    "shuffled, stepped by the CPU": shuffled,
    "shuffled, stepped by the GPU": lambda: shuffled(gradients="vram", step="gpu"),
    "one chunk": one_chunk,
    "backward fails": backward_that_fails,
    "step fails": step_that_fails,
    "disk": slow_disk,
    "touched between steps": touched_between_steps,
    "long update": an_update_that_takes_long,
    "several ranks": lambda: several_ranks(1),
    "several ranks, accumulating": lambda: several_ranks(2),
    "several ranks, sums": lambda: several_ranks(2, "step"),
    "several ranks, weights in RAM": ranks_that_share_weights,
    "several ranks, full": a_full_rank,
}
SLOW = (
    "moved, accumulating",
    "branches on disk",
    "disk",
    "several ranks, accumulating",
    "several ranks, weights in RAM",
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(layout, "STEP_CHUNK", 4096)
    monkeypatch.setattr(StepBalancer, "correct", at_random(0))


HARMLESS = {
    # the sums of layers without a gradient in this window are sent too, and not read
    frozenset(("reads in gradients.Gradients.end_of_window", "writes in gradients.Gradients._send")),
    # a parameter that was not stepped is uploaded with its layer, as it was
    frozenset(("writes in states.LayerState.step", "reads in the model")),
}
"""Where a step uses other parameters than the last one."""


def races(name: str) -> set[Any]:
    with Watched().running() as watched:
        RUNS[name]()
        gc.collect()
        found = watched.races()
    harmless = HARMLESS if name.startswith(("branches", "by hand")) else set()
    return {
        pair for pair in found if frozenset(re.sub(r"^(stream \d+|compute) ", "", one) for one in pair) not in harmless
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS])
def test_nothing_races(name: str) -> None:
    assert races(name) == set()


NEVER_MISSED = {
    Wait("gradients.py", "Gradients.remove", "self.d2h.synchronize()"): "closing waits again in `forget_buffers`; this "
    "one is for an engine that is dropped",
    Wait(
        "weights.py", "ForwardHooks._hook_functions.at_root", "weight.wait()"
    ): "`Outside` waits for what Python reads before its module runs; this one is for what Python does not see",
    Wait("records.py", "StepRecords.wait", "end.synchronize()"): "it is for timings, and orders no work",
    Wait("recompute.py", "OffloadedInputs._fetch", "self.h2d.wait(saved.arrived)"): "the compute stream, which this "
    "stream waits for a line before, was made to wait for it by `_free_vram`",
    Wait("state_ring.py", "StateRing.copy_down", "self.d2h.wait(after)"): "this stream waited for each chunk's step",
    Wait("state_ring.py", "StateRing._fetch", "self.h2d.wait(event)", "self._stepped"): "it leaves the bus to others, "
    "and orders nothing",
    Wait("states.py", "LayerState._step_on_gpu", "stream.wait(self.uploaded)"): "the gradient's copy to RAM, which the "
    "thread waited for, began after the compute stream had waited for it",
    Wait("update.py", "StepThread._step_on_cpu", "self.h2d.wait(update.compute_done)"): "so did the norm's sums, after "
    "all of backward",
    Wait("update.py", "StepThread._queue_on_gpu", "self.kernels.wait(update.compute_done)"): "as on the CPU",
    Wait("update.py", "StepThread.close", "torch.cuda.synchronize(self._device)"): "with a GPU only",
}


MISSED_BY = {
    "moved": ["Gradients.forget_buffers: self.d2h.synchronize()", "PlacedModel._dismantle"],
    "moved, accumulating": ["StepThread.settle"],
    "branches": ["Gradients.end_of_window: layer.weights.wait()"],
    "by hand": ["Gradients._open: layer.weights.wait()"],
    "accumulating": [
        "Gradients._take_in",
        "Gradients._accumulate_through",
        "Gradients._open: self._waits.delay(layer.sent)",
    ],
    "used twice": ["Gradients._reopen"],
    "disk": ["PlacedModel.settle", "PlacedModel._finish_updates: self._disk.synchronize()", "LayerWeights.settle"],
    "branches on disk": ["PlacedModel._finish_updates: pending.weights.wait()"],
    "step fails": ["PlacedModel.release", "WeightRing.synchronize"],
    "backward fails": ["OffloadedInputs._send: self.d2h.wait(view.returned)"],
    "shuffled, stepped by the GPU": ["StateRing.step: self.d2h.wait(unread)"],
    "shuffled, stepped by the CPU": [
        "LayerState._wait_for_copies: event.synchronize() copied",
        "LayerState._wait_for_copies: event.synchronize() self.uploaded",
    ],
    "one chunk": ["StateRing._fetch: self.h2d.wait(event) layer.drained"],
    "long update": ["StepThread.finish"],
    "saved at once": ["StreamedWeights.settle"],
    "touched between steps": ["LayerWeights.open"],
    "several ranks": [
        "GradientExchange.receive: self.stream.wait(record_compute(self._device))",
        "GradientExchange.sum",
        "WeightGathers",
        "Gradients._exchange_layer: self.d2h.wait(exchange.stream.record())",
        "Gradients.end_of_window: self._waits.delay(self._exchange.stream.record())",
    ],
    "several ranks, full": ["Gradients.forget_buffers: self._exchange.stream.synchronize()"],
    "several ranks, weights in RAM": [
        "StreamedWeights._wait_for_ranks",
        "StreamedWeights.finish_reading",
        "StreamedWeights.begin_write",
        "Posting.post",
    ],
    "several ranks, accumulating": [
        "GradientExchange.receive: self.stream.wait(self._received_until)",
        "Gradients._exchange_layer: self.d2h.wait(layer.sent)",
    ],
}
"""By the run: the waits, as their names begin. All others: "everywhere"."""


def test_waits_that_are_never_missed_are_there() -> None:
    assert set(NEVER_MISSED) <= set(waits())


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait for wait in waits() if wait not in NEVER_MISSED], ids=str)
def test_a_wait_that_is_gone_is_seen(wait: Wait) -> None:
    name = next((run for run, missed in MISSED_BY.items() if str(wait).startswith(tuple(missed))), "everywhere")
    with without(wait):
        for _ in range(3):  # on a busy machine, what comes before a wait may take longer than what it waits for
            try:
                if races(name):
                    return
            except (Exception, AssertionError):
                return
    raise AssertionError(f"nobody misses it in the run {name!r}")
