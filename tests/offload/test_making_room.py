"""Memory runs out in mid-run: the engine continues with a leaner plan, and the numbers equal a run that had room."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offloadkit.device import host_memory, process_memory
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OffloadkitError, OutOfRamError, OutOfVramError, RepeatWindowError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import model as placed_model
from offloadkit.offload import shortage
from offloadkit.offload.gradient_buffers import NormSums
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.states import LayerState
from offloadkit.planner import Plan
from tests.models import Residual, TinyLM, assert_equal, numbers, tokens
from tests.offload.test_move import IN_VRAM, lm, planned, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Hungry(nn.Module):
    """Raises an OOM error in some calls, counted from 1. It has dropout and running means."""

    def __init__(self, *full_at: int, in_backward: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Residual(9, 31, dropout=0.2) for _ in range(3)])
        self.norm: nn.Module = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 1)
        self.full_at, self.in_backward, self.num_calls = full_at, in_backward, 0
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        for block in self.blocks:
            x = block(x)
            self.seen.append(StorageWeakRef(x.untyped_storage()))
        x = self.norm(x * (1 + random.random() + np.random.random()))  # also draws from Python's and numpy's generators
        cycle: list[Any] = [x]
        cycle.append(cycle)
        loss = self.head(x).float().pow(2).mean()
        if self.num_calls in self.full_at and self.in_backward:
            x.register_hook(fail)
        elif self.num_calls in self.full_at:
            fail(loss)
        return {"loss": loss}


def fail(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def rows(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 9, generator=generator) for _ in range(num)]


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def in_a_bare_loop(model: Hungry, plan: Plan | None = None) -> tuple[dict[str, torch.Tensor], OffloadEngine]:
    """Four windows of two micro-batches; a window is repeated when the engine asks for it."""
    config = OffloadConfig(learning_rate=1e-2, gradient_accumulation=2)
    with OffloadEngine(model, config, device="cpu", plan=plan) as engine:
        engine.train()
        seeded()
        given, at = rows(8), 0
        while at < 8:
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            means = [buffer.clone() for buffer in model.buffers()]
            try:
                for batch in given[at : at + 2]:
                    engine.backward(engine(batch)["loss"])
                    engine.step()
                at += 2
            except RepeatWindowError:
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
                for buffer, mean in zip(model.buffers(), means, strict=True):
                    buffer.copy_(mean)
        return numbers(engine), engine


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_bare_loop_repeats_the_window_and_the_numbers_are_those_of_a_run_with_room(in_backward: bool) -> None:
    there, config = Hungry(), OffloadConfig(gradient_accumulation=2)
    expected, _ = in_a_bare_loop(there, planned(there, config, IN_VRAM))
    model = Hungry(4, 5, in_backward=in_backward)
    with pytest.warns(
        RuntimeWarning, match=r"the GPU's memory was full after step 1: the plan has moved in .*\(VRAM .* ->"
    ):
        found, engine = in_a_bare_loop(model, planned(model, config, IN_VRAM))
    assert_equal(expected, found, "repeated")
    assert [move.why for move in engine.telemetry.moves] == ["the GPU's memory was full"] * 2
    assert engine.telemetry.moves[0].after == engine.telemetry.moves[1].before
    assert engine.plan.total_bytes("vram") == engine.telemetry.moves[1].after["vram"]
    assert [record.step for record in engine.telemetry.records] == [1, 2, 3, 4]


def test_an_engine_that_had_to_close_says_so_through_an_outer_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer's step wraps the engine's own context."""
    model, config = Hungry(1), OffloadConfig(gradient_accumulation=2)
    engine = OffloadEngine(model, config, device="cpu", plan=planned(model, config, IN_VRAM))
    allocate = host_memory.allocate

    def full(sizes: Any, device: Any, what: str) -> Any:
        if what.startswith("the buffers"):
            raise OffloadkitError("no RAM")
        return allocate(sizes, device, what)

    monkeypatch.setattr(host_memory, "allocate", full)
    with pytest.raises(OutOfVramError, match="the engine is closed"), engine.recover_from_oom():
        engine(rows(1)[0])


def test_the_error_ends_training_when_no_leaner_plan_is_left() -> None:
    model = Hungry(*range(1, 100))
    said = "repeat this window, from its first micro-batch"
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while said.startswith("repeat"):
            with pytest.raises(OutOfVramError, match=said + "|Use a smaller micro-batch") as raised:
                engine(rows(1)[0])
            said = said if isinstance(raised.value, RepeatWindowError) else ""
    assert "Use a smaller micro-batch" in str(raised.value)
    assert {each.activations for each in engine.plan.placements[:-1]} == {"offload"}
    assert len(engine.telemetry.moves) == model.num_calls - 1 > 1


