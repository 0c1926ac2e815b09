"""Turn rows into a tokenized dataset, a task and a collator for a Trainer.

| kind of columns (see `columns.py`) | task |
|---|---|
| pairs | seq2seq; for a causal model causal, with labels on the target only |
| messages | causal, with the tokenizer's chat template |
| labelled text | classification |
| text | causal |
| tokenized | depends on the model and the shape of `labels` |
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from offloadkit.errors import DataError
from offloadkit.facts.changes import longest_of_model
from offloadkit.facts.units import counted
from offloadkit.hf.columns import BY_NAME, ColumnOptions, Columns, Kind, choose
from offloadkit.hf.load import Task, infer_task
from offloadkit.hf.read import is_stream, load_dataset_like
from offloadkit.hf.streams import Rows, TokenizedStream
from offloadkit.hf.tokenize import IGNORED, Tokenizing, known_names, label_names, tokenize
from offloadkit.hf.widths import (
    Collate,
    PadToWidths,
    Widths,
    pad_to_widths,
    rounded_up,
    width_step,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["PreparedData", "load_dataset_like", "prepare", "with_decoder_inputs"]

_DEFAULT_INPUT_LENGTHS: dict[Task, int] = {"seq2seq": 512, "causal": 1024, "classification": 512}
DEFAULT_TARGET_LENGTH = 128


Mask = Literal["padded", "unread", "full"]
"""What attention masks may mask, the most first; "full": nothing, "unread": see `masks.Padding`."""


@dataclass(frozen=True)
class PreparedData:
    dataset: Any
    """A `datasets.Dataset`, a `TokenizedStream`, or packs of either (`packing.py`): columns input_ids, attention_mask
    (packs: position_ids) and labels (lists of int; classification: one int)."""

    collator: PadToWidths
    """Rows -> tensors int64 [rows, width], padded; labels with -100. See `widths.width_step`."""

    task: Task

    id2label: dict[int, str] | None = None

    longest_input: int = 1
    """Tokens of the longest row, padded."""

    longest_target: int = 1
    """Tokens of the longest row's labels, padded; 1 in classification."""

    mask: Mask = "padded"

    @property
    def rows_in_words(self) -> str:
        if not hasattr(self.dataset, "__len__"):
            return "a stream of rows"
        packed = getattr(self.dataset, "rows", None)
        number = counted(len(self.dataset), "row")
        return number if packed is None else f"{counted(len(packed), 'row')}, packed into {number}"


def prepare(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    *,
    task: Task | None = None,
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    id2label: dict[int, str] | None = None,
    column_options: ColumnOptions = BY_NAME,
) -> PreparedData:
    """Tokenize a dataset for a model.

    Args:
        dataset: from `load_dataset_like`.
        tokenizer: from `ModelSource.load_tokenizer`.
        task: None: inferred from the columns and the model.
        max_input_length: tokens per row, with the end token; for a causal model input plus target. None: 512 (causal:
            1024), at most the model's limit.
        max_target_length: target tokens per row (seq2seq). None: 128.
        id2label: classes of the training set, for an evaluation set.

    Raises:
        DataError: no column set fits the model, a value is missing, a token id is beyond the vocabulary, or no row has
            a target.
    """
    dataset = dataset.with_format(None)
    columns = _columns(dataset, model_config, task, column_options)
    task = _task_of(columns, dataset, model_config, task)
    if task == "classification" and id2label is None:
        id2label = label_names(dataset, columns.target or "labels", model_config)
    run = _run(dataset, columns, tokenizer, model_config, task, max_input_length, max_target_length, id2label)
    tokenized = tokenize(run)
    if len(tokenized) == 0:
        whys: dict[Kind, str] = {
            "tokenized": "all labels are -100",
            "messages": "no message has the role 'assistant', whose messages are learned",
        }
        why = whys.get(columns.kind, "their text has no tokens to predict")
        why = run.why_cut_off() if run.cut_off else why
        raise DataError(f"none of the {len(dataset)} rows teaches anything: {why}")
    run.check_known()
    run.warn_of_losses()
    number, limit = len(dataset), longest_of_model(model_config)
    step = width_step(run.total_input / number, run.longest_input, limit)
    target_step = width_step(run.total_target / number, run.longest_target, limit) if task == "seq2seq" else step
    widest = rounded_up(run.longest_input, step), rounded_up(run.longest_target, target_step)
    if task == "classification":
        widest = widest[0], 1
    mask: Mask = "padded"
    if run.num_attended == number * run.longest_input:
        mask = "full"
    elif run.num_attended == run.total_input and task == "causal":
        mask = "unread"
    collator = _collator(tokenizer, task, (step, target_step) if task == "seq2seq" else (step,))
    return PreparedData(tokenized, collator, task, run.id2label, *widest, mask)


