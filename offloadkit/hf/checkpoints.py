"""Saves and resumes a Trainer: its checkpoint folders, with data files instead of the Trainer's pickles."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedConfig
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from offloadkit.checkpoint.folder import (
    MANIFEST,
    check_readable,
    check_room,
    colab_disk_warning,
    explained_write_errors,
    free_bytes,
    newest_checkpoint,
    rotate_checkpoints,
    set_aside,
    write_manifest,
)
from offloadkit.checkpoint.run import read_random, write_random
from offloadkit.checkpoint.weights import num_bytes_of
from offloadkit.distributed import world
from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts.files import path_of
from offloadkit.facts.units import format_bytes
from offloadkit.hf.adapters import ADAPTERS, adapters_of, check_same_adapters, has_adapters
from offloadkit.hf.losses import WithLosses
from offloadkit.hf.ragged import ResumableOrder
from offloadkit.hf.resumed import check_same_model, check_trainer_state
from offloadkit.hf.saving import arguments_as_data, load_in_pieces, read_later, saved_in_pieces
from offloadkit.hf.streams import EndlessRows
from offloadkit.hf.trained import phase_of, print_on_rank_0, ranks_of, trained_module
from offloadkit.offload.unread import is_unread, make_real
from offloadkit.planner import Plan


def checkpoint_folder(trainer: Any, trial: Any = None) -> Path:
    return Path(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")


class TrainerCheckpoints:
    """The checkpoints of one Trainer.

    Attributes:
        order: the row order by length that a checkpoint includes, or None.
        newest: the last checkpoint written or loaded in this run, for a rollback.
        save_seconds: the time of the slowest save.
    """

    def __init__(self) -> None:
        self.order: ResumableOrder | None = None
        self.newest: Path | None = None
        self.save_seconds = 0.0
        self._is_saving = False

    # -- before training

    def find(self, trainer: Any, given: str | bool) -> str:
        """Check and return the checkpoint to resume from: `given`, or if True the newest complete one in the output
        folder.
        """
        recut = trainer.offload.resume_incomplete
        if given is True:
            found = newest_checkpoint(Path(trainer.args.output_dir), recut=recut)
        else:
            found = path_of(given, "resume_from_checkpoint")
            check_readable(found, recut=recut)
        check_trainer_state(found / TRAINER_STATE_NAME)
        if not (found / MANIFEST).is_file():
            _check_of_transformers(trainer, found)
        config = getattr(trainer.model, "config", None)
        if isinstance(config, PreTrainedConfig) and (differing := check_same_model(found, config)) is not None:
            print_on_rank_0(trainer, f"{differing}. The run goes on with this model's")
        if (found / ADAPTERS).is_file() and (said := check_same_adapters(found, adapters_of(trainer.model))):
            print_on_rank_0(trainer, f"{said}. The run goes on with this run's")
        return str(found)

    def check_room_by_plan(self, trainer: Any, plan: Plan | None) -> None:
        """`check_room` before a large model is read, as far as the number of saves is known. The plan's bytes are those
        of one rank without adapters.
        """
        args = trainer.args
        if plan is None or args.world_size > 1 or has_adapters(trainer.model):
            return
        num_epochs = 1 if args.max_steps > 0 else ceil(args.num_train_epochs)
        smaller = plan.basis.config.smaller_checkpoints
        _check_room(
            Path(args.output_dir),
            min(_num_saves(args, max(0, args.max_steps), num_epochs), 2),
            plan.checkpoint_bytes,
            plan.model_bytes if trainer.saves_model else 0,
            {option: plan.checkpoint_bytes_of(contents) for contents, option in smaller.items()},
        )

    def check_room(self, trainer: Any, num_steps: int) -> None:
        """Raise `OutputError` unless the disk has room for two checkpoints, one of which replaces the other, and for
        the model.

        Prints a line if the disk is too small for all checkpoints, if only one is kept, and if a runtime such as
        Colab's deletes them.
        """
        args = trainer.args
        is_endless = isinstance(trainer.train_dataset, EndlessRows)
        num_saves = _num_saves(args, num_steps, 1 if is_endless else min(trainer.state.num_train_epochs, num_steps))
        num_bytes, smaller, model = _num_bytes(trainer)
        output, limit = Path(args.output_dir), args.save_total_limit
        with ranks_of(trainer).together("checking the disk"):
            if not args.should_save:
                return
            rest = model if trainer.saves_model else 0
            least = min(num_saves, 2)
            _check_room(output, least, num_bytes, rest, smaller)
            if (least or rest) and (lost := colab_disk_warning(output)) is not None:
                print_on_rank_0(trainer, lost)
            if limit == 1 and num_saves > 1:
                print_on_rank_0(
                    trainer,
                    "save_total_limit=1 keeps the newest checkpoint alone: if that one is broken, there is none before "
                    "it to go back to. save_total_limit=2 keeps two",
                )
            most = num_saves if not limit else min(num_saves, limit + 1)
            room = (free_bytes(output) - rest) // max(1, num_bytes)
            if room < most:
                print_on_rank_0(
                    trainer,
                    f"{output} has room for {room} checkpoints of {format_bytes(num_bytes)}, and up to {most} will be "
                    "there: pass a smaller save_total_limit, or make room",
                )

    # -- saving

    def save(self, trainer: Any, trial: Any, write: Callable[[], None]) -> None:
        """Save a checkpoint of the current step with the Trainer's `write`, and delete older ones when it is complete.

        Every rank calls it, and writes its states and random states; rank 0 writes everything else. Raises
        `OutputError` if the disk is full, and `RankError` if saving failed on another rank.
        """
        args, engine, limit = trainer.args, trainer.engine, trainer.args.save_total_limit
        folder = checkpoint_folder(trainer, trial)
        ranks = ranks_of(trainer)
        if engine is not None:  # on all ranks: rank 0 then reads the weights by itself
            num_bytes, smaller, _ = _num_bytes(trainer)
            with ranks.together("checking the disk"):
                if args.should_save:
                    check_room(folder.parent, num_bytes, f"checkpoint-{trainer.state.global_step}", smaller=smaller)
        args.save_total_limit, self._is_saving = None, True
        began = time.monotonic()
        try:
            replaced = set_aside(folder) if args.should_save else nullcontext()
            with phase_of(trainer, "saving"), explained_write_errors(folder.parent), replaced:
                with ranks.together("writing a checkpoint"):
                    write()
                    if args.save_only_model:  # the Trainer has left out the rest, which has no states
                        trainer._save_optimizer_and_scheduler(str(folder))
                        trainer._save_rng_state(str(folder))
                with ranks.together("writing a checkpoint"):
                    if args.should_save:
                        write_manifest(folder, engine.origin, engine.config.checkpoint_contents)
                if engine is not None:
                    engine.last_checkpoint = self.newest = folder.absolute()
        finally:
            args.save_total_limit, self._is_saving = limit, False
            self.save_seconds = max(self.save_seconds, time.monotonic() - began)
        if args.should_save:
            rotate_checkpoints(folder.parent, limit, trainer.state.best_model_checkpoint)

    def saving_model(self, trainer: Any) -> AbstractContextManager[None]:
        """A context for `save_model`. In a checkpoint, every rank waits in it until rank 0 has made the folder."""
        return ranks_of(trainer).together("writing the model") if self._is_saving else nullcontext()

    def save_weights(self, trainer: Any, folder: Path, save: Callable[[], None]) -> None:
        with saved_in_pieces(), arguments_as_data(folder, trainer), phase_of(trainer, "saving"):
            save()
            if self._is_saving and isinstance(trained := trained_module(trainer), WithLosses):
                trained.write(folder, trainer.engine.origin)

    def save_states(self, trainer: Any, folder: Path, **values: Any) -> None:
        """Write this rank's optimizer states; on rank 0 also scheduler and `values` to `run.json`."""
        rank, num_ranks = trainer.args.process_index, trainer.args.world_size
        values = {"scheduler": trainer.lr_scheduler.state_dict(), **values}
        trainer.engine.snapshot().write(folder, rank, num_ranks, **values)

    def save_random(self, trainer: Any, folder: Path) -> None:
        """Write this rank's random states; on rank 0 also the order of the rows."""
        origin = trainer.engine.origin
        write_random(folder, origin, trainer.args.process_index)
        if self.order is not None and trainer.args.should_save:
            self.order.write(folder, origin)

    # -- resuming

    def load_weights(self, trainer: Any, folder: Path, model: Any, load: Callable[..., None]) -> None:
        """Load weights into `model` (None: the Trainer's) in pieces; the Trainer's `load` does everything else.

        Unread weights are read from the checkpoint when the engine is built. Raises `ModelError` if weights do not
        match the model or a file is cut.
        """
        with phase_of(trainer, "resuming"):
            if is_unread(trainer.model):
                if read_later(trainer.model, folder):
                    return
                if has_adapters(trainer.model):  # its base is read when the engine places it
                    load(str(folder))
                    return
                make_real(trainer.model.parameters())
            ours = model is None and trainer.engine is None
            if not ours or not load_in_pieces(trainer.model, folder):
                given = () if model is None else (model,)  # sentence-transformers' method takes none
                try:
                    load(str(folder), *given)
                except ModelError as error:
                    raise ModelError(f"{folder}: {error}") from error
            if isinstance(trained := trained_module(trainer), WithLosses):
                trained.read(folder, incomplete=trainer.offload.resume_incomplete)

    def load_states(self, trainer: Any, folder: Path, load: Callable[[str], None]) -> dict[str, Any]:
        """Load states, scheduler and row order that this class saved, or transformers' own files with the Trainer's
        `load`.

        Returns the values in `run.json`; {} for a checkpoint of transformers' Trainer.
        """
        engine, scheduler = trainer.engine, trainer.lr_scheduler
        values: dict[str, Any] = {}
        if self.order is not None:
            self.order.read(folder)
        with phase_of(trainer, "resuming"):
            if engine is not None and (folder / MANIFEST).is_file():
                engine.drop_gradients()
                with ranks_of(trainer).together("resuming"):
                    values = engine.load_states(folder, scheduler=scheduler)
                scheduler.load_state_dict(values["scheduler"])
            elif not (folder / SCHEDULER_NAME).is_file():
                _load_optimizer_alone(trainer, folder)
            else:
                load(str(folder))
        if engine is not None:
            engine.last_checkpoint = self.newest = folder.absolute()
        return values

    def load_random(self, trainer: Any, folder: Path | None) -> bool:
        """Load random states that this class saved. Returns False for None and for a checkpoint of transformers'
        Trainer.

        The Trainer's loop calls it before it takes the rows if an epoch begins, else after it has taken the first rows.
        """
        if self.order is not None:
            self.order.reset()
        if folder is None or not (folder / MANIFEST).is_file():
            return False
        read_random(folder, trainer.args.process_index)
        return True


