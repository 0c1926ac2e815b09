"""The run, attempt and update that wrote a checkpoint, recorded in the manifest and in each file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from offloadkit.facts.files import parse_json, read_json

ORIGIN = "origin"


class Origin(NamedTuple):
    """A run at one of its updates.

    Attributes:
        run: random id, kept when the run is resumed.
        attempt: 1, and one more after each resume.
    """

    run: str
    attempt: int
    num_updates: int

    @classmethod
    def of_new_run(cls) -> Origin:
        """A new id, without touching any random generator."""
        return cls(os.urandom(6).hex(), 1, 0)

    def of_file(self, name: str) -> dict[str, Any]:
        return {**self._asdict(), "file": name}

    def of_arrays(self, name: str) -> dict[str, str]:
        return {ORIGIN: json.dumps(self.of_file(name))}

    def __str__(self) -> str:
        return f"run {self.run}, attempt {self.attempt}, after {self.num_updates} updates"


def parse_origin(found: Any) -> Origin:
    """Raises `KeyError` or `TypeError` if `found` has no origin."""
    return Origin(str(found["run"]), int(found["attempt"]), int(found["num_updates"]))


def recorded_origin(path: Path) -> tuple[Origin, str] | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found = parse_json((file.metadata() or {})[ORIGIN])
        else:
            found = read_json(path)[ORIGIN]
        return parse_origin(found), str(found["file"])
    except (OSError, ValueError, SafetensorError, LookupError, TypeError, OverflowError):
        return None
