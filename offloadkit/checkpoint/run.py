"""All numbers of a run by name, and the checkpoint folder that holds them.

| File | Holds |
|---|---|
| `states-RANK-of-RANKS.safetensors` | optimizer states, by parameter name and range; none with `save_only_model` |
| `run.json` | options by group, counts, summation, scheduler, position in the data, checksums of frozen weights |
| `random.json` | random states of rank 0; later ranks write `random-RANK.json` |
| `order.json` | Trainer only: the random state that an epoch's order by length was drawn from |
| `weights.safetensors` | trained and written weights, buffers; the Trainer writes HuggingFace's files instead |
| `manifest.json` | run, attempt and update; contents; all files, their sizes and checksums; written last |

Every file but the manifest records the run, attempt, update and its own name under `origin`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offloadkit.checkpoint.arrays import ArrayFile, PeriodicCall
from offloadkit.checkpoint.base import Base
from offloadkit.checkpoint.folder import (
    MANIFEST,
    check_readable,
    check_room,
    explained_write_errors,
    recover_folder,
    replace_folder,
    write_manifest,
)
from offloadkit.checkpoint.one_run import another_writer
from offloadkit.checkpoint.origin import ORIGIN, Origin
from offloadkit.checkpoint.states import Ranges, SavedStates, States, write_states
from offloadkit.checkpoint.values import (
    check_random_states,
    random_states,
    read_json,
    set_random_states,
    why_unlike,
    write_json,
)
from offloadkit.checkpoint.weights import WEIGHT_FILE, check_weights, load_weights, num_bytes_of, write_weights
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.errors import ConfigError, ModelError, shown
from offloadkit.facts.config import Contents, OffloadConfig
from offloadkit.optim.table import options_of, saved_dtype

RUN_FILE = "run.json"
RANDOM_FILE = "random.json"
RANDOM_FILE_OF_RANK = "random-{:05}.json"


@dataclass(frozen=True)
class SummationOrder:
    """How the gradients of an update are summed, which fixes the order of additions."""

    num_ranks: int
    gradient_accumulation: int
    """Micro-batches per rank."""
    exchange: str

    @property
    def num_sums(self) -> int:
        """One partial sum per rank if ranks sum locally first, 1 if micro-batches are added one by one."""
        adds_first = self.exchange == "step" and self.gradient_accumulation > 1
        return self.num_ranks if adds_first else 1

    def order_warning(self, now: SummationOrder) -> str | None:
        """A warning if a run saved with this order resumes with another one, else None."""
        if self.num_sums == now.num_sums:
            return None
        return (
            f"gradients were summed by {self} before and are summed by {now} now, in another order, so the last bits "
            f"of the weights differ from an uninterrupted run. {self} continue bit for bit; with "
            "exchange='micro_batch' from the start, so does any number of ranks"
        )

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        return f"{ranks} x {self.gradient_accumulation} micro-batches with exchange={self.exchange!r}"


@dataclass(frozen=True)
class RunSnapshot:
    """All numbers of a run by name, for saving and resuming. The tensors are live: use them between updates."""

    weights: Mapping[str, Any]
    """The module's `state_dict()`, without frozen weights that the program has not written."""
    states: States
    ranges: Ranges
    """Ranges of `states`; with several ranks, this rank's part."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of trained parameters."""
    groups: list[dict[str, Any]]
    """Options of each parameter group, and its parameters' names under "parameters"."""
    facts: dict[str, Any]
    """Values that a resumed run must share: "optimizer", "precision", and "seed" with stochastic rounding."""
    counts: dict[str, Any]
    """"num_updates" and "loss_scale"."""
    summation: SummationOrder
    origin: Origin
    forget_pages: Callable[[], None]
    """Drops mapped pages of on-disk states from RAM."""
    reset_states: Callable[[], None]
    """Sets moments and step counts to zero and the master weights to the working weights."""
    config: OffloadConfig
    base: Base | None = None
    """The frozen weights; None if there are none."""

    @property
    def contents(self) -> Contents:
        return self.config.checkpoint_contents

    def num_bytes(self, num_ranks: int = 1, contents: Contents | None = None) -> int:
        """Bytes of a checkpoint with `contents` (None: the config's)."""
        size = 0
        for name, array in ((name, array) for arrays in self.states.values() for name, array in arrays.items()):
            if (dtype := saved_dtype(name, array.dtype, contents or self.contents)) is not None:
                size += array.numel() * dtype.itemsize
        return num_bytes_of(self.weights) + num_ranks * size

    def smaller(self, num_ranks: int = 1) -> dict[str, int]:
        """Bytes of smaller checkpoints, by the option that chooses them."""
        return {
            option: self.num_bytes(num_ranks, contents) for contents, option in self.config.smaller_checkpoints.items()
        }

    def write(self, folder: Path, rank: int = 0, num_ranks: int = 1, **more: Any) -> None:
        """Write optimizer states into `folder`, and on rank 0 the values and `more`. No weights or random states."""
        if rank == 0:
            self.write_values(folder, **more)
        self.write_states(folder, rank, num_ranks)

    def write_values(self, folder: Path, **more: Any) -> None:
        values = {"facts": self.facts, "groups": self.groups, "counts": self.counts, "adding": asdict(self.summation)}
        if self.base is not None:
            values["base"] = self.base.to_dict()
        values |= {ORIGIN: self.origin.of_file(RUN_FILE), **more}
        write_json(folder / RUN_FILE, values)

    def write_states(self, folder: Path, rank: int = 0, num_ranks: int = 1) -> None:
        between = PeriodicCall(self.forget_pages)
        how = self.origin, self.contents, self.config.seed
        write_states(folder, self.states, self.ranges, self.shapes, between, *how, rank, num_ranks)
        between.finish()

    def weights_among(self, names: Collection[str]) -> dict[str, Any]:
        """The weights to load from a file with `names`: all but the frozen ones that it lacks."""
        frozen = {} if self.base is None else self.base.weights
        return {
            name: weight for name, weight in {**self.weights, **frozen}.items() if name in names or name not in frozen
        }

    def check(self, folder: Path, saved: SavedStates, loaded: Collection[str] = ()) -> dict[str, Any]:
        """Check that this run can resume from the saved values; returns the values in `run.json`, with the manifest's
        "contents". Changes nothing.

        Args:
            loaded: names of weights that will be loaded.

        Raises:
            ModelError: parameters, shapes, groups or frozen weights differ, or a file is truncated or broken.
            ConfigError: the optimizer, precision, working dtype or seed differs.
        """
        path = folder / RUN_FILE
        values = read_json(path)
        number: dict[str, Any] = {"lr": 0.0, "betas": [0.0], "eps": 0.0, "weight_decay": 0.0}
        wanted: dict[str, Any] = {"facts": {}, "groups": [{"options": number, "parameters": [""]}]}
        wanted |= {"counts": {"num_updates": 0, "loss_scale": None}, "adding": asdict(self.summation)}
        why = why_unlike(values, wanted, "it", whole=True)
        if why is None and (scale := values["counts"]["loss_scale"]) is not None:
            why = why_unlike(scale, self.counts["loss_scale"], "loss_scale", whole=True)
        if why is None and (type(done := values["counts"]["num_updates"]) is not int or done < 0):
            why = f"num_updates is {shown(done)}, but a whole number >= 0 is needed"
        if why is not None:
            raise ModelError(f"{path} cannot be read ({why}): it is truncated or corrupt")
        for at, group in enumerate(values["groups"]):
            try:
                options_of(group["options"])
            except ConfigError as error:
                raise ModelError(f"{path}, group {at}: {error}") from error
        values["adding"] = {name: values["adding"][name] for name in asdict(self.summation)}
        facts, groups = values["facts"], values["groups"]
        members = [group["parameters"] for group in groups]
        for name, own in self.facts.items():
            if facts.get(name, own) != own:
                raise ConfigError(
                    f"{path}: the run was saved with {name}={facts[name]!r}, this run has {own!r}: resume with "
                    f"OffloadConfig({name}={facts[name]!r})"
                )
        saved.check(self.states, self.ranges, self.shapes)
        if len(groups) != len(self.groups):
            raise ModelError(f"{path}: the saved run has {len(groups)} parameter groups, this run {len(self.groups)}")
        for at, (theirs, group) in enumerate(zip(members, self.groups, strict=True)):
            if set(theirs) != set(group["parameters"]):
                other = sorted(set(theirs) ^ set(group["parameters"]))[0]
                raise ModelError(f"{path}: parameter group {at} of the saved run and of this run differ in {other!r}")
        if self.base is not None:
            self.base.check(path, values.get("base"), loaded)
        return values | {"contents": saved.contents}

    def load_states(self, saved: SavedStates) -> None:
        """Load the saved states, or begin with new ones if the checkpoint has none."""
        if not saved.has_states:
            self.reset_states()
            return
        between = PeriodicCall(self.forget_pages)
        saved.load(self.states, self.ranges, between)
        between.finish()


