"""`device.measure.measure`: its results without a GPU, its duration, and its cache."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from offloadkit import errors
from offloadkit.device import measure as disk
from offloadkit.device import measure as measuring
from offloadkit.device import measure as rates
from offloadkit.device.host_memory import HostSlab
from offloadkit.errors import OffloadkitError, OutputError
from offloadkit.facts import hardware, nvml
from offloadkit.kernels import cpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "own_rates", {})
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Replaces measuring: rates are 1.0, 2.0, ... by number of the call. The list collects the calls."""
    calls: list[torch.device] = []

    def count(device: torch.device, meet: object) -> dict[str, Any]:
        calls.append(device)
        return dict.fromkeys(measuring.RATES, float(len(calls)))

    monkeypatch.setattr(measuring, "machine_rates", count)
    cores_are_busy(monkeypatch, 0)
    return calls


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few MiB are stepped and copied; with arrays larger than the caches, measuring takes seconds."""
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 1 << 27)
    monkeypatch.setattr(measuring, "_MATMUL_SIZES", (256,))
    monkeypatch.setattr(measuring, "_COPY_BYTES", 8 << 20)


def cores_are_busy(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Between any two readings other processes use `seconds` of two cores."""
    used = itertools.count(step=seconds)
    monkeypatch.setattr(hardware, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(user=next(used)), SimpleNamespace()])


def test_ranks_meet_before_each_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank would time its launches while another rank keeps all cores busy with the CPU step."""
    log: list[str] = []

    def logs(name: str) -> Callable[..., Any]:
        return lambda *_: None if log[-1:] == [name] and name != "meet" else log.append(name)

    def clock() -> float:
        logs("timed")() if log[-1] == "meet" else None
        return next(ticks)

    ticks = itertools.count(step=0.03)
    copies = SimpleNamespace(copy=logs("copy"))
    monkeypatch.setattr(measuring.time, "perf_counter", clock)
    monkeypatch.setattr(measuring, "_MATMUL_SIZES", (256,))
    monkeypatch.setattr(measuring, "CopyStream", lambda *_: copies)
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 1 << 27)
    for name, function in (("available", lambda: True), ("triad", logs("triad")), ("optimizer_step", logs("step"))):
        monkeypatch.setattr(cpu, name, function)
    measuring.machine_rates(CPU, logs("meet"))
    steps = ["meet", "step"] * 3
    assert log == ["meet", "triad", *steps, "meet", "copy", *["meet"] * 3, "meet", "timed", "meet", "timed"]


@pytest.mark.parametrize("best", [True, False])
def test_ranks_take_the_usual_time_and_not_that_of_a_moment_in_which_the_others_rest(
    best: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and last of eleven runs are quick, because the other ranks have not begun or have finished."""
    now, number = [0.0], [0]

    def run() -> None:
        number[0] += 1
        now[0] += 0.004 if number[0] in (2, 12) else 0.01

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    timed = measuring.best_seconds if best else measuring.usual_seconds
    assert timed(run, CPU) == pytest.approx(0.004 if best else 0.01)
    assert best or now[0] > 0.1, "all runs must be timed"


