"""Presets, loading and initial weights of HuggingFace models."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    LlamaConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)
from transformers.models.auto.auto_factory import _LazyAutoMapping

import offloadkit
from offloadkit.errors import ConfigError, ModelError, ModelNotFoundError
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.load import infer_task
from offloadkit.hf.patches import patched
from offloadkit.hf.presets import PRESETS
from offloadkit.hf.source import resolve
from tests.hf import tiny

PARAMETERS = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-small": 76_961_152,
    "google/t5-v1_1-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "google/flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
}
"""Counted in the checkpoints on the hub."""


DECODERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b-chat-hf": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b-instruct": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b-base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b-it": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "mistral-7b": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
"""Counted in the checkpoints on the hub; a tied head counts once."""


@pytest.mark.parametrize("name", DECODERS)
def test_preset_of_a_decoder_has_the_parameters_of_the_checkpoint(name: str) -> None:
    """All layers of a decoder have the same number of parameters, so one layer is built on the meta device."""
    preset = PRESETS[name]
    number = preset.config().num_hidden_layers
    one_layer = {"n_layer" if preset.model_type == "gpt2" else "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(replace(preset, values=preset.values | one_layer).config())
    of_layer = sum(weight.numel() for key, weight in model.named_parameters() if ".0." in key)
    assert sum(weight.numel() for weight in model.parameters()) + (number - 1) * of_layer == DECODERS[name]


def test_every_preset_is_checked_and_builds_whole() -> None:
    checked = {PRESETS[name].values["architectures"][0] for name in (*PARAMETERS, *DECODERS)}
    assert checked == {preset.values["architectures"][0] for preset in PRESETS.values()}
    shapes = {str(PRESETS[name].values) for name in DECODERS}
    assert shapes == {str(preset.values) for preset in PRESETS.values() if preset.model_type != "t5"}
    source = resolve("llama-3.2-1b", init="random")
    assert source.on_meta.num_parameters() == DECODERS["llama-3.2-1b"]
    assert (source.task, source.config.rope_parameters["factor"]) == ("causal", 32.0)


def test_a_presets_files_are_those_of_its_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda location, **_: read.append(location))
    assert resolve("llama-3.2-1b").config is None
    assert read == ["meta-llama/Llama-3.2-1B"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_has_the_parameters_of_the_checkpoint(name: str) -> None:
    model = resolve(name, init="random").on_meta
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.config.vocab_size == 32_128


def test_preset_aliases_lead_to_the_name_on_the_hub() -> None:
    for alias, hub_name in {
        "t5-3b": "google-t5/t5-3b",
        "t5-v1_1-xl": "google/t5-v1_1-xl",
        "t5-v1_1-3b": "google/t5-v1_1-xl",
        "flan-t5-xxl": "google/flan-t5-xxl",
        "google/flan-t5-11b": "google/flan-t5-xxl",
    }.items():
        assert PRESETS[alias].hub_name == hub_name
        assert PRESETS[alias] is PRESETS[hub_name]
    assert len({preset.hub_name for preset in PRESETS.values() if preset.model_type == "t5"}) == 15


def test_v1_0_ties_its_head_and_v1_1_does_not() -> None:
    old, new = (resolve(name, init="random").on_meta for name in ("t5-small", "flan-t5-small"))
    assert isinstance(old, T5ForConditionalGeneration)
    assert isinstance(new, T5ForConditionalGeneration)
    assert old.lm_head.weight is old.shared.weight
    assert new.lm_head.weight is not new.shared.weight
    for model in (old, new):
        assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert (old.config.scale_decoder_outputs, new.config.scale_decoder_outputs) == (True, False)
    assert new.config.is_gated_act
    assert not old.config.is_gated_act


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_model_has_one_dtype_everywhere_and_comes_again_with_the_seed(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = tiny.save_config(tiny.t5_v1_1_config(), tmp_path)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(tiny.load_model(folder, init="random", dtype=dtype).state_dict())
    assert {value.dtype for value in drawn[0].values()} == {dtype}
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not torch.equal(drawn[0]["shared.weight"], drawn[2]["shared.weight"])


IMPORTED = """
import importlib.abc, sys, torch
from transformers import T5Config
from offloadkit.hf.load import build

