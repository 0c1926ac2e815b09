"""Triton kernels on CUDA, bit-equal to their references: the optimizer step and the gradient norm's block sums.

Without Triton, or if it cannot compile, slower torch operations are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offloadkit.errors import warn_once
from offloadkit.optim.moments import BLOCK
from offloadkit.optim.reference import step_reference
from offloadkit.optim.table import FlatState, Segment, StateTable, check_state

try:
    from offloadkit.kernels import gpu_triton
except ImportError:
    gpu_triton = None  # type: ignore[assignment]

BLOCKS_AT_ONCE = 1536
"""Blocks per launch; the intermediate rows between the two kernels take 12 MiB. A decoder block of T5-3B has 1,027."""


@cache
def available() -> bool:
    """Whether the kernels run on the current CUDA device; warns once if Triton is installed but fails."""
    if gpu_triton is None or not torch.cuda.is_available():
        return False
    gradient = torch.zeros(32, dtype=torch.bfloat16, device="cuda")  # older devices lack bf16
    blocks, out = torch.tensor([[0, 32]], device="cuda"), torch.empty(1, dtype=torch.float64, device="cuda")
    what = "the gradient norm's kernel, so slower torch operations are used"
    return is_built(what, lambda: block_sums(gradient, blocks, out))


def is_built(what: str, run: Callable[[], object]) -> bool:
    """Whether `run` can build and launch its kernels; warns if it fails.

    Args:
        what: the kernels, and what is used instead of them, for the warning.
    """
    try:
        run()
    except torch.OutOfMemoryError:  # not the kernels' fault
        raise
    except Exception as error:  # Triton, its driver and its C compiler raise many types
        warnings.warn(f"Triton could not build {what}: {error}", stacklevel=3)
        return False
    return True


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`dispatch.block_sums` on the gradient's device and current stream; `dispatch` checks the arguments."""
    pieces, at_once = gpu_triton.PIECES, gpu_triton.PIECES_AT_ONCE
    kernels: Any = gpu_triton
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for first in range(0, blocks.shape[0], BLOCKS_AT_ONCE):
            some, sums = blocks, out
            if blocks.shape[0] > BLOCKS_AT_ONCE:
                some, sums = blocks[first : first + BLOCKS_AT_ONCE], out[first : first + BLOCKS_AT_ONCE]
            num_blocks = some.shape[0]
            rows = torch.empty(num_blocks * pieces * 32, dtype=torch.float64, device=gradient.device)
            _launch(kernels.sum_rows_of_pieces, num_blocks * pieces // at_once, gradient, some, rows)
            _launch(kernels.sum_pieces_of_block, num_blocks, rows, sums)


def optimizer_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One optimizer step in place, on CUDA arrays and the current stream, without host synchronization.

    Bit-equal to `step_reference`. Raises as `check_state` does.
    """
    check_state(state, gradient, segments)
    if step_compiles(state.table, gradient.dtype):
        launch_step(state, gradient, segments, grad_scale)
    else:
        step_reference(state, gradient, segments, grad_scale)


@cache
def step_compiles(table: StateTable, gradient: torch.dtype) -> bool:
    """Whether Triton can build the step kernel for these dtypes; warns once if not."""
    if gpu_triton is None:
        _warn_without_step("Triton is not installed")
        return False
    if not hasattr(gpu_triton, table.optimizer.name) or table.precision not in gpu_triton.PRECISIONS:
        _warn_without_step(f"{table.optimizer.name} with {table.precision!r} moments has none")
        return False
    device = "cuda" if torch.cuda.is_available() else "cpu"  # "cpu" for Triton's interpreter

    def zeros(length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    state = FlatState.cut(table, zeros(BLOCK, table.weights_dtype), zeros)
    options = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.0}
    segment = Segment(0, BLOCK, table.optimizer.scalars(**options, step=1))
    try:
        launch_step(state, zeros(BLOCK, gradient), [segment], 0.0)
    except torch.OutOfMemoryError:  # not the kernel's fault
        raise
    except Exception as error:  # the compiler, its driver and the C compiler raise many types
        _warn_without_step(f"{type(error).__name__}: {error}")
        return False
    return True


def _warn_without_step(reason: str) -> None:
    warn_once(
        "There is no Triton kernel for the optimizer step, so it runs on torch operations on the GPU: the same result, "
        f"slower. {reason}",
        stacklevel=4,
    )


def launch_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """Launch the step's kernel. Raises the compiler's errors.

    Missing arrays are passed as the weights, and the kernel does not read them.
    """
    kernel: Any = getattr(gpu_triton, state.table.optimizer.name)
    if not state.of_kernel:
        names = [moment.name for moment in state.table.optimizer.moments]
        state.of_kernel = [
            _as_integers(array)
            for array in (
                state.weights,
                state.arrays.get("remainder", state.weights),
                *(state.arrays[name] for name in names),
                *(state.arrays.get(f"{name}_scale", state.weights) for name in names),
            )
        ]
    weights, remainder, *moments = state.of_kernel
    arrays, is_bf16 = (weights, remainder, _as_integers(gradient), *moments), gradient.dtype == torch.bfloat16
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for start, length, scalars, key, offset, _ in segments:
            if length > 0:
                num_programs = -(-length // (BLOCK * gpu_triton.ROWS))
                random = _signed(key), _signed(key >> 32), offset
                _launch(kernel, num_programs, *arrays, start, length, grad_scale, *scalars, *random, is_bf16)


_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by function, device and what Triton specializes them for."""
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""CUDA's handle of the current stream, by the device's index."""


def _launch(kernel: Any, num_programs: int, *arguments: Any) -> None:
    """`kernel[(num_programs,)](*arguments, enable_fp_fusion=False)`, in less of Python's time.

    A kernel that was compiled for arguments of the same kind is launched without Triton's search for it and without
    Triton's hooks. It gets addresses, because Triton asks CUDA about the memory of each tensor.

    The first argument is a tensor on the current device.
    """
    device = arguments[0].get_device()
    kinds, values = [kernel, device], []
    for argument in arguments:
        value = argument
        if isinstance(argument, float):  # always fp32
            kinds.append(float)
        elif isinstance(argument, Tensor):
            value = argument.data_ptr()
            kinds.append((argument.dtype, value % 16 == 0))
        elif isinstance(argument, bool):  # a constant
            kinds.append(argument)
        else:
            kinds.append((-(2**31) <= argument < 2**31, argument % 16 == 0, argument == 1))
        values.append(value)
    key = tuple(kinds)
    if (compiled := _compiled.get(key)) is not None:
        launched = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(num_programs, 1, 1, _stream_of(device), *launched, *values)
        return
    compiled = kernel[(num_programs,)](*arguments, enable_fp_fusion=False)
    # Triton's interpreter returns nothing. For AMD, kernels also depend on whether a tensor has 2 GiB.
    if gpu_triton.LAUNCHES_TAKE_CONSTANTS and compiled is not None and torch.version.hip is None:
        _compiled[key] = compiled


def _as_integers(array: Tensor) -> Tensor:
    return array.view(torch.int16) if array.dtype == torch.bfloat16 else array


def _signed(bits: int) -> int:
    """Lower 32 bits as a signed number, so that Triton specializes for one type."""
    return (bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
