"""Fine-tune a HuggingFace model on a dataset: plan, load, train, evaluate, save.

    result = offloadkit.finetune("t5-3b", "pairs.jsonl", eval_dataset="held_out.jsonl")

`hf.options.FinetuneOptions` describes the arguments.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

import torch

from offloadkit.checkpoint.earlier_run import EarlierRun, earlier_run
from offloadkit.checkpoint.folder import (
    atomic_write,
    colab_disk_warning,
    explained_write_errors,
    newest_checkpoint,
    skipped_checkpoints,
    writable,
)
from offloadkit.checkpoint.one_run import one_run
from offloadkit.deepspeed.process import check_installed, restored_globals
from offloadkit.deepspeed.zero import check as check_zero
from offloadkit.device.process_memory import VramCap, phase
from offloadkit.distributed import world
from offloadkit.distributed.launch import is_launched
from offloadkit.doors.engines.baseline import measured_baseline
from offloadkit.doors.model_card import CARD, model_card
from offloadkit.doors.planning import (
    PlanRequest,
    auto_batch_size,
    check_input_length,
    default_dtype,
    plan_source,
    shown_plan,
)
from offloadkit.doors.recipes import RECIPE_FILE, as_yaml, changed, is_of_user, with_head
from offloadkit.doors.several_gpus import RankMonitor, check_num_gpus, on_several_gpus
from offloadkit.errors import (
    ConfigError,
    DataNotFoundError,
    OffloadkitError,
    OutOfVramError,
    errors_hold_nothing,
    shown,
)
from offloadkit.facts import hardware
from offloadkit.facts.calls import WrittenCall, call_of
from offloadkit.facts.config import OffloadConfig, Precision
from offloadkit.facts.field_help import helps_with_fields
from offloadkit.facts.starting import collector_off, is_loaded, say
from offloadkit.facts.telemetry import Move, Peaks, StepRecord
from offloadkit.facts.units import parse_bytes, rounded
from offloadkit.hf.adapters import check_same_adapters, has_adapters
from offloadkit.hf.columns import ColumnOptions
from offloadkit.hf.data import PreparedData, longest_row, prepare_both, with_decoder_inputs
from offloadkit.hf.evaluate import Sample, in_words, predict, share_correct
from offloadkit.hf.images import GivenRows, check_without_images, prepare_images, stream_has_images
from offloadkit.hf.load import is_speech, sees_images
from offloadkit.hf.longest import longest_of_sizes
from offloadkit.hf.options import FinetuneOptions, documented_arguments
from offloadkit.hf.packing import check_packing, packed, planned_length, share_of_padding
from offloadkit.hf.quiet import bars_where_live
from offloadkit.hf.read import check_there, is_stream, on_hub, with_validation
from offloadkit.hf.resumed import check_same_model, other_rows
from offloadkit.hf.saving import save_whole
from offloadkit.hf.source import ModelSource, resolve
from offloadkit.hf.speech import prepare_speech
from offloadkit.monitor.monitor import Monitor, can_be_drawn
from offloadkit.offload.layers import flat_layers, is_of
from offloadkit.offload.unread import is_unread
from offloadkit.optim.table import DTYPES
from offloadkit.planner import Dtype, Plan
from offloadkit.planner.phases import differing

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
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

NUM_PREDICTED = 256
"""Number of evaluation rows, from the first, for exact match or accuracy."""

_NUM_SHOWN = 5
_SPEED_OF_EVALUATION = {
    f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
}
"""Logged values of an evaluation that are no metrics."""
_RESUME = "resume=True (--resume)"


@helps_with_fields
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
        """The folder that `from_pretrained` loads: transformers', or PEFT's for adapters."""
        return self.output_dir / "model"

    def __repr__(self) -> str:
        numbers = (
            ", ".join(f"{name} {rounded(value, 4)}" for name, value in self.metrics.items()) or "nothing was trained"
        )
        name, plan = type(self.model).__name__, self.plan
        of = f"{plan.num_parameters:,} parameters"
        if has_adapters(self.model):
            of = f"{plan.num_trainable_parameters:,} trained of {of}"
        memory = "".join(f"\n  {sentence}" for sentence in _not_as_planned(self.plan, self.peaks, self.moves))
        return (
            f"FinetuneResult({name} of {of}, {len(self.steps)} steps\n"
            f"  {numbers}\n  {'adapters' if has_adapters(self.model) else 'model'} in {self.model_dir}{memory})"
        )


def _say(doing: str) -> None:
    if world.rank() == 0:
        say(doing)


@contextmanager
def _libraries() -> Iterator[None]:
    if not is_loaded("datasets") or not is_loaded("transformers.trainer"):
        _say("loading transformers and datasets")
        with collector_off():
            import offloadkit.hf.trainer  # noqa: F401
    yield


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _joined(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `function` to join the launcher's process group first, and to print only on rank 0.

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
            if error.option not in given:
                raise
            raise ConfigError(error.problem, option=given[error.option]) from None

    return renamed


_training = threading.RLock()
"""Lock held by a running `finetune`, because random states, free VRAM and library settings are per process."""


@contextmanager
def _alone() -> Iterator[None]:
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
    model: str | os.PathLike[str] | PreTrainedModel | PeftModel,
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
    lora: bool | int | LoraConfig | None = None,
    freeze: str | Sequence[str] | None = None,
    precision: Precision | None = None,
    vram: int | str | None = None,
    ram: int | str | None = None,
    compile_blocks: bool | None = None,
    grace_seconds: float | None = None,
    save_minutes: float | None = None,
    init: Literal["pretrained", "random"] = "pretrained",
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    packing: bool = False,
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
    eval_dataset = with_validation(train_dataset, eval_dataset)
    options = FinetuneOptions(**locals())
    if num_gpus is not None:
        check_num_gpus(num_gpus, on_cpu=bool(training_arguments.get("use_cpu")))
    if num_gpus is not None and num_gpus > 1:
        found: FinetuneResult = on_several_gpus(
            finetune, num_gpus, options.keywords | {"num_gpus": None}, _call(options).asked()
        )
        return found
    if baseline == "measure" and world.size() > 1:
        raise ConfigError("baseline='measure' runs one process: leave it out where several processes train together")
    trained_by, given = _engine(engine), options
    options = replace(options, offload=_with_working_dtype(options))
    check_there(train_dataset)
    check_there(eval_dataset, "eval_dataset: ")
    in_use = (model, getattr(model, "name_or_path", None), tokenizer)
    data = (train_dataset, eval_dataset)
    replaces = functools.partial(earlier_run, output_dir, resume=resume, overwrite=overwrite, in_use=in_use, data=data)
    earlier = world.run_on_rank_0("checking output_dir", replaces)
    # Do not create the folder if a file of rows, or a checkpoint to resume from, is missing.
    own_files = resume and trained_by.is_planned
    output = world.run_on_rank_0("checking output_dir", lambda: writable(output_dir, resume=own_files))
    with _claimed(output, earlier):
        setup = _set_up(replace(options, output_dir=output), trained_by, _call(given))
        at_once = setup.source.needs_no_hub(tokenizer) and not any(map(on_hub, (train_dataset, eval_dataset)))
        assumed = None if at_once or not trained_by.is_planned else setup.shown_plan()
        setup, rows = _read_rows(setup)
        plan = setup.shown_plan(assumed) if trained_by.is_planned else setup.plan()
        recipe = as_yaml(given, batch_size=setup.args.per_device_train_batch_size, num_gpus=_num_started())
        recipe = with_head(recipe, output / RECIPE_FILE, resumed=setup.checkpoint)
        if setup.checkpoint is not None:
            _say_resuming(setup, setup.checkpoint, is_planned=trained_by.is_planned)
        watch = _monitor(setup, rows, plan, is_planned=trained_by.is_planned)
        return trained_by.train(TrainingRun(setup, rows, plan, watch, earlier, recipe))


finetune.__doc__ = inspect.cleandoc(finetune.__doc__ or "").replace(
    "Raises:", f"{documented_arguments()}\n\nRaises:", 1
)


@_joined
@_libraries()
@_takes_hf_names
@bars_where_live()
def dry_run(**arguments: Any) -> str:
    """Check arguments of `finetune` and show the plan; nothing is trained, written or downloaded beyond the config.

    Returns:
        The arguments as a recipe. The plan is for the longest row if the rows and the tokenizer are here, else for the
        longest that is allowed.

    Raises:
        As `finetune` does before training.
    """
    arguments["eval_dataset"] = with_validation(arguments["train_dataset"], arguments.get("eval_dataset"))
    own = {each.name for each in fields(FinetuneOptions)}
    others = {name: value for name, value in arguments.items() if name not in own}
    options = FinetuneOptions(
        **{name: value for name, value in arguments.items() if name in own}, training_arguments=others
    )
    trained_by = _engine(options.engine)
    setup = _set_up(replace(options, offload=_with_working_dtype(options)), trained_by, _call(options))
    setup = replace(setup, request=replace(setup.request, num_gpus=options.num_gpus))
    sets = options.train_dataset, options.eval_dataset
    try:
        for data in sets:
            check_there(data)
        if any(map(on_hub, sets)) or not setup.source.needs_no_hub(options.tokenizer):
            print("rows or tokenizer are on the hub: planned for the longest rows that are allowed", flush=True)
        else:
            setup, rows = _read_rows(setup)
            print(f"{rows.training.rows_in_words} to train on", flush=True)
    except DataNotFoundError as error:
        print(f"{error}: planned for the longest rows that are allowed", flush=True)
    setup.shown_plan()
    return as_yaml(options, batch_size=setup.args.per_device_train_batch_size, num_gpus=options.num_gpus or 1)


@contextmanager
def _claimed(output: Path, earlier: EarlierRun) -> Iterator[None]:
    with ExitStack() as claims:

        def claim() -> None:
            claims.enter_context(one_run(output))
            claims.enter_context(earlier.replaced())

        world.run_on_rank_0("claiming output_dir", claim)
        yield


# -- the arguments


def _own_checkpoint(output: Path, source: ModelSource, offload: OffloadConfig) -> Path:
    checkpoint = newest_checkpoint(output, recut=offload.resume_incomplete)
    check_same_adapters(checkpoint, source.adapters, is_added=has_adapters(source.model))
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


def _with_working_dtype(options: FinetuneOptions) -> OffloadConfig:
    """The config with the dtype of `offload`, else of the arguments `bf16` and `fp16`, else the device's default."""
    config, given = options.engine_config, options.training_arguments
    if config.working_dtype != "auto":
        return config
    device = _device(given)
    dtype = default_dtype(on_gpu=device.type == "cuda", native_bf16=hardware.supports_bf16(device))
    if given.get("bf16") or given.get("fp16"):
        dtype = "bf16" if given.get("bf16") else "fp16"
    elif given.get(dtype) is False:
        dtype = "fp32"
    return replace(config, working_dtype=dtype)


