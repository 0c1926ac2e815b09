"""The benchmarks of several GPUs: every engine on two CPU ranks, the rows, and runs that exceed their time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import rank_engines, report, table
from benchmarks import ranks as benchmark
from benchmarks.cases import config_of
from benchmarks.rank_cases import RANK_CASES, RANK_ENGINES
from tests.distributed.pool import RankPool

RAW: dict[str, Any] = {
    "step_seconds": 0.5,
    "all_step_seconds": [0.5, 0.5],
    "phase_seconds": {"forward": 0.1},
    "num_tokens": 48,
    "num_warmup": 8,
    "num_parameters": 100,
    "dtype": "bf16",
    "batch_size": 2,
    "vram_bytes": 3 << 30,
    "max_allocated_bytes": 2 << 30,
    "ram_bytes": 5 << 30,
    "resident_bytes": 6 << 30,
    "received": {"gather": 10**9},
    "GPUs": 2,
    "machine": {"gpu": "NVIDIA H200", "cpu": "a CPU", "num_cores": 32, "ram_bytes": 256 << 30},
    "versions": dict.fromkeys(("torch", "transformers", "offloadkit", "deepspeed"), "1.0"),
}
"""The measurements reported by a rank."""


def of_rank(**task: Any) -> dict[str, Any]:
    """`measure_rank` in a process of the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        row = benchmark.measure_rank(**task)
    gc.collect()  # closes the engine before the pool's next task
    return row


def launched_in(pool: RankPool) -> Callable[..., list[Any]]:
    """A replacement for `launch` that runs on the pool's processes, which are started here."""
    pool.run(2, dist.barrier)  # otherwise one rank may leave the group before the other has joined

    def run(function: Any, arguments: dict[str, Any], num_ranks: int, **_: Any) -> list[Any]:
        return pool.run(num_ranks, of_rank, **arguments)

    return run


@pytest.mark.slow
def test_ours_on_two_ranks_makes_a_whole_row(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "launch", launched_in(ranks))
    monkeypatch.setattr(benchmark, "WARMUP", 0)
    out = tmp_path / "ranks.csv"
    options: dict[str, Any] = {"steps": 2, "out": out, "commit": "abc", "device": "cpu"}
    (row,) = benchmark.run(["tiny-llama-2"], engines=["ours"], **options)
    assert row["status"] == "measured", row["reason"]
    (read,) = table.read(out)
    unknown = {name for name, value in read.items() if value is None}
    assert unknown <= {"reason", "peer", "notes", "ram_budget_bytes"}
    figures = read["figures"]
    assert (read["case"], read["engine"], read["tokens"], figures["GPUs"]) == ("tiny-llama-2", "ours", 2 * 2 * 16, 2)
    assert figures["tokens/s"] == pytest.approx(read["tokens"] / read["seconds"], rel=0.01)
    moved = {kind: number for kind, number in figures["received"].items() if kind != "agreement"}
    assert moved == figures["planned to be received"]
    assert moved["gather"] > 0
    assert 0 < read["ram_peak_bytes"] <= figures["resident RAM of all ranks"]
    assert "tiny-llama-2, offloadkit, turn 1 of 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "engine", "kinds"),
    [
        ("tiny-llama-2", "fsdp2-recomputed", {"allgather_base", "reduce_scatter_base"}),
        ("tiny-2", "fsdp2-our-compute", {"allgather_base", "reduce_scatter_base"}),
        ("tiny-2", "ddp", {"allreduce"}),
    ],
)
def test_peers_on_two_ranks_are_measured_and_what_they_receive_is_counted(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, engine: str, kinds: set[str]
) -> None:
    monkeypatch.setattr(benchmark, "launch", launched_in(ranks))
    monkeypatch.setattr(benchmark, "WARMUP", 0)
    (row,) = benchmark.run([case], engines=[engine], steps=1, out=tmp_path / "a.csv", commit="abc", device="cpu")
    assert row["status"] == "measured", row["reason"]
    received, num_bytes = row["figures"]["received"], 2 * row["num_parameters"]  # bf16
    assert {name for name, number in received.items() if number > 0.1 * num_bytes} == kinds
    times = row["accumulation"] if engine != "ddp" else 2  # DDP exchanges once a step, in both directions
    reduced = received["allreduce" if engine == "ddp" else "reduce_scatter_base"]
    assert reduced == pytest.approx(times * num_bytes / 2, rel=0.1)
    if engine == "ddp":
        assert row["batch_size"] == 32 * 2, "no memory was full"


@pytest.mark.slow(20)
def test_the_hashed_cases_train_the_same_weights_on_one_rank_and_on_two(tmp_path: Path) -> None:
    cases = ["tiny-1-hashed", "tiny-2-hashed"]
    rows = benchmark.run(cases, steps=1, out=tmp_path / "a.csv", commit="abc", device="cpu")
    assert [row["status"] for row in rows] == ["measured"] * 2, [row["reason"] for row in rows]
    for name in ("weights", "gradient norm"):
        alone, together = (row["figures"][name] for row in rows)
        assert alone == together, name
    assert len(rows[0]["figures"]["weights"]) == 64, "one hash, the same on all ranks"