def _run(
    dataset: Dataset,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    task: Task,
    max_input_length: int | None,
    max_target_length: int | None,
    id2label: dict[int, str] | None,
) -> Tokenizing:
    return Tokenizing(
        dataset,
        columns,
        tokenizer,
        task,
        vocab_size=config.get_text_config().vocab_size,
        max_input_length=max_input_length or default_input_length(config, task),
        max_target_length=max_target_length or DEFAULT_TARGET_LENGTH,
        id2label=id2label if task == "classification" else None,
        num_positions=num_positions(config),
    )


def _prepare_stream(
    rows: Rows,
    first: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    *,
    max_input_length: int | None,
    max_target_length: int | None,
    column_options: ColumnOptions,
) -> PreparedData:
    """Like `prepare`, for a stream: columns, task and widths follow from its first rows, the longest row from the
    maximum lengths.
    """
    columns = _columns(first, config, None, column_options)
    task = _task_of(columns, first, config, None)
    id2label = known_names(first, columns.target or "labels", config) if task == "classification" else None
    if task == "classification" and id2label is None:
        raise DataError(
            "the labels of a stream are not known before it ends: give it a datasets.ClassLabel feature with their "
            "names, or pass a model whose config.label2id has them"
        )
    lengths = {"max_input_length": max_input_length, "max_target_length": max_target_length}
    data = prepare(first, tokenizer, config, task=task, id2label=id2label, column_options=column_options, **lengths)
    run = _run(first, columns, tokenizer, config, task, max_input_length, max_target_length, id2label)
    steps = data.collator.widths.steps
    longest_target = {"seq2seq": run.max_target_length, "causal": run.max_input_length, "classification": 1}[task]
    return replace(
        data,
        dataset=TokenizedStream(rows, run),
        longest_input=rounded_up(run.max_input_length, steps[0]),
        longest_target=longest_target if task == "classification" else rounded_up(longest_target, steps[-1]),
        mask="unread" if task == "causal" and columns.kind != "tokenized" else "padded",
    )


def prepare_both(
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    *,
    max_input_length: int | None,
    max_target_length: int | None,
    column_options: ColumnOptions = BY_NAME,
) -> tuple[PreparedData, PreparedData | None]:
    """Tokenize a training set and, unless it is None, an evaluation set, for the same task and labels.

    Prints the chosen columns, unless the column names make the choice obvious.

    Args:
        train_dataset, eval_dataset: see `load_dataset_like`. `train_dataset` may also be a stream, and `eval_dataset`
            the share of training rows to hold out (0 < share < 1).
    """
    how: dict[str, Any] = {
        "max_input_length": max_input_length,
        "max_target_length": max_target_length,
        "column_options": column_options,
    }
    if is_stream(train_dataset):
        stream = Rows(train_dataset)
        rows = stream.first()
        data = _prepare_stream(stream, rows, tokenizer, model_config, **how)
    else:
        rows = load_dataset_like(train_dataset, columns=column_options.named)
        data = prepare(rows, tokenizer, model_config, **how)
    if said := _columns(rows, model_config, data.task, column_options).in_words(rows.column_names):
        print(said, flush=True)

    def prepared(given: Any) -> PreparedData:
        rows = load_dataset_like(given, split="validation", columns=column_options.named)
        return prepare(rows, tokenizer, model_config, task=data.task, id2label=data.id2label, **how)

    return with_evaluation(data, eval_dataset, prepared)


def with_evaluation(
    data: PreparedData, eval_dataset: Any, prepared: Callable[[Any], PreparedData]
) -> tuple[PreparedData, PreparedData | None]:
    """The training rows and the evaluation rows, which `prepared` makes of `eval_dataset`; see `prepare_both`."""
    if eval_dataset is None:
        return data, None
    if isinstance(eval_dataset, float):
        return held_out(data, eval_dataset)
    try:
        return data, prepared(eval_dataset)
    except DataError as error:
        raise DataError(f"eval_dataset: {error}") from error


def held_out(data: PreparedData, share: float) -> tuple[PreparedData, PreparedData]:
    """Training rows, and a share of them for evaluation. Raises `DataError` if no row is left to train on."""
    total = len(data.dataset)
    number = max(1, round(share * total))
    if number == total:
        raise DataError(f"eval_dataset={share} holds out all of the rows ({total}): pass a smaller share, or more rows")
    held = set(random.Random(0).sample(range(total), number))
    rest = [row for row in range(total) if row not in held]
    return replace(data, dataset=data.dataset.select(rest)), replace(data, dataset=data.dataset.select(sorted(held)))


def longest_row(*prepared: PreparedData | None) -> dict[str, Any]:
    """Arguments of `planning.PlanRequest`."""
    some = [data for data in prepared if data is not None]
    return {
        "mask": min((data.mask for data in some), key=get_args(Mask).index),
        "max_input_length": max(data.longest_input for data in some),
        "max_target_length": max(data.longest_target for data in some),
    }


_KINDS: dict[Task, set[Kind]] = {
    "seq2seq": {"tokenized", "pairs"},
    "causal": {"tokenized", "pairs", "messages", "text"},
    "classification": {"tokenized", "labelled text"},
}


