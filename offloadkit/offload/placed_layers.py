"""`PlacedLayers`: reads the flat layers into their placements, and moves them to other placements."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from offloadkit.device.host_memory import HostSlab
from offloadkit.device.streams import Waits
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.errors import ConfigError, EngineStateError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.hardware import process_ram_bytes, trim_heap
from offloadkit.offload.external_writes import Alias, ExternalWrites, unwatched
from offloadkit.offload.layer_memory import Changes, LayerAllocator, LayerMemory
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.matrix_exchange import MatrixExchange
from offloadkit.offload.matrix_steps import MatrixSteps, workspace
from offloadkit.offload.recompute import drop_recomputed
from offloadkit.offload.shards import WeightGathers
from offloadkit.offload.shortage import RamWatch
from offloadkit.offload.state_ring import StateRing
from offloadkit.offload.states import LayerState, exchanges_sums
from offloadkit.offload.unread import make_real
from offloadkit.offload.weight_ring import StreamedWeights, WeightRing
from offloadkit.offload.weights import LayerWeights
from offloadkit.planner import NUM_STATE_BUFFERS, NUM_STEP_BUFFERS, NUM_WEIGHT_BUFFERS, Plan, step_buffer_bytes
from offloadkit.planner.layout import check_matrices
from offloadkit.planner.phases import READ_AHEAD_BYTES


class PlacedLayers:
    """The states of all flat layers, each in its placement, and the rings that they share.

    Attributes:
        states: in definition order.
        is_stepped: an update was started that `finish_updates` has not waited for.
        written: the frozen parameters that the program has written since they were placed.
        weight_ring: None if no layer is streamed, and between `leave_rings` and `join_rings`.
        pinning_seconds: seconds spent populating and pinning RAM.
    """

    def __init__(
        self,
        layers: Sequence[FlatLayer],
        plan: Plan,
        config: OffloadConfig,
        device: torch.device,
        ranks: Solo | Group,
        waits: Waits,
        gathers: WeightGathers | None,
    ) -> None:
        self._layers, self._shapes, self._accumulation = tuple(layers), plan.layers, config.gradient_accumulation
        self._config, self._device, self._ranks, self._waits = config, device, ranks, waits
        self._bring = None if gathers is None else gathers.bring
        self.states: list[LayerState] = []
        self.is_stepped = False
        self.written = set[nn.Parameter]()
        self.weight_ring: WeightRing | None = None
        self.pinning_seconds = 0.0
        self.memory = LayerAllocator(plan.layers, self._accumulation, config.disk, device, ranks)
        self._check(plan.placements)
        cpu, parameters = torch.device("cpu"), [view.parameter for layer in layers for view in layer.views]
        self._given = {each: (cpu if each.is_meta else each.device, each.dtype) for each in parameters}

    @property
    def trained(self) -> list[LayerState]:
        """The states of the layers that are not frozen."""
        return [state for state in self.states if state.layer.kind.is_trained]

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(state.placement for state in self.states)

    @property
    def assigned(self) -> tuple[Placement, ...]:
        """`placements`, with `step` set to the processor that steps the layer next."""
        return tuple(
            replace(state.placement, step="gpu" if state.on_gpu else "cpu") if state.switchable else state.placement
            for state in self.states
        )

    def views(self) -> Iterator[ParameterView]:
        for state in self.trained:
            yield from state.layer.views

    def _check(self, placements: Sequence[Placement]) -> None:
        """A collective.

        Raises:
            ConfigError: a layer's weights, or exchanged gradient sums, are in VRAM on one rank and in RAM on another;
                or the CPU would step matrices on a machine with a GPU or on several ranks.
        """
        if self._device.type != "cpu" or self._ranks.size > 1:
            check_matrices(self._shapes, placements)
        exchanged = [layer for layer in self._layers if exchanges_sums(layer, self._config)]
        for what in ("weights", *(["gradients"] if exchanged else [])):
            told = self._ranks.agree(np.array([getattr(where, what) == "ram" for where in placements], dtype=np.int64))
            for at in np.flatnonzero(told.min(axis=0) != told.max(axis=0)):
                where = ", ".join(f"{('VRAM', 'RAM')[each]} on rank {rank}" for rank, each in enumerate(told[:, at]))
                raise ConfigError(
                    f"the {what} of {self._shapes[at].name!r} are in different places ({where}): choose the same "
                    f"Placement.{what} on all ranks"
                )

    # ---- reading ------------------------------------------------------------------------------------------------

    def read(self, plan: Plan, ram_watch: RamWatch) -> list[HostSlab]:
        """Place the layers that are not placed yet; returns the RAM buffers for `join_rings` and staging.

        Layers that were placed by another plan move first. After `torch.OutOfMemoryError` the layer that was being
        placed is unchanged, and `read` may be called again with a leaner plan.
        """
        moves, new = self._in_order(plan.placements), list(enumerate(plan.placements))[len(self.states) :]
        self.memory.reserve([*moves, *new], self._present)
        for at, where in moves:  # several ranks keep their plan: no moves
            self.states[at] = self._elsewhere(at, where)
        started = time.perf_counter()
        gc.collect()  # an engine that an exception left behind may be held by reference cycles only
        buffer_bytes = self.memory.buffer_bytes(plan.placements)
        memories, buffers = self.memory.allocate(new, {}, "the optimizer states", buffer_bytes)
        self.pinning_seconds = time.perf_counter() - started
        most_ahead = read_ahead_bytes(plan, self._device, shared=self._ranks.size > 1)
        together = read_together([self._layers[at] for at, _ in new], most_ahead)
        args = self._config, self._device, self._waits
        for index, ((at, placement), memory) in enumerate(zip(new, memories, strict=True)):
            if index in together:
                self.make_real(together[index])
            state = LayerState(self._layers[at], placement, memory, *args, bring=self._bring)
            state.take_parameters()
            trim_heap()  # otherwise freed holes of one matrix's size remain, and the next layer's matrices do not fit
            self.states.append(state)
            ram_watch.check()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return buffers

    def make_real(self, parameters: Sequence[nn.Parameter]) -> None:
        """Read or draw the parameters that are still on the meta device, and broadcast rank 0's numbers."""
        make_real(parameters)
        for parameter in parameters:
            if not parameter.is_meta:
                self._ranks.broadcast(parameter)

    def give_back(self) -> None:
        """If the build failed, restore the parameters, so that another attempt trains the same numbers."""
        while self.states and self._given:
            self.states.pop().give_back(self._given)

    def keep(self) -> None:
        """The build succeeded: `give_back` does nothing from now on."""
        self._given.clear()

    # ---- moving -------------------------------------------------------------------------------------------------

    def begin_move(self, placements: Sequence[Placement]) -> Changes:
        """The changes that bring each layer to its place in `placements`, in order. Reserves the disk, and RAM that
        ranks share, for them. A collective.

        Raises:
            ConfigError: as `PlacedModel`.
            OffloadkitError: too little RAM or disk.
        """
        self._check(placements)
        changes = self._in_order(placements)
        self.memory.reserve(changes, self._present)
        return changes

    def _in_order(self, placements: Sequence[Placement]) -> Changes:
        """The placed layers that must move, in order.

        A layer that takes VRAM moves as soon as the total does not exceed the final one. Until then, layers that free
        VRAM move first; they take RAM.
        """

        def vram(at: int, where: Placement) -> int:
            return sum(self._shapes[at].vram_bytes(where, self._accumulation).values())

        def taken(change: tuple[int, Placement]) -> tuple[int, int]:
            at, where = change
            return vram(at, where) - vram(at, self.states[at].placement), self.memory.num_bytes(at, where)

        found = [(at, placements[at]) for at, state in enumerate(self.states) if state.placement != placements[at]]
        found.sort(key=taken)
        giving = deque(change for change in found if taken(change)[0] < 0)
        taking = deque(found[len(giving) :])
        above, ordered = -sum(taken(change)[0] for change in found), list[tuple[int, Placement]]()
        while giving or taking:
            fits = bool(taking) and above + taken(taking[0])[0] <= 0
            change = (taking if fits or not giving else giving).popleft()
            above += taken(change)[0]
            ordered.append(change)
        return ordered

    def move(self, at: int, placement: Placement, moved: Callable[[LayerState, LayerState], None]) -> None:
        """Move one layer. After an error, the layer has not moved.

        Args:
            moved: called with the old and the new state, while both exist.
        """
        old = self.states[at]
        new = self._elsewhere(at, placement)
        if new is not old:
            moved(old, new)
            self.states[at] = new

    def _elsewhere(self, at: int, placement: Placement) -> LayerState:
        """The layer's state in another placement, which may be the present one. After an error that is unchanged; after
        a move it must not be used any more."""
        old = self.states[at]
        if _stays(old, placement):
            old.placement = placement
            return old
        (memory,), _ = self.memory.allocate([(at, placement)], {at: old.memory}, "a layer's states")
        return old.moved(placement, memory)

    @property
    def _present(self) -> dict[int, LayerMemory]:
        return {at: state.memory for at, state in enumerate(self.states)}

    @property
    def is_whole(self) -> bool:
        """Whether every layer has weights. False if an interrupt came in the middle of a layer's move."""
        return all(state.weights.flat.numel() for state in self.states)

    def check_movable(self, placements: Sequence[Placement]) -> None:
        """Raise `EngineStateError` if another tensor shares the memory of a parameter that would move."""
        leaving = [
            state.weights
            for state, placement in zip(self.states, placements, strict=True)
            if not _stays(state, placement) and "ram" in (state.placement.weights, placement.weights)
        ]
        with unwatched():
            name = _name_of_shared(leaving) if leaving else None
        if name is not None:
            raise EngineStateError(
                f"parameter {name!r} cannot move: another tensor shares its memory (a view that its module keeps, say) "
                "and would keep old values. Keep a clone() instead, or drop it before the move"
            )

    # ---- what layers share --------------------------------------------------------------------------------------

    def join_rings(self, buffers: Sequence[HostSlab], external_writes: ExternalWrites) -> torch.Tensor:
        """Build the rings for the present placements; returns the staging memory among `buffers`, uint8."""
        placed = list(zip(self._shapes, self.placements, strict=True))
        num_disk = NUM_STATE_BUFFERS if any(where.states == "disk" for _, where in placed) else 0
        if self.memory.disk is not None:
            self.memory.disk.use(buffers[:num_disk])
        step_buffer = step_buffer_bytes(placed, self._accumulation)
        passes = any(where.states == "ram" and where.step == "gpu" for where in self.placements)
        ring = StateRing(self._device, step_buffer, NUM_STEP_BUFFERS) if passes else None  # a rank may own no element
        matrix_steps: MatrixSteps | MatrixExchange | None = None
        if matrices := dict.fromkeys(matrix for shape in self._shapes for matrix in shape.matrices):
            shared = workspace(self._device, matrices, self._config.muon)
            if isinstance(self._ranks, Group):
                matrix_steps = MatrixExchange(self._ranks, self._device, self._layers, self._shapes, shared)
            else:
                matrix_steps = MatrixSteps(shared)
        for state in self.states:
            state.join(ring, matrix_steps)
        streamed = [state.weights for state in self.states if isinstance(state.weights, StreamedWeights)]
        self.weight_ring = None
        if streamed:
            self.weight_ring = WeightRing(streamed, self._device, NUM_WEIGHT_BUFFERS, self._waits, external_writes)
        staging = [slab.cut(slab.num_bytes, torch.uint8) for slab in buffers[num_disk:]]
        return staging[0] if staging else torch.empty(0, dtype=torch.uint8)

    def leave_rings(self) -> None:
        """Release the rings before layers move."""
        rings = {state.ring for state in self.states if state.ring is not None}
        for state in self.states:
            state.leave_ring()
        for ring in rings:
            ring.h2d.synchronize()  # wait: states fetched for a skipped step before they move
        if self.weight_ring is not None:
            self.weight_ring.close()
            self.weight_ring = None
        if self.memory.disk is not None:
            self.memory.disk.use([])

    def bind_to_ram(self) -> None:
        """Bind the parameters whose weights live in RAM to that RAM."""
        for state in self.states:
            state.weights.bind_to_ram()

    def settle(self) -> None:
        """Finish updates, including copies, so that the newest weights are in the tensors they live in."""
        for state in self.states:
            state.settle()
        if self.memory.disk is not None:
            self.memory.disk.synchronize()  # wait: the disk before states are read

    def finish_updates(self) -> None:
        """Finish updates, so that parameters may be written."""
        if self.is_stepped:  # this method runs before every write of a parameter
            for state in self.states:
                state.weights.wait()  # wait: updates before parameters are written
            self.is_stepped = False
        if self.memory.disk is not None:
            self.memory.disk.synchronize()  # wait: the disk before parameters are written

    def take_over_external_writes(self, *, keep_remainder: bool = False) -> None:
        """Copy weights that the program wrote in place into the master weights, and note frozen ones."""
        for state in self.states:
            written = state.weights.external_writes_since()
            if written:
                self.finish_updates()
                state.take_over(written, keep_remainder=keep_remainder)
                if not state.layer.kind.is_trained:
                    self.written.update(view.parameter for view in written)

    def reset_states(self) -> None:
        """Set moments and step counts to zero, and the master weights to the working weights."""
        self.finish_updates()
        for state in self.trained:
            state.reset()
            self.forget_pages()

    def forget_pages(self) -> None:
        """Drop the page cache of states on disk, which were mapped to be read or written between steps."""
        if self.memory.disk is not None:
            self.memory.disk.file.forget_pages()

    def release(self) -> list[HostSlab]:
        """Free all memory and the disk, but the weights; returns the slabs of weights in RAM."""
        if self.memory.disk is not None:
            self.memory.disk.file.close()
        slabs = [state.memory.weights for state in self.states if state.memory.weights is not None]
        self.states.clear()
        if self.weight_ring is not None:
            self.weight_ring.synchronize()  # wait: fetches before weights are released
            self.weight_ring.close()
        return slabs


