"""Resolves a user's model (preset, folder, hub name, or model in memory) to a `ModelSource`: config, task, weights,
tokenizer.
"""

from __future__ import annotations

import copy
import os
import reprlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn

from offloadkit.engine.outline import without_memory
from offloadkit.errors import ConfigError, ModelError, ModelNotFoundError, cut, shown
from offloadkit.facts.starting import collector_off
from offloadkit.hf.adapters import add_adapters, base_of, check_adapters, has_adapters, lora_config, without_adapters
from offloadkit.hf.freezing import freeze_names, freeze_parts
from offloadkit.hf.hub import MOST_LABELS, causes, check_files, check_folder, locate, readable_hub_errors, where_to_look
from offloadkit.hf.load import (
    DEQUANTISABLE,
    Task,
    auto_class_of,
    build,
    completed,
    draw_lazily,
    fill,
    infer_task,
    is_speech,
    quantised_by,
    read,
    read_lazily_or_now,
    sees_images,
)
from offloadkit.hf.presets import PRESETS
from offloadkit.hf.quiet import progress_bars
from offloadkit.hf.read_ahead import read_ahead
from offloadkit.offload.unread import is_unread

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Init = Literal["pretrained", "random"]


class ModelSource:
    """One model: its architecture, weights and tokenizer. Everything is read on demand, once. Made by `resolve`.

    Attributes:
        given: the user's name or folder, or the model in memory, which may have adapters.
        init: "random" draws HuggingFace's initial weights instead of reading a checkpoint.
        lora: adapters to add, as `adapters.lora_config` takes them; None: none.
        freeze: names of parts that are not trained; see `freezing.freeze_parts`.
    """

    def __init__(
        self,
        given: str | PreTrainedModel,
        location: str,
        init: Init,
        task: Task | None,
        lora: bool | int | LoraConfig | None = None,
        freeze: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            location: folder or hub name to read files from; "" for a model in memory.
            task: selects the head; None: the architecture's.
        """
        self.given, self.init, self.lora, self.freeze = given, init, lora or None, freeze
        self._location, self._task = location, task
        self._id2label: dict[int, str] | None = None

    # -- what it is

    @property
    def model(self) -> PreTrainedModel | None:
        return None if isinstance(self.given, str) else self.given

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The architecture. A hub name may need a download; no weights are read."""
        if self.model is not None:
            return self.model.config
        if self._preset_config is not None and self.init == "random":
            return self._preset_config
        from transformers import AutoConfig

        check_folder(self._location)
        with readable_hub_errors(self._location, file="config.json"):
            read_config = AutoConfig.from_pretrained(self._location, **where_to_look(self._location))
        return cast("PreTrainedConfig", read_config)

    def check_trainable(self, *, reads_weights: bool) -> None:
        """Raise `ModelError` if `finetune` can train no task of the model, or it would read weights that stay
        quantised. (`resolve` checks a model in memory.)
        """
        _ = self.task
        stored = None if self.model is not None or not reads_weights else self.config
        quantisation = getattr(stored, "quantization_config", None)
        if quantisation is None:
            return
        said = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
        method = quantised_by(said)
        if not said.get("dequantize") and method not in DEQUANTISABLE:
            bits = said.get("bits") or (4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else None)
            how = f"{bits}-bit {method}" if bits else method
            loaded = (
                ", or load it with transformers' from_pretrained, add adapters by peft.get_peft_model and pass that"
            )
            raise ModelError(
                f"the weights of {self.given!r} are quantised (quantization_config in its config.json: {how}), and "
                "quantised weights cannot be trained: pass the checkpoint that they were made from"
                + (loaded if method == "bitsandbytes" else "")
            )

    @cached_property
    def _preset_config(self) -> PreTrainedConfig | None:
        """The config of a preset; None if a folder has the same name, because folders take precedence."""
        preset = PRESETS.get(self.given) if isinstance(self.given, str) else None
        return None if preset is None or os.path.isdir(self._location) else preset.config()

    @property
    def task(self) -> Task:
        """The user's task, else the task of the class or config. Raises `ModelError` if no task can be trained."""
        kinds = type(base_of(self.model)).__mro__
        if self._task is None and any(kind.__name__.endswith("ForSequenceClassification") for kind in kinds):
            return "classification"
        return self._task or infer_task(self._preset_config or self.config)

    def for_rows(self, task: Task, id2label: dict[int, str] | None) -> ModelSource:
        """The same model with the head for `task`, and class names by id for classification."""
        other = copy.copy(self)
        other._task, other._id2label = task, id2label
        if self.model is not None:
            _check_head(base_of(self.model), task, id2label)
        elif task != self.task or id2label is not None:
            other.__dict__.pop("on_meta", None)
        return other

    # -- its adapters

    @property
    def adapters(self) -> Any:
        """PEFT's config of the adapters that the model has or gets; None: all weights are trained."""
        if has_adapters(self.model):
            return cast("PeftModel", self.model).active_peft_config
        return lora_config(self.lora, self._adapted_task)

    @property
    def _adapted_task(self) -> Task | None:
        """None for speech, because PEFT's class for seq2seq passes `input_ids`, and for models that see images, which
        PEFT's class for causal models does not load.
        """
        config = self._preset_config or self.config
        return None if is_speech(config) or (self.task == "causal" and sees_images(config)) else self.task

    @property
    def is_quantised(self) -> bool:
        """Whether a model in memory has quantised weights, on which only adapters can be trained."""
        return getattr(base_of(self.model), "is_quantized", False) is True

    def without_adapters(self) -> ModelSource:
        """The same model, with all weights trained. A model with adapters is on the meta device there."""
        other = copy.copy(self)
        other.lora = None
        other.__dict__.pop("on_meta", None)
        if has_adapters(self.model):
            other.given = without_adapters(without_memory(cast(nn.Module, self.model)))
        return other

    def _adapted(self, model: Any) -> Any:
        """The model with its adapters, or with its frozen parts."""
        freeze_parts(model, self.freeze)
        config = lora_config(self.lora, self._adapted_task)
        return model if config is None or has_adapters(model) else add_adapters(model, config)

    def training_config(self, config: PreTrainedConfig | None = None) -> PreTrainedConfig:
        """A copy of the config, with the labels of the rows. Weights that transformers can dequantise are not to stay
        quantised, as they would on a GPU that has kernels for them.
        """
        config = copy.deepcopy(config or self.config)
        _set_labels(config, self._id2label)
        stored = getattr(config, "quantization_config", None)
        if isinstance(stored, dict) and stored.get("quant_method") in DEQUANTISABLE:
            stored["dequantize"] = True
        return config

    @cached_property
    def on_meta(self) -> PreTrainedModel:
        """The model on the meta device. Callers must undo their changes to it.

        Raises `ModelError` if the architecture has no head for the task, or its decoder has no start token.
        """
        model: Any
        if self.model is not None:
            model = without_memory(self.model)
        else:
            config = self.training_config(self._preset_config)
            self.check_decoder(config)
            with collector_off(), self._of_its_config():  # building imports the model's module
                model = build(config, self.task, None, torch.device("meta"))
            if self.init == "pretrained":  # all weights that are read are trained, also Whisper's fixed positions
                model.requires_grad_(True)
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # transformers' default, without its warning; GPT-2 sets no loss type
        return cast("PreTrainedModel", self._adapted(model))

    def check_decoder(self, config: PreTrainedConfig | None = None) -> None:
        """Raise `ModelError` if an encoder-decoder has no decoder start token in its config (or in `config`)."""
        of, field = f"the config of {self.given!r}", f"decoder_start_token_id in {self.given}'s config.json"
        _check_decoder(config or self.config, of, field)

    # -- its weights

    def read_ahead(self) -> None:
        if self.model is None and self.init == "pretrained" and os.path.isdir(self._location):
            read_ahead(sorted(Path(self._location).glob("*.safetensors")))

    def load(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", progress: bool = True
    ) -> PreTrainedModel:
        """Load the model, in evaluation mode, onto `device`, parameter by parameter, never with two copies in RAM.

        A model in memory is converted in place, and gets its adapters. Random weights use torch's generator.

        Args:
            dtype: of floating-point parameters; None: the checkpoint's (random: the config's, else fp32).
        """
        device = torch.device(device)
        if self.model is not None:
            given = self._adapted(self._named(self.model))
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
        return cast("PreTrainedModel", self._adapted(completed(model)))

    def _of_its_config(self) -> AbstractContextManager[None]:
        return readable_hub_errors(str(self.given), found=True, file="config.json")

    def _named(self, model: Any) -> Any:
        if self._id2label and all(name == f"LABEL_{index}" for index, name in model.config.id2label.items()):
            _set_labels(model.config, self._id2label)
        return model

    def load_lazily(self, *, dtype: torch.dtype | None = None, allow_missing: bool = False) -> PreTrainedModel:
        """Like `load`, but parameters stay `unread` on the meta device until `unread.make_real`.

        Files are fetched and opened now. Buffers, and parameters that the checkpoint lacks, become real now. All
        parameters become real if transformers must convert the checkpoint (quantised, experts stored one by one, a .bin
        older than torch 1.6), or if the model's `_init_weights` does not set everything. A model in memory is returned
        unchanged.
        """
        if self.model is not None:
            given = self._adapted(self._named(self.model))
            return cast("PreTrainedModel", given if dtype is None else given.to(dtype))
        config, task = self.training_config(), self._task or infer_task(self.config)
        if self.init == "random":
            with self._of_its_config():
                model = draw_lazily(config, task, dtype)
        else:
            model = read_lazily_or_now(self._location, config, task, dtype, allow_missing)
        return cast("PreTrainedModel", self._adapted(completed(model)))

    # -- its tokenizer

    def load_tokenizer(
        self, tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None
    ) -> PreTrainedTokenizerBase:
        """Load the model's own tokenizer, or the given one, and set a padding token.

        Args:
            tokenizer: a tokenizer, a processor that has one, the hub name or folder of either, or "byte" for ByT5's,
                which needs no files (one token per byte, 384 ids; for random weights). None: the model's own.
        """
        from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

        if tokenizer is None:
            tokenizer = self._tokenizer_name
            if not tokenizer:
                raise ModelError("a model made in memory has no tokenizer: pass tokenizer=")
        if isinstance(tokenizer, str) and tokenizer == "byte":
            return cast("PreTrainedTokenizerBase", ByT5Tokenizer())
        if isinstance(own := getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase):
            template, tokenizer = getattr(tokenizer, "chat_template", None), copy.copy(own)
            tokenizer.chat_template = own.chat_template or template
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

    def load_processor(self, processor: Any = None, *, of_images: bool = False) -> Any:
        """Load the model's own processor, or the given one (a processor, its hub name or folder).

        Args:
            of_images: it must have an image processor; else a feature extractor, of sound.

        Raises:
            ConfigError: it has none, or no tokenizer.
            ModelError: there is none to load, or a package that it needs is not installed.
        """
        processor = self._tokenizer_name if processor is None else processor
        if isinstance(processor, str) and processor == "":
            raise ModelError("a model made in memory has no processor: pass tokenizer= its processor")
        return _read_processor(processor, "image_processor" if of_images else "feature_extractor")

    @property
    def _tokenizer_name(self) -> str:
        return self.given if isinstance(self.given, str) else cast(str, getattr(self.given, "name_or_path", ""))

    def needs_no_hub(self, tokenizer: Any) -> bool:
        drawn = self.init == "random" and self._preset_config is not None
        if self.model is None and not drawn and not os.path.isdir(self._location):
            return False
        if tokenizer is None:
            tokenizer = self._tokenizer_name or None
        if not isinstance(tokenizer, str | os.PathLike) or tokenizer == "byte":
            return True
        return bool(os.fspath(tokenizer)) and os.path.isdir(os.path.expanduser(tokenizer))


def resolve(
    model: str | os.PathLike[str] | PreTrainedModel | PeftModel,
    *,
    init: str = "pretrained",
    task: Task | None = None,
    lora: bool | int | LoraConfig | None = None,
    freeze: str | Sequence[str] | None = None,
) -> ModelSource:
    """Find out which kind of model `model` is, without reading or fetching files.

    Args:
        model: a preset ("t5-3b"), a folder from `save_pretrained`, a hub name, or a HuggingFace model, also with
            adapters of PEFT.
        init: "pretrained" or "random"; see `ModelSource`.
        task: "seq2seq", "causal" or "classification"; None: the architecture's.
        lora: adapters to add; see `adapters.lora_config`.
        freeze: names of parts that are not trained; see `freezing.freeze_parts`.

    Raises:
        ConfigError: invalid `init`, `task`, `lora` or `freeze`, `lora` for a model that has adapters, or `freeze` for a
            model that has or gets adapters.
        ModelNotFoundError: `model` can only be a folder that does not exist.
        ModelError: `model` is no name, path or HuggingFace model, is compiled or wrapped for distributed training, or
            its decoder has no start token.
    """
    if not isinstance(init, str) or init not in ("pretrained", "random"):
        raise ConfigError(f"init must be 'pretrained' or 'random', got {shown(init)}")
    if task is not None and not (isinstance(task, str) and task in get_args(Task)):
        raise ConfigError(f"task must be one of {', '.join(map(repr, get_args(Task)))}, or None; got {shown(task)}")
    names = freeze_names(freeze)
    if names and (lora or has_adapters(model)):
        raise ConfigError(
            "adapters are trained on frozen weights: leave freeze out. For a part without adapters pass "
            f"lora=peft.LoraConfig(target_modules='all-linear', exclude_modules=r'.*{names[0].strip('*.')}.*')"
        )
    if isinstance(model, str | os.PathLike):
        return ModelSource(os.fspath(model), locate(model), cast(Init, init), task, lora, names)
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        from offloadkit.engine.checks import check_not_wrapped

        check_not_wrapped(model)
    if has_adapters(model):
        if lora:
            raise ConfigError(
                f"this {type(model).__name__} has adapters already: leave lora out, or pass its base model"
            )
        check_adapters(model)
    if isinstance(model, nn.Module) and not isinstance(base_of(model), PreTrainedModel):
        engine = "offloadkit.OffloadEngine, which takes any torch.nn.Module"
        raise ModelError(f"a {type(model).__name__} is not a HuggingFace model: train it with {engine}")
    if not isinstance(model, nn.Module):
        name = reprlib.repr(model)
        raise ModelError(f"{name} is not a model: pass a hub name, a preset, a folder, or a HuggingFace model")
    _check_decoder(model.config, f"the config of this {type(model).__name__}", "model.config.decoder_start_token_id")
    return ModelSource(cast("PreTrainedModel", model), "", cast(Init, init), task, lora, names)


def _check_decoder(config: Any, of: str, field: str) -> None:
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        raise ModelError(
            f"{of} has no decoder_start_token_id, the first token of its decoder: set {field} (T5 uses its pad token, "
            "0)"
        )


def _set_labels(config: PreTrainedConfig, id2label: dict[int, str] | None) -> None:
    if id2label is not None:
        config.id2label = dict(id2label)
        config.label2id = {label: index for index, label in id2label.items()}


def _check_head(model: Any, task: Task, id2label: dict[int, str] | None) -> None:
    """Raise `ModelError` if a model in memory lacks the task's head, or has another number of labels."""
    config: Any = model.config
    heads = auto_class_of(config, task)._model_mapping
    # By name, since `heads.values()` imports all of transformers' models, in seconds.
    names = {name for each in heads._model_mapping.values() for name in ([each] if isinstance(each, str) else each)}
    classes = [each for each in type(model).__mro__ if each.__module__.startswith("transformers.models.")]
    if not (names & {each.__name__ for each in classes} or isinstance(model, tuple(heads._extra_content.values()))):
        raise ModelError(f"a {type(model).__name__} cannot learn {task!r}: pass a model with that head, or its name")
    if task == "classification" and id2label and config.num_labels != len(id2label):
        raise ModelError(
            f"the model has {config.num_labels} labels but the dataset has {len(id2label)}: load it with "
            f"num_labels={len(id2label)}"
        )


def _read_processor(given: Any, part: str) -> Any:
    """A processor with `part` and a tokenizer. Raises `ConfigError` if `given` is something else."""
    from transformers import AutoProcessor

    if isinstance(given, str | os.PathLike) and given != "byte":
        location = locate(given)
        if os.path.isdir(location):
            check_files(Path(location))
        read: Any = AutoProcessor.from_pretrained
        try:
            with readable_hub_errors(location, kind="processor"):
                given = read(location, **where_to_look(location))
        except (ModelError, TypeError, ValueError, ImportError) as error:
            missing = next((each for each in causes(error) if isinstance(each, ImportError)), None)
            if missing is not None:
                line = next((each for each in str(missing).splitlines() if each.strip()), "a package is missing")
                raise ModelError(
                    f"the processor of {location!r} cannot be loaded: {cut(line.split('.')[0])}. Install it (Qwen's "
                    "processors of images need `pip install torchvision`)"
                ) from error
            if type(error) not in (ModelError, TypeError, ValueError):
                raise
            raise ModelError(
                f"no processor can be loaded from {location!r}: pass tokenizer= a processor, or the name or folder of "
                f"one, with its preprocessor_config.json and tokenizer files ({error})"
            ) from error
    if not all(hasattr(given, name) for name in (part, "tokenizer")):
        what = "speech model" if part == "feature_extractor" else "model that sees images"
        raise ConfigError(
            f"tokenizer must be the processor of a {what}, with its {part} and tokenizer, or the name or folder of "
            f"one; got {shown(given)}"
        )
    return given


def _read_tokenizer(location: str) -> PreTrainedTokenizerBase:
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
    # Without files transformers makes a tokenizer with special tokens only (T5's also has the word boundary).
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if len(set(tokenizer.get_vocab()) - special) < 2:
        raise ModelError(
            f"{location!r} has no tokenizer files, or not all of them: without them transformers makes an empty "
            f"{type(tokenizer).__name__}, for which every word is unknown. Add them, or pass tokenizer= the name or "
            "folder of the tokenizer that the model was trained with, or 'byte' for a model with random weights"
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
    """Load a HuggingFace model like transformers' `from_pretrained`, but without reading its weights yet.

    An `OffloadEngine`, or a Trainer of this package, later reads (or draws) the weights layer by layer into their
    training memory, so RAM never holds a second copy of the model. Until then, using, writing or copying weights raises
    `ModelError`. Buffers, and parameters that the checkpoint lacks (a new head), are real at once. A checkpoint that
    transformers converts while reading (quantised, experts stored one by one) is read at once, with a message.

    Args:
        name_or_path: a preset ("t5-3b"), a folder from `save_pretrained`, or a hub name.
        dtype: of floating-point parameters; None: the checkpoint's (random: the config's, else fp32).
        init: "random" draws HuggingFace's initial weights with torch's generator.
        task: "seq2seq", "causal" or "classification", for transformers' `AutoModelForSeq2SeqLM`, `AutoModelForCausalLM`
            or `AutoModelForSequenceClassification`; None: the architecture's.
        num_labels: number of classes of a classifier; None: the config's.
        allow_missing: draw tensors that the checkpoint lacks instead of raising. A new classification head is always
            drawn.

    Returns:
        The model, in evaluation mode.

    Raises:
        ConfigError: invalid `dtype`, `init`, `task`, `num_labels` or `allow_missing`.
        ModelError: the architecture has no such head, or the checkpoint is broken or lacks tensors.
        ModelNotFoundError, ModelAccessError, DownloadError: the name is unknown, the hub refuses access or cannot be
            reached.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype must be a torch.dtype, such as torch.bfloat16, or None, got {shown(dtype)}")
    if not isinstance(name_or_path, str | os.PathLike):
        raise ModelError(f"{reprlib.repr(name_or_path)} is not a name: pass a hub name, a preset or a folder")
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
