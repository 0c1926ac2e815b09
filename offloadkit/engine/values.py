"""Values of small tensors on the meta device.

What a model computes from the integers of a batch, such as grids of patches, lengths and masks, is computed on the CPU
too. `.tolist()`, `.item()` and shapes that follow from values then work without a GPU and without weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")
_CPU = torch.device("cpu")
_MOST_INTEGERS = 1 << 26
_MOST_FLOATS = 1 << 12
"""Largest tensors of a batch whose values are kept. Seconds of a video's frames are floating-point numbers."""
_MOST_COMPUTED = 1 << 20
"""A result with more elements in memory than this and than the tensors that it follows from has no values: a mask of
every query and key would take seconds.
"""
_NAME = "_offloadkit_value"
_WITHOUT_TENSORS = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))
_REDUCTIONS = ("sum", "all", "any", "min", "max", "mean", "prod", "equal")

NOTHING = object()


def keeps_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a batch is small enough to keep its values."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return False
    if is_constant(tensor):
        return True
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (_MOST_FLOATS if is_float else _MOST_INTEGERS)


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether all elements are one number in memory (`expand`), which stands for numbers that a plan does not know."""
    return not tensor.is_meta and tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def _num_stored(tensor: torch.Tensor) -> int:
    """Elements in memory, of which an expanded tensor has fewer than its shape says."""
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())


@cache
def is_dynamic(function: Any) -> bool:
    """Whether the shape of an operation's result, or a number, follows from values."""
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(function.tags)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers. `tree_flatten` would take a third of a trace's time."""
    found: list[torch.Tensor] = []
    _find_tensors(value, found)
    return found


def _find_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in (tuple, list):
        for each in value:
            _find_tensors(each, found)
    elif type(value) is dict:
        for each in value.values():
            _find_tensors(each, found)
    elif type(value) not in _WITHOUT_TENSORS:
        found += (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def noted(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values that a tensor on the meta device was made with, on the CPU; None if they were not known."""
    value: torch.Tensor | None = getattr(tensor, _NAME, (None, False))[0]
    return value


class Values:
    """The known values of tensors on the meta device. They live as long as these tensors."""

    def __init__(self) -> None:
        self._lost: dict[int, Any] = {}
        """Storages of values that an operation with unknown values has written to."""

    def on_meta(self, tensor: torch.Tensor, *, is_mask: bool) -> torch.Tensor:
        """A tensor like `tensor` on the meta device, with its values if they are kept.

        Args:
            is_mask: no number is known that follows from all of its values, because later micro-batches may mask other
                tokens.
        """
        made = torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
        if keeps_values(tensor):
            setattr(made, _NAME, (tensor.detach().to(_CPU, copy=not is_constant(tensor)), is_mask))
        return made

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values, on the CPU; None if they are not known."""
        if tensor.device == _CPU:
            return tensor
        value = noted(tensor)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def computed(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], read: Sequence[torch.Tensor]) -> Any:
        """The result of an operation whose tensors, `read`, have known values; otherwise `NOTHING`."""
        is_known = torch.Tag.nondeterministic_seeded not in function.tags and not function.__name__.startswith("empty")
        if not is_known or not all(self.of(each) is not None for each in read) or self._is_of_a_mask(function, read):
            self._lose_written(function, args)
            return NOTHING
        ours, named = tree_map_only(torch.Tensor, self.of, (tuple(args), kwargs))
        if named.get("device") == META:
            named = named | {"device": _CPU}
        try:
            return function(*ours, **named)
        except Exception:  # the tokens of an example may have no meaning
            self._lose_written(function, args)
            return NOTHING

    def give(self, made: Sequence[torch.Tensor], result: Any, read: Sequence[torch.Tensor]) -> None:
        """Keep the `result` of `computed` as the values of `made`, which an operation made from `read`."""
        values = tensors_of(result)
        if len(values) != len(made):
            return
        is_mask = any(getattr(each, _NAME, (None, False))[1] for each in read)
        for tensor, value in zip(made, values, strict=True):
            if tensor.device == META and tensor.shape == value.shape:
                setattr(tensor, _NAME, (value, is_mask))

    @staticmethod
    def are_small(made: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> bool:
        large = [each for each in made if each.numel() > _MOST_COMPUTED]
        most = max([_MOST_COMPUTED, *map(_num_stored, read)]) if large else 0
        return all(_num_stored(each) <= most for each in large)

    def _lose_written(self, function: Any, args: Sequence[Any]) -> None:
        if function._schema.is_mutable:
            for each, given in zip(function._schema.arguments, args, strict=False):
                for tensor in tensors_of(given) if each.is_write else ():
                    value = noted(tensor)
                    if value is not None:
                        storage = value.untyped_storage()
                        self._lost[storage._cdata] = storage  # kept, so that no other storage gets its address

    @staticmethod
    def _is_of_a_mask(function: Any, read: Sequence[torch.Tensor]) -> bool:
        """Whether an operation reduces all of a mask to one number."""
        if function.overloadpacket.__name__ not in _REDUCTIONS or function._overloadname not in ("default", ""):
            return False
        return any(each.dim() and getattr(each, _NAME, (None, False))[1] for each in read)
