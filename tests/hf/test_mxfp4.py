"""gpt-oss comes with experts in MXFP4: they are dequantised while they are read, whatever kernels there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.quantizers import quantizer_mxfp4
from typer.testing import CliRunner

import offloadkit
from offloadkit.doors.cli import app
from tests.hf import families, tiny

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
ROWS = [{"input_ids": families.tokens((6,), seed).tolist()} for seed in range(4)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has what transformers needs to keep weights in MXFP4."""
    for name in ("is_triton_available", "is_kernels_available"):
        monkeypatch.setattr(quantizer_mxfp4, name, lambda *_: True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in the format of openai/gpt-oss-20b."""
    config: Any = families.tiny_config("GptOssForCausalLM")
    config.intermediate_size = 32
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = weight.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Two numbers in each byte, the lower bits first: a sign and an index of `VALUES`, times 2^(scale - 127)."""
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    signed = VALUES[numbers % 8] * (1 - 2 * (numbers // 8))
    return (signed * 2.0 ** (scales[..., None].float() - 127)).flatten(-2).mT


def test_mxfp4_weights_are_dequantised_for_training(
    folder: Path, kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(folder / "model.safetensors")
    for model in (offloadkit.from_pretrained(folder), tiny.load_model(folder, progress=False)):
        experts: Any = model.get_submodule("model.layers.1.mlp.experts")
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.1.mlp.experts.{name}"
            expected = dequantised(stored[f"{key}_blocks"], stored[f"{key}_scales"])
            assert torch.equal(getattr(experts, name).float(), expected)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert "its mxfp4 weights are dequantised, so the whole model is read into RAM" in capsys.readouterr().out


@pytest.mark.parametrize("door", ["finetune", "cli"])
def test_a_model_in_mxfp4_is_planned_and_finetuned(
    folder: Path, kernels: None, door: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = offloadkit.plan(folder, batch_size=2, max_input_length=6)
    assert made.fits
    assert made.num_tokens == 12
    if door == "finetune":
        offloadkit.finetune(folder, ROWS, output_dir=folder / "out", tokenizer="byte", max_steps=1, use_cpu=True)
    else:
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
        options = ["--output", str(folder / "out"), "--tokenizer", "byte", "--max-steps", "1"]
        done = CliRunner().invoke(app, ["train", str(folder), str(folder / "rows.jsonl"), *options])
        assert done.exit_code == 0, done.output
        print(done.output)
    said = capsys.readouterr().out
    assert "its mxfp4 weights are dequantised, so the whole model is read into RAM" in said, said
    assert "quantization_config" not in json.loads((folder / "out" / "model" / "config.json").read_text())
    assert not any(name.endswith("_blocks") for name in load_file(folder / "out" / "model" / "model.safetensors"))
