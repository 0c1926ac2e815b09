"""Calls of the C kernels (cpu_kernels.c), with bit-equal torch operations as the fallback.

Calls release the GIL and run on the library's thread pool, shared by all Python threads. The pool sleeps between calls
and is recreated after a fork.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offloadkit.errors import warn_once
from offloadkit.facts import hardware
from offloadkit.optim.moments import random_bits, round_stochastically
from offloadkit.optim.reference import split_master, step_reference
from offloadkit.optim.table import OPTIMIZERS, FlatState, Segment, check_state

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_PRECISIONS = {"exact": 0, "compact": 1, "tiny": 2}
_MAX_MOMENTS, _MAX_SCALARS = 2, 8
SLICE = 1 << 18
"""Elements that torch splits or rounds at a time: temporaries in the caches are five times as fast."""
LEVELS = ("baseline", "avx2", "avx512")
_NO_LIBRARY = (
    "offloadkit's C kernels are missing or do not load, so the CPU optimizer step runs on torch operations: the same "
    "result, 5 to 20 times slower (precision compact or tiny: 50 to 200 times). To build them, install a C compiler "
    "(gcc or clang) and reinstall offloadkit: pip install --force-reinstall --no-deps offloadkit, or pip install -e . "
    "in a checkout."
)


_Scalars = ctypes.c_float * _MAX_SCALARS
_Pointers = ctypes.c_void_p * _MAX_MOMENTS


class _Segment(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("scalars", _Scalars),
        ("random_key", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
    ]


class _Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("weights_kind", "gradient_kind", "precision")),
        *((name, ctypes.c_void_p) for name in ("weights", "remainder", "gradient")),
        *((name, _Pointers) for name in ("moments", "scales")),
    ]


class _PlanModel(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("machine", "stages", "layers", "ends", "blocks")),
        *((name, ctypes.c_int64) for name in ("num_stages", "num_layers")),
    ]


_LIBRARY = Path(__file__).with_name("_cpu_kernels.so")


@cache
def c_library() -> ctypes.CDLL | None:
    return load(_LIBRARY) if _LIBRARY.exists() else None


def load(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # built for another machine or a newer libc
        return None
    pointer, c_int, c_int64, c_float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    steps = [name for name in OPTIMIZERS if hasattr(library, f"offloadkit_{name}")]
    signatures: dict[str, tuple[list[Any], Any]] = {
        **dict.fromkeys(steps, ([pointer, pointer, c_int64, c_float], c_int)),
        "accumulate": ([c_int, c_int, pointer, pointer, c_int64], None),
        "split": ([pointer, pointer, pointer, c_int64], None),
        "round": ([pointer, pointer, c_int64, ctypes.c_uint64, c_int64, c_int], None),
        "block_sums": ([c_int, pointer, pointer, c_int64, pointer], None),
        "triad": ([pointer, pointer, c_float, c_int64], None),
        "populate": ([pointer, ctypes.c_uint64], c_int),
        "set_num_threads": ([c_int], None),
        "num_threads": ([], c_int),
        "level_usable": ([c_int], c_int),
        "plan_seconds": ([pointer, pointer, pointer, c_int64, pointer], c_int),
        "force_level": ([c_int], None),
    }
    if not all(hasattr(library, f"offloadkit_{name}") for name in signatures):  # built from an older checkout
        return None
    for name, (arguments, result) in signatures.items():
        function = library[f"offloadkit_{name}"]
        function.argtypes, function.restype = arguments, result
        setattr(library, name, function)
    library.set_num_threads(default_num_threads())
    return library


def available() -> bool:
    return c_library() is not None


def cpu_levels() -> list[str]:
    """Levels that this CPU supports, slowest first, of "baseline", "avx2", "avx512"; [] without the library."""
    library = c_library()
    return [] if library is None else [name for i, name in enumerate(LEVELS) if library.level_usable(i)]


def default_num_threads(num_cores: int | None = None) -> int:
    """Threads for the step: all cores (by affinity and cgroup quota, or `num_cores`) but one for the main thread; at
    least two if possible.

    DataLoader workers need no reserved core. (Gparam/s on an H200 host with 16 cores: 6.3 with 11 threads, 6.7 with 13,
    6.8 with 15.)
    """
    cores = num_cores or hardware.num_cores()
    return max(min(2, cores), cores - 1)


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads per call, including the calling thread. Raises ValueError below 1.

    No effect without the library: `torch.set_num_threads` applies to the fallback.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}: at least 1 is needed")
    library = c_library()
    if library is not None:
        library.set_num_threads(num_threads)


def num_threads() -> int:
    library = c_library()
    return torch.get_num_threads() if library is None else int(library.num_threads())


def optimizer_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One optimizer step in place on CPU arrays, in one pass, bit-equal to `step_reference`."""
    check_state(state, gradient, segments)
    _check_on_cpu(gradient)
    library, table = c_library(), state.table
    if library is None:
        warn_once(_NO_LIBRARY)
    kernel = getattr(library, table.optimizer.name, None) if table.precision in _PRECISIONS else None
    if kernel is None:
        step_reference(state, gradient, segments, grad_scale)
        return
    some = [
        _Segment(start, length, _Scalars(*scalars), key, offset)
        for start, length, scalars, key, offset, _ in segments
        if length > 0
    ]
    if not some:
        return
    pointers = {name: array.data_ptr() for name, array in state.arrays.items()}
    names = [moment.name for moment in table.optimizer.moments]
    arrays = _Arrays(
        *(_KINDS[state.weights.dtype], _KINDS[gradient.dtype], _PRECISIONS[table.precision]),
        *(state.weights.data_ptr(), pointers.get("remainder"), gradient.data_ptr()),
        _Pointers(*(pointers[name] for name in names)),
        _Pointers(*(pointers.get(f"{name}_scale") for name in names)),
    )
    error = kernel(ctypes.byref(arrays), (_Segment * len(some))(*some), len(some), grad_scale)
    if error:
        raise MemoryError(os.strerror(error))


