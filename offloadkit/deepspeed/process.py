"""What a process needs before DeepSpeed runs in it: the package, its variables, its cores, its compiled AdamW."""

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

from offloadkit import hardware
from offloadkit.errors import ConfigError

GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_INSTALLED = "deepspeed is not installed: pip install 'offloadkit[deepspeed]'"


def is_installed() -> bool:
    """Whether DeepSpeed can be imported. It is not imported here."""
    return importlib.util.find_spec("deepspeed") is not None


def check_installed() -> None:
    """
    Raises:
        ConfigError: with the command that installs it.
    """
    if not is_installed():
        raise ConfigError(NOT_INSTALLED)


def prepare(*, on_cpu_steps: bool, to_disk: bool = False) -> None:
    """Set the variables that DeepSpeed reads, bind this rank to its cores, and compile what is compiled at first use.

    A process that no launcher has started becomes a group of its own.

    Args:
        on_cpu_steps: whether the CPU steps.
        to_disk: whether states go to a disk.

    Raises:
        ConfigError: DeepSpeed is not installed, or what it compiles cannot be compiled.
    """
    check_installed()
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # it refuses nvcc's of other minor versions, which do
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        become_a_group()
    bind_cores()
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    if to_disk and not AsyncIOBuilder().is_compatible():
        raise ConfigError(
            "states on a disk: DeepSpeed needs libaio for it (`apt install libaio-dev`). Without it leave disk out, or "
            "train with offloadkit's own engine"
        )
    if on_cpu_steps:
        try:
            with building("cpu_adam"):
                CPUAdamBuilder().load(verbose=False)
        except Exception as error:  # whatever a compiler and its driver do
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"DeepSpeed cannot compile its AdamW for CPUs ({first}): it needs a C++ compiler (`apt install g++`) "
                "and, beside a torch with CUDA, CUDA's own (CUDA_HOME). offloadkit's own engine needs neither"
            ) from error


def become_a_group() -> None:
    """Set the variables that torch.distributed reads, for a world of this one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = ("0", "0", "1", "1", "127.0.0.1", str(port))
    os.environ.update(zip(GROUP_VARIABLES, values, strict=True))


def bind_cores() -> None:
    """Give each rank of a host its part of the cores, for the CPU's step: unbound, all ranks share all of them.

    Nothing is done for a process that is alone on its host, nor where OMP_NUM_THREADS says more than torchrun's 1: the
    `deepspeed` launcher has bound the ranks then, or the user.
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
def left_as_it_was() -> Iterator[None]:
    """Inside this context DeepSpeed may run. After it the process is in the group, and has the variables, that it had.

    The Trainer's settings for DeepSpeed, which transformers keeps globally, are gone too.
    """
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
    """While a torch extension is built: ninja is found beside Python, and no other process builds the same one.

    torch's own lock is a file that a killed build leaves behind; the next build would wait for ever. This lock ends
    with its process.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = Path(_get_build_directory(extension, verbose=False))
    with (folder / "offloadkit.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
