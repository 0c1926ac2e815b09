"""The processes that a launcher has started together: joining their group, and what the first of them does for all.

`torchrun`, `accelerate launch` and the `deepspeed` launcher tell each process in its environment who it is. All doors
come here before anything else; what an engine's ranks do together is in `ranks.py`.
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
    """Join the group of the processes that were started together with this one, unless it has joined one already.

    If the process computes on the first GPU, the one of LOCAL_RANK becomes its own. Nothing happens where it was
    started alone.

    Args:
        timeout: seconds that an operation may wait for the other ranks, also in a group that it has joined already.
            None leaves it as it is; a new group has torch's then.

    Raises:
        RankError: the others cannot be reached.
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
            f"the environment names {os.environ['WORLD_SIZE']} processes, and this one (RANK={os.environ['RANK']}) "
            f"cannot reach the others ({error}): start it by torchrun, `accelerate launch` or the deepspeed launcher. "
            "To train alone, remove RANK and WORLD_SIZE from the environment"
        ) from error


def rank() -> int:
    """This process's number in torch.distributed's default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def size() -> int:
    """How many processes there are in it; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def from_first(what: str, run: Callable[[], _T]) -> _T:
    """What `run()` gives on rank 0, on all ranks. Only rank 0 calls it; all ranks must come here together.

    Args:
        what: is done, for an error that cannot be sent.

    Raises:
        BaseException: what `run()` raised.
        RankError: it cannot be sent to other ranks; they get this in its place. Or another rank never comes here.
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
            problem = "another process has died, has raised an error or has not come here in time: look at that"
            raise RankError(f"{what} failed: {problem}") from error
    found, sent = told[0]
    if raised is not None or sent is not None:
        raise raised or sent
    return found  # type: ignore[no-any-return]


def _sendable(what: str, error: BaseException) -> BaseException:
    """The error, without what it holds; a `RankError` where it cannot be pickled."""
    try:
        if isinstance(error, Exception):
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return error
    except Exception:  # anybody's exception
        pass
    return RankError(f"{what} failed on rank 0: {type(error).__name__}: {error}")
