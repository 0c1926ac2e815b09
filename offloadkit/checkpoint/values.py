"""Values as JSON that are read back as they were: options, counts, a scheduler's state, a position, random states.

JSON has no tuples, tensors, bytes or keys that are not texts, and no infinity. Such a value is an object with one key
that says what it is, as in `{"$tuple": [3, 4]}`; a tensor's bytes are in hexadecimal. Nothing here is code: reading a
file of a stranger runs nothing.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offloadkit.checkpoint.folder import written_beside
from offloadkit.errors import ConfigError, ModelError


def as_json(value: Any, name: str) -> Any:
    """`value` as `json` writes it; `from_json` gives an equal one back. `name` says in messages what it is.

    Raises:
        ConfigError: it holds something that is not data, such as a function.
    """
    match value:
        case None | bool() | str():
            return value
        case np.bool_() | np.integer() | np.floating():
            return as_json(value.item(), name)
        case int():
            return int(value)  # of an enumeration, the number
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case list():
            return [as_json(item, f"{name}[{at}]") for at, item in enumerate(value)]
        case tuple():
            return {"$tuple": [as_json(item, f"{name}[{at}]") for at, item in enumerate(value)]}
        case set() | frozenset():
            return {"$set": [as_json(item, name) for item in sorted(value)]}
        case bytes():
            return {"$bytes": value.hex()}
        case dict():
            items = {key: as_json(item, f"{name}[{key!r}]") for key, item in value.items()}
            if type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key in items):
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
        f"{name} is a {type(value).__name__}, which a checkpoint cannot store: it holds numbers, texts, lists, dicts "
        "and tensors. Leave it out, or store what it is made of, such as vars(args) for a Namespace"
    )


def from_json(value: Any) -> Any:
    """The value that `as_json` was given."""
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
        case "$dict" | "$counter":
            pairs = {from_json(key): from_json(item) for key, item in content}
            return Counter(pairs) if kind == "$counter" else pairs
        case "$tensor":
            name, shape, memory = content
            dtype = getattr(torch, name)
            flat = torch.frombuffer(bytearray.fromhex(memory), dtype=dtype) if memory else torch.empty(0, dtype=dtype)
            return flat.view(shape)
        case "$array":
            name, shape, memory = content
            return np.frombuffer(bytes.fromhex(memory), dtype=np.dtype(name)).reshape(shape).copy()
    raise ValueError(f"{kind!r} is no kind of value that is known")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write `values`; the file has its name when it is complete.

    Raises:
        ConfigError: as `as_json`.
        OSError: it could not be written.
    """
    text = json.dumps({name: as_json(value, name) for name, value in values.items()}, allow_nan=False)
    with written_beside(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` was given.

    Raises:
        ModelError: the file is missing, cut or broken.
    """
    try:
        found = from_json(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is missing, cut or broken") from error


def random_states() -> dict[str, Any]:
    """The states of the random generators of Python, numpy, torch and, if it is in use, of the current GPU."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    cuda: Any = torch.cuda  # whose functions are typed in some releases of torch only
    if cuda.is_initialized():  # asking would begin to use it
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators to `random_states()` of before. The GPU's is left alone where there is none, now or then."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
