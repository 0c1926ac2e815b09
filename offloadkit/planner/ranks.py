"""A machine's rates as one of several ranks has them: shares of the host, and the link between ranks.

Not for rates that were measured while all ranks worked (`distributed.machine`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offloadkit.errors import ConfigError
from offloadkit.facts.hardware import CPU_STEP_RATES, Hardware, is_bus
from offloadkit.facts.units import format_rate
from offloadkit.planner.cards import card_named

GPUS_PER_HOST = 8
"""GPUs of an assumed host. More GPUs are on several such hosts."""
NETWORK_BYTES_PER_SECOND = 40e9
"""Bytes per second that a GPU receives from other hosts: four fifths of 400 Gbit/s (assumed)."""

_SHARED = (
    *(*CPU_STEP_RATES.values(), "dram_bytes_per_second", "cpu_and_bus_bytes_per_second"),
    *("disk_read_bytes_per_second", "disk_write_bytes_per_second"),
)
_OF_BUS = ("h2d_bytes_per_second", "d2h_bytes_per_second", "both_bytes_per_second")
"""Rates of a GPU's own bus, limited by the host's RAM."""


def for_ranks(
    machine: Hardware, num_ranks: int, *, link: float = 0.0, network: float = NETWORK_BYTES_PER_SECOND
) -> Hardware:
    """The machine as seen by one of `num_ranks` concurrent ranks, with a GPU like the machine's.

    A host's ranks share cores and DRAM evenly. Every GPU has its own bus, whose copies use DRAM too.

    Args:
        machine: a machine of at most `num_ranks` ranks on one host.
        link: bytes per second that a rank receives while all ranks of one host exchange; 0: the machine's link, or else
            the link of its card's data sheet.
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
        where = (
            f"{where or 'their link'}, and between hosts of {here} by a network with {format_rate(network)} for each"
        )
    cores = max(1, round(machine.num_cores * share))
    assumed = f"{num_ranks} GPUs are taken to be linked by {where}." if where else machine.link_assumed
    others: dict[str, Any] = {**rates, "link_bytes_per_second": rate, "link_assumed": assumed}
    others |= {"link_is_bus": by_bus, "network_bytes_per_second": between}
    return replace(machine, num_ranks=here, num_cores=cores, **others)


def _link(machine: Hardware) -> tuple[float, bool, str]:
    if machine.link_bytes_per_second:
        return machine.link_bytes_per_second, machine.link_is_bus, ""
    try:
        rate = card_named(machine.gpu_name or "").link_bytes_per_second()
    except ConfigError:
        rate = 0.0
    if rate:
        return rate, False, f"NVLink with {format_rate(rate)}, by the card's data sheet"
    through_ram = machine.both_bytes_per_second / 2
    return through_ram, is_bus(through_ram, machine), f"their buses alone, with {format_rate(through_ram)}"
