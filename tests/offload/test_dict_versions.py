"""`UnchangedContainers` finds each write that changes a value, and no other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.offload import dict_versions
from offloadkit.offload.dict_versions import COUNTED, UnchangedContainers

Change = Callable[[nn.Module], Any]


def write(module: Any, value: float) -> None:
    module.factor = value


CHANGES: list[Change] = [
    lambda module: write(module, 2.0),
    lambda module: setattr(module, "factor", 2.0),
    lambda module: vars(module).update(factor=float("1.0")),  # an equal object
    lambda module: object.__setattr__(module, "factor", 2.0),
    lambda module: delattr(module, "factor"),
    lambda module: setattr(module, "another", 1),
    lambda module: setattr(module, "up", nn.Linear(2, 2)),
    lambda module: module._parameters.pop("scale"),
    lambda module: module.register_buffer("shift", torch.ones(2)),
    lambda module: module.eval(),
    lambda module: module.get_submodule("up").register_buffer("first", torch.ones(2)),
]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.factor = nn.Linear(2, 2), nn.Parameter(torch.ones(2)), 1.0
        self.register_buffer("shift", torch.zeros(2))


def dicts_of(module: nn.Module) -> list[Any]:
    up = module.get_submodule("up")
    return [vars(module), module._parameters, module._buffers, module._modules, up._buffers]


@pytest.mark.parametrize("is_counted", [COUNTED, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_value_is_found_in_each_later_call(
    change: Change, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dict_versions, "COUNTED", is_counted)
    module = Module()
    for _ in range(50):  # so that the interpreter specializes writes of attributes
        write(module, module.factor)  # type: ignore[arg-type]
    dicts = UnchangedContainers(dicts_of(module))
    assert dicts.first_changed() is None
    change(module)
    assert dicts.first_changed() is not None
    assert dicts.first_changed() is not None


def test_a_value_that_is_written_back_is_no_change() -> None:
    module = Module()
    dicts = UnchangedContainers(dicts_of(module))
    before, module.factor = module.factor, 2.0
    module.factor = before
    module.requires_grad_(False)
    assert dicts.first_changed() is None


def test_another_order_is_a_change_where_python_counts_no_write() -> None:
    table: OrderedDict[str, Any] = OrderedDict(first=1, second=2)
    dicts = UnchangedContainers([table])
    table.move_to_end("first")
    assert dicts.first_changed() == 0


def test_tables_that_are_no_dicts_are_compared() -> None:
    table: Any = {"factor": 1.0}
    dicts = UnchangedContainers([MappingProxyType(table)])  # type: ignore[list-item]
    assert dicts.first_changed() is None
    table["factor"] = 2.0
    assert dicts.first_changed() == 0


@pytest.mark.parametrize("is_counted", [COUNTED, False])
def test_a_renamed_key_is_a_change(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, so the values keep their order."""
    monkeypatch.setattr(dict_versions, "COUNTED", is_counted)
    table = {"factor": 1.0, "shift": 2.0}
    dicts = UnchangedContainers([[1.0], table], keys=True)
    counted = UnchangedContainers([table])
    assert dicts.first_changed() is None
    table["bias"] = table.pop("shift")
    assert dicts.first_changed() == 1
    assert counted.first_changed() == (0 if is_counted else None)
