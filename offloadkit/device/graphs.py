"""Work that is captured once and replayed: CUDA graphs; on the CPU, functions that run again.

All graphs of a pool share memory. Captured work may keep tensors alive for other work, by a reference in Python. All
other memory of a graph, its results included, is valid until the next capture or replay of any graph of the pool.
"""

from __future__ import annotations

import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, Protocol

import torch

from offloadkit.device.process_memory import restart_peaks
from offloadkit.device.streams import own_stream
from offloadkit.facts.fitted import GRAPHS_DRIVER_BYTES
from offloadkit.facts.starting import collector_off

Results = Sequence[torch.Tensor | None]
Work = Callable[[], Results]


class Graph(Protocol):
    """Captured work. It reads and writes the same memory in every replay.

    Attributes:
        results: what the work returned.
        kept_bytes: VRAM of the pool that the work keeps for other work.
    """

    results: Results
    kept_bytes: int

    def replay(self) -> None:
        """Do the work again, with the present random state."""


class Pool(Protocol):
    """Memory that graphs share.

    Attributes:
        works_once: a replay does not call the work again, so kept tensors are needed no longer than by captures.
        num_bytes: VRAM reserved for it.
        is_broken: a capture, of any pool, failed in a way that makes random numbers of earlier graphs wrong.
    """

    works_once: bool
    num_bytes: int

    @property
    def is_broken(self) -> bool: ...

    def capture(self, work: Work) -> Graph:
        """Capture `work`, without effects on its results and random states until the graph is replayed.

        Raises:
            torch.OutOfMemoryError: the VRAM does not suffice.
            RuntimeError: the work cannot be captured, because it waits for the device, for example.
        """

    def random_state(self) -> Any:
        """The random state of the next replay."""

    def random_from(self, state: Any) -> Any:
        """Context manager: replays start with this random state."""

    def watch_eager(self) -> None:
        """Eager work begins, which graphs will do later."""

    def in_eager(self) -> AbstractContextManager[None]:
        """Context of a part of that work; other work comes before and after."""

    def begins_backward(self) -> None:
        """The first part of the backward of that work begins; other work's may have come before."""

    def end_of_eager(self) -> None:
        """It has ended."""

    def begin(self) -> None:
        """Called before the first capture, after eager work."""

    def missing_bytes(self, other_bytes: int, kept_bytes: int | None, scale: float) -> int:
        """VRAM that training needs beyond what torch may have; 0 if it fits.

        Args:
            other_bytes: memory of the graphs outside the pool.
            kept_bytes: memory that the eager work allocates and that the graphs have in the pool. None: blocks also run
                eagerly while graphs exist, so both count in full.
            scale: the work is larger than the eager work by this factor.
        """

    def dropped(self) -> None:
        """Called when graphs are dropped, by the thread that queued their last replays."""

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
        self.num_bytes, self.is_broken, self.works_once = 0, False, False

    def watch_eager(self) -> None:
        pass

    def in_eager(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begins_backward(self) -> None:
        pass

    def end_of_eager(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def missing_bytes(self, other_bytes: int, kept_bytes: int | None, scale: float) -> int:
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

    def dropped(self) -> None:
        pass

    def free(self) -> None:
        self.newest = None


class _Function:
    kept_bytes = 0

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

    _num_failures: ClassVar[int] = 0
    """Captures that CUDA ended. Each exchanges the generator's state, which graphs of other pools had too."""

    def __init__(self, device: torch.device) -> None:
        untyped: Any = torch.cuda
        self._device, self._generator = device, untyped.default_generators[device.index]
        self._stream, self._handle = own_stream(self, device), untyped.graph_pool_handle()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._eager_bytes = self._outside_bytes = self._bytes_before = self.num_bytes = 0
        self._is_outside = False
        self.works_once, self._failures_before = True, CudaPool._num_failures

    @property
    def is_broken(self) -> bool:
        return self._failures_before != CudaPool._num_failures

    def watch_eager(self) -> None:
        restart_peaks(self._device)
        self._is_outside = True

    @contextmanager
    def in_eager(self) -> Iterator[None]:
        self._note_outside()
        yield
        self.end_of_eager()
        restart_peaks(self._device)

    def begins_backward(self) -> None:
        if self._is_outside:
            self._is_outside = False
            self._note_outside()

    def _note_outside(self) -> None:
        self._outside_bytes = max(self._outside_bytes, torch.cuda.max_memory_allocated(self._device))
        self.end_of_eager()

    def end_of_eager(self) -> None:
        self._eager_bytes = max(self._eager_bytes, torch.cuda.max_memory_allocated(self._device))

    def begin(self) -> None:
        self.end_of_eager()  # if no backward followed
        self._bytes_before, self.num_bytes = torch.cuda.memory_allocated(self._device), 0
        torch.cuda.empty_cache()  # of the eager work's activations: the pool holds them from now on

    def capture(self, work: Work) -> Graph:
        try:
            return self._capture(work)
        except torch.OutOfMemoryError as error:
            if self.is_broken:
                raise
            traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()  # a capture itself cannot
        return self._capture(work)

    def _capture(self, work: Work) -> Graph:
        graph: Any = torch.cuda.CUDAGraph()
        _clear_workspaces()  # so that cuBLAS takes its workspace from this pool
        before, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        replays = torch.cuda.current_stream(self._device)
        # A capture begins with writes to the seed and offset on the GPU that all graphs of the generator read.
        self._stream.wait_stream(replays)
        try:
            with torch.cuda.stream(self._stream), collector_off():
                if not self._graphs:
                    untyped: Any = torch.cuda
                    self._handle = untyped.graph_pool_handle()  # torch deletes a pool with its last graph
                owned = self._captured(graph, work)
                results = [None if each is None else without_owning(each) for each in owned]
                del owned
        finally:
            replays.wait_stream(self._stream)
            self.num_bytes += torch.cuda.memory_reserved(self._device) - before
            _clear_workspaces()
        self._graphs.add(graph)
        return _CudaGraph(graph, results, max(0, torch.cuda.memory_allocated(self._device) - allocated))

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
        CudaPool._num_failures += 1
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

    def missing_bytes(self, other_bytes: int, kept_bytes: int | None, scale: float) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._device) * total)
        allowed = min(allowed, torch.cuda.memory_reserved(self._device) + free)
        eager = self._scaled(self._eager_bytes, scale)
        if kept_bytes is None:
            eager += self.num_bytes
        else:  # the graphs use the pool in place of the eager work's memory; other work's memory comes on top
            outside = self._scaled((self._outside_bytes or self._eager_bytes) - kept_bytes, scale)
            eager = max(eager, outside + self.num_bytes)
        return max(0, eager + other_bytes + GRAPHS_DRIVER_BYTES - allowed)

    def _scaled(self, peak_bytes: int, scale: float) -> int:
        return peak_bytes + int((scale - 1) * max(0, peak_bytes - self._bytes_before))

    def dropped(self) -> None:
        # Before expandable segments leave VRAM, torch waits for the stream of their allocation alone.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def free(self) -> None:
        self._eager_bytes = self._outside_bytes = 0
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
    def __init__(self, graph: Any, results: Results, kept_bytes: int) -> None:
        self.results, self.replay, self.kept_bytes = results, graph.replay, kept_bytes


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
