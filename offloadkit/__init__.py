"""offloadkit: exact AdamW training with what does not fit on the GPU in host RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# offloadkit.plan, offloadkit.finetune and offloadkit.compare are modules too. Importing one binds its name to the
# module, once; all are imported by the time that the lines below bind the names to the functions.
from offloadkit.compare import Comparison, Slowdown, Sweep, compare, measure_slowdown, sweep
from offloadkit.config import OffloadConfig, Placement
from offloadkit.engine import OffloadEngine
from offloadkit.errors import OffloadkitError
from offloadkit.finetune import FinetuneResult, finetune
from offloadkit.monitor import Monitor
from offloadkit.planning import plan
from offloadkit.profiling import breakdown
from offloadkit.telemetry import StepRecord, Telemetry

if TYPE_CHECKING:
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer, OffloadTrainerMixin

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "FinetuneResult",
    "Monitor",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadSeq2SeqTrainer",
    "OffloadTrainer",
    "OffloadTrainerMixin",
    "OffloadkitError",
    "Placement",
    "Slowdown",
    "StepRecord",
    "Sweep",
    "Telemetry",
    "__version__",
    "breakdown",
    "compare",
    "finetune",
    "measure_slowdown",
    "plan",
    "sweep",
]

_NEED_TRANSFORMERS = ("OffloadTrainer", "OffloadSeq2SeqTrainer", "OffloadTrainerMixin")


def __getattr__(name: str) -> Any:
    """The Trainers, whose import loads transformers, when they are first asked for."""
    if name in _NEED_TRANSFORMERS:
        from offloadkit.hf import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'offloadkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
