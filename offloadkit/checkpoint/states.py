"""Optimizer states on disk, by parameter name and element range.

Each rank writes one safetensors file of 1-D arrays; a checkpoint of the weights alone has none. Metadata records each
array's name ("exp_avg"), parameter, first element, length and whole length, so any run can read its own ranges from all
files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from offloadkit.checkpoint.arrays import ArrayFile, Encoding, PeriodicCall, write_arrays
from offloadkit.checkpoint.folder import contents_of
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.values import why_unlike
from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts import files
from offloadkit.facts.config import Contents
from offloadkit.kernels.cpu import round_into
from offloadkit.optim.moments import random_key
from offloadkit.optim.table import CHECKPOINT_CONTENTS, MOMENT_INDEX, saved_dtype

STATE_FILES = "states-*-of-*.safetensors"
_RESUME_ALIKE = "resume with the optimizer, precision and working dtype that the run was saved with"

States = Mapping[str, Mapping[str, torch.Tensor]]
"""Live arrays by parameter name and array name, as in `OffloadEngine.state_dict()["optimizer"]`."""
Ranges = Mapping[str, Mapping[str, tuple[int, int]]]
"""Start of each live array in the parameter's whole array, and the length of the whole array."""


def write_states(
    folder: Path,
    states: States,
    ranges_of: Ranges,
    shapes: Mapping[str, Sequence[int]],
    between: PeriodicCall,
    origin: Origin,
    contents: Contents,
    seed: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Write one rank's `states` into `folder`; rank 0 also arrays that all ranks share.

    Args:
        shapes: full shapes of the parameters.
        contents: which states are written; nothing is written if none are.
        seed: seed of stochastic rounding. The bits also follow from the parameter's name, its step and the element, so
            they do not depend on ranges or ranks.
    """
    if not CHECKPOINT_CONTENTS[contents].has_states:
        return
    arrays, ranges, encodings = {}, {}, {}
    for parameter, state in states.items():
        for name, array in state.items():
            (start, of), flat = ranges_of[parameter][name], array.reshape(-1)
            if (not flat.numel() and (of or rank)) or (name == "step" and rank):
                continue
            key = f"{parameter}/{name}[{start}:{start + flat.numel()}]"
            arrays[key] = flat
            dtype = saved_dtype(name, array.dtype, contents)
            assert dtype is not None, "these contents have states"
            if dtype != array.dtype:
                random = random_key(seed, parameter, int(state["step"]))
                encodings[key] = Encoding(dtype, partial(_rounded, random, start, MOMENT_INDEX[name]))
            ranges[key] = {
                "array": name,
                "parameter": parameter,
                "start": start,
                "length": flat.numel(),
                "of": of,
                "dtype": str(dtype).removeprefix("torch."),
            }
    metadata: dict[str, Any] = {"rank": rank, "ranks": num_ranks, "ranges": ranges}
    metadata["parameters"] = {parameter: list(shape) for parameter, shape in shapes.items()}
    file = f"states-{rank:05}-of-{num_ranks:05}.safetensors"
    texts = origin.of_arrays(file) | {name: json.dumps(value) for name, value in metadata.items()}
    write_arrays(folder / file, arrays, texts, between, encodings)


def _rounded(key: int, begin: int, moment: int, values: torch.Tensor, first: int) -> torch.Tensor:
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(values, rounded, key, first=begin + first, moment=moment)
    return rounded


_FACTS = {"rank": 0, "ranks": 0, "ranges": {}, "parameters": {}}
_RANGE = {"parameter": "", "array": "", "start": 0, "length": 0, "of": 0}
"""Required fields of the metadata and of each range in it."""


class _Range(NamedTuple):
    file: ArrayFile
    key: str
    start: int
    length: int
    of: int


class SavedStates:
    """The optimizer states in a checkpoint folder, if it has any. Only headers are read before `load`.

    Attributes:
        contents: what the manifest says that the checkpoint holds.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` if a rank's file is missing, truncated or broken, or the ranges have gaps or overlaps."""
        self._files = ExitStack()
        self._where = folder
        self._ranges: dict[str, dict[str, list[_Range]]] = {}
        self._shapes: dict[str, list[int]] = {}
        self.contents = contents_of(folder)
        if not self.has_states:
            return
        try:
            self._open(folder)
        except BaseException:
            self.close()
            raise

    @property
    def has_states(self) -> bool:
        return CHECKPOINT_CONTENTS[self.contents].has_states

    def _open(self, folder: Path) -> None:
        paths = sorted(folder.glob(STATE_FILES))
        if not paths:
            raise ModelError(
                f"{folder} has no optimizer states ({STATE_FILES}): it is not a checkpoint that can be resumed"
            )
        self._where = paths[0]
        ranks: list[int] = []
        num_ranks = len(paths)
        for path in paths:
            file = self._files.enter_context(ArrayFile(path))
            try:
                facts = {name: files.parse_json(text) for name, text in file.metadata.items()}
                if (why := why_unlike(facts, _FACTS, "its metadata", whole=True)) is not None:
                    raise ValueError(why)
                ranks.append(facts["rank"])
                num_ranks = facts["ranks"]
                self._shapes |= facts["parameters"]
                for key, found in facts["ranges"].items():
                    if (why := why_unlike(found, _RANGE, f"the range {key!r}", whole=True)) is not None:
                        raise ValueError(why)
                    place = _Range(file, key, found["start"], found["length"], found["of"])
                    if key not in file.arrays or file.arrays[key].shape != (place.length,):
                        raise ValueError(f"{key!r} has another length than its range")
                    self._ranges.setdefault(found["parameter"], {}).setdefault(found["array"], []).append(place)
                for parameter in self._ranges:
                    if not isinstance(self._shapes.get(parameter), list):
                        raise ValueError(f"it has no shape of {parameter!r}")
            except ValueError as error:
                raise ModelError(f"{path} cannot be read: its ranges are corrupt or missing ({error})") from error
        if sorted(ranks) != list(range(num_ranks)):
            raise ModelError(
                f"{folder} has only the states of ranks {sorted(ranks)}, out of {num_ranks}: copy all its files"
            )
        for parameter, arrays in self._ranges.items():
            for name, places in arrays.items():
                places.sort(key=lambda place: place.start)
                ends = accumulate((place.length for place in places), initial=0)
                starts = [*(place.start for place in places), places[0].of]
                if list(ends) != starts:
                    raise ModelError(
                        f"{places[0].file.path}: the ranges of {name} of {parameter!r} do not add up to its "
                        f"{places[0].of} elements: one file comes from another checkpoint"
                    )

    def check(self, states: States, ranges: Ranges, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the saved parameters, shapes, arrays and dtypes match `states`, if there are saved states.

        Raises:
            ModelError: parameters or shapes differ.
            ConfigError: the optimizer, precision or working dtype differs.
        """
        if not self.has_states:
            return
        where, names = self._where, self._ranges.keys()
        for missing, what in ((names - states.keys(), "not trained now"), (states.keys() - names, "not saved")):
            if missing:
                listed = ", ".join(map(repr, sorted(missing)[:5]))
                raise ModelError(
                    f"{where} is from another model, or other parameters were frozen: {len(missing)} of its trained "
                    f"parameters are {what}, such as {listed}. Resume with the model of that run and the same "
                    "parameters frozen (finetune: freeze=)"
                )
        for parameter, state in states.items():
            if tuple(self._shapes[parameter]) != tuple(shapes[parameter]):
                raise ModelError(
                    f"{where}: saved {parameter!r} has shape {tuple(self._shapes[parameter])}, but this model's has "
                    f"{tuple(shapes[parameter])}. Resume with the model of that run"
                )
            saved = self._ranges[parameter]
            if saved.keys() != state.keys():
                theirs, ours = (", ".join(sorted(arrays.keys() - {"step"})) for arrays in (saved, state))
                raise ConfigError(
                    f"{where}: the saved run keeps {theirs} of {parameter!r}, but this run {ours}: {_RESUME_ALIKE}"
                )
            for name, array in state.items():
                for place in saved[name]:
                    dtype = place.file.arrays[place.key].dtype
                    if dtype != saved_dtype(name, array.dtype, self.contents):
                        raise ConfigError(
                            f"{place.file.path}: saved {name} of {parameter!r} is {dtype}, but this run's is "
                            f"{array.dtype}: {_RESUME_ALIKE}"
                        )
                    if place.of != ranges[parameter][name][1]:
                        raise ModelError(
                            f"{place.file.path}: saved {name} of {parameter!r} has {place.of} elements, but this run's "
                            f"has {ranges[parameter][name][1]}"
                        )

    def load(self, states: States, ranges: Ranges, between: PeriodicCall) -> None:
        """Read this rank's ranges into the live arrays of `states`. Call `check` first. Needs `has_states`."""
        for parameter, state in states.items():
            for name, array in state.items():
                begin = ranges[parameter][name][0]
                for place in self._ranges[parameter][name]:
                    first, last = max(begin, place.start), min(begin + array.numel(), place.start + place.length)
                    if first < last:
                        into = array.view(-1)[first - begin : last - begin]
                        place.file.read(place.key, into, between, first=first - place.start)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
