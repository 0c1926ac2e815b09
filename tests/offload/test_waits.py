"""Every wait that orders memory is needed: no race with all waits, and a race or an error without any one of them.

`tests/happens_before.py` finds the races. Waits that no run needs are listed in `NEVER_MISSED` with the reason.
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

from offloadkit.device.host_memory import SharedSlab
from offloadkit.engine import engine as engine_module
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, RepeatWindowError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels import cpu
from offloadkit.offload import graphs, states, update
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import layout, placed, possible, tier_bytes
from tests.distributed.mirrored import MirroredRanks
from tests.engine.test_engine_waits import EmbedsByHand
from tests.happens_before import Wait, Watched, waits, without
from tests.models import Residual, TinyLM, numbers, tokens, train
from tests.offload.test_state_ring import (
    EVERYWHERE,
    IN_VRAM,
    LEAST_RAM,
    STREAMED,
    at_random,
    lm,
    mixed,
    trained,
)

DEPTH = len(EVERYWHERE) - 1


def everywhere(accumulation: int) -> None:
    """All placements at once, and layers that change the processor."""
    options: dict[str, Any] = {"working_dtype": "bf16", "gradient_accumulation": accumulation}
    trained("cpu", 3, mixed(OffloadConfig(**options), EVERYWHERE, DEPTH), depth=DEPTH, **options)


def graphed(accumulation: int) -> None:
    """All placements at once, and blocks as graphs although a mode watches torch's operations."""
    num_replays, replay = 0, BlockGraphs.replay

    def counted(*args: Any) -> Any:
        nonlocal num_replays
        num_replays += 1
        return replay(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts_graphs, "device_types", {"cpu"})
        patch.setattr(graphs, "_check_surroundings", lambda device: None)
        patch.setattr(BlockGraphs, "replay", counted)
        everywhere(accumulation)
    assert num_replays > 2 * DEPTH


def matrices() -> None:
    """Muon steps the blocks' matrices, AdamW the other parameters; layers move after a skipped step."""
    options: dict[str, Any] = {"working_dtype": "bf16", "optimizer": "muon"}
    config = OffloadConfig(on_nonfinite="skip", **options)
    places = [IN_VRAM, *STREAMED, Placement(), replace(STREAMED[3], activations="offload")]
    trained("cpu", 3, mixed(OffloadConfig(**options), places, DEPTH), depth=DEPTH, **options)
    with warnings.catch_warnings(), OffloadEngine(lm(), config, device="cpu", plan=mixed(config, places)) as engine:
        warnings.simplefilter("ignore")
        for number, batch in enumerate(tokens(4)):
            engine.backward(engine(batch) * (float("nan") if number == 1 else 1.0))
            engine.step()
            if number == 1:
                engine.move(mixed(config, places[::-1]))


def moved(accumulation: int) -> None:
    """Layers move while prefetched states of a skipped step and gradients of a dropped window are on their way."""
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
    """A caller that saves a part of the model reads each layer's weights right after the step."""
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
        if branch == "by hand":  # like a C++ extension, unseen by torch's Python hooks
            with torch._C.DisableTorchFunctionSubclass():
                return nn.functional.linear(x, self.second.weight).float().pow(2).mean()
        module = self.first if branch == "first" else self.blocks[int(branch)]
        return module(x).float().pow(2).mean()  # type: ignore[no-any-return]


def branches(*names: str, **options: Any) -> None:
    """No step uses the parameters of the step before; each step loads the block that it uses."""
    config, x, real = OffloadConfig(placement=Placement(**options)), torch.randn(4, 33), update.gradient_norm
    step = states.optimizer_step
    model = _Branches()
    best = {index: block.state_dict() for index, block in enumerate(model.blocks)}
    with pytest.MonkeyPatch.context() as patch, OffloadEngine(model, config, device="cpu") as engine:
        if options:
            patch.setattr(states, "optimizer_step", lambda *args: (time.sleep(0.1), step(*args))[1])
        else:
            patch.setattr(update, "gradient_norm", lambda *args: (time.sleep(0.1), real(*args))[1])
        for name in names:
            if name.isdigit() and options:
                model.blocks[int(name)].load_state_dict(best[int(name)])
            engine.backward(engine(x, name))
            engine.step()


