"""The benchmarks run on a CPU with tiny shapes: every mode, every column, and a run that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks import engines, measure, run, table, workloads

# The GPU baseline and offloadkit are in the package's own reach; peers are optional.
OURS = ("gpu", "gpu-ours", "offloadkit")
TINY = {
    "model": "t5-tiny",
    "batch_size": 2,
    "tokens": 12,
    "target_tokens": 6,
    "accumulation": 1,
    "checkpointing": False,
    "attention": "default",
    "vram_cap_gib": 0.0,
    "cores": 0,
    "steps": 2,
    "warmup": 1,
}


def measured(engine: str, mode: str = "steps", **task: Any) -> dict[str, Any]:
    work = {**TINY, **task.pop("work", {})}
    return {
        "engine": engine,
        "work": work,
        **task,
        **measure.measure({"mode": mode, "engine": engine, "work": work, **task}),
    }


@pytest.fixture(autouse=True)
def nondeterminism_comes_back() -> Iterator[None]:
    """The loader mode asks torch for deterministic kernels, in what is a process of its own elsewhere."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("work", [{}, {"accumulation": 2, "checkpointing": True}])
@pytest.mark.parametrize("model", [{}, {"model": "llama-tiny", "target_tokens": 0}])
def test_engines_do_the_same_work(model: dict[str, Any], work: dict[str, Any]) -> None:
    rows = [measured(engine, work={**model, **work}) for engine in OURS]
    assert len({row["losses"][0] for row in rows}) == 1
    torch.testing.assert_close(rows[2]["losses"], rows[1]["losses"], rtol=2e-2, atol=0)
    assert all(len(row["losses"]) == 5 for row in rows)
    assert all(row["step_seconds"] > 0 for row in rows)


def test_startup_splits_disk_to_first_step(tmp_path: Path) -> None:
    measured("gpu", "save", folder=str(tmp_path))
    rows = [measured(engine, "startup", folder=str(tmp_path), cold=True) for engine in ("gpu", "offloadkit")]
    assert len({row["losses"][0] for row in rows}) == 1
    table.print_table("startup", rows)


def test_forked_loader_workers_change_no_loss() -> None:
    rows = [measured("offloadkit", "loader", num_workers=num_workers) for num_workers in (0, 2)]
    table.print_table("loader", rows)
    assert "the same losses, the same weights" in table.loader_verdict(rows)


def test_the_command_writes_rows_with_machine_versions_and_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    command = "steps --model t5-tiny --batch 2 --tokens 8+4 --steps 1 --warmup 0 --cpu --cores 1 --engine gpu"
    run.main([*command.split(), "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"machine", "versions", "commit", "date", "rows"} <= set(result)
    (row,) = result["rows"]
    assert row["slowdown_gpu"] == 1.0
    assert result["machine"]["num_cores"] == 1
    assert "s/step" in capsys.readouterr().out


def test_a_run_that_fails_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    options = run.parse(["steps", "--timeout", "120"])
    row = run.run_task({"mode": "steps", "engine": "no-such-engine", "work": TINY}, options)
    assert row["failed"].startswith("KeyError")
    table.print_table("steps", [row])
    assert "KeyError" in capsys.readouterr().out


def test_one_command_measures_every_engine_and_a_plan_in_each_budget() -> None:
    command = "steps --engine gpu gpu-ours planned planned-compiled ao --budget 48 24 --ckpt gpu ao --vram 60 --cores 2"
    asked = run.tasks(run.parse(command.split()))
    assert [table.label(task) for task in asked] == [
        "gpu ckpt",
        "gpu-ours",
        "planned 48 GiB",
        "planned 24 GiB",
        "planned 48 GiB compiled",
        "planned 24 GiB compiled",
        "ao ckpt",
    ]
    assert {workloads.Workload(**task["work"]).cores for task in asked} == {2}
    caps = {(task["engine"], workloads.Workload(**task["work"]).vram_cap_gib) for task in asked}
    assert caps == {("gpu", 60.0), ("gpu-ours", 60.0), ("planned", 0.0), ("ao", 60.0)}


def test_the_command_measures_a_plan_beside_the_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "steps --model t5-tiny --batch 2 --tokens 8+4 --steps 1 --warmup 0 --cpu --engine gpu planned --budget 2"
    _, row = run.main([*command.split(), "--out", str(tmp_path / "result.json")])
    assert row["engine"] == "planned"
    assert row["slowdown_gpu"] > 0
    assert "planned 2 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--engine planned", "--engine gpu --budget 24"])
