"""Builds HuggingFace models: on the meta device, with initial weights, or with a checkpoint's weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts import hardware
from offloadkit.facts.threads import ThreadPool
from offloadkit.hf.hub import readable_hub_errors, where_to_look
from offloadkit.hf.quiet import no_conversion_service, no_tying_advice, progress_bars
from offloadkit.hf.weight_files import ByteBar, ConversionNeededError, read_lazily
from offloadkit.offload.external_writes import unwatched
from offloadkit.offload.unread import become, leave_unread, make_real

_Draw = Callable[[], object]
_FILLS = (torch.ops.aten.normal_, torch.ops.aten.uniform_, torch.ops.aten.zero_, torch.ops.aten.fill_)
"""In-place operations that overwrite every element."""
PART_ELEMENTS = 1 << 22
"""Large tensors are drawn in parts of this size, with one seed per part."""
NUM_THREADS = len(hardware.own_cores())


class ConstructorNeededError(Exception):
    """`_init_weights` does not initialise a tensor, or its random operation takes no generator."""


class InitialWeights:
    """Draws initial weights by `_init_weights`, for a model on the meta device."""

    def __init__(self, model: nn.Module, seed: int, own: Mapping[nn.Parameter, _Draw]) -> None:
        """Allocate and fill the buffers of `model` (on the meta device), and check that all parameters can be drawn.

        `own`: functions that draw a parameter in place, instead of `_init_weights`. Raises `ConstructorNeededError`,
        and leaves the model unusable, if only the constructor sets some values.
        """
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._model, self._seed = model, seed
        self._draws = _draws(model) | {parameter: [draw] for parameter, draw in own.items()}
        self._bar = ByteBar("Drawing weights", sum(p.numel() * p.element_size() for p in self._names))
        for parameter, name in self._names.items():
            found = self._draws.get(parameter, [])
            self._draws[parameter] = found[self._write(parameter, name, set(), found) :]
        draws = _draws(model, of_buffers=True)
        for prefix, module in model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    real = module._buffers[attribute] = torch.empty_like(buffer, device="cpu")
                    self._write(real, f"{prefix}.{attribute}", set(), draws.get(buffer, []))

    def materialise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Draw the parameters that are still on the meta device. Implements `unread.Materialise`."""
        waiting = [parameter for parameter in parameters if parameter.is_meta]
        for parameter in waiting:
            become(parameter, torch.empty_like(parameter, device="cpu"))
        tensors = [*self._names, *self._model.buffers()]
        others = {_storage(tensor) for tensor in tensors if not tensor.is_meta}

        def draw(parameter: nn.Parameter) -> None:
            self._write(parameter, self._names[parameter], others, self._draws[parameter], of_parts)
            self._bar.advance(parameter.numel() * parameter.element_size())

        with (
            ThreadPool(NUM_THREADS, "offloadkit-draw-part") as of_parts,
            ThreadPool(NUM_THREADS, "offloadkit-draw") as pool,
        ):
            list(pool.map(draw, sorted(waiting, key=torch.numel, reverse=True)))

    def _write(
        self,
        tensor: torch.Tensor,
        name: str,
        others: set[int],
        draws: Sequence[_Draw],
        of_parts: ThreadPool | None = None,
    ) -> int:
        """Run `draws`; returns the index of the last draw that overwrites the whole tensor.

        Earlier draws can be skipped: T5, for example, draws every matrix twice.
        """
        first = 0
        with torch.no_grad(), unwatched(), _OnlyInto(tensor, f"{self._seed} {name}", others, of_parts) as only:
            for number, draw in enumerate(draws):
                only.fills = None
                draw()
                if only.fills:
                    first = number
        if not only.written:
            raise ConstructorNeededError(f"{type(self._model).__name__}._init_weights does not initialise {name!r}")
        return first