def _device(given: Mapping[str, Any]) -> torch.device:
    return torch.device("cpu") if given.get("use_cpu") else hardware.default_device()


# -- the stages before training


@dataclass(frozen=True)
class Setup:
    """A run whose model's config is known, and whose rows are not read yet."""

    options: FinetuneOptions
    """The user's options, with `output_dir`, `offload` and `batch_size` decided."""
    source: ModelSource
    checkpoint: Path | None
    args: Seq2SeqTrainingArguments
    offload: OffloadConfig
    """`options.offload` with the values of `args`."""
    request: PlanRequest

    @property
    def output(self) -> Path:
        return Path(self.options.output_dir)

    def plan(self) -> Plan:
        return plan_source(self.source, self.offload, self.request)

    def shown_plan(self, assumed: Plan | None = None) -> Plan:
        return shown_plan(self.source, self.offload, self.request, assumed=assumed, verbose=self.options.verbose)


@dataclass(frozen=True)
class TrainingRows:
    tokenizer: Any
    training: PreparedData
    evaluation: PreparedData | None
    saved: Any
    """What is saved with the model: the tokenizer, or the processor that has one."""


def _set_up(options: FinetuneOptions, engine: _Engine, call: WrittenCall) -> Setup:
    from offloadkit.hf.arguments import arguments_of_finetune, check_arguments, engine_config

    config, given = options.engine_config, options.training_arguments
    source = resolve(options.model, init=options.init, lora=options.lora, freeze=options.freeze)
    if not engine.is_planned and source.adapters is not None:
        raise ConfigError("engine='deepspeed' trains all weights: leave engine out to train adapters")
    if options.baseline == "measure" and (source.adapters is not None or source.freeze):
        raise ConfigError(
            "baseline='measure' times full fine-tuning: leave it out to train adapters or to freeze parts"
        )
    if source.model is None:
        _say(f"reading the config of {source.given}")
    newest = functools.partial(engine.newest_checkpoint, Path(options.output_dir), source, config)
    checkpoint = world.run_on_rank_0("looking for a checkpoint", newest) if options.resume else None
    request = PlanRequest(
        options.batch_size,
        options.max_input_length,
        options.max_target_length,
        _device(given),
        packing=options.packing,
        call=call,
    )
    if options.batch_size == "auto":
        wanted = replace(request, label_smoothing=given.get("label_smoothing_factor") or 0.0)
        chosen = functools.partial(auto_batch_size, source, config, wanted)
        options = replace(options, batch_size=world.run_on_rank_0("choosing batch_size", chosen))
    args = arguments_of_finetune(options)
    check_arguments(args)
    if is_speech(source.config):
        _check_for_text_alone(options, f"{source.config.model_type} hears sound")
        check_input_length(source.config, options.max_input_length)
    source.check_trainable(reads_weights=options.init == "pretrained")
    if options.packing:
        check_packing(source)
    source.read_ahead()
    offload = engine_config(config, args)
    engine.check_options(offload)
    evaluates = options.eval_dataset is not None and "per_device_eval_batch_size" in given
    request = replace(
        request,
        batch_size=options.batch_size,
        device=args.device,
        label_smoothing=args.label_smoothing_factor,
        eval_batch_size=args.per_device_eval_batch_size if evaluates else None,
    )
    return Setup(options, source, checkpoint, args, offload, request)


