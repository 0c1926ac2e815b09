"""Rows of sound and text (`audio` + `text`) for Whisper.

The model's own processor makes input_features of the sound when a row is read, and labels of the text before training.
Sound is decoded and resampled by `datasets`' Audio feature.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from offloadkit.errors import ConfigError, DataError, ModelError, cut
from offloadkit.facts.units import rounded
from offloadkit.hf.columns import ColumnOptions, strings
from offloadkit.hf.data import DEFAULT_TARGET_LENGTH, PreparedData, with_evaluation
from offloadkit.hf.load import num_frames
from offloadkit.hf.read import is_stream, load_dataset_like
from offloadkit.hf.tokenize import IGNORED, Cut
from offloadkit.hf.widths import LEAST_STEP, PadToWidths, Widths, rounded_up
from offloadkit.offload.graphs import MOST_KINDS

if TYPE_CHECKING:
    from datasets import Dataset as Rows
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_DECODER = "torchcodec"
_HOW = f"install it by `pip install {_DECODER}`, which also needs FFmpeg's libraries"


class SpeechRows(Dataset[dict[str, Any]]):
    """Rows whose features are computed when they are read: 1.5 MB each, for Whisper-large, which RAM need not hold.

    Attributes:
        lengths: labels of each row.
    """

    def __init__(self, sounds: _Sounds, extractor: Any, labels: Sequence[list[int]], indices: Sequence[int]) -> None:
        """`indices`: rows of `sounds` that are learned, and have `labels`."""
        self.sounds, self.extractor, self.labels, self.indices = sounds, extractor, labels, indices
        self.lengths = [len(row) for row in labels]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """input_features, fp32 [mel bins, frames], and labels, a list of ints."""
        extractor = self.extractor
        samples = self.sounds[self.indices[index]]
        made = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="np")
        return {"input_features": made["input_features"][0], "labels": self.labels[index]}

    def select(self, rows: Sequence[int]) -> SpeechRows:
        chosen = [self.labels[row] for row in rows], [self.indices[row] for row in rows]
        return SpeechRows(self.sounds, self.extractor, *chosen)


class _Sounds:
    """The decoded sound of each row, at one rate."""

    def __init__(self, rows: Rows, column: str, rate: int) -> None:
        """Raises `DataError` if the values are no sound, or cannot be decoded because torchcodec is not installed."""
        import datasets

        self._column, self._rate = column, rate
        feature: Any = rows.features[column]
        is_array = isinstance(feature, dict) and {"array", "sampling_rate"} <= set(feature)
        encoded = isinstance(feature, datasets.Audio) or (isinstance(feature, dict) and not is_array)
        if not is_array and not encoded and getattr(feature, "dtype", None) not in _ENCODED:
            raise DataError(
                f"the column {column!r} holds {cut(str(feature))}, not sound: a row needs a dict with array and "
                "sampling_rate, a path, the bytes of a file, or a datasets.Audio feature"
            )
        rows = rows.select_columns([column])
        if is_array:
            found = sorted(
                set(rows.with_format("arrow")[:][column].combine_chunks().field("sampling_rate").to_pylist())
            )
            other = next((each for each in found if each != rate), None)
            if other is None:
                self._rows = rows.with_format("numpy")
                return
            _check_decoder(f"the sound of {column!r} has {other:,} samples a second, and the model hears {rate:,}")
        else:
            _check_decoder(f"the column {column!r} holds encoded sound, and the model hears {rate:,} samples a second")
        self._rows = rows.cast_column(column, datasets.Audio(sampling_rate=rate))

    def __len__(self) -> int:
        return len(self._rows)

    def num_samples(self, index: int) -> int:
        """At the model's rate, by the header of a file that says its duration. Raises as `self[index]`."""
        with _decoding(index):
            metadata = getattr(self._rows[index][self._column], "metadata", None)
        seconds = getattr(metadata, "duration_seconds", None)
        return round(seconds * self._rate) if seconds else len(self[index])

    def __getitem__(self, index: int) -> np.ndarray:
        """fp32 [samples]. Raises `DataError` if the row has no sound of one channel."""
        with _decoding(index):
            value = self._rows[index][self._column]
            samples = None if value is None else np.asarray(value["array"], dtype=np.float32)
        if samples is None or samples.size == 0:
            raise DataError(f"row {index} has no sound in {self._column!r}: fill it in or drop the row")
        if samples.ndim != 1:
            raise DataError(f"row {index} has sound of the shape {samples.shape}: one channel is needed, [samples]")
        return samples


@contextmanager
def _decoding(row: int) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"row {row} has sound that cannot be decoded: {cut(str(error))}") from error


_ENCODED = ("string", "large_string", "binary", "large_binary")


