"""Gradients: from autograd into one bucket per layer, and on to the optimizer step.

When autograd has all gradients of a layer, one operation copies them into the layer's *bucket*, a 1-D buffer in VRAM,
and `.grad` is dropped. Then ("sums": sums of squares by norm block):

| | `gradients="ram"` | `gradients="vram"` |
|---|---|---|
| one micro-batch | sums on the device, D2H on the copy stream | bucket stays; sums and D2H at the boundary |
| several | D2H, then the stepping thread adds into fp32 in RAM | added into fp32 on the device; D2H at the boundary |

With one micro-batch per window, or `exchange="micro_batch"`, several ranks exchange each bucket first, and the table
applies to the range that a rank owns. With `exchange="step"`, each rank accumulates whole layers, and the ranks
exchange the sums: sums in VRAM in the window's last backward, or at the boundary if the window ends early; sums in RAM,
which is shared, on the stepping thread before the norm. All ranks' gradients are added in fp32 in rank order.

Layers are exchanged in rank 0's order of completion in the last step; incomplete layers at the end of backward. A
parameter without a gradient counts as -0.0, which changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from offloadkit.device import trace
from offloadkit.device.streams import CopyStream, Waits, record_compute
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.kernels.dispatch import block_sums
from offloadkit.offload.external_writes import Watched, grad_of, unwatched
from offloadkit.offload.gradient_buffers import Buckets, NormSums, RamSums
from offloadkit.offload.layer_gradient import LayerGradient, Stage, runs
from offloadkit.offload.layers import ParameterView
from offloadkit.offload.shards import Reduction
from offloadkit.offload.weights import LayerWeights, has_hooks


class Gradients:
    """Takes the gradients of all layers from autograd and brings them to the optimizer step.

    Attributes:
        layers: in definition order.
        buckets: of the layers.
        reduction: several ranks only: their exchange of gradients.
        ends_window: the next backward is the last of the accumulation window.
    """

    ends_window = False

    def __init__(
        self,
        views: Iterable[ParameterView],
        device: torch.device,
        *,
        accumulation: int,
        submit: Callable[[Callable[[], None]], None],
        got_gradient: Callable[[LayerWeights, ParameterView], None],
        waits: Waits,
        ranks: Solo | Group,
    ) -> None:
        """
        Args:
            views: all trained parameters. `arrange` assigns them to layers.
            accumulation: micro-batches per window.
            submit: queues a job for the stepping thread.
            got_gradient: called on each parameter's first gradient.
        """
        self._accumulation, self._device, self._is_sum = accumulation, device, accumulation > 1 or ranks.size > 1
        self._submit, self._got_gradient, self._waits = submit, got_gradient, waits
        self.d2h = CopyStream(device, "D2H")
        self.reduction = None
        if isinstance(ranks, Group):
            self.reduction = Reduction(ranks, device, accumulation, self.d2h, waits)
        self._norm_sums: NormSums | None = None
        self._use((), torch.empty(0))
        self._layer_of: dict[ParameterView, tuple[LayerGradient, int]] = {}
        self._of_weights: dict[LayerWeights, LayerGradient] = {}
        self._hooks: list[Any] = []
        self._hook_of: dict[int, int] = {}
        for view in views:
            parameter: Any = view.parameter
            with unwatched():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(view)))
            self._hook_of[id(parameter)] = self._hooks[-1].id

    def hook_last(self, parameter: Any) -> None:
        """Move the engine's hook behind all other post-accumulate hooks of the parameter."""
        hooks, own = parameter._post_accumulate_grad_hooks, self._hook_of.get(id(parameter))
        if own in hooks:
            hooks[own] = hooks.pop(own)  # autograd follows the dict's order, which `move_to_end` does not change

    def arrange(self, layers: Sequence[LayerGradient], staging: torch.Tensor) -> None:
        """Set the layers, after placing or a move, and allocate their buffers.

        Args:
            staging: pinned uint8 memory that a micro-batch's gradient passes through before it is added in RAM. Empty
                if nothing accumulates in RAM.
        """
        self._use(layers, staging)
        self._norm_sums = NormSums(layers, self._device, is_sum=self._is_sum)
        for gradient in layers:
            self._of_weights[gradient.weights] = gradient
            for index, view in enumerate(gradient.layer.views):
                self._layer_of[view] = (gradient, index)

    def _use(self, layers: Sequence[LayerGradient], staging: torch.Tensor) -> None:
        self.layers, self._norm_sums = layers, None
        self.buckets = Buckets(layers, self._device, self._waits, is_sum=self._is_sum)
        self._ram_sums = RamSums(self.d2h, self._waits, self._submit, staging)
        if self.reduction is not None:
            self.reduction.arrange(layers, self.buckets, self._ram_sums)

    def forget_buffers(self) -> None:
        """Release all buffers before layers move. No gradient may be pending, and no job may be running."""
        self.d2h.synchronize()  # wait: copies before their buffers go
        if self.reduction is not None:
            self.reduction.finish_exchanges()
        for layer in self.layers:
            layer.forget_buffers()
        self._layer_of.clear()
        self._of_weights.clear()
        self._use((), torch.empty(0))

    def _gradient_hook(self, view: ParameterView) -> Callable[[torch.Tensor], None]:
        layer_of = self._layer_of

        def take(parameter: torch.Tensor) -> None:
            if isinstance(parameter, Watched):
                parameter.grad = None
                raise _without_the_engine(view)
            gradient = parameter.grad
            if gradient is None:  # `take` and `TiedUses` have handed it over, or another hook has dropped it
                return
            layer, index = layer_of[view]
            if layer.at_end_only or layer.stage is not Stage.FILLING:
                parameter.grad = None
                self.receive(view, gradient)
                return
            layer.weights.check_held(view)
            layer.received.add(index)
            if len(layer.received) == len(layer.layer.views):
                self._gather_from_autograd(layer)
                self._finish(layer)

        return take

    def take(
        self, weights: LayerWeights, gradients: list[torch.Tensor], others: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> bool:
        """Take the gradients of all parameters of a layer at once. Their memory is free after this call.

        Args:
            others: (destination, source) of other copies. The operation that copies the gradients makes them too if
                their dtype is the same, and empties the list then.

        Returns:
            False if autograd must have them, because a parameter may have another gradient, or the user hooks on it.
        """
        layer = self._of_weights.get(weights)
        if layer is None or layer.at_end_only or layer.received or layer.stage is not Stage.FILLING:
            return False
        with unwatched():  # the ring may guard them
            for each in weights.parameters:
                if grad_of(each) is not None or not each.requires_grad or has_hooks(each):
                    return False
        weights.check_held(weights.layer.views[0])  # they leave VRAM together
        layer.received.update(range(len(gradients)))
        self._gather(layer, range(len(gradients)), gradients, others)
        self._finish(layer)
        return True

    def _gather_from_autograd(self, layer: LayerGradient) -> None:
        indices = list(layer.received)
        views = [layer.layer.views[index] for index in indices]
        gradients: list[Any] = [view.parameter.grad for view in views]
        for view, gradient in zip(views, gradients, strict=True):
            _check_dense(view, gradient)
        self._gather(layer, indices, gradients, [])
        for view in views:
            view.parameter.grad = None

    def _gather(
        self,
        layer: LayerGradient,
        indices: Iterable[int],
        gradients: list[torch.Tensor],
        others: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """`indices`: of the gradients' views, which are those in `layer.received`. `others`: as for `take`."""
        self.buckets.open(layer, layer.received)
        places = layer.places()
        into = [places[index] for index in indices]
        if others and {each.dtype for each, _ in others} == {layer.bucket_dtype}:  # otherwise each is copied by itself
            into += [each for each, _ in others]
            gradients = [*gradients, *(source for _, source in others)]
            others.clear()
        torch._foreach_copy_(into, gradients)

    @torch.no_grad()
    def receive(self, view: ParameterView, gradient: torch.Tensor) -> None:
        """Add one gradient, in the parameter's shape, to its part of the bucket.

        For layers with tied weights, and layers that were already sent; they are sent at the end of backward.
        """
        if isinstance(view.parameter, Watched):
            raise _without_the_engine(view)
        _check_dense(view, gradient)
        if view not in self._layer_of:
            raise EngineStateError(f"the loss belongs to a closed engine: {view.name!r} is a tied weight")
        layer, index = self._layer_of[view]
        layer.weights.check_held(view)
        if layer.stage is not Stage.FILLING:
            self._reopen(layer)
        if not layer.received:
            self.buckets.open(layer, {index})
        place = layer.places()[index]
        if index in layer.received:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            layer.received.add(index)

    def end_of_backward(self) -> None:
        """Finish the layers that this micro-batch did not complete, because it uses only some of their views.

        Several ranks that exchange now finish all layers in order, because another rank may have gradients.
        """
        exchanges = self._exchanges_now
        for layer in self.layers if exchanges is None else exchanges.in_order():
            if (layer.received or exchanges is not None) and layer.stage is Stage.FILLING:
                if layer.received and not layer.at_end_only:
                    self._gather_from_autograd(layer)
                self._finish(layer)
        if self.reduction is not None:
            self.reduction.end_of_backward(exchanged=exchanges is not None)
        for layer in self.layers:
            layer.received.clear()
            if layer.stage is Stage.FULL:
                layer.stage = Stage.FILLING

    def join_remaining_exchanges(self) -> None:
        """This rank cannot finish its backward: take part in the remaining exchanges with zeros.

        All ranks will drop the window. Gradients of incomplete layers are dropped.
        """
        for layer in self.layers:
            if layer.stage is Stage.FILLING:
                layer.received.clear()
            for view in layer.layer.views:
                view.parameter.grad = None
        if (exchanges := self._exchanges_now) is not None:
            exchanges.go_on()  # from the layer at which it stopped
            self.end_of_backward()

    def end_of_window(self) -> None:
        """Copy the gradients that stayed on the device, and the block sums of all layers, to RAM."""
        for layer in self.layers:
            # The block sums in RAM are overwritten below. The last update computed its norm from them before its
            # weights arrived, so wait for the weights, even if no forward has used the layer.
            layer.weights.wait()  # wait: the last update before new sums of squares
        window = [layer for layer in self.layers if layer.window]
        if self.reduction is not None:
            self.reduction.end_of_window(self._submit)
        assert self._norm_sums is not None
        arrived = self._norm_sums.send(window, self.d2h)
        for layer in self.layers:
            layer.stage = Stage.FILLING
        for layer in window:
            layer.sent = arrived

    @property
    def _exchanges_now(self) -> Reduction | None:
        """The exchange of this backward's gradients; None if this backward exchanges none."""
        reduction = self.reduction
        return None if reduction is None or (reduction.exchanges_sums and not self.ends_window) else reduction

    @property
    def window_is_full(self) -> bool:
        """Whether sums of this window were exchanged, so that no further micro-batch is possible."""
        return any(layer.stage is Stage.REDUCED for layer in self.layers)

    def drop(self) -> None:
        """Drop the gradients of this window."""
        if self.reduction is not None:
            self.reduction.drop()
        for layer in self.layers:
            layer.window.clear()
            layer.received.clear()
            layer.stage = Stage.FILLING
            self.buckets.release(layer, None)
            for view in layer.layer.views:
                view.parameter.grad = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.d2h.synchronize()  # wait: copies before the engine is dropped

    def _finish(self, layer: LayerGradient) -> None:
        """Called when a layer has all its gradients of this micro-batch: start the operations of the module's table."""
        if (tracing := trace.active()) is not None:
            tracing.has_gradients_of(layer.layer.name)
        layer.stage = Stage.FULL
        for index in layer.received - layer.known:
            self._got_gradient(layer.weights, layer.layer.views[index])
        layer.known |= layer.received
        first, again = layer.received - layer.window, layer.received & layer.window
        layer.window |= layer.received
        if self.reduction is None or layer.exchanges_sums:
            self._take_in(layer, first, again)
        if (exchanges := self._exchanges_now) is not None:
            exchanges.complete(layer)

    def _take_in(self, layer: LayerGradient, first: set[int], again: set[int]) -> None:
        """Send a micro-batch's gradient to RAM, or accumulate it. It is the window's first gradient for the views in
        `first`.
        """
        if not layer.received:
            return
        if self._accumulation == 1:
            if not layer.on_device:
                self._send(layer)
        elif layer.on_device:
            assert layer.accumulated is not None
            for part, add in ((first, False), (again, True)):
                for start, length in runs(layer.layer, part):
                    into, piece = (tensor[start : start + length] for tensor in (layer.accumulated, layer.bucket))
                    into.add_(piece) if add else into.copy_(piece)
            self.buckets.release(layer, None)
        else:
            ranges = [(start, start, length, False) for start, length in runs(layer.layer, first)]
            ranges += [(start, start, length, True) for start, length in runs(layer.layer, again)]
            self.d2h.wait(record_compute(self._device))  # wait: backward before a copy of one micro-batch
            self.buckets.release(layer, self._ram_sums.add(layer, layer.bucket, ranges))

    def _send(self, layer: LayerGradient) -> None:
        assert layer.host is not None
        gradient = layer.bucket
        block_sums(gradient, layer.device_blocks, layer.device_sums)
        self.d2h.wait(record_compute(self._device))
        layer.sent = self.d2h.copy_all([(layer.host, gradient)], layer.layer.name)
        self.buckets.release(layer, layer.sent)

    def _reopen(self, layer: LayerGradient) -> None:
        """A gradient arrived after the layer was sent, so the layer is used twice: send it at the end of backward."""
        if self.reduction is not None and (layer.stage is Stage.REDUCED or not layer.exchanges_sums):
            raise EngineStateError(
                f"a parameter of {layer.layer.name!r} got a second gradient after the layer's gradients were sent to "
                "the other ranks: blocks that torch recomputes and that are used twice can be trained on one GPU only. "
                "Use OffloadConfig(activation_checkpointing=True) instead of torch's checkpoint()"
            )
        layer.at_end_only, layer.stage = True, Stage.FILLING
        if self._accumulation > 1:
            layer.received.clear()
        elif not layer.on_device:
            assert layer.sent is not None
            assert layer.host is not None
            layer.sent.synchronize()  # wait: a copy before its gradient comes again
            self.buckets.take(layer)
            layer.bucket.copy_(layer.host)


def _without_the_engine(view: ParameterView) -> EngineStateError:
    return EngineStateError(
        f"a gradient of {view.name!r} arrived outside engine.backward(): call engine.backward(loss) instead of "
        "loss.backward(). With several losses, add them first. The engine scales the loss of fp16 itself. If another "
        "engine's loss is computed through this model (a GAN), freeze this model meanwhile: "
        "module.requires_grad_(False). To train without the engine (with another Trainer, say), close it first: "
        "engine.close() or trainer.close()"
    )


def _check_dense(view: ParameterView, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ModelError(f"parameter {view.name!r} has sparse gradients: build its nn.Embedding with sparse=False")
