"""Watches free RAM, explains CUDA's out-of-memory errors, and finds leaner plans."""

from __future__ import annotations

import gc
import shutil
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch

from offloadkit.device import process_memory
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.errors import OutOfRamError, OutOfVramError
from offloadkit.facts import hardware
from offloadkit.facts.config import Placement
from offloadkit.facts.threads import Thread
from offloadkit.facts.units import format_bytes
from offloadkit.offload.use_order import edges
from offloadkit.planner import Plan, leaner
from offloadkit.planner.layout import GRAPHS, TIERS
from offloadkit.planner.words import of_others

POLL_SECONDS = 0.2
TOLERANCE = 1.02
"""A plan may exceed free VRAM by this factor, because the framework's share is an estimate."""
_MIN_FLOOR_BYTES = 256 << 20
"""Least RAM that must stay free."""
_SHARES = (32, 16, 8)
"""A plan gives up at least these parts of its VRAM when the GPU is full for the first time, the second, and later: the
allocation that failed is known, but not what the rest of the step would have asked for.
"""


@dataclass
class RamPoll:
    """The part of `RamWatch` that its thread references, so that `RamWatch` itself can be collected.

    Attributes:
        planned: this process's planned bytes by category.
        warning: the newest unread warning.
    """

    planned: Mapping[str, int]
    floor_bytes: int
    closed: threading.Event = field(default_factory=threading.Event)
    warning: str | None = None

    def run(self) -> None:
        while not self.closed.wait(POLL_SECONDS):
            process_memory.sample_ram()
            available = hardware.ram_available_bytes()
            if available < self.floor_bytes:
                self.warning = self._explain(available)

    def _explain(self, available: int) -> str:
        used, planned, limit = hardware.process_ram_bytes(), sum(self.planned.values()), hardware.ram_limit_bytes()
        parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in self.planned.items() if size)
        others = limit - available - used
        return (
            f"RAM is running out: {format_bytes(available)} of {format_bytes(limit)} are left, less than the "
            f"{format_bytes(self.floor_bytes)} at which training stops before the system kills it. This process uses "
            f"{format_bytes(used)}; {format_bytes(planned)} were planned ({parts or 'nothing'})"
            + (f"; others use {format_bytes(others)}" if others > 0 else "")
            + ". End other programs, start fewer DataLoader workers, or give the plan less RAM (ram=...)"
        )


class RamWatch:
    """Watches free RAM until it is closed or garbage-collected.

    Args:
        planned: this process's planned bytes by category, for the error message.
        floor_bytes: RAM that must stay free, counting page cache as free. None: `ram_floor()`.
    """

    def __init__(self, planned: Mapping[str, int], floor_bytes: int | None = None) -> None:
        if floor_bytes is None:
            floor_bytes = ram_floor()
        self.poll = RamPoll(dict(planned), floor_bytes)
        self._thread = Thread(target=self.poll.run, name="offloadkit-ram-watch", daemon=True)
        weakref.finalize(self, self.poll.closed.set)
        self._thread.start()

    def check(self) -> None:
        """Raise `OutOfRamError` if less than the floor was free since the last check. Reads one attribute."""
        if (warning := self.warning()) is not None:
            raise OutOfRamError(warning)

    def warning(self) -> str | None:
        """The warning since the last call, or None. Reads one attribute."""
        warning, self.poll.warning = self.poll.warning, None
        return warning

    def expect(self, planned: Mapping[str, int]) -> None:
        """Switch to another plan's bytes, and discard the warning."""
        self.poll.planned, self.poll.warning = dict(planned), None

    def close(self) -> None:
        self.poll.closed.set()
        if threading.current_thread() is not self._thread:  # a finalizer runs on any thread
            self._thread.join()


