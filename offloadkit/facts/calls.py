"""Calls and commands with changed options, for the user to copy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, str | int]
"""Names in Python and values, such as {"precision": "compact", "vram": "8GiB"}."""

_CONFIG = "offloadkit.OffloadConfig"
_OF_CONFIG = ("disk",)
"""Options that functions take as fields of their argument `offload`."""


@dataclass(frozen=True)
class Asked:
    """The command or call of the user, which other processes may work for.

    Attributes:
        again: writes it with other options; None if it lacks one of them.
    """

    again: Callable[[Options], str | None]
    in_a_shell: bool


_asked: ContextVar[Asked | None] = ContextVar("_asked", default=None)


@contextmanager
def asked_by(asked: Asked) -> Iterator[None]:
    """Inside, calls and commands are written as `asked` writes them."""
    before = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(before)


def as_here(command: str, call: str) -> str:
    """The shell command in a command, else the call."""
    return command if (asked := _asked.get()) is not None and asked.in_a_shell else call


_OPTION = re.compile(r"\b(batch_size|max_input_length|precision)=(['\"]?)(\w+)\2")


def in_words_here(words: str) -> str:
    """Words with options as in a call, such as "batch_size=4 and ...", in a command with its options."""
    return as_here(_OPTION.sub(lambda found: f"--{found[1].replace('_', '-')} {found[3]}", words), words)


@dataclass(frozen=True)
class WrittenCall:
    """The call that asked for a plan. Values are written in Python; `...` stands for those that cannot be written."""

    function: str
    positional: tuple[str, ...] = ("...",)
    named: tuple[tuple[str, str], ...] = ()

    def changed(self, options: Options) -> str | None:
        """The call, or what has asked for it, with other options; None if it has no such options."""
        return self.asked().again(options)

    def asked(self) -> Asked:
        """The command in which the call is made, else the call."""
        return _asked.get() or Asked(self._changed, in_a_shell=False)

    def _changed(self, options: Options) -> str | None:
        named, positional = dict(self.named), self.positional
        own = {name: _written(value) for name, value in options.items() if name not in _OF_CONFIG}
        if self.function == _CONFIG:
            if not options.keys() <= {"vram", "ram", "precision", *_OF_CONFIG}:
                return None
            own, positional = {name: _written(value) for name, value in options.items()}, ()
        elif of_config := [f"{name}={_written(options[name])}" for name in options if name not in own]:
            before = ["..."] if "offload" in named else []
            own["offload"] = f"{_CONFIG}({', '.join(before + of_config)})"
        parts = [*positional, *(f"{name}={value}" for name, value in (named | own).items())]
        return f"{self.function}({', '.join(parts)})"


BY_CONFIG = WrittenCall(_CONFIG)
BY_FINETUNE = WrittenCall("offloadkit.finetune")


def call_of(function: str, *positional: object, **named: Any) -> WrittenCall:
    """The call with these arguments; None is a default and left out."""
    given = tuple((name, _written(value)) for name, value in named.items() if value is not None)
    return WrittenCall(function, tuple(map(_written, positional)), given)


_LONGEST = 200
"""Characters of a value; a longer one is rather data."""


def _written(value: object) -> str:
    written = "..."
    if isinstance(value, str | os.PathLike):
        written = json.dumps(os.fspath(value), ensure_ascii=False)
    elif isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        written = f"[{', '.join(map(_written, value[:_LONGEST]))}]"
    elif isinstance(value, bool | int | float):
        written = repr(value)
    return written if len(written) <= _LONGEST else "..."
