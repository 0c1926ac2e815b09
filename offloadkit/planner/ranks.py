"""One machine, as each of several ranks has it: what ranks of a host share, and the link between them.

Rates that were measured while all ranks worked need none of this (`distributed.machine`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offloadkit.errors import ConfigError
from offloadkit.hardware import CPU_STEP_RATES, Hardware
from offloadkit.planner.cards import card_named

GPUS_PER_HOST = 8
"""Most GPUs that a host is taken to have; more are on several such hosts."""
NETWORK_BYTES_PER_SECOND = 40e9
"""What a GPU receives from other hosts: 400 Gbit/s for each, of which four fifths are reached (assumed)."""

_SHARED = (
    *(*CPU_STEP_RATES.values(), "dram_bytes_per_second", "cpu_and_bus_bytes_per_second"),
    *("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
)
"""Rates that all ranks of a host have together."""
_OF_BUS = ("h2d_bytes_per_second", "d2h_bytes_per_second", "both_bytes_per_second")
"""Rates of a GPU's own bus, as far as RAM serves all of them."""


def for_ranks(
    machine: Hardware, num_ranks: int, *, link: float = 0.0, network: float = NETWORK_BYTES_PER_SECOND
) -> Hardware:
    """The machine as each of `num_ranks` ranks that work at once has it, with a GPU like the machine's.

    A host's ranks share cores and DRAM evenly. Each GPU has a bus of its own, whose copies are DRAM's traffic too.

    Args:
        machine: of fewer ranks on one host, or of as many.
        link: bytes per second that a rank receives while all of one host exchange; 0 takes what the machine knows, or
            else its card's sheet.
        network: bytes per second that a rank receives from other hosts.
    """
    if num_ranks == 1:
        return machine
    here = min(num_ranks, GPUS_PER_HOST)
    share = machine.num_ranks / here
    rates = {name: share * getattr(machine, name) for name in _SHARED}
    dram = rates["cpu_and_bus_bytes_per_second"]
    rates |= {name: min(getattr(machine, name), dram) for name in _OF_BUS}
    rate, by_bus, where = (link, is_bus(link, machine), "") if link else _link(machine)
    between = 0.0
    if num_ranks > here:
        between = network
        where = f"{where or 'their link'}, and between hosts of {here} by a network with {_gb(network)} for each"
    cores = max(1, round(machine.num_cores * share))
    assumed = f"{num_ranks} GPUs are taken to be linked by {where}." if where else machine.link_assumed
    others: dict[str, Any] = {**rates, "link_bytes_per_second": rate, "link_assumed": assumed}
    others |= {"link_is_bus": by_bus, "network_bytes_per_second": between}
    return replace(machine, num_ranks=here, num_cores=cores, **others)


def is_bus(link: float, machine: Hardware) -> bool:
    """Whether a link of so many bytes per second is the GPUs' own buses: every NVLink is faster than they are, with as
    many of NCCL's thread blocks as it likes."""
    return machine.device != "cpu" and link <= machine.h2d_bytes_per_second


def _link(machine: Hardware) -> tuple[float, bool, str]:
    """Bytes per second that a GPU receives from others of its host, whether over its bus, and where that is from if it
    was not measured."""
    if machine.link_bytes_per_second:
        return machine.link_bytes_per_second, machine.link_is_bus, ""
    try:
        rate = card_named(machine.gpu_name or "").link_bytes_per_second()
    except ConfigError:
        rate = 0.0
    if rate:
        return rate, False, f"NVLink with {_gb(rate)}, by the card's data sheet"
    through_ram = machine.both_bytes_per_second / 2
    return through_ram, is_bus(through_ram, machine), f"their buses alone, with {_gb(through_ram)}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