def matmuls_take(seconds_of: Callable[[int, float], float], monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Simulate `torch.mm` by `seconds_of(flops, now)`; returns the clock."""
    now = [0.0]

    def matmul(a: torch.Tensor, *_: object, **__: object) -> None:
        now[0] += seconds_of(2 * len(a) ** 3, now[0])

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", matmul)
    return lambda: now[0]


@pytest.mark.parametrize(
    ("least_seconds", "until"), [(0.008, 0.0), (0.008, 0.03), (0.008, 0.06), (0.078, float("inf"))]
)
def test_small_matmuls_that_wait_for_busy_cores_do_not_end_the_measurement(
    least_seconds: float, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """210 GFLOP/s, but up to some moment no matmul takes less than the least seconds: a matmul of 256 then reaches 4.2
    or 0.43 GFLOP/s.
    """
    matmuls_take(lambda flops, now: max(flops / 210e9, least_seconds if now < until else 0.0), monkeypatch)
    assert rates._matmul_rate(torch.bfloat16, CPU) == pytest.approx(210e9)


def test_a_slow_machine_is_measured_by_few_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = matmuls_take(lambda flops, now: flops / 1e9, monkeypatch)
    assert rates._matmul_rate(torch.float16, CPU) == pytest.approx(1e9)
    assert clock() < 0.5


def test_what_ranks_know_they_know_though_the_file_is_replaced(quick: list[torch.device], cache_folder: Path) -> None:
    """Otherwise one rank would measure alone and wait for the other ranks."""
    measuring.measure(CPU, num_ranks=2)
    assert measuring.is_measured(CPU, 2)
    measuring.cache_file().unlink()
    measuring.measure(CPU, num_ranks=2)
    assert len(quick) == 1


def test_several_ranks_add_to_one_file_at_once(quick: list[torch.device]) -> None:
    names = [f"rank {rank}" for rank in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: measuring.kept(CPU, name, {"a rate"}, lambda: {"a rate": 1.0}), names))
    assert sorted(key[-6:] for key in json.loads(measuring.cache_file().read_text())) == names


@pytest.mark.usefixtures("small_arrays")
def test_everything_is_measured(tmp_path: Path) -> None:
    machine = measuring.measure("cpu", folder=tmp_path, fresh=True)
    numbers = {name: value for name, value in asdict(machine).items() if name.endswith("_per_second")}
    links = {numbers.pop(f"{name}_bytes_per_second") for name in ("link", "few_ctas_link", "network")}
    assert links == {0}, "a single rank has no link"
    assert all(1e6 < number < 1e16 for number in numbers.values()), numbers
    assert 1e-8 < machine.launch_seconds < 1e-2
    assert (machine.gpu_name, machine.compute_capability, machine.can_pin) == (None, None, False)
    assert machine.vram_total_bytes == machine.ram_total_bytes == hardware.ram_limit_bytes()
    assert machine.disk_folder == str(tmp_path)
    assert machine.disk_free_bytes > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"], "the measuring file was not removed"


def test_what_goes_on_beside_the_step_is_counted_by_bytes_that_arrived_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pieces are copied before the step, three during it, and the rest after it."""
    numel, piece, copied, now, met = 1 << 17, (1 << 17) * 14, [0], [0.0], list[int]()

    class Copies:
        """A stream in both directions. Copies to RAM are recorded in order and finish by count."""

        def __init__(self, device: torch.device, name: str) -> None:
            self.wait, self.copy, self._number = (lambda *_: None), (lambda *_: None), itertools.count(1)

        def record(self) -> Any:
            number = next(self._number)
            return SimpleNamespace(done=lambda: number <= copied[0])

    def step(*_: object) -> None:
        copied[0] += 3
        now[0] += 0.5

    def meet() -> None:
        met.append(1)
        copied[0] = 2 + 100 * (len(met) - 1)

    monkeypatch.setattr(measuring, "CopyStream", Copies)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cpu, "optimizer_step", step)
    slab = HostSlab(numel * 14 + 5 * 256)
    alone = {"cpu_adamw_bytes_per_second": 1e9, "both_bytes_per_second": 3e11, "can_pin": True}
    found = rates.step_beside_copies(slab, numel, alone, CPU, meet)
    assert found[0] == (rates.step_traffic_bytes("exact") * numel + 3 * 2 * piece) / 0.5
    assert len(found) > 1
    slab.clear()
    assert rates.step_beside_copies(slab, numel, alone | {"can_pin": False}, CPU, meet) == [0.0]
    assert len(met) == 2 * len(found), "a rank without pinned RAM joins every barrier"


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="needs the C kernel")
def test_the_step_moves_bytes_about_as_fast_as_the_triad() -> None:
    measured = max((rates.machine_rates(CPU) for _ in range(2)), key=lambda rate: rate["cpu_adamw_bytes_per_second"])
    assert 0.2 < measured["cpu_adamw_bytes_per_second"] / measured["dram_bytes_per_second"] < 5


