"""The command line: `offloadkit demo | doctor | plan | recipes | train | compare | sweep`."""

from __future__ import annotations

import atexit
import difflib
import errno
import functools
import gc
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
import typer.core

from offloadkit.doors import recipes
from offloadkit.errors import ConfigError, OffloadkitError, TrainingStoppedError, shown
from offloadkit.facts.calls import Asked, Options, asked_by
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.field_help import field_docs
from offloadkit.facts.files import matching, why_no_name
from offloadkit.facts.starting import collector_off, is_loaded, say
from offloadkit.facts.version import __version__
from offloadkit.hf.options import FinetuneOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's tables cut the names of options at 80 columns
    pretty_exceptions_enable=False,
    help="Fine-tune models that are too big for the GPU: exact AdamW, with what does not fit in host RAM.",
)


recipes_app = typer.Typer(
    no_args_is_help=True,
    help="List, show and copy recipes for `offloadkit train`.",
)
app.add_typer(recipes_app, name="recipes")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"offloadkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# Python's exit would scan all objects of torch and transformers, which takes most of a second.
atexit.register(gc.freeze)

_HELP = {name: text.split("\n\n")[0].replace("\n", " ") for name, text in field_docs(FinetuneOptions).items()}
_METAVARS = {"lora": "RANK", "freeze": "NAME"}

Model = Annotated[str, typer.Argument(metavar="MODEL", help=_HELP["model"])]
Tokenizer = Annotated[str | None, typer.Option(help=_HELP["tokenizer"])]
AutoBatchSize = Annotated[str, typer.Option(help=_HELP["batch_size"])]
InputLength = Annotated[int | None, typer.Option(help=_HELP["max_input_length"])]
TargetLength = Annotated[int | None, typer.Option(help=_HELP["max_target_length"])]
Accumulation = Annotated[int, typer.Option(help=_HELP["gradient_accumulation"])]
Precision = Annotated[str, typer.Option(help=_HELP["precision"], show_default=False)]
Dtype = Annotated[str, typer.Option("--dtype", help="Working weights: auto, bf16, fp16 or fp32.")]
Verbose = Annotated[bool, typer.Option("--verbose", help=_HELP["verbose"])]
Lora = Annotated[str | None, typer.Option(metavar=_METAVARS["lora"], help=_HELP["lora"])]
Freeze = Annotated[list[str] | None, typer.Option(metavar=_METAVARS["freeze"], help=_HELP["freeze"])]
Packing = Annotated[bool, typer.Option("--packing", help=_HELP["packing"])]
Vram = Annotated[str | None, typer.Option(help=_HELP["vram"])]
Ram = Annotated[str | None, typer.Option(help=_HELP["ram"])]
ProcessVram = Annotated[str | None, typer.Option(help="VRAM that each process may use, e.g. 11GiB.")]
ProcessRam = Annotated[str | None, typer.Option(help="RAM that each process may use.")]
Disk = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Folder on a local disk for optimizer states that do not fit in RAM."),
]
Steps = Annotated[
    int | None, typer.Option(help="Timed steps, after four for warm-up. Default: at least six, and at least 3 s.")
]
MeasuredOutput = Annotated[Path, typer.Option(help="Folder for the table, the chart and the rows.")]

Command = TypeVar("Command", bound=Callable[..., Any])


def _readable_errors(command: Command, *, loads_torch: bool = True) -> Command:
    """The command, with an `OffloadkitError` printed as one message and exit status 1, and 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            if loads_torch and not is_loaded("torch"):
                say("loading torch and transformers")
            context = kwargs.get("context")  # None: the command asks for no plan with other options
            with asked_by(Asked(_Again.of(context) if context else _never, in_a_shell=True)), _warnings_in_lines():
                return command(*args, **kwargs)
        except TrainingStoppedError as error:
            typer.echo(f"\n{error}", err=True)
            raise typer.Exit(128 + error.signal) from error
        except OffloadkitError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo(f"\ninterrupted{error}", err=True)
            raise typer.Exit(130) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
                raise
            typer.echo(f"error: the output cannot be written: {error.strerror}", err=True)
            raise typer.Exit(1) from error

    return run  # type: ignore[return-value]


@contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """While open, warnings are printed without the file and the code that gave them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _command(command: Command, cls: type[typer.core.TyperCommand] | None = None) -> Command:
    return app.command(cls=cls)(_readable_errors(command))


