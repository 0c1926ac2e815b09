"""`finetune(num_gpus=N)`: refused arguments, messages from ranks, the display, and the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dill
import pytest
import torch
from transformers import T5ForConditionalGeneration
from typer.testing import CliRunner

import offloadkit
from offloadkit import Monitor
from offloadkit.distributed import launch as launch_module
from offloadkit.doors import finetuning, several_gpus
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError
from offloadkit.facts.calls import BY_FINETUNE, as_here
from offloadkit.facts.telemetry import StepRecord
from offloadkit.monitor import terminal, words
from offloadkit.monitor.page import page
from tests.distributed.doors import as_launched, model_named, pairs
from tests.distributed.pool import RankPool
from tests.monitor.records import Watched


@pytest.mark.parametrize(
    ("num_gpus", "more", "message"),
    [
        (0, {}, "num_gpus must be a whole number >= 1, got 0"),
        (True, {}, "num_gpus must be a whole number >= 1, got True"),
        (2, {}, "num_gpus=2: this machine has 0 GPUs that torch can use. .* use_cpu=True tries it"),
        (99_999, {"use_cpu": True}, "num_gpus=99999: .* GiB of RAM for Python and torch alone, .* Pass at most"),
        (2, {"use_cpu": True, "train_dataset": None}, "train_dataset cannot be sent to the processes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_gpus: Any, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch_module.subprocess, "Popen", None)
    arguments = {"train_dataset": pairs(4), **more}
    if "train_dataset" in more:
        arguments["train_dataset"] = (each for each in "ab")
    with pytest.raises(ConfigError, match=message):
        offloadkit.finetune("t5-small", output_dir=tmp_path / "out", num_gpus=num_gpus, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="started this process as one of 2; leave num_gpus out"):
        several_gpus.check_num_gpus(2, on_cpu=True)


def test_the_command_line_takes_num_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = CliRunner().invoke(app, ["train", "t5-small", "rows.jsonl", "--num-gpus", "2"])
    assert run.exit_code == 1
    assert "num_gpus=2: this machine has 1 GPU that torch can use" in run.output


def test_ranks_write_the_call_or_the_command_that_the_user_has_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[Any] = []

    def launch(_: Any, arguments: dict[str, Any], *others: Any, **options: Any) -> None:
        found.append(dill.loads(dill.dumps(arguments["asked"])))
        raise ConfigError("no rank is needed")

    monkeypatch.setattr(several_gpus, "launch", launch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no rank"):
        offloadkit.finetune("t5-small", "rows.jsonl", num_gpus=2, use_cpu=True, monitor=False)
    CliRunner().invoke(app, ["train", "t5-small", "rows.jsonl", "--num-gpus", "2", "use_cpu=true"])
    call, command = found
    assert command.again({"ram": "2GiB"}) == "offloadkit train t5-small rows.jsonl --ram 2GiB --num-gpus 2 use_cpu=true"
    written = call.again({"ram": "2GiB"})
    assert written.startswith('offloadkit.finetune("t5-small", "rows.jsonl", ')
    assert all(each in written for each in ("num_gpus=2", "use_cpu=True", 'ram="2GiB"'))
    for asked, shown in ((call, "a call"), (command, "a command")):
        assert (
            several_gpus.train_on_rank(lambda: as_here("a command", "a call"), is_given=False, asked=asked)[0] == shown
        )


def trained(folder: Path) -> tuple[Any, dict[str, torch.Tensor], list[Any]]:
    """A rank's result for a model passed as an object, and the messages it sends."""
    model, tokenizer = model_named("t5")
    heard: list[Any] = []
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 2, "use_cpu": True, "monitor": False}
    with as_launched(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(several_gpus, "send_to_parent", heard.append)
        patch.setattr(finetuning, "is_launched", lambda: True)
        result, weights = several_gpus.train_on_rank(
            offloadkit.finetune,
            is_given=True,
            asked=BY_FINETUNE.asked(),
            model=model,
            train_dataset=pairs(8),
            tokenizer=tokenizer,
            output_dir=folder,
            **options,
        )
    return result, weights, heard


@pytest.mark.usefixtures("one_thread")
def test_ranks_tell_what_the_monitor_shows(ranks: RankPool, tmp_path: Path) -> None:
    (result, weights, first), (nothing, none, second) = ranks.run(2, trained, folder=tmp_path / "out")
    assert (nothing, none) == (None, {})
    shown = several_gpus.SharedMonitor(2, is_drawn=False)
    assert not shown.stops()
    for rank, message in [*((0, message) for message in first[:-1]), *((1, message) for message in second)]:
        shown.on_message(rank, message)
    monitor = shown.monitor
    assert monitor is not None
    assert monitor.total_steps == 2
    assert monitor.plan is not None
    assert monitor.plan.to_dict() == result.plan.to_dict()
    records = list(monitor.telemetry.records)
    assert [record.step for record in records] == [1, 2]
    own = [message[1] for message in (*first, *second) if message[0] == "did"]
    for record in records:
        of_step = [each for each in own if each.step == record.step]
        assert len(of_step) == 2
        assert record.loss == pytest.approx(sum(each.loss for each in of_step) / 2)
        assert record.num_tokens == sum(each.num_tokens for each in of_step)
    assert not shown.stops()
    monitor.request_stop()
    assert shown.stops()
    shown.on_message(0, first[-1])
    assert monitor.figures().state == "finished"
    assert [each.name for each in monitor.figures().ranks] == ["rank 0", "rank 1"]

    given, _ = model_named("t5")
    held = dict(given.named_parameters())
    several_gpus.take_weights(given, weights)
    saved = T5ForConditionalGeneration.from_pretrained(result.model_dir)
    for name, parameter in given.named_parameters():
        assert parameter is held[name]
        assert torch.equal(parameter, saved.get_parameter(name)), name


def test_a_row_for_each_gpu() -> None:
    monitor = Monitor(display="none")
    gib = 2**30
    for number in (1, 0):
        monitor.ranks[number] = StepRecord(
            step=1,
            loss=1.0,
            num_tokens=1,
            grad_norm=1.0,
            learning_rate=1.0,
            skipped=False,
            seconds={"step": 0.5 + number},
            bytes={"vram": {"process": (4 + number) * gib}, "ram": {"process": 9 * gib}},
        )
    rows = ["GPU 0: 4 GiB VRAM, 9 GiB RAM, 500 ms a step", "GPU 1: 5 GiB VRAM, 9 GiB RAM, 1.5 s a step"]
    figures = monitor.figures()
    assert [words.rank(each) for each in figures.ranks] == rows
    assert set(rows) <= {line.strip() for line in words.summary(figures).splitlines()}
    drawn = page(figures, "x").replace("\N{NO-BREAK SPACE}", " ")
    assert all(row in drawn for row in rows)


@pytest.mark.slow(15)
def test_finetune_on_two_ranks_is_stopped_and_hands_the_model_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    watched, stops = Watched(), several_gpus.SharedMonitor.stops
    monkeypatch.setattr(several_gpus, "can_be_drawn", lambda: True)
    monkeypatch.setattr(terminal, "LogLines", lambda: watched)

    def stops_after_a_step(self: Any) -> bool:
        if self.monitor is not None and self.monitor.ranks:
            self.monitor.request_stop()
        return stops(self)

    monkeypatch.setattr(several_gpus.SharedMonitor, "stops", stops_after_a_step)
    model, tokenizer = model_named("t5")
    parameter = next(model.parameters())
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 500, "use_cpu": True, "tokenizer": tokenizer}
    result = offloadkit.finetune(model, pairs(8), output_dir=tmp_path, num_gpus=2, **options)
    assert result.stopped
    assert 0 < len(result.steps) < 500
    assert f"stopped after step {len(result.steps)} of 500" in capsys.readouterr().out
    assert result.model is model
    assert next(model.parameters()) is parameter
    saved = T5ForConditionalGeneration.from_pretrained(result.model_dir)
    assert all(torch.equal(value, saved.get_parameter(name)) for name, value in model.named_parameters())
    assert len(list((tmp_path / f"checkpoint-{len(result.steps)}").glob("states-*"))) == 2
    assert [(each.state, len(each.ranks)) for each in watched.ends] == [("stopped", 2)]
    assert not list(tmp_path.glob(".ranks-*"))
