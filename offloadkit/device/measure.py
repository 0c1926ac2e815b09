"""Measures the speed of this machine: `measure` returns a `Hardware`. Rates are cached; sizes are read every time.

The cache is `$XDG_CACHE_HOME/offloadkit/hardware.json`, by default below ~/.cache. Its keys contain host name,
processor, cores, GPU, driver and versions.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from offloadkit.device.host_memory import HostSlab
from offloadkit.device.process_memory import load_libraries
from offloadkit.device.state_file import unnamed_file
from offloadkit.device.streams import CopyStream, Event
from offloadkit.errors import OutputError
from offloadkit.facts import hardware
from offloadkit.facts.config import Precision
from offloadkit.facts.files import path_of
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.threads import ThreadPool
from offloadkit.kernels import cpu
from offloadkit.optim.table import DTYPES, FlatState, Segment, state_table

_VERSION = 9
"""Raise it when the measurements change, to invalidate cached rates."""
DISK_RATES = {"disk_read_bytes_per_second", "disk_write_bytes_per_second"}
RATES = {
    field.name
    for field in fields(Hardware)
    if field.name.endswith("_per_second") or field.name in ("can_pin", "launch_seconds", "vram_context_bytes")
} - {*DISK_RATES, "link_bytes_per_second", "few_ctas_link_bytes_per_second", "network_bytes_per_second"}
_DRAM_RATES = ("dram_bytes_per_second", "cpu_and_bus_bytes_per_second")
own_rates: dict[str, Any] = {}
"""Rates for this process only: of a busy machine, or cached rates that all ranks have agreed to use."""
_BUSY = 0.1
"""Fraction of the cores' time above which other processes disturb a measurement."""
_COUNTING_SECONDS = 0.05
"""Tolerance; the system counts CPU time in hundredths of a second."""
_DRIVER = Path("/sys/module/nvidia/version")


def measure(
    device: torch.device | str | None = None,
    *,
    folder: str | Path | None = None,
    fresh: bool = False,
    num_ranks: int = 1,
    meet: Callable[[], object] | None = None,
) -> Hardware:
    """Measure this machine, in under two seconds.

    Args:
        device: None: the current CUDA device, or the CPU without one.
        folder: measure the disk of this folder, with at most 64 MiB. None: skip the disk.
        fresh: ignore cached rates.
        num_ranks: number of processes of this host that measure at the same time; rates are cached per number.
        meet: barrier of the ranks between groups of rates, so that all ranks measure the same rate at once. Rates of
            RAM and bus are then medians instead of maxima.

    Raises:
        OutputError: `folder` is not a folder, or cannot be written.
    """
    device = hardware.device_of(device)
    if folder is not None:
        folder = Path(os.path.realpath(path_of(folder, "folder")))
        if not folder.is_dir():
            raise OutputError(f"{folder} is not a folder: the disk's rate is measured in an existing folder")
    cached = {} if fresh else _known()
    key = _machine_key(device, num_ranks)
    rates = cached.get(key, {})
    if rates.keys() != RATES:
        rates = _found(key, device, lambda: machine_rates(device, meet), num_ranks)
    if device.type == "cuda":
        load_libraries(device)
        rates = rates | {"vram_context_bytes": hardware.context_of_another_time(device, rates["vram_context_bytes"])}
    disk: dict[str, Any] = {}
    if folder is not None:
        disk_key = f"{key} | {folder}"
        disk = cached.get(disk_key, {})
        if disk.keys() != DISK_RATES:
            disk = disk_rates(folder)
            _store(disk_key, disk)
        disk |= {"disk_folder": str(folder), "disk_free_bytes": shutil.disk_usage(folder).free}
    return Hardware(**_sizes(device), **rates, **disk)


def is_measured(device: torch.device, num_ranks: int) -> bool:
    """Whether rates for `num_ranks` ranks are cached. If so, this process keeps them."""
    key = _machine_key(device, num_ranks)
    rates: dict[str, Any] = _known().get(key, {})
    if rates.keys() == RATES:
        own_rates[key] = rates  # other processes may replace the file, and the ranks rely on these rates
    return rates.keys() == RATES