def test_a_plan_needs_a_budget_and_nothing_else_does(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["steps", *arguments.split()])
    assert "take --budget GIB, and nothing else does" in capsys.readouterr().err


def test_a_plan_is_measured_in_mode_steps_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["loader", "--engine", "planned", "--budget", "24"])
    assert "runs in mode steps, got loader" in capsys.readouterr().err


def planned_row(**work: Any) -> dict[str, Any]:
    return measured("planned", work={**work, "warmup": 1, "steps": 2, "vram_budget_gib": 2.0})


def test_a_planned_row_shows_each_step_of_both_processors() -> None:
    row = planned_row()
    each, num_steps = row["each_step"], 1 + 1 + 1 + 2
    assert len(row["losses"]) == num_steps
    assert {name: len(values) for name, values in each.items()} == {
        "cpu_step": num_steps,
        "gpu_step": num_steps,
        "layers_on_gpu": num_steps,
    }
    assert max(each["cpu_step"] + each["gpu_step"]) > 0


def test_a_split_that_corrects_itself_is_warmed_up_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is moved to the CPU before the third update."""
    from offloadkit import planning
    from offloadkit.config import Placement
    from offloadkit.offload.update import StepBalancer

    make = planning.plan

    def with_states_in_ram(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        return replace(made, placements=[Placement(gradients="ram", states="ram", step="gpu")] * len(made.layers))

    def move_one(split: StepBalancer, layers: Any) -> None:
        layers[0].on_gpu = split._num_updates < 2

    monkeypatch.setattr(planning, "plan", with_states_in_ram)
    monkeypatch.setattr(StepBalancer, "correct", move_one)
    row = planned_row()
    num_steps = 1 + measure.WARMUP_WHILE_LAYERS_MOVE + 1 + 2
    assert len(row["losses"]) == num_steps
    each = row["each_step"]
    first, last = each["layers_on_gpu"][0], each["layers_on_gpu"][-1]
    assert each["layers_on_gpu"] == [first] * 2 + [last] * (num_steps - 2)
    assert last == first - 1 > 0


@pytest.mark.parametrize("engine", sorted(engines.PACKAGES))
def test_a_missing_peer_is_named_with_what_to_install(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    package = engines.PACKAGES[engine]
    with pytest.raises(ModuleNotFoundError, match=f"{engine} needs the package {package}.*pip install {package}"):
        measured(engine, work={"model": "llama-tiny", "target_tokens": 0})
    if engine in engines.BUILDS:
        with pytest.raises(SystemExit, match=f"pip install {package}"):
            engines.build_ahead([engine])


def test_roundpipe_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"none for T5, got t5-tiny: take --model llama-3\.2-3b"):
        measured("roundpipe")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="RoundPipe needs a CUDA GPU"):
        measured("roundpipe", work={"model": "llama-tiny", "target_tokens": 0})


class InPlaceOfRoundPipe:
    """Computes what it is asked for, part by part, without moving anything."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model, self.num_parts = model, settings["model_run_config"]["num_microbatch"]
        self.num_steps = 0

    def optim_parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def forward_backward(self, input_kwargs: dict[str, Any], loss_fn: Any) -> torch.Tensor:
        assert not input_kwargs.pop("return_logits")
        found = []
        for part in range(self.num_parts):
            inputs = {name: tensor.chunk(self.num_parts)[part] for name, tensor in input_kwargs.items()}
            found.append(loss_fn(self.model(**inputs), None))
            found[-1].backward()
        return torch.stack(found).sum().detach()

    def step(self, update: Any) -> None:
        update()
        self.num_steps += 1


