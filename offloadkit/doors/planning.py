"""`plan`: memory and seconds of training a model, from its name and a few options, without reading any weights.

plan = offloadkit.plan("t5-3b", vram="8GiB", ram="32GiB", batch_size=4)
print(plan)  # whether it fits, and how fast it is; plan.explain() and plan.details() say more
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from offloadkit.device.measure import host_rates, measure
from offloadkit.distributed.machine import known_links, measured_together, planning_ranks
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.engine.outline import Outline, held_in_ram, largest_work, outlined, proposing_disk, with_room_of
from offloadkit.engine.tracing import Call
from offloadkit.errors import ConfigError, shown
from offloadkit.facts import hardware
from offloadkit.facts.calls import BY_FINETUNE, WrittenCall, as_here, call_of
from offloadkit.facts.config import OffloadConfig, Precision, check_counts, given_size, with_wishes
from offloadkit.facts.hardware import Hardware, with_disk
from offloadkit.facts.starting import said_if_long
from offloadkit.facts.units import format_bytes, parse_bytes
from offloadkit.hf.assumed_images import assumed_batch
from offloadkit.hf.data import DEFAULT_TARGET_LENGTH, default_input_length, num_positions
from offloadkit.hf.load import Task, is_speech, num_frames, sees_images
from offloadkit.hf.masks import Padding, known_padding
from offloadkit.hf.packed import known_boundaries, planned_boundaries
from offloadkit.hf.packing import check_packing
from offloadkit.hf.source import ModelSource, resolve
from offloadkit.planner import Dtype, MicroBatch, Plan, Rows
from offloadkit.planner.cards import CARDS, card_named
from offloadkit.planner.layout import activation_bytes
from offloadkit.planner.plan import check_fits
from offloadkit.planner.ranks import for_ranks

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

BATCH_SIZES = (32, 16, 8, 4, 2, 1)
"""Sizes that "auto" tries: the first whose activations, with every block recomputed, take at most half of VRAM."""
AUTO_BATCH_SIZE = 8

GIB = 1 << 30
ASSUMED_VRAM = "24GiB"
"""VRAM of each GPU if several are planned for without a given size."""
ASSUMED_CARD = Hardware(
    device="cuda:0",
    gpu_name="an assumed card",
    compute_capability=(8, 0),
    supports_bf16=True,
    can_pin=True,
    vram_total_bytes=0,
    vram_free_bytes=0,
    vram_context_bytes=GIB // 2,
    ram_total_bytes=0,
    ram_available_bytes=0,
    cpu_name="8 cores",
    num_cores=8,
    h2d_bytes_per_second=24e9,
    d2h_bytes_per_second=24e9,
    both_bytes_per_second=40e9,
    dram_bytes_per_second=45e9,
    cpu_adamw_bytes_per_second=45e9,
    cpu_compact_bytes_per_second=40e9,
    cpu_tiny_bytes_per_second=35e9,
    cpu_and_bus_bytes_per_second=60e9,
    vram_bytes_per_second=600e9,
    launch_seconds=6e-6,
    bf16_flops_per_second=60e12,
    fp16_flops_per_second=60e12,
    fp32_flops_per_second=15e12,
)
"""A typical machine, not measured: PCIe 4 x16, two channels of DDR5, a mid-range card."""


def plan(
    model: str | os.PathLike[str] | PreTrainedModel | PeftModel,
    *,
    vram: int | str | None = None,
    ram: int | str | None = None,
    precision: Precision | None = None,
    batch_size: int | Literal["auto"] = "auto",
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    gradient_accumulation: int | None = None,
    task: Task | None = None,
    packing: bool = False,
    lora: bool | int | LoraConfig | None = None,
    freeze: str | Sequence[str] | None = None,
    offload: OffloadConfig | None = None,
    device: torch.device | None = None,
    gpu: str | None = None,
    num_gpus: int | None = None,
) -> Plan:
    """The memory that training `model` needs, its placements, and the seconds of a step. Only the model's config is
    read.

    If torch.distributed is initialised, all ranks call it together, and all get rank 0's plan.

    Args:
        model: a preset ("t5-3b"; needs no network), folder, hub name, or a model.
        vram, ram: budgets ("8GiB"): VRAM of each GPU, total RAM; None: the free memory here. Without a GPU and without
            `device`, `vram` plans for a card of that size with assumed rates.
        precision: of the optimizer states; None: the config's.
        batch_size: rows of a micro-batch; "auto": see `BATCH_SIZES`. It is chosen before the placements.
        max_input_length, max_target_length: tokens of a row; None: as in `finetune`.
        gradient_accumulation: micro-batches in an update; None: the config's.
        task: "seq2seq", "causal" or "classification"; None: the task of the architecture.
        packing: rows are packed, as in `finetune`; the plan counts attention as if each filled `max_input_length`.
        lora: adapters to train, as in `finetune`. The plan's `beside` is then the verdict of full fine-tuning.
        freeze: names of modules that are not trained, as in `finetune`.
        offload: as in `finetune`; its `working_dtype` "auto" means `default_dtype`.
        device: the device for training; None: the GPU if there is one.
        gpu: an absent card to plan for ("RTX 4090"), by its data sheet: see `planner.cards.CARDS`. The CPU and RAM are
            this machine's, with assumed rates if they were never measured. `vram` is then a part of the card.
        num_gpus: number of such GPUs that train together on separate micro-batches, eight to a host. They may be
            absent: without a GPU, `gpu` and `vram`, the plan is for cards of `ASSUMED_VRAM`. None: the number of ranks.

    Raises:
        ConfigError: an option is invalid, the card is unknown, `vram` exceeds the card, or `num_gpus` differs from the
            number of ranks.
        OutputError: the folder for states on disk does not exist, or is full.
        ModelError, ModelNotFoundError, ModelAccessError: as in `finetune`.
    """
    source = resolve(model, init="random", task=task, lora=lora, freeze=freeze)
    source.check_trainable(reads_weights=True)
    if packing:
        check_packing(source)
    config = with_wishes(offload, vram=vram, ram=ram, precision=precision, gradient_accumulation=gradient_accumulation)
    if device is not None and not isinstance(device, torch.device):
        device = hardware.device_of(device)
    lengths: dict[str, Any] = {"max_input_length": max_input_length, "max_target_length": max_target_length}
    others: dict[str, Any] = {"vram": vram, "ram": ram, "precision": precision, "task": task, "lora": lora}
    others |= {"freeze": freeze, "offload": offload} | ({"packing": True} if packing else {})
    others |= {"gradient_accumulation": gradient_accumulation, "device": device, "gpu": gpu, "num_gpus": num_gpus}
    size = None if batch_size == "auto" else batch_size
    call = call_of("offloadkit.plan", model, batch_size=size, **lengths, **others)
    request = PlanRequest(batch_size, **lengths, device=device, gpu=gpu, num_gpus=num_gpus, packing=packing, call=call)
    return plan_source(source, config, request)


_MOST_TOKENS = 2**27
_LONG_ROW = 2**15
"""Tokens of a row from which "auto" tries small batches first: tracing takes long for many tokens, with tiles of each.
"""
_WELL_KNOWN = ("T4", "RTX 3060", "RTX 4090", "A100")


@dataclass(frozen=True)
class PlanRequest:
    """The micro-batches and the machine to plan for. The fields are arguments of `plan`.

    Raises:
        ConfigError: a number is no whole number, or too small.
    """

    batch_size: int | Literal["auto"]
    max_input_length: int | None
    max_target_length: int | None
    device: torch.device | None
    gpu: str | None = None
    num_gpus: int | None = None
    eval_batch_size: int | None = None
    """Batch size of evaluation, which matters if it is larger than training's."""
    label_smoothing: float = 0.0
    """If not 0, the Trainer computes the loss from whole logits."""
    mask: Literal["padded", "unread", "full", "absent"] | None = None
    """The batches' attention mask: over padding, over padding that no label reads (`masks.Padding`), or masking
    nothing, or there is none. None: as `finetune` pads on the right, "unread" for causal models and else "padded".
    """

    packing: bool = False
    """The micro-batches are packed (`hf/packing.py`)."""
    packed_row: int | None = None
    """Tokens of equal rows whose attention takes as long as that of the packed rows. None: `max_input_length`."""

    with_images: Callable[[int], Call] | None = None
    """The largest micro-batches of so many rows with images. None: a model that sees images is planned for one that
    its config tells."""
    is_text: bool = False
    """The rows of a model that sees images have none."""

    call: WrittenCall = BY_FINETUNE
    """For remedies if the plan does not fit."""

    def __post_init__(self) -> None:
        names = ("num_gpus", "max_input_length", "max_target_length")
        check_counts(given_size(self.batch_size) | {name: getattr(self, name) for name in names}, optional=names)


