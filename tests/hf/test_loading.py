"""Weights read or drawn on request have the values of eager loading, and never a second copy in RAM."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaForCausalLM, MixtralConfig, PreTrainedModel, T5ForConditionalGeneration

from offloadkit.errors import ModelError
from offloadkit.hf import load, weight_files
from tests.hf import tiny
from tests.hf.hub_client import digest
from tests.hf.hub_server import Hub, Repository
from tests.hf.test_hub import Ask, ask, hub
from tests.hf.tiny import build_model, load_model

__all__ = ["ask", "hub"]
"""Fixtures."""

CONFIGS: dict[str, Any] = {
    "t5": tiny.t5_config(),
    "t5 v1.1": tiny.t5_v1_1_config(),
    "llama": tiny.llama_config(),
    "llama, tied": tiny.llama_config(tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2),
}


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under every name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Equal names, values, dtypes, ties and `requires_grad`."""
    first, second = all_tensors(one), all_tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert tensor.requires_grad == second[name].requires_grad, name
        assert torch.equal(tensor, second[name]), name
    for names in (first, second):
        assert len({id(tensor) for tensor in names.values()}) == len({id(tensor) for tensor in first.values()})


def written(config: Any, folder: Path, form: str = "one file") -> PreTrainedModel:
    """Saves a model with random weights in `folder`, in a format of the hub."""
    torch.manual_seed(0)
    model = load_model(tiny.save_config(config, folder), init="random", progress=False)
    if form == "bin":
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if form == "sharded" else "1GB")
    return model


def built(folder: Path, **options: Any) -> PreTrainedModel:
    """The model, read lazily, three parameters at a time in reverse order."""
    model, materialise = build_model(folder, **options)
    assert materialise is not None
    parameters = list(reversed(list(model.parameters())))
    for begin in range(0, len(parameters), 3):
        materialise(parameters[begin : begin + 3])
    return model


@pytest.mark.parametrize("form", ["one file", "sharded", "bin"])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_from_pretrained(tmp_path: Path, name: str, form: str) -> None:
    written(CONFIGS[name], tmp_path, form)
    assert_same(built(tmp_path), load_model(tmp_path, progress=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_take_the_dtype_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    written(CONFIGS["llama"], tmp_path)
    assert_same(built(tmp_path, dtype=dtype), load_model(tmp_path, dtype=dtype, progress=False))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["one file", "bin"])
def test_large_tensors_are_read_in_pieces(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(CONFIGS["t5"], tmp_path, form)
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)
    assert_same(built(tmp_path, dtype=torch.bfloat16), model.bfloat16())


def test_parameters_wait_without_memory_and_stay_the_same_objects(tmp_path: Path) -> None:
    written(CONFIGS["t5"], tmp_path)
    model, materialise = build_model(tmp_path)
    assert isinstance(model, T5ForConditionalGeneration)
    assert materialise is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    before = list(model.parameters())
    shared: Any = model.shared.weight
    shared.requires_grad_(False)
    group = torch.optim.SGD([shared]).param_groups[0]["params"]
    materialise([shared])
    assert model.shared.weight is model.lm_head.weight is model.encoder.embed_tokens.weight is group[0] is shared
    assert not shared.requires_grad
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert {name for name, parameter in model.named_parameters() if not parameter.is_meta} == {"shared.weight"}
    values = shared.clone()
    materialise(before)
    assert torch.equal(shared, values)
    materialise(before)
    called: list[Any] = []
    trainable: Any = shared.requires_grad_(True)
    trainable.register_post_accumulate_grad_hook(called.append)
    model(input_ids=torch.tensor([[3, 1]]), labels=torch.tensor([[4, 1]])).loss.backward()
    assert called == [shared]


@pytest.mark.parametrize("form", ["one file", "bin"])
def test_head_of_its_own_is_not_tied_though_the_config_says_so(tmp_path: Path, form: str) -> None:
    written(CONFIGS["t5 v1.1"], tmp_path, form)
    claims = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(claims))
    model = built(tmp_path)
    assert isinstance(model, T5ForConditionalGeneration)
    assert model.lm_head.weight is not model.shared.weight
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert model.config.tie_word_embeddings is False
    assert_same(model, load_model(tmp_path, progress=False))


