"""The plan's constants that were fitted on H200s with PCIe 5 and 16 cores, each with its source.

The sources are rows of benchmarks/results.csv. "Steps" are the measured steps that tests/planner/test_measured.py names
(`COMMITS`): the constant is the one with which most of them are planned right. "Launches" are the rows "launches, t5"
and "launches, llama" of commit c40b67e: Python's time alone, the mean of the two models (tests/test_plan_launches.py).
"Rates" are the column of that name: what `device.measure` found, the median of 13 hosts.
"""

from __future__ import annotations

from offloadkit.config import Precision

# ---- what a card reaches of its data sheet ------------------------------------------------------------------------

HALF_EFFICIENCY = 0.87
"""Of the sheet's dense FLOP/s, bf16 and fp16: a matmul of a layer's size. Rates: 860 and 853 of 989 TFLOP/s."""
FP32_EFFICIENCY = 0.76
"""The same in fp32, without TF32. Rates: 51.1 of 67 TFLOP/s."""
VRAM_EFFICIENCY = 0.84
"""Of the sheet's memory bandwidth: an addition in place. Rates: 4.01 of 4.8 TB/s."""
BUS_EFFICIENCY = 0.87
"""Of PCIe's bytes per second in one direction. Rates: 54.8 of 63 GB/s."""
BOTH_WAYS_EFFICIENCY = 0.78
"""Of PCIe's bytes per second in both directions together. Rates: 97.9 of 126 GB/s."""

LINK_EFFICIENCY = 0.3
"""Of NVLink's bytes per second in one direction, in an exchange between all ranks: 136 of 450 GB/s between two H200s,
with 32 MiB to each. Where the ranks are, their link is measured."""

# ---- what the GPU reaches of the measured rates --------------------------------------------------------------------

ELEMENTWISE_EFFICIENCY = 0.7
"""Fraction of the measured VRAM bandwidth that non-matmul ops reach (reductions, broadcasts, strided reads). Steps."""
ATTENTION_EFFICIENCY = 0.4
"""Fraction of the measured matmul rate that our attention kernels reach. Their bytes are counted separately. Rows
"attention, ..." of commit e70d484."""
COMPILED_TRAFFIC = 0.6
"""Bytes that the non-matmul ops of a compiled block move, as a fraction of what they move uncompiled. Steps."""
STEP_EFFICIENCY = 0.85
"""Fraction of the VRAM bandwidth that the AdamW kernel reaches, and the copies and norms of gradients. Steps."""
KERNEL_SECONDS = 4e-6
"""Seconds of an empty kernel. Steps."""

# ---- what the CPU and the disk reach of the measured rates ---------------------------------------------------------

CPU_EFFICIENCY: dict[Precision, float] = {"exact": 0.97, "compact": 0.91, "tiny": 0.87}
"""Fraction of the CPU step's measured rate that is left beside copies and Python. Steps.

It is smaller for a precision that is bound by arithmetic.
"""
ADD_EFFICIENCY = 0.75
"""Rate at which gradients are added in RAM while others arrive, as a fraction of the CPU step's rate. Steps."""
NORM_EFFICIENCY = 0.48
"""Rate at which the norm of gradients in RAM is computed, in fp64, as a fraction of the CPU step's rate. Steps."""
DISK_OVERLAP = 0.8
"""Time to read and write states at once, as a fraction of reading them and then writing them. Row "disk"."""

# ---- bytes -----------------------------------------------------------------------------------------------------------

LOADED_LATER_BYTES = 128 << 20
"""What a CUDA context may still grow by once a training has begun, since kernels are loaded when they first run. On an
H200 it was 0.1 GiB. A budget of VRAM leaves it out until the context stays as it is, so a plan does too."""

# ---- several ranks --------------------------------------------------------------------------------------------------

