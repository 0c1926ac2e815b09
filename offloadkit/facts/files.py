"""Defensive handling of file names and files from users: invalid names, endless files, deeply nested JSON."""

from __future__ import annotations

import errno
import glob
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offloadkit.errors import ConfigError, shown

MOST_JSON_BYTES = 2**28
"""Tokenizers are the largest, with tens of megabytes."""
DEEPEST_JSON = 100
"""Python's recursion limit is about a thousand calls."""
_LONGEST_PART, _LONGEST_NAME = 255, 4_095


def why_no_name(name: str) -> str | None:
    """Why no file can have this name, as the end of a sentence, or None."""
    if "\0" in name:
        return "it has a NUL character in it"
    try:
        encoded = os.fsencode(os.path.expanduser(name))
    except UnicodeEncodeError:
        return "it has half of a character in it (a lone surrogate)"
    if (longest := max(map(len, encoded.split(b"/")))) > _LONGEST_PART:
        return f"a part of it has {longest:,} bytes, but file systems allow {_LONGEST_PART}"
    if len(encoded) > _LONGEST_NAME:
        return f"it has {len(encoded):,} bytes, but file systems allow {_LONGEST_NAME:,}"
    if name.startswith("~") and encoded.startswith(b"~") and not os.path.lexists(name):
        return f"there is no user {name.split('/')[0][1:]!r}"
    return None


def why_no_model_name(name: str) -> str | None:
    """Why no model can be read from or written to this path, as the end of a sentence, or None."""
    if (why := why_no_name(name)) is not None:
        return why
    try:
        name.encode()
    except UnicodeEncodeError:
        pass
    else:
        return None
    try:
        os.fsencode(name).decode()
    except UnicodeDecodeError:
        return "its bytes are not UTF-8, which safetensors needs"
    return f"Python reads names of files as {sys.getfilesystemencoding()} here, not as UTF-8: set PYTHONUTF8=1"


def path_of(given: object, option: str) -> Path:
    """Convert a user's path, expanding ~.

    Raises:
        ConfigError: it is no path, or no file of a model can have this name. The message begins with `option`.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise ConfigError(f"{option} must be a path, such as 'folder/name', got {shown(given)}")
    name = os.fspath(given)
    if (why := why_no_model_name(name)) is not None:
        raise ConfigError(f"{option} {shown(name)} cannot be used: {why}. Pass another path")
    return Path(os.path.expanduser(name))


def is_pattern(path: Path) -> bool:
    """Whether `path` is a pattern with *, ? or [], and not a file of that name."""
    return glob.has_magic(str(path)) and not path.exists()


def matching(path: Path) -> list[Path]:
    """The files that a pattern matches, sorted; another path alone, which need not exist."""
    return [Path(each) for each in sorted(glob.glob(str(path), recursive=True))] if is_pattern(path) else [path]


def why_not_plain(path: str | os.PathLike[str]) -> str | None:
    """A path's kind if it is not a regular file; None if it is or does not exist."""
    try:
        mode = os.stat(path).st_mode  # follows links, as in the hub's cache
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def read_json(path: Path, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: the file is unreadable, not a regular file, or larger than `MOST_JSON_BYTES`.
        ValueError: see `parse_json`.
    """
    if (other := why_not_plain(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {other}, not a file")
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_JSON_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {MOST_JSON_BYTES:,} are read")
        content = file.read(MOST_JSON_BYTES)
    return parse_json(content, object_pairs_hook)


def parse_json(text: bytes | str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Raises `ValueError` for invalid JSON or UTF-8, nesting deeper than `DEEPEST_JSON`, or a lone surrogate."""
    if isinstance(text, bytes):
        text = text.decode()
    try:
        found = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > DEEPEST_JSON:
        check_depth(found)
    if "\\ud" in text or "\\uD" in text:
        _check_letters(found)
    return found


def check_depth(value: Any) -> None:
    below = [value]
    for _ in range(DEEPEST_JSON):
        below = [item for each in below for item in _inside(each) if isinstance(item, dict | list)]
        if not below:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"lists and objects are nested deeper than {DEEPEST_JSON}"


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_letters(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character (a lone surrogate) is in {shown(value)}") from error
    elif isinstance(value, dict | list):
        for each in value if isinstance(value, list) else (*value, *value.values()):
            _check_letters(each)