def _call(options: FinetuneOptions) -> WrittenCall:
    given = changed(options) | {**options.training_arguments}
    given.pop("training_arguments", None)
    if "hub_token" in given:
        given["hub_token"] = ...
    model, rows = given.pop("model"), given.pop("train_dataset")
    return call_of("offloadkit.finetune", model, rows if isinstance(rows, str | os.PathLike) else ..., **given)


def _check_for_text_alone(options: FinetuneOptions, why: str) -> None:
    """Raise `ConfigError` if an option is given that only text has."""
    of_text = {"baseline": "predict", "engine": "offloadkit", "label_smoothing_factor": 0, "packing": False}
    for name, default in of_text.items():
        if (value := getattr(options, name, options.training_arguments.get(name, default))) != default:
            raise ConfigError(f"{name}={value!r} is for text, and {why}: leave it out")


def _given(data: Any, split: str, options: FinetuneOptions) -> Any:
    """Rows that may have images; a stream, a share of rows and None as they are."""
    is_none = data is None or isinstance(data, float) or is_stream(data)
    return data if is_none else GivenRows(data, split, options.input_column)


def _read_rows(setup: Setup) -> tuple[Setup, TrainingRows]:
    options = setup.options
    column_options = ColumnOptions(options.input_column, options.target_column, options.template)
    config, load = setup.source.config, cast(Any, setup.source.load_tokenizer)
    sets = options.train_dataset, options.eval_dataset
    may_have = zip(sets, ("train", "validation"), strict=True) if sees_images(config) else ()
    given = [_given(each, split, options) for each, split in may_have]
    with_images = any(
        stream_has_images(each, options.input_column) if is_stream(each) else each.has_images()
        for each in given
        if is_stream(each) or isinstance(each, GivenRows)
    )
    if with_images:
        _check_for_text_alone(options, "the rows have images")
    elif not sees_images(config):
        check_without_images(options.train_dataset, config)
    if is_speech(config) or with_images:
        load = functools.partial(setup.source.load_processor, of_images=with_images)
    tokenizer = load(options.tokenizer)
    dtype = DTYPES[cast("Dtype", setup.offload.working_dtype)]
    of: dict[str, Any] = {"column_options": column_options}
    if with_images:
        of |= {"max_input_length": options.max_input_length}
        data, evaluation = prepare_images(given[0], given[1], tokenizer, config, dtype, **of)
    elif is_speech(config):
        of |= {"max_target_length": options.max_target_length}
        data, evaluation = prepare_speech(*sets, tokenizer, config, dtype, **of)
    else:
        data, evaluation = prepare_both(*sets, tokenizer, config, **options.lengths, column_options=column_options)
    if options.packing:
        seed = setup.args.seed if setup.args.data_seed is None else setup.args.data_seed
        data = packed(data, config, tokenizer, max_input_length=options.max_input_length, seed=seed)
    request = replace(setup.request, **longest_row(data, evaluation), packed_row=planned_length(data.dataset))
    if with_images:
        planned = [(each.dataset, each.collator) for each in (data, evaluation) if each is not None]
        request = replace(request, with_images=functools.cache(functools.partial(longest_of_sizes, planned)))
    request = replace(request, is_text=not with_images)
    if evaluation is not None and request.eval_batch_size is not None:
        request = replace(request, eval_batch_size=min(request.eval_batch_size, len(evaluation.dataset)))
    source = setup.source.for_rows(data.task, data.id2label)
    saved = _saved_with(source, options.tokenizer, tokenizer)
    return replace(setup, source=source, request=request), TrainingRows(tokenizer, data, evaluation, saved)


