"""What one micro-batch computes, saves and needs for a while, found on the meta device: no weights, no GPU, no time.

The model's forward and backward run once, without memory. A repeated block is followed in detail once for each of its
kinds (class, parameter shapes, inputs); where the kind comes again, what it gave is repeated, so that eighty layers
take as long as two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offloadkit.offload.layers import repeated_blocks
from offloadkit.offload.meter import META, AsOnGpu, Meter, allocated_bytes
from offloadkit.offload.step_clock import num_tokens
from offloadkit.plan.work import MicroBatch, Pass, Stage


def trace_micro_batch(model: nn.Module, batch: dict[str, torch.Tensor]) -> MicroBatch:
    """Follow one forward and backward of `model` over `batch`; the loss is the output's `.loss`, or the output itself.

    Args:
        model: on the meta device, in the dtype it computes with and in training mode.
        batch: keyword arguments of forward; only shapes and dtypes count.
    """
    inputs = {
        name: torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
        for name, tensor in batch.items()
    }
    meter = Meter([*model.parameters(), *model.buffers(), *inputs.values()], mask_is_full="attention_mask" not in batch)
    stages = _Stages(meter)
    with ExitStack() as undo:
        undo.callback(_drop_gradients_of(model))
        for name, block in repeated_blocks(model):
            undo.enter_context(_followed(name, block, stages))
        undo.enter_context(AsOnGpu())
        undo.enter_context(meter)
        with torch.enable_grad():
            output = model(**inputs)
            loss = getattr(output, "loss", output)
            stages.end_of_forward()
            del output
            loss.backward()
            stages.end_of_backward()
    return MicroBatch(stages.in_order(), num_tokens(model, inputs) or 0)


class _Stages:
    """Cuts what the meter sees into stages, while the model runs forward and backward once."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._found: list[Stage] = []
        self._kinds: dict[Any, _Kind] = {}
        self._begin()

    def in_order(self) -> tuple[Stage, ...]:
        """The stages, without those outside the blocks in which nothing happens."""
        return tuple(stage for stage in self._found if stage.block or stage.forward.num_operations)

    def _begin(self) -> None:
        self.meter.reset_peak()
        self._before, self._counted = self.meter.live, self.meter.total

    def _end_outside(self) -> None:
        meter = self.meter
        self._found.append(
            Stage(
                block="",
                forward=meter.total - self._counted,
                backward=Pass(),
                kept_bytes=meter.live - self._before,
                output_bytes=0,
                input_bytes=0,
                shared_bytes=0,
                forward_peak_bytes=meter.peak - self._before,
                backward_peak_bytes=0,
            )
        )

    def end_of_forward(self) -> None:
        self._end_outside()
        self._at = len(self._found) - 1
        self._begin()

    def before_block_backward(self, index: int) -> None:
        """Backward leaves the outside stage after block number `index`."""
        self.end_of_backward()
        self._at = index - 1

    def after_block_backward(self) -> None:
        self._begin()

    def end_of_backward(self) -> None:
        """Backward of the outside stage it is in is done."""
        meter = self.meter
        self._found[self._at] = replace(
            self._found[self._at],
            backward=meter.total - self._counted,
            backward_peak_bytes=meter.peak - self._before,
        )

    def run(self, name: str, block: nn.Module, forward: Callable[..., Any], arguments: Any) -> Any:
        """A block's outputs: those of its first run where its kind was followed before."""
        self._end_outside()
        leaves, spec = tree_flatten(arguments)
        key = _kind(block, leaves, spec)
        if key not in self._kinds:
            self._kinds[key] = self._follow(forward, leaves, spec)
        kind = self._kinds[key]
        self._found.append(replace(kind.stage, block=name))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        trained = any(isinstance(output, _Made) and output.requires_grad for output in kind.outputs)
        anchor = torch.empty(0, device=META, requires_grad=trained)
        index = len(self._found) - 1
        made = iter(_Block.apply(self, index, kind.outputs, anchor, *tensors))  # type: ignore[no-untyped-call]
        given: list[Any] = []
        for output in kind.outputs:
            if isinstance(output, _Handed):
                given.append(tensors[output.input])
            else:
                given.append(next(made) if isinstance(output, _Made) else output)
        self._begin()
        return tree_unflatten(given, kind.spec)

    def _follow(self, forward: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> _Kind:
        """Run one block forward and backward by itself."""
        meter = self.meter
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        own = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in inputs]
        unused = iter(own)
        arguments = [next(unused) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(arguments, spec)
        self._begin()
        result = forward(*args, **kwargs)
        forward_pass, forward_peak = meter.total - self._counted, meter.peak - self._before
        kept = meter.live - self._before
        outputs, output_spec = tree_flatten(result)
        described = [_described(output, own) for output in outputs]
        made = [output for output, form in zip(outputs, described, strict=True) if isinstance(form, _Made)]
        storages = {id(output.untyped_storage()): output.untyped_storage().nbytes() for output in made}
        self._begin()
        roots = [output for output in made if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        differentiated = [tensor for tensor in inputs if tensor.requires_grad]
        stage = Stage(
            block="",
            forward=forward_pass,
            backward=meter.total - self._counted,
            kept_bytes=kept,
            output_bytes=sum(map(allocated_bytes, storages.values())),
            input_bytes=sum(tensor.nbytes for tensor in inputs[:1]),
            shared_bytes=sum(tensor.nbytes for tensor in differentiated[1:]),
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=meter.peak - self._before,
        )
        return _Kind(stage, described, output_spec)


@dataclass(frozen=True)
class _Kind:
    """What followed blocks of one kind give."""

    stage: Stage
    outputs: list[Any]
    """A `_Made` or a `_Handed` for each tensor, other things as they are."""
    spec: Any


@dataclass(frozen=True)
class _Made:
    """A tensor that a block made."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Handed:
    """A tensor that a block hands on; its number among the inputs."""

    input: int


def _described(output: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    for index, tensor in enumerate(inputs):
        if tensor.untyped_storage() is output.untyped_storage() and tensor.shape == output.shape:
            return _Handed(index)
    return _Made(output.shape, output.dtype, output.requires_grad)


def _kind(block: nn.Module, leaves: Sequence[Any], spec: Any) -> Any:
    """Equal for blocks that compute the same over the same shapes."""

    def form(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.shape, leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)

    return type(block), block.training, repr(spec), *map(form, leaves), *map(form, block.parameters())


class _Block(torch.autograd.Function):
    """Stands for a block in the graph of what lies outside: outputs and gradients of the right shapes. The anchor
    requires a gradient where a weight of the block does."""

    @staticmethod
    def forward(
        ctx: Any, stages: _Stages, index: int, outputs: Sequence[Any], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.stages, ctx.index, ctx.needs = stages, index, [tensor.requires_grad for tensor in inputs]
        forms = [output for output in outputs if isinstance(output, _Made)]
        made = [torch.empty(form.shape, dtype=form.dtype, device=META) for form in forms]
        ctx.mark_non_differentiable(
            *(tensor for tensor, form in zip(made, forms, strict=True) if not form.requires_grad)
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        ctx.stages.before_block_backward(ctx.index)
        needs = zip(ctx.saved_tensors, ctx.needs, strict=True)
        gradients = [torch.empty_like(tensor) if needed else None for tensor, needed in needs]
        ctx.stages.after_block_backward()
        return None, None, None, None, *gradients


@contextmanager
def _followed(name: str, block: nn.Module, stages: _Stages) -> Iterator[None]:
    """While it is open, calls of `block` go through `stages`."""
    own, forward = vars(block).get("forward"), block.forward
    block.forward = lambda *args, **kwargs: stages.run(name, block, forward, (args, kwargs))
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def _drop_gradients_of(model: nn.Module) -> Callable[[], None]:
    """Have each gradient dropped as soon as it is there, as the engine does; returns what stops that."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks: list[Any] = [
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for parameter in trained
    ]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop
