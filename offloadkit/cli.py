"""The command line: `offloadkit demo | doctor | plan | train`. Errors of ours print as one message."""

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
            hint = "; --resume goes on from the newest checkpoint" if "resume" in kwargs else ""
            typer.echo(f"\ninterrupted{hint}", err=True)
            raise typer.Exit(130) from error

    return run  # type: ignore[return-value]


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
    output: Annotated[Path, typer.Option(help="Folder for model/ and checkpoints.")] = Path("offloadkit-output"),
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name; 'byte': one token a byte.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the dataset.")] = 1,
    max_steps: Annotated[int | None, typer.Option(help="Updates; goes before --epochs.")] = None,
    batch_size: Annotated[str, typer.Option(help="Rows in a micro-batch, or auto.")] = "auto",
    gradient_accumulation: Annotated[int, typer.Option(help="Micro-batches an update.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="Left out: 1e-4, with random weights 5e-4.")] = None,
    precision: Annotated[str, typer.Option(help="Of the optimizer states: exact, compact or tiny.")] = "exact",
    vram: Annotated[str | None, typer.Option(help="VRAM to use, e.g. 8GiB. Left out: what is free.")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM to use. Left out: what is available.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Start from random weights.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order, dropout and random weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    retry_leaner: Annotated[
        bool, typer.Option("--retry-leaner", help="Go on with less in VRAM, once, where the GPU's memory is full.")
    ] = False,
) -> None:
    """Train MODEL on DATASET with the optimizer in host RAM."""
    from offloadkit.finetune import finetune

    wishes: Any = {"precision": precision, "vram": vram, "ram": ram}
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
        **wishes,
    )
    typer.echo(result)