def _check_flat_pair(one: Tensor, other: Tensor, names: str) -> None:
    if one.dim() != 1 or one.shape != other.shape:
        raise ValueError(f"flat arrays of one length are needed, not {one.shape} and {other.shape}")
    if not (one.is_contiguous() and other.is_contiguous()):
        raise ValueError(f"{names} must be contiguous")
    _check_on_cpu(one)
    _check_on_cpu(other)


def accumulate(accumulator: Tensor, gradient: Tensor, *, add: bool) -> None:
    """accumulator += fp32(gradient), or accumulator = fp32(gradient) if not `add`.

    accumulator: fp32; gradient: bf16, fp16 or fp32; both 1-D, contiguous, of equal length, on the CPU. Raises TypeError
    for a wrong dtype, ValueError for a wrong layout.
    """
    if accumulator.dtype != torch.float32 or gradient.dtype not in _KINDS:
        raise TypeError(
            f"the accumulator must be fp32 and the gradient bf16, fp16 or fp32, "
            f"not {accumulator.dtype} and {gradient.dtype}"
        )
    _check_flat_pair(accumulator, gradient, "accumulator and gradient")
    library, kind = c_library(), _KINDS[gradient.dtype]
    if library is not None:
        library.accumulate(kind, add, accumulator.data_ptr(), gradient.data_ptr(), accumulator.numel())
    elif add:
        accumulator.add_(gradient)
    else:
        accumulator.copy_(gradient)


