"""Python's time to start the operations of a model's blocks, timed with blocks of the model on its GPU.

A bare launch underestimates it: modules, autograd and the model's own code take several times as long, by a factor that
differs between hosts and models. Timed blocks have zeros for weights and few rows, because Python's time depends on
neither. Times are cached with the machine's rates.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offloadkit.device.host_random import HostRandom
from offloadkit.device.measure import kept
from offloadkit.engine.values import noted
from offloadkit.facts import hardware
from offloadkit.offload.layers import repeated_blocks
from offloadkit.planner.seconds import weighed
from offloadkit.planner.work import MicroBatch, Stage

_MOST_KINDS = 2
"""Kinds of blocks that are timed, the most frequent first: T5 has one kind in its encoder and one in its decoder."""
_ROWS = 2
"""Rows of a timed block. Triton compiles another kernel for sizes of 1."""
_BURST = 5
"""Repetitions of a burst, whose median is taken. The fastest burst counts, because other work on the host slows some
bursts, and the first burst loads what the block needs. With the median of all repetitions, two models with equal blocks
came out 23 % apart. The slowest burst after the first shows how much Python's time varies on this host.
"""
_LEAST, _MOST = 2, 8
_ENOUGH_SECONDS = 0.2
"""At least and at most this many bursts for a kind of block, and no new burst after this many seconds."""
_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Shape:
    """A tensor's description. The tensor itself is not kept, because the tracing counts its memory."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    ends: tuple[int, ...] = ()
    """Ends of the parts that a block cuts its input into, such as the images of a vision tower."""


@dataclass
class _Kind:
    block: nn.Module
    arguments: list[Any]
    """The leaves of the arguments, with tensors as `_Shape`."""
    spec: Any
    names: list[str] = field(default_factory=list)


class BlockSeconds(NamedTuple):
    """Seconds of Python in forward and backward in the fastest bursts, and of both in the slowest burst."""

    forward: float
    backward: float
    slowest: float


class OperationSeconds(NamedTuple):
    """Seconds of Python for an operation of forward and of backward, with our attention weighted as in the plan, and
    how many times as long the slowest burst took.
    """

    forward: float
    backward: float
    spread: float


class Blocks:
    def __init__(self) -> None:
        self._kinds: dict[Any, _Kind] = {}

    def called(self, name: str, block: nn.Module, arguments: Any) -> None:
        leaves, spec = tree_flatten(arguments)
        first = next((tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)), ())
        shapes = [_described(leaf, first) for leaf in leaves]
        parts = (shape if isinstance(shape, _Shape) else type(shape) for shape in shapes)
        sizes = tuple(parameter.shape for parameter in block.parameters())
        key = type(block), sizes, repr(spec), *parts
        self._kinds.setdefault(key, _Kind(block, shapes, spec)).names.append(name)

    def operation_seconds(self, work: MicroBatch, device: torch.device) -> OperationSeconds | None:
        """The mean over the most frequent kinds of blocks of the micro-batch `work`. None if a block could not be timed
        here.
        """
        stages = {stage.block: stage for stage in work.stages}
        often = sorted(self._kinds.values(), key=lambda kind: -len(kind.names))[:_MOST_KINDS]
        seconds, operations, slowest = [0.0, 0.0], [0.0, 0.0], 0.0
        for kind in often:
            stage = stages.get(kind.names[0])
            took = _kept_seconds(kind, stage, device) if stage else None
            if stage is None or took is None:
                return None
            for part, of_part in enumerate((stage.forward, stage.backward)):
                seconds[part] += len(kind.names) * took[part]
                operations[part] += len(kind.names) * weighed(of_part)
            slowest += len(kind.names) * took.slowest
        if not all(operations):
            return None
        return OperationSeconds(seconds[0] / operations[0], seconds[1] / operations[1], slowest / sum(seconds))