class _Train(typer.core.TyperCommand):
    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except Exception as error:
            unknown: Any = error  # typer brings its own NoSuchOption, or takes click's
            if hasattr(error, "possibilities") and unknown.option_name.startswith("--"):
                written = unknown.option_name
                name = written[2:].replace("-", "_")
                is_near = bool(difflib.get_close_matches(written, unknown.possibilities or [], cutoff=0.75))
                if name in _HELP or (not is_near and _is_training_argument(name)):
                    unknown.message = (
                        f"No such option: {written}. Arguments without an option are KEY=VALUE: {name}=VALUE"
                    )
                    unknown.possibilities = None
            raise


def _is_training_argument(name: str) -> bool:
    from offloadkit.hf.arguments import argument_names

    return name in argument_names()


def _recipe_command(command: Command) -> Command:
    return recipes_app.command()(_readable_errors(command, loads_torch=False))


@dataclass(frozen=True)
class _Again:
    """A command line, to be written with other options."""

    command: str
    parts: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(name, option, words that were given) of each parameter."""

    @classmethod
    def of(cls, context: typer.Context) -> _Again:
        """The present one."""
        return cls(str(context.info_name), tuple(_given(context, each) for each in context.command.params))

    def __call__(self, options: Options) -> str | None:
        """The command line with other options; None if the command lacks one of them."""
        if not options.keys() <= {name for name, *_ in self.parts}:
            return None
        words = ["offloadkit", self.command]
        for name, option, given in self.parts:
            words += [option, str(options[name])] if name in options else given
        return shlex.join(words)


def _given(context: typer.Context, each: Any) -> tuple[str, str, tuple[str, ...]]:
    name, option, words = str(each.name or ""), str(each.opts[0]), list[str]()
    value, source = context.params.get(name), context.get_parameter_source(name)
    if source is None or source.name != "COMMANDLINE":
        pass
    elif each.param_type_name == "argument":
        words += map(str, value if isinstance(value, list | tuple) else [value])
    elif isinstance(value, bool):
        words.append((each.opts if value else each.secondary_opts)[0])
    else:
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option, str(one)]
    return name, option, tuple(words)


def _never(options: Options) -> None:
    """For commands that are not proposed with other options."""


def _how_to_go_on(output: Path) -> str:
    from offloadkit.checkpoint.folder import newest_checkpoint

    try:
        return f"; --resume goes on from {newest_checkpoint(output, verify=False)}"
    except ConfigError:
        return f"; there is no checkpoint in {output} to resume from"


@_command
def demo(
    *,
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Folder for model/ and summary.json.")] = Path("offloadkit-demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; with fewer the model learns less.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the dates, the weights and the order of rows.")
    ] = 0,
) -> None:
    """Watch a small T5 learn dates; 105 s on two idle CPU cores."""
    from offloadkit.doors.demo.run import NUM_STEPS, run_demo

    run_demo(output, num_steps=steps or NUM_STEPS, seed=seed)


@_command
def doctor(
    folder: Annotated[Path, typer.Option(help="Folder whose disk is measured.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine and say what would improve training. Exits with 1 if nothing can be trained."""
    from offloadkit.doors import doctor

    facts = doctor.gather(folder)
    typer.echo(json.dumps(doctor.as_json(facts), indent=2) if as_json else doctor.report(facts))
    if any(advice.level == "stop" for advice in doctor.advise(facts)):
        raise typer.Exit(1)


