"""HuggingFace models by hub name, folder or instance: their configs, weights and tokenizers."""

from __future__ import annotations

import os
import reprlib
from typing import TYPE_CHECKING, Any, cast

import torch

from offloadkit.errors import ConfigError, ModelError
from offloadkit.hf.hub import PRESETS, Preset, check_folder, readable_hub_errors, resolve, where_to_look
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
from offloadkit.hf.quiet import progress_bars
from offloadkit.hf.weight_files import Materialise

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "EAGER_ATTENTION",
    "PRESETS",
    "Preset",
    "Task",
    "build_model",
    "check_kind",
    "infer_task",
    "load_config",
    "load_model",
    "load_tokenizer",
    "meta_model",
    "needs_no_hub",
]

EAGER_ATTENTION = {"t5", "mt5", "umt5"}
"""Model types whose learned attention bias makes transformers' default, `sdpa`, the worse choice: it is slower and
larger (T5-3B, 8x(512+128) tokens: 0.238 s and 26.8 GiB against 0.227 s and 21.5 GiB for forward and backward, H200),
its backward is not deterministic, and with padded batches it has been seen to give NaN gradients."""


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
        init: "random" draws HuggingFace's initial weights in RAM, seeded by torch's generator, instead of reading any.
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
    config, task = _config_for(name_or_path_or_model, task, init, num_labels, id2label)
    if init == "pretrained":
        model = read(resolve(name_or_path_or_model), config, task, dtype, device, progress)
    elif device.type == "meta":
        model = build(config, task, dtype, device)
    else:
        model, materialise = draw_lazily(config, task, dtype)
        with progress_bars(progress):
            fill(model, materialise, device)
    return completed(model)


def build_model(
    name_or_path: str | os.PathLike[str],
    *,
    task: Task | None = None,
    init: str = "pretrained",
    dtype: torch.dtype | None = None,
    num_labels: int | None = None,
    id2label: dict[int, str] | None = None,
) -> tuple[PreTrainedModel, Materialise | None]:
    """As `load_model`, but parameters are on the meta device, and what makes them real comes with the model.

    Files are fetched and opened here; values are read, or drawn, when they are asked for. What a checkpoint lacks (a
    new classification head) and all buffers are real already.

    Returns:
        The model, and a function of parameters of it; None where all are real: a checkpoint that transformers converts
        while reading (quantised, experts stored one by one, a .bin older than torch 1.6), or a model whose
        `_init_weights` does not say everything.

    Raises:
        As `load_model`; the function raises `ModelError` for a file that is gone or broken by then.
    """
    _check_init(init)
    config, task = _config_for(name_or_path, task, init, num_labels, id2label)
    materialise: Materialise | None
    if init == "random":
        model, materialise = draw_lazily(config, task, dtype)
    else:
        model, materialise = read_lazily_or_now(resolve(name_or_path), config, task, dtype)
    return completed(model), materialise


def check_kind(model: object) -> None:
    """Raise `ModelError` for what is neither a name, nor a path, nor a HuggingFace model, or one that cannot begin."""
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
    config: Any = model.config
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        raise ModelError(
            f"the config of this {type(model).__name__} has no decoder_start_token_id, the token that its decoder "
            "begins with: set model.config.decoder_start_token_id (T5's is its pad token, 0)"
        )


def meta_model(
    config: PreTrainedConfig, task: Task | None = None, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model without memory (parameters on the meta device): names, shapes and tying for a plan.

    Raises:
        ModelError: the architecture has no head for the task.
    """
    return build(config, task or infer_task(config), dtype, torch.device("meta"))


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
            with readable_hub_errors(source, kind="tokenizer"):
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
        _check_vocabulary(tokenizer, source)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                "the tokenizer has neither pad_token nor eos_token: set tokenizer.pad_token to one it knows"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise `ModelError` for a tokenizer that knows special tokens alone: transformers makes one where no file of it is
    found (T5's knows the word boundary too), and every word becomes the unknown token."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if len(set(tokenizer.get_vocab()) - special) < 2:
        raise ModelError(
            f"{source!r} has no tokenizer files, or not all of them: without these transformers makes an empty "
            f"{type(tokenizer).__name__}, to which every word is unknown. Put them there, or pass tokenizer= the name "
            "or folder of the tokenizer that the model was trained with, or 'byte' for a model with random weights"
        )


def needs_no_hub(model: Any, tokenizer: Any, *, init: str) -> bool:
    """Whether config and tokenizer (arguments: as `load_config` and `load_tokenizer`) are read without a download."""
    by_name = isinstance(model, str | os.PathLike)
    config_is_here = not by_name or _is_folder(model) or (init == "random" and str(model) in PRESETS)
    if tokenizer is None:
        tokenizer = model if by_name else getattr(model, "name_or_path", "") or None
    return config_is_here and (
        tokenizer == "byte" or not isinstance(tokenizer, str | os.PathLike) or _is_folder(tokenizer)
    )


def _is_folder(name: str | os.PathLike[str]) -> bool:
    return bool(os.fspath(name)) and os.path.isdir(os.path.expanduser(name))


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


def _config_for(
    name_or_path: str | os.PathLike[str],
    task: Task | None,
    init: str,
    num_labels: int | None,
    id2label: dict[int, str] | None,
) -> tuple[PreTrainedConfig, Task]:
    """The config to build a model from, and its task."""
    config = load_config(name_or_path, init=init)
    task = task or infer_task(config)
    _set_labels(config, num_labels, id2label)
    if config.model_type in EAGER_ATTENTION:
        config._attn_implementation = "eager"
    return config, task


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
    if task is not None and not isinstance(model, tuple(auto_class_of(model.config, task)._model_mapping.values())):
        raise ModelError(f"a {type(model).__name__} does not do {task!r}: pass a model with that head, or its name")
    if task == "classification" and num_labels and model.config.num_labels != num_labels:
        raise ModelError(
            f"the model tells {model.config.num_labels} labels apart and the dataset has {num_labels}: "
            f"load it with num_labels={num_labels}"
        )
    if id2label and all(name == f"LABEL_{index}" for index, name in model.config.id2label.items()):
        _set_labels(model.config, None, id2label)
    return cast("PreTrainedModel", model.to(device=device, dtype=dtype))
