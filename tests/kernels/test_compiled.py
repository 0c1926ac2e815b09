"""The Triton kernels compiled for the supported capabilities, without such GPUs: shared memory, registers, stack.

They are compiled like a launch would compile them, and never launched. A T4 (7.5) has only the kernels of the step, of
the norm and of matrices: the other kernels need bf16, so models run their own code there.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.kernels import attention, decoder, gpu, linear_cross_entropy, muon
from offloadkit.optim.muon import MuonScalars
from offloadkit.optim.table import FlatState, Matrix, Segment, optimizer_named, state_table

triton: Any = pytest.importorskip("triton", reason="Triton is not installed, so there is no compiler for its kernels")

SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a thread block may take, by capability (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""
REGISTERS = 255
"""Limit of registers per thread, for all capabilities."""
STACK_BYTES = 16
"""Limit of a thread's local memory: a register or a few more, in some versions of Triton."""
CAPABILITIES = [75, 86, 89, 90, 120]
"""T4; RTX 30 and A10; RTX 40, L4 and L40S; H100 and H200; RTX 50 and RTX PRO 6000."""
WITH_BF16 = [number for number in CAPABILITIES if divmod(number, 10) >= attention.LEAST_CAPABILITY]


class AbsentGpu:
    """Triton's driver of an absent GPU. Its device number is its capability, because Triton caches kernels by
    device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A module of kernels whose launches only compile.

    Attributes:
        kernels: compiled kernels by name.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.kernels: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _Launches(self, name, found) if hasattr(found, "warmup") else found


class _Launches:
    def __init__(self, compiled: Compiled, name: str, kernel: Any) -> None:
        self._compiled, self._name, self._kernel = compiled, name, kernel

    def __getitem__(self, grid: Any) -> Any:
        def compile_(*args: Any, **options: Any) -> None:
            self._compiled.kernels[self._name] = self._kernel.warmup(*args, grid=grid, **options)

        return compile_


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The modules of kernels, compiled for the capability of the test."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(driver, "_active", AbsentGpu(request.param))
    found = SimpleNamespace(capability=request.param, gpu=Compiled(gpu.gpu_triton))
    found.attention = Compiled(attention.attention_triton)
    found.decoder = Compiled(decoder.decoder_triton)
    found.loss = Compiled(linear_cross_entropy.linear_cross_entropy_triton)
    found.muon = Compiled(muon.muon_triton)
    monkeypatch.setattr(linear_cross_entropy, "KERNELS", found.loss)
    monkeypatch.setattr(muon, "muon_triton", found.muon)
    monkeypatch.setattr(decoder, "KERNELS", found.decoder)
    monkeypatch.setattr(gpu, "gpu_triton", found.gpu)
    monkeypatch.setattr(attention, "KERNELS", found.attention)
    monkeypatch.setitem(attention.BLOCKS, "cpu", attention.BLOCKS["cuda"])
    return found


def zeros(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype)


def check(kernels: dict[str, Any], capability: int, folder: Path) -> None:
    """Each kernel fits the capability's shared memory and registers."""
    for name, kernel in kernels.items():
        file = folder / f"{name}.cubin"
        file.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        took = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
        print(f"sm_{capability} {name}: {took['REG']} registers, {kernel.metadata.shared} bytes of shared memory")
        assert kernel.metadata.shared <= SHARED_KIB[capability] << 10, name
        assert 0 < took["REG"] <= REGISTERS, name
        assert took["STACK"] + took["LOCAL"] <= STACK_BYTES, f"{name} spills"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", CAPABILITIES, indirect=True)
def test_steps_and_norms_compile(compiled: SimpleNamespace, tmp_path: Path) -> None:
    """The largest step (8-bit moments) and Lion's, with bf16 weights if the capability supports bf16, otherwise fp16.
    `gpu.available` tries the norm of bf16 gradients on every GPU."""
    dtype = torch.bfloat16 if compiled.capability >= 80 else torch.float16
    for optimizer in ("adamw", "lion"):
        precision = optimizer_named(optimizer).precisions[-1]
        table = state_table(optimizer, precision, dtype)
        state = FlatState.cut(table, zeros(4096, dtype), zeros)
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 1}
        segment = Segment(0, 4096, table.optimizer.scalars(**options), 123)
        gpu.launch_step(state, zeros(4096, dtype), [segment], 0.5)
    gpu.block_sums(zeros(65536, torch.bfloat16), torch.tensor([[0, 65536]]), zeros(1, torch.float64))
    assert set(compiled.gpu.kernels) == {"adamw", "lion", "sum_rows_of_pieces", "sum_pieces_of_block"}
    check(compiled.gpu.kernels, compiled.capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [80, *WITH_BF16, 100], indirect=True)
