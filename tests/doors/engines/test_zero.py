"""Options translated to DeepSpeed: stages, configuration and memory. If it is installed, it trains to the same
weights."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit import DynamicLossScale, OffloadConfig, Placement
from offloadkit.deepspeed import process as deepspeed_process
from offloadkit.deepspeed import zero as zero_module
from offloadkit.deepspeed.process import GROUP_VARIABLES, restored_globals
from offloadkit.deepspeed.zero import LADDER, Zero, ds_config, forecast_line, zero_for, zero_needs
from offloadkit.errors import ConfigError, DoesNotFitError
from tests.doors.test_finetune import PAIRS, t5

GIB = 1 << 30
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results.csv"


def a_plan(num_parameters: int, *, vram: float = 0.0, ram: float = 0.0, on_cpu: bool = False) -> Any:
    """The fields of a plan that the arithmetic reads; budgets in GiB, 0 for none."""
    budgets = {tier: int(gib * GIB) for tier, gib in (("vram", vram), ("ram", ram)) if gib}
    return SimpleNamespace(
        num_parameters=num_parameters,
        layers=[SimpleNamespace(dtype="bf16")],
        basis=SimpleNamespace(work=None, hardware=None),
        on_cpu=on_cpu,
        budgets=budgets,
        needs=lambda: {"vram": GIB, "ram": 2 * GIB},
    )


@pytest.mark.parametrize(
    ("placement", "zero"),
    [
        (Placement(), Zero(2, "ram", "vram")),
        (Placement(gradients="vram"), Zero(1, "ram", "vram")),
        (Placement("vram", "vram", "vram", "keep", "gpu"), Zero(2, "vram", "vram")),
        (Placement(weights="ram", activations="checkpoint"), Zero(3, "ram", "ram", True)),
        (Placement(states="disk"), Zero(3, "disk", "vram")),
    ],
)
def test_a_placement_is_a_stage(placement: Placement, zero: Zero) -> None:
    assert zero_for(OffloadConfig(placement=placement, disk="/data"), None) == zero


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "tiny"}, r"precision='tiny': DeepSpeed keeps fp32 moments"),
        ({"optimizer": "lion"}, r"optimizer='lion': DeepSpeed uses its own AdamW"),
        (
            {"checkpoint_precision": "compact"},
            "checkpoint_precision='compact': DeepSpeed's checkpoints have fp32 moments",
        ),
        ({"compile_blocks": True}, "compile_blocks=True: leave it out"),
        ({"loss_scale": DynamicLossScale(start=1000)}, r"start=1000.*power of two"),
        ({"placement": Placement(activations="offload")}, "activations='offload' has no equivalent"),
        ({"placement": Placement(activations="cheap")}, "activations='cheap' has no equivalent"),
        ({"placement": Placement(gradients="vram", step="gpu")}, "DeepSpeed steps states in RAM on the CPU"),
        ({"placement": Placement(states="disk")}, "states='disk': name the folder"),
    ],
)
def test_what_deepspeed_has_not_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zero_for(OffloadConfig(**options), None)


def test_the_config_says_to_deepspeed_what_ours_says() -> None:
    """Read back by offloadkit's ds_config.json reader, which knows every key."""
    own = OffloadConfig(
        max_grad_norm=0.5,
        gradient_accumulation=4,
        loss_scale=DynamicLossScale(start=2.0**10, window=50, hysteresis=3, minimum=2.0),
        disk="/data",
    )
    content = ds_config(Zero(3, "disk", "ram"), own, "fp16", batch_size=8, bucket_elements=1000, pinned=True)
    read = OffloadConfig.from_deepspeed(content)
    for name in ("max_grad_norm", "gradient_accumulation", "loss_scale", "disk"):
        assert getattr(read, name) == getattr(own, name), name
    assert read.working_dtype == "fp16"
    assert content["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
    fixed = ds_config(Zero(), OffloadConfig(loss_scale=128.0), "fp16", batch_size=1, bucket_elements=None, pinned=True)
    assert OffloadConfig.from_deepspeed(fixed).loss_scale == 128.0
    unclipped = ds_config(
        Zero(), OffloadConfig(max_grad_norm=None), "bf16", batch_size=1, bucket_elements=None, pinned=False
    )
    assert OffloadConfig.from_deepspeed(unclipped).max_grad_norm is None
    assert OffloadConfig.from_deepspeed(unclipped).working_dtype == "bf16"
    assert "reduce_bucket_size" not in unclipped["zero_optimization"]


def test_the_ram_of_zero_is_what_was_measured() -> None:
    """Single-GPU runs on an H200 in bf16: within 1.5 %."""
    with RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "measured" and row["ram_peak_bytes"]]
    found = set()
    for row in rows:
        several = "GPUs" in json.loads(row["figures"] or "{}")
        if row["engine"] not in ("zero2", "zero3") or not row["num_parameters"] or several:
            continue
        zero = Zero() if row["engine"] == "zero2" else Zero(3, weights="ram")
        plan = a_plan(int(row["num_parameters"]))
        assert zero_needs(zero, plan)["ram"] == pytest.approx(int(row["ram_peak_bytes"]), rel=0.015), row["case"]
        found.add((row["engine"], row["model"]))
    assert len(found) >= 5