class Notes(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.endswith(".modeling_t5"):
            print(torch.get_default_device())

sys.meta_path.insert(0, Notes())
build(T5Config(d_model=8, d_ff=8, num_layers=1, vocab_size=8), "seq2seq", None, torch.device("meta"))
"""


@pytest.mark.slow
def test_a_models_module_is_not_imported_on_the_meta_device() -> None:
    """torch 2.6 can import the module only while the CPU is the default device."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["cpu"]


def test_random_weights_are_spread_as_t5_spreads_them(tmp_path: Path) -> None:
    config = tiny.t5_v1_1_config(d_model=64, d_kv=16, num_heads=4, d_ff=128, vocab_size=2048)
    torch.manual_seed(0)
    model = tiny.load_model(tiny.save_config(config, tmp_path), init="random")
    spread = {name: value.std().item() for name, value in model.state_dict().items()}
    attention = "encoder.block.0.layer.0.SelfAttention"
    assert spread["shared.weight"] == pytest.approx(1.0, rel=0.05)
    assert spread[f"{attention}.q.weight"] == pytest.approx((64 * 16) ** -0.5, rel=0.05)
    assert spread[f"{attention}.k.weight"] == pytest.approx(64**-0.5, rel=0.05)
    assert spread["decoder.block.1.layer.2.DenseReluDense.wo.weight"] == pytest.approx(128**-0.5, rel=0.05)
    assert spread["lm_head.weight"] == pytest.approx(64**-0.5, rel=0.05)
    tokens = torch.randint(2, 2048, (4, 20))
    assert model(input_ids=tokens, labels=tokens).loss.item() < 2 * torch.tensor(2048.0).log().item()


def test_head_of_its_own_survives_tying_saving_and_reading(tmp_path: Path) -> None:
    model = tiny.load_model(tiny.save_config(tiny.t5_v1_1_config(), tmp_path / "config"), init="random")
    model.tie_weights()
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is False
    again = tiny.load_model(tmp_path / "model", progress=False)
    again.tie_weights()
    assert isinstance(again, T5ForConditionalGeneration)
    assert again.lm_head.weight is not again.shared.weight
    assert again.encoder.embed_tokens.weight is again.shared.weight
    assert again.config.scale_decoder_outputs is False
    assert_same_weights(model, again)


def test_generation_starts_with_the_pad_token(tmp_path: Path) -> None:
    folder = tiny.save_config(tiny.t5_config(decoder_start_token_id=None), tmp_path)
    model = tiny.load_model(folder, init="random")
    generation = model.generation_config
    assert (generation.decoder_start_token_id, generation.pad_token_id, generation.eos_token_id) == (0, 0, 1)
    assert model.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=3)[0, 0] == 0  # type: ignore[operator]


def test_causal_model_without_a_pad_token_pads_with_its_end_token(tmp_path: Path) -> None:
    folder = tiny.save_config(tiny.llama_config(pad_token_id=None), tmp_path)
    assert tiny.load_model(folder, init="random").generation_config.pad_token_id == 2


