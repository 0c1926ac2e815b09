"""The same work through each door: `finetune`, HuggingFace's Trainer, TRL's SFTTrainer, a loop, a DeepSpeed script.

Each door is used in the usual way: weights are read from a folder, rows are text over bytes, and the budget is the only
setting of offloadkit. Seconds and memory count the whole process.
"""

from __future__ import annotations

import gc
import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.ragged import SHORTEST_SHARE
from offloadkit import (
    FinetuneResult,
    OffloadConfig,
    OffloadEngine,
    OffloadSeq2SeqTrainer,
    OffloadTrainer,
    OffloadTrainerMixin,
    finetune,
)
from offloadkit.device.process_memory import DeviceMemory
from offloadkit.doors.engines.work import Work, plain_model
from offloadkit.facts import hardware
from offloadkit.facts.telemetry import Telemetry
from offloadkit.optim.table import DTYPES
from offloadkit.planner import Plan

Row = dict[str, Any]
_LEAST, _MOST = 32, 126
"""Range of printable ASCII."""
_TIMES_THE_WEIGHTS = 8
"""Bytes of a checkpoint and the trained model, as a multiple of the bytes of weights read."""


def prepare(task: dict[str, Any]) -> Row:
    """Write random weights and a tokenizer over bytes to the folder read by the doors."""
    from transformers import ByT5Tokenizer

    work, folder = Work(**task["work"]), Path(task["folder"])
    device = hardware.default_device()
    model: Any = plain_model(work, work.dtype or "bf16", device, device)
    model.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return {}


def folder_of(work: Work) -> Path:
    """Folder of this model's weights, in the folder for temporary files."""
    digest = hashlib.sha256((Path(work.model) / "config.json").read_bytes() + str(work.dtype).encode()).hexdigest()
    return Path(tempfile.gettempdir()) / "offloadkit-doors" / digest[:16]


def measured(work: Work, engine: str) -> Row:
    """Measurements of one door, in the format of `offloadkit.doors.engines.worker.measured`, and the plan's
    predictions."""
    device = hardware.default_device()
    vram = DeviceMemory(device)
    telemetry = Telemetry()
    telemetry.subscribe(lambda _: vram.sample())
    assert work.steps is not None
    door, num_steps = DOORS[engine.removeprefix("offloadkit-")], work.warmup + work.steps
    plan, losses = door(work, str(folder_of(work)), num_steps, telemetry)
    timed_rows = _rows(work, num_steps)[work.warmup * work.rows :]
    vram.sample()
    peaks = {name: dict(sizes) for name, sizes in telemetry.peaks.items()}
    records = list(telemetry.records)[work.warmup :]
    each = [record.seconds["step"] for record in records if "step" in record.seconds]
    return {
        "dtype": work.dtype_on(device),
        "num_tokens": sum(len(text) + 1 for row in timed_rows for text in row.values()) // work.steps,
        "step_seconds": median(each),
        "all_step_seconds": each,
        "phase_seconds": {
            name: median(record.seconds.get(name, 0.0) for record in records) for name in records[-1].seconds
        },
        "num_warmup": work.warmup,
        "last_loss": losses[-1],
        "vram_bytes": max(vram.peak_bytes, *(sizes.get("vram", 0) for sizes in peaks.values())),
        "max_allocated_bytes": 0,  # torch's counter is reset in each phase
        "peak_ram_bytes": hardware.process_peak_ram_bytes(),
        "num_parameters": plan.num_parameters,
        "figures": {
            "peaks": peaks,
            "phases": {each.name: {"vram": each.vram, "ram": each.ram} for each in plan.phases},
            **({"bound_seconds": plan.bound.step} if plan.bound else {}),
        },
        "planned": {
            "vram_bytes": plan.total_bytes("vram"),
            "ram_bytes": plan.total_bytes("ram"),
            "disk_bytes": plan.total_bytes("disk"),
            "step_seconds": plan.seconds and plan.seconds.step,
            "placements": {str(where): plan.placements.count(where) for where in dict.fromkeys(plan.placements)},
        },
    }


