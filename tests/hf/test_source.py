"""A model's source is resolved once: where it is read, what is cached, and the choices of a family's entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, ByT5Tokenizer, LlamaForCausalLM, Speech2TextConfig

import offloadkit
from offloadkit.doors.planning import PlanRequest, plan_source
from offloadkit.errors import ModelError, ModelNotFoundError
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf import patches, source
from offloadkit.hf.hub import nearest_preset, no_model_message, unreachable
from offloadkit.hf.patches import Family
from offloadkit.hf.source import resolve
from tests.hf import tiny

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(4)]
REQUEST = PlanRequest(2, max_input_length=8, max_target_length=4, device=None)


def test_training_by_name_reads_the_config_once_and_builds_the_planned_model_once(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save_config(tiny.t5_config(), tmp_path / "model")
    ByT5Tokenizer().save_pretrained(folder)
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    monkeypatch.setattr(AutoConfig, "from_pretrained", counted("config", AutoConfig.from_pretrained))
    monkeypatch.setattr(source, "build", counted("on meta", source.build))
    monkeypatch.setattr("offloadkit.doors.finetuning.on_hub", lambda data: True)  # makes two plans
    options: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "use_cpu": True, "save_strategy": "no"}
    offloadkit.finetune(folder, PAIRS, init="random", tokenizer="byte", output_dir=tmp_path / "out", **options)
    assert sorted(calls) == ["config", "on meta"]


def test_a_plan_leaves_the_model_that_it_was_made_from_unchanged() -> None:
    found = resolve("t5-small", init="random")
    config = OffloadConfig(vram="4GiB", ram="8GiB")
    first = plan_source(found, config, REQUEST)
    model: Any = found.on_meta
    assert "forward" not in vars(model.lm_head)
    assert not any("forward" in vars(module) or "compute_bias" in vars(module) for module in model.modules())
    assert model.config.use_cache
    assert model.config._attn_implementation == "sdpa"
    assert plan_source(found, config, REQUEST) == first
    other = plan_source(found, OffloadConfig(vram="4GiB", ram="8GiB", working_dtype="fp32"), REQUEST)
    assert {layer.dtype for layer in other.layers} == {"fp32"}
    assert plan_source(found, config, REQUEST) == first


def test_rows_change_the_head_and_not_what_was_read(tmp_path: Path) -> None:
    found = resolve(tiny.save_config(tiny.bert_config(), tmp_path), init="random")
    two = found.on_meta.config.num_labels
    three = found.for_rows("classification", {0: "a", 1: "b", 2: "c"})
    assert (two, three.on_meta.config.num_labels) == (2, 3)
    assert three.config is found.config
    assert found.config.num_labels == 2
    causal = resolve(tiny.save_config(tiny.llama_config(), tmp_path / "causal"), init="random")
    shown = causal.on_meta
    assert causal.for_rows("causal", None).on_meta is shown


def test_the_attention_of_a_family_follows_from_its_entry_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save_config(tiny.llama_config(), tmp_path)

    def attentions() -> set[str]:
        found = resolve(folder, init="random")
        models: list[Any] = [found.on_meta, found.load(progress=False)]
        for model in models:
            patches.patched(model, OffloadConfig(), kernels=False)
        return {model.config._attn_implementation for model in models}

    assert attentions() == {"sdpa"}
    monkeypatch.setattr(patches, "FAMILIES", (*patches.FAMILIES, Family(model_types=("llama",), attention="eager")))
    assert attentions() == {"eager"}


def test_an_attention_of_ours_is_one_that_a_family_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LongT5Config, T5Config
    from transformers.models.longt5.modeling_longt5 import LongT5Attention
    from transformers.models.t5.modeling_t5 import T5Attention

    named = {name for family in patches.FAMILIES for name in family.biased_attention}
    assert {"T5Attention", "LongT5Attention", "UdopAttention"} <= named

    def is_fused(base: type[Any], config: Any) -> bool:
        """Whether offloadkit's attention replaces the attention of a new class."""
        attention = type("Attention", (base,), {"__module__": base.__module__})(config, True, layer_idx=0)
        patches.fuse_attention(attention)
        return bool(attention.config._attn_implementation == patches.NAME)

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "num_heads": 2, "attn_implementation": "eager"}
    assert is_fused(T5Attention, T5Config(**sizes))
    assert is_fused(LongT5Attention, LongT5Config(**sizes))
    monkeypatch.setattr(patches, "FAMILIES", ())
    assert not is_fused(T5Attention, T5Config(**sizes))


