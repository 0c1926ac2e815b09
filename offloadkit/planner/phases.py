"""Peak memory of each phase of a run.

*slabs* are the RAM of the flat layers; *framework* is Python and its libraries; *held* are activations. torch keeps
reserved VRAM, so phases after training take at least as much. Without a GPU, a plan's VRAM is in RAM, and activations
are freed after each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from offloadkit.facts.config import Placement
from offloadkit.facts.units import format_bytes
from offloadkit.planner.layout import GRAPHS, LayerShape, of_one
from offloadkit.planner.work import MicroBatch, Stage

PhaseName = Literal["reading", "first step", "training", "evaluation", "generation", "saving", "closing", "resuming"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
NEEDED = tuple(name for name in PHASES if name != "generation")
"""The phases that a plan must fit. Most runs do not generate."""

_LATE_FRAMEWORK_BYTES = 700 << 20
"""RAM that the framework takes with the first step on a GPU: cuBLAS, kernels, Triton. Before the first step the
framework has at most 1.0 GiB: in benchmarks/results.csv (w6, w6-48) reading, with its staged layer, was not the peak.
If rates or blocks were measured just before, these bytes are taken already while reading.
"""
READ_AHEAD_BYTES = 640 << 20
"""Most bytes of parameters that are read or initialised at once on a GPU, unless a single layer has more: less than the
framework takes later.
"""
_TOLERANCE, _TOLERATED_BYTES = 0.05, 1 << 29
"""A measured peak is reported if it differs from the plan by more than both this fraction and this number of bytes."""


@dataclass(frozen=True)
class Phase:
    name: PhaseName
    vram: int
    """Without a GPU, this memory is part of `ram`."""
    ram: int


def phases_of(
    layers: Sequence[LayerShape],
    placements: Sequence[Placement],
    accumulation: int,
    tiers: Mapping[str, Mapping[str, int]],
    work: MicroBatch | None,
    *,
    on_cpu: bool,
    held_bytes: int = 0,
    generating: int | None = None,
) -> tuple[Phase, ...]:
    """The phases in time order.

    Args:
        tiers: the training step's bytes (`layout.run_bytes`), with the same omissions.
        held_bytes: RAM of a model in memory; 0: weights are read or initialised.
        generating: VRAM of keys, values and of weights that stream in training; None: keys and values of the longest
            rows of `work`.

    - Reading: all slabs are populated, then each layer is staged, in the working dtype, and copied to its place
      (`PlacedLayers.read`). On a GPU several layers are staged at once, in the RAM that the framework takes later.
      Gradient buckets are allocated in the first backward. A model in memory is beside all of it; on the CPU, its
      layers are freed one by one.
    - First step and training: the bytes of `tiers`. All buffers are allocated in the first step.
    - Evaluation: no gradients, and one stage's activations at a time. Its micro-batch may have more rows.
    - Generation: as evaluation, with keys and values of all blocks.
    - Saving: tensors are written from their places (`checkpoint.arrays`), in pieces too small to count.
    - Closing: states are freed first. Weights in RAM stay in place; if there are any, all other weights move to RAM.
    - Resuming: as reading. States are read in pieces that are smaller than a staged layer.
    """
    ram, vram = dict(tiers["ram"]), dict(tiers["vram"])
    framework, held_in_ram, held = ram.pop("framework", 0), ram.pop("activations", 0), vram.pop("activations", 0)
    held += vram.pop(GRAPHS, 0)
    slabs, lasting = sum(ram.values()), sum(vram.values())
    sizes, codes = of_one(layers, placements, accumulation)
    buckets = int(sizes.buffers(codes)["vram"]["gradients"].item())
    frozen = [each for each in zip(layers, placements, strict=True) if not each[0].kind.is_trained]
    in_layers = sum(layer.weight_bytes() for layer, where in frozen if where.weights == "vram")
    moved = int(sizes.moved(codes, vram.get("frozen weights", 0) - in_layers).item())
    if on_cpu:
        built, forward, full = lasting - buckets, forward_bytes(work), framework + slabs + held_in_ram
        generates = forward + (cache_bytes(work) if generating is None else generating)
        read, taken = (framework + slabs + max(built, _read_beside(layers, placements, own)) for own in (0, held_bytes))
        found: dict[PhaseName, tuple[Any, Any]] = {
            "reading": (built, taken),
            "first step": (lasting + held, full + lasting + held),
            "training": (lasting + held, full + lasting + held),
            "evaluation": (lasting + forward, full + lasting + forward),
            "generation": (lasting + generates, full + lasting + generates),
            "saving": (lasting, full + lasting),
            "closing": (lasting, full + lasting),
            "resuming": (built, read),
        }
    else:
        on_gpu = PhasesOnGpu(layers, work, framework, reads=not held_bytes, generating=generating)
        found = on_gpu.of(slabs, lasting, buckets, held=held, held_in_ram=held_in_ram, moved=moved)
        found["reading"] = found["reading"][0], found["reading"][1] + held_bytes
    return tuple(Phase(name, *map(int, found[name])) for name in PHASES)


class PhasesOnGpu:
    """Peak VRAM and RAM of each phase on a GPU, for numbers or arrays of bytes. `phases_of` describes the phases."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        work: MicroBatch | None,
        framework: int,
        *,
        reads: bool = True,
        generating: int | None = None,
    ) -> None:
        late = min(framework, _LATE_FRAMEWORK_BYTES)
        together = min(late, READ_AHEAD_BYTES, sum(layer.weight_bytes() for layer in layers)) if reads else 0
        largest = max((layer.weight_bytes() for layer in layers), default=0)
        self._framework, self._reading = framework, framework - late + max(largest, together)
        self._forward, self._cache = forward_bytes(work), cache_bytes(work) if generating is None else generating

    def of(
        self, slabs: Any, lasting: Any, buckets: Any, *, held: Any, held_in_ram: Any, moved: Any, brought: Any = 0
    ) -> dict[PhaseName, tuple[Any, Any]]:
        """
        Args:
            slabs: RAM of layers and buffers.
            lasting: VRAM except activations; of it, `buckets` hold gradients.
            held, held_in_ram: activations, and in VRAM the graphs of blocks.
            moved: RAM of the model when its engine is closed.
            brought: VRAM of streamed weights in generation, in addition to `generating`.
        """
        built, reserved, full = lasting - buckets, lasting + held, self._framework + slabs + held_in_ram
        forward = built + self._forward
        return {
            "reading": (built, slabs + self._reading),
            "first step": (reserved, full),
            "training": (reserved, full),
            "evaluation": (np.maximum(reserved, forward), full),
            "generation": (np.maximum(reserved, forward + self._cache + brought), full),
            "saving": (reserved, full),
            "closing": (reserved, np.maximum(full, self._framework + moved)),
            "resuming": (built, slabs + self._reading),
        }