def test_arrays_are_larger_than_the_caches_and_small_beside_the_free_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: True)
    for cache, free, parameters in (
        (0, 64 << 30, 8 << 20),
        (96 << 20, 64 << 30, 4 * (96 << 20) // 14 // 256 * 256),
        (1 << 30, 64 << 30, 96 << 20),
        (96 << 20, 1 << 29, (1 << 26) // 14 // 256 * 256),
    ):
        monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda cache=cache: cache)
        monkeypatch.setattr(hardware, "ram_available_bytes", lambda free=free: free)
        assert rates.numel_to_step() == parameters


def test_each_cache_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for core, (shared, size) in enumerate((("0-1", "32768K"), ("0-1", "32768K"), ("2-3", "32768K"))):
        folder = tmp_path / f"cpu{core}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
        (folder / "size").write_text(f"{size}\n")
    assert hardware.last_level_cache_bytes(tmp_path) == 64 << 20
    assert hardware.last_level_cache_bytes(tmp_path / "none") == 0


@pytest.mark.usefixtures("small_arrays")
def test_without_the_kernel_torch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "c_library", lambda: None)
    monkeypatch.setattr(errors, "warned", set())
    with pytest.warns(UserWarning, match="C kernels are missing"):
        measured = rates.machine_rates(CPU)
    assert measured["cpu_adamw_bytes_per_second"] > 1e6
    assert measured.keys() == measuring.RATES


def test_rates_are_kept_and_sizes_are_not(quick: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    first = measuring.measure("cpu")
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 12345)
    second = measuring.measure("cpu")
    assert quick == [CPU]
    assert second.ram_available_bytes == second.vram_free_bytes == 12345
    changed = {"ram_available_bytes", "vram_free_bytes"}
    assert all(getattr(first, f.name) == getattr(second, f.name) for f in fields(first) if f.name not in changed)


def test_the_rate_of_vram_alone_is_the_kept_one_where_there_is_one(
    quick: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "quick_vram_rate", lambda device: 7.0)
    assert measuring.vram_rate(CPU) == 7.0
    measuring.measure(CPU)
    assert measuring.vram_rate(CPU) == 1.0
    assert len(quick) == 1, "other rates must not be measured"


def test_a_quick_look_at_vram_takes_a_few_hundredths_of_a_second() -> None:
    rates.quick_vram_rate(CPU)
    began = time.process_time()
    rate = rates.quick_vram_rate(CPU)
    assert rate is not None
    assert 1e8 < rate < 1e13
    assert time.process_time() - began < 0.5


def test_without_room_for_its_array_there_is_no_quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: 32 << 20)
    assert rates.quick_vram_rate(CPU) is None


def test_a_fresh_measurement_replaces_what_was_kept(quick: list[torch.device]) -> None:
    assert measuring.measure("cpu").h2d_bytes_per_second == 1
    assert measuring.measure("cpu", fresh=True).h2d_bytes_per_second == 2
    assert measuring.measure("cpu").h2d_bytes_per_second == 2


