"""The order of rows of different lengths, which a resumed epoch can repeat.

HuggingFace's `group_by_length` shuffles rows, cuts them into windows of many batches, and sorts each window, longest
row first. The order is drawn from torch's random state, which `ResumableOrder` saves. In `OrderOfSeed`, for `finetune`,
it depends on the seed alone, and updates are shuffled, because otherwise long and short rows alternate and epochs end
on short rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Sampler

from offloadkit.checkpoint.origin import ORIGIN, Origin
from offloadkit.checkpoint.values import read_json, write_json
from offloadkit.distributed import world
from offloadkit.errors import ModelError
from offloadkit.hf.images import ImageRows
from offloadkit.hf.speech import SpeechRows

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import LengthGroupedSampler

_ORDER_FILE = "order.json"


def by_length(rows: Any, size: int, args: TrainingArguments) -> LengthGroupedSampler | None:
    """HuggingFace's order by length, in groups of `size`, of rows with images or sound; None for other rows and orders.
    (The Trainer would read and decode every row to learn its length.)
    """
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if not isinstance(rows, ImageRows | SpeechRows) or args.train_sampling_strategy != "group_by_length":
        return None
    seed = args.seed if args.data_seed is None else args.data_seed
    return LengthGroupedSampler(size, lengths=rows.lengths, generator=torch.Generator().manual_seed(seed))


class OrderOfSeed(Sampler[int]):
    """HuggingFace's order by length, determined by seed and epoch; updates after the first come in random order."""

    def __init__(self, sampler: LengthGroupedSampler, args: TrainingArguments) -> None:
        self._sampler, self._epoch = sampler, 0
        self._seed = int(args.seed if args.data_seed is None else args.data_seed) % 2**64

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def seed_of_epoch(self) -> int:
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
    """HuggingFace's order by length, drawn from torch's random state, which is saved so that a resumed epoch has the
    same order.

    All ranks use rank 0's random state, because the states diverge as soon as one rank draws more numbers.
    """

    def __init__(self, sampler: LengthGroupedSampler) -> None:
        self._sampler = sampler
        self._drawn_from: torch.Tensor | None = None
        """Random state that the present epoch's order was drawn from."""
        self._again: torch.Tensor | None = None
        """Random state for the next order; None: torch's present state."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        generator = None
        drawn_from = self._again
        if drawn_from is None:
            drawn_from = world.run_on_rank_0("drawing the order of rows", torch.get_rng_state)
        if self._again is not None or world.rank() > 0:
            generator = torch.Generator()
            generator.set_state(drawn_from)
        self._drawn_from, self._again = drawn_from, None
        self._sampler.generator = generator
        return iter(self._sampler)

    def write(self, folder: Path, origin: Origin) -> None:
        write_json(folder / _ORDER_FILE, {ORIGIN: origin.of_file(_ORDER_FILE), "drawn_from": self._drawn_from})

    def read(self, folder: Path) -> None:
        """Use the saved order for the next epoch, if `folder` has one. Raises `ModelError` if the file is broken."""
        if (folder / _ORDER_FILE).is_file():
            state = read_json(path := folder / _ORDER_FILE).get("drawn_from")
            try:
                self._again = None if state is None else torch.Generator().set_state(state).get_state()
            except (TypeError, RuntimeError) as error:
                raise ModelError(f"{path} has no valid random state ({error}): it is truncated or corrupt") from error

    def reset(self) -> None:
        self._again = None