@pytest.mark.parametrize("form", ["one file", "sharded", "bin"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_folder_gives_back_the_weights_in_the_dtype_asked_for(
    tmp_path: Path, form: str, dtype: torch.dtype | None
) -> None:
    model = tiny.load_model(tiny.save_config(tiny.t5_config(), tmp_path), init="random", dtype=torch.bfloat16)
    save_as(model, tmp_path, form)
    loaded = tiny.load_model(tmp_path, dtype=dtype, progress=False)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype or torch.bfloat16}
    assert not loaded.training
    assert_same_weights(model, loaded)


def test_loading_leaves_no_hooks_on_the_model(tmp_path: Path) -> None:
    folder = tiny.save_config(tiny.llama_config(), tmp_path / "a")
    tiny.load_model(folder, init="random").save_pretrained(tmp_path / "b")
    model = tiny.load_model(tmp_path / "b", progress=False)
    assert not hasattr(model, "hf_device_map")
    assert not any(hasattr(module, "_hf_hook") or module._forward_pre_hooks for module in model.modules())


def test_loading_makes_no_second_copy_in_ram(tmp_path: Path) -> None:
    """Read in fp32 and kept in bf16: the peak is the file's pages (4 bytes a parameter) plus the weights (2)."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux's /proc/self/clear_refs to start a new peak")
    config = tiny.llama_config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=64)
    tiny.load_model(tiny.save_config(config, tmp_path / "a"), init="random").save_pretrained(tmp_path / "b")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmHWM")
    model = tiny.load_model(tmp_path / "b", dtype=torch.bfloat16, progress=False)
    peak = resident_bytes("VmHWM") - before
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert peak < 7 * num_parameters


def test_bin_checkpoint_that_holds_code_is_refused(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(tmp_path / "executed"),))

    tiny.save_config(tiny.t5_config(), tmp_path)
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"shared.weight": Code()}, file, protocol=2)
    with pytest.raises(ModelError, match="cannot be read"):
        tiny.load_model(tmp_path, progress=False)
    assert not (tmp_path / "executed").exists()


def test_broken_weight_file_is_named(tmp_path: Path) -> None:
    tiny.save_config(tiny.t5_config(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(
        ModelError, match=r"the weight file .*model\.safetensors of .* cannot be read .* Put a complete copy"
    ):
        tiny.load_model(tmp_path, progress=False)


def test_folder_without_weights_says_so(tmp_path: Path) -> None:
    tiny.save_config(tiny.t5_config(), tmp_path)
    with pytest.raises(
        ModelError, match=r"has no weights: init=\"random\" \(--random-weights\) draws some.*no file named"
    ):
        tiny.load_model(tmp_path, progress=False)


def test_folder_without_config_points_at_the_folders_in_it(tmp_path: Path) -> None:
    tiny.save_config(tiny.t5_config(), tmp_path / "checkpoint-7")
    with pytest.raises(ModelNotFoundError, match=r"no config.json.*checkpoint-7"):
        tiny.load_model(tmp_path)


@pytest.mark.parametrize("name", ["./no/such/folder", "no/such/folder", "", "t5 3b", Path("t5-small-here")])
def test_missing_folder_is_not_looked_up_on_the_hub(name: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadkit.hf.source.where_to_look", lambda source: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match=r"there is no such folder.*(save_pretrained|did you mean)"):
        tiny.load_model(name)


def test_model_instance_is_converted_in_place(tmp_path: Path) -> None:
    model = T5ForConditionalGeneration(tiny.t5_config())
    taken = tiny.load_model(model, dtype=torch.bfloat16, task="seq2seq")
    assert taken is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.shared.weight


def test_model_instance_with_another_head_is_refused_and_no_other_model_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_LazyAutoMapping, "values", lambda self: pytest.fail("imports all models"))
    model = AutoModelForSequenceClassification.from_config(tiny.bert_config(num_labels=3))
    with pytest.raises(ModelError, match="cannot learn 'causal'"):
        tiny.load_model(model, task="causal")
    with pytest.raises(ModelError, match="3 labels but the dataset has 5"):
        tiny.load_model(model, task="classification", num_labels=5)


def test_labels_of_a_model_instance_get_names_where_they_have_none() -> None:
    names = {0: "bad", 1: "good"}
    unnamed = AutoModelForSequenceClassification.from_config(tiny.bert_config(num_labels=2))
    assert tiny.load_model(unnamed, task="classification", id2label=names).config.id2label == names
    assert unnamed.config.label2id == {"bad": 0, "good": 1}
    named = AutoModelForSequenceClassification.from_config(tiny.bert_config(id2label={0: "no", 1: "yes"}))
    assert tiny.load_model(named, task="classification", id2label=names).config.id2label == {0: "no", 1: "yes"}


def test_a_decoder_that_does_not_know_how_to_begin_is_told_of() -> None:
    config = tiny.t5_config()
    config.decoder_start_token_id = None
    with pytest.raises(ModelError, match=r"set model\.config\.decoder_start_token_id"):
        tiny.load_model(T5ForConditionalGeneration(config))


def test_a_folder_whose_decoder_does_not_know_how_to_begin_is_refused_before_training(tmp_path: Path) -> None:
    folder = tiny.save_config(tiny.t5_config(decoder_start_token_id=None), tmp_path / "model")
    said = r"the config of '.*model' has no decoder_start_token_id.*set decoder_start_token_id in .*config\.json"
    with pytest.raises(ModelError, match=said):
        offloadkit.plan(folder)
    rows, options = [{"input": "a", "target": "b"}], {"init": "random", "tokenizer": "byte", "use_cpu": True}
    with pytest.raises(ModelError, match=said):
        offloadkit.finetune(folder, rows, output_dir=tmp_path / "out", **options)


def test_plain_module_is_sent_to_the_engine() -> None:
    with pytest.raises(ModelError, match="OffloadEngine"):
        tiny.load_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "task"),
    [
        (tiny.t5_config(), "seq2seq"),
        (tiny.t5_config(architectures=None), "seq2seq"),
        (tiny.llama_config(), "causal"),
        (LlamaConfig(), "causal"),
        (tiny.bert_config(), "classification"),
        (tiny.llama_config(architectures=["LlamaForSequenceClassification"]), "classification"),
    ],
)
def test_task_follows_from_the_config(config: T5Config, task: str) -> None:
    assert infer_task(config) == task


def test_model_for_none_of_the_tasks_is_refused() -> None:
    with pytest.raises(ModelError, match="neither an encoder-decoder"):
        infer_task(ViTConfig())


def test_task_without_a_head_names_the_one_there_is(tmp_path: Path) -> None:
    folder = tiny.save_config(tiny.t5_config(), tmp_path)
    with pytest.raises(ModelError, match="no model for task 'causal'; it can be trained as 'seq2seq'"):
        _ = tiny.source_of(folder, task="causal").on_meta
    with pytest.raises(ConfigError, match="task must be one of"):
        _ = resolve(folder, task="translation").on_meta  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="init must be"):
        tiny.load_model("t5-small", init="zeros")


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_classification_head_has_the_labels(tmp_path: Path, init: str) -> None:
    labels = {0: "bad", 1: "good", 2: "odd"}
    tiny.load_model(
        tiny.save_config(tiny.bert_config(), tmp_path), init="random", task="classification"
    ).save_pretrained(tmp_path)
    model = tiny.load_model(tmp_path, init=init, task="classification", id2label=labels, progress=False)
    assert model.config.num_labels == 3
    assert model.config.label2id == {"bad": 0, "good": 1, "odd": 2}
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 3)


def test_byte_tokenizer_needs_no_files() -> None:
    tokenizer = resolve("t5-small").load_tokenizer("byte")
    assert isinstance(tokenizer, ByT5Tokenizer)
    assert tokenizer("A")["input_ids"] == [68, 1]


def test_tokenizer_is_the_models_own_and_can_pad(tmp_path: Path) -> None:
    tiny.save_config(tiny.llama_config(), tmp_path)
    tiny.word_tokenizer(pad_token=None).save_pretrained(tmp_path)
    tokenizer = resolve(tmp_path).load_tokenizer()
    assert tokenizer("the cat")["input_ids"] == [1, 4, 6]
    assert tokenizer.pad_token == "</s>"
    assert resolve(tmp_path).load_tokenizer(tokenizer) is tokenizer
    model = AutoModelForCausalLM.from_config(tiny.llama_config())
    model.config.name_or_path = model.name_or_path = str(tmp_path)
    assert resolve(model).load_tokenizer()("the cat")["input_ids"] == [1, 4, 6]


def test_missing_tokenizer_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pass tokenizer="):
        resolve(tiny.save_config(tiny.llama_config(), tmp_path)).load_tokenizer()
    with pytest.raises(ModelError, match="pass tokenizer="):
        resolve(AutoModelForSeq2SeqLM.from_config(tiny.t5_config())).load_tokenizer()


@pytest.mark.parametrize("config", [tiny.t5_config(), tiny.bert_config()])
@pytest.mark.parametrize("settings", [{}, {"pad_token": "<pad>"}])
def test_folder_without_a_vocabulary_is_refused_where_transformers_makes_an_empty_tokenizer(
    config: PreTrainedConfig, settings: dict[str, str], tmp_path: Path
) -> None:
    """With `settings` the folder has only a tokenizer_config.json."""
    folder = tiny.save_config(config, tmp_path)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"no tokenizer files.* pass tokenizer= .*'byte'"):
        resolve(folder).load_tokenizer()
    ByT5Tokenizer().save_pretrained(folder)
    assert resolve(folder).load_tokenizer()("A")["input_ids"] == [68, 1]


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Every parameter and buffer, after conversion to fp32."""
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name].float(), second[name].float(), rtol=0, atol=0)


def save_as(model: torch.nn.Module, folder: Path, form: str) -> None:
    """Write the weights in a format of the hub: one safetensors file, several files, or an old .bin."""
    if form == "bin":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if form == "sharded" else "1GB")  # type: ignore[operator]
        assert (folder / "model.safetensors.index.json").exists() == (form == "sharded")


def resident_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def attention_of(model: torch.nn.Module) -> set[str]:
    """The attention implementation of each module."""
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


def test_t5_is_trained_with_eager_attention_in_all_its_layers_however_it_was_loaded(tmp_path: Path) -> None:
    given = T5ForConditionalGeneration(tiny.t5_config(attn_implementation="sdpa"))
    given.save_pretrained(tmp_path)
    for model in (tiny.load_model("t5-small", init="random", device="meta"), tiny.load_model(tmp_path), given):
        undo = patched(model, OffloadConfig(), kernels=False)
        assert attention_of(model) == {"eager"}
        undo()
        assert attention_of(model) == {"sdpa"}
        patched(model, OffloadConfig(attention="keep"), kernels=False)
        assert attention_of(model) == {"sdpa"}