def test_what_others_disturbed_is_not_kept_on_disk(quick: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    cores_are_busy(monkeypatch, 1000)
    assert [measuring.measure("cpu").h2d_bytes_per_second for _ in range(2)] == [1, 1]
    assert not measuring.cache_file().exists()
    assert measuring.measure("cpu", fresh=True).h2d_bytes_per_second == 2
    monkeypatch.setattr(measuring, "own_rates", {})
    cores_are_busy(monkeypatch, 0)
    assert [measuring.measure("cpu").h2d_bytes_per_second for _ in range(2)] == [3, 3]
    assert measuring.cache_file().exists()


def test_rates_of_a_gpu_that_other_processes_use_are_not_kept_on_disk(
    quick: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their VRAM would count as this process's CUDA context in every later plan."""
    cores_are_busy(monkeypatch, 0)
    monkeypatch.setattr(hardware, "vram_outside_bytes", lambda device: 20 << 30)
    measuring.measure("cpu")
    assert not measuring.cache_file().exists()
    monkeypatch.setattr(hardware, "vram_outside_bytes", lambda device: 600 << 20)
    measuring.own_rates.clear()
    measuring.measure("cpu")
    assert measuring.cache_file().exists()


@pytest.mark.parametrize(
    ("others", "num_ranks", "disturbed"), [(0.02, 1, False), (0.2, 1, False), (0.4, 1, True), (0.4, 2, False)]
)
def test_a_tenth_of_the_cores_disturbs(
    monkeypatch: pytest.MonkeyPatch, others: float, num_ranks: int, disturbed: bool
) -> None:
    """Fractions of two cores in one second. Another measuring rank takes half of them."""
    now, cores = [0.0], [SimpleNamespace(user=100.0), SimpleNamespace(system=1000.0)]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measuring.time, "process_time", lambda: 7.0)
    monkeypatch.setattr(hardware, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: cores)

    def measured() -> dict[str, float]:
        now[0] += 1
        cores[0].user += others
        return {"a rate": 1.0}

    measuring.kept(CPU, "something", {"a rate"}, measured, num_ranks=num_ranks)
    assert measuring.cache_file().exists() is not disturbed


@pytest.mark.skipif(cpu.default_num_threads() < 2, reason="one core")
def test_the_seconds_of_others_are_those_of_other_processes() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    before = measuring.seconds_of_others()
    busy = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 20
        while measuring.seconds_of_others() - before < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("change", ["cpu_name", "num_cores"])
def test_another_machine_is_measured_again(
    quick: list[torch.device], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    measuring.measure("cpu")
    monkeypatch.setattr(hardware, change, lambda: 77)
    measuring.measure("cpu")
    assert len(quick) == 2


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", "older", "number"])
def test_a_damaged_cache_is_measured_over(quick: list[torch.device], damage: str) -> None:
    measuring.measure("cpu")
    file = measuring.cache_file()
    kept = json.loads(file.read_text())
    replaced = {"older": {key: {"h2d": 1} for key in kept}, "number": dict.fromkeys(kept, 3)}
    file.write_text(json.dumps(replaced[damage]) if damage in replaced else damage)
    assert measuring.measure("cpu").h2d_bytes_per_second == 2
    assert json.loads(file.read_text()) == {next(iter(kept)): dict.fromkeys(measuring.RATES, 2.0)}


def test_a_cache_that_cannot_be_written_is_done_without(quick: list[torch.device], cache_folder: Path) -> None:
    cache_folder.write_text("a file where the folder should be")
    assert measuring.measure("cpu").h2d_bytes_per_second == 1
    assert measuring.measure("cpu").h2d_bytes_per_second == 2


def test_disks_are_kept_by_folder(quick: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    def count(folder: Path) -> dict[str, float]:
        measured.append(folder)
        return dict.fromkeys(measuring.DISK_RATES, float(len(measured)))

    monkeypatch.setattr(measuring, "disk_rates", count)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other", tmp_path):
        measuring.measure("cpu", folder=folder)
    assert measured == [tmp_path, tmp_path / "other"]
    assert measuring.measure("cpu", folder=tmp_path).disk_read_bytes_per_second == 1
    without = measuring.measure("cpu")
    assert (without.disk_folder, without.disk_free_bytes, without.disk_read_bytes_per_second) == (None, 0, 0.0)
    assert len(quick) == 1


def test_a_folder_that_is_none_says_so(quick: list[torch.device], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is not a folder"):
        measuring.measure("cpu", folder=tmp_path / "missing")


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OutputError, match=r"cannot write to .*: Permission denied"):
        disk.disk_rates(tmp_path)


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    with pytest.raises(OffloadkitError, match="has 5 MiB free: at least 8 are needed"):
        disk.disk_rates(tmp_path)


def test_a_disk_without_direct_access_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr("os.fsync", flushed.append)
    measured = disk.disk_rates(tmp_path)
    assert len(flushed) >= 2
    assert min(measured.values()) > 0


def test_the_memory_fraction_limits_the_vram(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    answers = {
        "mem_get_info": (60 * gib, 80 * gib),
        "memory_reserved": 10 * gib,
        "memory_allocated": 8 * gib,
        "get_per_process_memory_fraction": 0.25,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer, raising=False)
    monkeypatch.setattr(hardware, "_loaded_bytes", {})
    monkeypatch.setattr(nvml, "process_bytes", lambda _: None)
    device = torch.device("cuda", 0)
    assert hardware.vram_bytes(device) == (12 * gib, 20 * gib)
    assert hardware.vram_context_bytes(device) == 1.5 * gib, "the rest belongs to another process"
    monkeypatch.setitem(hardware.library_bytes, 0, 2 * gib)
    assert hardware.vram_context_bytes(device) == 3.5 * gib, "the known part of this process counts in full"
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    assert hardware.vram_bytes(device) == (62 * gib, 80 * gib)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert hardware.vram_bytes(device) == (62 * gib, 80 * gib)


def test_a_cpu_with_a_number_is_a_cpu(quick: list[torch.device]) -> None:
    """accelerate gives each rank a numbered CPU device."""
    assert measuring.measure(torch.device("cpu", 1)).device == "cpu"
