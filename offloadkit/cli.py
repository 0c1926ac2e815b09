"""The command line: `offloadkit demo | doctor | plan | train | compare | sweep`; errors of ours are one message."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from offloadkit.errors import OffloadkitError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train models that do not fit: exact AdamW with the optimizer in host memory.",
)

_STEPS = "Timed, after four that warm up. Left out: six, or as many as take three seconds."

Command = TypeVar("Command", bound=Callable[..., Any])


def _readable(command: Command) -> Command:
    """Print an `OffloadkitError` as its message and exit with 1, Ctrl-C with 130; other errors keep their traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except OffloadkitError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            typer.echo(f"\ninterrupted{_how_to_go_on(Path(kwargs['output'])) if 'resume' in kwargs else ''}", err=True)
            raise typer.Exit(130) from error

    return run  # type: ignore[return-value]


def _how_to_go_on(output: Path) -> str:
    """What `--resume` would do after an interrupt that left no time for a checkpoint."""
    from offloadkit.checkpoint.folder import newest_checkpoint
    from offloadkit.errors import ConfigError

    try:
        return f"; --resume goes on from {newest_checkpoint(output)}"
    except ConfigError:
        return f"; there is no checkpoint in {output} to resume from"


@app.command()
@_readable
def demo(
    output: Annotated[Path, typer.Option(help="Folder for model/ and summary.json.")] = Path("offloadkit-demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Fewer steps learn less.")] = None,
    seed: Annotated[int, typer.Option(help="Of the dates, the weights and the order.")] = 0,
) -> None:
    """Watch a small T5 learn to write dates in ISO form; about a minute and a half on two CPU cores."""
    from offloadkit.demo.run import NUM_STEPS, run_demo

    run_demo(output, num_steps=steps or NUM_STEPS, seed=seed)


