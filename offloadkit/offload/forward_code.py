"""The code that the forwards of modules run. A graph goes on computing what this code was when it was captured.

All blocks of a model share classes, functions and globals, so one comparison a forward serves all.
"""

from __future__ import annotations

import dis
import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import _lru_cache_wrapper, cache, cached_property, partial
from itertools import islice
from operator import is_
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from offloadkit.offload.dict_versions import UnchangedContainers, versions

MOST_VALUES = 2000
"""Larger dicts, lists and sets are not compared."""
_UNNAMED = (
    *("forward", "__call__", "_call_impl", "__getattr__", "backward", "setup_context"),
    *("__getitem__", "__contains__", "__iter__", "__len__", "__enter__", "__exit__"),
)
"""Methods that forwards call without their names, by torch or by syntax."""
_LIBRARIES = frozenset({"torch", "numpy", "triton", "offloadkit", *sys.stdlib_module_names}) - {"__main__"}
"""Packages whose functions are not searched, but for the methods of modules."""


class ForwardCode:
    """Finds changes of the code that forwards run: attributes of classes, the code, defaults and closures of functions,
    and globals, with the contents of global dicts, lists and sets, and the attributes of global objects.

    All are found by their names in code, beginning with the forwards, and compared by identity. For example,
    `torch.nn.functional.linear` is found in `nn.Linear.forward`, which a module has, and what that function calls is
    not, because it belongs to a library.

    Not found are

    - names that are made at run time (`getattr(self, name)`), operators (`__add__`) and constructors of classes;
    - attributes of functions, what a function imports while it runs, and code inside objects of libraries (that of
      `torch.library.custom_op`);
    - attributes of modules that are in no block, of objects inside objects, and of objects without a `__dict__`;
    - the code, defaults and closures of functions of installed packages, unless the class of a module is in the same
      file: a function that replaces them is found by its name;
    - changes while a forward runs: the next forward finds them.
    """

    def __init__(self, modules: Iterable[nn.Module], forwards: Iterable[Callable[..., Any]]) -> None:
        """`forwards`: those that modules have instead of their classes'."""
        found = _Search(modules, forwards)
        self._tables = list(found.tables.values())
        for each in self._tables:
            each.freeze(found.words)
        self._dicts = [each.table for each in self._tables]
        self._versions = versions(self._dicts)
        self._functions = [each for each in found.functions if found.may_change(each)]
        cells = [(cell, function) for cell, function in found.cells if found.may_change(function)]
        self._cells, self._owners = [cell for cell, _ in cells], [function for _, function in cells]
        self._parts = self._parts_now()
        self._containers = []
        for are_dicts in (True, False):  # of dicts alone, the writes can be counted
            pairs = [pair for pair in found.containers if (type(pair[1]) is dict) == are_dicts]
            containers = UnchangedContainers([each for _, each in pairs], keys=True)
            self._containers.append(([name for name, _ in pairs], containers))

    def _parts_now(self) -> list[Any]:
        functions = self._functions
        own = [*map(_code, functions), *map(_defaults, functions), *map(_kwdefaults, functions)]
        return own + gc.get_referents(*self._cells)

    def changed(self) -> str | None:
        """The name of what has changed, or None."""
        now, before = versions(self._dicts), self._versions
        if now is None or before is None or now != before:
            for at, table in enumerate(self._tables):
                if (now is None or before is None or now[at] != before[at]) and (name := table.changed()) is not None:
                    return name
            self._versions = now
        parts = self._parts_now()
        if len(parts) != len(self._parts):
            return "a variable of a function"
        if not all(map(is_, parts, self._parts)):
            at = next(at for at, part in enumerate(parts) if part is not self._parts[at])
            num = len(self._functions)
            owner = self._functions[at % num] if at < 3 * num else self._owners[at - 3 * num]
            return f"the code, a default or a variable of {owner.__qualname__}"
        for names, containers in self._containers:
            if (at_container := containers.first_changed()) is not None:
                return f"the contents of {names[at_container]}"
        return None


