"""Rows of several lengths: few widths to pad them to, and an order that a resumed epoch takes again.

HuggingFace's order `group_by_length` shuffles rows, cuts them into windows of many batches, and sorts each window, the
longest first. A batch's rows are then of nearly equal length. The first batch of an epoch holds the longest row of all.
It is drawn from torch's random state, so it depends on what else has drawn from that (`ResumableOrder`). `finetune`'s
order follows from its seed alone, and has the updates in random order (`OrderOfSeed`). Otherwise long and short rows
would take turns, and an epoch would end on short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Sampler

from offloadkit.checkpoint.origin import ORIGIN, Origin
from offloadkit.checkpoint.values import read_json, write_json
from offloadkit.distributed import world
from offloadkit.errors import ModelError

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import LengthGroupedSampler

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""From rows to a batch."""

LEAST_STEP = 16
"""Tokens that tensor cores take at a time. Triton compiles one kernel for all multiples of it."""
_STEPS_OF_MEAN = 8
"""A row of mean length is at least so many steps long, so padding to a step adds 1/16 of it on average."""
_ORDER_FILE = "order.json"


def width_step(mean: float, longest: int, limit: int | None) -> int:
    """Tokens whose multiples batches are padded to.

    A larger step means fewer shapes: each new one has its own memory blocks and may need kernels that are not loaded
    yet. A smaller step means less padding, which large batches compute for nothing. Rows of 128 to 512 tokens have 13
    widths, 32 apart.

    Args:
        mean, longest: tokens of a row.
        limit: the most tokens that the model takes; None: any number.

    Returns:
        A power of two, at least `LEAST_STEP`; less where `limit` leaves no room. 1 where all rows are equally long, or
        none is longer than `LEAST_STEP`.
    """
    if longest <= LEAST_STEP or mean == longest:
        return 1
    step = LEAST_STEP
    while 2 * step * _STEPS_OF_MEAN <= mean:
        step *= 2
    while step > 1 and limit is not None and rounded_up(longest, step) > limit:
        step //= 2
    return step


def rounded_up(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step


@dataclass(frozen=True)
class PadToWidths:
    """A collator whose batches are padded on to a multiple of some step."""

    collate: Collate

    steps: Mapping[str, int]
    """By the name of a tensor [rows, length]."""

    values: Mapping[str, int]
    """What each of them is padded with."""

    on_the_left: frozenset[str] = frozenset()
    """Those that are padded there."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch, whose tensors have the same dtypes as before."""
        batch = self.collate(rows)
        for name, step in self.steps.items():
            if name in batch and (missing := -batch[name].shape[1] % step):
                sides = (missing, 0) if name in self.on_the_left else (0, missing)
                batch[name] = F.pad(batch[name], sides, value=self.values[name])
        return batch


class OrderOfSeed(Sampler[int]):
    """HuggingFace's order by length as it follows from a seed and the number of the epoch.

    Its updates come in random order after the first, which holds the longest row.
    """

    def __init__(self, sampler: LengthGroupedSampler, args: TrainingArguments) -> None:
        """args: their `data_seed`, else their `seed` is the order's."""
        self._sampler, self._epoch = sampler, 0
        self._seed = int(args.seed if args.data_seed is None else args.data_seed) % 2**64

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """The next order is that of this epoch. The Trainer calls it."""
        self._epoch = epoch

    def seed_of_epoch(self) -> int:
        """Of 32 bits, which is what torch's generator takes. Epochs and seeds that differ have others."""
        return int(np.random.SeedSequence([self._epoch, self._seed]).generate_state(1)[0])

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed_of_epoch())
        self._sampler.generator = generator
        rows, size = list(self._sampler), self._sampler.batch_size
        if len(rows) <= size:
            return iter(rows)
        end = len(rows) - len(rows) % size
        whole = torch.tensor(rows[size:end]).view(-1, size)
        order = torch.randperm(len(whole), generator=generator)
        return iter(rows[:size] + whole[order].flatten().tolist() + rows[end:])


class ResumableOrder(Sampler[int]):
    """The order that HuggingFace's sampler draws from torch's random state; it can be drawn again.

    HuggingFace resumes an epoch by drawing its order anew. Its sampler of equal lengths then draws another one. All
    ranks have rank 0's order: their random states part as soon as one draws more than another.
    """

    def __init__(self, sampler: LengthGroupedSampler) -> None:
        self._sampler = sampler
        self._drawn_from: torch.Tensor | None = None
        """The random state that the present epoch's order was drawn from."""
        self._again: torch.Tensor | None = None
        """The one that the next order is drawn from; None: torch's present one."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        generator = None
        drawn_from = self._again
        if drawn_from is None:
            drawn_from = world.from_first("drawing the order of rows", torch.get_rng_state)
        if self._again is not None or world.rank() > 0:
            generator = torch.Generator()
            generator.set_state(drawn_from)
        self._drawn_from, self._again = drawn_from, None
        self._sampler.generator = generator
        return iter(self._sampler)

    def write(self, folder: Path, origin: Origin) -> None:
        """Write what the present epoch's order was drawn from into a checkpoint's folder."""
        write_json(folder / _ORDER_FILE, {ORIGIN: origin.of_file(_ORDER_FILE), "drawn_from": self._drawn_from})

    def read(self, folder: Path) -> None:
        """Have the next epoch's order be the one of the checkpoint in `folder`, if it holds one.

        Raises:
            ModelError: the file is cut or broken.
        """
        if (folder / _ORDER_FILE).is_file():
            state = read_json(path := folder / _ORDER_FILE).get("drawn_from")
            try:
                self._again = None if state is None else torch.Generator().set_state(state).get_state()
            except (TypeError, RuntimeError) as error:
                raise ModelError(f"{path} holds no random state ({error}): it is cut or broken") from error

    def begin_anew(self) -> None:
        """The next epoch's order is drawn from torch's random state after all."""
        self._again = None
