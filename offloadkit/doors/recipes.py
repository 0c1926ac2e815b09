"""Recipes: YAML files of arguments of `finetune`. Some come with the package, and each run writes its own."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from offloadkit.errors import ConfigError, shown
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.options import FinetuneOptions

FOLDER = Path(__file__).parents[1] / "recipes"
RECIPE_FILE = "recipe.yaml"
"""Name of the recipe that a run writes into its output folder."""
_LEFT_OUT = ("output_dir", "resume", "overwrite", "monitor", "verbose", "num_gpus", "training_arguments")
"""Options that do not change what is trained, or are written otherwise."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """Reads 1e-4 as a number: YAML 1.1 asks for a point before the e and a sign after it. Refuses a name that is given
    twice: PyYAML takes the last value.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)  # before names of merged mappings (<<) are added to it
        keys = [key.value for key, _ in node.value if not key.tag.endswith(":merge")]
        if (twice := next((key for key in keys if keys.count(key) > 1), None)) is not None:
            raise yaml.MarkedYAMLError(problem=f"it has {shown(twice)} twice, leave one of the lines out")
        return node


class _Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
    """Quotes texts that `_Loader` would read as numbers."""


_FLOAT = "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def names() -> list[str]:
    """Names of the package's recipes."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in (".yaml", ".py"))


def is_recipe(name: str) -> bool:
    """Whether `name` is a YAML file or a recipe of the package, and not a folder."""
    return name.endswith((".yaml", ".yml")) or (name in names() and not Path(name).is_dir())


def find(name: str) -> Path:
    """The file of a recipe, by the package's name or a path. Raises `ConfigError` with the nearest name."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name in names():
        return next(path for path in FOLDER.iterdir() if path.stem == name)
    near = nearest(name)
    meant = "`offloadkit recipes ls` lists the package's" if near is None else f"did you mean {near!r}?"
    raise ConfigError(f"there is no recipe {name!r}, neither a file nor one of the package; {meant}")


def about(name: str) -> str:
    """The first line of a recipe: what it does."""
    return find(name).read_text().splitlines()[0].strip('#" ')


def read(name: str) -> dict[str, Any]:
    """The arguments in a recipe. Its section "offload" holds fields of `OffloadConfig`.

    Raises:
        ConfigError: there is no such recipe, it is a script, or it is no mapping of names to values.
    """
    file = find(name)
    if file.suffix == ".py":
        raise ConfigError(f"the recipe {name!r} is a script: `offloadkit recipes cp {name}`, then `python {file.name}`")
    try:
        found = yaml.load(file.read_text(), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the recipe {file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"the recipe {file} must map arguments of finetune to values, got {shown(found)}")
    if not isinstance(found.get("offload", {}), dict):
        raise ConfigError(f"the section offload of the recipe {file} holds fields of OffloadConfig by name")
    return found


def nearest(name: str) -> str | None:
    """The package's recipe that is spelled most like `name`, or None."""
    return next(iter(difflib.get_close_matches(Path(name).stem, names(), 1, cutoff=0.7)), None)


def copy(name: str, to: Path) -> Path:
    """Copy a recipe into a folder, or to a file whose name ends as the recipe's; returns the new file.

    Raises:
        ConfigError: there is a file already, or the copy cannot be written.
    """
    file, to = find(name), to.expanduser()
    target = to if to.suffix == file.suffix and not to.is_dir() else to / file.name
    if (there := to if to.is_file() else target).exists():
        raise ConfigError(f"{there} exists already: name another folder, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another folder") from error
    return target


def as_yaml(options: FinetuneOptions, *, batch_size: int, num_gpus: int = 1) -> str:
    """A run's arguments as a recipe. Values that YAML cannot hold, such as a model in memory, become comments. A
    `LoraConfig` becomes a text that `finetune` refuses, because a run without `lora` would train all weights.

    Args:
        batch_size: the size that "auto" has become.
        num_gpus: processes that `finetune` started.
    """
    from offloadkit.hf.read import are_paths  # imports torch

    given = {name: value for name, value in changed(options).items() if name not in _LEFT_OUT}
    given |= {"batch_size": batch_size} | ({"num_gpus": num_gpus} if num_gpus > 1 else {})
    given |= {name: value for name, value in options.training_arguments.items() if name != "hub_token"}
    config = given.pop("offload", None)
    values: dict[str, Any] = {}
    others: list[str] = []
    for name, value in given.items():
        in_memory = name in ("train_dataset", "eval_dataset") and not isinstance(value, str | float | os.PathLike)
        _put(values, others, name, value, in_memory=in_memory and not are_paths(value))
    within: dict[str, Any] = {}
    for name, value in (changed(config) if isinstance(config, OffloadConfig) else {}).items():
        _put(within, others, name, value)
    text: str = yaml.dump(
        values | ({"offload": within} if within else {}), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
    )
    return "\n".join([*others, text])


_WHOLE = "# The arguments of a run. To repeat it: offloadkit train FILE output_dir=FOLDER\n"
_IN_MEMORY = "in memory, which is passed in Python"
_LAST_PART = "# The arguments of the last part of a run, from "


def is_of_user(path: Path) -> bool:
    """Whether the file exists and no run wrote it."""
    return path.is_file() and not path.read_bytes().startswith((_WHOLE.encode(), _LAST_PART.encode()))


def with_head(recipe: str, path: Path, *, resumed: Path | None) -> str:
    """A run's recipe and a comment: it repeats the run, unless the part before the checkpoint had other arguments.

    Args:
        path: the recipe file in the output folder, perhaps of the run that is resumed.
        resumed: the checkpoint.
    """
    if resumed is None:
        return _WHOLE + recipe
    before = path.read_text(errors="replace") if path.is_file() and not is_of_user(path) else ""
    if before.endswith(f"\n{recipe}"):
        return before
    earlier = "".join(f"# {line.removeprefix('# ')}\n" for line in before.splitlines()) or "# (not known)\n"
    return f"{_LAST_PART}{resumed.name} on, which do not repeat the run. Before:\n{earlier}{recipe}"


def repeats_the_run(text: str) -> bool:
    """Whether `with_head` found one set of arguments for the whole run, and nothing of it was in memory."""
    return not text.startswith(_LAST_PART) and _IN_MEMORY not in text


def _put(values: dict[str, Any], others: list[str], name: str, value: Any, *, in_memory: bool = False) -> None:
    """Add a value, or a comment in its place."""
    try:
        if in_memory:
            raise TypeError
        values[name] = _plain(value)
    except TypeError:
        said = f"a {type(value).__name__} {_IN_MEMORY}"
        if name == "lora":
            values[name] = said
        else:
            others.append(f"# {name}: {said}")


def changed(record: FinetuneOptions | OffloadConfig) -> dict[str, Any]:
    """The fields whose values are not the default, by name."""
    defaults = OffloadConfig() if isinstance(record, OffloadConfig) else None  # it fills in values when it is made
    found: dict[str, Any] = {}
    for each in fields(record):
        usual = each.default if defaults is None else getattr(defaults, each.name)
        given = getattr(record, each.name)
        value = tuple(given) if isinstance(given, list) else given
        is_plain = is_dataclass(value) or isinstance(value, str | bool | int | float | tuple)  # a pandas frame is not
        if value is not usual and not (is_plain and value == usual):
            found[each.name] = given
    return found


def _plain(value: Any) -> Any:
    """`value` in types of YAML. Raises `TypeError` for others."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return _plain(value.value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError
