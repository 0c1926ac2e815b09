"""Finds races between streams and threads without a GPU, by the happens-before order of memory accesses.

While `Watched.running()` is open, streams do their work immediately, so a missing wait changes no number. Every
memory access is logged with its actor (a stream or a thread) and the actor's vector clock. Recording and waiting for
events, queues and thread events transfer clocks. Two accesses race if they overlap, at least one of them writes, and
neither clock includes the other access. It does not matter whether the accesses coincided in time.

torch's operations on the main thread belong to the compute stream, unless all their memory is pinned RAM. An operation
on both is a copy that blocks the host. Allocating or freeing a tensor in device memory counts as a write by the
compute stream, because the caching allocator reuses memory in that stream's order.
"""

from __future__ import annotations

import ast
import concurrent.futures
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import offloadkit
from offloadkit.device import host_memory, streams
from offloadkit.device.streams import Event, Pairs, Stream
from offloadkit.kernels import cpu
from offloadkit.offload import (
    gradient_buffers,
    gradients,
    layer_gradient,
    matrix_exchange,
    matrix_steps,
    shards,
    state_ring,
    states,
    update,
)
from tests.distributed.mirrored import MirroredRanks

PACKAGE = Path(offloadkit.__file__).parent
_MOST_QUERIES = 8
"""A pending event turns done after this number of queries, so that polling ends."""

Clock = dict[int, int]


class Access(NamedTuple):
    """Bytes first .. end of memory, accessed by an actor at its `time` with this `clock`."""

    first: int
    end: int
    writes: bool
    actor: int
    time: int
    clock: Clock
    where: str