NCCL_BYTES = 1408 << 20
"""VRAM of NCCL's buffers and kernels, with as many thread blocks as it likes: 1.2 to 1.3 GiB between two H200s.

It follows from what processes took besides torch's tensors. For t5-3b-2x24 and -2x28 that was 2,083 and 2,079 MiB
(e91ecd8), and with few 1,334 and 1,326 (7633a8b), of which NCCL's were 472. For llama-8b-2x24 and -2x80 it was 2,109
and 2,147 (e91ecd8), and 1,369 and 1,365 (07f6458), of which NCCL's were 564. NCCL's own choice itself was counted up to
1,152 MiB only."""
NCCL_FEW_BYTES = 576 << 20
"""The same with `FEW_CTAS`, and over PCIe alone: 564 MiB between two H200s with NVLink. Over PCIe few took at most 474
MiB; NCCL's own choice, which is few there too, was not measured."""
FEW_CTAS = 4
"""Thread blocks of NCCL at once, where few are enough. Each keeps a processor of the GPU from computing, also while it
waits for another rank. With everything of T5-3B in VRAM of two H200s a step took 0.19 s with 4, and 0.24 s with NCCL's
own choice; the link gave 34 and 136 GB/s."""
CROWDED = 1.1
"""By which factor a step may be planned longer with few: what NCCL's own choice takes of the GPU's processors is not
planned."""
AGREE_SECONDS = 3e-4
"""Seconds of a gather or a sum of some thousand numbers by gloo, for each rank but the first. Two processes of a host
with two cores took 0.26 to 0.33 ms at the least for the sum of 3,000 to 43,000 numbers, and 0.18 to 0.32 ms to gather
them. Gloo's ring has as many more steps as there are more ranks."""
EXCHANGE_SECONDS = 3e-5
"""Seconds of an exchange or a gather of no bytes: NCCL starts a kernel on each rank, and they meet. Not measured."""

# ---- Python's time, in launches of a bare kernel -------------------------------------------------------------------

FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 5.4, 6.0
"""Python's time for an operation of forward and of backward, the engine's hooks included. Launches.

It holds where no block of the model was timed (`python_time`).
"""
ENGINE_LAUNCHES = 54
"""Of these, what is the engine's own for a block in forward: hooks and waits. Launches.

It comes on top of what was timed with a block of the model, which has no engine. Compiling does not make it smaller. It
is what the first constant above leaves for T5-large's blocks after a loop without an engine: rows "ours-on-gpu" of
growth-t5-large-2 and -8, commit e70d484, where Python bound both.

In backward such a loop leaves 103. Nothing is added for it: a block that is timed alone has the start of autograd in
its time, and finds the GPU idle. So planned, the median row of one GPU whose blocks were timed has 0.93 of the seconds
in backward, and 0.96 of those of the step (tests/test_plan_launches.py).
"""
COMPILED_LAUNCHES = 0.44
"""Python's time for an operation of a compiled block, as a fraction of that uncompiled. Launches."""
ATTENTION_LAUNCHES = 8
"""Launch overhead of our attention kernel, in launches of an ordinary op, besides the one that it counts as.

It holds for forward and for backward, and in compiled blocks too: compiling does not make it smaller. Launches of
commit e70d484, T5's beside Llama's.
"""
RECOMPUTED_LAUNCHES = (1.1, 2.2)
"""Python's overhead in forward and backward for each operation of a recomputed block's forward. Launches.

Our attention counts as one operation. The launches of the recomputation itself come on top.
"""
STREAMED_LAUNCHES = (37, 33)
"""Python's time in forward and backward for a flat layer whose weights are streamed. Launches."""
LAYER_LAUNCHES = 28
"""Python's time for starting the update of a flat layer. Steps."""
STEP_LAUNCHES = 50
"""Python's time for a flat layer that the CPU steps. Steps."""
CHUNK_LAUNCHES = 25
"""Python's time for a chunk of states that the GPU steps: copies, kernel and events. Steps."""
THREAD_SLOWS = 0.5
"""By which fraction Python is slower in forward for each thread of the update, as long as that works: the one that has
the CPU step, and the one that queues the GPU's steps of states in RAM. All three take turns at the interpreter's lock.

Steps say little of it: with 0 to 0.5 about as many of docs/results.md are planned within 15 %.
"""
RANKS_SLOW = 1.0
"""The same for the CPU's step where several ranks of a host have theirs at once: they keep all cores and the RAM busy.

Two ranks with T5-3B on two H200s: the main thread took 57 to 60 ms of processor time for a forward without any CPU step
beside it, and 115 to 142 ms with one, which went on for nearly all of that forward.
"""
