"""Seconds from the start of the process to the end of the first step of `finetune`, by phase; and of two commands.

    python -m benchmarks start t5-3b --vram 8GiB

Each run is a fresh process. For weights from a disk, the page cache is emptied before. The first run on a machine also
measures its rates and compiles kernels, and Python's bytecode if the libraries came without. The results are cached, so
each start is run twice. A row of the table has the last run's seconds by phase, and the CPU seconds (user and system,
all threads), which are disturbed less by other work on the machine.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.run import git_commit
from benchmarks.table import Row

CPU, FIRST = "CPU", "first turn"
"""Names in a row's `figures`: CPU seconds of the last turn, and all seconds of the first turn. All other names are
phases."""
MARK = "start: "
PHASES = {
    "offloadkit.doors.planning:measure": "measure the machine",
    "offloadkit.doors.finetuning:auto_batch_size": "plan",
    "offloadkit.doors.finetuning:shown_plan": "plan",
    "offloadkit.doors.finetuning:prepare_both": "tokenize",
    "offloadkit.doors.finetuning:TrainingRun._load": "open the model",
    "offloadkit.device.host_memory:allocate": "populate and pin RAM",
    "offloadkit.hf.load:InitialWeights.materialise": "draw weights",
    "offloadkit.hf.weight_files:WeightFiles.materialise": "map files",
    "offloadkit.offload.states:LayerState.take_parameters": "take weights over",
    "offloadkit.engine.engine:OffloadEngine.__init__": "rest of the engine",
    "offloadkit.hf.trainer:OffloadTrainerMixin.train": "first step",
}
"""Timed functions and methods with their phases. Time in a nested phase does not count for the outer phase."""


class FirstStepDoneError(Exception):
    """Ends the measured run. Its argument is the time of the end of the step, by `time.perf_counter`."""


class Stopwatch:
    """Seconds by phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Wrap `function` so that its seconds count for `phase`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[phase] += took - self._inner.pop()
                self._inner[-1] += took

        return run

    def follow(self, where: str, phase: str) -> None:
        """Time the function or method at "module:name"."""
        module, _, path = where.partition(":")
        owner: Any = import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, name, self.timed(getattr(owner, name), phase))


def start(
    model: str,
    *,
    sources: tuple[str, ...] = ("disk", "random", "command"),
    vram: str | None = None,
    ram: str | None = None,
    batch_size: int = 8,
    turns: int = 2,
    device: str | None = None,
    out: Path = table.PATH,
    commit: str | None = None,
    notes: str = "",
) -> list[Row]:
    """Measure and print each start; append a row for each to `out`, and return the new rows.

    Args:
        sources: "disk" reads the weights from a prepared folder, "random" draws them. "command" stands for
            `offloadkit --help` and `offloadkit plan` of the model within the budgets.
        device: "cpu" hides the GPU.
    """
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # set in container images; each import would compile again
    within = [each for name, size in (("--vram", vram), ("--ram", ram)) if size for each in (name, size)]
    commands = {"startup-help": ["--help"], f"startup-plan-{model}": ["plan", model, *within]}
    about = _machine(device) | {"status": "measured", "commit": commit or git_commit(), "notes": notes or None}
    rows: list[Row] = []

    def measure(case: str, engine: str, run: Callable[[], dict[str, float]], **more: Any) -> None:
        totals = []
        for turn in range(1, turns + 1):
            before = _cpu_seconds()
            phases = run()
            cpu = _cpu_seconds() - before
            totals.append(sum(phases.values()))
            print(f"{case}, turn {turn} of {turns}: {totals[-1]:.1f} s, of the CPU {cpu:.1f} s")
            print("".join(f"  {phase:22} {number:6.2f}\n" for phase, number in phases.items()), end="", flush=True)
        figures = {**(phases if len(phases) > 1 else {}), CPU: round(cpu, 2), FIRST: round(totals[0], 2)}
        row = {"case": case, "engine": engine, "date": table.now(), **about, **more, "turns": turns}
        rows.append(row | {"seconds": totals[-1], "figures": figures})
        table.write([*table.read(out), rows[-1]], out)

    for source in sources:
        if source == "command":
            for case, command in commands.items():
                measure(case, f"offloadkit {' '.join(command)}", functools.partial(run_command, command, environment))
            continue
        folder = _prepared(model, source, environment)
        task = {"folder": str(folder), "init": "pretrained" if source == "disk" else "random", "vram": vram}
        task |= {"ram": ram, "batch_size": batch_size}
        run = functools.partial(_run_start, f"{model} from {source}", task, environment)
        measure(f"startup-{model}-{source}", "offloadkit", run, model=model, batch_size=batch_size)
    return rows


