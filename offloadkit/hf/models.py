"""HuggingFace models by hub name, folder or instance: their configs, weights and tokenizers."""

from __future__ import annotations

import os
import reprlib
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from offloadkit.errors import ConfigError, ModelError
from offloadkit.hf.hub import check_folder, readable_hub_errors, resolve, where_to_look
from offloadkit.hf.presets import PRESETS, Preset
from offloadkit.hf.quiet import no_conversion_service, no_tying_advice, progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "EAGER_ATTENTION",
    "PRESETS",
    "Preset",
    "Task",
    "check_kind",
    "infer_task",
    "load_config",
    "load_model",
    "load_tokenizer",
    "meta_model",
]

Task = Literal["seq2seq", "causal", "classification"]
"""What is learned: target tokens from input tokens, each next token, or one label a text."""

EAGER_ATTENTION = {"t5", "mt5", "umt5"}
"""Model types whose learned attention bias makes transformers' default, `sdpa`, the worse choice: it is slower and
larger (T5-3B, 8x(512+128) tokens: 0.238 s and 26.8 GiB against 0.227 s and 21.5 GiB for forward and backward, H200),
its backward is not deterministic, and with padded batches it has been seen to give NaN gradients."""

_AUTO_CLASSES: dict[str, str] = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
}


def load_config(name_or_path: str | os.PathLike[str], *, init: str = "pretrained") -> PreTrainedConfig:
    """The architecture of a model; no weights are read.

    Args:
        name_or_path: folder with a `config.json`, preset name, or hub name. A folder goes before a preset of that name.
        init: "random" takes a preset's shape from this package, without a network; "pretrained" reads the hub's.

    Raises:
        ModelNotFoundError, ModelAccessError, DownloadError, ModelError: see `readable_hub_errors`.
    """
    from transformers import AutoConfig, T5Config

    _check_init(init)
    source = resolve(name_or_path)
    if init == "random" and not os.path.isdir(source) and str(name_or_path) in PRESETS:
        return T5Config(**PRESETS[str(name_or_path)].config_values())
    check_folder(source)
    with readable_hub_errors(source):
        return cast("PreTrainedConfig", AutoConfig.from_pretrained(source, **where_to_look(source)))


def load_model(
    name_or_path_or_model: str | os.PathLike[str] | PreTrainedModel,
    *,
    task: Task | None = None,
    init: str = "pretrained",
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    num_labels: int | None = None,
    id2label: dict[int, str] | None = None,
    progress: bool = True,
) -> PreTrainedModel:
    """A model in evaluation mode whose parameters lie on `device`, put there one by one: never two copies in RAM.

    Args:
        name_or_path_or_model: hub name, preset, folder, or a model; a model is converted in place, not copied.
        task: which head; None takes what the config's architecture says.
        init: "random" draws HuggingFace's initial weights on `device` from torch's generator instead of reading any.
        dtype: of all floating-point parameters; None keeps the checkpoint's (random: the config's, else fp32).
        device: where the parameters go.
        num_labels, id2label: classes of a classification head; `id2label` alone gives the number too.
        progress: show bars while files are fetched and read.

    Raises:
        ModelError: the architecture has no head for the task, or the weights cannot be read.
        ModelNotFoundError, ModelAccessError, DownloadError: see `readable_hub_errors`.
    """
    _check_init(init)
    check_kind(name_or_path_or_model)
    device = torch.device(device)
    if not isinstance(name_or_path_or_model, str | os.PathLike):
        return _take_over(name_or_path_or_model, task, dtype, device, num_labels, id2label)
    config = load_config(name_or_path_or_model, init=init)
    task = task or infer_task(config)
    _set_labels(config, num_labels, id2label)
    if config.model_type in EAGER_ATTENTION:
        config._attn_implementation = "eager"
    if init == "random":
        model = _build(config, task, dtype, device)
    else:
        model = _read(resolve(name_or_path_or_model), config, task, dtype, device, progress)
    _tell_untied_head(model)
    _complete_generation_config(model)
    model.train(False)
    return model