def test_tied_weight_is_found_under_its_other_names(tmp_path: Path) -> None:
    model = written(CONFIGS["t5"], tmp_path)
    state = model.state_dict()
    stored = {name: value for name, value in state.items() if name != "shared.weight"}
    (tmp_path / "model.safetensors").unlink()
    torch.save(stored, tmp_path / "pytorch_model.bin")
    assert_same(built(tmp_path), model)


@pytest.mark.parametrize("strip", [True, False])
def test_names_may_have_the_base_models_prefix_or_not(tmp_path: Path, strip: bool) -> None:
    """A checkpoint of the base model in a model with a head, and vice versa."""
    model = written(tiny.bert_config(architectures=["BertForSequenceClassification"]), tmp_path)
    state = {name.removeprefix("bert.") if strip else name: value for name, value in model.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(built(tmp_path), model)


@pytest.mark.parametrize("num_labels", [2, 5])
def test_head_that_is_not_in_the_file_is_initialised_and_mentioned(tmp_path: Path, num_labels: int) -> None:
    """The head is missing in the file, or has another number of labels."""
    model: Any = written(tiny.bert_config(architectures=["BertForSequenceClassification"], num_labels=2), tmp_path)
    if num_labels == 2:
        model.bert.save_pretrained(tmp_path)
    options: dict[str, Any] = {"task": "classification", "num_labels": num_labels}
    with warnings_of_transformers() as messages:
        torch.manual_seed(7)
        built_model, materialise = build_model(tmp_path, **options)
    assert "classifier.weight" in "".join(messages)
    assert materialise is not None
    lazy: Any = built_model
    assert lazy.classifier.weight.shape == (num_labels, 16)
    assert lazy.classifier.weight.abs().sum() > 0
    materialise(list(lazy.parameters()))
    torch.manual_seed(7)
    assert_same(lazy, load_model(tmp_path, progress=False, **options))


@contextmanager
def warnings_of_transformers() -> Iterator[list[str]]:
    """Log messages of transformers' loader, which do not reach the root logger."""
    messages: list[str] = []
    logger, handler = logging.getLogger("transformers"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def test_experts_stored_one_by_one_are_converted_at_once_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    written(MixtralConfig(architectures=["MixtralForCausalLM"], **sizes, **heads), tmp_path)
    model, materialise = build_model(tmp_path)
    assert materialise is None
    assert "converted" in capsys.readouterr().out
    assert_same(model, load_model(tmp_path, progress=False))


def test_bin_file_of_old_torch_is_read_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_state(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    again, materialise = build_model(tmp_path)
    assert materialise is None
    assert "torch's format before 1.6" in capsys.readouterr().out
    assert_same(again, model)


def tiny_state(folder: Path) -> PreTrainedModel:
    """A model with only a config in `folder`."""
    model = written(CONFIGS["t5"], folder)
    (folder / "model.safetensors").unlink()
    return model


@pytest.mark.parametrize("form", ["one file", "sharded", "bin"])
def test_truncated_file_is_found_before_anything_is_read(tmp_path: Path, form: str) -> None:
    if form == "bin":
        torch.save(tiny_state(tmp_path).state_dict(), tmp_path / "pytorch_model.bin")
    else:
        written(CONFIGS["t5"], tmp_path, form)
    path = max(tmp_path.glob("*model*.bin" if form == "bin" else "*.safetensors"))
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(ModelError, match=f"^the weight file {path} of .* cannot be read"):
        build_model(tmp_path)


def test_file_that_is_gone_leaves_the_parameters_as_they_were(tmp_path: Path) -> None:
    written(CONFIGS["llama"], tmp_path)
    model, materialise = build_model(tmp_path)
    assert materialise is not None
    (tmp_path / "model.safetensors").rename(tmp_path / "aside")
    with pytest.raises(ModelError, match="cannot be"):
        materialise(list(model.parameters()))
    assert all(parameter.is_meta for parameter in model.parameters())
    (tmp_path / "aside").rename(tmp_path / "model.safetensors")
    materialise(list(model.parameters()))
    assert_same(model, load_model(tmp_path, progress=False))


def test_bar_counts_the_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[int, list[int]]] = []

    class Bar:
        def __init__(self, desc: str, total: int, **_: Any) -> None:
            bars.append((total, []))

        def update(self, num_bytes: int) -> None:
            bars[-1][1].append(num_bytes)

        def close(self) -> None:
            bars[-1][1].append(0)

    written(CONFIGS["t5"], tmp_path)
    model, materialise = build_model(tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr("transformers.utils.logging.tqdm", Bar)
    assert materialise is not None
    for parameter in model.parameters():
        materialise([parameter])
    (total, steps), num_parameters = bars[0], sum(parameter.numel() for parameter in model.parameters())
    assert total == sum(steps) == 4 * num_parameters
    assert steps.index(0) == len(steps) - 1


# ---- initial weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_weights_do_not_depend_on_order_or_company(tmp_path: Path, name: str) -> None:
    tiny.save_config(CONFIGS[name], tmp_path)
    models = []
    for make in (built, lambda folder, init: load_model(folder, init=init, progress=False)):
        torch.manual_seed(5)
        models.append(make(tmp_path, init="random"))
        torch.rand(100)
    assert_same(*models)
    torch.manual_seed(6)
    other = load_model(tmp_path, init="random", progress=False)
    assert not torch.equal(next(other.parameters()), next(models[0].parameters()))


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_no_two_drawn_weights_are_equal(tmp_path: Path, name: str) -> None:
    """Weights of q and k, and of neighbouring layers, have equal shapes but different seeds."""
    model = load_model(tiny.save_config(CONFIGS[name], tmp_path), init="random", progress=False)
    drawn = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    assert len(drawn) > 8
    for one, other in itertools.combinations(drawn, 2):
        first, second = drawn[one].flatten(), drawn[other].flatten()
        least = min(len(first), len(second))
        assert not torch.equal(first[:least] / first.std(), second[:least] / second.std()), (one, other)
        assert abs(torch.corrcoef(torch.stack([first[:least], second[:least]]))[0, 1]) < 0.5, (one, other)


def test_drawing_leaves_what_is_drawn_already_and_torchs_generator_alone(tmp_path: Path) -> None:
    model, materialise = build_model(tiny.save_config(CONFIGS["t5"], tmp_path), init="random")
    assert materialise is not None
    parameters = list(model.parameters())
    materialise(parameters[:4])
    with torch.no_grad():
        for parameter in parameters[:4]:
            parameter.fill_(2)
    state = torch.get_rng_state()
    materialise(parameters)
    assert torch.equal(torch.get_rng_state(), state)
    assert all((parameter == 2).all() for parameter in parameters[:4])
    assert not any((parameter == 2).all() for parameter in parameters[4:])


def test_each_matrix_of_t5_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's `_init_weights` first draws a matrix as for any linear layer, then again as for T5."""
    folder, drawn = tiny.save_config(CONFIGS["t5"], tmp_path), list[Any]()
    model, materialise = build_model(folder, init="random")
    assert materialise is not None
    seeded = load.seeded_overload
    monkeypatch.setattr(load, "seeded_overload", lambda func: (drawn.append(func), seeded(func))[1])
    parameters = list(model.parameters())
    materialise(parameters)
    assert len(drawn) == sum(parameter.dim() > 1 for parameter in parameters)
    (wi,) = (
        each for name, each in model.named_parameters() if name == "encoder.block.0.layer.1.DenseReluDense.wi.weight"
    )
    assert wi.std().item() == pytest.approx(CONFIGS["t5"].d_model ** -0.5, rel=0.1)


def test_large_tensors_are_drawn_in_parts_to_the_same_numbers_by_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save_config(CONFIGS["t5"], tmp_path)
    monkeypatch.setattr(load, "PART_ELEMENTS", 64)
    models = []
    for num_threads in (1, 3):
        monkeypatch.setattr(load, "NUM_THREADS", num_threads)
        torch.manual_seed(5)
        models.append(load_model(folder, init="random", progress=False))
    assert_same(*models)
    for parameter in models[0].parameters():
        if parameter.dim() > 1 and parameter.numel() > 64:
            assert parameter.unique().numel() > 0.9 * parameter.numel(), "parts must have different seeds"


def test_the_bar_of_drawing_counts_the_bytes_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals, steps = list[int](), list[int]()
    bar = weight_files.ByteBar.__init__
    monkeypatch.setattr(load.ByteBar, "__init__", lambda self, title, of: (totals.append(of), bar(self, title, of))[1])
    monkeypatch.setattr(load.ByteBar, "advance", lambda self, num_bytes: steps.append(num_bytes))
    model = load_model(tiny.save_config(CONFIGS["t5"], tmp_path), init="random", progress=False)
    assert totals == [sum(steps)] == [4 * sum(parameter.numel() for parameter in model.parameters())]


def test_weights_that_are_drawn_in_several_pieces_keep_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = LlamaForCausalLM.__mro__[1]
    initialise = base._init_weights

    def halves(self: Any, module: nn.Module) -> None:
        if not list(module.parameters(recurse=False)):  # it may have buffers
            initialise(self, module)
        for parameter in module.parameters(recurse=False):
            parameter.data[: len(parameter) // 2].fill_(1.0)
            parameter.data[len(parameter) // 2 :].fill_(2.0)

    monkeypatch.setattr(base, "_init_weights", halves)
    model, materialise = build_model(tiny.save_config(CONFIGS["llama"], tmp_path), init="random")
    assert materialise is not None
    materialise(list(model.parameters()))
    for parameter in model.parameters():
        half = len(parameter) // 2
        assert (parameter[:half] == 1).all()
        assert (parameter[half:] == 2).all()


def test_model_whose_init_weights_forgets_a_parameter_is_built_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_config(CONFIGS["llama"], tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    model, materialise = build_model(tmp_path, init="random")
    assert materialise is None
    assert not any(parameter.is_meta for parameter in model.parameters())


# ---- from the hub ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dropped_connection_says_that_a_rerun_resumes_and_it_does(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    model = written(CONFIGS["t5"], tmp_path, "sharded")
    repository = hub.add_folder("org/lazy", tmp_path)
    broken = sorted(name for name in repository.files if name.endswith(".safetensors"))[-1]
    repository.breaks_at = {broken: len(repository.files[broken]) // 2}
    answer = ask("lazy model", "org/lazy")
    assert answer["error"] == "DownloadError"
    assert "resumes" in answer["message"]
    repository.breaks_at = {}
    expected = {name: digest(value) for name, value in model.state_dict().items()}
    assert ask("lazy model", "org/lazy")["weights"] == expected


@pytest.mark.slow
def test_gated_model_is_refused(hub: Hub, ask: Ask) -> None:
    hub.models["org/lazy-gated"] = Repository(refusal=(403, "GatedRepo"))
    assert ask("lazy model", "org/lazy-gated")["error"] == "ModelAccessError"


# ---- memory ---------------------------------------------------------------------------------------------------------

LOAD = """
import json, sys
from pathlib import Path
import torch
from tests.hf.tiny import build_model

def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field + ":"))

model, materialise = build_model(sys.argv[1])
blocks = [list(block.parameters()) for block in model.model.layers]
layers = [*blocks, [p for p in model.parameters() if not any(p is q for block in blocks for q in block)]]
before, slabs = status("VmRSS"), 0
largest = max(p.numel() * 4 for p in model.parameters())
excess = 0
for layer in layers:
    materialise(layer)
    for parameter in layer:
        parameter.data = parameter.data.bfloat16()
        slabs += 2 * parameter.numel()
    excess = max(excess, status("VmHWM") - before - slabs)
print(json.dumps({"excess": excess, "largest": largest, "slabs": slabs}))
"""
"""Takes layers over in bf16 like the engine; prints the largest number of extra bytes."""


@pytest.mark.slow
def test_peak_of_loading_half_a_billion_parameters_is_the_slabs_and_one_layer(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc/self/status")
    config = tiny.llama_config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=8
    )
    tiny.save_config(config, tmp_path)
    write_zeros(build_model(tmp_path, init="random")[0], tmp_path / "model.safetensors")
    process = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    measured = json.loads(process.stdout)
    assert measured["slabs"] > 800 * 2**20
    assert measured["excess"] < measured["largest"] + 2**30
    assert measured["excess"] < 256 * 2**20  # a layer, modules imported late; the model in fp32 has 1.6 GiB


def write_zeros(model: nn.Module, path: Path) -> None:
    """A sparse safetensors file with fp32 zeros for the model's parameters: only its header takes disk space."""
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 4 * parameter.numel()
        header[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