@pytest.mark.parametrize("batch_size", [3, 4])
def test_roundpipe_gets_the_work_of_the_others(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def named_as_before(input_embeds: torch.Tensor, cache_position: torch.Tensor, **others: Any) -> Any:
        return llama.create_causal_mask(input_embeds=input_embeds, cache_position=cache_position, **others)

    llama = SimpleNamespace(create_causal_mask=masking_utils.create_causal_mask)
    optim = SimpleNamespace(Adam=torch.optim.Adam)
    modules = {"models": SimpleNamespace(llama=llama), "optim": optim}
    package = SimpleNamespace(RoundPipeRunConfig=dict, wrap_model_to_roundpipe=InPlaceOfRoundPipe, **modules)
    for name, module in {"roundpipe": package, **{f"roundpipe.{name}": each for name, each in modules.items()}}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(engines, "build_roundpipe_adam", lambda: 0.0)
    work = {"model": "llama-tiny", "target_tokens": 0, "batch_size": batch_size, "accumulation": 2}
    cpu, shape = torch.device("cpu"), workloads.Workload(**{**TINY, **work})
    engine = engines.RoundPipe(workloads.build_model(shape, cpu, cpu), shape, cpu)
    before = [weight.detach().clone() for weight in engine._model.optim_parameters()]
    losses = []
    for index, batch in enumerate(workloads.fixed_batches(shape, cpu), start=1):
        losses.append(engine.forward(batch))
        engine.backward(losses[-1])
        engine.step(index == shape.accumulation)
    expected = measured("gpu", work={**work, "steps": 1, "warmup": 0})["losses"][0]
    assert float(torch.stack(losses).mean()) == pytest.approx(expected, rel=1e-2)
    assert engine._model.num_steps == 1
    assert not all(map(torch.equal, engine._model.optim_parameters(), before))
    assert all(weight.grad is None for weight in engine._model.optim_parameters())
    hidden = torch.zeros(2, 5, engine._model.model.config.hidden_size)
    config, mask = engine._model.model.config, torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    assert named_as_before(hidden, torch.arange(5), config=config, attention_mask=mask, past_key_values=None).shape == (
        2,
        1,
        5,
        5,
    )


def test_only_engines_that_compile_something_are_built_ahead() -> None:
    with pytest.raises(SystemExit, match="zero2, zero3, roundpipe, got gpu"):
        engines.build_ahead(["gpu"])


def test_a_build_that_was_killed_does_not_hold_up_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    left_behind = tmp_path / "adam" / "lock"
    left_behind.parent.mkdir()
    left_behind.touch()
    with engines._building("adam"):
        assert not left_behind.exists()
        assert os.environ["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")


SLEEPING = """
import json, os, subprocess, sys, time
task = json.load(open(sys.argv[1]))
if task["engine"] == "gpu":
    json.dump({"step_seconds": 1.0}, open(sys.argv[2], "w"))
else:
    child = subprocess.Popen(["sleep", "600"])
    open("pids.part", "w").write(f"{os.getpid()} {child.pid}")
    os.rename("pids.part", "pids")
    time.sleep(600)
"""
RUN = """
from benchmarks import run
run.MEASURE, run.print_table = "sleeping", lambda *_: None
run.main("steps --engine gpu ao --out rows.json --commit abc".split())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_ends_what_it_measures_and_keeps_its_rows(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    paths = os.pathsep.join([str(tmp_path), str(Path(run.__file__).parent.parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell's background job
    )
    try:
        started = time.monotonic()
        while not (tmp_path / "pids").exists():
            assert process.poll() is None
            assert time.monotonic() - started < 120
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert f"ended by {number.name}" in said
    assert [row["engine"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["gpu"]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_command_knows_every_engine() -> None:
    assert set(run.ENGINE_NAMES) == set(engines.ENGINES)


@pytest.mark.parametrize("model", workloads.MODELS)
def test_every_shape_is_a_configuration(model: str) -> None:
    assert workloads.model_config(model).vocab_size >= 512


@pytest.mark.parametrize("arguments", ["--model t5-3b --tokens 512", "--model llama-3.2-3b --tokens 8+8", "--tokens x"])
def test_token_counts_that_do_not_fit_the_model_are_refused(arguments: str) -> None:
    with pytest.raises(SystemExit):
        run.parse(["steps", *arguments.split()])