def check_kind(model: object) -> None:
    """Raise `ModelError` for what is neither a name, nor a path, nor a HuggingFace model."""
    if isinstance(model, str | os.PathLike):
        return
    from transformers import PreTrainedModel

    if isinstance(model, torch.nn.Module) and not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {type(model).__name__} is not a HuggingFace model: train it with offloadkit.OffloadEngine, which takes "
            "any torch.nn.Module"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{reprlib.repr(model)} is no model: pass a hub name, a preset, a folder, or a HuggingFace model"
        )


def meta_model(
    config: PreTrainedConfig, task: Task | None = None, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model without memory (parameters on the meta device): names, shapes and tying for a plan.

    Raises:
        ModelError: the architecture has no head for the task.
    """
    return _build(config, task or infer_task(config), dtype, torch.device("meta"))


def infer_task(config: PreTrainedConfig) -> Task:
    """The task that the architecture named in the config was made for; by the model type when it names none.

    Raises:
        ModelError: it was made for none of the three.
    """
    from transformers.models.auto import modeling_auto as auto

    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        return "classification"
    if config.is_encoder_decoder and config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    names_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (names_causal or not masked):
        return "causal"
    if config.model_type in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return "classification"
    raise ModelError(
        f"{architecture or config.model_type!r} is neither an encoder-decoder, a causal language model nor a text "
        "classifier: load it yourself and train it with offloadkit.OffloadEngine"
    )


def load_tokenizer(
    name_or_path_or_model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model, or the one given; it can pad when it comes back.

    Args:
        name_or_path_or_model: the model, as `load_model` takes it.
        tokenizer: a tokenizer, its hub name or folder, or "byte" for ByT5's (one token a byte, 384 ids, needs no
            files: for models with random weights). None: the model's own.

    Raises:
        ModelError: there is none, or it has neither a padding nor an end token.
        ModelNotFoundError, ModelAccessError, DownloadError: see `readable_hub_errors`.
    """
    from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        if tokenizer is None:
            tokenizer = _own_name(name_or_path_or_model)
        if tokenizer == "byte":
            return cast("PreTrainedTokenizerBase", ByT5Tokenizer())
        source = resolve(tokenizer)
        try:
            with readable_hub_errors(source):
                tokenizer = cast(
                    "PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(source, **where_to_look(source))
                )
        except (ModelError, TypeError) as error:
            if type(error) not in (ModelError, TypeError):
                raise
            raise ModelError(
                f"no tokenizer can be loaded from {source!r}: pass tokenizer= a name, a folder, a tokenizer, or 'byte' "
                f"({error})"
            ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                "the tokenizer has neither pad_token nor eos_token: set tokenizer.pad_token to one it knows"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _own_name(model: str | os.PathLike[str] | PreTrainedModel) -> str | os.PathLike[str]:
    """Where the tokenizer of a model is looked for when none is given."""
    if not isinstance(model, torch.nn.Module):
        return model
    name = getattr(model, "name_or_path", "")
    if not name:
        raise ModelError("a model made in memory has no tokenizer of its own: pass tokenizer=")
    return cast(str, name)


def _check_init(init: str) -> None:
    if init not in ("pretrained", "random"):
        raise ConfigError(f"init must be 'pretrained' or 'random', got {init!r}")


def _set_labels(config: PreTrainedConfig, num_labels: int | None, id2label: dict[int, str] | None) -> None:
    if id2label is not None:
        config.id2label = dict(id2label)
        config.label2id = {label: index for index, label in id2label.items()}
    elif num_labels is not None:
        config.num_labels = num_labels


def _auto_class(config: PreTrainedConfig, task: str) -> Any:
    """The Auto class of a task, once it is known to have a model for the config."""
    import transformers

    if task not in _AUTO_CLASSES:
        raise ConfigError(f"task must be one of {', '.join(map(repr, _AUTO_CLASSES))}, got {task!r}")
    auto_class = getattr(transformers, _AUTO_CLASSES[task])
    if type(config) not in auto_class._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError(
            f"{config.model_type!r} has no model for task {task!r}; it can be trained as {infer_task(config)!r}"
        )
    return auto_class


def _build(config: PreTrainedConfig, task: str, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """A model with initial weights drawn on `device`."""
    auto_class = _auto_class(config, task)
    with device:
        model = cast("PreTrainedModel", auto_class.from_config(config, dtype=dtype or config.dtype or torch.float32))
        if getattr(config, "scale_decoder_outputs", True) is False:
            _untie_head(model)
    return model


def _untie_head(model: Any) -> None:
    """Give a T5 v1.1 model the head of its own that its checkpoints have.

    transformers 5 ties the head of every new T5 to the embeddings. The new weight is drawn from N(0, 1 / d_model), as
    T5X draws `logits_dense`, so that logits of the unscaled decoder output start at unit scale.
    """
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return
    weight = torch.empty_like(head.weight)
    if weight.device.type != "meta":
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    head.weight = torch.nn.Parameter(weight)
    model.all_tied_weights_keys.pop("lm_head.weight", None)
    _tell_untied_head(model)


def _tell_untied_head(model: Any) -> None:
    """Make the config say what the parameters say, lest a later `tie_weights()` or an older reader tie the head."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    config_ties = getattr(model.config, "tie_word_embeddings", False)
    if config_ties and head is not None and head.weight is not embeddings.weight:
        model.config.tie_word_embeddings = False


def _read(
    source: str,
    config: PreTrainedConfig,
    task: str,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: bool,
) -> PreTrainedModel:
    """Weights from a folder or the hub, each tensor straight onto `device` and into `dtype`."""
    auto_class = _auto_class(config, task)
    with (
        readable_hub_errors(source, found=True),
        progress_bars(progress),
        no_conversion_service(),
        no_tying_advice(),
    ):
        model = auto_class.from_pretrained(
            source,
            config=config,
            dtype=dtype or "auto",
            device_map={"": device},
            weights_only=True,
            ignore_mismatched_sizes=task == "classification",
            **where_to_look(source),
        )
    return cast("PreTrainedModel", model)


def _take_over(
    model: Any,
    task: str | None,
    dtype: torch.dtype | None,
    device: torch.device,
    num_labels: int | None,
    id2label: dict[int, str] | None,
) -> PreTrainedModel:
    """A model that the user made, moved and converted in place; labels that have no names yet get them."""
    num_labels = num_labels or len(id2label or ())
    if task is not None and not isinstance(model, tuple(_auto_class(model.config, task)._model_mapping.values())):
        raise ModelError(f"a {type(model).__name__} does not do {task!r}: pass a model with that head, or its name")
    if task == "classification" and num_labels and model.config.num_labels != num_labels:
        raise ModelError(
            f"the model tells {model.config.num_labels} labels apart and the dataset has {num_labels}: "
            f"load it with num_labels={num_labels}"
        )
    if id2label and all(name == f"LABEL_{index}" for index, name in model.config.id2label.items()):
        _set_labels(model.config, None, id2label)
    return cast("PreTrainedModel", model.to(device=device, dtype=dtype))


def _complete_generation_config(model: PreTrainedModel) -> None:
    """Fill in what `generate()` needs and old configs leave out."""
    generation, config = getattr(model, "generation_config", None), model.config
    if generation is None or not model.can_generate():
        return
    eos = generation.eos_token_id[0] if isinstance(generation.eos_token_id, list) else generation.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = eos
    if config.is_encoder_decoder and generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = (
            generation.bos_token_id if generation.bos_token_id is not None else generation.pad_token_id
        )
