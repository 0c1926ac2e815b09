"""Activation checkpointing of the repeated blocks: backward recomputes them from inputs in VRAM or in pinned RAM."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offloadkit.device import host_memory
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.errors import ConfigError, ModelError
from offloadkit.offload.graphs import BlockGraphs, Recomputed
from offloadkit.offload.kept_results import KeptResults, OtherMatmulsError, changed, described, others
from offloadkit.offload.layers import forward_of, repeated_blocks, replace_forwards
from offloadkit.offload.weights import LayerWeights

Checkpoint = Literal["cheap", "checkpoint", "offload"]
"""Recompute a block from an input that stays in VRAM ("checkpoint") or is offloaded to RAM ("offload"); or all but its
matmuls and attention ("cheap").
"""


def checkpoint_activations(
    model: nn.Module,
    choices: Mapping[nn.Module, Checkpoint],
    weights: Mapping[nn.Module, Sequence[LayerWeights]],
    offloaded: OffloadedInputs,
    *,
    compiled: bool = False,
    graphs: BlockGraphs | None = None,
    unlike: set[nn.Module] | None = None,
) -> Callable[[], None]:
    """Make backward recompute the activations of the blocks in `choices`; returns a function that undoes this.

    HuggingFace models use their own switch; blocks of other models get another `forward`. The recomputation uses the
    same random numbers (dropout).

    Args:
        weights: by block, the layers that a recomputation needs in VRAM.
        compiled: the blocks are compiled. Then HuggingFace's switch is not used, because with it compiled T5 blocks
            have other gradients.
        graphs: runs the blocks, and recomputes those that run eagerly.
        unlike: receives the "cheap" blocks whose second run had other matmuls; the block is then recomputed as a whole.
            None: such a block is an error in backward.

    Raises:
        ConfigError: the model has no repeated blocks to recompute.
    """
    names = {block: name for name, block in repeated_blocks(model)}
    if not names:
        raise ConfigError(
            f"activation_checkpointing=True, but {type(model).__name__} has no repeated blocks to recompute: put its "
            "layers in an nn.ModuleList, or leave the option off"
        )

    def cheaply(block: nn.Module) -> Callable[..., Any]:
        def recomputed(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if unlike is not None and block in unlike:
                return recomputed_in_backward(device, function, *args, **kwargs)
            otherwise = None if unlike is None else partial(unlike.add, block)
            return _cheaply_recomputed(device, otherwise, function, *args, **kwargs)

        return recomputed

    def recompute(block: nn.Module) -> Callable[..., Any]:
        run = partial(_checkpoint, offloaded.device, recomputed_in_backward)
        if choices[block] == "offload":
            run = partial(offloaded.checkpoint, f"{names[block]} input")
        elif choices[block] == "cheap":
            run = partial(_checkpoint, offloaded.device, cheaply(block))
        buffers = _ChangingBuffers(block)

        def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return run(weights.get(block, ()), buffers, forward, *args, **kwargs)

        return call

    def recomputed(block: nn.Module) -> Recomputed:
        sends = partial(offloaded.sends, f"{names[block]} input") if choices[block] == "offload" else nullcontext
        why_eager = "its activations are recomputed cheaply" if choices[block] == "cheap" else None
        return Recomputed(recompute(block), sends, why_eager)

    if getattr(model, "supports_gradient_checkpointing", False) and not compiled:
        untyped: Any = model
        switch_off = _switch_on(untyped)
        blocks: list[Any] = list(names)
        for block in blocks:
            for inner in block.modules():  # otherwise T5's mask gets a gradient, which selects other attention kernels
                if hasattr(inner, "gradient_checkpointing") and inner is not block:
                    inner.gradient_checkpointing = False
            if block in choices and graphs is None:
                block._gradient_checkpointing_func = recompute(block)
            else:
                block.gradient_checkpointing = False
        if graphs is not None:
            graphs.recompute({block: recomputed(block) for block in choices}, in_training_only=True)
        return switch_off
    if graphs is not None:
        graphs.recompute({block: recomputed(block) for block in choices}, in_training_only=False)
        return lambda: None
    return replace_forwards({block: partial(recompute(block), forward_of(block)) for block in choices})


SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks")
"""Attributes that transformers' switch for recomputation sets."""