def kept(
    device: torch.device, what: str, names: set[str], measured: Callable[[], dict[str, float]], *, num_ranks: int = 1
) -> dict[str, float]:
    """Figures `names` from the cache under `what`, or the result of `measured`, which is cached unless it is {}."""
    key = f"{_machine_key(device, num_cores=os.cpu_count())} | {what}"  # ranks may be bound to fewer cores for now
    cached: dict[str, float] = _known().get(key, {})
    return cached if cached.keys() == names else _found(key, device, measured, num_ranks)


def _found(
    key: str, device: torch.device, measured: Callable[[], dict[str, Any]], num_ranks: int = 1
) -> dict[str, Any]:
    """Measure, and cache the result unless other processes used the cores or the GPU."""
    began = time.perf_counter(), seconds_of_others()
    found = measured()
    if found and (_disturbed(*began, num_ranks) or hardware.is_gpu_shared(device)):
        own_rates[key] = found
    elif found:
        _store(key, found)
    return found


def vram_rate(device: torch.device) -> float | None:
    """Bytes per second of `device`'s memory, cached or measured in a few hundredths of a second; None if it is too
    full.
    """
    device = hardware.indexed(device)
    cached = _known().get(_machine_key(device), {})
    rate: float | None = cached.get("vram_bytes_per_second") or quick_vram_rate(device)
    return rate


def host_rates() -> dict[str, float]:
    """Cached rates of this machine's processor and RAM, by field of `Hardware`; {} if never measured."""
    cached = _known()
    for device in (hardware.default_device(), torch.device("cpu")):
        rates = cached.get(_machine_key(device), {})
        if rates.keys() == RATES:
            return {name: rates[name] for name in (*hardware.CPU_STEP_RATES.values(), *_DRAM_RATES)}
    return {}


def _times_of_own_cores() -> list[Any]:
    own = hardware.own_cores()
    return [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in own]


def seconds_of_others() -> float:
    """CPU seconds of other processes and virtual machines on these cores since boot."""
    uses = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(core, use, 0.0) for core in _times_of_own_cores() for use in uses) - time.process_time()


def _disturbed(started: float, others: float, num_ranks: int = 1) -> bool:
    """Whether other processes kept the cores busy since `started`, when `seconds_of_others` was `others`. Allows for
    the other measuring ranks.
    """
    share = (_BUSY + 1 - 1 / num_ranks) * len(_times_of_own_cores()) * (time.perf_counter() - started)
    return seconds_of_others() - others > share + _COUNTING_SECONDS


def _sizes(device: torch.device) -> dict[str, Any]:
    ram_total, ram_available = hardware.ram_limit_bytes(), hardware.ram_available_bytes()
    on_gpu = device.type == "cuda"
    vram_free, vram_total = hardware.vram_bytes(device) if on_gpu else (ram_available, ram_total)
    return {
        "device": str(device) if on_gpu else "cpu",  # accelerate numbers CPU devices
        "gpu_name": torch.cuda.get_device_name(device) if on_gpu else None,
        "compute_capability": torch.cuda.get_device_capability(device) if on_gpu else None,
        "supports_bf16": hardware.supports_bf16(device),
        "vram_total_bytes": vram_total,
        "vram_free_bytes": vram_free,
        "vram_of_others_bytes": hardware.vram_of_others_bytes(device),
        "ram_total_bytes": ram_total,
        "ram_available_bytes": ram_available,
        "cpu_name": hardware.cpu_name(),
        "num_cores": hardware.num_cores(),
    }


def _machine_key(device: torch.device, num_ranks: int = 1, num_cores: int | None = None) -> str:
    gpu = "no GPU"
    if device.type == "cuda":
        driver = hardware.text_of(_DRIVER) or "unknown"
        gpu = f"{device} {torch.cuda.get_device_name(device)}, driver {driver}"
    kernel = ",".join(cpu.cpu_levels()) or "no C kernel"
    processor = f"{hardware.cpu_name()}, {num_cores or hardware.num_cores()} cores, {kernel}"
    together = f" | {num_ranks} ranks at once" if num_ranks > 1 else ""
    return f"{platform.node()} | {processor} | {gpu} | torch {torch.__version__} | {_VERSION}{together}"


