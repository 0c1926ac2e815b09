"""Functions run by the ranks in tests of their plans."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from offloadkit.device import measure as measuring
from offloadkit.distributed import machine
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.engine.outline import plan_for
from offloadkit.errors import OffloadkitError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import Telemetry
from offloadkit.kernels import cpu
from tests.distributed.runs import model
from tests.models import TinyLM, tokens

CPU = torch.device("cpu")


def unlike(card: Hardware, *_: Any, **__: Any) -> Hardware:
    """`card` with slow copies on rank 1, and slow VRAM and launches on rank 0."""
    slow = {"h2d_bytes_per_second": 5e9} if dist.get_rank() else {"vram_bytes_per_second": 4e11, "launch_seconds": 1e-5}
    return replace(card, **slow, vram_free_bytes=card.vram_free_bytes >> dist.get_rank())  # type: ignore[arg-type]


def all_used(**options: Any) -> TinyLM:
    """A `TinyLM` without the parameter that gets no gradient."""
    made = TinyLM(**options)
    del made.unused
    return made


def counted(
    micro_batches: int, placement: Placement, exchange: str, **options: Any
) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Bytes that this rank's plan expects to receive in a step, and bytes received in each of three steps."""
    telemetry = Telemetry()
    run: dict[str, Any] = {"placement": placement, "gradient_accumulation": micro_batches, "exchange": exchange}
    config = OffloadConfig(working_dtype="bf16", **run)
    with OffloadEngine(all_used(**options), config, device="cpu", telemetry=telemetry) as engine:
        for batch in tokens(3 * micro_batches):
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
        return engine.plan.communicated, [record.received for record in telemetry.records]


def least_vram(card: Hardware, exchange: str) -> tuple[dict[str, int], list[dict[str, int]], dict[str, int]]:
    """Train by the plan with the least VRAM: returns `counted`'s results and the bytes of weights in RAM.

    "planned" and "taken" count all weights in RAM, "living" only weights whose home is RAM.
    """
    made, telemetry, batches = all_used(tied=False, depth=9, hidden=900), Telemetry(), tokens(6)
    run: dict[str, Any] = {"gradient_accumulation": 2, "exchange": exchange, "working_dtype": "bf16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure", partial(unlike, card))
        patch.setattr(machine, "is_measured", lambda *_: True)
        short = plan_for(made, OffloadConfig(vram="1GiB", **run), CPU, batches[0])
        assert short is not None
        config = OffloadConfig(vram=short.needs()["vram"], **run)
        with OffloadEngine(made, config, device="cpu", telemetry=telemetry, example=batches[0]) as engine:
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
            plan, states = engine.plan, engine.placed.states
            assert [state.placement for state in states] == list(plan.placements)
            living = [state.weights.own.nbytes for state in states if state.memory.weights is not None]
            copies = [state.flat.weights for state in states if state.flat.weights is not state.weights.own]
            weights = {
                "planned": plan.tiers["ram"]["working weights"],
                "taken": sum(living) + sum(copy.nbytes for copy in copies),
                "living": sum(living),
            }
            return plan.communicated, [record.received for record in telemetry.records], weights


