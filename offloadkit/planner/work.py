"""What a micro-batch computes and how much memory that takes, as plain numbers. `tracing` finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one stage."""

    flops: int = 0
    """Of matrix products and attention; a multiplication and an addition are two."""
    fused_attention_flops: int = 0
    """The same in kernels of our own."""
    matmul_bytes: int = 0
    """Read and written by all products."""
    moved_bytes: int = 0
    """Read and written by all other operations."""
    num_operations: int = 0
    """Kernels started."""
    num_attention: int = 0
    """Among them, attention by kernels of our own."""

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.flops + other.flops,
            self.fused_attention_flops + other.fused_attention_flops,
            self.matmul_bytes + other.matmul_bytes,
            self.moved_bytes + other.moved_bytes,
            self.num_operations + other.num_operations,
            self.num_attention + other.num_attention,
        )

    def __sub__(self, other: Pass) -> Pass:
        return Pass(
            self.flops - other.flops,
            self.fused_attention_flops - other.fused_attention_flops,
            self.matmul_bytes - other.matmul_bytes,
            self.moved_bytes - other.moved_bytes,
            self.num_operations - other.num_operations,
            self.num_attention - other.num_attention,
        )


@dataclass(frozen=True)
class Stage:
    """One repeated block, or what is computed between two of them. Weights, and buffers of gradients, do not count."""

    block: str
    """The block's name in the model; "" for what lies outside."""
    forward: Pass
    backward: Pass
    kept_bytes: int
    """Made in forward and alive until backward: what autograd saved, and the outputs."""
    output_bytes: int
    """The outputs among them: all that is left of a checkpointed block."""
    input_bytes: int
    """The first input (the hidden states): what waits in RAM when activations are offloaded."""
    shared_bytes: int
    """Inputs that several blocks read (a position bias, an encoder's output), each with a gradient in backward."""
    forward_peak_bytes: int
    """Most that forward has alive, beyond what was there before."""
    backward_peak_bytes: int
    """Most that backward has alive, beyond what was there when it began (with `kept_bytes`)."""


@dataclass(frozen=True)
class Rows:
    """The shape of a micro-batch: rows, and tokens of each."""

    batch_size: int
    input_length: int
    target_length: int | None
    """Of a decoder of its own; None for a model without one."""

    def __str__(self) -> str:
        """ "8 x (512+128)" or "8 x 512"."""
        lengths = self.input_length if self.target_length is None else f"({self.input_length}+{self.target_length})"
        return f"{self.batch_size} x {lengths}"


@dataclass(frozen=True)
class MicroBatch:
    """Forward and backward over one micro-batch, in forward order."""

    stages: tuple[Stage, ...]
    num_tokens: int
    """Positions that the model reads and, with a decoder of its own, writes; padding counts."""
    rows: Rows | None = None
    """None where only what it computes is known."""