class Actor:
    """A stream or a thread with its vector clock: the newest known time of each actor."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: Clock = {number: 1}

    def learn(self, clock: Clock) -> None:
        own = self.clock
        if any(own.get(actor, 0) < time for actor, time in clock.items()):
            self.clock = own | {actor: time for actor, time in clock.items() if own.get(actor, 0) < time}

    def tell(self) -> Clock:
        """A copy of the clock for another actor; later actions are not included."""
        told = self.clock
        self.clock = told | {self.number: told[self.number] + 1}
        return told


class _Event(Event):
    def __init__(self, watched: Watched, clock: Clock, of: int) -> None:
        super().__init__()
        self._watched, self.clock, self._of = watched, clock, of
        self._num_queries = 0

    def done(self) -> bool:
        with self._watched.lock:
            self._num_queries += 1
            host = self._watched.host()
            known = host.clock.get(self._of, 0) >= self.clock[self._of]
            if not known and self._num_queries > _MOST_QUERIES:
                host.learn(self.clock)
            return known or self._num_queries > _MOST_QUERIES

    def synchronize(self) -> None:
        with self._watched.lock:
            self._watched.host().learn(self.clock)


class _Stream(Stream):
    def __init__(self, watched: Watched, name: str) -> None:
        self._watched, self.actor = watched, watched.actor(name)

    def asked(self) -> Actor:
        """The stream's next work starts after the calling thread's previous work."""
        self.actor.learn(self._watched.host().tell())
        return self.actor

    def copy(self, pairs: Pairs) -> None:
        with self._watched.lock:
            actor = self.asked()
            for into, source in pairs:
                self._watched.note(actor, [source], [into])
        super().copy(pairs)

    def run(self, work: Callable[[], object]) -> None:
        self._watched.current.stream = self
        try:
            work()
        finally:
            self._watched.current.stream = None

    def record(self, timing: bool = False) -> Event:
        with self._watched.lock:
            return _Event(self._watched, self.asked().tell(), self.actor.number)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        with self._watched.lock:
            self.asked().learn(event.clock)

    def synchronize(self) -> None:
        self.record().synchronize()


class _Operations(TorchDispatchMode):
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {name.name: value for name, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        reads, writes = list[torch.Tensor](), list[torch.Tensor]()
        for argument in func._schema.arguments:
            into = argument.alias_info is not None and argument.alias_info.is_write
            (writes if into else reads).extend(_tensors(given.get(argument.name)))
        if any(returned.alias_info is not None for returned in func._schema.returns) and not writes:
            return result  # a view
        if func._schema.name.endswith("_like") or "::new_" in func._schema.name:
            reads = []  # reads only the shape
        with self._watched.lock:
            self._watched.torch_did(reads, writes, list(_tensors(result)), blocks="_local_scalar" in str(func))
        return result


class Watched:
    """Simulated CPU streams whose memory accesses are logged.

    Attributes:
        log: every access so far.
    """

    def __init__(self) -> None:
        self.lock, self.current = threading.RLock(), threading.local()
        self.log: list[Access] = []
        self._actors: list[Actor] = []
        self._hosts: dict[int, Actor] = {}
        self._slabs: list[tuple[int, int]] = []
        self._on_streams: set[int] = set()
        self._compute = _Stream(self, "compute")
        self._main = threading.get_ident()

    def actor(self, name: str) -> Actor:
        self._actors.append(Actor(len(self._actors), name))
        return self._actors[-1]

    def host(self) -> Actor:
        """The calling thread."""
        thread = threading.get_ident()
        if thread not in self._hosts:
            self._hosts[thread] = self.actor("main" if thread == self._main else f"thread {len(self._hosts)}")
        return self._hosts[thread]

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        return _Stream(self, f"stream {len(self._actors)}")

    def compute(self, device: torch.device) -> Stream:
        return self._compute

    # ---- accesses ----------------------------------------------------------------------------------------------

    def note(self, actor: Actor, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        for tensors, into in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._note(actor, *_bytes(tensor), into)
                    if actor is not self._compute.actor and tensor.untyped_storage().data_ptr() not in self._on_streams:
                        self._watch_storage(tensor)

    def _note(self, actor: Actor, first: int, end: int, writes: bool) -> None:
        clock = actor.clock
        self.log.append(Access(first, end, writes, actor.number, clock[actor.number], clock, _caller()))

    def _watch_storage(self, tensor: torch.Tensor) -> None:
        """Freeing device memory that a stream used counts as a write by the compute stream."""
        storage = tensor.untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if not self._in_ram(tensor):
            self._on_streams.add(first)

            def freed() -> None:
                with self.lock:
                    self._on_streams.discard(first)
                    self._note(self._compute.asked(), first, end, True)

            weakref.finalize(storage, freed).atexit = False

    def _in_ram(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(first <= address < end for first, end in self._slabs)

    def torch_did(
        self, reads: list[torch.Tensor], writes: list[torch.Tensor], made: list[torch.Tensor], blocks: bool
    ) -> None:
        touched = {self._in_ram(tensor) for tensor in (*reads, *writes) if tensor.numel()}
        on_host = touched == {True} or (threading.get_ident() != self._main and self._stream_of_kernel() is None)
        actor = self.host() if on_host else (self._stream_of_kernel() or self._compute).asked()
        self.note(actor, reads, [*writes, *(() if on_host else made)])
        if len(touched) == 2 or blocks:
            self.host().learn(actor.tell())

    def _stream_of_kernel(self) -> _Stream | None:
        stream: _Stream | None = getattr(self.current, "stream", None)
        return stream

    def _kernel(self, real: Callable[..., Any], split: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
        """Wrap the kernel `real`; `split` separates its arguments into (read, written)."""

        def watched(*args: Any, **options: Any) -> Any:
            reads, writes = split(*args)
            with self.lock:
                self.torch_did(list(_tensors(reads)), list(_tensors(writes)), [], blocks=False)
            with _disable_current_modes():
                return real(*args, **options)

        return watched

    # ---- transfer of clocks --------------------------------------------------------------------------------------

    def _tells(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that it publishes the caller's clock on the object."""

        def tells(it: Any, *args: Any) -> Any:
            with self.lock:
                it.__dict__.setdefault("told", []).append(self.host().tell())
            return real(it, *args)

        return tells

    def _learns(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def learns(it: Any, *args: Any, **options: Any) -> Any:
            result = real(it, *args, **options)
            if result is not False:
                with self.lock:
                    for clock in it.__dict__.get("told", ()):
                        self.host().learn(clock)
            return result

        return learns

    def _queue(self) -> type[Any]:
        watched = self

        class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
            def put(self, item: Any, *args: Any) -> None:
                with watched.lock:
                    super().put((item, watched.host().tell()), *args)

            def get(self, *args: Any, **options: Any) -> Any:
                item, clock = super().get(*args, **options)
                with watched.lock:
                    watched.host().learn(clock)
                return item

            def get_nowait(self) -> Any:
                return self.get(block=False)

        return Queue

    def _slab(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*args: Any) -> Any:
            slabs = real(*args)
            for slab in slabs:
                ends = slab.address, slab.address + slab.num_bytes
                self._slabs.append(ends)
                weakref.finalize(slab.buffer, self._slab_freed, *ends).atexit = False
            return slabs

        return allocate

    def _slab_freed(self, first: int, end: int) -> None:
        with self.lock:
            self._slabs.remove((first, end))
            self._note(self.host(), first, end, True)

    @contextmanager
    def running(self) -> Iterator[Watched]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(streams.backends, "cpu", self)
            for owner, name in ((threading.Event, "set"), (concurrent.futures.Future, "set_result")):
                patch.setattr(owner, name, self._tells(getattr(owner, name)))
            for owner, names in (
                (threading.Event, ("wait", "is_set")),
                (concurrent.futures.Future, ("result", "done")),
            ):
                for name in names:
                    patch.setattr(owner, name, self._learns(getattr(owner, name)))
            patch.setattr(queue, "SimpleQueue", self._queue())
            for name in ("allocate", "allocate_shared"):
                patch.setattr(host_memory, name, self._slab(getattr(host_memory, name)))
            for module in (states, state_ring, matrix_steps):

                def split(
                    state: Any, gradient: Any, segments: Any, scale: float, workspace: Any = ()
                ) -> tuple[Any, Any]:
                    return gradient, (state, workspace)

                step = self._kernel(module.optimizer_step, split)
                patch.setattr(module, "optimizer_step", step)
            for name, split in _STEPS_OF_MATRICES.items():
                patch.setattr(matrix_exchange, name, self._kernel(getattr(matrix_exchange, name), split))
            exchange = self._kernel(MirroredRanks.exchange_parts, lambda ranks, into, sent, *_: (sent, into))
            patch.setattr(MirroredRanks, "exchange_parts", exchange)
            for module in (gradient_buffers, gradients, layer_gradient, shards):
                sums = self._kernel(module.block_sums, lambda gradient, blocks, out: (gradient, out))
                patch.setattr(module, "block_sums", sums)
            patch.setattr(cpu, "accumulate", self._kernel(cpu.accumulate, lambda into, source: (source, into)))
            of_layers = lambda new, *_: ([state.gradient.sums for state, _, _ in new.layers], ())  # noqa: E731
            patch.setattr(update, "gradient_norm", self._kernel(update.gradient_norm, of_layers))
            with _Operations(self):
                yield self

    # ---- races ---------------------------------------------------------------------------------------------------

    def races(self) -> set[tuple[str, str]]:
        """Pairs of functions with racing accesses, the earlier access first."""
        shared = sorted({edge for a in self.log if a.actor != self._compute.actor.number for edge in (a.first, a.end)})
        borders = np.array(shared)
        last: dict[int, Access] = {}
        readers: dict[int, dict[int, Access]] = {}
        found: set[tuple[str, str]] = set()
        for access in self.log:
            begin = max(0, int(np.searchsorted(borders, access.first, "right")) - 1)
            for piece in range(begin, int(np.searchsorted(borders, access.end, "left"))):
                before = [last[piece]] if piece in last else []
                if access.writes:
                    before += readers.pop(piece, {}).values()
                    last[piece] = access
                else:
                    readers.setdefault(piece, {})[access.actor] = access
                for other in before:
                    if access.clock.get(other.actor, 0) < other.time:
                        found.add((self._said(other), self._said(access)))
        return found

    def _said(self, access: Access) -> str:
        return f"{self._actors[access.actor].name} {'writes' if access.writes else 'reads'} in {access.where}"


_STEPS_OF_MATRICES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "write_update": lambda state, gradient, segment, scale, into, workspace: (
        gradient,
        (state["momentum_buffer"], into, workspace),
    ),
    "orthogonalize": lambda update, matrix, scalars, workspace: ((), (update, workspace)),
    "apply_update": lambda state, update, segment, workspace: (update, (state.weights, state.remainder, workspace)),
}
"""(read, written) of the arguments."""


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _caller() -> str:
    """The innermost function of a module that has named waits."""
    files = {str(path) for path in _modules()}
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path in files:
            return f"{Path(path).stem}.{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the model"