@pytest.mark.parametrize(("in_backward", "dtype"), [(False, "fp32"), (True, "fp32"), (True, "fp16")])
def test_nothing_of_the_failed_window_is_alive_while_layers_move(
    in_backward: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller keeps the model's outputs, activations are in a cycle, and the module that fails has hooks: a closure
    of torch's has its arguments.
    """
    model = Hungry(*[2][:in_backward], in_backward=in_backward)
    model.norm = nn.LayerNorm(9)  # BatchNorm has no fp16 on the CPU
    model.head.register_forward_hook(lambda *_: fail(x) if model.num_calls == 2 and not in_backward else None)
    config = OffloadConfig(gradient_accumulation=2, working_dtype=dtype)
    alive: list[bool] = []
    with OffloadEngine(model, config, device="cpu") as engine:
        x = rows(1)[0].to(next(model.parameters()).dtype)
        engine.backward(engine(x)["loss"])
        engine.step()
        move = engine.replanner.move

        def observed(*args: Any) -> None:
            alive.append(not all(each.expired() for each in model.seen))
            move(*args)

        monkeypatch.setattr(engine.replanner, "move", observed)

        def micro_batch() -> None:
            output = engine(x)
            engine.backward(2 * output["loss"])

        gc.disable()
        try:
            with pytest.warns(RuntimeWarning), pytest.raises(RepeatWindowError):
                micro_batch()
        finally:
            gc.enable()
    assert alive == [False]


def test_a_full_gpu_is_recovered_from_whatever_tensors_the_program_has() -> None:
    """Autograd raises if it is asked for the node of such a view. The program turns gradients off for backward."""
    base = torch.zeros(4, requires_grad=True) * 1
    part, _ = base.split(2)
    base.mul_(2)
    with pytest.raises(RuntimeError, match="is a view"):
        part.grad_fn  # noqa: B018
    with OffloadEngine(Hungry(1, in_backward=True), OffloadConfig(), device="cpu") as engine:
        loss = engine(rows(1)[0])["loss"]
        with torch.no_grad(), pytest.warns(RuntimeWarning), pytest.raises(RepeatWindowError):
            engine.backward(loss)
        engine.backward(engine(rows(1)[0])["loss"])
        engine.step()


class Evaluated(Hungry):
    """Raises an OOM error in evaluation while any block has its weights in VRAM."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        if not torch.is_grad_enabled() and self.is_full():
            fail(x)
        return found

    def is_full(self) -> bool:
        return any(where.states == "vram" for where in self.engine.plan.placements)


@pytest.mark.parametrize("training", [False, True])
def test_where_an_evaluation_finds_the_gpu_full_less_is_kept_in_vram_and_it_is_repeated(training: bool) -> None:
    """In training mode it draws random numbers and changes running means."""
    config, found = OffloadConfig(), []
    for placement in (Placement("ram"), IN_VRAM):
        model = Evaluated()
        with OffloadEngine(model, config, device="cpu", plan=planned(model, config, placement)) as model.engine:
            seeded()
            model.engine.backward(model.engine(rows(1)[0])["loss"])
            model.engine.step()
            model.train(training)
            if placement == IN_VRAM:
                with pytest.warns(RuntimeWarning, match="full in an evaluation after step 1: the plan has moved"):
                    losses = evaluated(model)
                assert model.num_calls == 1 + 3 + len(model.engine.telemetry.moves)
            else:
                losses = evaluated(model)
            found.append(numbers(model.engine) | {"losses": losses})
    assert_equal(*found, "evaluated")


@torch.no_grad()
def evaluated(model: Evaluated) -> torch.Tensor:
    return torch.stack([model.engine(batch)["loss"] for batch in rows(3)])


def test_where_an_evaluation_finds_the_gpu_full_and_nothing_can_move_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Evaluated()
    monkeypatch.setattr(model, "is_full", lambda: True)
    plan = planned(model, OffloadConfig(), IN_VRAM)
    with OffloadEngine(model, OffloadConfig(), device="cpu", plan=plan) as model.engine:
        under_way = r"evaluate and generate after the step\(\) that ends it"
        loss = model.engine(rows(1)[0])["loss"]
        with pytest.raises(OutOfVramError, match=under_way):  # backward needs the weights that this graph holds
            evaluated(model)
        model.engine.backward(loss)
        with pytest.raises(OutOfVramError, match=under_way) as raised:  # like a Trainer, around the engine's own
            model.engine.run_eval(lambda: evaluated(model))
        assert str(raised.value).count("window is open") == 1
        assert model.engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(OutOfVramError, match="Use a smaller micro-batch and more"):
                evaluated(model)
        moves = model.engine.telemetry.moves
        assert all(move.after["vram"] < move.before["vram"] for move in moves)
        assert moves
        model.engine.backward(model.engine(rows(1)[0])["loss"])
        assert model.engine.step()


def test_a_move_that_fails_keeps_the_error_of_the_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Hungry(2)
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        kept: list[torch.Tensor] = []
        keeps = model.blocks[0].register_forward_pre_hook(lambda *_: kept.append(model.blocks[0].up.weight.data))
        engine.backward(engine(rows(1)[0])["loss"])
        engine.step()
        keeps.remove()
        monkeypatch.setattr(shortage, "leaner", lambda plan, *args: planned(model, OffloadConfig(), Placement("ram")))
        with pytest.raises(OutOfVramError, match=r"Planned were .*leaner plan failed: .*shares its memory") as raised:
            engine(rows(1)[0])
        assert type(raised.value) is OutOfVramError
        kept.clear()
        engine.backward(engine(rows(1)[0])["loss"])
        engine.step()


def test_where_ram_runs_out_states_go_to_the_disk_after_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for short in (False, True):
        torch.manual_seed(0)
        model = TinyLM(width=17, hidden=67, depth=12)
        with OffloadEngine(model, OffloadConfig(disk=str(tmp_path)), device="cpu") as engine:
            for at, batch in enumerate(tokens(3)):
                engine.backward(engine(batch))
                if short and at == 1:
                    engine.ram_watch.poll.warning = "RAM is running out"
                    move, poll = engine.placed.move, engine.ram_watch.poll
                    late = lambda *args, move=move, poll=poll: (setattr(poll, "warning", "still"), move(*args))  # noqa: E731
                    monkeypatch.setattr(engine.placed, "move", late)
                    with pytest.warns(RuntimeWarning, match=r"RAM was running out after step 2: .*RAM .* -> .*, disk "):
                        assert engine.step()
                    engine.ram_watch.check()
                else:
                    engine.step()
            assert (engine.plan.total_bytes("disk") > 0) == short
            found.append(numbers(engine))
    assert_equal(*found, "moved")


TAKES = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * (64 << 20))
    print(len(held), flush=True)
