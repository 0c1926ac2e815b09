"""A Trainer with images and sound: collators as the models' processors make batches, and the plan for the largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from offloadkit import OffloadConfig, OffloadTrainer
from offloadkit.hf.longest import longest_batch
from offloadkit.hf.masks import Padding
from tests import sub_models
from tests.hf.training import logged, train

Row = dict[str, Any]
ROWS: list[Row] = [{"words": 3 + 5 * (index == 4), "grid": (1, 4, 4 * (1 + 3 * (index == 2)))} for index in range(6)]
"""Row 4 has the most words, row 2 the most patches."""


def images(rows: list[Row]) -> dict[str, Any]:
    """Patches of all rows in one tensor, as Qwen2.5-VL's processor returns them; padding on the right."""
    batches = [sub_models.qwen_batch([row["grid"]], row["words"]) for row in rows]
    width = max(batch["input_ids"].shape[1] for batch in batches)
    found: dict[str, Any] = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        if name not in ("pixel_values", "image_grid_thw"):
            fill = -100 if name == "labels" else 0
            tensors = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=fill) for each in tensors]
        found[name] = torch.cat(tensors)
    return found


def vlm() -> Any:
    torch.manual_seed(0)
    return sub_models.qwen2_5_vl()


def trainer_of(folder: Path, model: Any, rows: Any, collate: Any, **options: Any) -> Any:
    from tests.hf.training import arguments

    given = arguments(folder, remove_unused_columns=False, **options)
    config = OffloadConfig(vram="8GiB", ram="8GiB")
    return OffloadTrainer(model=model, args=given, train_dataset=rows, data_collator=collate, offload=config)


def test_the_largest_batches_by_tokens_and_by_patches_keep_their_grids(tmp_path: Path) -> None:
    call, padding, note, _ = longest_batch(trainer_of(tmp_path, vlm(), ROWS, images))
    calls = [call, *call.alternatives]
    assert max(len(each.kwargs["pixel_values"]) for each in calls) == 64 + 16  # row 2 with another row
    assert max(each.kwargs["input_ids"].shape[1] for each in calls) == 1 + 16 + 1 + 3
    assert all(each.kwargs["image_grid_thw"].prod(1).sum() == len(each.kwargs["pixel_values"]) for each in calls)
    assert (padding, note, call.masks_nothing) == (Padding.UNREAD, "", False)


def test_planned_and_trained_as_by_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = vlm()
    trainer = trainer_of(tmp_path / "ours", model, ROWS, images)
    trainer.train()
    work = trainer.telemetry.plan.basis.work
    assert {stage.block.split(".")[1] for stage in work.stages if stage.block} == {"visual", "language_model"}
    assert "2 x 21 tokens" in capsys.readouterr().out
    more = {"data_collator": images}
    plain = train(tmp_path / "plain", vlm(), ROWS, Trainer, more, remove_unused_columns=False)
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-4)


def sounds(rows: list[Row]) -> dict[str, Any]:
    samples, width = max(row["samples"] for row in rows), max(row["labels"] for row in rows)
    sound = [torch.full((1, row["samples"]), 0.1).cumsum(1).sin() for row in rows]
    pad = torch.nn.functional.pad
    return {
        "input_values": torch.cat([pad(each, (0, samples - each.shape[1])) for each in sound]),
        "attention_mask": torch.cat(
            [pad(torch.ones_like(each).long(), (0, samples - each.shape[1])) for each in sound]
        ),
        "labels": torch.tensor([[3] * row["labels"] + [-100] * (width - row["labels"]) for row in rows]),
    }


def test_sound_is_measured_in_samples_not_in_labels_alone(tmp_path: Path) -> None:
    rows = [{"samples": 400 + 400 * (index == 3), "labels": 2 + 3 * (index == 1)} for index in range(5)]
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, sub_models.wav2vec2(), rows, sounds)
    call, *_ = longest_batch(trainer)
    shapes = [{name: tuple(value.shape) for name, value in each.kwargs.items()} for each in (call, *call.alternatives)]
    assert max(each["input_values"] for each in shapes) == (2, 800)
    assert max(each["labels"] for each in shapes) == (2, 5)
    trainer.train()
    assert len(logged(trainer, "loss")) == 3
    assert trainer.telemetry.plan.basis.work is not None


def spectra(rows: list[Row]) -> dict[str, Any]:
    width = max(row["labels"] for row in rows)
    labels = torch.tensor([[3 + row["labels"]] * row["labels"] + [-100] * (width - row["labels"]) for row in rows])
    return {
        "input_features": torch.cat([sub_models.whisper_batch(1)["input_features"] for _ in rows]),
        "labels": labels,
    }


def test_whisper_is_planned_for_its_frames_and_longest_labels(tmp_path: Path) -> None:
    rows = [{"labels": 2 + 5 * (index == 3)} for index in range(5)]
    torch.manual_seed(0)
    trainer = trainer_of(tmp_path / "ours", sub_models.whisper(), rows, spectra)
    call, *_ = longest_batch(trainer)
    shapes = [{name: tuple(value.shape) for name, value in each.kwargs.items()} for each in (call, *call.alternatives)]
    assert {"input_features": (2, 8, 48), "labels": (2, 7)} in shapes
    trainer.train()
    torch.manual_seed(0)
    more = {"data_collator": spectra}
    plain = train(tmp_path / "plain", sub_models.whisper(), rows, Trainer, more, remove_unused_columns=False)
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-4)