# ---- waits, removed one at a time --------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A statement that waits; in a loop over events, the wait for one event.

    A comment on the line of the statement or event may name it: `stream.wait(event)  # wait: NAME`. Tests then find it
    wherever the code moves.
    """

    path: Path
    function: str
    words: str
    event: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{self.function}: {self.words} {self.event}".rstrip()


@cache
def _modules() -> tuple[Path, ...]:
    """Modules of all folders with a named wait."""
    named = {path.parent for path in PACKAGE.rglob("*.py") if "  # wait: " in path.read_text()}
    return tuple(sorted(path for folder in named for path in folder.glob("*.py")))


def waits() -> list[Wait]:
    """All statements that call wait, delay or synchronize."""
    return [wait for path in _modules() for wait, _ in _waits(path)[1]]


def _waits(path: Path) -> tuple[ast.Module, list[tuple[Wait, ast.AST]]]:
    """The module's syntax tree, and each wait with the node to replace by None."""
    text = path.read_text()
    module, lines, found = ast.parse(text), text.splitlines(), list[tuple[Wait, ast.AST]]()

    def name_of(node: ast.AST) -> str:
        return lines[node.end_lineno - 1].partition("  # wait: ")[2]  # type: ignore[attr-defined]

    def look(node: ast.AST, name: str, events: list[ast.expr]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                look(child, f"{name}.{child.name}".lstrip("."), [])
            elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                call = child.value.func
                if isinstance(call, ast.Attribute) and call.attr in ("wait", "delay", "synchronize"):
                    wait = Wait(path, name, ast.unparse(child), name=name_of(child))
                    for event in events:
                        found.append((wait._replace(event=ast.unparse(event), name=name_of(event)), event))
                    if not events:
                        found.append((wait, child.value))
            else:
                of_tuple = isinstance(child, ast.For) and isinstance(child.iter, ast.Tuple)
                look(child, name, child.iter.elts if of_tuple else events)  # type: ignore[attr-defined]

    look(module, "", [])
    return module, found


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """While it is open, the function runs without this wait."""
    module, found = _waits(wait.path)
    (taken_out,) = [node for each, node in found if each == wait]

    class Without(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return ast.copy_location(ast.Constant(None), node) if node is taken_out else self.generic_visit(node)

    codes: dict[str, CodeType] = {}

    def collect(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                codes[inner.co_qualname] = inner
                collect(inner)

    collect(compile(Without().visit(module), str(wait.path), "exec"))
    names = wait.path.relative_to(PACKAGE.parent).with_suffix("").parts
    function: Any = sys.modules[".".join(names)]
    for part in wait.function.split("."):
        if not isinstance(function, FunctionType):
            function = vars(function)[part]
    before, function.__code__ = function.__code__, codes[function.__qualname__]
    try:
        yield
    finally:
        function.__code__ = before
