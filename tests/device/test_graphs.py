"""Captures of CUDA graphs are ordered with replays. Here a stream is a list of work, and a drawn stream works next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.device.graphs import CudaPool


class Stream:
    """Work that has not run yet, and whether it may begin."""

    def __init__(self) -> None:
        self.device_index, self.stream_id = 0, id(self)
        self.work, self.num_done = list[tuple[Callable[[], bool], Callable[[], object]]](), 0

    def do(self, work: Callable[[], object]) -> None:
        self.work.append((lambda: True, work))

    def wait_stream(self, other: Stream) -> None:
        reached = len(other.work)
        self.work.append((lambda: other.num_done >= reached, lambda: None))

    def may_work(self) -> bool:
        return self.num_done < len(self.work) and self.work[self.num_done][0]()

    def go_on(self) -> None:
        self.num_done += 1
        self.work[self.num_done - 1][1]()


class Gpu:
    """The streams, and the offset of random numbers that all graphs of torch's generator read (before torch 2.13).

    Attributes:
        read: the offsets that replays have read.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.offset, self.next_offset = -1, 8
        self.read = list[int]()
        self.current = Stream()
        self.streams = [self.current]

    def new_stream(self, device: torch.device, priority: int) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def set_offset(self, offset: int) -> None:
        self.current.do(lambda: setattr(self, "offset", offset))

    def run(self) -> None:
        """Do all work."""
        while may_work := [stream for stream in self.streams if stream.may_work()]:
            self._draw.choice(may_work).go_on()

    def empty_cache(self) -> None:
        """As torch does before it unmaps a segment, wait for the stream in which graphs have allocated memory."""
        _, captures = self.streams
        while captures.num_done < len(captures.work):
            self._draw.choice([stream for stream in self.streams if stream.may_work()]).go_on()


class Graph:
    """A graph that notes the offset of its random numbers when it runs."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def capture_begin(self, **_: Any) -> None:
        self.gpu.set_offset(0)

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.gpu.set_offset(self.gpu.next_offset)
        self.gpu.next_offset += 4
        self.gpu.current.do(lambda: self.gpu.read.append(self.gpu.offset))


@pytest.fixture(params=range(20))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(request.param)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    for name, value in {
        "Stream": gpu.new_stream,
        "CUDAGraph": lambda: Graph(gpu),
        "stream": gpu.stream,
        "current_stream": lambda device: gpu.current,
        "graph_pool_handle": lambda: (0, 1),
        "default_generators": [SimpleNamespace()],
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "empty_cache": gpu.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return gpu


def test_a_capture_leaves_the_random_numbers_of_replays_alone(gpu: Gpu) -> None:
    """Python captures blocks long before the GPU has run the blocks before, or even the start of this capture."""
    pool = CudaPool(torch.device("cuda", 0))
    for _ in range(3):
        pool.capture(tuple).replay()
    gpu.run()
    assert gpu.read == [8, 12, 16]


def test_memory_of_graphs_leaves_vram_after_their_replays(gpu: Gpu) -> None:
    """An evaluation drops graphs while the GPU still runs the backward of the step before. Or graphs are dropped after
    their last backward, and torch itself empties its cache.
    """
    pool = CudaPool(torch.device("cuda", 0))
    pool.capture(tuple).replay()
    pool.dropped()
    pool.free()
    assert gpu.read == [8]