@app.command()
@_readable
def doctor(
    folder: Annotated[Path, typer.Option(help="Where the disk is measured: where checkpoints will go.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine and say what would make training better; exits with 1 where nothing can be trained."""
    import json

    from offloadkit import doctor

    facts = doctor.gather(folder)
    typer.echo(json.dumps(doctor.as_json(facts), indent=2) if as_json else doctor.report(facts))
    if any(advice.level == "stop" for advice in doctor.advise(facts)):
        raise typer.Exit(1)


@app.command()
@_readable
def plan(
    model: Annotated[str, typer.Argument(help="Preset (t5-3b, flan-t5-xl, ...), folder, or hub name.")],
    vram: Annotated[
        str | None, typer.Option(help="VRAM the process may take, e.g. 8GiB. Left out: what is free.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="RAM the process may take. Left out: what is available.")] = None,
    precision: Annotated[str, typer.Option(help="Of the optimizer states: exact, compact or tiny.")] = "exact",
    batch_size: Annotated[str, typer.Option(help="Rows in a micro-batch, or auto.")] = "auto",
    max_input_length: Annotated[int | None, typer.Option(help="Tokens of input a row.")] = None,
    max_target_length: Annotated[int | None, typer.Option(help="Tokens of target a row.")] = None,
    gradient_accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches an update.")] = 1,
    disk: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="On a local disk, for optimizer states that fit no RAM.")
    ] = None,
    compile_blocks: Annotated[bool, typer.Option("--compile-blocks", help="Plan for compiled blocks.")] = False,
    dtype: Annotated[str, typer.Option(help="Working weights: auto, bf16, fp16 or fp32.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what training MODEL needs, where it goes and how long a step takes; exits with 1 where it does not fit.

    No weights are read. Without a GPU here, --vram plans for a card of that size.
    """
    import json

    from offloadkit.config import OffloadConfig
    from offloadkit.planning import plan as plan_model

    config: Any = {
        "vram": vram,
        "ram": ram,
        "precision": precision,
        "gradient_accumulation": gradient_accumulation,
        "working_dtype": dtype,
        "disk": disk,
        "compile_blocks": compile_blocks,
    }
    planned = plan_model(
        model,
        batch_size=_rows(batch_size),
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        offload=OffloadConfig(**config),
    )
    typer.echo(json.dumps(planned.to_dict(), indent=2) if as_json else f"{planned}\n{planned.explain()}".rstrip())
    if not planned.fits:
        raise typer.Exit(1)


def _rows(batch_size: str) -> int | Literal["auto"]:
    """`--batch-size` as a number or "auto"."""
    if batch_size == "auto":
        return "auto"
    if not batch_size.lstrip("-").isdigit():
        raise typer.BadParameter(f"{batch_size!r} is neither a whole number nor auto", param_hint="--batch-size")
    return int(batch_size)


@app.command()
@_readable
def train(
    model: Annotated[str, typer.Argument(help="Preset, folder, or hub name.")],
    dataset: Annotated[str, typer.Argument(help=".jsonl, .csv or .parquet file, or hub name.")],
    eval_dataset: Annotated[str | None, typer.Option(help="Evaluated after each epoch and at the end.")] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for model/ and checkpoints.")
    ] = "offloadkit-output",
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name; 'byte': one token a byte.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the dataset.")] = 1,
    max_steps: Annotated[int | None, typer.Option(help="Updates; goes before --epochs.")] = None,
    batch_size: Annotated[str, typer.Option(help="Rows in a micro-batch, or auto.")] = "auto",
    gradient_accumulation: Annotated[int, typer.Option(help="Micro-batches an update.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="Left out: 1e-4, with random weights 5e-4.")] = None,
    precision: Annotated[str, typer.Option(help="Of the optimizer states: exact, compact or tiny.")] = "exact",
    vram: Annotated[str | None, typer.Option(help="VRAM to use, e.g. 8GiB. Left out: what is free.")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM to use. Left out: what is available.")] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="On a local disk, for optimizer states that fit no RAM.")
    ] = None,
    compile_blocks: Annotated[
        bool, typer.Option("--compile-blocks", help="Faster steps, after a first one that compiles for minutes.")
    ] = False,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Start from random weights.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order, dropout and random weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    retry_leaner: Annotated[
        bool, typer.Option("--retry-leaner", help="Go on with less in VRAM, once, where the GPU's memory is full.")
    ] = False,
) -> None:
    """Train MODEL on DATASET with the optimizer in host RAM.

    One Ctrl-C ends it after the step under way, saves, and exits with 130; --resume goes on.
    """
    from offloadkit.config import OffloadConfig
    from offloadkit.finetuning import finetune

    wishes: Any = {"precision": precision, "vram": vram, "ram": ram, "offload": OffloadConfig(disk=disk)}
    result = finetune(
        model,
        dataset,
        eval_dataset=eval_dataset,
        output_dir=output,
        tokenizer=tokenizer,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=_rows(batch_size),
        gradient_accumulation=gradient_accumulation,
        learning_rate=learning_rate,
        init="random" if random_weights else "pretrained",
        seed=seed,
        resume=resume,
        retry_leaner=retry_leaner,
        compile_blocks=compile_blocks,
        **wishes,
    )
    typer.echo(result)
    if result.stopped:
        typer.echo(f"stopped early{_how_to_go_on(result.output_dir)}", err=True)
        raise typer.Exit(130)


@app.command()
@_readable
def compare(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets, folders, hub names. Left out: T5, all sizes.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="baseline, offloadkit, deepspeed; again for more.")] = None,
    num_samples: Annotated[int, typer.Option(help="What the seconds are for.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Rows in a micro-batch.")] = 8,
    max_input_length: Annotated[int, typer.Option(help="Tokens of input a row.")] = 512,
    max_target_length: Annotated[int, typer.Option(help="Tokens of target a row.")] = 128,
    gradient_accumulation: Annotated[int, typer.Option(help="Micro-batches an update.")] = 1,
    precision: Annotated[str, typer.Option(help="Of offloadkit's optimizer states: exact, compact or tiny.")] = "exact",
    vram: Annotated[str | None, typer.Option(help="Most VRAM of each process, e.g. 11GiB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Most RAM of each process.")] = None,
    steps: Annotated[int | None, typer.Option(help=_STEPS)] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for one process. Left out: by the plan.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the table, the chart and the rows.")] = Path(
        "offloadkit-compare"
    ),
) -> None:
    """Draw how long offloadkit, plain training and DeepSpeed take for each of MODELS. Running again goes on.

    Exits with 1 where nothing could be measured.
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


@app.command()
@_readable
def sweep(
    model: Annotated[str, typer.Argument(help="Preset, folder, or hub name.")],
    dataset: Annotated[
        str | None, typer.Argument(help="Train each size on these rows. Left out: time random ones.")
    ] = None,
    eval_dataset: Annotated[str | None, typer.Option(help="Whose loss is measured after training.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Rows in a micro-batch, with commas.")] = "1,2,4,8,16,32,64",
    gradient_accumulation: Annotated[str, typer.Option(help="Micro-batches an update, with commas.")] = "1",
    scale_learning_rate: Annotated[str, typer.Option(help="none, sqrt, linear, with commas.")] = "none",
    learning_rate: Annotated[float | None, typer.Option(help="Of the smallest step.")] = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Of an epoch; with a dataset: that each size trains on.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name; 'byte': one token a byte.")] = None,
    max_input_length: Annotated[int | None, typer.Option(help="Tokens of input a row.")] = None,
    max_target_length: Annotated[int | None, typer.Option(help="Tokens of target a row.")] = None,
    precision: Annotated[str, typer.Option(help="Of the optimizer states: exact, compact or tiny.")] = "exact",
    vram: Annotated[str | None, typer.Option(help="Most VRAM of each process, e.g. 11GiB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Most RAM of each process.")] = None,
    steps: Annotated[int | None, typer.Option(help=_STEPS)] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one process. Left out: by the plan; with DATASET no limit.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the table, the chart and the rows.")] = Path(
        "offloadkit-sweep"
    ),
) -> None:
    """Measure what larger batches cost; with DATASET, what they do to the held-out loss. Running again goes on.

    Exits with 1 where nothing could be measured.
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
    """Print a `Comparison` or `Sweep`; exit with 1 where none of its rows has figures."""
    typer.echo(str(result))
    if not any(row["status"] == "measured" for row in result.rows):
        raise typer.Exit(1)


def _numbers(text: str, option: str) -> list[int]:
    """ "1,2,4" as numbers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of whole numbers such as 1,2,4", param_hint=option)
    return [int(part) for part in parts]
