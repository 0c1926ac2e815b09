"""Engines on several GPUs of this machine, one after the other in fresh processes; one table row each.

    python -m benchmarks ranks --plan                          # plans of all cases; needs no GPU
    python -m benchmarks ranks tiny-1 tiny-2 --device cpu      # a try without a GPU

Everything on two H200s, in commands of at most ten minutes, which stop by themselves and keep measured rows:

    OUT="--out ranks.csv --commit $(git rev-parse --short HEAD)"
    # 1. T5-3B and Llama-8B: offloadkit and FSDP2
    python -m benchmarks ranks t5-3b-1x24 t5-3b-2x24 t5-3b-2x28 t5-3b-2 llama-8b-2x24 llama-8b-2x80 llama-8b-2 \
        llama-8b-1x24 $OUT --seconds 570
    # 2. Accumulation on a link and on PCIe
    python -m benchmarks ranks llama-7b-x1 llama-7b-x4 t5-3b-2x24-pcie llama-7b-x1-pcie llama-7b-x4-pcie $OUT \
        --seconds 430
    # 3. If time is left: strong scaling, T5-11B, DeepSpeed; then the first command again, for a median
    python -m benchmarks ranks t5-3b-2x24-strong llama-8b-2x24-strong t5-3b-2-deepspeed t5-11b-2x80 t5-11b-2x24 $OUT \
        --seconds 570
    # Ranks may share one GPU here. Numbers, memory and bytes are as on two GPUs, seconds are not
    python -m benchmarks ranks t5-3b-1x24-hashed t5-3b-2x24-hashed $OUT
    python -m benchmarks merge ranks.csv                       # afterwards, into the repository's table

On four H100s, most important cases first:

    python -m benchmarks ranks llama-8b-1x24 llama-8b-4x24 llama-8b-2x24 t5-3b-1x24 t5-3b-4x24 t5-3b-4x80 \
        llama-8b-4x80 llama-8b-4 t5-3b-4 t5-3b-2x24 $OUT --seconds 560
    python -m benchmarks.killed_ranks --ranks 4 --kills 5 $OUT
    python -m benchmarks ranks t5-11b-4x80 qwen3-32b-4x80 t5-3b-4-deepspeed llama-8b-1x80 llama-8b-2x80 t5-3b-1x80 \
        t5-3b-2x80 $OUT --seconds 460

On eight H200s, where no row was measured yet, most important cases first:

    python -m benchmarks ranks llama-8b-8x24 llama-8b-1x24 t5-3b-8x24 t5-3b-1x24 t5-3b-8x80 llama-8b-8x80 t5-11b-8x80 \
        t5-3b-8 llama-8b-8 t5-3b-1x80 $OUT --seconds 570
    python -m benchmarks ranks qwen3-32b-8x80 llama-8b-1x80 $OUT --seconds 430
    python -m benchmarks.killed_ranks --ranks 8 --kills 5 $OUT
    python -m benchmarks ranks llama-8b-4x24 t5-3b-4x24 llama-8b-4x80 t5-3b-4x80 t5-3b-8-deepspeed llama-8b-2x24 \
        t5-3b-2x24 llama-8b-2x80 t5-3b-2x80 llama-8b-8-deepspeed $OUT --seconds 570

`--turns 2` measures everything twice; the turns of all cases of a command alternate. The rank processes are children of
the command: when it ends, however it does, they are gone.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import table
from benchmarks.cases import config_of
from benchmarks.plans import layers_and_work
from benchmarks.rank_cases import RANK_CASES, RANK_ENGINES, RankCase
from benchmarks.run import STEPS, WARMUP, ended_by_signals, git_commit, row_of
from benchmarks.scaling import EIGHT_H200S
from benchmarks.table import Row
from offloadkit.distributed.launch import launch, send_to_parent
from offloadkit.doors.engines.work import Work
from offloadkit.facts.config import OffloadConfig
from offloadkit.planner import Plan, make_plan
from offloadkit.planner.ranks import for_ranks

Raw = dict[str, Any]

_VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TOKENIZERS_PARALLELISM": "false", "DS_SKIP_CUDA_CHECK": "1"}
"""NVLink multicast fails in virtual machines."""
_PCIE_ONLY = {"NCCL_P2P_DISABLE": "1"}
FEW_WARMUP, FEW_STEPS = 2, 3
"""For slow cases."""
SPARE_BYTES = 2 << 30
"""VRAM of a card that a budget does not use: 80 GiB are 77 on an H100."""
_LEAST_SECONDS = 20.0
"""No process is started with less time left."""


class NotMeasuredError(Exception):
    """A rank could not measure. Its argument holds a row's "status" and "reason"."""