def plan_source(source: ModelSource, config: OffloadConfig, request: PlanRequest) -> Plan:
    """`plan` for a resolved model."""
    device, gpu, num_gpus = request.device, request.gpu, request.num_gpus
    with planning_ranks(device or hardware.default_device()) as ranks:
        if ranks.size > 1 and num_gpus not in (None, ranks.size):
            raise ConfigError(f"num_gpus={num_gpus}, but torch.distributed has {ranks.size} ranks: leave num_gpus out")
        number = num_gpus or ranks.size
        nothing_is_here = ranks.size == 1 and device is None and hardware.default_device().type == "cpu"
        if num_gpus is not None and nothing_is_here and gpu is None and config.vram is None:
            config = replace(config, vram=ASSUMED_VRAM)
        machine, assumed = _machine(config, device, gpu, number, ranks)
        if source.model is not None and not assumed:
            machine = with_room_of(source.model, machine)

        def make() -> Plan:
            found = _outline(source, _with_dtype(config, machine), machine, request, assumed=assumed)
            rows = found.rows()
            outline = replace(found, outline=replace(found.outline, num_ranks=number))
            made = outline.outline.plan(outline.work(rows))
            if source.adapters is not None and not source.is_quantised:
                whole = replace(request, batch_size=rows.batch_size)
                full = _outline(
                    source.without_adapters(), _with_dtype(config, machine), machine, whole, assumed=assumed
                )
                full = replace(full, outline=replace(full.outline, num_ranks=number))
                beside = full.outline.plan(full.work(rows)).verdict
                made = replace(made, basis=replace(made.basis, beside=f"full fine-tuning: {beside}"))
            if made.fits:
                return made
            smaller = tuple(outline.smaller(rows))
            basis = replace(made.basis, chosen=f"batch_size={rows.batch_size}", smaller=smaller, call=request.call)
            return proposing_disk(replace(made, basis=basis))

        with said_if_long("searching for a plan") if ranks.rank == 0 else nullcontext():
            return ranks.broadcast_from(make)


