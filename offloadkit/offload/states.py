"""A flat layer's weights, optimizer states and gradient, placed by the plan, and its step on the CPU or the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from offloadkit.device.host_memory import SharedSlab
from offloadkit.device.streams import CopyStream, Event, Waits
from offloadkit.distributed.stepped import Stepped
from offloadkit.errors import ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels.dispatch import optimizer_step, split_into
from offloadkit.offload.external_writes import unwatched
from offloadkit.offload.layer_gradient import LayerGradient, runs
from offloadkit.offload.layer_memory import LayerMemory
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.matrix_exchange import MatrixExchange, MatrixStep
from offloadkit.offload.matrix_steps import MatrixSteps
from offloadkit.offload.state_ring import Loaded, StateRing, StreamedStates
from offloadkit.offload.weight_ring import SharedRam, StreamedWeights
from offloadkit.offload.weights import LayerWeights, LookedUpWeights
from offloadkit.optim.moments import random_key
from offloadkit.optim.reference import join_master, split_master
from offloadkit.optim.table import FlatState, Optimizer, Options, Segment
from offloadkit.planner import cpu_can_step, gpu_can_step, reaches_ram


@lru_cache(maxsize=256)
def _scalars(optimizer: Optimizer, options: Options, step: int) -> tuple[float, ...]:
    return optimizer.scalars(**vars(options), step=step)


def exchanges_sums(layer: FlatLayer, config: OffloadConfig) -> bool:
    """Whether ranks accumulate the whole layer over a window and then exchange the sums."""
    return bool(layer.cuts) and config.exchange == "step" and config.gradient_accumulation > 1


class Publication(NamedTuple):
    """A layer's new weights on their way from the GPU to RAM that the ranks share."""

    stepped: Stepped
    drained: Event | None
    """The end of the copy; None if this rank owns no part of the layer."""

    def done(self) -> bool:
        return self.drained is None or self.drained.done()

    def post(self) -> None:
        """Wait for the copy, then notify the other ranks."""
        if self.drained is not None:
            self.drained.synchronize()  # wait: states in RAM before other ranks know
        self.stepped.post()


_SPLIT = 1 << 22
"""Master weights are split this many elements at a time, to limit temporary VRAM."""