def _saved_with(source: ModelSource, given: Any, tokenizer: Any) -> Any:
    """The processor of a model that sees images and was trained on text, if there is one; else the tokenizer."""
    is_named = given is None or (isinstance(given, str | os.PathLike) and given != "byte")
    may_have = is_named or hasattr(given, "image_processor")
    if not sees_images(source.config) or hasattr(tokenizer, "image_processor") or not may_have:
        return tokenizer
    try:
        return source.load_processor(given, of_images=True)
    except OffloadkitError:  # none, or a package is missing
        return tokenizer


def _say_resuming(setup: Setup, checkpoint: Path, *, is_planned: bool) -> None:
    for skipped, why in skipped_checkpoints(setup.output):
        print(f"{skipped} is skipped: it {why}", flush=True)
    print(f"going on from {checkpoint}", flush=True)
    args = setup.args
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if is_planned and (warning := other_rows(checkpoint, rows, accumulation, world.size())):
        print(warning, flush=True)


def _monitor(setup: Setup, rows: TrainingRows, plan: Plan, *, is_planned: bool) -> Monitor:
    options, seconds = setup.options, None
    if options.baseline == "measure":
        seconds = measured_baseline(setup.source.given, rows.training, setup.args, setup.output / "baseline")
    if is_launched():
        return RankMonitor(plan, baseline_seconds=seconds, is_drawn=options.monitor)
    is_shown = options.monitor and can_be_drawn() and world.rank() == 0 and is_planned
    return Monitor(plan, baseline_seconds=seconds, display="auto" if is_shown else "none")


