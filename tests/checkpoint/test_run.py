"""A resumed run equals the uninterrupted run, and a checkpoint that does not fit changes nothing."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offloadkit.checkpoint.folder import check_saving, origin_of, write_manifest
from offloadkit.checkpoint.run import write_random
from offloadkit.engine.engine import OffloadEngine as EngineOfDevice
from offloadkit.errors import ConfigError, EngineStateError, ModelError, OutputError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.states import LayerState
from tests.models import TinyLM, tokens

OffloadEngine = partial(EngineOfDevice, device="cpu")
PLACEMENTS = {
    "vram": Placement(step="gpu", gradients="vram", states="vram"),
    "ram": Placement(weights="ram"),
    "disk": Placement(states="disk"),
}
ELSEWHERE = {"vram": "disk", "ram": "vram", "disk": "ram"}


def model(seed: int = 0, **changes: Any) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(**({"width": 9, "hidden": 33, "depth": 1, "dropout": 0.2} | changes))


def options(folder: Path, **changes: Any) -> OffloadConfig:
    return OffloadConfig(**({"learning_rate": 1e-2, "working_dtype": "bf16", "disk": str(folder)} | changes))


def decay(engine: EngineOfDevice) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.7)


def train(engine: EngineOfDevice, scheduler: Any, num_steps: int) -> None:
    for batch in tokens(num_steps):
        engine.backward(engine(batch))
        engine.step()
        if scheduler is not None:
            scheduler.step()


def run_state(engine: EngineOfDevice) -> dict[str, torch.Tensor]:
    state = engine.state_dict()
    found = {name: tensor.clone() for name, tensor in state["module"].items()}
    for name, arrays in state["optimizer"].items():
        found |= {f"{name} {array}": tensor.clone() for array, tensor in arrays.items()}
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("tier", PLACEMENTS)
@pytest.mark.parametrize("precision", ["exact", "compact", "tiny"])
def test_it_goes_on_bit_for_bit_under_another_placement(tmp_path: Path, tier: str, precision: Any) -> None:
    """Dropout, a scheduler, weights with remainders, frozen and tied weights, parameters that are never stepped."""
    config = partial(options, tmp_path, precision=precision)
    trained = model()
    trained.norm.weight.requires_grad_(False)
    with OffloadEngine(trained, config(placement=PLACEMENTS[tier])) as engine:
        scheduler = decay(engine)
        train(engine, scheduler, 2)
        engine.save_checkpoint(tmp_path / "saved", scheduler=scheduler, position={"epoch": 1, "batch": (3, 2.5)})
        train(engine, scheduler, 1)
        expected, drawn = run_state(engine), (random.random(), np.random.rand(), torch.rand(1))
    other = model(seed=1)
    other.norm.weight.requires_grad_(False)
    with OffloadEngine(other, config(placement=PLACEMENTS[ELSEWHERE[tier]])) as engine:
        scheduler = decay(engine)
        assert engine.load_checkpoint(tmp_path / "saved", scheduler=scheduler) == {"epoch": 1, "batch": (3, 2.5)}
        assert engine.num_updates == 2
        train(engine, scheduler, 1)
        assert differing(expected, run_state(engine)) == []
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.7**3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    assert any(array.endswith("remainder") and tensor.any() for array, tensor in expected.items())


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    config = options(tmp_path, working_dtype="fp16")
    with OffloadEngine(model(), config) as engine:
        engine.loss_scale.update(overflow=True)
        train(engine, None, 2)
        engine.save_checkpoint(tmp_path / "saved")
        scale = engine.loss_scale.state_dict()
        train(engine, None, 2)
        expected = run_state(engine)
    with OffloadEngine(model(seed=1), config) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.loss_scale.state_dict() == scale
        train(engine, None, 2)
        assert differing(expected, run_state(engine)) == []


def test_loading_copies_no_weight_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes from outside copy a weight to keep its remainders; loading must not copy the whole weight for each
    piece."""
    config = options(tmp_path, placement=Placement(gradients="vram", step="gpu"))
    with OffloadEngine(model(), config) as engine:
        train(engine, None, 1)
        engine.save_checkpoint(tmp_path / "saved")
        expected = run_state(engine)
        train(engine, None, 1)
        monkeypatch.setattr(LayerState, "before_write", None)
        engine.load_checkpoint(tmp_path / "saved")
        assert differing(expected, run_state(engine)) == []


@pytest.mark.slow
def test_a_folder_whose_files_safetensors_could_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latin = tmp_path / "gr\udcf6sse"
    latin.mkdir()
    with pytest.raises(OutputError, match="not UTF-8"):
        check_saving(latin)
    monkeypatch.chdir(latin)
    with OffloadEngine(model(), options(tmp_path)) as engine:
        train(engine, None, 1)
        with pytest.raises(ConfigError, match="not UTF-8"):
            engine.save_checkpoint("saved")
    assert list(latin.iterdir()) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 8-bit moments, after two updates."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with OffloadEngine(model(), options(folder, precision="tiny")) as engine:
        train(engine, None, 2)
        engine.save_checkpoint(folder / "saved")
    return folder / "saved"


