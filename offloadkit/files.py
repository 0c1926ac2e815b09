"""Names and files that others have given: names that no file can have, files without an end, JSON without a bottom."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offloadkit.errors import ConfigError, shown

MOST_JSON_BYTES = 2**28
"""Of a file of JSON. A tokenizer's is the largest, with tens of megabytes."""
DEEPEST_JSON = 100
"""Lists and objects around a value. Python's own functions end at about a thousand calls."""
_LONGEST_PART, _LONGEST_NAME = 255, 4_095


def why_no_name(name: str) -> str | None:
    """Why no file or folder can have the name, as the end of a sentence; None if one can."""
    if "\0" in name:
        return "it has a NUL character in it"
    try:
        encoded = os.fsencode(os.path.expanduser(name))
    except UnicodeEncodeError:
        return "it has half of a character in it (a lone surrogate)"
    if (longest := max(map(len, encoded.split(b"/")))) > _LONGEST_PART:
        return f"a part of it has {longest:,} bytes, and file systems take {_LONGEST_PART}"
    if len(encoded) > _LONGEST_NAME:
        return f"it has {len(encoded):,} bytes, and file systems take {_LONGEST_NAME:,}"
    if name.startswith("~") and encoded.startswith(b"~") and not os.path.lexists(name):
        return f"there is no user {name.split('/')[0][1:]!r}"
    return None


def path_of(given: object, option: str) -> Path:
    """A path that a user has given, with the home folder in the place of ~.

    Raises:
        ConfigError: it is no path, or no file can have such a name. The message begins with `option`.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise ConfigError(f"{option} must be a path, such as 'folder/name', got {shown(given)}")
    name = os.fspath(given)
    if (why := why_no_name(name)) is not None:
        raise ConfigError(f"{option} {shown(name)} cannot be used: {why}. Pass another path")
    return Path(os.path.expanduser(name))


def why_not_plain(path: str | os.PathLike[str]) -> str | None:
    """What a path leads to, in words, where that is no file with an end; None for one, and where nothing is there."""
    try:
        mode = os.stat(path).st_mode  # links are followed: the hub's cache is made of them
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"


def read_json(path: Path, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value in a file of JSON.

    Raises:
        OSError: the file cannot be read, is no file with an end, or has more than `MOST_JSON_BYTES`.
        ValueError: as `parse_json`.
    """
    if (other := why_not_plain(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {other}, not a file")
    with open(path, "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) > MOST_JSON_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; {MOST_JSON_BYTES:,} are the most that are read")
        content = file.read(MOST_JSON_BYTES)
    return parse_json(content, object_pairs_hook)


def parse_json(text: bytes | str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that a text of JSON stands for.

    Raises:
        ValueError: it is no JSON, is not UTF-8, is nested deeper than `DEEPEST_JSON`, or has half a character in it.
    """
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
    """Raise `ValueError` for a value of JSON that is nested deeper than `parse_json` takes."""
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
    """Raise `ValueError` for a text that has half a character."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character (a lone surrogate) is in {shown(value)}") from error
    elif isinstance(value, dict | list):
        for each in value if isinstance(value, list) else (*value, *value.values()):
            _check_letters(each)
