"""Fine-tune a HuggingFace model on a dataset: plan, load, train, evaluate, save.

    result = offloadkit.finetune("t5-3b", "pairs.jsonl", eval_dataset="held_out.jsonl")

`options.FinetuneOptions` describes the arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch

from offloadkit.checkpoint.earlier_run import EarlierRun, earlier_run
from offloadkit.checkpoint.folder import (
    lost_with_runtime,
    newest_checkpoint,
    put_in_place,
    skipped_checkpoints,
    writable,
)
from offloadkit.checkpoint.one_run import one_run
from offloadkit.deepspeed.process import check_installed, left_as_it_was
from offloadkit.deepspeed.zero import check as check_zero
from offloadkit.device.process_memory import VramCap, phase
from offloadkit.distributed import world
from offloadkit.distributed.launch import is_launched
from offloadkit.doors.engines.baseline import measured_baseline
from offloadkit.doors.planning import (
    auto_batch_size,
    default_dtype,
    plan_for_rows,
    plan_source,
    shown_plan,
    with_wishes,
)
from offloadkit.doors.several_gpus import TellingMonitor, check_num_gpus, on_several_gpus
from offloadkit.errors import ConfigError, errors_hold_nothing, shown
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Precision
from offloadkit.facts.starting import collector_off, is_loaded, say
from offloadkit.facts.telemetry import Move, Peaks, StepRecord
from offloadkit.facts.units import parse_bytes
from offloadkit.hf.columns import ColumnWish
from offloadkit.hf.data import PreparedData, longest_row, prepare_both, with_decoder_inputs
from offloadkit.hf.evaluate import Sample, in_words, predict, share_correct
from offloadkit.hf.options import LEARNING_RATES, FinetuneOptions, documented_arguments
from offloadkit.hf.quiet import bars_where_live
from offloadkit.hf.read import check_there, on_hub
from offloadkit.hf.resumed import check_same_model, other_rows
from offloadkit.hf.saving import saved_in_pieces
from offloadkit.hf.source import ModelSource, resolve
from offloadkit.monitor.monitor import Monitor, can_be_drawn
from offloadkit.offload.layers import flat_layers, is_of
from offloadkit.offload.unread import is_unread
from offloadkit.planner import Dtype, Plan
from offloadkit.planner.phases import differing

if TYPE_CHECKING:
    from transformers import (
        EvalPrediction,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Seq2SeqTrainingArguments,
        TrainerCallback,
        TrainingArguments,
    )

    from offloadkit.deepspeed.training import ZeroTrainer
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

HF_NAMES = {
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lr": "learning_rate",
}
"""HuggingFace's names that `finetune` accepts for its own arguments."""

NUM_PREDICTED = 256
"""Number of evaluation rows, from the first, for exact match or accuracy."""

_NUM_SHOWN = 5
_SPEED_OF_EVALUATION = {
    f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
}
"""Logged values of an evaluation that are no metrics."""
_RESUME = "resume=True (--resume)"


