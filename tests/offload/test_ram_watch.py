"""The RAM watch: its threshold, its message, and a real process that it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadkit.errors import OffloadkitError, OutOfRamError
from offloadkit.facts import hardware
from offloadkit.offload import shortage as ram_watch
from offloadkit.offload.shortage import RamWatch
from tests.messages import has_facts

MIB, GIB = 1 << 20, 1 << 30
PLANNED = {"moments": 6 * GIB, "gradients": 2 * GIB, "disk": 0}


class Machine:
    """A machine of 12 GiB whose available RAM the test sets."""

    def __init__(self) -> None:
        self.available = 4 * GIB
        self.num_looks = 0
        self.others = {thread.ident for thread in threads()}
        """Watches of engines that other tests left open."""

    def look(self) -> int:
        self.num_looks += threading.get_ident() not in self.others
        return self.available

    def wait_for_looks(self, number: int = 2) -> None:
        target, deadline = self.num_looks + number, time.monotonic() + 10
        while self.num_looks < target:
            assert time.monotonic() < deadline, "nobody looks"
            time.sleep(0.002)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(hardware, "ram_available_bytes", machine.look)
    monkeypatch.setattr(hardware, "ram_limit_bytes", lambda: 12 * GIB)
    monkeypatch.setattr(hardware, "process_ram_bytes", lambda: 9 * GIB)
    monkeypatch.setattr(ram_watch, "POLL_SECONDS", 0.01)
    return machine


@pytest.fixture
def watch(machine: Machine) -> Iterator[RamWatch]:
    watch = RamWatch(PLANNED)
    yield watch
    watch.close()


def test_it_is_silent_while_there_is_room(machine: Machine, watch: RamWatch) -> None:
    machine.available = 256 * MIB
    machine.wait_for_looks()
    watch.check()


def test_it_says_what_was_planned_and_what_is_used(machine: Machine, watch: RamWatch) -> None:
    machine.available = 200 * MIB
    machine.wait_for_looks()
    with pytest.raises(OutOfRamError) as raised:
        watch.check()
    assert isinstance(raised.value, OffloadkitError)
    told = str(raised.value)
    assert has_facts(told, "200 MiB of 12 GiB", "256 MiB")
    assert has_facts(told, "9 GiB", "8 GiB", "moments 6 GiB", "gradients 2 GiB", "2.8 GiB")
    assert "ram=" in told


def test_a_low_between_two_checks_counts_once(machine: Machine, watch: RamWatch) -> None:
    machine.available = MIB
    machine.wait_for_looks()
    machine.available = 4 * GIB
    machine.wait_for_looks()
    with pytest.raises(OutOfRamError, match="1 MiB of 12 GiB"):
        watch.check()
    watch.check()


@pytest.mark.parametrize(("limit", "floor"), [(12 * GIB, 256 * MIB), (400 * GIB, 4 * GIB)])
def test_the_floor_is_one_percent_and_at_least_256_mib(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, limit: int, floor: int
) -> None:
    monkeypatch.setattr(hardware, "ram_limit_bytes", lambda: limit)
    for available in (floor, floor - MIB):
        machine.available = available
        watch = RamWatch({})
        machine.wait_for_looks()
        watch.close()
        if available == floor:
            watch.check()
        else:
            with pytest.raises(OutOfRamError, match=r"0 KiB were planned \(nothing\)"):
                watch.check()


def test_a_floor_may_be_given(machine: Machine) -> None:
    watch = RamWatch({}, floor_bytes=5 * GIB)
    machine.wait_for_looks()
    watch.close()
    with pytest.raises(OutOfRamError, match="less than the 5 GiB"):
        watch.check()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "offloadkit-ram-watch"]


def test_it_ends_when_it_is_closed_and_when_it_is_collected(machine: Machine) -> None:
    before = set(threads())
    watch = RamWatch(PLANNED)
    assert set(threads()) - before
    watch.close()
    watch.close()
    assert not set(threads()) - before
    left_behind = RamWatch(PLANNED)
    (thread,) = set(threads()) - before
    del left_behind
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()


REAL = """
import mmap, time
from offloadkit.facts import hardware
from offloadkit.errors import OutOfRamError
from offloadkit.offload.shortage import RamWatch

watch = RamWatch({"states": 64 << 20}, floor_bytes=hardware.ram_available_bytes() - (256 << 20))
held = []
try:
    for step in range(40):
        held.append(b"x" * (32 << 20))
        time.sleep(0.1)
        watch.check()
except OutOfRamError as error:
    print(step, error)
"""


@pytest.mark.slow
def test_a_process_that_takes_too_much_ends_with_the_error() -> None:
    root = Path(hardware.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True, cwd=root)
    step, _, message = done.stdout.partition(" ")
    assert int(step) < 39
    assert "64 MiB were planned (states 64 MiB)" in message