def ram_floor() -> int:
    return max(hardware.ram_limit_bytes() // 100, _MIN_FLOOR_BYTES)


@contextmanager
def explained_shortage(
    plan: Plan, device: torch.device, drop_gradients: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Context that turns CUDA's out-of-memory error into `OutOfVramError`, after a call of `drop_gradients`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        explained = f"{full_gpu(plan, device)}. {_ADVICE}"
        traceback.clear_frames(error.__traceback__)  # a kept error would keep the activations in VRAM
        drop_gradients()
        raise OutOfVramError(explained) from error


def forget_frames(error: OutOfVramError) -> None:
    """Free what the frames of the error and of its cause hold; a note keeps the lines of the cause.

    Clearing the frames is not enough: their functions keep the variables of closures, such as the arguments of a module
    with hooks.
    """
    traceback.clear_frames(error.__traceback__)
    cause = error.__cause__
    if cause is not None and cause.__traceback__ is not None:
        cause.add_note(f"It was raised here:\n{''.join(traceback.format_tb(cause.__traceback__))}")
        traceback.clear_frames(cause.__traceback__)
        at: TracebackType | None = cause.__traceback__
        while at is not None:
            following, at.tb_next = at.tb_next, None  # running context managers keep the first frame
            at = following
        cause.__traceback__ = None


def forget_graph(loss: torch.Tensor, first: int) -> None:
    """Detach `loss` and all other tensors of its graph, such as the model's outputs, because no backward will follow:
    a caller that keeps one of them would keep the graph's activations.

    Args:
        first: sequence number of the graph's first node. Older nodes belong to the caller.
    """
    nodes = {following for _, following, at, _ in edges([loss], first) if at >= first} | {loss.grad_fn} - {None}
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and _node_of(each) in nodes]
    for each in (loss, *kept):
        with suppress(RuntimeError):  # a view of a larger tensor
            each.detach_()
    nodes.clear()
    _end_interrupted_backward(loss.device)


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view that autograd refuses, because its base was written
        return None


def _end_interrupted_backward(device: torch.device) -> None:
    """Autograd's queue keeps nodes of a backward that raised until the next backward takes them out."""
    with suppress(torch.OutOfMemoryError), torch.enable_grad():
        torch.zeros((), device=device, requires_grad=True).neg().backward()  # type: ignore[no-untyped-call]


def leaner_budget(plan: Plan, device: torch.device, asked: int, times: int) -> int:
    """VRAM budget, in bytes, for the next plan of a run that ran out of VRAM with `plan`.

    It is the smaller of planned and used bytes, minus a share of the planned bytes or twice the excess over the plan,
    whichever is more. The allocation that failed counts to the excess.

    Args:
        asked: bytes of the allocation that failed; 0 if unknown.
        times: how often the GPU was full before.
    """
    planned = plan.total_bytes("vram")
    used = planned
    if device.type == "cuda":
        used = hardware.vram_context_bytes(device) + process_memory.peak_reserved_bytes(device)
    return max(1, min(planned, used) - max(_share(planned, asked, times), 2 * (used + asked - planned)))


def _share(num_bytes: int, asked: int, times: int) -> int:
    return num_bytes // (_SHARES[min(times, len(_SHARES) - 1)] if asked else _SHARES[-1])


def _planned(
    plan: Plan, make: Callable[[Mapping[str, int]], Plan | None], budgets: Mapping[str, int], ranks: Ranks
) -> Plan | None:
    """`make` as a collective: all ranks get rank 0's plan for the least budgets of any rank."""
    if not ranks.agree(np.array([plan.basis.config.placement is None], dtype=np.int64)).all():
        return None  # some rank's user has fixed the placement
    least = minimum_over_ranks(ranks, budgets)
    return ranks.broadcast_from(lambda: make(least))


def minimum_over_ranks(ranks: Ranks, budgets: Mapping[str, int]) -> dict[str, int]:
    """Minimum over ranks of each tier's bytes, without tiers that some rank lacks."""
    told = ranks.agree(np.array([budgets.get(tier, -1) for tier in TIERS], dtype=np.int64)).min(axis=0)
    return {tier: size for tier, size in zip(TIERS, told.tolist(), strict=True) if size >= 0}


def _spare_ram(plan: Plan) -> int:
    """RAM, in bytes, that this run may still take: the host's free RAM is shared equally by its ranks."""
    return max(0, hardware.ram_available_bytes() - ram_floor()) // plan.num_on_host


def _spare_vram(device: torch.device) -> int:
    """VRAM, in bytes, that is free at the process's peak, if other processes keep theirs."""
    for_peaks = process_memory.peak_reserved_bytes(device) - torch.cuda.memory_allocated(device)
    return max(0, hardware.vram_bytes(device)[0] - for_peaks)


def room(plan: Plan, device: torch.device) -> dict[str, int]:
    """Bytes of "vram" and "ram" that another plan of this run may need, limited by budgets and free memory."""
    needs, spare = plan.needs(), {"ram": _spare_ram(plan)}
    if device.type == "cuda":
        spare["vram"] = _spare_vram(device)
    free = {tier: needs[tier] + more for tier, more in spare.items()}
    return {tier: min(plan.budgets[tier], free.get(tier, plan.budgets[tier])) for tier in ("vram", "ram")}


def with_less_vram(
    plan: Plan, device: torch.device, error: BaseException | None, times: int, ranks: Ranks = SOLO
) -> Plan | None:
    """The plan for OOM recovery, or None if no plan takes less VRAM. A collective.

    Args:
        error: torch's, on a rank whose GPU is full.
        times: how often the GPU was full before.
    """
    planned = plan.total_bytes("vram")
    if error is None:
        vram = planned - 1
    elif plan.basis.work is None:
        vram = planned - planned // 8
    else:
        vram = leaner_budget(plan, device, process_memory.asked_bytes(error), times)
    return _planned(plan, partial(leaner, plan, "vram"), {"vram": vram, "ram": _ram_to_use(plan)}, ranks)


def _ram_to_use(plan: Plan) -> int:
    """RAM, in bytes, that a successor of `plan` may take, limited by the budget and free RAM."""
    now = plan.total_bytes("ram")
    ram = now + _spare_ram(plan)
    return min(ram, max(now, plan.budgets.get("ram", ram)))


def with_less_vram_at_rest(plan: Plan, error: BaseException | None, times: int, ranks: Ranks = SOLO) -> Plan | None:
    """The plan for OOM recovery between training steps, when there are no activations: what the allocation lacked and a
    share less in VRAM, or as little as possible. None if no plan takes less. A collective; see `with_less_vram`.
    """
    less = 1
    if error is not None:
        asked = process_memory.asked_bytes(error)
        less = max(1, asked + _share(_at_rest(plan), asked, times))
    budgets = {"vram": max(1, plan.total_bytes("vram") - less), "ram": _ram_to_use(plan)}
    return _planned(plan, partial(_leaner_at_rest, plan), budgets, ranks)


def _leaner_at_rest(plan: Plan, budgets: Mapping[str, int]) -> Plan | None:
    """`budgets`: their VRAM is less than that of `plan` by what is lacking."""
    leanest, found = plan, leaner(plan, "vram", budgets)
    enough = _at_rest(plan) - (plan.total_bytes("vram") - budgets["vram"])
    while found is not None:
        if _at_rest(found) < _at_rest(leanest):
            leanest = found
        if (lacking := _at_rest(leanest) - enough) <= 0:
            break
        total = found.total_bytes("vram")
        found = leaner(found, "vram", {**budgets, "vram": max(1, total - max(lacking, total // _SHARES[0]))})
    return leanest if _at_rest(leanest) < _at_rest(plan) else None


def _at_rest(plan: Plan) -> int:
    return plan.total_bytes("vram") - sum(plan.tiers["vram"].get(name, 0) for name in ("activations", GRAPHS))


def with_less_ram(plan: Plan, device: torch.device, ranks: Ranks = SOLO) -> Plan | None:
    """The plan for scarce RAM: less by an eighth, or by the shortage relative to twice the floor. A collective.

    The ranks of a host share the shortage equally.
    """
    now = {tier: plan.total_bytes(tier) for tier in TIERS}
    lacking = (2 * ram_floor() - hardware.ram_available_bytes()) // plan.num_on_host
    budgets = {"ram": max(1, now["ram"] - max(now["ram"] // 8, lacking))}
    if device.type == "cuda":
        budgets["vram"] = min(now["vram"] + _spare_vram(device), max(now["vram"], plan.budgets.get("vram", 1 << 60)))
    if (folder := plan.basis.config.disk) is not None:
        budgets["disk"] = now["disk"] + shutil.disk_usage(folder).free // plan.num_on_host
    return _planned(plan, partial(leaner, plan, "ram"), budgets, ranks)


def within_free_vram(plan: Plan, device: torch.device, freed_bytes: int, ranks: Ranks = SOLO) -> Plan:
    """`plan`, or a leaner one if free VRAM has become too small for it. A collective: one rank is enough.

    `freed_bytes`: VRAM that the engine will free.
    """
    if device.type != "cuda":
        return plan
    machine = plan.basis.hardware  # includes this process's other use of VRAM
    context = hardware.vram_context_bytes(device)
    if machine:  # measured before the ranks connected
        context = machine.vram_context_bytes + hardware.library_bytes[device.index or 0]
    there = hardware.vram_bytes(device)[0] + context + freed_bytes
    fits = plan.total_bytes("vram") <= TOLERANCE * there
    if ranks.agree(np.array([fits], dtype=np.int64)).all():
        return plan
    ram = max(plan.total_bytes("ram"), plan.budgets.get("ram", 0))
    return _planned(plan, partial(leaner, plan, "vram"), {"vram": there, "ram": ram}, ranks) or plan


def move_summary(before: Plan, after: Plan) -> str:
    """For example "VRAM 8 GiB -> 6 GiB, RAM 10 GiB -> 12 GiB"."""
    both = {name: [format_bytes(plan.total_bytes(tier)) for plan in (before, after)] for tier, name in TIERS.items()}
    changed = [f"{name} {old} -> {new}" for name, (old, new) in both.items() if old != new]
    others: dict[str, Callable[[Placement], bool]] = {
        "layers with recomputed activations": lambda where: where.activations in ("checkpoint", "offload"),
        "layers with recomputed element-wise results": lambda where: where.activations == "cheap",
        "layers that the GPU steps": lambda where: where.step == "gpu",
    }
    for name, counts in others.items():
        old, new = (sum(map(counts, plan.placements)) for plan in (before, after))
        if old != new:
            changed.append(f"{name} {old} -> {new}")
    return ", ".join(changed)


_ADVICE = (
    "Use a smaller micro-batch and more gradient accumulation, or give the plan less VRAM than available (vram=...), "
    "so that more is in RAM"
)


def full_gpu(plan: Plan, device: torch.device) -> str:
    planned = plan.tiers["vram"]
    parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in planned.items() if size)
    free, total = hardware.vram_bytes(device)
    held = of_others(hardware.vram_of_others_bytes(device))
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    fixed = sum(size for category, size in planned.items() if category not in ("activations", GRAPHS, "framework"))
    others = (
        ""
        if "activations" in planned
        else ("; activations were not planned, because the micro-batch's size was unknown")
    )
    return (
        f"the GPU's memory is full: torch used up to {format_bytes(used)}, {format_bytes(free)} of "
        f"{format_bytes(total)} are free{held}. Planned were {format_bytes(sum(planned.values()))} ({parts}){others}; "
        f"activations and torch's own memory took {format_bytes(max(0, used - fixed))}"
    )
