"""Plans a module in memory: the work of its micro-batch, and the placement of its layers.

`Outline` is a module without memory, changed as in training. `plan_for` plans for an example micro-batch. `FirstWindow`
starts a run without an example with little in VRAM, and plans from the micro-batches of the first window, or from the
blocks and the VRAM of a second one.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offloadkit.device.process_memory import forget_peak
from offloadkit.device.state_file import unfit_for_states
from offloadkit.distributed.machine import measured_by, planning_ranks
from offloadkit.distributed.ranks import SOLO, Group, Ranks, Solo
from offloadkit.engine.block_calls import BlockCalls, with_at_least, with_the_rest
from offloadkit.engine.checks import used_elsewhere
from offloadkit.engine.python_time import blocks_called
from offloadkit.engine.tracing import Call, trace_blocks, trace_micro_batch
from offloadkit.facts.changes import caching_configs, changed, claim, configs_of, num_rotated
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware, with_disk
from offloadkit.offload.layers import FlatLayer, flat_layers, frozen_dtypes, hooks_of, plan_of, repeated_blocks
from offloadkit.offload.records import num_tokens
from offloadkit.planner import MicroBatch, Plan, Rows, Stage
from offloadkit.planner.plan import check_fits
from offloadkit.planner.words import misfit_message

logger = logging.getLogger(__name__)

_EMPTY_CELL = CellType()
_MEASURE = "measure"
"""In place of a plan: the next window is measured."""
_SHARES_OF_VRAM = (8, 4, 2, 1)
"""The run may start with 1/n of VRAM, activations left out, for the first of these n that fits."""


@dataclass(frozen=True)
class Outline:
    """A module on the meta device, ready to be traced over micro-batches of any shape and to be planned.

    The module's changes for training apply only while a micro-batch is traced.
    """

    model: Any
    layers: list[FlatLayer]
    machine: Hardware
    config: OffloadConfig
    assumed: bool = False
    """Whether the machine's rates are assumed, not measured."""
    held_bytes: int = 0
    """RAM of the model until the engine has taken over all of it."""
    num_ranks: int = 1
    """Ranks that share the layers. `machine` is one rank's."""
    has_set_forwards: bool = False
    """Whether other code, such as TRL, has set forwards on modules. Such code may compute more outside the model."""

    def work(
        self, batch: Any, rows: Rows | None = None, loss_of: Callable[[Any], torch.Tensor] | None = None
    ) -> MicroBatch | None:
        """Trace a micro-batch; None if the model cannot run on the meta device.

        `batch` and `loss_of` as for `trace_micro_batch`. `rows`: the shape; None: read from `input_ids` and `labels` if
        possible.
        """
        of_rows = rows or _rows(self.model, batch)
        return self._timed(lambda: trace_micro_batch(self.model, batch, loss_of), of_rows, self._num_positions(batch))

    def work_of_blocks(self, calls: Sequence[tuple[str, Call]], batch: Call, held_bytes: int) -> MicroBatch | None:
        """The work of a micro-batch from the calls of its blocks; None if a block cannot run on the meta device.

        Args:
            calls: `BlockCalls.kept`.
            held_bytes: as for `with_the_rest`.
        """
        tokens, rows = num_tokens(self.model, dict(batch.kwargs)) or 0, _rows(self.model, batch)
        limit = self._num_positions(batch)
        work = self._timed(lambda: trace_blocks(self.model, calls, tokens), rows, limit) if calls else None
        return None if work is None else with_the_rest(work, held_bytes)

    def _num_positions(self, batch: Any) -> int | None:
        is_packed = "position_ids" in Call.of(batch).kwargs
        return None if is_packed else num_rotated(getattr(self.model, "config", None))

    def _timed(
        self, trace: Callable[[], MicroBatch], rows: Rows | None, num_positions: int | None
    ) -> MicroBatch | None:
        """The traced work with Python's time; None if it cannot be traced."""
        with self._as_trained():
            try:
                with blocks_called(self.model) as blocks:
                    traced = trace()
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                logger.warning(f"activations and seconds of this model cannot be planned: {what}")
                return None
            device = torch.device(self.machine.device)
            is_here = device.type == "cuda" and torch.cuda.is_available() and not self.machine.assumed
            seconds = blocks.operation_seconds(traced, device) if is_here else None
        traced = replace(traced, rows=rows, num_positions=num_positions)
        if seconds is None:
            return traced
        launch = self.machine.launch_seconds
        launches = seconds.forward / launch, seconds.backward / launch
        return replace(traced, operation_launches=launches, python_spread=seconds.spread)

    @contextmanager
    def _as_trained(self) -> Iterator[None]:
        kernels = self.machine.device != "cpu"
        capability = self.machine.compute_capability if self.machine.assumed else None
        with ExitStack() as undo:
            undo.callback(changed(self.model, self.config, kernels=kernels, capability=capability))
            for caching in caching_configs(self.model):
                undo.callback(claim(caching, "use_cache", False))
            for routing in configs_of(self.model):  # blocks are traced one by one: nothing may leave them by hooks
                if getattr(routing, "output_router_logits", False):
                    undo.callback(claim(routing, "output_router_logits", False))
            yield

    def plan(self, work: MicroBatch | None, **changes: Any) -> Plan:
        config = replace(self.config, **changes)
        of: Any = {"work": work, "hardware": self.machine, "assumed": self.assumed, "num_ranks": self.num_ranks}
        made = plan_of(self.model, self.layers, config, **of)
        return replace(made, basis=replace(made.basis, held_bytes=self.held_bytes))


