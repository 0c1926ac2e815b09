"""Random rows of a quarter to all of the length, sorted and padded as in `finetune`, with an attention mask."""

from __future__ import annotations

from typing import Any, cast

import torch

from offloadkit.doors.engines.work import (
    IGNORED_LABEL,
    NUM_SPECIAL_IDS,
    Batch,
    Work,
    config_of,
    model_to_plan,
    random_steps,
)
from offloadkit.hf.load import infer_task
from offloadkit.hf.widths import LEAST_STEP, Widths, choose_widths, is_compute_bound, width_step

SHORTEST_SHARE = 4
"""The shortest row is the longest row divided by this."""
RAGGED_STEPS = 12
"""Distinct steps; training cycles through them."""
_WINDOW_STEPS = 50
"""Steps whose rows are sorted together, as in HuggingFace's length-grouped sampler."""


def steps_of(work: Work, device: torch.device) -> list[list[Batch]]:
    """Steps of full or of ragged rows, each a list of micro-batches. Full rows: see `random_steps`.

    Ragged rows: `RAGGED_STEPS` steps, evenly spaced in a window of rows sorted by input length as in HuggingFace's
    sampler, longest first. Batches have attention_mask, int64 of the inputs' shape, and label -100 at padding. Widths
    match `finetune`'s. The very first row has the full lengths.
    """
    if work.mask == "full":
        return random_steps(work, device)
    config = config_of(work.model)
    is_seq2seq = infer_task(config) == "seq2seq"
    num_words = config.get_text_config().vocab_size
    padding = config.get_text_config().pad_token_id or 0
    generator = torch.Generator().manual_seed(work.seed)
    drawn = _drawn_lengths(work, generator)
    steps = _ragged_steps(work, drawn, generator)
    widths = _widths(work, torch.tensor(drawn)[:, : 1 + is_seq2seq].numpy())

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(NUM_SPECIAL_IDS, num_words, (work.batch_size, length), generator=generator)

    def real(of_rows: list[int], width: int) -> torch.Tensor:
        return torch.arange(width) < torch.tensor(of_rows)[:, None]

    def batch(lengths: list[tuple[int, int]]) -> Batch:
        inputs, targets = map(list, zip(*lengths, strict=True))
        fitting = widths.fit([max(inputs), max(targets)][: len(widths.steps)])
        mask = real(inputs, fitting[0])
        ids = tokens(mask.shape[1])
        labels = ids.masked_fill(~mask, IGNORED_LABEL)
        if is_seq2seq:
            written = real(targets, fitting[1])
            labels = tokens(written.shape[1]).masked_fill(~written, IGNORED_LABEL)
        found = {"input_ids": ids.masked_fill(~mask, padding), "labels": labels, "attention_mask": mask.long()}
        return {name: tensor.to(device) for name, tensor in found.items()}

    size = work.batch_size
    return [[batch(rows[first : first + size]) for first in range(0, work.rows, size)] for rows in steps]


def _drawn_lengths(work: Work, generator: torch.Generator) -> list[tuple[int, int]]:
    def drawn(longest: int) -> list[int]:
        shortest = max(1, longest // SHORTEST_SHARE)
        size = (4 * work.rows * _WINDOW_STEPS,)
        found: list[int] = torch.randint(shortest, longest + 1, size, generator=generator).tolist()
        return [longest, *found[1:]]

    return list(zip(drawn(work.input_length), drawn(work.target_length), strict=True))


def _ragged_steps(work: Work, drawn: list[tuple[int, int]], generator: torch.Generator) -> list[list[tuple[int, int]]]:
    from transformers.trainer_pt_utils import get_length_grouped_indices

    window, grouped = work.rows * _WINDOW_STEPS, cast("Any", get_length_grouped_indices)
    order = grouped([each for each, _ in drawn], work.rows, generator=generator)[:window]
    firsts = [round(step * (_WINDOW_STEPS - 1) / (RAGGED_STEPS - 1)) * work.rows for step in range(RAGGED_STEPS)]
    return [[drawn[at] for at in order[first : first + work.rows]] for first in firsts]


def _widths(work: Work, lengths: Any) -> Widths:
    steps = [width_step(column.mean(), column.max(), None) for column in lengths.T]
    if is_compute_bound(model_to_plan(work.model), work.batch_size * lengths[:, 0].mean()):
        return Widths(tuple(steps))
    multiples = [min(step, LEAST_STEP) for step in steps]
    return choose_widths(lengths, work.batch_size, "group_by_length", steps, multiples)
