"""Repeated blocks as graphs that are captured once: Python launches a block's forward or backward by one call.

A block that is called with the same kinds of arguments again, after a backward, is captured; `_Facts`, `ForwardCode`
and the arguments say whether a captured graph still computes what the block would. Otherwise the block runs eagerly,
and is captured again if it can be. Two graphs belong to a block:

| activations | forward | backward |
|---|---|---|
| kept | forward; saved tensors stay alive | `autograd.grad` |
| recomputed | forward; saved tensors are dropped | forward and `autograd.grad` |

Between graphs, inputs are copied into *static* memory, and outputs and gradients of inputs are cloned. The engine gets
a layer's gradients at once, without autograd, where no parameter can have another gradient; the same operation clones
gradients of inputs and, where they go from block to block, writes the static memory of the next backward. Streamed
weights are copied too, because a block's place in the ring changes. An input that many blocks share, such as an
encoder's output, is also an output of each block that uses it, and the next block gets that one. So backward adds the
uses' gradients one by one, in the order of eager blocks. A block whose input is used after it too, as by an auxiliary
loss, runs eagerly (`use_order.py`).

Kept activations stay in the pool from capture on. A *generation* is what is captured until no forward waits for its
backward; the next generation reuses its memory. So the pool holds the activations of the largest kind of batch, and
graphs of several generations do not run before one backward.
"""

from __future__ import annotations

import gc
import logging
import math
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, zip_longest
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offloadkit.device.graphs import Graph, Results, Work, pools, without_owning
from offloadkit.device.host_random import HostRandom
from offloadkit.errors import EngineStateError
from offloadkit.facts.units import format_bytes
from offloadkit.offload.dict_versions import UnchangedContainers
from offloadkit.offload.external_writes import Watched
from offloadkit.offload.forward_code import ForwardCode
from offloadkit.offload.layers import forward_of, hooks_of, replace_forwards
from offloadkit.offload.use_order import Summed, UseOrder, edges, next_node
from offloadkit.offload.weights import LayerWeights

logger = logging.getLogger(__name__)

MOST_KINDS = 8
"""A block is captured for at most this many kinds of arguments, such as lengths of rows."""
MOST_CONTENTS = 2000
"""Most values in the dicts, lists and objects that a block's attributes hold; they are compared in every call."""
FIRST_RUNS = 128
"""Micro-batches in which blocks run eagerly, after a GPU was full with new lengths beside graphs of other lengths."""
MOST_CHANGES = 3
"""A block whose attributes or code changed this often, and whose graphs ran less than `PAYS` times in between, runs
eagerly for `RARELY` calls.
"""
PAYS = 16
"""Steps after which graphs have saved the time of their captures. On an H200: T5-base 8, T5-3B in 24 GiB 11 to 24."""
RARELY = 128
"""Graphs of blocks that ran in another order are captured anew `MOST_CHANGES` times, then once in so many forwards: a
changed block is captured after the blocks that follow it.
"""


Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source)."""
Take = Callable[[LayerWeights, list[torch.Tensor], Copies], bool]
"""`Gradients.take`."""


class Recomputed(NamedTuple):
    """How a block is recomputed in backward."""

    run: Callable[..., Any]
    """`run(forward, *args, **kwargs)` runs `forward`, which backward runs again."""
    saves: Callable[[Any], AbstractContextManager[None]]
    """Context manager for saving the block's inputs; its argument is the first input."""
    why_eager: str | None
    """Why the block cannot be captured, or None."""


class _EagerlyError(Exception):
    """The block must run eagerly; the message says why."""