def closed_after_backward() -> None:
    """Gradients are on their way when their memory is freed."""
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement()), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))


class Twice(TinyLM):
    """Runs its blocks twice under torch's older checkpointing, whose backward brings a gradient for each run."""

    def __init__(self, *hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(65, size) for size in hidden])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())


class InPairs(TinyLM):
    """torch recomputes pairs of blocks: a pair's first block is read after its second block was used last."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for at in range(0, len(self.blocks), 2):
            x = checkpoint(nn.Sequential(*self.blocks[at : at + 2]), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())


def recomputed_by_torch() -> None:
    with OffloadEngine(InPairs(depth=6), OffloadConfig(placement=Placement(weights="ram")), device="cpu") as engine:
        train(engine, tokens(2))


def used_twice() -> None:
    """A small block with a separate bucket gets a second gradient after it was sent."""
    with OffloadEngine(Twice(1027, 3), OffloadConfig(placement=Placement()), device="cpu") as engine:
        train(engine, tokens(3))


def read_by_the_parent() -> None:
    """A weight is used without its module, right after a step."""
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
    """Prefetched blocks are not used before the step."""
    torch.manual_seed(1)
    placement = Placement(weights="ram", **options)
    model = _Shuffled(depth=6, width=33, hidden=257)
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
        for batch in tokens(5):
            engine.backward(engine(batch))
            engine.step()


def one_chunk() -> None:
    """A single chunk passes through VRAM: the next step fetches it first."""
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
    """Backward fails before it uses a prefetched input. The next forward takes that input's memory first, because the
    last block's memory is too small."""
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
    """The engine is closed before its update has finished, while weights are fetched."""
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
    """A program around the engine reads and writes weights that are being stepped or fetched."""
    for placement in (Placement(), Placement(weights="ram")):
        model = TinyLM()
        with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
            for batch in tokens(3):
                engine.backward(engine(batch))
                engine.step()
                with torch.no_grad():
                    model.embed.weight.norm()
                    model.blocks[3].up.weight.clamp_(-0.1, 0.1)
                    model.blocks[0](torch.ones(1, 65))  # the next block is prefetched
                    model.blocks[1].up.weight.data.mul_(0.5)


def slow_disk() -> None:
    """Compares numbers, not accesses: weights are loaded while states are on their way to and from the disk."""

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

    real = os.pwritev
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *args: (time.sleep(0.1), real(*args))[1])
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


def slow_sums() -> None:
    """The staging ring is full, and gradients cross its end."""
    real = cpu.accumulate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "accumulate", lambda *args, **options: (time.sleep(0.002), real(*args, **options))[1])
        with OffloadEngine(TinyLM(depth=6), OffloadConfig(gradient_accumulation=2), device="cpu") as engine:
            for batch in tokens(4):
                engine.backward(engine(batch))
                engine.step()


def several_ranks(accumulation: int, exchange: str = "micro_batch") -> None:
    """One rank's work; weights are gathered right after their step, or at the gates."""
    places = [Placement(), Placement(step="gpu"), LEAST_RAM, IN_VRAM]
    places = places if exchange == "micro_batch" else [IN_VRAM]
    for at, placement in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "joined_ranks", MirroredRanks)
            options: dict[str, Any] = {"working_dtype": "bf16", "gradient_accumulation": accumulation}
            options |= {"exchange": exchange, "placement": placement}
            engine = OffloadEngine(lm(), OffloadConfig(**options), device="cpu")
        with engine:
            assert engine.placed.gathers is not None
            engine.placed.gathers.looks_ahead = at % 2 == 0
            for batch in tokens(3 * accumulation):
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
            assert isinstance(engine.ranks, MirroredRanks)
            assert engine.ranks.num_gathers == 3 * len(engine.placed.states)


