"""A safetensors file, written piece by piece: tensors on a GPU are never all in RAM, as they are for `save_file`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

PIECE_BYTES = 16 * 2**20
"""Bytes of a tensor that are in RAM at once beside it."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""dtypes as the format names them, without the newest ones."""


def can_write(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether `write_tensors` knows the dtypes of all, and all are contiguous."""
    return all(tensor.dtype in _NAMES and tensor.is_contiguous() for tensor in tensors.values())


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors`, on any device, as `safetensors.torch.save_file` does. An old file at `path` stays until the end.

    Args:
        tensors: by name; see `can_write`. One that is there under two names is written twice.
        metadata: text for the file's header.

    Raises:
        OSError: the file could not be written. Nothing of it is left.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide elements first, as the library does: so each tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    target = Path(path)
    new = target.with_name(f".{target.name}-new")
    try:
        with open(new, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in order:
                for piece in _pieces(tensors[name]):
                    file.write(piece)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor in order, `PIECE_BYTES` at a time; of one in RAM they are views."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), PIECE_BYTES):
        yield flat[begin : begin + PIECE_BYTES].cpu().numpy().data
