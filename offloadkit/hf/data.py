"""From rows to what a Trainer needs: the task that the columns define, token ids, and the collator.

| columns | task |
|---|---|
| `input`, `target` | seq2seq |
| `messages` (a list of role/content dicts) | causal, through the tokenizer's chat template |
| `text`, `label` | classification |
| `text` | causal |
| `input_ids` (`labels`, `attention_mask`, `decoder_input_ids`) | tokenized: by model and shape of `labels` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from offloadkit.errors import DataError
from offloadkit.hf.load import Task, infer_task
from offloadkit.hf.read import load_dataset_like
from offloadkit.hf.tokenize import IGNORED, Tokenizing, label_names, tokenize

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["PreparedData", "load_dataset_like", "prepare", "with_decoder_inputs"]

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""From rows to a batch."""
_DEFAULT_INPUT_LENGTHS: dict[Task, int] = {"seq2seq": 512, "causal": 1024, "classification": 512}
DEFAULT_TARGET_LENGTH = 128
_COLUMN_SETS: dict[str, tuple[tuple[str, ...], Task | None]] = {
    "tokenized": (("input_ids",), None),
    "pairs": (("input", "target"), "seq2seq"),
    "messages": (("messages",), "causal"),
    "labelled text": (("text", "label"), "classification"),
    "text": (("text",), "causal"),
}
"""Column sets in the order in which they are tried; other columns are left out."""


@dataclass(frozen=True)
class PreparedData:
    """A tokenized dataset and its collator."""

    dataset: Dataset
    """Columns input_ids, attention_mask and labels (lists of int; classification: one int)."""

    collator: Collate
    """Rows -> tensors int64 [rows, longest row], padded; labels with -100."""

    task: Task

    id2label: dict[int, str] | None = None
    """Classification: the name of each class id, for the head of the model and for the evaluation set."""

    longest_input: int = 1
    """Tokens of the longest row."""

    longest_target: int = 1
    """Tokens of the longest row's labels; 1 in classification."""


def prepare(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    *,
    task: Task | None = None,
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    id2label: dict[int, str] | None = None,
) -> PreparedData:
    """Tokenize a dataset for a model.

    Args:
        dataset: what `load_dataset_like` returns.
        tokenizer: what `ModelSource.load_tokenizer` returns.
        model_config: tells what the model can learn, and how long its inputs may be.
        task: None: by the columns.
        max_input_length: tokens of input in a row, with the end token. None: 512 (causal: 1024), or the model's
            limit if that is less.
        max_target_length: tokens of target in a row of seq2seq; None: 128.
        id2label: for an evaluation set, the classes of the training set.

    Raises:
        DataError: no column set fits, or none fits this model; a field is missing; a token id is beyond the vocabulary;
            no row has a target.
    """
    dataset = dataset.with_format(None)
    kind = _column_set(dataset, task)
    task = _task_of(kind, dataset, model_config, task)
    for length in (max_input_length, max_target_length):
        if length is not None and (not isinstance(length, int) or length < 2):
            raise DataError(f"max_input_length and max_target_length are whole numbers of tokens >= 2, got {length!r}")
    if task == "classification" and id2label is None:
        id2label = label_names(dataset, "labels" if kind == "tokenized" else "label", model_config)
    run = Tokenizing(
        dataset,
        tokenizer,
        task,
        vocab_size=model_config.get_text_config().vocab_size,
        max_input_length=max_input_length or default_input_length(model_config, task),
        max_target_length=max_target_length or DEFAULT_TARGET_LENGTH,
        id2label=id2label if task == "classification" else None,
    )
    tokenized = tokenize(run, kind)
    if len(tokenized) == 0:
        raise DataError(
            f"there is nothing to learn in any of the {len(dataset)} rows: "
            + ("all labels are -100" if kind == "tokenized" else "their text gives no tokens to predict")
        )
    run.check_known()
    run.warn_of_losses()
    collator = _collator(tokenizer, task)
    return PreparedData(tokenized, collator, task, run.id2label, run.longest_input, run.longest_target)


def prepare_both(
    train_dataset: Any,
    eval_dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    *,
    max_input_length: int | None,
    max_target_length: int | None,
) -> tuple[PreparedData, PreparedData | None]:
    """The training set and, unless it is None, the evaluation set, for the same task and labels.

    Args:
        train_dataset, eval_dataset: what `load_dataset_like` takes.

    Raises:
        DataError: as `prepare`; of the evaluation set, its message begins with "eval_dataset: ".
    """
    lengths: dict[str, Any] = {"max_input_length": max_input_length, "max_target_length": max_target_length}
    data = prepare(load_dataset_like(train_dataset), tokenizer, model_config, **lengths)
    if eval_dataset is None:
        return data, None
    try:
        rows = load_dataset_like(eval_dataset, split="validation")
        return data, prepare(rows, tokenizer, model_config, task=data.task, id2label=data.id2label, **lengths)
    except DataError as error:
        raise DataError(f"eval_dataset: {error}") from error