def a_full_rank() -> None:
    """The GPU is full in mid-backward: gradients are on their way to the other ranks while layers move."""
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
    """Other ranks step parts of the weights in RAM and fetch the parts stepped here. Some weights are written or loaded
    while prefetched blocks are on their way."""
    torch.manual_seed(1)
    model, part = _Shuffled(depth=6, width=65, hidden=1100), SharedSlab.part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "joined_ranks", MirroredRanks)
        engine = OffloadEngine(model, OffloadConfig(placement=Placement(weights="ram")), device="cpu")
        ranks = engine.ranks
        assert isinstance(ranks, MirroredRanks)

        def others_have_read() -> None:
            """Real ranks map the memory themselves, so copies and freed memory do not affect them."""
            told = threading.Event()
            engine.step_thread.gpu_worker.jobs.put(told.set)
            told.wait()
            ranks.simulated.record().synchronize()

        patch.setattr(SharedSlab, "part", lambda slab: (others_have_read(), part(slab)))
        with engine:
            where = [Placement(weights="ram", step="gpu"), LEAST_RAM, Placement(weights="ram")]
            layers = engine.plan.layers
            engine.move(placed(engine.plan, [possible(where[at % 3], layer) for at, layer in enumerate(layers)]))
            shared = [state for state in engine.placed.states if state.memory.weights is not None]
            ranks.watch([(each.layer.index, each.weights.flat, each.layer.cuts) for each in shared])
            best = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
            for number, batch in enumerate(tokens(5)):
                engine.backward(engine(batch))
                engine.step()
                if number == 1:
                    engine.synchronize()
                    with torch.no_grad():
                        model.blocks[1](torch.ones(1, 65))  # the next block is prefetched
                    for block in model.blocks:
                        block.load_state_dict(best)
                if number == 2:
                    with torch.no_grad():
                        model.blocks[2].up.weight.clamp_(-0.1, 0.1)
            engine.synchronize()
            others_have_read()


