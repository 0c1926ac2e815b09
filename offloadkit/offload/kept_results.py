"""Selective recomputation: a block's results of matmuls and attention are kept, and backward recomputes the rest.

A dispatch mode sees every operation of the block's forward and keeps the results. In the second run it returns them
instead of computing. It works below autograd, so both runs save the same tensors, and gradients have equal bits. The
mode takes about 10 µs of Python for an operation, which a GPU hides if its blocks are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.errors import ModelError
from offloadkit.kernels.feed_forward import is_tiling

MIN_PRODUCTS = 257
"""Fewest products in an element of a kept result. A matmul that adds fewer, such as attention's scores, is bound by the
memory of its result, and is as cheap to compute again as an element-wise operation.
"""
_LEFT_MATRIX = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
"""The position of the left matrix among the arguments. Its last size is the number of products."""
_NAMESPACES = ("aten", "offloadkit", "flash_attn", "torch_attn")
"""Namespaces of operations whose use of random numbers is known (`_draws`). All other operations are run again."""

RandomStates = Sequence[tuple[torch.Generator, torch.Tensor]]


@cache
def _kind(operation: Any) -> int | None:
    """The position of the left matrix; -1 for attention and convolutions, and None for all other operations."""
    if not isinstance(operation, OpOverload):
        return -1 if operation.name() == "flex_attention" else None
    if operation.namespace not in _NAMESPACES:
        return None
    name = operation._schema.name.rpartition("::")[2]
    if operation._schema.is_mutable or "backward" in name or operation._overloadname != "default":
        return None
    if "attention" in name or "attn" in name or name == "convolution":
        return -1
    return _LEFT_MATRIX.get(name)


def is_kept(operation: Any, args: Sequence[Any]) -> bool:
    kind = _kind(operation)
    return kind is not None and not is_tiling() and (kind < 0 or args[kind].shape[-1] >= MIN_PRODUCTS)


@cache
def _dropout_argument(operation: Any) -> tuple[int, str] | None:
    names = [argument.name for argument in operation._schema.arguments] if isinstance(operation, OpOverload) else []
    return next(((at, name) for at, name in enumerate(names) if name in ("dropout", "dropout_p")), None)


def _draws(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws random numbers, for dropout."""
    found = _dropout_argument(operation)
    if found is None:
        return False
    at, name = found
    return bool(args[at] if at < len(args) else kwargs.get(name, 0.0))


@dataclass(frozen=True)
class _Call:
    """An operation and its inputs, to find out whether the second run is like the first.

    Attributes:
        parameters: ids of the parameters among the inputs and of those that inputs are views of, such as a transposed
            weight. A streamed weight may have another address in the second run, but its parameter is the same.
    """

    operation: Any
    inputs: list[tuple[torch.Size, torch.dtype]]
    parameters: list[int | None]

    @classmethod
    def of(cls, operation: Any, args: Sequence[Any]) -> _Call:
        tensors = _tensors(args)
        return cls(operation, [(each.shape, each.dtype) for each in tensors], [_parameter(each) for each in tensors])

    def is_like(self, other: _Call) -> bool:
        if self.operation is not other.operation or self.inputs != other.inputs:
            return False
        both = zip(self.parameters, other.parameters, strict=True)
        return all(one == two or one is None or two is None for one, two in both)

    def __str__(self) -> str:
        return f"{self.operation.name()} of {', '.join(described(*each) for each in self.inputs) or 'no tensors'}"


def _parameter(tensor: torch.Tensor) -> int | None:
    found = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    return id(found) if isinstance(found, nn.Parameter) else None


@dataclass
class _Result:
    """
    Attributes:
        output: None once it is dropped.
        versions: version counters of the tensors. A result that was written later is computed again.
        num_saved: number of tensors that autograd had saved before the operation ran.
        random_states: states after the operation, if it drew random numbers.
    """

    call: _Call
    output: Any
    versions: list[int]
    num_saved: int
    random_states: RandomStates

    def is_unchanged(self) -> bool:
        return self.versions == [tensor._version for tensor in _tensors(self.output)]

    def drop(self) -> None:
        self.output = None