def check_best_model(trainer: Any) -> None:
    """Raise `ModelError` if the checkpoint of the best model is broken."""
    best = Path(str(trainer.state.best_model_checkpoint))
    if not (best / MANIFEST).is_file():
        return

    def check() -> None:
        check_readable(best, weights_alone=True)

    try:
        world.run_on_rank_0("checking the best model", check)
    except ModelError as error:
        raise ModelError(
            f"{error}. It is the best model's: to have the newest weights instead, go on with "
            "resume_from_checkpoint=True (resume=True) and load_best_model_at_end=False"
        ) from error


def missing_weights(trainer: Any, missing_keys: list[str]) -> list[str]:
    """`missing_keys` without tied weights that the checkpoint has under their other name.

    Raises:
        ModelError: the checkpoint lacks weights.
    """
    model = trainer.model
    weights = model.state_dict(keep_vars=True)
    loaded = {id(weight) for name, weight in weights.items() if name not in missing_keys}
    missing = [name for name in missing_keys if id(weights.get(name)) not in loaded]
    by_design = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    if (lost := [name for name in missing if name not in by_design]) and not trainer.offload.resume_incomplete:
        raise ModelError(
            f"the checkpoint lacks {len(lost)} of the model's {len(weights)} tensors, such as {lost[0]!r}: resume "
            "with the model of that run, or pass offload=OffloadConfig(resume_incomplete=True) to go on with the "
            "values that the model has"
        )
    return missing