def run(
    cases: Sequence[str],
    *,
    engines: Sequence[str] = (),
    turns: int = 1,
    steps: int = STEPS,
    seconds: float = float("inf"),
    out: Path = table.PATH,
    commit: str | None = None,
    device: str | None = None,
    verbose: bool = False,
    notes: str = "",
) -> list[Row]:
    """Measure, append a row for each case and engine to `out`, and return these rows.

    The turns alternate between all cases and engines. The file is written after each turn.

    Args:
        engines: keys of `RANK_ENGINES`; none: the engines of each case.
        turns: fresh processes for each engine.
        seconds: total time limit. Then running turns are killed, and turns that have not begun are named.
        device: "cpu" hides the GPUs.
        notes: written into each row.
    """
    commit, end = commit or git_commit(), time.monotonic() + seconds
    before = table.read(out)
    pairs = [(name, engine) for name in cases for engine in engines or RANK_CASES[name].engines]
    found: dict[tuple[str, str], list[Raw]] = {pair: [] for pair in pairs}
    made: list[Row] = []
    for turn in range(1, turns + 1):
        for name, engine in pairs:
            case, setup, left = RANK_CASES[name], RANK_ENGINES[engine], end - time.monotonic()
            print(f"{name}, {setup.title}, turn {turn} of {turns} ...", end=" ", flush=True)
            if left < _LEAST_SECONDS:
                print("not begun: no time is left", flush=True)
                continue
            raw = _measured(case, engine, steps, min(case.limit, left), device, verbose)
            print(_said(raw), flush=True)
            found[name, engine].append(raw)
            made = [
                row_of(
                    name,
                    _as_measured(RANK_CASES[name], raws[-1]),
                    engine,
                    RANK_ENGINES[engine],
                    raws,
                    commit,
                    notes,
                )
                for (name, engine), raws in found.items()
                if raws
            ]
            table.write([*before, *made], out)
    return made


def _as_measured(case: RankCase, raw: Raw) -> RankCase:
    vram = raw.get("vram_budget", 0) / 2**30
    return replace(case, batch_size=raw.get("batch_size", case.batch_size), vram=vram or case.vram)


def _said(raw: Raw) -> str:
    if raw["status"] != "measured":
        return f"{raw['status']}: {raw['reason']} ({raw['process_seconds']:.0f} s)"
    planned = raw.get("planned", {}).get("step_seconds")
    sizes = f"VRAM {raw['vram_bytes'] / 2**30:.2f} GiB each, RAM {raw['peak_ram_bytes'] / 2**30:.1f} GiB in all"
    received = {name: f"{number / 1e9:.3g} GB" for name, number in raw["figures"]["received"].items()}
    return (
        f"{raw['step_seconds']:.4f} s"
        + (f" (planned {planned:.4f})" if planned else "")
        + table.beside_bound(raw)
        + ", "
        f"{raw['figures']['tokens/s']:,} tokens/s, {sizes}, received {received}, {raw['process_seconds']:.0f} s in all"
    )


def _measured(case: RankCase, engine: str, steps: int, limit: float, device: str | None, verbose: bool) -> Raw:
    """The combined result of all ranks in one turn, or the reason of its failure."""
    setup, began = RANK_ENGINES[engine], time.monotonic()
    heard: dict[int, Raw] = {}

    def stops() -> bool:
        if time.monotonic() > began + limit:
            raise NotMeasuredError({"status": "failed", "reason": f"took more than {limit:.0f} s"})
        return False

    with tempfile.TemporaryDirectory() as scratch, ended_by_signals(), _variables(case, device):
        config_of(case.model).save_pretrained(scratch)
        steps, warmup = (min(steps, FEW_STEPS), FEW_WARMUP) if case.slow else (steps, WARMUP)
        work = replace(case.work(setup, scratch, tempfile.gettempdir()), steps=steps, warmup=warmup)
        task: dict[str, Any] = {"work": work.to_dict(), "engine": setup.engine}
        task |= {"binds": setup.package == "deepspeed", "traced": case.traced}
        try:
            with contextlib.ExitStack() as quiet:
                printed = io.StringIO()
                if not verbose:
                    quiet.enter_context(contextlib.redirect_stdout(printed))
                    quiet.enter_context(contextlib.redirect_stderr(printed))
                raws = launch(
                    measure_rank, task, case.num_gpus, folder=Path(scratch), on_message=heard.__setitem__, stops=stops
                )
        except Exception as error:
            why = error.args[0] if isinstance(error, NotMeasuredError) else _failed(error)
            if len(heard) < case.num_gpus:
                if why["status"] == "failed":
                    sys.stderr.write("\n".join([printed.getvalue()[-3000:], *getattr(error, "__notes__", ())]) + "\n")
                return why | {"process_seconds": time.monotonic() - began, "recomputed": work.recomputed}
            raws = [heard[rank] | {"uncounted": why["reason"]} for rank in range(case.num_gpus)]
    return _together(raws, case) | {"process_seconds": time.monotonic() - began, "recomputed": work.recomputed}


