"""Smaller checkpoints: moments in bf16 (`checkpoint_precision="compact"`) or weights alone (`save_only_model`)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offloadkit.checkpoint import arrays
from offloadkit.checkpoint.folder import contents_of, origin_of, write_manifest
from offloadkit.engine.engine import OffloadEngine as EngineOfDevice
from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts.config import OffloadConfig
from offloadkit.optim import moments
from tests.checkpoint.test_run import ELSEWHERE, PLACEMENTS, decay, differing, model, options, run_state, train

OffloadEngine = partial(EngineOfDevice, device="cpu")
STATES = "states-00000-of-00001.safetensors"
COMPACT: dict[str, Any] = {"checkpoint_precision": "compact"}
ALONE: dict[str, Any] = {"save_only_model": True}
BEGINS_ANEW = "the checkpoint has the weights alone .*moments begin at zero"


def trained(folder: Path, steps: int = 3, **changes: Any) -> dict[str, torch.Tensor]:
    """The state of a run of `model()` that is saved in `folder`/saved after some steps."""
    with OffloadEngine(model(), options(folder, **changes)) as engine:
        train(engine, None, steps)
        engine.save_checkpoint(folder / "saved")
        return run_state(engine)


def resumed(folder: Path, steps: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    with OffloadEngine(model(seed=1), options(folder, **changes)) as engine:
        engine.load_checkpoint(folder / "saved")
        train(engine, None, steps)
        return run_state(engine)


def rounded(name: str, moment: torch.Tensor, step: int, seed: int) -> torch.Tensor:
    """The bf16 numbers, as fp32, that a checkpoint declares for a moment."""
    parameter, array = name.split(" ")
    shift = {"exp_avg": 0, "exp_avg_sq": 16}[array]
    random = moments.random_bits(moments.random_key(seed, parameter, step), 0, moment.numel()) >> shift & 0xFFFF
    return moments.round_stochastically(moment.flatten(), random).float().view(moment.shape)


@pytest.mark.parametrize("tier", ["ram", *(pytest.param(tier, marks=pytest.mark.slow) for tier in ("vram", "disk"))])
def test_compact_moments_are_the_declared_rounding_and_weights_keep_their_bits(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 400)
    before = trained(tmp_path, placement=PLACEMENTS[tier], seed=5, **COMPACT)
    assert contents_of(tmp_path / "saved") == "compact"
    after = resumed(tmp_path, placement=PLACEMENTS[ELSEWHERE[tier]], seed=5)
    saved_moments = [name for name in before if name.endswith((" exp_avg", " exp_avg_sq"))]
    assert set(differing(before, after)) <= set(saved_moments)
    for name in saved_moments:
        step = int(before[name.split(" ")[0] + " step"])
        assert torch.equal(after[name], rounded(name, before[name], step, seed=5)), name
    nearest = [before[name].bfloat16().float().equal(after[name]) for name in saved_moments]
    assert not all(nearest)


@pytest.mark.slow
def test_a_run_goes_on_from_compact_moments_alike_under_any_placement_and_near_the_run_that_was_saved(
    tmp_path: Path,
) -> None:
    with OffloadEngine(model(), options(tmp_path, **COMPACT)) as engine:
        train(engine, None, 3)
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, None, 3)
        uninterrupted = run_state(engine)
    found = [resumed(tmp_path, 3, placement=placement) for placement in (None, *PLACEMENTS.values())]
    assert [differing(found[0], other) for other in found[1:]] == [[]] * 3
    assert differing(uninterrupted, found[0]) != []
    for name, values in uninterrupted.items():
        if not name.endswith(("remainder", "exp_avg", "exp_avg_sq")):
            assert torch.allclose(values.float(), found[0][name].float(), rtol=0.02, atol=1e-3), name


@pytest.mark.slow
def test_saving_rounded_moments_again_changes_none(tmp_path: Path) -> None:
    trained(tmp_path, **COMPACT)
    before = resumed(tmp_path)
    with OffloadEngine(model(seed=1), options(tmp_path, **COMPACT)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.save_checkpoint(tmp_path / "saved")
    assert differing(before, resumed(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_the_moments_of_other_optimizers_are_rounded_too(tmp_path: Path, optimizer: str) -> None:
    states = []
    for seed, steps in ((0, 2), (1, 0)):
        with OffloadEngine(model(seed, depth=2), options(tmp_path, optimizer=optimizer, **COMPACT)) as engine:
            if not steps:
                engine.load_checkpoint(tmp_path / "saved")
            train(engine, None, steps)
            engine.save_checkpoint(tmp_path / "saved")
            states.append(run_state(engine))
    before, after = states
    changed = differing(before, after)
    assert {name.split(" ")[1] for name in changed} <= {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert any(name.endswith("exp_avg" if optimizer == "lion" else "momentum_buffer") for name in changed)
    for name in changed:
        assert (after[name] - before[name]).abs().max() <= before[name].abs().max() / 128


@pytest.mark.parametrize(
    ("changes", "contents", "per_parameter"),
    [
        (COMPACT, "compact", 8),
        (ALONE, "weights", 2),
        pytest.param({}, "all", 12, marks=pytest.mark.slow),
        pytest.param({"precision": "compact", **COMPACT}, "all", 8, marks=pytest.mark.slow),
        pytest.param(COMPACT | ALONE, "weights", 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_are_those_planned_and_the_manifest_says_the_contents(
    tmp_path: Path, changes: dict[str, Any], contents: str, per_parameter: int
) -> None:
    with OffloadEngine(model(), options(tmp_path, **changes)) as engine:
        train(engine, None, 1)
        engine.save_checkpoint(tmp_path / "saved")
        planned, told = engine.plan.checkpoint_bytes, engine.snapshot().num_bytes()
        num_parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["contents"] == contents
    arrays = [array for path in (tmp_path / "saved").glob("*.safetensors") for array in load_file(path).values()]
    assert sum(array.nbytes for array in arrays) == told
    steps = 0 if contents == "weights" else 4 * len(list(model().parameters()))
    assert told - steps == per_parameter * num_parameters
    assert told - steps <= planned < told + 4096 * per_parameter  # layers are padded


def test_without_states_torchs_adamw_with_a_new_state_goes_on(tmp_path: Path) -> None:
    """Step, schedule, position and random states go on; the moments and their bias correction begin anew."""
    config = partial(options, tmp_path, working_dtype="fp32", max_grad_norm=None, eps=1e-6, weight_decay=0.1)
    with OffloadEngine(model(), config(**ALONE)) as engine:
        train(engine, scheduler := decay(engine), 3)
        engine.save_checkpoint(tmp_path / "saved", scheduler=scheduler, position=(3, "rows"))
        before, drawn = {name: weight.clone() for name, weight in engine.module.state_dict().items()}, torch.rand(1)
    assert not (tmp_path / "saved" / STATES).exists()
    plain = model(seed=1)
    plain.load_state_dict(before)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    with OffloadEngine(model(seed=1), config(**ALONE)) as engine:
        scheduler = decay(engine)
        with pytest.warns(RuntimeWarning, match=BEGINS_ANEW):
            assert engine.load_checkpoint(tmp_path / "saved", scheduler=scheduler) == (3, "rows")
        assert torch.equal(torch.rand(1), drawn)
        assert differing(before, {name: weight.clone() for name, weight in engine.module.state_dict().items()}) == []
        assert (engine.num_updates, scheduler.last_epoch) == (3, 3)
        batches = torch.randint(61, (2, 1, 3))
        for step, batch in enumerate(batches):
            for each in (engine, plain):
                torch.manual_seed(step)  # dropout
                loss = each(batch)
                engine.backward(loss) if each is engine else loss.backward()
            adamw.param_groups[0]["lr"] = rate = 1e-2 * 0.7 ** (3 + step)
            adamw.step()
            adamw.zero_grad()
            assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
            engine.step()
            scheduler.step()
        assert engine.num_updates == 5
        assert engine.state_dict()["optimizer"]["embed.weight"]["step"] == 2
        for name, weight in plain.state_dict().items():
            assert torch.allclose(engine.module.state_dict()[name], weight, rtol=1e-5, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.filterwarnings(f"ignore:{BEGINS_ANEW}")
@pytest.mark.parametrize("precision", ["exact", "tiny"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_used_engine_and_new_ones_resume_alike_without_states(tmp_path: Path, dtype: Any, precision: Any) -> None:
    """Master weights begin at the working weights, whatever the engine had before."""
    changes: dict[str, Any] = {"working_dtype": dtype, "precision": precision}
    with OffloadEngine(model(), options(tmp_path, **changes, **ALONE)) as engine:
        train(engine, None, 3)
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, None, 2)
        engine.load_checkpoint(tmp_path / "saved")
        begun = run_state(engine)
        working = {name: weight.clone() for name, weight in engine.module.named_parameters()}
        assert all(torch.equal(weight, working[name].float()) for name, weight in engine.master_weights().items())
        train(engine, None, 2)
        used = run_state(engine)
    assert not any(values.any() for name, values in begun.items() if " " in name and not name.endswith("remainder"))
    for placement in (None, *PLACEMENTS.values()):
        assert differing(begun, resumed(tmp_path, placement=placement, **changes)) == []
        assert differing(used, resumed(tmp_path, 2, placement=placement, **changes)) == []


def test_states_that_are_missing_or_contents_that_are_unknown_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    saved, origin = tmp_path / "saved", origin_of(tmp_path / "saved")
    (saved / STATES).rename(tmp_path / STATES)
    with pytest.raises(ModelError, match=rf"^{STATES} of the checkpoint .* \(it is missing\)"):
        resumed(tmp_path)
    write_manifest(saved, origin)
    with pytest.raises(ModelError, match="it has only weights, no optimizer states"):
        resumed(tmp_path)
    (tmp_path / STATES).rename(saved / STATES)
    write_manifest(saved, origin, "compact")
    with pytest.raises(ConfigError, match=r"saved exp_avg of .* is torch\.float32, but this run's is torch\.float32"):
        resumed(tmp_path)
    write_manifest(saved, origin, "half")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"manifest\.json"):
        resumed(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_precision": "tiny"}, "must be 'compact' or None, got 'tiny'"),
        ({"precision": "tiny", **COMPACT}, "leave checkpoint_precision out"),
        ({"save_only_model": 1}, "save_only_model must be True or False, got 1"),
        ({"on_nonfinite": "rollback", **ALONE}, "leave one of them out"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**changes)
