"""What a user may call a model (a preset, a folder, a hub name, a model in memory), looked up once: `resolve(model)`.

Every door of the package resolves its model first. Everything below takes the `ModelSource`: the config, the task, the
model without memory for a plan, the weights and the tokenizer all come from there.
"""

from __future__ import annotations

import copy
import os
import reprlib
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn

from offloadkit.errors import ConfigError, ModelError, ModelNotFoundError, shown
from offloadkit.hf.hub import MOST_LABELS, check_files, check_folder, locate, readable_hub_errors, where_to_look
from offloadkit.hf.load import (
    Task,
    auto_class_of,
    build,
    completed,
    draw_lazily,
    fill,
    infer_task,
    read,
    read_lazily_or_now,
)
from offloadkit.hf.presets import PRESETS
from offloadkit.hf.quiet import progress_bars
from offloadkit.hf.read_ahead import read_ahead
from offloadkit.offload.unread import is_unread
from offloadkit.outline import without_memory
from offloadkit.starting import collector_off

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Init = Literal["pretrained", "random"]
"""Where weights come from: a checkpoint, or HuggingFace's own initialisation."""


class ModelSource:
    """One model: what it is, how large it is, and where its weights and its tokenizer come from.

    Nothing is read when it is made. What is read later is read once and kept.

    Attributes:
        given: the name or folder as the user wrote it, or the model in memory.
        init: "random" draws HuggingFace's initial weights instead of reading a checkpoint's.
    """

    def __init__(self, given: str | PreTrainedModel, location: str, init: Init, task: Task | None) -> None:
        """Use `resolve`.

        Args:
            location: the folder or hub name that files are read from; "" for a model in memory.
            task: which head the model gets; None: the one that its architecture names.
        """
        self.given, self.init = given, init
        self._location, self._task = location, task
        self._id2label: dict[int, str] | None = None

    # -- what it is

    @property
    def model(self) -> PreTrainedModel | None:
        """The model in memory; None for a name."""
        return None if isinstance(self.given, str) else self.given

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The architecture; a name on the hub needs a download. No weights are read.

        Raises:
            ModelNotFoundError, ModelAccessError, DownloadError, ModelError: see `readable_hub_errors`.
        """
        if self.model is not None:
            return self.model.config
        if self._preset_config is not None and self.init == "random":
            return self._preset_config
        from transformers import AutoConfig

        check_folder(self._location)
        with readable_hub_errors(self._location, file="config.json"):
            read_config = AutoConfig.from_pretrained(self._location, **where_to_look(self._location))
        return cast("PreTrainedConfig", read_config)

    def check_not_quantised(self) -> None:
        """
        Raises:
            ModelError: the checkpoint's weights are quantised, and stay so when they are read.
        """
        stored = None if self.model is not None or self.init == "random" else self.config
        quantisation = getattr(stored, "quantization_config", None)
        if quantisation is None:
            return
        said = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
        method = getattr(said.get("quant_method"), "value", said.get("quant_method"))
        if not said.get("dequantize") and method not in ("mxfp4", "fp8"):  # transformers may dequantise these itself
            raise ModelError(
                f"the weights of {self.given!r} are quantised (quantization_config in its config.json: {method}), and "
                "quantised weights cannot be trained: pass a checkpoint that is not"
            )

    @cached_property
    def _preset_config(self) -> PreTrainedConfig | None:
        """A preset's architecture from this package. A folder goes before a preset of the same name."""
        preset = PRESETS.get(self.given) if isinstance(self.given, str) else None
        return None if preset is None or os.path.isdir(self._location) else preset.config()

    @property
    def task(self) -> Task:
        """What the model learns; by its class or config where nobody said.

        Raises:
            ModelError: the architecture was made for no task that can be trained.
        """
        kinds = type(self.model).__mro__
        if self._task is None and any(kind.__name__.endswith("ForSequenceClassification") for kind in kinds):
            return "classification"
        return self._task or infer_task(self._preset_config or self.config)

    def for_rows(self, task: Task, id2label: dict[int, str] | None) -> ModelSource:
        """The same model with the head that the rows of a dataset need.

        Args:
            task: what the rows teach.
            id2label: the name of each class id in classification.

        Raises:
            ModelError: a model in memory has another head.
        """
        other = copy.copy(self)
        other._task, other._id2label = task, id2label
        if self.model is not None:
            _check_head(self.model, task, id2label)
        elif task != self.task or id2label is not None:
            other.__dict__.pop("on_meta", None)
        return other

    def training_config(self, config: PreTrainedConfig | None = None) -> PreTrainedConfig:
        """A copy of the config (or of `config`) with the labels of the rows."""
        config = copy.deepcopy(config or self.config)
        _set_labels(config, self._id2label)
        return config

    @cached_property
    def on_meta(self) -> PreTrainedModel:
        """The model on the meta device: modules, shapes and tied weights, no numbers. Whoever changes it, undoes that.

        A preset's shape comes from this package, so that a plan needs no network.

        Raises:
            ModelError: the architecture has no head for the task, or its decoder has no first token.
        """
        model: Any
        if self.model is not None:
            model = without_memory(self.model)
        else:
            config = self.training_config(self._preset_config)
            self.check_decoder(config)
            with collector_off(), self._of_its_config():  # its module is imported
                model = build(config, self.task, None, torch.device("meta"))
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # what transformers takes then, with a warning: GPT-2's class names no loss
        return cast("PreTrainedModel", model)

    def check_decoder(self, config: PreTrainedConfig | None = None) -> None:
        """Check that a decoder of the model's config (or of `config`) has a first token.

        Raises:
            ModelError: it has none.
        """
        of, field = f"the config of {self.given!r}", f"decoder_start_token_id in {self.given}'s config.json"
        _check_decoder(config or self.config, of, field)

    # -- its weights

    def read_ahead(self) -> None:
        """Begin to bring the files of a folder's weights into the page cache, in the background."""
        if self.model is None and self.init == "pretrained" and os.path.isdir(self._location):
            read_ahead(sorted(Path(self._location).glob("*.safetensors")))

    def load(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", progress: bool = True
    ) -> PreTrainedModel:
        """The model in evaluation mode with its parameters on `device`: put there one by one, never two copies in RAM.

        A model in memory is converted in place, not copied. Random weights are seeded by torch's generator.

        Args:
            dtype: of all floating-point parameters; None keeps the checkpoint's (random: the config's, else fp32).
            progress: show bars while files are fetched and read.

        Raises:
            ModelError: the architecture has no head for the task, or the weights cannot be read.
            ModelNotFoundError, ModelAccessError, DownloadError: see `readable_hub_errors`.
        """
        device = torch.device(device)
        if self.model is not None:
            given = self._named(self.model)
            if is_unread(given):
                fill(given, device)
            return cast("PreTrainedModel", given.to(device=device, dtype=dtype))
        config, task = self.training_config(), self._task or infer_task(self.config)
        if self.init == "pretrained":
            model = read(self._location, config, task, dtype, device, progress)
        elif device.type == "meta":
            with self._of_its_config():
                model = build(config, task, dtype, device)
        else:
            with self._of_its_config():
                model = draw_lazily(config, task, dtype)
            with progress_bars(progress):
                fill(model, device)
        return completed(model)

    def _of_its_config(self) -> AbstractContextManager[None]:
        """A context in which transformers builds the model: each class has errors of its own for a config."""
        return readable_hub_errors(str(self.given), found=True, file="config.json")

    def _named(self, model: Any) -> Any:
        """The model in memory; its labels get the names of the rows' where they have none yet."""
        if self._id2label and all(name == f"LABEL_{index}" for index, name in model.config.id2label.items()):
            _set_labels(model.config, self._id2label)
        return model

    def load_lazily(self, *, dtype: torch.dtype | None = None, allow_missing: bool = False) -> PreTrainedModel:
        """As `load`, but parameters are left `unread`: on the meta device, until `unread.make_real` asks for them.

        Files are fetched and opened here. What a checkpoint lacks (a new classification head) and all buffers are real
        already. So are all parameters of a checkpoint that transformers converts while reading: quantised, experts
        stored one by one, a .bin older than torch 1.6. So are those of a model whose `_init_weights` does not set
        everything. A model in memory comes back as it is.

        Raises:
            As `load`.
        """
        if self.model is not None:
            given = self._named(self.model)
            return cast("PreTrainedModel", given if dtype is None else given.to(dtype))
        config, task = self.training_config(), self._task or infer_task(self.config)
        if self.init == "random":
            with self._of_its_config():
                return completed(draw_lazily(config, task, dtype))
        return completed(read_lazily_or_now(self._location, config, task, dtype, allow_missing))

    # -- its tokenizer

    def load_tokenizer(
        self, tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None
    ) -> PreTrainedTokenizerBase:
        """The model's own tokenizer, or the one given; it has a padding token when it comes back.

        Args:
            tokenizer: a tokenizer, its hub name or folder, or "byte" for ByT5's (one token a byte, 384 ids, needs no
                files: for models with random weights). None: the model's own.

        Raises:
            ModelError: there is none, or it has neither a padding nor an end token.
            ModelNotFoundError, ModelAccessError, DownloadError: see `readable_hub_errors`.
        """
        from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

        if tokenizer is None:
            tokenizer = self._tokenizer_name
            if not tokenizer:
                raise ModelError("a model made in memory has no tokenizer of its own: pass tokenizer=")
        if isinstance(tokenizer, str) and tokenizer == "byte":
            return cast("PreTrainedTokenizerBase", ByT5Tokenizer())
        if not isinstance(tokenizer, PreTrainedTokenizerBase | str | os.PathLike):
            raise ConfigError(f"tokenizer must be a tokenizer, its name or folder, or 'byte', got {shown(tokenizer)}")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            try:
                tokenizer = _read_tokenizer(locate(tokenizer))
            except ModelNotFoundError as error:
                if "tokenizer" in str(error):
                    raise
                raise ModelNotFoundError(f"tokenizer: {error}") from error
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ModelError(
                    "the tokenizer has neither pad_token nor eos_token: set tokenizer.pad_token to one it knows"
                )
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    @property
    def _tokenizer_name(self) -> str:
        """Where the model's own tokenizer is looked for; "" where nobody knows."""
        return self.given if isinstance(self.given, str) else cast(str, getattr(self.given, "name_or_path", ""))

    def needs_no_hub(self, tokenizer: Any) -> bool:
        """Whether the config, and the `tokenizer` that `load_tokenizer` takes, are read without a download."""
        drawn = self.init == "random" and self._preset_config is not None
        if self.model is None and not drawn and not os.path.isdir(self._location):
            return False
        if tokenizer is None:
            tokenizer = self._tokenizer_name or None
        if not isinstance(tokenizer, str | os.PathLike) or tokenizer == "byte":
            return True
        return bool(os.fspath(tokenizer)) and os.path.isdir(os.path.expanduser(tokenizer))


