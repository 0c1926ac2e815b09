"""The shape of the package: who may import whom, and what stays light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "offloadkit"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "recipes")  # scripts that users copy

# Lowest first: a room imports from itself and from the rows above its own.
ROWS = [
    {"errors"},
    {"facts"},
    {"optim"},
    {"kernels"},
    {"planner", "device"},
    {"distributed"},
    {"offload", "checkpoint"},
    {"engine", "monitor"},
    {"hf"},
    {"deepspeed"},
]
DOORS = [
    {"doors.planning", "doors.recipes"},
    {"doors.engines", "doors.several_gpus", "doors.model_card"},
    {"doors.finetuning"},
    {"doors.comparing"},
    {"doors.demo", "doors.doctor"},
    {"doors.cli"},
]
"""The last room, whose parts follow the same rule."""
RANK = {name: rank for rank, row in enumerate([*ROWS, *DOORS]) for name in row}
MONITOR_SEES = {"monitor", "planner", "device", "facts", "errors"}
ENTRY_POINTS = {"__init__", "__main__"}

NUMERIC_CORE = {name for name, rank in RANK.items() if rank <= RANK["engine"]} - {"monitor"}
NOT_IN_THE_CORE = {"transformers", "ipywidgets", "IPython", "accelerate", "datasets", "typer", "deepspeed"}
NOT_AT_IMPORT = NOT_IN_THE_CORE | {"torch", "matplotlib", "rich"}

FORBIDDEN_WORDS = {"manager", "handler", "helper", "coordinator", "util", "utils"}


def part_of(path: Path) -> str:
    """The room of a file: "offload" for offload/layers.py, "doors.cli" for doors/cli.py."""
    return room(path.relative_to(PACKAGE).with_suffix("").parts)


def room(names: Sequence[str]) -> str:
    """The room of a module, given by the parts of its name below the package."""
    return ".".join(names[: 2 if names[0] == "doors" else 1])


def module_of(path: Path) -> str:
    """Dotted name of the package that relative imports in `path` start from."""
    return ".".join(("offloadkit", *path.relative_to(PACKAGE).parts[:-1]))


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`, functions included."""
    above = [tree]
    while above:
        for node in ast.iter_child_nodes(above.pop()):
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            inner = node.orelse if is_for_types else [node]
            yield from inner
            above += inner


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, *, types: bool = False) -> list[tuple[int, str]]:
    """(line, dotted name) of everything `path` imports at run time; `from a import b` counts as a.b.

    Args:
        types: what only type checkers import too.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree_of(path)) if types else runtime_nodes(tree_of(path)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_of(path).split(".")
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            found += ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if "import_module" in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
                found.append((node.lineno, str(node.args[0].value)))
    return found


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every room of offloadkit that `path` imports; "" where it imports from the package itself."""
    for line, name in imports(path):
        root, *rest = name.split(".")
        if root == "offloadkit":
            part = rest[0] if rest else ""
            is_module = (PACKAGE / f"{part}.py").exists() or (PACKAGE / part / "__init__.py").exists()
            yield line, room(rest) if is_module else ""


def allowed(importer: str, imported: str) -> bool:
    """Whether `importer` may import `imported`, both rooms of the package."""
    if importer == "monitor":
        return imported in MONITOR_SEES
    return importer == imported or (imported in RANK and RANK[imported] < RANK[importer])


def test_every_module_has_a_place_in_the_order() -> None:
    unplaced = {part_of(path) for path in FILES} - set(RANK) - ENTRY_POINTS - {"doors.__init__"}
    assert not unplaced, f"say in tests/test_architecture.py (ROWS) whom these may import: {sorted(unplaced)}"


@pytest.mark.parametrize(
    "wrong",
    [
        "facts optim",
        "optim kernels",
        "device offload",
        "facts deepspeed",
        "engine hf",
        "hf doors.finetuning",
        "doors.demo doors.cli",
    ],
)
def test_no_arrow_runs_back(wrong: str) -> None:
    importer, imported = wrong.split()
    assert not allowed(importer, imported)
    assert allowed(imported, importer)


@pytest.mark.parametrize("rooms", ["planner device", "offload checkpoint", "engine monitor"])
def test_rooms_of_one_row_do_not_know_each_other(rooms: str) -> None:
    one, other = rooms.split()
    assert not allowed(one, other)
    assert other == "monitor" or not allowed(other, one)


def test_the_monitor_sees_the_plan_and_the_records_alone() -> None:
    assert not allowed("monitor", "engine")
    assert not allowed("monitor", "offload")


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {imported or 'the package itself'}"
        for path in FILES
        if part_of(path) in RANK
        for line, imported in own_imports(path)
        if not allowed(part_of(path), imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_bears_the_name_of_a_public_function() -> None:
    import offloadkit

    functions = {name for name in offloadkit.__all__ if name.islower()}
    modules = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not functions & modules


def test_modules_import_in_no_circle_not_even_for_types() -> None:
    names = {".".join(("offloadkit", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items() if name != "offloadkit.__init__"}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {dotted if dotted in names else dotted.rpartition(".")[0] for _, dotted in imports(path, types=True)}
        graph[name] = {other for other in found if other in names and other != name}
    while free := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in free}
    assert not graph, f"these import each other in a circle: {sorted(graph)}"


def test_the_numeric_core_knows_neither_transformers_nor_widgets() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in FILES
        if part_of(path) in NUMERIC_CORE
        for line, name in imports(path)
        if name.split(".")[0] in NOT_IN_THE_CORE
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_offloadkit_stays_light() -> None:
    code = f"import sys, offloadkit; print(*sorted({NOT_AT_IMPORT!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.split() == []


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def words(name: str) -> set[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("name", ["StreamManager", "event_handler", "HTTPHelper", "utils"])
def test_forbidden_words_are_found_in_names(name: str) -> None:
    assert words(name) & FORBIDDEN_WORDS


def test_names_say_what_a_thing_is() -> None:
    wrong = [str(path.relative_to(PACKAGE)) for path in FILES if words(path.stem) & FORBIDDEN_WORDS]
    wrong += [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in FILES
        for line, name in defined_names(tree_of(path))
        if words(name) & FORBIDDEN_WORDS
    ]
    assert not wrong, "\n".join(wrong)


def rough_figures(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, code) of figures in f-strings that may show an exponent (`:.3g`), and of sizes divided by hand."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FormattedValue):
            continue
        spec = ast.unparse(node.format_spec)[2:-1] if node.format_spec is not None else ""
        divisors = {ast.unparse(each.right) for each in ast.walk(node.value) if isinstance(each, ast.BinOp)}
        sized = spec.endswith("f") and divisors & {"2 ** 20", "2 ** 30", "1000000000.0", "1000000000000.0"}
        if re.search("[0-9]?[geGE]$", spec) or sized:
            yield node.lineno, ast.unparse(node.value) + ":" + spec


@pytest.mark.parametrize("code", ["f'{x:.3g}'", "f'{x:g}'", "f'{x:.2e}'", "f'{x / 2**30:.2f}'", "f'{x / 1e9:.0f}'"])
def test_a_rough_figure_is_found(code: str) -> None:
    assert [*rough_figures(ast.parse(code))]
    assert not [*rough_figures(ast.parse("f'{rounded(x)} {x:.1%} {x:,.0f} {x:>8} {x!r}'"))]


def test_figures_are_formatted_by_units_which_shows_1180_and_not_an_exponent() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} {code}"
        for path in FILES
        if path != PACKAGE / "facts" / "units.py"
        for line, code in rough_figures(tree_of(path))
    ]
    assert not wrong, "\n".join(wrong)