def _check_decoder(why: str) -> None:
    try:
        importlib.import_module(f"{_DECODER}.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        said = "is not installed" if missing else f"cannot be loaded ({cut(str(error).splitlines()[0])})"
        raise DataError(
            f"{why}: datasets decodes and resamples by {_DECODER}, which {said}: {_HOW}. Or give each row a dict with "
            "array and sampling_rate, at the model's rate"
        ) from error


@dataclass(frozen=True)
class _Collator:
    step: int
    longest: int
    dtype: torch.dtype

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """input_features [rows, mel bins, frames], and labels, int64 [rows, width], padded to a multiple of `step`."""
        width = min(rounded_up(max(len(row["labels"]) for row in rows), self.step), self.longest)
        features = np.stack([row["input_features"] for row in rows])
        return {
            "input_features": torch.from_numpy(features).to(self.dtype),
            "labels": torch.tensor([row["labels"] + [IGNORED] * (width - len(row["labels"])) for row in rows]),
        }


def prepare_speech(
    train_dataset: Any,
    eval_dataset: Any,
    processor: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    max_target_length: int | None,
    column_options: ColumnOptions,
) -> tuple[PreparedData, PreparedData | None]:
    """A training set and, unless it is None, an evaluation set of sound and text.

    Args:
        train_dataset, eval_dataset: as in `data.prepare_both`, but no streams.
        dtype: of the features, which the model does not cast to its weights'.

    Raises:
        ConfigError: a template is given.
        DataError: a column is missing or holds no sound or text, sound cannot be decoded, or no row has text.
        ModelError: the processor's features do not fit the model.
    """
    if column_options.template is not None:
        raise ConfigError("the input of a speech model is sound, which no template makes: pass input_column=")
    _check_fits(processor, config)

    def prepared(data: Any, split: str) -> PreparedData:
        if is_stream(data):
            raise DataError("streams of sound are not supported: pass a datasets.Dataset or a list of rows")
        names = column_options.input or "audio", column_options.target or "text"
        rows = load_dataset_like(data, split=split, columns=names).with_format(None)
        return _prepared(rows, *names, processor, config, dtype, max_target_length)

    data = prepared(train_dataset, "train")
    return with_evaluation(data, eval_dataset, lambda rows: prepared(rows, "validation"))


def _check_fits(processor: Any, config: Any) -> None:
    extractor, frames = processor.feature_extractor, num_frames(config)
    made = extractor.feature_size, extractor.nb_max_frames
    if made != (config.num_mel_bins, frames):
        raise ModelError(
            f"the processor makes features of {made[0]} mel bins x {made[1]} frames, and the model takes "
            f"{config.num_mel_bins} x {frames}: pass the model's own processor"
        )


def _prepared(
    rows: Rows,
    audio: str,
    text: str,
    processor: Any,
    config: Any,
    dtype: torch.dtype,
    max_target_length: int | None,
) -> PreparedData:
    if missing := [name for name in (audio, text) if name not in rows.column_names]:
        raise DataError(
            f"a speech model learns rows of audio + text, and there is no column {missing[0]!r}. Columns found: "
            f"{cut(', '.join(rows.column_names))}. Name yours by input_column= (sound) and target_column= (text)"
        )
    extractor, number = processor.feature_extractor, len(rows)
    sounds = _Sounds(rows, audio, extractor.sampling_rate)
    most = min(max_target_length or DEFAULT_TARGET_LENGTH, config.max_target_positions)
    targets_cut = Cut("max_target_length", most, "targets", config.max_target_positions)
    values = strings(rows[text][:], text, list(range(number)))
    labels = [_labels(ids, config) for ids in processor.tokenizer(text=values, verbose=False)["input_ids"]]
    for index, row in enumerate(labels):
        targets_cut.add(len(row))
        if row and not 0 <= min(row) <= max(row) < config.vocab_size:
            raise DataError(
                f"row {index} has the token id {max(row)} in {text!r}, but the model's vocabulary is 0 ... "
                f"{config.vocab_size - 1}: is the tokenizer the model's own?"
            )
    learned = [index for index, value in enumerate(values) if value.strip()]
    if not learned:
        raise DataError(f"none of the {number} rows teaches anything: their {text!r} has no tokens to predict")
    if len(learned) < number:
        logger.warning("%d of %d rows left out: they have nothing to learn", number - len(learned), number)
    if targets_cut.num_rows:
        logger.warning("%s", targets_cut.in_words(number))
    _tell_cut_sound([sounds.num_samples(index) for index in learned], extractor)
    shortened = [_cut(labels[index], most) for index in learned]
    longest = max(map(len, shortened))
    step = 1 if longest <= LEAST_STEP else rounded_up(-(-longest // MOST_KINDS), LEAST_STEP)
    collator = PadToWidths(_Collator(step, longest, dtype), Widths((1, 1)), {}, {})
    found = SpeechRows(sounds, extractor, shortened, learned)
    return PreparedData(found, collator, "seq2seq", None, num_frames(config), longest, "full")


def _labels(ids: list[int], config: Any) -> list[int]:
    """The ids without the decoder's start token, which the model puts before the labels."""
    return ids[1:] if ids[:1] == [config.decoder_start_token_id] else ids


def _cut(ids: list[int], most: int) -> list[int]:
    """At most `most` ids; the last one, which ends the text, stays."""
    return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def _tell_cut_sound(lengths: Sequence[int], extractor: Any) -> None:
    long = [length for length in lengths if length > extractor.n_samples]
    if long:
        rate, window = extractor.sampling_rate, extractor.n_samples
        lost, heard = sum(long) - window * len(long), rounded(window / rate, 3)
        logger.warning(
            f"{len(long):,} of {len(lengths):,} rows have sound longer than the model's window of {heard} s "
            f"and lose {lost / rate:,.1f} of all {sum(lengths) / rate:,.1f} s, but none of their text (the longest has "
            f"{max(long) / rate:,.1f} s): cut them into shorter rows"
        )
