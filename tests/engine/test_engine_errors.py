"""Errors name the given value, the expected value and the remedy; a refused call changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.device import host_memory
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, ModelError, NonFiniteGradientError, OffloadkitError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.telemetry import Telemetry
from offloadkit.facts.units import parse_bytes
from offloadkit.offload import update
from tests.models import TinyLM, tokens, train


def spoil(engine: OffloadEngine, batch: torch.Tensor, value: float = float("nan")) -> None:
    engine.backward(engine(batch) * value)
    engine.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_nonfinite_gradients_are_never_applied_and_are_reported(value: float, accumulation: int) -> None:
    batches = tokens(6)
    config = OffloadConfig(learning_rate=1e-2, gradient_accumulation=accumulation)
    with OffloadEngine(TinyLM(), config) as engine:
        train(engine, batches[: 2 * accumulation])
        before = copy.deepcopy(engine.state_dict())
        for _ in range(accumulation):
            spoil(engine, batches[2], value)
        with pytest.raises(NonFiniteGradientError, match=r"step 3 .*embed.*not applied.*on_nonfinite='skip'"):
            engine.synchronize()
        after = engine.state_dict()
        for name, state in before["optimizer"].items():
            assert all(torch.equal(state[key], after["optimizer"][name][key]) for key in state)
        assert all(torch.equal(tensor, after["module"][name]) for name, tensor in before["module"].items())
        train(engine, batches[:accumulation])


def test_nonfinite_gradients_are_reported_at_the_next_boundary() -> None:
    batches = tokens(2)
    with OffloadEngine(TinyLM()) as engine:
        spoil(engine, batches[0])
        engine.backward(engine(batches[1]))
        with pytest.raises(NonFiniteGradientError, match="step 1"):
            engine.step()


@pytest.mark.parametrize("door", ["save", "load"])
def test_errors_of_nan_and_of_the_update_name_the_last_checkpoint(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, saved = tokens(1)[0], tmp_path / "saved"
    with OffloadEngine(TinyLM()) as engine:
        spoil(engine, batch)
        with pytest.raises(NonFiniteGradientError, match="No checkpoint was saved or loaded yet"):
            engine.synchronize()
        assert engine.last_checkpoint is None
        engine.save_checkpoint(saved)
        assert engine.last_checkpoint == saved
        if door == "save":
            spoil(engine, batch)
            with pytest.raises(NonFiniteGradientError, match=f"The last checkpoint is {str(saved)!r}"):
                engine.synchronize()
    engine = OffloadEngine(TinyLM())
    engine.load_checkpoint(saved)
    assert engine.last_checkpoint == saved

    def broken(self: object, *args: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(update.LayerState, "step", broken)
    engine.backward(engine(batch))
    engine.step()
    with pytest.raises(EngineStateError, match=f"The last checkpoint is {str(saved)!r}"):
        engine.synchronize()
    with pytest.raises(EngineStateError):
        engine.close()


def test_nonfinite_steps_can_be_left_out() -> None:
    batches = tokens(5)
    weights = []
    for spoiled in (False, True):
        torch.manual_seed(0)
        with OffloadEngine(TinyLM(), OffloadConfig(on_nonfinite="skip")) as engine:
            train(engine, batches[:2])
            if spoiled:
                spoil(engine, batches[2])
                with pytest.warns(RuntimeWarning, match="step 3 is nan"):
                    engine.synchronize()
                assert [record.skipped for record in engine.telemetry.records][-1]
            train(engine, batches[3:])
            weights.append(engine.master_weights())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_model_in_a_wrapper_for_several_devices() -> None:
    with pytest.raises(ModelError, match=r"wrapped in DataParallel, which is not needed: pass the module inside"):
        OffloadEngine(nn.DataParallel(TinyLM()), OffloadConfig())


def test_a_model_without_trainable_parameters() -> None:
    model = TinyLM().requires_grad_(False)
    with pytest.raises(ModelError, match=r"no trainable parameters.*requires_grad_"):
        OffloadEngine(model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 3)
    model.extra = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ModelError, match=str(dtype).replace("torch.", r"torch\.")):
        OffloadEngine(model)


def test_integer_parameters_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    with OffloadEngine(model) as engine:
        engine.backward(engine(torch.ones(1, 3)).sum())
        assert engine.step()
        assert model.table.dtype == torch.int64


def test_a_parameter_added_after_the_engine_was_built() -> None:
    model = TinyLM()
    with OffloadEngine(model) as engine:
        model.adapter = nn.Linear(4, 4)
        engine.backward(engine(tokens(1)[0]))
        with pytest.raises(ModelError, match=r"'adapter\.weight' was added, replaced or unfrozen.*build a new one"):
            engine.step()


def test_a_parameter_unfrozen_after_the_engine_was_built() -> None:
    model = TinyLM()
    model.norm.weight.requires_grad_(False)
    with OffloadEngine(model) as engine:
        model.norm.weight.requires_grad_(True)
        engine.backward(engine(tokens(1)[0]))
        with pytest.raises(ModelError, match=r"'norm\.weight' was added, replaced or unfrozen"):
            engine.step()


def test_a_parameter_group_added_after_the_engine_was_built() -> None:
    with (
        OffloadEngine(TinyLM()) as engine,
        pytest.raises(ModelError, match="cannot be added after the engine was built"),
    ):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_step_before_backward() -> None:
    with OffloadEngine(TinyLM()) as engine:
        with pytest.raises(EngineStateError, match="before backward"):
            engine.step()
        with pytest.raises(EngineStateError, match="before backward"):
            engine.optimizer.step()


def test_backward_twice_without_step() -> None:
    batch = tokens(1)[0]
    with OffloadEngine(TinyLM()) as engine:
        engine.backward(engine(batch))
        with pytest.raises(EngineStateError, match="gradient_accumulation"):
            engine.backward(engine(batch))


def test_two_engines_on_one_model_and_use_after_close() -> None:
    model = TinyLM()
    engine = OffloadEngine(model)
    with pytest.raises(EngineStateError, match="close"):
        OffloadEngine(model)
    engine.close()
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine(tokens(1)[0])
    OffloadEngine(model).close()


def test_a_failing_step_is_raised_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object) -> None:
        raise RuntimeError("disk on fire")

    engine = OffloadEngine(TinyLM())
    monkeypatch.setattr(update.LayerState, "step", broken)
    engine.backward(engine(tokens(1)[0]))
    engine.step()
    loss = engine(tokens(1)[0])
    with pytest.raises(EngineStateError) as caught:
        engine.backward(loss)
    assert "disk on fire" in str(caught.value.__cause__)
    with pytest.raises(EngineStateError):
        engine.close()


def test_too_little_ram_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyLM()
    address = model.norm.weight.data_ptr()
    monkeypatch.setattr(host_memory, "ram_available_bytes", lambda: 1 << 20)
    with pytest.raises(OffloadkitError, match=r"need .* of RAM, 1 MiB are available"):
        OffloadEngine(model)
    assert model.norm.weight.data_ptr() == address


def test_too_little_ram_for_inputs_that_wait_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(activations="offload"))) as engine:
        monkeypatch.setattr(host_memory, "ram_available_bytes", lambda: 0)
        with pytest.raises(OffloadkitError, match=r"inputs of recomputed blocks need .* of RAM, 0 KiB are available"):
            engine(tokens(1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be a number >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive, or None"),
        ({"gradient_accumulation": 0}, "gradient_accumulation must be a whole number >= 1, got 0"),
        ({"working_dtype": "fp8"}, "working_dtype must be one of 'auto', 'bf16', 'fp16', 'fp32'; got 'fp8'"),
        ({"precision": "sloppy"}, "precision must be one of 'exact'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of 'raise', 'skip'"),
    ],
)
def test_options_out_of_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**options)  # type: ignore[arg-type]


def test_placements_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="step must be one of 'cpu', 'gpu'; got 'tpu'"):
        Placement(step="tpu")  # type: ignore[arg-type]


def test_placements_that_contradict_themselves() -> None:
    with pytest.raises(ConfigError, match="states='vram' with step='cpu': states in VRAM are stepped by the GPU"):
        Placement(gradients="vram", states="vram")
    with pytest.raises(ConfigError, match=r"states='disk' with step='gpu': .* by the CPU .*states='ram'"):
        Placement(gradients="vram", states="disk", step="gpu")
    with pytest.raises(ConfigError, match="weights='ram' and gradients='vram': where the states are in VRAM"):
        Placement(weights="ram", gradients="vram", states="vram", step="gpu")


def test_sizes_are_read_and_refused() -> None:
    assert parse_bytes("8GiB") == 8 << 30
    assert parse_bytes("1.5 gb") == 1_500_000_000
    assert parse_bytes(" 8589934592") == parse_bytes(8 << 30) == 8 << 30
    for bad in ("eight", "8 parsecs", "", "-1GiB", 0):
        with pytest.raises(ConfigError):
            parse_bytes(bad)


@pytest.mark.parametrize("name", ["vram", "ram"])
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("42", r"'42' is 42 bytes, less than 64 KiB: did you mean '42GiB'\?"),
        (8, r"8 is 8 bytes, less than 64 KiB: did you mean '8GiB'\?"),
        ("42KiB", "'42KiB' is 43,008 bytes, less than 64 KiB: nothing fits that"),
    ],
)
def test_a_budget_without_its_unit_is_refused(name: str, size: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**{name: size})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation": 2}, r"gradient_accumulation: 1 in the plan, 2 in OffloadConfig"),
        ({"activation_checkpointing": True}, r"activation_checkpointing: False in the plan, True in OffloadConfig"),
        ({"placement": Placement(gradients="vram")}, r"placement: None in the plan, Placement\(.*\) in OffloadConfig"),
    ],
)
def test_a_plan_of_another_config_is_refused(options: dict[str, Any], message: str) -> None:
    model = TinyLM()
    address = model.norm.weight.data_ptr()
    with OffloadEngine(TinyLM()) as engine:
        plan = engine.plan
    with pytest.raises(
        ConfigError, match=f"make a plan for this config, or train with the plan's config:\n  {message}"
    ):
        OffloadEngine(model, OffloadConfig(**options), plan=plan)
    assert model.norm.weight.data_ptr() == address
    OffloadEngine(model, OffloadConfig(learning_rate=1e-2), plan=plan).close()


def test_parameter_groups_that_do_not_cover_the_model() -> None:
    model = TinyLM()
    with pytest.raises(ModelError, match=r"in no optimizer group: unused, blocks\.0\.up\.weight.* and 14 more"):
        OffloadEngine(model, param_groups=[{"params": [model.embed.weight]}])
    with pytest.raises(ModelError, match="in two of the param_groups"):
        OffloadEngine(model, param_groups=[{"params": list(model.parameters())}, {"params": [model.norm.weight]}])


def test_a_loss_that_is_not_a_scalar_says_so() -> None:
    with OffloadEngine(nn.Linear(3, 3)) as engine:
        output = engine(torch.ones(2, 3))
        with pytest.raises(ValueError, match=r"scalar.*\(2, 3\)"):
            engine.backward(output)


def test_sparse_gradients_say_what_to_do() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    with OffloadEngine(model) as engine:
        loss = engine(torch.arange(3)).sum()
        with pytest.raises(ModelError, match=r"'0\.weight' has sparse gradients.*sparse=False"):
            engine.backward(loss)


def test_a_saved_run_with_other_groups_or_parameters_loads_nothing() -> None:
    with OffloadEngine(TinyLM()) as engine:
        saved = copy.deepcopy(engine.state_dict())
    model = TinyLM()
    groups = [{"params": [p]} for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    with OffloadEngine(model, param_groups=groups) as engine:
        with pytest.raises(ModelError, match="has 1 parameter groups"):
            engine.load_state_dict(saved)
        del saved["optimizer"]["norm.weight"]
        with pytest.raises(ModelError, match=r"norm\.weight differ"):
            engine.load_state_dict(saved)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_log_is_strict_json_where_a_step_was_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    config = OffloadConfig(on_nonfinite="skip")
    with OffloadEngine(TinyLM(), config, telemetry=Telemetry(log)) as engine:
        spoil(engine, tokens(1)[0])
        with pytest.warns(RuntimeWarning, match="not applied"):
            engine.synchronize()
    (line,) = log.read_text().splitlines()
    record = json.loads(line, parse_constant=pytest.fail)
    assert record["skipped"]
    assert record["grad_norm"] is None


@pytest.mark.parametrize(
    "options",
    [{"maximize": True}, {"amsgrad": True}, {"decoupled_weight_decay": False, "weight_decay": 0.1}, {"momentum": 0.9}],
)
def test_options_of_a_group_that_would_change_the_step_are_refused_by_name(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"{name}=.*lr, betas, eps and weight_decay"):
        OffloadEngine(model, OffloadConfig(), param_groups=[{"params": model.parameters(), **options}], device="cpu")
    theirs = torch.optim.AdamW(model.parameters()).state_dict()
    theirs["param_groups"][0] |= options
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        with pytest.raises(ConfigError, match=f"{name}="):
            engine.optimizer.load_state_dict(theirs)
        engine.optimizer.param_groups[0] |= options
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(ConfigError, match=f"{name}="):
            engine.step()


def test_options_that_change_no_step_and_names_of_the_users_own_are_taken() -> None:
    model = nn.Linear(2, 2)
    groups = [{**torch.optim.AdamW(model.parameters(), foreach=True).param_groups[0], "layer_name": "all"}]
    with OffloadEngine(model, OffloadConfig(), param_groups=groups, device="cpu") as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert engine.step()


@pytest.mark.parametrize("output", [{"loss": torch.ones(())}, (torch.ones(()),), None, 1.5])
def test_backward_of_something_that_is_no_loss_says_so(output: Any) -> None:
    with OffloadEngine(nn.Linear(2, 2), device="cpu") as engine:
        engine(torch.ones(1, 2))
        with pytest.raises(TypeError, match=f"takes the loss, a scalar tensor, and got a {type(output).__name__}"):
            engine.backward(output)
        loss = engine(torch.ones(1, 2)).sum()
        with pytest.raises(EngineStateError, match="loss that requires no gradient"):
            engine.backward(loss.detach())
        engine.backward(loss)  # nothing was lost


def test_a_scripted_module_with_weights_is_named_and_one_without_trains() -> None:
    with pytest.raises(ModelError, match="module '1' is scripted"):
        OffloadEngine(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), device="cpu")
    with OffloadEngine(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU())), device="cpu") as engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        assert engine.step()


@pytest.mark.parametrize("placement", [None, Placement(weights="ram")])
def test_two_engines_and_one_loss_name_what_works_and_it_works(placement: Placement | None) -> None:
    torch.manual_seed(0)
    critic, maker, x = nn.Linear(4, 1), nn.Linear(4, 4), torch.randn(2, 4)
    config = OffloadConfig(placement=placement)
    with (
        OffloadEngine(critic, config, device="cpu") as of_critic,
        OffloadEngine(maker, config, device="cpu") as of_maker,
    ):
        with pytest.raises(EngineStateError, match=r"module\.requires_grad_\(False\)"):
            of_maker.backward(of_critic(of_maker(x)).sum())
        before = critic.weight.detach().clone()
        critic.requires_grad_(False)
        of_maker.backward(of_critic(of_maker(x)).sum())
        assert of_maker.step()
        critic.requires_grad_(True)
        of_critic.backward(of_critic(x).sum())
        assert of_critic.step()
        assert not torch.equal(critic.weight, before)


def with_a_quantiser(model: nn.Module) -> nn.Module:
    model.is_quantized = True  # as set by transformers
    return nn.Sequential(model)


def with_quantised_linears(model: nn.Module) -> nn.Module:
    model[1] = type("Linear", (nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"})(4, 4)
    return model


def with_a_quantised_tensor(model: nn.Module) -> nn.Module:
    kind = type("Int8Params", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    model[1].weight = kind(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize("quantise", [with_a_quantiser, with_quantised_linears, with_a_quantised_tensor])
def test_a_quantised_model_is_refused_by_name_and_adapters_beside_it_train(quantise: Any) -> None:
    model = quantise(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"(module|parameter) '\S+' .* is quantised, .*dequantize"):
        OffloadEngine(model, device="cpu")
    model.peft_config = {"default": object()}
    OffloadEngine(model, device="cpu").close()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "torchao"])
def test_adapters_on_weights_of_other_quantisers_are_refused_by_name(method: str) -> None:
    model = with_a_quantiser(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.peft_config, model[0].quantization_method = {"default": object()}, method
    with pytest.raises(ModelError, match=f"the Sequential under the adapters is quantised by {method}, .*: load it"):
        OffloadEngine(model, device="cpu")


def test_adapters_on_weights_of_8_bit_floating_point_are_refused_by_name() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(model[0].weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    model.peft_config = {"default": object()}
    with pytest.raises(ModelError, match=r"'0\.weight' is torch\.float8_e4m3fn, .*dequantize=True"):
        OffloadEngine(model, device="cpu")


def test_a_quantised_tensor_keeps_its_bits_beside_adapters() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kind: Any = type("Params4bit", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    model[0].weight = kind(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)  # bnb_4bit_quant_storage
    model.peft_config = {"default": object()}
    with OffloadEngine(model, OffloadConfig(working_dtype="fp32"), device="cpu"):
        assert model[0].weight.dtype == torch.bfloat16
        assert type(model[0].weight) is kind


@pytest.mark.parametrize("activations", ["checkpoint", "cheap", "keep"])
@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_autograd_grad_gives_a_gradient_or_says_what_is_not_possible(weights: Any, activations: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), torch.randn(2, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    of_weights = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    placement = Placement(weights=weights, activations=activations)
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
        if weights == "ram" and activations != "keep":
            with pytest.raises(EngineStateError, match=r"torch\.autograd\.grad.*engine\.backward\(loss\)"):
                torch.autograd.grad(engine(x).sum(), x)
        else:
            torch.testing.assert_close(torch.autograd.grad(engine(x).sum(), x)[0], expected)
            found = torch.autograd.grad(engine(x).sum(), list(model.parameters()))
            torch.testing.assert_close(found, of_weights)
        engine.backward(engine(x).sum())
        torch.testing.assert_close(x.grad, expected)
        assert engine.step()


def test_autograd_grad_gives_the_sum_of_a_tied_weights_uses_and_backward_without_the_engine_is_refused() -> None:
    torch.manual_seed(0)
    model = TinyLM(tied=True)
    ids = tokens(1)[0]
    (expected,) = torch.autograd.grad(model(ids), model.embed.weight)
    with OffloadEngine(model, OffloadConfig(placement=Placement()), device="cpu") as engine:
        torch.testing.assert_close(torch.autograd.grad(engine(ids), model.embed.weight)[0], expected)
        with pytest.raises(EngineStateError, match=r"engine\.backward\(loss\)"):
            engine(ids).backward()
        engine.backward(engine(ids))
        assert engine.step()