def report_ignored_scaler(trainer: Any, folder: Path) -> None:
    if (path := folder / SCALER_NAME).is_file():
        print_on_rank_0(
            trainer, f"{path} is ignored: the engine scales the loss by itself, and begins with its own loss scale"
        )


def _num_saves(args: Any, num_steps: int, num_epochs: int) -> int:
    """The most checkpoints that a run of so many steps and epochs may save. Its last step saves one too."""
    strategy, every = args.save_strategy, args.save_steps
    if strategy == "best":  # after any evaluation
        strategy, every = args.eval_strategy, args.eval_steps
    if strategy in ("no", "epoch"):
        return 0 if strategy == "no" else num_epochs
    return ceil(num_steps / max(1, int(every if every >= 1 else ceil(num_steps * every))))


def _check_room(output: Path, num_checkpoints: int, num_bytes: int, model: int, smaller: Mapping[str, int]) -> None:
    """Raise `OutputError` unless the disk has room for so many checkpoints and the model.

    `smaller`: bytes of smaller checkpoints, by the option that chooses them.
    """
    what = ["the model", "a checkpoint", "two checkpoints"][num_checkpoints]
    what += " and the model" * (model > 0 and num_checkpoints > 0)
    without = "pass save_strategy='no', which writes no checkpoint" if num_checkpoints else ""
    with_option = {option: num_checkpoints * size + model for option, size in smaller.items() if num_checkpoints}
    check_room(output, num_checkpoints * num_bytes + model, what, without, with_option)


