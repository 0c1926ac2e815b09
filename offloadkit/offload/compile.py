"""Compiled blocks: `torch.compile` once for all equal blocks of a model, wherever their weights and activations live.

Blocks of one class, with parameters of the same shapes and dtypes, share one graph. Their weights are inputs of it, and
what moves weights (a block's gate, a recomputation) runs outside, so every placement runs the same kernels over the
same numbers. Every engine compiles for itself: which kernels a new shape gets depends on the shapes before it, and they
are the run's. torch keeps what was compiled on disk (`TORCHINDUCTOR_CACHE_DIR`), where the next run finds it.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from offloadkit.errors import ConfigError
from offloadkit.offload.layers import repeated_blocks

BACKEND = "inductor"
"""Of torch.compile."""

_DETERMINISTIC = "deterministic"
"""Option of inductor's: no kernel and no padding is chosen by its measured time, on which the numbers would depend."""

_CACHES = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Keyword arguments of HuggingFace blocks that are of no use in training, and what turns them off."""

_EMBEDDING = "a compiled embedding adds up its gradient with atomic operations, in no fixed order"

_numbers = itertools.count()


def compile_blocks(model: nn.Module, tied: Collection[nn.Module]) -> Callable[[], None]:
    """Have the repeated blocks of `model` run compiled wherever gradients are wanted; returns what ends that.

    A block that cannot be compiled runs as it is, after a warning that says why; so does one that holds an embedding
    (T5's first), whose compiled gradient would differ from run to run, without a warning.

    Args:
        tied: modules with hooks that exchange a weight while they run; a block with one of them is not compiled.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    kinds: dict[Any, list[nn.Module]] = {}
    for _, block in repeated_blocks(model):
        kinds.setdefault(_kind(block, tied), []).append(block)
    if not kinds:
        raise ConfigError(
            f"compile_blocks=True, but {type(model).__name__} has no repeated blocks to compile: "
            "put its layers in an nn.ModuleList, or leave the switch off"
        )
    without_caches = bool(getattr(model, "supports_gradient_checkpointing", False))
    before = []
    for (_, reason, _), blocks in kinds.items():
        forward = _EqualBlocks(blocks, reason).forward(without_caches)
        for block in blocks:
            before.append((block, vars(block).get("forward")))
            block.forward = MethodType(forward, block)  # a method: a deepcopy of the model takes its own block along

    def restore() -> None:
        for block, forward in before:
            del block.forward
            if forward is not None:
                block.forward = forward

    return restore


def _kind(block: nn.Module, tied: Collection[nn.Module]) -> Any:
    """Equal for blocks that one graph does for; its second part says why no graph does, if so."""
    reason = ""
    if "forward" in vars(block):
        reason = "its forward was replaced"
    elif any(module in tied for module in block.modules()):
        reason = "it holds a tied weight"
    elif any(isinstance(module, nn.Embedding) for module in block.modules()):
        reason = _EMBEDDING
    elif BACKEND == "inductor" and not _has_deterministic_option():
        reason = f"torch {torch.__version__} chooses kernels by measured time, so numbers would vary; 2.10 need not"
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return type(block), reason, tuple(parameters)


class _EqualBlocks:
    """Blocks that one graph does for (one for each kind of input)."""

    def __init__(self, blocks: Sequence[nn.Module], reason: str) -> None:
        """
        Args:
            reason: why they cannot be compiled, or nothing.
        """
        self.what = f"{len(blocks)} x {type(blocks[0]).__name__}"
        self._own_forward = {block: vars(block)["forward"] for block in blocks if "forward" in vars(block)}
        self._ran: set[nn.Module] = set()
        """Blocks that ran compiled, whose recomputation must too."""
        self._fails = False
        self._compiled: Callable[..., Any] = self.as_it_is
        try:
            self._compiled = torch.compile(_function_of_its_own(), backend=self._compile)
        except RuntimeError as error:  # a Python or a system that torch does not compile for
            reason = reason or str(error)
        if reason and reason != _EMBEDDING:
            self._give_up(reason)
        self._fails = bool(reason)

    def forward(self, without_caches: bool) -> Callable[..., Any]:
        """What a block's `forward` is from now on: a function, which a deepcopy of the model does not copy."""
        from torch._dynamo.exc import TorchDynamoException

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.as_it_is(block, *args, **kwargs)
            if without_caches and not getattr(block, "_can_checkpoint_with_cache", False):
                kwargs.update((name, off) for name, off in _CACHES.items() if kwargs.get(name) is not None)
            if self._fails and block not in self._ran:
                return self.as_it_is(block, *args, **kwargs)
            try:
                output = self._compiled(block, *args, **kwargs)
            except TorchDynamoException as error:
                self._failed(block, error)
                return self.as_it_is(block, *args, **kwargs)
            self._ran.add(block)
            return output

        return forward

    def as_it_is(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, uncompiled."""
        own = self._own_forward.get(block)
        return type(block).forward(block, *args, **kwargs) if own is None else own(*args, **kwargs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """The backend: torch's own, with a line before and after."""
        from torch._dynamo import lookup_backend

        print(f"compiling {self.what}: this step waits for it", flush=True)
        began = time.perf_counter()
        options: dict[str, Any] = {"config_patches": {_DETERMINISTIC: True}} if BACKEND == "inductor" else {}
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
                f"{self.what} cannot be compiled: {reason}. Training goes on with them uncompiled",
                RuntimeWarning,
                stacklevel=2,
            )
        self._fails = True


def _function_of_its_own() -> Callable[..., Any]:
    """A function that runs a block, with a code object that nobody else has: torch files what it compiled, and which
    sizes it saw change, under that."""

    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(block).forward(block, *args, **kwargs)

    code = run.__code__.replace(co_name=f"run_block_{next(_numbers)}")
    return FunctionType(code, run.__globals__)


def _has_deterministic_option() -> bool:
    from torch._inductor import config

    return hasattr(config, _DETERMINISTIC)