_untyped: Any = FunctionType
_code, _defaults, _kwdefaults = (
    vars(_untyped)[name].__get__ for name in ("__code__", "__defaults__", "__kwdefaults__")
)


@dataclass(eq=False)
class _Table:
    """The globals of a Python module, or the attributes of a class or object.

    Attributes:
        names: those that code reads.
        size: of a class or object, whose new attributes may hide inherited ones.
    """

    owner: str
    table: dict[str, Any]
    size: int | None = None
    names: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def freeze(self, words: set[str]) -> None:
        """Take the values of now. `words`: all names that code has."""
        if self.size is not None:
            self.names = [*words & self.table.keys()]
        self.values = list(map(self.table.get, self.names))

    def changed(self) -> str | None:
        if not all(map(is_, map(self.table.get, self.names), self.values)):
            pairs = zip(self.names, self.values, strict=True)
            return next(f"{self.owner}.{name}" for name, then in pairs if self.table.get(name) is not then)
        if self.size is not None and len(self.table) != self.size:
            return f"the attributes of {self.owner}"
        return None


class _Search:
    """What the code of forwards reads.

    Attributes:
        words: all names in code.
        tables: by identity of the dicts.
        cells: of closures, with their functions.
        containers: dicts, lists and sets, with names for the user.
    """

    def __init__(self, modules: Iterable[nn.Module], forwards: Iterable[Callable[..., Any]]) -> None:
        self.words = set[str](_UNNAMED)
        self.tables: dict[int, _Table] = {}
        self.functions: list[FunctionType] = []
        self.cells: list[tuple[CellType, FunctionType]] = []
        self.containers: list[tuple[str, Any]] = []
        self._classes: list[type] = []
        self._held: dict[str, list[Any]] = {}
        self._objects: list[tuple[str, dict[str, Any]]] = []
        self._waiting: list[tuple[FunctionType, bool]] = []
        self._seen = set[Any]()
        for module in modules:
            for name, value in vars(module).items():
                if functions := _functions_in(value):
                    self._held.setdefault(name, []).extend(functions)
            self._add_class(type(module))
        self._files = {each.__module__ for each in self._classes}
        for call in forwards:
            self._visit(call, "a forward", is_method=True)
        while self._waiting or self._has_new_methods():
            self._look_into(*self._waiting.pop())

    def may_change(self, function: FunctionType) -> bool:
        """Whether someone may change the function itself, as IPython's autoreload does, instead of its name."""
        package, parts = _package(function.__module__), Path(function.__code__.co_filename).parts
        is_installed = "site-packages" in parts or "dist-packages" in parts
        return package not in _LIBRARIES and (not is_installed or function.__module__ in self._files)

    def _has_new_methods(self) -> bool:
        """Find methods of the classes, functions that modules hold, and attributes of objects, by the names that code
        has.
        """
        for word in self.words & self._held.keys():
            for value in self._held.pop(word):
                self._visit(value, word, is_method=True)
        for each in self._classes:
            if each is not nn.Module:
                for word in self.words & vars(each).keys():
                    self._visit(vars(each)[word], word, is_method=True)
        for name, attributes in self._objects:
            for word in self.words & attributes.keys():
                self._visit(attributes[word], name, is_inside=True)
        return bool(self._waiting)

    def _visit(self, value: Any, name: str, *, is_method: bool = False, is_inside: bool = False) -> None:
        """`is_inside`: it is in an object, so the search ends with further objects."""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property | cached_property):
            value = value.fget if isinstance(value, property) else value.func
        if isinstance(value, _lru_cache_wrapper):
            value = value.__wrapped__
        if isinstance(value, FunctionType):
            self._add_function(value, is_method=is_method)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, name, is_method=is_method)
            self._visit(value.__self__, name, is_inside=is_inside)
        elif isinstance(value, partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit(each, name, is_method=is_method, is_inside=is_inside)
        elif isinstance(value, type):
            if _package(value.__module__) not in _LIBRARIES:
                self._add_class(value)
        elif isinstance(value, dict | list | tuple | set):
            self._add_container(value, name, is_inside=is_inside)
        elif not is_inside and not isinstance(value, nn.Module) and _may_be_written(type(value)):
            if isinstance(attributes := getattr(value, "__dict__", None), dict):
                self._add_object(attributes, name)
                self._add_class(type(value))

    def _add_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if each in self._seen or _package(each.__module__) in sys.stdlib_module_names:
                continue
            self._seen.add(each)
            self._classes.append(each)
            table: dict[str, Any] = gc.get_referents(vars(each))[0]  # its writes are counted, those of `vars` are not
            self.tables[id(table)] = _Table(each.__name__, table, len(table))
            for name, value in [] if issubclass(each, Enum) else [*table.items()]:
                if isinstance(value, dict | list | tuple | set) and not name.startswith("__"):
                    self._visit(value, f"{each.__name__}.{name}", is_inside=True)

    def _add_object(self, attributes: dict[str, Any], name: str) -> None:
        if not attributes:
            self._add_container(attributes, name, is_inside=True)
        elif id(attributes) not in self.tables:
            self.tables[id(attributes)] = _Table(name, attributes, len(attributes))
            self._objects.append((name, attributes))

    def _add_container(self, container: Any, name: str, *, is_inside: bool) -> None:
        if id(container) in self._seen or len(container) > MOST_VALUES:
            return
        self._seen.add(id(container))
        if not isinstance(container, tuple):
            self.containers.append((name, container))
        for each in list(container.values() if isinstance(container, dict) else container):
            self._visit(each, name, is_inside=is_inside)

    def _add_function(self, function: FunctionType, *, is_method: bool) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        self.functions.append(function)
        self._waiting.append((function, is_method))
        for defaults in filter(None, (function.__defaults__, function.__kwdefaults__)):
            self._add_container(defaults, f"the defaults of {function.__qualname__}", is_inside=False)

    def _look_into(self, function: FunctionType, is_method: bool) -> None:
        package = _package(function.__globals__.get("__name__"))
        if package in _LIBRARIES and not is_method:
            self._visit(getattr(function, "__wrapped__", None), function.__qualname__)  # as @torch.no_grad() makes it
            return
        for cell in function.__closure__ or ():
            for value in gc.get_referents(cell):
                self.cells.append((cell, function))
                self._visit(value, f"a variable of {function.__qualname__}", is_method=is_method)
        if package == "offloadkit":
            return
        read, words = _names_in(function.__code__)
        self.words |= words
        spaces = [function.__globals__]
        for name in read & function.__globals__.keys():
            self._add_global(function.__globals__, name, spaces)
        for space in islice(spaces, 1, None):  # it grows: modules of packages have modules too
            for name in words & space.keys():
                self._add_global(space, name, spaces)

    def _add_global(self, space: dict[str, Any], name: str, spaces: list[dict[str, Any]]) -> None:
        """`spaces`: gets the attributes of a Python module that the name stands for."""
        value, owner = space[name], str(space.get("__name__"))
        if isinstance(value, ModuleType) and _package(value.__name__) not in sys.stdlib_module_names:
            if not any(vars(value) is each for each in spaces):
                spaces.append(vars(value))
        if (id(space), name) not in self._seen:
            self._seen.add((id(space), name))
            self.tables.setdefault(id(space), _Table(owner, space)).names.append(name)
            if isinstance(value, FunctionType) or _package(owner) not in _LIBRARIES:
                self._visit(value, f"{owner}.{name}")


def _functions_in(value: Any) -> list[Any]:
    """An attribute of a module that is a function, or those in it."""
    found = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    return [each for each in found if isinstance(each, FunctionType | MethodType | partial)]


def _may_be_written(kind: type) -> bool:
    """Whether the attributes of such an object belong to programs."""
    return kind in (SimpleNamespace, Namespace) or _package(kind.__module__) not in _LIBRARIES


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


@cache
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(names of globals, all names) in a function's code and in the functions that it makes."""
    read = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    words = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            inner = _names_in(each)
            read, words = read | inner[0], words | inner[1]
    return frozenset(read), frozenset(words)
