"""A Trainer's micro-batches, dealt to ranks so that all of them together are those of one rank.

accelerate deals them one by one: micro-batch k·N + r goes to rank r of N, which is the order in which one rank would
take them. At the end of an epoch it adds rows of the beginning, until all ranks have equally many. `deal` leaves these
out. The last micro-batch stays short, and a rank without one gets a filler: a row that counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import recursively_apply

from offloadkit.hf.masks import Around

TARGETS = "number_of_targets"
"""Key of a batch under which `Counted` says how many targets it has; no argument of any model."""


class ToldBatches(BatchSamplerShard):  # type: ignore[misc, unused-ignore]
    """As accelerate's, and tells the sampler of rows which epoch begins. accelerate itself does not, on resuming."""

    def set_epoch(self, epoch: int) -> None:
        """The next rows are those of this epoch."""
        sampler: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


class DealtBatches(ToldBatches):
    """One rank's micro-batches, each a list of rows' numbers. It takes the place of accelerate's own."""

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // int(self.num_processes))

    @property
    def ends_with_filler(self) -> bool:
        """Whether the last one is a filler."""
        return 0 < len(self.batch_sampler) % int(self.num_processes) <= int(self.process_index)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == self.process_index:
                yield batch
        if self.ends_with_filler:
            yield batch[:1]


def tell_epochs(loader: Any) -> None:
    """Have a loader that accelerate has prepared for several ranks tell its sampler which epoch begins."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSamplerShard:
        batches.__class__ = ToldBatches  # nobody may exchange a DataLoader's batch sampler


def deal(loader: Any) -> DealtBatches | None:
    """Have a loader that accelerate has prepared for several ranks deal as this module says.

    Returns:
        Its batches; None where they are not dealt one by one: streams, whole batches that are split, other samplers.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSamplerShard and batches.num_processes > 1 and not batches.split_batches:
        batches.__class__ = DealtBatches  # nobody may exchange a DataLoader's batch sampler
    return batches if isinstance(batches, DealtBatches) else None


@dataclass(frozen=True)
class Counted(Around):
    """A collator whose batches say under `TARGETS` how many targets they have, while they are in RAM."""

    count: Callable[[Any], Any]

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping):
            batch[TARGETS] = int(self.count(batch))
        return batch


def without_targets(batch: Any) -> tuple[Any, int | None]:
    """A batch as its collator made it, and what `Counted` has added; None if it has not."""
    if not isinstance(batch, MutableMapping) or TARGETS not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != TARGETS}, batch[TARGETS]


@dataclass(frozen=True)
class GatheredRows:
    """Gathers evaluated rows of all ranks, in the order of one rank: no fillers, and nothing twice.

    It is what a Trainer's `gather_function` is for loaders that were dealt.
    """

    accelerator: Any
    batch_size: int
    whole_batches: bool
    """Whether a short batch's loss counts as a whole one's, as in one rank's Seq2SeqTrainer."""

    def __call__(self, values: Any) -> Any:
        """
        Args:
            values: tensors [rows, ...] of this rank, nested. They may differ between ranks in their rows alone.
        """
        return recursively_apply(self._gathered, values)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        missing = self.batch_size - rows.shape[0]
        if missing > 0:
            rows = torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])
        found: torch.Tensor = self.accelerator.gather(rows)
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return found
        is_loss = self.whole_batches and rows.dim() == 1 and rows.is_floating_point()
        return found[: -(-state.remainder // self.batch_size) * self.batch_size if is_loss else state.remainder]