def cache_file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "offloadkit" / "hardware.json"


def _read_cache() -> dict[str, Any]:
    try:
        cached = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    entries = cached.items() if isinstance(cached, dict) else ()
    return {key: rates for key, rates in entries if isinstance(rates, dict)}


def _known() -> dict[str, Any]:
    return own_rates | _read_cache()


def _store(key: str, rates: dict[str, Any]) -> None:
    """Add rates to the cache by replacing the file. If it cannot be written, the next process measures again."""
    path = cache_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # several ranks write at once
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
                json.dump(_read_cache() | {key: rates}, file, indent=1)
            os.replace(file.name, path)


# ---- rates of processor, RAM, bus and GPU ------------------------------------------------------------------------

_cuda: Any = torch.cuda  # typed only in some releases of torch
_NUM_REPETITIONS = 3
_STEADY_REPETITIONS, _STEADY_SECONDS = 5, 0.02
"""A least time is steady after this many repetitions and seconds that did not improve it by `_GAIN`."""
_GAIN = 0.02
_SLOW_SECONDS = 0.1
"""Repeating stops after these total seconds, but never after one repetition. No matmul follows a slower one."""
_LAUNCHING_SECONDS = 0.05
"""Total seconds of timing launches."""

_TOGETHER_SECONDS = 0.1
"""Seconds for each rate of RAM and bus, with all ranks at once."""

_COPY_BYTES = 64 << 20
_COPY_PIECE_BYTES = 16 << 20
_VRAM_BYTES = 256 << 20
_QUICK_VRAM_BYTES, _QUICK_RAM_BYTES = 192 << 20, 32 << 20
"""Larger than all caches, including GPU caches of 96 MiB."""
_STATE_BYTES = 2 + 2 + 4 + 4 + 2
"""Bytes per parameter: bf16 weight, remainder, exp_avg, exp_avg_sq and bf16 gradient."""
_TRIAD_TRAFFIC_BYTES = 3 * 4
_MIN_PARAMETERS, _MAX_PARAMETERS = 8 << 20, 96 << 20
_WITHOUT_KERNEL_PARAMETERS = 1 << 17
_MATMUL_SIZES = (256, 512, 1024, 2048, 4096)
_NUM_LAUNCHES = 200