@pytest.mark.slow
def test_ranks_in_fresh_processes(tmp_path: Path) -> None:
    (row,) = benchmark.run(["tiny-1"], steps=1, out=tmp_path / "a.csv", commit="abc", device="cpu")
    assert row["status"] == "measured", row["reason"]
    assert (row["figures"]["GPUs"], row["figures"]["received"]) == (1, {})


@pytest.fixture
def measured_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[table.Row]]:
    """`benchmarks.ranks.run` with another `launch`."""

    def run(launch: Callable[..., Any], cases: list[str], **options: Any) -> list[table.Row]:
        monkeypatch.setattr(benchmark, "launch", launch)
        return benchmark.run(cases, out=tmp_path / "a.csv", commit="abc", **options)

    return run


def test_what_was_told_counts_if_ranks_fail_later(measured_by: Callable[..., list[table.Row]]) -> None:
    def tells(on_message: Any, **_: Any) -> None:
        for rank in range(2):
            on_message(rank, RAW | {"step_seconds": 0.5 + rank, "received": {}})
        raise RuntimeError("counting failed")

    (row,) = measured_by(lambda function, arguments, number, **options: tells(**options), ["t5-3b-2x24"])
    assert (row["status"], row["seconds"], row["tokens"]) == ("measured", 1.5, 96)
    assert row["figures"]["uncounted"] == "RuntimeError: counting failed"


def test_processes_that_take_too_long_are_killed_and_the_rest_is_not_begun(
    measured_by: Callable[..., list[table.Row]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])

    def hangs(stops: Any, **_: Any) -> None:
        while not stops():
            now[0] += 1

    launched = measured_by(
        lambda function, arguments, number, **options: hangs(**options), ["t5-3b-2x24", "tiny-1", "tiny-2"], seconds=160
    )
    assert [(row["case"], row["status"], row["reason"]) for row in launched] == [
        ("t5-3b-2x24", "failed", "took more than 150 s")
    ]
    assert capsys.readouterr().out.count("not begun: no time is left") == 1 + len(RANK_CASES["tiny-2"].engines)


