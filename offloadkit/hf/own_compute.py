"""What of a model is computed otherwise where offloadkit trains it on a GPU, and where a plan counts what it takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from offloadkit.hf.fused_attention import fuse_attention
from offloadkit.hf.fused_norms import fuse_norms


def fuse(model: nn.Module, *, compiled: bool = False) -> Callable[[], None]:
    """Have attention with a position bias run by our kernels, and the norms, but where blocks are `compiled`, as one
    kernel each; returns what undoes it."""
    changes = ExitStack()
    changes.callback(fuse_attention(model))
    if not compiled:
        changes.callback(fuse_norms(model))
    return changes.close