def save_run(folder: Path, numbers: RunSnapshot, ranks: Ranks = SOLO, **more: Any) -> None:
    """Write a checkpoint with weights and random states, replacing an older one in `folder`.

    Several ranks write their states into a temporary folder; rank 0 then writes the rest, the manifest last. After an
    error `folder` still holds its old files.

    Raises:
        OutputError: writing fails, or `folder` holds other files.
        ConfigError, ModelError: a value cannot be serialized.
        RankError: another rank failed.
    """
    if ranks.size == 1:

        def write_alone(new: Path) -> None:
            _check_room(folder, numbers, 1)
            numbers.write(new, **more)

        _save(folder, write_alone, numbers)
        return
    beside, first = folder.with_name(f".{folder.name}-ranks"), ranks.rank == 0
    try:
        with ranks.together("beginning a checkpoint"), explained_write_errors(folder):
            if first:
                _check_room(folder, numbers, ranks.size)
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
        with ranks.together("writing optimizer states"), explained_write_errors(folder):
            numbers.write_states(beside, ranks.rank, ranks.size)
            if not first:
                write_random(beside, numbers.origin, ranks.rank)

        def write(new: Path) -> None:
            check_room(folder, num_bytes_of(numbers.weights), "a checkpoint")
            numbers.write_values(new, **more)
            for path in beside.iterdir():
                path.rename(new / path.name)

        with ranks.together("writing a checkpoint"):
            if first:
                _save(folder, write, numbers)
    finally:
        if first:
            shutil.rmtree(beside, ignore_errors=True)


