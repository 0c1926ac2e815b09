"""offloadkit: exact AdamW training with what does not fit on the GPU in host RAM.

Public names are imported on first use: `import offloadkit` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offloadkit.facts.changes import Change, register
from offloadkit.facts.config import Reader, register_reader
from offloadkit.facts.shell import print_warnings_in_notebooks
from offloadkit.facts.starting import collector_off, is_loaded, say
from offloadkit.facts.version import __version__

if TYPE_CHECKING:
    from offloadkit.deepspeed.engine import add_config_arguments, init_distributed, initialize
    from offloadkit.deepspeed.training import deepspeed_arguments
    from offloadkit.doors.comparing.comparison import Comparison, compare
    from offloadkit.doors.comparing.slowdown import Slowdown, measure_slowdown
    from offloadkit.doors.comparing.sweeping import Sweep, sweep
    from offloadkit.doors.finetuning import FinetuneResult, finetune
    from offloadkit.doors.planning import plan
    from offloadkit.engine.engine import OffloadEngine
    from offloadkit.errors import OffloadkitError
    from offloadkit.facts.config import DynamicLossScale, MuonOptions, OffloadConfig, Placement
    from offloadkit.facts.telemetry import StepRecord, Telemetry
    from offloadkit.hf.source import from_pretrained
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer, OffloadTrainerMixin
    from offloadkit.hf.widths import pad_to_few_widths
    from offloadkit.monitor.monitor import Monitor
    from offloadkit.offload.profiling import breakdown

_HOME = {
    "Comparison": "doors.comparing.comparison",
    "DynamicLossScale": "facts.config",
    "FinetuneResult": "doors.finetuning",
    "Monitor": "monitor.monitor",
    "MuonOptions": "facts.config",
    "OffloadConfig": "facts.config",
    "OffloadEngine": "engine.engine",
    "OffloadSeq2SeqTrainer": "hf.trainer",
    "OffloadTrainer": "hf.trainer",
    "OffloadTrainerMixin": "hf.trainer",
    "OffloadkitError": "errors",
    "Placement": "facts.config",
    "Slowdown": "doors.comparing.slowdown",
    "StepRecord": "facts.telemetry",
    "Sweep": "doors.comparing.sweeping",
    "Telemetry": "facts.telemetry",
    "add_config_arguments": "deepspeed.engine",
    "breakdown": "offload.profiling",
    "compare": "doors.comparing.comparison",
    "deepspeed_arguments": "deepspeed.training",
    "finetune": "doors.finetuning",
    "from_pretrained": "hf.source",
    "init_distributed": "deepspeed.engine",
    "initialize": "deepspeed.engine",
    "measure_slowdown": "doors.comparing.slowdown",
    "pad_to_few_widths": "hf.widths",
    "plan": "doors.planning",
    "sweep": "doors.comparing.sweeping",
}
"""Modules of the public names. No module has the name of a public function, so that neither hides the other."""

__all__ = [
    "Comparison",
    "DynamicLossScale",
    "FinetuneResult",
    "Monitor",
    "MuonOptions",
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
    "add_config_arguments",
    "breakdown",
    "compare",
    "deepspeed_arguments",
    "finetune",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "measure_slowdown",
    "pad_to_few_widths",
    "plan",
    "sweep",
]


def _change_of_transformers() -> Change:
    from offloadkit.hf.patches import patched

    return patched


def _reader_of_deepspeed() -> Reader:
    from offloadkit.deepspeed.config import offload_config

    return offload_config


register("transformers", _change_of_transformers)
register_reader(_reader_of_deepspeed)
print_warnings_in_notebooks(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'offloadkit' has no attribute {name!r}")
    if name == "finetune" and not is_loaded("torch"):
        say("loading torch")
    with collector_off():
        value = getattr(import_module(f"offloadkit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])
