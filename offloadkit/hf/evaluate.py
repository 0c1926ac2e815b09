"""Predictions of a trained model for a few rows, exact match and accuracy."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offloadkit.errors import OutOfVramError
from offloadkit.hf.data import PreparedData
from offloadkit.hf.images import ImageRows

_CONTINUED_TOKENS = 48
_PROMPT_OF_WHISPER = 4
"""Tokens before the text: start, language, task, and no timestamps."""


@dataclass(frozen=True)
class Sample:
    input: str
    target: str
    prediction: str

    @property
    def correct(self) -> bool:
        return self.prediction.strip() == self.target.strip()


def predict(
    model: Any,
    tokenizer: Any,
    data: PreparedData,
    *,
    num_rows: int,
    batch_size: int,
    run_eval: Callable[[Callable[[], Any]], Any] = lambda run: run(),
) -> list[Sample]:
    """Predictions for the first `num_rows` rows: greedily generated text, or the most likely class.

    A causal model continues the prompt, which has labels of -100, or the first half of a row without one. If the GPU is
    full, a batch has half as many rows from then on; with one row, `run_eval` makes room.

    Args:
        run_eval: runs a function that computes one batch, and returns its result (`OffloadEngine.run_eval`).
    """
    was_training = model.training
    model.eval()
    rows, number = data.dataset, min(num_rows, len(data.dataset))
    try:
        with torch.no_grad():
            if data.task == "causal":
                write = partial(_describe, data.collator) if isinstance(rows, ImageRows) else _continue
                return [run_eval(partial(write, model, tokenizer, rows[index])) for index in range(number)]
            answer, samples = _write if data.task == "seq2seq" else _classify, list[Sample]()
            while len(samples) < number:
                batch = [rows[index] for index in range(number)[len(samples) :][:batch_size]]
                try:
                    samples += run_eval(partial(_only_if_it_fits, answer, model, tokenizer, data, batch))
                except (OutOfVramError, torch.OutOfMemoryError) as error:
                    if len(batch) == 1:
                        raise
                    traceback.clear_frames(error.__traceback__)  # releases the keys and values of the failed batch
                    batch_size = len(batch) // 2
            return samples
    finally:
        model.train(was_training)


def _only_if_it_fits(answer: Callable[..., list[Sample]], *args: Any) -> list[Sample]:
    """`answer(*args)`. A GPU that is full with several rows raises an error for which `run_eval` moves no plan:
    fewer rows take less time than a move.
    """
    *_, batch = args
    try:
        return answer(*args)
    except torch.OutOfMemoryError as error:
        if len(batch) == 1:
            raise
        traceback.clear_frames(error.__traceback__)  # releases the keys and values of the failed batch
    raise OutOfVramError(f"the GPU was full with {len(batch)} rows")


def in_words(sample: Sample, task: str) -> str:
    shown = f"{_short(sample.input)!r} -> {_short(sample.prediction)!r}"
    if task == "causal":
        return shown
    return f"{shown}  (right)" if sample.correct else f"{shown}  (should be {_short(sample.target)!r})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def share_correct(samples: list[Sample]) -> float:
    return sum(sample.correct for sample in samples) / len(samples)


def _write(model: Any, tokenizer: Any, data: PreparedData, rows: list[dict[str, Any]]) -> list[Sample]:
    batch = data.collator(rows)
    longest = max(len(row["labels"]) for row in rows)
    targets = [[token for token in row["labels"] if token >= 0] for row in rows]
    if "input_features" in batch:
        features = batch["input_features"].to(model.device, model.dtype)
        room = model.config.max_target_positions - _PROMPT_OF_WHISPER
        written = _generate(model, max(1, min(longest, room)), input_features=features)
        texts = (_text(tokenizer.tokenizer, ids) for ids in (targets, written))
        return [Sample("(sound)", *sample) for sample in zip(*texts, strict=True)]
    written = _generate(model, longest, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    texts = (_text(tokenizer, ids) for ids in ([row["input_ids"] for row in rows], targets, written))
    return [Sample(*sample) for sample in zip(*texts, strict=True)]


def _classify(model: Any, tokenizer: Any, data: PreparedData, rows: list[dict[str, Any]]) -> list[Sample]:
    batch = {name: values.to(model.device) for name, values in data.collator(rows).items()}
    labels = batch.pop("labels").tolist()
    chosen = model(**batch).logits.argmax(-1).tolist()
    names = data.id2label or {}
    inputs = _text(tokenizer, [row["input_ids"] for row in rows])
    return [
        Sample(text, str(names.get(label, label)), str(names.get(choice, choice)))
        for text, label, choice in zip(inputs, labels, chosen, strict=True)
    ]


def _continue(model: Any, tokenizer: Any, row: dict[str, Any]) -> Sample:
    ids = row["input_ids"]
    masked = next((index for index, label in enumerate(row.get("labels", ids)) if label >= 0), 0)
    cut = masked if 0 < masked < len(ids) else max(1, len(ids) // 2)
    prompt = torch.tensor([ids[:cut]])
    longest = min(_CONTINUED_TOKENS, len(ids) - cut)
    written = _generate(model, longest, input_ids=prompt, attention_mask=torch.ones_like(prompt))
    return Sample(*_text(tokenizer, [ids[:cut], ids[cut:], written[0, cut:].tolist()]))


def _describe(collate: Any, model: Any, processor: Any, row: Any) -> Sample:
    """The last answer of a conversation with images, generated from all that comes before it."""
    batch = collate([row])
    ids, labels = batch["input_ids"][0], batch.pop("labels")[0].tolist()
    learned = [place for place, label in enumerate(labels) if label >= 0]
    begin = max(place for place in learned if labels[place - 1] < 0)
    end = learned[-1] + 1
    of_tokens = {name: value[:, :begin] for name, value in batch.items() if value.shape == batch["input_ids"].shape}
    written = _generate(model, min(_CONTINUED_TOKENS, end - begin), **batch | of_tokens)[0, begin:]
    rows = [ids[:begin].tolist(), ids[begin:end].tolist(), written.tolist()]
    return Sample(*_text(processor.tokenizer, rows))


def _generate(model: Any, num_tokens: int, **tensors: torch.Tensor) -> Any:
    inputs = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    return model.generate(**inputs, max_new_tokens=num_tokens, max_length=None, num_beams=1, do_sample=False)


def _text(tokenizer: Any, rows: Any) -> list[str]:
    """Decode, except ids beyond the tokenizer's, which a model with a padded vocabulary may generate."""
    num_known = len(tokenizer)
    known = [[token for token in map(int, row) if token < num_known] for row in rows]
    return [str(text) for text in tokenizer.batch_decode(known, skip_special_tokens=True)]
