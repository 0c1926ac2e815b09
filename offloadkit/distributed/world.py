"""Joining the process group of a launcher (`torchrun`, `accelerate launch`, `deepspeed`), and running work on rank 0.

All entry points call this module first; `ranks.py` has the operations of an engine's ranks.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from offloadkit.errors import RankError

_T = TypeVar("_T")


def join(timeout: float | None = None) -> None:
    """Join the launcher's process group, unless the process has joined a group already. No effect without a launcher.

    If the current device is the first GPU, it becomes the GPU of LOCAL_RANK.

    Args:
        timeout: longest wait of an operation for the other ranks in seconds, also in a group joined earlier. None keeps
            the present timeout, or torch's default for a new group.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    if limit is not None and dist.is_available() and dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(limit)
    if int(os.environ.get("WORLD_SIZE") or 1) == 1 or "RANK" not in os.environ or not dist.is_available():
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.current_device() == 0:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)
    except (ValueError, RuntimeError) as error:
        raise RankError(
            f"the environment names {os.environ['WORLD_SIZE']} processes, but this one (RANK={os.environ['RANK']}) "
            f"cannot reach the other processes ({error}): start it with torchrun, `accelerate launch` or the deepspeed "
            "launcher. To train on one GPU, remove RANK and WORLD_SIZE from the environment"
        ) from error


def rank() -> int:
    """Rank in torch.distributed's default group; 0 without a group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """World size of torch.distributed's default group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def run_on_rank_0(what: str, run: Callable[[], _T]) -> _T:
    """Call `run` on rank 0 while all ranks wait, and broadcast its result, or the error that it raised.

    `what` describes the work in messages. Raises `RankError` if the error cannot be pickled, or a rank never arrives.
    """
    if size() == 1:
        return run()
    told: list[Any] = [None]
    raised: BaseException | None = None
    if rank() == 0:
        try:
            told = [(run(), None)]
        except BaseException as error:
            raised, told = error, [(None, _sendable(what, error))]
    try:
        dist.broadcast_object_list(told, 0)
    except RuntimeError as error:
        if raised is None:
            problem = "another process has died, has raised an error or has not arrived here in time: look at that"
            raise RankError(f"{what} failed: {problem}") from error
    found, sent = told[0]
    if raised is not None or sent is not None:
        raise raised or sent
    return found  # type: ignore[no-any-return]


def _sendable(what: str, error: BaseException) -> BaseException:
    try:
        if isinstance(error, Exception):
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return error
    except Exception:  # user exceptions may raise anything
        pass
    return RankError(f"{what} failed on rank 0: {type(error).__name__}: {error}")