def _columns(dataset: Dataset, config: PreTrainedConfig, task: Task | None, column_options: ColumnOptions) -> Columns:
    """Columns that fit the model; if none fit, columns of any kind, for the error message of `_task_of`."""
    if task is None and column_options.named:
        task = infer_task(config)
    tasks: list[Task] = [task] if task else ["classification"]
    if task is None and not _fills_in_masks(config):
        tasks.append("seq2seq" if config.is_encoder_decoder else "causal")
    names = dataset.column_names
    try:
        return choose(names, set().union(*(_KINDS[each] for each in tasks)), column_options)
    except DataError as error:
        if column_options.named:
            raise
        if task is not None:
            raise DataError(f"for task {task!r} {error}") from error
        return choose(names, set().union(*_KINDS.values()), column_options)


def _fills_in_masks(config: PreTrainedConfig) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and infer_task(config) == "classification"


def _task_of(columns: Columns, dataset: Dataset, config: PreTrainedConfig, task: Task | None) -> Task:
    encoder_decoder = bool(config.is_encoder_decoder)
    of_kind: dict[Kind, Task] = {"messages": "causal", "text": "causal", "labelled text": "classification"}
    of_kind["pairs"] = "seq2seq" if encoder_decoder else "causal"
    wanted = task or of_kind.get(columns.kind) or _task_of_tokenized(dataset, config)
    if wanted == "seq2seq" and not encoder_decoder:
        raise DataError(f"seq2seq needs an encoder-decoder (T5, BART), and {config.model_type!r} is not one")
    if wanted == "causal" and encoder_decoder:
        raise DataError(
            f"{' + '.join(columns.inputs)} trains a causal language model, but {config.model_type!r} is an "
            "encoder-decoder: give it the columns input + target"
        )
    if wanted == "causal" and _fills_in_masks(config):
        raise DataError(
            f"{config.model_type!r} is an encoder and cannot generate text: give it the columns text + label"
        )
    return wanted


def _task_of_tokenized(dataset: Dataset, config: PreTrainedConfig) -> Task:
    from datasets import ClassLabel, Value

    label = dataset.features.get("labels")
    if isinstance(label, Value | ClassLabel):
        return "classification"
    if config.is_encoder_decoder:
        if label is None:
            raise DataError(
                f"an encoder-decoder ({config.model_type}) needs `labels` in addition to `input_ids`. Columns found: "
                f"{', '.join(dataset.column_names)}"
            )
        return "seq2seq"
    return "causal"


def default_input_length(config: PreTrainedConfig, task: Task) -> int:
    default, limit = _DEFAULT_INPUT_LENGTHS[task], longest_of_model(config)
    return default if limit is None else min(default, limit)


def num_positions(config: PreTrainedConfig) -> int | None:
    """Number of learned position embeddings; None for rotary or relative positions."""
    names = vars(config.get_text_config())
    computed = any(word in name for name in names for word in ("rope", "rotary", "relative"))
    return None if computed else longest_of_model(config)


def _collator(tokenizer: PreTrainedTokenizerBase, task: Task, steps: tuple[int, ...]) -> PadToWidths:
    """A collator that pads inputs and labels to multiples of `steps`.

    Causal rows have labels already. `DataCollatorForLanguageModeling` would mask an end token that is also the padding
    token, so the model would not learn to end. They are padded on the right: on the left, the padding would be trained
    to predict a row's first token.
    """
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

    if task == "causal" and tokenizer.padding_side == "left":
        tokenizer = copy.copy(tokenizer)
        tokenizer.padding_side = "right"
    if task == "classification":
        return pad_to_widths(DataCollatorWithPadding(tokenizer), tokenizer, Widths(steps), None)
    own = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)
    collate = _PadDecoderInputs(own, tokenizer.pad_token_id)
    return pad_to_widths(collate, tokenizer, Widths(steps), IGNORED)


@dataclass(frozen=True)
class _PadDecoderInputs:
    """Pads a `decoder_input_ids` column, which `DataCollatorForSeq2Seq` does not."""

    collate: Collate
    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if "decoder_input_ids" not in rows[0]:
            return self.collate(rows)
        decoder_rows = [torch.tensor(row["decoder_input_ids"]) for row in rows]
        batch = self.collate([{k: v for k, v in row.items() if k != "decoder_input_ids"} for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence(decoder_rows, batch_first=True, padding_value=self.pad_token_id)
        batch["decoder_input_ids"] = padded
        return batch


def with_decoder_inputs(collator: PadToWidths, model: Any) -> PadToWidths:
    """A seq2seq collator that adds `decoder_input_ids`, made from the labels as in the model's forward.

    Label smoothing needs this, because the Trainer then removes the labels from the model's inputs.
    """
    collate: Collate = collator.collate

    def collate_and_shift(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(rows)
        if "decoder_input_ids" not in batch:
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    return replace(collator, collate=collate_and_shift)