def split_into(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """`split_master` into existing arrays. master: fp32; weights: bf16; remainder: int16; layout and errors as for
    `accumulate`.
    """
    arrays = master, weights, remainder
    if [array.dtype for array in arrays] != [torch.float32, torch.bfloat16, torch.int16]:
        raise TypeError(f"fp32, bf16 and int16 are needed, not {', '.join(str(array.dtype) for array in arrays)}")
    if master.dim() != 1 or len({array.shape for array in arrays}) > 1:
        raise ValueError(f"flat arrays of one length are needed, not {', '.join(str(each.shape) for each in arrays)}")
    if not all(array.is_contiguous() for array in arrays):
        raise ValueError("master weights, weights and remainders must be contiguous")
    for array in arrays:
        _check_on_cpu(array)
    if (library := c_library()) is not None:
        library.split(*(array.data_ptr() for array in arrays), master.numel())
        return
    for begin in range(0, master.numel(), SLICE):
        at = slice(begin, begin + SLICE)
        for half, found in zip((weights, remainder), split_master(master[at]), strict=True):
            half[at].copy_(found)


def round_into(values: Tensor, rounded: Tensor, key: int, *, first: int, moment: int) -> None:
    """Write `moments.round_stochastically` of fp32 moments into bf16 `rounded`, both 1-D; layout and errors as for
    `accumulate`.

    Args:
        key: `moments.random_key` of the parameter and its step.
        first: number of the first element in its parameter.
        moment: 0 or 1, the moment's index, which selects the lower or upper half of the random bits.
    """
    if (values.dtype, rounded.dtype) != (torch.float32, torch.bfloat16):
        raise TypeError(f"fp32 and bf16 are needed, not {values.dtype} and {rounded.dtype}")
    _check_flat_pair(values, rounded, "moments")
    if (library := c_library()) is not None:
        library.round(values.data_ptr(), rounded.data_ptr(), values.numel(), key, first, 16 * moment)
        return
    for begin in range(0, values.numel(), SLICE):
        part = values[begin : begin + SLICE]
        random = random_bits(key, first + begin, part.numel()) >> 16 * moment & 0xFFFF
        rounded[begin : begin + SLICE] = round_stochastically(part, random)


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`dispatch.block_sums` on the CPU; needs the library. `dispatch` checks dtypes and shapes.

    Raises ValueError for a block outside the gradient or longer than 65,536.
    """
    library = c_library()
    assert library is not None
    if blocks.numel():
        starts, lengths = blocks.unbind(1)
        if blocks.min() < 0 or lengths.max() > 65_536 or (starts + lengths).max() > gradient.numel():
            raise ValueError(f"a block leaves the gradient of {gradient.numel()} elements or is longer than 65,536")
    library.block_sums(_KINDS[gradient.dtype], gradient.data_ptr(), blocks.data_ptr(), blocks.shape[0], out.data_ptr())


def triad(a: Tensor, b: Tensor, s: float) -> None:
    """a += s * b on fp32 CPU arrays, to measure DRAM bandwidth. Needs the library."""
    library = c_library()
    if library is None:
        raise RuntimeError(_NO_LIBRARY)
    if a.dtype != torch.float32 or b.dtype != torch.float32 or a.numel() != b.numel():
        raise ValueError("two fp32 arrays of one length are needed")
    if not (a.is_contiguous() and b.is_contiguous()):
        raise ValueError("two contiguous arrays are needed")
    library.triad(a.data_ptr(), b.data_ptr(), s, a.numel())


def populate(address: int, num_bytes: int) -> None:
    """Fault in the pages of [address, address + num_bytes) as writable, on all threads. Contents are kept.

    Raises OSError (such as ENOMEM) if the kernel refuses. The fallback writes one byte per page.
    """
    library = c_library()
    if library is not None:
        error = library.populate(address, num_bytes)
        if error:
            raise OSError(error, f"{num_bytes} bytes of host memory could not be populated: {os.strerror(error)}")
        return
    page = os.sysconf("SC_PAGESIZE")
    memory = (ctypes.c_char * num_bytes).from_address(address)
    for at in range(0, num_bytes, page):
        memory[at] = memory[at]
    if num_bytes:
        memory[num_bytes - 1] = memory[num_bytes - 1]


def step_seconds(
    model: Mapping[str, NDArray[Any]], codes: NDArray[np.int64], levels: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """`StepModel.seconds` of many placements, bit-equal; None without the library.

    Args:
        model: arrays laid out as in cpu_plan.h, with layers in the order of the stages: "machine" (fp64), "stages" and
            "layers" (fp64 [number, costs]), "ends" (int64, end of every stage's layers), "blocks" (int64, per layer).
        codes: [number, number of layers].
        levels: [number, 3] counts of recomputed, offloaded and cheap blocks.

    Returns:
        [number, 4]: seconds of the update phase, of the backward phase, of forward's work and of the CPU step's work.
    """
    if (library := c_library()) is None:
        return None
    names = ("machine", "stages", "layers", "ends", "blocks")
    pointers = (np.ascontiguousarray(model[name]).ctypes.data for name in names)
    whole = _PlanModel(*pointers, len(model["stages"]), len(model["layers"]))
    codes, levels = (np.ascontiguousarray(each, dtype=np.int64) for each in (codes, levels))
    found = np.empty((len(codes), 4))
    arguments = codes.ctypes.data, levels.ctypes.data, len(codes), found.ctypes.data
    error = library.plan_seconds(ctypes.byref(whole), *arguments)
    if error:
        raise MemoryError(os.strerror(error))
    return found


def _check_on_cpu(array: Tensor) -> None:
    if array.device.type != "cpu":
        raise ValueError(f"an array is on {array.device}: this step runs on the CPU")
