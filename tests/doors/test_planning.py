"""`offloadkit.plan` with budgets: text, refusals, and the command."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import tempfile
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
    modeling_utils,
)
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.device.measure import measure
from offloadkit.doors import planning
from offloadkit.doors.cli import app
from offloadkit.engine import outline
from offloadkit.errors import ConfigError, DoesNotFitError
from offloadkit.facts.calls import Asked, asked_by, in_words_here
from offloadkit.facts.changes import num_rotated
from offloadkit.hf.data import num_positions
from offloadkit.hf.presets import PRESETS
from offloadkit.hf.source import resolve
from offloadkit.planner import Plan
from offloadkit.planner.phases import cache_bytes
from offloadkit.planner.remedies import nearest_fits
from tests.hf import tiny
from tests.hf.tiny import llama_config, t5_config
from tests.messages import has_facts
from tests.planner.machines import GIB, H200

README = Path(__file__).parents[2] / "README.md"
PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(8)]


@pytest.mark.parametrize(("attention", "mask", "masked"), [("ours", None, 0), ("ours", "padded", 1), ("keep", None, 1)])
def test_a_causal_models_mask_is_planned_unless_it_is_left_out(attention: Any, mask: Any, masked: int) -> None:
    def kept(config: OffloadConfig, mask: Any) -> int:
        request = planning.PlanRequest(2, 64, None, torch.device("cpu"), mask=mask)
        work = planning.plan_source(resolve(LlamaForCausalLM(llama_config())), config, request).basis.work
        assert work is not None
        return work.stages[1].kept_bytes

    config = OffloadConfig(attention=attention, working_dtype="bf16")
    bias = 2 * 2 * 64 * 64  # SDPA makes it from a mask
    assert kept(config, mask) - kept(config, "absent") == masked * bias


@pytest.mark.slow
def test_a_card_that_is_not_here_is_planned_for() -> None:
    made = offloadkit.plan("t5-3b", vram="8GiB", ram="42GiB")
    assert made.fits
    assert made.num_parameters == 2_851_598_336
    assert made.total_bytes("vram") <= 8 * GIB
    assert made.num_tokens == 32 * (512 + 128)
    said = (
        r"FITS \(assumed card of 8 GiB\): (\S+) of 8 GiB VRAM, (\d+) of 42 GiB RAM, about (\S+) s a step, "
        r"[\d,]+ tokens/s"
    )
    found = re.fullmatch(said, str(made).splitlines()[0])
    shown = re.search(f"plan t5-3b --vram 8GiB --ram 42GiB +# {said.rsplit(', ', 1)[0]}", README.read_text())
    assert found
    assert shown
    off_by = [abs(float(a) - float(b)) for a, b in zip(found.groups(), shown.groups(), strict=True)]
    assert all(off <= most for off, most in zip(off_by, (0.11, 1.1, 0.11), strict=True)), "the README has other figures"
    text = made.details()
    assert "available" in text
    assert "Adam moments" in text
    assert " RAM -> GPU " in text
    assert not re.search(r"^\s+m?s\b", text, re.MULTILINE), "a unit must follow its number"
    assert max(map(len, text.splitlines())) <= 80
    explained = made.explain()
    assert re.search("limits? the step", explained)
    assert "more VRAM would keep" in explained


@pytest.mark.slow
def test_what_does_not_fit_says_so_and_what_would() -> None:
    made = offloadkit.plan("t5-3b", vram="8GiB", ram="30GiB", batch_size=1)
    assert not made.fits
    assert set(made.lacking()) <= {"vram", "ram"}
    assert re.search("\n  missing .* GiB", made.details())
    assert made.verdict.startswith("DOES NOT FIT (assumed card of 8 GiB): needs ")
    (lean,) = [line for line in made.explain().splitlines() if line.startswith('1. offloadkit.plan("t5-3b", ')]
    assert has_facts(lean, 'precision="compact")', " would fit: ")
    assert lean.endswith(" tokens/s")
    for words, other in nearest_fits(made):
        assert other.fits, words
    with pytest.raises(
        DoesNotFitError, match=r"needs .* GiB of (V?RAM), has .*\n(.*\n)*1\. .*precision=\"compact\".* would fit"
    ):
        planning.check_fits(made)


def test_what_is_missing_and_what_would_fit_are_said_once() -> None:
    made = offloadkit.plan("t5-base", vram="1GiB", ram="2GiB", batch_size=1)
    said = f"{made}\n{made.explain()}"
    assert set(made.lacking()) == {"vram", "ram"}
    assert said.lower().count("does not fit") == 1
    larger, *leaner = [line for line in said.splitlines() if " would fit: " in line]
    assert all('precision="tiny"' in line for line in leaner)
    asked, takes = larger.removeprefix("1. ").split("  # would fit: ")
    assert re.fullmatch(r'offloadkit\.plan\("t5-base", batch_size=1, vram="\S+GiB", ram="\S+GiB"\)', asked)
    assert eval(asked, {"offloadkit": offloadkit}).fits, "the call must fit as it is written"
    assert re.fullmatch(r"[\d,]+ tokens/s", takes)


@pytest.mark.slow
def test_fewer_rows_are_proposed_where_activations_are_too_large() -> None:
    made = offloadkit.plan("t5-base", vram="1.5GiB", ram="16GiB", batch_size=32)
    assert not made.fits
    words = [words for words, _ in nearest_fits(made)]
    assert words[0] == "batch_size=16", "the largest that fits, and no smaller one"
    assert [each.startswith("batch_size=32 with ") for each in words[1:]] == [True]


@pytest.mark.slow
def test_where_no_change_is_enough_alone_fewer_rows_in_a_smaller_budget_are_proposed() -> None:
    made = offloadkit.plan("t5-base", ram="2GiB", batch_size=4, device=torch.device("cpu"))
    (larger, whole), (fewer, less), *_ = nearest_fits(made)
    assert re.fullmatch(r"\S+ GiB of RAM", larger)
    assert re.fullmatch(r"batch_size=1 with \S+ GiB of RAM", fewer)
    assert less.fits
    assert less.budgets["ram"] < 0.9 * whole.budgets["ram"]


@pytest.mark.slow
def test_the_batch_size_is_chosen_before_what_lives_where() -> None:
    sizes = [offloadkit.plan("t5-base", vram=f"{vram}GiB", ram="30GiB").num_tokens for vram in (1.5, 2, 4, 24)]
    rows = [tokens // 640 for tokens in sizes if tokens]
    assert rows == sorted(rows)
    assert rows[0] < rows[-1] == 32


@pytest.mark.slow
def test_a_plan_says_what_batch_it_is_for() -> None:
    made = offloadkit.plan("t5-base", vram="1.5GiB", ram="30GiB", gradient_accumulation=2)
    facts = made.to_dict()
    size = facts["batch_size"]
    assert size in planning.BATCH_SIZES
    assert facts["num_tokens"] == 2 * size * (facts["input_length"] + facts["target_length"]) == 2 * size * 640
    words = f"2 x {size} x (512+128) tokens a step"
    assert f"  222,903,552 parameters in bf16, {words}" in str(made).splitlines()
    assert words in made._repr_html_()
    assert repr(made).startswith(f"Plan(222,903,552 parameters in 25 flat layers, {words}, ")
    assert len(repr(made)) < 200


def test_the_assumed_card_is_described() -> None:
    text = " ".join(offloadkit.plan("t5-small", vram="8GiB", ram="8GiB", batch_size=1).details().split())
    assert "an assumed card with 60 TFLOP/s in bf16 and VRAM of 600 GB/s, 24 GB/s from RAM of 45 GB/s, and 8" in text


def test_without_a_gpu_the_plan_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = offloadkit.plan("t5-small", offload=OffloadConfig(), device=torch.device("cpu"))
    assert made.on_cpu
    assert made.num_tokens == 8 * 640
    assert made.seconds is not None
    assert re.match(r"FITS \(on the CPU\): \S+ of \S+ GiB RAM, about ", made.verdict)
    assert "optimizer states in RAM" in made.details()
    short = offloadkit.plan("t5-small", ram="1GiB", batch_size=1, device=torch.device("cpu"))
    assert set(short.lacking()) == {"ram"}


def test_a_models_own_attention_shapes_and_frozen_parts_are_planned() -> None:
    torch.manual_seed(0)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 384}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))
    model.shared.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    made = offloadkit.plan(model, vram="4GiB", ram="8GiB", batch_size=2)
    assert made.num_parameters - made.num_trainable_parameters == 384 * 64
    assert made.tiers["vram"]["activations"] > 0
    assert all(weight.device.type == "cpu" for weight in model.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert model.config.use_cache


def test_a_classifier_is_planned() -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = BertForSequenceClassification(BertConfig(**shape, num_attention_heads=4))
    made = offloadkit.plan(model, vram="4GiB", ram="8GiB", batch_size=2)
    assert made.num_tokens == 2 * 512
    assert str(made).endswith(" parameters in bf16, 2 x 512 tokens a step")
    assert made.to_dict()["target_length"] is None


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_classifier_that_counts_end_tokens_is_planned_whole(kind: str) -> None:
    """A classifier is recognised by its class."""
    model: Any
    if kind == "t5":
        model = T5ForSequenceClassification(T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2))
        model.config.decoder_start_token_id = 0
    else:
        model = BartForSequenceClassification(BartConfig(d_model=32, encoder_layers=2, decoder_layers=2))
    made = offloadkit.plan(model, vram="4GiB", ram="8GiB", batch_size=2, max_input_length=64)
    assert made.verdict.startswith("FITS")
    assert str(made).endswith(", 2 x 64 tokens a step")
    assert made.tiers["vram"]["activations"] > 0


def test_a_plan_of_gpt2_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not find a loss in the name of GPT-2's class, and warns while it chooses the right one."""
    said: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append, raising=False)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64))
    for each in ("gpt2", model):
        assert offloadkit.plan(each, vram="8GiB", batch_size=1, max_input_length=64).seconds is not None
    assert said == []
    assert model.loss_type is None