def resolve(
    model: str | os.PathLike[str] | PreTrainedModel, *, init: str = "pretrained", task: Task | None = None
) -> ModelSource:
    """Look up what `model` means; nothing is read or fetched yet.

    Args:
        model: a preset ("t5-3b"), a folder that `save_pretrained` wrote, a hub name, or a HuggingFace model.
        init: "pretrained" or "random"; see `ModelSource`.
        task: "seq2seq", "causal" or "classification"; None: what the architecture was made for.

    Raises:
        ConfigError: `init` is neither.
        ModelNotFoundError: it can only be a folder, and there is none.
        ModelError: it is neither a name, nor a path, nor a HuggingFace model; it is compiled or wrapped for distributed
            training; or its decoder has no first token.
    """
    if not isinstance(init, str) or init not in ("pretrained", "random"):
        raise ConfigError(f"init must be 'pretrained' or 'random', got {shown(init)}")
    if task is not None and not (isinstance(task, str) and task in get_args(Task)):
        raise ConfigError(f"task must be one of {', '.join(map(repr, get_args(Task)))}, or None; got {shown(task)}")
    if isinstance(model, str | os.PathLike):
        return ModelSource(os.fspath(model), locate(model), cast(Init, init), task)
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        from offloadkit.engine.checks import check_not_wrapped

        check_not_wrapped(model)
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        engine = "offloadkit.OffloadEngine, which takes any torch.nn.Module"
        raise ModelError(f"a {type(model).__name__} is not a HuggingFace model: train it with {engine}")
    if not isinstance(model, PreTrainedModel):
        name = reprlib.repr(model)
        raise ModelError(f"{name} is no model: pass a hub name, a preset, a folder, or a HuggingFace model")
    _check_decoder(model.config, f"the config of this {type(model).__name__}", "model.config.decoder_start_token_id")
    return ModelSource(model, "", cast(Init, init), task)