def test_ranks_inherit_what_the_case_says_of_the_link(measured_by: Callable[..., list[table.Row]]) -> None:
    seen: list[dict[str, str | None]] = []

    def looks(*_: Any, **__: Any) -> list[Any]:
        seen.append({name: os.environ.get(name) for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE")})
        return [RAW, RAW]

    before = dict(os.environ)
    rows = measured_by(looks, ["t5-3b-2x24", "t5-3b-2x24-pcie"], turns=2)
    assert [each["NCCL_P2P_DISABLE"] for each in seen] == [None, "1"] * 2, "turns alternate"
    assert {each["NCCL_NVLS_ENABLE"] for each in seen} == {"0"}
    assert dict(os.environ) == before
    assert [(row["turns"], row["figures"]["link"]) for row in rows] == [(2, "as it is"), (2, "PCIe")]


def test_rows_of_several_gpus_have_a_section_and_no_part_in_the_score(
    measured_by: Callable[..., list[table.Row]],
) -> None:
    planned = {"vram_bytes": 4 << 30, "ram_bytes": 5 << 30, "step_seconds": 0.4, "received": {"gather": 10**9}}
    rows = measured_by(lambda *_, **__: [RAW | {"planned": planned, "batch_size": 8}] * 2, ["t5-3b-2x24"])
    refused = {"case": "t5-11b-2x24", "engine": "ours", "model": "t5-11b", "batch_size": 1, "status": "does not fit"}
    rows.append(dict.fromkeys(table.COLUMNS) | refused | {"reason": "the plan needs more", "commit": "abc"})
    before = report.results([])
    text = "\n".join(report.several_gpus(rows))
    cells = ["t5-3b-2x24", "t5-3b", "2 x 8 x (512+128)", "offloadkit", "0.500", "-", "1", "192", "3.0", "10.0"]
    assert f"| {' | '.join([*cells, '1.00', '0.400', '4.0', '5.0'])} | H200, 32 cores, abc, " in text
    assert "| t5-11b | 2 x 1 x (512+128) | offloadkit | the plan needs more |" in text
    assert report.results(rows).replace(text + "\n", "") == before
    assert report.planned_rows(rows)[report.STREAMED] == []


def test_each_kind_of_gpu_has_a_table_and_what_fitted_at_last_is_no_refusal(
    measured_by: Callable[..., list[table.Row]],
) -> None:
    (row,) = measured_by(lambda *_, **__: [RAW | {"batch_size": 8}] * 2, ["t5-3b-2x24"])
    refused = row | {"status": "does not fit", "reason": "too much", "gpu": None, "seconds": None}
    other = row | {"gpu": "NVIDIA H100", "seconds": 2 * row["seconds"]}
    elsewhere = refused | {"case": "t5-3b-2x28"}
    text = "\n".join(report.several_gpus([refused, row, other, elsewhere, row | {"seconds": 0.25}]))
    tables = [part.split("\n| ")[3:] for part in text.split("\n**")[1:]]
    seconds = [[tuple(cells.split(" | ")[4:6]) for cells in part] for part in tables]
    assert seconds == [[("0.250", "0.500")], [("1.000", "-")], [("too much", "")]]
    assert text.count("too much") == 1
    assert (
        text.index("**H200**") < text.index("**H100**") < text.index("**What did not fit**") < text.index("t5-3b-2x28")
    )


def test_a_run_on_four_gpus_has_a_table_with_its_scaling_and_traces(
    measured_by: Callable[..., list[table.Row]],
) -> None:
    names = {1: "t5-3b-1x24", 2: "t5-3b-2x24", 4: "t5-3b-4x24"}
    raw = RAW | {"batch_size": 8, "planned": {"vram_bytes": 4 << 30, "ram_bytes": 5 << 30, "step_seconds": 0.4}}
    rows = [
        measured_by(lambda *_, raws=[raw | {"GPUs": size}] * size, **__: raws, [name])[0]
        for size, name in names.items()
    ]
    elsewhere = rows[0] | {"commit": "another"}
    alone = "\n".join(report.several_gpus([elsewhere, *rows[:2]]))
    assert "scaling" not in alone
    names_of_trace = ("traced step", "computing", "only NCCL", "only copies", "idle", "NCCL", "H2D", "D2H")
    traced = dict.fromkeys((*names_of_trace, "main thread", "all threads"), 0.25)
    rows[1]["figures"]["traced"] = traced  # as by a peer, without rates
    rows[2]["figures"]["traced"] = traced | {"step": 0.5, "H2D bytes": 3e9, "D2H bytes": 1e9}
    rows[2]["figures"]["bytes moved in the last step"] = {"cpu_step": 6 * 10**9, "h2d": 3 * 10**9, "d2h": 10**9}
    rates = {"link": 2e9, "h2d": 30e9, "d2h": 5e9, "cpu_and_bus": 50e9}
    rows[2]["rates"] = {f"{name}_bytes_per_second": rate for name, rate in rates.items()}
    others, of_run = "\n".join(report.several_gpus([elsewhere, *rows])).split("**1 to 4 GPUs of one machine**")
    assert "another" in others
    assert "abc" not in others
    cells = [line.strip("| ").split(" | ") for line in of_run.splitlines() if line.startswith("| t5-3b, 8 x")]
    assert [(each[2], each[6], each[7]) for each in cells] == [
        ("1", "96", "1.00"),
        ("2", "192", "2.00"),
        ("4", "384", "4.00"),
    ]
    assert f"| t5-3b-4x24 | {' | '.join(['0.250'] * 6)} | 0.500 | {' | '.join(['0.250'] * 4)} | 3.0 |" in of_run
    assert [line for line in of_run.splitlines() if line.startswith("| t5-3b-4x24 | 1.00 | ")] == [
        "| t5-3b-4x24 | 1.00 | 1.00 | 0.40 | 0.40 | 0.06 | - |"  # 4 * 0.25 s of threads on 32 cores
    ]
    assert "0 of 3 steps took the planned seconds within 15 %, 0 the planned VRAM within 5 %" in of_run
    assert "was at most 3.0 GiB above one rank's planned RAM plus 3 GiB a rank." in of_run  # 4 * 5 - 5 - 4 * 3
    traced["autograd's thread"] = 0.05
    rows[2]["figures"]["traced"] |= traced
    assert report.limits(rows[2])["Python"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (["a", "a"], "the same trained weights, bit for bit"),
        (["a", "b"], "DIFFERENT weights"),
        (["a", "a b"], "DIFFERENT"),
    ],
)
def test_the_report_says_whether_hashed_cases_trained_the_same_weights(
    measured_by: Callable[..., list[table.Row]], weights: list[str], said: str
) -> None:
    cases = ["t5-3b-1x24-hashed", "t5-3b-2x24-hashed"]
    rows = measured_by(lambda *_, **__: [RAW] * 2, cases)
    for row, found in zip(rows, weights, strict=True):
        row["figures"]["weights"] = found
    assert f"{' and '.join(cases)}: {said}" in "\n".join(report.several_gpus(rows))


def test_ddps_largest_batch_is_found_to_an_eighth() -> None:
    tried: list[int] = []

    def fits(number: int, most: int) -> bool:
        tried.append(number)
        return number <= most

    for most in (0, 1, 2, 3, 7, 21, 64):
        found = rank_engines.largest(64, lambda number, most=most: fits(number, most))  # type: ignore[misc]
        assert found <= most <= found + max(1, found // 8) - (found == most)
    assert max(tried) == 64


def test_every_case_is_planned_and_its_engines_are_known() -> None:
    for case in RANK_CASES.values():
        assert set(case.engines) <= set(RANK_ENGINES)
        assert config_of(case.model).architectures
    assert {setup.engine for setup in RANK_ENGINES.values()} == set(rank_engines.ENGINES)
    (line,) = benchmark.planned(["tiny-llama-2"])
    assert line.startswith("tiny-llama-2: 2 x llama-tiny, 2 x 16, ours fsdp2-recomputed; at most 150 s. Planned: ")
    (line,) = benchmark.planned(["t5-3b-2"])
    assert "fsdp2" in line