def _stays(state: LayerState, placement: Placement) -> bool:
    """Whether the placements differ at most in `activations`."""
    return replace(state.placement, activations=placement.activations) == placement


def _name_of_shared(weights: Sequence[LayerWeights]) -> str | None:
    """Name of a parameter whose memory is shared by a tensor unknown to the engine, or None."""
    ours = {id(tensor) for each in weights for tensor in each.own_tensors()}
    names = {
        tensor.untyped_storage()._cdata: view.name
        for each in weights
        for tensor, view in zip(each.own_tensors(), each.layer.views, strict=False)
    }

    drop_recomputed(lambda tensor: tensor.layout == torch.strided and tensor.untyped_storage()._cdata in names)

    def found() -> str | None:
        objects = gc.get_objects()
        known = ours | {id(each._plain) for each in objects if type(each) is Alias}  # aliases raise when used later
        for each in objects:
            if type(each) in (torch.Tensor, nn.Parameter) and id(each) not in known and each.layout == torch.strided:
                with suppress(RuntimeError):  # a tensor without storage
                    if (name := names.get(each.untyped_storage()._cdata)) is not None:
                        return name
        return None

    if found() is None:
        return None
    gc.collect()  # the tensor may be unreachable
    return found()


def read_ahead_bytes(plan: Plan, device: torch.device, *, shared: bool) -> int:
    """Upper bound of bytes to read or draw at once, over several layers, within the RAM that the plan leaves free.

    The free RAM is unknown if the plan does not count the framework or if several ranks share the parameters' pages
    (`shared`): then the bound is `READ_AHEAD_BYTES`.
    """
    if device.type != "cuda":
        return 0
    if "framework" not in plan.tiers["ram"] or shared:
        return READ_AHEAD_BYTES
    return max(0, min(READ_AHEAD_BYTES, plan.total_bytes("ram") + plan.basis.held_bytes - process_ram_bytes()))


def read_together(layers: Sequence[FlatLayer], most_bytes: int) -> dict[int, list[nn.Parameter]]:
    """Group consecutive layers: {index of the group's first layer: parameters to make real before it is taken over}.

    A group is one layer, or several layers of at most `most_bytes` together, so that all cores have parameters to draw.
    """
    found: dict[int, list[nn.Parameter]] = {}
    room, first = 0, 0
    for index, layer in enumerate(layers):
        parameters = [view.parameter for view in layer.views]
        num_bytes = sum(parameter.nbytes for parameter in parameters if parameter.is_meta)
        if num_bytes > room:
            room, first = most_bytes, index
        room -= num_bytes
        found.setdefault(first, []).extend(parameters)
    return found
