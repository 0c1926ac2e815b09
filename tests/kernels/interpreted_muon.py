"""Run with TRITON_INTERPRET=1 by test_muon.py: the kernels of the step of matrices against torch's operations, on CPU
tensors.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from triton.runtime import interpreter

from offloadkit.kernels import muon
from offloadkit.optim.table import Matrix, Segment
from tests.optim.states import DTYPES, assert_same_bits, clone, make_gradient, make_state
from tests.optim.test_muon import scalars


def fma(self: object, x: interpreter.TensorHandle, y: interpreter.TensorHandle, z: interpreter.TensorHandle) -> object:
    """Rounded once, as on a GPU. (The interpreter rounds the product too.)"""
    exact = x.data.astype(np.longdouble) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def main() -> None:
    interpreter.InterpreterBuilder.create_fma = fma
    rows, columns = 33, 96
    for weights, gradients, nesterov, momentum in itertools.product(DTYPES, DTYPES, (True, False), (0.95, 0.3)):
        matrix, numel = Matrix(rows, columns), rows * columns
        workspace = muon.Workspace(torch.zeros(matrix.workspace_bytes, dtype=torch.uint8))
        state, gradient = make_state(weights, numel + 300, optimizer="muon"), make_gradient(gradients, numel + 300)
        state.weights[400], expected = float("nan"), None
        segment = Segment(256, numel, scalars(nesterov=nesterov, momentum=momentum), matrix=matrix)
        for turned in (False, True):
            ours, theirs = clone(state), clone(state)
            update, into = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(columns, rows, dtype=torch.bfloat16)
            of_piece = into.T if turned else into.view(rows, columns)
            muon.launch_write(ours, gradient, segment, 0.73125, of_piece)
            muon.write_update(theirs, gradient, segment, 0.73125, update, workspace)
            assert torch.equal(of_piece, update.view(rows, columns))
            muon.launch_apply(ours, of_piece, segment)
            muon.apply_update(theirs, update, segment, workspace)
            assert_same_bits(ours, theirs)
            assert expected is None or torch.equal(update, expected)
            expected = update
    source, into = torch.randn(100, 70).bfloat16(), torch.empty(70, 100).bfloat16()
    muon.launch_transpose(source, into)
    assert torch.equal(into, source.T)
