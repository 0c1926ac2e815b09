"""Measurement of the machine by several ranks that work at the same time; the slowest rank counts."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.device.measure import is_measured, kept, measure
from offloadkit.distributed.ranks import Group, Ranks, Solo, host, joined_ranks
from offloadkit.facts import hardware
from offloadkit.facts.fitted import FEW_CTAS
from offloadkit.facts.hardware import Hardware, is_bus
from offloadkit.kernels import cpu
from offloadkit.optim.norm import NORM_BLOCK

_SENT_BYTES = {"cuda": 256 << 20, "cpu": 2 << 20}
"""Bytes that a rank sends to measure the link, spread over all ranks."""
_LINK, _FEW_CTAS_LINK = "link_bytes_per_second", "few_ctas_link_bytes_per_second"
_NUM_EXCHANGES = 4
"""The fastest exchange counts."""
_OF_CTAS = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS")
"""Environment variables that override the plan's number of NCCL thread blocks."""
_MOST_CORES = 4096
"""Beyond this number of cores, ranks are not bound."""


@contextmanager
def planning_ranks(device: torch.device) -> Iterator[Solo | Group]:
    """Open the ranks for planning together. All ranks must call this."""
    ranks = joined_ranks(device)
    try:
        yield ranks
    finally:
        ranks.close()