# -- the training


@dataclass(frozen=True)
class TrainingRun:
    setup: Setup
    rows: TrainingRows
    plan: Plan
    monitor: Monitor
    """Shows the training from its first step on and holds its `telemetry`."""
    earlier: EarlierRun
    """Run whose checkpoints are removed once this run has done a step or written a checkpoint."""
    recipe: str
    """The arguments in YAML, with their head."""

    def write_card(self, plan: Plan, trainer: Any, metrics: Mapping[str, float], peaks: Peaks) -> None:
        """Write the model card into the saved model's folder."""
        options, rows, folder = self.setup.options, self.rows, self.setup.output / "model"
        model = options.model
        text = model_card(
            folder,
            os.fspath(model) if isinstance(model, str | os.PathLike) else None,
            self.setup.source.config,
            plan,
            {
                "training": (options.train_dataset, rows.training),
                "evaluation": (options.eval_dataset, rows.evaluation),
            },
            is_drawn=options.init == "random" and self.setup.source.model is None,
            recipe=self.recipe,
            num_steps=trainer.state.global_step,
            metrics=metrics,
            peaks=peaks,
        )
        world.run_on_rank_0("writing the card", functools.partial(_write, folder / CARD, text))

    def train(self) -> tuple[OffloadSeq2SeqTrainer, Plan, dict[str, float]]:
        """Returns the trainer, the last plan and the metrics."""
        from offloadkit.hf.callbacks import show_progress
        from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

        setup, plan, model = self.setup, self.plan, self._load()
        if not is_of(plan, flat_layers(model, setup.offload)):
            # The checkpoint's parameters differ from its config's: a custom head, or fewer tied weights.
            plan = shown_plan(resolve(model, task=self.rows.training.task), setup.offload, setup.request)
        given, telemetry = self._given_to_trainer(model, setup.args), self.monitor.telemetry
        trainer = OffloadSeq2SeqTrainer(plan=plan, offload=setup.offload, telemetry=telemetry, **given)
        trainer.order_of_seed = trainer.saves_model = True
        telemetry.padding_share = share_of_padding(self.rows.training.dataset)
        show_progress(trainer, monitored=self.monitor.is_drawn)
        self.monitor.plan = plan
        metrics, _ = self._train(trainer, **trainer.stopping_options())
        return trainer, plan if trainer.engine is None else trainer.engine.plan, metrics

    def train_by_deepspeed(self) -> tuple[ZeroTrainer, dict[str, float], bool]:
        """Returns the trainer, the metrics and whether training was stopped early."""
        from transformers import set_seed

        from offloadkit.deepspeed.training import ZeroTrainer, deepspeed_arguments, model_of_its_own
        from offloadkit.hf.callbacks import show_progress

        setup, plan = self.setup, self.plan
        args = deepspeed_arguments(setup.args, setup.offload, plan, logits=_num_logits(setup.source, plan))
        set_seed(setup.args.seed)
        model = model_of_its_own(setup.source, setup.offload, args)
        trainer = ZeroTrainer(**self._given_to_trainer(model, args))
        show_progress(trainer)
        if trainer.is_world_process_zero() and (lost := colab_disk_warning(setup.output)) is not None:
            print(lost, flush=True)
        return trainer, *self._train(trainer)

    def _load(self) -> PreTrainedModel:
        """Build the model. The engine reads or initializes the weights once it has memory for them.

        With a checkpoint the weights are the checkpoint's; of adapters the Trainer reads them, and the rest is the
        base's. A model in memory is returned as is, or with its adapters.
        """
        from transformers import set_seed

        setup, rows = self.setup, self.rows.training
        set_seed(setup.args.seed)
        if setup.source.model is not None and not is_unread(setup.source.model):
            return setup.source.load(device=_loading_device(self.plan, setup.args))
        if setup.source.model is None and setup.checkpoint is not None and setup.source.adapters is None:
            saved = resolve(setup.checkpoint).for_rows(rows.task, rows.id2label)
            saved.check_decoder()
            model = saved.load_lazily()
            planned = dict(setup.source.on_meta.named_parameters())
            for name, parameter in model.named_parameters():
                if name in planned:
                    parameter.requires_grad_(planned[name].requires_grad)
            # The Trainer writes the tokenizer's pad_token_id into the config. Embeddings give that token no gradient.
            own = dict(setup.source.on_meta.named_modules())
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Embedding) and isinstance(own.get(name), torch.nn.Embedding):
                    module.padding_idx = cast(torch.nn.Embedding, own[name]).padding_idx
            return model
        return setup.source.load_lazily()

    def _given_to_trainer(self, model: PreTrainedModel, args: TrainingArguments) -> dict[str, Any]:
        rows, options = self.rows, self.setup.options
        smooths = args.label_smoothing_factor and rows.training.task == "seq2seq"
        metrics = options.compute_metrics
        return {
            "model": model,
            "args": args,
            "train_dataset": rows.training.dataset,
            "eval_dataset": None if rows.evaluation is None else rows.evaluation.dataset,
            "data_collator": with_decoder_inputs(rows.training.collator, model) if smooths else rows.training.collator,
            "processing_class": rows.tokenizer,
            "callbacks": list(options.callbacks),
            "compute_metrics": metrics and _returns_a_dict(metrics),
        }

    def _train(self, trainer: Any, **stopping: Any) -> tuple[dict[str, float], bool]:
        from offloadkit.hf.callbacks import MonitorCallback, StepEndCallback

        if trainer.is_world_process_zero():
            path = self.setup.output / RECIPE_FILE
            is_own = not is_of_user(path)
            written = functools.cache(lambda: _write(path, self.recipe) if is_own else None)
            trainer.add_callback(StepEndCallback(self.earlier.remove_checkpoints, written))
        trainer.add_callback(asks := MonitorCallback(self.monitor, trainer.any_flag, **stopping))
        checkpoint = self.setup.checkpoint
        with closing(asks), ExitStack() as opened:
            opened.enter_context(closing(trainer))
            output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._end(trainer, stopped=asks.stopped)
            opened.pop_all()
        return self._metrics(trainer, output), asks.stopped

    def _end(self, trainer: Any, *, stopped: bool) -> None:
        self.monitor.close("stopped" if stopped else "finished")
        if stopped:
            done, checkpoint = trainer.state.global_step, f"checkpoint-{trainer.state.global_step}"
            print(f"stopped after step {done} of {trainer.state.max_steps}: {_RESUME} goes on from {checkpoint}")
        elif trainer.state.global_step == self.monitor.steps_before:
            done = f"{trainer.state.global_step} of {trainer.state.max_steps} steps were done"
            print(f"nothing was left to train: {done}; more epochs or max_steps train on")

    def _metrics(self, trainer: Any, output: Any) -> dict[str, float]:
        """Metrics of this attempt. (transformers 5.17 divides the loss by steps before a checkpoint too.)"""
        num_steps = trainer.state.global_step - self.monitor.steps_before
        if num_steps == 0:
            return {}
        seconds = output.metrics["train_runtime"]
        return {"train_loss": trainer._total_loss_scalar / num_steps, "train_seconds": seconds}