def _run_start(what: str, task: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """The seconds of a start in a fresh process, by phase."""
    _drop_pages(Path(task["folder"]))
    command = [sys.executable, "-m", "benchmarks.start", json.dumps(task | {"began": time.time()})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    marked = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not marked:
        raise SystemExit(f"{what} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(marked[-1].removeprefix(MARK))
    return found


def run_command(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """The seconds of `offloadkit` with these arguments."""
    began = time.perf_counter()
    whole = [sys.executable, "-m", "offloadkit", *command]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"offloadkit {' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return {"all": round(time.perf_counter() - began, 3)}


def _cpu_seconds() -> float:
    """User and system time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _machine(device: str | None) -> Row:
    """The columns that describe the machine."""
    import torch

    from offloadkit import __version__
    from offloadkit.doors.engines.runner import version
    from offloadkit.facts import hardware

    here = torch.device("cpu") if device == "cpu" else hardware.default_device()
    found = table.of_machine(hardware.describe_machine(here))
    return found | {name: version(name) for name in ("torch", "transformers")} | {"offloadkit": __version__}


def _prepared(model: str, source: str, environment: dict[str, str]) -> Path:
    """A folder with the model's config and, for "disk", its weights; it is kept."""
    folder = Path(tempfile.gettempdir()) / "offloadkit-start" / f"{model}-{source}"
    if not (folder / "done").exists():
        task = json.dumps({"prepare": model, "folder": str(folder), "weights": source == "disk"})
        subprocess.run([sys.executable, "-m", "benchmarks.start", task], env=environment, check=True)
    return folder


def _prepare(task: dict[str, Any]) -> None:
    import torch

    from benchmarks.cases import config_of
    from offloadkit.doors.engines.work import Work, plain_model
    from offloadkit.facts import hardware

    folder, config = Path(task["folder"]), config_of(task["prepare"])
    config.save_pretrained(folder)
    if task["weights"]:
        device = hardware.default_device()
        work = Work(str(folder), 1, 8, 8)
        built: Any = plain_model(work, "bf16", torch.device("cpu"), device)
        built.save_pretrained(folder)
    (folder / "done").touch()


def _drop_pages(folder: Path) -> None:
    """Drop the files of `folder` from the page cache."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_here(task: dict[str, Any]) -> dict[str, float]:
    """The seconds of one start in this process by phase, from the moment at which the parent launched it."""
    from offloadkit import finetune

    finetuning = import_module("offloadkit.doors.finetuning")
    watch = Stopwatch()
    with finetuning._libraries():
        pass
    watch.seconds["import libraries"] = time.time() - task["began"]
    for where, phase in PHASES.items():
        watch.follow(where, phase)
    trainer: Any = import_module("offloadkit.hf.trainer").OffloadTrainerMixin
    train = trainer.train

    def train_and_end(*args: Any, **kwargs: Any) -> None:
        train(*args, **kwargs)
        raise FirstStepDoneError(time.perf_counter())

    trainer.train = train_and_end
    config = json.loads((Path(task["folder"]) / "config.json").read_text())
    row = {"input": "a" * 511, "target": "b" * 127} if config.get("is_encoder_decoder") else {"text": "a" * 1023}
    rows = [row] * task["batch_size"]
    sizes: dict[str, Any] = {name: task[name] for name in ("vram", "ram", "batch_size", "init")}
    with tempfile.TemporaryDirectory() as output:
        options: dict[str, Any] = {"monitor": False, "save_strategy": "no", "report_to": "none"}
        whole = watch.timed(finetune, "rest")
        try:
            whole(task["folder"], rows, tokenizer="byte", output_dir=output, max_steps=1, **sizes, **options)
        except FirstStepDoneError as done:
            watch.seconds["rest"] -= time.perf_counter() - done.args[0]  # without the release of the run's memory
    return {phase: round(number, 3) for phase, number in watch.seconds.items()}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "prepare" in given:
        _prepare(given)
    else:
        print(MARK + json.dumps(measure_here(given)), flush=True)