def _machine(
    config: OffloadConfig, device: torch.device | None, gpu: str | None, number: int, ranks: Solo | Group
) -> tuple[Hardware, bool]:
    """The machine as one of `number` ranks has it, and whether its rates are assumed. `ranks` measure this machine
    together.
    """
    if gpu is not None:
        found, assumed = machine_with(gpu, config), True
    elif isinstance(ranks, Group) and not _assumes_card(config, device):
        return measured_together(ranks, device or hardware.default_device(), config.states_folder), False
    else:
        found, assumed = machine_for(config, device)
    links: dict[str, Any] = {} if assumed or number == 1 else known_links(torch.device(found.device), number)
    return replace(for_ranks(found, number, link=links.get("link_bytes_per_second", 0.0)), **links), assumed


def shown_plan(
    source: ModelSource,
    config: OffloadConfig,
    request: PlanRequest,
    *,
    assumed: Plan | None = None,
    verbose: bool = False,
) -> Plan:
    """Make and print the plan of `plan_source`; raises `DoesNotFitError` if it does not fit.

    Args:
        assumed: a plan that was shown before the lengths of the rows were known: if it changes, one line is printed.
            Rows may be longer than assumed, because tokenized rows are not cut.
        verbose: print everything, not only the verdict.
    """
    made = plan_source(source, config, request)
    if made == assumed:
        return made
    if assumed is not None:
        target = f" + {request.max_target_length}" if source.task == "seq2seq" else ""
        longest = f"the longest row has {request.max_input_length}{target} tokens"
        unpadded = " and no row has padding" if request.mask == "full" else ""
        print(f"planned again, {longest}{unpadded}: {made.verdict}", flush=True)
    elif verbose:
        print(made, made.details(), *([made.explain()] if made.fits else []), sep="\n", flush=True)
    elif made.fits:  # otherwise the error has the verdict
        print(made, flush=True)
    check_fits(made)
    return made


