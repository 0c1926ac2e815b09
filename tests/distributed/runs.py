"""Functions run by the ranks: each rank trains the same model on its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from offloadkit.distributed import machine
from offloadkit.distributed import ranks as ranks_module
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.offload.shards import WeightGathers
from offloadkit.planner import placed as placed_at
from tests.models import TinyLM, tokens
from tests.offload.test_frozen import Adapted
from tests.simulated_streams import Simulation


class Choosy(TinyLM):
    """A `TinyLM` with a parameter and a block that only some micro-batches use, and a buffer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(65))
        self.register_buffer("offset", torch.rand(65))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.offset.to(x.dtype)
        if int(tokens[0, 0]) % 2:
            x = x * self.scale
        for block in self.blocks[:1] if int(tokens[0, 1]) % 3 == 0 else self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flip(-1).flatten())


RESIDENT = Placement(states="vram", gradients="vram", step="gpu")
CPU_STEP = Placement()
GPU_STEP = Placement(step="gpu")
LATE_GRADIENTS = Placement(gradients="vram", step="cpu")
GPU_ALONE = Placement(gradients="vram", step="gpu")
STREAMED = Placement(weights="ram")
STREAMED_TO_GPU = Placement(weights="ram", gradients="vram", activations="cheap", step="gpu")
ON_DISK = Placement(states="disk")
LEAST = Placement(weights="ram", states="disk", activations="offload")

STEPS = 3


def model(
    rank: int = 0,
    *,
    frozen: bool = False,
    adapters: bool = False,
    conv1d: bool = False,
    spare: bool = False,
    **options: Any,
) -> Choosy:
    """Weights differ between ranks at first; the engine gives all ranks those from rank 0.

    Args:
        frozen: freezes the first block.
        adapters: freezes everything but adapters in the blocks, the norm and the scale.
        conv1d: makes the blocks' first layers transformers' Conv1D.
        spare: adds a matrix to each block that forward does not use. Two ranks then cut the block's second matrix.
    """
    torch.manual_seed(rank)
    made = Choosy(**{"tied": True, "depth": 2, "hidden": 1100, **options})
    for block in made.blocks if conv1d else ():
        block.up = Conv1D(block.up.out_features, block.up.in_features)
    for block in made.blocks if spare else ():
        block.spare = nn.Linear(65, 1100, bias=False)
    if frozen:
        for parameter in made.blocks[0].parameters():
            parameter.requires_grad_(False)
    if adapters:
        made.requires_grad_(False)
        made.norm.requires_grad_(True)
        made.scale.requires_grad_(True)
        for block in made.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)  # type: ignore[assignment]
    return made


def groups_of(made: nn.Module) -> list[dict[str, Any]]:
    vectors = [p for p in made.parameters() if p.ndim < 2]
    matrices = [p for p in made.parameters() if p.ndim >= 2]
    return [{"params": matrices, "lr": 3e-3, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-2, "betas": (0.8, 0.9)}]


