"""The command line: `offloadkit demo | doctor | plan | train | compare | sweep`."""

from __future__ import annotations

import atexit
import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from offloadkit.errors import OffloadkitError, TrainingStoppedError, shown
from offloadkit.files import why_no_name
from offloadkit.starting import collector_off, is_loaded, say
from offloadkit.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune models that are too big for the GPU: exact AdamW, with what does not fit in host RAM.",
)


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


# Otherwise Python's exit scans all objects of torch and transformers, which takes most of a second.
atexit.register(gc.freeze)

Model = Annotated[str, typer.Argument(help="Preset (t5-3b, llama-3.1-8b, ...), folder, or hub name.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub name; 'byte' is one token a byte. Default: the model's own.")
]
AutoBatchSize = Annotated[str, typer.Option(help="Rows in a micro-batch, or auto.")]
InputLength = Annotated[
    int | None, typer.Option(help="Longest input in tokens. Default: 512 (causal models: 1024), or the model's limit.")
]
TargetLength = Annotated[int | None, typer.Option(help="Longest target in tokens. Default: 128.")]
Accumulation = Annotated[int, typer.Option(help="Micro-batches in one update.")]
Precision = Annotated[str, typer.Option(help="Optimizer moments: exact (fp32), compact (bf16) or tiny (int8).")]
Dtype = Annotated[str, typer.Option(help="Working weights: auto, bf16, fp16 or fp32.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Say where everything lives, byte by byte and phase by phase.")
]
Vram = Annotated[str | None, typer.Option(help="VRAM that may be used, e.g. 8GiB. Default: what is free.")]
Ram = Annotated[str | None, typer.Option(help="RAM that may be used. Default: what is available.")]
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


def _command(command: Command) -> Command:
    """Register a command. An `OffloadkitError` is printed as one message and exits with 1, Ctrl-C exits with 130; other
    errors keep their traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            if not is_loaded("torch"):
                say("loading torch and transformers")
            return command(*args, **kwargs)
        except TrainingStoppedError as error:
            typer.echo(f"\n{error}", err=True)
            raise typer.Exit(128 + error.signal) from error
        except OffloadkitError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo(f"\ninterrupted{_how_to_go_on(Path(kwargs['output'])) if 'resume' in kwargs else ''}", err=True)
            raise typer.Exit(130) from error

    return app.command()(run)  # type: ignore[return-value]


def _how_to_go_on(output: Path) -> str:
    from offloadkit.checkpoint.folder import newest_checkpoint
    from offloadkit.errors import ConfigError

    try:
        return f"; --resume goes on from {newest_checkpoint(output, verify=False)}"
    except ConfigError:
        return f"; there is no checkpoint in {output} to resume from"


@_command
def demo(
    output: Annotated[Path, typer.Option(help="Folder for model/ and summary.json.")] = Path("offloadkit-demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; with fewer the model learns less.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the dates, the weights and the order of rows.")] = 0,
) -> None:
    """Watch a small T5 learn to write dates in ISO form; about a minute and a half on two CPU cores."""
    from offloadkit.demo.run import NUM_STEPS, run_demo

    run_demo(output, num_steps=steps or NUM_STEPS, seed=seed)


@_command
def doctor(
    folder: Annotated[Path, typer.Option(help="Folder whose disk is measured.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine and say what would improve training. Exits with 1 if nothing can be trained."""
    from offloadkit import doctor

    facts = doctor.gather(folder)
    typer.echo(json.dumps(doctor.as_json(facts), indent=2) if as_json else doctor.report(facts))
    if any(advice.level == "stop" for advice in doctor.advise(facts)):
        raise typer.Exit(1)


