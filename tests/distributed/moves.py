"""What ranks do in the tests of plans that move in mid-run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from offloadkit import hardware
from offloadkit.config import OffloadConfig, Placement
from offloadkit.device import host_memory
from offloadkit.distributed.ranks import Ranks
from offloadkit.engine import OffloadEngine
from offloadkit.errors import OffloadkitError, RepeatWindowError
from offloadkit.offload import shortage
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.planner import Plan
from offloadkit.planner import placed as placed_at
from offloadkit.planner.layout import possible
from tests.distributed.runs import CPU_STEP, RESIDENT, STEPS, STREAMED, model
from tests.models import tokens

NO_ROOM = "RAM is running out here"


def planned(made: nn.Module, config: OffloadConfig, where: Placement) -> Plan:
    """The plan with all layers there."""
    base = plan_of(made, flat_layers(made, config), config)
    return placed_at(base, [possible(where, layer) for layer in base.layers])


def fail(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def moving(
    micro_batches: int = 1,
    *,
    full: Collection[tuple[int, int]] = (),
    where: str = "forward",
    scarce: Collection[tuple[int, int]] = (),
    to: Placement = STREAMED,
    begins: Placement = RESIDENT,
    after_the_first: Callable[[OffloadEngine], None] | None = None,
    steps: int = STEPS,
    **config: Any,
) -> dict[str, Any]:
    """Train as `runs.train` does, and repeat a window that has to be repeated, as a loop of one's own would.

    Args:
        full: (rank, micro-batch that it begins, repeated ones counted too) at which that rank's GPU is full.
        where: "forward", "backward", or "exchange": where a layer's gradient leaves.
        scarce: (rank, step), counted from 0, at which that rank is short of RAM. The plan to move to is `to` then.
        after_the_first: called after the first step.

    Returns:
        "weights", the "moves" with their reasons, the "placements" in the end, the "steps" on record, the number of
        micro-batches "begun", and the "error" that ended training.
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

    batches, error = tokens(steps * micro_batches * size), ""
    open_bucket = Gradients._open

    def opens(self: Gradients, *args: Any) -> None:
        if where == "exchange" and self.layers.index(args[0]) == 1 and is_full():
            fail(batches[0])
        open_bucket(self, *args)

    plan = planned(made, options, begins)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setattr(Gradients, "_open", opens)
        if scarce:
            patch.setattr(shortage, "leaner", lambda plan, *_: placed_at(plan, [to] * len(plan.layers)))
        engine = OffloadEngine(made, options, device="cpu", plan=plan)
        made.blocks[0].register_forward_hook(in_forward)
        try:
            torch.manual_seed(rank)
            step = 0
            while step < steps:
                drawn = torch.get_rng_state()
                try:
                    for k in range(micro_batches):
                        state["begun"] += 1
                        state["armed"] = True
                        engine.backward(engine(batches[(step * micro_batches + k) * size + rank]))
                        if (rank, step) in scarce:
                            engine._ram_watch._poll.warning = NO_ROOM
                        engine.step()
                except RepeatWindowError:
                    torch.set_rng_state(drawn)
                    continue
                step += 1
                if step == 1 and after_the_first is not None:
                    after_the_first(engine)
            engine.synchronize()
        except OffloadkitError as raised:
            error = f"{type(raised).__name__}: {raised}"
            import traceback; traceback.print_exc()
        is_open, plan = engine._open, engine.plan
        moves = [move.why for move in engine.telemetry.moves]
        with warnings.catch_warnings():
            engine.close()
        return {
            "weights": {name: parameter.detach().clone() for name, parameter in made.named_parameters()},
            "moves": moves,
            "placements": plan.placements,
            "steps": len(engine.telemetry.records),
            "begun": state["begun"] + 1,
            "error": error,
            "is_open": is_open,
        }


def moves_apart(how: str) -> dict[str, Any]:
    """Rank 1 does something else than rank 0 when the user moves the plan after the first step."""
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
            if rank == 0 or how != "alone":
                engine.move(to)

    return moving(after_the_first=move, begins=CPU_STEP)


def no_memory(*_: Any) -> Any:
    raise OffloadkitError("no RAM at all")


def with_less_free(plan: Plan, free: int) -> tuple[int, ...]:
    """By rank: the VRAM that a plan takes which is made where rank 1's GPU has `free` bytes less than it takes."""
    group = Ranks(torch.device("cpu"))
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
