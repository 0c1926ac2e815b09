"""The option lora before PEFT is asked: what it takes, a checkpoint of other adapters, and a light command line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offloadkit
from offloadkit.errors import ConfigError
from offloadkit.hf.adapters import check_same_adapters
from offloadkit.hf.options import check_lora


@pytest.mark.parametrize("lora", [0, -4, 1.5, "16", [16], {"r": 16}], ids=repr)
def test_lora_is_true_a_rank_or_a_config(lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"lora must be True, a rank .*, got"):
        offloadkit.finetune("t5-small", [{"input": "a", "target": "b"}], lora=lora)


def test_a_missing_peft_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install peft"):
        offloadkit.plan("llama-3.2-1b", lora=8)
    check_lora(None)
    check_lora(False)


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    def config(rank: int) -> Any:
        return SimpleNamespace(peft_type="LORA", r=rank, lora_alpha=32, use_dora=False, use_rslora=False, bias="none")

    check_same_adapters(tmp_path, None)
    with pytest.raises(ConfigError, match="from a run without LoRA"):
        check_same_adapters(tmp_path, config(16))
    (tmp_path / "adapter_config.json").write_text(json.dumps(vars(config(16))))
    check_same_adapters(tmp_path, config(16))
    with pytest.raises(ConfigError, match="with r 16, and this run has 8"):
        check_same_adapters(tmp_path, config(8))
    with pytest.raises(ConfigError, match=r"from a run with LoRA: .*rank 16"):
        check_same_adapters(tmp_path, None)


def test_the_command_line_begins_without_torch() -> None:
    code = "import sys, offloadkit.doors.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