def _num_logits(source: ModelSource, plan: Plan) -> int:
    rows = plan.rows
    if rows is None or source.task == "classification":
        return 0
    vocabulary: int = source.config.get_text_config().vocab_size
    return rows.batch_size * (rows.target_length or rows.input_length) * vocabulary


def _loading_device(plan: Plan, args: Seq2SeqTrainingArguments) -> torch.device:
    """Device that holds a model in memory until the engine takes its weights: the GPU if fp32 weights fit next to the
    plan's VRAM.
    """
    free = hardware.vram_bytes(args.device)[0]
    fits = 4 * plan.num_parameters + plan.total_bytes("vram") < 0.9 * free
    return args.device if fits else torch.device("cpu")


# -- training by offloadkit


def _by_offloadkit(run: TrainingRun) -> FinetuneResult:
    setup, rows = run.setup, run.rows
    with ExitStack() as opened:
        opened.push(run.monitor)  # closes the monitor, which starts when the weights are in place
        trainer, plan, metrics = run.train()
    with closing(trainer):  # frees the engine's memory even after an error
        trained: Any = trainer.model
        peaks = trainer.telemetry.peaks
        with phase("saving", peaks, setup.args.device):
            save = functools.partial(_save, trained, rows.saved, setup.output / "model")
            world.run_on_rank_0("saving the model", save)  # before the evaluation, which may fail
        run.write_card(plan, trainer, metrics, peaks)  # again after the evaluation
        samples = _evaluate(trainer, rows, metrics)
        plan = plan if trainer.engine is None else trainer.engine.plan  # the evaluation may have changed the plan
        run.write_card(plan, trainer, metrics, peaks)
        steps, state = list(trainer.telemetry.records), trainer.state
        moves = trainer.telemetry.moves
        stopped = trainer.any_rank(run.monitor.stop_requested) and state.global_step < state.max_steps
    for sentence in _not_as_planned(plan, peaks, moves):
        print(sentence, flush=True)
    found = trained, rows.tokenizer, plan, metrics, state.log_history, samples, steps, setup.output
    return FinetuneResult(*found, stopped=stopped, peaks=peaks, moves=moves)