def planned_together(card: Hardware, *, long: int = 0, **wishes: Any) -> dict[str, Any]:
    """A rank's plan and what it did. With `long`, rank 1's micro-batches are `long` times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure", partial(unlike, card))
        patch.setattr(machine, "is_measured", lambda *_: True)
        batches = tokens(2)
        if long and dist.get_rank():
            batches = [batch.repeat(1, long) for batch in batches]
        example = None if long else batches[0]
        with OffloadEngine(model(tied=False), OffloadConfig(**wishes), device="cpu", example=example) as engine:
            threads = cpu.num_threads()
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
            plan = engine.plan
            assert list(plan.layers) == [state.layer.shape() for state in engine.placed.states]
    return {
        "machine": plan.basis.hardware,
        "placements": plan.placements,
        "moves": [move.why for move in engine.telemetry.moves],
        "activations": plan.tiers["vram"].get("activations"),
        "num_gpus": plan.num_gpus,
        "ram": plan.budgets["ram"],
        "threads": (threads, cpu.num_threads()),
    }


def apart() -> str:
    """Only rank 1 has a plan to choose."""
    wishes: Any = {"vram": "40GiB"} if dist.get_rank() else {}
    try:
        OffloadEngine(model(), OffloadConfig(**wishes), device="cpu").close()
    except OffloadkitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told() -> list[Any]:
    """A broadcast from rank 1, and the error if rank 1 fails in it."""
    group = Group(CPU)
    try:
        found: list[Any] = [group.broadcast_from(lambda: dist.get_rank(), by=1)]
        try:
            group.broadcast_from(lambda: 1 // 0, by=1)
        except Exception as error:
            found.append(type(error).__name__)
        return found
    finally:
        group.close()


def measured(card: Hardware) -> tuple[Hardware, int, list[str]]:
    """The machine as measured together while only one rank knows its rates, and what a second call measures."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        asked: list[str] = []
        rates = {name: getattr(card, name) for name in measuring.RATES}
        patch.setattr(measuring, "machine_rates", lambda device, meet: asked.append(str(device)) or rates)
        patch.setattr(measuring, "own_rates", {})
        patch.setenv("XDG_CACHE_HOME", folder)
        group = Group(CPU)
        try:
            if dist.get_rank():
                measuring.measure(CPU, num_ranks=2)
                asked.clear()
            found = [machine.measured_together(group, CPU) for _ in range(2)]
        finally:
            group.close()
        known = machine.known_links(CPU, 2)
        assert found[0].link_bytes_per_second == found[1].link_bytes_per_second == known["link_bytes_per_second"]
        assert known["few_ctas_link_bytes_per_second"] == 0, "only NCCL has thread blocks"
        assert not measuring.is_measured(CPU, 1), "one rank alone has other rates"
        patch.setenv("NCCL_P2P_DISABLE", "1")
        assert machine.known_links(CPU, 2) == {}, "without peer access the link is another one"
        patch.delenv("NCCL_P2P_DISABLE")
        patch.setenv("NCCL_MAX_CTAS", "1")
        assert machine.known_links(CPU, 2) == {}, "with one thread block the link is another one"
        return found[0], int(np.log2(found[0].link_bytes_per_second)), asked


def bound(near: list[set[int]], own: set[int]) -> list[set[int]]:
    """Cores of this thread and of an older thread: while cores are shared, then afterwards.

    A thread pinned by the user keeps its cores.

    Args:
        near: by rank, the cores next to its GPU.
        own: the cores each rank may use beforehand.
    """
    before, found, elsewhere = os.sched_getaffinity(0), [], {sorted(own)[dist.get_rank() == 0]}
    ranks, end = Group(CPU), threading.Event()
    older, pinned = (threading.Thread(target=end.wait) for _ in range(2))
    try:
        os.sched_setaffinity(0, own)
        for thread in (older, pinned):
            thread.start()
            assert thread.native_id is not None
        os.sched_setaffinity(pinned.native_id, elsewhere)  # type: ignore[arg-type]
        for shared in (True, False):
            with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
                patch.setattr(hardware, "cores_near", lambda device: near[dist.get_rank()])
                if shared:
                    opened.enter_context(machine.shared_cores(ranks, CPU))
                found += [os.sched_getaffinity(0), os.sched_getaffinity(older.native_id)]  # type: ignore[arg-type]
                assert os.sched_getaffinity(pinned.native_id) == elsewhere  # type: ignore[arg-type]
        return found
    finally:
        end.set()
        for thread in (older, pinned):
            thread.join()
        os.sched_setaffinity(0, before)
        ranks.close()


def cores_within(quota: float | None) -> tuple[int, int]:
    """(ranks per host, cores of a rank) if each rank is bound to 16 cores and the container's CPU quota is `quota`."""
    ranks = Group(CPU)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardware, "own_cores", lambda: {16 * ranks.rank + core for core in range(16)})
            patch.setattr(hardware, "cpu_quota", lambda: quota)
            return machine.cores_of_rank(ranks)
    finally:
        ranks.close()
