"""Functions run by the ranks in tests of plans that move in mid-run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.device import host_memory
from offloadkit.distributed import machine
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, OffloadkitError, RankError, RepeatWindowError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import LOADED_LATER_BYTES, NCCL_BYTES
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.offload import rate_watch, shortage, states
from offloadkit.offload.gradient_buffers import Buckets
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import Plan, layout
from offloadkit.planner import placed as placed_at
from offloadkit.planner.layout import possible
from offloadkit.planner.seconds import StepModel
from tests.distributed.runs import CPU_STEP, RESIDENT, STEPS, STREAMED, model
from tests.models import TinyLM, tokens

NO_ROOM = "RAM is running out here"


def planned(made: nn.Module, config: OffloadConfig, where: Placement) -> Plan:
    """The plan with all layers at `where`, as far as each layer allows it."""
    base = plan_of(made, flat_layers(made, config), config)
    return placed_at(base, [possible(where, layer) for layer in base.layers])


def fail(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def is_open(engine: OffloadEngine) -> bool:
    """Whether the engine has not closed itself."""
    try:
        engine.drop_gradients()
    except EngineStateError:
        return False
    return True


def moving(
    micro_batches: int = 1,
    *,
    full: Collection[tuple[int, int]] = (),
    where: str = "forward",
    scarce: Collection[tuple[int, int]] = (),
    to: Placement | None = None,
    begins: Placement = RESIDENT,
    after_the_first: Callable[[OffloadEngine], None] | None = None,
    steps: int = STEPS,
    device: str = "cpu",
    graphed: Collection[int] = (),
    **config: Any,
) -> dict[str, Any]:
    """Train like `runs.train`, and repeat a window when asked to, as a bare loop would.

    Args:
        full: (rank, micro-batch) pairs where the rank's GPU is full; repeated micro-batches count too.
        where: "forward", "backward", or "exchange", when a layer's gradient is sent.
        scarce: (rank, step), from 0, where the rank is short of RAM.
        to: the plan to move to; None: a leaner one.
        after_the_first: called after the first step.
        device: "cuda": the current device.
        graphed: ranks whose blocks run as graphs, which a full GPU gives up before a plan moves.

    Returns:
        "weights", the reasons of the "moves", the final "placements", the number of "steps" recorded and of
        micro-batches "begun", the "error" that ended training, and for each move whether activations were "alive".
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    made = model(rank, dropout=0.2)
    options = OffloadConfig(
        gradient_accumulation=micro_batches, **{"learning_rate": 1e-2, "max_grad_norm": 0.5, **config}
    )
    state = {"begun": -1, "armed": False}

    def is_full() -> bool:
        found = state["armed"] and (rank, state["begun"]) in full
        state["armed"] = state["armed"] and not found
        return bool(found)

    def in_forward(block: Any, args: Any, output: torch.Tensor) -> None:
        if where == "forward" and is_full():
            fail(output)
        if where == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: fail(gradient) if is_full() else None)

    on = hardware.indexed(torch.device(device))
    batches, error = tokens(steps * micro_batches * size, str(on)), ""
    seen, alive = list[StorageWeakRef](), list[bool]()
    own_open = Buckets.open

    def opens(self: Buckets, layer: Any, views: Any) -> None:
        if where == "exchange" and layer is engine.placed.gradients.layers[1] and is_full():
            fail(batches[0])
        own_open(self, layer, views)

    plan = planned(made, options, begins)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(Buckets, "open", opens)
        patch.setattr(facts_graphs, "device_types", {device} if rank in graphed else set())
        if to is not None:
            patch.setattr(shortage, "leaner", lambda plan, *_: placed_at(plan, [to] * len(plan.layers)))
        engine = OffloadEngine(made, options, device=on, plan=plan)
        made.blocks[0].register_forward_hook(in_forward)
        made.norm.register_forward_hook(lambda norm, args, _: seen.append(StorageWeakRef(args[0].untyped_storage())))
        move = engine.replanner.move

        def moves(plan: Plan, why: str) -> None:
            alive.append(any(not each.expired() for each in seen))
            move(plan, why)

        patch.setattr(engine.replanner, "move", moves)
        try:
            torch.manual_seed(rank)
            step = 0
            while step < steps:
                drawn = random_states()
                try:
                    for k in range(micro_batches):
                        state["begun"] += 1
                        state["armed"] = True
                        loss = engine(batches[(step * micro_batches + k) * size + rank])
                        engine.backward(1 * loss)  # which leaves `loss` to the engine
                        if (rank, step) in scarce:
                            engine.ram_watch.poll.warning = NO_ROOM
                        engine.step()
                except RepeatWindowError:
                    set_random_states(drawn)
                    continue
                step += 1
                if step == 1 and after_the_first is not None:
                    after_the_first(engine)
            engine.synchronize()
        except OffloadkitError as raised:
            error = f"{type(raised).__name__}: {raised}"
        plan, open_still = engine.plan, is_open(engine)
        moves = [move.why for move in engine.telemetry.moves]
        engine.close()
        return {
            "weights": {name: parameter.detach().cpu().clone() for name, parameter in made.named_parameters()},
            "moves": moves,
            "placements": plan.placements,
            "steps": len(engine.telemetry.records),
            "begun": state["begun"] + 1,
            "error": error,
            "alive": alive,
            "is_open": open_still,
        }


