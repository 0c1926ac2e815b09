"""What the monitor costs a training: steps with it and without it in turns, in one process, in a real Jupyter kernel.

    python -m benchmarks.monitor_cost                                       # t5-base on a GPU, about a minute
    python -m benchmarks.monitor_cost --cpu --pairs 6                       # t5-tiny
    python -m benchmarks.monitor_cost --render FRAMES docs                  # its page as pictures, by Chromium

First a run over micro-batches that grow longer, with the monitor: three states of its page are kept, in which the VRAM
bar moves. Then pairs of turns, one with the monitor and one without, whose order alternates, so that drift cancels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.run import ROOT, Row, git_commit, write_results

NUM_LENGTHS, STEPS_OF_A_LENGTH = 8, 8
NUM_SETTLING = 2
"""Steps at a turn's begin that are not timed."""
FRAMES = ("start", "middle", "end")
FRAMES_FOLDER = Path(tempfile.gettempdir()) / "monitor-frames"
THREADS = {"monitor": "offloadkit-monitor", "sending": "IOPub"}
"""Those that draw, and that send what was drawn."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NARROW, MIDDLE, WIDE = 420, 560, 800
"""Pixels of the windows that a frame is drawn in."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what the command line asks for; print what it cost, return the rows of the result file."""
    options = parse(arguments)
    if options.render:
        render(*options.render)
        return []
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.out = options.out or ROOT / "benchmarks" / "results" / f"monitor-cost-{options.model}.json"
    told = {key: getattr(options, key) for key in ("pairs", "steps", "seconds", "mode", "model")}
    told |= {"work": options.work, "out": str(options.out.resolve()), "commit": options.commit or git_commit()}
    num_values = run_in_a_kernel(f"from benchmarks.monitor_cost import measure\nmeasure({told!r})", options.frames)
    rows: list[Row] = json.loads(options.out.read_text())["rows"]
    print(f"{num_values} drawings in all")
    print("\n".join(words(rows[0])), f"\nwritten to {options.out}, frames to {options.frames}", sep="")
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the work as the fields of a `Workload`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor_cost", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="a T5 (default: t5-base, with --cpu t5-tiny)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--vram", type=float, default=4.0, metavar="GIB", help="budget of VRAM")
    parser.add_argument("--pairs", type=int, default=20, help="turns with the monitor, and as many without")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a turn")
    parser.add_argument("--seconds", type=float, default=40.0, help="no pair begins later than this after the first")
    parser.add_argument("--cpu", action="store_true", help="without the GPU")
    parser.add_argument("--out", type=Path, help="result file, written after each turn")
    parser.add_argument("--frames", type=Path, default=FRAMES_FOLDER, help="folder for the page's three states")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--render", nargs=2, type=Path, metavar=("FRAMES", "FOLDER"), help="draw frames as PNG instead")
    options = parser.parse_args(arguments)
    if min(options.pairs, options.steps, options.batch) < 1:
        parser.error("--pairs, --steps and --batch are at least 1")
    options.mode, options.model = "monitor-cost", options.model or ("t5-tiny" if options.cpu else "t5-base")
    lengths = (
        {"tokens": 64, "target_tokens": 16} if options.model == "t5-tiny" else {"tokens": 512, "target_tokens": 128}
    )
    options.work = {"model": options.model, "batch_size": options.batch, "vram_budget_gib": options.vram, **lengths}
    return options


# ---- outside: what a front end does ---------------------------------------------------------------------------------


def run_in_a_kernel(code: str, frames: Path) -> int:
    """Run one cell in a kernel of this interpreter, whose output goes to the screen.

    Returns:
        How often the monitor's page was sent.
    """
    import nbformat
    from nbclient import NotebookClient

    class Listening(NotebookClient):  # type: ignore[misc]
        """Keeps the pages of the first monitor, and shows what is printed."""

        def __init__(self, notebook: Any) -> None:
            super().__init__(notebook, timeout=None, kernel_name="python3")
            self.pages: list[str] = []
            self.first, self.num_values = "", 0

        def handle_comm_msg(self, outs: Any, msg: Any, cell_index: int) -> None:
            super().handle_comm_msg(outs, msg, cell_index)
            content = msg["content"]
            value = content.get("data", {}).get("state", {}).get("value", "")
            if isinstance(value, str) and 'class="okm"' in value:
                self.num_values += 1
                self.first = self.first or content["comm_id"]
                if content["comm_id"] == self.first:
                    self.pages.append(value)
                elif self.pages:
                    keep_frames(self.pages, frames)
                    self.pages = []

        def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "stream":
                print(msg["content"]["text"], end="", flush=True)
            return super().output(outs, msg, display_id, cell_index)

    with tempfile.TemporaryDirectory() as folder, kernel_at(Path(folder)):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        client = Listening(notebook)
        client.execute()
    return client.num_values


