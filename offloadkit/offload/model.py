"""`PlacedModel`: places a model's flat layers by a plan, installs the hooks, and moves layers to another plan."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from offloadkit.device.host_memory import HostSlab
from offloadkit.device.process_memory import let_segments_grow
from offloadkit.device.streams import BusyTime, Waits
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.facts.changes import caching_configs, without_caches
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.graphs import FIRST_TORCH, has_graphs, may_capture, torch_is_too_old
from offloadkit.facts.hardware import trim_heap
from offloadkit.offload.compile import compile_blocks
from offloadkit.offload.external_writes import ExternalWrites, refuse_to_empty, unwatched
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.offload.layer_memory import Changes
from offloadkit.offload.layers import FlatLayer, repeated_blocks
from offloadkit.offload.placed_layers import PlacedLayers
from offloadkit.offload.recompute import Checkpoint, OffloadedInputs, Recomputation
from offloadkit.offload.shards import WeightGathers
from offloadkit.offload.shortage import RamWatch, with_less_vram
from offloadkit.offload.states import LayerState
from offloadkit.offload.update import StepThread
from offloadkit.offload.weight_ring import StreamedWeights
from offloadkit.offload.weights import ForwardHooks, LayerWeights, PendingUpdate, TiedUses, move_rest
from offloadkit.planner import Plan

logger = logging.getLogger(__name__)


class PlacedModel:
    """A module whose trained parameters are views of flat layers, placed by a plan.

    Attributes:
        plan: the plan in use: the plan given, or a leaner one if the GPU was full.
        is_whole: the model can be trained on. False after a move failed and could not rebuild the shared buffers.
        gathers: with several ranks, brings the weights that other ranks stepped.
        offloaded_inputs: the inputs of recomputed blocks that wait in RAM.
        caching: configs that turn the key/value cache on and off.
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
            ConfigError: the model has no repeated blocks to checkpoint; or a layer's weights are in different places on
                different ranks, or in RAM on several hosts.
        """
        self.module, self._device, self._config, self._ranks = module, device, config, ranks
        self.plan, self.is_whole, self._num_shortages = plan, False, 0
        let_segments_grow(device)
        self._waits = Waits(device)
        self.gathers = WeightGathers(ranks, device, self._waits) if isinstance(ranks, Group) else None
        self.layers = PlacedLayers(layers, plan, config, device, ranks, self._waits, self.gathers)
        self.states = self.layers.states
        undo.callback(self.layers.give_back)
        buffers = self._read(layers, ram_watch)
        placed = {view.parameter for layer in layers for view in layer.views}
        self._rest = {each: _memory_and_version(each) for each in module.parameters() if each not in placed}
        for buffer in module.buffers():
            ranks.broadcast(buffer)
        # The model must keep the weights that live in RAM, however the engine ends.
        undo.callback(self.layers.bind_to_ram)
        self.offloaded_inputs = OffloadedInputs(device, self._waits)
        self.caching = caching_configs(module)
        tied = {owner for layer in layers for view in layer.views if view.shared for owner, _ in view.owners}
        if config.compile_blocks:
            undo.callback(compile_blocks(module, tied))
        self.graphs: BlockGraphs | None = None
        if may_capture(device.type, compiled=config.compile_blocks):
            self.graphs = BlockGraphs(repeated_blocks(module), device, tied)
            undo.callback(self.graphs.close)
        elif has_graphs(device.type) and torch_is_too_old():
            logger.warning("blocks run eagerly: CUDA graphs need torch %d.%d", *FIRST_TORCH)
        self.recomputation = Recomputation(
            module,
            self.offloaded_inputs,
            self.graphs,
            always=config.activation_checkpointing,
            compiled=config.compile_blocks,
            chosen_by_plan=config.placement is None,
        )
        undo.callback(self.recomputation.end)
        self.external_writes = ExternalWrites(
            self.states, self.layers.finish_updates, lambda each: self.gradients.hook_last(each), device
        )
        undo.callback(self.external_writes.close)
        undo.callback(refuse_to_empty(module))
        self.forward_hooks = ForwardHooks(
            module,
            [state.weights for state in self.states],
            settle,
            self.external_writes,
            reads_copies=_reads_none if self.graphs is None else self.graphs.reads_copies,
        )
        undo.callback(self.forward_hooks.remove)
        self.gradients = Gradients(
            self.layers.views(),
            device,
            accumulation=config.gradient_accumulation,
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
                self._arrange(buffers) if self.plan is begun else self.move(self.plan.placements, lambda _: None)
                self.layers.keep()
                self.follow(self.plan)
                return
            except torch.OutOfMemoryError as error:
                if not self._lean(error):
                    raise

    def follow(self, plan: Plan) -> None:
        """Use graphs if `plan` does, or if it does not know the micro-batch."""
        if self.graphs is not None:
            self.graphs.is_planned = plan.is_graphed or plan.basis.work is None
            if not self.graphs.is_planned:
                self.graphs.release()

    def _lean(self, error: torch.OutOfMemoryError) -> bool:
        """Out of VRAM while placing: switch to a plan with less in VRAM, if it exists. Several ranks keep their
        plan.
        """
        alone, times = self._ranks.size == 1, self._num_shortages
        leaner = with_less_vram(self.plan, self._device, error, times) if alone else None
        self._num_shortages += 1
        self.plan = leaner or self.plan
        return leaner is not None

    def _read(self, layers: Sequence[FlatLayer], ram_watch: RamWatch) -> list[HostSlab]:
        """Place the whole module; returns the RAM buffers that layers share.

        If the GPU is full, the layer being placed is restored, the layers before it move to a leaner plan, and placing
        continues.
        """
        placed = {view.parameter for layer in layers for view in layer.views}
        while True:
            try:
                buffers = self.layers.read(self.plan, ram_watch)
                move_rest(self.module, placed, self._device, self._config.working_dtype, self.layers.make_real)
                for state in self.states:  # drawing a layer counts versions of others, whose bits it does not change
                    state.weights.ignore_earlier_writes()
                return buffers
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # frees memory that the failed layer had allocated
                if not self._lean(error):
                    raise

    @property
    def trained(self) -> list[LayerState]:
        return self.layers.trained

    @property
    def unlike(self) -> list[int]:
        """Layers of "cheap" blocks whose second run had other matmuls, and which are recomputed as a whole."""
        blocks = self.recomputation.unlike or ()
        return [
            at
            for at, state in enumerate(self.states)
            if state.layer.block in blocks and state.placement.activations == "cheap"
        ]

    @property
    def is_busy(self) -> bool:
        """Whether forward or backward is running."""
        return self._waits.phase is not None

    def _arrange(self, buffers: Sequence[HostSlab]) -> None:
        """Build everything that layers share for the present placements."""
        staging = self.layers.join_rings(buffers, self.external_writes)
        weights: dict[nn.Module, list[LayerWeights]] = {}
        choices: dict[nn.Module, Checkpoint] = {}
        for state in self.states:
            if (block := state.layer.block) is not None:
                weights.setdefault(block, []).append(state.weights)
                if (activations := state.placement.activations) != "keep":
                    choices[block] = activations
        self.recomputation.arrange(choices, weights)
        if self.graphs is not None:
            self.graphs.arrange(weights, self.gradients.take)
        self.gradients.arrange([state.gradient for state in self.trained], staging)
        self.is_whole = True

    def move(self, placements: Sequence[Placement], moved: Callable[[LayerState], None]) -> None:
        """Bring each layer to its place in `placements`. A collective.

        All updates must be done, and no gradient pending. At most one layer exists twice at a time, and peak memory is
        the larger of before and after, plus at most two layers. After an error, `layers.placements` says which layers
        have moved, and `is_whole` whether training can go on; with several ranks it is False on all.

        Args:
            moved: called with each new state, while the old state still exists.

        Raises:
            RankError: another rank's move failed.
        """
        changes = self.layers.begin_move(placements)
        try:
            with self._ranks.together("moving to another plan"):
                if changes or not self.is_whole:
                    self._move(changes, moved)
        except BaseException:
            if self._ranks.size > 1:
                self.is_whole = False
            raise

    def _move(self, changes: Changes, moved: Callable[[LayerState], None]) -> None:
        def exchange(old: LayerState, new: LayerState) -> None:
            self.forward_hooks.exchange(old.weights, new.weights)
            self.external_writes.moved(new)
            moved(new)

        self.is_whole = False
        self.release_graphs()
        self.gradients.forget_buffers()
        self.layers.leave_rings()
        try:
            with unwatched():
                for at, where in changes:
                    self.layers.move(at, where, exchange)
        finally:
            trim_heap()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if self.layers.is_whole:
                self._arrange(self.layers.memory.buffers(self.layers.placements))

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """While open: forward builds a graph and does not use the key/value cache."""
        saved_tensors = nullcontext() if self.layers.weight_ring is None else self.layers.weight_ring.saved_tensors()
        graphed = nullcontext() if self.graphs is None else self.graphs.in_forward()
        with self._waits.during("forward"), without_caches(self.caching), saved_tensors, graphed:
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
    def in_backward(self, loss: torch.Tensor) -> Iterator[None]:
        """While open: the backward of `loss` runs. At the end, the micro-batch's gradients have been sent."""
        recomputing = nullcontext() if self.layers.weight_ring is None else self.layers.weight_ring.backward()
        if self.gathers is not None:
            self.gathers.bring()  # all ranks fetch weights before they exchange gradients
        if self.graphs is not None:
            self.graphs.begins_backward(loss)
        try:
            with self._waits.during("backward"), self.external_writes.released(), recomputing:
                yield
                self.gradients.end_of_backward()
            if self.graphs is not None:
                self.graphs.end_of_backward()
        except BaseException:
            self.end_modules()
            raise

    def streamed_bytes(self, within: nn.Module) -> int:
        """Bytes of the weights in RAM of blocks in `within`."""
        blocks = {*within.modules()}
        streamed = (each.weights for each in self.states if isinstance(each.weights, StreamedWeights))
        return sum(each.flat_bytes.numel() for each in streamed if each.layer.block in blocks)

    @contextmanager
    def resident_weights(self, within: nn.Module) -> Iterator[None]:
        """While open, blocks in `within` stay in VRAM, and no parameter is watched. See `WeightRing.resident`."""
        ring = self.layers.weight_ring
        with self.external_writes.released(), nullcontext() if ring is None else ring.resident({*within.modules()}):
            yield

    def release_graphs(self) -> None:
        """Free the VRAM of graphs, which only training uses. They are captured again."""
        if self.graphs is not None:
            self.graphs.release()

    @property
    def gave_up_graphs(self) -> bool:
        return self.graphs is not None and self.graphs.gave_up

    def give_up_graphs(self) -> bool:
        """Use no graphs any more, if there are some, or were in this window; returns whether. No backward follows."""
        if self.graphs is None or not self.graphs.forget_calls():
            return False
        self.graphs.give_up("the GPU was full")
        return True

    def settle(self) -> None:
        """Finish pending updates, including copies, so that the newest weights are in the tensors they live in."""
        if self.is_whole:  # otherwise a move failed; everything was settled before it
            self.layers.settle()

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
        """End the accumulation window. Returns the layers to step with their parameters' indices, in forward order
        (several ranks: in the agreed `order`); forward waits for them from now on.
        """
        order = self.forward_order if order is None else order
        self.layers.is_stepped = True
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
        """Stop waiting for other ranks, after this rank's update is done. Returns whether weights lack updates of other
        ranks.
        """
        lacks = self.gathers is not None and self.gathers.has_any
        lacks |= not all(stepped.reached() for stepped in self.layers.memory.stepped)
        self.forget_pending()
        return lacks

    def take_busy(self) -> list[tuple[str, BusyTime]]:
        """Since the last call: waits of the compute stream by name, and busy time of the "h2d" and "d2h" copies."""
        copies = [("d2h", self.gradients.d2h), ("d2h", self.offloaded_inputs.d2h), ("h2d", self.offloaded_inputs.h2d)]
        if self.layers.weight_ring is not None:
            copies.append(("h2d", self.layers.weight_ring.h2d))
        return [*self._waits.take().items(), *((name, stream.take_busy()) for name, stream in copies)]

    def frozen_weights(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Frozen weights where they live, with their version counters, by name. Call `settle` first.

        The counter is None for floating-point weights in no layer: nothing watches them, and `.data` hides writes.
        """
        homes = {
            view.parameter: state.weights.flat[view.elements].view(view.parameter.shape)
            for state in self.states
            if not state.layer.kind.is_trained
            for view in state.layer.views
        }
        with unwatched():
            return {
                name: (
                    homes.get(parameter, parameter.data),
                    None if parameter not in homes and parameter.is_floating_point() else parameter._version,
                )
                for name, parameter in self._frozen()
            }

    def written_frozen(self) -> set[str]:
        """Names of the frozen weights that the program has written since the model was placed. Call `settle` first.

        In-place writes to `.data` of a weight in no layer are not seen.
        """
        written = self.layers.written
        with unwatched():
            return {
                name
                for name, parameter in self._frozen()
                if parameter in written or self._rest.get(parameter) not in (None, _memory_and_version(parameter))
            }

    def _frozen(self) -> list[tuple[str, nn.Parameter]]:
        trained = {view.parameter for view in self.layers.views()}
        named = self.module.named_parameters(remove_duplicate=False)
        return [(name, parameter) for name, parameter in named if parameter not in trained]

    def release(self) -> None:
        """Free memory and disk after all steps and copies are done. The model keeps its weights.

        If any weights live in RAM, they become ordinary memory in place, and the whole model moves to RAM. States and
        gradients are freed first, so RAM use stays below training's unless VRAM holds more than they did.
        """
        self.gradients.forget_buffers()  # a loss that the user keeps references the hooks of tied weights, and so it
        del self.gradients
        slabs = self.layers.release()
        self.offloaded_inputs.release()
        for slab in slabs:
            slab.make_ordinary()
        if slabs:
            self.module.to("cpu")


def _reads_none(_: nn.Module) -> bool:
    return False


def _memory_and_version(parameter: nn.Parameter) -> tuple[int, int]:
    """Assigning `.data` changes the memory; other writes change the version."""
    return parameter.data_ptr(), parameter._version
