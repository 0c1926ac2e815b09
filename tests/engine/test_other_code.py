"""Other code acts on a model with an open engine: it saves, copies, converts, compiles, forks and interrupts."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.facts.changes import claim, unclaimed, without_claims
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.external_writes import Watched
from offloadkit.planner import placed
from tests.models import TinyLM, tokens, train

IN_RAM = Placement(weights="ram", activations="checkpoint")


def small(dtype: torch.dtype = torch.float32, **options: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(width=9, hidden=17, depth=2, **options).to(dtype)


def config(placement: Placement | None = None) -> OffloadConfig:
    return OffloadConfig(learning_rate=1e-2, placement=placement or Placement())


def step(engine: OffloadEngine) -> None:
    """A step that is still in progress on return."""
    engine.backward(engine(tokens(1)[0]))
    engine.step()


# ---- saving and copying ----------------------------------------------------------------------------------------------


def attributes(model: nn.Module) -> dict[str, Any]:
    """Attributes of each module, and the number of its hooks."""
    return {
        name: {key: len(value) if "_hooks" in key else type(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "how", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy], ids=["pickle", "copy"]
)
@pytest.mark.parametrize("placement", [Placement(), IN_RAM], ids=["vram", "ram"])
def test_a_copy_of_a_model_in_training_is_a_plain_model(how: Callable[[Any], Any], placement: Placement) -> None:
    model = small()
    model.blocks[0].register_forward_hook(nothing)
    model.blocks[1].forward = doubled
    plain = attributes(model)
    with OffloadEngine(model, config(placement), device="cpu") as engine:
        step(engine)
        copied = how(model)
        assert all(torch.equal(copied.state_dict()[name], value) for name, value in model.state_dict().items())
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        assert copied.head.weight is copied.embed.weight
        assert attributes(copied) == plain
        assert copied.blocks[1].forward is doubled
        before = engine.master_weights()["embed.weight"]
        copied(tokens(1)[0]).backward()  # without the engine
        assert torch.equal(before, engine.master_weights()["embed.weight"])
        step(engine)
    assert attributes(model) == plain


def nothing(*_: Any) -> None: ...


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_what_is_pickled_needs_no_engine() -> None:
    model = small()
    with OffloadEngine(model, config(IN_RAM), device="cpu") as engine:
        step(engine)
        for each in (model, model.blocks[0], model.head.weight, dict(model.named_parameters()), model.state_dict()):
            assert b"offloadkit" not in pickle.dumps(each)


def test_what_shares_the_memory_of_weights_is_found() -> None:
    """Sending a model to a spawned process moves its weights to shared memory."""
    model = small()
    with OffloadEngine(model, config(), device="cpu") as engine:
        ForkingPickler.dumps(model)
        engine.backward(engine(tokens(1)[0]))
        with pytest.raises(EngineStateError, match="'unused' would get new memory"):
            engine.step()


# ---- converting and exchanging ---------------------------------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "to a dtype": lambda model: model.to(torch.float64),
    "a part of it": lambda model: model.get_submodule("embed").double(),
    "to shared memory": lambda model: model.share_memory(),
    "to the meta device": lambda model: model.to("meta"),
    "emptied": lambda model: model.to_empty(device="cpu"),
    "a part of it emptied": lambda model: model.get_submodule("embed").to_empty(device="cpu"),
}


@pytest.mark.parametrize("placement", [Placement(), IN_RAM], ids=["vram", "ram"])
def test_a_conversion_in_mid_run_is_refused_and_changes_nothing(placement: Placement) -> None:
    model, untouched = small(), small()
    with OffloadEngine(model, config(placement), device="cpu") as engine:
        for convert in CONVERSIONS.values():
            train(engine, tokens(1))
            with pytest.raises(EngineStateError, match=r"'(embed\.weight|unused)' .* \.half\(\), to_empty\(\)"):
                convert(model)
    with OffloadEngine(untouched, config(placement), device="cpu") as engine:
        train(engine, tokens(1) * len(CONVERSIONS))
    assert all(torch.equal(value, untouched.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_model_that_is_brought_to_where_it_computes_stays_as_it_is(device: str) -> None:
    """A loop may call `to` in every epoch. Master weights keep their bits beyond bf16."""
    masters = []
    for moves in (True, False):
        model = small(torch.bfloat16)
        with OffloadEngine(model, config(IN_RAM), device=device) as engine:
            train(engine, tokens(2, device))
            if moves:
                model.to(device, torch.bfloat16)
            train(engine, tokens(1, device))
            masters.append(engine.master_weights())
    assert all(torch.equal(value, masters[1][name]) for name, value in masters[0].items())


def test_what_is_not_trained_may_be_emptied_and_a_closed_model_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 1))  # no repeated blocks
    with OffloadEngine(model, config(), device="cpu"):
        model[0].to_empty(device="cpu")
    model.to_empty(device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def exchange(model: Any) -> None:
    model.blocks[0].up.weight = nn.Parameter(torch.ones(17, 9, dtype=torch.float64))


def adapt(model: Any) -> None:
    model.head = nn.Linear(9, 61, device="meta")  # like a new head or an adapter that was never moved to the device


@pytest.mark.parametrize(("change", "name"), [(exchange, r"blocks\.0\.up\.weight"), (adapt, r"head\.weight")])
def test_what_was_exchanged_is_named_where_forward_fails(change: Callable[[Any], None], name: str) -> None:
    model: Any = small(tied=False)
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))
        modules = [*model.blocks.modules()]
        kept = [dict(module._parameters) for module in modules]
        head = model.head
        change(model)
        with pytest.raises(ModelError, match=rf"parameter '{name}' was added, replaced or unfrozen"):
            engine(tokens(1)[0])
        model.head = head
        for module, parameters in zip(modules, kept, strict=True):
            module._parameters.update(parameters)
        train(engine, tokens(1))


def test_what_two_engines_share_is_cast_by_neither() -> None:
    trunk = nn.Linear(4, 4).requires_grad_(False)
    one, other = (nn.Sequential(trunk, nn.Linear(4, 1)) for _ in range(2))
    with OffloadEngine(one, config(), device="cpu") as first:
        with pytest.raises(EngineStateError, match=r"'0\.weight' is torch\.float32, and another model"):
            OffloadEngine(other, replace(config(), working_dtype="bf16"), device="cpu")
        with OffloadEngine(other, config(), device="cpu") as second:
            for engine in (first, second, first):
                engine.backward(engine(torch.ones(1, 4)).sum())
                engine.step()


# ---- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])  # a long import
@pytest.mark.parametrize("part", ["whole", "block"])
def test_training_through_a_model_compiled_around_the_hooks_is_refused(part: str, backend: str) -> None:
    torch._dynamo.reset()
    model: Any = small()
    (model if part == "whole" else model.blocks[1]).compile(backend=backend)
    with (
        OffloadEngine(model, config(), device="cpu") as engine,
        pytest.raises(EngineStateError, match=r"OffloadConfig\(compile_blocks=True\)"),
    ):
        engine(tokens(1)[0])


def test_what_torch_compile_returns_is_refused_unless_it_is_frozen() -> None:
    advice = r"Pass the model that was given to torch.compile\(\); OffloadConfig\(compile_blocks=True\) compiles"
    with pytest.raises(ModelError, match=advice):
        OffloadEngine(torch.compile(small(), backend="eager"), device="cpu")
    model: Any = small()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(ModelError, match=advice):
        OffloadEngine(model, device="cpu")
    model.blocks[1].requires_grad_(False)
    with OffloadEngine(model, config(), device="cpu") as engine:
        train(engine, tokens(1))


# ---- processes, interrupts and leftovers -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_engine_refuses_every_call_in_a_forked_process(device: str) -> None:
    """The child has no threads and no GPU, and pinned memory is not mapped: touching it would be a SIGSEGV."""
    model = small()
    batch = tokens(1, device)[0]
    with OffloadEngine(model, config(IN_RAM), device=device) as engine:
        train(engine, [batch])
        engine.backward(engine(batch))
        calls = [engine.step, engine.grad_norm, engine.drop_gradients, engine.optimizer.zero_grad, engine.state_dict]
        if (child := os.fork()) == 0:
            signal.alarm(10)  # ends a hanging child
            told = 0
            for call in calls:
                try:
                    call()
                except EngineStateError as error:
                    told += "the engine was used in a forked process" in str(error)
            engine.close()  # like the end of a `with`
            os._exit(int(told != len(calls)))
        assert os.waitpid(child, 0)[1] == 0
        engine.step()


def test_the_model_moves_after_a_backward_that_was_interrupted_within_a_recomputed_block() -> None:
    """The loss is kept, as in a notebook, and holds the weights that the recomputation saved."""
    model = small()

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(interrupt)

    with OffloadEngine(model, config(Placement(activations="checkpoint")), device="cpu") as engine:
        hook = model.blocks[0].up.register_forward_hook(watch)
        loss = engine(tokens(1)[0])
        hook.remove()
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        engine.move(placed(engine.plan, [IN_RAM] * len(engine.plan.placements)))
        train(engine, tokens(1))
        with pytest.raises(RuntimeError):
            engine.backward(loss)


@pytest.mark.parametrize("where", ["forward", "backward", "evaluation"])
def test_after_an_interrupt_weights_may_be_read_and_written_at_once(where: str) -> None:
    """torch runs no forward hook after an interrupt: a tied weight's use would stay in its module, and a block's
    parameters would point into VRAM that the next block overwrites."""
    found = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, runs = TinyLM(width=9, hidden=17, depth=5), list[int]()
        model.blocks[1].up.weight = model.blocks[0].up.weight
        inner = [model.blocks[1].up] if where == "backward" else [model.head, model.blocks[3].down]

        def interrupt(*_: Any, runs: list[int] = runs) -> None:
            runs.append(1)
            if where != "backward" or len(runs) == 2:  # the first run belongs to forward
                raise KeyboardInterrupt

        with OffloadEngine(model, config(IN_RAM), device="cpu") as engine:
            train(engine, tokens(1))
            if where == "evaluation":
                engine.backward(engine(tokens(1)[0]))
            for module in inner if interrupted else []:
                hook = module.register_forward_pre_hook(interrupt)
                with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(where != "evaluation"):
                    engine.backward(engine(tokens(1)[0]))
                hook.remove()
                assert "weight" not in module.__dict__
                assert all(isinstance(parameter, Watched) for parameter in model.parameters())
            if where == "evaluation":
                engine.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            train(engine, tokens(2))
            found.append({name: weight.clone() for name, weight in model.state_dict().items()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())


def test_a_loss_of_a_closed_engine_says_so() -> None:
    with OffloadEngine(small(), config(), device="cpu") as engine:
        loss = engine(tokens(1)[0])
    with pytest.raises(EngineStateError, match="to a closed engine"):
        loss.backward()


def test_an_engine_that_nobody_can_reach_is_in_nobodys_way() -> None:
    model = small()
    gc.disable()
    try:
        engine = OffloadEngine(model, config(), device="cpu")
        circle: list[Any] = [engine]
        circle.append(circle)
        del engine, circle
        OffloadEngine(model, config(), device="cpu").close()
    finally:
        gc.enable()


def test_an_interrupt_that_a_notebook_remembers_is_in_no_new_engines_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()

    def interrupted() -> None:
        engine = OffloadEngine(model, config(), device="cpu")
        train(engine, tokens(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    del caught
    OffloadEngine(model, config(), device="cpu").close()


class Settings:
    cached = True


def test_an_attribute_that_two_models_share_is_as_it_was_when_the_last_is_done() -> None:
    settings = Settings()
    first, second = claim(settings, "cached", 1), claim(settings, "cached", 2)
    assert unclaimed(settings, "cached") is True
    assert without_claims(settings).cached is True
    assert without_claims(settings) is without_claims(settings) is not settings
    first()
    first()
    assert settings.cached == 2
    second()
    assert settings.cached is True
    assert without_claims(settings) is settings


def test_an_attribute_that_others_have_set_meanwhile_stays_so() -> None:
    settings = Settings()
    undo = claim(settings, "cached", False)
    settings.cached = "mine"  # type: ignore[assignment]
    undo()
    assert settings.cached == "mine"