def test_other_tools_read_its_files_and_nothing_is_a_pickle(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert names == {
        "manifest.json",
        "random.json",
        "run.json",
        "states-00000-of-00001.safetensors",
        "weights.safetensors",
    }
    weights = load_file(saved / "weights.safetensors")
    assert "head.weight" not in weights, "tied"
    arrays = load_file(saved / "states-00000-of-00001.safetensors")
    with safe_open(saved / "states-00000-of-00001.safetensors", framework="pt") as file:
        ranges = json.loads(file.metadata()["ranges"])
    assert ranges.keys() == arrays.keys()
    for name, place in ranges.items():
        assert (place["start"], place["length"]) == (0, arrays[name].numel())
        assert place["dtype"] == str(arrays[name].dtype).removeprefix("torch.")
    assert arrays["embed.weight/step[0:1]"] == 2
    assert set(json.loads((saved / "manifest.json").read_text())["files"]) == names - {"manifest.json"}


def test_states_of_several_ranks_are_read_as_one(saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(saved, tmp_path / "saved")
    file = copy / "states-00000-of-00001.safetensors"
    arrays = load_file(file)
    with safe_open(file, framework="pt") as opened:
        ranges, shapes = json.loads(opened.metadata()["ranges"]), opened.metadata()["parameters"]
    file.unlink()
    for rank in (0, 1):
        part, places = {}, {}
        for name, array in arrays.items():
            start, end = (0, len(array) // 2) if rank == 0 else (len(array) // 2, len(array))
            part[name] = array[start:end].clone()
            places[name] = ranges[name] | {"start": start, "length": end - start}
        metadata = {"rank": str(rank), "ranks": "2", "ranges": json.dumps(places), "parameters": shapes}
        save_file(part, copy / f"states-0000{rank}-of-00002.safetensors", metadata)
    write_manifest(copy, origin_of(copy))
    states = []
    for folder in (saved, copy):
        with OffloadEngine(model(seed=1), options(tmp_path, precision="tiny")) as engine:
            engine.load_checkpoint(folder)
            states.append(run_state(engine))
    assert differing(*states) == []
    (copy / "states-00001-of-00002.safetensors").unlink()
    write_manifest(copy, origin_of(copy))
    with (
        OffloadEngine(model(), options(tmp_path, precision="tiny")) as engine,
        pytest.raises(ModelError, match=r"ranks \[0\], out of 2"),
    ):
        engine.load_checkpoint(copy)


def cut(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size * 2 // 3)

    return spoil


def cut_unnoticed(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        cut(name)(folder)
        write_manifest(folder, origin_of(folder))

    return spoil


def unfinished(folder: Path) -> None:
    (folder / "manifest.json").unlink()


STATES = "states-00000-of-00001.safetensors"


BROKEN = [
    (unfinished, r"saved: it has no manifest\.json, so its writing was interrupted"),
    (cut(STATES), rf"^{STATES} of the checkpoint .* bytes, but \d+ were written"),
    (cut("weights.safetensors"), r"^weights\.safetensors of the checkpoint "),
    (cut("random.json"), r"^random\.json of the checkpoint "),
    (cut("manifest.json"), r"^manifest\.json of the checkpoint "),
    (cut_unnoticed(STATES), rf"^{STATES} of the checkpoint .* cannot be read"),
]


def test_a_broken_checkpoint_is_refused_and_changes_nothing(saved: Path, tmp_path: Path) -> None:
    with OffloadEngine(model(seed=1), options(tmp_path, precision="tiny")) as engine:
        train(engine, None, 1)
        before, random_state = run_state(engine), torch.get_rng_state()
        for spoil, message in BROKEN:
            copy = shutil.copytree(saved, tmp_path / "saved", dirs_exist_ok=True)
            spoil(copy)
            with pytest.raises(ModelError, match=message):
                engine.load_checkpoint(copy)
        assert differing(before, run_state(engine)) == []
        assert engine.num_updates == 1
        assert torch.equal(torch.get_rng_state(), random_state)


def test_one_rank_takes_the_random_states_of_rank_0(tmp_path: Path) -> None:
    with OffloadEngine(model(), options(tmp_path)) as engine:
        engine.save_checkpoint(folder := tmp_path / "saved")
        expected = torch.rand(1)
        (folder / "manifest.json").unlink()
        write_random(folder, engine.snapshot().origin, rank=1)
        write_manifest(folder, engine.snapshot().origin)
        engine.load_checkpoint(folder)
        assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"optimizer": "lion", "precision": "exact"}, ConfigError, r"run\.json: .*optimizer='adamw'.*'lion'"),
        ({"precision": "exact"}, ConfigError, r"run\.json: .*precision='tiny', this run has 'exact'"),
        ({"seed": 5}, ConfigError, r"run\.json: .* seed=0, this run has 5"),
        (
            {"working_dtype": "fp32"},
            ConfigError,
            rf"{STATES}: the saved run keeps .*remainder of 'unused', but this run",
        ),
        ({"working_dtype": "fp16"}, ConfigError, rf"{STATES}: saved remainder of 'unused' is torch\.int16"),
        ({"depth": 2}, ModelError, rf"{STATES} is from another model, or .*: 4 .* not saved, such as 'blocks\.1\.down"),
        ({"depth": 0}, ModelError, rf"{STATES} is from another model, or .*: 4 .* not trained now, such as 'blocks\.0"),
        ({"hidden": 34}, ModelError, rf"{STATES}: saved 'blocks\.0\.up\.weight' has shape \(33, 9\), .* \(34, 9\)"),
        ({"groups": 2}, ModelError, r"run\.json: the saved run has 1 parameter groups, this run 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(
    saved: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    changes = {"precision": "tiny"} | changes
    other = model(seed=1, **{name: changes.pop(name) for name in ("depth", "hidden") if name in changes})
    groups = None
    if changes.pop("groups", 0):
        groups = [{"params": other.embed.parameters()}]
        groups.append({"params": [p for name, p in other.named_parameters() if not name.startswith("embed")]})
    with OffloadEngine(other, options(tmp_path, **changes), param_groups=groups) as engine:
        before = run_state(engine)
        with pytest.raises(error, match=message):
            engine.load_checkpoint(saved)
        assert differing(before, run_state(engine)) == []


def test_in_the_middle_of_a_window_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    with OffloadEngine(model(), options(tmp_path, gradient_accumulation=2)) as engine:
        load = partial(engine.load_state_dict, copy.deepcopy(engine.state_dict()))
        engine.backward(engine(tokens(1)[0]))
        engine.step()
        for call in (partial(engine.save_checkpoint, tmp_path / "saved"), engine.state_dict, load):
            with pytest.raises(EngineStateError, match="1 micro-batches of an accumulation window"):
                call()
        engine.optimizer.zero_grad()
        engine.save_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("functions", [(True, False), (False, True)], ids=["to a callable object", "to a function"])
def test_a_run_goes_on_with_another_schedule(tmp_path: Path, functions: tuple[bool, bool]) -> None:
    """LambdaLR saves the state of a callable object (transformers' `linear`), but None for a function (`constant`)."""

    def schedule(engine: EngineOfDevice, is_function: bool) -> torch.optim.lr_scheduler.LRScheduler:
        factor = (lambda step: 0.5**step) if is_function else partial(pow, 0.5)
        return torch.optim.lr_scheduler.LambdaLR(engine.optimizer, factor)

    with OffloadEngine(model(), options(tmp_path)) as engine:
        before = schedule(engine, functions[0])
        train(engine, before, 2)
        engine.save_checkpoint(tmp_path / "saved", scheduler=before, position=2)
    with OffloadEngine(model(1), options(tmp_path)) as engine:
        after = schedule(engine, functions[1])
        assert engine.load_checkpoint(tmp_path / "saved", scheduler=after) == 2
        assert after.last_epoch == 2
        train(engine, after, 1)
        assert after.get_last_lr() == [pytest.approx(1e-2 * 0.5**3)]


def test_a_save_that_fails_leaves_the_checkpoint_before_and_foreign_files_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, origin: object, contents: str) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with OffloadEngine(model(), options(tmp_path)) as engine:
        engine.save_checkpoint(tmp_path / "saved", position=1)
        with monkeypatch.context() as patch:
            patch.setattr("offloadkit.checkpoint.run.write_manifest", full)
            with pytest.raises(OutputError, match="make room"):
                engine.save_checkpoint(tmp_path / "saved", position=2)
        assert engine.load_checkpoint(tmp_path / "saved") == 1
        with pytest.raises(ConfigError, match=r"position\['loader'\] is a function, which a checkpoint cannot store"):
            engine.save_checkpoint(tmp_path / "saved", position={"loader": full})
        with pytest.raises(ConfigError, match="has no scheduler"):
            engine.load_checkpoint(tmp_path / "saved", scheduler=decay(engine))
        engine.save_checkpoint(tmp_path / "saved", position=3)
        assert engine.load_checkpoint(tmp_path / "saved") == 3
        with pytest.raises(OutputError, match=r"mine contains other files and no manifest\.json"):
            engine.save_checkpoint(tmp_path / "mine")
        os.mkfifo(tmp_path / "pipe")  # like /dev/null, which root could rename
        with pytest.raises(OutputError, match="pipe exists and is not a folder"):
            engine.save_checkpoint(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "pipe").unlink()
        (tmp_path / "empty").mkdir()
        engine.save_checkpoint(tmp_path / "empty", position=4)
        assert engine.load_checkpoint(tmp_path / "empty") == 4
        (tmp_path / "link").symlink_to("saved")
        engine.save_checkpoint(tmp_path / "link", position=5)
        assert engine.load_checkpoint(tmp_path / "saved") == engine.load_checkpoint(tmp_path / "link") == 5
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "mine", "saved"]