def outlined(
    model: Any,
    config: OffloadConfig,
    machine: Hardware,
    *,
    assumed: bool = False,
    param_groups: Sequence[dict[str, Any]] | None = None,
    apart: Collection[nn.Parameter] = (),
) -> Outline:
    """The outline of `model`, which is on the meta device. Its dtypes and its training mode stay changed."""
    layers = flat_layers(model, config, param_groups, apart)
    _take_working_dtypes(model, layers, config)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):  # the model's own recomputation cannot be traced
            module.gradient_checkpointing = False
    return Outline(model.train(), layers, machine, config, assumed)


def _take_working_dtypes(model: nn.Module, layers: list[FlatLayer], config: OffloadConfig) -> None:
    dtypes = {view.parameter: layer.dtype for layer in layers for view in layer.views}
    rest = [parameter for parameter in model.parameters() if parameter not in dtypes]
    for parameter, dtype in (dtypes | frozen_dtypes(model, rest, config.working_dtype)).items():
        parameter.data = parameter.data.to(dtype)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy on the meta device with the same modules and tied weights, without values and without foreign hooks."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for hooks in hooks_of(module):
            hooks.clear()
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    for module, its_copy in tuple(copies.items()):
        if _is_set_by_others(forward := vars(module).get("forward"), copies):
            its_copy.forward = _of_copies(forward, copies)
    return copied


def _is_set_by_others(forward: Any, modules: Collection[nn.Module]) -> bool:
    """Whether other code (as TRL does) has set this `forward`, which holds a method of one of the modules."""
    owners = (getattr(held, "__self__", None) for held in _held_by(forward))
    return any(isinstance(owner, nn.Module) and owner in modules for owner in owners)


