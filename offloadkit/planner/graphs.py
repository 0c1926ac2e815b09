"""VRAM of CUDA graphs of repeated blocks (`offload/graphs.py`).

All graphs share one pool. It holds the activations that captured blocks keep, which eager blocks keep elsewhere, and
the temporary memory of one block at a time, which eager blocks share with the rest of the model. Inputs and gradients
of outputs are copied into static memory, which all blocks share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from offloadkit.facts.fitted import GRAPHS_DRIVER_BYTES, GRAPHS_UNUSED, GRAPHS_WORKSPACE_BYTES
from offloadkit.planner.layout import LayerShape, activations
from offloadkit.planner.work import MicroBatch


@dataclass(frozen=True)
class Graphs:
    number: int
    """Graphs for micro-batches of the planned size: a forward and a backward of each captured block."""
    num_bytes: int
    """VRAM that eager blocks do not need: pool, static memory and the driver's."""
    fit: bool = True
    """Whether the VRAM suffices. If not, all blocks run eagerly."""


def capturable(layers: Sequence[LayerShape], work: MicroBatch) -> set[str]:
    """Names of the blocks that can be captured: they are called once, never wait, and have no tied weights."""
    calls = Counter(stage.block for stage in work.stages if stage.block and not stage.waits)
    return {name for name, number in calls.items() if number == 1} - {layer.name for layer in layers if layer.shared}


class GraphBytes:
    """VRAM of graphs for one model's blocks, with micro-batches of one shape."""

    def __init__(self, layers: Sequence[LayerShape], work: MicroBatch) -> None:
        self._work = work
        self._gradients: Counter[str] = Counter()
        for layer in layers:
            self._gradients[layer.name] += layer.bucket_bytes()
        self._may = capturable(layers, work)
        sizes: dict[str, list[int]] = {}
        for layer in layers:
            if layer.name in self._may:
                sizes.setdefault(layer.name, []).append(layer.weight_bytes())
        self.of_weights = sum(map(max, zip_longest(*sizes.values(), fillvalue=0)))
        """VRAM of the weights' copies that graphs of streamed blocks read, one for all blocks."""

    def captures(self, how: Sequence[str]) -> list[bool]:
        """Whether each stage is a block that runs as a graph. `how`: as for `activations`."""
        return [
            stage.block in self._may and choice != "cheap" for stage, choice in zip(self._work.stages, how, strict=True)
        ]

    def of(self, how: Sequence[str]) -> int:
        """Bytes that eager blocks do not need, without `of_weights`; 0 if no block is captured."""
        below = outside = scratch = kept_in_pool = 0
        static: dict[int, int] = {}
        for stage, choice, captured in zip(self._work.stages, how, self.captures(how), strict=True):
            kept, of_backward = stage.kept_bytes, stage.backward_peak_bytes
            if choice == "cheap" and stage.cheap is not None:
                kept, of_backward = stage.cheap.kept_bytes, stage.cheap.backward_peak_bytes
            below -= stage.input_bytes if choice == "offload" else 0
            if captured:
                again = 0 if choice == "keep" else kept
                kept_in_pool += kept if choice == "keep" else 0
                of_block = again + of_backward + self._gradients[stage.block]
                scratch = max(scratch, stage.forward_peak_bytes - kept, of_block)
                copies = stage.input_bytes + stage.output_bytes + 3 * stage.shared_bytes  # input, gradient, its clone
                static[stage.input_bytes] = max(static.get(stage.input_bytes, 0), copies)
                of_backward = 0
            elif choice in ("keep", "cheap"):
                outside = max(outside, below + stage.forward_peak_bytes)
            after = below + (kept if choice in ("keep", "cheap") else stage.output_bytes)
            outside = max(outside, (after if captured else below + kept + of_backward) + stage.shared_bytes)
            below = after
        if not static:
            return 0
        beyond = max(0, outside + scratch - activations(self._work, how).vram)
        pool = kept_in_pool + scratch
        return beyond + sum(static.values()) + int(GRAPHS_UNUSED * pool) + GRAPHS_WORKSPACE_BYTES + GRAPHS_DRIVER_BYTES

    def graphs(self, how: Sequence[str], *, streams: bool) -> Graphs | None:
        """The graphs of a plan; None if no block is captured. `streams`: whether weights of blocks are in RAM."""
        number = 2 * sum(self.captures(how))
        return Graphs(number, self.of(how) + self.of_weights * streams) if number else None
