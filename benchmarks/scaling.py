"""The planned tables of docs/several-gpus.md: `python -m benchmarks scaling` rewrites them.

Cards are planned by their data sheets, on the hosts assumed below, so the tables are the same on every machine.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from offloadkit.doors.planning import ASSUMED_CARD
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware
from offloadkit.planner import LayerShape, MicroBatch, Plan, make_plan
from offloadkit.planner.cards import card_named
from offloadkit.planner.scaling import scaling_table

PAGE = Path(__file__).parent.parent / "docs" / "several-gpus.md"
GIB = 1 << 30
SLOW_NETWORK = 10e9
"""100 Gbit/s for each GPU at an efficiency of four fifths."""


def host(card_name: str, num_cores: int, ram_gib: int, dram: float) -> Hardware:
    """A host of such cards whose DRAM moves `dram` bytes per second in the CPU step; copies at the same time add to
    that."""
    card, ram = card_named(card_name), ram_gib * GIB
    vram: Any = {"vram_total_bytes": int(card.usable_gib * GIB)}
    vram["vram_free_bytes"] = vram["vram_total_bytes"] - ASSUMED_CARD.vram_context_bytes
    rates: Any = card.rates() | dict.fromkeys(("dram_bytes_per_second", "cpu_adamw_bytes_per_second"), dram)
    rates["cpu_and_bus_bytes_per_second"] = max(1.15 * dram, rates["both_bytes_per_second"])
    memory: Any = {"ram_total_bytes": ram, "ram_available_bytes": ram}
    return replace(ASSUMED_CARD, gpu_name=card.name, num_cores=num_cores, **rates, **vram, **memory)


def page() -> str:
    """The page with its marked parts replaced."""
    text = PAGE.read_text()
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(f"{begin}.*?{end}", f"{begin}\n{table}\n{end}", text, flags=re.DOTALL)
    return text


def tables() -> dict[str, str]:
    """Each table by the name of its marked part."""
    large = _plan(_llama(), host("H200", 128, 1000, 376e9), vram="80GiB")
    small = _plan(_t5_3b(), host("RTX 4090", 32, 240, 160e9))
    return {
        "llama-8b": scaling_table(large, (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)),
        "slow network": scaling_table(large, (8, 16, 64), (1, 16), SLOW_NETWORK),
        "t5-3b": scaling_table(small, (1, 2, 4), (1, 4)),
    }


def _plan(model: tuple[list[LayerShape], MicroBatch], machine: Hardware, **budgets: Any) -> Plan:
    return make_plan(model[0], OffloadConfig(**budgets), work=model[1], hardware=machine, assumed=True)


@cache
def _llama() -> tuple[list[LayerShape], MicroBatch]:
    from tests.planner.machines import LLAMA_8B, llama

    return llama(4, 2048, **LLAMA_8B)


@cache
def _t5_3b() -> tuple[list[LayerShape], MicroBatch]:
    from tests.planner.machines import t5_3b

    return t5_3b(8, fused=True)
