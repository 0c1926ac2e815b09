"""Reads checkpoint weights directly into their training memory, parameter by parameter.

`read_lazily` lets transformers load the checkpoint with parameters on the meta device, and records the stored tensor of
each parameter. Values are read in pieces when the engine asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn

from offloadkit.errors import ModelError
from offloadkit.hf.hub import readable_hub_errors
from offloadkit.hf.quiet import progress_bars
from offloadkit.offload.unread import become, leave_unread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_BYTES = 128 * 2**20


class ConversionNeededError(Exception):
    """The stored tensors must be converted (quantised, merged) or cannot be mapped."""


class ByteBar:
    """A progress bar in bytes; it appears with the first byte and closes with the last."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._bar: Any = None

    def advance(self, num_bytes: int) -> None:
        from transformers.utils import logging

        if self._bar is None:
            options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
            self._bar = logging.tqdm(desc=self._title, total=self._total, **options)
        self._bar.update(num_bytes)
        self._done += num_bytes
        if self._done >= self._total:
            self._bar.close()


class _File:
    """A safetensors or .bin file, unmapped after each `PIECE_BYTES` read."""

    def __init__(self, path: str) -> None:
        """Raises `ConversionNeededError` for a .bin older than torch 1.6, which cannot be mapped."""
        self._path = path
        self._is_safetensors = path.endswith(".safetensors")
        if not self._is_safetensors and not _begins_as_zip(path):
            raise ConversionNeededError(f"{os.path.basename(path)} is in torch's format before 1.6")
        self._mapping: Any = None
        self._num_read = 0

    def tensors(self) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
        from transformers.modeling_utils import load_state_dict

        stored = load_state_dict(self._path, map_location="meta") if self._is_safetensors else self._open()
        for name, tensor in stored.items():
            yield name, tensor.shape, tensor.dtype
        self.close()

    def read(self, name: str, rows: slice | None, num_bytes: int) -> torch.Tensor:
        """A stored tensor, or its `rows`, of `num_bytes` bytes; may be a view of the file."""
        if self._num_read + num_bytes > PIECE_BYTES:
            self.close()
        self._num_read += num_bytes
        mapping = self._open()
        if not self._is_safetensors:
            return cast(torch.Tensor, mapping[name] if rows is None else mapping[name][rows])
        return cast(torch.Tensor, mapping.get_tensor(name) if rows is None else mapping.get_slice(name)[rows])

    def _open(self) -> Any:
        from safetensors import safe_open

        if self._mapping is None and self._is_safetensors:
            self._mapping = safe_open(self._path, framework="pt")
        elif self._mapping is None:
            self._mapping = torch.load(self._path, map_location="cpu", mmap=True, weights_only=True)
        return self._mapping

    def close(self) -> None:
        self._mapping, self._num_read = None, 0


_MOST_A_TENSOR, _MOST_TENSORS = 1_000, 10_000
"""Generous, because checkpoints may store experts one by one, which are merged into one tensor."""


def _num_tensors(path: str) -> int:
    from safetensors import safe_open

    if not path.endswith(".safetensors"):
        return 0
    with safe_open(path, framework="pt") as file:
        return len(file.keys())


def _begins_as_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