def _read_beside(layers: Sequence[LayerShape], placements: Sequence[Placement], held_bytes: int) -> int:
    """Without a GPU: peak bytes in addition to the slabs while layers are read, or taken over from a model in memory,
    one after the other. `held_bytes`: of that model, which each layer frees its share of.
    """
    most = read = taken = 0
    numel = sum(layer.numel for layer in layers)
    for layer, where in zip(layers, placements, strict=True):
        read += layer.weight_bytes() if where.weights == "vram" else 0
        read += sum(layer.state_bytes().values()) if where.states == "vram" else 0
        most = max(most, read + (held_bytes * (numel - taken) // numel if held_bytes else layer.weight_bytes()))
        taken += layer.numel
    return most


def forward_bytes(work: MicroBatch | None) -> int:
    """Peak activations of evaluation's forward: one stage's at a time."""
    stages = (work.evaluation or work).stages if work else ()
    return max((stage.input_bytes + stage.shared_bytes + stage.forward_peak_bytes for stage in stages), default=0)


def cache_bytes(work: MicroBatch | None) -> int:
    """Bytes of the KV cache in generation: the keys and values of a decoder's blocks, or where attention is not seen,
    two arrays of hidden states for each.

    Causal models generate one row at a time (`hf.evaluate.predict`), encoder-decoders fewer rows if the GPU is full.
    """
    if work is None:
        return 0
    work = work.evaluation or work
    blocks = [stage for stage in work.stages if stage.block]
    cached = sum(stage.forward.read_key_bytes or 2 * stage.input_bytes for stage in _decoder(blocks))
    one_by_one = work.rows is not None and work.rows.target_length is None
    return cached // work.rows.batch_size if one_by_one and work.rows else cached


def _decoder(blocks: Sequence[Stage]) -> Iterator[Stage]:
    """The blocks beside the last one. An encoder runs before."""
    where = {stage.block.rpartition(".")[0] for stage in blocks[-1:]}
    return (stage for stage in blocks if stage.block.rpartition(".")[0] in where)


def differing(phases: Sequence[Phase], peaks: Mapping[str, Mapping[str, int]], *, held_bytes: int = 0) -> Iterator[str]:
    """Sentences on phases whose measured peak (`Telemetry.peaks`) differs from the plan by more than both 5 % and 0.5
    GiB. On a GPU reading may take `_LATE_FRAMEWORK_BYTES` more RAM: a step that was measured before has loaded them.
    So may it take `held_bytes` of a model in memory: if its file is mapped, it is resident until all of it is read.
    """
    for phase in phases:
        for tier, planned in (("ram", phase.ram), ("vram", phase.vram)):
            took = peaks.get(phase.name, {}).get(tier)
            if took is None:
                continue
            is_reading = (phase.name, tier) == ("reading", "ram")
            loaded = is_reading * (held_bytes + _LATE_FRAMEWORK_BYTES * bool(phase.vram))
            if max(planned - took, took - planned - loaded) > max(_TOLERANCE * planned, _TOLERATED_BYTES):
                both = f"took {format_bytes(took)} of {tier.upper()}, {format_bytes(planned)} were planned"
                yield f"memory: {phase.name} {both}"