# -- the result


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    save_whole(model, tokenizer, folder)
    print(f"the {'adapters are' if has_adapters(model) else 'model is'} in {folder}", flush=True)


def _write(path: Path, text: str) -> None:
    with explained_write_errors(path.parent), atomic_write(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # names of files may have bytes that are not UTF-8


def _num_started() -> int:
    """Number of processes that `finetune` started; 1 if a launcher did."""
    return world.size() if is_launched() else 1


def _not_as_planned(plan: Plan, peaks: Peaks, moves: Sequence[Move]) -> list[str]:
    """Sentences about phases whose measured memory differs from the plan.

    None if activations were not planned, or if the plan changed, because the peaks then mix several plans.
    """
    if plan.num_tokens is None or moves:
        return []
    return list(differing(plan.phases, peaks, held_bytes=plan.basis.held_bytes))


def _evaluate(trainer: OffloadSeq2SeqTrainer, rows: TrainingRows, metrics: dict[str, float]) -> list[Sample]:
    """Evaluate and predict. A full GPU does not end a run whose model is trained and saved."""
    if rows.evaluation is None:
        _print(metrics)
        return []
    how: dict[str, Any] = {} if trainer.engine is None else {"run_eval": trainer.engine.run_eval}
    try:
        metrics |= _losses(trainer)
        return _predicted(trainer.model, rows, metrics, trainer.args, trainer.telemetry.peaks, **how)
    except OutOfVramError as error:
        message = f"the model is trained and saved, but its evaluation is incomplete, because {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return []


def _print(metrics: Mapping[str, float]) -> None:
    if metrics:  # something was trained or evaluated
        print("  ".join(f"{name} {rounded(value, 4)}" for name, value in metrics.items()), flush=True)


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
    model: Any, rows: TrainingRows, metrics: dict[str, float], args: TrainingArguments, peaks: Peaks, **how: Any
) -> list[Sample]:
    evaluation = rows.evaluation
    if evaluation is None:
        _print(metrics)
        return []
    how["num_rows"] = _NUM_SHOWN if evaluation.task == "causal" else NUM_PREDICTED
    how["batch_size"] = args.per_device_eval_batch_size
    with phase("generation", peaks, args.device):
        samples = world.run_on_rank_0(
            "predicting", functools.partial(predict, model, rows.tokenizer, evaluation, **how)
        )
    if evaluation.task != "causal":
        metrics["exact_match" if evaluation.task == "seq2seq" else "accuracy"] = share_correct(samples)
    _print(metrics)
    for sample in samples[:_NUM_SHOWN]:
        print(f"  {in_words(sample, evaluation.task)}")
    return samples[:_NUM_SHOWN]


