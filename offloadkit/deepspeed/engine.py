"""DeepSpeed's API for existing scripts: `initialize`, and an engine with DeepSpeed's methods over an `OffloadEngine`.

    import offloadkit as deepspeed

    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="ds_config.json", training_data=data)
    for inputs, labels in loader:
        loss = criterion(engine(inputs.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()

`config.py` maps the keys of the config.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from offloadkit.checkpoint.arrays import ArrayFile
from offloadkit.checkpoint.folder import atomic_write, explained_write_errors, readable_or_before, sync_name
from offloadkit.checkpoint.run import check_run
from offloadkit.checkpoint.values import as_json, random_states, set_random_states
from offloadkit.checkpoint.weights import WEIGHT_FILE, check_weights, load_weights
from offloadkit.deepspeed.config import DeepSpeedConfig, offload_config, read_deepspeed
from offloadkit.distributed import world
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, ModelError, RolledBackError
from offloadkit.facts.telemetry import StepRecord
from offloadkit.offload.layers import listed_groups
from offloadkit.optim.schedules import schedule_named

logger = logging.getLogger(__name__)

_NUM_WORKERS = 2
"""DataLoader workers for `training_data`: DeepSpeed's number for one GPU, since random states depend on it."""
_LATEST = "latest"
_OTHER_DTYPE = re.compile("dtype|scalar type|[Ii]nput type")
"""torch's errors about inputs whose dtype differs from the weights'."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Optimizer, DataLoader[Any] | None, Any]:
    """Replacement for `deepspeed.initialize`: train the model with an `OffloadEngine` and the options of a
    ds_config.json.

    Processes started by a launcher (torchrun, `deepspeed`) train together.

    Args:
        args: `deepspeed_config` is used if `config` is None; `local_rank` is set.
        optimizer: an AdamW, Adam or Lion, or a function that makes one from `model_parameters`. Overrides the config's
            optimizer. The engine takes over its param_groups and never calls its `step`.
        model_parameters: tensors or group dicts; all other parameters are frozen. None: all parameters.
        training_data: a dataset for a DataLoader of micro-batches, shuffled and sharded over the ranks.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer; stepped after each applied update.
            Overrides the config's schedule.
        distributed_port, dist_init_required: see `init_distributed`; with False it is not called.
        config, config_params: a path, or the content.

    Returns:
        The engine, its optimizer, the DataLoader or None, and the schedule or None.

    Raises:
        ConfigError: the config or the optimizer needs an unsupported feature; the message says what to do.
        ModelError, DoesNotFitError and others: see `OffloadEngine`.
    """
    if model is None:
        raise ConfigError("initialize needs a model: initialize(model=model, config=...)")
    for name, given in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if given is not None:
            raise ConfigError(f"initialize({name}=...): offloadkit shards only data, not models; use DeepSpeed")
    if dist_init_required is not False:
        init_distributed(distributed_port=distributed_port)
    local_rank = _local_rank()
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank
    read = read_deepspeed(_the_config(args, config, config_params), num_gpus=world.size())
    if read.auto:
        raise ConfigError(
            f"{read.where}: 'auto' in {', '.join(read.auto)}: a Trainer's arguments would set that, but there is no "
            "Trainer here. Write numbers, or train with OffloadTrainer(..., offload=OffloadConfig.from_deepspeed(...))"
        )
    if read.micro_batch_size is None:
        raise ConfigError(f"{read.where} needs train_batch_size, or train_micro_batch_size_per_gpu")
    if optimizer is None and not read.has_optimizer:
        raise ConfigError(
            f'{read.where}: there is no optimizer: write "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}}, '
            "or pass initialize(optimizer=...)"
        )
    options = offload_config(read)
    parameters = None if model_parameters is None else _groups(model_parameters)
    client = optimizer
    if client is not None and not isinstance(client, Optimizer):
        client = client(list(model.parameters()) if parameters is None else parameters)
    if client is not None:
        options = replace(options, optimizer=_kind(client))
        parameters = client.param_groups
    for group in parameters or () if client is None else ():
        read.check_decay(group.get("weight_decay", 0.0), "a group of model_parameters")
    if parameters is not None:
        _freeze_others(model, parameters)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    offload = OffloadEngine(model, options, param_groups=parameters, device=device)
    if client is not None:
        client.param_groups = offload.optimizer.param_groups  # the client's schedules write into these groups
        client._opt_called = True  # type: ignore[attr-defined]  # torch's schedules check this attribute
    if lr_scheduler is None and read.schedule is not None:
        try:
            lr_scheduler = schedule_named(read.schedule[0], offload.optimizer, read.schedule[1])
        except ConfigError as error:
            raise ConfigError(f"{read.where}, scheduler: {error}") from error
    elif callable(lr_scheduler):
        lr_scheduler = lr_scheduler(offload.optimizer)
    loader = None
    if training_data is not None:
        sampler: DistributedSampler[Any] | None = None
        if not isinstance(training_data, IterableDataset):
            sampler = DistributedSampler(training_data, num_replicas=world.size(), rank=world.rank())
        loader = DataLoader(
            training_data,
            batch_size=read.micro_batch_size,
            sampler=sampler,
            num_workers=_NUM_WORKERS,
            collate_fn=collate_fn,
            pin_memory=device.type == "cuda",
            drop_last=read.drop_last,
        )
    engine = DeepSpeedEngine(offload, read, lr_scheduler, loader, local_rank)
    return engine, offload.optimizer, loader, lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` (a flag for the script) and `--deepspeed_config PATH`, which `initialize` reads."""
    group = parser.add_argument_group("DeepSpeed", "a DeepSpeed config for offloadkit")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; it has no effect here")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="PATH", help="ds_config.json")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    **_others: Any,
) -> None:
    """Join the process group of the launcher's environment variables, or create a group of world size 1.

    Does nothing if torch.distributed is initialized already.

    Args:
        dist_backend: None: NCCL for GPUs, gloo for the CPU.
        distributed_port: port of rank 0, if MASTER_PORT is not set.
        timeout, init_method: see `torch.distributed.init_process_group`.
        auto_mpi_discovery, verbose: ignored.
    """
    if dist.is_initialized():
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(_local_rank())
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if init_method is None and int(os.environ.get("WORLD_SIZE") or 1) == 1:
        alone: Any = dist.HashStore  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone(), rank=0, world_size=1, timeout=timeout)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(backend, init_method=init_method, timeout=timeout)


