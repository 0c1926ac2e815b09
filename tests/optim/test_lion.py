"""Lion: its formula, its C kernel, and the options that a run accepts and refuses."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from offloadkit import OffloadConfig, OffloadEngine
from offloadkit.errors import ConfigError
from offloadkit.kernels import cpu
from offloadkit.optim.lion import LionScalars, lion_scalars
from offloadkit.optim.reference import round_to_fp32, step_reference
from offloadkit.optim.table import Segment
from tests.optim.states import (
    DTYPES,
    assert_same_array_bits,
    assert_same_bits,
    clone,
    forced_level,
    make_gradient,
    make_state,
    special_state,
)

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.1}


def plain_python_step(w: float, m: float, gradient: float, s: LionScalars) -> tuple[float, float]:
    """The formula in Python's fp64, each operation rounded to fp32: as good as rounding the exact result once."""
    r = round_to_fp32
    mean = r(r(s.beta1 * m) + r(s.one_minus_beta1 * gradient))
    direction = (mean > 0) - (mean < 0)
    return r(r(w * s.decay) - r(direction * s.lr)), r(r(s.beta2 * m) + r(s.one_minus_beta2 * gradient))


@pytest.mark.parametrize("step", [step_reference, cpu.optimizer_step], ids=["reference", "c"])
def test_it_is_the_formula_in_plain_python(step) -> None:  # type: ignore[no-untyped-def]
    state, gradient = make_state(torch.float32, 100, optimizer="lion"), make_gradient(torch.float32, 100)
    scalars = lion_scalars(step=4, **OPTIONS)
    rows = zip(state.weights.tolist(), state["exp_avg"].tolist(), gradient.tolist(), strict=True)
    expected = torch.tensor([plain_python_step(*row, scalars) for row in rows], dtype=torch.float64).float()
    step(state, gradient, [Segment(0, 100, scalars)], 1.0)
    for actual, column in zip((state.weights, state["exp_avg"]), expected.unbind(1), strict=True):
        assert_same_array_bits(actual, column.contiguous())


def test_it_steps_by_the_learning_rate_against_the_gradient() -> None:
    state = make_state(torch.float32, 3, optimizer="lion")
    state.weights.zero_(), state["exp_avg"].zero_()
    scalars = lion_scalars(lr=0.5, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0, step=1)
    step_reference(state, torch.tensor([3.0, -1e-3, 0.0]), [Segment(0, 3, scalars)], 1.0)
    assert state.weights.tolist() == [-0.5, 0.5, 0.0]
    assert state["exp_avg"].tolist() == pytest.approx([0.03, -1e-5, 0.0])


@pytest.mark.skipif(not cpu.available(), reason="the C kernels were not built")
@pytest.mark.parametrize("level", cpu.cpu_levels())
def test_the_c_kernel_gives_the_reference_s_bits(level: str) -> None:
    scalars = lion_scalars(step=1, **OPTIONS)
    with forced_level(level):
        for weights, gradients, place in product(DTYPES, DTYPES, ("master", "exp_avg")):
            state, gradient = special_state(weights, gradients, place, optimizer="lion")
            expected, segments = clone(state), [Segment(3, 700, scalars), Segment(900, 64, scalars)]
            for _ in range(3):
                cpu.optimizer_step(state, gradient, segments, 0.7312345)
                step_reference(expected, gradient, segments, 0.7312345)
            assert_same_bits(state, expected)


def test_a_run_keeps_one_moment_and_six_bytes_a_parameter() -> None:
    model = torch.nn.Linear(256, 256, bias=False).bfloat16()
    with OffloadEngine(model, OffloadConfig(optimizer="lion"), device="cpu") as engine:
        assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
        states = engine.plan.tiers["ram"]
        assert states["master weights"] + states["moments"] == 6 * 256 * 256
        before = engine.master_weights()["weight"]
        engine.backward(engine(torch.ones(1, 256).bfloat16()).float().sum())
        engine.step()
        assert engine.optimizer.state[model.weight].keys() == {"step", "remainder", "exp_avg"}
        moved = (engine.master_weights()["weight"] - before).abs()
        assert torch.allclose(moved, torch.full_like(moved, 1e-4), rtol=1e-2)


def test_what_does_not_go_together_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="'lion' with precision='tiny': its moments are kept in 'exact' only"):
        OffloadEngine(model, OffloadConfig(optimizer="lion", precision="tiny"))
    with pytest.raises(ConfigError, match=r"'soap' cannot be offloaded: it rotates .* one of 'adamw', 'lion'"):
        OffloadEngine(model, OffloadConfig(optimizer="soap"))
    with pytest.raises(ConfigError, match="optimizer must be one of 'adamw', 'lion', 'muon'; got 'sgd'"):
        OffloadEngine(model, OffloadConfig(optimizer="sgd"))


def test_a_run_is_not_resumed_with_another_optimizer() -> None:
    def run(optimizer: str) -> OffloadEngine:
        torch.manual_seed(0)
        engine = OffloadEngine(torch.nn.Linear(8, 8), OffloadConfig(optimizer=optimizer), device="cpu")
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        return engine

    with run("lion") as lion, run("adamw") as adamw:
        for saved, other in ((lion, adamw), (adamw, lion)):
            with pytest.raises(ConfigError, match=r"saved optimizer keeps exp_avg.*, but this run's exp_avg.*: resume"):
                other.load_state_dict(saved.state_dict())
            with pytest.raises(ConfigError, match=r"saved optimizer keeps exp_avg.*, but this run's exp_avg.*: resume"):
                other.optimizer.load_state_dict(saved.optimizer.state_dict())
