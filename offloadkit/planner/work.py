"""The computation and memory of a micro-batch in numbers, as counted by `tracing`."""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one stage."""

    flops: int = 0
    """FLOPs of matmuls. A multiply-add is two FLOPs."""
    sdpa_flops: int = 0
    """FLOPs of torch's fused attention, without the keys that a causal mask hides."""
    sdpa_flops_of_a_key: int = 0
    """FLOPs of torch's fused attention if every query saw one key."""
    fused_attention_flops: int = 0
    """FLOPs of attention in our own kernels."""
    matmul_bytes: int = 0
    """Bytes that all matmuls and attention read and write."""
    moved_bytes: int = 0
    """Bytes that all other operations read and write."""
    num_operations: int = 0
    num_attention: int = 0
    read_key_bytes: int = 0
    """Bytes of the keys and values that attention reads."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Pass) -> Pass:
        return Pass(*map(operator.sub, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Cheap:
    """A block that keeps only its results of matmuls and attention (`Placement(activations="cheap")`)."""

    kept_bytes: int
    """`Stage.kept_bytes` of such a block."""
    backward_peak_bytes: int
    """`Stage.backward_peak_bytes` of such a block."""
    again: Pass
    """The operations that backward computes again."""


@dataclass(frozen=True)
class Stage:
    """One repeated block, or the operations between two blocks. Its bytes exclude weights and gradient buffers."""

    block: str = ""
    """The block's name in the model; "" between blocks."""
    forward: Pass = Pass()
    backward: Pass = Pass()
    kept_bytes: int = 0
    """Bytes allocated in forward and alive until backward: tensors saved by autograd, and the outputs."""
    output_bytes: int = 0
    """The outputs' part of `kept_bytes`: all that a checkpointed block keeps."""
    input_bytes: int = 0
    """The first input (the hidden states), which waits in RAM if activations are offloaded."""
    shared_bytes: int = 0
    """Inputs that several blocks read (a position bias, an encoder's output). They have gradients in backward."""
    forward_peak_bytes: int = 0
    """Peak of forward, beyond the bytes alive before it."""
    backward_peak_bytes: int = 0
    """Peak of backward, beyond the bytes alive before it (which include `kept_bytes`)."""
    cheap: Cheap | None = None
    """None between blocks, and for blocks whose recomputation cannot be traced."""
    waits: bool = False
    """Forward reads numbers on the host, or has shapes that follow from numbers: no CUDA graph can hold the block."""


@dataclass(frozen=True)
class Rows:
    batch_size: int
    input_length: int
    target_length: int | None
    """Tokens of the decoder's row; None unless the model is an encoder-decoder."""

    def __str__(self) -> str:
        lengths = self.input_length if self.target_length is None else f"({self.input_length}+{self.target_length})"
        return f"{self.batch_size} x {lengths}"


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward over one micro-batch, in forward order."""

    stages: tuple[Stage, ...]
    num_tokens: int
    """Positions, padding included; for an encoder-decoder, of encoder and decoder."""
    rows: Rows | None = None
    """None if the shape is unknown."""
    num_positions: int | None = None
    """Positions of a row that the model's config names; None: no limit, or the rows are packed."""
    evaluation: MicroBatch | None = None
    """The largest micro-batch of evaluation, if it has more rows than this one; else None."""
    operation_launches: tuple[float, float] | None = None
    """Python's time for an operation of forward and of backward, in launches of a bare kernel, as timed with the
    model's blocks. None: not timed.
    """
    python_spread: float = 1.0
    """Python's time for a block in the slowest burst of its timing, relative to the fastest; 1 if not timed."""

    @property
    def vram_bytes(self) -> int:
        """VRAM of all activations, if they are kept, with the peak of a stage."""
        return sum(stage.kept_bytes for stage in self.stages) + max(
            (max(stage.forward_peak_bytes - stage.kept_bytes, stage.backward_peak_bytes) for stage in self.stages),
            default=0,
        )