def _check_room(folder: Path, numbers: RunSnapshot, num_ranks: int) -> None:
    check_room(folder, numbers.num_bytes(num_ranks), "a checkpoint", smaller=numbers.smaller(num_ranks))


def _save(folder: Path, write_numbers: Callable[[Path], None], numbers: RunSnapshot) -> None:
    def write(new: Path) -> None:
        write_numbers(new)
        write_weights(new, numbers.weights, numbers.origin)
        write_random(new, numbers.origin)
        write_manifest(new, numbers.origin, numbers.contents)

    replace_folder(folder, write, MANIFEST)


def check_run(folder: Path, ranks: Ranks = SOLO) -> None:
    """Verify all files of a checkpoint on rank 0, after restoring a folder that was moved when saving was killed."""
    with ranks.together("checking a checkpoint"):
        if ranks.rank == 0:
            if (other := another_writer(folder)) is None:
                recover_folder(folder)
            else:
                warnings.warn(other, RuntimeWarning, stacklevel=3)
            check_readable(folder)


def load_run(
    folder: Path,
    numbers: RunSnapshot,
    *,
    scheduler: dict[str, Any] | None,
    took_weights: Callable[[], None],
    ranks: Ranks = SOLO,
) -> dict[str, Any]:
    """Load a checkpoint of `save_run` into the live tensors and the random generators. A collective.

    Args:
        scheduler: this run's scheduler state, to compare with the saved one.
        took_weights: called after the weights are loaded and before the optimizer states are.
        ranks: a rank without saved random states takes rank 0's.

    Returns:
        The values in `run.json`.

    Raises:
        ModelError, ConfigError: see `RunSnapshot.check`, or the checkpoint is incomplete. Nothing is changed then.
    """
    check_run(folder, ranks)
    if not (folder / WEIGHT_FILE).is_file():
        raise ModelError(
            f"{folder} has no {WEIGHT_FILE}: a Trainer wrote it. Resume it with the Trainer, or with finetune"
        )
    with SavedStates(folder) as saved, ArrayFile(folder / WEIGHT_FILE) as weights:
        values, own = numbers.check(folder, saved, weights.arrays), numbers.weights_among(weights.arrays)
        check_weights(weights, own)
        states = _random_of(folder, ranks.rank)
        if scheduler is not None:
            check_scheduler(folder, values, scheduler)
        load_weights(weights, own)
        took_weights()
        numbers.load_states(saved)
    set_random_states(states)
    return values


def check_scheduler(folder: Path, values: dict[str, Any], own: dict[str, Any]) -> None:
    """Check that the saved scheduler state in `values` (from `run.json`) fits this run's scheduler state `own`.

    Raises:
        ConfigError: the checkpoint has no scheduler state.
        ModelError: the saved state has a different structure.
    """
    if values.get("scheduler") is None:
        raise ConfigError(
            f"{folder} has no scheduler state, because the run was saved without a scheduler. Leave out scheduler="
        )
    saved = values["scheduler"]
    comparable = dict(own)
    if isinstance(saved, dict) and isinstance(functions := saved.get("lr_lambdas"), list):
        # torch saves None for a plain function in lr_lambdas and ignores it on load, so do not compare those entries
        comparable["lr_lambdas"] = [None if None in functions else each for each in own.get("lr_lambdas", [])]
    why = why_unlike(saved, comparable, "scheduler")
    for name, value in own.items() if why is None else ():
        if isinstance(value, list) and name in saved and len(saved[name]) != len(value):
            why = f"{name} of its scheduler has {len(saved[name])} values, but this run's has {len(value)}"
    if why is not None:
        raise ModelError(
            f"{folder / RUN_FILE} cannot be read ({why}): it is corrupt, or from a run with another scheduler"
        )


def write_random(folder: Path, origin: Origin, rank: int = 0) -> None:
    name = RANDOM_FILE_OF_RANK.format(rank) if rank else RANDOM_FILE
    write_json(folder / name, {ORIGIN: origin.of_file(name), **random_states()})


def read_random(folder: Path, rank: int = 0) -> None:
    """Restore this rank's random states from a checkpoint folder, or rank 0's if this rank has none."""
    set_random_states(_random_of(folder, rank))


def _random_of(folder: Path, rank: int) -> Any:
    own = folder / RANDOM_FILE_OF_RANK.format(rank)
    path = own if own.is_file() else folder / RANDOM_FILE
    states = read_json(path)
    check_random_states(states, path)
    return states
