"""Whose numbers a checkpoint holds. Its manifest says it, and each of our files of itself, with its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from offloadkit.files import parse_json, read_json

ORIGIN = "origin"
"""In a file of JSON, or in the metadata of one of safetensors."""


class Origin(NamedTuple):
    """A run at one of its updates.

    Attributes:
        run: drawn when a run begins, and kept by those that go on from its checkpoints.
        attempt: 1, and one more each time that the run goes on from a checkpoint.
        num_updates: so far.
    """

    run: str
    attempt: int
    num_updates: int

    @classmethod
    def of_new_run(cls) -> Origin:
        """Of a run that begins. No generator of random numbers moves by it."""
        return cls(os.urandom(6).hex(), 1, 0)

    def of_file(self, name: str) -> dict[str, Any]:
        """What the file `name` says of itself in JSON."""
        return {**self._asdict(), "file": name}

    def of_arrays(self, name: str) -> dict[str, str]:
        """As `of_file`, for the metadata of safetensors."""
        return {ORIGIN: json.dumps(self.of_file(name))}

    def __str__(self) -> str:
        return f"run {self.run}, attempt {self.attempt}, after {self.num_updates} updates"


def parse_origin(found: Any) -> Origin:
    """The origin in what was JSON. Raises `KeyError` or `TypeError` where there is none."""
    return Origin(str(found["run"]), int(found["attempt"]), int(found["num_updates"]))


def said_by(path: Path) -> tuple[Origin, str] | None:
    """Whose a file says that it is, and what its name was. None: it does not say, or cannot be read."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found = parse_json((file.metadata() or {})[ORIGIN])
        else:
            found = read_json(path)[ORIGIN]
        return parse_origin(found), str(found["file"])
    except (OSError, ValueError, SafetensorError, LookupError, TypeError, OverflowError):
        return None
