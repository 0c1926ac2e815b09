"""Functions run by the ranks in tests of `finetune` and of the Trainers, each started as by a launcher."""

from __future__ import annotations

import functools
import signal
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from offloadkit.distributed import world

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "user", "hello", "good", "bad"]


@contextmanager
def as_launched() -> Iterator[tuple[int, int]]:
    """Sets the environment that a launcher gives this rank; yields (rank, ranks). With one rank nothing is set."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with pytest.MonkeyPatch.context() as patch:
        if size > 1:
            local = torch.cuda.current_device() if dist.get_backend() == "nccl" else rank  # GPUs may be shared
            who = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            for name, value in {**who, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}.items():
                patch.setenv(name, str(value))
        yield rank, size


def pairs(number: int, begin: int = 0) -> list[dict[str, str]]:
    """Rows of several lengths."""
    sentence = [
        " ".join(WORDS[(at * step + 1) % 14] for step in range(1, 2 + at * 5 % 9)) for at in range(begin, number)
    ]
    return [{"input": text, "target": " ".join(reversed(text.split()[:4]))} for text in sentence]


def model_named(name: str) -> tuple[Any, Any]:
    """A model without dropout, the same on all ranks, and its tokenizer."""
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    from tests.hf.tiny import llama_config, t5_config, word_tokenizer

    torch.manual_seed(0)
    if name == "t5":
        return T5ForConditionalGeneration(t5_config(dropout_rate=0.0)), word_tokenizer()
    return LlamaForCausalLM(llama_config()), word_tokenizer()


def right_tokens(prediction: Any) -> dict[str, float]:
    """Metrics that also depend on the number and order of the rows."""
    guessed = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    guessed = guessed.argmax(-1) if guessed.ndim == 3 else guessed
    weighed = float((np.where(labels >= 0, labels, 0).sum(1) * np.arange(1, len(labels) + 1)).sum())
    return {"labels": weighed, "rows": float(len(labels)), "guessed": float(guessed.shape[0])}


def finetuned(
    name: str,
    folder: Path,
    *,
    accumulation: int,
    rows: int = 11,
    size: int = 0,
    interrupted_at: int | None = None,
    on_gpu: bool = False,
    streams: Literal["", "again", "once"] = "",
    **options: Any,
) -> dict[str, Any]:
    """Run `finetune` with `accumulation` micro-batches an update, summed over all ranks.

    Args:
        size: number of ranks that a launcher has started; 0: the size of the present group.
        interrupted_at: the last rank alone is interrupted after this step.
        streams: the rows are a stream, which can be read again or only once.

    Returns:
        "weights", "losses", "metrics", "norms", "samples", "stopped".
    """
    import offloadkit

    with nullcontext((0, size)) if size else as_launched() as (rank, size):
        if interrupted_at is not None and rank == size - 1:
            options["callbacks"] = [interrupt_at(interrupted_at)]
        model, tokenizer = model_named(name)
        own: dict[str, Any] = {"batch_size": 2, "epochs": 2, "logging_steps": 1, "learning_rate": 1e-2}
        own["offload"] = offloadkit.OffloadConfig(exchange="micro_batch")
        data: Any = pairs(rows)
        if streams:
            data = functools.partial(iter, data if streams == "again" else iter(data))
        result = offloadkit.finetune(
            model,
            data,
            tokenizer=tokenizer,
            output_dir=folder,
            gradient_accumulation=accumulation // size,
            use_cpu=not on_gpu,
            **(own | options),
        )
    return {
        "weights": {name: parameter.detach().cpu().clone() for name, parameter in result.model.named_parameters()},
        "losses": [entry["loss"] for entry in result.history if "loss" in entry],
        "norms": [record.grad_norm for record in result.steps],
        "metrics": {name: value for name, value in result.metrics.items() if name != "train_seconds"},
        "samples": result.samples,
        "stopped": result.stopped,
    }


def finetuned_on_full_gpus(folder: Path, *, full: int, room: int) -> dict[str, Any]:
    """Run `finetune`; its evaluation after training finds GPUs full.

    Args:
        full: number of evaluated micro-batches, of rank 1, that find its GPU full; -1: all of them.
        room: most rows for which rank 0 has the memory to generate text.
    """
    from transformers import T5ForConditionalGeneration

    forward, generate, tried = T5ForConditionalGeneration.forward, T5ForConditionalGeneration.generate, list[int]()
    left = full if dist.is_initialized() and dist.get_rank() == 1 else 0

    @functools.wraps(forward)
    def evaluates(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        found = forward(self, *args, **kwargs)
        if "labels" in kwargs and not torch.is_grad_enabled() and found.loss.device.type != "meta" and left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    def generates(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        tried.append(len(input_ids))
        if len(input_ids) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, input_ids=input_ids, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(T5ForConditionalGeneration, "forward", evaluates)
        patch.setattr(T5ForConditionalGeneration, "generate", generates)
        options: dict[str, Any] = {"eval_dataset": pairs(16, 11), "per_device_eval_batch_size": 2, "epochs": 1}
        found = finetuned("t5", folder, accumulation=4, **options)
    return found | {"tried": tried, "warned": [str(each.message) for each in warned]}


def finetuned_until_one_fails(folder: Path, *, meets: bool) -> None:
    """The last rank fails in a callback after the second step. With `meets` the other ranks wait for it at a
    barrier."""
    from transformers import TrainerCallback

    class Fails(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                raise MemoryError("no room here")
            if meets:
                dist.barrier()

    finetuned("llama", folder, accumulation=2, rows=16, callbacks=[Fails()])


def interrupt_at(step: int) -> Any:
    """A callback that raises SIGINT at the end of the step."""
    from transformers import TrainerCallback

    class Interrupts(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                signal.raise_signal(signal.SIGINT)

    return Interrupts()


def trained(
    kind: str,
    folder: Path,
    *,
    accumulation: int,
    rows: int = 11,
    streams: bool = False,
    scales_loss: bool = False,
    exchange: Literal["step", "micro_batch"] = "micro_batch",
    full: tuple[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run a Trainer's `train` and `evaluate` with `accumulation` micro-batches an update, summed over all ranks.

    Args:
        streams: whether the rows are an `IterableDataset`.
        scales_loss: whether the Trainer class itself divides by the number of targets in the accumulated batch.
        kind: "t5" (a Seq2SeqTrainer that generates) or "llama" (a Trainer whose metrics read logits).
        full: (rank, number of the training forward, from 1) where the rank's GPU is full.

    Returns:
        "weights", "losses", "metrics" of all evaluations, "norms", the reasons of all "moves", and as "samples" the
        name of the best checkpoint.
    """
    from offloadkit.facts.config import OffloadConfig
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer
    from tests.hf.training import arguments, causal_rows, llama, seq2seq_rows, t5

    with as_launched() as (rank, size):
        generates = kind == "t5"
        own: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-2, "per_device_eval_batch_size": 2}
        own |= {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "constant"}
        own |= {"predict_with_generate": generates, "generation_max_length": 6, "include_for_metrics": ["inputs"]}
        args = arguments(folder, gradient_accumulation_steps=accumulation // size, **(own | options))
        make = seq2seq_rows if generates else causal_rows

        class Scaling(OffloadTrainer):
            loss_is_scaled_for_ga = True

            def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any, **_: Any) -> Any:
                logits, labels = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
                summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                return summed / num_items_in_batch

        usual = OffloadSeq2SeqTrainer if generates else OffloadTrainer
        trainer = (Scaling if scales_loss else usual)(
            model=t5() if generates else llama(),
            args=args,
            train_dataset=Stream(make(rows)) if streams else make(rows),
            eval_dataset=make(7),
            compute_metrics=right_tokens,
            offload=OffloadConfig(exchange=exchange),
        )
        if full is not None and full[0] == rank:
            fill_at(trainer.model, full[1])
        output = trainer.train()
        last = {} if scales_loss else trainer.evaluate()
        history, best = trainer.state.log_history, trainer.state.best_model_checkpoint
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.close()
    times = ("runtime", "second", "total_flos", "epoch", "step")
    evaluations = [*(entry for entry in history if "eval_loss" in entry), last]
    return {
        "weights": weights,
        "losses": [entry["loss"] for entry in history if "loss" in entry] + [output.training_loss],
        "norms": [record.grad_norm for record in trainer.telemetry.records],
        "metrics": {
            f"{name} {at}": value
            for at, entry in enumerate(evaluations)
            for name, value in entry.items()
            if not any(part in name for part in times)
        },
        "samples": None if best is None else Path(best).name,
        "moves": [move.why for move in trainer.telemetry.moves],
    }