"""
"""A process that takes 64 MiB per input line, and releases all of it at its end."""


@contextmanager
def taken_by_another_process(engine: OffloadEngine) -> Iterator[None]:
    """While it is open, another process takes RAM until the watch sees less than its floor. The floor is raised for the
    test, because filling a large machine would take too much."""
    floor = hardware.ram_available_bytes() - (128 << 20)
    engine.ram_watch.poll.floor_bytes, before = floor, engine.ram_watch.poll.floor_bytes
    with subprocess.Popen([sys.executable, "-c", TAKES], stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for _ in range(32):  # other processes may release some meanwhile
            other.stdin.write("more\n")
            assert other.stdout.readline()
            if hardware.ram_available_bytes() < floor - (64 << 20):
                break
        yield
    engine.ram_watch.poll.floor_bytes = before


def joined_group(own: Path) -> Path | None:
    """A new control group (v2) with a `memory.high`, joined by this process; None if the system allows none.

    own: the current group. The new group is its sibling, because a group with processes has no child groups, except for
    the root.
    """
    folder = own if own == hardware.CGROUP else own.parent
    try:
        if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
            return None
        group = folder / f"offloadkit-test-{os.getpid()}"
        group.mkdir()
    except OSError:
        return None
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        group.rmdir()
        return None
    return group


@contextmanager
def squeezed(engine: OffloadEngine) -> Iterator[None]:
    """While it is open, RAM is under pressure: by the system's `memory.high` if possible, otherwise by another
    process."""
    own = hardware.cgroup_dirs("memory")[0]
    group = joined_group(own)
    if group is None:
        with taken_by_another_process(engine):
            yield
        return
    try:
        (group / "memory.high").write_text(str(int((group / "memory.current").read_text()) + (128 << 20)))
        yield
    finally:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.slow
def test_ram_that_is_really_squeezed_moves_the_run_to_the_disk_with_the_bits_of_one_that_was_there_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortage, "POLL_SECONDS", 0.01)
    config = OffloadConfig(disk=str(tmp_path), gradient_accumulation=2, learning_rate=1e-2, working_dtype="bf16")

    def trained(plan: Plan | None) -> tuple[dict[str, torch.Tensor], OffloadEngine]:
        torch.manual_seed(0)
        model = TinyLM(width=17, hidden=67, depth=12, dropout=0.2)
        with OffloadEngine(model, config, device="cpu", plan=plan) as engine:
            for at, batch in enumerate(tokens(8)):
                engine.backward(engine(batch))
                if plan is None and at == 3:
                    with squeezed(engine):
                        deadline = time.monotonic() + 30
                        while engine.ram_watch.poll.warning is None:
                            assert time.monotonic() < deadline, "no process sees the pressure"
                            time.sleep(0.01)
                        with pytest.warns(RuntimeWarning, match=r"RAM was running out after step 2: .*, disk "):
                            assert engine.step()
                    engine.ram_watch.warning()  # from the time before
                else:
                    engine.step()
            return numbers(engine), engine

    found, engine = trained(None)
    move = engine.telemetry.moves[0]  # what else runs on the machine may cause further moves
    assert move.after["ram"] < move.before["ram"]
    assert move.after["disk"] > move.before["disk"] == 0
    expected, _ = trained(engine.plan)
    assert_equal(expected, found, "squeezed")


def test_where_the_move_out_of_ram_fails_training_stops_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OffloadkitError("no RAM at all")

    with OffloadEngine(
        TinyLM(width=17, hidden=67, depth=12), OffloadConfig(disk=str(tmp_path)), device="cpu"
    ) as engine:
        engine.backward(engine(tokens(1)[0]))
        engine.ram_watch.poll.warning = "RAM is running out"
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "allocate", full)
            with pytest.raises(OutOfRamError, match=r"RAM is running out. The move .* failed: "):
                engine.step()


@pytest.mark.parametrize(
    ("owner", "name", "full_at"),
    [
        (LayerState, "take_parameters", (3, 4)),
        (placed_model, "move_rest", (1, 2)),
        (NormSums, "__init__", (1, 2)),
    ],
)
def test_a_gpu_that_is_full_while_the_engine_is_built_makes_the_plan_leaner(
    owner: Any, name: str, full_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fp32 model trained in bf16: bits beyond bf16 are in the optimizer states of the layers that move."""
    config, found, real = OffloadConfig(learning_rate=1e-2, working_dtype="bf16"), [], getattr(owner, name)
    for is_full in (False, True):
        calls: list[int] = []

        def fails(*args: Any, calls: list[int] = calls, is_full: bool = is_full, **options: Any) -> Any:
            calls.append(1)
            if is_full and len(calls) in full_at:
                fail(torch.empty(0))
            return real(*args, **options)

        monkeypatch.setattr(owner, name, fails)
        model = lm()
        plan = planned(model, config, IN_VRAM)
        told = pytest.warns(RuntimeWarning, match="the GPU was full while the engine was built: the plan is leaner")
        with told if is_full else nullcontext():
            engine = OffloadEngine(model, config, device="cpu", plan=plan)
        with engine:
            assert engine.plan.placements == engine.placed.layers.placements
            assert (engine.plan.total_bytes("vram") < 0.8 * plan.total_bytes("vram")) == is_full
            train(engine, tokens(2))
            found.append(numbers(engine))
    assert_equal(*found, name)


