"""The arguments of a model's blocks in a real forward, for a model that does not run on the meta device as a whole: its
blocks do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offloadkit.engine.tracing import Call
from offloadkit.offload.layers import repeated_blocks
from offloadkit.planner.layout import activation_bytes
from offloadkit.planner.work import MicroBatch, Stage

_MOST_VALUES = 1 << 16
"""Integers of an argument whose values are kept: ends of images, but no mask of every query and key."""


class BlockCalls:
    """Records the blocks that `model` calls, in order, until `close`.

    Attributes:
        kept: (name of the block, its call) of the forward that was kept last. Large tensors are on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: list[tuple[str, Call]] = []
        self._now: dict[str, Call] = {}
        self._hooks = ExitStack()
        self._hooks.callback(model.register_forward_pre_hook(self._begin).remove)
        for name, block in repeated_blocks(model):
            hook = block.register_forward_pre_hook(self._recorder(name), with_kwargs=True)
            self._hooks.callback(hook.remove)

    def _begin(self, *_: Any) -> None:
        self._now = {}

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self._now:  # a block that is recomputed in backward is called again
                self._now[name] = Call(*tree_map_only(torch.Tensor, _light, (tuple(args), dict(kwargs))))

        return record

    def keep(self) -> None:
        """Keep the calls of the forward that has just ended."""
        self.kept = list(self._now.items())

    def close(self) -> None:
        self._hooks.close()


def _light(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() and tensor.numel() <= _MOST_VALUES:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def with_the_rest(work: MicroBatch, held_bytes: int) -> MicroBatch:
    """`work`, which has blocks alone, with the activations of the rest of the model.

    Args:
        held_bytes: VRAM of all activations, as measured with every block recomputed.
    """
    rest = max(0, held_bytes - activation_bytes(work, recomputed=True))
    return replace(work, stages=(Stage(kept_bytes=rest, forward_peak_bytes=rest), *work.stages))


def with_at_least(work: MicroBatch, held_bytes: int) -> MicroBatch:
    """`work`, with what was measured beyond it in the backward of its last stage, the loss.

    Args:
        held_bytes: as for `with_the_rest`.
    """
    *others, last = work.stages

    def grown(more: int) -> MicroBatch:
        return replace(work, stages=(*others, replace(last, backward_peak_bytes=last.backward_peak_bytes + more)))

    if activation_bytes(work, recomputed=True) >= held_bytes:
        return work
    # The last stage takes `of_last` by the trace, with what it finds in VRAM.
    of_last = activation_bytes(grown(held_bytes), recomputed=True) - held_bytes
    return grown(held_bytes - of_last)
