"""Frozen weights. A checkpoint has a checksum of each, which a resumed run must share, and the written weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from offloadkit.checkpoint.folder import PIECE_BYTES, checksum_threads
from offloadkit.checkpoint.values import why_unlike
from offloadkit.errors import ModelError


class Checksums:
    """One xxh3 for each frozen weight, computed again only after a write."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int | None, str]] = {}

    def of(self, weights: Mapping[str, tuple[torch.Tensor, int | None]]) -> dict[str, str]:
        """Checksums over dtype, shape and bytes, by name.

        Args:
            weights: (tensor, number that every write changes) by name. None: compute the checksum again.
        """
        known = {name: version for name, (version, _) in self._known.items() if version is not None}
        new = {name: each for name, each in weights.items() if name not in known or known[name] != each[1]}
        if new:
            with checksum_threads() as pool:
                found = pool.map(_checksum, [tensor for tensor, _ in new.values()])
                for (name, (_, version)), checksum in zip(new.items(), found, strict=True):
                    self._known[name] = version, checksum
        return {name: self._known[name][1] for name in sorted(weights)}


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> str:
    found = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        found.update(flat[start : start + PIECE_BYTES].cpu().numpy().data)
    return found.hexdigest()


@dataclass(frozen=True)
class Base:
    """The frozen weights of a run.

    Attributes:
        model: the model's name or folder; "" if unknown.
        checksums: returns the checksums by name.
        weights: the entries of the module's `state_dict()`.
    """

    model: str
    checksums: Callable[[], dict[str, str]]
    weights: Mapping[str, torch.Tensor]

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "xxh3": self.checksums()}

    def check(self, path: Path, saved: Any, loaded: Collection[str] = ()) -> None:
        """Compare with the entry in `path`, the saved run's, except for weights that will be `loaded`.

        Raises:
            ModelError: the frozen weights differ, or the entry is corrupt.
        """
        why = why_unlike(saved, {"model": "", "xxh3": {}}, "base", whole=True)
        if why is not None:
            raise ModelError(f"{path} cannot be read ({why}): it is truncated or corrupt")
        own, theirs = self.checksums(), saved["xxh3"]
        memory = {self.weights[name].data_ptr() for name in loaded if name in self.weights}
        tied = {name for name, weight in self.weights.items() if weight.data_ptr() in memory}
        differing = [name for name in sorted({*own, *theirs} - tied) if own.get(name) != theirs.get(name)]
        if differing:
            of = f" of {saved['model']!r}" if saved["model"] else ""
            raise ModelError(
                f"{path}: {len(differing)} frozen weights differ from those{of} that the run was saved with, such as "
                f"{differing[0]!r}. The checkpoint does not have them: resume with the same base model, frozen alike"
            )