def test_a_gpu_that_is_full_again_while_the_layers_move_leaves_a_plan_that_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers find no room, and then neither does one layer on its way to a leaner plan."""
    model, config = lm(), OffloadConfig()
    plan, left = planned(model, config, IN_VRAM), {"arrange": 1, "moved": 1}

    def fails(real: Any, name: str) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            left[name] -= 1
            if left[name] == 0:
                fail(torch.empty(0))
            return real(*args, **options)

        return run

    monkeypatch.setattr(Gradients, "arrange", fails(Gradients.arrange, "arrange"))
    monkeypatch.setattr(LayerState, "moved", fails(LayerState.moved, "moved"))
    with pytest.warns(RuntimeWarning, match="the plan is leaner"):
        engine = OffloadEngine(model, config, device="cpu", plan=plan)
    with engine:
        assert engine.plan.placements == engine.placed.layers.placements
        train(engine, tokens(1))


@pytest.mark.parametrize(
    ("owner", "name", "number", "error"),
    [
        (LayerState, "take_parameters", 3, OffloadkitError("no RAM")),
        (placed_model, "move_rest", 1, KeyboardInterrupt()),
        (NormSums, "__init__", 1, OffloadkitError("no RAM")),
    ],
)
@pytest.mark.parametrize(("placement", "dtype"), [(Placement("ram", states="disk"), "bf16"), (IN_VRAM, "fp16")])
def test_an_engine_that_cannot_be_built_leaves_the_model_as_it_was(
    owner: Any,
    name: str,
    number: int,
    error: BaseException,
    placement: Placement,
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second attempt trains the same numbers. The error may be kept meanwhile, as in notebooks."""
    config, real, calls = OffloadConfig(working_dtype=dtype), getattr(owner, name), list[int]()

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*args, **options)

    model = lm()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(type(error)) as kept:
        OffloadEngine(model, config, device="cpu", plan=planned(model, config, placement))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_equal(before, dict(model.state_dict()), name)
    assert not any(value for module in model.modules() for key, value in vars(module).items() if "_hooks" in key)
    assert kept.value is error


