"""The figures: each case and engine makes one table row, and the documents agree with the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plans, report, run, same_script, table
from benchmarks.cases import CASES, ENGINES, GIB, config_of
from benchmarks.doors import DOORS
from benchmarks.peer_engines import ENGINES as RUN
from benchmarks.ragged import RAGGED_STEPS, steps_of
from benchmarks.rank_cases import RANK_CASES
from benchmarks.table import Row
from offloadkit.doors.engines.work import IGNORED_LABEL, Work, num_tokens, random_steps, width
from offloadkit.offload.graphs import MOST_KINDS

ROWS = table.read()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Work], dict[str, Any]]], list[Work]]:
    """Makes `answer` return what a fresh process would; the returned list collects the tasks."""

    def install(answer: Callable[[Work], dict[str, Any]]) -> list[Work]:
        asked: list[Work] = []

        def process(work: Work, *_: Any) -> dict[str, Any]:
            asked.append(work)
            return {"recomputed": work.recomputed, "process_seconds": 1.0} | answer(work)

        monkeypatch.setattr(run, "in_fresh_process", process)
        return asked

    return install


def measured(seconds: float, **changes: Any) -> dict[str, Any]:
    """The result of a fresh process."""
    return {
        "status": "measured",
        "step_seconds": seconds,
        "all_step_seconds": [seconds] * 6,
        "phase_seconds": {"forward": 0.1},
        "num_parameters": 100,
        "num_tokens": 48,
        "num_warmup": 8,
        "dtype": "bf16",
        "vram_bytes": GIB,
        "max_allocated_bytes": GIB // 2,
        "peak_ram_bytes": GIB,
        "machine": {"gpu": "NVIDIA H200", "cpu": "a CPU", "num_cores": 16, "ram_bytes": 100 * GIB},
        "versions": dict.fromkeys(("torch", "transformers", "offloadkit", "deepspeed", "torchao"), "1.0"),
    } | changes


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(20)
def test_an_engine_in_a_fresh_process_makes_a_whole_row(tmp_path: Path) -> None:
    out = tmp_path / "results.csv"
    (row,) = run.run(["tiny-ragged"], engines=["offloadkit"], steps=2, out=out, commit="abc", device="cpu")
    (read,) = table.read(out)
    assert (read["case"], read["engine"], read["status"], read["commit"]) == (
        "tiny-ragged",
        "offloadkit",
        "measured",
        "abc",
    )
    unknown = {name for name, value in read.items() if value is None}
    assert unknown <= {"reason", "peer", "notes", "ram_budget_bytes"}
    assert (read["gpu"], read["mask"], read["steps"]) == ("none", "ragged", run.ROUNDS * RAGGED_STEPS)
    assert read["tokens"] < 2 * (16 + 8)
    by_width = read["figures"][table.BY_WIDTH]
    assert by_width["slowest"] >= max(by_width.values())
    assert {"forward", "backward", "step"} <= set(read["phases"])
    assert read["seconds"] == pytest.approx(row["seconds"], rel=1e-5)
    assert sum(read["placements"].values()) > 1
    assert plans.hardware_of(read["rates"]).device == "cpu"


def test_a_row_of_ragged_rows_says_that_blocks_ran_as_graphs(
    tmp_path: Path, answers: Callable[..., list[Work]]
) -> None:
    own = {"graphs": 96, "operation_launches": [5.0, 4.0], table.BOUND: 0.3, table.RANGE: [0.3, 0.4]}
    answers(lambda work: measured(0.4, figures=own, seconds_by_width={"512": 0.4}))
    (row,) = run.run(["w1-ragged"], engines=["offloadkit"], out=tmp_path / "a.csv", commit="abc")
    assert row["figures"] == {
        "graphs": 96,
        "operation_launches": [5.0, 4.0],
        table.BY_WIDTH: {"512": 0.4, "slowest": 0.4},
    }


def test_turns_alternate_and_their_spread_is_in_the_row(
    tmp_path: Path, answers: Callable[..., list[Work]], capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.3, 1.0, 0.5, 1.0, 0.4, 1.0])
    asked = answers(lambda work: measured(next(seconds)))
    rows = run.run(["w1"], engines=["hf", "zero2-50m"], turns=3, out=tmp_path / "a.csv", commit="abc")
    assert [work.bucket_elements for work in asked] == [None, 50_000_000] * 3
    assert {(work.steps, work.warmup) for work in asked} == {(run.STEPS, run.WARMUP)}
    first, second = rows
    assert (first["seconds"], first["min_seconds"], first["max_seconds"], first["turns"]) == (0.4, 0.3, 0.5, 3)
    assert second["peer"] == "deepspeed 1.0"
    assert table.read(tmp_path / "a.csv")[0]["seconds"] == 0.4


def test_a_step_is_printed_beside_its_bound(
    tmp_path: Path, answers: Callable[..., list[Work]], capsys: pytest.CaptureFixture[str]
) -> None:
    answers(lambda work: measured(0.3, figures={"bound_seconds": 0.24}))
    (row,) = run.run(["w1"], engines=["offloadkit"], out=tmp_path / "a.csv", commit="abc")
    assert "0.3000 s, 1.25x the bound of 0.24 s, VRAM" in capsys.readouterr().out
    planned = {"planned_seconds": 0.397, "planned_vram_bytes": 1, "planned_ram_bytes": 1, "planned_disk_bytes": 0}
    assert "0.397, 1.25x the bound of 0.24 s" in report.results([row | planned])


def test_steps_that_python_bounds_count_apart(tmp_path: Path, answers: Callable[..., list[Work]]) -> None:
    planned = {"planned_seconds": 0.26, "planned_vram_bytes": GIB, "planned_ram_bytes": GIB}
    answers(lambda work: measured(0.3, figures={"planned_range": [0.22, 0.31]}))
    (row,) = run.run(["w1"], engines=["offloadkit"], out=tmp_path / "a.csv", commit="abc")
    rows = [row | planned, row | planned | {"case": "w2", "seconds": 0.32}]
    assert report.in_range(rows) == (1, 2)
    assert report.planned_right(rows, "planned_seconds", "seconds", 0.15) == (0, 0)
    page = report.results(rows)
    assert "| 0.220 to 0.310 |" in page
    assert "Python bounds 2 other steps, which have a planned range: 1 of them took as long." in page


def test_a_row_says_that_a_turn_ran_by_a_leaner_plan(tmp_path: Path, answers: Callable[..., list[Work]]) -> None:
    turns = iter([measured(0.1, moves=["VRAM was full"]), measured(0.1), measured(0.1)])
    answers(lambda work: next(turns))
    out = tmp_path / "a.csv"
    (moved,) = run.run(["w1"], engines=["offloadkit"], turns=2, out=out, commit="abc", notes="a remark")
    (other,) = run.run(["w1"], engines=["offloadkit"], out=out, commit="abc", notes="a remark")
    assert moved["notes"] == "a remark; memory ran out: by a leaner plan"
    assert other["notes"] == "a remark"


def test_rows_are_appended_and_written_after_each_process(tmp_path: Path, answers: Callable[..., list[Work]]) -> None:
    out, numbers = tmp_path / "a.csv", []

    def answer(work: Work) -> dict[str, Any]:
        numbers.append(len(table.read(out)))
        return measured(0.1)

    answers(answer)
    run.run(["w1"], engines=["hf"], out=out, commit="abc")
    run.run(["w1", "w3"], engines=["hf", "offloadkit"], out=out, commit="def")
    assert numbers == [0, 1, 2, 3, 4]
    assert [(row["commit"], row["case"], row["engine"]) for row in table.read(out)] == [
        ("abc", "w1", "hf"),
        ("def", "w1", "hf"),
        ("def", "w1", "offloadkit"),
        ("def", "w3", "hf"),
        ("def", "w3", "offloadkit"),
    ]


def test_activations_are_recomputed_only_where_it_does_not_fit_otherwise(
    tmp_path: Path, answers: Callable[..., list[Work]]
) -> None:
    def answer(work: Work) -> dict[str, Any]:
        full = {"status": "does not fit", "reason": "does not fit: needs more than 139 GiB of VRAM"}
        return measured(1.2) if work.recomputed else full

    asked = answers(answer)
    hf, ours = run.run(["w7"], engines=["hf", "offloadkit"], out=tmp_path / "a.csv", commit="abc")
    assert [work.recomputed for work in asked] == [False, True, False]  # offloadkit's plan decides by itself
    assert (hf["status"], hf["recomputed"]) == ("measured", True)
    assert (ours["status"], ours.get("seconds")) == ("does not fit", None)


def test_budgets_are_offloadkit_s_alone_but_where_they_hold_for_all() -> None:
    def limits(case: str, engine: str) -> tuple[int | None, int | None]:
        work = CASES[case].work(ENGINES[engine], "folder", "disk")
        return work.vram, work.ram

    assert limits("w1", "offloadkit") == (24 * GIB, None)
    assert limits("w1", "hf") == limits("w1", "zero2") == (None, None)
    assert limits("blog-11-t5-3b", "hf") == (11 * GIB, 64 * GIB)
    disk = {engine: CASES["plan-t4-t5-3b"].work(ENGINES[engine], "", "/disk").disk for engine in ("offloadkit", "hf")}
    assert disk == {"offloadkit": "/disk", "hf": None}


def test_every_case_has_engines_and_a_model_that_are_known() -> None:
    assert {setup.engine for setup in ENGINES.values() if not setup.is_door} == set(RUN)
    assert {name for name, setup in ENGINES.items() if setup.is_door} == {f"offloadkit-{door}" for door in DOORS}
    for case in CASES.values():
        assert set(case.engines) <= set(ENGINES)
    for model in {case.model for case in CASES.values()}:
        assert config_of(model).architectures


@pytest.mark.parametrize("model", ["t5-tiny", "llama-tiny"])
def test_ragged_rows_are_sorted_masked_and_padded_as_in_finetune(tmp_path: Path, model: str) -> None:
    config_of(model).save_pretrained(tmp_path)
    work = Work(str(tmp_path), batch_size=4, input_length=128, target_length=32, accumulation=2, mask="ragged")
    steps = steps_of(work, torch.device("cpu"))
    assert [len(step) for step in steps] == [2] * RAGGED_STEPS
    tokens, lengths = 0, []
    for step in steps:
        for batch in step:
            mask, labels = batch["attention_mask"].bool(), batch["labels"] != IGNORED_LABEL
            lengths.append(mask.sum(1))
            assert mask.shape[1] % 16 == labels.shape[1] % 16 == 0
            assert mask.shape[1] >= lengths[-1].max()
            assert batch["input_ids"][~mask].eq(0).all()
            tokens += int(mask.sum()) + (int(labels.sum()) if model == "t5-tiny" else 0)
            assert model == "t5-tiny" or torch.equal(labels, mask)
            assert labels.sum(1).min() >= 8
    assert lengths[0][0] == 128
    assert min(map(min, lengths)) >= 32
    assert 4 < len({width(step) for step in steps}) <= MOST_KINDS
    flat = torch.cat(lengths)[1:]
    assert torch.equal(flat, flat.sort(descending=True).values)
    assert num_tokens(steps) == round(tokens / len(steps))
    (full,) = random_steps(Work(str(tmp_path), 2, 16, 8), torch.device("cpu"))
    assert set(full[0]) == {"input_ids", "labels"}
    assert num_tokens([full]) == 2 * (16 + (8 if model == "t5-tiny" else 0))


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_keeps_every_value(tmp_path: Path) -> None:
    row: Row = {"case": 'a "b", c', "seconds": 0.25, "turns": 3, "recomputed": False, "phases": {"x": [1, 2.5]}}
    table.write([row], tmp_path / "a.csv")
    (read,) = table.read(tmp_path / "a.csv")
    assert {name: value for name, value in read.items() if value is not None} == row
    with pytest.raises(ValueError, match=r"no such columns: \['second'\]"):
        table.write([{"second": 1}], tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("case,seconds\n")
    with pytest.raises(ValueError, match="convert it first"):
        table.read(tmp_path / "b.csv")


def test_the_newest_measured_row_counts() -> None:
    made = [
        {"case": "w1", "engine": "hf", "status": status, "seconds": seconds}
        for status, seconds in (("measured", 1.0), ("measured", 2.0), ("planned", 3.0), ("failed", None))
    ]
    assert table.latest(made, "w1", "hf") == made[1]
    assert table.latest(made[2:], "w1", "hf") == made[2]
    assert table.latest(made, "w2", "hf") is None


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_planned_rows_take_the_place_of_older_ones(tmp_path: Path) -> None:
    out = tmp_path / "a.csv"
    source = next(row for row in ROWS if row["case"] == "w1" and row["rates"] and row["commit"] == "e70d484")
    table.write([source], out)
    for commit in ("abc", "def"):
        plans.plan_cases(["fit-t5-base"], out=out, commit=commit)
    first, planned = table.read(out)
    assert first == source
    assert (planned["status"], planned["commit"], planned["case"]) == ("planned", "def", "fit-t5-base")
    assert planned["planned_vram_bytes"] <= planned["vram_budget_bytes"]
    assert 0.01 < planned["seconds"] < 1
    table.write([source | {"gpu": "another card"}], out)
    with pytest.raises(ValueError, match="has no row with rates of an H200"):
        plans.plan_cases(["fit-t5-base"], out=out, commit="abc")


# ---- the documents ---------------------------------------------------------------------------------------------------


def test_the_results_page_is_what_the_table_says() -> None:
    assert report.RESULTS.read_text() == report.results(ROWS), "stale: run `python -m benchmarks report`"


def test_the_readme_s_figures_are_what_the_table_says() -> None:
    text = report.README.read_text()
    assert report.filled(text, ROWS) == text, "stale: run `python -m benchmarks report`"
    assert {found["name"] for found in re.finditer(report.MARKED, text, re.DOTALL)} == set(report.PARTS)


def test_the_charts_are_drawn_from_the_table(tmp_path: Path) -> None:
    for theme, path in report.CHARTS.items():
        assert report.digest(ROWS).encode() in path.read_bytes(), "stale: run `python -m benchmarks report`"
        report.draw_chart(ROWS, tmp_path / path.name, theme)
        assert report.digest(ROWS).encode() in (tmp_path / path.name).read_bytes()


def test_the_bars_of_the_chart_are_of_one_run() -> None:
    shown = [row for _, row in report.chart_rows(ROWS)]
    assert len(shown) == 3
    assert len({(row["commit"], row["gpu"], row["cores"]) for row in shown}) == 1
    ours = next(row for row in shown if row["engine"] == "offloadkit")
    alone = [*ROWS, ours | {"seconds": 0.01, "commit": "another"}]
    assert report.digest(alone) == report.digest(ROWS)
    others = [row | {"commit": "another"} if row["engine"] == "hf" else row for row in ROWS]
    newest = [table.latest(others, "w1", engine) for engine in ("hf", "offloadkit")]
    assert [row for _, row in report.chart_rows(others)][:2] == newest, "no run has all bars"


def test_a_new_row_makes_the_documents_stale() -> None:
    row = dict(report.chart_rows(ROWS))["offloadkit"]
    changed = [*ROWS, row | {"seconds": 9.87}]
    text = report.README.read_text()
    assert report.results(changed) != report.results(ROWS)
    assert report.filled(text, changed) != text
    assert report.digest(changed) != report.digest(ROWS)
    with pytest.raises(KeyError, match="no figures 'nothing'"):
        report.filled("<!-- figures:nothing -->\n<!-- /figures -->", ROWS)


def test_the_newest_row_of_a_case_takes_the_place_of_its_older_rows_in_the_score() -> None:
    def score(rows: list[Row]) -> list[tuple[int, int]]:
        planned = report.planned_rows(rows)
        names = (report.GRAPHED, report.NEWEST)
        return [report.planned_right(planned[name], "planned_seconds", "seconds", report.WITHIN) for name in names]

    (right, every), (right_of_newest, newest) = score(ROWS)
    row = next(each for each in report.planned_rows(ROWS)[report.NEWEST] if each["case"] == "w3")
    assert abs(row["planned_seconds"] / row["seconds"] - 1) < report.WITHIN
    assert score([*ROWS, row | {"seconds": 9.87}]) == [(right, every + 1), (right_of_newest - 1, newest)]
    assert score([*ROWS, row | {"seconds": 9.87, "gpu": "another GPU"}])[1] == (right_of_newest, newest + 1)


def test_the_readme_is_read_in_four_minutes() -> None:
    assert len(report.README.read_text().split()) <= 900


def numbers_of(row: Row) -> list[float]:
    """Every number that a document may quote from a row."""
    case = CASES[row["case"]]
    found: list[float | None] = [row["seconds"], row["min_seconds"], row["max_seconds"], row["cores"]]
    found += [case.batch_size, case.input_length, case.target_length, case.accumulation]
    found += [(row["num_parameters"] or 0) / 1e9]
    for name in ("vram_bytes", "ram_peak_bytes", "planned_vram_bytes", "planned_ram_bytes", "vram_budget_bytes"):
        found.append((row[name] or 0) / GIB)
    return [number for number in found if number]


NOT_A_FIGURE = r"\]\([^)]*\)|T5-3B|ZeRO-\d|H\d00|AdamW|\b[0-9a-f]{7}(-dirty)?\b|\d{4}-\d\d-\d\d"
"""Links, names, commits and dates."""


def how_right_the_plan_was() -> str:
    """The README's sentence about the plan's accuracy, with figures counted here."""
    ran = [row for row in ROWS if row["status"] == "measured" and row["planned_seconds"]]
    others = ("doors-", "phases-", *RANK_CASES)
    ran = [row for row in ran if not row["case"].startswith(others) and row["mask"] != "ragged"]
    ran = [row for row in ran if row["date"] > report.GRAPHS]
    off = [row["planned_seconds"] / row["seconds"] for row in ran if "planned_range" not in (row["figures"] or {})]
    right = sum(0.85 <= ratio <= 1.15 for ratio in off)
    return f"On H100s and H200s, {right} of the {len(off)} planned steps that were also run there were within 15 %."


def test_every_figure_of_the_readme_is_in_the_table() -> None:
    """Independent of the report's code: each number rounds a value of a row that the line can refer to."""
    num_seen = 0
    for part in re.finditer(report.MARKED, report.README.read_text(), re.DOTALL):
        for line in part["body"].splitlines():
            about = [row for row in ROWS if row["case"] == report.CHART_CASE and row["seconds"]]
            line = re.sub(r'srcset="[^"]*"|src="[^"]*"', "", line.replace(how_right_the_plan_was(), ""))
            for text in re.findall(r"\d+(?:\.\d+)?", re.sub(NOT_A_FIGURE, "", line)):
                slack = 0.5000001 * 10 ** -len(text.partition(".")[2])
                known = any(abs(number - float(text)) <= slack for row in about for number in numbers_of(row))
                assert known, f"{text} of {line!r} is in no row of {part['name']}"
                num_seen += 1
    assert num_seen > 10
    assert how_right_the_plan_was() in report.README.read_text()


