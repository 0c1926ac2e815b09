"""Compiled blocks: `torch.compile` once for all equal blocks of a model, independent of the placement.

Blocks of one class whose parameters have the same shapes and dtypes share one graph, with the weights as inputs. Hooks
that move weights, and recomputation, run outside the graph, so all placements run the same kernels.

Every engine compiles again, with the first batch, for any number and length of rows; torch by default would compile for
its length only, and again for the second length. torch caches compiled code on disk (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from offloadkit.errors import ConfigError
from offloadkit.offload.layers import repeated_blocks, replace_forwards

BACKEND = "inductor"

DETERMINISTIC = "deterministic"
"""Option of inductor: do not choose kernels and padding by measured times, so that numbers do not depend on them."""

_CACHES = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Keyword arguments of HuggingFace blocks that are useless in training, with values that turn them off."""

_EMBEDDING = "a compiled embedding sums its gradient with atomic operations, in no fixed order"

_MARK = "_dynamo_weak_dynamic_indices"
"""Attribute that torch sets on marked tensors."""

_numbers = itertools.count()


def compile_blocks(model: nn.Module, tied: Collection[nn.Module]) -> Callable[[], None]:
    """Compile the repeated blocks of `model` for calls with gradients enabled; returns a function that restores them.

    A block that cannot be compiled runs uncompiled, after a warning with the reason. A block with an embedding (T5's
    first) runs uncompiled without a warning, because its compiled gradient would differ from run to run.

    Args:
        tied: modules with hooks that replace a weight while they run. Their blocks are not compiled.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    kinds: dict[Any, list[nn.Module]] = {}
    for _, block in repeated_blocks(model):
        kinds.setdefault(_kind(block, tied), []).append(block)
    if not kinds:
        raise ConfigError(
            f"compile_blocks=True, but {type(model).__name__} has no repeated blocks to compile: put its layers in an "
            "nn.ModuleList, or leave the option off"
        )
    without_caches = bool(getattr(model, "supports_gradient_checkpointing", False))
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for (_, reason, _), blocks in kinds.items():
        forward = EqualBlocks(blocks, reason).forward(without_caches)
        for block in blocks:
            forwards[block] = MethodType(forward, block)
    return replace_forwards(forwards)


def _kind(block: nn.Module, tied: Collection[nn.Module]) -> Any:
    """A key that is equal for blocks that share a graph: (class, reason not to compile or "", parameters)."""
    from torch._inductor import config

    reason = ""
    if "forward" in vars(block):
        reason = "its forward was replaced"
    elif any(module in tied for module in block.modules()):
        reason = "it contains a tied weight"
    elif any(isinstance(module, nn.Embedding) for module in block.modules()):
        reason = _EMBEDDING
    elif BACKEND == "inductor" and not hasattr(config, DETERMINISTIC):
        reason = (
            f"torch {torch.__version__} chooses kernels by measured time, so numbers would vary; torch 2.10 does not "
            "have to"
        )
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return type(block), reason, tuple(parameters)


def _mark_lengths(inputs: Iterable[Any]) -> None:
    """Mark sizes that may change with the batch as dynamic: all but the last, and in 4-D [rows, heads, queries, keys]
    all but the heads. torch may still find that a size cannot change.
    """
    for value in inputs:
        if isinstance(value, tuple | list):
            _mark_lengths(value)
        elif isinstance(value, torch.Tensor) and not hasattr(value, _MARK):
            sizes = [0, 2, 3] if value.dim() == 4 else range(value.dim() - 1)
            torch._dynamo.maybe_mark_dynamic(value, [at for at in sizes if value.shape[at] > 1])


class EqualBlocks:
    def __init__(self, blocks: Sequence[nn.Module], reason: str) -> None:
        """`reason`: why the blocks cannot be compiled; "" if they can."""
        self.what = f"{len(blocks)} x {type(blocks[0]).__name__}"
        self._own_forward = {block: vars(block)["forward"] for block in blocks if "forward" in vars(block)}
        self._ran: set[nn.Module] = set()
        """Blocks that ran compiled, and so must be recomputed compiled."""
        self._fails = False
        self._compiled: Callable[..., Any] = self.uncompiled

        def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(block).forward(block, *args, **kwargs)

        # torch stores compiled code, and which sizes changed, by code object, so each kind of block has its own.
        code = run.__code__.replace(co_name=f"run_block_{next(_numbers)}")
        try:
            self._compiled = torch.compile(FunctionType(code, run.__globals__), backend=self._compile)
        except RuntimeError as error:  # torch does not support this Python or system
            reason = reason or str(error)
        if reason and reason != _EMBEDDING:
            self._give_up(reason)
        self._fails = bool(reason)

    def forward(self, without_caches: bool) -> Callable[..., Any]:
        """The new `forward` of these blocks; its first argument is the block."""
        from torch._dynamo.exc import TorchDynamoException

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.uncompiled(block, *args, **kwargs)
            if without_caches and not getattr(block, "_can_checkpoint_with_cache", False):
                kwargs.update((name, off) for name, off in _CACHES.items() if kwargs.get(name) is not None)
            if self._fails and block not in self._ran:
                return self.uncompiled(block, *args, **kwargs)
            _mark_lengths((*args, *kwargs.values()))
            try:
                output = self._compiled(block, *args, **kwargs)
            except TorchDynamoException as error:
                self._failed(block, error)
                return self.uncompiled(block, *args, **kwargs)
            self._ran.add(block)
            return output

        return forward

    def uncompiled(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self._own_forward.get(block)
        return type(block).forward(block, *args, **kwargs) if own is None else own(*args, **kwargs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The backend: `BACKEND`, with a line printed before and after, because the step waits for it."""
        from torch._dynamo import lookup_backend

        print(f"compiling {self.what}: this step waits for it", flush=True)
        began = time.perf_counter()
        options: dict[str, Any] = {"config_patches": {DETERMINISTIC: True}} if BACKEND == "inductor" else {}
        compiled: Callable[..., Any] = lookup_backend(BACKEND)(graph, inputs, **options)
        print(f"compiled {self.what} in {time.perf_counter() - began:.1f} s", flush=True)
        return compiled

    def _failed(self, block: nn.Module, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause
        self._ran.discard(block)
        lines = str(cause).strip().splitlines() or ["no reason given"]
        self._give_up(f"{type(cause).__name__}: {lines[0]}")

    def _give_up(self, reason: str) -> None:
        if not self._fails:
            warnings.warn(
                f"{self.what} cannot be compiled: {reason}. Training continues without compiling them",
                RuntimeWarning,
                stacklevel=2,
            )
        self._fails = True
