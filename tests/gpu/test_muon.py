"""Muon on CUDA: torch's bits, the same bits in every placement, and one update close to the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import muon
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels.muon import step_matrices
from offloadkit.optim.muon import muon_scalars
from offloadkit.optim.table import FlatState, Matrix, Segment, state_table
from tests.offload.test_state_ring import IN_VRAM, mixed, trained
from tests.optim.test_muon import OPTIONS, SHAPES

PLACES = {
    "vram": [IN_VRAM],
    "states in RAM": [Placement(step="gpu")],
    "weights in RAM": [Placement(weights="ram", step="gpu")],
    "both": [IN_VRAM, Placement(gradients="vram", step="gpu"), Placement(weights="ram", step="gpu")],
}


@pytest.mark.parametrize("is_transposed", [False, True], ids=["Linear", "Conv1D"])
def test_it_is_torch_s_function(is_transposed: bool) -> None:
    """The torch optimizer gets the transpose of a Conv1D's weight and gradient, as contiguous tensors."""

    def turned(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.T.contiguous() if is_transposed else matrix

    generator = torch.Generator("cuda").manual_seed(0)
    for rows, columns in [*SHAPES, (1024, 4096)]:
        theirs = torch.nn.Parameter(torch.randn(rows, columns, generator=generator, device="cuda"))
        optimizer = torch.optim.Muon([theirs], **OPTIONS)
        flat, matrix = turned(theirs.detach()).flatten().clone(), Matrix(rows, columns, is_transposed)
        ours = FlatState(state_table("muon", "exact", flat.dtype), flat, {"momentum_buffer": torch.zeros_like(flat)})
        segment = Segment(0, rows * columns, muon_scalars(**OPTIONS, step=1), matrix=matrix)
        for _ in range(3):
            theirs.grad = torch.randn(rows, columns, generator=generator, device="cuda")
            optimizer.step()
            step_matrices(ours, turned(theirs.grad).flatten(), [segment], 1.0)
        assert torch.equal(matrix.of(ours.weights), theirs)


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
