"""The planned tables of docs/several-gpus.md: `python -m benchmarks scaling` rewrites them.

Cards are planned by their data sheets, on the hosts assumed below, so the tables are the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plans import layers_and_work
from offloadkit.doors.planning import ASSUMED_CARD
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.units import format_bytes, format_seconds
from offloadkit.planner import LayerShape, MicroBatch, Plan, make_plan
from offloadkit.planner.cards import card_named
from offloadkit.planner.make import replanned, with_other_exchange
from offloadkit.planner.ranks import GPUS_PER_HOST, NETWORK_BYTES_PER_SECOND, for_ranks

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


EIGHT_H200S = host("H200", 128, 560, 376e9)
"""A host with 128 cores and 560 GiB of RAM. The rate of its DRAM is assumed: twice the rate that a host with 64 cores
and four H100s reached."""


def page() -> str:
    """The page with its marked parts replaced."""
    text = PAGE.read_text()
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = re.sub(f"{begin}.*?{end}", f"{begin}\n{table}\n{end}", text, flags=re.DOTALL)
    return text


def tables() -> dict[str, str]:
    """Each table by the name of its marked part."""
    llama, t5 = layers_and_work("llama-3.1-8b", "bf16", 4, 2048, 0), layers_and_work("t5-3b", "bf16", 8, 512, 128)
    large = _plan(llama, host("H200", 128, 1000, 376e9), vram="80GiB")
    small = _plan(t5, host("RTX 4090", 32, 240, 160e9))
    return {
        "llama-8b": scaling_table(large, (1, 2, 4, 8, 16, 32, 64), (1, 4, 16)),
        "slow network": scaling_table(large, (8, 16, 64), (1, 16), SLOW_NETWORK),
        "t5-3b": scaling_table(small, (1, 2, 4), (1, 4)),
        "eight H200s": table_of_cases(),
    }


def table_of_cases() -> str:
    """The plans of the cases on eight GPUs, as a table in Markdown."""
    from benchmarks.rank_cases import RANK_CASES
    from benchmarks.ranks import plan_of

    head: tuple[str, ...] = ("GPUs", "model, rows and budget", "VRAM each", "RAM of all ranks", "received", "step")
    rows = [(*head, "tokens/s", "scaling", "RAM of one GPU"), ("---:", "---", *("---:",) * 7)]
    for name, case in RANK_CASES.items():
        if case.num_gpus != GPUS_PER_HOST or case.vram is None or case.claim == "try":
            continue
        made, alone = plan_of(case), RANK_CASES.get(name.replace("-8x", "-1x"))
        one = plan_of(alone) if alone else None
        cells = _cells(made, f"{case.model}, {case.shape}, {case.vram:g} GiB", sum(made.communicated.values()))
        assert made.tokens_per_second is not None
        scaling = f"{made.tokens_per_second / one.tokens_per_second:.2f}" if one and one.tokens_per_second else "-"
        rows.append((*cells, scaling, format_bytes(one.needs()["ram"]) if one else "-"))
    return _in_markdown(rows)


def _cells(made: Plan, what: str, received_bytes: int) -> tuple[str, ...]:
    """The first cells of a plan's row; `what` tells it from the other rows."""
    needs = made.needs()
    assert made.seconds is not None
    return (
        f"{made.num_gpus}",
        what,
        format_bytes(needs["vram"]),
        format_bytes(needs["ram"] * made.num_on_host),
        format_bytes(received_bytes) if received_bytes else "-",
        format_seconds(made.seconds.step, digits=3),
        f"{made.tokens_per_second:,.0f}",
    )


def _in_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plan(model: tuple[list[LayerShape], MicroBatch], machine: Hardware, **budgets: Any) -> Plan:
    return make_plan(model[0], OffloadConfig(**budgets), work=model[1], hardware=machine, assumed=True)


@dataclass(frozen=True)
class ScaledPlan:
    """A plan for more GPUs.

    Attributes:
        efficiency: tokens/s / (number of GPUs * tokens/s of one GPU with as many micro-batches). More than 1 means that
            less is offloaded.
        otherwise: `plan` with the other order of exchange (each micro-batch instead of sums, or the reverse). None with
            one GPU or one micro-batch, where both orders are the same.
    """

    plan: Plan
    efficiency: float
    otherwise: Plan | None

    @property
    def received_bytes(self) -> int:
        return sum(self.plan.communicated.values()) // self.plan.accumulation


def scaled_plans(
    plan: Plan, numbers: Sequence[int], accumulations: Sequence[int], network: float = NETWORK_BYTES_PER_SECOND
) -> Iterator[ScaledPlan]:
    """`plan`, which is for one GPU, made again for each number of GPUs and of micro-batches.

    `network`: bytes per second that a GPU receives from other hosts.
    """
    machine = plan.basis.hardware
    assert machine is not None
    for accumulation in accumulations:
        alone = replanned(plan, gradient_accumulation=accumulation).tokens_per_second
        for number in numbers:
            share = for_ranks(machine, number, network=network)
            layers = tuple(layer.shared_by(number) for layer in plan.layers)
            other = replanned(replace(plan, layers=layers), hardware=share, gradient_accumulation=accumulation)
            assert alone is not None
            assert other.tokens_per_second is not None
            otherwise = with_other_exchange(other) if min(number, accumulation) > 1 else None
            yield ScaledPlan(other, other.tokens_per_second / (number * alone), otherwise)


def scaling_table(
    plan: Plan, numbers: Sequence[int], accumulations: Sequence[int], network: float = NETWORK_BYTES_PER_SECOND
) -> str:
    """`scaled_plans` as a table in Markdown. The last column is for the other order of exchange."""
    head: tuple[str, ...] = ("GPUs", "micro-batches", "VRAM each", "RAM a host", "received a micro-batch", "step")
    order = "micro_batch" if plan.basis.config.exchange == "step" else "step"
    head += ("tokens/s", "scaling", f'tokens/s, "{order}"')
    rows = [head, ("---:",) * len(head)]
    for each in scaled_plans(plan, numbers, accumulations, network):
        otherwise = f"{each.otherwise.tokens_per_second:,.0f}" if each.otherwise else "-"
        cells = _cells(each.plan, f"{each.plan.accumulation}", each.received_bytes)
        rows.append((*cells, f"{each.efficiency:.2f}", otherwise))
    return _in_markdown(rows)
