from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import same_numbers


def test_differing_new_and_missing_lines_are_named_of_the_cases_that_ran() -> None:
    old = "a weights: 1\na losses: 2\na states: 3\nb weights: 4\n"
    new = "a weights: 1\na losses: 5\na norms: 6\n"
    assert same_numbers.differences(old, new, ["a"]) == [
        "differs: a losses",
        "only in the old output: a states",
        "only in the new output: a norms",
    ]


def test_a_resumed_run_and_placements_that_differ_are_unequal() -> None:
    def task(name: str) -> same_numbers.Task:
        return same_numbers.Task(name, 1, same_numbers.run_loop, {}, "group")

    same = {"weights": "1", "resumed weights": "1", "plan": "2"}
    assert same_numbers.unequal([(task("a"), same), (task("b"), same | {"plan": "3"})]) == []
    other = same | {"resumed weights": "4"}
    assert same_numbers.unequal([(task("a"), same), (task("b"), other)]) == [
        "b weights as resumed",
        "by placement: a | b",
    ]


@pytest.mark.slow
def test_an_output_equals_itself_but_for_a_changed_line_which_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [task.name for task in same_numbers.all_tasks(8) if task.name.startswith("loop/mlp/")]
    chosen = next(name for name in names if not name.endswith("/plan"))  # nothing is measured
    assert same_numbers.main(["--device", "cpu", "--only", chosen]) == 0
    old = tmp_path / "old.txt"
    old.write_text(capsys.readouterr().out)
    first, *rest = old.read_text().splitlines()
    assert rest
    old.write_text("\n".join([f"{first}0", *rest]))
    assert same_numbers.main(["--device", "cpu", "--only", chosen, "--compare", str(old)]) == 1
    changed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("changed: ")]
    assert changed == [f"changed: differs: {first.partition(': ')[0]}"]
