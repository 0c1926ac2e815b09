"""`PlacedModel`: places a model's flat layers by a plan, installs the hooks, and moves layers to another plan."""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import nn

from offloadkit.device import host_memory
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.process_memory import let_segments_grow
from offloadkit.device.state_file import DiskStates, Region, StateFile
from offloadkit.device.streams import BusyTime, Waits
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.distributed.stepped import Stepped
from offloadkit.errors import ConfigError, EngineStateError
from offloadkit.facts.changes import caching_configs, without_caches
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.hardware import process_ram_bytes, trim_heap
from offloadkit.offload.compile import compile_blocks
from offloadkit.offload.external_writes import Alias, ExternalWrites, refuse_to_empty, unwatched
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.matrix_steps import MatrixSteps
from offloadkit.offload.recompute import Checkpoint, OffloadedInputs, checkpoint_activations, drop_recomputed
from offloadkit.offload.shards import WeightGathers
from offloadkit.offload.shortage import RamWatch, with_less_vram
from offloadkit.offload.state_ring import StateRing
from offloadkit.offload.states import LayerState, exchanges_sums
from offloadkit.offload.unread import make_real
from offloadkit.offload.update import StepThread
from offloadkit.offload.weight_ring import StreamedWeights, WeightRing
from offloadkit.offload.weights import ForwardHooks, LayerWeights, PendingUpdate, TiedUses, move_rest
from offloadkit.planner import (
    NUM_STAGING,
    NUM_STATE_BUFFERS,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    LayerShape,
    Plan,
    step_buffer_bytes,
)
from offloadkit.planner.layout import check_matrices, workspace_bytes
from offloadkit.planner.phases import READ_AHEAD_BYTES


