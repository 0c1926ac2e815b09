"""Muon on CUDA: torch's bits, the same bits in every placement, and one update close to the CPU's."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks import muon
from offloadkit.device.graphs import CudaPool, CudaPoolOfStep
from offloadkit.facts.config import MuonOptions, OffloadConfig, Placement
from offloadkit.kernels import muon as kernel
from offloadkit.kernels.muon import step_matrices
from offloadkit.offload.matrix_steps import workspace
from offloadkit.optim.muon import MuonScalars
from offloadkit.optim.table import FlatState, Matrix, Segment, state_table
from tests.offload.test_state_ring import IN_VRAM, mixed, trained
from tests.optim.states import DTYPES, assert_same_bits, make_gradient, make_state
from tests.optim.test_muon import OPTIONS, SHAPES, scalars

CUDA = torch.device("cuda:0")
LARGE = [(1024, 4096), (4096, 1024), (16384, 1024), (3072, 8192), (8192, 3072), (3072, 3072), (1024, 3072)]

PLACES = {
    "vram": [IN_VRAM],
    "states in RAM": [Placement(step="gpu")],
    "weights in RAM": [Placement(weights="ram", step="gpu")],
    "both": [IN_VRAM, Placement(gradients="vram", step="gpu"), Placement(weights="ram", step="gpu")],
}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_it_is_torch_s_function(monkeypatch: pytest.MonkeyPatch, is_transposed: bool) -> None:
    """All iterations are replayed. The torch optimizer gets the transpose of a Conv1D's weight and gradient, as
    contiguous tensors.
    """

    def turned(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.T.contiguous() if is_transposed else matrix

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [*SHAPES, *LARGE]
    memory = workspace(CUDA, [Matrix(*shape, is_transposed) for shape in shapes], MuonOptions())
    monkeypatch.setattr(kernel, "iterated", None)
    for rows, columns in shapes:
        theirs = torch.nn.Parameter(torch.randn(rows, columns, generator=generator, device="cuda"))
        optimizer = torch.optim.Muon([theirs], **OPTIONS)
        flat, matrix = turned(theirs.detach()).flatten().clone(), Matrix(rows, columns, is_transposed)
        ours = FlatState(state_table("muon", "exact", flat.dtype), flat, {"momentum_buffer": torch.zeros_like(flat)})
        segment = Segment(0, rows * columns, scalars(), matrix=matrix)
        for _ in range(3):
            theirs.grad = torch.randn(rows, columns, generator=generator, device="cuda")
            optimizer.step()
            step_matrices(ours, turned(theirs.grad).flatten(), [segment], 1.0, memory)
        assert torch.equal(matrix.of(ours.weights), theirs), (rows, columns)
        assert torch.equal(matrix.of(ours["momentum_buffer"]), optimizer.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_the_kernels_have_the_bits_of_torch_s_operations(monkeypatch: pytest.MonkeyPatch, is_transposed: bool) -> None:
    for weights, gradients, (rows, columns) in product(DTYPES, DTYPES, [(300, 130), (130, 300)]):
        matrix, numel = Matrix(rows, columns, is_transposed), rows * columns
        found = []
        for triton in (kernel.muon_triton, None):
            kernel.compiles.cache_clear()
            monkeypatch.setattr(kernel, "muon_triton", triton)
            state, gradient = make_state(weights, numel + 300, optimizer="muon"), make_gradient(gradients, numel + 300)
            state.weights[400] = float("nan")
            state.weights, state.arrays = state.weights.cuda(), {key: each.cuda() for key, each in state.arrays.items()}
            for nesterov, momentum in product((True, False), (0.95, 0.3)):
                segment = Segment(256, numel, scalars(nesterov=nesterov, momentum=momentum), matrix=matrix)
                step_matrices(state, gradient.cuda(), [segment], 0.73125)
            found.append(state)
        assert_same_bits(*found)
    kernel.compiles.cache_clear()


def test_another_thread_replays_while_this_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of eager work and of graphs are as without the other thread."""
    matrix, s = Matrix(1024, 1024), MuonScalars(*scalars())  # type: ignore[arg-type]
    memory = kernel.Workspace(torch.zeros(matrix.workspace_bytes, dtype=torch.uint8, device=CUDA))
    drawn = torch.zeros(1 << 20, device=CUDA)
    pool = CudaPool(CUDA)
    graph = pool.capture(lambda: (drawn.uniform_(),))

    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        found = []
        for _ in range(100):
            graph.replay()
            found += [drawn.sum(), torch.rand(1 << 20, device=CUDA).sum()]
        return torch.stack(found).cpu()

    expected = draw()
    own = CudaPoolOfStep(CUDA)
    memory.capture([matrix], scalars(), lambda work: own.capture(work).replay)
    monkeypatch.setattr(kernel, "iterated", None)
    stop, errors, replays = threading.Event(), list[BaseException](), list[int]()

    def replay() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                while not stop.is_set():
                    memory.orthogonalized(matrix, s)
                    torch.cuda.current_stream().synchronize()
                    replays.append(1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replay)
    thread.start()
    try:
        found = draw()
        other = pool.capture(lambda: (drawn.uniform_(),))
        other.replay()
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert len(replays) > 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", PLACES)
def test_every_placement_gives_the_same_bits(name: str) -> None:
    options: dict[str, Any] = {"working_dtype": "bf16", "optimizer": "muon"}
    config = OffloadConfig(**options)
    expected = trained("cuda", 4, mixed(config, [IN_VRAM]), **options)
    found = trained("cuda", 4, mixed(config, PLACES[name]), **options)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_update_is_close_to_the_cpu_s() -> None:
    found = muon.updates(tiny=True)["cuda"]
    assert 0 < found["largest_difference"] <= muon.LIMIT