def _switch_on(model: Any) -> Callable[[], None]:
    """Switch on recomputation in a HuggingFace model; returns a function that restores its modules."""
    before = {
        module: {name: vars(module)[name] for name in SWITCHES if name in vars(module)} for module in model.modules()
    }
    # The name depends on the version of transformers.
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
    # The switch makes the embeddings' outputs require a gradient, which only reentrant recomputation needs.
    _remove_new_hooks(model, before[model])

    def switch_off() -> None:
        for module, values in before.items():
            for name in SWITCHES:
                vars(module).pop(name, None)
            vars(module).update(values)

    return switch_off


def _remove_new_hooks(model: Any, before: dict[str, Any]) -> None:
    known = [before.get("_require_grads_hook"), *before.get("_require_grads_hooks", ())]
    new = [vars(model).get("_require_grads_hook"), *vars(model).get("_require_grads_hooks", ())]
    for hook in new:
        if hook is not None and not any(hook is each for each in known):
            hook.remove()


class _ChangingBuffers:
    """The buffers of a block that its forward changes, such as BatchNorm's statistics, found by the first forward.

    A recomputation sees the buffers as its forward saw them; its own changes to them are discarded.
    """

    def __init__(self, block: nn.Module) -> None:
        self._found: list[tuple[nn.Module, str]] | None = None
        self._all = [(module, name) for module in block.modules() for name in module._buffers]

    def copies(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        """Copies of the changing buffers; of all buffers before the end of the first forward."""
        places = self._all if self._found is None else self._found
        present = ((module, name, module._buffers[name]) for module, name in places)
        return {(module, name): buffer.clone() for module, name, buffer in present if buffer is not None}

    def end_of_forward(self, before: dict[tuple[nn.Module, str], torch.Tensor]) -> None:
        """After the first forward: find the changing buffers, and drop all other copies from `before`."""
        if self._found is None:
            self._found = [
                (module, name)
                for (module, name), old in before.items()
                if isinstance(module, nn.modules.batchnorm._NormBase)  # changes none in eval mode, but may do so later
                or (now := module._buffers[name]) is None
                or not torch.equal(now, old)
            ]
            for place in before.keys() - set(self._found):
                del before[place]


@contextmanager
def _exchanged(buffers: dict[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
    """While open, the modules use copies of `buffers` instead of their own buffers."""
    own = {(module, name): module._buffers[name] for module, name in buffers}
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for (module, name), present in own.items():
            module._buffers[name] = present


def _checkpoint(
    device: torch.device,
    recomputed: Callable[..., Any],
    weights: Sequence[LayerWeights],
    buffers: _ChangingBuffers,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `forward`, and make backward recompute its activations by `recomputed`, with `weights` brought to VRAM.

    Backward raises `EngineStateError` if `weights` were updated since forward.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    seen = [layer.num_updates for layer in weights]
    before, has_run = buffers.copies(), False
    if isinstance(forward, partial):  # HuggingFace binds arguments; tensors among them must be passed explicitly
        args, kwargs, forward = (*forward.args, *args), {**forward.keywords, **kwargs}, forward.func

    def run(*args: Any, **kwargs: Any) -> Any:
        for layer, num_updates in zip(weights, seen, strict=True):
            layer.check_seen(num_updates)
            layer.use()
        with _exchanged(before) if has_run and before else nullcontext():
            return forward(*args, **kwargs)

    output = recomputed(device, run, *args, **kwargs)
    has_run = True
    buffers.end_of_forward(before)
    return output


class Recomputation:
    """Makes backward recompute the blocks that the present placements choose.

    Attributes:
        unlike: as for `checkpoint_activations`.
    """

    def __init__(
        self,
        model: nn.Module,
        offloaded: OffloadedInputs,
        graphs: BlockGraphs | None,
        *,
        always: bool,
        compiled: bool,
        chosen_by_plan: bool,
    ) -> None:
        """
        Args:
            always: use HuggingFace's switch even if no block is recomputed.
            graphs, compiled: as for `checkpoint_activations`.
            chosen_by_plan: no user has chosen the level "cheap".
        """
        self.unlike = set[nn.Module]() if chosen_by_plan else None
        self._model, self._offloaded, self._graphs = model, offloaded, graphs
        self._always, self._compiled = always, compiled
        self._choices: Mapping[nn.Module, Checkpoint] | None = None
        self._weights: dict[nn.Module, Sequence[LayerWeights]] = {}
        self._undo: Callable[[], None] = lambda: None

    @property
    def in_training_only(self) -> bool:
        """Whether transformers' own checkpointing recomputes blocks, only in training mode."""
        if self._graphs is not None:
            return self._graphs.recomputes_in_training_only
        return any(getattr(block, "gradient_checkpointing", False) for block in self._choices or ())

    def arrange(
        self, choices: Mapping[nn.Module, Checkpoint], weights: Mapping[nn.Module, Sequence[LayerWeights]]
    ) -> None:
        """Recompute the blocks in `choices` from now on. Arguments as for `checkpoint_activations`."""
        self._weights.clear()
        self._weights.update(weights)
        if choices == self._choices:
            return
        self.end()
        if choices or self._always:
            self._undo = checkpoint_activations(
                self._model,
                choices,
                self._weights,
                self._offloaded,
                compiled=self._compiled,
                graphs=self._graphs,
                unlike=self.unlike,
            )
        self._choices = choices

    def end(self) -> None:
        if self._graphs is not None:
            self._graphs.recompute({}, in_training_only=False)
        self._undo()
        self._undo = lambda: None


class OffloadedInputs:
    """Inputs of checkpointed blocks, kept in pinned RAM until backward.

    Only a block's first argument, the hidden states, goes to RAM. Tensors that many blocks share (masks, a position
    bias, an encoder's output) stay in VRAM. All micro-batches reuse the same RAM.

    Attributes:
        free: pinned RAM that holds no input.
        copying: VRAM that a copy still reads or writes, each with the end of the copy.
        in_ram: the inputs in RAM, in forward order.
    """

    def __init__(self, device: torch.device, waits: Waits) -> None:
        self.device, self._waits = device, waits
        self.d2h, self.h2d = CopyStream(device, "D2H"), CopyStream(device, "H2D")
        self.free: list[_OffloadedInput] = []
        self.copying: list[tuple[torch.Tensor, Event]] = []
        self.in_ram: list[_OffloadedInput] = []

    def checkpoint(
        self,
        name: str,
        weights: Sequence[LayerWeights],
        buffers: _ChangingBuffers,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`_checkpoint`, with the first argument in RAM until backward. Traces show its copies under `name`.

        Raises:
            ModelError: the block wrote to its first argument while it was being copied.
        """
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        with self.sends(name, first):
            return _checkpoint(self.device, recomputed_in_backward, weights, buffers, forward, *args, **kwargs)

    @contextmanager
    def sends(self, name: str, first: torch.Tensor | None) -> Iterator[None]:
        """While open, autograd saves `first` in RAM. Arguments and errors as for `checkpoint`."""
        if not torch.is_grad_enabled():
            yield
            return
        # An address, not the tensor, because autograd keeps `pack`, which would keep the tensor's memory.
        address, version = (None, 0) if first is None else (first.data_ptr(), first._version)

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | _Handle:
            sent = tensor.data_ptr() == address and tensor.is_floating_point()
            return self._send(tensor, name) if sent else (tensor, tensor._version)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        if first is not None and first._version != version:
            raise changed_in_place(first)

    def release(self) -> None:
        """Free the RAM. The model may keep this object alive, in its blocks' recomputation functions."""
        self.free.clear()
        self.copying.clear()

    def _send(self, tensor: torch.Tensor, name: str) -> _Handle:
        self._free_vram(1)
        view = self.take(tensor.numel() * tensor.element_size())
        tensor = tensor.detach().contiguous()
        view.name, view.shape, view.device = name, tensor.shape, None
        view.slab.clear()
        view.host = view.slab.cut(tensor.numel(), tensor.dtype)
        self.d2h.wait(record_compute(self.device))
        if view.returned is not None:
            self.d2h.wait(view.returned)  # wait: a fetched input before its RAM is used again
        view.arrived = self.d2h.copy_all([(view.host, tensor.view(-1))], name)
        self.copying.append((tensor, view.arrived))
        self.in_ram.append(view)
        handle = _Handle(view)
        weakref.finalize(handle, self._free_ram, view).atexit = False
        return handle

    def _free_vram(self, num_left: int) -> None:
        """Free the VRAM of all inputs being copied, except the newest `num_left`.

        The compute stream waits for these copies, because it may reuse the memory. Without this limit, Python running
        far ahead of the device would keep the VRAM of many inputs.
        """
        for at in reversed(range(len(self.copying))):  # in place: a finalizer on any thread may add to the list
            if self.copying[at][1].done():
                del self.copying[at]
        while len(self.copying) > num_left:
            _, event = self.copying.pop(0)
            self._waits.delay(event)

    def _free_ram(self, view: _OffloadedInput) -> None:
        """Free the RAM of an input that autograd released, because backward has used it or the graph was dropped.

        A dropped graph's input may have been prefetched, and its copy to VRAM may still be running.
        """
        self.in_ram.remove(view)
        if view.device is not None and view.returned is not None:
            self.copying.append((view.device, view.returned))
        view.device = None
        self.free.append(view)

    def take(self, num_bytes: int) -> _OffloadedInput:
        """The smallest free RAM buffer of at least `num_bytes`. If none exists, a new one replaces the largest free
        buffer, so that RAM does not grow with each new sequence length.
        """
        fitting = [view for view in self.free if view.slab.num_bytes >= num_bytes]
        if fitting:
            view = min(fitting, key=lambda each: each.slab.num_bytes)
            self.free.remove(view)
            return view
        copies = ((view, (view.arrived, view.returned)) for view in self.free)
        unused = [view for view, ends in copies if all(end is None or end.done() for end in ends)]
        if unused:
            self.free.remove(max(unused, key=lambda each: each.slab.num_bytes))
        del unused
        (slab,) = host_memory.allocate([num_bytes], self.device, "inputs of recomputed blocks")
        return _OffloadedInput(slab)

    def _unpack(self, packed: tuple[torch.Tensor, int] | _Handle) -> torch.Tensor:
        """The input of the block that backward has reached. Prefetches the preceding block's input."""
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise changed_in_place(tensor)
            return tensor
        self._free_vram(0)
        saved = packed.view
        here = self._fetch(saved)
        in_ram = [*self.in_ram]  # another thread's garbage collection may release inputs meanwhile
        at = in_ram.index(saved)
        if at > 0:
            self._fetch(in_ram[at - 1])
        assert saved.returned is not None
        self._waits.delay(saved.returned)
        saved.device = None
        return here

    def _fetch(self, saved: _OffloadedInput) -> torch.Tensor:
        if saved.device is None:
            saved.device = torch.empty(saved.shape, dtype=saved.host.dtype, device=self.device)
            self.h2d.wait(record_compute(self.device))  # the compute stream may still use this memory's old contents
            assert saved.arrived is not None
            self.h2d.wait(saved.arrived)  # wait: an input in RAM before it is fetched
            saved.returned = self.h2d.copy_all([(saved.device.view(-1), saved.host)], saved.name)
        return saved.device


@dataclass(eq=False)
class _Handle:
    """Autograd's reference to an input; its finalizer frees the RAM."""

    view: _OffloadedInput


@dataclass(eq=False)
class _OffloadedInput:
    """One input: its memory in RAM, and its copies to RAM and back.

    Attributes:
        name: label of the copies in a trace.
        host: 1-D pinned tensor with the input's elements.
        device: the input in VRAM, after it is fetched for backward.
        arrived: the end of the copy to RAM.
        returned: the end of the copy to VRAM.
    """

    slab: HostSlab
    name: str = field(init=False)
    host: torch.Tensor = field(init=False)
    shape: torch.Size = field(init=False)
    device: torch.Tensor | None = None
    arrived: Event | None = None
    returned: Event | None = None


def recomputed_in_backward(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with activations recomputed in backward; only the arguments are kept until then.

    The second run uses the random states of the CPU and of `device`, autocast and default device of the first.

    Raises:
        ModelError: (in backward) the second run saved other tensors than the first; or a saved tensor, or a tensor
            among the arguments (also in lists and tuples), was written.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    again = _Recomputation(device, function, args, kwargs)
    with saved_tensors_hooks(again.pack, again.unpack):
        return function(*args, **kwargs)


def cheaply_recomputed_in_backward(
    device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`recomputed_in_backward`, with the results of matmuls and attention kept until backward too (`KeptResults`)."""
    return _cheaply_recomputed(device, None, function, *args, **kwargs)


def _cheaply_recomputed(
    device: torch.device, otherwise: Callable[[], None] | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    again = _Recomputation(device, function, args, kwargs, otherwise)
    with saved_tensors_hooks(again.pack, again.unpack), again.keeping_results():
        return function(*args, **kwargs)


class _Recomputation:
    """Inputs of the second run, and the tensors it has found. Autograd's nodes keep it until backward is done."""

    def __init__(
        self,
        device: torch.device,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """`otherwise`: called if the second run had other matmuls, and all of it was run again. None: an error."""
        self._function, self._kwargs, self._otherwise = function, kwargs, otherwise
        self._results: KeptResults | None = None
        self._versions = [(tensor, tensor._version) for tensor in _tensors_in(kwargs.values())]
        # Tensors among the positional arguments are saved like an operation's inputs, so that hooks on saved tensors
        # see them, and in-place changes before backward raise.
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._at = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self._saved_args: Any = _save(_ANCHOR, *[args[index] for index in self._at])
        self._environment = _Environment(device)
        self._saved: list[tuple[torch.Size, torch.dtype, int]] = []
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    def keeping_results(self) -> AbstractContextManager[None]:
        """Context for the first run that keeps results of matmuls and attention."""
        self._results = KeptResults(self._environment.present_random_states)
        return self._results.keeping(self._saved)

    def pack(self, tensor: torch.Tensor) -> int:
        """Saves the tensor's index, in the order of saving, instead of the tensor."""
        results = self._results
        self._saved.append((tensor.shape, tensor.dtype, 0 if results is None else results.position))
        return len(self._saved) - 1

    def unpack(self, index: int) -> torch.Tensor:
        """The tensor with this index. It is not kept; unpacking it again takes another run."""
        if index not in self._found:
            self._found = self._run_again() if self._otherwise is None else self._run_again_or_otherwise()
        tensor, version = self._found.pop(index)
        if tensor._version != version:
            raise changed_in_place(tensor)
        return tensor

    def _run_again_or_otherwise(self) -> dict[int, tuple[torch.Tensor, int]]:
        with suppress(OtherMatmulsError):
            return self._run_again()
        self._results = None
        found = self._run_again()
        if self._otherwise is not None:
            self._otherwise()
        return found

    def _run_again(self) -> dict[int, tuple[torch.Tensor, int]]:
        """{index: (tensor, version counter)} of the tensors that the second run saves."""
        expected, found = self._saved, dict[int, tuple[torch.Tensor, int]]()
        num_saved, results = len(expected), self._results

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index = len(found)
            shape, dtype, position = expected[index]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise changed(f"saved tensor {index} {described(tensor.shape, tensor.dtype)}", described(shape, dtype))
            if results is not None and results.position != position:
                ran = f"{results.position} of its matmuls and attention before it saved tensor {index}"
                raise others(f"ran {ran}", str(position))
            if tensor.requires_grad:
                tensor = tensor.detach()  # an operation's output saved by its own node would keep itself alive
            found[index] = tensor, tensor._version
            if index + 1 == num_saved:
                raise _FoundAllError
            return tensor

        args = list(self._args)
        for index, saved in zip(self._at, self._saved_args.grad_fn.saved_tensors, strict=True):
            args[index] = saved
        for tensor, version in self._versions:
            if tensor._version != version:
                raise changed_in_place(tensor)
        reusing = nullcontext() if self._results is None else self._results.reusing()
        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        try:
            with self._environment.restored(), hooks, torch.enable_grad(), reusing:
                self._function(*args, **self._kwargs)
        except _FoundAllError:
            return found
        raise changed(f"saved {len(found)} tensors", f"{num_saved}")


def drop_recomputed(memory: Callable[[torch.Tensor], bool]) -> None:
    """Drop tensors of recomputed blocks that an interrupted backward left in graphs that are still referenced.

    `memory`: whether a tensor is in the memory in question; recomputations without such a tensor are left alone.
    """
    for each in gc.get_objects():
        if type(each) is _Recomputation and any(memory(tensor) for tensor, _ in each._found.values()):
            each._found = {}


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


class _FoundAllError(Exception):
    """Ends the second run when it has found all tensors that backward needs."""


def changed_in_place(tensor: torch.Tensor) -> ModelError:
    """The error for a tensor that was written to after autograd had saved it."""
    return ModelError(
        f"a tensor {described(tensor.shape, tensor.dtype)} that backward needs was modified after it was saved. "
        "Either an in-place operation did it (x.mul_(2): compute x = x * 2 instead), or engine.step() was called "
        "before engine.backward(loss)"
    )


class _Save(torch.autograd.Function):
    """Saves tensors as autograd does. Its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


_save: Any = _Save.apply
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
"""An input that requires a gradient, so that `_Save` is in the graph even if no other input does."""


class _Environment:
    """The implicit inputs of a run: random states, autocast and the default device."""

    def __init__(self, device: torch.device) -> None:
        self._device_types: tuple[str, ...] = ("cpu",)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._device_types = ("cpu", "cuda")
            self._generators.append(torch.cuda.default_generators[device.index])
        self._random_states = self.present_random_states()
        self._autocast = self._present_autocast()
        self._default_device = _default_device()

    def present_random_states(self) -> list[tuple[torch.Generator, torch.Tensor]]:
        return [(generator, generator.get_state()) for generator in self._generators]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context with the recorded environment; restores the present random states afterwards."""
        now = self.present_random_states()
        for generator, state in self._random_states:
            generator.set_state(state)
        try:
            with ExitStack() as contexts:
                if self._autocast != self._present_autocast():
                    for kind, enabled, dtype, cached in self._autocast:
                        contexts.enter_context(torch.autocast(kind, dtype, enabled, cached))
                if self._default_device != _default_device():
                    contexts.enter_context(self._default_device)
                yield
        finally:
            for generator, state in now:
                generator.set_state(state)

    def _present_autocast(self) -> list[tuple[str, bool, torch.dtype, bool]]:
        cached = torch.is_autocast_cache_enabled()
        return [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in self._device_types
        ]


def _default_device() -> torch.device:
    """`torch.get_default_device()` in a third of its time."""
    return torch.empty(0).device