class PlacedModel:
    """A module whose trained parameters are views of flat layers, placed by a plan.

    Attributes:
        states: the flat layers, in definition order.
        trained: the flat layers that are not frozen.
        plan: the plan in use: the plan given, or a leaner one if the GPU was full.
        is_whole: the model can be trained on. False after a move failed and could not rebuild the shared buffers.
        gathers: with several ranks, brings the weights that other ranks stepped.
        offloaded_inputs: the inputs of recomputed blocks that wait in RAM.
        caching: configs that turn the key/value cache on and off.
        pinning_seconds: seconds spent populating and pinning RAM.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[FlatLayer],
        plan: Plan,
        config: OffloadConfig,
        device: torch.device,
        *,
        ranks: Solo | Group,
        ram_watch: RamWatch,
        step_thread: StepThread,
        settle: weakref.WeakMethod[Callable[[], None]],
        undo: ExitStack,
    ) -> None:
        """
        Args:
            ranks: the ranks that train together. Rank 0's weights are broadcast to all.
            ram_watch: checked while RAM fills.
            step_thread: adds up gradients in RAM.
            settle: called before the whole model's weights are saved or loaded.
            undo: receives the callbacks that release the module.

        Raises:
            OffloadkitError: not enough RAM, or the disk cannot be used.
            torch.OutOfMemoryError: the GPU is full, and no plan is leaner.
            ConfigError: the model has no repeated blocks to checkpoint; or a layer's weights are in different places
                on different ranks, or in RAM on several hosts.
        """
        self.module, self._device, self._config = module, device, config
        self._shapes, self._accumulation = plan.layers, config.gradient_accumulation
        self.plan = plan
        self.states: list[LayerState] = []
        self.is_whole = self._is_stepped = False
        self._disk: DiskStates | None = None
        self._regions: dict[FlatLayer, Region] = {}
        self._layers = tuple(layers)
        self._ring: WeightRing | None = None
        let_segments_grow(device)
        self._waits, self._ranks = Waits(device), ranks
        self.gathers = WeightGathers(ranks, device, self._waits) if isinstance(ranks, Group) else None
        self._stepped: dict[FlatLayer, Stepped] = {}
        self._check(plan.placements)
        parameters = [view.parameter for layer in layers for view in layer.views]
        cpu = torch.device("cpu")
        self._given = {each: (cpu if each.is_meta else each.device, each.dtype) for each in parameters}
        undo.callback(self._give_back)
        shared = self._begin(layers, ram_watch)
        for buffer in module.buffers():
            ranks.broadcast(buffer)
        undo.callback(self._bind_to_ram)  # the model must keep the weights that live in RAM, however the engine ends
        self.offloaded_inputs = OffloadedInputs(device, self._waits)
        self.caching = caching_configs(module)
        if config.compile_blocks:
            tied = {owner for layer in layers for view in layer.views if view.shared for owner, _ in view.owners}
            undo.callback(compile_blocks(module, tied))
        self._recomputed: dict[nn.Module, Checkpoint] | None = None
        self._weights_of: dict[nn.Module, list[LayerWeights]] = {}
        self._stop_recomputing: Callable[[], None] = lambda: None
        undo.callback(lambda: self._stop_recomputing())
        self.external_writes = ExternalWrites(
            self.states, self._finish_updates, lambda each: self.gradients.hook_last(each), device
        )
        undo.callback(self.external_writes.close)
        undo.callback(refuse_to_empty(module))
        self.forward_hooks = ForwardHooks(
            module, [state.weights for state in self.states], settle, self.external_writes
        )
        undo.callback(self.forward_hooks.remove)
        self.gradients = Gradients(
            self.views(),
            device,
            accumulation=self._accumulation,
            submit=step_thread.submit,
            got_gradient=self.forward_hooks.got_gradient,
            waits=self._waits,
            ranks=ranks,
        )
        undo.callback(self.gradients.remove)
        self._tied_uses = TiedUses(list(layers), self.gradients.receive)
        undo.callback(self._tied_uses.remove)
        begun = self.plan
        while True:
            try:
                self._arrange(shared) if self.plan is begun else self.move(self.plan.placements, lambda _: None)
                self._given.clear()
                return
            except torch.OutOfMemoryError:
                if not self._lean():
                    raise

    def _lean(self) -> bool:
        """Out of VRAM while placing: switch to a plan with less in VRAM. Returns whether such a plan exists.

        Several ranks keep their plan.
        """
        leaner = with_less_vram(self.plan, self._device) if self._ranks.size == 1 else None
        self.plan = leaner or self.plan
        return leaner is not None

    def _begin(self, layers: Sequence[FlatLayer], ram_watch: RamWatch) -> list[HostSlab]:
        """Place the whole module; returns the RAM buffers that layers share.

        If the GPU is full, the layer being placed is restored, the layers before it move to a leaner plan, and placing
        continues.
        """
        placed = {view.parameter for layer in layers for view in layer.views}
        while True:
            try:
                for at, where in self._changes(self.plan.placements):  # several ranks keep their plan: no changes
                    self.states[at] = self._elsewhere(self.states[at], where)
                shared = self._allocate(layers, self.plan, ram_watch)
                move_rest(self.module, placed, self._device, self._config.working_dtype, self._make_real)
                for state in self.states:  # drawing a layer counts versions of others, whose bits it does not change
                    state.weights.ignore_earlier_writes()
                return shared
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # frees memory that the failed layer had allocated
                if not self._lean():
                    raise

    def _give_back(self) -> None:
        """If the build failed, restore the parameters, so that another attempt trains the same numbers."""
        while self.states and self._given:
            self.states.pop().give_back(self._given)

    def _allocate(self, layers: Sequence[FlatLayer], plan: Plan, ram_watch: RamWatch) -> list[HostSlab]:
        """Make the missing states, each with a slab in RAM; returns the RAM buffers that layers share."""
        placements = plan.placements
        placed = list(zip(layers, self._shapes, placements, strict=True))[len(self.states) :]
        sizes = [self._own_bytes(shape, where) for _, shape, where in placed]
        shared = self._shared_sizes(placements)
        started = time.perf_counter()
        gc.collect()  # an engine that an exception left behind may be held by reference cycles only
        in_ram = [(layer, shape) for layer, shape, where in placed if where.weights == "ram"]
        of_weights = [] if self._ranks.size > 1 else [shape.weight_bytes() for _, shape in in_ram]
        slabs = iter(host_memory.allocate([*sizes, *shared, *of_weights], self._device, "the optimizer states"))
        own, buffers = list(islice(slabs, len(sizes))), list(islice(slabs, len(shared)))
        weights_slabs = dict(zip((layer for layer, _ in in_ram), slabs, strict=False))
        weights_slabs |= self._share([(layer, shape.weight_bytes()) for layer, shape in in_ram], "weights")
        sums_slabs = self._share_sums([(layer, shape) for layer, shape, where in placed if where.gradients == "ram"])
        self.pinning_seconds = time.perf_counter() - started
        self._take_disk([(layer, shape) for layer, shape, placement in placed if placement.states == "disk"])
        most_ahead = read_ahead_bytes(plan, self._device, shared=self._ranks.size > 1)
        together = read_together([layer for layer, _, _ in placed], most_ahead)
        for index, ((layer, _, placement), slab) in enumerate(zip(placed, own, strict=True)):
            if index in together:
                self._make_real(together[index])
            state = LayerState(
                layer,
                placement,
                slab,
                self._config,
                self._device,
                self._waits,
                region=self._regions.get(layer),
                weights_slab=weights_slabs.get(layer),
                bring=self._bring,
                stepped=self._stepped.get(layer),
                sums_slab=sums_slabs.get(layer),
            )
            state.take_parameters()
            trim_heap()  # otherwise freed holes of one matrix's size remain, and the next layer's matrices do not fit
            self.states.append(state)
            ram_watch.check()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return buffers

    def _make_real(self, parameters: Sequence[nn.Parameter]) -> None:
        """Read or draw the parameters that are still on the meta device, and broadcast rank 0's numbers."""
        make_real(parameters)
        for parameter in parameters:
            if not parameter.is_meta:
                self._ranks.broadcast(parameter)

    def _check(self, placements: Sequence[Placement]) -> None:
        """
        Raises:
            ConfigError: a layer's weights, or exchanged gradient sums, are in VRAM on one rank and in RAM on another;
                or the CPU of a machine with a GPU would step matrices.
        """
        if self._device.type != "cpu":
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

    @property
    def _bring(self) -> Callable[[LayerWeights], None] | None:
        """Several ranks only: fetches weights in VRAM that another rank has stepped."""
        return None if self.gathers is None else self.gathers.bring

    def _share(self, sizes: Sequence[tuple[FlatLayer, int]], what: str) -> dict[FlatLayer, HostSlab]:
        """Several ranks only: allocate shared RAM, (layer, bytes). A collective: sizes must agree on all ranks."""
        if not isinstance(self._ranks, Group) or not sizes:
            return {}
        if not self._stepped:
            self._stepped = dict(zip(self._layers, self._ranks.stepped(len(self._layers)), strict=True))
        num_bytes = [size for _, size in sizes]
        files, part = self._ranks.share(num_bytes), (self._ranks.rank, self._ranks.size)
        with self._ranks.together(f"taking RAM for {what}"):  # and no rank writes before all ranks have populated it
            slabs = host_memory.allocate_shared(files, num_bytes, self._device, f"the {what} in RAM", part)
        return dict(zip((layer for layer, _ in sizes), slabs, strict=True))

    def _share_sums(self, layers: Sequence[tuple[FlatLayer, LayerShape]]) -> dict[FlatLayer, HostSlab]:
        return self._share(
            [
                (layer, shape.num_ranks * shape.window_bytes(self._accumulation))
                for layer, shape in layers
                if shape.sums_whole(self._accumulation)
            ],
            "sums of gradients",
        )

    def _own_bytes(self, shape: LayerShape, placement: Placement) -> int:
        """RAM of a layer's own slab. Norm sums, weights in RAM and exchanged gradient sums have separate slabs."""
        total = sum(shape.ram_bytes(placement, self._accumulation).values()) - shape.sums_bytes()
        if shape.sums_whole(self._accumulation) and placement.gradients == "ram":
            total -= shape.window_bytes(self._accumulation)
        return total - (shape.stepped_bytes() if placement.weights == "ram" else 0)

    @staticmethod
    def _weight_bytes(shape: LayerShape, placement: Placement) -> int:
        return shape.weight_bytes() if placement.weights == "ram" else 0

    def _shared_sizes(self, placements: Sequence[Placement]) -> list[int]:
        """Bytes of the RAM buffers that layers share: for states on disk first, then staging for accumulation."""
        placed = list(zip(self._shapes, placements, strict=True))
        on_disk = [sum(shape.state_bytes().values()) for shape, placement in placed if placement.states == "disk"]
        through_ram = [
            shape.staged_bytes(self._accumulation) for shape, placement in placed if placement.gradients == "ram"
        ]
        num_staging = NUM_STAGING if self._accumulation > 1 and through_ram else 0
        return [max(on_disk, default=0)] * (NUM_STATE_BUFFERS if on_disk else 0) + [
            max(through_ram, default=0)
        ] * num_staging

    def _take_disk(self, layers: Sequence[tuple[FlatLayer, LayerShape]]) -> None:
        """Give each layer without one a region on disk. The layer keeps the region until the engine is closed."""
        new = [(layer, sum(shape.state_bytes().values())) for layer, shape in layers if layer not in self._regions]
        if not new:
            return
        sizes = [size for _, size in new]
        if self._disk is None:
            self._disk = DiskStates(StateFile(self._config.disk or tempfile.gettempdir(), sizes), [])
            indices = list(range(len(sizes)))
        else:
            indices = self._disk.file.add(sizes)
        disk = self._disk
        self._regions |= {layer: Region(disk, at) for (layer, _), at in zip(new, indices, strict=True)}

    # ---- what layers share, and moving -------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether forward or backward is running."""
        return self._waits.phase is not None

    @property
    def recomputes_in_training(self) -> bool:
        """Whether transformers' own checkpointing recomputes blocks, which it does in training mode only."""
        return any(getattr(block, "gradient_checkpointing", False) for block in self._recomputed or ())

    @property
    def trained(self) -> list[LayerState]:
        return [state for state in self.states if state.layer.kind.is_trained]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Current placement of each layer."""
        return tuple(state.placement for state in self.states)

    @property
    def assigned(self) -> tuple[Placement, ...]:
        """`placements`, with `step` set to the processor that steps the layer next."""
        return tuple(
            replace(state.placement, step="gpu" if state.on_gpu else "cpu") if state.switchable else state.placement
            for state in self.states
        )

    def _arrange(self, shared: Sequence[HostSlab]) -> None:
        """Build everything that layers share for the current placements: buffers, rings, block recomputation."""
        placed = list(zip(self._shapes, self.placements, strict=True))
        num_disk = NUM_STATE_BUFFERS if any(where.states == "disk" for _, where in placed) else 0
        if self._disk is not None:
            self._disk.use(shared[:num_disk])
        step_buffer = step_buffer_bytes(placed, self._accumulation)
        ring = StateRing(self._device, step_buffer, NUM_STEP_BUFFERS) if step_buffer else None
        workspace = workspace_bytes(self._shapes)
        matrix_steps = MatrixSteps(self._device, workspace) if workspace else None
        for state in self.states:
            state.join(ring, matrix_steps)
        streamed = [state.weights for state in self.states if isinstance(state.weights, StreamedWeights)]
        self._ring = None
        if streamed:
            self._ring = WeightRing(streamed, self._device, NUM_WEIGHT_BUFFERS, self._waits, self.external_writes)
        self._recompute_blocks()
        staging = [slab.cut(slab.num_bytes, torch.uint8) for slab in shared[num_disk:]]
        self.gradients.arrange([state.gradient for state in self.trained], staging)
        self.is_whole = True

    def _dismantle(self) -> None:
        self.is_whole = False
        self.gradients.forget_buffers()
        rings = {state.ring for state in self.states if state.ring is not None}
        for state in self.states:
            state.leave_ring()
        for ring in rings:
            ring.h2d.synchronize()  # wait: states fetched for a skipped step before they move
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._disk is not None:
            self._disk.use([])

    def check_movable(self, placements: Sequence[Placement]) -> None:
        """
        Raises:
            EngineStateError: another tensor shares the memory of a parameter that would move.
        """
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

    def move(self, placements: Sequence[Placement], moved: Callable[[LayerState], None]) -> None:
        """Bring each layer to its place in `placements`. A collective.

        All updates must be done, and no gradient pending. At most one layer exists twice at a time, and peak memory is
        the larger of before and after, plus at most two layers. After an error, `self.placements` says which layers
        have moved, and `is_whole` whether training can go on; with several ranks it is False on all.

        Args:
            moved: called with each new state, while the old state still exists.

        Raises:
            RankError: another rank's move failed.
        """
        self._check(placements)
        changes = self._changes(placements)
        shared, sums = self._shared_in(placements)
        try:
            with self._ranks.together("moving to another plan"):
                self._change(changes, moved, shared, sums)
        except BaseException:
            if self._ranks.size > 1:
                self.is_whole = False
            raise

    def _change(
        self,
        changes: Sequence[tuple[int, Placement]],
        moved: Callable[[LayerState], None],
        shared: Mapping[FlatLayer, HostSlab],
        sums: Mapping[FlatLayer, HostSlab],
    ) -> None:
        if not changes and self.is_whole:
            return
        self._dismantle()
        try:
            with unwatched():
                for at, where in changes:
                    self._move_layer(at, where, moved, shared, sums)
        finally:
            trim_heap()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if all(state.weights.flat.numel() for state in self.states):  # False if an interrupt came in mid-layer
                sizes = self._shared_sizes(self.placements)
                self._arrange(host_memory.allocate(sizes, self._device, "the buffers of gradients and states"))

    def _changes(self, placements: Sequence[Placement]) -> list[tuple[int, Placement]]:
        """The layers that must move, in order, as (index, new placement).

        A layer that takes VRAM moves as soon as the total does not exceed the final one. Until then, layers that free
        VRAM move first; they take RAM. Layers that go to disk get a region here.
        """

        def vram(at: int, where: Placement) -> int:
            return sum(self._shapes[at].vram_bytes(where, self._accumulation).values())

        def taken(change: tuple[int, Placement]) -> tuple[int, int]:
            at, where = change
            more = vram(at, where) - vram(at, self.states[at].placement)
            return more, self._own_bytes(self._shapes[at], where) + self._weight_bytes(self._shapes[at], where)

        found = [(at, placements[at]) for at, state in enumerate(self.states) if state.placement != placements[at]]
        self._take_disk([(self.states[at].layer, self._shapes[at]) for at, where in found if where.states == "disk"])
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

    def _shared_in(
        self, placements: Sequence[Placement]
    ) -> tuple[dict[FlatLayer, HostSlab], dict[FlatLayer, HostSlab]]:
        """Several ranks only: shared RAM for weights and for gradient sums that move from VRAM to RAM."""
        new = list(zip(self._layers, self._shapes, self.placements, placements, strict=True))
        weights = [
            (layer, shape.weight_bytes())
            for layer, shape, old, where in new
            if (old.weights, where.weights) == ("vram", "ram")
        ]
        sums = [
            (layer, shape) for layer, shape, old, where in new if (old.gradients, where.gradients) == ("vram", "ram")
        ]
        return self._share(weights, "weights"), self._share_sums(sums)

    def _move_layer(
        self,
        at: int,
        placement: Placement,
        moved: Callable[[LayerState], None],
        shared: Mapping[FlatLayer, HostSlab],
        sums: Mapping[FlatLayer, HostSlab],
    ) -> None:
        old = self.states[at]
        new = self._elsewhere(old, placement, shared.get(old.layer), sums.get(old.layer))
        if new is not old:
            self.forward_hooks.exchange(old.weights, new.weights)
            self.external_writes.moved(new)
            moved(new)
            self.states[at] = new

    def _elsewhere(
        self,
        old: LayerState,
        placement: Placement,
        shared: HostSlab | None = None,
        sums: HostSlab | None = None,
    ) -> LayerState:
        """The layer's state in another placement, which may be `old` itself. After an error `old` is unchanged; after
        a move `old` must not be used any more.

        Args:
            shared: several ranks only: RAM for weights that come from VRAM.
            sums: several ranks only: RAM for gradient sums that come from VRAM.
        """
        if _stays(old, placement):
            old.placement = placement
            return old
        shape = self._shapes[self.states.index(old)]
        sizes = [self._own_bytes(shape, placement)]
        if self._ranks.size == 1:
            sizes.append(self._weight_bytes(shape, placement))
        slab, *of_weights = host_memory.allocate(sizes, self._device, "a layer's states")
        weights_slab = None
        if placement.weights == "ram":
            weights_slab = shared or old.weights_slab if self._ranks.size > 1 else of_weights[0]
            assert weights_slab is not None
            weights_slab.clear()
        sums_slab = (sums or old.sums_slab) if placement.gradients == "ram" else None
        if sums_slab is not None:
            sums_slab.clear()
        return old.moved(
            placement,
            slab,
            region=self._regions[old.layer] if placement.states == "disk" else None,
            weights_slab=weights_slab,
            bring=self._bring,
            stepped=self._stepped.get(old.layer),
            sums_slab=sums_slab,
        )

    def _recompute_blocks(self) -> None:
        choices: dict[nn.Module, Checkpoint] = {}
        self._weights_of.clear()
        for state in self.states:
            block = state.layer.block
            if block is not None:
                self._weights_of.setdefault(block, []).append(state.weights)
                if (activations := state.placement.activations) != "keep":
                    choices[block] = activations
        if choices == self._recomputed:
            return
        self._stop_recomputing()
        self._stop_recomputing = lambda: None
        if choices or self._config.activation_checkpointing:
            compiled = self._config.compile_blocks
            self._stop_recomputing = checkpoint_activations(
                self.module, choices, self._weights_of, self.offloaded_inputs, compiled=compiled
            )
        self._recomputed = choices

    def _bind_to_ram(self) -> None:
        for state in self.states:
            if isinstance(state.weights, StreamedWeights):
                state.weights.bind_to_ram()

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """While open: forward builds a graph and does not use the key/value cache."""
        saved_tensors = nullcontext() if self._ring is None else self._ring.saved_tensors()
        with self._waits.during("forward"), without_caches(self.caching), saved_tensors:
            try:
                yield
            except BaseException:
                self.end_modules()
                raise

    def end_modules(self) -> None:
        """Reset hooks after an interrupted forward or backward, because torch skips forward hooks then."""
        self._tied_uses.end()
        self.external_writes.watch_all()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """While open: backward runs. At the end, the micro-batch's gradients have been sent."""
        recomputing = nullcontext() if self._ring is None else self._ring.backward()
        if self.gathers is not None:
            self.gathers.bring()  # all ranks fetch weights before they exchange gradients
        try:
            with self._waits.during("backward"), self.external_writes.released(), recomputing:
                yield
                self.gradients.end_of_backward()
        except BaseException:
            self.end_modules()
            raise

    def settle(self) -> None:
        """Finish pending updates, including copies, so that the newest weights are in the tensors they live in."""
        if not self.is_whole:
            return  # a move failed; everything was settled before it
        for state in self.states:
            state.settle()
        if self._disk is not None:
            self._disk.synchronize()  # wait: the disk before states are read

    def take_over_external_writes(self, *, keep_remainder: bool = False) -> None:
        """Copy weights that the program wrote in place into the master weights."""
        for state in self.states:
            written = state.weights.external_writes_since()
            if written:
                self._finish_updates()
                state.take_over(written, keep_remainder=keep_remainder)

    def _finish_updates(self) -> None:
        if self._is_stepped:  # this method runs before every write of a parameter
            for pending in self.states:
                pending.weights.wait()  # wait: updates before parameters are written
            self._is_stepped = False
        if self._disk is not None:
            self._disk.synchronize()  # wait: the disk before parameters are written

    def join_remaining_exchanges(self) -> None:
        """This rank cannot finish its micro-batch: take part in the collectives that the other ranks still wait for.

        The gradients sent are meaningless; all ranks drop the window.
        """
        if self.gathers is not None:
            self.gathers.bring()
        with torch.no_grad(), self.external_writes.released():
            self.gradients.join_remaining_exchanges()

    @property
    def forward_order(self) -> list[LayerState]:
        """The trained layers in the order of the last forward."""
        by_weights = {state.weights: state for state in self.trained}
        return [by_weights[weights] for weights in self.forward_hooks.forward_order() if weights in by_weights]

    def start_update(
        self, order: Sequence[LayerState] | None = None
    ) -> list[tuple[LayerState, set[int], PendingUpdate]]:
        """End the accumulation window. Returns the layers to step with their parameters' indices, in forward order;
        forward waits for them from now on.

        order: several ranks only: the order that all ranks agreed on.
        """
        order = self.forward_order if order is None else order
        self._is_stepped = True
        self.gradients.end_of_window()
        layers = []
        for state in order:
            views = set(state.gradient.window)
            if views:
                layers.append((state, views, state.weights.start_update(views)))
                state.gradient.window.clear()
        if self.gathers is not None:
            self.gathers.begin([state.weights for state, _, _ in layers if state.placement.weights == "vram"])
        return layers

    def forget_pending(self) -> None:
        """Cancel the waits of forward for pending updates."""
        if self.gathers is not None:
            self.gathers.forget()
        for state in self.states:
            if state.weights.pending is not None and not state.weights.pending.recorded.is_set():
                state.weights.pending.record(None)

    def abandon_ranks(self) -> bool:
        """Stop waiting for other ranks, after this rank's update is done.

        Returns:
            Whether weights lack updates of other ranks.
        """
        lacks = self.gathers is not None and self.gathers.has_any
        lacks |= any(not stepped.reached() for stepped in self._stepped.values())
        self.forget_pending()
        return lacks

    def take_busy(self) -> list[tuple[str, BusyTime]]:
        """Since the last call: waits of the compute stream by name, and busy time of the "h2d" and "d2h" copies."""
        copies = [("d2h", self.gradients.d2h), ("d2h", self.offloaded_inputs.d2h), ("h2d", self.offloaded_inputs.h2d)]
        if self._ring is not None:
            copies.append(("h2d", self._ring.h2d))
        return [*self._waits.take().items(), *((name, stream.take_busy()) for name, stream in copies)]

    def forget_pages(self) -> None:
        """Drop the page cache of states on disk, which were mapped to be read or written between steps."""
        if self._disk is not None:
            self._disk.file.forget_pages()

    def views(self) -> Iterator[ParameterView]:
        """Views of all trained parameters."""
        for state in self.trained:
            yield from state.layer.views

    def release(self) -> None:
        """Free memory and disk after all steps and copies are done. The model keeps its weights.

        If any weights live in RAM, they become ordinary memory in place, and the whole model moves to RAM. States and
        gradients are freed first, so RAM use stays below training's unless VRAM holds more than they did.
        """
        if self._disk is not None:
            self._disk.file.close()
            self._disk = None
        slabs = [state.weights_slab for state in self.states if state.weights_slab is not None]
        self.states.clear()
        self.gradients.forget_buffers()  # a loss that the user keeps references the hooks of tied weights, and so it
        del self.gradients
        self.offloaded_inputs.release()
        if self._ring is not None:
            self._ring.synchronize()  # wait: fetches before weights are released
            self._ring.close()
        if slabs:  # also after a failed move, when there is no ring
            for slab in slabs:
                slab.make_ordinary()
            self.module.to("cpu")


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
