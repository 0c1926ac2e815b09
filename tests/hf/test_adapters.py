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
    with pytest.raises(ConfigError, match=r"pass adapters of another kind as model=peft\.get_peft_model"):
        check_lora(SimpleNamespace(peft_type="IA3"))


def test_a_missing_peft_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install peft"):
        offloadkit.plan("llama-3.2-1b", lora=8)
    check_lora(None)
    check_lora(False)


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    def config(**changes: Any) -> Any:
        values = {"peft_type": "LORA", "r": 16, "target_modules": {"q", "v"}, "lora_dropout": 0.0, "use_dora": False}
        values |= {"init_lora_weights": True, "peft_version": "1"}
        return SimpleNamespace(to_dict=lambda: values | changes)

    assert check_same_adapters(tmp_path, None) is None
    with pytest.raises(ConfigError, match="from a run without LoRA"):
        check_same_adapters(tmp_path, config())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config(target_modules=["v", "q"]).to_dict()))
    assert check_same_adapters(tmp_path, config(peft_version="2", init_lora_weights="gaussian", new=3)) is None
    for changes in ({"r": 8}, {"use_dora": True}, {"target_modules": {"q"}}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ConfigError, match=f"with {next(iter(changes))} .*, and this run has .*: resume"):
            check_same_adapters(tmp_path, config(**changes))
    assert check_same_adapters(tmp_path, config(target_modules="all-linear"), is_added=False) is None
    said = check_same_adapters(tmp_path, config(lora_dropout=0.1))
    assert said == f"the adapters in {tmp_path} differ from this run's: lora_dropout 0.0 (now 0.1)"
    with pytest.raises(ConfigError, match=r"from a run with LoRA: .*rank 16"):
        check_same_adapters(tmp_path, None)


def test_the_command_line_begins_without_torch() -> None:
    code = "import sys, offloadkit.doors.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
