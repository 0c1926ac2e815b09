"""Blocks as graphs compute the bits of eager blocks. On the CPU a graph is a function that runs again."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from offloadkit.device.graphs import RunAgain
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, RepeatWindowError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import graphs as offload_graphs
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.graphs import MOST_CHANGES, MOST_KINDS, BlockGraphs, _Entry, _FirstRun
from offloadkit.planner.make import without_graphs
from tests.graphs import PLACEMENTS, Trained, assert_equals_eager, batches, llama, t5, train, train_by
from tests.offload import test_forward_code
from tests.offload.test_forward_code import CODE, QUICK, Calls


@pytest.fixture(autouse=True)
def graphs_are_on(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu"})
    monkeypatch.setattr(RunAgain, "fill_with_nan", True)
    own = BlockGraphs.replay

    def replay(self: BlockGraphs, captured: Any) -> Any:
        """Overwrites the kept activations that share memory with the graph on a GPU."""
        for entry in entries_of(self):
            if entry._forward is not captured and not entry.comes_before(captured):
                for static in entry._own:
                    static.memory.fill_(torch.nan)
        return own(self, captured)

    monkeypatch.setattr(BlockGraphs, "replay", replay)


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        *(("t5", each) for each in PLACEMENTS[::2]),
        *(pytest.param("t5", each, marks=pytest.mark.slow) for each in PLACEMENTS[1::2]),
        ("llama", PLACEMENTS[0]),
        ("llama", PLACEMENTS[2]),
    ],
)
def test_graphs_train_the_bits_of_eager_blocks(
    kind: str, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, two lengths of rows and accumulation, in bf16, where the order of sums shows."""
    model, data = {"t5": t5, "llama": llama}[kind], batches(kind, 6)
    found = train(model(), data, placement, gradient_accumulation=2, working_dtype="bf16")
    assert found[2] >= 2 * 2 * 2  # forward and backward, two blocks, two lengths
    assert_equals_eager(
        found, lambda: train(model(), data, placement, gradient_accumulation=2, working_dtype="bf16"), monkeypatch
    )


def test_a_frozen_encoder_trains_the_bits_of_eager_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a second length of rows is captured without a first run."""
    caplog.set_level(logging.INFO)

    def run() -> Trained:
        model, placement = t5(), Placement(weights="ram", activations="checkpoint")
        model.encoder.requires_grad_(False)
        return train(model, batches("t5", 6), placement)

    found = run()
    assert "encoder.block.1 runs eagerly: its outputs require no gradient" in caplog.text
    assert "cannot be captured" not in caplog.text
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[1], PLACEMENTS[4]])
def test_losses_of_two_lengths_at_once_have_the_bits_of_eager_blocks(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the second length overwrite the inputs of the first one, of which backward needs masks and biases."""
    data = batches("t5", 8)

    def run() -> Trained:
        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            for long, short in zip(data[::2], data[1::2], strict=True):
                yield engine(**long).loss + engine(**short).loss

        return train_by(t5().train(), forwards, placement)

    found = run()
    assert found[2] > 0
    assert_equals_eager(found, run, monkeypatch)


def test_graphs_are_dropped_before_their_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their replays are waited for when they are dropped, and memory is freed without another wait."""
    told = list[str]()
    monkeypatch.setattr(RunAgain, "dropped", lambda self: told.append("dropped"))
    monkeypatch.setattr(RunAgain, "free", lambda self: told.append("freed"))
    with OffloadEngine(llama().train(), OffloadConfig(placement=PLACEMENTS[0]), device="cpu") as engine:
        for batch in batches("llama", 4):
            engine.backward(engine(**batch).loss)
            engine.step()
        num_entries = sum(entry.num_graphs() > 0 for entry in entries_of(engine.placed.graphs))
        told.clear()
        engine.placed.graphs.release()
    assert told[: num_entries + 1] == ["dropped"] * num_entries + ["freed"]
    assert num_entries >= 2


def test_lengths_and_blocks_share_static_memory() -> None:
    def num_bytes(data: list[dict[str, torch.Tensor]], **changes: Any) -> int:
        config = OffloadConfig(working_dtype="fp32", placement=PLACEMENTS[4])
        with OffloadEngine(t5(**changes).train(), config, device="cpu") as engine:
            for batch in data:
                engine.backward(engine(**batch).loss)
                engine.step()
            graphs = engine.placed.graphs
            assert graphs is not None
            copies = [
                each.memory for (what, index, _), each in graphs._statics.items() if (what, index) == ("weights", 0)
            ]
            assert len(copies) > 1, "blocks of the encoder are smaller than those of the decoder"
            assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
            return graphs._static_bytes()

    long, short = batches("t5", 2)
    one, both = num_bytes([long] * 3), num_bytes([long] * 3 + [short] * 3)
    assert both == one
    assert num_bytes([short, long, short, short, long]) == one
    assert num_bytes([short] * 3 + [long] * 3 + [short]) == one, "larger memory takes the place of smaller memory"


@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[4]])
def test_blocks_are_captured_again_for_longer_rows(
    placement: Placement, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The long rows come in a forward whose first blocks ran as graphs, with a second loss before backward."""
    caplog.set_level(logging.INFO)
    long, short = batches("t5", 2)

    def run() -> Trained:
        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            for batch in [short] * 3:
                yield engine(**batch).loss
            yield engine(**short).loss + engine(**long).loss
            for batch in [long, long, short, short, long]:
                yield engine(**batch).loss

        return train_by(t5(), forwards, placement)

    found = run()
    assert found[2] > 0
    assert caplog.text.count("larger inputs than before") == 1
    assert_equals_eager(found, run, monkeypatch)


def test_reasons_of_eager_calls_are_those_of_their_forward() -> None:
    """Longer rows drop the graphs: all blocks that follow in this forward run eagerly. Then a block is called by
    itself.
    """
    model = Stack()
    with OffloadEngine(model, OffloadConfig(working_dtype="fp32", placement=Placement()), device="cpu") as engine:
        for size in [(2, 3)] * 3 + [(2, 6)] * 2:
            engine.backward(engine(size))
            engine.step()
        graphs = engine.placed.graphs
        assert graphs is not None
        assert list(graphs.num_eager) == ["a block got larger inputs than before, so all blocks are captured again"]
        model.blocks[0](torch.ones(2, 3, 8))
        assert "ran outside of the engine's forward" in list(graphs.num_eager)[1]