def _held_by(function: Any) -> list[Any]:
    cells = getattr(getattr(function, "__func__", function), "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != _EMPTY_CELL]


def _of_copies(function: Any, copies: dict[Any, Any]) -> Any:
    """A function or method that holds and calls the copies of modules instead of the modules. Anything else is
    returned as it is.

    `copies`: the copy of each module. Functions are added, because a function may hold itself.
    """
    if isinstance(function, nn.Module):
        return copies.get(function, function)
    if isinstance(function, MethodType):
        owner: Any = function.__self__
        return MethodType(_of_copies(function.__func__, copies), _of_copies(owner, copies))
    if not isinstance(function, FunctionType) or not _is_set_by_others(function, copies):
        return function
    if function in copies:
        return copies[function]
    held = function.__closure__ or ()
    cells = tuple(CellType() for _ in held)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    copies[function] = made
    for cell, own in zip(cells, held, strict=True):
        if own != _EMPTY_CELL:
            cell.cell_contents = _of_copies(own.cell_contents, copies)
    return made


def needs_plan(config: OffloadConfig, device: torch.device) -> bool:
    """Whether a plan has choices or checks to make: placements on a GPU, or a budget."""
    return config.vram is not None or config.ram is not None or (device.type != "cpu" and config.placement is None)


def plan_for(
    model: nn.Module,
    config: OffloadConfig,
    device: torch.device,
    example: Any,
    *,
    rows_option: str = "",
    evaluation_rows: int = 0,
    ranks: Solo | Group | None = None,
    param_groups: Sequence[dict[str, Any]] | None = None,
) -> Plan | None:
    """The plan of a module in memory for micro-batches like `example`. The module is not changed.

    Several ranks call it together, and all get the plan of the rank whose example has the most elements.

    Args:
        example: as for `trace_micro_batch`.
        rows_option: the user's name for the number of rows. A plan that does not fit proposes fewer rows.
        evaluation_rows: batch size of evaluation, if larger than training's.
        ranks: the ranks that train together; None: the ranks of torch.distributed.
        param_groups: as for `flat_layers`.

    Returns:
        None if the module or this example cannot run on the meta device.

    Raises:
        ModelError, ConfigError: as `OffloadEngine`.
    """
    if ranks is None:
        with planning_ranks(device) as found:
            options: Any = {"rows_option": rows_option, "evaluation_rows": evaluation_rows}
            options["param_groups"] = param_groups
            return plan_for(model, config, device, example, **options, ranks=found)
    outline = _outline_of_copy(model, config, device, ranks, param_groups)
    make = partial(_plan_for, outline, example, rows_option, evaluation_rows)
    made: Plan | None = _of_the_largest(ranks, _num_elements(example), make)
    return made


def _of_the_largest(ranks: Ranks, number: int, make: Callable[[], Any]) -> Any:
    """Broadcast `make()` from the rank with the largest `number`, the first in a tie."""
    return ranks.broadcast_from(make, by=int(ranks.agree(np.array([number]))[:, 0].argmax()))


def _plan_for(outline: Outline | None, example: Any, rows_option: str, evaluation_rows: int) -> Plan | None:
    work = None if outline is None else largest_work(outline, example, evaluation_rows)
    if outline is None or work is None:
        return None
    made = outline.plan(work)
    if made.fits or work.rows is None or not rows_option:
        return made
    numbers = [1 << power for power in reversed(range((work.rows.batch_size - 1).bit_length()))]
    calls = ((number, _with_rows(example, number)) for number in numbers)
    fewer = (((f"{rows_option}={number}",), outline.work(call)) for number, call in calls if call is not None)
    smaller = tuple((options, replace(less, evaluation=work.evaluation)) for options, less in fewer if less is not None)
    return replace(made, basis=replace(made.basis, smaller=smaller))


def largest_work(outline: Outline, example: Any, evaluation_rows: int) -> MicroBatch | None:
    """The work of the example, or of its alternative that needs the most VRAM."""
    call = Call.of(example)
    found = [(work, each) for each in (call, *call.alternatives) if (work := outline.work(each)) is not None]
    if not found:
        return None
    work, largest = max(found, key=lambda each: each[0].vram_bytes)
    evaluated = _with_rows(largest, evaluation_rows) if evaluation_rows > _num_rows(largest) else None
    return work if evaluated is None else replace(work, evaluation=outline.work(evaluated))


def _num_rows(example: Any) -> int:
    """The first size of `input_ids`, else of the first tensor; 0 without a tensor."""
    call = Call.of(example)
    found = [call.kwargs.get("input_ids"), *call.tensors()]
    return next((each.shape[0] for each in found if isinstance(each, torch.Tensor) and each.dim()), 0)


def _num_elements(example: Any) -> int:
    return sum(_sizes(Call.of(example)).values())


def _sizes(call: Call) -> dict[str, int]:
    """Numbers of integers and of floating-point numbers."""
    tensors = call.tensors()
    floats = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
    return {"integers": sum(tensor.numel() for tensor in tensors) - floats, "floats": floats}


def _with_rows(example: Any, number: int) -> Call | None:
    """The example with another number of rows, which repeat its own.

    Patches of the images of all rows, as in Qwen2.5-VL's `pixel_values`, have no dimension of rows: such an example is
    repeated as a whole.

    Returns:
        None for fewer rows than such an example has.
    """
    rows, call = _num_rows(example), Call.of(example).without_memory()
    is_packed = any(each.is_floating_point() and each.dim() and len(each) not in (1, rows) for each in call.tensors())
    if is_packed and number < rows:
        return None
    times = -(-number // rows)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or not (is_packed or len(tensor) == rows):
            return tensor
        repeated = tensor.repeat(times, *[1] * (tensor.dim() - 1))
        return repeated if is_packed else repeated[:number]

    args, kwargs = tree_map_only(torch.Tensor, resized, (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)


def _outline_of_copy(
    model: nn.Module,
    config: OffloadConfig,
    device: torch.device,
    ranks: Solo | Group,
    param_groups: Sequence[dict[str, Any]] | None,
) -> Outline | None:
    """The outline of a copy of `model`; None if it cannot be copied. Several ranks measure the machine together."""
    machine = with_room_of(model, measured_by(ranks, device, config.states_folder))
    try:
        copied = without_memory(model)
    except Exception as error:
        logger.warning(f"this model cannot be planned, since it cannot be copied: {type(error).__name__}: {error}")
        return None
    copies = dict(zip(model.parameters(), copied.parameters(), strict=True))
    groups = param_groups and [
        {**group, "params": [copies[each] for each in group["params"] if each in copies]} for group in param_groups
    ]
    apart = {copies[each] for each in used_elsewhere(model)}
    outline = outlined(copied, config, machine, param_groups=groups, apart=apart)
    modules = set(model.modules())
    has_set_forwards = any(_is_set_by_others(vars(module).get("forward"), modules) for module in modules)
    return replace(outline, held_bytes=held_in_ram(model), num_ranks=ranks.size, has_set_forwards=has_set_forwards)


def held_in_ram(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu")


def with_room_of(model: nn.Module, machine: Hardware) -> Hardware:
    """The machine with the model's memory counted as free, because the engine takes over its weights one by one. On a
    GPU this is so in VRAM alone: all RAM of the plan is pinned before the first weights are taken over.

    Other VRAM of the process (such as a reference model) counts as needed, like the CUDA context.
    """
    on_cpu = machine.device == "cpu"
    tensors = (*model.parameters(), *model.buffers())
    in_vram = sum(tensor.nbytes for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    others = 0
    if not on_cpu and torch.cuda.is_available():
        others = max(0, torch.cuda.memory_allocated(machine.device) - in_vram)
    in_ram = machine.num_ranks * held_in_ram(model) if on_cpu else 0
    return replace(
        machine,
        vram_context_bytes=machine.vram_context_bytes + others,
        vram_free_bytes=machine.vram_free_bytes + in_vram,
        ram_available_bytes=machine.ram_available_bytes + in_ram,
    )


def _rows(model: Any, batch: Any) -> Rows | None:
    named = Call.of(batch).kwargs
    ids, labels = named.get("input_ids"), named.get("labels")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    has_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    target = labels.shape[1] if has_decoder and isinstance(labels, torch.Tensor) and labels.dim() == 2 else None
    return Rows(ids.shape[0], ids.shape[1], target)


class FirstWindow:
    """The start of a run whose micro-batches are still unknown.

    Attributes:
        plan: the plan to start with: about the least VRAM that RAM and disk allow, with every block recomputed.
        is_done: nothing is left to plan. If the model does not run on the meta device, or has set forwards, there is a
            second window, whose VRAM is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[FlatLayer],
        config: OffloadConfig,
        device: torch.device,
        evaluation_rows: int = 0,
        ranks: Solo | Group = SOLO,
        param_groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """`model` still has its weights; `layers` are its flat layers. `evaluation_rows`, `param_groups` as for
        `plan_for`.
        """
        self._evaluation_rows, self._ranks = evaluation_rows, ranks
        self._outline = _outline_of_copy(model, config, device, ranks, param_groups)
        self._examples: dict[str, Call] = {}
        self._most: dict[str, int] = {}
        self._model, self._device, self.is_done = model, device, False
        self._calls: BlockCalls | None = None
        self._called_elements = -1
        if self._outline is None:
            self.plan = plan_of(model, layers, config)
        else:
            self.plan = ranks.broadcast_from(self._lean)

    @property
    def is_settled(self) -> bool:
        """Whether the first window leaves nothing to choose or to check."""
        return self._outline is None or (not self._is_on_cpu and bool(self._outline.config.placement))

    @property
    def _is_on_cpu(self) -> bool:
        """Without a GPU nothing is chosen, and a budget is checked by the plan alone, because no allocator limits
        it.
        """
        return self._outline is not None and self._outline.machine.device == "cpu"

    def record_micro_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a micro-batch of the first window. Only the one with the most integers, such as tokens, and the one
        with the most other numbers, such as pixels, are kept.
        """
        call, light = Call(args, kwargs), None
        for kind, number in _sizes(call).items():
            if number > self._most.get(kind, 0) or not self._examples:
                light = light or call.without_memory()
                self._examples[kind], self._most[kind] = light, number
        if self._calls is not None and sum(_sizes(call).values()) > self._called_elements:
            self._called_elements = sum(_sizes(call).values())
            self._calls.keep()

    def plan_now(self) -> Plan | None:
        """The plan for the recorded micro-batches; None if it does not fit or the model cannot be traced. All ranks
        call it.

        Raises:
            DoesNotFitError: there is no GPU, and the plan does not fit.
        """
        made: Plan | str | None = _of_the_largest(self._ranks, sum(self._most.values()), self._plan_now)
        if isinstance(made, str):
            self._calls = BlockCalls(self._model)
            forget_peak(self._device)
            return None
        self.is_done = True
        self.close()
        if made is not None:
            check_fits(proposing_disk(made))
        return made

    def close(self) -> None:
        """Take the hooks of a measured window off the model."""
        if self._calls is not None:
            self._calls.close()

    def _plan_now(self) -> Plan | str | None:
        if self._outline is None or not self._examples:
            return None
        first, *others = {id(call): call for call in self._examples.values()}.values()
        largest, is_corrected, work = replace(first, alternatives=tuple(others)), self._outline.has_set_forwards, None
        may_measure = self._calls is None and not self._is_on_cpu and any(repeated_blocks(self._outline.model))
        if is_corrected and may_measure:
            return _MEASURE
        if self._calls is None or is_corrected:
            work = largest_work(self._outline, largest, self._evaluation_rows)
        if self._calls is not None:
            held, calls = self._held_bytes(), self._calls.kept
            work = with_at_least(work, held) if work else self._outline.work_of_blocks(calls, first, held)
        elif work is None and may_measure:
            return _MEASURE
        made = None if work is None else self._outline.plan(work)
        if made is not None and not made.fits and not self._is_on_cpu:
            logger.warning(
                f"training goes on as it began: the plan for its micro-batches {misfit_message(made)}\n{made.explain()}"
            )
            return None
        return made

    def _held_bytes(self) -> int:
        """VRAM of the activations of the second window: its peak without all that the plan places."""
        placed = sum(size for name, size in self.plan.tiers["vram"].items() if name not in ("framework", "activations"))
        return max(0, peak_allocated_bytes(self._device) - placed)

    def _lean(self) -> Plan:
        outline = self._outline
        assert outline is not None
        config, machine = outline.config, outline.machine
        whole = outline.plan(None)
        if self.is_settled or self._is_on_cpu:
            return whole
        blocks = [Stage(name) for name, _ in repeated_blocks(outline.model)]
        work, made = MicroBatch((Stage(), *blocks, Stage()), 0), whole
        for share in _SHARES_OF_VRAM:
            vram = whole.budgets["vram"] // share
            made = outline.plan(work, vram=vram, activation_checkpointing=bool(blocks))
            if made.fits:
                break
        # Undo the budget, the recomputation and the made-up work; everything else is this run's.
        basis = replace(made.basis, config=config, hardware=machine, work=None)
        unknown: dict[str, Any] = {"seconds": None, "large_gpu_seconds": None, "num_tokens": None}
        return replace(made, basis=basis, budgets=whole.budgets, **unknown)


def peak_allocated_bytes(device: torch.device) -> int:
    """Highest bytes that torch allocated on a GPU since the last `forget_peak`; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def proposing_disk(plan: Plan) -> Plan:
    """Give a plan that does not fit a disk to propose (`Basis.with_disk`): the disk of the temporary or current
    folder.
    """
    machine = plan.basis.hardware
    if plan.fits or machine is None or machine.device == "cpu" or plan.basis.config.disk:
        return plan
    folder = next((name for name in (tempfile.gettempdir(), ".") if not unfit_for_states(Path(name))), None)
    return plan if folder is None else replace(plan, basis=replace(plan.basis, with_disk=with_disk(machine, folder)))
