"""LoRA by `finetune` and the command line: PEFT's numbers, PEFT's files, and a plan that knows the frozen base."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    BitsAndBytesConfig,
    ByT5Tokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5ForConditionalGeneration,
    TrainingArguments,
    set_seed,
)
from typer.testing import CliRunner

import offloadkit
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError, ModelError
from offloadkit.hf.adapters import add_adapters
from offloadkit.planner.make import replanned
from tests.hf.tiny import bert_config, llama_config, t5_config
from tests.hf.training import causal_rows, losses_of_peft, t5

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

ROWS = [{key: values.tolist() for key, values in row.items()} for row in causal_rows(8)]
TEXTS = [{"input": f"say {number}", "target": f"number {number}"} for number in range(8)]
USUAL: dict[str, Any] = {"monitor": False, "batch_size": 4, "logging_steps": 1, "lr_scheduler_type": "constant"}
USUAL |= {"tokenizer": ByT5Tokenizer(), "warmup_steps": 0}


def base(vocab_size: int = 384) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama_config()
    config.vocab_size = vocab_size
    return LlamaForCausalLM(config)


@pytest.fixture(name="folder")
def base_folder(tmp_path: Path) -> Path:
    base().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return found


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows of one length."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"init_lora_weights": "gaussian"}], ids=str)
def test_steps_equal_pefts(options: dict[str, Any], tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    ours, theirs = base(), base()
    hyper: dict[str, Any] = {"learning_rate": 1e-2, "adam_epsilon": 1e-4}
    rows = ROWS[:4]
    result = offloadkit.finetune(ours, rows, lora=config, output_dir=tmp_path, max_steps=5, **USUAL, **hyper)
    set_seed(0)
    model = peft.get_peft_model(theirs, copy.deepcopy(config)).train()
    losses = losses_of_peft(model, batch_of(rows), 5)
    assert [entry["loss"] for entry in result.history if "loss" in entry] == pytest.approx(losses, abs=1e-6)
    assert losses[-1] < losses[0] - 0.01
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], weight, rtol=0, atol=1e-6, msg=name)


def test_losses_in_bf16_are_nearer_to_pefts_than_pefts_with_another_seed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(vocab_size=384, hidden_size=64, intermediate_size=128)).save_pretrained(
        tmp_path / "b"
    )
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    curves = []
    for seed in (0, 1):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
        set_seed(seed)
        adapted = peft.get_peft_model(model, copy.deepcopy(config)).train()
        curves.append(torch.tensor(losses_of_peft(adapted, batch_of(ROWS), 15)))
    hyper: dict[str, Any] = USUAL | {"learning_rate": 1e-2, "adam_epsilon": 1e-4, "batch_size": len(ROWS)}
    in_bf16 = offloadkit.OffloadConfig(working_dtype="bf16")
    options: dict[str, Any] = {"lora": config, "offload": in_bf16, "max_steps": 15, "output_dir": tmp_path / "out"}
    result = offloadkit.finetune(tmp_path / "b", ROWS, **options, **hyper)
    ours = torch.tensor([entry["loss"] for entry in result.history if "loss" in entry])
    between_seeds, from_peft = curves[0] - curves[1], ours - curves[0]
    assert curves[0][-1] < curves[0][0] - 0.2
    assert from_peft.abs().mean() < between_seeds.abs().mean()
    assert from_peft.abs().max() < between_seeds.abs().max()


def tied() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(vocab_size=384, tie_word_embeddings=True))


def experts() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
    config = Qwen3MoeConfig(vocab_size=384, num_experts_per_tok=2, pad_token_id=0, **shape)
    config.architectures = ["Qwen3MoeForCausalLM"]
    return Qwen3MoeForCausalLM(config)


def seq2seq() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(t5_config(dropout_rate=0.0))


def classifier() -> Any:
    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(bert_config(vocab_size=384, **no_dropout))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rsLoRA": (base, {"target_modules": "all-linear", "use_rslora": True}),
    "embeddings": (base, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied embeddings": (
        tied,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "embedding adapters": (base, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "tokens": (base, {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}),
    "tied tokens": (tied, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 6]}}),
    "experts": (experts, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "biases and patterns": (base, {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "bias": "lora_only"}),
    "PiSSA": (base, {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "T5": (seq2seq, {"target_modules": "all-linear", "task_type": "SEQ_2_SEQ_LM"}),
    "BERT": (classifier, {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
}
CLASSES = {"SEQ_2_SEQ_LM": peft.AutoPeftModelForSeq2SeqLM, "SEQ_CLS": peft.AutoPeftModelForSequenceClassification}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_adapters_trains_saves_merges_and_resumes_as_pefts_do(kind: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    config = peft.LoraConfig(r=4, **{"task_type": "CAUSAL_LM", **options})
    labels: list[Any] = {"T5": [[6, 7], [8, 9]], "BERT": [0, 1]}.get(kind, [[5, 6, 7], [9, 8, 7]])
    pairs = zip([[5, 6, 7], [9, 8, 7]], labels, strict=True)
    rows = [{"input_ids": ids, "labels": label} for ids, label in pairs] * 2
    make().save_pretrained(tmp_path / "base")
    run: dict[str, Any] = {**USUAL, "learning_rate": 1e-2, "adam_epsilon": 1e-4, "save_steps": 2, "max_steps": 4}

    def finetune(folder: str, **more: Any) -> offloadkit.FinetuneResult:
        lora = copy.deepcopy(config)
        return offloadkit.finetune(tmp_path / "base", rows, lora=lora, output_dir=tmp_path / folder, **run | more)

    result = finetune("whole")
    theirs = type(make()).from_pretrained(tmp_path / "base")
    set_seed(0)
    losses = losses_of_peft(peft.get_peft_model(theirs, copy.deepcopy(config)).train(), batch_of(rows), 4)
    assert [entry["loss"] for entry in result.history if "loss" in entry] == pytest.approx(losses, abs=2e-6)
    assert losses[-1] < losses[0]
    x = {"input_ids": torch.tensor([[5, 6, 7, 8]])} | ({"labels": torch.tensor([[6, 7]])} if kind == "T5" else {})
    with torch.no_grad():
        trained = result.model.eval()(**x).logits
        again = CLASSES.get(config.task_type, peft.AutoPeftModelForCausalLM).from_pretrained(result.model_dir).eval()
        torch.testing.assert_close(again(**x).logits, trained, rtol=0, atol=1e-6)
        torch.testing.assert_close(again.merge_and_unload()(**x).logits, trained, rtol=1e-5, atol=2e-6)
    finetune("parts", max_steps=2)
    finetune("parts", resume=True)
    found, wanted = saved(tmp_path / "parts" / "model"), saved(result.model_dir)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_folder_is_pefts_and_merges(folder: Path, tmp_path: Path) -> None:
    result = offloadkit.finetune(folder, TEXTS, lora=4, output_dir=tmp_path / "out", max_steps=3, **USUAL)
    assert isinstance(result.model, peft.PeftModel)
    assert (result.model_dir / "adapter_config.json").is_file()
    assert not list(result.model_dir.glob("model*"))
    again = peft.AutoPeftModelForCausalLM.from_pretrained(result.model_dir)
    trained = logits(result.model)
    assert not torch.equal(trained, logits(base()))
    assert torch.equal(logits(again), trained)
    result.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, rtol=1e-5, atol=1e-5)
    card = (result.model_dir / "README.md").read_text()
    assert "AutoPeftModelForCausalLM" in card
    assert "library_name: peft" in card


def test_a_resumed_run_has_the_adapters_of_an_uninterrupted_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: dict[str, Any] = {"lora": peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"]), "save_steps": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    offloadkit.finetune(folder, TEXTS, output_dir=whole, max_steps=4, **run, **USUAL)
    offloadkit.finetune(folder, TEXTS, output_dir=parts, max_steps=2, **run, **USUAL)
    assert (parts / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert not (parts / "checkpoint-2" / "model.safetensors").exists()
    for lora, why in ((8, "this run has 8"), (None, "from a run with LoRA")):
        with pytest.raises(ConfigError, match=why):
            offloadkit.finetune(folder, TEXTS, output_dir=parts, max_steps=4, resume=True, lora=lora, **USUAL)
    copied = shutil.copytree(parts, tmp_path / "copied")
    offloadkit.finetune(folder, TEXTS, output_dir=parts, max_steps=4, resume=True, **run, **USUAL)
    capsys.readouterr()
    for targets, said in ((["q_proj"], "lora_dropout 0.1 (now 0.3)"), (["v_proj"], "")):
        run["lora"] = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=targets)
        with nullcontext() if said else pytest.raises(ConfigError, match="target_modules"):
            offloadkit.finetune(folder, TEXTS, output_dir=copied, max_steps=3, resume=True, **run, **USUAL)
        assert said in capsys.readouterr().out
    found, wanted = saved(parts / "model"), saved(whole / "model")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_peft_model_is_trained_in_place(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    model: Any = peft.get_peft_model(t5(), config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"input_ids": [3, 4, 5], "labels": [6, 7]}, {"input_ids": [8, 9], "labels": [10]}] * 2
    result = offloadkit.finetune(model, rows, output_dir=tmp_path / "out", max_steps=2, **USUAL)
    assert result.model is model
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    with pytest.raises(ConfigError, match="has adapters already"):
        offloadkit.finetune(model, rows, lora=4, output_dir=tmp_path / "again", **USUAL)
    frozen = peft.PeftModel.from_pretrained(t5(), result.model_dir)
    with pytest.raises(ModelError, match="is_trainable=True"):
        offloadkit.finetune(frozen, rows, output_dir=tmp_path / "frozen", **USUAL)
    prompt = peft.PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2)
    with pytest.raises(ModelError, match="adds tokens to each row"):
        offloadkit.plan(peft.get_peft_model(t5(), prompt))


def test_classifiers_train_their_head_beside_the_adapters(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in (("good", "yes"), ("bad", "no"))] * 2
    base().save_pretrained(tmp_path / "base")
    result = offloadkit.finetune(tmp_path / "base", rows, lora=2, output_dir=tmp_path / "out", max_steps=2, **USUAL)
    trained = {name for name, each in result.model.named_parameters() if each.requires_grad}
    assert any("modules_to_save" in name for name in trained)
    assert any("score" in name or "classifier" in name for name in saved(result.model_dir))


def test_a_plan_counts_adapters_and_says_what_full_fine_tuning_takes(folder: Path) -> None:
    plan = offloadkit.plan(folder, lora=4, batch_size=1, max_input_length=16)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trained, whole = peft.get_peft_model(base(), config).get_nb_trainable_parameters()
    assert (plan.num_trainable_parameters, plan.num_parameters) == (trained, whole)
    (line,) = [each for each in str(plan).splitlines() if "full fine-tuning" in each]
    assert "FITS" in line
    full = offloadkit.plan(folder, batch_size=1, max_input_length=16)
    assert "full fine-tuning" not in str(full)
    assert plan.checkpoint_bytes < full.checkpoint_bytes / 2
    adapters = sum(layer.weight_bytes() for layer in plan.layers if layer.kind.is_trained)
    buffers = plan.basis.frozen_bytes - plan.basis.unsaved_bytes
    assert plan.checkpoint_peak_bytes == 2 * plan.checkpoint_bytes + adapters + buffers
    assert replanned(plan, ram="8GiB").checkpoint_peak_bytes == plan.checkpoint_peak_bytes
    of_model = offloadkit.plan(peft.get_peft_model(base(), config), batch_size=1, max_input_length=16)
    assert of_model.layers == plan.layers
    assert "full fine-tuning" in str(of_model)


def test_a_frozen_base_that_does_not_fit_streams(folder: Path) -> None:
    limits = {"gpu": "RTX 3060", "vram": "8GiB", "ram": "64GiB"}
    plan = offloadkit.plan("llama-3.1-8b", lora=16, batch_size=1, max_input_length=512, **limits)
    assert plan.fits
    assert any(where.weights == "ram" for where in plan.placements)
    assert "frozen embeddings looked up in RAM" in plan.details()


def test_what_trains_all_weights_refuses_adapters(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="times full fine-tuning"):
        offloadkit.finetune(folder, TEXTS, lora=4, baseline="measure", output_dir=tmp_path / "out", **USUAL)
    config = peft.LoraConfig(r=4, target_modules=["nothing_of_that_name"])
    with pytest.raises(ModelError, match=r"PEFT cannot adapt a LlamaForCausalLM .* Its linear layers: q_proj, k_proj"):
        offloadkit.plan(folder, lora=config)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_modules": ["q_proj", "v_porj"]}, r"target_modules .* 'v_porj', .* no module of .*mean 'v_proj'\?"),
        ({"target_modules": ["model.layers.0.mlp.up_proj", "x"]}, r"has 'x', which matches no module of the LlamaFor"),
        ({"modules_to_save": ["lm_head", "embed_tokenz"]}, r"modules_to_save .* 'embed_tokenz', .*mean 'embed_tokens'"),
        ({"exclude_modules": ["k_porj"]}, r"exclude_modules .* 'k_porj', .*did you mean 'k_proj'\?"),
        (
            {"target_parameters": ["mlp.up_proj.weight", "mlp.up_porj.weight"]},
            r"target_parameters .* no parameter .*mean 'mlp.up_proj.weight'\?",
        ),
    ],
)
def test_a_name_that_matches_nothing_is_refused_and_the_model_left_as_it_was(
    options: dict[str, Any], told: str, folder: Path, tmp_path: Path
) -> None:
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)
    model = base()
    model.lm_head.requires_grad_(False)
    before = {name: (each.clone(), each.requires_grad) for name, each in model.named_parameters()}
    for given in (model, folder):
        with pytest.raises(ConfigError, match=told):
            offloadkit.finetune(given, TEXTS, lora=config, output_dir=tmp_path / "out", **USUAL)
    with pytest.raises(ConfigError, match=told):
        offloadkit.plan(folder, lora=config)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    for name, (value, is_trained) in before.items():
        assert torch.equal(after[name], value)
        assert after[name].requires_grad == is_trained


def test_names_that_peft_or_an_expression_gives_may_match_nothing(folder: Path) -> None:
    for targets in (None, "all-linear", r".*\.(q_proj|v_porj)", ["q_proj"]):
        assert offloadkit.plan(folder, lora=peft.LoraConfig(r=4, target_modules=targets)).fits
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    config = MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    renamed = peft.LoraConfig(r=4, target_modules=["q_proj", "w1", "w2", "w3"])  # as in transformers 4
    assert add_adapters(MixtralForCausalLM(config), renamed).active_peft_config.target_modules == {"q_proj"}


def test_heads_that_peft_itself_names_may_be_missing() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    adapted = add_adapters(LlamaForSequenceClassification(llama_config()), config).active_peft_config
    assert adapted.modules_to_save == ["classifier", "score"]
    again = add_adapters(LlamaForSequenceClassification(llama_config()), adapted)
    trained = {name.split(".")[2] for name, each in again.named_parameters() if each.requires_grad}
    assert trained == {"model", "score"}
    assert again.active_peft_config == adapted, "a run may be resumed with its saved config"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target_modules": ["q_proj", "v_porj"]}, ConfigError),
        ({"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokenz": [1]}}, ModelError),
    ],
)
def test_a_refused_model_has_its_tied_modules_again(options: dict[str, Any], error: type[Exception]) -> None:
    model = LlamaForCausalLM(llama_config(tie_word_embeddings=True))
    before = dict(model.named_modules())
    with pytest.raises(error) as raised:
        add_adapters(model, peft.LoraConfig(r=4, modules_to_save=["lm_head"], **options))
    assert "base_layer" not in str(raised.value)
    assert dict(model.named_modules()) == before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(each.requires_grad for each in model.parameters())


def test_quantised_bases_are_refused_by_name(tmp_path: Path) -> None:
    config = llama_config()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"quantised .*4-bit bitsandbytes"):
        offloadkit.plan(tmp_path / "base", lora=4)


def test_adapters_train_on_4_bit_weights_as_pefts_do(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)

    def quantised() -> Any:
        given = LlamaForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map={"": "cpu"})
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(given, config)

    hyper: dict[str, Any] = {"learning_rate": 1e-2, "adam_epsilon": 1e-4}
    result = offloadkit.finetune(quantised(), ROWS[:4], output_dir=tmp_path / "out", max_steps=5, **USUAL, **hyper)
    found = [entry["loss"] for entry in result.history if "loss" in entry]
    assert found == pytest.approx(losses_of_peft(quantised().train(), batch_of(ROWS[:4]), 5), abs=1e-6)
    model = quantised()
    plan = offloadkit.plan(model, max_input_length=16)
    assert plan.fits
    assert (plan.num_trainable_parameters, plan.num_parameters) == model.get_nb_trainable_parameters()
    four_bits.bnb_4bit_use_double_quant = True  # scales of one byte, in one block of 256
    doubly = offloadkit.plan(quantised(), max_input_length=16)
    scales = [each.quant_state.absmax for each in model.parameters() if hasattr(each, "quant_state")]
    saved_bytes = sum(each.nbytes - each.numel() - 4 for each in scales)
    assert plan.basis.frozen_bytes - doubly.basis.frozen_bytes == saved_bytes > 0
    trainer = offloadkit.OffloadTrainer(
        quantised(), TrainingArguments(str(tmp_path / "trainer"), max_steps=1, report_to=[]), train_dataset=ROWS
    )
    assert trainer.train().global_step == 1
    plain = quantised().unload()
    config = peft.LoraConfig(r=4)
    refused = (
        lambda: offloadkit.plan(plain, lora=config),
        lambda: offloadkit.finetune(plain, ROWS, lora=config, output_dir=tmp_path / "no", **USUAL),
        lambda: offloadkit.OffloadTrainer(plain),
        lambda: offloadkit.OffloadEngine(plain),
    )
    for each in refused:
        with pytest.raises(ModelError, match=r"is quantised, .* add adapters by peft\.get_peft_model and pass that"):
            each()


def test_the_command_line_plans_and_trains_adapters(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out"
    file.write_text('{"input": "a", "target": "b"}\n' * 4)
    planned = CliRunner().invoke(app, ["plan", str(folder), "--lora", "8", "--max-input-length", "16"])
    assert planned.exit_code == 0, planned.output
    assert "full fine-tuning" in planned.output
    options = ["--tokenizer", "byte", "--output", str(out), "--max-steps", "1", "--no-monitor", "--batch-size", "2"]
    trained = CliRunner().invoke(app, ["train", str(folder), str(file), "--lora", "8", *options])
    assert trained.exit_code == 0, trained.output
    assert peft.LoraConfig.from_pretrained(out / "model").r == 8
    refused = CliRunner().invoke(app, ["train", str(folder), str(file), "--lora", "much", *options])
    assert refused.exit_code == 2