@_command
@collector_off()
def plan(
    *,
    context: typer.Context,
    model: Model,
    vram: Vram = None,
    ram: Ram = None,
    precision: Precision = "exact",
    batch_size: AutoBatchSize = "auto",
    max_input_length: InputLength = None,
    max_target_length: TargetLength = None,
    gradient_accumulation: Accumulation = 1,
    packing: Packing = False,
    lora: Lora = None,
    freeze: Freeze = None,
    disk: Disk = None,
    compile_blocks: Annotated[bool, typer.Option("--compile-blocks", help="Plan for compiled blocks.")] = False,
    dtype: Dtype = "auto",
    verbose: Verbose = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="CARD", help="Plan for a card that is not here, e.g. 'RTX 4090', t4, a100.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs that train together; they need not be here. Eight make a host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the memory and the seconds that training MODEL takes.

    Exits with 1 if it does not fit. No weights are read. --gpu plans for a card that is not here.

    On a machine without a GPU, --vram alone plans for an assumed card of that size.

    With --num-gpus, --vram is for each GPU and --ram for a host.
    """
    from offloadkit.doors.planning import plan as plan_model

    config: Any = {"vram": vram, "ram": ram, "precision": precision, "working_dtype": dtype, "disk": disk}
    config |= {"gradient_accumulation": gradient_accumulation, "compile_blocks": compile_blocks}
    planned = plan_model(
        model,
        batch_size=_rows(batch_size),
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        packing=packing,
        lora=_rank(lora),
        freeze=freeze or None,
        offload=OffloadConfig(**config),
        gpu=gpu,
        num_gpus=num_gpus,
    )
    texts = [str(planned), *([planned.details()] if verbose else []), planned.explain()]
    typer.echo(json.dumps(planned.to_dict(), indent=2) if as_json else "\n".join(filter(None, texts)))
    if not planned.fits:
        raise typer.Exit(1)


def _rows(batch_size: str) -> int | Literal["auto"]:
    if batch_size == "auto":
        return "auto"
    if not batch_size.lstrip("-").isdigit():
        raise typer.BadParameter(f"{shown(batch_size)} is neither a whole number nor auto", param_hint="--batch-size")
    return int(batch_size)


def _rank(lora: str | None) -> int | None:
    if lora is None or (lora.isdigit() and int(lora)):
        return None if lora is None else int(lora)
    raise typer.BadParameter(f"{shown(lora)} is no rank, a whole number such as 16", param_hint="--lora")


_PYTHON_ONLY = ("init", "callbacks", "compute_metrics", "offload", "training_arguments")
"""Fields of `FinetuneOptions` that `train` has no option for, or another one."""


def _kind(hint: Any) -> Any:
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [each for each in get_args(hint) if each is not NoneType] if is_union else [hint]
    is_simple = len(kinds) == 1 and (kinds[0] in (bool, int, float) or get_origin(kinds[0]) is Literal)
    return kinds[0] if is_simple else str


def _takes_finetune_options(command: Command) -> Command:
    """Declare an option in place of `**options` for each field of `FinetuneOptions`."""
    types = ["EvalPrediction", "LoraConfig", "PeftModel", "PreTrainedModel", "PreTrainedTokenizerBase"]
    types.append("TrainerCallback")
    hints = get_type_hints(FinetuneOptions, localns=dict.fromkeys(types, object))  # transformers is not imported
    declared = []
    for each in fields(FinetuneOptions):
        flag = "--output" if each.name == "output_dir" else f"--{each.name.replace('_', '-')}"
        if each.default is True:
            flag += f"/--no-{each.name}"
        about: Any = typer.Option(flag, metavar=_METAVARS.get(each.name), help=_HELP[each.name])
        default, kind = each.default, _kind(hints[each.name])
        if default is MISSING:
            about = typer.Argument(metavar=each.name.upper(), help=_HELP[each.name], show_default=False)
            default = None
        annotation: Any = Annotated[kind if default is not None else kind | None, about]
        if each.name not in _PYTHON_ONLY:
            declared.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    own = [each for each in signature(command, eval_str=True).parameters.values() if each.kind is not each.VAR_KEYWORD]
    command.__signature__ = Signature([*declared, *own])  # type: ignore[attr-defined]
    return command


@_recipe_command
def ls() -> None:
    """List the package's recipes."""
    width = max(map(len, recipes.names()))
    for name in recipes.names():
        typer.echo(f"{name:{width}}  {recipes.about(name)}")


RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a recipe, as `ls` lists it, or a file.")]


@_recipe_command
def show(name: RecipeName) -> None:
    """Print a recipe."""
    typer.echo(recipes.find(name).read_text(), nl=False)


@_recipe_command
def cp(
    name: RecipeName,
    to: Annotated[Path, typer.Argument(metavar="TO", help="Folder, or new file, for the copy.")] = Path("."),
) -> None:
    """Copy a recipe, to change it."""
    typer.echo(recipes.copy(name, to))


@functools.partial(_command, cls=_Train)
@_takes_finetune_options
def train(
    *,
    context: typer.Context,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Any argument of finetune or of HuggingFace's TrainingArguments, or offload.NAME for OffloadConfig's.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the arguments and the plan; train and write nothing.")
    ] = False,
    disk: Disk = None,
    working_dtype: Dtype = "auto",
    on_nonfinite: Annotated[
        Literal["raise", "skip", "rollback"],
        typer.Option(help="NaN or Inf in gradients: end; leave the step out; go back to the last checkpoint."),
    ] = "raise",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Start from random weights.")] = False,
    **options: Any,
) -> None:
    """Train MODEL on TRAIN_DATASET with the optimizer in host RAM.

    A recipe, of the package or a file, may be given as MODEL: offloadkit train chat train_dataset=chats.jsonl

    Arguments on the command line override a recipe's.

    Ctrl-C finishes the current step, saves a checkpoint and exits with 130; --resume continues.
    """
    with collector_off():
        from offloadkit.doors import finetuning

    def given(**values: Any) -> dict[str, Any]:
        sources = {name: context.get_parameter_source(name) for name in values}
        return {name: values[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}

    options |= {
        "lora": _rank(options["lora"]),
        "batch_size": _rows(options["batch_size"]),
        "eval_dataset": _share_or_name(options["eval_dataset"]),
    }
    settings, by_option = list(settings or []), given(**options)
    for name in ("train_dataset", "model"):
        if _is_setting(by_option.get(name) or ""):
            settings.insert(0, by_option.pop(name))
    arguments: dict[str, Any] = {}
    if recipes.is_recipe(by_option.get("model") or ""):
        name = by_option.pop("model")
        arguments = {
            finetuning.HF_NAMES.get(key, key): value
            for key, value in _known(recipes.read(name), f"the recipe {name}: ").items()
        }
    elif near := _misspelled_recipe(by_option.get("model") or ""):
        raise ConfigError(
            f"no model and no recipe has the name {by_option['model']!r}; did you mean the recipe {near!r}?"
        )
    by_setting = _settings(settings, finetuning.HF_NAMES)
    if twice := by_option.keys() & by_setting.keys():
        raise typer.BadParameter("is given twice", param_hint=min(twice))
    config = arguments.pop("offload", {}) | by_setting.pop("offload")
    config |= given(disk=disk, working_dtype=working_dtype, on_nonfinite=on_nonfinite)
    arguments |= by_option | by_setting | ({"init": "random"} if random_weights else {})
    for name in ("model", "train_dataset"):
        if name not in arguments:
            raise typer.BadParameter(f"pass it, or {name}=... with a recipe", param_hint=name.upper())
    arguments["offload"] = OffloadConfig(**config)
    if dry_run:
        typer.echo(finetuning.dry_run(**arguments))
        return
    try:
        result = finetuning.finetune(**arguments)
    except KeyboardInterrupt:
        output = Path(arguments.get("output_dir", options["output_dir"]))
        raise KeyboardInterrupt(_how_to_go_on(output)) from None
    if result.stopped:
        typer.echo(f"stopped early{_how_to_go_on(result.output_dir)}", err=True)
        raise typer.Exit(130)


def _share_or_name(eval_dataset: str | None) -> float | str | None:
    if eval_dataset is None or why_no_name(eval_dataset) or Path(eval_dataset).exists():
        return eval_dataset  # `finetune` rejects invalid names
    try:
        return float(eval_dataset)
    except ValueError:
        return eval_dataset


def _misspelled_recipe(name: str) -> str | None:
    """The recipe that was meant, if `name` is no folder, no preset and no hub name with an owner."""
    from offloadkit.hf.presets import PRESETS

    return None if "/" in name or name in PRESETS or Path(name).exists() else recipes.nearest(name)


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def _is_setting(given: str) -> bool:
    """Whether a positional argument is KEY=VALUE, and neither a path nor a pattern of files that are there, such as
    year=2024/rows.jsonl.
    """
    if not _SETTING.match(given) or why_no_name(given):
        return bool(_SETTING.match(given))
    return not any(path.exists() for path in matching(Path(given)))


_WITHIN = "offload."
_TEXTS = ("model", "train_dataset", "tokenizer", "output_dir", "input_column", "target_column", "template")


def _known(arguments: dict[str, Any], where: str = "") -> dict[str, Any]:
    """`arguments`; raises `ConfigError` for a name that neither `finetune` nor `OffloadConfig` has."""
    from offloadkit.hf.arguments import LISTED, argument_meant, argument_names

    own = [each.name for each in fields(FinetuneOptions) if each.name not in ("callbacks", "compute_metrics")]
    known = dict.fromkeys([*own, *argument_names(), "lr"])
    within = [each.name for each in fields(OffloadConfig)]
    for name in arguments:
        if name not in known and name != "offload":
            other = f"; did you mean {_WITHIN}{name}?" if name in within else argument_meant(name, known)
            raise ConfigError(f"{where}no argument {shown(name)}{other or LISTED}")
    for name in arguments.get("offload", {}):
        if name not in within:
            other = argument_meant(name, within) or f": its fields are {', '.join(within)}"
            raise ConfigError(f"{where}OffloadConfig has no field {shown(name)}{other}")
    return arguments


def _settings(given: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Parse KEY=VALUE. Values are JSON (0.1, true, [1, 2]) or Python's True, False and None; all else, and all values
    of string arguments, are strings. The values of `offload.NAME` are under "offload".

    Args:
        names: argument of `finetune` by HuggingFace's name.
    """
    from offloadkit.hf.arguments import argument_names, is_text

    found: dict[str, Any] = {"offload": {}}
    for each in given:
        key, equals, text = each.partition("=")
        if not equals:
            raise ConfigError(f"{shown(each)} is not KEY=VALUE, such as warmup_steps=100")
        into = found["offload"] if key.startswith(_WITHIN) else found
        key = key.removeprefix(_WITHIN) if into is not found else names.get(key, key)
        if key in into:
            raise ConfigError(f"{key} is given twice")
        try:
            into[key] = json.loads(text)
        except json.JSONDecodeError:
            into[key] = {"True": True, "False": False, "None": None}.get(text, text)
        is_name = key in _TEXTS or (key in argument_names() and is_text(key))
        if into is found and is_name and into[key] is not None and not isinstance(into[key], str):
            into[key] = text
    return _known(found)


@_command
def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODELS", help="Presets, folders, hub names. Default: T5 in all sizes."),
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="baseline, offloadkit, deepspeed; may be repeated.")] = None,
    num_samples: Annotated[int, typer.Option(help="Samples that the reported seconds are for.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Rows in a micro-batch.")] = 8,
    max_input_length: Annotated[int, typer.Option(help="Tokens of input in a row.")] = 512,
    max_target_length: Annotated[int, typer.Option(help="Tokens of target in a row.")] = 128,
    gradient_accumulation: Accumulation = 1,
    precision: Precision = "exact",
    vram: ProcessVram = None,
    ram: ProcessRam = None,
    steps: Steps = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for one process. Default: by the plan.")] = None,
    output: MeasuredOutput = Path("offloadkit-compare"),
) -> None:
    """Measure and draw offloadkit, plain training and DeepSpeed.

    Running it again continues. Exits with 1 if nothing could be measured.
    """
    options: dict[str, Any] = {**locals()}
    from offloadkit.doors.comparing.comparison import ENGINES, T5_MODELS
    from offloadkit.doors.comparing.comparison import compare as compare_models

    engines = options.pop("engine") or ENGINES
    names = options.pop("models") or T5_MODELS
    _show_measured(compare_models(names, engines, output_dir=options.pop("output"), **options))


@_command
def sweep(
    model: Model,
    dataset: Annotated[
        str | None, typer.Argument(metavar="DATASET", help="Train each size on these rows. Default: time random rows.")
    ] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Rows whose loss is measured after training.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Rows in a micro-batch, separated by commas.")] = "1,2,4,8,16,32,64",
    gradient_accumulation: Annotated[str, typer.Option(help="Micro-batches in one update, separated by commas.")] = "1",
    scale_learning_rate: Annotated[str, typer.Option(help="none, sqrt or linear, separated by commas.")] = "none",
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the smallest batch.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Samples in an epoch; with DATASET, those that each size trains on.")
    ] = None,
    tokenizer: Tokenizer = None,
    max_input_length: Annotated[int | None, typer.Option(help="Tokens of input in a row.")] = None,
    max_target_length: Annotated[int | None, typer.Option(help="Tokens of target in a row.")] = None,
    precision: Precision = "exact",
    vram: ProcessVram = None,
    ram: ProcessRam = None,
    steps: Steps = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one process. Default: by the plan; no limit with DATASET.")
    ] = None,
    output: MeasuredOutput = Path("offloadkit-sweep"),
) -> None:
    """Measure larger batches: seconds and, with DATASET, held-out loss.

    Running it again continues. Exits with 1 if nothing could be measured.
    """
    options: dict[str, Any] = {**locals()}
    from offloadkit.doors.comparing.sweeping import sweep as sweep_sizes

    options |= {
        "batch_sizes": _numbers(batch_sizes, "--batch-sizes"),
        "gradient_accumulation": _numbers(gradient_accumulation, "--gradient-accumulation"),
        "scale_learning_rate": scale_learning_rate.split(","),
    }
    named = options.pop("model"), options.pop("dataset")
    _show_measured(sweep_sizes(*named, output_dir=options.pop("output"), **options))


def _show_measured(result: Any) -> None:
    typer.echo(str(result))
    if not any(row["status"] == "measured" for row in result.rows):
        raise typer.Exit(1)


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(f"{shown(text)} is no list of whole numbers such as 1,2,4", param_hint=option)
    return [int(part) for part in parts]