def test_a_model_in_memory_is_not_read_again() -> None:
    model = tiny.load_model("t5-small", init="random", device="meta")
    found = resolve(model)
    assert found.model is model
    assert found.config is model.config
    assert found.on_meta is not model
    assert found.on_meta is found.on_meta


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors"])
def test_finetune_refuses_a_quantised_checkpoint_by_name(tmp_path: Path, method: str) -> None:
    config: Any = tiny.t5_config()
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path / "quantised")
    rows = [{"input": "a", "target": "b"}]
    with pytest.raises(ModelError, match=f"quantised.*quantization_config.*{method}"):
        offloadkit.finetune(str(tmp_path / "quantised"), rows, output_dir=str(tmp_path / "out"), tokenizer="byte")
    config.quantization_config = {"quant_method": method, "dequantize": True}
    config.save_pretrained(tmp_path / "dequantised")
    resolve(tmp_path / "dequantised").check_trainable(reads_weights=True)
    resolve(tmp_path / "quantised", init="random").check_trainable(reads_weights=False)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama3-8b", "llama-3-8b"),
        ("Llama3.1-8B", "llama-3.1-8b"),
        ("t5_3B", "t5-3b"),
        ("qwen-2.5-7b", "qwen2.5-7b"),
        ("mistral7b", "mistral-7b"),
        ("gpt-2", "gpt2"),
        ("T5-XL", "t5-3b"),
        ("mistral", "mistral-7b"),
        ("google/t5-3b", "google-t5/t5-3b"),
        ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen/Qwen2.5-7B-Chat", "Qwen/Qwen2.5-7B"),
        ("myorg/mymodel", None),
        ("bert-base-uncased", None),
    ],
)
def test_a_name_that_is_nearly_a_presets_gets_one_guess(name: str, meant: str | None) -> None:
    assert nearest_preset(name) == meant
    there, away = no_model_message(name, "the hub knows none"), str(unreachable(name, "model"))
    for message, otherwise in ((there, "a hub name such as"), (away, "check the connection and run again")):
        assert len(message.split()) < 45
        assert message.count("did you mean") == (meant is not None)
        assert (f"did you mean '{meant}'?" if meant else otherwise) in message
        assert ". " not in message, "one sentence"


def test_other_speech_models_are_refused_by_plan_and_finetune_and_name_the_trainer(tmp_path: Path) -> None:
    config = Speech2TextConfig(architectures=["Speech2TextForConditionalGeneration"], decoder_start_token_id=1)
    folder = str(tiny.save_config(config, tmp_path / "speech"))
    rows = [{"text": "a"}]
    for refused in (lambda: offloadkit.plan(folder), lambda: offloadkit.finetune(folder, rows, tokenizer="byte")):
        with pytest.raises(ModelError, match=r"Speech2TextForCond.* offloadkit\.OffloadSeq2SeqTrainer"):
            refused()


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_weights_that_transformers_can_dequantise_are_read_so_on_every_gpu(tmp_path: Path, method: str) -> None:
    config: Any = tiny.llama_config()
    config.quantization_config = {"quant_method": method}
    source = resolve(tiny.save_config(config, tmp_path / method))
    source.check_trainable(reads_weights=True)
    read: Any = source.training_config()
    assert read.quantization_config["dequantize"] is True


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny.llama_config())
    model.save_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    for each in [each for each in weights if each.endswith("proj.weight")]:
        scale = weights[each].abs().max() / 448
        weights[f"{each}_scale_inv"] = scale.reshape(1, 1)
        weights[each] = (weights[each] / scale).to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = resolve(tmp_path).load()
    assert not getattr(read, "is_quantized", False)
    torch.testing.assert_close(read.get_parameter(name).float(), model.get_parameter(name), rtol=0.1, atol=1e-3)


def test_plan_refuses_4_bit_weights_by_name(tmp_path: Path) -> None:
    config: Any = tiny.t5_config()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = tiny.save_config(config, tmp_path / "4bit")
    with pytest.raises(ModelError, match=r"4bit.* quantised \(quantization_config .*4-bit bitsandbytes\).*: pass the "):
        offloadkit.plan(folder)


def test_gguf_is_named_and_the_original_asked_for(tmp_path: Path) -> None:
    tiny.save_config(tiny.llama_config(), tmp_path / "with config")
    (tmp_path / "alone").mkdir()
    for name in ("alone", "with config"):
        (tmp_path / name / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    given = [tmp_path / "alone", tmp_path / "with config", tmp_path / "alone" / "model-Q4_K_M.gguf"]
    for model in (*given, "owner/Llama-3-8B-GGUF"):
        with pytest.raises(ModelError, match=r"in GGUF, .*: pass the model that it was converted from"):
            offloadkit.plan(model)


def test_a_file_of_rows_in_the_place_of_a_model_is_told_the_order(tmp_path: Path) -> None:
    for name, message in (("rows.jsonl", "the model comes first, then the rows"), ("config.json", "pass its folder")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ModelNotFoundError, match=message):
            offloadkit.plan(tmp_path / name)


def test_a_folder_of_adapters_names_what_loads_it(tmp_path: Path) -> None:
    for config, loader in (("{}", "ForCausalLM"), ('{"task_type": "SEQ_2_SEQ_LM"}', "ForSeq2SeqLM")):
        (tmp_path / "adapter_config.json").write_text(config)
        with pytest.raises(ModelError, match=rf"adapter of PEFT, .*AutoPeftModel{loader}"):
            offloadkit.plan(tmp_path)
