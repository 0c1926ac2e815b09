"""The C kernel's thread pool: its size, forks, the GIL, several callers, floating-point mode, populated pages."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offloadkit.facts import hardware
from offloadkit.kernels import cpu
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.reference import step_reference
from offloadkit.optim.table import Segment
from tests.optim.states import assert_same_array_bits, assert_same_bits, clone, make_gradient, make_state

SCALARS = adamw_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=3)
OTHER_SCALARS = adamw_scalars(lr=3e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, step=1)

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C kernel is not built")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def work() -> None:
    """One call with enough pieces for every thread of the pool."""
    cpu.accumulate(torch.zeros(1 << 20), torch.ones(1 << 20), add=True)


def os_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_the_number_of_threads_changes_no_bit() -> None:
    state, gradient = make_state(torch.bfloat16, 200_001), make_gradient(torch.float32, 200_001)
    segments = [Segment(0, 100_003, SCALARS), Segment(100_003, 99_998, OTHER_SCALARS)]
    expected = clone(state)
    step_reference(expected, gradient, segments, 0.3)
    for num_threads in (1, 2, 5, 2, 1):
        cpu.set_num_threads(num_threads)
        assert cpu.num_threads() == num_threads
        actual = clone(state)
        cpu.optimizer_step(actual, gradient, segments, 0.3)
        assert_same_bits(actual, expected)


def test_the_pool_grows_and_shrinks_to_the_number_asked_for() -> None:
    work()
    cpu.set_num_threads(1)
    time.sleep(0.2)
    alone = os_threads()
    cpu.set_num_threads(6)
    work()
    assert os_threads() == alone + 5
    cpu.set_num_threads(3)
    wait_until(lambda: os_threads() == alone + 2)
    cpu.set_num_threads(1)
    wait_until(lambda: os_threads() == alone)


def test_idle_threads_sleep() -> None:
    cpu.set_num_threads(4)
    work()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_fewer_than_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        cpu.set_num_threads(0)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (3, 2), (16, 15)])
def test_default_threads_leave_a_core_to_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(hardware, "num_cores", lambda: cores)
    assert cpu.default_num_threads() == expected


def in_child(action: Callable[[], bool]) -> None:
    """Run `action` in a forked child and expect True within 20 seconds. The child's torch uses one thread, as in a
    DataLoader's worker, because OpenMP's pool does not survive a fork."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os._exit(0 if action() else 1)
        except BaseException:
            os._exit(2)
    end = time.monotonic() + 20
    while (waited := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.005)
    assert waited[1] == 0


def steps_right() -> bool:
    cpu.set_num_threads(3)
    accumulator = torch.ones(1 << 20)
    cpu.accumulate(accumulator, accumulator.clone(), add=True)
    return bool((accumulator == 2.0).all()) and os_threads() >= 3


def test_a_forked_child_makes_its_own_threads() -> None:
    cpu.set_num_threads(3)
    work()
    in_child(steps_right)
    assert steps_right()


def test_a_fork_while_another_thread_steps_harms_neither() -> None:
    cpu.set_num_threads(3)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            work()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(5):
            in_child(steps_right)
    finally:
        stop.set()
        busy.join(20)
    assert not busy.is_alive()


def test_the_gil_is_released() -> None:
    """While one thread is inside a single long call, another thread runs Python code again and again."""
    cpu.set_num_threads(1)
    state, gradient = make_state(torch.float32, 4 << 20), make_gradient(torch.float32, 4 << 20)
    segments = [Segment(0, 4 << 20, SCALARS)] * 20
    inside: list[tuple[float, float]] = []

    def call() -> None:
        start = time.monotonic()
        cpu.optimizer_step(state, gradient, segments, 1.0)
        inside.append((start, time.monotonic()))

    caller = threading.Thread(target=call)
    caller.start()
    beats = []
    while caller.is_alive():
        beats.append(time.monotonic())
        time.sleep(0.001)
    (start, end), span = inside[0], inside[0][1] - inside[0][0]
    middle = [beat for beat in beats if start + 0.25 * span < beat < end - 0.25 * span]
    assert len(middle) >= 3


def test_callers_in_several_threads_all_get_their_own_result() -> None:
    cpu.set_num_threads(3)
    wrong: list[int] = []

    def call(value: int) -> None:
        for _ in range(20):
            accumulator = torch.full((300_000,), float(value))
            cpu.accumulate(accumulator, accumulator.clone(), add=True)
            if not (accumulator == 2.0 * value).all():
                wrong.append(value)

    callers = [threading.Thread(target=call, args=(value,)) for value in range(1, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == []


@pytest.mark.parametrize("num_threads", [1, 2])
def test_subnormals_are_kept_where_the_calling_thread_flushes_them(num_threads: int) -> None:
    gradient = torch.tensor([1e-40, -1e-42, 1e-45, 1.0]).repeat(80_000)
    accumulator, expected = gradient.clone(), gradient * 2
    cpu.set_num_threads(1)
    time.sleep(0.1)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormals here")
    try:
        cpu.set_num_threads(num_threads)
        cpu.accumulate(accumulator, gradient, add=True)
        assert torch.tensor(1e-40).mul(1.0).item() == 0.0, "the caller's own mode must come back"
    finally:
        torch.set_flush_denormal(False)
    assert_same_array_bits(accumulator, expected)


def resident_bytes(memory: torch.Tensor) -> int:
    """Resident bytes of the mapping that holds `memory`, from /proc/self/smaps."""
    address, inside = memory.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("offset", [0, 5])
def test_populate_faults_every_page_in_and_keeps_what_they_hold(offset: int) -> None:
    num_bytes = (40 << 20) + 12_345
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    memory[offset + 17_000_000] = 99
    before = resident_bytes(memory)
    cpu.populate(memory.data_ptr() + offset, num_bytes - offset)
    assert before < 4 << 20
    assert resident_bytes(memory) >= num_bytes
    assert memory[offset + 17_000_000] == 99
    assert int(memory.sum(dtype=torch.int64)) == 99


def test_populating_what_is_not_mapped_is_an_error() -> None:
    mapping = mmap.mmap(-1, 1 << 20)
    with pytest.raises(OSError, match="could not be populated"):
        cpu.populate(1 << 45, 1 << 20)
    mapping.close()