class LayerState:
    """A flat layer as the optimizer step sees it.

    With several ranks, the states and the gradient cover the part that this rank owns (`layer.shard`). Views and their
    indices refer to the whole layer.

    Attributes:
        flat: 1-D working weights and the arrays of `layer.states`, placed by the plan. If the CPU can step the layer,
            `flat.weights` are the streamed weights, or a copy in RAM of resident weights; else they are the resident
            weights. States on disk are mapped here; a step works on a copy in RAM.
        on_gpu: the GPU does the next step. The stepping thread may change it if the layer is `switchable`.
        switchable: both processors can step the layer, and the user has not fixed the placement.
        steps: fp32 [num_views of the whole layer], number of steps of each parameter.
        uploaded: the end of the newest step, when resident weights are up to date and a gradient in VRAM may be
            overwritten. Streamed weights have their own events.
    """

    def __init__(
        self,
        layer: FlatLayer,
        placement: Placement,
        memory: LayerMemory,
        config: OffloadConfig,
        device: torch.device,
        waits: Waits,
        *,
        resident: LayerWeights | None = None,
        bring: Callable[[LayerWeights], None] | None = None,
    ) -> None:
        """
        Args:
            resident: existing weights in VRAM to keep; None allocates new ones.
            bring: as for `LayerWeights`.
        """
        self.shard = shard = layer.shard
        self._pieces = {shard.first_view + at: piece for at, piece in enumerate(shard.views)}
        """The piece of each view (by index) that this rank owns."""
        self._groups = list({piece.group for piece in shard.views})
        self._runs = runs(shard, set(range(len(shard.views))))
        self.layer, self.placement, self.memory = layer, placement, memory
        self._config, self._device, self._waits, self._bring = config, device, waits, bring
        slab, self._region = memory.slab, memory.region

        def in_vram(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device)

        keeps_copy = cpu_can_step(placement, layer.kind)
        self.weights: LayerWeights
        self._streamed: StreamedWeights | None = None
        if memory.weights is not None:
            shared = None
            if isinstance(memory.weights, SharedSlab) and memory.stepped is not None:
                shared = SharedRam(memory.weights, memory.stepped)
            flat = memory.weights.cut(layer.numel, layer.dtype)
            if layer.looked_up:
                self.weights = LookedUpWeights(layer, flat, device, waits, is_shared=shared is not None)
            else:
                self.weights = self._streamed = StreamedWeights(layer, flat, device, waits, shared)
            weights = self.weights.own
        else:
            self.weights = resident or LayerWeights(layer, in_vram(layer.numel, layer.dtype), device, waits, bring)
            weights = slab.cut(shard.numel, layer.dtype) if keeps_copy else self.weights.own
        states = slab.cut if self._region is None else self._region.cutter()
        self.flat = FlatState.cut(layer.states, weights, in_vram if placement.states == "vram" else states)
        is_sum = config.gradient_accumulation > 1 or layer.shared or shard is not layer
        all_sums: list[torch.Tensor] = []
        if memory.sums is not None:
            all_sums = [memory.sums.cut(layer.numel, torch.float32) for _ in layer.cuts[1:]]
            host: torch.Tensor | None = all_sums[layer.rank][shard.begin : shard.begin + shard.numel]
        else:
            host = slab.cut(shard.numel, torch.float32 if is_sum else layer.dtype) if reaches_ram(placement) else None
        self.gradient = LayerGradient(
            self.weights,
            host,
            on_device=placement.gradients == "vram",
            exchanges_sums=exchanges_sums(layer, config),
            all_sums=all_sums,
        )
        self.ring: StateRing | None = None
        self._passing: StreamedStates | None = None
        self._matrix_steps: MatrixSteps | MatrixExchange | None = None
        self._begun: tuple[MatrixStep, Loaded | None] | None = None
        self.on_gpu, self.switchable = placement.step == "gpu", False
        self._copy_is_stale = False
        self._seen_writes: dict[ParameterView, int] = {}
        """Version counters of parameters whose writes since the last boundary all went through `after_write`."""
        self.steps = torch.zeros(len(layer.views), dtype=torch.float32)
        self.uploaded: Event | None = None

    def join(self, ring: StateRing | None, matrix_steps: MatrixSteps | MatrixExchange | None = None) -> None:
        """Pass the states through `ring` when the GPU steps them. None if the GPU steps no states that are in RAM.

        `matrix_steps`: steps the layer if its step unit is a matrix.
        """
        placement, self.ring, self._passing = self.placement, ring, None
        is_matrix = self.layer.kind.step_unit == "matrix"
        self._matrix_steps = matrix_steps if is_matrix else None
        if ring is not None and placement.states == "ram" and gpu_can_step(placement):
            passing_gradient = self.gradient.host if placement.gradients == "ram" else None
            resident_weights = self.weights.own if self._streamed is None else None
            name, cuts = f"{self.layer.name} states", None
            if is_matrix:  # several ranks: all pieces of matrices are one chunk
                cuts = (
                    [view.start for view in self.layer.views] if self.shard is self.layer else [0][: self.shard.numel]
                )
            self._passing = StreamedStates(name, self.flat, resident_weights, passing_gradient, cuts)
        self.on_gpu = placement.step == "gpu"
        by_either = cpu_can_step(placement, self.layer.kind) and self._passing is not None and not is_matrix
        self.switchable = self._config.placement is None and by_either

    def leave_ring(self) -> None:
        """Leave the ring. The layer is settled; the RAM copy of weights in VRAM is updated."""
        self._refresh_copy()
        self._wait_for_copies()
        self.ring = self._passing = self._matrix_steps = self.uploaded = None
        self.on_gpu = self.switchable = False

    def moved(self, placement: Placement, memory: LayerMemory) -> LayerState:
        """A new object for the layer in another placement; this object must have left its ring and is dead afterwards.

        After an error, this object is unchanged. Weights that stay in VRAM keep their memory, which other tensors may
        share. Every rank writes the same whole weights to shared RAM, so no rank has to wait.

        Args:
            memory: may have this layer's present slabs for weights and sums.
        """
        resident = self.weights if self.memory.weights is None and placement.weights == "vram" else None
        args = self.layer, placement, memory, self._config, self._device, self._waits
        new = LayerState(*args, resident=resident, bring=self._bring)
        stays = memory.weights is not None and memory.weights is self.memory.weights
        if new.flat.weights is not self.weights.own and not stays:
            new.flat.weights.copy_(self.weights.own)
        for array in self.layer.states.arrays:
            new.flat[array.name].copy_(self.flat[array.name])
        if resident is None:
            if not stays and (self.shard is not self.layer or new.weights.own is not new.flat.weights):
                new.weights.flat.copy_(self.weights.flat)
            self.weights.retire()
            new.weights.start()
        for each in (memory.region, self._region):
            if each is not None:
                each.forget_pages()
        new.steps = self.steps
        new.gradient.follow(self.gradient)
        return new

    @property
    def is_streamed(self) -> bool:
        """Whether the states pass through VRAM in the next step."""
        return self.on_gpu and self._passing is not None

    def take_parameters(self) -> None:
        """Take the parameters' values as master weights and bind the parameters to the flat buffer."""
        parameters = [view.parameter for view in self.layer.views]
        if any(parameter.is_meta for parameter in parameters):
            raise ModelError(
                f"the parameters of {self.layer.name!r} are on the meta device, without values: load the model's "
                "weights first. To add adapters or tokens, load it with transformers' from_pretrained"
            )
        for index, view in enumerate(self.layer.views):
            source = view.parameter.data.reshape(-1)
            is_split = self.flat.remainder is not None and self.layer.dtype == torch.bfloat16
            split = is_split and source.dtype == torch.float32
            if self.shard is not self.layer:
                self.weights.flat[view.elements].copy_(split_master(source)[0] if split else source)
            for piece in self._owned(index):
                own = source[piece.first : piece.first + piece.numel]
                if split:
                    self._take_split(own, piece.start)
                    continue
                if self.flat.remainder is not None and self.layer.dtype == torch.float16:
                    self.flat.remainder[piece.elements].copy_(own)
                self.flat.weights[piece.elements].copy_(own)
        if self._streamed is None and self.shard is self.layer:  # one copy for all views, from pinned memory
            self.weights.flat.copy_(self.flat.weights)
        self.weights.start()
        if self._region is not None:
            self._region.forget_pages()

    def give_back(self, given: Mapping[nn.Parameter, tuple[torch.device, torch.dtype]]) -> None:
        """Undo `take_parameters` before any update: the parameters in `given` get separate memory on their former
        device, with their former numbers. With several ranks, these are rounded to the working dtype.
        """
        self._wait_for_copies()
        for view in self.layer.views:
            if view.parameter in given:
                device, dtype = given[view.parameter]
                is_master = dtype == torch.float32 and self.shard is self.layer
                numbers = self.master(view) if is_master else self.weights.home(view).clone()
                view.parameter.data = numbers.to(device, dtype)

    def _owned(self, view: ParameterView | int) -> list[ParameterView]:
        """The piece of a view (or of the view at an index) that this rank owns, or none. At world size 1: the view."""
        piece = self._pieces.get(view if isinstance(view, int) else self.layer.views.index(view))
        return [] if piece is None else [piece]

    def _take_split(self, master: torch.Tensor, start: int) -> None:
        remainder = self.flat.remainder
        assert remainder is not None
        for begin in range(0, master.numel(), _SPLIT):
            part = master[begin : begin + _SPLIT].to(remainder.device)
            elements = slice(start + begin, start + begin + part.numel())
            split_into(part, self.flat.weights[elements], remainder[elements])

    def open(self) -> None:
        self.weights.open()

    def use(self) -> None:
        self.weights.use()

    def for_graph(self, view: ParameterView) -> torch.Tensor:
        return self.weights.for_graph(view)

    def home(self, view: ParameterView) -> torch.Tensor:
        return self.weights.home(view)

    def described(self, view: ParameterView) -> torch.Tensor:
        return self.weights.described(view)

    def has_gradient(self, view: ParameterView) -> bool:
        return self.layer.views.index(view) in self.gradient.window

    def before_write(self, view: ParameterView) -> torch.Tensor | None:
        """Returns a 1-D copy of the weights that this rank owns, if `after_write` needs it and no RAM copy exists. All
        updates are done.
        """
        split = self.flat.remainder is not None and self.layer.dtype == torch.bfloat16
        if split and self._keeps_copy:
            self._refresh_copy()
        self._wait_for_copies()
        self.weights.begin_write()
        with unwatched():
            version = view.parameter._version
        if version == self.weights.known_version(view):
            self._seen_writes[view] = version
        elif self._seen_writes.get(view) != version:
            self._seen_writes.pop(view, None)
        for piece in self._owned(view):
            return self.flat.weights[piece.elements].clone() if split and not self._keeps_copy else None
        return None

    def after_write(self, view: ParameterView, before: torch.Tensor | None) -> None:
        self.weights.changed()
        with unwatched():
            version = view.parameter._version
        if view in self._seen_writes:
            self._seen_writes[view] = version
        if before is not None:
            (piece,) = self._owned(view)
            self._forget_remainder(piece, before)

    def take_over(self, written: Mapping[ParameterView, int], *, keep_remainder: bool = False) -> None:
        """Take weights that were written from outside as the master weights.

        The remainder is kept for weights whose bits did not change, if every write was seen; otherwise it is reset to
        add nothing. With `keep_remainder` the caller sets the remainder next. `written`: the parameters with their
        version counters.
        """
        self._wait_for_copies()
        if self._streamed is not None:
            self._streamed.save(list(written))
        for view, piece in [(each, piece) for each in written for piece in self._owned(each)]:
            if self.flat.remainder is not None and not keep_remainder:
                if self._seen_writes.get(view) != written[view]:
                    self._drop_remainder(piece)
                elif self.layer.dtype == torch.float16:
                    self._forget_remainder(piece, self.flat.remainder[piece.elements].half())
                elif self._keeps_copy:
                    self._forget_remainder(piece, self.flat.weights[piece.elements])
            if self._streamed is None:
                self.flat.weights[piece.elements].copy_(self.weights.own[piece.elements])
        self._seen_writes.clear()

    @property
    def _keeps_copy(self) -> bool:
        return self.flat.weights is not self.weights.own

    def reset(self) -> None:
        """Set moments and step counts to zero, and the master weights to the working weights."""
        self._wait_for_copies()
        for name, array in self.flat.arrays.items():
            if name != "remainder":
                array.zero_()
        self.steps.zero_()
        for piece in (piece for view in self.layer.views for piece in self._owned(view)):
            if self.flat.remainder is not None:
                self._drop_remainder(piece)

    def _drop_remainder(self, piece: ParameterView) -> None:
        assert self.flat.remainder is not None
        remainder = self.flat.remainder[piece.elements]
        if self.layer.dtype == torch.float16:
            remainder.copy_(self.weights.own[piece.elements])
        else:
            remainder.zero_()

    def _forget_remainder(self, piece: ParameterView, before: torch.Tensor) -> None:
        """`_drop_remainder` for the elements whose working weights differ in bits from `before`, 1-D."""
        assert self.flat.remainder is not None
        remainder = self.flat.remainder[piece.elements]
        now = self.weights.own[piece.elements]
        changed = (now.view(torch.int16) != before.to(now.device).view(torch.int16)).to(remainder.device)
        if self.layer.dtype == torch.float16:
            remainder.copy_(torch.where(changed, now.to(remainder), remainder))
        else:
            remainder.masked_fill_(changed, 0)

    def master(self, view: ParameterView) -> torch.Tensor:
        """fp32 copy of a parameter's master weights in RAM, in its shape; with several ranks the owned part, 1-D."""
        for piece in self._owned(view):
            weights = self.weights.own[piece.elements].cpu()
            if self.flat.remainder is None:
                return self._shaped(weights.clone(), piece)
            remainder = self.flat.remainder[piece.elements].cpu()
            flat = join_master(weights, remainder) if remainder.dtype == torch.int16 else remainder.clone()
            return self._shaped(flat, piece)
        return torch.empty(0)

    def _shaped(self, flat: torch.Tensor, piece: ParameterView) -> torch.Tensor:
        return flat.view(piece.parameter.shape) if self.shard is self.layer else flat

    def step(
        self,
        views: set[int],
        options: Sequence[Options],
        grad_scale: float,
        stream: CopyStream,
        passed: Callable[[int], None] | None = None,
    ) -> None:
        """One in-place optimizer step of the parameters at `views`; other parameters keep everything.

        A step on the CPU blocks; a step on the GPU is queued. Forward may use the layer's weights after `uploaded`.
        `stream` uploads weights that the CPU steps, or runs the GPU's kernels; it has waited for the compute stream.
        `passed`: as for `StateRing.step`.
        """
        segments = self._segments(views, options)
        was_on_gpu, self.weights.stepped_on_gpu = self.weights.stepped_on_gpu, self.on_gpu
        if self._stepped is not None:
            self._stepped.begin()
        if self.on_gpu:
            if self.uploaded is not None and not was_on_gpu:  # the GPU's steps are on one stream
                stream.wait(self.uploaded)  # wait: an upload before a step on the GPU
            self._step_on_gpu(segments, grad_scale, stream, passed)
            return
        self._refresh_copy()
        self._wait_for_copies()
        assert self.gradient.host is not None
        if self._region is None:
            optimizer_step(self.flat, self.gradient.host, segments, grad_scale)
        else:
            with self._region.in_ram() as slab:
                flat = FlatState.cut(self.layer.states, self.flat.weights, slab.cut)
                optimizer_step(flat, self.gradient.host, segments, grad_scale)
        if self._streamed is None:
            self.uploaded = stream.copy_all([(self.weights.own, self.flat.weights)], self.layer.name)
        elif self._stepped is not None:
            self._stepped.post()

    @property
    def _stepped(self) -> Stepped | None:
        return None if self._streamed is None or self._streamed.shared is None else self._streamed.shared.stepped

    def finish_reading(self) -> None:
        """Several ranks: wait for copies of the weights to VRAM, before other ranks step the layer."""
        if self._streamed is not None:
            self._streamed.finish_reading()

    def publication(self) -> Publication | None:
        """After a step on the GPU, several ranks with weights in RAM: the copy that the other ranks wait for."""
        if self._stepped is None:
            return None
        return Publication(self._stepped, None if self._passing is None else self._passing.drained)

    def _step_on_gpu(
        self,
        segments: Sequence[Segment],
        grad_scale: float,
        stream: CopyStream,
        passed: Callable[[int], None] | None,
    ) -> None:
        passing, streamed = self._passing, self._streamed
        if passing is None:
            gradient = self.gradient.kept
            if isinstance(self._matrix_steps, MatrixSteps):
                self._matrix_steps.step(self.flat, gradient, segments, grad_scale, stream)
            else:
                stream.run(lambda: optimizer_step(self.flat, gradient, segments, grad_scale))
            self.uploaded = stream.record()
            return
        assert self.ring is not None
        kept = self.gradient.kept if passing.gradient is None else None
        unread = None if streamed is None else streamed.copied
        matrix_steps = self._matrix_steps if isinstance(self._matrix_steps, MatrixSteps) else None
        self.uploaded = self.ring.step(
            passing, kept, segments, grad_scale, stream, unread=unread, matrix_steps=matrix_steps, passed=passed
        )
        if streamed is None:
            self._copy_is_stale = self._keeps_copy
        else:
            streamed.written = passing.drained

    @property
    def exchanges_matrices(self) -> bool:
        """Whether `begin_matrices`, `orthogonalize_matrices` and `apply_matrices` step the layer, instead of `step`."""
        return isinstance(self._matrix_steps, MatrixExchange)

    def begin_matrices(self, views: set[int], options: Sequence[Options], grad_scale: float, stream: CopyStream) -> int:
        """The first part of a step of matrices on several ranks, as `MatrixExchange` has it. Arguments as for `step`.

        Returns:
            Bytes that the other ranks send for the step.
        """
        assert isinstance(self._matrix_steps, MatrixExchange)
        segments = dict(zip(sorted(views & self._pieces.keys()), self._segments(views, options), strict=True))
        scalars = {
            index: _scalars(self.layer.states.optimizer, options[self.layer.views[index].group], int(self.steps[index]))
            for index in views
        }
        self.weights.stepped_on_gpu = True
        if self._stepped is not None:
            self._stepped.begin()
        if self.uploaded is not None:
            stream.wait(self.uploaded)  # wait: an upload before a step of matrices
        state, gradient, loaded = self.flat, torch.empty(0), None
        if self._passing is None:
            gradient = self.gradient.kept
        elif segments:  # a rank may own no part of a layer
            assert self.ring is not None
            kept = self.gradient.kept if self._passing.gradient is None else None
            loaded = self.ring.load(self._passing, kept, stream)
            state, gradient = loaded.state, loaded.gradient
        step = self._matrix_steps.begin(self.layer, state, gradient, segments, scalars, grad_scale, stream)
        self._begun = step, loaded
        return self._matrix_steps.received_bytes(step)

    def orthogonalize_matrices(self, stream: CopyStream) -> None:
        """The second part."""
        assert isinstance(self._matrix_steps, MatrixExchange)
        assert self._begun is not None
        self._matrix_steps.orthogonalize(self._begun[0], stream)

    def apply_matrices(self, stream: CopyStream) -> None:
        """The third part. Forward may use the layer's weights after `uploaded`."""
        assert isinstance(self._matrix_steps, MatrixExchange)
        assert self._begun is not None
        (step, loaded), self._begun = self._begun, None
        self._matrix_steps.apply(step, stream)
        if loaded is None:
            self.uploaded = stream.record()
            return
        assert self.ring is not None
        assert self._passing is not None
        self.uploaded = self.ring.store(self._passing, loaded, stream)  # `finish_reading` has waited for reads
        if self._streamed is not None:
            self._streamed.written = self._passing.drained

    def step_bytes(self) -> int:
        """Memory traffic of a step on the CPU: reads the gradient, reads and writes weights and states."""
        gradient = 0 if self.gradient.host is None else self.gradient.host.nbytes
        return gradient + 2 * sum(array.nbytes for array in (self.flat.weights, *self.flat.arrays.values()))

    def prefetch(self) -> None:
        """Start fetching the inputs of the next `step`: states from disk, states in RAM for a step on the GPU, or
        weights that the GPU stepped last for a step on the CPU.
        """
        if self._region is not None:
            self._region.prefetch()
        elif self.ring is not None and self._passing is not None:
            self.ring.fetch_ahead(self._passing) if self.on_gpu else self._refresh_copy()

    def _refresh_copy(self) -> None:
        if self._copy_is_stale:
            assert self.ring is not None
            assert self._passing is not None
            self.ring.copy_down(self._passing, self.flat.weights, self.weights.own, self.uploaded)
            self._copy_is_stale = False

    def settle(self) -> None:
        """Wait for the copies of a finished update; then all tensors may be read and written."""
        self.weights.settle()
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Wait for copies to and from RAM, before RAM is read or written."""
        copied = None if self._streamed is None else self._streamed.copied
        drained = None if self._passing is None else self._passing.drained
        for event in (
            copied,  # wait: weights fetched before they are written
            self.uploaded,  # wait: an upload before states are read
            drained,
        ):
            if event is not None:
                event.synchronize()

    def _segments(self, views: set[int], options: Sequence[Options]) -> list[Segment]:
        counts = self.steps.numpy()  # operations of torch would give the interpreter's lock to forward's thread
        if len(views) == len(self.layer.views):
            counts += 1
        else:
            counts[list(views)] += 1
        steps: list[int] = counts.astype(int).tolist()
        if self.layer.states.is_rounded or self.layer.kind.step_unit == "matrix":
            found = []
            for index in sorted(views & self._pieces.keys()):  # one segment per parameter, with separate random bits
                piece, step = self._pieces[index], steps[index]
                scalars = _scalars(self.layer.states.optimizer, options[piece.group], step)
                key = random_key(self._config.seed, piece.name, step) if self.layer.states.is_rounded else 0
                found.append(Segment(piece.start, piece.numel, scalars, key, piece.first, piece.matrix))
            return found
        if len(views) == len(self.layer.views) and len(self._groups) == 1 and len(set(steps)) == 1:
            scalars = _scalars(self.layer.states.optimizer, options[self._groups[0]], steps[0])
            return [Segment(start, length, scalars) for start, length in self._runs]
        kinds: dict[tuple[int, int], set[int]] = {}
        for index in views & self._pieces.keys():
            kinds.setdefault((self._pieces[index].group, steps[index]), set()).add(index - self.shard.first_view)
        by_scalars: dict[tuple[float, ...], set[int]] = {}
        for (group, step), indices in kinds.items():
            by_scalars.setdefault(_scalars(self.layer.states.optimizer, options[group], step), set()).update(indices)
        return [
            Segment(start, length, scalars)
            for scalars, indices in by_scalars.items()
            for start, length in runs(self.shard, indices)
        ]

    def state_of(self, index: int) -> dict[str, torch.Tensor]:
        """A parameter's states as torch optimizers keep them: views in the parameter's shape; block scales are 1-D.
        With several ranks all are 1-D and cover the part that this rank owns.
        """
        arrays = {"step": self.steps[index]}
        for array in self.layer.states.arrays:
            arrays[array.name] = self.flat[array.name][:0]
            for piece in self._owned(index):
                part = self.flat[array.name][array.part(piece.start, piece.start + piece.numel)]
                arrays[array.name] = part if array.block > 1 else self._shaped(part, piece)
        return arrays

    def ranges_of(self, index: int) -> dict[str, tuple[int, int]]:
        """(first element, number of elements of the whole parameter's array) for each array of `state_of`."""
        numel, ranges = self.layer.views[index].numel, {"step": (0, 1)}
        first = sum(piece.first for piece in self._owned(index))
        for array in self.layer.states.arrays:
            ranges[array.name] = (first // array.block, array.numel(numel))
        return ranges
