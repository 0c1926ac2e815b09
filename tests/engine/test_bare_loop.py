"""A bare loop around the engine is never silently wrong: it reads new values, its writes count, or it gets an error."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import update, weights
from offloadkit.offload.external_writes import ExternalWrites, Watched
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.model import PlacedModel
from tests.models import SquaredOutput, TinyLM, tokens, train

PLACEMENTS = {
    "vram": Placement(),
    "stepped by the GPU": Placement(gradients="vram", step="gpu"),
    "ram": Placement(weights="ram", activations="checkpoint"),
    "disk": Placement(states="disk"),
}


@pytest.fixture
def late_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No layer is stepped before some thread waits for an update."""
    asked = threading.Event()
    step, wait, finish = update.LayerState.step, weights.LayerWeights.wait, update.StepThread.finish

    def late(self: Any, *args: Any) -> None:
        assert asked.wait(30)
        step(self, *args)

    def waits(self: Any) -> None:
        if self.pending is not None:
            asked.set()
        wait(self)

    def finishes(self: Any, newest: Any) -> None:
        asked.set()
        finish(self, newest)

    def starts(self: Any, *args: Any) -> Any:
        asked.clear()
        return start(self, *args)

    start = PlacedModel.start_update
    monkeypatch.setattr(update.LayerState, "step", late)
    monkeypatch.setattr(weights.LayerWeights, "wait", waits)
    monkeypatch.setattr(update.StepThread, "finish", finishes)
    monkeypatch.setattr(PlacedModel, "start_update", starts)
    yield
    asked.set()