@pytest.mark.parametrize("free", [1 << 40, 1 << 20])
def test_less_free_vram_than_was_planned_with_begins_leaner(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken some since planning."""
    monkeypatch.setattr(hardware, "vram_bytes", lambda device: (free, 1 << 40))
    monkeypatch.setattr(hardware, "vram_context_bytes", lambda device: 0)
    plan = planned(model := Hungry(), OffloadConfig(), IN_VRAM)
    found = shortage.within_free_vram(plan, torch.device("cuda"), 0)
    assert (found is plan) == (plan.total_bytes("vram") <= free)
    more = shortage.within_free_vram(plan, torch.device("cuda"), plan.total_bytes("vram"))
    assert more is plan
    assert model.num_calls == 0


def test_a_plan_that_takes_just_what_is_free_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(Hungry(), OffloadConfig(), IN_VRAM)
    monkeypatch.setattr(shortage, "TOLERANCE", 1)
    monkeypatch.setattr(hardware, "vram_context_bytes", lambda device: 0)
    for short in (0, 1):
        free = plan.total_bytes("vram") - short
        monkeypatch.setattr(hardware, "vram_bytes", lambda device, free=free: (free, 1 << 40))
        assert (shortage.within_free_vram(plan, torch.device("cuda"), 0) is plan) == (short == 0)


def test_a_plan_with_less_ram_takes_no_vram_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = planned(Hungry(), OffloadConfig(), Placement()), list[dict[str, int]]()
    monkeypatch.setattr(shortage, "leaner", lambda plan, short, budgets: asked.append(dict(budgets)))
    monkeypatch.setattr(hardware, "vram_bytes", lambda device: (300, 10_000))
    monkeypatch.setattr(process_memory, "peak_reserved_bytes", lambda device: 250)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 150)
    shortage.with_less_ram(plan, torch.device("cuda"))
    assert asked[-1]["vram"] == plan.total_bytes("vram") + 200


@pytest.mark.parametrize("num_on_host", [1, 2, 5])
def test_ranks_of_a_host_share_what_its_ram_is_short_of_and_what_is_left(
    num_on_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, asked = planned(Hungry(), OffloadConfig(), Placement()), list[dict[str, int]]()
    now, device = plan.total_bytes("ram"), torch.device("cpu")
    monkeypatch.setattr(Plan, "num_on_host", num_on_host)
    monkeypatch.setattr(shortage, "ram_floor", lambda: now // 3)
    monkeypatch.setattr(shortage, "leaner", lambda plan, short, budgets: asked.append(dict(budgets)))
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 0)
    shortage.with_less_ram(plan, device)
    assert asked[-1]["ram"] == now - max(now // 8, 2 * (now // 3) // num_on_host)
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 2 * now)
    shortage.with_less_vram(plan, device, torch.OutOfMemoryError("CUDA out of memory"), 0)
    assert asked[-1]["ram"] == now + (2 * now - now // 3) // num_on_host


def test_a_second_full_gpu_is_judged_by_the_peak_since_the_last_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first plan's peak would make the third plan far leaner than needed."""
    forgot: list[int] = []
    for module in ("engine", "replanner"):
        monkeypatch.setattr(f"offloadkit.engine.{module}.forget_peak", lambda _: forgot.append(len(forgot)))
    model = Hungry()
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        engine.move(planned(model, OffloadConfig(), Placement("ram")))
    assert forgot == [0, 1]