class Meta(NamedTuple):
    """The metadata of a tensor that kernels may depend on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class _At(NamedTuple):
    """The place of a tensor in a structure of arguments or outputs."""

    place: int


_at = cache(_At)


class _Input(NamedTuple):
    """An output that is the input in this place."""

    place: int


class _Captured(NamedTuple):
    graph: Graph
    number: int
    """In the order of captures."""
    generation: int


class _Backward(NamedTuple):
    captured: _Captured
    places: list[_Static]
    """Of the gradients of outputs, and of inputs that were handed on."""
    before: Mapping[int, _Static]
    """By index of a result: memory of that gradient in the backward of the block before."""


class BlockGraphs:
    """The graphs of a model's repeated blocks.

    Attributes:
        is_open: a forward of the engine is running.
        has_begun: there are graphs, or were.
        is_planned: the plan has VRAM for graphs, or does not know the micro-batch.
        grew: graphs were dropped in this forward, because they need larger static memory.
        pool: the memory of all graphs.
        hooks_of_saved_tensors: those of the engine.
        num_calls, num_graphed: calls of blocks with gradients, and those that ran as graphs.
        num_eager: calls that did not, by reason. First runs of a length have none.
    """

    def __init__(
        self, blocks: Sequence[tuple[str, nn.Module]], device: torch.device, tied: Collection[nn.Module]
    ) -> None:
        """`tied`: modules with hooks that replace a weight while they run."""
        self.device, self.pool, self.is_open = device, pools[device.type](device), False
        self.is_planned = True
        self.weights: dict[nn.Module, Sequence[LayerWeights]] = {}
        self._statics: dict[tuple[str, int, Meta], _Static] = {}
        self._rooms: dict[tuple[str, int], _Room] = {}
        self._largest: dict[tuple[str, int], int] = {}
        self._passed_on: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.take: Take = _takes_nothing
        self._dropped: list[_Entry] = []
        self._blocks = [_Block(self, name, block, tied) for name, block in blocks]
        self.recomputes_in_training_only = False
        self._of_module = {each.module: each for each in self._blocks}
        self._code: ForwardCode | None = None
        self._undo = replace_forwards({each.module: each.forward for each in self._blocks})
        self._num_captures = self._num_disorders = self._num_forwards = self._generation = 0
        self._waiting: list[weakref.ref[_Call]] = []
        self._unsealed: list[_Entry] = []
        self.num_calls = self.num_graphed = 0
        self.num_eager: Counter[str] = Counter()
        self._counted: set[_Block] = set()
        self._kept_bytes, self._scale = 0, 1.0
        self.has_begun = self._is_out_of_order = self._is_watching = self.grew = False
        self._given_up: str | None = None
        self._why_closed = ""
        """Why no block runs as a graph in the rest of this forward."""
        self._num_shortages = self._num_first_runs = self._num_growths = 0
        self.hooks_of_saved_tensors: Any = None
        self.uses = UseOrder(_summed)
        self._num_found = 0

    def arrange(self, weights: Mapping[nn.Module, Sequence[LayerWeights]], take: Take) -> None:
        """The layers of each block, after they were placed or moved. Drops all graphs."""
        self.weights, self.take = dict(weights), take
        for block in self._blocks:
            block.streams = any(layer.is_streamed for layer in weights.get(block.module, ()))
        self.release()

    def recompute(self, blocks: Mapping[nn.Module, Recomputed], *, in_training_only: bool) -> None:
        """Recompute these blocks only. `in_training_only`: only in training mode."""
        self.recomputes_in_training_only = in_training_only and bool(blocks)
        for block in self._blocks:
            block.how = blocks.get(block.module)

    def release(self) -> None:
        """Drop all graphs and their memory. Those whose backward may still come stay until then."""
        for block in self._blocks:
            block.drop()
        self._statics.clear()
        self._rooms.clear()
        self._unsealed.clear()
        self._counted.clear()
        self.uses.clear()
        if self.has_begun:
            self.pool.free()
        self._kept_bytes, self._scale, self._generation, self._code = 0, 1.0, self._generation + 1, None
        self.has_begun = self._is_out_of_order = self._is_watching = False

    def reads_copies(self, module: nn.Module) -> bool:
        """Whether the forward of `module` reads copies of its weights, or calls `use` before it reads them. Other hooks
        of the module might read them before, or after a graph.
        """
        block = self._of_module.get(module)
        return block is not None and block.reads_copies()

    @property
    def gave_up(self) -> bool:
        return self._given_up is not None

    def give_up(self, why: str) -> None:
        """Drop all graphs, and capture no more."""
        if self._given_up is None:
            self._given_up = why
            logger.warning("blocks run eagerly from now on, without CUDA graphs: %s", why)
        self.release()

    def run_first(self, why: str) -> None:
        """Drop all graphs, because a block cannot run eagerly beside them with lengths that are new. For the next
        `FIRST_RUNS` forwards blocks run eagerly, so that most lengths are no longer new when graphs are captured again.
        """
        self._num_shortages += 1
        if self._num_shortages >= MOST_CHANGES:
            self.give_up(why)
        else:
            self._num_first_runs = FIRST_RUNS
            self._close("too little VRAM was free in their forward")

    def _close(self, why: str) -> None:
        """Drop all graphs, and capture no more in this forward."""
        self.is_open, self._why_closed = False, why
        self.release()

    def why_not(self) -> str:
        """Why no block runs as a graph now."""
        if self._given_up is not None:
            return self._given_up
        if not self.is_planned:
            return "the plan has no VRAM for graphs"
        return self._why_closed or "they ran outside of the engine's forward, such as in a recomputation"

    @property
    def runs_first(self) -> bool:
        """Whether blocks run eagerly with all lengths before any is captured."""
        return self._num_first_runs > 0

    def close(self) -> None:
        self._undo()
        self.weights.clear()
        self.take = _takes_nothing
        self.release()
        self._blocks.clear()
        self._of_module.clear()

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """While open, blocks run as graphs."""
        before, num_captures, self.is_open = self.is_open, self._num_captures, self._given_up is None
        self.hooks_of_saved_tensors = _hooks_of_saved_tensors()
        self._num_first_runs = max(0, self._num_first_runs - 1)
        if not any(each.live for each in self._blocks):
            self._num_forwards += 1
            if self._is_out_of_order and (self._num_disorders < MOST_CHANGES or self._num_forwards > RARELY):
                self._num_disorders, self._num_forwards = self._num_disorders + 1, 0
                self.release()
            self._seal()
        if self.is_open and self.is_planned and torch.is_grad_enabled():
            self._check_code()
        for block in self._blocks:
            block.num_calls = 0
        self.uses.begin()
        try:
            yield
        finally:
            self.is_open, self.grew, self._why_closed = before, False, ""
            self._passed_on.clear()
            if self._num_captures > num_captures:
                logger.info("%d graphs of blocks take %.0f MiB of VRAM", self.num_graphs(), self.num_bytes() / 2**20)

    def _check_code(self) -> None:
        """Capture all blocks again if the code of their forwards has changed."""
        if all(block.changes_often for block in self._blocks):
            self._code = None  # it keeps the values that it compares, such as activations in a global list
            return
        if self._code is not None and (changed := self._code.changed()) is not None:
            logger.info("%s changed; blocks are captured again", changed)
            self._change_all()
        if self._code is None:
            modules = [each for block in self._blocks for each in block.module.modules()]
            try:
                self._code = ForwardCode(modules, [block.own_forward for block in self._blocks])
            except Exception as error:  # a global may be an object that cannot be looked at, such as a dead weak proxy
                self.give_up(f"the code of their forwards cannot be compared ({type(error).__name__}: {error})")
                self.is_open = False

    def _change_all(self) -> None:
        """Without its old graphs, the pool has room for new ones."""
        if not self._live_calls():
            self.release()
        for block in self._blocks:
            block.change()

    def change(self, block: _Block) -> None:
        """Capture a block again whose attributes have changed, and with it all blocks if theirs have too."""
        if not block.changes_often and all(each is block or each.has_changed() for each in self._blocks):
            self._change_all()
        else:
            block.change()

    def forget_code(self) -> None:
        """A block has changed: the next forward looks for its code again."""
        self._code = None

    def _seal(self) -> None:
        """Later captures may use the memory of the activations that graphs keep."""
        if self._unsealed:
            if self.pool.works_once:
                for entry in self._unsealed:
                    entry.seal()
            self._unsealed.clear()
            self._generation += 1

    def watch_eager(self) -> AbstractContextManager[None]:
        """Context of a block that runs eagerly and will be captured: its memory shows what training needs."""
        if not (self.has_begun or self._is_watching):
            self._is_watching = True
            self.pool.watch_eager()
        return self.pool.in_eager() if self._is_watching else nullcontext()

    def watch_backward(self, outputs: Any) -> None:
        """The backward of the last block that ran eagerly begins with the gradient of its outputs."""
        tensors = (each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor) and each.requires_grad)
        output: Any = next(tensors, None)
        if output is not None:
            output.register_hook(self._begins_eager_backward)

    def _begins_eager_backward(self, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            self.give_up(_TWICE)
        elif self._is_watching:
            self.pool.begins_backward()

    def begins_backward(self, loss: torch.Tensor) -> None:
        """From the next call on, blocks run eagerly whose graphs would add the gradients of `loss` in another order."""
        found: dict[_Block, bool] = self.uses.used_after(loss)
        for block in found:
            block.run_eagerly()
        self._num_found += any(found.values())
        if self._num_found >= MOST_CHANGES:
            self.give_up("losses use inputs of other blocks again and again")

    def end_of_backward(self) -> None:
        """Release the inputs of this micro-batch."""
        if self._is_watching and not self.has_begun:
            self.pool.end_of_eager()
        self._is_watching = False
        for block in self._blocks:
            block.ran_eagerly = block.adds = False
        for room in self._rooms.values():
            room.turn.present = None
        if self._dropped:
            self.drop(())

    def forget_calls(self) -> bool:
        """No backward follows the forwards so far. Returns whether there are graphs, or were until these forwards."""
        has_memory = bool(self._dropped or self.num_graphs())
        for call in self._live_calls():
            call.end()
        self.end_of_backward()
        return has_memory

    def drop(self, entries: Iterable[_Entry]) -> None:
        """Free the memory of entries, now or at the end of the backward that needs it, even if a loss is kept."""
        needed = {call.entry for call in self._live_calls()}
        entries, self._dropped = {*entries, *self._dropped}, []
        for entry in entries:
            entry.is_dropped = True
            if entry in needed:
                self._dropped.append(entry)
            else:
                entry.free()

    def _live_calls(self) -> list[_Call]:
        """Calls whose backward has not run."""
        calls = [each() for block in self._blocks for each in [*block.live]]
        return [call for call in calls if call is not None]

    def begin(self) -> None:
        """Called before the first capture.

        Raises:
            _EagerlyError: nothing is captured any more.
        """
        if self.pool.is_broken:
            raise _EagerlyError("an earlier capture failed")
        if self._given_up is not None:
            raise _EagerlyError(self._given_up)
        if not self.has_begun:
            self.has_begun = True
            self.pool.begin()

    def capture(self, work: Work, entry: _Entry) -> _Captured:
        """
        Raises:
            torch.OutOfMemoryError: the VRAM does not suffice.
            RuntimeError: the work cannot be captured.
            _EagerlyError: nothing is captured any more, or the VRAM would not suffice later.
        """
        self.begin()
        self._num_captures += 1
        captured = _Captured(self.pool.capture(work), self._num_captures, self._generation)
        if not any(entry is each for each in self._unsealed):
            self._unsealed.append(entry)
        if entry.block not in self._counted:
            self._counted.add(entry.block)
            self._kept_bytes += int(captured.graph.kept_bytes / max(1.0, entry.scale))
        self._scale = max(self._scale, entry.scale)
        self._check_memory(self._kept_bytes, self._scale)
        return captured

    def check_eager(self, scale: float) -> None:
        """Give up if a block that keeps its activations cannot run eagerly beside the graphs.

        Args:
            scale: the batch is larger by this factor than the one that ran eagerly first.
        """
        if self.has_begun:
            with suppress(_EagerlyError):
                self._check_memory(None, scale)

    def _check_memory(self, kept_bytes: int | None, scale: float) -> None:
        if (missing := self.pool.missing_bytes(self._static_bytes(), kept_bytes, scale)) > 0:
            why = f"graphs need {format_bytes(missing)} more VRAM than is free"
            self._num_shortages += 1
            if kept_bytes is None or self._num_shortages >= MOST_CHANGES:
                self.give_up(why)
            else:
                # More may be free after the first steps, in which libraries are loaded.
                self._close("too little VRAM was free in their forward")
            raise _EagerlyError(why)

    def may_replay(self, captured: _Captured, call: _Call | None) -> bool:
        """Whether a replay leaves the activations alone that backward still needs.

        While a graph is captured, the activations of all earlier graphs of its generation are kept. But its memory may
        later be used for the activations of a newer graph. Blocks that run in the order of their captures pass, and in
        backward the other way round.
        """
        waiting = self._waiting
        while waiting and ((last := waiting[-1]()) is None or not last.is_live):
            waiting.pop()
        may = True
        for ref in reversed(waiting):
            newest = ref()
            if newest is not None and newest is not call and newest.is_live:
                may = newest.entry.comes_before(captured)
                break
        self._is_out_of_order |= not may
        return may and not self.pool.is_broken

    def keeps(self, call: weakref.ref[_Call]) -> None:
        """The call's activations wait for backward."""
        self._waiting.append(call)

    def replay(self, captured: _Captured) -> Results:
        """The results of a replay, which are gone after the next one."""
        captured.graph.replay()
        return captured.graph.results

    def num_graphs(self) -> int:
        return sum(block.num_graphs() for block in self._blocks)

    def num_bytes(self) -> int:
        """VRAM of the pool, kept activations included, and of static memory."""
        return self.pool.num_bytes + self._static_bytes()

    def _static_bytes(self) -> int:
        storages = [static.memory.untyped_storage() for static in self._statics.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def static(self, what: str, index: int, meta: Meta, least: int = 0) -> _Static:
        """Memory for input or gradient number `index`. All graphs that name it so share it, whatever its shape.

        Args:
            least: bytes of the largest shape, where it is known.

        Raises:
            _EagerlyError: the memory of other graphs is smaller. They are dropped, at most `MOST_CHANGES` times, so
                that two such memories never live.
        """
        key = (what, index, meta)
        if key not in self._statics:
            room, num_bytes = self._rooms.get(key[:2]), _bytes_of(meta)
            largest = self._largest[key[:2]] = max(num_bytes, least, self._largest.get(key[:2], 0))
            if room is None or room.storage.nbytes() < num_bytes:
                in_backward = torch._C._current_graph_task_id() >= 0
                if room is not None and not in_backward and self._num_growths < MOST_CHANGES:
                    self._num_growths += 1
                    self.grew = True
                    self._close(_GREW)
                    raise _EagerlyError(_GREW)
                room = self._rooms[key[:2]] = _Room(largest, self.device)
            self._statics[key] = _Static(meta, room)
        return self._statics[key]

    def saw(self, arguments: Any, output: Any) -> None:
        """Note the sizes in an eager run, so that memory which is made later suffices for them."""
        tensors, made = (
            [each for each in tree_leaves(found) if isinstance(each, torch.Tensor) and each.layout == torch.strided]
            for found in (arguments, output)
        )
        made = [each for each in made if not any(each is tensor for tensor in tensors)]
        for what, found in (("input", tensors), ("handed on", tensors), ("gradient", made)):
            for index, each in enumerate(found):
                self._largest[what, index] = max(_bytes_of(_meta(each)), self._largest.get((what, index), 0))

    def largest(self, index: int) -> int:
        """Bytes of the largest layer number `index` of a block whose weights move."""
        blocks = [self.weights.get(block.module, ()) for block in self._blocks if block.streams]
        layers = [layers[index].layer for layers in blocks if index < len(layers)]
        return max(layer.numel * layer.dtype.itemsize for layer in layers)

    def pass_on(self, tensor: torch.Tensor, alias: torch.Tensor) -> None:
        """Later blocks of this forward get `alias` instead of `tensor`."""
        original = self.original(tensor)
        self._passed_on[id(original)] = original, alias
        self._passed_on[id(alias)] = original, alias

    @property
    def has_passed_on(self) -> bool:
        return bool(self._passed_on)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor instead of which blocks got `tensor`."""
        found = self._passed_on.get(id(tensor))
        return tensor if found is None else found[0]

    def newest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that blocks get instead of `tensor`."""
        found = self._passed_on.get(id(tensor))
        if found is None:
            return tensor
        original, _ = found
        return self._passed_on[id(original)][1]


def _takes_nothing(weights: LayerWeights, gradients: list[torch.Tensor], copies: Copies) -> bool:
    return False


@contextmanager
def _without_filling() -> Iterator[None]:
    """While open, new memory is not filled in deterministic mode: a graph would fill it in each replay."""
    untyped: Any = torch.utils.deterministic
    before, untyped.fill_uninitialized_memory = untyped.fill_uninitialized_memory, False
    try:
        yield
    finally:
        untyped.fill_uninitialized_memory = before


class _Room:
    """Memory that holds one input at a time, or the gradient of one output, of any shape that fits."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False), torch.no_grad(), _without_filling():
            self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.turn = _Turn()


def _bytes_of(meta: Meta) -> int:
    last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))
    return (1 + last if math.prod(meta.shape) else 0) * meta.dtype.itemsize


class _Turn:
    """What a `_Room` holds, without a reference to that memory.

    Attributes:
        holder: of the `_Static` that was written last.
        present: the tensor whose copy the memory holds, if it is known; it shares the version counter of that tensor.
        version: of `present`, when it was copied.
    """

    holder: object = None
    present: torch.Tensor | None = None
    version = 0


class _Static:
    """Memory of an input, or of an output's gradient.

    Attributes:
        memory: a tensor in `room`, with a version counter of its own.
    """

    def __init__(self, meta: Meta, room: _Room) -> None:
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=meta.dtype, device=room.storage.device)
            self.memory = empty.set_(room.storage, 0, meta.shape, meta.stride)
        self._expanded = [dim for dim, stride in enumerate(meta.stride) if stride == 0]
        self._turn, self._own_turn = room.turn, object()

    def fill(self, value: float) -> None:
        self._begin()
        self.memory.fill_(value)

    def copy(self, tensor: torch.Tensor) -> None:
        """Called without gradients."""
        self._begin()
        into, source = self.memory, tensor
        for dim in self._expanded:
            into, source = into.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        into.copy_(source)

    def hold(self, tensor: torch.Tensor) -> None:
        """Copy `tensor`, unless the memory holds its values."""
        if not self._holds(tensor):
            self.copy(tensor)
            self.note(tensor.detach())

    def take(self, tensor: torch.Tensor) -> None:
        """Like `hold`, for a tensor of one block: no reference to it is kept."""
        if self._holds(tensor):
            self._turn.present = None
        else:
            self.copy(tensor)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a clone of `tensor` has the layout of this memory."""
        own, other = self.memory, torch.empty_like(tensor)
        is_alike = own.shape == other.shape and own.stride() == other.stride() and own.dtype == other.dtype
        return is_alike and not self._expanded

    def note(self, tensor: torch.Tensor) -> None:
        """The memory holds a copy of `tensor` now, which is kept."""
        turn = self._turn
        turn.holder, turn.present, turn.version = self._own_turn, tensor, tensor._version

    def _begin(self) -> None:
        self._turn.holder, self._turn.present = self._own_turn, None

    def _holds(self, tensor: torch.Tensor) -> bool:
        turn = self._turn
        present, version = turn.present, turn.version
        return (
            present is not None
            and turn.holder is self._own_turn
            and present.data_ptr() == tensor.data_ptr()
            and version == tensor._version == present._version
        )


def _writable(places: Mapping[int, _Static], results: Results) -> dict[int, _Static]:
    """Those of `places`, by index of a result, that can be written while the results are read."""
    memory = {place.memory.untyped_storage().data_ptr() for place in places.values()}
    if any(each is not None and each.untyped_storage().data_ptr() in memory for each in results):
        return {}
    found = ((index, place, results[index]) for index, place in places.items())
    return {index: place for index, place, each in found if each is not None and place.fits(each)}


def _new_clones(results: Results, indices: Iterable[int], clones: list[torch.Tensor | None]) -> Copies:
    """Make memory for the clones of these results. Returns the copies that fill it."""
    copies: Copies = []
    for index in indices:
        if (result := results[index]) is not None:
            clone = clones[index] = torch.empty_like(result)
            copies.append((clone, result))
    return copies


class _Key(NamedTuple):
    """What a block's graphs are captured for."""

    spec: Any
    metas: tuple[Meta, ...]
    addresses: tuple[int, ...]
    """Of the parameters that do not move."""
    recomputes: bool
    flags: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(self.metas)  # the rest differs rarely, and takes several times as long

    def num_bytes(self) -> int:
        """Of the first argument."""
        return math.prod(self.metas[0].shape) * self.metas[0].dtype.itemsize if self.metas else 0

    def is_like(self, other: _Key) -> bool:
        """Whether the calls differ in lengths alone."""
        return self._replace(metas=()) == other._replace(metas=()) and [
            (len(each.shape), each.dtype, each.requires_grad) for each in self.metas
        ] == [(len(each.shape), each.dtype, each.requires_grad) for each in other.metas]

    def difference(self, other: _Key) -> str:
        """What differs, beside lengths."""
        if self.spec != other.spec:
            return "an argument"
        if self.flags != other.flags:
            return "a setting of torch"
        if self.recomputes != other.recomputes:
            return "the choice to recompute it"
        if self.addresses != other.addresses:
            return "the memory of a parameter"
        return "the dtype, the number of dimensions or requires_grad of an argument"


class _Block:
    """A block whose forward runs as a graph if possible.

    Attributes:
        streams: weights visit VRAM, in several places.
        how: the block is recomputed so; None if it keeps its activations.
        live: forwards through graphs whose backward may come.
        ran_eagerly: since the last backward, with gradients.
        adds: autograd adds the gradients of several calls in this backward.
        num_calls: in this forward.
        is_used_after: other code uses its input, or a weight of it, after the block.
        eager_bytes: of the first argument, in the largest first run before any capture.
    """

    def __init__(self, graphs: BlockGraphs, name: str, module: nn.Module, tied: Collection[nn.Module]) -> None:
        self.graphs, self.name, self.module = graphs, name, module
        self.own_forward = forward_of(module)
        self.how: Recomputed | None = None
        self.streams = False
        self._tied = any(each in tied for each in module.modules())
        self._said: set[str] = set()
        self._num_changes = self._num_calm = 0
        """Calm: calls since the last change, through graphs, or eagerly if the block changes often."""
        self._repeats = self.ran_eagerly = self.adds = self.is_used_after = False
        self.num_calls = 0
        self.live: set[weakref.ref[_Call]] = set()
        self._facts: _Facts | None = None
        self._entries: dict[_Key, _Entry | _FirstRun] = {}
        self._newest: tuple[_Key, _Entry] | tuple[None, None] = None, None
        """The last call's: a key is compared faster than it is hashed."""
        self.eager_bytes = 0

    def drop(self) -> None:
        self._facts, self.eager_bytes, self.is_used_after = None, 0, False
        self._drop_entries()

    def run_eagerly(self) -> None:
        """Until all graphs are dropped, because its input or a weight of it is used after it."""
        self.is_used_after = True
        self._drop_entries()

    @property
    def changes_often(self) -> bool:
        return self._num_changes >= MOST_CHANGES

    def has_changed(self) -> bool:
        """Whether attributes have changed since the last call, or no graph depends on them."""
        return self._facts is None or self._facts.changed() is not None

    def change(self) -> None:
        """Capture the block again, unless it changes often."""
        self._num_changes, self._num_calm, self._facts = self._num_changes + 1, 0, None
        if not self.changes_often:
            self.graphs.forget_code()
        self._drop_entries()

    def _drop_entries(self) -> None:
        self.graphs.drop([entry for entry in self._entries.values() if isinstance(entry, _Entry)])
        self._entries.clear()
        self._newest = None, None

    def num_graphs(self) -> int:
        return sum(entry.num_graphs() for entry in self._entries.values() if isinstance(entry, _Entry))

    def reads_copies(self) -> bool:
        module = self.module
        own_hooks_only = len(module._forward_pre_hooks) == len(module._forward_hooks) == 1  # those of `ForwardHooks`
        return self.streams and own_hooks_only and vars(module).get("forward") == self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graphs = self.graphs
        if not torch.is_grad_enabled():
            if self._entries:  # an evaluation has dropped them
                self._say("gradients are off")
            return self._eagerly(args, kwargs)
        graphs.num_calls += 1
        if not (graphs.is_open and graphs.is_planned):
            graphs.num_eager[graphs.why_not()] += 1
            if graphs.has_passed_on:  # by blocks before, in this forward
                args, kwargs = _rebuilt((args, kwargs), graphs.newest)
            return self._eagerly(args, kwargs)
        tensors: list[torch.Tensor] = []
        self.num_calls += 1
        start = next_node()
        try:
            spec = _flatten((args, kwargs), tensors, graphs.newest)
            entry = self._entry(spec, tensors)
        except _EagerlyError as reason:
            self._say(str(reason))
            graphs.num_eager[str(reason)] += 1
            entry = None
        found = self._run(entry, tensors, args, kwargs)
        graphs.uses.ran(start, tensors)
        if isinstance(entry, _FirstRun) and entry.reason is None:  # it will be a graph
            originals = [*map(graphs.original, tensors)]
            graphs.uses.used(self, [*originals[:1], *self.module.parameters()], is_handed_on=False)
            graphs.uses.used(self, originals[1:], is_handed_on=True)
        return found

    def _run(
        self,
        entry: _Entry | _FirstRun | None,
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        graphs = self.graphs
        if entry is None:
            args, kwargs = _rebuilt((args, kwargs), graphs.newest)
            return self._eagerly(args, kwargs)
        if isinstance(entry, _FirstRun):
            args, kwargs = _rebuilt((args, kwargs), graphs.newest)
            with graphs.watch_eager(), entry:
                found = self._eagerly(args, kwargs)
            graphs.watch_backward(found)
            graphs.saw((args, kwargs), found)
            return found
        if (recomputed := self.recomputed) is None:
            return entry.run(tensors)
        with recomputed.saves(tensors[0] if tensors else None):
            return entry.run(tensors)

    @property
    def recomputed(self) -> Recomputed | None:
        """How to recompute the block in this forward; None if it keeps its activations."""
        return None if self.graphs.recomputes_in_training_only and not self.module.training else self.how

    def _eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ran_eagerly |= torch.is_grad_enabled()
        if self.streams:
            for layer in self.graphs.weights.get(self.module, ()):
                layer.use()
        if self.recomputed is None or not torch.is_grad_enabled():
            found = self.own_forward(*args, **kwargs)
        else:
            found = self.recomputed.run(self.own_forward, *args, **kwargs)
        if self.graphs.grew:
            self.graphs.saw((args, kwargs), found)
        return found

    def _entry(self, spec: Any, tensors: list[torch.Tensor]) -> _Entry | _FirstRun:
        """The captured graphs for this call, or the first run of such a call, before it is captured next time."""
        if self.num_calls > 1:
            self._repeats = True
        if self._repeats:  # eager blocks add the gradients of all uses of a parameter one by one
            raise _EagerlyError("it is called more than once")
        _check_surroundings(self.graphs.device)
        if _hooks_of_saved_tensors() != self.graphs.hooks_of_saved_tensors:
            raise _EagerlyError("other code saves or recomputes activations")
        facts = self._facts
        if facts is None or (changed := facts.changed()) is not None:
            if facts is not None:
                self.graphs.change(self)
                self._say(f"{changed} changed; it is captured again")
            facts = self._facts = _Facts(self.module)
        if self.changes_often:
            self._num_calm += 1
            if self._num_calm <= RARELY:
                raise _EagerlyError("its attributes or its code change often")
            self._num_changes, self._num_calm = MOST_CHANGES - 1, 0
        if self.is_used_after:
            raise _EagerlyError("its input or a weight of it is used after it too")
        streams, recomputed = self.streams, self.recomputed
        addresses = () if streams else facts.addresses()
        key = _Key(spec, tuple([_meta(each) for each in tensors]), addresses, recomputed is not None, _flags())
        newest = self._newest[0]
        entry = self._newest[1] if newest == key else self._entries.get(key)
        waits = not isinstance(entry, _Entry) and self.graphs.uses.waits_for(self)
        if entry is None or (waits and entry.reason is None):
            if newest is not None and not key.is_like(newest):
                self._say(f"{key.difference(newest)} changed; it is captured again")
            if recomputed is not None and recomputed.why_eager is not None:
                raise _EagerlyError(recomputed.why_eager)
            if self._tied:
                raise _EagerlyError("it contains a tied weight")
            if (reason := facts.reason()) is not None:
                raise _EagerlyError(reason)
            may_warm_up = not (facts.has_buffers or self.graphs.runs_first or waits)
            is_known = may_warm_up and any(other.reason is None for other in self._like(key))
            is_one_more = len({each[:2] for each in self._entries} - {key[:2]}) >= MOST_KINDS
            if recomputed is None and (is_one_more or not is_known):
                self.graphs.check_eager(key.num_bytes() / self.eager_bytes if self.eager_bytes else 1.0)
            if is_one_more:
                raise _EagerlyError(f"it was called with more than {MOST_KINDS} kinds of arguments")
            if not is_known:
                is_watched = any(other.reason is None for other in self._like(key))
                first = self._entries[key] = _FirstRun(self, spec, tensors, is_watched=is_watched)
                if not (self.eager_bytes and self.graphs.has_begun):
                    self.eager_bytes = max(self.eager_bytes, key.num_bytes())
                return first
        if not isinstance(entry, _Entry):
            if self.graphs.runs_first:
                raise _EagerlyError("all lengths run eagerly once before graphs take VRAM")
            has_run, reason = entry is not None, None if entry is None else entry.reason
            entry = self._entries[key] = _Entry(self, key, facts, reason, streams=streams)
            entry.capture(tensors, has_run=has_run)
        elif self._num_changes:
            self._num_calm += 1
            if self._num_calm >= PAYS:
                self._num_changes = 0
        if entry.reason is not None:
            raise _EagerlyError(entry.reason)
        if (why := entry.why_not_now()) is not None:
            raise _EagerlyError(why)
        if self._newest[1] is not entry:
            self._newest = key, entry
        return entry

    def _like(self, key: _Key) -> Iterator[_Entry | _FirstRun]:
        """Those for calls that differ from `key` in lengths alone."""
        return (entry for each, entry in self._entries.items() if each.is_like(key))

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.info("%s runs eagerly: %s", self.name, why)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for what a graph would not repeat: memory that the block does not own, and waits for the device.

    Attributes:
        reason: why the block cannot be captured, or None.
    """

    def __init__(self, block: nn.Module, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self._device = device
        own = [*tensors, *block.parameters(), *block.buffers()]
        own += [each for module in block.modules() for each in vars(module).values() if isinstance(each, torch.Tensor)]
        self._known = {_storage(each) for each in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.numel():
                if each.device != self._device:
                    self.reason = f"it uses a tensor on the {each.device.type}"
                elif _storage(each) not in self._known:
                    self.reason = "it uses a tensor that is neither an argument nor its own"
        if _hooks_of_saved_tensors() != (_detached, _unchanged):
            self.reason = "other code saves or recomputes activations in it"
        if waits_for_values(func, args):
            self.reason = f"it waits for the device ({func})"
        found = func(*args, **kwargs or {})
        made = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        if func is _COPY and made[0].device != self._device:  # as `.tolist()` does
            self.reason = f"it waits for the device (a copy to the {made[0].device.type})"
        self._known |= {_storage(each) for each in made}
        return found


def waits_for_values(function: Any, args: Sequence[Any]) -> bool:
    """Whether a result's shape, or a number on the host, follows from values. Indices are such values if they are a
    mask.
    """
    if function is torch.ops.aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_COPY = torch.ops.aten._to_copy.default
_GREW = "a block got larger inputs than before, so all blocks are captured again"
_TWICE = "a backward with create_graph=True is differentiated again"


class _FirstRun:
    """Context of a block's first run with such arguments, which is eager: kernels are compiled, libraries initialised.

    The block then runs once more, without effects, to see whether it can be captured. Graphs would need the memory of
    that run in addition to their own.

    Attributes:
        reason: why the block cannot be captured, or None.
    """

    def __init__(self, block: _Block, spec: Any, tensors: Sequence[torch.Tensor], *, is_watched: bool) -> None:
        """`is_watched`: the block was seen with other lengths."""
        self.reason: str | None = "its first run failed"
        self._block, self._spec, self._tensors, self._is_watched = block, spec, tensors, is_watched
        module = block.module
        written = [("an argument", tensors), ("a buffer", module.buffers()), ("a parameter", module.parameters())]
        self._before: list[tuple[str, torch.Tensor, int]] = []
        for what, each in written:
            self._before += [(what, tensor, tensor._version) for tensor in each]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                changed = [what for what, tensor, version in self._before if tensor._version != version]
                self.reason = f"it writes {changed[0]}" if changed else None
                if not (changed or self._is_watched):
                    self.reason = self._watched()
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)
            self.reason = _why_not(error)
        finally:
            self._before.clear()
            self._tensors = ()

    def _watched(self) -> str | None:
        """Run the block without effects. Returns why it cannot be captured, or None."""
        graphs, module = self._block.graphs, self._block.module
        args, kwargs = _unflatten(self._spec, [each.detach() for each in self._tensors])
        watch, before = _Watch(module, self._tensors, graphs.device), HostRandom()
        try:
            with graphs.pool.random_from(graphs.pool.random_state()), saved_tensors_hooks(_detached, _unchanged), watch:
                self._block.own_forward(*args, **kwargs)
            return "it draws random numbers on the host" if before.has_changed() else watch.reason
        finally:
            before.restore()


class _Facts:
    """The facts that a block's graph depends on, in addition to its arguments: attributes, parameters, buffers, hooks.

    Values are compared by identity, and kept, so that no other value gets their identity.
    """

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        members = [(module, each) for module in self.modules for each in _members(module)]
        self._owners = [*self.modules, *(module for module, _ in members)]
        self._dicts_and_classes = gc.get_referents(*self.modules)
        self._dicts = UnchangedContainers([*map(vars, self.modules), *(each for _, each in members)])
        contents, self._why_not = _contents(self.modules)
        self._names = [name for name, _ in contents]
        self._contents = UnchangedContainers([each for _, each in contents], keys=True)
        self.parameters: list[nn.Parameter] = list(block.parameters())
        self._requires_grad = list(map(_requires_grad, self.parameters))
        self._hooks = [hooks for module in self.modules[1:] for hooks in hooks_of(module)]
        self._is_hooked = any(self._hooks)
        self.has_buffers = any(True for _ in block.buffers())
        held = chain.from_iterable(self._dicts.values)
        self.tensors = [each for each in held if type(each) is torch.Tensor and each.layout == torch.strided]
        self._memory = self._memory_now()

    def addresses(self) -> tuple[int, ...]:
        return tuple(map(torch.Tensor.data_ptr, self.parameters))

    def _memory_now(self) -> list[int]:
        """Addresses of buffers and of other tensors, but no parameters."""
        return [tensor.data_ptr() for tensor in self.tensors]

    def reason(self) -> str | None:
        """Why the block cannot be captured, or None."""
        if self._is_hooked:
            return "a module in it has hooks"
        if self._why_not is not None:
            return self._why_not
        for module in self.modules:
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                return f"its {type(module).__name__} writes its statistics"
        return None

    def changed(self) -> str | None:
        """The name of a changed fact, or None."""
        if (at := self._dicts.first_changed()) is not None:
            return self._name_in(at)
        if (at := self._contents.first_changed()) is not None:
            return f"the contents of {self._names[at]}"
        if self._has_other_dicts():
            return "the class or the __dict__ of a module in it"
        if list(map(_requires_grad, self.parameters)) != self._requires_grad:
            return "requires_grad of a parameter"
        if self._memory_now() != self._memory:
            return "the memory of a buffer"
        if any(self._hooks) != self._is_hooked:
            return "hooks of a module in it"
        return None

    def _has_other_dicts(self) -> bool:
        """Whether a module has another `__dict__` or class. One call finds all, in a third of the time of two loops.

        On Python 3.13 it finds the values of attributes too, which takes 4 µs for 19 modules instead of 0.6.
        """
        try:
            return gc.get_referents(*self.modules) != self._dicts_and_classes
        except Exception:  # another dict has other tensors, which are compared by value
            return True

    def _name_in(self, at: int) -> str:
        """Of what has changed in a dict."""
        module = self._owners[at]
        if at >= len(self.modules):
            return f"a parameter, buffer or module of {type(module).__name__}"
        attributes = zip_longest(vars(module).items(), self._dicts.values[at], fillvalue=("__dict__", None))
        name = next((name for (name, now), then in attributes if now is not then), "__dict__")
        return f"{type(module).__name__}.{name}"


_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module, which are compared apart."""
_WITHOUT_CONTENTS = (
    *(nn.Module, torch.Tensor, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, weakref.ReferenceType),
    *(type(None), Number, str, bytes, frozenset, range, slice),
)


def _contents(modules: Sequence[nn.Module]) -> tuple[list[tuple[str, Collection[Any]]], str | None]:
    """(name of the attribute, container) of the dicts, lists, sets and objects that the attributes of modules hold,
    such as configs, with those inside them; and why they cannot be compared, or None.
    """
    found: list[tuple[str, Collection[Any]]] = []
    seen, num_values = set(map(id, modules)), 0
    held = [(type(module).__name__, name, each) for module in modules for name, each in vars(module).items()]
    left = [(f"{kind}.{name}", each) for kind, name, each in held if name not in _OWN_ATTRIBUTES]
    while left:
        owner, value = left.pop()
        if id(value) in seen or isinstance(value, _WITHOUT_CONTENTS):
            continue
        container = attributes = getattr(value, "__dict__", None)
        if isinstance(value, dict | list | tuple | set):
            container = value
            left += [] if attributes is None else [(owner, attributes)]
        elif isinstance(value, partial):
            container = value.func, value.args, value.keywords
        elif container is None or _bytes_beside_dict(type(value)) > _bytes_beside_dict(_Plain):
            return [], f"{owner} holds a {type(value).__name__}, whose contents are not compared"
        seen.add(id(value))
        values = list(container.values() if isinstance(container, dict) else container)
        found.append((owner, container))
        num_values += len(values)
        if num_values > MOST_CONTENTS:
            return [], f"its attributes hold more than {MOST_CONTENTS} values"
        left += [(owner, each) for each in values]
    return found, None


class _Plain:
    """Has nothing but a `__dict__`."""


def _bytes_beside_dict(kind: type) -> int:
    """Bytes of an instance, which are more than those of `_Plain` if it has slots or data of a C extension."""
    return kind.__basicsize__ - (8 if kind.__dictoffset__ > 0 else 0)


def _members(module: nn.Module) -> list[dict[str, Any]]:
    untyped: Any = module
    return [untyped._parameters, untyped._buffers, untyped._modules]


def _hooks_of_saved_tensors() -> Any:
    """The innermost hooks of tensors that autograd saves, or None."""
    untyped: Any = torch._C._autograd
    return untyped._top_saved_tensors_default_hooks(False)


def _check_surroundings(device: torch.device) -> None:
    """
    Raises:
        _EagerlyError: this thread runs operations in a way that a graph would not.
    """
    untyped: Any = torch._C
    if torch.is_autocast_enabled(device.type):
        raise _EagerlyError("autocast is on")
    if untyped._len_torch_dispatch_stack() or untyped._is_torch_function_mode_enabled():
        raise _EagerlyError("a mode watches torch's operations")
    if torch.compiler.is_compiling() or untyped._functorch.peek_interpreter_stack() is not None:
        raise _EagerlyError("torch transforms it")
    if torch.is_anomaly_enabled():
        raise _EagerlyError("anomaly detection is on")
    modules: Any = torch_module
    if modules._has_any_global_hook():
        raise _EagerlyError("torch has hooks of all modules")


def _flags() -> tuple[Any, ...]:
    """Settings of torch that choose kernels."""
    return tuple([each() for each in _getters()])


@cache
def _getters() -> Sequence[Callable[[], Any]]:
    """The functions that torch.backends calls, without its Python."""
    reductions = [f"cublas_allow_{each}_reduced_precision_reduction" for each in ("bf16", "fp16")]
    reductions.append("cublas_allow_fp16_accumulation")
    cudnn = ("cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark")
    attention = [f"{each}_sdp_enabled" for each in ("flash", "mem_efficient", "math", "cudnn")]
    names = ["deterministic_algorithms", "blas_preferred_backend"]
    found = [getattr(torch._C, f"_get_{name}") for name in (*names, *attention, *reductions, *cudnn)]
    # TF32 by either of torch's interfaces: the getters of the older one raise once `fp32_precision` was set.
    untyped: Any = torch._C
    precisions = [partial(untyped._get_fp32_precision_getter, "cuda", each) for each in ("matmul", "conv", "rnn")]
    return [*found, *precisions, torch.get_default_dtype]


def _meta(tensor: torch.Tensor) -> Meta:
    facts = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    return tuple.__new__(Meta, facts)  # in half of the time of `Meta(...)`


def _flatten(value: Any, tensors: list[torch.Tensor], newest: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with places instead of tensors, which are added to `tensors`.

    Raises:
        _EagerlyError: a value that a graph may not depend on.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if kind is torch.Tensor or kind is nn.Parameter:
        value = newest(value)
        for index, other in enumerate(tensors):
            if other is value:
                return _at(index)
        if value.layout != torch.strided or value.is_quantized or value.is_inference():
            raise _EagerlyError("it gets or returns a sparse, quantised or inference tensor")
        tensors.append(value)
        return _at(len(tensors) - 1)
    if kind is tuple or kind is list:
        inner = [(type(each), each) if type(each) in _CONSTANTS else _flatten(each, tensors, newest) for each in value]
        return kind, tuple(inner)
    if kind is dict:
        return kind, (tuple(value), _flatten(tuple(value.values()), tensors, newest))
    if isinstance(value, bool | int | float | str):
        return kind, value
    raise _EagerlyError(f"it gets or returns a {kind.__name__}")


_CONSTANTS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def _unflatten(spec: Any, tensors: Sequence[Any], inputs: Sequence[Any] = ()) -> Any:
    if isinstance(spec, _At):
        return tensors[spec.place]
    if isinstance(spec, _Input):
        return inputs[spec.place]
    kind, value = spec
    if kind in (tuple, list):
        return kind([_unflatten(each, tensors, inputs) for each in value])
    if kind is dict:
        keys, (_, inner) = value
        return {key: _unflatten(each, tensors, inputs) for key, each in zip(keys, inner, strict=True)}
    return value


def _rebuilt(value: Any, newest: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with the newest of each tensor."""
    if isinstance(value, torch.Tensor):
        return newest(value)
    if type(value) in (tuple, list):
        return type(value)([_rebuilt(each, newest) for each in value])
    if type(value) is dict:
        return {key: _rebuilt(each, newest) for key, each in value.items()}
    return value


@dataclass(eq=False)
class _Run:
    """The autograd graph of one run of a block.

    Attributes:
        leaves: the inputs, then the trained parameters.
        roots: for each output that is no input; None if it requires no gradient. A root does not keep the output.
        passed_on: the inputs that are outputs too.
    """

    leaves: list[torch.Tensor]
    roots: list[torch.Tensor | None]
    passed_on: list[torch.Tensor]

    def num_uses(self) -> list[int]:
        """How many nodes use each of `leaves`.

        Raises:
            _EagerlyError: gradients would flow to tensors that are neither arguments nor parameters of the block.
        """
        found = dict.fromkeys(map(id, self.leaves), 0)
        for _, node, _, _ in edges(root for root in self.roots if root is not None):
            if (leaf := getattr(node, "variable", None)) is not None:
                if id(leaf) not in found:
                    raise _EagerlyError("it uses parameters or activations of other modules")
                found[id(leaf)] += 1
        return list(found.values())


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Call:
    """One forward through an entry, until its backward.

    Attributes:
        is_live: backward may come.
        seen: the updates of the block's layers that it saw.
        versions: of the entry's `saved` tensors.
        follows_blocks: the gradients of inputs go to other blocks' backward, and to no operation or hook in between.
    """

    entry: _Entry
    random: Any
    seen: list[int]
    versions: list[int]
    follows_blocks: bool
    is_live: bool = True

    def end(self) -> None:
        """Its backward was the last one."""
        self.is_live = False
        self.entry.block.live.discard(weakref.ref(self))


class _Entry:
    """The graphs of one block for one kind of call.

    Attributes:
        reason: why the block cannot run as a graph, or None.
        is_dropped: no further forward uses the entry.
        saved: by storage, the buffers and other tensors of a block that keeps its activations, if autograd saved them.
    """

    def __init__(self, block: _Block, key: _Key, facts: _Facts, reason: str | None, *, streams: bool) -> None:
        """`streams`: the parameters move, so graphs read copies of them."""
        metas, graphs = key.metas, block.graphs
        self.block, self._spec, self._metas, self._addresses = block, key.spec, metas, key.addresses
        self._parameters = parameters = facts.parameters
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.recomputes = block.recomputed is not None
        self._held = {} if self.recomputes else {_storage(each): each for each in facts.tensors}
        self.saved = dict[int, torch.Tensor]()
        self.scale = key.num_bytes() / max(1, block.eager_bytes)
        self._num_own = 0 if self.recomputes else len(metas[:1])  # autograd saves the first input
        self._own: list[_Static] = []
        self._shared = [graphs.static("input", index, metas[index]) for index in range(self._num_own, len(metas))]
        self._all_layers = graphs.weights.get(block.module, ())
        self._weights: list[torch.Tensor] = []
        self._copied: list[tuple[LayerWeights, torch.Tensor]] = []
        self._copied_alone: list[tuple[torch.Tensor, nn.Parameter]] = []
        if streams:
            self._copy_weights()
        self._have_gradients = [index for index, meta in enumerate(metas) if meta.requires_grad]
        self._passes_on = [index for index in self._have_gradients if index > 0]
        at = {parameter: len(metas) + index for index, parameter in enumerate(self.trained)}
        self.summed: Summed | None = None
        self._layers = [
            (layer, [at[view.parameter] for view in layer.layer.views])
            for layer in self._all_layers
            if not layer.layer.shared and all(view.parameter in at for view in layer.layer.views)
        ]
        self._run: _Run | None = None
        self._forward: _Captured | None = None
        self._output_spec: Any = None
        self._differentiable: list[bool] = []
        self._backwards: dict[Any, _Backward] = {}
        self._newest: Callable[[], _Call | None] = lambda: None
        self.reason, self.is_dropped, self._is_freed = reason, False, False

    def _copy_weights(self) -> None:
        """Graphs read copies of the weights, one for a layer."""
        graphs, places = self.block.graphs, dict[nn.Parameter, torch.Tensor]()
        for index, layer in enumerate(self._all_layers):
            meta = Meta(torch.Size([layer.layer.numel]), (1,), layer.layer.dtype, requires_grad=False)
            flat = graphs.static("weights", index, meta, graphs.largest(index)).memory
            self._copied.append((layer, flat))
            places |= {view.parameter: flat[view.elements].view(view.parameter.shape) for view in layer.layer.views}
        for index, each in enumerate(self._parameters):
            if each not in places:
                places[each] = graphs.static("weight", index, _meta(each)).memory
                self._copied_alone.append((places[each], each))
        self._weights = [places[each] for each in self._parameters]

    def num_graphs(self) -> int:
        return (self._forward is not None) + len(self._backwards)

    def comes_before(self, captured: _Captured) -> bool:
        """Whether a replay of `captured` leaves the activations alone that the forward has kept."""
        own = self._forward
        return own is not None and own.generation == captured.generation and own.number < captured.number

    def seal(self) -> None:
        """Keep activations no longer from later captures."""
        self._run = None
        for own in self._own:
            own.memory = without_owning(own.memory)

    def why_not_now(self) -> str | None:
        """Why a replay of forward would overwrite activations that backward still needs, or None."""
        newest = self._newest()
        if not self.recomputes and newest is not None and newest.is_live:
            return "an earlier forward still waits for its backward"
        assert self._forward is not None
        if not self.block.graphs.may_replay(self._forward, None):
            return "blocks ran in another order than before"
        return None

    @torch.no_grad()
    def capture(self, tensors: Sequence[torch.Tensor], *, has_run: bool) -> None:
        """Capture the forward. Without success, `reason` says why. `has_run`: the block has run eagerly with these
        lengths.
        """
        graphs = self.block.graphs
        if self.reason is not None:
            return
        try:
            graphs.begin()
            if not graphs.pool.works_once:
                self._make_own()
            self._hold(tensors)
            if not has_run:
                self._warm_up(tensors)
                has_run = True
            self._forward = graphs.capture(self._work_of_forward, self)
            self._check_differentiable()
            # Backward too, so that an error shows before the graph is used. Later it is captured again if it gets
            # gradients of other outputs or with other strides.
            self._captured_backward(*self._ones(self._forward.graph.results))
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            self._fail(_EagerlyError("too little VRAM is free"))
            end = graphs.give_up if has_run else graphs.run_first
            end("the GPU was full while they were captured")
        except (RuntimeError, _EagerlyError) as error:
            self._fail(error)
            if graphs.pool.is_broken:
                graphs.give_up(f"{self.block.name}: {self.reason}")

    def _ones(self, outputs: Results) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the outputs, and none of the inputs that are handed on."""
        found = [each for each in outputs if each is not None]
        gradients = [
            torch.ones_like(each) if has else None for each, has in zip(found, self._differentiable, strict=True)
        ]
        return gradients, [None] * len(self._passes_on)

    def _warm_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run forward and backward without effects: kernels are compiled, libraries initialised."""
        pool, first = self.block.graphs.pool, [self._new_static(meta) for meta in self._metas[:1]]
        for static, tensor in zip(first[: self._num_own], tensors, strict=False):
            static.copy(tensor)
        inputs = [static.memory for static in [*first[: self._num_own], *self._shared]]
        versions = [each._version for each in inputs]
        with pool.random_from(pool.random_state()):
            run, outputs = self._compute(inputs)
            if versions != [each._version for each in inputs]:
                raise _EagerlyError("it writes an argument")
            self._check_differentiable()
            gradients, handed_on = self._ones(outputs)
            places = self._places(gradients)
            self._hold_gradients(places, gradients, handed_on)
            self._gradients(run, gradients, places)

    def _check_differentiable(self) -> None:
        if not any(self._differentiable):
            raise _EagerlyError("its outputs require no gradient")

    def _fail(self, error: Exception) -> None:
        self.reason = _why_not(error)
        self._forget()

    def _forget(self) -> None:
        if self.num_graphs():
            self.block.graphs.pool.dropped()
        self._run = self._forward = None
        self._backwards.clear()

    def free(self) -> None:
        self._forget()
        self._is_freed = True
        self._own, self._shared, self._weights = [], [], []
        self._copied, self._copied_alone = [], []

    def _new_static(self, meta: Meta) -> _Static:
        return _Static(meta, _Room(_bytes_of(meta), self.block.graphs.device))

    def _make_own(self) -> None:
        if not self._own:
            self._own = [self._new_static(meta) for meta in self._metas[: self._num_own]]

    def _hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy inputs, and weights that move, into static memory."""
        for static, tensor in zip(self._own, tensors, strict=False):
            static.copy(tensor)
        self._hold_shared(tensors[self._num_own :])

    def _hold_shared(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, (static, tensor) in enumerate(zip(self._shared, tensors, strict=True), self._num_own):
            if index == 0:
                static.copy(tensor)
            else:
                static.hold(tensor)
        for layer, flat in self._copied:
            layer.copy_to(flat)
        for copy, parameter in self._copied_alone:
            copy.copy_(parameter)

    def _inputs(self) -> list[torch.Tensor]:
        return [static.memory for static in [*self._own, *self._shared]]

    def _work_of_forward(self) -> list[torch.Tensor]:
        self._make_own()  # in the pool
        run, outputs = self._compute(self._inputs())
        num_uses, handed_on = run.num_uses(), self._passes_on
        once = [index for index, num in enumerate(num_uses) if num > 1 and index not in handed_on]
        self.summed = Summed(self.block, once, handed_on, len(self._differentiable))
        self._run = None if self.recomputes else run
        return outputs

    def _compute(self, inputs: Sequence[torch.Tensor]) -> tuple[_Run, list[torch.Tensor]]:
        """Run the block on `inputs`. Returns autograd's graph and the outputs that are no inputs."""
        with torch.enable_grad(), saved_tensors_hooks(self._pack if self._held else _detached, _unchanged):
            leaves = [
                each.detach().requires_grad_(meta.requires_grad) for each, meta in zip(inputs, self._metas, strict=True)
            ]
            weights = [each.detach() for each in self._weights] or [without_owning(each) for each in self._parameters]
            aliases = [
                each.requires_grad_(own.requires_grad) for each, own in zip(weights, self._parameters, strict=True)
            ]
            args, kwargs = _unflatten(self._spec, leaves)
            with _exchanged(self.block.module, dict(zip(self._parameters, aliases, strict=True))):
                output = self.block.own_forward(*args, **kwargs)
            outputs: list[torch.Tensor] = []
            spec = _outputs(_flatten(output, outputs, lambda tensor: tensor), outputs, leaves)
            outputs = [each for each in outputs if not any(each is leaf for leaf in leaves)]
            roots = [_root(each) if each.requires_grad else None for each in outputs]
            passed_on = [leaves[index].view_as(leaves[index]) for index in self._passes_on]
        self._output_spec, self._differentiable = spec, [each.requires_grad for each in outputs]
        run = _Run([*leaves, *(alias for alias in aliases if alias.requires_grad)], roots, passed_on)
        return run, outputs

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (storage := _storage(tensor)) in self._held:
            self.saved[storage] = self._held[storage]
        return _detached(tensor)

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        graphs, block = self.block.graphs, self.block
        seen = [layer.num_updates for layer in self._all_layers]
        graphs.num_graphed += 1
        follows_blocks = all(
            type(each.grad_fn) is _node and not each._backward_hooks  # a hook may write through `.data`
            for each in map(tensors.__getitem__, self._have_gradients)
        )
        versions = [each._version for each in self.saved.values()]
        call = _Call(self, graphs.pool.random_state(), seen, versions, follows_blocks)
        self._newest = newest = weakref.ref(call, block.live.discard)
        block.live.add(newest)
        if not self.recomputes:
            graphs.keeps(newest)
        found = _apply(call, len(tensors), *tensors, *self.trained)
        outputs, passed_on = found[: len(self._differentiable)], found[len(self._differentiable) :]
        inputs = list(tensors)
        for index, alias in zip(self._passes_on, passed_on, strict=True):
            graphs.pass_on(tensors[index], alias)
            inputs[index] = alias
        return _unflatten(self._output_spec, outputs, inputs)

    def replay_forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(outputs, inputs that are handed on)."""
        assert self._forward is not None
        self._hold(tensors)
        results = self.block.graphs.replay(self._forward)
        outputs = [result.clone() for result in results if result is not None]
        return outputs, [tensors[index] for index in self._passes_on]  # autograd makes aliases of them

    def differentiable(self) -> list[bool]:
        return self._differentiable

    def kept_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that backward needs."""
        return list(tensors[self._num_own :])

    def backward(
        self, call: _Call, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs and of the trained parameters."""
        graphs, block = self.block.graphs, self.block
        if self._is_freed or (not self.recomputes and self._newest() is not call):
            raise EngineStateError(f"the activations of {block.name} were overwritten before this backward")
        if call.versions != [each._version for each in self.saved.values()]:
            raise EngineStateError(
                f"a buffer of {block.name} that backward needs was written after this loss was computed: write it "
                "after backward, or compute the loss again"
            )
        block.adds |= len(block.live) > 1 or block.ran_eagerly
        for layer, num_updates in zip(self._all_layers, call.seen, strict=True):
            layer.check_seen(num_updates)
            layer.use(by_copy=bool(self._weights))
        self._hold_shared(inputs)
        num = len(self._differentiable)
        given, handed_on = gradients[:num], gradients[num:]
        # A retained loss is differentiated again, but a replay of this backward overwrites activations of later blocks.
        retains, found = torch._C._autograd._get_current_graph_task_keep_graph(), None
        if self.recomputes or not retains:
            try:
                found = self._captured_backward(given, handed_on)
            except (RuntimeError, _EagerlyError) as error:
                self._fail(error)
        places = self._places(given) if found is None else found.places
        self._hold_gradients(places, given, handed_on)
        if found is None or not graphs.may_replay(found.captured, call):
            with graphs.pool.random_from(call.random):
                own = self._gradients(self._compute(self._inputs())[0], given, places)
            if not retains:
                call.end()
            return list(own)
        graph = found.captured
        if self.recomputes:
            with graphs.pool.random_from(call.random):
                results = graphs.replay(graph)
        else:
            results = graphs.replay(graph)
        clones: list[torch.Tensor | None] = [None] * len(results)
        copies = _new_clones(results, self._have_gradients, clones)
        ahead = found.before if call.follows_blocks else {}
        for index, place in ahead.items():
            copies.append((place.memory, cast(torch.Tensor, results[index])))
        taken = self._hand_over(results, copies)
        if not retains:
            call.end()
        if len(taken) < len(self.trained):
            left = (index for index in range(len(self._metas), len(results)) if index not in taken)
            copies += _new_clones(results, left, clones)
        if copies:
            torch._foreach_copy_([into for into, _ in copies], [source for _, source in copies])
        for index, place in ahead.items():
            place.note(cast(torch.Tensor, clones[index]))
        return clones

    def _hand_over(self, results: Results, copies: Copies) -> Collection[int]:
        """Give the engine the gradients of layers that this backward completes, without autograd's work for each
        parameter. Returns their indices. The operation that copies gradients makes other `copies` too, and empties the
        list then.
        """
        block, taken = self.block, set[int]()
        if block.adds or any(isinstance(each, Watched) for each in self.trained[:1]):  # the latter in autograd.grad
            return taken
        for layer, indices in self._layers:
            gradients = [each for index in indices if (each := results[index]) is not None]
            is_whole = len(gradients) == len(indices) and not layer.used_outside
            if is_whole and block.graphs.take(layer, gradients, copies):
                taken.update(indices)
        return taken

    def _captured_backward(
        self, gradients: Sequence[torch.Tensor | None], handed_on: Sequence[torch.Tensor | None]
    ) -> _Backward | None:
        """The graph of backward; None if it has to run eagerly."""
        addresses = () if self._weights else tuple(map(torch.Tensor.data_ptr, self._parameters))
        key = tuple([None if each is None else _meta(each) for each in gradients]), addresses
        can_capture = self.recomputes or (self._run is not None and addresses == self._addresses)
        can_capture &= not self.is_dropped
        if key not in self._backwards and self.reason is None and can_capture:
            places = self._places(gradients)
            self._hold_gradients(places, gradients, handed_on)

            def work() -> Results:
                run = self._compute(self._inputs())[0] if self.recomputes else self._run
                assert run is not None
                return self._gradients(run, key[0], places)

            captured = self.block.graphs.capture(work, self)
            num = len(places) - len(self._passes_on)
            before = dict(zip(self._passes_on, places[num:], strict=True))
            if 0 in self._have_gradients and gradients[0] is not None:
                before[0] = places[0]
            self._backwards[key] = _Backward(captured, places, _writable(before, captured.graph.results))
        return self._backwards.get(key)

    def _places(self, gradients: Sequence[torch.Tensor | None]) -> list[_Static]:
        """Static memory for gradients of outputs, and of inputs that were handed on."""
        graphs = self.block.graphs
        places = [
            graphs.static("gradient", index, _meta(gradient))
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]
        return [*places, *(graphs.static("handed on", index, self._metas[index]) for index in self._passes_on)]

    def _hold_gradients(
        self,
        places: Sequence[_Static],
        gradients: Sequence[torch.Tensor | None],
        handed_on: Sequence[torch.Tensor | None],
    ) -> None:
        incoming = [*(each for each in gradients if each is not None), *handed_on]
        for place, gradient in zip(places, incoming, strict=True):
            if gradient is None:
                place.fill(-0.0)  # x + -0.0 is x
            else:
                place.take(gradient)

    def _gradients(self, run: _Run, given: Sequence[Any], places: Sequence[_Static]) -> Results:
        """Gradients of the leaves of `run`, from those in `places`. `given`: None for outputs without a gradient."""
        roots = [root for root, each in zip(run.roots, given, strict=True) if root is not None and each is not None]
        wanted = [leaf for leaf in run.leaves if leaf.requires_grad]
        found = torch.autograd.grad(
            [*roots, *run.passed_on],
            wanted,
            [place.memory for place in places],
            retain_graph=not self.recomputes,
            allow_unused=True,
        )
        gradients = iter(found)
        return [next(gradients) if leaf.requires_grad else None for leaf in run.leaves]


def _why_not(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if isinstance(error, _EagerlyError) else f"it cannot be captured ({lines[0]})"


def _outputs(spec: Any, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Any:
    """`spec` of a block's outputs, with `_Input` for those that are its inputs."""
    inputs = {at: index for at, each in enumerate(outputs) for index, leaf in enumerate(leaves) if each is leaf}
    places, num = dict[int, Any](), 0
    for at in range(len(outputs)):
        places[at] = _Input(inputs[at]) if at in inputs else _At(num)
        num += at not in inputs

    def replaced(value: Any) -> Any:
        if isinstance(value, _At):
            return places[value.place]
        kind, inner = value
        if kind in (tuple, list):
            return kind, tuple(map(replaced, inner))
        if kind is dict:
            return kind, (inner[0], replaced(inner[1]))
        return value

    return replaced(spec)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor  # an output saved by its own node would stay alive


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _exchanged(block: nn.Module, aliases: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """While open, the block's modules have the aliases instead of their parameters."""
    own = [(module._parameters, name, each) for module in block.modules() for name, each in module._parameters.items()]
    places: list[tuple[dict[str, Any], str, Any]] = [place for place in own if place[2] is not None]
    for parameters, name, parameter in places:
        parameters[name] = aliases[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


class _Root(torch.autograd.Function):
    """Passes the gradient of an output on, without keeping the output's memory."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.new_empty(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


_root: Any = _Root.apply


class _Replay(torch.autograd.Function):
    """A block's forward and backward, replayed."""

    @staticmethod
    def forward(ctx: Any, call: _Call, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        inputs = tensors[:num_inputs]
        ctx.save_for_backward(*call.entry.kept_inputs(inputs))
        outputs, passed_on = call.entry.replay_forward(inputs)
        if not all(call.entry.differentiable()):
            ctx.mark_non_differentiable(
                *[each for each, has in zip(outputs, call.entry.differentiable(), strict=True) if not has]
            )
        return *outputs, *passed_on

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            block = ctx.call.entry.block
            block.graphs.give_up(_TWICE)
            raise EngineStateError(
                f"create_graph=True: the backward of {block.name} ran as a CUDA graph and cannot be differentiated. "
                "All blocks run eagerly from now on: compute this loss again. If the first step of a run has such a "
                "backward, its blocks never become graphs"
            )
        return None, None, *ctx.call.entry.backward(ctx.call, ctx.saved_tensors, gradients)


def _summed(node: Any) -> Summed | None:
    return node.call.entry.summed if type(node) is _node else None


_Parent: Any = super(torch.autograd.Function, _Replay)
_node: Any = _Replay._backward_cls
_apply: Any = _Parent.apply
"""Without the checks of functorch: a block that torch transforms runs eagerly."""
