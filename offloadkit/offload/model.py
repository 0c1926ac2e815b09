"""A model whose parts lie where the plan says, and the hooks that keep it so while it runs."""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count, islice

import torch
from torch import nn

from offloadkit.config import OffloadConfig
from offloadkit.device import host_memory
from offloadkit.device.process_memory import let_segments_grow
from offloadkit.device.state_file import DiskStates, Region, StateFile
from offloadkit.device.streams import BusyTime, Waits
from offloadkit.hardware import trim_heap
from offloadkit.offload.caches import caching_configs, without_caches
from offloadkit.offload.compile import compile_blocks
from offloadkit.offload.gradients import Gradients
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.outside import Outside
from offloadkit.offload.recompute import Checkpoint, OffloadedInputs, checkpoint_activations
from offloadkit.offload.shortage import RamWatch
from offloadkit.offload.state_ring import StateRing
from offloadkit.offload.states import LayerState, Materialise
from offloadkit.offload.weight_ring import StreamedWeights, WeightRing
from offloadkit.offload.weights import ForwardHooks, LayerWeights, PendingUpdate, TiedUses, move_rest
from offloadkit.planner import (
    NUM_STAGING,
    NUM_STATE_BUFFERS,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    Plan,
    step_buffer_bytes,
)


class PlacedModel:
    """A module's flat layers in their places; its parameters are views of them.

    Attributes:
        states: the flat layers, in definition order.
        gradients: what backward brings.
        forward_hooks: what forward waits for.
        outside: what others do to the weights.
        caching: configs that say whether keys and values are cached.
        pinning_seconds: how long RAM took to be populated and pinned.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[FlatLayer],
        plan: Plan,
        config: OffloadConfig,
        device: torch.device,
        *,
        materialise: Materialise | None,
        ram_watch: RamWatch,
        submit: Callable[[Callable[[], None]], None],
        settle: weakref.WeakMethod[Callable[[], None]],
        undo: ExitStack,
    ) -> None:
        """
        Args:
            materialise: makes parameters without memory real, or None where all have some.
            ram_watch: checked while RAM fills.
            submit: queues work for the stepping thread.
            settle: called before the whole model's weights are saved or loaded.
            undo: told how to let go of the module.

        Raises:
            OffloadkitError: not enough RAM, or a disk that will not do.
            ConfigError: checkpointing of a model without repeated blocks.
        """
        self.module, self._plan, self._device = module, plan, device
        self._materialise, self._ram_watch = materialise, ram_watch
        self._config, self._accumulation = config, config.gradient_accumulation
        self._disk: DiskStates | None = None
        let_segments_grow(device)
        self._waits = Waits(device)
        self.states, staging = self._allocate(layers)
        trained = {view.parameter for layer in layers for view in layer.views}
        move_rest(module, trained, device, config.working_dtype, materialise)
        weights = [state.weights for state in self.states]
        streamed = [layer for layer in weights if isinstance(layer, StreamedWeights)]
        self._ring = WeightRing(streamed, device, NUM_WEIGHT_BUFFERS, self._waits) if streamed else None
        for layer in streamed:
            undo.callback(layer.bind_to_ram)  # however the engine ends, what is in RAM is what the model has
        self._offloaded = OffloadedInputs(device, self._waits)
        self.caching = caching_configs(module)
        if config.compile_blocks:
            tied = {owner for layer in layers for view in layer.views if view.shared for owner, _ in view.owners}
            undo.callback(compile_blocks(module, tied))
        self._checkpoint_blocks(config, undo)
        self.outside = Outside(self.states, self._finish_updates)
        undo.callback(self.outside.close)
        self.forward_hooks = ForwardHooks(module, weights, settle, self.outside)
        undo.callback(self.forward_hooks.remove)
        self.gradients = Gradients(
            [state.gradient for state in self.states],
            accumulation=self._accumulation,
            staging=staging,
            submit=submit,
            got_gradient=self.forward_hooks.got_gradient,
            waits=self._waits,
        )
        undo.callback(self.gradients.remove)
        undo.callback(TiedUses(list(layers), self.gradients.receive).remove)

    def _allocate(self, layers: Sequence[FlatLayer]) -> tuple[list[LayerState], list[torch.Tensor]]:
        """The layers' states, and the staging buffers for accumulation in RAM."""
        placed = list(zip(layers, self._plan.layers, self._plan.placements, strict=True))
        in_ram = [shape.weight_bytes() if placement.weights == "ram" else 0 for _, shape, placement in placed]
        sizes = [  # the norm's sums have a place of their own, and so have weights that live in RAM
            sum(shape.ram_bytes(placement, self._accumulation).values()) - shape.sums_bytes() - weights
            for (_, shape, placement), weights in zip(placed, in_ram, strict=True)
        ]
        through_ram = [shape.bucket_bytes() for _, shape, placement in placed if placement.gradients == "ram"]
        num_staging = NUM_STAGING if self._accumulation > 1 and through_ram else 0
        staging = max(through_ram, default=0)
        on_disk = [sum(shape.state_bytes().values()) for _, shape, placement in placed if placement.states == "disk"]
        shared = [*[staging] * num_staging, *[max(on_disk, default=0)] * (NUM_STATE_BUFFERS if on_disk else 0)]
        started = time.perf_counter()
        gc.collect()  # an engine that an exception left behind may be held by cycles only
        needed = [*sizes, *shared, *filter(None, in_ram)]
        slabs = iter(host_memory.allocate(needed, self._device, "the optimizer states"))
        self.pinning_seconds = time.perf_counter() - started
        own, shared_slabs = list(islice(slabs, len(sizes))), list(islice(slabs, len(shared)))
        if on_disk:
            file = StateFile(self._config.disk or tempfile.gettempdir(), on_disk)
            self._disk = DiskStates(file, shared_slabs[num_staging:])
        regions = count()
        step_buffer = step_buffer_bytes([item[1:] for item in placed], self._accumulation)
        ring = StateRing(self._device, step_buffer, NUM_STEP_BUFFERS) if step_buffer else None
        states = []
        for (layer, _, placement), slab in zip(placed, own, strict=True):
            region = Region(self._disk, next(regions)) if self._disk and placement.states == "disk" else None
            state = LayerState(
                layer,
                placement,
                slab,
                self._config,
                self._device,
                self._waits,
                region=region,
                ring=ring,
                weights_slab=next(slabs) if placement.weights == "ram" else None,
            )
            state.take_parameters(self._materialise)
            trim_heap()  # else holes of the size of matrices stay, which the next layer's do not fit into
            states.append(state)
            self._ram_watch.check()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return states, [slab.cut(staging, torch.uint8) for slab in shared_slabs[:num_staging]]

    def _checkpoint_blocks(self, config: OffloadConfig, undo: ExitStack) -> None:
        choices: dict[nn.Module, Checkpoint] = {}
        weights: dict[nn.Module, list[LayerWeights]] = {}
        for state in self.states:
            block = state.layer.block
            if block is not None:
                weights.setdefault(block, []).append(state.weights)
                if (activations := state.placement.activations) != "keep":
                    choices[block] = activations
        if choices or config.activation_checkpointing:
            undo.callback(
                checkpoint_activations(self.module, choices, weights, self._offloaded, compiled=config.compile_blocks)
            )

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """While it is open, the module's forward builds a graph, and caches nothing."""
        saved_tensors = nullcontext() if self._ring is None else self._ring.saved_tensors()
        with self._waits.during("forward"), without_caches(self.caching), saved_tensors:
            yield

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """While it is open, backward runs; at its end the micro-batch's gradients are on their way."""
        if self._ring is not None:
            self._ring.in_backward = True
        try:
            with self._waits.during("backward"), self.outside.released():
                yield
                self.gradients.end_of_backward()
        finally:
            if self._ring is not None:
                self._ring.in_backward = False

    def settle(self) -> None:
        """Have the newest weights where they live, the copies of an update that is done included."""
        for state in self.states:
            state.settle()
        if self._disk is not None:
            self._disk.synchronize()

    def take_over_outside_writes(self, *, keep_remainder: bool = False) -> None:
        """Weights that were written in place from outside become the master weights."""
        for state in self.states:
            written = state.weights.written_outside()
            if written:
                self._finish_updates()
                state.take_over(written, keep_remainder=keep_remainder)

    def _finish_updates(self) -> None:
        """Wait until no thread steps a layer or moves its states."""
        for pending in self.states:
            pending.weights.wait()
        if self._disk is not None:
            self._disk.synchronize()

    def start_update(self) -> list[tuple[LayerState, set[int], PendingUpdate]]:
        """The window ends: what is to be stepped, in the order in which forward asks for it; it waits from here on."""
        self.gradients.end_of_window()
        layers = []
        by_weights = {state.weights: state for state in self.states}
        for weights in self.forward_hooks.forward_order():
            state = by_weights[weights]
            views = set(state.gradient.window)
            if views:
                layers.append((state, views, weights.start_update(views)))
                state.gradient.window.clear()
        return layers

    def forget_pending(self) -> None:
        """Let forward wait for no update."""
        for state in self.states:
            if state.weights.pending is not None and not state.weights.pending.recorded.is_set():
                state.weights.pending.record(None)

    def take_busy(self) -> list[tuple[str, BusyTime]]:
        """Since the last call: the compute stream's waits by name, and the copies, "h2d" and "d2h"."""
        copies = [("d2h", self.gradients.d2h), ("d2h", self._offloaded.d2h), ("h2d", self._offloaded.h2d)]
        if self._ring is not None:
            copies.append(("h2d", self._ring.h2d))
        return [*self._waits.take().items(), *((name, stream.take_busy()) for name, stream in copies)]

    def forget_pages(self) -> None:
        """Drop the pages of states on disk from RAM; they were mapped to be read or written between steps."""
        if self._disk is not None:
            self._disk.file.forget_pages()

    def views(self) -> Iterator[ParameterView]:
        """Every trained parameter's place."""
        for state in self.states:
            yield from state.layer.views

    def release(self) -> None:
        """Give memory and disk back, once nothing steps or copies any more. The model keeps its weights.

        States and gradients go first. Weights that live in RAM stay where they are, as ordinary memory. So no moment
        takes more RAM than training did, unless VRAM holds more than that: a model with weights in RAM is in RAM as a
        whole then.
        """
        if self._disk is not None:
            self._disk.file.close()
            self._disk = None
        slabs = [state.weights_slab for state in self.states if state.weights_slab is not None]
        self.states.clear()
        del self.gradients
        self._offloaded.release()
        if self._ring is not None:
            self._ring.synchronize()
            self._ring.release()
            for slab in slabs:
                slab.make_ordinary()
            self.module.to("cpu")
