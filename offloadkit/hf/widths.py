"""Padded widths of batches whose rows differ in length.

Blocks are captured as CUDA graphs for at most `MOST_KINDS` kinds of arguments, so batches are padded to at most that
many widths (of an encoder-decoder: pairs of input and target widths). The widths follow from the lengths of the
training rows, the rows in a micro-batch and the kind of order, never from a plan, because a padded width changes the
last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import is_not
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from offloadkit.errors import ConfigError
from offloadkit.facts.changes import longest_of_model
from offloadkit.facts.graphs import may_capture
from offloadkit.hf.longest import is_standard
from offloadkit.hf.masks import CollatorWrapper
from offloadkit.hf.trained import print_on_rank_0
from offloadkit.offload.graphs import MOST_KINDS
from offloadkit.offload.layers import repeated_blocks

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

LEAST_STEP = 16
"""Tokens that tensor cores process at a time. Triton compiles one kernel for all multiples."""
_STEPS_OF_MEAN = 8
"""Minimum steps in a row of mean length; padding then adds 1/16 on average."""
_MOST_CANDIDATES = 1024


_COMPUTE_BOUND = 3e11
"""Parameters of a block times tokens of a micro-batch, above which padding costs more than a graph gains: an H100
computes so much in the time that Python needs for the block's launches. Fixed: widths depend on no machine.
"""


def width_step(mean: float, longest: int, limit: int | None) -> int:
    """The multiple, in tokens, that batches are padded to at least.

    A larger step means fewer shapes (each needs its own memory blocks and perhaps new kernels), a smaller step less
    padding. Rows of 128 to 512 tokens have 13 widths, 32 apart.

    Args:
        mean, longest: row lengths in tokens.
        limit: maximum tokens of the model; None: unlimited.

    Returns:
        A power of two, at least `LEAST_STEP`, or less if `limit` requires it. 1 if all rows have equal length or none
            exceeds `LEAST_STEP`.
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
    return -(-length // step) * step


@dataclass(frozen=True)
class Widths:
    steps: tuple[int, ...]
    """Multiples for a batch that no pair holds: of inputs, or of inputs and targets of an encoder-decoder."""

    pairs: tuple[tuple[int, ...], ...] = ()
    """Widths of inputs, or of inputs and targets, smallest first. Empty: batches are padded to `steps`."""

    share_added: float = 0.0
    """Padding added to batches padded to their longest rows, as a share of their tokens."""

    share_padding: float = 0.0
    """Padding as a share of all tokens."""

    def fit(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The smallest width that holds a batch of these lengths."""
        for pair in self.pairs:
            if all(length <= width for length, width in zip(lengths, pair, strict=True)):
                return pair
        return tuple(map(rounded_up, lengths, self.steps))

    def __str__(self) -> str:
        listed = ", ".join("+".join(map(str, pair)) for pair in self.pairs)
        widths = "1 width" if len(self.pairs) == 1 else f"{len(self.pairs)} widths"
        return (
            f"batches are padded to {widths} ({listed}): {self.share_added:.1%} more tokens than "
            f"padded to their longest rows, {self.share_padding:.0%} of all tokens are padding"
        )


def choose_widths(
    lengths: np.ndarray, batch_size: int, order: str, steps: Sequence[int], multiples: Sequence[int]
) -> Widths:
    """Widths with little padding for the micro-batches of one epoch, multiples of `multiples`.

    Args:
        lengths: int [rows, 1], or [rows, 2] with the lengths of targets.
        order: `train_sampling_strategy` of the arguments.
        steps: multiples that batches are padded to without widths. They stay if they make few enough.
    """
    pairs: list[tuple[int, ...]] = []
    if prod(len(np.unique(column)) for column in (-(-lengths // steps)).T) > MOST_KINDS:
        batches = _largest_of_batches(lengths, batch_size, order)
        pairs = _least_padding(-(-batches // multiples) * multiples)
    widths = Widths(tuple(steps), tuple(sorted(pairs, key=lambda pair: (sum(pair), pair))))
    return with_shares(widths, lengths, batch_size, order)


def with_shares(widths: Widths, lengths: np.ndarray, batch_size: int, order: str) -> Widths:
    """`widths` with the shares of padding in an epoch of rows of these lengths."""
    batches = _largest_of_batches(lengths, batch_size, order)
    rows = np.full(len(batches), batch_size)
    rows[-1] = len(lengths) - batch_size * (len(batches) - 1)
    found, at = np.unique(batches, axis=0, return_inverse=True)
    sizes = np.array([sum(widths.fit(batch)) for batch in found.tolist()])
    padded, least = int(rows @ sizes[at.ravel()]), int(rows @ batches.sum(axis=1))
    return replace(widths, share_added=padded / least - 1, share_padding=1 - int(lengths.sum()) / padded)


def _largest_of_batches(lengths: np.ndarray, batch_size: int, order: str) -> np.ndarray:
    """[batches, 1 or 2]: the longest inputs and targets of the batches of an epoch.

    Rows sorted by length are sorted as a whole. The sampler sorts windows of 50 updates, whose batches differ little.
    """
    if order != "sequential":
        lengths = lengths[np.random.RandomState(0).permutation(len(lengths))]  # the same in every version of numpy
    if order == "group_by_length":
        lengths = lengths[np.argsort(-lengths[:, 0], kind="stable")]
    return np.maximum.reduceat(lengths, np.arange(0, len(lengths), batch_size))


def _least_padding(batches: np.ndarray) -> list[tuple[int, ...]]:
    """At most `MOST_KINDS` rows that together hold every batch, with nearly the least sum of padded tokens.

    Widths are added greedily and then exchanged one at a time while that helps. Whole numbers make the choice equal on
    every machine.
    """
    most = round(_MOST_CANDIDATES ** (1 / batches.shape[1]))
    values = [_spread(np.sort(column), most) for column in batches.T]
    candidates = np.array(list(product(*values)))  # the last one holds every batch
    raised = [own[np.searchsorted(own, column)] for own, column in zip(values, batches.T, strict=True)]
    points, counts = np.unique(np.stack(raised, axis=1), axis=0, return_counts=True)
    sizes = candidates.sum(axis=1)
    holds = (candidates[:, None] >= points).all(axis=2)
    costs = np.where(holds, sizes[:, None], sizes[-1])
    chosen = [len(candidates) - 1]

    def best_beside(kept: list[int]) -> tuple[int, int]:
        totals = np.minimum(costs, costs[kept].min(axis=0)) @ counts
        return int(totals.min()), int(totals.argmin())

    total = int(sizes[-1] * counts.sum())
    while len(chosen) < min(MOST_KINDS, len(candidates)):
        total, found = best_beside(chosen)
        chosen.append(found)
    before = None
    while before != total:
        before = total
        for at in range(1, len(chosen)):
            now, found = best_beside(chosen[:at] + chosen[at + 1 :])
            if now < total:
                total, chosen[at] = now, found
    used = {chosen[at] for at in costs[chosen].argmin(axis=0)} | {chosen[0]}
    return [tuple(candidates[at].tolist()) for at in used]


def _spread(values: np.ndarray, most: int) -> np.ndarray:
    """The distinct `values` (sorted), or `most` of them at even distances in rank, with the largest."""
    distinct = np.unique(values)
    if len(distinct) <= most:
        return distinct
    return np.unique(values[np.arange(1, most + 1) * len(values) // most - 1])


# -- collators


@dataclass(frozen=True)
class PadToWidths(CollatorWrapper):
    """Pads the tensors of a collator further, to `widths`."""

    widths: Widths

    dimensions: Mapping[str, int]
    """By name of a [rows, length] tensor: 0 for the width of inputs, 1 for the width of targets."""

    values: Mapping[str, int]

    on_the_left: frozenset[str] = frozenset()

    def __call__(self, rows: Any) -> Any:
        """The collator's batch, unchanged without an attention mask, and if it has further tensors that may need the
        same length.
        """
        batch = self.collate(rows)
        tensors = {name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
        padded = {name: at for name, at in self.dimensions.items() if name in tensors}
        if tensors - padded.keys() - {"labels"} or "attention_mask" not in padded:
            return batch
        if "labels" in tensors - padded.keys() and _are_of_tokens(batch["labels"], batch["attention_mask"]):
            return batch
        lengths = [0] * len(self.widths.steps)
        for name, at in padded.items():
            lengths[at] = max(lengths[at], batch[name].shape[1])
        fitting = self.widths.fit(lengths)
        for name, at in padded.items():
            if missing := fitting[at] - batch[name].shape[1]:
                sides = (missing, 0) if name in self.on_the_left else (0, missing)
                batch[name] = F.pad(batch[name], sides, value=self.values[name])
        return batch


def _are_of_tokens(labels: torch.Tensor, mask: torch.Tensor) -> bool:
    return not labels.is_floating_point() and labels.shape == mask.shape


def pad_to_widths(collate: Any, tokenizer: Any, widths: Widths, label_padding: int | None) -> PadToWidths:
    """Pad batches of `collate`, which pads by `tokenizer`, to `widths`.

    Args:
        label_padding: None: labels have one value per row.
    """
    inputs, padding = ("input_ids", "attention_mask", "token_type_ids"), tokenizer.pad_token_id
    dimensions, left = dict.fromkeys(inputs, 0), {*inputs, "labels"}
    values = {"input_ids": padding, "attention_mask": 0, "token_type_ids": tokenizer.pad_token_type_id}
    if label_padding is not None:
        dimensions |= dict.fromkeys(("labels", "decoder_input_ids"), len(widths.steps) - 1)
        values |= {"labels": label_padding, "decoder_input_ids": padding}
    on_the_left = frozenset(left if tokenizer.padding_side == "left" else ())
    return PadToWidths(collate, widths, dimensions, values, on_the_left)


# -- a Trainer's

_WIDTHS = "widths"


class TrainerWidths:
    """Pads the batches of a Trainer.

    Attributes:
        chosen: the widths of training; None before they are chosen.
    """

    def __init__(self) -> None:
        self.chosen: Widths | None = None
        self._chosen_for: tuple[Any, ...] = ()
        self._collator: Any = None

    def collator(self, trainer: Any) -> Any:
        """The Trainer's collator. If it is a known one, its batches are padded to widths of the training rows, which
        are printed.
        """
        args = trainer.args
        now = trainer.data_collator, trainer.train_dataset, trainer.model, args.per_device_train_batch_size
        if len(now) != len(self._chosen_for) or any(map(is_not, now, self._chosen_for)):
            self._chosen_for, self._collator = now, trainer.data_collator
            self._choose(trainer)
        return self._collator

    def widest_collator(self, trainer: Any) -> Any:
        """A collator that pads each batch to the largest width."""
        collate = self.collator(trainer)
        if self.chosen is None:
            return collate
        return replace(collate, widths=replace(self.chosen, pairs=self.chosen.pairs[-1:]))

    @contextmanager
    def used(self, trainer: Any) -> Iterator[None]:
        """While open, the Trainer has this collator, unless evaluation continues the rows of a decoder: it would
        continue the padding on their right.
        """
        own, config = trainer.data_collator, getattr(trainer.model, "config", None)
        continues = getattr(trainer.args, "predict_with_generate", False)
        if not continues or getattr(config, "is_encoder_decoder", False):
            trainer.data_collator = self.collator(trainer)
        try:
            yield
        finally:
            trainer.data_collator = own

    def to_dict(self) -> dict[str, Any]:
        """For `run.json`."""
        return {} if self.chosen is None else {_WIDTHS: [list(pair) for pair in self.chosen.pairs]}

    def compare(self, trainer: Any, values: dict[str, Any]) -> None:
        """Print a warning if a run with these values of `run.json` had other widths."""
        if values and values.get(_WIDTHS) != self.to_dict().get(_WIDTHS):
            print_on_rank_0(
                trainer,
                "batches are padded to other widths than before the checkpoint, because training rows or batch_size "
                "differ, so the last bits of the weights differ from an uninterrupted run",
            )

    def _choose(self, trainer: Any) -> None:
        args, self.chosen, own = trainer.args, None, trainer.data_collator
        config = getattr(trainer.model, "config", None)
        known = _known(own, config)
        if known is not own and args.per_device_train_batch_size == 1 and not _has_standard_loss(trainer):
            known = None  # the loss may read the last token, without regard to padding
        num_lengths = 1 if known is None else len(known.widths.steps)
        lengths = row_lengths(trainer.train_dataset, ("input_ids", "labels")[:num_lengths])
        size, order = args.per_device_train_batch_size, str(args.train_sampling_strategy)
        if lengths is None:
            return
        if known is not None:
            trainer.telemetry.padding_share = with_shares(known.widths, lengths, size, order).share_padding
        if is_compute_bound(trainer.model, size * lengths[:, 0].mean()):
            return
        if known is None:
            is_graphed = may_capture(args.device.type, compiled=trainer.offload.compile_blocks)
            are_many = getattr(own, "padding", None) != "max_length" and len(np.unique(lengths)) > MOST_KINDS
            if is_graphed and are_many:
                print_on_rank_0(trainer, _UNKNOWN.format(type(own).__name__))
            return
        widths = _chosen(known, lengths, size, order, config, is_ours=known is own)
        if widths.pairs:
            self.chosen, self._collator = widths, replace(known, widths=widths)
            trainer.telemetry.padding_share = widths.share_padding
            print_on_rank_0(trainer, widths)


def pad_to_few_widths(
    collate: Any, rows: Any, model: Any, batch_size: int, order: Literal["random", "sequential"] = "random"
) -> Any:
    """A collator for a bare loop, as `finetune` and the Trainers have: its batches have at most eight widths (of an
    encoder-decoder: pairs of input and target widths), so that every batch runs as CUDA graphs.

    The widths have little padding for these rows. They follow from the arguments alone, so a repeated run has them too.

    Args:
        collate: a collator of transformers or TRL that pads on the right, to the longest row. Its tokenizer pads.
        rows: tokenized training rows, a `datasets.Dataset` or a list of dicts, with "input_ids", and with "labels" for
            an encoder-decoder. The widths hold the longest row; a longer row has its own width.
        model: the model that is trained; its loss must not read padding.
        batch_size: rows in a micro-batch.
        order: of the rows in an epoch.

    Returns:
        `collate` itself if its batches have few widths already, or if blocks are so large that padding costs more time
            than graphs gain.

    Raises:
        ConfigError: the collator is another one, or the rows have no lengths that can be read.
    """
    config = getattr(model, "config", None)
    known = _known(collate, config)
    if known is None:
        raise ConfigError(
            f"pad_to_few_widths() got an unknown collator, {type(collate).__name__}: pass one of transformers "
            "or TRL that pads on the right to the longest row, or set pad_to_multiple_of in your own collator"
        )
    columns = ("input_ids", "labels")[: len(known.widths.steps)]
    lengths = row_lengths(rows, columns)
    if lengths is None:
        raise ConfigError(
            f"pad_to_few_widths() cannot read the lengths of a {type(rows).__name__}: pass a datasets.Dataset or list "
            f"of dicts with lists of tokens in {' and '.join(columns)}"
        )
    if is_compute_bound(model, batch_size * lengths[:, 0].mean()):
        return collate
    widths = _chosen(known, lengths, batch_size, order, config, is_ours=False)
    return replace(known, widths=widths) if widths.pairs else collate


def _chosen(
    known: PadToWidths, lengths: np.ndarray, batch_size: int, order: str, config: Any, *, is_ours: bool
) -> Widths:
    """`choose_widths` within the model's limit. `is_ours`: the collator is `finetune`'s."""
    limit = longest_of_model(config) if hasattr(config, "get_text_config") else None
    multiples = [min(step, LEAST_STEP) if is_ours else step for step in known.widths.steps]
    if not is_ours and multiples[0] == 1:
        multiples = [width_step(0, int(longest), limit) for longest in lengths.max(axis=0)]
    return choose_widths(lengths, batch_size, order, known.widths.steps, multiples)


_UNKNOWN = (
    "batches keep the widths that {} pads to: blocks run as CUDA graphs for the first "
    f"{MOST_KINDS} widths. Only batches of transformers' and TRL's collators that pad on the right are padded further, "
    "if the model's pad_token_id is the tokenizer's and a custom loss has several rows"
)


_OF_TRL = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"


def _has_standard_loss(trainer: Any) -> bool:
    return is_standard(type(trainer).compute_loss) and getattr(trainer, "compute_loss_func", None) is None


def _known(collate: Any, config: Any) -> PadToWidths | None:
    """The collator with its own widths, if it is ours, or one of transformers' or TRL's that pad to the longest row.

    Not one that pads on the left: further padding would move the positions of every token, and would be trained to
    predict the first one.

    Args:
        config: the model's. None: no model of transformers.
    """
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerBase,
    )

    if isinstance(collate, PadToWidths):
        return collate
    if f"{type(collate).__module__}.{type(collate).__qualname__}" == _OF_TRL and not getattr(
        collate, "padding_free", True
    ):
        values = {"input_ids": collate.pad_token_id, "attention_mask": 0, "labels": -100}
        return PadToWidths(collate, Widths((collate.pad_to_multiple_of or 1,)), dict.fromkeys(values, 0), values)
    labels: dict[type, int | None] = {DataCollatorWithPadding: None, DataCollatorForLanguageModeling: -100}
    if type(collate) in (DataCollatorForSeq2Seq, DataCollatorForTokenClassification):
        labels[type(collate)] = collate.label_pad_token_id
    pads = type(collate) in labels and getattr(collate, "padding", True) in (True, "longest")
    if not pads or collate.return_tensors != "pt" or not isinstance(collate.tokenizer, PreTrainedTokenizerBase):
        return None
    if collate.tokenizer.padding_side == "left":
        return None
    if labels[type(collate)] is None and hasattr(config, "get_text_config"):
        # classifiers find the last token by this id, and without one they read the last place
        if config.get_text_config().pad_token_id != collate.tokenizer.pad_token_id:
            return None
    is_pairs = bool(getattr(config, "is_encoder_decoder", False))
    num_lengths = 2 if is_pairs and type(collate) is DataCollatorForSeq2Seq else 1
    widths = Widths((collate.pad_to_multiple_of or 1,) * num_lengths)
    return pad_to_widths(collate, collate.tokenizer, widths, labels[type(collate)])


def is_compute_bound(model: Any, num_tokens: float) -> bool:
    """Whether micro-batches of so many tokens keep an H100 busy for longer than Python needs to launch a block."""
    sizes = [sum(each.numel() for each in block.parameters()) for _, block in repeated_blocks(model)]
    return num_tokens * max(sizes, default=0) > _COMPUTE_BOUND


def row_lengths(rows: Any, columns: Sequence[str]) -> np.ndarray | None:
    """int [rows, columns]: lengths of the lists in a `datasets.Dataset` or a list of dicts; runs no code of the user.

    Returns:
        None for other data, rows computed when they are read, no rows, and missing columns or values.
    """
    from datasets import Dataset

    if isinstance(rows, list):
        if not rows or not all(
            isinstance(row, dict) and isinstance(row.get(name), list) for row in rows for name in columns
        ):
            return None
        return np.array([[len(row[name]) for name in columns] for row in rows])
    if not isinstance(rows, Dataset) or rows.format["type"] == "custom":
        return None
    if len(rows) == 0 or not {*columns} <= {*rows.column_names}:
        return None
    found = []
    for table in rows.select_columns([*columns]).with_format("arrow").iter(batch_size=10_000):
        parts = [table.column(name).chunks for name in columns]
        if any(chunk.null_count or not hasattr(chunk, "offsets") for chunks in parts for chunk in chunks):
            return None
        lengths = [np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks]) for chunks in parts]
        found.append(np.stack(lengths, axis=1))
    return np.concatenate(found).astype(np.int64)