def _num_bytes(trainer: Any) -> tuple[int, dict[str, int], int]:
    """Bytes of a checkpoint, of smaller checkpoints by the option that chooses them, and of the model."""
    numbers, num_ranks = trainer.engine.snapshot(), trainer.args.world_size
    own = model = num_bytes_of(numbers.weights)
    if not has_adapters(trainer.model):  # PEFT saves the adapters alone, transformers frozen weights too
        model = num_bytes_of(trainer.engine.state_dict()["module"])
    smaller = {option: model - own + size for option, size in numbers.smaller(num_ranks).items()}
    return model - own + numbers.num_bytes(num_ranks), smaller, model


def _check_of_transformers(trainer: Any, checkpoint: Path) -> None:
    """Raise `ConfigError` if a checkpoint of transformers' Trainer lacks files that an exact resume needs."""
    ranks = range(trainer.args.world_size)
    random_files = [f"rng_state_{rank}.pth" for rank in ranks] if len(ranks) > 1 else ["rng_state.pth"]
    lacking = [name for name in (SCHEDULER_NAME, *random_files) if not (checkpoint / name).is_file()]
    if not lacking:
        return
    said = f"{checkpoint} lacks {', '.join(lacking)}"
    if not trainer.offload.resume_incomplete:
        raise ConfigError(
            f"{said}: the run that goes on would not be the run that was saved. Resume from a checkpoint that has "
            "all files, or pass offload=OffloadConfig(resume_incomplete=True) to go on all the same"
        )
    print_on_rank_0(trainer, f"{said}: training goes on without (resume_incomplete=True)")


def _load_optimizer_alone(trainer: Any, checkpoint: Path) -> None:
    """Load `optimizer.pt` if `scheduler.pt` is missing; the Trainer would load neither.

    The scheduler continues this run's schedule at the checkpoint's step.
    """
    optimizer = trainer.optimizer
    optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
    done = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
    optimizer._opt_called = True  # otherwise torch warns that no step came before the scheduler's
    for _ in range(0 if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) else done):
        trainer.lr_scheduler.step()
