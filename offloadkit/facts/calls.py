"""Calls and commands with changed options, for the user to copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Options = Mapping[str, str | int]
"""Names in Python and values, such as {"precision": "compact", "vram": "8GiB"}."""

_command: ContextVar[Callable[[Options], str | None] | None] = ContextVar("_command", default=None)
_CONFIG = "offloadkit.OffloadConfig"
_OF_CONFIG = ("disk",)
"""Options that functions take as fields of their argument `offload`."""


@contextmanager
def in_a_command(again: Callable[[Options], str | None]) -> Iterator[None]:
    """Inside, calls are written as shell commands by `again`, which returns None if the command lacks an option."""
    before = _command.set(again)
    try:
        yield
    finally:
        _command.reset(before)


def as_here(command: str, call: str) -> str:
    """The shell command in a command, else the call."""
    return call if _command.get() is None else command


@dataclass(frozen=True)
class WrittenCall:
    """The call that asked for a plan."""

    function: str
    given: tuple[tuple[str, Any], ...] = (("", ...),)
    """Names and values of the arguments; the name of a positional one is "". `...` stands for unknown arguments."""

    def changed(self, options: Options) -> str | None:
        """The call, or the command, with other options; None if it has no such options."""
        if (again := _command.get()) is not None:
            return again(options)
        if self.function == _CONFIG:
            if not options.keys() <= {"vram", "ram", "precision", *_OF_CONFIG}:
                return None
            own = {**options}
        else:
            own = {name: value for name, value in options.items() if name not in _OF_CONFIG}
        parts = [_argument(name, value) for name, value in (dict(self.given) | own).items()]
        if of_config := [_argument(name, options[name]) for name in options if name not in own]:
            parts.append(f"offload={_CONFIG}({', '.join(of_config)})")
        return f"{self.function}({', '.join(parts)})"


BY_CONFIG = WrittenCall(_CONFIG)
BY_FINETUNE = WrittenCall("offloadkit.finetune")


def call_of(function: str, model: object, **given: Any) -> WrittenCall:
    """The call with these arguments, as far as they can be written; None is a default and left out."""
    known = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, str) and all(isinstance(value, str | int) for value in known.values()):
        return WrittenCall(function, (("", model), *known.items()))
    return WrittenCall(function)


def _argument(name: str, value: Any) -> str:
    written = "..." if value is ... else json.dumps(value) if isinstance(value, str) else repr(value)
    return f"{name}={written}" if name else written