def test_a_model_that_the_meta_device_cannot_run_is_planned_without_activations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(outline, "trace_micro_batch", refuses)
    made = offloadkit.plan("t5-small", vram="8GiB", batch_size=2)
    assert made.seconds is None
    assert "come on top" in str(made)
    assert "without a GPU" not in str(made)
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"vram": "8 apples"}, "cannot read '8 apples' as a size"),
        ({"ram": -1}, "ram: a size must be positive"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"batch_size": "many"}, "batch_size"),
        ({"max_input_length": 0}, "max_input_length must be a whole number >= 1, got 0"),
        ({"max_target_length": 2.5}, "max_target_length"),
        ({"precision": "exakt"}, "precision must be one of 'exact', 'compact', 'tiny'; got 'exakt'"),
        ({"offload": {"vram": "8GiB"}}, "offload must be an OffloadConfig, .* got {'vram'"),
    ],
)
def test_wishes_without_a_meaning_are_refused(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offloadkit.plan("t5-small", **wishes)


def test_rows_that_no_placement_holds_are_refused_before_they_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning._TaskOutline, "work", None)  # tracing would take hours
    model = LlamaForCausalLM(llama_config())
    for wishes in ({"max_input_length": 10**9}, {"max_input_length": 512, "batch_size": 10**7}):
        with pytest.raises(ConfigError, match="reduce batch_size") as error:
            offloadkit.plan(model, vram="1GiB", **wishes)
        assert has_facts(str(error.value), "1 GiB of VRAM", f"{2**30 // (4 * model.config.hidden_size):,} tokens")


