"""`engine.profile`: ranges on one time scale, and the bound of a step."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit.device import trace
from offloadkit.device.streams import Event
from offloadkit.device.trace import Range
from offloadkit.errors import ConfigError, OutputError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord
from offloadkit.offload import profiling
from offloadkit.offload.profiling import BACKWARD, UPDATE, bound, breakdown
from tests.messages import has_facts
from tests.models import TinyLM, tokens
from tests.planner.machines import H200

FAST = replace(
    H200,
    h2d_bytes_per_second=10e9,
    d2h_bytes_per_second=5e9,
    cpu_adamw_bytes_per_second=100e9,
    cpu_and_bus_bytes_per_second=100e9,
)


def record(**seconds: float) -> StepRecord:
    return StepRecord(7, 1.0, 10, 1.0, 1e-4, False, seconds)


RECORD = record(step=1.0, forward=0.4, forward_wait=0.3, backward=0.3, backward_bus_wait=0.1)
RANGES = [
    Range("GPU", "forward a", 0.0, 0.4),
    Range("GPU", "backward a", 0.4, 0.7),
    Range("H2D", "a", 0.0, 0.1, int(1e9)),
    Range("H2D", "b", 0.05, 0.2, int(1e9)),
    Range("D2H", "a", 0.45, 0.65, int(1e9)),
    Range("D2H", "b", 0.65, 0.69, 100),
    Range("CPU step", "a", 0.7, 1.0, int(30e9)),
]


def test_each_phase_is_bound_by_what_takes_the_longest_and_the_step_by_their_sum() -> None:
    found = bound(RANGES, [RECORD], FAST)
    assert {phase: found.limiting(phase).resource for phase in found.shares} == {UPDATE: "DRAM", BACKWARD: "bus up"}
    update = {share.resource: share for share in found.shares[UPDATE]}
    assert update["DRAM"].seconds == pytest.approx(0.32)  # with the bytes moved by the bus
    assert update["cores"].seconds == pytest.approx(0.3)
    assert update["compute"].seconds == pytest.approx(0.1)  # without its wait
    assert update["bus down"].seconds == pytest.approx(0.2)
    assert update["bus down"].busy_seconds == pytest.approx(0.2)  # two overlapping copies
    assert update["bus up"].num_bytes == 0
    backward = {share.resource: share for share in found.shares[BACKWARD]}
    assert backward["bus up"].seconds == pytest.approx(0.2, abs=1e-6)
    assert backward["bus up"].busy_seconds == pytest.approx(0.24)
    assert found.seconds == pytest.approx(0.52, abs=1e-6)
    assert has_facts(found.lines()[0], "1 s", "520 ms", "52%")
    assert any(has_facts(line, "backward", "bus up", "200 ms", "954 MiB", "240 ms") for line in found.lines())


def test_slow_cores_are_told_from_slow_memory() -> None:
    slow = replace(FAST, cpu_adamw_bytes_per_second=50e9)
    found = bound(RANGES, [RECORD], slow)
    assert found.limiting(UPDATE).resource == "cores"
    assert found.limiting(UPDATE).seconds == pytest.approx(0.6)


def test_both_directions_of_the_bus_share_what_they_have_together() -> None:
    ways = [Range("GPU", "backward a", 5.0, 6.0), *(Range(track, "a", 0.0, 0.4, int(1e9)) for track in ("H2D", "D2H"))]
    machine = replace(FAST, h2d_bytes_per_second=10e9, d2h_bytes_per_second=10e9, both_bytes_per_second=10e9)
    update = {share.resource: share.seconds for share in bound(ways, [RECORD], machine).shares[UPDATE]}
    assert (update["bus down"], update["bus up"]) == pytest.approx((0.2, 0.2))


def test_the_mean_of_several_steps() -> None:
    later = [replace(each, began=each.began + 1, ended=each.ended + 1) for each in RANGES]
    found = bound(RANGES + later, [RECORD, RECORD], FAST)
    once = bound(RANGES, [RECORD], FAST)
    assert found.step_seconds == once.step_seconds
    for phase, shares in found.shares.items():
        for share, expected in zip(shares, once.shares[phase], strict=True):
            assert (share.resource, share.num_bytes) == (expected.resource, expected.num_bytes)
            assert (share.seconds, share.busy_seconds) == pytest.approx((expected.seconds, expected.busy_seconds))


def test_a_steps_phases_on_one_line() -> None:
    assert breakdown(record(step=0.5, forward=0.2, cpu_step=0.3, forward_wait=0.0)) == (
        "step 7: 500 ms | forward 200 ms | cpu step 300 ms"
    )


def test_a_line_for_each_step_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_of() as engine:
        engine.telemetry.subscribe(lambda record: print(offloadkit.breakdown(record)))
        steps(engine, 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert all("| forward " in line and "| backward " in line and "| cpu step " in line for line in lines)


def engine_of(**options: Any) -> offloadkit.OffloadEngine:
    torch.manual_seed(0)
    return offloadkit.OffloadEngine(TinyLM(), offloadkit.OffloadConfig(**options), device="cpu")


def steps(engine: offloadkit.OffloadEngine, number: int) -> None:
    for batch in tokens(number):
        engine.backward(engine(batch))
        engine.step()


def drawn(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """(track, name, event) of a trace's ranges, by time."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [(tracks[event["tid"]], event["name"], event) for event in events if event["ph"] == "X"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_some_steps_of_an_engine(
    tmp_path: Path, accumulation: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, blocks run as graphs."""
    path = tmp_path / "trace.json"
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu"} if accumulation == 2 else set())
    with engine_of(gradient_accumulation=accumulation, placement=offloadkit.Placement(weights="ram")) as engine:
        steps(engine, 2 * accumulation)
        profile = engine.profile(steps=3, path=path)
        steps(engine, 4 * accumulation)
        assert trace.active() is None
        assert trace.prepared() is None
        steps(engine, accumulation)
        names = {state.layer.name for state in engine.placed.states}
    ranges = drawn(path)
    counts = Counter((track, name) for track, name, _ in ranges)
    for name in names:
        assert counts["CPU step", name] == 3
        assert counts["GPU", f"backward {name}"] == 3 * accumulation
    assert counts["norm", "norm"] == 3
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for _, _, event in ranges)
    assert profile.bound is not None
    assert profile.bound.seconds > 0
    shown = capsys.readouterr().out
    assert "steps 4 to 6 traced in" in shown
    assert shown.count("\nstep ") == 3
    assert "bound by" in shown
    assert ("a step; 100% of the blocks' calls ran as graphs" in shown) == (accumulation == 2)
    assert 0 < profile.python_seconds < profile.bound.step_seconds * 1.5


def test_pythons_seconds_are_without_those_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]

    def mark() -> Event:
        seconds[0] += 100.0
        return Event()

    monkeypatch.setattr(time, "thread_time", lambda: seconds[0])
    tracing = trace.Trace(torch.device("cpu"), mark)
    tracing.note_cpu_time()
    for name in ("forward", "", "backward", ""):
        seconds[0] += 1.0
        tracing.phase(name)
    seconds[0] += 1.0
    tracing.note_cpu_time()
    assert tracing.python_seconds() == 5.0


def test_a_profile_says_why_blocks_ran_eagerly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu"})
    with engine_of(placement=offloadkit.Placement()) as engine:
        steps(engine, 2)
        first = next(module for name, module in engine.module.named_modules() if name.endswith("0"))
        next(first.children()).register_forward_hook(lambda module, args, output: None)
        engine.profile(steps=2, path=tmp_path / "trace.json")
        steps(engine, 3)
        assert engine.placed.graphs is not None
        engine.placed.graphs.give_up("the GPU was full")
        engine.profile(steps=2, path=tmp_path / "trace.json")
        steps(engine, 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "ran eagerly" in line] == [
        "  25% ran eagerly: a module in it has hooks",
        "  100% ran eagerly: the GPU was full",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_traced_is_whole_steps_each_beside_the_update_of_the_one_before(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"

    def measure(ranks: object, device: torch.device) -> Hardware:
        time.sleep(2)  # a step takes milliseconds
        return FAST

    monkeypatch.setattr(profiling, "measured_by", measure)
    with engine_of(gradient_accumulation=accumulation) as engine:
        steps(engine, 3 * accumulation - 1)  # the third step has begun, if a step has several micro-batches
        profile = engine.profile(steps=3, path=path)
        steps(engine, 3 * accumulation + 1)
        records = list(engine.telemetry.records)
        assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
        names = [state.layer.name for state in engine.placed.states]
    assert profile.bound is not None
    assert profile.bound.step_seconds == mean(record.seconds["step"] for record in records[-3:])
    assert max(record.seconds["step"] for record in records[-3:]) < 1
    ranges = drawn(path)
    for name in names:
        stepped = [event["ts"] + event["dur"] for on, what, event in ranges if (on, what) == ("CPU step", name)]
        done = [event["ts"] for on, what, event in ranges if (on, what) == ("GPU", f"backward {name}")]
        assert len(stepped) == 3
        assert len(done) == 3 * accumulation
        assert all(first < then for first, then in zip(stepped, done[::accumulation], strict=True))


@pytest.mark.parametrize(
    "placement",
    [
        offloadkit.Placement(),
        offloadkit.Placement(weights="ram", activations="offload"),
        offloadkit.Placement(step="gpu", gradients="vram"),
        offloadkit.Placement(step="gpu", weights="ram"),
    ],
)
def test_every_layers_ways_up_and_down_are_named(tmp_path: Path, placement: offloadkit.Placement) -> None:
    path = tmp_path / "trace.json"
    with engine_of(placement=placement) as engine:
        engine.profile(steps=1, path=path)
        steps(engine, 2)
        layers = {state.layer.name for state in engine.placed.states}
        blocks = {name for name in layers if name.startswith("blocks.")}
    for track in ("H2D", "D2H"):
        found = {name for on, name, _ in drawn(path) if on == track}
        named = {name.removesuffix(" states").removesuffix(" input") for name in found} - {"norm sums"}
        assert named == layers, track
        assert blocks
        if placement.activations == "offload":
            assert {name for name in found if name.endswith(" input")} == {f"{name} input" for name in blocks}
        if placement.step == "gpu":
            assert {name for name in found if name.endswith(" states")} == {f"{name} states" for name in layers}


def test_profiling_changes_no_number() -> None:
    engines = [engine_of() for _ in range(2)]
    for number, engine in enumerate(engines):
        if number:
            engine.profile(steps=2, path=Path("/dev/null"))
        steps(engine, 3)
    weights = [engine.master_weights() for engine in engines]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for engine in engines:
        engine.close()


def test_an_engine_that_is_closed_while_it_is_traced_leaves_no_trace_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_of() as engine:
        engine.profile(steps=5, path=tmp_path / "trace.json")
        steps(engine, 1)
    assert trace.active() is None
    assert not (tmp_path / "trace.json").exists()
    assert "no trace was written: the engine was closed after" in capsys.readouterr().out


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with engine_of() as engine:
        with pytest.raises(ConfigError, match="steps must be a whole number >= 1, got 0"):
            engine.profile(steps=0)
        with pytest.raises(OutputError, match="is not a folder for the trace"):
            engine.profile(path=tmp_path / "none" / "trace.json")
        assert trace.active() is None
        engine.profile(path=tmp_path / "trace.json")
        with pytest.raises(ConfigError, match="a trace is already running"):
            engine.profile(path=tmp_path / "trace.json")


def test_the_machine_is_measured_before_steps_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def measure(ranks: object, device: torch.device) -> Hardware:
        measured.append(trace.active())
        return FAST

    monkeypatch.setattr(profiling, "measured_by", measure)
    with engine_of() as engine:
        profile = engine.profile(steps=1, path=tmp_path / "trace.json")
        assert measured == [None]
        steps(engine, 2)
    assert profile.bound is not None
    assert measured == [None]
