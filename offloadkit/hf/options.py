"""The arguments of `finetune`. Its docstring, `offloadkit train` and docs/finetune.md derive from them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal

from offloadkit.errors import ConfigError, shown
from offloadkit.facts.config import OffloadConfig, Precision, check_counts, given_size, with_wishes
from offloadkit.facts.field_help import field_docs

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

LEARNING_RATES = {"pretrained": 1e-4, "random": 5e-4, "lora": 2e-4}
"""Default learning rate by `init`, and of adapters."""


@dataclass(frozen=True)
class FinetuneOptions:
    """The arguments of `finetune`. The first paragraph under a field is also its help on the command line.

    Raises:
        ConfigError: a value is invalid, or two values contradict each other.
    """

    model: str | os.PathLike[str] | PreTrainedModel | PeftModel
    """Preset (t5-3b, llama-3.1-8b, ...), folder, or hub name.

    Also a model, which is trained in place. A model from `offloadkit.from_pretrained` is read when training begins. The
    adapters of a `PeftModel` are trained."""

    train_dataset: Any
    """Rows to train on: a .jsonl, .json, .csv or .parquet file, a pattern such as 'rows/*.jsonl', or a hub name.

    Also a `datasets.Dataset`, a list of dicts, a dict of lists, a list of texts, a list of files or a pandas frame. Of
    a `DatasetDict` the split "train" is learned and, without `eval_dataset`, "validation" evaluated on. Columns: input
    + target (or prompt + completion), text or messages (decoders), messages + images (decoders that see them), text +
    label (classifiers), audio + text (Whisper), or tokenized rows. Well-known names are recognized (Alpaca, Dolly,
    ShareGPT: see `hf/columns.py`). Decoders learn only the target of a pair: through the tokenizer's chat template if
    it has one, else as the input followed by the target and the end token. Of messages they learn all of the
    assistant's, and of tokenized rows what `labels` say, or TRL's `completion_mask` and `assistant_masks`.

    A torch dataset with a length is read into RAM. A stream is an `IterableDataset` of `datasets` or torch, or a
    function that yields rows. It needs `max_steps`, trains in its own order, and begins again where it ends. It is
    planned for `max_input_length`. Its first 64 rows choose columns and task. Set `save_steps` for checkpoints before
    the end. `resume` reads a stream from its start and skips the rows learned. Each of several processes reads the
    stream and trains on its micro-batches, so the stream must give all of them the same rows."""

    eval_dataset: Any = None
    """Rows to evaluate on after each epoch and at the end; 0.1 holds out a tenth of the training rows.

    The rows held out do not depend on `seed`."""

    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None
    """Folder or hub name; byte makes each byte a token, for random weights. Default: the model's own.

    Also a tokenizer. A Whisper, and rows with images, need a processor."""

    output_dir: str | os.PathLike[str] = "offloadkit-output"
    """Folder for the trained model, in its folder "model", and for checkpoints.

    `from_pretrained` loads the folder "model"."""

    epochs: float = 1
    """Passes over the training rows.

    HuggingFace's name: `num_train_epochs`."""

    max_steps: int | None = None
    """Updates; overrides the number of epochs. A stream of rows needs it."""

    batch_size: int | Literal["auto"] = "auto"
    """Rows in a micro-batch, or auto.

    HuggingFace's name: `per_device_train_batch_size`.
    "auto" takes the largest of `planning.BATCH_SIZES` whose activations, recomputed, need at most half of the VRAM.
    With several processes `batch_size` and `gradient_accumulation` are per process."""

    gradient_accumulation: int = 1
    """Micro-batches in one update.

    HuggingFace's name: `gradient_accumulation_steps`."""

    learning_rate: float | None = None
    """Peak learning rate. Default: 1e-4, with random weights 5e-4, with lora 2e-4.

    HuggingFace's name: `lr`. The rate warms up over the first 5 % of the steps and decays linearly to 0."""

    lora: bool | int | LoraConfig | None = None
    """Train LoRA's adapters of this rank, such as 16, on frozen weights. Needs `pip install peft`.

    True is rank 16. A rank adapts all linear layers but the head, with `lora_alpha` of twice the rank; a
    `peft.LoraConfig` chooses everything, such as experts in one 3-D parameter (`target_parameters`). Frozen weights
    that do not fit in VRAM stream from RAM. The plan shows full fine-tuning beside it. `result.model` is a `PeftModel`,
    and the saved folder has the adapters alone. `result.model.merge_and_unload().save_pretrained(folder)` writes the
    whole model.

    Weights that bitsandbytes has quantised stay in VRAM: pass a `PeftModel` on them as `model`. Weights quantised
    otherwise are refused."""

    freeze: str | Sequence[str] | None = None
    """Names of modules that are not trained, such as vision_tower.

    "vision_tower" is "model.vision_tower" too, and "*" stands for any characters. Frozen weights have no gradients and
    no optimizer states; they stream from RAM if they do not fit in VRAM."""

    precision: Precision | None = None
    """Optimizer moments: exact (fp32), compact (bf16) or tiny (int8). Default: exact.

    Like `vram`, `ram`, `compile_blocks`, `grace_seconds` and `save_minutes` it overrides the field of `offload`."""

    vram: int | str | None = None
    """VRAM that may be used, in bytes or such as 8GiB. Default: what is free."""

    ram: int | str | None = None
    """RAM that may be used, in bytes or such as 32GiB. Default: what is available."""

    compile_blocks: bool | None = None
    """Compile the blocks, which then do not run as CUDA graphs: seldom faster, and the first step takes minutes."""

    grace_seconds: float | None = None
    """Seconds for a save between SIGTERM or SIGHUP and the process being killed. Default: 25.

    The current step finishes and is saved if earlier saves were fast enough; a `TrainingStoppedError` names the
    checkpoint."""

    save_minutes: float | None = None
    """Also save after this many minutes, in addition to save_strategy."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Start from pretrained or random weights."""

    max_input_length: int | None = None
    """Longest input in tokens, at least 2. Default: 512 (decoders: 1024), or the model's limit.

    Longer texts are cut; tokenized rows are not. A decoder's input and target share it. Plan and planned seconds are
    for the longest rows; shorter batches take less. If rows or tokenizer must be downloaded, a plan for the maximum
    lengths comes before the download and a plan for the longest row after it."""

    max_target_length: int | None = None
    """Longest target of an encoder-decoder in tokens, at least 2. Default: 128."""

    packing: bool = False
    """Put rows of a decoder together in rows of max_input_length tokens, which do not see each other.

    Saves the padding of rows of different lengths. A micro-batch is then `batch_size` packed rows. Which rows share one
    follows from their lengths and the seed. Attention and positions begin anew with each row, so the loss of an update
    is that of the same rows without packing. Evaluation is not packed. Encoder-decoders, classifiers, and models whose
    layers carry a state or a convolution from token to token (Mamba, Qwen3-Next) are refused. A stream is packed 128
    rows at a time."""

    seed: int = 0
    """Seed of the order of rows, dropout and random weights, from 0 to 2**32 - 1.

    Batches hold rows of nearly equal length, as with HuggingFace's `train_sampling_strategy="group_by_length"`, in
    random order after the batch with the longest row. If length correlates with the kind of row, each batch has rows of
    one kind: pass "random" then. `data_seed` determines the order alone."""

    num_gpus: int | None = None
    """Train on this machine's first GPUs, so many of them, one process per GPU. Default: one.

    Functions and classes of the notebook or script are pickled by value. Rank 0's output and one monitor are shown
    here. An interrupt, an error or the end of this process ends all processes. The trained model comes back in RAM; a
    model that was passed in gets its weights. State collected in `callbacks` stays in the processes. `use_cpu=True`
    tries it without GPUs.

    Alternatively start a script that calls `finetune` with `torchrun --nproc-per-node 2 script.py`, `accelerate launch`
    or the `deepspeed` launcher: rank 0 prints, shows the monitor and writes; all ranks return the result. N processes
    compute the same as one with N times the `gradient_accumulation`; without dropout they are bit-identical if
    `gradient_accumulation` is 1 or with `OffloadConfig(exchange="micro_batch")`."""

    engine: Literal["offloadkit", "deepspeed"] = "offloadkit"
    """Engine that trains: offloadkit's, or DeepSpeed's ZeRO with HuggingFace's own Trainer.

    "deepspeed" needs `pip install offloadkit[deepspeed]`: see docs/from-deepspeed.md. The result's `plan` is then
    offloadkit's plan for the same run, and `steps` is empty. A model in memory is trained as a copy and gets the
    weights at the end."""

    input_column: str | None = None
    """Column with the input (or the text), if its name is not recognized."""

    target_column: str | None = None
    """Column with the target (or the label), if its name is not recognized."""

    template: str | None = None
    """Builds the input from several columns by str.format, such as '{context} Question: {question}'."""

    resume: bool = False
    """Continue from the newest complete checkpoint in the output folder.

    Checkpoints are written after each epoch and when training is stopped. Only the newest is kept;
    `save_total_limit=3` keeps three."""

    overwrite: bool = False
    """Replace an earlier run in the output folder, which is refused otherwise.

    The earlier checkpoints are kept until the first step is done, the earlier model until the new one is written."""

    monitor: bool = True
    """Show memory, time, slowdown and loss live in a notebook or terminal; else a progress bar.

    See `Monitor`. Outside notebooks and terminals, a line is printed at intervals. An interrupt (or the notebook's stop
    button) finishes the current step, writes a checkpoint, evaluates and saves; a second interrupt stops at once."""

    verbose: bool = False
    """Print the placement of every byte and the bottleneck of a step, not only whether the plan fits."""

    baseline: Literal["predict", "measure"] = "predict"
    """The time without offloading that the monitor compares with, if it fits on the GPU: predicted or measured.

    "measure" first runs a few steps without offloading in a fresh process, with micro-batches of the data's lengths.
    "predict" adds a predicted AdamW step in VRAM to the compute time of this run."""

    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = ()
    """Callbacks of HuggingFace's Trainer."""

    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None
    """Metrics as in HuggingFace's Trainer; needs an evaluation set.

    It gets logits, or with `predict_with_generate=True` the tokens that an encoder-decoder generates.
    `FinetuneResult.metrics` includes its values under names that begin with "eval_"."""

    offload: OffloadConfig | None = None
    """Options that `TrainingArguments` lacks.

    `OffloadConfig(on_nonfinite="rollback")` returns to the last checkpoint when gradients hold NaN, and
    `checkpoint_precision="compact"` writes smaller checkpoints. Working weights, gradients and activations are bf16 on
    a GPU with native bf16, fp16 with a loss scale on other GPUs, and fp32 on the CPU. Master weights are always fp32.
    `bf16=`, `fp16=` or `offload.working_dtype` changes the working dtype: `bf16=False` on a GPU with bf16, or
    `fp16=False` on a GPU without, selects fp32."""

    training_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any other argument of `transformers.Seq2SeqTrainingArguments`.

    `save_steps` and `eval_steps` save and evaluate every so many steps instead of after each epoch.
    `save_only_model=True` writes checkpoints of the weights alone, from which `resume` goes on with new moments.
    `report_to` names trackers, such as "trackio", "wandb" or "tensorboard", which get memory, speed and slowdown
    too."""

    def __post_init__(self) -> None:
        counts = {"max_steps": self.max_steps, "gradient_accumulation": self.gradient_accumulation}
        counts["per_device_eval_batch_size"] = self.training_arguments.get("per_device_eval_batch_size")
        check_counts(given_size(self.batch_size) | counts, optional=counts)
        check_counts(self.lengths, least=2, optional=self.lengths)  # a token, and the end token
        for name in ("epochs", "learning_rate"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise ConfigError(f"must be a positive number, got {shown(value)}", option=name)
        for name, choices in (("init", ("pretrained", "random")), ("baseline", ("predict", "measure"))):
            if not isinstance(value := getattr(self, name), str) or value not in choices:
                raise ConfigError(f"{name} must be {choices[0]!r} or {choices[1]!r}, got {shown(value)}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed must be a whole number from 0 to 2**32 - 1, got {shown(self.seed)}")
        for name in ("verbose", "resume", "overwrite", "monitor", "packing"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {shown(value)}")
        check_lora(self.lora)
        self._check_evaluation()
        self._check_stream()
        if self.packing and self.engine == "deepspeed":
            raise ConfigError("engine='deepspeed' packs no rows: leave engine or packing out")
        if self.packing and self.baseline == "measure":
            raise ConfigError("baseline='measure' times rows that are not packed: leave baseline or packing out")

    def _check_stream(self) -> None:
        from offloadkit.hf.read import is_stream

        if not is_stream(self.train_dataset):
            return
        if self.max_steps is None:
            raise ConfigError("train_dataset is a stream, which has no length: pass max_steps, the number of updates")
        if isinstance(self.eval_dataset, float):
            raise ConfigError(
                f"eval_dataset={self.eval_dataset} cannot hold out a share of a stream: pass rows to evaluate on"
            )
        if self.baseline == "measure":
            raise ConfigError("baseline='measure' reads the lengths of all rows: leave it out for a stream")
        if self.engine == "deepspeed":
            raise ConfigError("engine='deepspeed' takes no stream: leave engine out, or pass rows with a length")

    def _check_evaluation(self) -> None:
        rows, metrics = self.eval_dataset, self.compute_metrics
        if isinstance(rows, int | float) and (isinstance(rows, bool) or not 0 < rows < 1):
            what = "rows, or the share of the training rows to hold out, more than 0 and less than 1"
            raise ConfigError(f"eval_dataset must be {what}; got {shown(rows)}")
        if not isinstance(self.callbacks, list | tuple):
            raise ConfigError(f"callbacks must be a list of transformers.TrainerCallback, got {shown(self.callbacks)}")
        for each in self.callbacks:
            from transformers import TrainerCallback

            if not issubclass(each if isinstance(each, type) else type(each), TrainerCallback):
                raise ConfigError(
                    f"callbacks must be a list of transformers.TrainerCallback, and {shown(each)} is none"
                )
        if metrics is not None and not callable(metrics):
            raise ConfigError(f"compute_metrics must be a function of an EvalPrediction, got {shown(metrics)}")
        if metrics is not None and rows is None:
            raise ConfigError(
                "compute_metrics needs eval_dataset: pass rows, or a share of the training rows such as 0.1"
            )

    @property
    def keywords(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "training_arguments"} | dict(
            self.training_arguments
        )

    @property
    def engine_config(self) -> OffloadConfig:
        """`offload` with the options that override its fields."""
        names = ("vram", "ram", "precision", "compile_blocks", "grace_seconds", "save_minutes")
        return with_wishes(self.offload, **{name: getattr(self, name) for name in names})

    @property
    def lengths(self) -> dict[str, int | None]:
        return {"max_input_length": self.max_input_length, "max_target_length": self.max_target_length}


def check_lora(lora: Any) -> None:
    """Raise `ConfigError` unless `lora` is None, True, False, a rank or a `peft.LoraConfig`, and PEFT is installed."""
    if lora is None or lora is False:
        return
    is_rank = type(lora) is int and lora >= 1
    if lora is not True and not is_rank and type(lora).__name__ != "LoraConfig":
        other = ": pass adapters of another kind as model=peft.get_peft_model(model, config)"
        raise ConfigError(
            f"lora must be True, a rank such as 16, or a peft.LoraConfig, got {shown(lora)}"
            f"{other if hasattr(lora, 'peft_type') else ''}"
        )
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("lora needs PEFT, which is not installed: pip install peft")


def documented_arguments() -> str:
    """The section "Args" of the docstring of `finetune`."""
    docs = field_docs(FinetuneOptions)
    lines = ["Args:"]
    for each in fields(FinetuneOptions):
        lines += [f"    {each.name} ({each.type}):", indent(docs[each.name], " " * 8)]
    return "\n".join(lines)
