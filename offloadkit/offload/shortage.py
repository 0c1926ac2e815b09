"""Memory that runs out: a watch on the RAM left, the explanation of a CUDA out-of-memory error, and the plan to go on
by.

Both errors name the bytes that were planned and the bytes that are used.
"""

from __future__ import annotations

import shutil
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from offloadkit import hardware
from offloadkit.config import Placement
from offloadkit.device import process_memory
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.errors import OutOfRamError, OutOfVramError
from offloadkit.planner import Plan, leaner
from offloadkit.planner.plan import TIERS
from offloadkit.threads import Thread
from offloadkit.units import format_bytes

_INTERVAL_SECONDS = 0.2
"""How often the RAM left is read."""
_ABOUT = 1.02
"""A plan that takes so much more than is free is begun as it is: what the framework takes is an estimate."""
_MIN_FLOOR_BYTES = 256 << 20
"""Least RAM that must be left, on small machines too."""


@dataclass
class RamPoll:
    """The part of `RamWatch` that its thread uses. It does not refer to the `RamWatch`, which can be collected so.

    Attributes:
        planned: bytes by category that the plan gives this process.
        floor_bytes: RAM that must be left.
        warning: the newest finding of too little RAM, until somebody has read it.
    """

    planned: Mapping[str, int]
    floor_bytes: int
    closed: threading.Event = field(default_factory=threading.Event)
    warning: str | None = None

    def run(self) -> None:
        """Read the RAM left until closed. Where it is too little, set `warning`."""
        while not self.closed.wait(_INTERVAL_SECONDS):
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
    """Watches the RAM left, until it is closed or garbage-collected.

    Args:
        planned: bytes by category that the plan gives this process. The error names them.
        floor_bytes: what must be left, counting page cache as free. None: 1 % of the limit, but at least 256 MiB.

    Attributes:
        poll: what the watching thread reads and writes.
    """

    def __init__(self, planned: Mapping[str, int], floor_bytes: int | None = None) -> None:
        if floor_bytes is None:
            floor_bytes = _floor_bytes()
        self.poll = RamPoll(dict(planned), floor_bytes)
        self._thread = Thread(target=self.poll.run, name="offloadkit-ram-watch", daemon=True)
        weakref.finalize(self, self.poll.closed.set)
        self._thread.start()

    def check(self) -> None:
        """Call it wherever training can stop; it reads one attribute.

        Raises:
            OutOfRamError: less than the floor was left at some time since the last check.
        """
        if (warning := self.warning()) is not None:
            raise OutOfRamError(warning)

    def warning(self) -> str | None:
        """What was seen since the last call, in words; None if there was room. It reads one attribute."""
        warning, self.poll.warning = self.poll.warning, None
        return warning

    def expect(self, planned: Mapping[str, int]) -> None:
        """Go on by another plan. What was seen before counts no more."""
        self.poll.planned, self.poll.warning = dict(planned), None

    def close(self) -> None:
        """Stop watching. It may be called twice."""
        self.poll.closed.set()
        if threading.current_thread() is not self._thread:  # a finalizer runs on any thread
            self._thread.join()


