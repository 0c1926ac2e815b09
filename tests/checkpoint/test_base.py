"""Frozen weights: a resumed run must share their checksums, and a checkpoint contains the written ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from offloadkit.checkpoint import base
from offloadkit.checkpoint.base import Checksums
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ModelError
from offloadkit.facts.config import Placement
from tests.models import tokens, train
from tests.offload.test_frozen import RESIDENT, STREAMED, adapted, assert_equal, config, weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


def saved_run(folder: Path, placement: Placement = STREAMED) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint after two updates; the weights then, and two updates later."""
    model = adapted(torch.bfloat16)
    with OffloadEngine(model, config(placement), device="cpu") as engine:
        train(engine, tokens(4)[:2])
        engine.save_checkpoint(folder)
        then = weights_of(model)
        train(engine, tokens(4)[2:])
    return then, weights_of(model)


@pytest.mark.parametrize(("saved", "resumed"), [(STREAMED, RESIDENT), (RESIDENT, STREAMED)])
def test_a_run_goes_on_from_its_base(tmp_path: Path, saved: Placement, resumed: Placement) -> None:
    _, expected = saved_run(tmp_path / "saved", saved)
    with safe_open(tmp_path / "saved" / "weights.safetensors", framework="pt") as file:
        assert all("lora" in name for name in file.keys())  # noqa: SIM118
    model = adapted(torch.bfloat16)
    with OffloadEngine(model, config(resumed), device="cpu") as engine:
        train(engine, tokens(1))
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, tokens(4)[2:])
    assert_equal(weights_of(model), expected)


def write(model: Any, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1


@pytest.mark.parametrize("name", ["blocks.2.up.base_layer.weight", "embed.weight"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "while the engine is open"])
def test_another_base_is_refused_and_nothing_is_changed(tmp_path: Path, name: str, late: bool) -> None:
    saved_run(tmp_path / "saved")
    model = adapted(torch.bfloat16)
    model.config = {}  # has no name
    if not late:
        write(model, name)
    with OffloadEngine(model, config(), device="cpu") as engine:
        if late:
            engine.save_checkpoint(tmp_path / "other")  # its checksums are those of the time before
            write(model, name)
        before = weights_of(model)
        with pytest.raises(ModelError, match=rf"1 frozen weights differ .* such as '{name}'.*same base model"):
            engine.load_checkpoint(tmp_path / "saved")
        assert engine.num_updates == 0
        assert_equal(weights_of(model), before)


WRITTEN = ("blocks.2.up.base_layer.weight", "embed.weight", "head.weight")


@pytest.mark.parametrize("placement", [STREAMED, RESIDENT], ids=str)
def test_frozen_weights_that_were_written_are_saved(tmp_path: Path, placement: Placement) -> None:
    """A momentum teacher is frozen and written after each step."""
    model = adapted(torch.bfloat16)
    with OffloadEngine(model, config(placement), device="cpu") as engine:
        train(engine, tokens(4)[:2])
        for name in WRITTEN:
            write(model, name)
        engine.save_checkpoint(tmp_path / "saved")
        then = weights_of(model)
        train(engine, tokens(1))
        for name in WRITTEN:
            write(model, name)
        engine.load_checkpoint(tmp_path / "saved")
        assert_equal(weights_of(model), then)
        train(engine, tokens(4)[2:])
    with safe_open(tmp_path / "saved" / "weights.safetensors", framework="pt") as file:
        assert {name for name in file.keys() if "lora" not in name} == set(WRITTEN)  # noqa: SIM118
    resumed = adapted(torch.bfloat16)
    with OffloadEngine(resumed, config(placement), device="cpu") as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert_equal(weights_of(resumed), then)
        train(engine, tokens(4)[2:])
        engine.save_checkpoint(tmp_path / "later")
    assert_equal(weights_of(resumed), weights_of(model))
    with safe_open(tmp_path / "later" / "weights.safetensors", framework="pt") as file:
        assert set(WRITTEN) <= set(file.keys()), "written by loading"


def test_a_tied_frozen_weight_is_saved_once_under_its_first_name(tmp_path: Path) -> None:
    def tied() -> Any:
        model = adapted()
        model.head.weight = model.embed.weight
        return model

    model, resumed = tied(), tied()
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        write(model, "embed.weight")
        engine.save_checkpoint(tmp_path / "saved")
    with OffloadEngine(resumed, config(), device="cpu") as engine:
        engine.load_checkpoint(tmp_path / "saved")
    assert_equal(weights_of(resumed), weights_of(model))


def test_a_write_through_data_changes_the_checksum(tmp_path: Path) -> None:
    """`.data` of a parameter in no layer has a version counter of its own."""
    model = adapted()
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        engine.save_checkpoint(tmp_path / "saved")
        model.head.weight.data.view(-1)[0] += 1
        with pytest.raises(ModelError, match="1 frozen weights differ"):
            engine.load_checkpoint(tmp_path / "saved")


def test_the_error_names_the_base(tmp_path: Path) -> None:
    model = adapted()
    model.config = type("Config", (), {"_name_or_path": "some/model"})()
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        engine.save_checkpoint(tmp_path / "saved")
        write(model, "head.weight")
        with pytest.raises(ModelError, match="of 'some/model' that the run was saved with"):
            engine.load_checkpoint(tmp_path / "saved")


def test_a_corrupt_entry_is_named(tmp_path: Path) -> None:
    model = adapted()
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        numbers = engine.snapshot()
        assert numbers.base is not None
        for broken in (None, {}, {"model": "", "xxh3": 3}, {"model": 1, "xxh3": {}}):
            with pytest.raises(ModelError, match="truncated or corrupt"):
                numbers.base.check(tmp_path, broken)


def test_a_model_without_frozen_weights_has_no_entry(tmp_path: Path) -> None:
    model = adapted().requires_grad_(True)
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        engine.save_checkpoint(tmp_path / "saved")
    assert "base" not in json.loads((tmp_path / "saved" / "run.json").read_text())


def test_checksums_are_of_dtype_shape_and_bytes_and_are_kept_until_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 64)
    some = torch.arange(100, dtype=torch.float32)
    tensors = [some, some.view(10, 10), some.view(torch.int32), torch.zeros(100), some.bfloat16(), torch.tensor(1.0)]
    found = Checksums().of({str(at): (tensor, 0) for at, tensor in enumerate(tensors)})
    assert len({*found.values()}) == len(tensors)
    of_transposed = Checksums().of({"0": (some.view(10, 10).T.contiguous().T, 0)})
    assert of_transposed == {"0": found["1"]}, "layout does not count"
    checksums = Checksums()
    first = checksums.of({"a": (some, 0)})
    other = some + 1
    assert checksums.of({"a": (other, 0)}) == first
    assert checksums.of({"a": (other, 1)}) != first
    unwatched = checksums.of({"b": (some, None)})
    assert checksums.of({"b": (other, None)}) != unwatched


def test_the_plan_counts_no_frozen_weight_in_a_checkpoint(tmp_path: Path) -> None:
    model = adapted(torch.bfloat16)
    with OffloadEngine(model, config(), device="cpu") as engine:
        trained = sum(layer.weight_bytes() for layer in engine.plan.layers if layer.kind.is_trained)
        states = sum(sum(layer.state_bytes().values()) for layer in engine.plan.layers)
        assert engine.plan.checkpoint_bytes == trained + states
