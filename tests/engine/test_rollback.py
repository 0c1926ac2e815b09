"""`on_nonfinite="rollback"`: after NaN gradients, training resumes from the last checkpoint, up to three times."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.deepspeed.zero import check
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, ModelError, NonFiniteGradientError, RolledBackError
from offloadkit.facts.config import DynamicLossScale, OffloadConfig, Placement
from offloadkit.offload import update
from tests.messages import check_says
from tests.models import TinyLM, tokens

NAN, STEPS, SAVED = float("nan"), 6, 2


def engine_of(**config: Any) -> OffloadEngine:
    torch.manual_seed(0)
    model = TinyLM(depth=2, dropout=0.2)
    return OffloadEngine(model, OffloadConfig(on_nonfinite="rollback", learning_rate=1e-2, **config))


def schedule(engine: OffloadEngine) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))


def loop(
    engine: OffloadEngine, folder: Path, scheduler: Any, *, begin: int = 0, faults: dict[int, int] | None = None
) -> list[RolledBackError]:
    """Train to `STEPS` and save after `SAVED`. `faults` maps a position to the number of times its window has NaN."""
    accumulation, left, backs, position = engine.config.gradient_accumulation, Counter(faults), [], begin
    batches = tokens(STEPS * accumulation)
    while position < STEPS:
        left[position] -= 1
        factor = NAN if left[position] >= 0 else 1.0
        try:
            for micro_batch in batches[position * accumulation : (position + 1) * accumulation]:
                engine.backward(engine(micro_batch) * factor)
                engine.step()
        except RolledBackError as back:
            backs.append(back)
            position = back.position
            continue
        scheduler.step()
        position += 1
        if position == SAVED:
            engine.save_checkpoint(folder, scheduler=scheduler, position=position)
    return backs


def numbers(engine: OffloadEngine) -> dict[str, torch.Tensor]:
    state = engine.state_dict()
    found = {f"weight {name}": tensor.clone() for name, tensor in state["module"].items()}
    for name, states in state["optimizer"].items():
        found |= {f"{kind} {name}": torch.as_tensor(tensor).clone() for kind, tensor in states.items()}
    counts = [engine.num_updates, engine.optimizer.param_groups[0]["lr"]]
    return found | {"counts": torch.tensor(counts), "random": torch.get_rng_state()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"gradient_accumulation": 2, "max_grad_norm": None, "working_dtype": "bf16"},
        {"placement": Placement(step="gpu", states="vram", gradients="vram"), "working_dtype": "bf16"},
        {"placement": Placement(step="gpu"), "gradient_accumulation": 2},
        {"placement": Placement(weights="ram", activations="offload"), "precision": "tiny"},
        {"placement": Placement(states="disk"), "precision": "compact"},
    ],
    ids=["step on the CPU", "accumulated, unclipped", "all in VRAM", "step on the GPU", "weights in RAM", "disk"],
)
def test_the_run_goes_on_as_one_resumed_by_hand_from_that_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    """Two steps after the checkpoint have NaN once. The model has dropout, the run a schedule."""
    folder = tmp_path / "saved"
    with engine_of(**config) as engine:
        backs = loop(engine, folder, schedule(engine), faults={3: 1, 5: 1})
        found, skipped = numbers(engine), [record.skipped for record in engine.telemetry.records]
    assert [(back.step, back.num_updates, back.position, back.checkpoint) for back in backs] == [
        (4, 2, 2, folder),
        (6, 2, 2, folder),
    ]
    assert skipped == [False] * 3 + [True] + [False] * 3 + [True] + [False] * 4
    with engine_of(**config) as engine:
        scheduler = schedule(engine)
        begin = engine.load_checkpoint(folder, scheduler=scheduler)
        loop(engine, tmp_path / "other", scheduler, begin=begin)
        expected = numbers(engine)
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_a_run_that_was_resumed_goes_back_to_the_checkpoint_that_it_has_loaded(tmp_path: Path) -> None:
    with engine_of() as engine:
        loop(engine, tmp_path, schedule(engine))
        expected = numbers(engine)
    with engine_of() as engine:
        scheduler = schedule(engine)
        begin = engine.load_checkpoint(tmp_path, scheduler=scheduler)
        (back,) = loop(engine, tmp_path, scheduler, begin=begin, faults={4: 1})
        assert (back.step, back.num_updates, back.checkpoint) == (5, 2, tmp_path)
        found = numbers(engine)
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_the_error_says_which_step_and_to_which_checkpoint(tmp_path: Path) -> None:
    with engine_of() as engine:
        (back,) = loop(engine, tmp_path, schedule(engine), faults={3: 1})
    check_says(str(back), "step 4", "nan", "embed.weight", "blocks.0.up.weight", "blocks.0.up.bias")
    check_says(str(back), "back to step 2", repr(str(tmp_path)), "1 of 3")
    copied = pickle.loads(pickle.dumps(back))
    assert (copied.step, copied.num_updates, copied.position) == (4, 2, 2)


def test_nan_that_comes_again_is_an_error_after_three_times(tmp_path: Path) -> None:
    with engine_of() as engine:
        with pytest.raises(NonFiniteGradientError, match="3 times without passing step 4") as raised:
            loop(engine, tmp_path, schedule(engine), faults={3: 100})
        assert not isinstance(raised.value, RolledBackError)
        assert f"The last checkpoint is {str(tmp_path)!r}" in str(raised.value)
        engine.synchronize()
        assert [record.skipped for record in engine.telemetry.records].count(True) == 4


def test_three_times_are_counted_anew_past_the_step(tmp_path: Path) -> None:
    faults = {2: 3, 3: 3, 5: 3}
    with engine_of() as engine:
        assert len(loop(engine, tmp_path, schedule(engine), faults=faults)) == 9
        assert engine.num_updates == STEPS


def test_nan_in_two_steps_in_turn_does_not_go_on_for_ever(tmp_path: Path) -> None:
    """It would, if every step had a separate counter, or only the newest step were counted."""
    updates = [4, 3, 4, 3]

    with engine_of() as engine:

        def spoil(_: Any, given: Any, loss: torch.Tensor) -> torch.Tensor:
            if updates and engine.num_updates + 1 == updates[0]:
                updates.pop(0)
                return loss * NAN
            return loss

        engine.module.register_forward_hook(spoil)
        with pytest.raises(NonFiniteGradientError, match=r"step 3 is nan .* without passing step 4"):
            loop(engine, tmp_path, schedule(engine))
        assert updates == []


def test_without_a_checkpoint_the_error_says_so(tmp_path: Path) -> None:
    with engine_of() as engine:
        with pytest.raises(
            NonFiniteGradientError, match=r"step 1 .*no checkpoint to go back to\. No checkpoint was saved"
        ):
            loop(engine, tmp_path, schedule(engine), faults={0: 1})
        loop(engine, tmp_path, schedule(engine))  # the step was not applied, and training may continue


def test_a_step_that_an_fp16_loss_scale_overflows_in_does_not_go_back(tmp_path: Path) -> None:
    """With a scale that cannot fall, NaN rolls back."""
    with engine_of(working_dtype="fp16", loss_scale=DynamicLossScale(start=8.0)) as engine:
        assert loop(engine, tmp_path, schedule(engine), faults={3: 1}) == []
        engine.synchronize()
        assert [record.skipped for record in engine.telemetry.records] == [False, False, False, True, False, False]
    with engine_of(working_dtype="fp16", loss_scale=8.0) as engine:
        assert [back.step for back in loop(engine, tmp_path, schedule(engine), faults={3: 1})] == [4]


def test_a_loss_scale_goes_back_too(tmp_path: Path) -> None:
    """After the checkpoint an overflow lowered the scale to its minimum, where NaN is no longer an overflow."""
    scale = DynamicLossScale(start=4.0, hysteresis=1, minimum=2.0)
    with engine_of(working_dtype="fp16", loss_scale=scale) as engine:
        (back,) = loop(engine, tmp_path, schedule(engine), faults={2: 1, 3: 1})
        assert back.step == 4
        assert engine.loss_scale is not None
        assert engine.loss_scale.scale == 4.0


def test_a_checkpoint_that_is_broken_since_is_named_beside_the_nan(tmp_path: Path) -> None:
    with engine_of() as engine:
        scheduler = schedule(engine)
        loop(engine, tmp_path, scheduler)
        (path,) = tmp_path.glob("states-*")
        path.write_bytes(path.read_bytes()[:-1])
        engine.backward(engine(tokens(1)[0]) * NAN)
        with pytest.raises(ModelError, match=str(path.name)) as raised:
            engine.step()
        assert "norm of step 7 is nan" in "".join(raised.value.__notes__)


def test_a_step_that_fails_is_no_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of a failed update was never computed; a thread that waits for it gets the error."""

    start, found = update.StepThread.start, list[Any]()

    def starts(thread: update.StepThread, given: update.Update) -> None:
        wake = given.norm_known.set
        monkeypatch.setattr(given.norm_known, "set", lambda: (found.append(thread.error), wake())[1])
        start(thread, given)

    def broken(*_: object) -> float:
        raise RuntimeError("disk on fire")

    engine = engine_of()
    engine.save_checkpoint(tmp_path)
    monkeypatch.setattr(update.StepThread, "start", starts)
    monkeypatch.setattr(update, "sum_in_order", broken)
    engine.backward(engine(tokens(1)[0]))
    with pytest.raises(EngineStateError, match="half updated"):
        engine.step()
    assert [str(error) for error in found] == ["disk on fire"]
    with pytest.raises(EngineStateError):
        engine.close()


def test_a_profile_is_of_as_many_steps_where_one_goes_back(tmp_path: Path) -> None:
    with engine_of() as engine:
        scheduler = schedule(engine)
        loop(engine, tmp_path / "saved", scheduler)
        profile = engine.profile(steps=3, path=tmp_path / "trace.json")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop(engine, tmp_path / "saved", scheduler, begin=3, faults={3: 1, 5: 1})
        assert profile.path.is_file()


def test_deepspeed_as_the_engine_refuses_it() -> None:
    with pytest.raises(ConfigError, match="on_nonfinite='rollback': training continues there"):
        check(OffloadConfig(on_nonfinite="rollback"))