@_command
@collector_off()
def plan(
    model: Model,
    vram: Vram = None,
    ram: Ram = None,
    precision: Precision = "exact",
    batch_size: AutoBatchSize = "auto",
    max_input_length: InputLength = None,
    max_target_length: TargetLength = None,
    gradient_accumulation: Accumulation = 1,
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
    """Show how much memory training MODEL needs, where it is placed and how long a step takes.

    Exits with 1 if it does not fit. No weights are read. --gpu plans for a card that is not here.

    On a machine without a GPU, --vram alone plans for an assumed card of that size.

    With --num-gpus, --vram is that of each GPU and --ram that of a host.
    """
    from offloadkit.config import OffloadConfig
    from offloadkit.planning import plan as plan_model

    config: Any = {"vram": vram, "ram": ram, "precision": precision, "working_dtype": dtype, "disk": disk}
    config |= {"gradient_accumulation": gradient_accumulation, "compile_blocks": compile_blocks}
    planned = plan_model(
        model,
        batch_size=_rows(batch_size),
        max_input_length=max_input_length,
        max_target_length=max_target_length,
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


@_command
def train(
    model: Model,
    dataset: Annotated[str, typer.Argument(help=".jsonl, .json, .csv or .parquet file, or hub name.")],
    eval_dataset: Annotated[
        str | None,
        typer.Option(help="Rows to evaluate on, each epoch and at the end; 0.1 holds out a tenth of DATASET."),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for model/ and checkpoints.")
    ] = "offloadkit-output",
    tokenizer: Tokenizer = None,
    epochs: Annotated[float, typer.Option(help="Passes over the dataset.")] = 1,
    max_steps: Annotated[int | None, typer.Option(help="Updates; overrides --epochs.")] = None,
    batch_size: AutoBatchSize = "auto",
    max_input_length: InputLength = None,
    max_target_length: TargetLength = None,
    gradient_accumulation: Accumulation = 1,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 1e-4, with random weights 5e-4.")] = None,
    precision: Precision = "exact",
    vram: Vram = None,
    ram: Ram = None,
    disk: Disk = None,
    dtype: Dtype = "auto",
    compile_blocks: Annotated[
        bool, typer.Option("--compile-blocks", help="Faster steps, after a first one that compiles for minutes.")
    ] = False,
    grace_seconds: Annotated[
        float, typer.Option(help="Seconds from SIGTERM or SIGHUP to the end, in which a save must fit.")
    ] = 25.0,
    save_minutes: Annotated[float | None, typer.Option(help="Save after so many minutes, too.")] = None,
    on_nonfinite: Annotated[
        Literal["raise", "skip", "rollback"],
        typer.Option(help="NaN or Inf in gradients: end; leave the step out; go back to the last checkpoint."),
    ] = "raise",
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Start from random weights.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order of rows, dropout and random weights.")] = 0,
    num_gpus: Annotated[int | None, typer.Option(help="Train on so many GPUs of this machine. Default: one.")] = None,
    input_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What is input, if no known name says it.")
    ] = None,
    target_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What is target or label, if no known name says it.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Makes the input of several columns, e.g. '{question} {context}'.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run's model and checkpoints in the output folder.")
    ] = False,
    verbose: Verbose = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other training argument of HuggingFace; may be repeated."),
    ] = None,
) -> None:
    """Train MODEL on DATASET with the optimizer in host RAM.

    Ctrl-C finishes the current step, saves a checkpoint and exits with 130; --resume continues.
    """
    from offloadkit.config import OffloadConfig

    with collector_off():
        from offloadkit.finetuning import finetune

    config: Any = {"disk": disk, "working_dtype": dtype, "on_nonfinite": on_nonfinite}
    wishes: Any = {"precision": precision, "vram": vram, "ram": ram, "offload": OffloadConfig(**config)}
    wishes |= _settings(settings or [])
    result = finetune(
        model,
        dataset,
        eval_dataset=_share_or_name(eval_dataset),
        output_dir=output,
        tokenizer=tokenizer,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=_rows(batch_size),
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        gradient_accumulation=gradient_accumulation,
        learning_rate=learning_rate,
        init="random" if random_weights else "pretrained",
        seed=seed,
        num_gpus=num_gpus,
        input_column=input_column,
        target_column=target_column,
        template=template,
        resume=resume,
        overwrite=overwrite,
        verbose=verbose,
        compile_blocks=compile_blocks,
        grace_seconds=grace_seconds,
        save_minutes=save_minutes,
        **wishes,
    )
    typer.echo(result)
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


