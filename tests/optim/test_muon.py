"""Muon: equality with torch.optim.Muon and of workspace and reference steps, and its declared numbers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadkit import errors
from offloadkit.device.graphs import RunAgain
from offloadkit.facts.config import MuonOptions
from offloadkit.kernels import muon as kernel
from offloadkit.optim import muon as formula
from offloadkit.optim.muon import muon_scalars, newton_schulz_flops
from offloadkit.optim.reference import join_master, step_reference
from offloadkit.optim.table import FlatState, Matrix, Segment, state_table
from tests.optim.states import DTYPES, assert_same_bits, clone, make_gradient, make_state, set_master

OPTIONS: dict[str, Any] = {
    "lr": 0.0123,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}
SHAPES = [(64, 48), (48, 64), (128, 128), (7, 300), (129, 257)]
STEPS = [step_reference, kernel.step_matrices]


def scalars(**changed: Any) -> tuple[float, ...]:
    own = OPTIONS | changed
    return muon_scalars(lr=own.pop("lr"), options=MuonOptions(**own), step=1)


def fp32_state(weights: Tensor) -> FlatState:
    flat = weights.flatten().clone()
    return FlatState(state_table("muon", "exact", torch.float32), flat, {"momentum_buffer": torch.zeros_like(flat)})


@pytest.mark.parametrize("step", STEPS, ids=["reference", "workspace"])
@pytest.mark.parametrize(("nesterov", "adjust"), list(product([True, False], ["original", "match_rms_adamw"])))
@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_it_is_torch_s_function(step: Any, nesterov: bool, adjust: str, is_transposed: bool) -> None:
    """The torch optimizer gets the transpose of a Conv1D's weight and gradient, as contiguous tensors."""

    def turned(matrix: Tensor) -> Tensor:
        return matrix.T.contiguous() if is_transposed else matrix

    options = OPTIONS | {"nesterov": nesterov, "adjust_lr_fn": adjust}
    generator = torch.Generator().manual_seed(0)
    for rows, columns in SHAPES:
        theirs = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
        optimizer = torch.optim.Muon([theirs], **options)
        ours, matrix = fp32_state(turned(theirs.detach())), Matrix(rows, columns, is_transposed)
        segment = Segment(0, rows * columns, scalars(**options), matrix=matrix)
        for _ in range(3):
            theirs.grad = torch.randn(rows, columns, generator=generator)
            optimizer.step()
            step(ours, turned(theirs.grad).flatten(), [segment], 1.0)
        assert torch.equal(matrix.of(ours.weights), theirs)
        assert torch.equal(matrix.of(ours["momentum_buffer"]), optimizer.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize(
    ("is_captured", "is_transposed"), [(False, True), (True, False)], ids=["eager Conv1D", "captured Linear"]
)
def test_the_workspace_gives_the_reference_s_bits(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool, is_transposed: bool
) -> None:
    """Two of three matrices in one layer are stepped, in slices of three rows, in a workspace that held NaN."""
    monkeypatch.setattr(formula, "SLICE", 300)
    matrices = [Matrix(33, 96, is_transposed), Matrix(96, 33, is_transposed), Matrix(64, 64, is_transposed)]
    starts = [0, 3328, 6656]
    segments = [
        Segment(start, matrix.rows * matrix.columns, scalars(), matrix=matrix)
        for start, matrix in zip(starts[1:], matrices[1:], strict=True)
    ]
    memory = torch.full((max(matrix.workspace_bytes for matrix in matrices),), 255, dtype=torch.uint8)
    workspace, pool = kernel.Workspace(memory), RunAgain(torch.device("cpu"))
    if is_captured:
        workspace.capture(matrices, scalars(), lambda work: pool.capture(work).replay)
    for weights, gradients in product(DTYPES, DTYPES):
        state, gradient = make_state(weights, 11_000, optimizer="muon"), make_gradient(gradients, 11_000)
        state.weights[3400] = float("nan")
        expected = clone(state)
        for _ in range(2):
            kernel.step_matrices(state, gradient, segments, 0.7312345, workspace)
            step_reference(expected, gradient, segments, 0.7312345)
        assert_same_bits(state, expected)
    assert (pool.newest is not None) == is_captured


def test_other_scalars_than_the_captured_ones_are_iterated() -> None:
    matrix = Matrix(48, 64)
    workspace = kernel.Workspace(torch.zeros(matrix.workspace_bytes, dtype=torch.uint8))
    pool = RunAgain(torch.device("cpu"))
    workspace.capture([matrix], scalars(), lambda work: pool.capture(work).replay)
    for changed in ({"lr": 0.5, "momentum": 0.5, "nesterov": False, "weight_decay": 0.5}, {"ns_steps": 3}):
        assert pool.newest is None
        state, gradient = make_state(torch.float32, 48 * 64, optimizer="muon"), make_gradient(torch.float32, 48 * 64)
        expected, segments = clone(state), [Segment(0, 48 * 64, scalars(**changed), matrix=matrix)]
        kernel.step_matrices(state, gradient, segments, 1.0, workspace)
        step_reference(expected, gradient, segments, 1.0)
        assert_same_bits(state, expected)
        assert (pool.newest is None) == ("ns_steps" in changed)
        pool.newest = None


def cannot_capture(work: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_without_graphs_the_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "warned", set())
    matrix, state = Matrix(64, 48), make_state(torch.float32, 48 * 64, optimizer="muon")
    workspace = kernel.Workspace(torch.zeros(matrix.workspace_bytes, dtype=torch.uint8))
    with pytest.warns(UserWarning, match="no CUDA graphs.*not permitted"):
        workspace.capture([matrix, Matrix(48, 64)], scalars(), cannot_capture)
    expected, gradient = clone(state), make_gradient(torch.float32, 48 * 64)
    segments = [Segment(0, 48 * 64, scalars(), matrix=matrix)]
    kernel.step_matrices(state, gradient, segments, 1.0, workspace)
    step_reference(expected, gradient, segments, 1.0)
    assert_same_bits(state, expected)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernels_interpreted_on_the_cpu_have_torch_s_bits() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    code = "from tests.kernels.interpreted_muon import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_split_master_weight_moves_by_updates_that_bf16_would_lose() -> None:
    state, before = make_state(torch.bfloat16, 64 * 64, optimizer="muon"), torch.full((64 * 64,), 0.02)
    set_master(state, before)
    state["momentum_buffer"].zero_()
    segment = Segment(0, 64 * 64, scalars(lr=1e-5, weight_decay=0.0), matrix=Matrix(64, 64))
    step_reference(state, torch.randn(64 * 64, generator=torch.Generator().manual_seed(0)), [segment], 1.0)
    assert state.remainder is not None
    moved = (join_master(state.weights, state.remainder) - before).view(64, 64) / -1e-5
    assert 0.6 < torch.linalg.svdvals(moved.double()).median() < 1.3


def test_a_matrix_is_stepped_as_a_whole() -> None:
    state, gradient = make_state(torch.float32, 1024, optimizer="muon"), make_gradient(torch.float32, 1024)
    for matrix in (None, Matrix(16, 32)):
        for step in STEPS:
            with pytest.raises(ValueError, match=r"muon steps matrices: .* has not 1024 elements"):
                step(state, gradient, [Segment(0, 1024, scalars(), matrix=matrix)], 1.0)


def test_flops_of_llama_8b() -> None:
    per_block = 2 * newton_schulz_flops(4096, 4096) + 2 * newton_schulz_flops(1024, 4096)
    per_block += 2 * newton_schulz_flops(14336, 4096) + newton_schulz_flops(4096, 14336)
    assert 32 * per_block == pytest.approx(0.65e15, rel=0.03)
