"""Distribute a Trainer's micro-batches over ranks so that N ranks train on the same micro-batches as one rank.

accelerate gives micro-batch k·N + r to rank r of N, and pads the end of an epoch with rows from its beginning.
`shard_batches` removes this padding: the last micro-batch stays short, and a rank without a micro-batch gets a filler,
a row that does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import recursively_apply

from offloadkit.hf.masks import CollatorWrapper

TARGETS = "number_of_targets"
"""Key in a batch for its number of targets. No model has an argument of this name."""


class EpochAwareBatches(BatchSamplerShard):  # type: ignore[misc, unused-ignore]
    """Passes `set_epoch` on to the row sampler, which accelerate does not do on resuming."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


class ShardedBatches(EpochAwareBatches):
    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // int(self.num_processes))

    @property
    def ends_with_filler(self) -> bool:
        return 0 < len(self.batch_sampler) % int(self.num_processes) <= int(self.process_index)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == self.process_index:
                yield batch
        if self.ends_with_filler:
            yield batch[:1]


def forward_epochs(loader: Any) -> None:
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSamplerShard:
        batches.__class__ = EpochAwareBatches  # DataLoader forbids replacing its batch sampler


def shard_batches(loader: Any) -> ShardedBatches | None:
    """Change a prepared loader's batch sampler into `ShardedBatches`.

    Returns:
        The batch sampler; None for world size 1, streams, `split_batches` and other samplers.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    if type(batches) is BatchSamplerShard and batches.num_processes > 1 and not batches.split_batches:
        batches.__class__ = ShardedBatches  # DataLoader forbids replacing its batch sampler
    return batches if isinstance(batches, ShardedBatches) else None


@dataclass(frozen=True)
class Counted(CollatorWrapper):
    """A collator that adds the number of targets, counted in RAM, under `TARGETS`."""

    count: Callable[[Any], Any]

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping):
            batch[TARGETS] = int(self.count(batch))
        return batch


def without_targets(batch: Any) -> tuple[Any, int | None]:
    """Split off the number of targets (None if missing)."""
    if not isinstance(batch, MutableMapping) or TARGETS not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != TARGETS}, batch[TARGETS]


@dataclass(frozen=True)
class GatheredRows:
    """Gathers evaluated rows of all ranks in the order of one rank, without fillers and duplicates.

    A Trainer uses it as `gather_function` for loaders changed by `shard_batches`.
    """

    accelerator: Any
    batch_size: int
    whole_batches: bool
    """Weight the loss of a short batch like a full batch, as Seq2SeqTrainer does on one rank."""

    def __call__(self, values: Any) -> Any:
        """`values`: nested tensors [rows, ...] of this rank. Only `rows` may differ between ranks."""
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