def _settings(given: list[str]) -> dict[str, Any]:
    """Parse `--set KEY=VALUE` options. Values are JSON (0.1, true, [1, 2]) or Python's True, False and None; other
    values, and all values of string arguments, are strings."""
    from offloadkit.hf.arguments import INSTEAD, argument_names, did_you_mean, is_text

    found: dict[str, Any] = {}
    for each in given:
        key, equals, text = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{shown(each)} is not KEY=VALUE, such as warmup_steps=100", param_hint="--set")
        known = [name for name in argument_names() if name not in _HAVE_OPTIONS]
        if option := _HAVE_OPTIONS.get(key):
            raise typer.BadParameter(f"{key} has an option of its own: {option}", param_hint="--set")
        if key in INSTEAD and (name := INSTEAD[key].partition("=")[0]) not in known:
            option = _HAVE_OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise typer.BadParameter(f"no training argument {shown(key)}; did you mean {option}?", param_hint="--set")
        if key not in known:
            raise typer.BadParameter(f"no training argument {shown(key)}{did_you_mean(key, known)}", param_hint="--set")
        if key in found:
            raise typer.BadParameter(f"{key} is given twice", param_hint="--set")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = {"True": True, "False": False, "None": None}.get(text, text)
        if is_text(key) and found[key] is not None and not isinstance(found[key], str):
            found[key] = text
    return found


_HAVE_OPTIONS = {
    "output_dir": "--output",
    "num_train_epochs": "--epochs",
    "max_steps": "--max-steps",
    "per_device_train_batch_size": "--batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation",
    "learning_rate": "--learning-rate",
    "lr": "--learning-rate",
    "seed": "--seed",
}
"""Training arguments that `--set` rejects, and their own options."""


@_command
def compare(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets, folders, hub names. Default: T5 in all sizes.")
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
    """Measure and draw how long offloadkit, plain training and DeepSpeed take for each of MODELS.

    Running it again continues. Exits with 1 if nothing could be measured.
    """
    from offloadkit.comparing.comparison import ENGINES, T5_MODELS
    from offloadkit.comparing.comparison import compare as compare_models

    options: Any = {"precision": precision, "vram": vram, "ram": ram, "steps": steps, "timeout": timeout}
    result = compare_models(
        models or T5_MODELS,
        engine or ENGINES,
        num_samples=num_samples,
        batch_size=batch_size,
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        gradient_accumulation=gradient_accumulation,
        output_dir=output,
        **options,
    )
    _show_measured(result)


@_command
def sweep(
    model: Model,
    dataset: Annotated[
        str | None, typer.Argument(help="Train each size on these rows. Default: time random rows.")
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
    """Measure what larger batches cost and, with DATASET, how they change the loss on held-out rows.

    Running it again continues. Exits with 1 if nothing could be measured.
    """
    from offloadkit.comparing.sweeping import sweep as sweep_sizes

    options: Any = {"precision": precision, "vram": vram, "ram": ram, "steps": steps, "timeout": timeout}
    result = sweep_sizes(
        model,
        dataset,
        eval_dataset=eval_dataset,
        batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
        gradient_accumulation=_numbers(gradient_accumulation, "--gradient-accumulation"),
        scale_learning_rate=scale_learning_rate.split(","),
        learning_rate=learning_rate,
        num_samples=num_samples,
        tokenizer=tokenizer,
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        output_dir=output,
        **options,
    )
    _show_measured(result)


def _show_measured(result: Any) -> None:
    typer.echo(str(result))
    if not any(row["status"] == "measured" for row in result.rows):
        raise typer.Exit(1)


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(f"{shown(text)} is no list of whole numbers such as 1,2,4", param_hint=option)
    return [int(part) for part in parts]