def _failed(error: BaseException) -> Raw:
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}


@contextlib.contextmanager
def _variables(case: RankCase, device: str | None) -> Iterator[None]:
    """Environment variables of the ranks."""
    before = dict(os.environ)
    os.environ.update(_VARIABLES | (_PCIE_ONLY if case.pcie_only else {}))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # set in container images; each turn would compile again
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _together(raws: Sequence[Raw], case: RankCase) -> Raw:
    """One turn's figures: of the slowest rank and the rank with the most memory, and sums of tokens and RAM."""
    first, slowest = raws[0], max(raws, key=lambda raw: float(raw["step_seconds"]))
    tokens, planned = sum(raw["num_tokens"] for raw in raws), first.get("planned", {})
    figures = {
        "GPUs": first["GPUs"],
        "tokens/s": round(tokens / slowest["step_seconds"]),
        "received": _most(raw["received"] for raw in raws),
        "link": "PCIe" if case.pcie_only else "as it is",
        "resident RAM of all ranks": sum(raw["resident_bytes"] for raw in raws),
    }
    if "received" in planned:
        figures["planned to be received"] = _most(raw["planned"]["received"] for raw in raws)
        figures |= first.get("figures", {})  # the plan's times of Python
    if first.get("telemetry_seconds"):
        figures["seconds of the last step"] = _rounded(slowest["telemetry_seconds"])
        figures["bytes moved in the last step"] = slowest["moved"]
    if "traced" in first:
        names = ("main thread", "autograd's thread", "all threads")
        most = {name: max(raw["traced"][name] for raw in raws) for name in names}
        figures["traced"] = _rounded(first["traced"] | most)
    figures["seconds until built"] = round(max(raw.get("built_after", 0.0) for raw in raws), 1)
    if "weights" in first:
        figures |= {name: " ".join(sorted({str(raw[name]) for raw in raws})) for name in ("weights", "gradient norm")}
    if "uncounted" in first:
        figures["uncounted"] = first["uncounted"]
    return slowest | {
        "status": "measured",
        "num_tokens": tokens,
        "vram_bytes": max(raw["vram_bytes"] for raw in raws),
        "max_allocated_bytes": max(raw["max_allocated_bytes"] for raw in raws),
        "peak_ram_bytes": sum(raw["ram_bytes"] for raw in raws),
        "planned": planned,
        "figures": figures,
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{number:.4g}") for name, number in figures.items()}


def _most(received: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest number of bytes over all ranks, by kind."""
    most: dict[str, int] = {}
    for each in received:
        most |= {kind: max(number, most.get(kind, 0)) for kind, number in each.items()}
    return most


# ---- in a rank -------------------------------------------------------------------------------------------------------


def take_gpu(rank: int) -> int:
    """Select a GPU before NCCL is used, and return its number. If GPUs are fewer than ranks, ranks share them.

    NCCL refuses two ranks on one GPU unless they report different hosts. They then communicate over TCP, and their
    kernels take turns: correct, but slow. Over TCP, NCCL detects that a peer has ended, and torch would end this
    process, as between hosts. This is switched off on all ranks, because the engine's own watch must end waiting ranks.
    """
    num_gpus = torch.cuda.device_count()
    number, num_ranks = rank % num_gpus, int(os.environ.get("WORLD_SIZE", rank + 1))
    if num_gpus < num_ranks or num_gpus == 1:
        os.environ |= {
            "NCCL_HOSTID": f"rank {rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
    torch.cuda.set_device(number)
    return number


def measure_rank(work: dict[str, Any], engine: str, binds: bool, traced: bool) -> Raw:
    """The figures of this rank. They are sent as soon as steps are timed, before a further step that counts bytes.

    Args:
        binds: whether the rank keeps to its share of the cores and joins through NCCL alone, as usual under DeepSpeed.
        traced: whether further steps are traced (`rank_trace`).

    Raises:
        NotMeasuredError: an error came first.
    """
    given = Work(**work)
    try:
        return _measure_rank(given, engine, binds, traced)
    except Exception as error:
        from offloadkit.doors.engines.worker import why

        raise NotMeasuredError(why(error, given.vram)) from error


def _measure_rank(work: Work, engine_name: str, binds: bool, traced: bool) -> Raw:
    from benchmarks import rank_trace
    from benchmarks.rank_engines import ENGINES, Received
    from offloadkit import __version__
    from offloadkit.device.process_memory import DeviceMemory, forget_peak, let_segments_grow
    from offloadkit.distributed import world
    from offloadkit.doors.engines.runner import version
    from offloadkit.doors.engines.timing import timed_steps
    from offloadkit.doors.engines.work import num_tokens, random_steps
    from offloadkit.facts import hardware

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", take_gpu(rank)) if on_gpu else torch.device("cpu")
    if on_gpu and work.vram is not None:
        work = replace(work, vram=min(work.vram, torch.cuda.mem_get_info()[1] - SPARE_BYTES))
    vram = DeviceMemory(device)
    machine = dict(hardware.describe_machine(device))
    if binds:
        _bind(rank, size)
    if on_gpu and size > 1 and binds:
        dist.init_process_group("nccl")
    world.join()
    let_segments_grow(device)  # the same allocator for every engine
    torch.manual_seed(work.seed)
    dtype = work.dtype_on(device)
    engine = ENGINES[engine_name](work, dtype, device)
    engine.settle()
    built_after = time.time() - psutil.Process().create_time()
    if on_gpu:
        torch.cuda.empty_cache()
    forget_peak(device)
    own = replace(work, batch_size=getattr(engine, "batch_size", work.batch_size))
    all_steps = random_steps(replace(own, accumulation=size * work.accumulation), device)
    steps = [step[rank::size] for step in all_steps]
    row: Raw = {"dtype": dtype, "num_tokens": num_tokens(steps), "batch_size": own.batch_size, "machine": machine}
    row |= {"vram_budget": work.vram or 0, "built_after": built_after}
    row["GPUs"] = min(size, torch.cuda.device_count()) if on_gpu else size
    row |= timed_steps(engine, steps, own, device, vram)
    if dist.is_initialized():
        dist.barrier()  # all ranks are training and hold their shared memory
    row |= {"ram_bytes": _tree_bytes("pss"), "resident_bytes": _tree_bytes("rss")} | {"received": {}} | engine.row()
    if dist.is_initialized():
        dist.barrier()  # before one rank ends
    names = ("torch", "transformers", "deepspeed", "torchao", "roundpipe")
    row["versions"] = {name: version(name) for name in names} | {"offloadkit": __version__}
    send_to_parent(row)

    def step() -> None:
        for at, batch in enumerate(steps[0], start=1):
            engine.backward(engine.forward(batch))
            engine.step(at == len(steps[0]))

    if not row["received"] and size > 1:
        with Received(size) as counted:
            step()
            engine.settle()
        row["received"] = dict(counted.num_bytes)
    if traced:
        row["traced"] = rank_trace.trace(step, engine.settle, on_gpu=on_gpu)
    return row


def _bind(rank: int, size: int) -> None:
    """Bind this rank to its share of neighbouring cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    if share:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
        torch.set_num_threads(share)


def _tree_bytes(kind: str) -> int:
    """RAM of this process and its children. "pss": a shared page counts in proportion in each process."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            total += getattr(process.memory_full_info(), kind)
    return total


# ---- plans -----------------------------------------------------------------------------------------------------------

_START_SECONDS, _PINNED_PER_SECOND = 45.0, 2e9
"""Seconds of importing, measuring and drawing weights, and bytes of RAM pinned per second, as on an H200."""


def planned(cases: Sequence[str] = ()) -> Iterator[str]:
    """A line for each case: the plan of offloadkit on the host of eight H200s, and the longest duration of a turn."""
    for name in cases or RANK_CASES:
        case = RANK_CASES[name]
        what = f"{case.num_gpus} x {case.model}, {case.shape}, {' '.join(case.engines)}"
        head = f"{name}: {what}; at most {case.limit:.0f} s"
        if "ours" not in case.engines:
            yield head
            continue
        made = plan_of(case)
        needs, seconds = made.needs(), made.seconds
        ram = needs["ram"] * made.num_on_host
        step = seconds.step if seconds else 0.0
        num_steps = 4 + (FEW_WARMUP + FEW_STEPS if case.slow else WARMUP + STEPS)
        turn = _START_SECONDS + ram / _PINNED_PER_SECOND + num_steps * step
        received = sum(made.communicated.values())
        yield (
            f"{head}. Planned: {step:.3f} s/step, {needs['vram'] / 2**30:.1f} GiB each, {ram / 2**30:.0f} GiB of RAM, "
            f"{received / 1e9:.2f} GB received, a turn of about {turn:.0f} s"
            + ("" if made.fits else "; it DOES NOT FIT")
        )


def plan_of(case: RankCase) -> Plan:
    """The plan of a case on the host of eight H200s, by their data sheet (`scaling.EIGHT_H200S`)."""
    layers, work = layers_and_work(case.model, case.dtype, case.batch_size, case.input_length, case.target_length)
    config = OffloadConfig(
        precision=case.precision,
        gradient_accumulation=case.accumulation,
        working_dtype=case.dtype,
        max_grad_norm=1.0,
        **case.limits(RANK_ENGINES["ours"]),
    )
    layers = [layer.shared_by(case.num_gpus) for layer in layers]
    return make_plan(layers, config, work=work, hardware=for_ranks(EIGHT_H200S, case.num_gpus), assumed=True)