@contextlib.contextmanager
def kernel_at(folder: Path) -> Iterator[None]:
    """A kernel named python3, of this interpreter whatever else is installed, that finds this repository."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launcher, "display_name": "Python 3", "language": "python", "env": {"PYTHONPATH": paths}}
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    before = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("JUPYTER_PATH")
        if before is not None:
            os.environ["JUPYTER_PATH"] = before


def keep_frames(pages: list[str], folder: Path) -> None:
    """The first page with something measured in it, one in the middle, and the last."""
    measured = [page for page in pages if " used, " in page.replace("\N{NO-BREAK SPACE}", " ")] or pages
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in zip(FRAMES, (measured[0], measured[len(measured) // 2], measured[-1]), strict=True):
        (folder / f"{name}.html").write_text(page)


def render(frames: Path, folder: Path) -> list[Path]:
    """Pictures of the frames: all beside each other, and the last alone, in dark, and in a narrow window.

    Raises:
        SystemExit: `frames` holds none.
    """
    from playwright.sync_api import sync_playwright

    missing = [name for name in FRAMES if not (frames / f"{name}.html").exists()]
    if missing:
        raise SystemExit(f"{frames} has no {missing[0]}.html: name the --frames of a run of benchmarks.monitor_cost")
    last = FRAMES[-1:]
    asked = [
        ("-moving", FRAMES, "light", len(FRAMES) * MIDDLE),
        ("", last, "light", WIDE),
        ("-dark", last, "dark", WIDE),
        ("-narrow", last, "light", NARROW),
    ]
    written = []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, shown, theme, width in asked:
            page = browser.new_page(viewport={"width": width, "height": 900}, device_scale_factor=1.5)
            html = "".join(f"<div>{(frames / f'{frame}.html').read_text()}</div>" for frame in shown)
            grid = f"display:grid;grid-template-columns:repeat({len(shown)},1fr);gap:8px;align-items:start"
            back = "#111" if theme == "dark" else "#fff"
            page.set_content(
                f'<html theme="{theme}"><body style="margin:8px;background:{back};{grid}">{html}</body></html>'
            )
            written.append(folder / f"monitor-gpu{name}.png")
            page.screenshot(path=written[-1], full_page=True)
        browser.close()
    return written


# ---- inside the kernel ----------------------------------------------------------------------------------------------


def measure(told: dict[str, Any]) -> None:
    """Train, in turns with a monitor and without; the result file is written after each turn."""
    import torch

    from benchmarks.engines import Planned
    from benchmarks.measure import versions
    from benchmarks.workloads import Workload, fixed_batches
    from offloadkit.hardware import describe_machine

    work = Workload(**told["work"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop = Planned(work, device)
    (batch,) = fixed_batches(work, device)
    watch_it_grow(loop, batch)
    options = argparse.Namespace(**told | {"out": Path(told["out"])})
    about = {"machine": describe_machine(device), "versions": versions(), "work": asdict(work)}
    turns: list[Row] = []
    began = time.perf_counter()
    for pair in range(told["pairs"]):
        if pair and time.perf_counter() - began > told["seconds"]:
            print(f"no time for more than {pair} pairs")
            break
        for watched in (False, True) if pair % 2 else (True, False):
            turns.append({"pair": pair, "watched": watched, **turn(loop, batch, told["steps"], watched=watched)})
            with contextlib.redirect_stdout(io.StringIO()):
                write_results(options, [about | summary(turns), *turns])
    loop.engine.close()


def watch_it_grow(loop: Any, batch: dict[str, Any]) -> None:
    """A run over micro-batches that grow to the whole one, under a monitor; it warms up, too."""
    from offloadkit import Monitor

    with Monitor(loop.plan, loop.engine.telemetry, total_steps=NUM_LENGTHS * STEPS_OF_A_LENGTH) as monitor:
        for number in range(NUM_LENGTHS * STEPS_OF_A_LENGTH):
            share = (number // STEPS_OF_A_LENGTH + 1) / NUM_LENGTHS
            step(loop, {name: rows[:, : int(share * rows.shape[1])].contiguous() for name, rows in batch.items()})
            assert not monitor.stop_requested
        loop.engine.synchronize()


def step(loop: Any, batch: dict[str, Any]) -> None:
    loop.engine.backward(loop.engine(**batch).loss)
    loop.engine.step()


def turn(loop: Any, batch: dict[str, Any], num_steps: int, *, watched: bool) -> Row:
    """Timed steps, everything waited for at both ends, with a monitor of their own or without."""
    from offloadkit import Monitor

    with contextlib.ExitStack() as stack:
        monitor = Monitor(loop.plan, loop.engine.telemetry, total_steps=10**6)
        asked = stack.enter_context(monitor) if watched else monitor
        for _ in range(NUM_SETTLING):
            step(loop, batch)
            assert not asked.stop_requested  # so the interrupt is heeded in both
        loop.engine.synchronize()
        threads, began = thread_seconds(), time.perf_counter()
        ends = []
        for _ in range(num_steps):
            step(loop, batch)
            ends.append(time.perf_counter())
        loop.engine.synchronize()
        took = time.perf_counter() - began
        busy = {name: seconds - threads[name] for name, seconds in thread_seconds().items()}
    each = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    return {"seconds": took, "step_seconds": took / num_steps, "each_step": each, "thread_seconds": busy}


def thread_seconds() -> dict[str, float]:
    """CPU seconds so far of the threads in `THREADS`, by the system's clock of each; 0 where there is none."""
    alive = {thread.name: thread for thread in threading.enumerate() if thread.ident}
    found = {}
    for name, thread_name in THREADS.items():
        thread = alive.get(thread_name)
        ident = thread.ident if thread is not None else None
        found[name] = 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))
    return found