# -- DeepSpeed instead of the engine


def _by_deepspeed(run: TrainingRun) -> FinetuneResult:
    """Train with DeepSpeed. The result's model is loaded from the saved one; a model passed in gets its weights."""
    from offloadkit.deepspeed.training import give_weights

    peaks: Peaks = {}
    setup, rows, plan = run.setup, run.rows, run.plan
    device, folder = setup.args.device, setup.output / "model"
    with ExitStack() as opened:
        opened.enter_context(restored_globals())
        vram = None if setup.offload.vram is None else parse_bytes(setup.offload.vram)
        opened.callback(VramCap(vram, device).remove)
        opened.push(run.monitor)
        with phase("training by DeepSpeed", peaks, device):
            trainer, metrics, stopped = run.train_by_deepspeed()
        with closing(trainer):
            trainer.save_whole(folder, rows.saved)
            print(f"the model is in {folder}", flush=True)
            metrics |= {} if rows.evaluation is None else _losses(trainer)
            history = trainer.state.log_history
    there = 4 * plan.num_parameters < 0.8 * hardware.vram_bytes(device)[0]
    saved = resolve(folder).for_rows(rows.training.task, rows.training.id2label)
    trained: Any = saved.load(device=device if there else torch.device("cpu"))
    if setup.source.model is not None:
        trained = give_weights(trained, setup.source.model)
    samples = _predicted(trained, rows, metrics, setup.args, {})
    run.write_card(plan, trainer, metrics, peaks)
    return FinetuneResult(
        trained, rows.tokenizer, plan, metrics, history, samples, [], setup.output, stopped=stopped, peaks=peaks
    )


# -- the engines


@dataclass(frozen=True)
class _Engine:
    is_planned: bool
    """Whether the engine trains by the printed plan, shows the monitor and writes offloadkit's checkpoints."""
    check_installed: Callable[[], None]
    check_options: Callable[[OffloadConfig], None]
    newest_checkpoint: Callable[[Path, ModelSource, OffloadConfig], Path]
    train: Callable[[TrainingRun], FinetuneResult]


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
