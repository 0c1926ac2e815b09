"""One training step of a placed model, in time order: forward, backward, update."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadkit.device import watchdog
from offloadkit.device.streams import record_compute
from offloadkit.distributed.ranks import Ranks
from offloadkit.errors import EngineStateError, ModelError, NonFiniteGradientError, RankError
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.layers import UntrainedParameters
from offloadkit.offload.model import PlacedModel
from offloadkit.offload.profiling import Profile
from offloadkit.offload.records import StepRecords, num_tokens
from offloadkit.offload.shortage import forget_graph
from offloadkit.offload.states import LayerState
from offloadkit.offload.update import StepThread, Update
from offloadkit.offload.use_order import next_node
from offloadkit.optim.loss_scale import LossScale
from offloadkit.optim.table import options_of


class TrainingLoop:
    """Forward, backward and update of a placed model. It raises errors; `Replanner` handles them.

    Attributes:
        profile: the trace in progress, or None.
        num_updates: updates so far, including those before a resume.
        num_backwards: micro-batches of the accumulation window so far.
        has_graph: a forward was called, and no backward since.
        in_last: the window's last micro-batch is running, on several ranks that exchange gradients only then.
        last_checkpoint: the checkpoint to name in errors.
    """

    def __init__(
        self,
        placed: PlacedModel,
        step_thread: StepThread,
        optimizer: torch.optim.Optimizer,
        records: StepRecords,
        config: OffloadConfig,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self.placed, self.step_thread, self.records = placed, step_thread, records
        self._module, self._optimizer, self._config = placed.module, optimizer, config
        self._device, self._ranks = device, ranks
        trained = {view.parameter for view in placed.layers.views()}
        self.untrained = UntrainedParameters(placed.module, trained)
        has_fp16 = any(state.layer.dtype == torch.float16 for state in placed.trained)
        self.loss_scale = LossScale(config.loss_scale) if has_fp16 else None
        self.profile: Profile | None = None
        self.newest_update: Update | None = None
        self.last_checkpoint: Path | None = None
        self.num_updates = self.num_backwards = 0
        self.has_graph = self.in_last = False
        self._stepped = self._overflow_known = True
        self._first_node = 0
        """Sequence number of the first node of the graph since the last backward."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("use_cache") and self.placed.caching:
            raise ModelError(
                "use_cache=True in training: cached keys and values are only useful in generation. Leave it out, or "
                "call the engine under torch.no_grad()"
            )
        if not self._module.training and self.placed.recomputation.in_training_only and self.newest_update is None:
            warnings.warn(
                "the model is in eval mode, so transformers' blocks keep their activations although the plan "
                "recomputes them: call model.train() first",
                RuntimeWarning,
                stacklevel=3,
            )
        if not self.has_graph:
            self._first_node = next_node()
        with self.records.forward(num_tokens(self._module, kwargs)), self.placed.in_forward():
            try:
                output = self._module(*args, **kwargs)
            except (RuntimeError, TypeError, AttributeError) as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    self.untrained.check()  # may explain why forward failed
                raise
        self.has_graph = True
        return output

    def check_loss(self, loss: torch.Tensor) -> None:
        """Raise the errors of `OffloadEngine.backward` for an invalid loss or too many backwards."""
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"backward() takes the loss, a scalar tensor, and got a {type(loss).__name__}: pass the loss that the "
                "model's output holds, such as engine(**batch).loss"
            )
        accumulation = self._config.gradient_accumulation
        if accumulation == 1 and self.num_backwards:
            raise EngineStateError(
                "backward() was called twice before step(), but gradient_accumulation is 1: "
                "call step() after each backward(), or set OffloadConfig(gradient_accumulation=...)"
            )
        if self.placed.gradients.window_is_full:
            raise EngineStateError(
                f"backward() was called more than gradient_accumulation={accumulation} times in a window: the ranks "
                "exchange gradients in the last micro-batch. Call step(boundary=True) before it, or set "
                "OffloadConfig(gradient_accumulation=...)"
            )
        if loss.numel() != 1:
            raise ValueError(f"backward() takes a scalar loss, got a tensor of shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise EngineStateError(
                "backward() got a loss that requires no gradient: compute it by engine(...) with gradients enabled, "
                "and do not detach it. (The loss of a backward() that failed is detached: call engine(...) again.)"
            )

    def backward(self, loss: torch.Tensor, divisor: int) -> None:
        self.raise_thread_error()  # the other ranks wait for this rank's weights, not for its gradients
        given = loss
        if self.loss_scale is not None and self._config.loss_scale != 1:
            self._check_nothing_outside(loss)
        if divisor > 1:
            loss = loss / divisor
        self.placed.gradients.ends_window = self.num_backwards + 1 == self._config.gradient_accumulation
        with self.records.backward(loss):
            self.update_loss_scale()
            try:
                with self.placed.in_backward(loss):
                    loss = loss if self.loss_scale is None else loss.float() * self.loss_scale.scale
                    loss.backward()  # type: ignore[no-untyped-call]
            except BaseException as error:
                is_full = isinstance(error, torch.OutOfMemoryError)
                if self._ranks.size == 1 or not is_full:
                    self.drop_gradients()  # several ranks: the replanner drops them when all ranks know of the OOM
                if is_full:
                    self.forget_graph(given)
                else:
                    with suppress(RuntimeError):  # a view of a larger tensor
                        given.detach_()  # the caller may keep the loss, and with it the graph's memory
                if isinstance(error, RuntimeError) and not is_full:
                    self.untrained.check()  # may explain why backward failed
                raise

    def forget_graph(self, loss: torch.Tensor) -> None:
        """Detach the loss and all other tensors of its graph since the last backward, because no backward follows."""
        forget_graph(loss, self._first_node)

    def added(self) -> None:
        """Count a micro-batch whose gradients are gathered."""
        self.num_backwards += 1
        self._stepped = self.has_graph = False

    def _check_nothing_outside(self, loss: torch.Tensor) -> None:
        """In the first backward: raise `EngineStateError` if the loss reaches a foreign parameter, whose gradient would
        be scaled.
        """
        if self.newest_update is not None or self.num_backwards:
            return
        own = {id(view.parameter) for view in self.placed.layers.views()}
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                raise EngineStateError(
                    f"the loss reaches a parameter of shape {tuple(leaf.shape)} outside the engine's model, but in "
                    "fp16 the engine scales the loss, and only the engine's own step removes the scale: make it part "
                    "of the model, freeze it, or train in bf16 or with OffloadConfig(loss_scale=1.0)"
                )
            waiting += [following for following, _ in node.next_functions]

    def ends_window(self, boundary: bool | None) -> bool:
        """Whether the accumulation window ends with the last micro-batch. `boundary` as for `OffloadEngine.step`."""
        if self._stepped and not (boundary and self.num_backwards):
            raise EngineStateError("step() was called before backward(): call engine.backward(loss) first")
        ends = self.num_backwards >= self._config.gradient_accumulation if boundary is None else boundary
        if not ends:
            self._stepped = True
        return ends

    def start_update(self, order: Sequence[LayerState] | None) -> Update:
        """Start the update of the present window, without waiting. Forward waits for each updated layer.

        `order`: the layers in the order that several ranks have agreed on; None: forward order.
        """
        try:
            layers = self.placed.start_update(order)
            options = [options_of(group) for group in self._optimizer.param_groups]
            clip, computed = self._config.max_grad_norm, record_compute(self._device)
            update = Update(self.num_updates + 1, layers, options, clip, computed)
            if self.loss_scale is not None:
                update.loss_scale, update.scale_may_fall = self.loss_scale.scale, self.loss_scale.can_fall
            if self.profile is not None:
                self.profile.boundary()
            self.step_thread.start(update)
        except BaseException:  # including an interrupt: nothing may wait for an update that was never started
            self.placed.forget_pending()
            self.drop_gradients()
            raise
        return update

    def end_window(self, update: Update) -> None:
        self.num_updates += 1
        self.newest_update, self._overflow_known, self._stepped, self.num_backwards = update, False, True, 0
        self.in_last = False
        rate, received = self._optimizer.param_groups[0]["lr"], self._ranks.take_received()
        self.records.end_window(update, rate, self.placed.take_busy(), received)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it

    def update_loss_scale(self) -> None:
        """Adapt the loss scale once per window, by whether the last window overflowed.

        The wait for the norm is short, because forward has already waited for that update.
        """
        if self.loss_scale is None or self.newest_update is None or self._overflow_known or self.num_backwards:
            return
        watchdog.wait(self.newest_update.norm_known, "the gradient norm")
        self._overflow_known = True
        self.loss_scale.update(overflow=self.newest_update.skipped)

    def drop_gradients(self) -> None:
        self.placed.gradients.drop()
        self.records.drop_window()
        self.num_backwards, self._stepped, self.has_graph, self.in_last = 0, True, False, False

    def settle(self) -> None:
        """Wait for the newest update and its weights."""
        if self.newest_update is not None:
            self.step_thread.finish(self.newest_update)
        self.raise_thread_error()
        self.placed.settle()

    def synchronize(self) -> None:
        """Wait until every update is applied, on host and device. Raises the errors of `read_reports`."""
        self.settle()
        self.update_loss_scale()
        self.placed.layers.take_over_external_writes()
        self.records.wait()
        self.read_reports()

    def read_reports(self) -> None:
        """Record finished steps.

        Raises:
            NonFiniteGradientError: a step was not applied. Present gradients are dropped.
            EngineStateError, RankError: the stepping thread has failed.
        """
        self.raise_thread_error()
        try:
            self.records.read()
        except NonFiniteGradientError as error:
            self.drop_gradients()
            raise NonFiniteGradientError(f"{error}. {watchdog.in_words(self.last_checkpoint)}") from None

    def why_not_finite(self, update: Update) -> str | None:
        """Wait for the newest update's norm; a sentence if it is not finite and the loss scale cannot fall. All ranks
        have the same norm, so they roll back together.
        """
        watchdog.wait(update.norm_known, "the gradient norm")
        self.raise_thread_error()
        try:
            self.records.read()
        except NonFiniteGradientError as error:
            return str(error)
        return None

    def let_go(self) -> None:
        """Release all references to the model."""
        self.newest_update = None
        del self.placed, self.records, self.untrained

    def raise_thread_error(self) -> None:
        failure = self.step_thread.error
        if failure is None:
            return
        said = watchdog.in_words(self.last_checkpoint)
        if isinstance(failure, RankError):
            raise RankError(f"{failure}. {said}") from failure
        message = f"the optimizer step failed; the weights may be half updated: resume from a checkpoint. {said}"
        raise EngineStateError(message) from failure