def auto_batch_size(source: ModelSource, config: OffloadConfig, request: PlanRequest) -> int:
    """The size for `batch_size="auto"`: one of `BATCH_SIZES` with a GPU, else `AUTO_BATCH_SIZE`."""
    if request.device is None or request.device.type == "cpu":
        return AUTO_BATCH_SIZE
    machine = measure(request.device)
    return _outline(source, _with_dtype(config, machine), machine, request).rows().batch_size


def _with_dtype(config: OffloadConfig, machine: Hardware) -> OffloadConfig:
    if config.working_dtype != "auto":
        return config
    on_gpu = machine.device != "cpu"
    return replace(config, working_dtype=default_dtype(on_gpu=on_gpu, native_bf16=machine.supports_bf16))


def default_dtype(*, on_gpu: bool, native_bf16: bool) -> Dtype:
    """The working dtype for "auto": bf16 on a GPU, or fp16 if bf16 is emulated (slow); fp32 on the CPU."""
    if not on_gpu:
        return "fp32"
    return "bf16" if native_bf16 else "fp16"


def machine_for(config: OffloadConfig, device: torch.device | None) -> tuple[Hardware, bool]:
    """The machine to plan for (this GPU, this CPU, or a card of the given size), and whether its rates are assumed."""
    if _assumes_card(config, device):
        vram, ram = parse_bytes(config.vram or 0), hardware.ram_available_bytes()
        assumed = (
            "There is no GPU here, so a typical card's rates are assumed. Name yours by "
            f"{as_here('--gpu', 'gpu=')}, such as {', '.join(_WELL_KNOWN)}: {len(CARDS)} cards are known."
        )
        card = replace(ASSUMED_CARD, vram_total_bytes=vram, vram_free_bytes=vram, assumed=assumed)
        card = replace(card, assumed_card=f"assumed card of {format_bytes(vram)}")
        card = replace(card, ram_total_bytes=hardware.ram_limit_bytes(), ram_available_bytes=ram)
        return _with_states_folder(card, config), True
    return measure(device, folder=config.states_folder), False


def _assumes_card(config: OffloadConfig, device: torch.device | None) -> bool:
    return device is None and config.vram is not None and hardware.default_device().type == "cpu"


def machine_with(gpu: str, config: OffloadConfig) -> Hardware:
    """This machine with another GPU, by its data sheet. The CPU's rates are assumed if they were never measured.

    Raises `ConfigError` if the card is unknown, or the config's `vram` exceeds its memory.
    """
    card, host = card_named(gpu), host_rates()
    usable = int(card.usable_gib * GIB)
    if config.vram is not None and parse_bytes(config.vram) > usable:
        raise ConfigError(
            f"a {card.name} has {format_bytes(usable)} of VRAM, less than vram={shown(config.vram)}: pass a smaller "
            "vram"
        )
    rates: dict[str, Any] = card.rates() | host
    if host:
        rates["cpu_and_bus_bytes_per_second"] = max(
            host["cpu_and_bus_bytes_per_second"], rates["both_bytes_per_second"]
        )
    num_cores = hardware.num_cores() if host else ASSUMED_CARD.num_cores
    whose = f"this machine's {num_cores} cores, as measured" if host else f"an assumed host of {num_cores} cores"
    assumed = (
        f"Planned for a card that is not here, {card.name}, with its data sheet's rates scaled as an H200's measured "
        f"rates are to its data sheet, and for {whose}."
    )
    machine = replace(
        ASSUMED_CARD,
        gpu_name=card.name,
        compute_capability=card.capability,
        supports_bf16=card.supports_bf16,
        vram_total_bytes=usable,
        vram_free_bytes=usable - ASSUMED_CARD.vram_context_bytes,
        ram_total_bytes=hardware.ram_limit_bytes(),
        ram_available_bytes=hardware.ram_available_bytes(),
        cpu_name=hardware.cpu_name() if host else ASSUMED_CARD.cpu_name,
        num_cores=num_cores,
        assumed=assumed,
        **rates,
    )
    return _with_states_folder(machine, config)


