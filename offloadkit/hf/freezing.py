"""Freezes parts of a model by the names of its modules, such as "vision_tower"."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from offloadkit.errors import ConfigError, shown

_MOST_NAMES = 8


def freeze_names(freeze: Any) -> tuple[str, ...]:
    """The names as a tuple. Raises `ConfigError` unless they are None, a string or a list of strings."""
    names = () if freeze is None else (freeze,) if isinstance(freeze, str) else freeze
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"freeze must be the name of a module, such as 'vision_tower', or a list of names; got {shown(freeze)}"
        )
    return tuple(names)


def freeze_parts(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze the parameters of all modules, and single parameters, that a name matches.

    Args:
        names: "vision_tower" matches "model.vision_tower". "*" stands for any characters, as in
            "language_model.layers.[0-9].*".

    Raises:
        ConfigError: a name matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parts = [name for name, module in model.named_modules(remove_duplicate=False) if name and _has_parameters(module)]
    for pattern in names:
        found = [each for each in (*parts, *parameters) if _matches(each, pattern)]
        if not found:
            raise ConfigError(
                f"freeze={pattern!r} matches no module of the {type(model).__name__}. {_near(parts, pattern)}"
            )
        for name, parameter in parameters.items():
            if any(name == each or name.startswith(f"{each}.") for each in found):
                parameter.requires_grad_(False)
    if names and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"freeze={shown(list(names))} leaves no parameter to train: freeze fewer modules")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _near(parts: Sequence[str], pattern: str) -> str:
    """A sentence with the modules of similar names, or else the outermost modules."""
    by_end = {name.rpartition(".")[2]: name for name in reversed(parts)}
    wanted = pattern.strip("*.").rpartition(".")[2]
    near = difflib.get_close_matches(wanted, by_end, _MOST_NAMES, 0.5)
    near += [end for end in by_end if end not in near and wanted and (wanted in end or end in wanted)]
    names = [by_end[end] for end in near] or [name for name in parts if name.count(".") < 2]
    what = "Modules with similar names" if near else "Its outer modules"
    return f"{what}: {', '.join(names[:_MOST_NAMES])}"


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