@dataclass(frozen=True, eq=False)
class _Stored:
    """A stored tensor that acts as a safetensors slice for transformers: `[...]` reads a slice, and `.to` returns a
    parameter on the meta device.
    """

    file: _File
    name: str
    shape: torch.Size
    dtype: torch.dtype
    sources: dict[nn.Parameter, _Stored]

    def __getitem__(self, key: Any) -> Self:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
        empty = torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")
        parameter = nn.Parameter(empty, requires_grad=empty.is_floating_point())
        self.sources[parameter] = self
        return parameter

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """The values in pieces of about `PIECE_BYTES` along the first axis; may be views of the file."""
        if self.num_bytes <= PIECE_BYTES:
            yield self.file.read(self.name, None, self.num_bytes)
            return
        row_bytes = self.num_bytes // self.shape[0]
        step = max(1, PIECE_BYTES // row_bytes)
        for begin in range(0, self.shape[0], step):
            rows = slice(begin, min(begin + step, self.shape[0]))
            yield self.file.read(self.name, rows, (rows.stop - begin) * row_bytes)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """The values as `dtype` on the CPU. Without a cast they are a view of the file, as in `from_pretrained`."""
        if dtype == self.dtype:
            return self.file.read(self.name, None, self.num_bytes)
        value = torch.empty(self.shape, dtype=dtype)
        begin = 0
        for piece in self.pieces():
            here = value if piece.shape == value.shape else value[begin : begin + len(piece)]
            here.copy_(piece)
            begin += here.shape[0] if here.dim() else 0
        return value


class WeightFiles:
    def __init__(self, source: str) -> None:
        self._source = source
        self._sources: dict[nn.Parameter, _Stored] = {}
        self._bar: ByteBar | None = None

    def materialise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Read the parameters that are on the meta device. Implements `unread.Materialise`. Raises `ModelError` if a
        file is missing or broken.
        """
        waiting = [parameter for parameter in parameters if parameter.is_meta]
        if self._bar is None:
            self._bar = ByteBar("Reading weights", sum(stored.num_bytes for stored in self._sources.values()))
        sources = {parameter: self._sources[parameter] for parameter in waiting}
        with readable_hub_errors(self._source, found=True):
            for parameter, stored in sources.items():
                become(parameter, stored.value(parameter.dtype))
                self._bar.advance(stored.num_bytes)
        for parameter, stored in sources.items():
            stored.file.close()
            del self._sources[parameter]

    def place(
        self, model: Any, state_dict: dict[str, Any] | None, checkpoint_files: Any, load_config: Any, *_: Any, **__: Any
    ) -> Any:
        """Replaces `PreTrainedModel._load_pretrained_model`, but reads only names, shapes and buffers.

        Raises:
            ConversionNeededError: the stored tensors need a conversion.
            ModelError: the config asks for another shape.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        if load_config.hf_quantizer is not None or state_dict is not None or not checkpoint_files:
            raise ConversionNeededError("its weights are quantised")
        own = len(model.state_dict())
        if (number := sum(map(_num_tensors, checkpoint_files))) > _MOST_A_TENSOR * own + _MOST_TENSORS:
            raise ModelError(
                f"the weight files of {self._source} contain {number:,} tensors, but the model of its config.json has "
                f"{own}: replace them with the files of this model"
            )
        stored = {
            name: _Stored(file, name, shape, dtype, self._sources)
            for file in map(_File, checkpoint_files)
            for name, shape, dtype in file.tensors()
        }
        buffers = [name for name, _ in model.named_buffers()]
        with progress_bars(False):
            info, offloaded = convert_and_load_state_dict_in_model(model, cast(Any, stored), load_config)
        if info.mismatched_keys and not load_config.ignore_mismatched_sizes:  # transformers would initialise them first
            name, saved, own = min(info.mismatched_keys, key=str)
            raise ModelError(
                f"{self._source}: the saved {name!r} has shape {tuple(saved)}, but its config.json asks for "
                f"{tuple(own)}. Use the config of these weights"
            )
        self._read_buffers(model, buffers)
        self._decide_ties(model, info.missing_keys)
        open_questions = info.missing_and_mismatched()
        for name, parameter in model.named_parameters():
            if parameter not in self._sources and name not in open_questions:
                raise ConversionNeededError(f"its tensors must be converted for the model (such as {name!r})")
        return info, offloaded

    def _read_buffers(self, model: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = module._parameters.pop(attribute, None)
            if parameter is not None:
                value = self._sources.pop(parameter).value(parameter.dtype)
                # otherwise transformers would initialise it
                value._is_hf_initialized = True  # type: ignore[attr-defined]
                module.register_buffer(attribute, value)

    def _decide_ties(self, model: Any, missing: set[str]) -> None:
        """Tie the config's tied weights if the files have only one of them, or equal values; transformers cannot
        compare unread values.
        """
        groups: dict[str, list[str]] = {}
        for target, source in model.all_tied_weights_keys.items():
            groups.setdefault(source, [source]).append(target)
        for names in groups.values():
            stored = [name for name in names if name not in missing]
            for name in stored[1:]:
                if self._are_equal(model.get_parameter(stored[0]), model.get_parameter(name)):
                    missing.add(name)
                else:
                    model.all_tied_weights_keys.pop(name)

    def _are_equal(self, one: nn.Parameter, other: nn.Parameter) -> bool:
        if one.shape != other.shape or not {one, other} <= self._sources.keys():
            return False
        first, second = self._sources[one], self._sources[other]
        if first.dtype != second.dtype:
            return torch.equal(first.value(one.dtype), second.value(other.dtype))
        pairs = zip(first.pieces(), second.pieces(), strict=True)
        return all(torch.equal(a.to(one.dtype), b.to(other.dtype)) for a, b in pairs)

    def keep(self, model: nn.Module) -> None:
        used = set(model.parameters())
        self._sources = {parameter: stored for parameter, stored in self._sources.items() if parameter in used}
        leave_unread(self._sources, self.materialise, self._source)


def read_lazily(source: str, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Load a model with its parameters `unread` on the meta device.

    Parameters missing from the files are real and initialised; all buffers are real.

    Args:
        source: folder or hub name, for messages.
        load: calls `from_pretrained`.
    """
    from transformers import PreTrainedModel

    files = WeightFiles(source)
    seam: Any = PreTrainedModel  # `from_pretrained` has no public hook between finding and reading files
    original = seam.__dict__["_load_pretrained_model"]
    seam._load_pretrained_model = staticmethod(files.place)
    try:
        model = load()
    finally:
        seam._load_pretrained_model = original
    files.keep(model)
    return model