@pytest.mark.slow
def test_the_batch_size_of_long_rows_is_found_from_one_row_up(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = list[int]()
    work = planning._TaskOutline.work

    def counted(outline: Any, rows: Any) -> Any:
        traced.append(rows.batch_size)
        return work(outline, rows)

    def chosen(vram: str) -> Any:
        traced.clear()
        return offloadkit.plan(LlamaForCausalLM(llama_config()), vram=vram, max_input_length=256).to_dict()[
            "batch_size"
        ]

    monkeypatch.setattr(planning._TaskOutline, "work", counted)
    for vram in ("8MiB", "1MiB"):
        from_above = chosen(vram)
        with monkeypatch.context() as patched:
            patched.setattr(planning, "_LONG_ROW", 256)
            assert chosen(vram) == from_above
            assert traced[0] == 1


def test_rows_beyond_a_table_of_positions_are_refused() -> None:
    for model, limit in (("gpt2", 1024), ("t5-small", None), ("llama-3.2-1b", None), ("gemma-2-2b", None)):
        assert num_positions(PRESETS[model].config()) == limit
    with pytest.raises(ConfigError, match=r"rows of 1025 tokens are too long: gpt2 has 1024 positions\. Pass max_"):
        offloadkit.plan("gpt2", max_input_length=1025, device=torch.device("cpu"))


def test_rows_beyond_the_positions_of_a_config_are_said(tmp_path: Any) -> None:
    def said(tokens: int, **changes: Any) -> bool:
        llama_config(**{"max_position_embeddings": 32, **changes}).save_pretrained(tmp_path)
        made = offloadkit.plan(tmp_path, vram="4GiB", batch_size=1, max_input_length=tokens)
        return "Rows of 64 tokens are longer than the 32 positions of the model's" in " ".join(str(made).split())

    assert said(64)
    assert not said(32)
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    assert not said(64, rope_parameters=scaled)
    assert num_rotated(PRESETS["t5-small"].config()) is None


def test_finetune_refuses_what_does_not_fit_before_anything_is_loaded(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    offload, rows = OffloadConfig(ram="1GiB"), tmp_path / "rows.jsonl"
    rows.write_text("cannot be read")
    with pytest.raises(DoesNotFitError, match=r"needs .* GiB of RAM, has 1 GiB"):
        offloadkit.finetune(
            "t5-base", rows, init="random", use_cpu=True, batch_size=1, offload=offload, output_dir=tmp_path / "out"
        )
    assert capsys.readouterr().out == ""


def test_without_a_gpu_a_budget_of_vram_holds_too(tmp_path: Path) -> None:
    """Without a GPU, data planned for VRAM is in RAM, whose budget is not exceeded here."""
    run: dict[str, Any] = {"init": "random", "use_cpu": True, "batch_size": 1, "output_dir": tmp_path}
    with pytest.raises(DoesNotFitError, match=r"needs .* MiB of VRAM, has 100 MiB\n.*vram=.* would fit: ") as refused:
        offloadkit.finetune("t5-small", PAIRS, vram="100MiB", **run)
    assert "of RAM, has" not in str(refused.value)
    cpu = torch.device("cpu")
    needs = offloadkit.plan("t5-small", batch_size=1, device=cpu).total_bytes("vram")
    assert offloadkit.plan("t5-small", batch_size=1, device=cpu, vram=needs).fits
    assert offloadkit.plan("t5-small", batch_size=1, device=cpu, vram=needs - 1).lacking() == {"vram": 1}


def test_the_measured_gpu_is_planned_for_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure", lambda *_, **__: H200)
    made = offloadkit.plan("t5-small", device=torch.device("cuda", 0))
    assert made.num_tokens == 32 * 640
    assert made.slowdown == pytest.approx(1)
    assert made.budgets["vram"] == H200.vram_free_bytes + H200.vram_context_bytes
    assert not made.basis.assumed  # type: ignore[union-attr]
    assert made.layers[0].dtype == "bf16"


def test_a_gpu_without_native_bf16_is_planned_for_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure", lambda *_, **__: replace(H200, supports_bf16=False))
    assert offloadkit.plan("t5-small", device=torch.device("cuda", 0)).layers[0].dtype == "fp16"


def test_all_doors_plan_a_model_in_memory_for_the_same_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(measure(torch.device("cpu")), ram_available_bytes=8 * GIB)
    monkeypatch.setattr(planning, "measure", lambda *_, **__: machine)
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: machine)
    model = LlamaForCausalLM(llama_config())
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    batch = {name: torch.ones(1, 8, dtype=torch.long) for name in ("input_ids", "labels")}
    with offloadkit.OffloadEngine(model, OffloadConfig(), example=batch) as engine:
        by_engine = engine.plan.budgets["ram"]
    by_plan = offloadkit.plan(LlamaForCausalLM(llama_config()), max_input_length=8).budgets["ram"]
    assert by_plan == by_engine == 8 * GIB + held


@pytest.mark.slow
def test_a_refusal_proposes_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk = SimpleNamespace(total=500 * GIB, used=0, free=500 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    small: dict[str, Any] = {"vram": "1.5GiB", "ram": "2.8GiB", "batch_size": 1}
    made = offloadkit.plan("t5-base", **small)
    (call,) = re.findall(r"offloadkit\.plan\(.*disk=.*\)(?=  # would)", made.explain())[:1]
    assert f'disk="{tmp_path}"' in call
    assert eval(call, {"offloadkit": offloadkit}).fits
    on_disk = offloadkit.plan("t5-base", **small, offload=OffloadConfig(disk=str(tmp_path)))
    assert on_disk.fits
    assert on_disk.total_bytes("disk") > 0
    assert "OffloadConfig(disk" not in on_disk.explain()


# -- the command, and notebook output


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_exits_with_one_where_it_does_not_fit() -> None:
    done = run("t5-small", "--vram", "1GiB", "--ram", "600MiB", "--batch-size", "1")
    assert done.exit_code == 1
    assert done.stdout.startswith("DOES NOT FIT (assumed card of 1 GiB): needs ")
    assert run("t5-small", "--vram", "2GiB", "--ram", "16GiB", "--batch-size", "1").exit_code == 0


@pytest.mark.slow
def test_the_command_prints_json() -> None:
    done = run("t5-base", "--vram", "2GiB", "--ram", "16GiB", "--precision", "compact", "--json")
    facts = json.loads(done.stdout)
    assert facts["fits"]
    assert facts["total_bytes"]["vram"] == sum(facts["bytes"]["vram"].values()) <= 2 * GIB
    assert facts["step_seconds"] > 0
    assert {"name", "num_parameters", "weights", "states", "activations"} <= set(facts["layers"][0])
    assert facts["checkpoint_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram", "plenty"), "cannot read 'plenty' as a size"),
        (("--precision", "exakt"), "precision must be one of"),
        (("--dtype", "int8"), "working_dtype must be one of"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: tuple[str, str], message: str) -> None:
    done = run("t5-small", *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_several_gpus_are_planned_for_without_any() -> None:
    wishes: dict[str, Any] = {"vram": "8GiB", "ram": "8GiB", "batch_size": 1}
    made, alone = offloadkit.plan("t5-small", num_gpus=2, **wishes), offloadkit.plan("t5-small", **wishes)
    assert re.match(
        r"FITS on 2 GPUs \(assumed card of 8 GiB\): \S+ of 8 GiB VRAM each, \S+ of 8 GiB RAM in all, about ",
        made.verdict,
    )
    assert "2 GPUs x 1 x (512+128) tokens a step" in str(made)
    assert "2 GPUs are taken to be linked by their buses alone" in " ".join(str(made).split())
    assert (made.num_tokens, made.num_parameters) == (2 * (alone.num_tokens or 0), alone.num_parameters)
    assert offloadkit.plan("t5-small", num_gpus=1, **wishes) == alone
    with pytest.raises(ConfigError, match="num_gpus must be a whole number >= 1, got 0"):
        offloadkit.plan("t5-small", num_gpus=0, **wishes)
    assert "(assumed card of 24 GiB)" in str(offloadkit.plan("t5-small", num_gpus=2, batch_size=1))
    facts = json.loads(run("t5-small", "--gpu", "H200", "--num-gpus", "16", "--json").stdout)
    assert (facts["num_gpus"], facts["communicated_bytes"].keys()) == (16, {"exchange", "gather", "norm"})
    assert "NVLink" in facts["assumed"]


@pytest.fixture(scope="module")
def too_small() -> Plan:
    return offloadkit.plan("t5-small", vram="200MiB", ram="2GiB", batch_size=2)


def test_notebooks_get_a_card() -> None:
    made = offloadkit.plan("t5-small", vram="8GiB", ram="16GiB", batch_size=2)
    html = made._repr_html_()
    assert html.count("<tr>") >= 6
    assert re.search(r"(?<!-)color:", html) is None, "text has the page's colour, light or dark"
    verdict, seconds = html.index("FITS"), html.index(" a step, predicted")
    assert verdict < html.index(">VRAM<") < html.index(">RAM<") < seconds < html.index("<details>")
    need, width = made.needs()["vram"] / made.budgets["vram"], re.findall(r"(?<!max-)width:(\d+)px", html)
    assert int(width[1]) / int(width[0]) == pytest.approx(need, abs=0.01)


@pytest.mark.slow
def test_a_card_of_what_does_not_fit_has_calls_to_copy(too_small: Plan) -> None:
    html = too_small._repr_html_()
    calls = [unescape(each) for each in re.findall(r"<ol>.*</ol>", html)[0].split("<code")[1:]]
    assert len(calls) >= 1
    for each in calls:
        call = each.split(">", 1)[1].split("</code>")[0]
        assert eval(call, {"offloadkit": offloadkit}).fits


@pytest.mark.slow
def test_commands_are_written_as_commands() -> None:
    refused = run("t5-small", "--vram", "200MiB", "--ram=2GiB", "--batch-size", "2", "--verbose")
    first = next(line for line in refused.stdout.splitlines() if line.startswith("1. "))
    command = shlex.split(first.removeprefix("1. "), comments=True)
    assert command[:3] == ["offloadkit", "plan", "t5-small"]
    assert "--verbose" in command
    assert run(*command[2:]).exit_code == 0, "the command must fit as it is written"
    assert "offloadkit.plan" not in refused.stdout


@pytest.mark.slow
def test_options_in_words_are_a_commands_in_a_command() -> None:
    disk = "optimizer states on disk (OffloadConfig(disk='/x'), or --disk /x)"
    words = f"batch_size=4, precision='tiny' and {disk} with 9 GiB of RAM"
    assert in_words_here(words) == words
    with asked_by(Asked(lambda options: None, in_a_shell=True)):
        assert in_words_here(words) == f"--batch-size 4, --precision tiny and {disk} with 9 GiB of RAM"
    plan = ("plan", "llama-3.1-70b", "--gpu", "H100", "--num-gpus", "16", "--ram", "2TiB", "--batch-size", "16")
    assert "1. --batch-size 16 with " in CliRunner().invoke(app, plan).stdout


def test_another_machine_is_planned_by_a_call_or_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command, call = '--gpu "RTX 4090" --ram 64GiB', 'offloadkit.plan(..., gpu="RTX 4090", ram="64GiB")'
    from_python, from_shell = (
        " ".join(text.split()) for text in (str(offloadkit.plan("t5-small")), run("t5-small").stdout)
    )
    assert call in from_python
    assert command not in from_python
    assert command in from_shell
    assert call not in from_shell


def test_a_refused_finetune_is_written_as_a_call(tmp_path: Path) -> None:
    """What can be written is written; rows in memory and the token are not."""
    with pytest.raises(DoesNotFitError) as refused:
        offloadkit.finetune(
            "t5-small",
            PAIRS,
            vram="100MiB",
            batch_size=1,
            init="random",
            use_cpu=True,
            output_dir=tmp_path,
            hub_token="secret",
        )
    first = next(line for line in str(refused.value).splitlines() if line.startswith("1. "))
    call = ast.parse(first.removeprefix("1. ")).body[0].value  # type: ignore[attr-defined]
    assert ast.unparse(call.func) == "offloadkit.finetune"
    assert [ast.literal_eval(each) for each in call.args] == ["t5-small", ...]
    given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    assert given.pop("vram") != "100MiB"
    assert given == {
        "batch_size": 1,
        "init": "random",
        "use_cpu": True,
        "output_dir": str(tmp_path),
        "hub_token": ...,
    }


@pytest.mark.slow
def test_the_call_that_a_refused_finetune_names_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    tiny.save_config(t5_config(), tmp_path / "tiny")
    with pytest.raises(DoesNotFitError) as refused:
        offloadkit.finetune(
            "tiny", "rows.jsonl", ram="64MiB", max_steps=1, init="random", tokenizer="byte", use_cpu=True
        )
    first = next(line for line in str(refused.value).splitlines() if line.startswith("1. "))
    result = eval(first.removeprefix("1. "), {"offloadkit": offloadkit})
    assert len(result.steps) == 1


@pytest.mark.parametrize("kind", [pytest.param("t5", marks=pytest.mark.slow), "llama"])
def test_the_keys_and_values_of_generation_are_planned(kind: str) -> None:
    """Heads are wider together than the hidden states. A causal model predicts one row at a time."""
    rows: dict[str, int] = {"max_input_length": 64} | ({"max_target_length": 16} if kind == "t5" else {})
    if kind == "t5":
        model: Any = T5ForConditionalGeneration(t5_config(d_kv=32, num_layers=3, num_decoder_layers=2))
        tokens = {"input_ids": torch.ones(2, 64).long(), "decoder_input_ids": torch.ones(2, 16).long()}
    else:
        model = LlamaForCausalLM(llama_config(head_dim=32))
        tokens = {"input_ids": torch.ones(1, 64).long()}
    work = offloadkit.plan(model.bfloat16(), gpu="RTX 4090", batch_size=2, **rows).basis.work
    kept = model(**tokens, use_cache=True).past_key_values
    caches = [kept.self_attention_cache, kept.cross_attention_cache] if kind == "t5" else [kept]
    assert cache_bytes(work) == sum(layer.keys.nbytes + layer.values.nbytes for each in caches for layer in each.layers)