@contextmanager
def blocks_called(model: nn.Module) -> Iterator[Blocks]:
    """Collects the repeated blocks that `model` calls inside this context."""
    found, hooks = Blocks(), []
    for name, block in repeated_blocks(model):

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            found.called(name, module, (args, kwargs))

        hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _described(leaf: Any, sizes: Sequence[int]) -> Any:
    """`sizes`: shape of the block's first tensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _Shape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad, _ends(leaf, sizes))


def _ends(leaf: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    values = noted(leaf) if leaf.dim() == 1 and len(leaf) > 1 and not leaf.is_floating_point() else None
    numbers: list[int] = [] if values is None else values.tolist()
    return tuple(numbers) if numbers and numbers[0] == 0 and numbers[-1] in sizes[:2] else ()


def _kept_seconds(kind: _Kind, stage: Stage, device: torch.device) -> BlockSeconds | None:
    """The cached seconds, or seconds timed now. None if timing is impossible."""
    block, passes = type(kind.block), (stage.forward, stage.backward)
    dtypes = sorted({str(parameter.dtype) for parameter in kind.block.parameters()})
    size = sum(parameter.numel() for parameter in kind.block.parameters())
    operations = "+".join(f"{each.num_operations}" for each in passes)
    what = f"{block.__module__}.{block.__qualname__}, {size} parameters, {', '.join(dtypes)}, {operations} operations"
    names = [f"{name}_seconds" for name in BlockSeconds._fields]
    found = kept(device, what, set(names), lambda: _timed_or_nothing(kind, device))
    return BlockSeconds(*(found[name] for name in names)) if found else None


def _timed_or_nothing(kind: _Kind, device: torch.device) -> dict[str, float]:
    """{} if VRAM has no room, or if the block cannot run by itself."""
    num_bytes = sum(tensor.nbytes for tensor in (*kind.block.parameters(), *kind.block.buffers()))
    if device.type == "cuda" and hardware.vram_bytes(device)[0] < 4 * num_bytes + _SPARE_BYTES:
        return {}
    random = HostRandom()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            # The first backward of a process may find autograd's thread without a CUDA context; torch makes one.
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
            with torch.enable_grad():
                seconds = timed(kind, device)
    except Exception:  # any block: it may need other parts of its model, or more VRAM
        return {}
    finally:
        random.restore()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {f"{name}_seconds": value for name, value in seconds._asdict().items()}


def timed(kind: _Kind, device: torch.device) -> BlockSeconds:
    """Device synchronisation is not timed."""
    block = copy.deepcopy(kind.block).to_empty(device=device)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.zero_()
    first = next(leaf for leaf in kind.arguments if isinstance(leaf, _Shape))
    is_cut = any(leaf.ends for leaf in kind.arguments if isinstance(leaf, _Shape))
    rows = 0 if is_cut else first.size[0]
    leaves = [_made(leaf, rows, device) if isinstance(leaf, _Shape) else leaf for leaf in kind.arguments]
    args, kwargs = tree_unflatten(leaves, kind.spec)

    def once() -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        output = block(*args, **kwargs)
        between = time.perf_counter()
        made = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        made = [leaf for leaf in made if leaf.grad_fn is not None]  # a block may return its inputs
        gradients = [torch.ones_like(leaf) for leaf in made]
        went_back = time.perf_counter()
        torch.autograd.backward(made, gradients)
        took = between - started, time.perf_counter() - went_back
        for tensor in (*block.parameters(), *leaves):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        return took

    bursts: list[list[float]] = []
    began = time.perf_counter()
    while len(bursts) < _LEAST or (len(bursts) < _MOST and time.perf_counter() - began < _ENOUGH_SECONDS):
        bursts.append([median(part) for part in zip(*(once() for _ in range(_BURST)), strict=True)])
    forward, backward = (min(part) for part in zip(*bursts, strict=True))
    return BlockSeconds(forward, backward, max(map(sum, bursts[1:])))


def _made(shape: _Shape, rows: int, device: torch.device) -> torch.Tensor:
    """The ends of parts, or zeros, with at most `_ROWS` rows if the first size is the micro-batch's rows."""
    if shape.ends:
        return torch.tensor(shape.ends, dtype=shape.dtype, device=device)
    size = (min(rows, _ROWS), *shape.size[1:]) if shape.size[:1] == (rows,) else shape.size
    return torch.zeros(size, dtype=shape.dtype, device=device, requires_grad=shape.requires_grad)
