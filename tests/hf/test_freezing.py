"""`freeze`: parts of a model by name, in `finetune` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaForCausalLM, integrations

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.deepspeed.training import model_of_its_own
from offloadkit.errors import ConfigError, ModelError
from offloadkit.hf.freezing import freeze_parts
from offloadkit.hf.source import resolve
from tests.hf.tiny import llama_config
from tests.sub_models import gemma3


def frozen_of(model: Any, *names: str) -> set[str]:
    freeze_parts(model, names)
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_a_name_is_a_part_at_any_depth() -> None:
    names = {name for name, _ in gemma3().named_parameters()}
    tower = {name for name in names if name.startswith("model.vision_tower.")}
    assert frozen_of(gemma3(), "vision_tower") == frozen_of(gemma3(), "model.vision_tower") == tower
    first = {name for name in names if ".layers.0." in name}
    assert frozen_of(gemma3(), "layers.0", "embed_tokens") == first | {"model.language_model.embed_tokens.weight"}
    assert frozen_of(gemma3(), "language_model.layers.*.mlp") == {name for name in names if ".mlp." in name} - tower


def test_a_name_that_matches_nothing_is_refused_with_near_modules() -> None:
    with pytest.raises(ConfigError, match=r"'vision_towr' matches no module .*: model\.vision_tower") as raised:
        freeze_parts(gemma3(), ["vision_towr"])
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"Its outer modules: model, model\.vision_tower, model\.multi_modal"):
        freeze_parts(gemma3(), ["zzz"])
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        freeze_parts(gemma3(), ["model", "lm_head"])


@pytest.mark.parametrize("given", [7, [], [7], ""])
def test_other_values_are_refused(given: Any, tmp_path: Path) -> None:
    if given == []:
        assert offloadkit.plan("llama-3.2-1b", freeze=given).fits is not None
        return
    with pytest.raises(ConfigError, match="freeze must be the name of a module"):
        offloadkit.plan("llama-3.2-1b", freeze=given)
    with pytest.raises(ConfigError, match=r"leave freeze out\. .*exclude_modules=r'\.\*layers\.0\.\*'"):
        offloadkit.plan(LlamaForCausalLM(llama_config()), freeze="layers.0", lora=True)


def test_a_frozen_part_has_no_states_in_the_plan() -> None:
    whole, part = (offloadkit.plan("t5-small", freeze=names, gpu="RTX 4090") for names in (None, ["encoder.block"]))
    assert {layer.kind.trains for layer in whole.layers} == {"yes"}
    frozen = [layer.name for layer in part.layers if layer.kind.trains == "frozen"]
    assert frozen == [layer.name for layer in whole.layers if layer.name.startswith("encoder.block.")]
    assert sum(map(part.total_bytes, part.tiers)) < sum(map(whole.total_bytes, whole.tiers))


def test_finetune_leaves_frozen_weights_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(vocab_size=384))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = [{"input": f"question {number}", "target": "yes"} for number in range(4)]
    options: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "monitor": False, "tokenizer": ByT5Tokenizer()}
    result = offloadkit.finetune(model, rows, freeze="layers.0", output_dir=tmp_path, learning_rate=1e-2, **options)
    after = result.model.state_dict()
    assert {name for name, weight in before.items() if after[name].equal(weight)} == {
        name for name in before if ".layers.0." in name
    }


class _Arguments:
    """What DeepSpeed's door reads of TrainingArguments, and of its own config."""

    bf16, fp16, device = False, False, torch.device("cpu")

    @property
    def hf_deepspeed_config(self) -> _Arguments:
        return self

    def is_zero3(self) -> bool:
        return False


def test_deepspeeds_copy_of_a_model_has_its_parts_frozen() -> None:
    model, arguments = LlamaForCausalLM(llama_config()), _Arguments()
    made = model_of_its_own(resolve(model, freeze="embed_tokens"), OffloadConfig(), arguments)  # type: ignore[arg-type]
    integrations.deepspeed.unset_hf_deepspeed_config()
    assert {name for name, each in made.named_parameters() if not each.requires_grad} == {"model.embed_tokens.weight"}


def test_a_run_with_other_parts_frozen_is_not_resumed(tmp_path: Path) -> None:
    rows = [{"input": f"question {number}", "target": "yes"} for number in range(4)]
    options: dict[str, Any] = {"batch_size": 2, "monitor": False, "tokenizer": ByT5Tokenizer(), "save_steps": 1}

    def run(freeze: str | None, steps: int, **more: Any) -> None:
        model = LlamaForCausalLM(llama_config(vocab_size=384))
        given = options | more | {"max_steps": steps, "output_dir": tmp_path}
        offloadkit.finetune(model, rows, freeze=freeze, save_strategy="steps", **given)

    run("embed_tokens", 1)
    with pytest.raises(ModelError, match=r"not saved, such as 'model\.embed_tokens\.weight'\. .* freeze="):
        run(None, 2, resume=True)
    with pytest.raises(ModelError, match=r"not trained now, such as 'lm_head\.weight'\. .* freeze="):
        run("lm_head", 2, resume=True)
    run("embed_tokens", 2, resume=True)