def test_ragged_rows_are_shown_by_width_and_beside_full_ones() -> None:
    both = {"engine": "offloadkit", "status": "measured", "commit": "abc", "gpu": "H200", "cores": 16}
    full = both | {"seconds": 0.5}
    by_width = {table.BY_WIDTH: {"128": 0.3, "512": 0.45, "slowest": 0.6}}
    lines = list(report.width_table([both | {"seconds": 0.4, "figures": by_width}], [full]))
    assert lines[0] == "| seconds by width | x full | 128 | 512 | slowest step |"
    assert lines[2] == "| offloadkit | 0.80 | 0.300 | 0.450 | 0.600 |"
    assert list(report.width_table([], [full])) == []
    others = [full | {"commit": "def"}, full | {"engine": "hf"}]
    assert "| - |" in list(report.width_table([both | {"seconds": 0.4, "figures": by_width}], others))[2]


def test_peaks_of_phases_stand_beside_the_plan_s_and_what_it_missed_is_said() -> None:
    planned = {"reading": {"vram": 2 * GIB, "ram": 20 * GIB}, "training": {"vram": 3 * GIB, "ram": 20 * GIB}}
    peaks = {"training": {"vram": 3.6 * GIB, "ram": 20.9 * GIB}}
    row: Row = {"case": "doors", "engine": "offloadkit-loop", "figures": {"peaks": peaks, "phases": planned}}
    whole = row | {"case": "phases", "engine": "offloadkit-whole-run"}
    whole |= {"figures": {"peaks": planned, "phases": planned}}
    assert list(report.phase_table([row, whole])) == [
        "| peak in GiB, measured / planned | reading | training |",
        "| --- | --- | --- |",
        "| phases, VRAM | 2.0 / 2.0 | 3.0 / 3.0 |",
        "| phases, RAM | 20.0 / 20.0 | 20.0 / 20.0 |",
        "",
        "Peaks that are off by more than 5 % and 0.5 GiB:\n",
        "- *doors, a loop of one's own*: training took 3.6 GiB of VRAM, 3 GiB were planned.",
        "",
    ]