def several_ranks_with_matrices() -> None:
    """One of three ranks has a small piece of a matrix, and owns whole matrices in turn with the other ranks."""
    torch.manual_seed(1)
    model = TinyLM(depth=6, width=65, hidden=1100)
    config = OffloadConfig(working_dtype="bf16", optimizer="muon", placement=Placement(step="gpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "joined_ranks", lambda device: MirroredRanks(device, rank=1, size=3))
        engine = OffloadEngine(model, config, device="cpu")
    with engine:
        where = [IN_VRAM, Placement(weights="ram", step="gpu"), Placement(step="gpu")]
        of_block: dict[str, Placement] = {}
        for layer in engine.plan.layers:
            of_block.setdefault(layer.name, where[len(of_block) % 3])
        engine.move(placed(engine.plan, [possible(of_block[layer.name], layer) for layer in engine.plan.layers]))
        for batch in tokens(3):
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()


RUNS: dict[str, Callable[[], None]] = {
    "everywhere": lambda: everywhere(1),
    "accumulating": lambda: everywhere(2),
    "graphs": lambda: graphed(1),
    "graphs, accumulating": lambda: graphed(2),
    "matrices": matrices,
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
    "slow sums": slow_sums,
    "several ranks": lambda: several_ranks(1),
    "several ranks, accumulating": lambda: several_ranks(2),
    "several ranks, sums": lambda: several_ranks(2, "step"),
    "several ranks, weights in RAM": ranks_that_share_weights,
    "several ranks, matrices": several_ranks_with_matrices,
    "several ranks, full": a_full_rank,
}
SLOW = (
    "graphs",
    "graphs, accumulating",
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
    # sums of layers without a gradient in this window are sent too, and not read
    frozenset(("reads in gradient_buffers.NormSums.send", "writes in gradients.Gradients._send")),
    # a parameter that was not stepped is uploaded unchanged with its layer
    frozenset(("writes in states.LayerState.step", "reads in the model")),
}
"""Pairs that do not race, if consecutive steps use different parameters."""


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
    "copies before the engine is dropped": "closing waits again before buffers go",
    "updates before a forward reads weights by itself": "`ExternalWrites` waits for what Python reads before its "
    "module runs; this one is for what Python does not see",
    "timings": "it orders no work",
    "seconds of a move into VRAM": "it orders no work",
    "fetches before a block's own memory is freed": "the wait for the move's seconds came first",
    "an input in RAM before it is fetched": "the compute stream, which this stream waits for a line before, waited for "
    "it when the input's VRAM was freed",
    "a step before its weights are copied down": "this stream waited for each chunk's step",
    "a step before the next fetch": "it leaves the bus to others, and orders nothing",
    "an upload before a step on the GPU": "the gradient's copy to RAM, which the thread waited for, began after the "
    "compute stream had waited for it",
    "an upload before a step of matrices": "as before other steps on the GPU",
    "backward before the CPU's weights are uploaded": "so did the norm's sums, after all of backward",
    "backward before a step on the GPU": "as on the CPU",
    "the GPU before the thread ends": "with a GPU only",
    "lookups before a write": "with a GPU only: the CPU's lookups have read the embeddings when they return",
}
"""Names of waits, and why no run misses them."""


MISSED_BY = {
    "moved": ["copies before their buffers go", "states fetched for a skipped step before they move"],
    "moved, accumulating": ["jobs of the stepping thread"],
    "branches": ["the last update before new sums of squares"],
    "by hand": ["the last update before new gradients"],
    "accumulating": [
        "backward before a copy of one micro-batch",
        "a copy before it is accumulated",
        "the last copy before new gradients",
    ],
    "used twice": ["a copy before its gradient comes again"],
    "disk": [
        "the disk before states are read",
        "the disk before parameters are written",
        "an update before weights are read",
    ],
    "branches on disk": ["updates before parameters are written"],
    "step fails": ["fetches before weights are released", "fetches before their memory is freed"],
    "backward fails": ["a fetched input before its RAM is used again"],
    "shuffled, stepped by the GPU": ["weights in RAM read before their update is copied"],
    "shuffled, stepped by the CPU": [
        "weights fetched before they are written",
        "an upload before states are read",
    ],
    "one chunk": ["states in RAM before they are fetched"],
    "long update": ["the newest update"],
    "saved at once": ["an update before streamed weights are read", "weights in RAM before they are read"],
    "touched between steps": ["an update before weights are opened"],
    "slow sums": ["a sum before its staging is reused"],
    "several ranks": [
        "backward before an exchange",
        "a sum read before the next",
        "a gather's update",
        "an update before its gather",
        "an exchanged sum before its copy",
        "exchanges before sums of squares",
    ],
    "several ranks, full": ["exchanges before their buffers go"],
    "several ranks, weights in RAM": [
        "other ranks' steps",
        "copies before other ranks step",
        "copies before weights are written",
        "states in RAM before other ranks know",
    ],
    "several ranks, matrices": [
        "updates before they are exchanged",
        "pieces of the other ranks before their matrix is orthogonalized",
        "updates of the owners before they are applied",
    ],
    "several ranks, accumulating": [
        "received gradients read before the next come",
        "an exchange before its copies",
    ],
}
"""Names of waits by the run that races without them. The run "everywhere" covers all waits not named here."""


def test_names_of_waits_are_those_that_the_code_has() -> None:
    named = sorted(wait.name for wait in waits() if wait.name)
    missed = [name for names in MISSED_BY.values() for name in names]
    assert named == sorted([*NEVER_MISSED, *missed])


@pytest.mark.slow
@pytest.mark.parametrize("wait", [wait for wait in waits() if wait.name not in NEVER_MISSED], ids=str)
def test_a_wait_that_is_gone_is_seen(wait: Wait) -> None:
    name = next((run for run, missed in MISSED_BY.items() if wait.name in missed), "everywhere")
    with without(wait):
        for _ in range(3):  # on a busy machine, the work before a wait may take longer than the work it waits for
            try:
                if races(name):
                    return
            except (Exception, AssertionError):
                return
    raise AssertionError(f"nobody misses it in the run {name!r}")