def _draws(model: Any, *, of_buffers: bool = False) -> dict[torch.Tensor, list[_Draw]]:
    """Parameter (or buffer) -> calls of `_init_weights` that may write to it, in order.

    The order is that of `PreTrainedModel.initialize_weights`: children first, with `_init_weights` of the innermost
    `PreTrainedModel`.
    """
    from transformers import PreTrainedModel

    draws: dict[torch.Tensor, list[_Draw]] = {}

    def visit(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
        for child in module.children():
            visit(child, child._init_weights if isinstance(child, PreTrainedModel) else init)
        for tensor in module.buffers() if of_buffers else module.parameters():
            draws.setdefault(tensor, []).append(lambda: init(module))

    visit(model, model._init_weights)
    return draws


class _OnlyInto(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Restricts in-place operations to one tensor and to scratch memory, and seeds random operations.

    Scratch memory has a separate generator, because how much of it is drawn depends on which tensors are real.

    Attributes:
        fills: whether the first write since the caller set None overwrote every element; None: no write yet.
    """

    def __init__(self, target: torch.Tensor, seed: str, others: set[int], of_parts: ThreadPool | None = None) -> None:
        """`others`: storages that must not change. `of_parts`: threads that draw parts of a large tensor."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._target, self._others = _storage(target), others
        self._seed, self._num_elements, self._of_parts = seed, target.numel(), of_parts
        self._generator, self._scratch_generator = _generator(seed), _generator(f"{seed} scratch")
        self.written = False
        self.fills: bool | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = self._scratch_generator
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            storage = _storage(args[0])
            if storage == self._target:
                self.written, generator = True, self._generator
                fills = func.overloadpacket in _FILLS and args[0].numel() == self._num_elements
                self.fills = fills if self.fills is None else self.fills
            if args[0].is_meta or (storage != self._target and storage in self._others):
                return args[0]
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            func, kwargs = seeded_overload(func), {**kwargs, "generator": generator}
            if generator is self._generator and self._is_large(func, args[0]):
                return self._in_parts(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_large(self, func: Any, tensor: torch.Tensor) -> bool:
        large = self._of_parts is not None and tensor.numel() == self._num_elements > PART_ELEMENTS
        return large and func.overloadpacket in _FILLS and tensor.is_contiguous()

    def _in_parts(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        assert self._of_parts is not None

        def fill(number: int, part: torch.Tensor) -> None:
            func(part, *args[1:], **{**kwargs, "generator": _generator(f"{self._seed} {number}")})

        parts = args[0].detach().view(-1).split(PART_ELEMENTS)
        list(self._of_parts.map(fill, range(len(parts)), parts))
        filled: torch.Tensor = args[0]
        return filled


def seeded_overload(func: Any) -> Any:
    for overload in (func, getattr(func.overloadpacket, "generator", None)):
        if overload is not None and any(argument.name == "generator" for argument in overload._schema.arguments):
            return overload
    raise ConstructorNeededError(f"{func} takes no generator")


def _generator(seed: str) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(number)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Task = Literal["seq2seq", "causal", "classification"]

_AUTO_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal": "AutoModelForCausalLM",
    "classification": "AutoModelForSequenceClassification",
}
_SPEECH = "AutoModelForSpeechSeq2Seq"
_IMAGES = "AutoModelForImageTextToText"
_NUM_AT_A_TIME = 16
_MOST_PARAMETERS = 2**48


def infer_task(config: PreTrainedConfig) -> Task:
    """The task of the config's architecture or, if it names none, of its model type."""
    from transformers.models.auto import modeling_auto as auto

    architecture = (config.architectures or [""])[0]
    if is_speech(config):
        return "seq2seq"
    if sees_images(config):
        return "causal"
    if architecture.endswith("ForSequenceClassification"):
        return "classification"
    if config.is_encoder_decoder and config.model_type in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    names_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.is_encoder_decoder:  # some have decoders in the list below, which are not the whole model
        raise ModelError(
            f"{architecture or config.model_type} does not map text to text, and finetune and plan are for text, for "
            "sound by Whisper and for images by decoders: train it with offloadkit.OffloadSeq2SeqTrainer, which plans "
            "for the batches of your own collator"
        )
    if config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (names_causal or not masked):
        return "causal"
    if config.model_type in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return "classification"
    raise ModelError(
        f"{architecture or config.model_type!r} is neither an encoder-decoder, a causal language model nor a text "
        "classifier: load it yourself and train it with offloadkit.OffloadTrainer or offloadkit.OffloadEngine"
    )


def is_speech(config: PreTrainedConfig) -> bool:
    """Whether the model is a Whisper, which maps sound to text."""
    architecture = (config.architectures or ["WhisperForConditionalGeneration"])[0]
    return config.model_type == "whisper" and architecture == "WhisperForConditionalGeneration"


def sees_images(config: PreTrainedConfig) -> bool:
    """Whether the model is a decoder of text and images, such as Gemma 3 or Qwen2.5-VL."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return known is not None and not config.is_encoder_decoder and (config.architectures or [known])[0] == known


def num_frames(config: Any) -> int:
    """Frames of a Whisper's window: its two convolutions make a position of each two frames."""
    return 2 * int(config.max_source_positions)


def auto_class_name(config: PreTrainedConfig, task: Task) -> str:
    if task == "seq2seq" and is_speech(config):
        return _SPEECH
    return _IMAGES if task == "causal" and sees_images(config) else _AUTO_CLASSES[task]


def auto_class_of(config: PreTrainedConfig, task: str) -> Any:
    """The Auto class of a task. Raises `ConfigError` for an unknown task, `ModelError` if the class has no such
    model.
    """
    import transformers

    if task not in _AUTO_CLASSES:
        raise ConfigError(f"task must be one of {', '.join(map(repr, _AUTO_CLASSES))}, got {task!r}")
    auto_class = getattr(transformers, auto_class_name(config, cast("Task", task)))
    if type(config) not in auto_class._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError(
            f"{config.model_type!r} has no model for task {task!r}; it can be trained as {infer_task(config)!r}"
        )
    return auto_class


def draw_lazily(config: PreTrainedConfig, task: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """A model whose initial weights are drawn when needed, with a seed taken now from torch's generator.

    Weights are drawn at once if `_init_weights` does not initialise all of them.
    """
    model: Any = build(config, task, dtype, torch.device("meta"))
    head = model.get_output_embeddings() if _has_own_head(config) else None
    own = {} if head is None else {head.weight: lambda: _draw_head(head.weight)}
    seed = int(torch.randint(2**62, ()))
    try:
        initial = InitialWeights(model, seed, own)
    except ConstructorNeededError:
        return build(config, task, dtype, torch.device("cpu"))
    leave_unread(model.parameters(), initial.materialise)
    return cast("PreTrainedModel", model)


def fill(model: nn.Module, device: torch.device) -> None:
    """Read or draw all parameters, a few at a time, and move the model to `device`."""
    parameters = list(model.parameters())
    for begin in range(0, len(parameters), _NUM_AT_A_TIME):
        some = parameters[begin : begin + _NUM_AT_A_TIME]
        make_real(some)
        for parameter in some:
            parameter.data = parameter.data.to(device)
    model.to(device)


def build(config: PreTrainedConfig, task: str, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    auto_class = auto_class_of(config, task)
    auto_class._model_mapping.get(type(config), None)  # imports the model's module, which torch 2.6 cannot do on meta
    with device:
        model = cast("PreTrainedModel", auto_class.from_config(config, dtype=dtype or config.dtype or torch.float32))
        if _has_own_head(config):
            _untie_head(model)
    if (number := sum(parameter.numel() for parameter in model.parameters())) > _MOST_PARAMETERS:
        raise ModelError(f"its config.json asks for {number:,} parameters, which no model has: correct its sizes")
    return model


def _has_own_head(config: PreTrainedConfig) -> bool:
    """Whether the model is a T5 v1.1. Its config may wrongly say that the head is tied."""
    return getattr(config, "scale_decoder_outputs", True) is False


def _draw_head(weight: torch.Tensor) -> None:
    """Draw from N(0, 1 / d_model), as T5X does for `logits_dense`, so that logits start at unit scale."""
    torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def _untie_head(model: Any) -> None:
    """transformers 5 ties the head of every new T5; T5 v1.1 checkpoints have an untied head."""
    head = model.get_output_embeddings()
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return
    weight = torch.empty_like(head.weight)
    if weight.device.type != "meta":
        _draw_head(weight)
    head.weight = torch.nn.Parameter(weight)
    model.all_tied_weights_keys.pop("lm_head.weight", None)
    _tell_untied_head(model)


DEQUANTISABLE = ("mxfp4", "fp8")
"""Methods whose weights transformers dequantises; it keeps them where it finds kernels, unless told."""


def dequantisable(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint whose weights can be dequantised; None for others."""
    said = getattr(config, "quantization_config", None)
    said = said if isinstance(said, dict | None) else said.to_dict()
    return said if said is not None and quantised_by(said) in DEQUANTISABLE else None


def quantised_by(quantisation: Mapping[str, Any]) -> str:
    """The method in a `quantization_config`."""
    method = quantisation.get("quant_method")
    return str(getattr(method, "value", method))


def read(
    source: str,
    config: PreTrainedConfig,
    task: str,
    dtype: torch.dtype | None,
    device: torch.device,
    progress: bool,
    allow_missing: bool = False,
) -> PreTrainedModel:
    """Read a model from a folder or the hub, directly onto `device` and into `dtype`.

    Raises:
        ModelError: the checkpoint lacks tensors, except a classifier's head, and `allow_missing` is False.
    """
    auto_class = auto_class_of(config, task)
    errors = readable_hub_errors(source, found=True)
    with errors, progress_bars(progress), no_conversion_service(), no_tying_advice():
        model, loading = auto_class.from_pretrained(
            source,
            output_loading_info=True,
            config=config,
            dtype=dtype or "auto",
            device_map={"": device},
            weights_only=True,
            ignore_mismatched_sizes=task == "classification",
            **where_to_look(source),
        )
    if not allow_missing:
        _check_complete(source, model, loading, task)
    return cast("PreTrainedModel", model)


def _check_complete(source: str, model: Any, loading: Mapping[str, Any], task: str) -> None:
    """Raise `ModelError` if the checkpoint lacks tensors of the model, or has them in other shapes.

    A classifier's head and pooler may be missing, because fine-tuning trains them.
    """
    lacking = set(loading["missing_keys"]) | {name for name, *_ in loading["mismatched_keys"]}
    if task == "classification":
        base = f"{model.base_model_prefix}."
        lacking = {name for name in lacking if name.startswith(base) and "pooler" not in name.split(".")}
    if lacking:
        raise ModelError(
            f"{source} lacks {len(lacking)} of {len(model.state_dict())} tensors of {type(model).__name__}, such as "
            f"{min(lacking)!r}: they would start from random numbers. Pass the complete checkpoint and its "
            f"config.json, or model=offloadkit.from_pretrained({source!r}, allow_missing=True) to initialise them"
        )


def read_lazily_or_now(
    source: str, config: PreTrainedConfig, task: str, dtype: torch.dtype | None, allow_missing: bool
) -> PreTrainedModel:
    """Like `read` onto the CPU; if possible, values stay in their files until they are needed."""

    def load() -> PreTrainedModel:
        return read(source, copy.deepcopy(config), task, dtype, torch.device("cpu"), True, allow_missing)

    try:
        return read_lazily(source, load)
    except ConversionNeededError as error:
        quantisation = dequantisable(config)
        reason = f"its {quantised_by(quantisation)} weights are dequantised" if quantisation else error
        print(f"{source}: {reason}, so the whole model is read into RAM before training", flush=True)
        return load()


def completed(model: PreTrainedModel) -> PreTrainedModel:
    _tell_untied_head(model)
    _complete_generation_config(model)
    model.train(False)
    return model


def _tell_untied_head(model: Any) -> None:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    config_ties = getattr(model.config, "tie_word_embeddings", False)
    if config_ties and head is not None and head.weight is not embeddings.weight:
        model.config.tie_word_embeddings = False


def _complete_generation_config(model: PreTrainedModel) -> None:
    generation, config = getattr(model, "generation_config", None), model.config
    if generation is None or not model.can_generate():
        return
    eos = generation.eos_token_id[0] if isinstance(generation.eos_token_id, list) else generation.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = eos
    if config.is_encoder_decoder and generation.decoder_start_token_id is None:
        begin = generation.pad_token_id if generation.bos_token_id is None else generation.bos_token_id
        generation.decoder_start_token_id = begin
