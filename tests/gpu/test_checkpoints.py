"""Checkpoints on a GPU: arrays in VRAM pass through pinned pieces, and the GPU's random state is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.checkpoint import arrays
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.planner import placed, possible
from tests.models import TinyLM, tokens, train


@pytest.mark.parametrize("precision", ["exact", "tiny"])
def test_a_run_goes_on_under_another_placement(tmp_path: Path, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 4096)
    placements = [Placement(step="gpu", gradients="vram", states="vram"), Placement(weights="ram")]
    batches = tokens(4, "cuda")
    for first, then in (placements, placements[::-1]):
        found = []
        for placement in (first, then):
            torch.manual_seed(len(found))
            config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", precision=precision, placement=placement)
            with OffloadEngine(TinyLM(dropout=0.2), config, device="cuda") as engine:
                if not found:
                    train(engine, batches[:2])
                    engine.save_checkpoint(tmp_path / "saved")
                else:
                    engine.load_checkpoint(tmp_path / "saved")
                train(engine, batches[2:])
                found.append(engine.master_weights())
        assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


@pytest.mark.filterwarnings("ignore:the checkpoint has the weights alone")
@pytest.mark.parametrize("options", [{"checkpoint_precision": "compact"}, {"save_only_model": True}], ids=str)
def test_smaller_checkpoints_are_resumed_alike_under_any_placement_and_on_the_cpu(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments in VRAM are rounded in pieces, to the bits of moments in RAM."""
    monkeypatch.setattr(arrays, "PIECE_BYTES", 4096)
    in_vram, in_ram = Placement(step="gpu", gradients="vram", states="vram"), Placement(weights="ram")

    def engine_of(placement: Placement, device: str = "cuda") -> OffloadEngine:
        config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", placement=placement, **options)
        return OffloadEngine(TinyLM(), config, device=device)

    def states(engine: OffloadEngine) -> dict[str, torch.Tensor]:
        found = {name: weight.cpu().clone() for name, weight in engine.state_dict()["module"].items()}
        for name, arrays_of in engine.state_dict()["optimizer"].items():
            found |= {f"{name} {array}": values.cpu().clone() for array, values in arrays_of.items()}
        return found

    with engine_of(in_vram) as engine:
        train(engine, tokens(3, "cuda"))
        engine.save_checkpoint(tmp_path / "from vram")
        engine.move(placed(engine.plan, [possible(in_ram, layer) for layer in engine.plan.layers]))
        engine.save_checkpoint(tmp_path / "from ram")
    begun, trained = [], []
    for folder, placement, device in (
        ("from vram", in_vram, "cuda"),
        ("from ram", in_vram, "cuda"),
        ("from vram", in_ram, "cuda"),
        ("from vram", in_ram, "cpu"),
    ):
        with engine_of(placement, device) as engine:
            engine.load_checkpoint(tmp_path / folder)
            begun.append(states(engine))
            if device == "cuda":
                train(engine, tokens(2, "cuda"))
                trained.append(states(engine))
    for first, *others in (begun, trained):
        for other in others:
            assert all(torch.equal(values, first[name]) for name, values in other.items())