def test_attention_compiles(compiled: SimpleNamespace, tmp_path: Path) -> None:
    """The widest heads, with a mask and dropout: the largest kernels."""
    width = attention.WIDTHS[-1]
    query = torch.zeros((2, 16, 64, width), dtype=torch.bfloat16)
    bias, mask = query.new_zeros((1, 16, 64, 64)), query.new_zeros((2, 1, 64, 64))
    outputs = attention.attention(query, query, query, bias, mask, 1.0, 0.1)
    gradient = torch.zeros_like(outputs[0])
    attention.attention_backward(gradient, query, query, query, bias, mask, *outputs, 1.0, 0.1, True)
    assert set(compiled.attention.kernels) == {"forward", "of_queries", "of_keys_and_values"}
    check(compiled.attention.kernels, compiled.capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", WITH_BF16, indirect=True)
def test_decoder_blocks_compile(compiled: SimpleNamespace, tmp_path: Path) -> None:
    """The widest heads, with a rest that is not rotated, and the widest norm."""
    gate, heads = torch.zeros((64, 4096), dtype=torch.bfloat16), torch.zeros((2, 32, 8, 256), dtype=torch.bfloat16)
    for activation in decoder.ACTIVATIONS:
        decoder.gated_backward_op(decoder.gated_op(gate, gate, activation), gate, gate, activation)
        assert {"gated", "gated_backward"} <= set(compiled.decoder.kernels)
        check(compiled.decoder.kernels, compiled.capability, tmp_path)
    for width, inverse in ((256, False), (128, True)):
        angles = heads.new_zeros((2, 8, width))
        decoder.rotary_op(heads, heads[:, :4], angles, angles, inverse)
        check(compiled.decoder.kernels, compiled.capability, tmp_path)
    for width in (4096, decoder.WIDEST_NORM):
        x, weight = torch.zeros((64, width), dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
        output, scales = decoder.norm_op(x, weight, 1e-6, 1.0)
        decoder.norm_backward_op(output, x, weight, scales, 1.0)
        check(compiled.decoder.kernels, compiled.capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", WITH_BF16, indirect=True)
def test_losses_compile(compiled: SimpleNamespace, tmp_path: Path) -> None:
    """A first and a further chunk of the vocabulary, and the gradient."""
    logits, target = torch.zeros((4, 32000), dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    row = torch.zeros(4)
    for is_first in (True, False):
        linear_cross_entropy._statistics(logits, target, row, row, 0, is_first)
        check(compiled.loss.kernels, compiled.capability, tmp_path)
    linear_cross_entropy._gradient_of_logits(logits, target, row, row, logits, 0)
    assert set(compiled.loss.kernels) == {"statistics", "gradient"}
    check(compiled.loss.kernels, compiled.capability, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", CAPABILITIES, indirect=True)
def test_steps_of_matrices_compile(compiled: SimpleNamespace, tmp_path: Path) -> None:
    """Momentum and weights of a matrix, in rows and in columns, and the copy of a transpose."""
    dtype = torch.bfloat16 if compiled.capability >= 80 else torch.float16
    state = FlatState.cut(state_table("muon", "exact", dtype), zeros(4096, dtype), zeros)
    scalars = MuonScalars(0.0, 1.0, 0.5, True, False, 1e-7, 5, 1.0, 1.0, 1.0)
    segment, update = Segment(0, 4096, scalars, matrix=Matrix(64, 64)), torch.zeros((64, 64), dtype=torch.bfloat16)
    for into in (update, update.T):
        muon.launch_write(state, zeros(4096, dtype), segment, 1.0, into)
        muon.launch_apply(state, into, segment)
        check(compiled.muon.kernels, compiled.capability, tmp_path)
    muon.launch_transpose(update, torch.empty_like(update))
    assert set(compiled.muon.kernels) == {"write", "apply", "transpose"}
    check(compiled.muon.kernels, compiled.capability, tmp_path)


def test_every_kernel_is_compiled_here() -> None:
    """A new module of kernels needs a test in this file."""
    modules = {path.stem for path in Path(gpu.__file__).parent.glob("*_triton.py")}
    assert modules == {f"{name}_triton" for name in ("attention", "decoder", "gpu", "linear_cross_entropy", "muon")}