def cores_of_rank(ranks: Ranks) -> tuple[int, int]:
    """Number of ranks on this host, and number of cores for this rank.

    Ranks with the same CPU affinity share its cores evenly. All ranks of a host share a container's CPU quota.
    """
    own = [host(), zlib.crc32(repr(sorted(hardware.own_cores())).encode())]
    told = ranks.agree(np.array(own))
    on_host = told[told[:, 0] == own[0]]
    sharing = int((on_host[:, 1] == own[1]).sum())
    cores = len(hardware.own_cores()) // sharing
    quota = hardware.cpu_quota()
    return len(on_host), max(1, min(cores, round(quota) // len(on_host) if quota else cores))


@contextmanager
def shared_cores(ranks: Ranks, device: torch.device) -> Iterator[tuple[int, int]]:
    """Limit the C kernels of this process to its share of the host's cores (`cores_of_rank`) in the body.

    Ranks are bound to the cores on the NUMA nodes of their GPUs, if no rank of the host loses cores by it. RAM that a
    rank populates is then near its GPU.
    """
    threads, cores = cpu.num_threads(), hardware.own_cores()
    near = _near_cores(ranks, device) or cores
    try:
        _bind(cores, near)
        num_ranks, num_cores = cores_of_rank(ranks)
        cpu.set_num_threads(cpu.default_num_threads(num_cores))
        yield num_ranks, num_cores
    finally:
        cpu.set_num_threads(threads)
        _bind(near, cores)


def _near_cores(ranks: Ranks, device: torch.device) -> set[int]:
    own = hardware.own_cores()
    near = own & hardware.cores_near(device)
    told = ranks.agree(np.concatenate([[host()], _as_bits(own), _as_bits(near)]))
    now, then = np.split(told[told[:, 0] == host(), 1:], 2, axis=1)
    apart = ((then[:, None] == then).all(2) >= (then[:, None] & then).any(2)).all()  # equal or disjoint
    return near if apart and (_share(then) >= _share(now)).all() else set()


def _share(masks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cores per rank, fp64 [ranks], from affinity bit masks: ranks with equal masks share the cores."""
    sharing = (masks[:, None] == masks).all(2).sum(1)
    found: NDArray[np.float64] = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1).sum(1) / sharing
    return found


def _as_bits(cores: set[int]) -> NDArray[np.int64]:
    flags = np.zeros(_MOST_CORES, dtype=bool)
    flags[[core for core in cores if core < _MOST_CORES]] = True
    return np.packbits(flags).view(np.int64)


def _bind(before: set[int], cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task") if before != cores else ():
        with suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(int(thread)) == before:
                os.sched_setaffinity(int(thread), cores)


def measured_by(ranks: Solo | Group, device: torch.device, folder: str | Path | None = None) -> Hardware:
    return measured_together(ranks, device, folder) if isinstance(ranks, Group) else measure(device, folder=folder)


def measured_together(ranks: Group, device: torch.device, folder: str | Path | None = None) -> Hardware:
    """Measure one rank's machine while all ranks work; equal on all ranks except for names of parts.

    Rates, sizes and costs are the worst over all ranks, because the ranks wait for the slowest one. The link is
    measured by an exchange between all ranks. `folder` as for `measure`.
    """

    def meet() -> None:
        ranks.agree(np.array([0]))

    with shared_cores(ranks, device) as (num_ranks, num_cores):
        all_know = ranks.agree(np.array([is_measured(device, num_ranks)], dtype=np.int64)).all()
        own = measure(device, folder=folder, fresh=not all_know, num_ranks=num_ranks, meet=meet)
    links: dict[str, Any] = _links(ranks, device, num_ranks)
    own = replace(own, num_ranks=num_ranks, num_cores=num_cores, **links)
    names = [field.name for field in fields(Hardware) if type(getattr(own, field.name)) in (int, float)]
    told = _all_gather(ranks, [getattr(own, name) for name in names])
    least, most = told.min(0).tolist(), told.max(0).tolist()
    agreed: dict[str, Any] = {}
    for name, low, high in zip(names, least, most, strict=True):
        is_cost = name in ("launch_seconds", "vram_context_bytes", "vram_of_others_bytes", "num_ranks")
        agreed[name] = type(getattr(own, name))(high if is_cost else low)
    together = replace(own, **agreed)
    one_host = together.num_ranks == ranks.size  # otherwise the link is a network
    return replace(together, link_is_bus=one_host and is_bus(together.link_bytes_per_second, together))


def _all_gather(ranks: Ranks, own: Sequence[float]) -> NDArray[np.float64]:
    return ranks.agree(np.array(own, dtype=np.float64).view(np.int64)).view(np.float64)


def known_links(device: torch.device, num_ranks: int) -> dict[str, float]:
    """Cached link rates for `num_ranks` ranks on GPUs like `device`, by field of `Hardware`; {} if not measured."""
    return kept(device, _link_of(num_ranks), {_LINK, _FEW_CTAS_LINK}, dict)


def _link_of(num_ranks: int) -> str:
    apart = [f", {name}={os.environ[name]}" for name in (*_OF_CTAS, "NCCL_P2P_DISABLE") if name in os.environ]
    return f"link of {num_ranks} ranks{''.join(apart)}"  # these variables change the link's rate


def _links(ranks: Group, device: torch.device, num_ranks: int) -> dict[str, float]:
    """Bytes per second received by the slowest rank while all ranks exchange, by field of `Hardware`.

    Measured with NCCL's default number of thread blocks and, on GPUs, with few thread blocks, unless the environment
    sets the number.
    """
    known = known_links(device, ranks.size)
    can_choose = device.type == "cuda" and not any(name in os.environ for name in _OF_CTAS)
    all_know, all_can_choose = ranks.agree(np.array([bool(known), can_choose], dtype=np.int64)).min(0).tolist()
    if not all_know:
        own = [_exchange_rate(ranks, device, most) for most in (0, *((FEW_CTAS,) if all_can_choose else ()))]
        link, few = [*_all_gather(ranks, own).min(0).tolist(), 0.0][:2]
        known = {_LINK: link, _FEW_CTAS_LINK: few}
        kept(device, _link_of(ranks.size), {*known}, lambda: known, num_ranks=num_ranks)
    return known


def _exchange_rate(ranks: Group, device: torch.device, most_ctas: int) -> float:
    ranks.connect(most_ctas)
    piece = max(1, _SENT_BYTES[device.type] // ranks.size // NORM_BLOCK) * NORM_BLOCK  # as layers are cut
    sent = torch.zeros(ranks.size * piece, dtype=torch.uint8, device=device)
    received, cuts = torch.empty_like(sent), [at * piece for at in range(ranks.size + 1)]
    best = float("inf")
    for _ in range(_NUM_EXCHANGES):
        ranks.agree(np.array([0]))  # start together
        began = time.perf_counter()
        ranks.exchange(received, sent, cuts)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return (ranks.size - 1) * piece / best
