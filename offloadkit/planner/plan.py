"""`Plan`: the prediction of a run and its words; `make_plan` makes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from offloadkit.errors import DoesNotFitError
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware
from offloadkit.planner import remedies, words
from offloadkit.planner.layout import LayerShape
from offloadkit.planner.make import make
from offloadkit.planner.prediction import Basis, FrozenModel, Prediction
from offloadkit.planner.work import MicroBatch


class Plan(Prediction):
    """The memory of a run and the seconds of its steps, computed from shapes alone. See `Prediction` for the
    figures.
    """

    @property
    def verdict(self) -> str:
        """One line: whether the plan fits, on which assumed card or on the CPU; needed and available memory of the
        worst phase, seconds of a step, tokens/s.
        """
        return words.verdict(self)

    def explain(self) -> str:
        """Sentences with numbers: the bottleneck of the step and remedies. If the plan does not fit, a numbered list of
        plans that would, as calls or commands with other options if possible.
        """
        return remedies.explain(self)

    def details(self) -> str:
        """Lines of at most 80 columns: all placements, a table of bytes, the seconds and each phase's peak."""
        return words.details(self)

    def to_dict(self) -> dict[str, Any]:
        """The whole prediction in JSON types."""
        rows, seconds = self.rows, self.seconds
        return {
            "fits": self.fits,
            "num_parameters": self.num_parameters,
            "num_trainable_parameters": self.num_trainable_parameters,
            "batch_size": rows.batch_size if rows else None,
            "input_length": rows.input_length if rows else None,
            "target_length": rows.target_length if rows else None,
            "gradient_accumulation": self.accumulation,
            "bytes": self.tiers,
            "total_bytes": {tier: self.total_bytes(tier) for tier in self.tiers},
            "available_bytes": self.budgets,
            "missing_bytes": self.lacking(),
            "graphs": asdict(self.graphs) if self.graphs else None,
            "phases": [asdict(phase) for phase in self.phases],
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_peak_bytes": self.checkpoint_peak_bytes,
            "num_tokens": self.num_tokens,
            "num_gpus": self.num_gpus,
            "communicated_bytes": self.communicated,
            "step_seconds": seconds.step if seconds else None,
            "step_range_seconds": self.step_range,
            "bound_seconds": self.bound.step if self.bound else None,
            "busy_seconds": dict(seconds.busy) if seconds else None,
            "exposed_seconds": seconds.exposed if seconds else None,
            "tokens_per_second": self.tokens_per_second,
            "slowdown": self.slowdown,
            "rates_are_assumed": self.basis.assumed,
            "assumed": " ".join(words.assumed(self)),
            "layers": [
                {"name": layer.name, "num_parameters": layer.num_parameters, **vars(where)}
                for layer, where in zip(self.layers, self.placements, strict=True)
            ],
            "verdict": self.verdict,
            "explanation": self.explain().splitlines(),
        }

    def __repr__(self) -> str:
        return f"Plan({words.one_line(self)})"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {line}" for line in words.about(self))])

    def _repr_html_(self) -> str:
        if self.fits:
            return words.card(self, self.explain().splitlines(), [])
        found = [(each.call, each.words, each.takes) for each in remedies.remedies(self)]
        return words.card(self, remedies.notes(self), found)


def make_plan(
    layers: Sequence[LayerShape],
    config: OffloadConfig,
    *,
    frozen: int = 0,
    frozen_bytes: int = 0,
    work: MicroBatch | None = None,
    hardware: Hardware | None = None,
    assumed: bool = False,
    unsaved_bytes: int = 0,
    saves_adapters: bool = False,
    frozen_models: tuple[FrozenModel, ...] = (),
) -> Plan:
    """The plan of a model cut into `layers`; see `make`, and `Basis` for the other arguments."""
    basis = Basis(config, frozen, frozen_bytes, work, hardware, assumed, unsaved_bytes=unsaved_bytes)
    return make(Plan, layers, replace(basis, saves_adapters=saves_adapters, frozen_models=frozen_models))


def check_fits(plan: Plan) -> None:
    """Raise `DoesNotFitError`, with needed and available memory and plans that fit, unless the plan fits."""
    if not plan.fits:
        raise DoesNotFitError(f"the plan {words.misfit_message(plan)}\n{plan.explain()}\n({words.trained(plan)})")
