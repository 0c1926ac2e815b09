"""Compares a Trainer's checkpoint with the run that resumes it: model, rows per update, `trainer_state.json`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerState

from offloadkit.checkpoint.folder import read_object
from offloadkit.checkpoint.values import why_unlike
from offloadkit.errors import ConfigError, ModelError, shown
from offloadkit.hf.hub import readable_hub_errors

_SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "d_kv"]
_SIZES += ["head_dim", "intermediate_size", "d_ff", "num_labels"]
_NOT_COMPUTED = re.compile(
    r"(^|\.)(_.*|name_or_path|transformers_version|architectures|dtype|torch_dtype|use_cache|return_dict|output_.*|"
    r"id2label.*|label2id.*|problem_type|task_specific_params.*|.*token_id|tie_word_embeddings)$"
)
"""Config keys that change neither shapes nor the computation in training, or that the Trainer sets."""


def check_same_model(checkpoint: Path, config: PreTrainedConfig) -> str | None:
    """Raise `ConfigError` if the checkpoint's model has another type or other sizes than `config`; returns a line that
    names other differing keys, such as dropout, or None.
    """
    path = checkpoint / "config.json"
    if not path.is_file():  # the Trainer's model had no config
        return None
    saved = read_object(path)
    sizes: dict[str, tuple[Any, Any]] = {"model_type": (saved.get("model_type"), config.model_type)}
    differing = []
    if saved.get("model_type") == config.model_type:
        with readable_hub_errors(str(checkpoint), found=True, file=path.name):
            before = type(config).from_dict(saved)
        for name in _SIZES:
            sizes[name] = getattr(before, name, None), getattr(config, name, None)
        was, now = _flat(before.to_dict()), _flat(config.to_dict())
        differing = [
            f"{name} {was.get(name)} (now {now.get(name)})"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name) and not _NOT_COMPUTED.search(name)
        ]
    for name, (value, own) in sizes.items():
        if value != own:
            raise ConfigError(
                f"{checkpoint} is from another model, with {name} {value}, but this model has {own}: resume with the "
                "model of that run, or pass another output_dir"
            )
    return f"the config in {checkpoint} differs from this model's: {', '.join(differing)}" if differing else None


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def other_rows(checkpoint: Path, batch_size: int, accumulation: int, num_ranks: int) -> str | None:
    """A warning if the number of rows per update has changed, else None.

    The Trainer derives the position in the dataset from the number of steps, so it would continue at another row.
    """
    before = _saved_count(checkpoint / "trainer_state.json", "train_batch_size")
    if before in (None, batch_size):
        return _other_micro_batches(checkpoint, accumulation, num_ranks)
    return (
        f"batch_size is {batch_size} now and was {before}: the number of steps continues, at {batch_size} rows each, "
        f"so some rows are {'seen again' if batch_size < before else 'left out'}, and the weights differ from an "
        f"uninterrupted run; batch_size={before} continues exactly"
    )


def warn_of_later_pass(trainer: Any) -> None:
    """Warn if a stream's checkpoint is not from its first pass. transformers counts all rows learned as rows of the
    first pass, and then begins again.
    """
    passes = trainer.state.epoch or 0.0  # 1.0 at the last step of a run within the first pass
    if passes <= 1 or trainer.args.ignore_data_skip or not trainer.is_world_process_zero():
        return
    warnings.warn(
        f"the checkpoint is from pass {int(passes) + 1} over the stream of rows, and a Trainer skips rows of one pass: "
        "training goes on at the stream's first row, so some rows are seen again or left out, and the weights differ "
        "from an uninterrupted run. A stream that never ends continues exactly: repeat its rows in its __iter__ "
        "(datasets: .repeat(None)), and pass max_steps",
        RuntimeWarning,
        stacklevel=2,
    )


def other_length(checkpoint: Path, max_steps: int) -> bool:
    """Whether the run of the checkpoint was to end after another number of steps."""
    path = checkpoint / "trainer_state.json"
    return path.is_file() and _saved_count(path, "max_steps") not in (None, max_steps)


def follow_own_schedule(scheduler: Any) -> None:
    """Set the learning rates to the scheduler's own at its step.

    The rates of a checkpoint follow the schedule of its run: at the end of that run they are 0, and a longer run would
    begin with a step that does nothing. Schedulers that are no functions of the step keep the checkpoint's rates.
    """
    functions = getattr(scheduler, "lr_lambdas", None)
    if functions is None:
        return
    groups = scheduler.optimizer.param_groups
    rates = [rate * at(scheduler.last_epoch) for rate, at in zip(scheduler.base_lrs, functions, strict=True)]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _saved_count(path: Path, name: str) -> int | None:
    """A whole number >= 1 from a JSON file, or None. Raises `ModelError` for another value."""
    count = read_object(path).get(name)
    if count is not None and (type(count) is not int or count < 1):
        raise ModelError(f"{path}: {name} is {shown(count)}, but a whole number is needed: it is corrupt")
    return count


def _other_micro_batches(checkpoint: Path, accumulation: int, num_ranks: int) -> str | None:
    arguments = checkpoint / "training_args.json"
    of_each = _saved_count(arguments, "gradient_accumulation_steps") if arguments.is_file() else None
    ranks = len(list(checkpoint.glob("random*.json")))
    if of_each is None or ranks == 0 or of_each * ranks == accumulation * num_ranks:
        return None
    exactly = f"{of_each * ranks} in all continue exactly"
    if of_each * ranks % num_ranks == 0:
        exactly = f"gradient_accumulation={of_each * ranks // num_ranks} continues exactly"
    return (
        f"an update has {accumulation * num_ranks} micro-batches of all ranks now and had {of_each * ranks}: the "
        "number of steps continues, so some rows are seen again or left out, and the weights differ from an "
        f"uninterrupted run; {exactly}"
    )


_TRAINER_STATE: dict[str, Any] = {
    "global_step": 0, "max_steps": 0, "logging_steps": 0, "eval_steps": 0, "save_steps": 0, "num_train_epochs": 0,
    "train_batch_size": 0, "epoch": 0.0, "num_input_tokens_seen": 0, "total_flos": 0, "log_history": [{"step": 0}],
    "best_metric": 0.0, "best_global_step": 0, "best_model_checkpoint": "", "stateful_callbacks": {},
}  # fmt: skip
"""Example values of `trainer_state.json`, for their types; every value may also be null."""


def check_trainer_state(path: Path) -> None:
    state = read_object(path)
    said = {name: value for name, value in state.items() if value is not None}
    why = why_unlike(said, _TRAINER_STATE, "it")
    if why is None and (unknown := sorted(state.keys() - vars(TrainerState()).keys())):
        why = f"transformers knows no {shown(unknown[0])}"
    for name in ("global_step", "max_steps"):
        if why is None and (type(number := said.get(name)) is not int or number < 0):
            why = f"{name} is {shown(number)}, but a whole number is needed"
    if why is not None:
        raise ModelError(f"{path} cannot be read ({why}): it is truncated or corrupt")
