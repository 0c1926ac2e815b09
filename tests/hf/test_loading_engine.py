"""An engine that reads weights layer by layer has the numbers of an engine that takes over a loaded model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from offloadkit.doors.finetuning import finetune
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.load import draw_lazily
from offloadkit.hf.source import from_pretrained
from offloadkit.hf.trainer import OffloadTrainer
from offloadkit.offload import placed_layers as placing
from offloadkit.offload.placed_layers import read_ahead_bytes, read_together
from offloadkit.offload.unread import is_unread, make_real
from offloadkit.optim.reference import split_master
from offloadkit.planner.phases import READ_AHEAD_BYTES
from tests.hf import tiny
from tests.hf.tiny import load_model
from tests.hf.training import arguments, causal_rows

CONFIGS: dict[str, Any] = {
    "t5": tiny.t5_config(),
    "t5 v1.1": tiny.t5_v1_1_config(),
    "llama, tied": tiny.llama_config(tie_word_embeddings=True),
}
PLACEMENTS = {
    "resident": Placement(),
    "streamed": Placement(weights="ram", activations="checkpoint"),
    "all in VRAM": Placement(gradients="vram", states="vram", step="gpu"),
}


def written(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = load_model(tiny.save_config(config, folder), init="random", progress=False)
    model.save_pretrained(folder)
    return folder


def freeze(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1" not in name and "layers.1" not in name)


def numbers(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    """Weights (frozen ones too), buffers, remainders."""
    state = engine.state_dict()
    remainders = {f"{name} remainder": part["remainder"] for name, part in state["optimizer"].items()}
    return {name: value.clone() for name, value in (state["module"] | remainders).items()}


@pytest.mark.parametrize(("name", "placement"), list(zip(CONFIGS, PLACEMENTS, strict=True)))
def test_engine_has_the_same_weights_and_remainders(tmp_path: Path, name: str, placement: str) -> None:
    """fp32 on disk, bf16 in the engine, partly frozen."""
    folder = written(CONFIGS[name], tmp_path)
    config = OffloadConfig(working_dtype="bf16", placement=PLACEMENTS[placement])
    whole, lazy = load_model(folder, progress=False), from_pretrained(folder)
    assert is_unread(lazy)
    found = []
    for model in (whole, lazy):
        freeze(model)
        engine = OffloadEngine(model, config, device="cpu")
        found.append(numbers(engine))
        for _ in range(2):
            tokens = torch.arange(8).view(2, 4)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        found[-1] |= {f"{key} later": value for key, value in numbers(engine).items()}
        engine.close()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert any(found[0][key].any() for key in found[0] if key.endswith("remainder"))
    assert not any(parameter.is_meta for parameter in lazy.parameters())


@pytest.mark.parametrize("init", [pytest.param("pretrained", marks=pytest.mark.slow), "random"])
def test_finetune_by_name_gives_what_a_model_handed_over_gives(tmp_path: Path, init: Any) -> None:
    folder = written(CONFIGS["t5"], tmp_path / "model")
    rows = [{"input": f"a{n}", "target": f"b{n}"} for n in range(8)]
    options: dict[str, Any] = {"tokenizer": "byte", "batch_size": 2, "use_cpu": True, "learning_rate": 1e-3}
    by_name = finetune(str(folder), rows, init=init, output_dir=tmp_path / "one", **options)
    torch.manual_seed(0)
    given = load_model(folder, init=init, progress=False) if init == "random" else from_pretrained(folder)
    by_model = finetune(given, rows, output_dir=tmp_path / "two", **options)
    for name, value in by_model.model.state_dict().items():
        assert torch.equal(value, by_name.model.state_dict()[name]), name


@pytest.mark.slow
def test_resuming_by_name_goes_on_from_the_checkpoints_weights(tmp_path: Path) -> None:
    folder = written(CONFIGS["t5"], tmp_path / "model")
    rows = [{"input": f"a{n}", "target": f"b{n}"} for n in range(8)]
    options: dict[str, Any] = {"tokenizer": "byte", "batch_size": 2, "use_cpu": True, "bf16": True, "save_steps": 2}
    options |= {"save_strategy": "steps", "save_total_limit": 5}
    straight = finetune(str(folder), rows, output_dir=tmp_path / "run", epochs=2, **options)
    for number in (4, 6, 8):
        (tmp_path / "run" / f"checkpoint-{number}").rename(tmp_path / f"aside-{number}")
    resumed = finetune(str(folder), rows, output_dir=tmp_path / "run", epochs=2, resume=True, **options)
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_trainer_that_evaluates_before_it_trains_has_all_weights_and_buffers(tmp_path: Path, init: Any) -> None:
    folder = written(CONFIGS["llama, tied"], tmp_path / "model")
    torch.manual_seed(0)
    model = from_pretrained(folder, init=init)
    torch.manual_seed(0)
    whole = load_model(folder, init=init, progress=False)
    losses = []
    for one in (model, whole):
        trainer = OffloadTrainer(
            model=one,
            args=arguments(tmp_path),
            eval_dataset=causal_rows(),
            train_dataset=causal_rows(),
        )
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[:2] == losses[2:]
    assert [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta] == []


def test_layers_that_are_small_are_made_real_together() -> None:
    def layer(number: int) -> Any:
        parameters = [torch.nn.Parameter(torch.empty(number, device="meta")) for _ in range(2)]
        return SimpleNamespace(views=[SimpleNamespace(parameter=parameter) for parameter in parameters])

    layers = [layer(number) for number in (1, 1, 3, 9, 1)]
    sizes = {at: len(some) for at, some in read_together(layers, 8 * 5).items()}
    assert sizes == {0: 6, 3: 2, 4: 2}  # the fourth layer exceeds the limit alone
    assert list(read_together(layers, 0)) == [0, 1, 2, 3, 4]


def test_no_more_is_read_at_once_than_the_plan_has_ram_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has measured its machine already holds libraries that otherwise load with the first step."""
    gib = 1 << 30

    def read_ahead(device: str, categories: dict[str, int], present: int, shared: bool = False) -> int:
        monkeypatch.setattr(placing, "process_ram_bytes", lambda: present)
        plan: Any = SimpleNamespace(
            tiers={"ram": categories},
            total_bytes=lambda _: sum(categories.values()),
            basis=SimpleNamespace(held_bytes=gib),
        )
        return read_ahead_bytes(plan, torch.device(device), shared=shared)

    planned = {"moments": 2 * gib, "framework": 2 * gib}  # the model takes 1 GiB more
    assert read_ahead("cuda", planned, 4 * gib) == READ_AHEAD_BYTES
    assert read_ahead("cuda", planned, 5 * gib - 1000) == 1000
    assert read_ahead("cuda", planned, 6 * gib) == read_ahead("cpu", planned, gib) == 0
    assert read_ahead("cuda", {"moments": gib}, 6 * gib) == READ_AHEAD_BYTES
    assert read_ahead("cuda", planned, 6 * gib, shared=True) == READ_AHEAD_BYTES


