"""Work that is captured once and replayed: CUDA graphs; on the CPU, functions that run again.

All graphs of a pool share memory. Captured work may keep tensors alive for other work, by a reference in Python. All
other memory of a graph, its results included, is valid until the next capture or replay of any graph of the pool.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol

import torch

from offloadkit.device.process_memory import peak_reserved_bytes
from offloadkit.facts.starting import collector_off

DRIVER_BYTES = 256 << 20
"""At most, what the driver takes for graphs."""

Results = Sequence[torch.Tensor | None]
Work = Callable[[], Results]


class Graph(Protocol):
    """Captured work. It reads and writes the same memory in every replay.

    Attributes:
        results: what the work returned.
    """

    results: Results

    def replay(self) -> None:
        """Do the work again, with the present random state."""


class Pool(Protocol):
    """Memory that graphs share.

    Attributes:
        num_bytes: VRAM reserved for it.
        is_broken: a capture failed in a way that makes random numbers of earlier graphs wrong.
    """

    num_bytes: int
    is_broken: bool

    def capture(self, work: Work) -> Graph:
        """Capture `work`, without effects on its results and random states until the graph is replayed.

        Raises:
            RuntimeError: the work cannot be captured, because it waits for the device, for example.
        """

    def random_state(self) -> Any:
        """The random state of the next replay."""

    def random_from(self, state: Any) -> Any:
        """Context manager: replays start with this random state."""

    def begin(self) -> None:
        """Called before the first capture, after eager work: the memory of both must fit."""

    def missing_bytes(self, other_bytes: int) -> int:
        """VRAM that eager work, the pool and `other_bytes` need beyond what torch may have; 0 if they fit."""

    def free(self) -> None:
        """Free the memory of dropped graphs."""


class _Draws(ABC):
    @abstractmethod
    def random_state(self) -> Any: ...

    @abstractmethod
    def _set_random(self, state: Any) -> None: ...

    @contextmanager
    def random_from(self, state: Any) -> Iterator[None]:
        now = self.random_state()
        self._set_random(state)
        try:
            yield
        finally:
            self._set_random(now)


class RunAgain(_Draws):
    """The pool of the CPU: a replay runs the work again, into the memory of the first results."""

    fill_with_nan: ClassVar[bool] = False
    """For tests: the results of a graph become NaN as soon as another graph is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.newest: _Function | None = None
        self.num_bytes, self.is_broken = 0, False

    def begin(self) -> None:
        pass

    def missing_bytes(self, other_bytes: int) -> int:
        return 0

    def capture(self, work: Work) -> Graph:
        before = torch.default_generator.get_state()
        try:
            return _Function(work, self)
        finally:
            torch.default_generator.set_state(before)

    def random_state(self) -> Any:
        return torch.default_generator.get_state()

    def _set_random(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def free(self) -> None:
        self.newest = None


class _Function:
    def __init__(self, work: Work, pool: RunAgain) -> None:
        self._work, self._pool = work, pool
        self.results: Results = [None if each is None else each.detach().clone() for each in work()]

    def replay(self) -> None:
        before, self._pool.newest = self._pool.newest, self
        if RunAgain.fill_with_nan and before is not None and before is not self:
            for result in before.results:
                if result is not None and result.is_floating_point():
                    result.fill_(torch.nan)
        for into, source in zip(self.results, self._work(), strict=True):
            if into is not None and source is not None:
                into.copy_(source.detach())


class CudaPool(_Draws):
    """Graphs are captured on a stream of their own, in the mode that forbids unsafe calls to this thread alone: the
    stepping thread works on.
    """

    def __init__(self, device: torch.device) -> None:
        untyped: Any = torch.cuda
        self._device, self._generator = device, untyped.default_generators[device.index]
        self._stream, self._handle = untyped.Stream(device), untyped.graph_pool_handle()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._eager_bytes = self.num_bytes = 0
        self.is_broken = False

    def begin(self) -> None:
        self._eager_bytes, self.num_bytes = peak_reserved_bytes(self._device), 0
        torch.cuda.empty_cache()

    def capture(self, work: Work) -> Graph:
        graph: Any = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self._device)
        _clear_workspaces()  # so that cuBLAS takes its workspace from this pool
        try:
            with torch.cuda.stream(self._stream), collector_off():
                if not self._graphs:
                    untyped: Any = torch.cuda
                    self._handle = untyped.graph_pool_handle()  # torch deletes a pool with its last graph
                results = self._captured(graph, work)
        finally:
            self.num_bytes += torch.cuda.memory_reserved(self._device) - before
            _clear_workspaces()
        self._graphs.add(graph)
        return _CudaGraph(graph, [None if each is None else without_owning(each) for each in results])

    def _captured(self, graph: Any, work: Work) -> Results:
        try:
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            results = work()
            graph.capture_end()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # CUDA has ended the capture
                self._clean_up()
            raise
        return results

    def _clean_up(self) -> None:
        """After a capture that torch could not end: allocate outside the pool again, and draw random numbers again."""
        untyped: Any = torch._C
        self.is_broken = True
        with suppress(RuntimeError):  # the pool was not in use yet
            untyped._cuda_endAllocateToPool(self._device.index, self._handle)
        self._generator.graphsafe_set_state(self._generator.clone_state())

    def random_state(self) -> Any:
        return self._generator.initial_seed(), self._generator.get_offset()

    def _set_random(self, state: tuple[int, int]) -> None:
        seed, offset = state
        if self._generator.initial_seed() != seed:
            self._generator.manual_seed(seed)
        self._generator.set_offset(offset)

    def missing_bytes(self, other_bytes: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        allowed = min(allowed, torch.cuda.memory_reserved(self._device) + free)
        return max(0, self._eager_bytes + self.num_bytes + other_bytes + DRIVER_BYTES - allowed)

    def free(self) -> None:
        torch.cuda.empty_cache()


class CudaPoolOfStep(CudaPool):
    """Graphs without random numbers, which one thread may replay while another thread draws, captures or replays.

    They take a copy of the generator's state. Otherwise a replay would write the seed that the graphs of the other
    thread read, and torch refuses a replay while another graph of the same generator is captured.
    """

    def capture(self, work: Work) -> Graph:
        state = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._generator.clone_state())
        try:
            return super().capture(work)
        finally:
            self._generator.graphsafe_set_state(state)


class _CudaGraph:
    def __init__(self, graph: Any, results: Results) -> None:
        self.results, self.replay = results, graph.replay


def _clear_workspaces() -> None:
    untyped: Any = torch._C
    untyped._cuda_clearCublasWorkspaces()


def without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it alive."""
    untyped: Any = torch._C
    storage, start = tensor.untyped_storage(), tensor.storage_offset()
    same = untyped._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(same, start, tensor.shape, tensor.stride())


pools: dict[str, Callable[[torch.device], Pool]] = {"cpu": RunAgain, "cuda": CudaPool}
pools_of_step: dict[str, Callable[[torch.device], Pool]] = {"cuda": CudaPoolOfStep}
"""Pools for another thread than the main thread. The CPU needs none."""