def fill_at(model: torch.nn.Module, number: int) -> None:
    """Make the model's training forward with this number raise an OOM error."""
    calls = count(1)

    def fails(*_: Any) -> None:
        if torch.is_grad_enabled() and next(calls) == number:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_hook(fails)


def trained_on_own_rows(folder: Path) -> None:
    """Train on data sets whose length differs between ranks."""
    from offloadkit.hf.trainer import OffloadTrainer
    from tests.hf.training import arguments, causal_rows, llama

    with as_launched() as (rank, _):
        rows, args = causal_rows(8 - 2 * rank), arguments(folder, max_steps=2)
        with closing(OffloadTrainer(model=llama(), args=args, train_dataset=rows)) as trainer:
            trainer.train()


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


class UnsendableError(Exception):
    """An error that cannot be copied from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fails_on_first() -> None:
    """Rank 0's part of `run_on_rank_0` raises an error that cannot be sent."""

    def fails() -> None:
        raise UnsendableError("no", "luck")

    world.run_on_rank_0("trying", fails)


def first_never_comes() -> None:
    """Rank 0 fails before the other ranks hear from it."""
    dist.barrier()  # all have joined the group
    if dist.get_rank() == 0:
        raise ValueError("nothing left")
    world.run_on_rank_0("trying", lambda: None)


def error_of(call: Any, **arguments: Any) -> str:
    """The error raised on this rank."""
    try:
        call(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def trained_from_folder(folder: Path, *, unread: bool) -> dict[str, torch.Tensor]:
    """Weights after two steps from a folder; with `unread` the engine reads them, otherwise transformers does."""
    from transformers import AutoModelForCausalLM

    import offloadkit
    from offloadkit.offload.unread import is_unread

    model: Any = offloadkit.from_pretrained(folder) if unread else AutoModelForCausalLM.from_pretrained(folder)
    assert is_unread(model) == unread
    tokens = torch.arange(8).view(2, 4) + dist.get_rank()
    config = offloadkit.OffloadConfig(learning_rate=1e-2, working_dtype="bf16", exchange="micro_batch")
    with offloadkit.OffloadEngine(model.train(), config, device="cpu") as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    return {name: each.detach().clone() for name, each in model.state_dict().items()}
