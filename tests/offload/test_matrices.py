"""Runs with Muon: its weights, equality with torch's optimizers, placements, resuming, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadkit
from offloadkit import MuonOptions, OffloadConfig, OffloadEngine, Placement
from offloadkit.device import graphs
from offloadkit.device.graphs import RunAgain
from offloadkit.errors import ConfigError
from offloadkit.offload import matrix_steps
from offloadkit.offload.layers import flat_layers
from offloadkit.optim.muon import newton_schulz_flops
from offloadkit.optim.table import FlatState
from offloadkit.planner.layout import check_matrices
from offloadkit.planner.make import placed

PLACEMENTS = {
    "default": None,
    "cpu": Placement(),
    "disk": Placement(states="disk"),
    "vram": Placement(states="vram", gradients="vram", step="gpu"),
    "streamed": Placement(states="ram", step="gpu"),
    "gradients in vram": Placement(states="ram", gradients="vram", step="gpu"),
    "weights in ram": Placement(weights="ram", step="gpu"),
}


class Conv1D(nn.Module):
    """Like transformers' Conv1D: the weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.1), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), Conv1D(32, 48)
        self.router = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh()) * self.router(x).softmax(-1)[..., :1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MATRICES = {f"blocks.{at}.{name}.weight" for at in range(3) for name in ("up", "down")}


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


def trained(engine: OffloadEngine, steps: int, first: int = 0) -> dict[str, Tensor]:
    for step in range(first, first + steps * engine.config.gradient_accumulation):
        engine.backward(loss_of(engine, step))
        engine.step()
    return engine.master_weights()


def config(**changed: Any) -> OffloadConfig:
    return OffloadConfig(**{"optimizer": "muon", "learning_rate": 1e-2, "max_grad_norm": 0.5} | changed)


def engine_of(model: nn.Module | None = None, groups: Any = None, **changed: Any) -> OffloadEngine:
    return OffloadEngine(model or Model(), config(**changed), param_groups=groups, device="cpu")


def optimizers(layers: Any) -> dict[str, str]:
    return {view.name: layer.kind.optimizer for layer in layers for view in layer.views}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_it_trains_as_torch_s_muon_and_adamw(adjust: Any) -> None:
    """After the first step, the master weights of the matrices have the bits of torch.optim.Muon."""
    theirs = Model()
    named = dict(theirs.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    turned = {name: nn.Parameter(named[name].detach().T.contiguous()) for name in MATRICES if "down" in name}
    muon = [turned.get(name, named[name]) for name in sorted(MATRICES)]
    others = [parameter for name, parameter in named.items() if name not in MATRICES]
    steps = [
        torch.optim.Muon(muon, lr=2e-2, momentum=0.9, adjust_lr_fn=adjust),
        torch.optim.AdamW(others, lr=1e-2, weight_decay=0.02),
    ]
    options = MuonOptions(learning_rate=2e-2, momentum=0.9, adjust_lr_fn=adjust)
    with engine_of(max_grad_norm=None, weight_decay=0.02, muon=options) as ours:
        for step in range(2):
            trained(ours, 1, step)
            loss_of(theirs, step).backward()
            for name, parameter in turned.items():
                parameter.grad = named[name].grad.T.contiguous()
            for each in steps:
                each.step()
                each.zero_grad()
            with torch.no_grad():
                for name, parameter in turned.items():
                    named[name].copy_(parameter.T)
                    named[name].grad = None
            for name, weights in ours.master_weights().items():
                # AdamW's last bits differ from torch's, and Newton-Schulz in bf16 enlarges the difference.
                moved = (named[name] - before[name]).norm()
                assert (weights - named[name]).norm() <= (0.05 if step else 1e-4) * moved, name
                if step == 0 and name in MATRICES:
                    assert torch.equal(weights, named[name]), name


@pytest.mark.parametrize(("dtype", "accumulation"), [("bf16", 1), ("bf16", 2), ("fp16", 1), ("fp32", 2)])
def test_every_placement_gives_the_same_bits(tmp_path: Path, dtype: str, accumulation: int) -> None:
    found = {}
    for name, placement in PLACEMENTS.items():
        more = {"working_dtype": dtype, "gradient_accumulation": accumulation, "disk": str(tmp_path)}
        with engine_of(placement=placement, **more) as engine:
            found[name] = trained(engine, 2)
            states = engine.state_dict()["optimizer"]["blocks.1.down.weight"]
            assert states["momentum_buffer"].shape == (48, 32)
            if name == "streamed":  # no copy in RAM of weights that the CPU never steps
                others = [layer for layer in engine.plan.layers if not layer.matrices]
                assert engine.plan.tiers["ram"]["working weights"] == sum(layer.weight_bytes() for layer in others)
            found[name] |= {key: array.clone() for key, array in states.items()}
    for name, arrays in found.items():
        for key, array in arrays.items():
            assert torch.equal(array, found["cpu"][key]), (name, key)


def test_states_in_ram_pass_between_steps_of_layers_in_vram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 1 has its two matrices' states in RAM: each is followed by a layer in VRAM."""
    found, step = list[int](), matrix_steps.optimizer_step

    def noted(state: FlatState, *args: Any) -> None:
        found.append(state["momentum_buffer"].numel())
        step(state, *args)

    with engine_of(placement=PLACEMENTS["vram"]) as engine:
        expected = trained(engine, 2)
    with engine_of(placement=PLACEMENTS["vram"]) as engine:
        streamed = [layer.name == "blocks.1" and bool(layer.matrices) for layer in engine.plan.layers]
        engine.move(placed(engine.plan, [Placement(step="gpu") if each else PLACEMENTS["vram"] for each in streamed]))
        monkeypatch.setattr(matrix_steps, "optimizer_step", noted)
        trained(engine, 1)
        engine.synchronize()
        assert found == [1536, 3072, 3072, 1536, 3072, 3072]
        weights = trained(engine, 1, 1)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_graphs_of_the_iterations_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move allocates another workspace, and its graphs are captured anew."""
    with engine_of(placement=PLACEMENTS["vram"]) as engine:
        expected = trained(engine, 4)
    pools: list[RunAgain] = []

    def pool(device: torch.device) -> RunAgain:
        pools.append(RunAgain(device))
        return pools[-1]

    monkeypatch.setitem(graphs.pools_of_step, "cpu", pool)
    with engine_of(placement=PLACEMENTS["vram"]) as engine:
        trained(engine, 2)
        engine.move(
            placed(
                engine.plan,
                [Placement(step="gpu") if layer.matrices else PLACEMENTS["vram"] for layer in engine.plan.layers],
            )
        )
        found = trained(engine, 2, 2)
    assert len(pools) == 2
    assert all(pool.newest is not None for pool in pools)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_which_weights_it_steps() -> None:
    layers = flat_layers(Model(), config())
    assert {name for name, optimizer in optimizers(layers).items() if optimizer == "muon"} == MATRICES
    assert {len(layer.shape().matrices) for layer in layers} == {0, 2}
    assert next(filter(None, (layer.shape().matrices for layer in layers))) == ((32, 48, True), (48, 32, False))


def test_tied_weights_adapters_and_the_head_are_left_to_adamw() -> None:
    model = Model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[2].lora_A = nn.Linear(32, 4)
    model.get_output_embeddings = lambda: model.blocks[2].up  # type: ignore[assignment]
    found = optimizers(flat_layers(model, config()))
    assert {name for name, optimizer in found.items() if optimizer == "muon"} == {
        f"blocks.{at}.down.weight" for at in range(3)
    }


def test_groups_are_divided_and_keep_their_options() -> None:
    model = Model()
    decays = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decays, "weight_decay": 0.3, "lr": 3e-3}, {"params": others, "weight_decay": 0.0}]
    with engine_of(model, groups, muon=MuonOptions(weight_decay=0.05)) as engine:
        muon, adamw, rest = engine.optimizer.param_groups
        assert (muon["optimizer"], muon["lr"], muon["weight_decay"], muon["eps"]) == ("muon", 3e-3, 0.05, 1e-7)
        assert (adamw["optimizer"], adamw["lr"], adamw["weight_decay"], adamw["eps"]) == ("adamw", 3e-3, 0.3, 1e-8)
        assert (rest["optimizer"], rest["lr"], rest["weight_decay"]) == ("adamw", 1e-2, 0.0)
        assert len(muon["params"]) == 6
        trained(engine, 1)


def test_a_group_may_name_its_optimizer() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        rest = [parameter for name, parameter in named.items() if name not in MATRICES]
        return [
            {"params": [named[name] for name in sorted(MATRICES)], "optimizer": "muon", "momentum": 0.8, "lr": 5e-3},
            {"params": rest, "optimizer": "lion"},
        ]

    model = Model()
    with engine_of(model, groups(model), optimizer="adamw") as engine:
        assert engine.optimizer.param_groups[0]["momentum"] == 0.8
        assert engine.optimizer.param_groups[1]["betas"] == (0.9, 0.99)
        trained(engine, 1)
        assert engine.optimizer.state[model.head.weight].keys() == {"step", "exp_avg"}
        assert engine.optimizer.state[model.blocks[0].up.weight].keys() == {"step", "momentum_buffer"}
        engine.optimizer.param_groups[0]["momentum"] = 2.0
        engine.backward(loss_of(engine, 9))
        with pytest.raises(ConfigError, match=r"momentum of Muon must be a number in \[0, 1\), got 2.0"):
            engine.step()
    model = Model()
    with pytest.raises(ConfigError, match=r"param_groups\[0\] has optimizer='muon', .* holds 'embedding.weight'"):
        engine_of(model, [{"params": list(model.parameters()), "optimizer": "muon"}])
    with pytest.raises(ConfigError, match="optimizer must be one of 'adamw', 'lion', 'muon'; got 'sgd'"):
        engine_of(model, [{"params": list(model.parameters()), "optimizer": "sgd"}])


@pytest.fixture(params=["checkpoint", "state_dict"])
def resumes(request: Any, tmp_path: Path) -> Callable[[OffloadEngine, OffloadEngine | None], None]:
    def resume(saved: OffloadEngine, new: OffloadEngine | None) -> None:
        if request.param == "checkpoint":
            new.load_checkpoint(tmp_path / "saved") if new else saved.save_checkpoint(tmp_path / "saved")
        elif new:
            new.load_state_dict(torch.load(tmp_path / "saved.pt"))
        else:
            torch.save(saved.state_dict(), tmp_path / "saved.pt")

    return resume


def test_a_run_goes_on_bit_for_bit_under_another_placement(resumes: Any) -> None:
    with engine_of(placement=PLACEMENTS["streamed"], working_dtype="bf16") as one:
        trained(one, 2)
        resumes(one, None)
        expected = trained(one, 2, 2)
        with engine_of(placement=PLACEMENTS["cpu"], working_dtype="bf16") as other:
            resumes(one, other)
            found = trained(other, 2, 2)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_is_not_resumed_with_another_optimizer(tmp_path: Path) -> None:
    with engine_of() as muon, engine_of(optimizer="adamw") as adamw:
        for saved, other in ((muon, adamw), (adamw, muon)):
            trained(saved, 1)
            saved.save_checkpoint(tmp_path / "saved")
            with pytest.raises(ConfigError, match="the run was saved with optimizer="):
                other.load_checkpoint(tmp_path / "saved")


def test_moving_the_matrices_alone_changes_no_bit() -> None:
    with engine_of() as one, engine_of() as other:
        for at, placement in enumerate((PLACEMENTS["vram"], PLACEMENTS["weights in ram"], PLACEMENTS["cpu"])):
            trained(one, 1, at)
            trained(other, 1, at)
            wheres = [placement if layer.matrices else PLACEMENTS["vram"] for layer in other.plan.layers]
            other.move(placed(other.plan, wheres))
        expected, found = trained(one, 1, 9), trained(other, 1, 9)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'muon' with precision='compact': its moments are kept in 'exact' only"):
        engine_of(precision="compact")
    shapes = [layer.shape() for layer in flat_layers(Model(), config())]
    for placement, said in ((Placement(), "step='cpu'"), (Placement(states="disk"), "states='disk'")):
        with pytest.raises(ConfigError, match=rf"Placement\({said}\) for 'blocks.0', whose matrices Muon steps"):
            check_matrices(shapes, [placement] * len(shapes))
    with pytest.raises(ConfigError, match="optimizer='muon' finds no matrix to step"):
        engine_of(nn.Linear(4, 4))
    check_matrices(shapes, [Placement() if not shape.matrices else PLACEMENTS["streamed"] for shape in shapes])
    for name, value, said in (
        ("muon", 3, "muon must be an offloadkit.MuonOptions, got 3"),
        ("muon", {"momentum": 1.0}, r"momentum of Muon must be a number in \[0, 1\), got 1.0"),
        ("muon", {"weight_decay": -1}, "weight_decay of Muon must be a number >= 0, got -1"),
        ("muon", {"ns_steps": 100}, "ns_steps of Muon must be a whole number from 1 to 99, got 100"),
        ("muon", {"nesterov": 1}, "nesterov of Muon must be True or False, got 1"),
        ("muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients of Muon must be three numbers"),
        ("muon", {"adjust_lr_fn": "none"}, "adjust_lr_fn of Muon must be one of 'match_rms_adamw', 'original'; got"),
    ):
        with pytest.raises(ConfigError, match=said):
            config(**{name: MuonOptions(**value) if isinstance(value, dict) else value})


def test_the_plan_counts_flops_slots_and_the_workspace() -> None:
    plan = offloadkit.plan("t5-3b", gpu="RTX 4090", batch_size=4, ram="64GiB", vram="20GiB", offload=config())
    matrices = [matrix for layer in plan.layers for matrix in layer.matrices]
    assert len(matrices) == 24 * 6 + 24 * 10
    assert all(where.step == "gpu" for where, layer in zip(plan.placements, plan.layers, strict=True) if layer.matrices)
    largest = max(matrices, key=lambda matrix: matrix.workspace_bytes)
    numel = largest.rows * largest.columns
    passing = [
        layer.passing_bytes(where, 1)
        for where, layer in zip(plan.placements, plan.layers, strict=True)
        if layer.matrices and where.states == "ram"
    ]
    assert min(passing) >= 6 * numel
    assert plan.tiers["vram"]["state buffers"] == 3 * max(passing) + largest.workspace_bytes
    assert plan.seconds is not None
    flops = sum(newton_schulz_flops(matrix.rows, matrix.columns) for matrix in matrices)
    assert plan.basis.hardware is not None
    assert plan.seconds.busy["GPU step"] > flops / plan.basis.hardware.bf16_flops_per_second