@dataclass(frozen=True, repr=False)
class FinetuneResult:
    """Result of `finetune`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    metrics: dict[str, float]
    """train_loss and train_seconds if a step was taken. With an evaluation set also eval_loss, exact_match (seq2seq) or
    accuracy (classification) over the first `NUM_PREDICTED` rows, from 0 to 1, and the values of `compute_metrics`."""
    history: list[dict[str, Any]]
    """Log entries: loss, grad_norm, learning_rate and eval_loss by step."""
    samples: list[Sample]
    """Predictions for the first evaluation rows."""
    steps: list[StepRecord]
    """Telemetry of the newest 1,000 steps: seconds by phase, bytes by tier. `output_dir/steps.jsonl` has all."""
    output_dir: Path
    stopped: bool = False
    """Whether an interrupt or the stop button ended training early; `resume=True` continues it."""
    peaks: Peaks = field(default_factory=dict)
    """Measured peaks of RAM and VRAM by phase in bytes, to compare with `plan.phases`."""
    moves: list[Move] = field(default_factory=list)
    """Changes of the plan during training. `plan` is the last plan; earlier peaks may belong to earlier plans."""

    @property
    def model_dir(self) -> Path:
        """The folder that `from_pretrained` loads."""
        return self.output_dir / "model"

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items()) or "nothing was trained"
        name = type(self.model).__name__
        memory = "".join(f"\n  {sentence}" for sentence in _not_as_planned(self.plan, self.peaks, self.moves))
        return (
            f"FinetuneResult({name} of {self.plan.num_parameters:,} parameters, {len(self.steps)} steps\n"
            f"  {numbers}\n  model in {self.model_dir}{memory})"
        )


def _say(doing: str) -> None:
    if world.rank() == 0:
        say(doing)


@contextmanager
def _libraries() -> Iterator[None]:
    """Import the libraries for training, which takes seconds, and say so."""
    if not is_loaded("datasets") or not is_loaded("transformers.trainer"):
        _say("loading transformers and datasets")
        with collector_off():
            import offloadkit.hf.trainer  # noqa: F401
    yield


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _joined(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `function` to join the launcher's process group first, and to print on rank 0 only.

    Raises:
        ConfigError: `ddp_timeout` is not a positive number of seconds.
    """

    @functools.wraps(function)
    def joined(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        timeout: Any = kwargs.get("ddp_timeout")
        if timeout is not None and (not isinstance(timeout, int | float) or not 0 < timeout < 2**31):
            raise ConfigError(f"ddp_timeout must be a number of seconds > 0, got {shown(timeout)}")
        world.join(timeout)
        with ExitStack() as opened:
            if world.rank() > 0:
                silence = opened.enter_context(open(os.devnull, "w"))
                opened.enter_context(redirect_stdout(silence))
            return function(*args, **kwargs)

    return joined


def _takes_hf_names(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `function` to accept the names in `HF_NAMES`.

    Raises `ConfigError` if a value is passed under both names. An error about a value uses the name that was passed.
    """

    @functools.wraps(function)
    def renamed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = {ours: theirs for theirs, ours in HF_NAMES.items() if theirs in kwargs}
        for ours, theirs in given.items():
            if ours in kwargs:
                raise ConfigError(f"{ours} and {theirs} are two names of one value: pass one of them")
            kwargs[ours] = kwargs.pop(theirs)
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            ours, _, wrong = str(error).partition(" must be ")
            if ours not in given:
                raise
            raise ConfigError(f"{given[ours]} must be {wrong}") from None

    return renamed


_training = threading.RLock()
"""Lock held by a running `finetune`, because random states, free VRAM and library settings are per process."""


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other thread of this process is in `finetune`."""
    if not _training.acquire(blocking=False):
        print("another finetune of this process is under way: this one begins when it has ended", flush=True)
        _training.acquire()
    try:
        yield
    finally:
        _training.release()


@_joined
@_libraries()
@_alone()
@errors_hold_nothing()
@bars_where_live()
@_takes_hf_names
def finetune(
    model: str | os.PathLike[str] | PreTrainedModel,
    train_dataset: Any,
    *,
    eval_dataset: Any = None,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    output_dir: str | os.PathLike[str] = "offloadkit-output",
    epochs: float = 1,
    max_steps: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    gradient_accumulation: int = 1,
    learning_rate: float | None = None,
    precision: Precision | None = None,
    vram: int | str | None = None,
    ram: int | str | None = None,
    compile_blocks: bool | None = None,
    grace_seconds: float | None = None,
    save_minutes: float | None = None,
    init: Literal["pretrained", "random"] = "pretrained",
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    seed: int = 0,
    num_gpus: int | None = None,
    engine: Literal["offloadkit", "deepspeed"] = "offloadkit",
    input_column: str | None = None,
    target_column: str | None = None,
    template: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    monitor: bool = True,
    verbose: bool = False,
    baseline: Literal["predict", "measure"] = "predict",
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
    offload: OffloadConfig | None = None,
    **training_arguments: Any,
) -> FinetuneResult:
    """Fine-tune a HuggingFace model with optimizer states in host RAM.

    When VRAM runs out, training continues with a plan that needs less VRAM, until no such plan is left. The weights are
    the same as with enough memory.

    Raises:
        ConfigError: an argument is invalid, two arguments contradict each other, or `output_dir` holds an earlier run
            and neither `resume` nor `overwrite` is set.
        OutputError: `output_dir` is not writable; raised before anything is loaded.
        DataError, ModelError, ModelNotFoundError, ModelAccessError: the dataset or model is unusable.
        DoesNotFitError: no plan fits; raised before anything is downloaded or loaded.
        OutOfVramError: VRAM ran out, and no plan with less VRAM is left.
        TrainingStoppedError: SIGTERM or SIGHUP came. The step was finished, and saved if `grace_seconds` sufficed.
        NonFiniteGradientError: gradients became NaN or Inf; the step was not applied. With
            `OffloadConfig(on_nonfinite="rollback")`, three rollbacks came before.
        RankError: a process of `num_gpus` was killed. Errors raised on a rank end all ranks and are raised here.
    """
    options = FinetuneOptions(**locals())
    if num_gpus is not None:
        check_num_gpus(num_gpus, on_cpu=bool(training_arguments.get("use_cpu")))
    if num_gpus is not None and num_gpus > 1:
        found: FinetuneResult = on_several_gpus(finetune, num_gpus, options.keywords | {"num_gpus": None})
        return found
    from offloadkit.hf.arguments import arguments_of_finetune, check_arguments, engine_config

    lengths = options.lengths
    if baseline == "measure" and world.size() > 1:
        raise ConfigError("baseline='measure' runs one process: leave it out where several processes train together")
    trained_by = _engine(engine)
    wish = ColumnWish(input_column, target_column, template)
    offload = with_wishes(
        offload,
        vram=vram,
        ram=ram,
        precision=precision,
        compile_blocks=compile_blocks,
        grace_seconds=grace_seconds,
        save_minutes=save_minutes,
    )
    dtype = _working_dtype(offload, training_arguments)
    offload = with_wishes(offload, working_dtype=dtype)
    check_there(train_dataset)
    check_there(eval_dataset, "eval_dataset: ")
    in_use = (model, getattr(model, "name_or_path", None), tokenizer, train_dataset, eval_dataset)
    replaces = functools.partial(earlier_run, output_dir, resume=resume, overwrite=overwrite, in_use=in_use)
    earlier = world.from_first("checking output_dir", replaces)
    # Do not create the folder if a file of rows, or a checkpoint to resume from, is missing.
    own_files = resume and trained_by.is_planned
    output = world.from_first("checking output_dir", lambda: writable(output_dir, resume=own_files))
    with _claimed(output, earlier):
        source = resolve(model, init=init)
        if source.model is None:
            _say(f"reading the config of {source.given}")
            source.check_not_quantised()
            source.read_ahead()
        goes_on = functools.partial(trained_by.newest_checkpoint, output, source, offload)
        checkpoint = world.from_first("looking for a checkpoint", goes_on) if resume else None
        at_once = source.needs_no_hub(tokenizer) and not any(map(on_hub, (train_dataset, eval_dataset)))
        if batch_size == "auto":
            smoothing = training_arguments.get("label_smoothing_factor") or 0.0
            where = _device(training_arguments)
            fits = functools.partial(
                auto_batch_size, source, offload, **lengths, device=where, label_smoothing=smoothing
            )
            chosen: int = world.from_first("choosing batch_size", fits)
            batch_size = chosen
        own = {"output_dir": str(output), "num_train_epochs": epochs, "max_steps": max_steps or -1, "seed": seed}
        own |= {"gradient_accumulation_steps": gradient_accumulation, "per_device_train_batch_size": batch_size}
        own |= {"learning_rate": learning_rate or LEARNING_RATES[init]}
        own["prediction_loss_only"] = compute_metrics is None
        args = arguments_of_finetune(own, training_arguments, dtype, eval_dataset is not None)
        check_arguments(args)
        offload = engine_config(offload, args)
        trained_by.check_options(offload)

        size: dict[str, Any] = {"batch_size": batch_size, **lengths, "device": args.device}
        size["label_smoothing"] = args.label_smoothing_factor
        if eval_dataset is not None and "per_device_eval_batch_size" in training_arguments:
            size["eval_batch_size"] = args.per_device_eval_batch_size
        shows = trained_by.is_planned
        assumed = None if at_once or not shows else shown_plan(source, offload, verbose=verbose, **size)
        tokenizer = source.load_tokenizer(tokenizer)
        data, evaluation = prepare_both(train_dataset, eval_dataset, tokenizer, source.config, **lengths, wish=wish)
        source = source.for_rows(data.task, data.id2label)
        size |= longest_row(data, evaluation)
        if evaluation is not None and "eval_batch_size" in size:
            size["eval_batch_size"] = min(size["eval_batch_size"], len(evaluation.dataset))
        plan = (
            plan_for_rows(source, offload, assumed, verbose=verbose, **size)
            if shows
            else plan_source(source, offload, **size)
        )

        if checkpoint is not None:
            for skipped, why in skipped_checkpoints(output):
                print(f"{skipped} is skipped: it {why}", flush=True)
            print(f"going on from {checkpoint}", flush=True)
            if shows and (warning := other_rows(checkpoint, batch_size, gradient_accumulation, world.size())):
                print(warning, flush=True)
        seconds = None
        if baseline == "measure":
            step: dict[str, Any] = {"batch_size": batch_size, "accumulation": gradient_accumulation, "dtype": dtype}
            step["by_length"] = args.train_sampling_strategy == "group_by_length"
            seconds = measured_baseline(source.given, data, **step, folder=output / "baseline")
        is_shown = monitor and can_be_drawn() and world.rank() == 0 and shows
        watch = (
            TellingMonitor(plan, baseline_seconds=seconds, is_drawn=monitor)
            if is_launched()
            else Monitor(plan, baseline_seconds=seconds, display="auto" if is_shown else "none")
        )
        hooks: dict[str, Any] = {"callbacks": list(callbacks)}
        hooks["compute_metrics"] = compute_metrics and _returns_a_dict(compute_metrics)
        run = TrainingRun(source, args, offload, size, tokenizer, data, evaluation, watch, earlier, hooks)
        return trained_by.train(run, plan, checkpoint, output)


finetune.__doc__ = inspect.cleandoc(finetune.__doc__ or "").replace(
    "Raises:", f"{documented_arguments()}\n\nRaises:", 1
)


@contextmanager
def _claimed(output: Path, earlier: EarlierRun) -> Iterator[None]:
    with ExitStack() as claims:

        def claim() -> None:
            claims.enter_context(one_run(output))
            claims.enter_context(earlier.replaced())

        world.from_first("claiming output_dir", claim)
        yield


# -- the arguments


def _own_checkpoint(output: Path, source: ModelSource, offload: OffloadConfig) -> Path:
    """The newest readable checkpoint, checked against the model's config. Raises as `finetune`."""
    checkpoint = newest_checkpoint(output, recut=offload.resume_incomplete)
    differing = check_same_model(checkpoint, source.config)
    if differing is not None and world.rank() == 0:
        taken = "the checkpoint's" if source.model is None else "the model passed's"
        print(f"{differing}. The run goes on with {taken}", flush=True)
    return checkpoint


def _checkpoint_of_deepspeed(output: Path, source: ModelSource, offload: OffloadConfig) -> Path:
    from offloadkit.deepspeed.training import newest_of_deepspeed

    return newest_of_deepspeed(output)


def _engine(name: Any) -> _Engine:
    if not isinstance(name, str) or name not in _ENGINES:
        raise ConfigError(f"engine must be 'offloadkit' or 'deepspeed', got {shown(name)}")
    _ENGINES[name].check_installed()
    return _ENGINES[name]


def _returns_a_dict(compute_metrics: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_metrics)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = compute_metrics(*args, **kwargs)
        if not isinstance(found, dict) and kwargs.get("compute_result", True):  # False with `batch_eval_metrics`
            raise ConfigError(f"compute_metrics must return a dict of numbers by their names, got {shown(found)}")
        return found

    return checked


def _working_dtype(offload: OffloadConfig, given: dict[str, Any]) -> Dtype:
    """The dtype of `offload`, else of the arguments `bf16` and `fp16`, else the device's default."""
    if offload.working_dtype != "auto":
        return offload.working_dtype
    if given.get("bf16") or given.get("fp16"):
        return "bf16" if given.get("bf16") else "fp16"
    device = _device(given)
    dtype = default_dtype(on_gpu=device.type == "cuda", native_bf16=hardware.supports_bf16(device))
    return "fp32" if given.get(dtype) is False else dtype


def _device(given: dict[str, Any]) -> torch.device:
    return torch.device("cpu") if given.get("use_cpu") else hardware.default_device()


# -- the training


@dataclass(frozen=True)
class TrainingRun:
    """Everything a training run needs."""

    source: ModelSource
    """The model's source, with the head that the rows need."""
    args: Seq2SeqTrainingArguments
    offload: OffloadConfig
    """Options completed by the values of `args`."""
    size: dict[str, Any]
    """Arguments of `plan_source`."""
    tokenizer: Any
    data: PreparedData
    evaluation: PreparedData | None
    monitor: Monitor
    """Shows the training from its first step on and holds its `telemetry`."""
    earlier: EarlierRun
    """Run whose checkpoints are removed once this run has done a step or written a checkpoint."""
    hooks: dict[str, Any]
    """The user's `callbacks` and `compute_metrics` as arguments of the Trainer."""

    def train(self, plan: Plan, checkpoint: Path | None) -> tuple[OffloadSeq2SeqTrainer, Plan, dict[str, float]]:
        """Train, and return the trainer, the last plan and the metrics."""
        from offloadkit.hf.callbacks import AfterAStep, AsksTheMonitor

        model = self._load(plan, checkpoint)
        if not is_of(plan, flat_layers(model, self.offload)):
            # The checkpoint's parameters differ from its config's: a custom head, or fewer tied weights.
            plan = shown_plan(resolve(model, task=self.data.task), self.offload, **self.size)
        trainer = self._trainer(model, plan)
        if trainer.is_world_process_zero():
            trainer.add_callback(AfterAStep(self.earlier.remove_checkpoints))
        trainer.add_callback(asks := AsksTheMonitor(self.monitor, trainer.any_flag, **trainer.stopping_options()))
        self.monitor.plan = plan
        with closing(asks), ExitStack() as opened:
            opened.enter_context(closing(trainer))
            output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._end(trainer, stopped=asks.stopped)
            opened.pop_all()
        return trainer, plan if trainer.engine is None else trainer.engine.plan, self._metrics(trainer, output)

    def train_by_deepspeed(self, plan: Plan, checkpoint: Path | None) -> tuple[ZeroTrainer, dict[str, float], bool]:
        """Train, and return the trainer, the metrics and whether training was stopped early."""
        from transformers import set_seed

        from offloadkit.deepspeed.training import ZeroTrainer, deepspeed_arguments, model_of_its_own
        from offloadkit.hf.callbacks import AfterAStep, AsksTheMonitor, show_progress

        self.monitor.plan = plan
        args = deepspeed_arguments(self.args, self.offload, plan, logits=_num_logits(self.source, plan))
        set_seed(self.args.seed)
        model = model_of_its_own(self.source, self.offload, args)
        smooths = args.label_smoothing_factor and self.data.task == "seq2seq"
        trainer = ZeroTrainer(
            model=model,
            args=args,
            train_dataset=self.data.dataset,
            eval_dataset=None if self.evaluation is None else self.evaluation.dataset,
            data_collator=with_decoder_inputs(self.data.collator, model) if smooths else self.data.collator,
            processing_class=self.tokenizer,
            **self.hooks,
        )
        show_progress(trainer)
        if trainer.is_world_process_zero():
            trainer.add_callback(AfterAStep(self.earlier.remove_checkpoints))
            if (lost := lost_with_runtime(Path(str(self.args.output_dir)))) is not None:
                print(lost, flush=True)
        trainer.add_callback(asks := AsksTheMonitor(self.monitor, trainer.any_flag))
        with closing(asks), ExitStack() as opened:
            opened.enter_context(closing(trainer))
            found = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._end(trainer, stopped=asks.stopped)
            opened.pop_all()
        return trainer, self._metrics(trainer, found), asks.stopped

    def _load(self, plan: Plan, checkpoint: Path | None) -> PreTrainedModel:
        """Build the model. The engine reads or initializes the weights once it has memory for them.

        With a `checkpoint` the weights are the checkpoint's. A model in memory is returned as is.
        """
        from transformers import set_seed

        set_seed(self.args.seed)
        if self.source.model is not None and not is_unread(self.source.model):
            return self.source.load(device=_loading_device(plan, self.args))
        if self.source.model is None and checkpoint is not None:
            saved = resolve(checkpoint).for_rows(self.data.task, self.data.id2label)
            saved.check_decoder()
            return saved.load_lazily()
        return self.source.load_lazily()

    def _trainer(self, model: PreTrainedModel, plan: Plan) -> OffloadSeq2SeqTrainer:
        from offloadkit.hf.callbacks import show_progress
        from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

        smooths = self.args.label_smoothing_factor and self.data.task == "seq2seq"
        trainer = OffloadSeq2SeqTrainer(
            model=model,
            plan=plan,
            args=self.args,
            offload=self.offload,
            telemetry=self.monitor.telemetry,
            train_dataset=self.data.dataset,
            eval_dataset=None if self.evaluation is None else self.evaluation.dataset,
            data_collator=with_decoder_inputs(self.data.collator, model) if smooths else self.data.collator,
            processing_class=self.tokenizer,
            **self.hooks,
        )
        trainer.order_of_seed = trainer.saves_model = True
        show_progress(trainer, monitored=self.monitor.is_drawn)
        return trainer

    def _end(self, trainer: Any, *, stopped: bool) -> None:
        self.monitor.close("stopped" if stopped else "finished")
        if stopped:
            done, checkpoint = trainer.state.global_step, f"checkpoint-{trainer.state.global_step}"
            print(f"stopped after step {done} of {trainer.state.max_steps}: {_RESUME} goes on from {checkpoint}")
        elif trainer.state.global_step == self.monitor.steps_before:
            of = f"{trainer.state.global_step} steps were done and {trainer.state.max_steps} are wanted"
            print(f"nothing was left to train: {of}; more epochs or max_steps train on")

    def _metrics(self, trainer: Any, output: Any) -> dict[str, float]:
        """Metrics of this attempt. (transformers 5.17 divides the loss by steps before a checkpoint too.)"""
        num_steps = trainer.state.global_step - self.monitor.steps_before
        if num_steps == 0:
            return {}
        seconds = output.metrics["train_runtime"]
        return {"train_loss": trainer._total_loss_scalar / num_steps, "train_seconds": seconds}


def _num_logits(source: ModelSource, plan: Plan) -> int:
    """Number of logits in a micro-batch; 0 for classifiers and unknown rows."""
    rows = plan.rows
    if rows is None or source.task == "classification":
        return 0
    vocabulary: int = source.config.get_text_config().vocab_size
    return rows.batch_size * (rows.target_length or rows.input_length) * vocabulary


def _loading_device(plan: Plan, args: Seq2SeqTrainingArguments) -> torch.device:
    """Device that holds a model in memory until the engine takes its weights: the GPU if fp32 weights fit
    next to the plan's VRAM."""
    free = hardware.vram_bytes(args.device)[0]
    fits = 4 * plan.num_parameters + plan.total_bytes("vram") < 0.9 * free
    return args.device if fits else torch.device("cpu")


# -- training by offloadkit


def _by_offloadkit(run: TrainingRun, plan: Plan, checkpoint: Path | None, output: Path) -> FinetuneResult:
    with ExitStack() as opened:
        opened.push(run.monitor)  # closes the monitor, which starts when the weights are in place
        trainer, plan, metrics = run.train(plan, checkpoint)
    with closing(trainer):  # frees the engine's memory even after an error
        trained: Any = trainer.model
        peaks = trainer.telemetry.peaks
        with phase("saving", peaks, run.args.device):
            save = functools.partial(_save, trained, run.tokenizer, output / "model")
            world.from_first("saving the model", save)  # before the evaluation, which may fail
        samples = _evaluate(trainer, run.tokenizer, run.evaluation, metrics)
        plan = plan if trainer.engine is None else trainer.engine.plan  # the evaluation may have changed the plan
        steps, state = list(trainer.telemetry.records), trainer.state
        moves = trainer.telemetry.moves
        stopped = trainer.any_rank(run.monitor.stop_requested) and state.global_step < state.max_steps
    for sentence in _not_as_planned(plan, peaks, moves):
        print(sentence, flush=True)
    measured: dict[str, Any] = {"stopped": stopped, "peaks": peaks, "moves": moves}
    return FinetuneResult(trained, run.tokenizer, plan, metrics, state.log_history, samples, steps, output, **measured)


# -- the result


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    def write(folder: Path) -> None:
        with saved_in_pieces():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    put_in_place(folder, write)
    print(f"the model is in {folder}", flush=True)


def _not_as_planned(plan: Plan, peaks: Peaks, moves: Sequence[Move]) -> list[str]:
    """Describe phases whose measured memory differs from the plan.

    Returns none if activations were not planned, or if the plan changed, because the peaks then mix several plans."""
    return [] if plan.num_tokens is None or moves else list(differing(plan.phases, peaks))


def _evaluate(
    trainer: OffloadSeq2SeqTrainer, tokenizer: Any, evaluation: PreparedData | None, metrics: dict[str, float]
) -> list[Sample]:
    """Add evaluation results to `metrics`, print them, and return a few printed predictions."""
    if evaluation is None:
        return []
    metrics |= _losses(trainer)
    how: dict[str, Any] = {} if trainer.engine is None else {"evaluates": trainer.engine.evaluates}
    return _predicted(trainer.model, tokenizer, evaluation, metrics, trainer.args, trainer.telemetry.peaks, **how)


def _losses(trainer: Any) -> dict[str, float]:
    """Metrics of the evaluation after the last step; evaluates if there was none."""
    at_the_end = [log for log in trainer.state.log_history if log["step"] == trainer.state.global_step]
    best = trainer.args.load_best_model_at_end  # the newest loss may then belong to a different model
    known = [log for log in at_the_end if "eval_loss" in log and not best]
    return {
        name: value
        for name, value in (known[-1] if known else trainer.evaluate()).items()
        if name.startswith("eval_") and name not in _SPEED_OF_EVALUATION and isinstance(value, int | float)
    }


def _predicted(
    model: Any,
    tokenizer: Any,
    evaluation: PreparedData,
    metrics: dict[str, float],
    args: TrainingArguments,
    peaks: Peaks,
    **how: Any,
) -> list[Sample]:
    """Add exact match or accuracy to `metrics`, print the metrics, and return a few printed predictions."""
    how["num_rows"] = _NUM_SHOWN if evaluation.task == "causal" else NUM_PREDICTED
    how["batch_size"] = args.per_device_eval_batch_size
    with phase("generation", peaks, args.device):
        samples = world.from_first("predicting", functools.partial(predict, model, tokenizer, evaluation, **how))
    if evaluation.task != "causal":
        metrics["exact_match" if evaluation.task == "seq2seq" else "accuracy"] = share_correct(samples)
    print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    for sample in samples[:_NUM_SHOWN]:
        print(f"  {in_words(sample, evaluation.task)}")
    return samples[:_NUM_SHOWN]


# -- DeepSpeed in the engine's place


def _by_deepspeed(run: TrainingRun, plan: Plan, checkpoint: Path | None, output: Path) -> FinetuneResult:
    """Train with DeepSpeed. The result's model is loaded from the saved one; a model passed in gets its weights.

    Raises:
        ConfigError, DoesNotFitError: see `deepspeed_arguments`.
    """
    from offloadkit.deepspeed.training import give_weights

    peaks: Peaks = {}
    device = run.args.device
    with ExitStack() as opened:
        opened.enter_context(left_as_it_was())
        vram = None if run.offload.vram is None else parse_bytes(run.offload.vram)
        opened.callback(VramCap(vram, device).remove)
        opened.push(run.monitor)
        with phase("training by DeepSpeed", peaks, device):
            trainer, metrics, stopped = run.train_by_deepspeed(plan, checkpoint)
        with closing(trainer):
            trainer.save_whole(output / "model", run.tokenizer)
            print(f"the model is in {output / 'model'}", flush=True)
            metrics |= {} if run.evaluation is None else _losses(trainer)
            history = trainer.state.log_history
    there = 4 * plan.num_parameters < 0.8 * hardware.vram_bytes(device)[0]
    trained: Any = (
        resolve(output / "model")
        .for_rows(run.data.task, run.data.id2label)
        .load(device=device if there else torch.device("cpu"))
    )
    if run.source.model is not None:
        trained = give_weights(trained, run.source.model)
    samples: list[Sample] = []
    if run.evaluation is not None:
        samples = _predicted(trained, run.tokenizer, run.evaluation, metrics, run.args, {})
    return FinetuneResult(trained, run.tokenizer, plan, metrics, history, samples, [], output, stopped, peaks)


# -- the engines


@dataclass(frozen=True)
class _Engine:
    """The parts of `finetune` that depend on the engine."""

    is_planned: bool
    """Whether the engine trains by the printed plan, shows the monitor and writes offloadkit's checkpoints."""
    check_installed: Callable[[], None]
    check_options: Callable[[OffloadConfig], None]
    """Raises `ConfigError` for unsupported options."""
    newest_checkpoint: Callable[[Path, ModelSource, OffloadConfig], Path]
    """The checkpoint in the output folder that `resume=True` continues from."""
    train: Callable[[TrainingRun, Plan, Path | None, Path], FinetuneResult]
    """Train, save and evaluate, given the plan, a checkpoint to continue from, and the output folder."""


_ENGINES = {
    "offloadkit": _Engine(
        is_planned=True,
        check_installed=lambda: None,
        check_options=lambda offload: None,
        newest_checkpoint=_own_checkpoint,
        train=_by_offloadkit,
    ),
    "deepspeed": _Engine(
        is_planned=False,
        check_installed=check_installed,
        check_options=check_zero,
        newest_checkpoint=_checkpoint_of_deepspeed,
        train=_by_deepspeed,
    ),
}