def summary(turns: list[Row]) -> Row:
    """Steps with and without, the difference of pairs in shares of a step, and how busy the threads were.

    An interval is None before there are two pairs.
    """
    found: Row = {}
    for name, watched in (("with", True), ("without", False)):
        own = [turn for turn in turns if turn["watched"] is watched]
        if own:
            found[f"mean_step_seconds_{name}"] = statistics.fmean(turn["step_seconds"] for turn in own)
            found[f"median_step_seconds_{name}"] = statistics.median(s for turn in own for s in turn["each_step"])
            found[f"num_steps_{name}"] = sum(len(turn["each_step"]) for turn in own)
            wall = sum(turn["seconds"] for turn in own)
            for thread in THREADS:
                busy = sum(turn["thread_seconds"][thread] for turn in own)
                found[f"{thread}_thread_share_{name}"] = busy / wall
    pairs: dict[int, dict[bool, float]] = {}
    for each in turns:
        pairs.setdefault(each["pair"], {})[each["watched"]] = each["step_seconds"]
    differences = [pair[True] / pair[False] - 1 for pair in pairs.values() if len(pair) == 2]
    found["num_pairs"] = len(differences)
    if differences:
        found["mean_difference"] = statistics.fmean(differences)
        found["median_difference"] = statistics.median(differences)
        found["interval_95"] = interval(differences)
    return found


def interval(values: list[float]) -> list[float] | None:
    """Of the mean, by Student's t: 95 %."""
    if len(values) < 2:
        return None
    freedom, z = len(values) - 1, statistics.NormalDist().inv_cdf(0.975)
    exact = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}  # where the expansion is too small
    t = exact.get(freedom) or z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return [mean - half, mean + half]


def words(row: Row) -> list[str]:
    """The summary in lines."""
    low, high = row["interval_95"] or (float("nan"), float("nan"))
    lines = []
    for name in ("with", "without"):
        mean, median = (1000 * row[f"{kind}_step_seconds_{name}"] for kind in ("mean", "median"))
        number, shares = row[f"num_steps_{name}"], [f"{row[f'{one}_thread_share_{name}']:.3%}" for one in THREADS]
        lines.append(f"{name:8} {mean:.2f} ms a step, median {median:.2f} of {number}; threads {' + '.join(shares)}")
    said = f"difference of {row['num_pairs']} pairs {row['mean_difference']:+.2%}, 95 % [{low:+.2%}, {high:+.2%}]"
    return [
        "the threads are those that draw and that send, their CPU time in shares of a core",
        *lines,
        f"{said}, median {row['median_difference']:+.2%}",
    ]


if __name__ == "__main__":
    main()