@pytest.mark.parametrize("together", [1, 3])
def test_random_weights_do_not_depend_on_what_is_drawn_beside_them(together: int) -> None:
    torch.manual_seed(3)
    whole = resolve_tiny()
    make_real(whole.parameters())
    torch.manual_seed(3)
    lazy = resolve_tiny()
    parameters = list(lazy.parameters())
    for begin in range(0, len(parameters), together):
        make_real(parameters[begin : begin + together])
    for name, value in whole.state_dict().items():
        assert torch.equal(value, lazy.state_dict()[name]), name


def resolve_tiny() -> Any:
    return draw_lazily(CONFIGS["t5"], "seq2seq", torch.float32)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_drawing_a_later_layer_leaves_the_remainders_of_earlier_layers(placement: str) -> None:
    """`_init_weights` of a parent module touches parameters of layers that were placed before."""
    torch.manual_seed(3)
    whole = resolve_tiny()
    make_real(whole.parameters())
    masters = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    torch.manual_seed(3)
    config = OffloadConfig(working_dtype="bf16", placement=PLACEMENTS[placement])
    with OffloadEngine(resolve_tiny(), config, device="cpu") as engine:
        for name, master in engine.master_weights().items():
            assert torch.equal(master, masters[name]), name


def test_a_master_of_more_elements_than_one_slice_is_split_as_a_whole() -> None:
    model = torch.nn.Linear(2051, 2053, bias=False)  # slices have 2**22 elements
    master = model.weight.detach().clone()
    with OffloadEngine(model, OffloadConfig(working_dtype="bf16"), device="cpu") as engine:
        weights, _ = split_master(master.reshape(-1))
        assert torch.equal(engine.state_dict()["module"]["weight"].reshape(-1), weights)
        assert torch.equal(engine.master_weights()["weight"], master)