# ---- guards


class Named(dict[str, Any]):
    """A dict that has attributes too."""

    scale = 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)
        self.factor = 1.0
        self.options = {
            "scales": [1.0],
            "more": SimpleNamespace(scale=1.0),
            "named": Named(),
            "call": partial(max, [1]),
        }
        self.register_buffer("shift", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return x + self.down(self.drop(torch.tanh(self.up(x)))) * (scale * self.factor * self.scale) + self.shift

    @property
    def scale(self) -> float:
        return float(self.options["scales"][0] * self.options["more"].scale) + ("call" not in self.options)


class InPlace(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        x = super().forward(x)
        return x if pair is None else x + pair.mul_(2.0)


class CountsCalls(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        self.shift.add_(0.25)  # type: ignore[operator]
        return super().forward(x)


class Reads(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) if float(x.detach().sum()) > 0 else x - super().forward(x)


class CopiesAway(Block):
    """As `.tolist()` does on a GPU, with another device than the CPU."""

    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) if x.detach().to("meta").shape == x.shape else x


class DrawsInPython(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x, random.random())


SHARED = torch.ones(8)


class UsesAnotherTensor(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) * SHARED


class Remembers(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        self.newest = x.detach()
        return super().forward(x)


class Normalizes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(self.norm(x.flatten(0, 1)).view(x.shape))


class Stack(nn.Module):
    """Blocks that get `arguments`, called by a number of rows and a length."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])
        self.arguments: dict[str, Any] = {}
        self.order = [0, 1, 2]
        self.num_without_gradients = 0
        self.after: dict[int, Callable[[torch.Tensor], Any]] = {}
        """Called with the output of a block; the next block gets a tensor that it returns instead."""

    def forward(self, size: tuple[int, int]) -> torch.Tensor:
        x = torch.linspace(-1, 1, size[0] * size[1] * 8).view(*size, 8).to(self.blocks[0].up.weight.dtype)
        for index in self.order:
            with torch.no_grad() if index < self.num_without_gradients else nullcontext():
                x = self.blocks[index](x, **self.arguments)
            found = self.after.get(index, lambda _: None)(x)
            x = found if isinstance(found, torch.Tensor) else x
        return x.float().square().mean()


def after(step: int, change: Callable[[Stack], Any]) -> Callable[[Stack, int], Any]:
    return lambda model, now: change(model) if now == step else None


def set_dropout(model: Stack) -> None:
    model.blocks[1].drop.p = 0.25


def set_mode(model: Stack) -> None:
    model.blocks[1].drop.eval()


def set_attribute(model: Stack) -> None:
    model.blocks[1].factor = 0.5


def set_item(model: Stack) -> None:
    model.blocks[1].options["scales"][0] = 0.5


def set_attribute_of_attribute(model: Stack) -> None:
    model.blocks[1].options["more"].scale = 0.5


def set_attribute_of_dict(model: Stack) -> None:
    model.blocks[1].options["named"].scale = 0.5


def set_argument_of_partial(model: Stack) -> None:
    model.blocks[1].options["call"].args[0][0] = 2


def rename_a_key(model: Stack) -> None:
    """The last one, so that the values have the same order."""
    options = model.blocks[1].options
    options["call it"] = options.pop("call")


def exchange_module(model: Stack) -> None:
    model.blocks[1].drop = nn.Dropout(0.25)


def exchange_buffer(model: Stack) -> None:
    model.blocks[1].shift = torch.ones(8)


def exchange_memory(model: Stack) -> None:
    model.blocks[1].shift.data = torch.ones(8)


def exchange_forward(model: Stack) -> None:
    own = model.blocks[1].drop.forward
    model.blocks[1].drop.forward = lambda x: 2 * own(x)


class Doubles(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def exchange_class(model: Stack) -> None:
    model.blocks[1].drop.__class__ = Doubles


def exchange_dict(model: Stack) -> None:
    model.blocks[1].drop.__dict__ = {**vars(model.blocks[1].drop), "p": 0.25}


def exchange_dict_of_tensors(model: Stack) -> None:
    own = vars(model.blocks[1])
    model.blocks[1].__dict__ = {**own, "_buffers": {name: each + 1 for name, each in own["_buffers"].items()}}


def set_argument(model: Stack) -> None:
    model.arguments["scale"] = 0.5


def give_a_tensor(model: Stack) -> None:
    model.arguments["pair"] = torch.ones(8)


def stop_gradients(model: Stack) -> None:
    """Of the first block, so the input of the second one requires none."""
    model.num_without_gradients = 1


def freeze(model: Stack) -> None:
    model.blocks[1].up.bias.requires_grad_(False)


def hook(model: Stack) -> None:
    model.blocks[1].drop.register_forward_hook(lambda module, args, output: output * 2)


def hook_before(model: Stack) -> None:
    model.blocks[1].drop.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_in_backward(model: Stack) -> None:
    model.blocks[1].drop.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))


def hook_all(model: Stack) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


def give_object(model: Stack) -> None:
    model.arguments["pair"] = object()


def autocast(model: Stack) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def choose_kernels(model: Stack) -> Any:
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def allow_tf32(model: Stack) -> Iterator[None]:
    """As `TrainingArguments(tf32=True)` does; the getters of the older `allow_tf32` raise meanwhile."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def reverse(model: Stack) -> None:
    model.order = [2, 1, 0]


def call_twice(model: Stack) -> None:
    model.order = [0, 1, 1, 2]


CHANGES: list[tuple[Callable[[Stack], Any], str]] = [
    (set_dropout, "Dropout.p changed"),
    (set_mode, "Dropout.training changed"),
    (set_attribute, "Block.factor changed"),
    (set_item, "the contents of Block.options changed"),
    (set_attribute_of_attribute, "the contents of Block.options changed"),
    (set_attribute_of_dict, "the contents of Block.options changed"),
    (set_argument_of_partial, "the contents of options changed"),
    (rename_a_key, "the contents of Block.options changed"),
    (exchange_module, "a parameter, buffer or module of Block changed"),
    (exchange_buffer, "a parameter, buffer or module of Block changed"),
    (exchange_memory, "the memory of a buffer changed"),
    (exchange_forward, "Dropout.forward changed"),
    (exchange_class, "the class or the __dict__ of a module in it changed"),
    (exchange_dict, "the class or the __dict__ of a module in it changed"),
    (exchange_dict_of_tensors, "the class or the __dict__ of a module in it changed"),
    (set_argument, "an argument changed"),
    (give_a_tensor, "an argument changed"),
    (choose_kernels, "a setting of torch changed"),
    (allow_tf32, "a setting of torch changed"),
    (stop_gradients, "gradients are off"),
    (stop_gradients, "requires_grad of an argument changed"),
    (freeze, "requires_grad of a parameter changed"),
    (hook, "a module in it has hooks"),
    (hook_before, "a module in it has hooks"),
    (hook_in_backward, "a module in it has hooks"),
    (hook_all, "torch has hooks of all modules"),
    (autocast, "autocast is on"),
    (give_object, "it gets or returns a object"),
    (reverse, ""),
    (call_twice, "it is called more than once"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_block_that_changes_is_captured_again_or_runs_eagerly(
    change: Callable[[Stack], Any],
    said: str,
    activations: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "offloadkit")

    def run() -> Trained:
        return train(Stack(), [(2, 3)] * 6, Placement(activations=activations), after(3, change))

    found = run()
    assert said in caplog.text
    assert "6 graphs of blocks take" in caplog.text
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize(
    ("change", "said"),
    [pytest.param(*each, marks=[] if each[1] in QUICK else pytest.mark.slow, id=each[1]) for each in CODE],
)
@pytest.mark.parametrize("activations", ["keep", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_blocks_whose_code_changes_are_captured_again(
    change: Callable[[pytest.MonkeyPatch], None],
    said: str,
    activations: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "offloadkit")

    def run() -> Trained:
        with pytest.MonkeyPatch.context() as patch:
            change_it = after(3, lambda model: change(patch))
            return train(Stack(Calls), [(2, 3)] * 6, Placement(activations=activations), change_it)

    found = run()
    assert f"{said} changed; blocks are captured again" in caplog.text
    assert "6 graphs of blocks take" in caplog.text
    assert_equals_eager(found, run, monkeypatch)


def test_blocks_whose_code_changes_in_every_step_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offloadkit")
    monkeypatch.setattr(test_forward_code, "FACTOR", 1.0)

    def run() -> Trained:
        change = lambda model, step: setattr(test_forward_code, "FACTOR", 1.0 + step)  # noqa: E731
        return train(Stack(Calls), [(2, 3)] * 6, None, change)

    found = run()
    assert "its attributes or its code change often" in caplog.text
    assert found[2] == 0
    assert_equals_eager(found, run, monkeypatch)


def when_captured(monkeypatch: pytest.MonkeyPatch, note: Callable[[], None]) -> None:
    """Call `note` before each capture."""
    own = RunAgain.capture

    def capture(self: RunAgain, work: Any) -> Any:
        note()
        return own(self, work)

    monkeypatch.setattr(RunAgain, "capture", capture)


def change_global(model: Stack) -> None:
    test_forward_code.FACTOR = 2.0


def change_attributes(model: Stack) -> None:
    for block in model.blocks:
        cast(Any, block).drop.p = 0.5


@pytest.mark.parametrize("change", [change_global, change_attributes])
def test_when_all_blocks_change_new_graphs_have_the_memory_of_the_old_ones(
    change: Callable[[Stack], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_forward_code, "FACTOR", 1.0)
    done, own_free = list[str](), RunAgain.free

    def free(self: RunAgain) -> None:
        done.append("free")
        own_free(self)

    def note(model: Stack, step: int) -> None:
        done.append(f"step {step}")
        if step == 4:
            change(model)

    monkeypatch.setattr(RunAgain, "free", free)
    when_captured(monkeypatch, lambda: done.append("capture"))
    train(Stack(Calls), [(2, 3)] * 7, None, note)
    captures = ["capture"] * 6
    begin = done.index("step 1")
    assert done[begin : done.index("step 6") + 1] == (
        ["step 1", *captures, "step 2", "step 3", "step 4", "free", "step 5", *captures, "step 6"]
    )


def test_blocks_that_change_between_two_forwards_of_a_step_have_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the first forward stay until its backward."""

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for step in range(4):
            loss = engine((2, 3))
            if step == 2:
                change_attributes(cast(Stack, engine.module))
            yield loss + engine((2, 3))
        if (graphs := engine.placed.graphs) is not None:
            assert [block._num_changes for block in graphs._blocks] == [1] * 3

    run = lambda: train_by(Stack(Calls), forwards)  # noqa: E731
    assert_equals_eager(run(), run, monkeypatch)


@pytest.mark.slow
def test_blocks_that_change_often_are_captured_again_when_they_have_calmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes are too close for captures to pay."""
    monkeypatch.setattr(test_forward_code, "FACTOR", 1.0)
    monkeypatch.setattr(offload_graphs, "RARELY", 16)
    captured, now = list[int](), 0

    def change(model: Stack, step: int) -> None:
        nonlocal now
        now = step
        if step < 60 and step % 4 == 0:
            test_forward_code.FACTOR = 1.0 + step / 100

    def run() -> Trained:
        return train(Stack(Calls), [(2, 3)] * 100, None, change)

    when_captured(monkeypatch, lambda: captured.append(now))
    found = run()
    steps = sorted(set(captured))
    early = [step for step in steps if step < 60]
    assert len(early) <= MOST_CHANGES + 60 // 16
    assert [step for step in steps if step >= 60] == [steps[-1]]
    assert steps[-1] < 60 + 16 + 4
    assert_equals_eager(found, run, monkeypatch)


def test_values_that_change_in_every_step_are_not_kept() -> None:
    values, found = cast(Any, test_forward_code.ACTIVATIONS), list[weakref.ref[Any]]()

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for _ in range(6):
            values["kept"] = torch.zeros(1)
            found.append(weakref.ref(values["kept"]))
            yield engine((2, 3))
        assert [each() is not None for each in found] == [False] * 5 + [True]

    try:
        assert train_by(Stack(Calls), forwards)[2] == 0
    finally:
        del values["kept"]


def test_blocks_whose_code_cannot_be_compared_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(cast(Any, test_forward_code.ACTIVATIONS), "dead", weakref.proxy(nn.Module()))
    run = lambda: train(Stack(Calls), [(2, 3)] * 4)  # noqa: E731
    found = run()
    assert "the code of their forwards cannot be compared (ReferenceError" in caplog.text
    assert found[2] == 0
    assert_equals_eager(found, run, monkeypatch)


def test_a_block_that_changes_now_and_then_runs_as_a_graph_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured after the blocks that follow it, so all are captured anew."""
    monkeypatch.setattr(offload_graphs, "PAYS", 4)
    monkeypatch.setattr(offload_graphs, "RARELY", 4)
    model = Stack()
    with OffloadEngine(model, OffloadConfig(working_dtype="fp32", placement=Placement()), device="cpu") as engine:
        graphs = engine.placed.graphs
        assert graphs is not None
        for step in range(10 * (MOST_CHANGES + 3)):
            if step % 10 == 5:
                cast(Any, model.blocks[1]).drop.p = 0.1 + step / 100
            num_before = graphs.num_graphed
            engine.backward(engine((2, 3)))
            engine.step()
            if step % 10 == 4:
                assert graphs.num_graphed - num_before == 3


@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[1], PLACEMENTS[4]])
def test_nothing_is_captured_after_the_second_step_of_a_shape(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, step = list[int](), 0

    def note(model: Stack, now: int) -> None:
        nonlocal step
        step = now

    when_captured(monkeypatch, lambda: captured.append(step))
    assert train(Stack(), [(2, 3 + index % 2) for index in range(2 * 11)], placement, note)[2] == 2 * 3 * 2
    assert len(captured) == 2 * 3 * 2
    assert max(captured) < 2 * 2


@pytest.mark.parametrize("to", [PLACEMENTS[0], PLACEMENTS[1]])
def test_a_plan_that_moves_captures_again(to: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights come from RAM before the move."""

    def run() -> Trained:
        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            plan = engine.plan
            for step in range(6):
                if step == 3:
                    engine.move(replace(plan, placements=(to,) * len(plan.placements)))
                    assert engine.placed.graphs is None or not engine.placed.graphs.num_graphs()
                yield engine((2, 3))

        return train_by(Stack(), forwards, PLACEMENTS[4])

    found = run()
    assert found[2] == 6
    assert_equals_eager(found, run, monkeypatch)


def test_with_an_older_torch_blocks_run_eagerly_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(facts_graphs, "version", lambda _: "2.10.1")
    facts_graphs.torch_is_too_old.cache_clear()
    try:
        assert train(Stack(), [(2, 3)] * 3)[2] == 0
    finally:
        facts_graphs.torch_is_too_old.cache_clear()
    assert "blocks run eagerly: CUDA graphs need torch 2.11" in caplog.text


@pytest.mark.parametrize("how", ["run_eval", "run_generation"])
def test_evaluation_and_generation_free_the_graphs_which_are_captured_again(how: str) -> None:
    with OffloadEngine(Stack(), OffloadConfig(working_dtype="fp32", placement=Placement()), device="cpu") as engine:
        graphs = engine.placed.graphs
        assert graphs is not None
        for _ in range(2):
            for _ in range(3):
                engine.backward(engine((2, 3)))
                engine.step()
            assert graphs.num_graphs() == 6
            assert getattr(engine, how)(graphs.num_graphs) == 0


class HoldsMuch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rows = list(range(3000))


class HoldsAnArray(Block):
    def __init__(self) -> None:
        super().__init__()
        self.options["table"] = np.ones(2)  # type: ignore[assignment]


class Slotted:
    __slots__ = ("scale",)


class HoldsAnArrayWithAttributes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.options["table"] = type("Table", (np.ndarray,), {})(1)


class AlsoSlotted(Slotted):
    pass


class HoldsAnObjectThatIsAlsoSlotted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = AlsoSlotted()


class HoldsASlottedObject(Block):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()


KINDS: list[tuple[type[Block], str]] = [
    (DrawsInPython, "it draws random numbers on the host"),
    (Reads, "it waits for the device (aten._local_scalar_dense.default)"),
    (CopiesAway, "it waits for the device (a copy to the meta)"),
    (UsesAnotherTensor, "it uses a tensor that is neither an argument nor its own"),
    (CountsCalls, "it writes a buffer"),
    (Remembers, "its attributes or its code change often"),
    (HoldsMuch, "its attributes hold more than 2000 values"),
    (HoldsAnArray, "HoldsAnArray.options holds a ndarray, whose contents are not compared"),
    (HoldsASlottedObject, "HoldsASlottedObject.slotted holds a Slotted, whose contents are not compared"),
    (HoldsAnArrayWithAttributes, "HoldsAnArrayWithAttributes.options holds a Table, whose contents are not compared"),
    (HoldsAnObjectThatIsAlsoSlotted, "slotted holds a AlsoSlotted, whose contents are not compared"),
    (Normalizes, "its BatchNorm1d writes its statistics"),
]


@pytest.mark.parametrize(("kind", "said"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_blocks_that_no_graph_can_hold_run_eagerly(
    kind: type[Block], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offloadkit")

    def run() -> Trained:
        random.seed(0)
        return train(Stack(kind), [(2, 3)] * 6)

    found = run()
    assert said in caplog.text
    assert found[2] == 0
    assert_equals_eager(found, run, monkeypatch)


def test_a_block_with_an_output_without_strides_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offloadkit")

    class Compressed(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
            return super().forward(x), torch.eye(2).to_sparse_csr()

    class OfCompressed(Stack):
        def forward(self, size: tuple[int, int]) -> torch.Tensor:
            x = torch.ones(*size, 8)
            for block in self.blocks:
                x, _ = block(x)
            return x.square().mean()

    def run() -> Trained:
        return train(OfCompressed(Compressed), [(2, 3)] * 3)

    found = run()
    assert "it cannot be captured" in caplog.text
    assert_equals_eager(found, run, monkeypatch)


# ---- several forwards, other uses of weights, evaluations


def trained_by(loss_of: Callable[[OffloadEngine, Stack], torch.Tensor], activations: Any) -> Trained:
    torch.manual_seed(7)
    model = Stack()
    return train_by(
        model, lambda engine: (loss_of(engine, model) for _ in range(5)), Placement(activations=activations)
    )


def two_forwards(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    return cast(torch.Tensor, engine((2, 3)) + engine((2, 4)))


def the_same_forward_twice(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    return cast(torch.Tensor, engine((2, 3)) + engine((2, 3)))


def dropped_forward(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    engine((2, 3))
    return cast(torch.Tensor, engine((2, 3)))


def penalty(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    weights = cast(Any, model.blocks[1]).up.weight.square().sum() + cast(Any, model.blocks[0]).down.bias.abs().sum()
    return cast(torch.Tensor, engine((2, 3)) + 0.1 * weights)


def evaluation(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    loss: torch.Tensor = engine((2, 3))
    with torch.no_grad():
        engine((2, 3))
    return loss


def hook_on_a_gradient(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    weight = cast(Any, model.blocks[1]).up.weight
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: 2 * gradient)
    return cast(torch.Tensor, engine((2, 3)))


def gradient_before(engine: OffloadEngine, model: Stack) -> torch.Tensor:
    """Backward adds to an existing gradient."""
    loss: torch.Tensor = engine((2, 3))
    weight = cast(Any, model.blocks[1]).up.weight
    weight.grad = torch.ones_like(weight)
    return loss


def gradients_first(*between: tuple[int, int]) -> Callable[[OffloadEngine, Stack], torch.Tensor]:
    """Gradients of a loss that is kept for backward, then other forwards."""

    def loss_of(engine: OffloadEngine, model: Stack) -> torch.Tensor:
        loss: torch.Tensor = engine((2, 3))
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        others = [engine(size) for size in between]
        return loss + sum(float(each.detach().norm()) for each in [*found, *others])

    return loss_of


OTHER_LOOPS = [
    *(two_forwards, the_same_forward_twice, dropped_forward, penalty, evaluation),
    *(hook_on_a_gradient, gradient_before),
    *(gradients_first(), gradients_first((2, 4)), gradients_first((2, 3))),
]


@pytest.mark.parametrize("loss_of", OTHER_LOOPS)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_other_loops_train_the_bits_of_eager_blocks(
    loss_of: Any, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained_by(loss_of, activations)
    assert (found[2] == 0) == (loss_of is evaluation)  # it drops them
    assert_equals_eager(found, lambda: trained_by(loss_of, activations), monkeypatch)


class InOneDtype(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x).to(x.dtype)


def test_autograd_adds_the_gradients_of_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, before they are added to the window's sum in fp32."""

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for factor in (0.0, 0.0, 0.37, 0.73):
            loss = engine((2, 3))
            yield loss + factor * engine((2, 3)) if factor else loss

    def run() -> Trained:
        placement = Placement(activations="checkpoint")
        return train_by(Stack(InOneDtype), forwards, placement, gradient_accumulation=2, working_dtype="bf16")

    found = run()
    assert found[2] > 0
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("when", ["before backward", "after the step"])
def test_an_evaluation_frees_graphs_although_the_loss_is_kept(activations: Any, when: str) -> None:
    config = OffloadConfig(working_dtype="fp32", placement=Placement(activations=activations))
    with OffloadEngine(Stack(), config, device="cpu") as engine:
        engine.backward(engine((2, 3)))
        engine.step()
        loss = engine((2, 3))
        assert engine.placed.graphs is not None
        held = graphs_of(engine.placed.graphs)
        assert len(held) == 6
        if when == "before backward":
            engine.run_eval(lambda: None)
        engine.backward(loss)
        engine.step()
        if when == "after the step":
            engine.run_eval(lambda: None)
        cast(RunAgain, engine.placed.graphs.pool).newest = None
        assert not any(graph() for graph in held)


def entries_of(graphs: BlockGraphs) -> list[_Entry]:
    return [entry for block in graphs._blocks for entry in block._entries.values() if isinstance(entry, _Entry)]


def graphs_of(graphs: BlockGraphs) -> list[weakref.ref[Any]]:
    entries = entries_of(graphs)
    backwards = [backward.captured for entry in entries for backward in entry._backwards.values()]
    return [
        weakref.ref(each.graph) for each in [*(entry._forward for entry in entries), *backwards] if each is not None
    ]


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_step_between_forward_and_backward_is_an_error(activations: Any) -> None:
    config = OffloadConfig(working_dtype="fp32", placement=Placement(activations=activations))
    with OffloadEngine(Stack(), config, device="cpu") as engine:
        for _ in range(3):
            late = None  # frees the activations
            late, loss = engine((2, 4)), engine((2, 3))
            engine.backward(loss)
            engine.step()
        with pytest.raises(EngineStateError, match="were stepped, written or moved after this loss was computed"):
            engine.backward(late)


def gradients_of(engine: OffloadEngine, model: Stack) -> tuple[torch.Tensor, ...]:
    """Gradients of the loss, and of a penalty on its gradients."""
    torch.manual_seed(1)
    weights = list(model.parameters())
    first = torch.autograd.grad(engine((2, 3)), weights, create_graph=True)
    return *first, *torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), weights)


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_backward_that_is_differentiated_gives_graphs_up(
    num_steps: int, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step nothing else happens; after a capture an error says what to do."""

    def run(*, fails: bool) -> tuple[torch.Tensor, ...]:
        config = OffloadConfig(working_dtype="fp32", placement=Placement(activations=activations))
        model = Stack()
        with OffloadEngine(model, config, device="cpu") as engine:
            for _ in range(num_steps):
                torch.manual_seed(0)
                engine.backward(engine((2, 3)))
                engine.step()
            if fails:
                with pytest.raises(EngineStateError, match=r"create_graph=True: .*blocks\.2 .*compute this loss again"):
                    gradients_of(engine, model)
            found = tuple(each.detach().clone() for each in gradients_of(engine, model))
            assert engine.placed.graphs is None or (
                engine.placed.graphs.gave_up and not engine.placed.graphs.num_graphs()
            )
            engine.backward(engine((2, 3)))
            assert engine.step()
        return found

    found = run(fails=num_steps > 0)
    monkeypatch.setattr(facts_graphs, "device_types", set())
    assert all(map(torch.equal, found, run(fails=False)))


def test_gradients_of_streamed_weights_are_the_callers_own() -> None:
    """`torch.autograd.grad` gets them all, and they outlive the next replay."""
    found = []
    for placement in (Placement(), Placement(weights="ram"), Placement(weights="ram", activations="checkpoint")):
        model = Stack()
        with OffloadEngine(model, OffloadConfig(working_dtype="fp32", placement=placement), device="cpu") as engine:
            for _ in range(3):
                torch.manual_seed(0)
                engine.backward(engine((2, 3)))
                engine.step()
            torch.manual_seed(1)
            own = torch.autograd.grad(engine((2, 3)), list(model.parameters()))
            engine.backward(engine((2, 3)))
            engine.step()
            found.append([each.clone() for each in own])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_graph_hands_a_layers_gradients_to_the_engine_at_once(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, found = Gradients.take, list[bool]()

    def take(self: Gradients, *args: Any) -> bool:
        found.append(own(self, *args))
        return found[-1]

    monkeypatch.setattr(Gradients, "take", take)
    train(Stack(), [(2, 3)] * 3, placement)
    assert found == [True] * 3 * 2  # the first step is eager


def test_a_graph_copies_streamed_weights_from_where_the_parameters_are() -> None:
    model, found = Stack(), []
    block: Any = model.blocks[1]

    def look(*_: Any) -> None:
        (layer,) = cast(Any, engine.placed.graphs).weights[block]
        for weight in (block.up.weight.detach().clone(), torch.ones(16, 8)):
            flat = torch.zeros(layer.layer.numel)
            layer.copy_to(flat)
            view = next(each for each in layer.layer.views if each.parameter is block.up.weight)
            found.append(torch.equal(flat[view.elements].view(16, 8), weight))
            block.up.weight.data = torch.ones(16, 8)

    config = OffloadConfig(working_dtype="fp32", placement=Placement(weights="ram"))
    with OffloadEngine(model, config, device="cpu") as engine, torch.no_grad():
        block.register_forward_pre_hook(look)
        engine((2, 3))
    assert found == [True, True]


def in_a_hook_before(model: Stack, read: Callable[..., None]) -> None:
    model.blocks[1].register_forward_pre_hook(read)


def in_a_hook_after(model: Stack, read: Callable[..., None]) -> None:
    model.blocks[1].register_forward_hook(read, prepend=True)


def in_a_wrapped_forward(model: Stack, read: Callable[..., None]) -> None:
    block: Any = model.blocks[1]
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        read()
        return own(*args, **kwargs)

    block.forward = forward


def between_blocks(model: Stack, read: Callable[..., None]) -> None:
    model.after = {1: read}


def in_backward(model: Stack, read: Callable[..., None]) -> None:
    """Before and after the block's backward."""
    model.after = {at: lambda x: x.register_hook(read) for at in (0, 1)}


READERS = [in_a_hook_before, in_a_hook_after, in_a_wrapped_forward, between_blocks, in_backward]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_other_code_reads_the_newest_streamed_weights_beside_a_graph(
    reader: Callable[..., None], activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs read copies, and parameters are not bound to the ring's memory until other code reads them."""

    def run(placement: Placement) -> tuple[Trained, list[torch.Tensor]]:
        model, found = Stack(), []

        def read(*_: Any) -> None:
            found.append(cast(Any, model.blocks[1]).up.weight.detach().clone())

        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            for step in range(5):
                if step == 3:
                    reader(model, read)
                yield engine((2, 3))

        return train_by(model, forwards, placement), found

    trained, found = run(Placement(weights="ram", activations=activations))
    assert trained[2] == 6
    monkeypatch.setattr(facts_graphs, "device_types", set())
    expected, seen = run(Placement(activations=activations))
    assert trained[0] == expected[0]
    assert len(found) == len(seen) >= 2
    assert all(map(torch.equal, found, seen))


class Overwrites(torch.autograd.Function):
    """Doubles the gradient in its memory without its version counter, as kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradients[0].data.mul_(2)
        return gradients[0]


def keep(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    x.register_hook(kept.append)


def keep_a_view(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    x.register_hook(lambda gradient: kept.append(gradient[0]))


def keep_as_grad(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    x.retain_grad()
    kept.append(x)


def double(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    x.register_hook(lambda gradient: gradient.clone().mul_(2))


def double_in_place(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    def hook(gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    x.register_hook(hook)


def double_through_data(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    def hook(gradient: torch.Tensor) -> None:
        gradient.data.mul_(2)

    x.register_hook(hook)


def double_in_memory(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, Overwrites).apply(x))


def use_twice(x: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept.append(x.square().mean())


def use_again(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
    return x + 0.5 * x


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize(
    "change",
    [
        *(keep, keep_a_view, keep_as_grad, double, double_in_place, double_through_data, double_in_memory),
        *(use_twice, use_again),
    ],
)
def test_other_code_gets_gradients_between_graphs(
    change: Callable[..., torch.Tensor | None], activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's gradients are also written to the memory from which the next graph reads them."""

    def run() -> tuple[Trained, list[torch.Tensor]]:
        model, seen = Stack(), list[torch.Tensor]()

        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            for step in range(5):
                kept: list[torch.Tensor] = []
                if step >= 3:
                    model.after = dict.fromkeys((0, 1), partial(change, kept=kept))
                loss = engine((2, 3))
                yield loss if change is not use_twice else sum(kept, loss)
                seen.extend(cast(Any, each.grad) if change is keep_as_grad else each.detach() for each in kept)

        return train_by(model, forwards, Placement(activations=activations)), seen

    trained, seen = run()
    monkeypatch.setattr(facts_graphs, "device_types", set())
    expected, seen_eagerly = run()
    assert trained[2] == 6
    assert trained[0] == expected[0]
    assert all(torch.equal(trained[1][name], weight) for name, weight in expected[1].items())
    assert len(seen) == len(seen_eagerly) == 4 * (change in (keep, keep_a_view, keep_as_grad, use_twice))
    assert all(map(torch.equal, seen, seen_eagerly))


class HalfOutputs(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x.float()).bfloat16()


@pytest.mark.parametrize(("kind", "num"), [(Block, 3), (HalfOutputs, 5)])
def test_one_operation_copies_all_gradients_of_a_graph(
    kind: type[Block], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the engine, to autograd, and to the memory of the next graph; those of another dtype by another operation."""
    copies, operations = list[torch.Tensor](), list[Any]()
    copy, copy_all = offload_graphs._Static.copy, torch._foreach_copy_

    def run() -> Trained:
        def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
            for _ in range(4):
                copies.clear()
                operations.clear()
                yield engine((2, 3))

        return train_by(Stack(kind), forwards)

    def copied(static: Any, tensor: torch.Tensor) -> None:
        copies.append(tensor)
        copy(static, tensor)

    def copied_all(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        operations.append(into)
        copy_all(into, sources)

    monkeypatch.setattr(offload_graphs._Static, "copy", copied)
    monkeypatch.setattr(torch, "_foreach_copy_", copied_all)
    found = run()
    assert len(copies) == 3 + 1  # inputs of three blocks, and the gradient of the last one's output
    assert len(operations) == num  # the first block's input requires no gradient
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_streamed_weights_are_bound_to_ram_when_they_are_read(activations: Any) -> None:
    """After a step of graphs they stay unbound until then, but have the layout and device of the weights in RAM."""
    model, found = Stack(), []
    weight = cast(Any, model.blocks[1]).up.weight
    config = OffloadConfig(working_dtype="fp32", placement=Placement(weights="ram", activations=activations))
    with OffloadEngine(model, config, device="cpu") as engine:
        for step in range(6):
            engine.backward(engine((2, 3)))
            engine.step()
            weights, view = next(
                (state.weights, view)
                for state in engine.placed.layers.states
                for view in state.layer.views
                if view.parameter is weight
            )
            index, home = weights.layer.views.index(view), weights.home(view)
            assert (weights.bound[index].stride() == home.stride()) == (step == 0)  # the first step has eager blocks
            assert (weight.is_contiguous(), weight.stride(), weight.device) == (True, home.stride(), home.device)
            if step > 2:
                found.append(weight.detach().clone())
                assert torch.equal(found[-1], home)
                assert weights.bound[index].data_ptr() == home.data_ptr()
    assert not torch.equal(found[0], found[1])


def test_a_hook_reads_streamed_weights_in_a_backward_beside_the_engines() -> None:
    """There `torch.autograd.grad` of weights watches none."""
    model, found = Stack(), list[torch.Tensor]()
    block = cast(Any, model.blocks[1])
    config = OffloadConfig(working_dtype="fp32", placement=Placement(weights="ram"))
    with OffloadEngine(model, config, device="cpu") as engine:
        for _ in range(3):
            engine.backward(engine((2, 3)))
            engine.step()
        expected = block.down.weight.detach().clone()
        model.after = {0: lambda x: x.register_hook(lambda _: found.append(block.down.weight.detach().clone()))}
        loss = engine((2, 3))
        torch.autograd.grad(loss, [cast(Any, model.blocks[0]).down.weight])
        assert engine.placed.graphs is not None
        assert engine.placed.graphs.num_graphs() == 6
    assert torch.equal(*found, expected)


class Scales(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) * cast(torch.Tensor, self.shift)


@pytest.mark.parametrize(("kind", "error"), [(Scales, EngineStateError), (Block, None)])
def test_a_buffer_that_backward_needs_and_is_written_before_is_an_error(kind: type[Block], error: Any) -> None:
    with OffloadEngine(Stack(kind), OffloadConfig(working_dtype="fp32", placement=Placement()), device="cpu") as engine:
        for _ in range(3):
            engine.backward(engine((2, 3)))
            engine.step()
        loss = engine((2, 3))
        cast(Any, engine.module.blocks[1]).shift.add_(1.0)
        with nullcontext() if error is None else pytest.raises(error, match="that backward needs was written after"):
            engine.backward(loss)


def test_a_full_gpu_gives_up_graphs_before_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later shortage is not judged by a peak that had graphs in it."""
    model, forgot = Stack(), list[torch.device]()
    monkeypatch.setattr("offloadkit.engine.replanner.forget_peak", forgot.append)
    with OffloadEngine(model, OffloadConfig(working_dtype="fp32", placement=Placement()), device="cpu") as engine:
        graphs = engine.placed.graphs
        assert graphs is not None

        def step() -> None:
            engine.backward(engine((2, 3)))
            engine.step()

        for _ in range(3):
            step()
        assert graphs.num_graphs() == 6
        with monkeypatch.context() as full:
            full.setattr(model, "arguments", {"scale": _Full()})
            with pytest.raises(RepeatWindowError, match="CUDA graphs of blocks are not used any more"):
                step()
        for _ in range(3):
            step()
        assert graphs.num_graphs() == 0
        assert len(forgot) == 1
        assert engine.plan.placements == (Placement(),) * len(engine.plan.placements)


def test_a_short_batch_at_the_end_of_an_epoch_needs_its_own_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths are one kind too many, so blocks run eagerly while the graphs stay."""
    asked = []

    def missing(self: RunAgain, other_bytes: int, kept_bytes: int | None, scale: float) -> int:
        asked.append((kept_bytes, scale))
        return int(kept_bytes is None and scale > 0.5)

    monkeypatch.setattr(RunAgain, "missing_bytes", missing)
    whole = [(4, length) for length in range(3, 3 + MOST_KINDS)]
    *_, num_graphs = train(Stack(), [*whole, *whole, (2, whole[-1][1])])
    assert asked[-1] == (None, 0.5)
    assert num_graphs == 3 * 2 * MOST_KINDS


@pytest.mark.slow
def test_too_little_vram_is_found_in_a_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the encoder's graphs; blocks run eagerly for the rest of the forward, and are captured again twice."""
    asked = []

    def missing(self: RunAgain, other_bytes: int, kept_bytes: int | None, scale: float) -> int:
        asked.append(kept_bytes)
        return 3 << 20 if len(asked) % 6 == 0 else 0

    monkeypatch.setattr(RunAgain, "missing_bytes", missing)
    data = batches("t5", 14)[::2]
    found = train(t5(), data, Placement(), working_dtype="bf16")
    assert found[2] == 0
    assert caplog.text.count("from now on, without CUDA graphs: graphs need 3 MiB more VRAM than is free") == 1
    assert_equals_eager(found, lambda: train(t5(), data, Placement(), working_dtype="bf16"), monkeypatch)


@pytest.mark.slow
def test_lengths_that_cannot_run_beside_graphs_run_eagerly_before_all_are_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def full(self: _Entry, tensors: Any) -> None:
        tried.append(self.block.name)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_Entry, "_warm_up", full)
    monkeypatch.setattr(offload_graphs, "FIRST_RUNS", 4)
    short, middle, long = data = [batches("llama", 1, length=length)[0] for length in (6, 9, 12)]
    data = [short, short, middle, middle, short, long, middle, *data, *data]  # memory grows for the long one
    found = train(llama(), data)
    assert found[2] == 2 * 2 * 3
    assert tried == ["model.layers.0"]
    assert "without CUDA graphs" not in caplog.text
    more = [batches("llama", 1, length=length)[0] for length in (7, 8, 10) for _ in range(6)]
    assert train(llama(), [*data, *more])[2] == 0
    assert len(tried) == 1 + MOST_CHANGES
    assert caplog.text.count("without CUDA graphs: the GPU was full while they were captured") == 1
    assert_equals_eager(found, lambda: train(llama(), data), monkeypatch)


def test_a_block_is_watched_in_its_first_run_before_graphs_take_vram(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = _FirstRun._watched, []

    def watched(self: _FirstRun) -> str | None:
        seen.append((self._block.name, self._block.graphs.has_begun))
        return own(self)

    monkeypatch.setattr(_FirstRun, "_watched", watched)
    train(Stack(), [(2, 3), (2, 3), (2, 4), (2, 4)])
    assert seen == [("blocks.0", False), ("blocks.1", False), ("blocks.2", False)]


def test_the_plan_follows_a_run_that_gave_up_its_graphs() -> None:
    data = batches("llama", 1)
    config = OffloadConfig(working_dtype="fp32", placement=Placement())
    with OffloadEngine(llama(), config, example=data[0], device="cpu") as engine:

        def step() -> None:
            engine.backward(engine(**data[0]).loss)
            engine.step()

        step()
        assert engine.plan.is_graphed
        graphs = engine.placed.graphs
        assert graphs is not None
        graphs.give_up("the VRAM did not suffice")
        step()
        assert not engine.plan.is_graphed


def two_steps(engine: OffloadEngine, batch: dict[str, torch.Tensor]) -> None:
    """Blocks are captured in the second step."""
    for _ in range(2):
        engine.backward(engine(**batch).loss)
        engine.step()


def test_graphs_that_are_dropped_before_their_backward_keep_their_memory_until_it_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the pool then waits for their last replays, before any memory of the pool leaves VRAM."""
    events: list[str] = []
    replay = BlockGraphs.replay
    monkeypatch.setattr(BlockGraphs, "replay", lambda *args: (events.append("replay"), replay(*args))[1])
    monkeypatch.setattr(RunAgain, "dropped", lambda pool: events.append("dropped"))
    data = batches("llama", 1)
    with OffloadEngine(llama(), OffloadConfig(working_dtype="fp32"), example=data[0], device="cpu") as engine:
        two_steps(engine, data[0])
        graphs = engine.placed.graphs
        assert graphs is not None
        loss = engine(**data[0]).loss
        graphs.run_first("new lengths do not fit")
        events.clear()
        engine.backward(loss)
        assert events == ["replay"] * 2 + ["dropped"] * 2


def test_a_full_gpu_frees_graphs_that_were_dropped_before_their_backward() -> None:
    """The window is repeated without graphs, whose memory eager blocks had beside them, and the plan does not move."""

    def full(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    data = batches("llama", 1)
    with OffloadEngine(llama(), OffloadConfig(working_dtype="fp32"), example=data[0], device="cpu") as engine:
        two_steps(engine, data[0])
        graphs = engine.placed.graphs
        assert graphs is not None
        output = engine(**data[0])
        graphs.run_first("new lengths do not fit")
        dropped = list(graphs._dropped)
        assert (len(dropped), graphs.num_graphs()) == (2, 0)
        output.loss.register_hook(full)
        with pytest.raises(RepeatWindowError, match="CUDA graphs of blocks are not used any more"):
            engine.backward(output.loss)
        assert (engine.telemetry.moves, graphs._dropped) == ([], [])
        assert not any(entry.num_graphs() for entry in dropped)


@pytest.mark.parametrize("moves", [True, False])
def test_a_plan_with_eager_blocks_drops_the_graphs(moves: bool) -> None:
    """Without a move too: of several ranks that give up graphs, one may have none, and would capture them later."""
    data = batches("llama", 1)
    config = OffloadConfig(working_dtype="fp32", placement=Placement())
    with OffloadEngine(llama(), config, example=data[0], device="cpu") as engine:
        two_steps(engine, data[0])
        graphs = engine.placed.graphs
        assert graphs is not None
        assert graphs.num_graphs() == 4
        if moves:
            engine.move(without_graphs(engine.plan))
        else:
            engine.replanner._plan_eager_blocks()
        assert graphs.num_graphs() == 0
        two_steps(engine, data[0])
        assert graphs.num_graphs() == 0


class _Full(float):
    def __mul__(self, other: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")
