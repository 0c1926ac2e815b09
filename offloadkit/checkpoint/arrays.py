"""Read and write safetensors files in pieces, so that only one piece needs extra RAM."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from offloadkit.checkpoint.folder import atomic_write
from offloadkit.errors import ModelError, shown
from offloadkit.facts import files
from offloadkit.facts.threads import ThreadPool

PIECE_BYTES = 64 * 2**20
PART_BYTES, _NUM_READERS = 8 * 2**20, 8
"""Bytes per reader thread; one thread copies only 5 GiB/s from the page cache."""
_HEADER_LENGTH = struct.Struct("<Q")
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class Encoding(NamedTuple):
    """How an array is written in another dtype, piece by piece."""

    dtype: torch.dtype
    encode: Callable[[torch.Tensor, int], torch.Tensor]
    """(1-D CPU tensor of an array's elements, number of its first element) -> as many elements of `dtype`."""


class PeriodicCall:
    """Calls a function after every few pieces, for example to drop pages of mapped memory."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._every, self._since = act, 4 * PIECE_BYTES, 0

    def moved(self, num_bytes: int) -> None:
        self._since += num_bytes
        if self._since >= self._every:
            self.finish()

    def finish(self) -> None:
        self._since = 0
        self._act()


def can_hold(dtype: torch.dtype) -> bool:
    return dtype in _DTYPE_NAMES


def write_arrays(
    path: Path,
    arrays: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    between: PeriodicCall | None = None,
    encodings: Mapping[str, Encoding] | None = None,
) -> None:
    """Write arrays of any device into a safetensors file, atomically.

    Args:
        encodings: encodings by name; an array without an encoding is written in its own dtype.

    Raises:
        ModelError: safetensors does not support an array's dtype.
        OSError: writing fails. An existing file is unchanged.
    """
    encodings = encodings or {}
    dtypes = {name: encodings[name].dtype if name in encodings else array.dtype for name, array in arrays.items()}
    # larger elements first, so every array starts at a multiple of its element size, as readers require
    ordered = sorted(arrays.items(), key=lambda item: -dtypes[item[0]].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    end = 0
    for name, array in ordered:
        if array.dtype not in _DTYPE_NAMES:
            raise ModelError(f"{name!r} is {array.dtype}, which a safetensors file cannot store")
        start, end = end, end + array.numel() * dtypes[name].itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[dtypes[name]],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_write(path) as file:
        file.write(_HEADER_LENGTH.pack(len(encoded)))
        file.write(encoded)
        for name, array in ordered:
            flat = array.detach().reshape(-1).contiguous()
            numel = PIECE_BYTES // array.dtype.itemsize
            for start in range(0, flat.numel(), numel):
                piece = flat[start : start + numel].cpu()
                written = encodings[name].encode(piece, start) if name in encodings else piece
                file.write(written.view(torch.uint8).numpy().data)
                if between is not None:
                    between.moved(piece.nbytes)


@dataclass(frozen=True)
class SavedArray:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _array(name: str, entry: Any, first: int, size: int) -> SavedArray:
    of, given, shape = (entry.get(key) for key in _ENTRY) if isinstance(entry, dict) else (None, None, None)
    offsets, lengths = _whole_numbers(given), _whole_numbers(shape)
    dtype = _DTYPES.get(of) if isinstance(of, str) else None
    if dtype is None or offsets is None or lengths is None or len(offsets) != 2:
        raise ValueError(f"the header entry {shown(name)} has no known dtype, shape or data_offsets")
    start, end = first + offsets[0], first + offsets[1]
    if not start <= end <= size or end - start != prod(lengths) * dtype.itemsize:
        raise ValueError(f"{shown(name)} ends at byte {end}, the file at {size}")
    return SavedArray(dtype, lengths, start, end)


_ENTRY = ("dtype", "data_offsets", "shape")


def _whole_numbers(given: Any) -> tuple[int, ...] | None:
    fine = isinstance(given, list) and all(type(each) is int and each >= 0 for each in given)
    return tuple(given) if fine else None


class ArrayFile:
    """A safetensors file that is open for reading. `metadata` holds strings from the header's `__metadata__`."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` if the file is missing, truncated or not a safetensors file."""
        self.path = path
        if (other := files.why_not_plain(path)) is not None:
            raise ModelError(f"{path} cannot be read: it is {other}, not a file")
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error.strerror})") from error
        try:
            self.arrays, self.metadata = self._header()
        except (OSError, ValueError, struct.error) as error:
            os.close(self._file)
            raise ModelError(f"{path} cannot be read ({error}): it is truncated or corrupt") from error
        self._staging: torch.Tensor | None = None
        self._readers: ThreadPool | None = None

    def _header(self) -> tuple[dict[str, SavedArray], dict[str, str]]:
        size = os.fstat(self._file).st_size
        (length,) = _HEADER_LENGTH.unpack(os.pread(self._file, _HEADER_LENGTH.size, 0))
        first = _HEADER_LENGTH.size + length
        if first > size or length > files.MOST_JSON_BYTES:
            raise ValueError(f"its header ends at byte {first}, but the file at {size}")
        header = files.parse_json(os.pread(self._file, length, _HEADER_LENGTH.size))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its __metadata__ is not an object of strings")
        return {name: _array(name, entry, first, size) for name, entry in header.items()}, metadata

    def read(self, name: str, into: torch.Tensor, between: PeriodicCall | None = None, *, first: int = 0) -> None:
        """Fill the 1-D contiguous tensor `into`, on any device, with an array's elements from `first` on."""
        array = self.arrays[name]
        if into.device.type == "cpu" and into.dtype == array.dtype:
            memory = into.view(torch.uint8)
            for start in range(0, memory.numel(), PIECE_BYTES):
                piece = memory[start : start + PIECE_BYTES]
                self._read_bytes(piece, array.start + first * array.dtype.itemsize + start)
                if between is not None:
                    between.moved(piece.numel())
            return
        for start, piece in self.pieces(name, pinned=into.is_cuda, first=first, numel=into.numel()):
            into[start : start + piece.numel()].copy_(piece)
            if between is not None:
                between.moved(piece.nbytes)

    def pieces(
        self, name: str, *, pinned: bool = False, first: int = 0, numel: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield pairs of first element and 1-D CPU tensor. All tensors share one buffer, so use each before the next.

        `first`, `numel`: part of the array (None: up to the end). Raises as `read`.
        """
        array = self.arrays[name]
        if self._staging is None or self._staging.is_pinned() != pinned:
            self._staging = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        begin = array.start + first * array.dtype.itemsize
        end = array.end if numel is None else begin + numel * array.dtype.itemsize
        for start in range(0, end - begin, PIECE_BYTES):
            piece = self._staging[: min(PIECE_BYTES, end - begin - start)]
            self._read_bytes(piece, begin + start)
            yield start // array.dtype.itemsize, piece.view(array.dtype)

    def _read_bytes(self, into: torch.Tensor, start: int) -> None:
        memory = into.numpy().data
        if memory.nbytes <= PART_BYTES:
            self._read_part(memory, start)
            return
        if self._readers is None:
            self._readers = ThreadPool(min(_NUM_READERS, os.cpu_count() or 1), "offloadkit-reading")
        parts = range(0, memory.nbytes, PART_BYTES)
        for _ in self._readers.map(lambda at: self._read_part(memory[at : at + PART_BYTES], start + at), parts):
            pass  # an error is raised here

    def _read_part(self, memory: memoryview, start: int) -> None:
        while memory.nbytes:
            try:
                num_read = os.preadv(self._file, [memory], start)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be read ({error.strerror})") from error
            if num_read == 0:
                raise ModelError(f"{self.path} cannot be read: it ends {memory.nbytes} bytes early")
            memory, start = memory[num_read:], start + num_read

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown()
        os.close(self._file)
        self._staging = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
