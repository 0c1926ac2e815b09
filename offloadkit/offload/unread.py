"""Parameters on the meta device whose numbers are read from a file, or drawn, when the engine places them.

`leave_unread` stores on each parameter the function that makes it real, and `make_real` calls it. Until then,
operations that need the numbers raise an error with advice. Writes raise too, because they would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offloadkit.errors import ModelError
from offloadkit.offload.external_writes import unwatched

Materialise = Callable[[Sequence[nn.Parameter]], None]
"""Gives the meta parameters among its arguments memory in RAM and their numbers, by `become`."""

_HINT = (
    "this model's weights are not read yet: offloadkit.from_pretrained leaves that to the engine, which reads them "
    "into their training memory (so `.to(device)` is not needed). They are available once an OffloadEngine is open, or "
    "a Trainer of offloadkit has begun to train or evaluate. To use, change, copy or save them earlier, load the model "
    "with transformers' from_pretrained"
)


def leave_unread(parameters: Iterable[nn.Parameter], materialise: Materialise, source: str = "") -> None:
    """Make `make_real` call `materialise` for `parameters`, which are on the meta device.

    `source`: the folder or hub name of their numbers; "" if they are drawn.
    """
    for parameter in parameters:
        parameter.__class__ = _Unread
        vars(parameter)[_FROM] = materialise, source


def is_unread(model: nn.Module) -> bool:
    return any(type(parameter) is _Unread for parameter in model.parameters())


def sources(model: nn.Module) -> set[str]:
    return {vars(parameter)[_FROM][1] for parameter in model.parameters() if type(parameter) is _Unread}


def make_real(parameters: Iterable[nn.Parameter]) -> None:
    """Read or draw the unread parameters among `parameters`, into RAM.

    Raises:
        ModelError: a file is missing or broken.
    """
    waiting: dict[Materialise, list[nn.Parameter]] = {}
    for parameter in parameters:
        if type(parameter) is _Unread:
            waiting.setdefault(vars(parameter)[_FROM][0], []).append(parameter)
    for materialise, some in waiting.items():
        materialise(some)


def become(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter without memory the memory of `value`. The parameter object stays the same.

    Raises:
        ModelError: the parameter's shape was changed since it was left unread.
    """
    if value.shape != parameter.shape:
        shapes = f"{tuple(value.shape)}, and was made {tuple(parameter.shape)} before it was read"
        raise ModelError(f"a weight has the shape {shapes}: {_HINT}")
    real = nn.Parameter(value, requires_grad=parameter.requires_grad)
    real.__dict__.update({name: each for name, each in vars(parameter).items() if name != _FROM})
    parameter.__class__ = nn.Parameter
    swap: Any = torch.utils.swap_tensors  # typed only in some releases of torch
    swap(parameter, real)


_FROM = "_offloadkit_unread"
_DATA_OF = {torch.Tensor.data.__get__, torch.Tensor.detach}  # type: ignore[attr-defined]


class _Watched:
    """Common base of an unread parameter and its `.data`: operations that need numbers raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwatched():
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if not all(each.is_meta for each in tensors):  # a real tensor: an input, or a value to write
                raise ModelError(_HINT)
            versions = [each._version for each in tensors]
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                raise ModelError(_HINT) from error
            if versions != [each._version for each in tensors]:
                raise ModelError(_HINT)
            for each in tree_leaves(result):
                if type(each) is torch.Tensor and (func in _DATA_OF or each._is_view()):
                    each.__class__ = _UnreadData
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ModelError(_HINT)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(_HINT)


class _Unread(_Watched, nn.Parameter):
    """An unread parameter."""


class _UnreadData(_Watched, torch.Tensor):
    """The `.data` of an unread parameter, a view of it, or its entry in `state_dict()`."""