def longest_row(*prepared: PreparedData | None) -> dict[str, int]:
    """The lengths to plan for once the rows are tokenized: no batch is longer."""
    some = [data for data in prepared if data is not None]
    return {
        "max_input_length": max(data.longest_input for data in some),
        "max_target_length": max(data.longest_target for data in some),
    }


def _column_set(dataset: Dataset, task: Task | None) -> str:
    """The first column set in the dataset that fits the task.

    Raises:
        DataError: there is none. The message shows the columns found and the sets accepted.
    """
    columns = set(dataset.column_names)
    for kind, (needed, its_task) in _COLUMN_SETS.items():
        if columns.issuperset(needed) and (task is None or its_task in (task, None)):
            return kind
    sets = "; ".join(f"{' + '.join(needed)} ({its_task or 'tokenized'})" for needed, its_task in _COLUMN_SETS.values())
    wanted = f" for task {task!r}" if task else ""
    known = {name for needed, _ in _COLUMN_SETS.values() for name in needed}
    other = next((name for name in dataset.column_names if name not in known), "question")
    raise DataError(
        f"no column set fits{wanted}. Columns found: {', '.join(dataset.column_names) or 'none'}. Accepted: {sets}. "
        f"Rename yours, e.g. dataset.rename_column({other!r}, {'target' if 'input' in columns else 'input'!r})"
    )


def _task_of(kind: str, dataset: Dataset, config: PreTrainedConfig, task: Task | None) -> Task:
    """The task that columns, model and user agree on.

    Raises:
        DataError: they do not agree.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    needed, its_task = _COLUMN_SETS[kind]
    wanted = task or its_task or _task_of_tokenized(dataset, config)
    encoder_decoder = bool(config.is_encoder_decoder)
    if wanted == "seq2seq" and not encoder_decoder:
        raise DataError(
            f"{' + '.join(needed)} trains an encoder-decoder (T5, BART), and {config.model_type!r} is none: "
            "join each pair into one `text`, or into `messages`"
        )
    if wanted == "causal" and encoder_decoder:
        raise DataError(
            f"{' + '.join(needed)} trains a causal language model, and {config.model_type!r} is an encoder-decoder: "
            "give it the columns input + target"
        )
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES  # made to fill in masked tokens (BERT)
    if wanted == "causal" and masked and infer_task(config) == "classification":
        raise DataError(f"{config.model_type!r} is an encoder and writes no text: give it the columns text + label")
    return wanted


def _task_of_tokenized(dataset: Dataset, config: PreTrainedConfig) -> Task:
    from datasets import ClassLabel, Value

    label = dataset.features.get("labels")
    if isinstance(label, Value | ClassLabel):
        return "classification"
    if config.is_encoder_decoder:
        if label is None:
            raise DataError(
                f"an encoder-decoder ({config.model_type}) needs `labels` beside `input_ids`. "
                f"Columns found: {', '.join(dataset.column_names)}"
            )
        return "seq2seq"
    return "causal"


def default_input_length(config: PreTrainedConfig, task: Task) -> int:
    """The task's default, or the model's limit if that is less. (T5 has none: its positions are relative.)"""
    text_config = config.get_text_config()
    limits = [getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return min([_DEFAULT_INPUT_LENGTHS[task], *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _collator(tokenizer: PreTrainedTokenizerBase, task: Task) -> Collate:
    """HuggingFace's collators.

    Causal rows bring their own labels. `DataCollatorForLanguageModeling` would mask an end token that is also the
    padding token, and it would not be learned.
    """
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

    if task == "classification":
        return DataCollatorWithPadding(tokenizer)
    return _PadDecoderInputs(DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED), tokenizer.pad_token_id)


@dataclass(frozen=True)
class _PadDecoderInputs:
    """`DataCollatorForSeq2Seq`, plus the padding of a `decoder_input_ids` column, which it lacks."""

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


def with_decoder_inputs(collate: Collate, model: Any) -> Collate:
    """A seq2seq collator that also makes `decoder_input_ids` from the labels, as the model does.

    With label smoothing the model gets no labels: the Trainer removes them from the batch and computes the loss itself.
    """

    def collate_and_shift(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collate(rows)
        if "decoder_input_ids" not in batch:
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    return collate_and_shift