def train(
    micro_batches: int = 1,
    *,
    steps: int = STEPS,
    placement: Placement = CPU_STEP,
    placements: list[Placement] | None = None,
    groups: bool = False,
    model_options: dict[str, Any] | None = None,
    nan_in: int | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    first_step: int = 0,
    late: int | None = None,
    move_to: Placement | None = None,
    halves: bool = False,
    clamps: bool = False,
    seeds: bool = False,
    hosts: bool = False,
    simulate_ranks: int | None = None,
    loss_factor: float = 1.0,
    device: str = "cpu",
    **config: Any,
) -> dict[str, Any]:
    """Train `steps` steps of `micro_batches` on each rank; the global micro-batch is k * ranks + rank.

    Args:
        placements: by rank, in place of `placement`.
        nan_in: the global micro-batch whose loss is NaN.
        resume, save: folders of checkpoints.
        late: seed of streams that work late; rank r uses seed + r.
        move_to: the placement after the first step.
        loss_factor: multiplies every loss.
        simulate_ranks: sum gradients in the order of so many ranks with `exchange="step"`.
        clamps: whether a block writes its weights in its forward.
        seeds: whether to seed torch before every global micro-batch.
        hosts: whether each rank counts as a host.
        halves: whether all ranks halve their weights after the first step.
        device: "cuda": the current device.

    Returns:
        "weights" and "buffers" by name, "states" by name and array with the index of the first element, "norms",
        "num_updates", and "log", the collective operations with their bytes.
    """
    streams = nullcontext() if late is None else Simulation(seed=late + dist.get_rank(), longest=1e-3).running()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    made, log = model(rank, **(model_options or {})), list[tuple[str, int]]()
    config = {"learning_rate": 1e-2, "max_grad_norm": 0.5, **config}
    placed = placements[rank] if placements else placement
    options = OffloadConfig(placement=placed, gradient_accumulation=micro_batches, **config)
    telemetry = Telemetry()
    where = hardware.indexed(torch.device(device))
    with (
        streams,
        pytest.MonkeyPatch.context() as patch,
        patched_hosts() if hosts and size > 1 else nullcontext(),
        pytest.warns(RuntimeWarning) if nan_in is not None else nullcontext(),
        OffloadEngine(
            made, options, device=where, telemetry=telemetry, param_groups=groups_of(made) if groups else None
        ) as engine,
    ):
        for name in ("exchange", "gather", "exchange_parts"):
            patch.setattr(Group, name, logged(name, getattr(Group, name), log))
        if late is not None:
            patch.setattr(WeightGathers, "begin", looking_ahead(WeightGathers.begin))
        if clamps:
            made.blocks[0].register_forward_pre_hook(clamp)
        if resume is not None:
            engine.load_checkpoint(resume)
        per_step = micro_batches * size
        batches = tokens((first_step + steps) * per_step, str(where))
        for step in range(first_step, first_step + steps):
            shares = Shares(engine)
            for k in range(micro_batches):
                at = step * per_step + k * size + rank
                if simulate_ranks is not None:
                    of_rank, of_micro_batch = divmod(k, micro_batches // simulate_ranks)
                    at = step * per_step + of_micro_batch * simulate_ranks + of_rank
                if seeds:
                    torch.manual_seed(at)
                loss = engine(batches[at])
                engine.backward(loss * (float("nan") if at == nan_in else loss_factor))
                if simulate_ranks is not None and (k + 1) % (micro_batches // simulate_ranks) == 0:
                    shares.end_of_rank(last=k + 1 == micro_batches)
                engine.step()
            if step == 0 and halves:
                with torch.no_grad():
                    for parameter in made.parameters():
                        parameter.mul_(0.5)
            if step == 0 and move_to is not None:
                engine.move(placed_at(engine.plan, [move_to] * len(engine.plan.layers)))
        engine.synchronize()
        if save is not None:
            engine.save_checkpoint(save)
        numbers = engine.snapshot()
        states = {
            f"{name}.{array}": (numbers.ranges[name][array][0], values.cpu().clone().reshape(-1))
            for name, arrays in numbers.states.items()
            for array, values in arrays.items()
        }
        return {
            "weights": {name: parameter.detach().cpu().clone() for name, parameter in made.named_parameters()},
            "buffers": {name: buffer.cpu().clone() for name, buffer in made.named_buffers()},
            "states": states,
            "norms": [record.grad_norm for record in telemetry.records],
            "num_updates": engine.num_updates,
            "log": log,
        }


def train_by_graphs(device: str = "cpu", **options: Any) -> tuple[dict[str, Any], int]:
    """(what `train` returns, number of captured graphs)."""
    captured, own = list[Any](), BlockGraphs.capture

    def capture(self: BlockGraphs, *args: Any) -> Any:
        captured.append(own(self, *args))
        return captured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts_graphs, "device_types", {device})
        patch.setattr(BlockGraphs, "capture", capture)
        return train(device=device, **options), len(captured)


@contextmanager
def patched_hosts() -> Iterator[None]:
    """While it is open, every rank reports a different host."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ranks_module, machine):
            patch.setattr(module, "host", dist.get_rank)
        yield


@torch.no_grad()
def clamp(block: nn.Module, args: Any) -> None:
    for parameter in block.parameters():
        parameter.clamp_(-0.03, 0.03)


class Shares:
    """Sums a window's micro-batches rank by rank, for one rank that has all micro-batches and sums in VRAM."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._layers = engine.placed.gradients.layers
        self._sums: dict[tuple[int, int], torch.Tensor] = {}

    def end_of_rank(self, *, last: bool) -> None:
        """Put a simulated rank's sum aside; after the last rank, the sum over all ranks replaces the gradients."""
        for at, layer in enumerate(self._layers):
            assert layer.accumulated is not None
            for index in layer.window:
                own = layer.accumulated[layer.layer.views[index].elements]
                self._sums[at, index] = self._sums[at, index] + own if (at, index) in self._sums else own.clone()
            layer.window.clear()
        for (at, index), total in self._sums.items() if last else ():
            layer = self._layers[at]
            assert layer.accumulated is not None
            layer.accumulated[layer.layer.views[index].elements] = total
            layer.window.add(index)


def looking_ahead(begin: Callable[..., None]) -> Callable[..., None]:
    """`WeightGathers.begin` with early gathers, as on a GPU."""

    def run(self: WeightGathers, coming: Any) -> None:
        self.looks_ahead = True
        begin(self, coming)

    return run


def logged(name: str, operation: Callable[..., None], log: list[tuple[str, int]]) -> Callable[..., None]:
    def run(self: Group, *args: Any) -> None:
        operation(self, *args)  # it may wait for an operation of another thread
        log.append((name, getattr(args[-2], "nbytes", 0)))  # parts differ between ranks

    return run


def joined(runs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The states of all ranks, concatenated by array."""
    found: dict[str, torch.Tensor] = {}
    for name in runs[0]["states"]:
        if name.endswith(".step"):
            found[name] = runs[0]["states"][name][1]
            continue
        parts = [run["states"][name] for run in runs if run["states"][name][1].numel()]
        parts.sort(key=lambda part: part[0])
        found[name] = torch.cat([values for _, values in parts]) if parts else torch.empty(0)
    return found


def traced(folder: Path) -> tuple[list[dict[str, int]], list[str]]:
    """Write a trace of two steps to `folder`; returns the bytes received in each step and the layers' names."""
    telemetry = Telemetry()
    made, config = TinyLM(tied=False), OffloadConfig(working_dtype="bf16")
    del made.unused
    with OffloadEngine(made, config, device="cpu", telemetry=telemetry) as engine:
        engine.profile(steps=2, path=folder / "trace.json")
        for batch in tokens(5):
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
        return [record.received for record in telemetry.records][1:3], [layer.name for layer in engine.plan.layers]