def evaluating(
    full: Collection[tuple[int, int]] = (),
    *,
    together: bool = True,
    begins: Placement = RESIDENT,
    to: Placement | None = None,
    is_open: bool = False,
    nested: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Train a step, evaluate twice with random numbers, and train another step.

    Args:
        full: (rank, evaluation) pairs where the rank's GPU is full once; a repeated evaluation counts too.
        to: the plan to move to; None: a leaner one.
        is_open: the evaluations are inside an accumulation window.
        nested: they run inside another evaluation, as a Trainer's that generates.

    Returns:
        As `moving`, and the results of the evaluations that ended well as "evaluated", of all that began as "begun".
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    made = model(rank, dropout=0.2)
    options = OffloadConfig(learning_rate=1e-2, gradient_accumulation=1 + is_open, **config)
    batches, begun, evaluated, errors = tokens(3 * size), list[int](), list[float](), list[str]()

    def in_forward(block: Any, args: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            begun.append(len(begun))
            if (rank, begun[-1]) in full:
                fail(output)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if to is not None:
            patch.setattr(shortage, "leaner", lambda plan, *_: placed_at(plan, [to] * len(plan.layers)))
        with OffloadEngine(made, options, device="cpu", plan=planned(made, options, begins)) as engine:
            made.blocks[0].register_forward_hook(in_forward)
            for number in range(2):
                torch.manual_seed(rank)
                engine.backward(engine(batches[number * size + rank]))
                engine.step()
                for seed in range(2 if number == 0 else 0):
                    engine.synchronize()
                    torch.manual_seed(seed)
                    try:
                        with torch.no_grad():  # as a Trainer does: around the engine's own recovery
                            batch = batches[2 * size + rank]
                            run = partial(engine.run_eval, partial(engine, batch), together=together)
                            loss = engine.run_eval(run, together=together) if nested else run()
                            evaluated.append(float(loss))
                    except OffloadkitError as raised:
                        errors.append(f"{type(raised).__name__}: {raised}")
            engine.synchronize()
            return {
                "weights": {name: parameter.detach().clone() for name, parameter in made.named_parameters()},
                "moves": [move.why for move in engine.telemetry.moves],
                "placements": engine.plan.placements,
                "steps": len(engine.telemetry.records),
                "error": "; ".join(errors),
                "evaluated": evaluated,
                "begun": len(begun),
            }


def does_not_connect(ranks: Group, most_ctas: int = 0) -> None:
    """`Group.connect` when NCCL has no room on rank 1."""
    if dist.get_rank():
        raise RankError("connecting the GPUs failed")
    while ranks.lost() is None:  # until this rank knows
        time.sleep(0.01)
    ranks.agree(np.array([most_ctas]))


def moves_apart(how: str) -> dict[str, Any]:
    """Rank 1 deviates from rank 0 while the user moves the plan after the first step."""
    rank = dist.get_rank()

    def move(engine: OffloadEngine) -> None:
        to = placed_at(engine.plan, [STREAMED] * len(engine.plan.layers))
        with pytest.MonkeyPatch.context() as patch:
            if rank and how == "fails":
                patch.setattr(host_memory, "allocate", no_memory)
            if rank and how == "window":
                engine.backward(engine(tokens(1)[0]))
            elif how == "window":
                engine.backward(engine(tokens(1)[0]))
                engine.drop_gradients()
            if how == "connects":
                patch.setattr(Group, "connect", does_not_connect)
            if how == "ends":
                engine.synchronize()
            if rank and how == "ends":
                raise OffloadkitError("no move here")
            engine.move(to)

    return moving(after_the_first=move, begins=CPU_STEP)


def late_after_a_move() -> dict[str, Any]:
    """Weights move to shared RAM after the first step; then rank 1's CPU steps every layer late."""
    step = states.optimizer_step

    def late(*args: Any) -> None:
        time.sleep(0.03)
        step(*args)

    with pytest.MonkeyPatch.context() as patch:

        def move(engine: OffloadEngine) -> None:
            engine.move(placed_at(engine.plan, [STREAMED] * len(engine.plan.layers)))
            if dist.get_rank():
                patch.setattr(states, "optimizer_step", late)

        return moving(after_the_first=move, begins=CPU_STEP)


class Measured(Telemetry):
    """Copies take the planned seconds, and the CPU step `factor` times the planned seconds."""

    engine: OffloadEngine
    factor: float

    def add(self, record: StepRecord) -> None:
        plan, placements = self.engine.plan, self.engine.placed.layers.assigned
        assert plan.basis.work is not None
        assert plan.basis.hardware is not None
        rates = StepModel(plan.layers, plan.basis.work, plan.basis.hardware, plan.accumulation).rates(placements)
        if "CPU step" in rates:
            rates["CPU step"] /= self.factor
        names = {"h2d": "H2D", "d2h": "D2H", "cpu_step": "CPU step"}
        took = {phase: record.moved[phase] / rates[name] for phase, name in names.items() if name in rates}
        super().add(replace(record, seconds=record.seconds | took))


def measured(card: Hardware, slow: float) -> dict[str, Any]:
    """Train by a plan for `card`; on rank 1 the CPU step takes `slow` times the planned seconds."""
    rates = {each.name: getattr(card, each.name) / 1e5 for each in fields(card) if each.name.endswith("_per_second")}
    here = replace(card, **rates)  # a tiny model's copies take as long as a large model's on the card
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(machine, "measure", lambda *_, **__: here)
        patch.setattr(machine, "is_measured", lambda *_: True)
        patch.setattr(machine, "cores_of_rank", lambda ranks: (ranks.size, 4))
        patch.setattr(StepBalancer, "correct", lambda *_: None)
        patch.setattr(rate_watch, "WARM_UP", 1)
        patch.setattr(rate_watch, "NUM_STEPS", 2)
        patch.setattr(layout, "STEP_CHUNK", 4096)  # otherwise a tiny layer's buffers would be larger than its states
        torch.manual_seed(0)
        made, batches = TinyLM(width=32, hidden=255, depth=6), tokens(1)
        del made.unused
        telemetry = Measured()
        vram = here.vram_context_bytes + LOADED_LATER_BYTES + layout.ALLOCATOR_BYTES + NCCL_BYTES + (1 << 20)
        config = OffloadConfig(learning_rate=1e-2, vram=vram, ram="8GiB")
        with OffloadEngine(made, config, device="cpu", example=batches[0], telemetry=telemetry) as engine:
            telemetry.engine, telemetry.factor = engine, slow if dist.get_rank() else 1.0
            begins = engine.plan.placements
            for _ in range(6):
                engine.backward(engine(batches[0]))
                engine.step()
            engine.synchronize()
            return {
                "weights": {name: parameter.detach().clone() for name, parameter in made.named_parameters()},
                "moves": [(move.step, move.why) for move in telemetry.moves],
                "by the CPU": [sum(where.step == "cpu" for where in each) for each in (begins, engine.plan.placements)],
                "placements": engine.plan.placements,
                "steps": len(telemetry.records),
                "error": "",
            }


def no_memory(*_: Any) -> Any:
    raise OffloadkitError("no RAM at all")


def with_less_free(plan: Plan, free: int) -> tuple[int, ...]:
    """(VRAM of the plan, VRAM of its replacement) if rank r's GPU has r * `free` bytes less than the plan needs."""
    group = Group(torch.device("cpu"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            total = plan.total_bytes("vram")
            there = total - free * group.rank
            patch.setattr(hardware, "vram_bytes", lambda _: (there, 1 << 40))
            patch.setattr(hardware, "vram_context_bytes", lambda _: 0)
            found = shortage.within_free_vram(plan, torch.device("cuda"), 0, group)
        return total, found.total_bytes("vram")
    finally:
        group.close()
