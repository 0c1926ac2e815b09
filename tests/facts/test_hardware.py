"""Resources of this process, read from made-up cgroup trees of both versions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from offloadkit.facts import hardware

MIB = 1 << 20
GIB = 1 << 30
Tree = Callable[[str, dict[str, str]], None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Sets the text of /proc/self/cgroup and the files under /sys/fs/cgroup; 64 cores, 512 GiB RAM, 400 GiB
    available."""

    def make(own_cgroups: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own_cgroups)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        monkeypatch.setattr(hardware, "CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
        memory = type("Memory", (), {"total": 512 * GIB, "available": 400 * GIB})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return make


def read() -> tuple[int, int, int]:
    """(cores, RAM limit, RAM available), both in GiB."""
    return hardware.num_cores(), hardware.ram_limit_bytes() // GIB, hardware.ram_available_bytes() // GIB


def v2(limit: object, used: int = 0, *, active: int = 0, inactive: int = 0, prefix: str = "") -> dict[str, str]:
    stat = f"anon 1\nactive_file {active * GIB}\ninactive_file {inactive * GIB}"
    limit = limit * GIB if isinstance(limit, int) else limit
    files = {"memory.max": str(limit), "memory.current": str(used * GIB), "memory.stat": stat}
    return {prefix + name: text for name, text in files.items()}


def test_without_cgroups_the_machine_is_what_there_is(tree: Tree) -> None:
    tree("", {})
    assert read() == (64, 512, 400)


def test_v2_in_a_container_reads_its_root(tree: Tree) -> None:
    tree("0::/", {"cpu.max": "400000 100000", **v2(32, 10)})
    assert read() == (4, 32, 22)


@pytest.mark.parametrize(("high", "limit"), [(20, 20), (48, 32)])
def test_v2_slows_a_process_down_above_high(tree: Tree, high: int, limit: int) -> None:
    tree("0::/", {**v2(32, 10), "memory.high": str(high * GIB)})
    assert read() == (64, limit, limit - 10)


def test_v2_without_limits_says_max(tree: Tree) -> None:
    tree("0::/", {"cpu.max": "max 100000", **v2("max", 10)})
    assert read() == (64, 512, 400)


def test_page_cache_counts_as_free(tree: Tree) -> None:
    tree("0::/", v2(32, 30, active=6, inactive=12))
    assert read() == (64, 32, 20)


def test_v2_takes_the_tightest_of_the_groups_above(tree: Tree) -> None:
    files = v2("max", 1, prefix="a/b/") | v2(48, 3, prefix="a/") | {"a/b/cpu.max": "max 100000"}
    tree("0::/a/b", files | {"a/cpu.max": "250000 50000"})
    assert read() == (5, 48, 45)


def test_a_wider_group_that_its_other_members_fill_leaves_less_than_a_tighter_one(tree: Tree) -> None:
    tree("0::/a/b", v2(16, 1, prefix="a/b/") | v2(64, 60, prefix="a/"))
    assert read() == (64, 16, 4)


def v1(limit: int, used: int, *, own_cache: int, all_cache: int, prefix: str) -> dict[str, str]:
    stat = f"cache 0\ninactive_file {own_cache * GIB}\ntotal_inactive_file {all_cache * GIB}\ntotal_active_file 0"
    files = {"limit_in_bytes": str(limit), "usage_in_bytes": str(used * GIB), "stat": stat}
    return {f"{prefix}memory.{name}": text for name, text in files.items()}


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_v1_reads_the_tree_of_each_controller(tree: Tree, folder: str) -> None:
    own = "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n0::/docker/x"
    quota = {f"{folder}/docker/x/cpu.cfs_quota_us": "150000", f"{folder}/docker/x/cpu.cfs_period_us": "50000"}
    memory = v1(24 * GIB, 20, own_cache=1, all_cache=8, prefix="memory/docker/x/")
    tree(own, quota | memory)
    assert read() == (3, 24, 12)


def test_v1_in_a_container_that_shows_the_hosts_path(tree: Tree) -> None:
    """The mount begins at the container's own group and does not contain the path that the host names."""
    tree("9:memory:/docker/x\n4:cpu,cpuacct:/docker/x", v1(8 * GIB, 3, own_cache=0, all_cache=0, prefix="memory/"))
    assert read() == (64, 8, 5)


def test_v1_without_limits_has_minus_one_and_a_huge_number(tree: Tree) -> None:
    quota = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    tree("9:memory:/\n4:cpu:/", quota | v1(9223372036854771712, 3, own_cache=0, all_cache=0, prefix="memory/"))
    assert read() == (64, 512, 400)


@pytest.mark.parametrize(("quota", "cores"), [("20000 100000", 1), ("150000 100000", 2), ("9900000 100000", 64)])
def test_part_of_a_core_is_rounded_and_never_less_than_one(tree: Tree, quota: str, cores: int) -> None:
    tree("0::/", {"cpu.max": quota})
    assert hardware.num_cores() == cores


def test_overfull_groups_leave_nothing(tree: Tree) -> None:
    tree("0::/", v2(8, 9))
    assert hardware.ram_available_bytes() == 0


@pytest.mark.slow
def test_the_peak_is_this_programs_own_and_not_that_of_the_one_that_started_it() -> None:
    large = b"x" * (600 * MIB)
    code = "from offloadkit.facts import hardware; print(hardware.process_peak_ram_bytes())"
    command, root = [sys.executable, "-c", code], Path(hardware.__file__).parents[2]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout)
    assert 50 * MIB < peak < hardware.process_peak_ram_bytes() - 200 * MIB
    del large


def test_the_cores_next_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(hardware, "PCI_DEVICES", tmp_path)
    gpu = torch.device("cuda", 1)
    assert hardware.cores_near(gpu) == set(), "the system does not report it"
    (tmp_path / "0000:9b:00.0").mkdir()
    (tmp_path / "0000:9b:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert hardware.cores_near(gpu) == {0, 1, 2, 8, 10, 11}
    assert hardware.cores_near(torch.device("cpu")) == set()
    del found.pci_bus_id
    assert hardware.cores_near(gpu) == set(), "torch does not report it"