def machine_rates(device: torch.device, meet: Callable[[], object] | None = None) -> dict[str, Any]:
    """Measure the fields of `Hardware` except the disk's. `meet` as for `measure`."""
    alone, meet = meet is None, meet or (lambda: None)
    seconds = best_seconds if alone else usual_seconds
    numel = numel_to_step()
    slab = HostSlab(max(numel * _STATE_BYTES + 5 * 256, _COPY_BYTES))
    slab.populate()
    meet()
    rates: dict[str, Any] = {"dram_bytes_per_second": _triad_rate(slab, numel * _STATE_BYTES // 8, seconds)}
    for precision, name in hardware.CPU_STEP_RATES.items():
        step = partial(_step, *_state(slab, numel, precision))
        meet()
        rates[name] = step_traffic_bytes(precision) * numel / seconds(step, torch.device("cpu"))
    rates["can_pin"] = False
    if device.type == "cuda":
        _cuda.init()
        with torch.cuda.device(device):
            rates["can_pin"] = slab.pin()
    slab.clear()
    meet()
    rates |= _copy_rates(slab.cut(_COPY_BYTES, torch.uint8), device, seconds)
    slab.clear()
    found = step_beside_copies(slab, numel, rates, device, meet)
    one_of_them = rates["cpu_adamw_bytes_per_second"], rates["both_bytes_per_second"]
    rates["cpu_and_bus_bytes_per_second"] = max(max(found) if alone else median(found), *one_of_them)
    meet()
    rates["vram_bytes_per_second"] = _vram_rate(device)
    meet()
    rates["launch_seconds"] = _launch_seconds(device)
    for name, dtype in DTYPES.items():
        rates[f"{name}_flops_per_second"] = _matmul_rate(dtype, device)
    rates["vram_context_bytes"] = hardware.vram_context_bytes(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def best_seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Least seconds of one `run`, with `times` runs enqueued at once.

    Repeats until the least time is steady. The first runs may take 50 times as long as later runs, because libraries
    create kernels, threads start and other processes use the cores.
    """
    run()
    _wait(device)
    best, spent, repetitions = float("inf"), 0.0, 0
    steady_repetitions, steady_seconds = 0, 0.0
    while repetitions < 2 or spent < _SLOW_SECONDS:
        took = _timed(run, device, times)
        improved, best = took < (1 - _GAIN) * best, min(best, took)
        spent, repetitions = spent + took, repetitions + 1
        steady_repetitions, steady_seconds = (0, 0.0) if improved else (steady_repetitions + 1, steady_seconds + took)
        if steady_repetitions >= _STEADY_REPETITIONS and steady_seconds >= _STEADY_SECONDS:
            break
    return best / times


def usual_seconds(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Median seconds of one `run` while all ranks run it at once: a minimum would show a moment when other ranks
    rested.
    """
    run()
    _wait(device)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < _NUM_REPETITIONS or time.perf_counter() - began < _TOGETHER_SECONDS:
        took.append(_timed(run, device, times) / times)
    return median(took)


def _timed(run: Callable[[], object], device: torch.device, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def numel_to_step() -> int:
    """Parameters to step: four times the last-level cache in total bytes, but at most an eighth of free RAM.

    Smaller arrays measure the cache: on an H200 host with 300 MiB of cache, a triad over 128 MiB moved 435 GB/s; its
    DRAM moves 189 GB/s.
    """
    if not cpu.available():
        return _WITHOUT_KERNEL_PARAMETERS
    numel = min(max(_MIN_PARAMETERS, 4 * hardware.last_level_cache_bytes() // _STATE_BYTES), _MAX_PARAMETERS)
    return max(256, min(numel, hardware.ram_available_bytes() // 8 // _STATE_BYTES) // 256 * 256)


def _state(slab: HostSlab, numel: int, precision: Precision = "exact") -> tuple[FlatState, Tensor]:
    """bf16 weights, optimizer states and a bf16 gradient from the start of the slab.

    Values are ordinary numbers, because zeros and denormals run at other speeds on some processors.
    """
    slab.clear()
    weights = slab.cut(numel, torch.bfloat16).fill_(0.02)
    state = FlatState.cut(state_table("adamw", precision, torch.bfloat16), weights, slab.cut)
    for array in state.arrays.values():
        array.fill_(1e-3 if array.dtype.is_floating_point else 77)
    return state, slab.cut(numel, torch.bfloat16).fill_(1e-3)


def step_traffic_bytes(precision: Precision) -> float:
    """DRAM bytes per parameter of an AdamW step: weight and states are read and written, the gradient is read."""
    numel = 1 << 20
    states = sum(state_table("adamw", precision, torch.bfloat16).num_bytes(numel).values()) / numel
    return 2 * (2 + states) + 2


_Timing = Callable[..., float]


def _triad_rate(slab: HostSlab, numel: int, seconds: _Timing) -> float:
    a, b = (slab.cut(numel, torch.float32).fill_(1e-3) for _ in range(2))
    slab.clear()
    run = (lambda: cpu.triad(a, b, 1e-9)) if cpu.available() else (lambda: a.add_(b, alpha=1e-9))
    return _TRIAD_TRAFFIC_BYTES * numel / seconds(run, a.device)


def _step(state: FlatState, gradient: Tensor) -> None:
    scalars = state.table.optimizer.scalars(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=1)
    cpu.optimizer_step(state, gradient, [Segment(0, gradient.numel(), scalars)], 1.0)


def _copy_rates(host: Tensor, device: torch.device, seconds: _Timing) -> dict[str, float]:
    """`host`: uint8; its length is the bytes of one copy."""
    there, back = CopyStream(device, "H2D"), CopyStream(device, "D2H")
    half, num_bytes = host.numel() // 2, host.numel()
    buffer = torch.zeros_like(host, device=device)

    def both() -> None:
        there.copy(buffer[:half], host[:half])
        back.copy(host[half:], buffer[half:])

    return {
        "h2d_bytes_per_second": num_bytes / seconds(lambda: there.copy(buffer, host), device, 2),
        "d2h_bytes_per_second": num_bytes / seconds(lambda: back.copy(host, buffer), device, 2),
        "both_bytes_per_second": num_bytes / seconds(both, device, 2),
    }


def step_beside_copies(
    slab: HostSlab, numel: int, rates: dict[str, Any], device: torch.device, meet: Callable[[], object]
) -> list[float]:
    """Combined bytes per second of the CPU step and concurrent copies, per repetition; [0] without pinned RAM.

    The copies read and write the step's arrays, so they reach DRAM. Ranks synchronize before every repetition;
    otherwise a rank's step would soon overlap only the longer copies of the other ranks.
    """
    if not rates["can_pin"]:
        for _ in range(_NUM_REPETITIONS):
            meet()
        return [0.0]
    memory = slab.cut(numel * _STATE_BYTES, torch.uint8)
    state, gradient = _state(slab, numel)
    pieces = [memory[start : start + _COPY_PIECE_BYTES] for start in range(0, len(memory), _COPY_PIECE_BYTES)]
    there, back = CopyStream(device, "H2D"), CopyStream(device, "D2H")
    buffers = [torch.empty(_COPY_PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    num_bytes = step_traffic_bytes("exact") * numel
    bus_bytes = 3 * num_bytes / rates["cpu_adamw_bytes_per_second"] * rates["both_bytes_per_second"]
    found: list[float] = []
    for _ in range(_NUM_REPETITIONS):
        meet()
        ends: list[tuple[Event, int]] = []
        for index in range(max(2, int(bus_bytes / 2 / _COPY_PIECE_BYTES))):  # longer than the step
            piece, buffer = pieces[index % len(pieces)], buffers[index % 2]
            if index >= 2:
                there.wait(ends[-2][0])
            there.copy(buffer[: len(piece)], piece)
            back.wait(there.record())
            back.copy(piece, buffer[: len(piece)])
            ends.append((back.record(), 2 * len(piece)))
        before, began = _done_bytes(ends), time.perf_counter()
        _step(state, gradient)
        seconds = time.perf_counter() - began
        copied = _done_bytes(ends) - before
        _wait(device)
        found.append((num_bytes + copied) / seconds)
    return found


def _done_bytes(ends: list[tuple[Event, int]]) -> int:
    return sum(num_bytes for _, num_bytes in takewhile(lambda end: end[0].done(), ends))


def _room(device: torch.device) -> int:
    return hardware.vram_bytes(device)[0] if device.type == "cuda" else hardware.ram_available_bytes()


def _vram_rate(device: torch.device) -> float:
    large = _VRAM_BYTES if device.type == "cuda" else 2 * _COPY_BYTES
    array = torch.zeros(max(1, min(large, _room(device) // 8) // 4), device=device)
    return 2 * 4 * array.numel() / best_seconds(lambda: array.add_(1.0), device, 2)


def quick_vram_rate(device: torch.device) -> float | None:
    """`vram_rate` without the cache, on a smaller array than `measure` uses."""
    on_gpu = device.type == "cuda"
    large = _QUICK_VRAM_BYTES if on_gpu else _QUICK_RAM_BYTES
    if _room(device) < 2 * large:
        return None
    seconds = best_seconds(partial(torch.zeros(large // 4, device=device).add_, 1.0), device, 4 if on_gpu else 1)
    if on_gpu:
        torch.cuda.empty_cache()  # keeps the array out of the training's memory
    return 2 * large / seconds


def _launch_seconds(device: torch.device) -> float:
    """Seconds to launch one small operation, with too few launches to fill the device's queue.

    Repeats for `_LAUNCHING_SECONDS`: over only a few milliseconds, an H200 host measured 1.7 times the seconds of a
    slower host, because other work takes the core for milliseconds.
    """
    array = torch.zeros(1, device=device)
    array.add_(1.0)
    best, spent = float("inf"), 0.0
    while spent < _LAUNCHING_SECONDS:
        _wait(device)
        started = time.perf_counter()
        for _ in range(_NUM_LAUNCHES):
            array.add_(1.0)
        took = time.perf_counter() - started
        best, spent = min(best, took / _NUM_LAUNCHES), spent + took
    return best


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest matmul. On a busy CPU threads wait for each other about as long in a small matmul as in a
    large one, so a size is run once before it counts as too slow.
    """
    rate, on_gpu = 0.0, device.type == "cuda"
    for size in _MATMUL_SIZES:
        flops = 2 * size**3
        factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
        run = partial(torch.mm, factor, factor, out=torch.empty_like(factor))
        if not on_gpu and rate and (seconds := _timed(run, device, 1)) > _SLOW_SECONDS:
            return max(rate, flops / seconds)
        rate = max(rate, flops / best_seconds(run, device, 8 if on_gpu else 1))
    return rate


# ---- the disk ----------------------------------------------------------------------------------------------------

_DISK_PIECE_BYTES = 4 << 20
_MAX_DISK_PIECES = 16
_NUM_DISK_THREADS = 4
_MAX_PASS_SECONDS = 0.15


def disk_rates(folder: Path) -> dict[str, float]:
    """Bytes per second of overwriting a file of at most 64 MiB and reading it back, in four parallel pieces of 4 MiB.

    Uses O_DIRECT if supported; otherwise fsync after writes, and drops pages from the page cache before reads. Raises
    `OutputError` if the folder cannot be written or is full.
    """
    free = shutil.disk_usage(folder).free
    num_pieces = min(_MAX_DISK_PIECES, free // 2 // _DISK_PIECE_BYTES)
    if num_pieces == 0:
        least = _DISK_PIECE_BYTES >> 19
        raise OutputError(f"{folder} has {free >> 20} MiB free: at least {least} are needed to measure it")
    try:
        file, direct = unnamed_file(folder, num_pieces * _DISK_PIECE_BYTES)
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}; name a writable folder") from error
    buffer = mmap.mmap(-1, _DISK_PIECE_BYTES)  # page-aligned for O_DIRECT
    buffer.write(os.urandom(_DISK_PIECE_BYTES))  # random bytes defeat compression
    targets = [mmap.mmap(-1, _DISK_PIECE_BYTES) for _ in range(_NUM_DISK_THREADS)]

    def write(piece: int) -> None:
        os.pwrite(file, buffer, piece * _DISK_PIECE_BYTES)
        if not direct:
            os.fsync(file)

    def read(piece: int) -> None:
        if not direct:
            os.posix_fadvise(file, piece * _DISK_PIECE_BYTES, _DISK_PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [targets[piece % _NUM_DISK_THREADS]], piece * _DISK_PIECE_BYTES)

    try:
        with ThreadPool(_NUM_DISK_THREADS) as pool:
            num_written, _ = _pass(pool, write, num_pieces)  # the first write of a new file runs at another speed
            return {
                "disk_write_bytes_per_second": _pass(pool, write, num_written)[1],
                "disk_read_bytes_per_second": _pass(pool, read, num_written)[1],
            }
    except OSError as error:
        raise OutputError(f"measuring the disk in {folder} failed: {error.strerror}") from error
    finally:
        os.close(file)
        buffer.close()


def _pass(pool: ThreadPool, work: Callable[[int], None], num_pieces: int) -> tuple[int, float]:
    """Run `work`, a few pieces at a time, until done or out of time; returns (pieces done, bytes per second)."""
    started, done = time.perf_counter(), 0
    while done < num_pieces and (done == 0 or time.perf_counter() - started < _MAX_PASS_SECONDS):
        some = range(done, min(done + _NUM_DISK_THREADS, num_pieces))
        list(pool.map(work, some))
        done = some.stop
    return done, done * _DISK_PIECE_BYTES / (time.perf_counter() - started)