def _check_decoder(config: Any, of: str, field: str) -> None:
    """Raise `ModelError` for an encoder-decoder that cannot make decoder inputs from labels."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        raise ModelError(
            f"{of} has no decoder_start_token_id, the token that its decoder begins with: set {field} (T5's is its pad "
            "token, 0)"
        )


def _set_labels(config: PreTrainedConfig, id2label: dict[int, str] | None) -> None:
    if id2label is not None:
        config.id2label = dict(id2label)
        config.label2id = {label: index for index, label in id2label.items()}


def _check_head(model: Any, task: Task, id2label: dict[int, str] | None) -> None:
    """Raise `ModelError` for a model in memory that cannot learn the task, or has another number of labels."""
    config: Any = model.config
    if not isinstance(model, tuple(auto_class_of(config, task)._model_mapping.values())):
        raise ModelError(f"a {type(model).__name__} does not do {task!r}: pass a model with that head, or its name")
    if task == "classification" and id2label and config.num_labels != len(id2label):
        raise ModelError(
            f"the model tells {config.num_labels} labels apart and the dataset has {len(id2label)}: "
            f"load it with num_labels={len(id2label)}"
        )


def _read_tokenizer(location: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or a hub name, once it is known to have a vocabulary."""
    from transformers import AutoTokenizer

    if os.path.isdir(location):
        check_files(Path(location))
    try:
        with readable_hub_errors(location, kind="tokenizer"):
            read_tokenizer = AutoTokenizer.from_pretrained(location, **where_to_look(location))
            tokenizer = cast("PreTrainedTokenizerBase", read_tokenizer)
    except (ModelError, TypeError) as error:
        if type(error) not in (ModelError, TypeError):
            raise
        raise ModelError(
            f"no tokenizer can be loaded from {location!r}: pass tokenizer= a name, a folder, a tokenizer, or 'byte' "
            f"({error})"
        ) from error
    # Without tokenizer files transformers makes one that knows special tokens alone (T5's knows the word boundary too).
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if len(set(tokenizer.get_vocab()) - special) < 2:
        raise ModelError(
            f"{location!r} has no tokenizer files, or not all of them: without these transformers makes an empty "
            f"{type(tokenizer).__name__}, to which every word is unknown. Put them there, or pass tokenizer= the name "
            "or folder of the tokenizer that the model was trained with, or 'byte' for a model with random weights"
        )
    return tokenizer


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    init: Init = "pretrained",
    task: Task | None = None,
    num_labels: int | None = None,
    allow_missing: bool = False,
) -> PreTrainedModel:
    """A HuggingFace model as transformers' `from_pretrained` gives it, but its weights are not read yet.

    They are read (or drawn) when an `OffloadEngine` takes the model, or a Trainer of this package begins to train or to
    evaluate it: one layer after the other, each into the place where it is trained. So RAM never holds a second copy of
    the model, as it would for a while after transformers' own function. (`finetune` with `num_gpus=` or
    `engine="deepspeed"` needs it whole, and reads it first.) Until then a use of the weights' numbers is a
    `ModelError`, and so is writing or copying them. What the checkpoint lacks (a new head) is there at once, and all
    buffers are.

    A checkpoint whose tensors transformers converts while reading (quantised, experts stored one by one) is read at
    once, with a message.

    Args:
        name_or_path: a preset ("t5-3b"), a folder that `save_pretrained` wrote, or a hub name.
        dtype: of all floating-point parameters; None keeps the checkpoint's (random: the config's, else fp32).
        init: "random" draws HuggingFace's initial weights, seeded by torch's generator, instead of reading any.
        task: "seq2seq", "causal" or "classification"; None: what the architecture was made for. It chooses among
            transformers' `AutoModelForSeq2SeqLM`, `AutoModelForCausalLM` and `AutoModelForSequenceClassification`.
        num_labels: that a classifier tells apart; None: what the config says.
        allow_missing: have tensors that the checkpoint lacks drawn, where it would be refused otherwise. A new
            classifier's head is always drawn.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: `init`, `dtype` or `num_labels` has no meaning.
        ModelError: the architecture has no such head, or the checkpoint is broken, or lacks tensors of the model.
        ModelNotFoundError, ModelAccessError, DownloadError: see `readable_hub_errors`.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype must be a torch.dtype, such as torch.bfloat16, or None, got {shown(dtype)}")
    if not isinstance(name_or_path, str | os.PathLike):
        raise ModelError(f"{reprlib.repr(name_or_path)} is no name: pass a hub name, a preset or a folder")
    if not isinstance(allow_missing, bool):
        raise ConfigError(f"allow_missing must be True or False, got {shown(allow_missing)}")
    source = resolve(name_or_path, init=init, task=task)
    if num_labels is not None:
        if type(num_labels) is not int or not 0 < num_labels <= MOST_LABELS:
            raise ConfigError(f"num_labels must be a whole number >= 1 and <= {MOST_LABELS:,}, got {shown(num_labels)}")
        if source.task != "classification":
            raise ConfigError(f"num_labels={num_labels} is for task='classification'; this model's is {source.task!r}")
        if num_labels != source.config.num_labels:
            source = source.for_rows("classification", {index: f"LABEL_{index}" for index in range(num_labels)})
    return source.load_lazily(dtype=dtype, allow_missing=allow_missing)