@pytest.mark.parametrize(
    ("size", "activations", "logits", "recomputed", "allocated"),
    [
        (2851598336, 17852540928, 8 * 128 * 32128, False, 30723766272),
        (3212749824, 28000138240, 8 * 1024 * 128256, False, 50180065792),
        (3212749824, 10774914048, 32 * 1024 * 128256, True, 64157268480),
    ],
)
def test_the_vram_of_zero_is_what_was_measured(
    size: int, activations: int, logits: int, recomputed: bool, allocated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1, W6 and W7 of benchmarks/results.csv with DeepSpeed's default buckets; activations as planned for these
    rows."""
    monkeypatch.setattr(zero_module, "activation_bytes", lambda *_, **__: activations)
    monkeypatch.setattr(zero_module, "BUCKET_ELEMENTS", 500_000_000)
    needs = zero_needs(Zero(recomputed=recomputed), a_plan(size), logits=logits)
    assert 0.99 < needs["vram"] / allocated < 1.12


def test_the_fastest_way_that_fits_is_taken() -> None:
    config = OffloadConfig()
    size = 3_000_000_000
    chosen = [zero_for(config, a_plan(size, vram=vram, ram=128)) for vram in (80, 24, 5)]
    assert chosen == [LADDER[0], LADDER[1], LADDER[3]]
    assert zero_for(OffloadConfig(activation_checkpointing=True), a_plan(size, vram=24, ram=128)) == LADDER[2]
    assert zero_for(config, a_plan(size, ram=128, on_cpu=True)) == LADDER[1]
    assert zero_for(config, a_plan(12_000, ram=1, on_cpu=True)) == LADDER[1], "a process without CUDA is small"
    with pytest.raises(DoesNotFitError, match=r"by ZeRO-3, states and weights in RAM.* of RAM, has 16 GiB.*disk="):
        zero_for(config, a_plan(size, vram=5, ram=16))
    assert zero_for(OffloadConfig(disk="/data"), a_plan(size, vram=5, ram=58)).states == "disk"
    halves = zero_needs(LADDER[0], a_plan(size), num_ranks=2)["vram"], zero_needs(LADDER[0], a_plan(size))["vram"]
    assert halves[0] == halves[1] - 18 * size // 2
    line = forecast_line(LADDER[1], a_plan(size))
    assert line.startswith("DeepSpeed ZeRO-2, states in RAM: about ")
    assert line.endswith("(offloadkit: 1 GiB and 2 GiB)")


def test_an_engine_that_is_not_there_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_process, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install 'offloadkit\[deepspeed\]'"):
        offloadkit.finetune("no-such-model", "no-such-rows.jsonl", engine="deepspeed")
    with pytest.raises(ConfigError, match="engine must be 'offloadkit' or 'deepspeed', got 'fsdp'"):
        offloadkit.finetune("no-such-model", "no-such-rows.jsonl", engine="fsdp")  # type: ignore[arg-type]


def test_ranks_of_a_host_are_bound_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(list(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, threads in (("0", "1"), ("1", "1"), ("1", "16")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)  # 16: set by a launcher
        deepspeed_process.bind_cores()
    assert bound == [[2, 3, 4], [5, 6, 7]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    deepspeed_process.bind_cores()
    assert len(bound) == 2


def test_a_process_keeps_no_variable_of_its_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GROUP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with restored_globals():
        deepspeed_process.set_group_variables()
        assert os.environ["WORLD_SIZE"] == "1"
    assert not set(GROUP_VARIABLES) & set(os.environ)


def test_a_killed_build_leaves_no_lock_that_the_next_one_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both extensions that DeepSpeed needs without a GPU."""
    built: list[str] = []

    def build(name: str) -> None:
        assert not (tmp_path / name / "lock").exists()
        assert (tmp_path / name / "offloadkit.lock").exists()
        built.append(name)

    def folder(name: str, verbose: bool) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        return str(tmp_path / name)

    adam = SimpleNamespace(load=lambda verbose: build("cpu_adam"))
    modules = {
        "deepspeed": SimpleNamespace(),
        "deepspeed.ops": SimpleNamespace(),
        "deepspeed.ops.op_builder": SimpleNamespace(AsyncIOBuilder=None, CPUAdamBuilder=lambda: adam),
        "deepspeed.comm": SimpleNamespace(),
        "deepspeed.comm.torch": SimpleNamespace(build_shm_op=lambda: build("deepspeed_shm_comm")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(deepspeed_process, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torch.utils.cpp_extension._get_build_directory", folder)
    for name in ("DS_SKIP_CUDA_CHECK", "DS_ACCELERATOR", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
    with restored_globals():
        deepspeed_process.prepare(on_cpu_steps=True)
    assert built == ["cpu_adam", "deepspeed_shm_comm"]


# -- with DeepSpeed


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], offloadkit.FinetuneResult]:
    """Weights without clipping, because AdamW alone would hide a wrong factor of the gradients."""
    model = t5(dropout=0.0)
    usual: dict[str, Any] = {"eval_dataset": PAIRS[:2], "tokenizer": "byte", "batch_size": 2, "use_cpu": True}
    usual |= {"gradient_accumulation": 2, "max_steps": 4, "max_grad_norm": 0.0, "adam_epsilon": 1e-3}
    usual |= {"learning_rate": 1e-2, "weight_decay": 0.1, "train_sampling_strategy": "sequential", "logging_steps": 1}
    result = offloadkit.finetune(model, PAIRS, output_dir=folder, **(usual | options))
    assert result.model is model
    return {name: each.detach().clone() for name, each in model.named_parameters()}, result


@pytest.mark.slow
def test_deepspeed_trains_what_offloadkit_trains(tmp_path: Path, one_thread: None) -> None:
    """DeepSpeed's stages end within 1e-6 of offloadkit's weights for one model and config; a resumed run equals a run
    without interruption."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    before = dict(os.environ)
    expected, own = trained(tmp_path / "own")
    for number, placement in enumerate(
        (Placement(), Placement(gradients="vram"), Placement(weights="ram", activations="checkpoint"))
    ):
        options: dict[str, Any] = {"engine": "deepspeed", "offload": OffloadConfig(placement=placement)}
        weights, result = trained(tmp_path / str(number), **options)
        for name, each in weights.items():
            assert torch.allclose(each, expected[name], rtol=0, atol=1e-6), (placement, name)
        assert result.metrics["eval_loss"] == pytest.approx(own.metrics["eval_loss"], rel=1e-5)
        assert [log.get("loss") for log in result.history] == pytest.approx([log.get("loss") for log in own.history])
        assert result.samples == own.samples
        saved = type(result.model).from_pretrained(result.model_dir).state_dict()
        assert all(torch.equal(saved[name], each) for name, each in weights.items())
    schedule: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0, "save_steps": 2}
    schedule |= {"engine": "deepspeed", "gradient_accumulation": 1}
    through, _ = trained(tmp_path / "through", **schedule)
    trained(tmp_path / "stopped", **schedule, max_steps=2)
    resumed, _ = trained(tmp_path / "stopped", **schedule, resume=True)
    for name, each in resumed.items():
        assert torch.allclose(each, through[name], rtol=0, atol=1e-6), name
    own_variables = {name: os.environ.get(name) for name in GROUP_VARIABLES}
    assert own_variables == {name: before.get(name) for name in GROUP_VARIABLES}
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_run_with_all_in_vram_compiles_nothing(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's AdamW steps: within 1e-6 of offloadkit's weights. A run resumed in mid-epoch reads the same rows as an
    uninterrupted run, also in an order by length with accumulation."""
    theirs = pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    monkeypatch.setitem(theirs.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda *args, **options: pytest.fail("it compiles"))
    expected, _ = trained(tmp_path / "own")
    in_vram = OffloadConfig(placement=Placement("vram", "vram", "vram", "keep", "gpu"))
    found, _ = trained(tmp_path / "theirs", engine="deepspeed", offload=in_vram, ram="2GiB")
    for name, each in found.items():
        assert torch.allclose(each, expected[name], rtol=0, atol=1e-6), name
    options: dict[str, Any] = {"engine": "deepspeed", "offload": in_vram, "lr_scheduler_type": "constant"}
    options |= {"warmup_steps": 0, "save_steps": 4, "train_sampling_strategy": "group_by_length", "max_steps": 5}
    through, _ = trained(tmp_path / "through", **options)
    trained(tmp_path / "stopped", **options | {"max_steps": 4})
    resumed, _ = trained(tmp_path / "stopped", **options, resume=True)
    assert all(torch.equal(each, through[name]) for name, each in resumed.items())


@pytest.mark.slow
def test_huggingfaces_trainer_takes_our_arguments(tmp_path: Path, one_thread: None) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9]}] * 4
    usual: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": "none", "use_cpu": True}
    with restored_globals():
        args = offloadkit.deepspeed_arguments(
            Seq2SeqTrainingArguments(output_dir=str(tmp_path), save_strategy="no", **usual), OffloadConfig()
        )
        trainer = Seq2SeqTrainer(model=t5(), args=args, train_dataset=rows)
        trainer.train()
        assert trainer.deepspeed.zero_optimization_stage() == 2
        assert trainer.deepspeed.gradient_clipping() == args.max_grad_norm
        trainer.deepspeed.destroy()