def test_the_older_ratio_needs_the_same_commit_and_day() -> None:
    hf: Row = {"case": "w1", "engine": "hf", "seconds": 0.5, "commit": "abc", "gpu": "g", "cores": 2}
    hf |= {"date": "2026-01-01T10:00"}
    ours = hf | {"engine": "offloadkit-compiled", "seconds": 1.0, "date": "2026-01-01T12:00"}
    compiled = hf | {"engine": "hf-compiled", "seconds": 0.4}
    assert report.ratio([hf, ours], ours, "hf") == "2.00"
    assert report.ratio([hf, compiled, ours], ours, "hf") == "2.50"
    for other in ({"commit": "def"}, {"date": "2026-01-02T10:00"}, {"cores": 16}):
        assert report.ratio([hf | other, ours], ours, "hf") == "-"


def test_of_several_bucket_sizes_the_fastest_is_shown() -> None:
    row = dict.fromkeys(table.COLUMNS) | {"case": "w1", "status": "measured", "commit": "abc"}
    buckets = [row | {"engine": f"zero2{size}", "seconds": s} for size, s in (("", 3.0), ("-50m", 2.0), ("-200m", 4.0))]
    assert [found["engine"] for found in report.rows_of_case(buckets, "w1")] == ["zero2-50m"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_passes_on_what_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(run, "run", lambda cases, **options: told.update(options, cases=cases))
    arguments = "run w1 w3 --engines hf zero2 --turns 3 --device cpu --commit abc --out"
    command.main([*arguments.split(), str(tmp_path / "a.csv")])
    assert told["cases"] == ["w1", "w3"]
    assert (told["engines"], told["turns"], told["device"]) == (["hf", "zero2"], 3, "cpu")
    assert (told["commit"], told["out"]) == ("abc", tmp_path / "a.csv")


def test_rows_of_another_machine_are_merged_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here.csv", tmp_path / "there.csv"
    rows: list[Row] = [{"case": "w1", "date": date} for date in ("2026-01-01", "2026-01-02", "2026-01-03")]
    table.write(rows[:1], here)
    table.write(rows[1:], there)
    for _ in range(2):
        command.main(["merge", str(there), "--out", str(here)])
    assert [row["date"] for row in table.read(here)] == ["2026-01-01", "2026-01-02", "2026-01-03"]


def test_one_script_by_both_packages_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each package and number of ranks adds a row to the table, also if its run fails."""
    seconds = iter((4.0, 1.0, 2.0, 0.5, 6.0, 3.0, None, 0.7))
    asked: list[tuple[str, int]] = []

    def answer(package: str, num_ranks: int, *_: Any) -> dict[str, Any]:
        asked.append((package, num_ranks))
        if (taken := next(seconds)) is None:
            return {"reason": "exit status 1"}
        found = {"seconds": taken, "tokens": 5120 * num_ranks, "loss": 2.5, "num_parameters": 7, "dtype": "bf16"}
        found |= {"vram_bytes": 3, "ram_bytes": 4, "vram_budget": 24 << 30 if package == "offloadkit" else None}
        machine = {"gpu": "NVIDIA H200", "cpu": "a CPU", "num_cores": 32, "ram_bytes": 5}
        return found | {"machine": machine, "versions": {"torch": "2.13", "peer": "deepspeed 0.19"}}

    monkeypatch.setattr(same_script, "measured", answer)
    out = tmp_path / "table.csv"
    table.write([{"case": "older"}], out)
    same_script.main(
        ["both", "--model", "t5-tiny", "--ranks", "1", "2", "--turns", "2", "--commit", "abc", "--out", str(out)]
    )
    assert asked == [("deepspeed", 1), ("offloadkit", 1), ("deepspeed", 2), ("offloadkit", 2)] * 2
    older, *rows = table.read(out)
    assert older["case"] == "older"
    assert [(row["case"], row["engine"], row["seconds"], row["status"]) for row in rows] == [
        ("same-script-t5-tiny", "deepspeed", 5.0, "measured"),
        ("same-script-t5-tiny", "offloadkit", 2.0, "measured"),
        ("same-script-t5-tiny-2", "deepspeed", None, "failed"),
        ("same-script-t5-tiny-2", "offloadkit", 0.6, "measured"),
    ]
    assert rows[3]["figures"] == {"GPUs": 2, "tokens/s": 17067, "loss": 2.5, "peak RAM of rank 0": 4}
    assert (rows[1]["commit"], rows[1]["cores"], rows[1]["vram_budget_bytes"]) == ("abc", 32, 24 << 30)


@pytest.mark.slow
def test_one_script_trains_a_tiny_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    options = "both --model t5-tiny --engines offloadkit --warmup 1 --steps 1 --device cpu --commit abc --out"
    same_script.main([*options.split(), str(tmp_path / "table.csv")])
    (row,) = table.read(tmp_path / "table.csv")
    assert (row["status"], row["tokens"], row["dtype"], row["num_parameters"]) == ("measured", 5120, "fp32", 197_632)


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "w99"])
    assert "invalid choice: 'w99'" in capsys.readouterr().err
    command.main(["list"])
    assert "w1: W1, t5-3b, 8 x (512+128), full" in capsys.readouterr().out


@pytest.mark.slow(15)
def test_a_door_reads_the_model_from_a_folder_and_makes_a_row(tmp_path: Path) -> None:
    (row,) = run.run(["tiny-doors"], engines=["offloadkit-trainer"], steps=2, out=tmp_path / "t.csv", device="cpu")
    assert row["status"] == "measured", row["reason"]
    assert (row["engine"], row["steps"], row["tokens"]) == ("offloadkit-trainer", 2, 48)
    assert row["seconds"] > 0
    assert row["planned_ram_bytes"] > 0