def _floor_bytes() -> int:
    """RAM that must be left."""
    return max(hardware.ram_limit_bytes() // 100, _MIN_FLOOR_BYTES)


@contextmanager
def explained_shortage(
    plan: Plan, device: torch.device, drop_gradients: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """A context that explains CUDA's out-of-memory error.

    Raises:
        OutOfVramError: instead of torch's error, after a call of `drop_gradients`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        explained = f"{full_gpu(plan, device)}. {_ADVICE}"
        traceback.clear_frames(error.__traceback__)  # else a kept error would keep the activations in VRAM
        drop_gradients()
        raise OutOfVramError(explained) from error


def leaner_budget(plan: Plan, device: torch.device) -> int:
    """VRAM budget, in bytes, for a second plan of a run that ran out of VRAM with `plan`.

    The budget starts from the smaller of what was planned and what was used. It leaves out an eighth of the planned
    bytes, or twice the excess over the plan if that is more: the allocation that failed is not in what was used.
    """
    planned = plan.total_bytes("vram")
    used = planned
    if device.type == "cuda":
        used = hardware.vram_context_bytes(device) + process_memory.peak_reserved_bytes(device)
    return max(1, min(planned, used) - max(planned // 8, 2 * (used - planned)))


def _planned(plan: Plan, short: Literal["vram", "ram"], budgets: Mapping[str, int], ranks: Ranks) -> Plan | None:
    """`leaner`. Several ranks ask for it together, and get what rank 0 finds within the least budgets of any."""
    if not ranks.agree(np.array([plan.basis.config.placement is None], dtype=np.int64)).all():
        return None  # a rank's user has chosen
    least = of_all(ranks, budgets)
    return ranks.told(lambda: leaner(plan, short, least))


def of_all(ranks: Ranks, budgets: Mapping[str, int]) -> dict[str, int]:
    """The least bytes that any rank has of each tier; without the tiers that some have not."""
    told = ranks.agree(np.array([budgets.get(tier, -1) for tier in TIERS], dtype=np.int64)).min(axis=0)
    return {tier: size for tier, size in zip(TIERS, told.tolist(), strict=True) if size >= 0}


def _spare_ram(plan: Plan) -> int:
    """Bytes of RAM that this run may take besides what it has. The ranks of a host have equal parts of that."""
    return max(0, hardware.ram_available_bytes() - _floor_bytes()) // plan.num_on_host


def room(plan: Plan, device: torch.device) -> dict[str, int]:
    """Bytes of "vram" and "ram" that another plan of this run may need: within its budgets, and what is free now."""
    needs, spare = plan.needs(), {"ram": _spare_ram(plan)}
    if device.type == "cuda":
        for_peaks = process_memory.peak_reserved_bytes(device) - torch.cuda.memory_allocated(device)
        spare["vram"] = max(0, hardware.vram_bytes(device)[0] - for_peaks)
    free = {tier: needs[tier] + more for tier, more in spare.items()}
    return {tier: min(plan.budgets[tier], free.get(tier, plan.budgets[tier])) for tier in ("vram", "ram")}


def with_less_vram(plan: Plan, device: torch.device, ranks: Ranks = SOLO) -> Plan | None:
    """The plan to go on by where the GPU was full; None if no plan takes less. Several ranks call it together."""
    vram = 7 * plan.total_bytes("vram") // 8 if plan.basis.work is None else leaner_budget(plan, device)
    return _planned(plan, "vram", {"vram": vram, "ram": _ram_to_use(plan)}, ranks)


def _ram_to_use(plan: Plan) -> int:
    """RAM, in bytes, that a plan in the place of `plan` may take: what is left now counts, and so does the budget."""
    now = plan.total_bytes("ram")
    ram = now + _spare_ram(plan)
    return min(ram, max(now, plan.budgets.get("ram", ram)))


def with_less_vram_at_rest(plan: Plan, device: torch.device) -> Plan | None:
    """The plan to go on by where the GPU was full between training steps, when no activations of theirs are there:
    one with an eighth less of everything else in VRAM, or with as little as there can be. None if no plan takes less.
    """
    leanest, found, ram = plan, with_less_vram(plan, device), _ram_to_use(plan)
    while found is not None:
        if _at_rest(found) < _at_rest(leanest):
            leanest = found
        if _at_rest(leanest) <= 7 * _at_rest(plan) // 8:
            break
        found = leaner(found, "vram", {"vram": 7 * found.total_bytes("vram") // 8, "ram": ram})
    return leanest if _at_rest(leanest) < _at_rest(plan) else None


def _at_rest(plan: Plan) -> int:
    """VRAM, in bytes, that a plan takes between steps."""
    return plan.total_bytes("vram") - plan.tiers["vram"].get("activations", 0)


def with_less_ram(plan: Plan, device: torch.device, ranks: Ranks = SOLO) -> Plan | None:
    """The plan to go on by where RAM is running out: an eighth less, or as much as is short of twice the floor.

    Several ranks call it together; those of a host have equal parts of what its RAM is short of.
    """
    now = {tier: plan.total_bytes(tier) for tier in TIERS}
    lacking = (2 * _floor_bytes() - hardware.ram_available_bytes()) // plan.num_on_host
    budgets = {"ram": max(1, now["ram"] - max(now["ram"] // 8, lacking))}
    if device.type == "cuda":
        used = hardware.vram_context_bytes(device) + process_memory.peak_reserved_bytes(device)
        spare = max(0, hardware.vram_bytes(device)[1] - used)
        budgets["vram"] = min(now["vram"] + spare, max(now["vram"], plan.budgets.get("vram", 1 << 60)))
    if (folder := plan.basis.config.disk) is not None:
        budgets["disk"] = now["disk"] + shutil.disk_usage(folder).free // plan.num_on_host
    return _planned(plan, "ram", budgets, ranks)


def within_free_vram(plan: Plan, device: torch.device, freed_bytes: int, ranks: Ranks = SOLO) -> Plan:
    """`plan`, or a leaner one where less VRAM is free than when it was made, since another process took some.

    Several ranks call it together, and all begin by the leaner one where it is needed on any.

    Args:
        freed_bytes: VRAM that the engine will free.
    """
    if device.type != "cuda":
        return plan
    machine = plan.basis.hardware  # its context is what the plan counts, with what else this process had in VRAM
    context = hardware.vram_context_bytes(device)
    if machine:  # it was measured before ranks connected
        context = machine.vram_context_bytes + hardware.library_bytes[device.index or 0]
    there = hardware.vram_bytes(device)[0] + context + freed_bytes
    fits = plan.total_bytes("vram") <= _ABOUT * there
    if ranks.agree(np.array([fits], dtype=np.int64)).all():
        return plan
    ram = max(plan.total_bytes("ram"), plan.budgets.get("ram", 0))
    return _planned(plan, "vram", {"vram": there, "ram": ram}, ranks) or plan


def moved_in_words(before: Plan, after: Plan) -> str:
    """ "VRAM 8 GiB -> 6 GiB, RAM 10 GiB -> 12 GiB"."""
    both = {name: [format_bytes(plan.total_bytes(tier)) for plan in (before, after)] for tier, name in TIERS.items()}
    changed = [f"{name} {old} -> {new}" for name, (old, new) in both.items() if old != new]
    others: dict[str, Callable[[Placement], bool]] = {
        "layers with recomputed activations": lambda where: where.activations != "keep",
        "layers that the GPU steps": lambda where: where.step == "gpu",
    }
    for name, counts in others.items():
        old, new = (sum(map(counts, plan.placements)) for plan in (before, after))
        if old != new:
            changed.append(f"{name} {old} -> {new}")
    return ", ".join(changed)


_ADVICE = (
    "Take a smaller micro-batch and more gradient accumulation, or give the plan less VRAM than there is (vram=...), "
    "so that more lives in RAM"
)


def full_gpu(plan: Plan, device: torch.device) -> str:
    """What torch held on a full GPU, and what was planned."""
    planned = plan.tiers["vram"]
    parts = ", ".join(f"{category} {format_bytes(size)}" for category, size in planned.items() if size)
    free, total = hardware.vram_bytes(device)
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    fixed = sum(size for category, size in planned.items() if category not in ("activations", "framework"))
    others = "" if "activations" in planned else "; activations were not planned, the micro-batch's size was not known"
    return (
        f"the GPU's memory is full: torch held up to {format_bytes(used)}, {format_bytes(free)} of "
        f"{format_bytes(total)} are free. Planned were {format_bytes(sum(planned.values()))} ({parts}){others}; "
        f"activations and what torch needs for itself took {format_bytes(max(0, used - fixed))}"
    )