# -- the rows


def _rows(work: Work, num_steps: int) -> list[dict[str, str]]:
    """Random text whose tokens, including the end token, have the lengths of the work."""
    draw = random.Random(work.seed)

    def text(length: int, first: bool) -> str:
        if work.mask == "ragged" and not first:
            length = draw.randint(max(2, length // SHORTEST_SHARE), length)
        return "".join(chr(draw.randint(_LEAST + 1, _MOST)) for _ in range(length - 1))

    rows = []
    for index in range(num_steps * work.rows):
        first = index % work.batch_size == 0
        row = {"input": text(work.input_length, first)}
        rows.append(row | {"target": text(work.target_length, first)} if work.target_length else {"text": row["input"]})
    return rows


def _tokenized(work: Work, tokenizer: Any, num_steps: int) -> list[dict[str, list[int]]]:
    rows = []
    for row in _rows(work, num_steps):
        ids = tokenizer(row.get("input") or row["text"])["input_ids"]
        labels = tokenizer(row["target"])["input_ids"] if "target" in row else ids
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


# -- the doors


def _finetune(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    with tempfile.TemporaryDirectory() as output:
        return _of_result(_finetuned(work, folder, num_steps, output), telemetry)


def _whole_run(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    """`finetune` with an evaluation of doubled micro-batches and a checkpoint, resumed from that checkpoint.

    If the disk has no room for the checkpoint, only the evaluation runs.
    """
    with tempfile.TemporaryDirectory() as output:
        more: Row = {"eval_dataset": _rows(work, 4), "per_device_eval_batch_size": 2 * work.batch_size}
        weights = sum(each.stat().st_size for each in Path(folder).glob("*.safetensors"))
        if shutil.disk_usage(output).free < _TIMES_THE_WEIGHTS * weights:
            print("the disk has no room for a checkpoint: nothing is resumed")
            return _of_result(_finetuned(work, folder, num_steps, output, **more), telemetry)
        first = _finetuned(work, folder, num_steps, output, save_strategy="steps", save_steps=num_steps, **more)
        found = _of_result(first, telemetry)
        del first  # frees the model
        gc.collect()
        again = _finetuned(work, folder, num_steps + 2, output, resume=True, **more)
        telemetry.peaks["resuming"] = again.peaks["resuming"]
        return found


def _finetuned(work: Work, folder: str, num_steps: int, output: str, **more: Any) -> FinetuneResult:
    lengths: Row = {"max_input_length": work.input_length}
    lengths |= {"max_target_length": work.target_length} if work.target_length else {}
    options: Row = {"monitor": False, "save_strategy": "no", "logging_steps": 5} | lengths | more
    return finetune(
        folder,
        _rows(work, num_steps),
        output_dir=output,
        batch_size=work.batch_size,
        gradient_accumulation=work.accumulation,
        max_steps=num_steps,
        vram=work.vram,
        ram=work.ram,
        **options,
    )


def _of_result(result: FinetuneResult, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    for record in result.steps:
        telemetry.add(record)
    telemetry.peaks.update(result.peaks)
    return result.plan, [log["loss"] for log in result.history if "loss" in log]


def _model_and_tokenizer(work: Work, folder: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    made: Any = AutoModelForSeq2SeqLM if work.target_length else AutoModelForCausalLM
    return made.from_pretrained(folder, dtype=DTYPES[work.dtype or "bf16"]), AutoTokenizer.from_pretrained(folder)


def _trainer(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments, TrainingArguments

    model, tokenizer = _model_and_tokenizer(work, folder)
    kind: Any = OffloadSeq2SeqTrainer if work.target_length else OffloadTrainer
    arguments: Any = Seq2SeqTrainingArguments if work.target_length else TrainingArguments
    with tempfile.TemporaryDirectory() as output:
        trainer = kind(
            model=model,
            args=arguments(output, **_arguments(work, num_steps)),
            train_dataset=_dataset(_tokenized(work, tokenizer, num_steps)),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            offload=OffloadConfig(vram=work.vram, ram=work.ram),
            telemetry=telemetry,
        )
        return _trained(trainer)


def _sft(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    from trl import SFTConfig, SFTTrainer

    class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    model, tokenizer = _model_and_tokenizer(work, folder)
    with tempfile.TemporaryDirectory() as output:
        trainer = OffloadSFTTrainer(
            model=model,
            args=SFTConfig(output, max_length=work.input_length, **_arguments(work, num_steps)),
            train_dataset=_dataset(_rows(work, num_steps)),
            processing_class=tokenizer,
            offload=OffloadConfig(vram=work.vram, ram=work.ram),
            telemetry=telemetry,
        )
        return _trained(trainer)


def _loop(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    model, tokenizer = _model_and_tokenizer(work, folder)
    rows, collate = _tokenized(work, tokenizer, num_steps), DataCollatorForSeq2Seq(tokenizer, model=model)
    device = hardware.default_device()
    batches = DataLoader(rows, batch_size=work.batch_size, collate_fn=collate, pin_memory=device.type == "cuda")  # type: ignore[arg-type]
    config = OffloadConfig(gradient_accumulation=work.accumulation, vram=work.vram, ram=work.ram)
    longest: Row = {name: tensor.to(device) for name, tensor in next(iter(batches)).items()}
    losses = []
    model.train()
    with OffloadEngine(model, config, example=longest, telemetry=telemetry) as engine:
        for batch in batches:
            loss = engine(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        engine.synchronize()
        return engine.plan, [float(loss) for loss in losses]


def _deepspeed(work: Work, folder: str, num_steps: int, telemetry: Telemetry) -> tuple[Plan, list[float]]:
    """A DeepSpeed script with only the import changed, and the budget in a section of its config."""
    from transformers import DataCollatorForSeq2Seq

    import offloadkit as deepspeed

    model, tokenizer = _model_and_tokenizer(work, folder)
    config = {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": work.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": work.dtype in (None, "bf16")},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "offloadkit": {"vram": work.vram, "ram": work.ram},
    }
    model.train()
    engine, _, batches, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=_tokenized(work, tokenizer, num_steps),
        collate_fn=DataCollatorForSeq2Seq(tokenizer, model=model),
        config=config,
    )
    engine.offload.telemetry.subscribe(telemetry.add)
    losses = []
    assert batches is not None
    for batch in batches:
        loss = engine(**{name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.offload.synchronize()
    telemetry.peaks.update(engine.offload.telemetry.peaks)
    plan = engine.offload.plan
    engine.destroy()
    return plan, [float(loss) for loss in losses]


def _arguments(work: Work, num_steps: int) -> Row:
    return {
        "per_device_train_batch_size": work.batch_size,
        "gradient_accumulation_steps": work.accumulation,
        "max_steps": num_steps,
        "learning_rate": 1e-4,
        "bf16": work.dtype in (None, "bf16") and torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 5,
        "disable_tqdm": True,
    }


def _dataset(rows: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _trained(trainer: Any) -> tuple[Plan, list[float]]:
    with closing(trainer):
        trainer.train()
        return trainer.engine.plan, [log["loss"] for log in trainer.state.log_history if "loss" in log]


DOORS: dict[str, Callable[[Work, str, int, Telemetry], tuple[Plan, list[float]]]] = {
    "finetune": _finetune,
    "whole-run": _whole_run,
    "trainer": _trainer,
    "sft": _sft,
    "loop": _loop,
    "deepspeed": _deepspeed,
}
"""Doors by the engine's name in the table, without "offloadkit-"."""