def small(**options: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(depth=2, width=17, hidden=65, **options)


def config(placement: str, dtype: str = "bf16", **options: Any) -> OffloadConfig:
    return OffloadConfig(
        learning_rate=1e-2,
        working_dtype=dtype,  # type: ignore[arg-type]
        placement=PLACEMENTS[placement],
        **options,
    )


def saved(what: Any) -> Any:
    """The result of `torch.load` after `torch.save`."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READINGS: dict[str, Callable[[Any], torch.Tensor]] = {
    "norm": lambda model: model.blocks[0].up.weight.norm().detach(),
    "data": lambda model: model.blocks[1].down.bias.data.clone(),
    "a view": lambda model: model.embed.weight.detach()[3].float().sum(),
    "a list": lambda model: torch._foreach_norm(list(model.parameters()))[3].detach(),
    "to numpy": lambda model: torch.tensor(model.norm.weight.detach().float().cpu().numpy()),
    "deepcopy": lambda model: copy.deepcopy(model).blocks[0].down.weight.detach(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model.norm.bias)).detach(),
    "torch.save": lambda model: saved(dict(model.state_dict()))["embed.weight"],
    "an average": lambda model: AveragedModel(model).module.norm.weight.detach().clone(),
}


@pytest.mark.usefixtures("late_steps")
@pytest.mark.parametrize("placement", ["vram", "ram"])
def test_what_is_read_after_a_step_is_new(placement: str, device: str) -> None:
    model = small()
    with OffloadEngine(model, config(placement, "fp32"), device=device) as engine:
        held = [model.state_dict()["head.weight"], model.blocks[0].up.weight.data]
        view = model.blocks[1].up.weight.view(-1)  # with a graph
        readings = READINGS | {"held": lambda model: torch.cat([part.flatten().cpu() for part in held])}
        readings["a held view"] = lambda model: view.detach().cpu().clone()
        for name, read in readings.items():
            before = read(model)
            engine.backward(engine(tokens(1, device)[0]))
            engine.step()
            found = read(model)
            engine.synchronize()
            assert torch.equal(found, read(model)), name
            assert not torch.equal(found, before), name
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


@pytest.mark.usefixtures("late_steps")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("placement", ["vram", "ram"])
def test_a_forked_process_is_told_that_the_weights_are_not_there(placement: str) -> None:
    """A forked process would wait for a step that never comes, or read memory that is not mapped."""
    model: Any = small()
    del model.unused  # the model's state_dict begins with no layer: it waits for the whole update
    uses: list[Callable[[], Any]] = [
        lambda: model.blocks[0].up.weight.sum(),
        lambda: model.blocks[0](torch.ones(1, 17)),
        model.state_dict,
        lambda: model.load_state_dict({}, strict=False),
    ]
    with OffloadEngine(model, config(placement, "fp32"), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        engine.step()
        for at, use in enumerate(uses):
            if (child := os.fork()) == 0:
                signal.alarm(10)  # ends a hanging child
                told = 1
                with torch.no_grad():
                    try:
                        use()
                    except EngineStateError as error:
                        told = int("in a forked process" not in str(error))
                    finally:
                        os._exit(told)
            assert os.waitpid(child, 0)[1] == 0, at


@torch.no_grad()
def clamp_held_data(model: Any) -> None:
    data = [parameter.data for parameter in model.parameters()]
    torch._foreach_clamp_max_(data, 0.05)


@torch.no_grad()
def write_in_many_ways(model: Any) -> None:
    for parameter in model.blocks[0].parameters():
        parameter.data.clamp_(-0.05, 0.05)
    model.embed.weight[3] = 0
    model.embed.weight[4].zero_()
    model.blocks[1].up.bias.copy_(model.blocks[1].up.bias.clamp(max=0.05))
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 0.5
    torch._foreach_mul_([model.norm.weight, model.norm.bias], 0.5)
    model.blocks[1].down.weight -= 0.25
    nn.init.zeros_(model.blocks[0].down.bias)


@pytest.mark.usefixtures("late_steps")
@pytest.mark.parametrize(
    ("dtype", "write"),
    [
        ("bf16", write_in_many_ways),
        ("bf16", clamp_held_data),
        ("fp16", write_in_many_ways),
        pytest.param("fp32", write_in_many_ways, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_after_a_step_counts_and_leaves_the_rest_alone(
    write: Callable[[Any], None], dtype: str, device: str
) -> None:
    """Master weights equal the written values; if a working weight kept its bits, its master does not change."""
    trained = {}
    for placement in PLACEMENTS:
        model = small()
        with OffloadEngine(model, config(placement, dtype), device=device) as engine:
            train(engine, tokens(2, device))
            masters = engine.master_weights()
            engine.backward(engine(tokens(1, device)[0]))
            engine.optimizer.param_groups[0]["lr"] = 0.0  # a step in progress that changes nothing
            engine.step()
            plain = copy.deepcopy(model)
            bits = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
            write(plain)
            write(model)
            found = engine.master_weights()
            kept = 0
            for name, written in plain.named_parameters():
                same = written.detach() == bits[name]
                expected = torch.where(same.cpu(), masters[name], written.detach().float().cpu())
                assert torch.equal(found[name], expected), (placement, name)
                assert torch.equal(model.get_parameter(name).detach(), written.detach())
                kept += int((same.cpu() & (masters[name] != written.detach().float().cpu())).sum())
            assert dtype == "fp32" or kept > 0
            engine.optimizer.param_groups[0]["lr"] = 1e-2
            train(engine, tokens(2, device))
            trained[placement] = engine.master_weights()
    for placement, found in trained.items():
        assert all(torch.equal(weight, found[name]) for name, weight in trained["vram"].items()), placement


@pytest.mark.parametrize("placement", ["vram", "ram"])
def test_writes_between_micro_batches_count_from_the_next_one(placement: str, device: str) -> None:
    batches, losses = tokens(2, device), []
    model = small()
    with OffloadEngine(model, config(placement, "fp32", gradient_accumulation=2), device=device) as engine:
        plain = copy.deepcopy(model).to(device)
        for batch in batches:
            loss = engine(batch)
            with torch.no_grad():
                losses.append((loss.item(), plain(batch).item()))
            engine.backward(loss)
            engine.step()
            for each in (model, plain):
                with torch.no_grad():
                    each.blocks[0].up.weight.data.mul_(0.5)
        assert losses[0][0] == losses[0][1] != losses[1][0] == losses[1][1]


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("place", ["vram", "ram"])
def test_a_write_between_forward_and_backward_is_an_error(place: Any, activations: Any, device: str) -> None:
    model = small()
    placement = Placement(weights=place, activations=activations)
    with OffloadEngine(model, OffloadConfig(placement=placement), device=device) as engine:
        loss = engine(tokens(1, device)[0])
        norm = model.blocks[0].up.weight.norm().item()
        model.blocks[0].up.weight.data.mul_(2)
        with pytest.raises((EngineStateError, RuntimeError), match=r"inplace operation|stepped, written"):
            engine.backward(loss)
        assert model.blocks[0].up.weight.norm().item() == pytest.approx(2 * norm)
        train(engine, tokens(1, device))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_after_a_forward_that_failed_counts(error: type[BaseException], device: str) -> None:
    def fails(*_: Any) -> None:
        raise error

    model = small()
    with OffloadEngine(model, config("vram", "fp32"), device=device) as engine:
        engine.optimizer.param_groups[0]["lr"] = 0.0
        for forward in (engine, torch.no_grad()(model)) if error is RuntimeError else (engine,):
            hook = model.blocks[1].down.register_forward_pre_hook(fails)
            with pytest.raises(error):
                forward(tokens(1, device)[0])
            hook.remove()
            written = model.blocks[1].up.weight.data.mul_(0.5).clone()
            train(engine, tokens(1, device))  # the CPU steps a copy in RAM
            assert torch.equal(model.blocks[1].up.weight.detach(), written)


def test_loading_from_a_checkpoint_leaves_no_remainder(device: str) -> None:
    model = small()
    with OffloadEngine(model, config("vram"), device=device) as engine:
        train(engine, tokens(2, device))
        model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()})
        assert all(
            torch.equal(master, model.get_parameter(name).detach().float().cpu())
            for name, master in engine.master_weights().items()
        )


def test_frozen_parameters_are_as_before(device: str) -> None:
    model = small()
    model.norm.requires_grad_(False)
    with OffloadEngine(model, config("vram", "fp32"), device=device) as engine:
        assert type(model.norm.weight) is nn.Parameter
        model.norm.weight.data.fill_(3)
        model.embed.weight.requires_grad_(False)
        train(engine, tokens(1, device))
        assert (model.norm.weight == 3).all()


@pytest.mark.parametrize("placement", ["vram", "ram"])
def test_torch_averages_and_schedules_beside_the_engine(placement: str, device: str) -> None:
    def averaged(*, settled: bool) -> dict[str, torch.Tensor]:
        model = small()
        with OffloadEngine(model, config(placement), device=device) as engine:
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            schedule = SWALR(engine.optimizer, swa_lr=0.05, anneal_epochs=2)
            for batch in tokens(3, device):
                engine.backward(engine(batch))
                engine.step()
                schedule.step()
                if settled:
                    engine.synchronize()
                    with torch.no_grad():
                        ema.update_parameters(copy.deepcopy(model))
                else:
                    ema.update_parameters(model)
            assert engine.optimizer.param_groups[0]["lr"] == 0.05
            assert type(ema.module.norm.weight) is nn.Parameter
            return {name: weight.clone() for name, weight in ema.state_dict().items()}

    expected, found = averaged(settled=True), averaged(settled=False)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_what_watching_takes_grows_with_the_parameters_and_not_with_their_square() -> None:
    """Counts Python calls, the only cost of watching besides torch's own work."""

    def num_calls(work: Callable[[], object]) -> int:
        found = 0

        def called(frame: Any, event: str, arg: Any) -> None:
            nonlocal found
            found += event == "call" and f"offloadkit{os.sep}offload" in frame.f_code.co_filename

        sys.setprofile(called)
        try:
            work()
        finally:
            sys.setprofile(None)
        return found

    def counts(depth: int) -> list[int]:
        model = TinyLM(depth=depth, width=5, hidden=7)
        with OffloadEngine(model, config("vram"), device="cpu") as engine:
            train(engine, tokens(1))
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            ema.update_parameters(model)
            parameters = list(model.parameters())
            work: list[Callable[[], object]] = [
                lambda: ema.update_parameters(model),
                lambda: torch._foreach_norm(parameters),
                lambda: torch._foreach_mul_([parameter.detach() for parameter in parameters], 0.5),
                lambda: [parameter.data.clamp_(-1, 1) for parameter in parameters],
            ]
            return [num_calls(each) for each in work]

    some, more = counts(8), counts(16)
    assert all(0 < twice <= 2 * once for once, twice in zip(some, more, strict=True)), (some, more)


def test_gradients_are_asked_of_the_engine(device: str) -> None:
    model = small()
    with OffloadEngine(model, device=device) as engine:
        assert model.norm.weight.grad is None
        engine.backward(engine(tokens(1, device)[0]))
        with pytest.raises(EngineStateError, match=r"holds the gradient of 'embed.weight', .*max_grad_norm.*clip_grad"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(EngineStateError, match=r"engine\.drop_gradients\(\)"):
            model.norm.weight.grad = torch.ones_like(model.norm.weight)
        engine.step()
        model.zero_grad()
    model(tokens(1, device)[0]).backward()
    assert model.norm.weight.grad is not None


def test_a_gradient_scaler_is_told_who_scales(device: str) -> None:
    with OffloadEngine(small(), device=device) as engine:
        scaler = torch.amp.GradScaler(device)
        with pytest.raises(EngineStateError, match="The engine scales the loss of fp16"):
            scaler.scale(engine(tokens(1, device)[0])).backward()
        engine.backward(scaler.scale(engine(tokens(1, device)[0])))
        with pytest.raises(EngineStateError, match="the engine scales the loss of fp16"):
            scaler.unscale_(engine.optimizer)
        engine.drop_gradients()
        with pytest.raises(EngineStateError, match="The engine scales the loss of fp16"):
            scaler.step(engine.optimizer)
        off = torch.amp.GradScaler(device, enabled=False)
        engine.backward(off.scale(engine(tokens(1, device)[0])))
        off.step(engine.optimizer)
        assert engine.num_updates == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_backward_without_the_engine_leaves_nothing(tied: bool, device: str) -> None:
    norms = []
    for by_hand in (False, True):
        with OffloadEngine(small(tied=tied), device=device) as engine:
            if by_hand:
                with pytest.raises(EngineStateError, match=r"call engine\.backward\(loss\) instead of loss\.backward"):
                    engine(tokens(1, device)[0]).backward()
            train(engine, tokens(1, device))
            norms.append(engine.grad_norm())
    assert norms[0] == norms[1]


class Counts(nn.Module):
    """BatchNorm, and a buffer that affects the output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.norm(torch.tanh(self.linear(x - self.mean)))


def test_a_recomputation_leaves_buffers_as_forward_did(device: str) -> None:
    results = []
    for activations in ("keep", "cheap", "checkpoint", "offload"):
        torch.manual_seed(0)
        model = SquaredOutput(nn.Sequential(Counts(), Counts()))
        placement: Any = Placement(activations=activations)  # type: ignore[arg-type]
        with OffloadEngine(model, OffloadConfig(learning_rate=1e-2, placement=placement), device=device) as engine:
            train(engine, [torch.randn(4, 6, device=device) for _ in range(3)])
        results.append(model.state_dict())
    assert int(results[0]["inner.0.norm.num_batches_tracked"]) == 3
    for other in results[1:]:
        assert [name for name, tensor in results[0].items() if not torch.equal(tensor, other[name])] == []


@pytest.mark.parametrize("activations", ["cheap", "checkpoint", "offload"])
def test_a_copy_of_a_model_that_recomputes_trains_by_itself(activations: Any) -> None:
    """The copy computes with its own weights, and its buffers count each batch once, also after the engine is
    closed."""
    model = SquaredOutput(nn.Sequential(Counts(), Counts()))
    placement = Placement(weights="ram", activations=activations)
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
        x = torch.randn(4, 6)
        train(engine, [x])
        copied = copy.deepcopy(model)
        copied(x).backward()
    assert int(copied.inner[0].norm.num_batches_tracked) == 2
    assert copied.inner[0].linear.weight.grad.abs().sum() > 0
    assert model.inner[0].linear.weight.grad is None
    with OffloadEngine(copied, OffloadConfig(placement=placement), device="cpu") as engine:
        train(engine, [x])
    assert int(copied.inner[0].norm.num_batches_tracked) == 3


class ReadsAnother(TinyLM):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(batch)
        assert self.blocks[0].up.weight.shape[0] == 65  # shapes are known at any time
        return loss + self.blocks[0].up.weight.float().pow(2).mean()


def test_weights_in_ram_that_forward_uses_without_their_block_are_an_error(device: str) -> None:
    model = ReadsAnother(depth=2, width=17, hidden=65)
    with OffloadEngine(model, config("ram"), device=device) as engine:
        with pytest.raises(EngineStateError, match=r"'blocks\.0' was used outside its block's forward"):
            engine(tokens(1, device)[0])
        with torch.no_grad():
            assert model.blocks[0].up.weight.isfinite().all()


def test_a_training_step_touches_no_watched_weight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is called only for operations of the user's program, not for the step's own operations."""
    touched = []
    place_of, function = ExternalWrites.place_of, vars(Watched)["__torch_function__"].__func__

    def called(cls: type, func: Any, *args: Any) -> Any:
        touched.append(func)
        return function(cls, func, *args)

    monkeypatch.setattr(Watched, "__torch_function__", classmethod(called))
    monkeypatch.setattr(ExternalWrites, "place_of", lambda *args: (touched.append("place"), place_of(*args))[1])
    for placement in PLACEMENTS:
        with OffloadEngine(small(), config(placement), device=device) as engine:
            touched.clear()
            for batch in tokens(3, device):
                engine.backward(engine(batch))
                engine.step()
            assert touched == [], placement
            next(engine.module.parameters()).detach().sum()
            assert touched, "the counter must see the program's own operations"


def test_a_closed_engine_leaves_plain_tensors_and_no_memory(device: str) -> None:
    model = small()
    engine = OffloadEngine(model, config("ram"), device=device)
    held, layer = model.blocks[0].up.weight.data, weakref.ref(engine.placed.states[0])
    with torch.no_grad():
        value = held.clone()
    engine.close()
    gc.collect()
    assert layer() is None
    assert torch.equal(held, value)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


class Somewhere:
    """A layer in private memory."""

    def __init__(self, layer: FlatLayer) -> None:
        self.layer, self._weights = layer, torch.ones(3)

    def home(self, view: ParameterView) -> torch.Tensor:
        return self._weights

    def described(self, view: ParameterView) -> torch.Tensor:
        return view.parameter

    def open(self) -> None: ...

    def has_gradient(self, view: ParameterView) -> bool:
        return False

    def before_write(self, view: ParameterView) -> None: ...

    def after_write(self, view: ParameterView, before: torch.Tensor | None) -> None: ...


def test_what_was_taken_before_a_layer_moved_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    layer = FlatLayer(0, "layer", torch.float32, [ParameterView("weight", parameter, 0, 0, [])], [])
    here, there = Somewhere(layer), Somewhere(layer)
    parameter.data = here.home(layer.views[0])
    watching = ExternalWrites([here], lambda: None, lambda parameter: None, torch.device("cpu"))
    held = parameter.data
    assert held.sum() == 3
    watching.moved(there)
    with pytest.raises(EngineStateError, match=r"'weight' before its layer moved"):
        held.sum()
    watching.close()
    assert held.sum() == 3


def test_arrays_of_numpy_may_not_be_written() -> None:
    model = small()
    with OffloadEngine(model, config("vram", "fp32"), device="cpu"), pytest.raises(ValueError, match="read-only"):
        model.norm.weight.detach().numpy()[0] = 3