class KeptResults:
    """The kept results of one run of a block, in the order of the operations.

    Attributes:
        position: number of these operations that the present run has begun. Both runs must have the same number at
            each tensor that autograd saves; then no operation is missing in the second run, and none is new.
    """

    def __init__(self, random_states: Callable[[], RandomStates]) -> None:
        """`random_states`: returns the present states of the generators that the block may use."""
        self.random_states = random_states
        self.position = 0
        self._results: list[_Result] = []
        self._is_reusing = False

    @contextmanager
    def keeping(self, saved: Sequence[Any]) -> Iterator[None]:
        """Keep the results of operations in this context. `saved`: one entry for each tensor that autograd has saved.

        Results that no saved tensor needs, such as that of a block's last matmul, are dropped at the end.
        """
        with _Keeping(self, saved):
            yield
        for result in self._results:
            if result.num_saved == len(saved) or not result.is_unchanged():
                result.drop()

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Return the kept results of operations in this context. Dropped ones are computed."""
        before = self._is_reusing, self.position
        self._is_reusing, self.position = True, 0
        try:
            with _Reusing(self):
                yield
        finally:
            self._is_reusing, self.position = before

    def add(self, call: _Call, output: Any, num_saved: int, *, drew: bool) -> None:
        if not self._is_reusing:  # else the block itself runs a backward
            output, states = _alias(output), self.random_states() if drew else ()
            versions = [each._version for each in _tensors(output)]
            self._results.append(_Result(call, output, versions, num_saved, states))
            self.position += 1

    def take(self, call: _Call) -> Any:
        """The next output; None if it must be computed. It is dropped, unless the graph is retained.

        Raises:
            OtherMatmulsError: the first run had another operation here.
            ModelError: the first run had this operation with another parameter here.
        """
        at, self.position = self.position, self.position + 1
        if at >= len(self._results):
            raise others(f"ran {call} as number {at + 1} of its matmuls and attention", f"only {at}")
        result = self._results[at]
        if not call.is_like(result.call):
            if str(call) == str(result.call):
                raise changed(f"ran {call}", f"{result.call} with another parameter")
            raise others(f"ran {call}", str(result.call))
        if result.output is None:
            return None
        output, is_unchanged = result.output, result.is_unchanged()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            result.drop()
        if not is_unchanged:
            return None
        for generator, state in result.random_states:
            generator.set_state(state)
        return _alias(output)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that the block itself compiles, such as flex attention, stay compiled."""
        return True


class _Keeping(_Mode):
    def __init__(self, results: KeptResults, saved: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._saved = results, saved

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = operation(*args, **kwargs)
        if is_kept(operation, args):
            call, drew = _Call.of(operation, args), _draws(operation, args, kwargs)
            self._results.add(call, output, len(self._saved), drew=drew)
        return output


class _Reusing(_Mode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_kept(operation, args):
            output = self._results.take(_Call.of(operation, args))
            if output is not None:
                return output
        return operation(*args, **(kwargs or {}))


class OtherMatmulsError(ModelError):
    """The second run has other matmuls or attention than the first. All of it may be run again nevertheless."""


def described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def changed(found: str, expected: str) -> ModelError:
    """The error for a second run that is not like the first."""
    return ModelError(
        f"a recomputed block {found}, but in its forward {expected}: its result depends on something that changed in "
        "between (a cache, a counter). Train it with Placement(activations='keep')"
    )


def others(found: str, expected: str) -> OtherMatmulsError:
    """`changed` for a second run with other matmuls."""
    return OtherMatmulsError(str(changed(found, expected)))


def _tensors(output: Any) -> list[torch.Tensor]:
    found = output if isinstance(output, tuple | list) else (output,)
    return [each for each in found if isinstance(each, torch.Tensor)]


def _alias(output: Any) -> Any:
    """The output with new tensor objects of the same memory and version counters, which autograd may put in a graph."""
    if isinstance(output, tuple | list):
        return type(output)(map(_alias, output))
    if not isinstance(output, torch.Tensor):
        return output
    # Below autograd, views have their own version counters unless this dispatch key is included.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return output.detach()
