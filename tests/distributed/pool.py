"""Processes that run a function as the ranks of a gloo group.

They are started once and survive errors; each run makes a group of the size it needs.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

LIMIT = 60
"""Seconds per run. A rank that takes longer prints all its stacks and exits."""
TIMEOUT = timedelta(seconds=40)
"""Timeout of the process group."""
ON_GPUS = 3
"""Factor for both limits on GPUs, where kernels are compiled and ranks that share a GPU take turns."""


def _serve(rank: int, on_gpus: bool, tasks: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # imported modules: each engine runs a collection, and a pass over them takes longer than most tasks
    num_modules, longer = 0, ON_GPUS if on_gpus else 1
    if on_gpus:
        from benchmarks.ranks import take_gpu

        take_gpu(rank)
    while (task := tasks.recv()) is not None:
        function, size, file, backend, arguments = task
        if len(sys.modules) > num_modules:
            num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        faulthandler.dump_traceback_later(longer * LIMIT, exit=True)
        try:
            store = f"file://{file}"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=longer * TIMEOUT)
            try:
                answer = True, function(**arguments)
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            answer = False, (error, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        tasks.send(answer)


def _context(backend: str) -> BaseContext:
    """Processes fork from a server that has imported the libraries; with CUDA, each process imports them."""
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "transformers.trainer_seq2seq", "datasets"])
    return context


class RankPool:
    def __init__(self, backend: str = "gloo") -> None:
        """backend: of the group; with "nccl" rank r computes on GPU r, or shares a GPU."""
        self._backend = backend
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run `function`, importable by name, on `size` ranks and return its results.

        Raises:
            BaseException: the error of the first rank that failed.
        """
        answers = self.answers(size, function, **arguments)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def answers(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Like `run`, but a failed rank's result is its error."""
        context = _context(self._backend)
        while len(self._ranks) < size:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(len(self._ranks), self._backend == "nccl", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            for _, pipe in self._ranks[:size]:
                pipe.send((function, size, f"{folder}/store", self._backend, arguments))
            answers, lost = [], False
            for _, pipe in self._ranks[:size]:
                try:
                    done, value = pipe.recv() if pipe.poll(ON_GPUS * LIMIT + 10) else (False, None)
                except EOFError:
                    done, value = False, None
                if not done:
                    lost = lost or value is None
                    error, text = value or (RuntimeError("a rank ended, or hung: its stacks are above"), "")
                    error.add_note(text)
                    value = error
                answers.append(value)
        if lost:
            self.close()
        return answers

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks.clear()
