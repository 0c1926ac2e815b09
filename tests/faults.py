"""Insert small faults into the code, one at a time, and count how many the tests detect.

    python tests/faults.py                 draw 72, try them in two processes, report
    python tests/faults.py --list          show them
    python tests/faults.py --only 7        try one, and show the tests' output

The kernels in Triton's interpreter need Triton and numpy < 2.4.
The seed and the text of the files decide the draw. It covers all ROOMS evenly, and within a room every kind of
fault evenly. Results are kept in a folder, so an interrupted run continues; a fault is tried again when its file or
the tests changed. A fault counts as detected if a test fails, fails again alone, and passes alone without the fault.
If the tests exceed their time, the fault counts as undetected.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

SEED = 36
NUM_FAULTS = 72
LEAST_SEEN = 60
SECONDS = 900
"""Time limit of the tests for one fault."""
ROOT = Path(__file__).parent.parent
ROOMS = ("offload", "optim", "planner", "checkpoint", "hf", "distributed", "engine", "kernels")
"""Folders and files of offloadkit."""

EQUIVALENT: dict[str, str] = {
    "c72c283754": "of a card's compute capability, only whether it is 8.0 or more is read",
    "ead9cff0d4": "what the first backward checked, later windows check too: that takes time, and finds the same",
    "94ee1e322e": "as many checksums are found as were written: the file's size is compared before",
    "2cc4caadfd": "__builtin_cpu_init() is for constructors that run before libgcc's own, which calls it too",
}
"""Fault keys with the reason why no test can detect them. These faults stay in the draw and count as drawn."""

CHANGES = "tests/offload/test_state_ring.py::test_layers_may_change_the_processor_before_every_step"
STEP = ["tests/optim", "tests/kernels", "tests/offload/test_rounded_states.py", "tests/engine/test_fp16.py", CHANGES]
ENGINE = [
    "tests/engine/test_engine_waits.py", "tests/engine/test_engine_errors.py", "tests/engine/test_engine_life.py",
    "tests/device", "tests/engine/test_fp16.py", "tests/engine/test_engine.py", "tests/offload",
    "tests/engine/test_synchronisation.py", "tests/engine/test_bare_loop.py", "tests/engine/test_rollback.py",
]  # fmt: skip
ALSO_SLOW = ["-m", "slow or not slow"]  # the kernels in Triton's interpreter
SAVE = [
    "tests/checkpoint", "tests/doors/test_output_folder.py", "tests/hf/test_checkpoints.py", "tests/hf/test_folders.py",
    "tests/hf/test_resumed_options.py",
]  # fmt: skip
TRAINER = [
    *(
        f"tests/hf/test_{of}.py"
        for of in ("trainer", "trainer_refusals", "trainer_rollback", "trainer_run", "trainer_waits")
    )
]
TRAINER_PARTS = ("trainer", "trainer_run", "trainer_plan", "trained", "window", "checkpoints", "evaluations")
DATA = [*(f"tests/hf/test_{of}.py" for of in ("read_data", "columns", "data", "ragged"))]
LOAD = [*(f"tests/hf/test_{of}.py" for of in ("loading", "loading_engine", "from_pretrained", "source", "hub"))]
PLAN = [
    "tests/planner", "tests/doors/test_planning.py", "tests/engine/test_tracing.py", "tests/offload/test_placements.py",
]  # fmt: skip
TESTS: dict[str, list[str]] = {
    "optim": STEP,
    "offload": ENGINE,
    "planner": PLAN,
    "kernels": STEP,
    "checkpoint": SAVE,
    "hf": ["tests/hf"],
    "distributed": ["tests/distributed"],
    "engine": [*ENGINE, "tests/hf/test_resumed_options.py", "tests/checkpoint/test_run.py"],
    **{f"hf/{of}.py": DATA for of in ("columns", "data", "longest", "ragged", "read", "tokenize")},
    **{f"hf/{of}.py": LOAD for of in ("hub", "source", "weight_files")},
    "hf/load.py": [*LOAD, "tests/hf/test_resumed_options.py"],
    "hf/loss.py": ["tests/hf/test_chunked_loss.py", "tests/hf/test_logits.py", *TRAINER],
    "hf/masks.py": ["tests/hf/test_masks.py"],
    "hf/read_ahead.py": ["tests/hf/test_read_ahead.py"],
    "hf/saving.py": ["tests/hf/test_folders.py", "tests/hf/test_checkpoints.py", *LOAD],
    **{f"hf/{of}.py": [*TRAINER, *SAVE, "tests/hf/test_doors.py"] for of in TRAINER_PARTS},
    "optim/table.py": [*STEP, *PLAN],
    "optim/torch_optimizer.py": ["tests/optim", "tests/engine/test_engine_life.py", "tests/engine/test_engine.py"],
    "offload/compile.py": ["tests/offload/test_compile.py"],
    "offload/records.py": ["tests/offload/test_timings.py", "tests/facts/test_telemetry.py", *ENGINE],
    "offload/profiling.py": ["tests/offload/test_profiling.py"],
    "offload/shortage.py": [*(f"tests/offload/test_{of}.py" for of in ("ram_watch", "shortage", "making_room"))],
    "planner/leaner.py": ["tests/planner/test_leaner.py", "tests/offload/test_making_room.py"],
    "offload/layers.py": [*ENGINE, "tests/planner/test_plan.py", "tests/doors/test_planning.py"],
    "planner/layout.py": [*PLAN, "tests/optim/test_table.py", CHANGES],
    "kernels/cpu_plan.h": ["tests/planner"],
    "kernels/attention.py": ["tests/hf/test_fused_attention.py"],
    "kernels/attention_triton.py": ["tests/hf/test_fused_attention.py", *ALSO_SLOW],
    "kernels/gpu_triton.py": ["tests/kernels/test_gpu.py", "tests/optim/test_norm.py", *ALSO_SLOW],
    "kernels/linear_cross_entropy.py": ["tests/hf/test_chunked_loss.py"],
}
"""Tests to run, by room, or by file for some files."""


class Fault(NamedTuple):
    """`old` at offset `start` of a file becomes `new`."""

    path: str
    kind: str
    start: int
    old: str
    new: str

    @property
    def key(self) -> str:
        """A stable name: it survives changes elsewhere in the file."""
        text = (ROOT / self.path).read_text()
        before = text[: self.start]
        line = text[before.rfind("\n") + 1 :].split("\n", 1)[0]
        column, same = self.start - before.rfind("\n") - 1, before.count(f"\n{line}\n")
        words = f"{self.path}|{line.strip()}|{column - len(line) + len(line.lstrip())}|{same}|{self.new}"
        return hashlib.sha256(words.encode()).hexdigest()[:10]

    def mutated(self) -> str:
        text = (ROOT / self.path).read_text()
        assert text[self.start :].startswith(self.old)
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def diff(self) -> str:
        old, new = (ROOT / self.path).read_text().splitlines(), self.mutated().splitlines()
        return "\n".join(difflib.unified_diff(old, new, self.path, self.kind, lineterm="", n=1))

    def tests(self) -> list[str]:
        """Arguments for pytest: files, single tests and options."""
        name = self.path.removeprefix("offloadkit/")
        wanted = TESTS.get(name) or TESTS[name.split("/")[0]]
        return list(dict.fromkeys(wanted))


# ---- Python ------------------------------------------------------------------------------------------------------

_COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
_COMPUTED = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "%")}
_RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "floor": "ceil", "ceil": "floor"}


_IN_EITHER_ORDER = ("min", "max", "minimum", "maximum", "isinstance", "getattr", "hasattr", "setattr", "cast")
"""Functions whose arguments commute, or fail in every call if swapped."""


class _Finder:
    """All faults of one Python file."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._text = path, text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = text.splitlines(keepends=True)
        self.found: list[Fault] = []
        self._look(ast.parse(text))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: Any) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        self.found.append(Fault(self._path, kind, start, self._text[start:end], new))

    def _between(self, kind: str, left: Any, right: Any, old: str, new: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        match = re.search(rf"(?<![\w*/<>=!]){re.escape(old)}(?![\w*/<>=])", self._text[start:end])
        if match:
            self._add(kind, start + match.start(), start + match.end(), new)

    def _look(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(child, ast.arg) or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
                continue
            if isinstance(node, ast.AnnAssign) and child is node.annotation:
                continue
            if isinstance(node, ast.FunctionDef) and (child is node.returns or child in node.decorator_list):
                continue
            if isinstance(node, ast.ClassDef) and child in node.decorator_list:
                continue
            self._try(child)
            self._look(child)

    def _try(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, new = _COMPARED[type(node.ops[0])]
            self._between("comparison", node.left, node.comparators[0], old, new)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self._between("and/or", node.values[0], node.values[1], old, new)
        elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
            self._between("arithmetic", node.left, node.right, *_COMPUTED[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add("not", start, start + len("not "), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._add("constant", *self._span(node), str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            self._add("constant", *self._span(node), str(node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            self._add("constant", *self._span(node), repr(node.value * 2 or 1.0))
        elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or isinstance(node, ast.AugAssign):
            self._add("statement", *self._span(node), "pass")
        elif isinstance(node, ast.Call):
            self._try_call(node)

    def _try_call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _RENAMED:
            end = self._span(node.func)[1]
            self._add("min/max", end - len(name), end, _RENAMED[name])
        plain = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript)
        if len(node.args) >= 2 and all(isinstance(argument, plain) for argument in node.args[:2]):
            (first, first_end), (second, second_end) = (self._span(argument) for argument in node.args[:2])
            one, other = self._text[first:first_end], self._text[second:second_end]
            if one != other and name not in _IN_EITHER_ORDER:
                self._add("arguments", first, second_end, other + self._text[first_end:second] + one)


# ---- C -------------------------------------------------------------------------------------------------------------

_IN_C = [
    ("comparison", r"(?<=\w )<(?= \w)", "<="), ("comparison", r"(?<= )<=(?= )", "<"),
    ("comparison", r"(?<= )>(?= )", ">="),
    ("comparison", r"(?<= )==(?= )", "!="), ("comparison", r"(?<= )!=(?= )", "=="), ("and/or", r"&&", "||"),
    ("and/or", r"\|\|", "&&"), ("arithmetic", r"(?<= )\+(?= )", "-"), ("arithmetic", r"(?<= )-(?= )", "+"),
    ("arithmetic", r"(?<=\w )\*(?= \w)", "+"), ("shift", r"(?<= )>>(?= )", "<<"), ("shift", r"(?<= )<<(?= )", ">>"),
    ("constant", r"(?<![\w.#x])\d+(?=[\s;,)\]])", "+1"),
]  # fmt: skip


def _faults_of_c(path: str, text: str) -> list[Fault]:
    blank = re.sub(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"|^\s*#[^\n]*", lambda m: " " * len(m[0]), text, flags=re.S | re.M)
    found = []
    for kind, pattern, new in _IN_C:
        for match in re.finditer(pattern, blank):
            becomes = str(int(match[0]) + 1) if new == "+1" else new
            found.append(Fault(path, kind, match.start(), match[0], becomes))
    statement = r"(?m)^ +(?P<s>[\w\[\]>.-]+(?:\([^;{}\n]*\)| [-+*/|^&]= [^;\n]*);)$"
    matches = re.finditer(statement, blank)
    return found + [Fault(path, "statement", match.start("s"), match["s"], ";") for match in matches]


# ---- the draw --------------------------------------------------------------------------------------------------------


def candidates(room: str) -> dict[str, list[Fault]]:
    """All faults of a room, by kind."""
    by_kind: dict[str, list[Fault]] = {}
    place = ROOT / "offloadkit" / room
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        name, is_python = str(path.relative_to(ROOT)), path.suffix == ".py"
        if is_python or path.suffix in (".c", ".h"):
            text = path.read_text()
            for fault in _Finder(name, text).found if is_python else _faults_of_c(name, text):
                by_kind.setdefault(fault.kind, []).append(fault)
    return by_kind


def drawn(seed: int = SEED, num: int = NUM_FAULTS) -> list[Fault]:
    """Draw the same faults for the same files: rooms in turn, a random kind, a random fault of that kind."""
    draw, rooms, found = random.Random(seed), {room: candidates(room) for room in ROOMS}, list[Fault]()
    while len(found) < num:
        of_room = rooms[ROOMS[len(found) % len(ROOMS)]]
        fault = draw.choice(of_room[draw.choice(sorted(of_room))])
        if fault not in found:
            found.append(fault)
    return found


# ---- trying them -----------------------------------------------------------------------------------------------------


def _copy_tree(into: Path) -> Path:
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split("\n")
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "offloadkit/kernels").glob("*.so")]
    for name in filter(None, [*files, *compiled]):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def _run_tests(tree: Path, tests: list[str], *, show: bool = False) -> dict[str, Any]:
    """Whether a test fails ("seen"), and which ("by")."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", *tests]
    out: Any = None if show else subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"seen": False, "by": f"no end after {SECONDS} s"}
    if process.returncode not in (0, 1, 2):  # 2: a test file could not be imported
        raise RuntimeError(f"pytest could not run: {output}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output or "", flags=re.M)
    return {"seen": process.returncode != 0, "by": failed[-1] if failed else ""}


def try_fault(fault: Fault, tree: Path, *, show: bool = False) -> dict[str, Any]:
    """Apply the fault to the copy `tree`, run the tests, and undo it."""
    tests = fault.tests()
    while True:
        with _put_in(fault, tree) as compiles:
            if not compiles:
                return {"seen": True, "by": "it does not compile"}
            result = _run_tests(tree, tests, show=show)
            failed = result["by"]
            if "::" not in failed:  # no test failed, or a file could not be imported
                return result
            again = _run_tests(tree, [failed])["seen"]
        if again and not _run_tests(tree, [failed])["seen"]:
            return result
        tests += ["--deselect", failed]


@contextlib.contextmanager
def _put_in(fault: Fault, tree: Path) -> Iterator[bool]:
    """Apply the fault; returns whether the code still compiles."""
    file, is_c = tree / fault.path, not fault.path.endswith(".py")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    file.write_text(fault.mutated())
    try:
        yield not (is_c and subprocess.run(build, cwd=tree, capture_output=True, check=False).returncode)
    finally:
        shutil.copy2(ROOT / fault.path, file)
        if is_c:
            for compiled in (ROOT / "offloadkit/kernels").glob("*.so"):
                shutil.copy2(compiled, tree / compiled.relative_to(ROOT))


def _digest() -> str:
    """Hash of all code and tests, stored with each result."""
    paths = sorted(path for folder in ("offloadkit", "tests") for path in (ROOT / folder).rglob("*") if path.is_file())
    texts = (path.read_bytes() for path in paths if path.suffix in (".py", ".c", ".h") and path != Path(__file__))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def _attempts(faults: list[Fault], results: Path, processes: int) -> Iterator[tuple[Fault, dict[str, Any]]]:
    """Yield each fault with its result, in order; results in the file are not computed again."""
    known: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(processes):
            trees.put(_copy_tree(Path(folder) / str(number)))

        def result(fault: Fault) -> dict[str, Any]:
            if fault.key not in known:
                tree = trees.get()
                try:
                    known[fault.key] = try_fault(fault, tree)
                    results.write_text(json.dumps(known, indent=1))
                finally:
                    trees.put(tree)
            found: dict[str, Any] = known[fault.key]
            return found

        yield from zip(faults, pool.map(result, faults), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the faults")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="try these, and show the tests' output")
    parser.add_argument("--first", type=int, default=NUM_FAULTS, metavar="N", help="try the first N")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "offloadkit-faults")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    faults = drawn(options.seed)
    if options.list:
        for number, fault in enumerate(faults):
            print(f"{number} {fault.key} {EQUIVALENT.get(fault.key, '')}\n{fault.diff()}\n")
        return
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            for number in options.only:
                print(faults[number].diff(), flush=True)
                print(try_fault(faults[number], _copy_tree(Path(folder) / str(number)), show=True))
        return
    options.results.mkdir(parents=True, exist_ok=True)
    num_seen, chosen = 0, faults[: options.first]
    attempts = _attempts(chosen, options.results / f"{_digest()}.json", options.processes)
    for number, (fault, result) in enumerate(attempts):
        num_seen += result["seen"]
        word = (
            "seen"
            if result["seen"]
            else f"EQUIVALENT: {EQUIVALENT[fault.key]}"
            if fault.key in EQUIVALENT
            else "UNSEEN"
        )
        print(f"{number} {fault.key} {word} {result['by']}\n{fault.diff()}\n", flush=True)
    print(f"{num_seen} of {len(chosen)} seen; at least {LEAST_SEEN} of {NUM_FAULTS} are to be")
    sys.exit(num_seen < LEAST_SEEN * len(chosen) / NUM_FAULTS)


if __name__ == "__main__":
    main()
