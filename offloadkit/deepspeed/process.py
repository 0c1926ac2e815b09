"""Prepare a process for DeepSpeed: package, environment variables, cores, compiled AdamW."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offloadkit.errors import ConfigError
from offloadkit.facts import hardware

GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_INSTALLED = "deepspeed is not installed: pip install 'offloadkit[deepspeed]'"


def is_installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def check_installed() -> None:
    if not is_installed():
        raise ConfigError(NOT_INSTALLED)


def prepare(*, on_cpu_steps: bool, to_disk: bool = False) -> None:
    """Set DeepSpeed's environment variables, bind this rank to its cores, and compile extensions.

    Without a launcher the process forms a group of world size 1. Raises `ConfigError` if DeepSpeed is not installed, or
    an extension cannot be compiled.
    """
    check_installed()
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # DeepSpeed rejects other minor versions of nvcc, which work
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        set_group_variables()
    bind_cores()
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    if to_disk and not AsyncIOBuilder().is_compatible():
        raise ConfigError(
            "states on a disk: DeepSpeed needs libaio for it (`apt install libaio-dev`). Otherwise leave disk out, or "
            "train with offloadkit's own engine"
        )
    try:
        if on_cpu_steps:
            with building("cpu_adam"):
                CPUAdamBuilder().load(verbose=False)
        if not torch.cuda.is_available():
            from deepspeed.comm.torch import build_shm_op

            with building("deepspeed_shm_comm"):
                build_shm_op()
    except Exception as error:  # compilers and their drivers may raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"DeepSpeed cannot compile its CPU operations ({first}): they need a C++ compiler (`apt install g++`) and, "
            "if torch has CUDA, also the CUDA toolkit (CUDA_HOME). offloadkit's own engine needs neither"
        ) from error


def set_group_variables() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = ("0", "0", "1", "1", "127.0.0.1", str(port))
    os.environ.update(zip(GROUP_VARIABLES, values, strict=True))


def bind_cores() -> None:
    """Give each rank of a host its share of the cores for the CPU step; otherwise all ranks would share all cores.

    Does nothing for a single rank per host, or if OMP_NUM_THREADS is not torchrun's 1: then the `deepspeed` launcher or
    the user has bound the ranks.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    cores = sorted(hardware.own_cores())
    number = len(cores) // num_ranks
    if num_ranks == 1 or number == 0 or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    first = int(os.environ.get("LOCAL_RANK") or 0) * number
    os.sched_setaffinity(0, cores[first : first + number])
    os.environ["OMP_NUM_THREADS"] = str(number)
    torch.set_num_threads(number)


@contextmanager
def restored_globals() -> Iterator[None]:
    """Restore the process group, the environment variables and transformers' global DeepSpeed settings afterwards."""
    import torch.distributed as dist

    before = {name: os.environ.get(name) for name in (*GROUP_VARIABLES, "ACCELERATE_USE_DEEPSPEED")}
    had_group = dist.is_initialized()
    try:
        yield
    finally:
        from accelerate.state import AcceleratorState
        from transformers.integrations import deepspeed as of_transformers

        untyped: Any = of_transformers
        untyped.unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        if not had_group and dist.is_initialized():
            import deepspeed

            deepspeed.comm.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def building(extension: str) -> Iterator[None]:
    """Build a torch extension with ninja on PATH, and with a lock against concurrent builds.

    torch's own lock file outlives a killed build, so the next build waits forever. This lock ends with its process.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = Path(_get_build_directory(extension, verbose=False))
    with (folder / "offloadkit.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