def _with_states_folder(machine: Hardware, config: OffloadConfig) -> Hardware:
    return machine if config.states_folder is None else with_disk(machine, config.states_folder)


def check_input_length(config: Any, given: int | None) -> None:
    """Raise `ConfigError` if `max_input_length` is given for a speech model, whose window is fixed."""
    if is_speech(config) and given not in (None, num_frames(config)):
        raise ConfigError(
            f"max_input_length={given} is for text, and each row of {config.model_type} has {num_frames(config):,} "
            "frames of sound: leave it out"
        )


@dataclass(frozen=True)
class _TaskOutline:
    outline: Outline
    task: Task
    request: PlanRequest

    def rows(self) -> Rows:
        """The requested rows. Raises `ConfigError` if they are longer than the model's table of positions."""
        outline, wanted = self.outline, self.request
        config: Any = outline.model.config
        limit = num_positions(config)
        for name in ("max_input_length", "max_target_length"):
            if limit and (length := getattr(wanted, name)) and length > limit:
                raise ConfigError(
                    f"rows of {length} tokens are too long: {config.model_type} has {limit} positions. Pass {name}="
                    f"{limit}, which cuts texts; rows that are tokenized already must be cut before"
                )
        length = wanted.max_input_length or default_input_length(config, self.task)
        target = (wanted.max_target_length or DEFAULT_TARGET_LENGTH) if self.task == "seq2seq" else None
        if is_speech(config):
            length, target = num_frames(config), min(target or 1, config.max_target_positions)
            check_input_length(config, wanted.max_input_length)
        is_too_short = self._has_images and wanted.with_images is None and assumed_batch(config, 1, length) is None
        if is_too_short and wanted.max_input_length is not None:
            raise ConfigError(
                f"max_input_length={length} leaves no room for an image of {config.model_type}: pass a larger one, or "
                "leave it out"
            )
        rows = Rows(AUTO_BATCH_SIZE, length, target)
        if wanted.batch_size != "auto":
            rows = replace(rows, batch_size=wanted.batch_size)
        elif outline.machine.device != "cpu":
            self._check_tokens(replace(rows, batch_size=1))
            return self._largest(rows)
        self._check_tokens(rows)
        return rows

    @property
    def _vram(self) -> int:
        value = self.outline.config.vram
        return self.outline.machine.vram_total_bytes if value is None else parse_bytes(value)

    def _check_tokens(self, rows: Rows) -> None:
        """Raise `ConfigError` for rows whose tokens no placement can hold: the VRAM is smaller than a block's input and
        output, with two bytes a number. Tracing them could take hours.
        """
        config: Any = self.outline.model.config.get_text_config()
        most = min(_MOST_TOKENS, self._vram // (4 * (getattr(config, "hidden_size", None) or 1)))
        if rows.batch_size * max(rows.input_length, rows.target_length or 0) > most:
            raise ConfigError(
                f"a micro-batch of {rows} tokens is too large for {format_bytes(self._vram)} of VRAM, which holds the "
                f"input and the output of one block for {most:,} tokens: reduce batch_size, max_input_length or "
                "max_target_length"
            )

    def _largest(self, rows: Rows) -> Rows:
        """`rows` with the largest of `BATCH_SIZES` whose activations, recomputed, take at most half of the VRAM."""
        is_long = rows.input_length + (rows.target_length or 0) >= _LONG_ROW
        found = min(BATCH_SIZES)
        for size in reversed(BATCH_SIZES) if is_long else BATCH_SIZES:
            work = self.work(replace(rows, batch_size=size))
            if work is None:
                return replace(rows, batch_size=AUTO_BATCH_SIZE)
            fits = activation_bytes(work, recomputed=True) <= self._vram // 2
            found = size if fits else found
            if fits != is_long:
                break
        return replace(rows, batch_size=found)

    @property
    def _has_images(self) -> bool:
        is_text = self.request.is_text or self.request.packing or self.task != "causal"
        return not is_text and sees_images(self.outline.model.config)

    def work(self, rows: Rows) -> MicroBatch | None:
        """Trace a micro-batch; None if the model cannot run on the meta device."""
        size, length = rows.batch_size, rows.input_length
        config: Any = self.outline.model.config
        if self._has_images:
            return self._work_of_images(rows)
        labels = {"seq2seq": (size, rows.target_length or 0), "causal": (size, length), "classification": (size,)}
        shapes = {"input_ids": (size, length), "attention_mask": (size, length), "labels": labels[self.task]}
        batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}
        if is_speech(config):
            features = size, config.num_mel_bins, length
            dtype = self.outline.model.dtype
            batch = {"input_features": torch.empty(features, dtype=dtype, device="meta"), "labels": batch["labels"]}
        elif self.request.mask == "absent" or self.request.packing:
            del batch["attention_mask"]
        rows_within = None
        if self.request.packing:
            batch["position_ids"] = torch.empty_like(batch["input_ids"])
            rows_within = planned_boundaries(size, length, self.request.packed_row or length)
        loss_of = self._smoothed(batch) if self.request.label_smoothing else None
        mask = self.request.mask or ("unread" if self.task == "causal" else "padded")
        with known_padding(Padding.UNREAD if mask == "unread" else None), known_boundaries(rows_within):
            work = self.outline.work(Call((), batch, mask == "full"), rows, loss_of)
        evaluated = self.request.eval_batch_size or 0
        if work is None or evaluated <= size:
            return work
        return replace(work, evaluation=self.work(replace(rows, batch_size=evaluated)))

    def _work_of_images(self, rows: Rows) -> MicroBatch | None:
        wanted, config = self.request, cast(Any, self.outline.model.config)
        if wanted.with_images is not None and rows.input_length == wanted.max_input_length:
            call = wanted.with_images(rows.batch_size)
        else:
            assumed = assumed_batch(config, rows.batch_size, rows.input_length)
            if assumed is None:
                return None
            call = Call((), assumed)
        with known_padding(Padding.UNREAD):
            return largest_work(self.outline, call, wanted.eval_batch_size or 0)

    def _smoothed(self, batch: dict[str, torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        """The loss that the Trainer computes outside the model. Removes the labels from `batch`."""
        from transformers.trainer_pt_utils import LabelSmoother

        smoother, labels = LabelSmoother(epsilon=self.request.label_smoothing), batch.pop("labels")
        if self.task == "seq2seq":
            batch["decoder_input_ids"] = torch.empty_like(labels)
        return partial(smoother, labels=labels, shift_labels=self.task == "causal")

    def smaller(self, rows: Rows) -> Iterator[tuple[tuple[str, ...], MicroBatch]]:
        sizes = [size for size in BATCH_SIZES if size < rows.batch_size]
        others: list[tuple[tuple[str, ...], Rows]]
        others = [((f"batch_size={size}",), replace(rows, batch_size=size)) for size in sizes]
        half = rows.input_length // 2
        if half and not is_speech(self.outline.model.config) and self.request.with_images is None:
            one_row = () if rows.batch_size == 1 else ("batch_size=1",)
            shorter = replace(rows, batch_size=1, input_length=half)
            others.append(((*one_row, f"max_input_length={half}"), shorter))
        for options, other in others:
            if (work := self.work(other)) is not None:
                yield options, work


def _outline(
    source: ModelSource, config: OffloadConfig, machine: Hardware, request: PlanRequest, *, assumed: bool = False
) -> _TaskOutline:
    """The working dtype of `config` is decided."""
    held = 0 if source.model is None else held_in_ram(source.model)
    outline = outlined(source.on_meta, config, machine, assumed=assumed)
    return _TaskOutline(replace(outline, held_bytes=held), source.task, request)
