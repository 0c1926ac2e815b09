"""Branches of the notebooks that need a GPU, and so run in no test here, call what offloadkit has."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
UNKNOWN = object()


def tree_of(path: Path) -> ast.Module:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]  # type: ignore[no-untyped-call]
    lines = "\n".join(cells).splitlines()
    return ast.parse(
        "\n".join(line if line.lstrip()[:1] not in ("%", "!") else line.split("%")[0] + "pass" for line in lines)
    )


def imported(tree: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if "offloadkit" in names or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offloadkit")):
            exec(ast.unparse(node), found)
    return found


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a name, attribute or item of offloadkit's; `UNKNOWN` for others. Raises as the notebook would."""
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute | ast.Subscript):
        of = value_of(node.value, names)
        if of is not UNKNOWN and isinstance(node, ast.Attribute):
            return getattr(of, node.attr)
        if isinstance(of, Mapping) and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return of[node.slice.value]
    return UNKNOWN


def calls(tree: ast.Module, names: Mapping[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := value_of(node.func, names)) is not UNKNOWN:
            yield node, found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_calls_have_the_parameters_that_functions_take(path: Path) -> None:
    tree = tree_of(path)
    found = list(calls(tree, imported(tree)))
    assert found
    for node, function in found:
        if not any(isinstance(each, ast.Starred) for each in node.args):
            named = {each.arg: None for each in node.keywords if each.arg is not None}
            inspect.signature(function).bind_partial(*node.args, **named)