class DeepSpeedEngine:
    """An `OffloadEngine` with DeepSpeed's methods. Other attributes are looked up on the module.

    Attributes:
        module: the model.
        offload: the `OffloadEngine` with the plan, telemetry, `profile` and `move`.
        optimizer: a `torch.optim.Optimizer`.
        lr_scheduler: the schedule, or None.
        training_dataloader: the DataLoader, or None.
        device: where the model computes.
        micro_steps: calls of `step`.
        global_samples: rows of all updates so far.
        skipped_steps: updates skipped because gradients overflowed. Without fp16 the newest update is counted at the
            next `step`.
    """

    def __init__(
        self, offload: OffloadEngine, read: DeepSpeedConfig, lr_scheduler: Any, loader: Any, local_rank: int
    ) -> None:
        self.offload, self.module, self.optimizer = offload, offload.module, offload.optimizer
        self.device, self.lr_scheduler, self.training_dataloader = offload.device, lr_scheduler, loader
        self.local_rank, self.global_rank, self.world_size = local_rank, world.rank(), world.size()
        self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._read = read
        self._boundary: bool | None = None
        self._ended_a_window = False
        self._num_backwards = 0
        self._schedule_ahead = 0
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(offload.config.working_dtype)
        self._casts, self._has_run = read.casts_inputs and self._dtype is not None, False
        seen = weakref.WeakMethod(self._saw)  # telemetry must not keep a dropped engine alive

        def saw(record: StepRecord) -> None:
            if (own := seen()) is not None:
                own(record)

        offload.telemetry.subscribe(saw)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        With `fp16.auto_cast`, floating-point inputs are cast to the working dtype and outputs to fp32. The same casts
        are enabled if the first micro-batch fails because its inputs are fp32.
        """
        if self._casts:
            return self._with_casts(args, kwargs)
        if self._has_run or self._dtype is None:
            return self.offload(*args, **kwargs)
        states = random_states()
        try:
            output = self.offload(*args, **kwargs)
        except RuntimeError as error:
            is_fp32 = any(getattr(each, "dtype", None) == torch.float32 for each in tree_leaves((args, kwargs)))
            if not is_fp32 or not _OTHER_DTYPE.search(str(error)):
                raise
            logger.warning(
                f"the inputs are fp32, but the model computes in {self._dtype}: they are cast, and outputs are cast "
                "back to fp32"
            )
            self._casts = True
            set_random_states(states)
            return self._with_casts(args, kwargs)
        self._has_run = True
        return output

    forward = __call__

    def _with_casts(self, args: Any, kwargs: Any) -> Any:
        def lower(each: Any) -> Any:
            is_float = isinstance(each, torch.Tensor) and each.is_floating_point()
            return each.to(self._dtype) if is_float else each

        def higher(each: Any) -> Any:
            return each.float() if isinstance(each, torch.Tensor) and each.dtype == self._dtype else each

        args, kwargs = tree_map(lower, (args, kwargs))
        return tree_map(higher, self.offload(*args, **kwargs))

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_others: Any
    ) -> torch.Tensor:
        """Run backward of one micro-batch. Gradients are the mean over micro-batches and ranks.

        Args:
            loss: a scalar.
            scale_wrt_gas: divide the loss by the number of micro-batches; False if the script does so.

        Returns:
            The detached loss, divided by the number of micro-batches if `scale_wrt_gas`.

        Raises:
            ConfigError: `retain_graph` is True.
            EngineStateError, OutOfVramError: see `OffloadEngine.backward`.
        """
        if retain_graph:
            raise ConfigError("backward(retain_graph=True): add the losses, and call backward once")
        if scale_wrt_gas:
            self.offload.backward(loss)
        else:
            self.offload.backward(loss / self.world_size, scale_by_accumulation=False)
        self._num_backwards += 1
        return loss.detach() / (self.gradient_accumulation_steps() if scale_wrt_gas else 1)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` ends the accumulation window."""
        if self._boundary is not None:
            return self._boundary
        if not self._read.managed_accumulation:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Let the script mark the ends of accumulation windows from now on."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count a micro-batch; at the end of a window start the update and step the schedule.

        Args:
            lr_kwargs: for the schedule's `step`.

        Raises:
            EngineStateError, NonFiniteGradientError, ...: see `OffloadEngine.step`. The `position` of a
                `RolledBackError` is the checkpoint's `client_state`.
        """
        is_boundary = self.is_gradient_accumulation_boundary()
        try:
            self.offload.step(boundary=is_boundary)
        except RolledBackError as back:
            back.position = self._go_on(back.position)
            raise
        self.micro_steps += 1
        self._ended_a_window = is_boundary
        if not is_boundary:
            return
        counted = self.gradient_accumulation_steps() if self._read.managed_accumulation else self._num_backwards
        self.global_samples += counted * self.train_micro_batch_size_per_gpu() * self.world_size
        self._num_backwards = 0
        if self._waits_for_the_norm and not math.isfinite(self.offload.grad_norm() or 0.0):
            self.skipped_steps += 1
            self._schedule_ahead += 1
        if self._schedule_ahead:  # the schedule counts only applied updates
            self._schedule_ahead -= 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        every = self._read.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}",
                flush=True,
            )

    @property
    def _waits_for_the_norm(self) -> bool:
        """Whether `step` waits for the gradient norm, as in fp16, where overflows are common, so that the schedule
        skips them. Otherwise, after a skipped update, the schedule runs one step ahead until the next update.
        """
        return self.offload.loss_scale is not None

    def _saw(self, record: StepRecord) -> None:
        if record.skipped and not self._waits_for_the_norm:
            self.skipped_steps += 1
            self._schedule_ahead += 1
        if self._read.wall_clock_breakdown and self.global_rank == 0:
            phases = " | ".join(f"{name}: {1000 * seconds:.2f}" for name, seconds in record.seconds.items())
            print(f"step={record.step} | time (ms) | {phases}", flush=True)

    def was_step_applied(self) -> bool:
        """Whether the newest `step` ended a window and its update was not skipped. Waits for the update's norm."""
        return self._ended_a_window and math.isfinite(self.offload.grad_norm() or 0.0)

    def zero_grad(self) -> None:
        """Do nothing, as with DeepSpeed's ZeRO: each update frees the gradients."""

    # ---- what scripts ask --------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Rows per update over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows per micro-batch."""
        assert self._read.micro_batch_size is not None
        return self._read.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per rank and update."""
        return self.offload.config.gradient_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Rows per update, rows per micro-batch, and micro-batches per rank and update."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def steps_per_print(self) -> int | None:
        """Updates between printed lines; None disables them."""
        return self._read.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether each update's phases are printed."""
        return self._read.wall_clock_breakdown

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self._read.dynamic_loss_scale is not None

    def zero_optimization(self) -> bool:
        """Whether the config has a stage above 0."""
        return self._read.stage > 0

    def zero_optimization_stage(self) -> int:
        """The stage, which has no effect on the plan."""
        return self._read.stage

    def fp16_enabled(self) -> bool:
        """Whether the config enables fp16."""
        return self._dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the config enables bf16."""
        return self._dtype == torch.bfloat16

    def gradient_clipping(self) -> float:
        """The maximum gradient norm; 0 disables clipping."""
        return self.offload.config.max_grad_norm or 0.0

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[tuple[float, float]]:
        """The betas of each group."""
        return [tuple(group["betas"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the newest update before clipping; None before the first update. Waits for the norm."""
        return self.offload.grad_norm()

    @property
    def global_steps(self) -> int:
        """Number of updates so far, including skipped ones."""
        return self.offload.num_updates

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # before `__init__` has set it
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither the engine nor its module ({type(self.module).__name__}) has {name!r}. "
                "docs/from-deepspeed.md lists the supported methods of DeepSpeed; engine.offload is the OffloadEngine "
                "behind it",
                name=name,
                obj=self,
            ) from error

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's evaluation mode."""
        return self.train(False)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write an offloadkit checkpoint to `save_dir`/`tag`. It can be loaded with any number of ranks.

        Args:
            tag: None: "global_step" and the number of updates.
            client_state: numbers, strings, lists, dicts and tensors, which `load_checkpoint` returns.
            save_latest: record the tag, so that `load_checkpoint` finds it without a tag.
            exclude_frozen_parameters: ignored; a checkpoint has only the frozen weights that the program wrote.

        Returns:
            True.

        Raises:
            ConfigError: `client_state` or the schedule's state holds an unsupported type.
            EngineStateError, OutputError: see `OffloadEngine.save_checkpoint`.
        """
        as_json(client_state or {}, "client_state")  # raises before anything is written
        folder = Path(save_dir).expanduser()
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        counts = {each: getattr(self, each) for each in ("micro_steps", "global_samples", "skipped_steps")}
        self.offload.save_checkpoint(
            folder / name, scheduler=self.lr_scheduler, position={"counts": counts, "client": client_state or {}}
        )
        if save_latest and self.global_rank == 0:
            with explained_write_errors(folder), atomic_write(folder / _LATEST) as file:
                file.write(name.encode())
                file.flush()
                os.fsync(file.fileno())
            sync_name(folder / _LATEST)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of `save_checkpoint`, with any placement and any number of ranks.

        Args:
            tag: None: the tag in the file "latest", or if that checkpoint is broken the one saved before it.
            load_module_strict: ignored; names of weights are always compared.
            load_optimizer_states: False is the same as `load_module_only`.
            load_lr_scheduler_states: False keeps the schedule's current state.
            load_module_only: load the weights only and start a new run.

        Returns:
            The checkpoint's folder and the saved `client_state`; (None, None) if the file "latest" is missing.

        Raises:
            ModelError, ConfigError: see `OffloadEngine.load_checkpoint`, or DeepSpeed wrote the checkpoint. Nothing is
                changed then.
        """
        folder = Path(load_dir).expanduser()
        is_latest = tag is None
        if tag is None:
            if not (folder / _LATEST).is_file():
                logger.warning(f"{folder} has no file {_LATEST!r}, so there is nothing to load: otherwise pass tag=")
                return None, None
            tag = (folder / _LATEST).read_text(encoding="utf-8").strip()
        found = folder / str(tag)
        if any(found.glob("*_model_states.pt")):
            raise ModelError(
                f"{found} is a DeepSpeed checkpoint: convert it to weights with its zero_to_fp32.py, load them into "
                "the model, and start over with them. The optimizer states cannot be used"
            )
        if is_latest:
            found = world.run_on_rank_0("looking for a checkpoint", partial(readable_or_before, found))
        if load_module_only or not load_optimizer_states:
            check_run(found, self.offload.ranks)
            with ArrayFile(found / WEIGHT_FILE) as weights:
                own = self.module.state_dict()
                check_weights(weights, own)
                load_weights(weights, own)
            return str(found), {}
        schedule = self.lr_scheduler if load_lr_scheduler_states else None
        rates = self.get_lr()
        position = self.offload.load_checkpoint(found, scheduler=schedule)
        if not load_lr_scheduler_states and self.lr_scheduler is not None:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return str(found), self._go_on(position)

    def _go_on(self, position: dict[str, Any]) -> dict[str, Any]:
        for name, count in position["counts"].items():
            setattr(self, name, count)
        self._schedule_ahead = self._num_backwards = 0
        self._ended_a_window = False
        client: dict[str, Any] = position["client"]
        return client

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's `state_dict()` in its working dtype for `torch.load`; returns True. A collective call.

        Raises:
            OutputError: the file cannot be written.
        """
        self.offload.synchronize()
        if self.global_rank == 0:
            weights = self.module.state_dict()
            if exclude_frozen_parameters:
                frozen = {name for name, each in self.module.named_parameters() if not each.requires_grad}
                weights = {name: each for name, each in weights.items() if name not in frozen}
            folder = Path(save_dir).expanduser()
            with explained_write_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(folder / save_filename) as file:
                    torch.save(weights, file)
        return True

    def destroy(self) -> None:
        """Close the `OffloadEngine`; the model keeps its trained weights."""
        self.offload.close()


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    by_args = getattr(args, "deepspeed_config", None)
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": by_args}
    found = {name: each for name, each in given.items() if each is not None}
    if len(found) != 1:
        have = f"there are {', '.join(found)}" if found else "there is none"
        raise ConfigError(
            f"initialize takes one config, but {have}: pass config='ds_config.json', or --deepspeed_config"
        )
    return next(iter(found.values()))


def _groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return listed_groups(listed) or []
    return [{"params": listed}]


def _kind(client: Optimizer) -> str:
    """offloadkit's name for a client's optimizer.

    Raises:
        ConfigError: it is not supported, its weight decay is coupled, or it has been stepped.
    """
    name = type(client).__name__
    kinds = {"AdamW": "adamw", "Adam": "adamw", "FusedAdam": "adamw", "DeepSpeedCPUAdam": "adamw"}
    kinds |= {"Lion": "lion", "FusedLion": "lion", "DeepSpeedCPULion": "lion"}
    if name not in kinds:
        raise ConfigError(
            f"initialize(optimizer={name}): offloadkit steps AdamW, Adam and Lion, in pieces. Pass torch.optim.AdamW, "
            "or use DeepSpeed"
        )
    for group in client.param_groups:
        decoupled = group.get("decoupled_weight_decay", name != "Adam") and getattr(client, "adam_w_mode", True)
        if kinds[name] == "adamw" and not decoupled and group.get("weight_decay"):
            raise ConfigError(
                f"initialize(optimizer={name}(weight_decay={group['weight_decay']})): {name} adds the decay to the "
                "gradient, but decay is decoupled here. Pass torch.optim.AdamW, or weight_decay=0"
            )
    if client.state:
        raise ConfigError(
            f"initialize(optimizer={name}): it has been stepped, and its moments would be lost. Pass a new one, and "
            "resume from a checkpoint with load_checkpoint"
        )
    return kinds[name]


def _freeze_others(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    listed = {parameter for group in groups for parameter in group["params"]}
    others = [name for name, each in model.named_parameters() if each.requires_grad and each not in listed]
    if not others:
        return
    logger.warning(f"{len(others)} parameters are in no group of the optimizer and are frozen: {others[0]}, ...")
    for name, parameter in model.named_parameters():
        if name in others:
            parameter.requires_grad_(False)


def _local_rank() -> int:
    """Without LOCAL_RANK, ranks are assigned to GPUs in turn."""
    return int(os.environ.get("LOCAL_RANK") or world.rank() % max(torch.cuda.device_count(), 1))
