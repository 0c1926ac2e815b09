"""How a run scales: one plan made again for more GPUs, more micro-batches and slower links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offloadkit.facts.units import format_bytes, format_seconds
from offloadkit.planner.make import replanned, with_other_exchange
from offloadkit.planner.plan import Plan
from offloadkit.planner.ranks import NETWORK_BYTES_PER_SECOND, for_ranks


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
        made, needs = each.plan, each.plan.needs()
        assert made.seconds is not None
        rows.append(
            (
                f"{made.num_gpus}",
                f"{made.accumulation}",
                format_bytes(needs["vram"]),
                format_bytes(needs["ram"] * made.num_on_host),
                format_bytes(each.received_bytes) if each.received_bytes else "-",
                format_seconds(made.seconds.step, digits=3),
                f"{made.tokens_per_second:,.0f}",
                f"{each.efficiency:.2f}",
                f"{each.otherwise.tokens_per_second:,.0f}" if each.otherwise else "-",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
