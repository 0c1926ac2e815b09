"""Copies of a module's buffers (BatchNorm statistics and the like), to restore before computing something again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from offloadkit.errors import EngineStateError

_Place = tuple[nn.Module, str]


@dataclass
class _Kept:
    """A buffer as `keep` found it; `copy` is None if only its version is kept."""

    buffer: torch.Tensor
    version: int | None
    copy: torch.Tensor | None

    def is_unchanged(self, now: torch.Tensor) -> bool:
        """Whether `now` is the same buffer with the same contents. Compares values if a copy exists, because BatchNorm
        does not increment versions.
        """
        if now is not self.buffer:
            return False
        return self.version == _version(now) if self.copy is None else torch.equal(self.copy, now)


class Buffers:
    """Keeps a module's buffers and restores them.

    Constant buffers (position tables) are copied only once; later the version counter detects writes.
    """

    def __init__(self) -> None:
        self._kept: dict[_Place, _Kept] = {}
        self._changing: set[_Place] = set()

    def keep(self, model: nn.Module) -> None:
        """Keep the present buffers of `model` instead of those kept before.

        The second call compares all buffers with their copies, and waits for the device.
        """
        before, self._kept = self._kept, {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                place = module, name
                if buffer is None:
                    continue
                old = before.get(place)
                is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # may change later, if now in eval mode
                if is_norm or (old is not None and place not in self._changing and not old.is_unchanged(buffer)):
                    self._changing.add(place)
                is_copied = old is None or place in self._changing
                self._kept[place] = _Kept(buffer, _version(buffer), buffer.detach().clone() if is_copied else None)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers.

        Raises:
            EngineStateError: a buffer was written that had been constant until the last `keep`. None is changed then.
        """
        for (module, name), kept in self._kept.items():
            if kept.copy is None and not kept.is_unchanged(kept.buffer):
                raise EngineStateError(
                    f"the buffer {name!r} of a {type(module).__name__} was written for the first time in a "
                    "recomputation, and there is no copy of it: resume from a checkpoint"
                )
        for (module, name), kept in self._kept.items():
            module._buffers[name] = kept.buffer if kept.copy is None else kept.buffer.copy_(kept.copy)


def _version(buffer: torch.Tensor) -> int | None:
    return None if buffer.is_inference() else buffer._version
