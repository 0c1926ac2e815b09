"""Lossless JSON for options, counts, scheduler states, positions and random states.

Tuples, tensors, bytes, non-string keys and infinity become objects with a single key that names the type, such as
`{"$tuple": [3, 4]}`; a tensor's bytes are hexadecimal. Reading never executes code.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offloadkit.checkpoint.folder import atomic_write
from offloadkit.errors import ConfigError, ModelError, cut, shown
from offloadkit.facts import files
from offloadkit.facts.units import kind_of


def as_json(value: Any, name: str) -> Any:
    """Convert `value` for `json`; `from_json` restores an equal value. `name` is used in messages.

    Raises:
        ConfigError: it holds an unsupported type, such as a function.
    """
    match value:
        case None | bool():
            return value
        case str():
            return value if _is_whole(value) else {"$text": value.encode("utf-8", "surrogatepass").hex()}
        case np.bool_() | np.integer() | np.floating():
            return as_json(value.item(), name)
        case int() if value.bit_length() < _MOST_BITS:
            return int(value)  # enums become numbers
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case list():
            return [as_json(item, f"{name}[{at}]") for at, item in enumerate(value)]
        case tuple():
            return {"$tuple": [as_json(item, f"{name}[{at}]") for at, item in enumerate(value)]}
        case set() | frozenset():
            return {"$set": [as_json(item, name) for item in sorted(value, key=repr)]}
        case bytes():
            return {"$bytes": value.hex()}
        case dict():
            items = {key: as_json(item, f"{name}[{key!r}]") for key, item in value.items()}
            if type(value) is not Counter and all(map(_is_plain, items)):
                return items
            kind = "$counter" if type(value) is Counter else "$dict"
            return {kind: [[as_json(key, name), item] for key, item in items.items()]}
        case torch.Tensor():
            memory = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dtype = str(value.dtype).removeprefix("torch.")
            return {"$tensor": [dtype, list(value.shape), memory.numpy().tobytes().hex()]}
        case np.ndarray() if value.dtype.kind in "biuf":
            return {"$array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    raise ConfigError(
        f"{name} is {kind_of(value)}, which a checkpoint cannot store: it can store numbers, strings, lists, "
        "dicts and tensors. Leave it out, or store its content, such as vars(args) for a Namespace"
    )


_MOST_BITS = 10_000
"""Maximum bits of an integer: Python parses at most 4,300 digits."""


def _is_plain(key: Any) -> bool:
    return type(key) is str and not key.startswith("$") and _is_whole(key)


def _is_whole(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    ((kind, content),) = value.items()
    match kind:
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(map(from_json, content))
        case "$set":
            return set(map(from_json, content))
        case "$bytes":
            return bytes.fromhex(content)
        case "$text":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        case "$dict" | "$counter":
            pairs = {from_json(key): from_json(item) for key, item in content}
            return Counter(pairs) if kind == "$counter" else pairs
        case "$tensor":
            name, shape, memory = content
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{shown(name)} is no dtype")
            flat = torch.frombuffer(bytearray.fromhex(memory), dtype=dtype) if memory else torch.empty(0, dtype=dtype)
            return flat.view(shape)
        case "$array":
            name, shape, memory = content
            return np.frombuffer(bytes.fromhex(memory), dtype=np.dtype(name)).reshape(shape).copy()
    raise ValueError(f"{shown(kind)} is not a known kind of value")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values` as JSON, atomically.

    Raises:
        ConfigError: see `as_json`, or a value is nested too deeply.
        OSError: the file cannot be written.
    """
    found = {}
    for name, value in values.items():
        try:
            found[name] = as_json(value, name)
            files.check_depth({name: found[name]})
        except ConfigError:
            raise
        except (RecursionError, ValueError) as error:
            raise ConfigError(
                f"{name} cannot be stored: its lists and dicts are nested deeper than {files.DEEPEST_JSON}. Flatten it"
            ) from error
    text = json.dumps(found, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read values written by `write_json`. Raises `ModelError` if the file is missing, truncated or broken."""
    try:
        found = from_json(files.read_json(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is missing, truncated or corrupt") from error


_KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    (int | float | np.number, "a number"),
    (str, "a text"),
    (list | tuple, "a list"),
    (Mapping, "an object"),
    (torch.Tensor, "a tensor"),
)


def why_unlike(saved: Any, own: Any, place: str, *, whole: bool = False) -> str | None:
    """Why the structure of a saved value does not match the run's own value, such as a string for a number: a clause
    that names the `place`, or None.

    A value that is None in the run, or missing from it, matches anything, unless `whole` requires all keys of `own`.
    The last item of a list stands for all later items.
    """
    kind: Any
    kind, name = next((each for each in _KINDS if isinstance(own, each[0])), (object, ""))
    is_number = name == "a number" and not isinstance(saved, bool)
    if is_number and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return None
    if not isinstance(saved, kind) or (name == "a number" and not is_number):
        return f"{place} is {shown(saved)}, but {name} is needed"
    if is_number and abs(saved) > 2**63 and abs(saved) != math.inf:
        return f"{place} is {shown(saved)}, which is too large"
    pairs: list[tuple[Any, Any, str]] = []
    if isinstance(own, Mapping):
        if whole and (lacking := [key for key in own if key not in saved]):
            return f"{place} has no {lacking[0]!r}"
        pairs = [(saved[key], each, f"{place}[{key!r}]") for key, each in own.items() if key in saved]
    elif isinstance(own, list | tuple) and own:
        pairs = [(each, own[min(at, len(own) - 1)], f"{place}[{at}]") for at, each in enumerate(saved)]
    return next((why for pair in pairs if (why := why_unlike(*pair, whole=whole)) is not None), None)


def random_states() -> dict[str, Any]:
    """States of the generators of Python, numpy, torch and, if CUDA is initialized, the current GPU."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    cuda: Any = torch.cuda  # typed only in some releases of torch
    if cuda.is_initialized():  # get_rng_state would initialize CUDA
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def check_random_states(states: dict[str, Any], path: Path) -> None:
    """Try the states from the file `path` on temporary generators. Raises `ModelError` if they are invalid."""
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if not isinstance(states.get("cuda", torch.empty(0, dtype=torch.uint8)), torch.Tensor):
            raise TypeError("'cuda' is no tensor")
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise ModelError(
            f"{path} has no valid random states ({type(error).__name__}: {cut(str(error))}): it is truncated or corrupt"
        ) from error


def set_random_states(states: dict[str, Any]) -> None:
    """Restore `random_states()`. The GPU's generator is skipped without a GPU or a saved state."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
