"""Constants fitted on H200s with PCIe 5 and 16 cores, with their sources in benchmarks/results.csv.

"Steps": the measured steps named by `COMMITS` in tests/planner/test_measured.py; the constant plans most of them right.
"Launches": rows "launches, t5" and "launches, llama" of commit c40b67e: Python's time alone, mean of the two models
(tests/engine/test_plan_launches.py). "Rates": the column of that name, from `device.measure`, median of 13 hosts.
"""

from __future__ import annotations

from offloadkit.facts.config import Precision

# ---- efficiency of a card relative to its data sheet ----------------------------------------------------------------

HALF_EFFICIENCY = 0.87
"""Fraction of the sheet's dense bf16 and fp16 FLOP/s in a matmul of a layer's size. Rates: 860 and 853 of 989
TFLOP/s."""
FP32_EFFICIENCY = 0.76
"""Fraction of the sheet's fp32 FLOP/s, without TF32. Rates: 51.1 of 67 TFLOP/s."""
VRAM_EFFICIENCY = 0.84
"""Fraction of the sheet's memory bandwidth in an in-place addition. Rates: 4.01 of 4.8 TB/s."""
BUS_EFFICIENCY = 0.87
"""Fraction of PCIe's bytes per second in one direction. Rates: 54.8 of 63 GB/s."""
BOTH_WAYS_EFFICIENCY = 0.78
"""Fraction of PCIe's bytes per second in both directions together. Rates: 97.9 of 126 GB/s."""

LINK_EFFICIENCY = 0.52
"""Fraction of NVLink's bytes per second in one direction, in an exchange between all ranks of idle GPUs, if not
measured: 233 of 450 GB/s between four H100s, 251 between two H200s.
"""

# ---- efficiency of the GPU relative to the measured rates -----------------------------------------------------------

ELEMENTWISE_EFFICIENCY = 0.7
"""Fraction of the measured VRAM bandwidth that non-matmul ops reach (reductions, broadcasts, strided reads). Steps."""
SDPA_EFFICIENCY = 0.7
"""Fraction of the measured matmul rate that torch's fused attention reaches in long rows. Llama-3.2-3B on an H100 took
3.23 s with one row of 32,768 tokens and 9.65 s with one of 65,536, planned 3.31 and 9.68 for the same placements. Masks
were absent; attention with a mask was not measured.
"""
SDPA_KEYS = 320
"""Keys whose time torch's fused attention takes for each query beyond the keys that the query sees. Steps with Llama
and rows of 1,024 and 2,048 tokens: with 320 they are planned as near as with every key counted at the matmul rate.
"""
ATTENTION_EFFICIENCY = 0.4
"""Fraction of the measured matmul rate that our own attention kernels reach; their bytes are counted separately. Rows
"attention, ..." of commit e70d484.
"""
COMPILED_TRAFFIC = 0.6
"""Bytes that the non-matmul ops of a compiled block move, as a fraction of the same ops uncompiled. Steps."""
STEP_EFFICIENCY = 0.85
"""Fraction of the VRAM bandwidth that the AdamW kernel and the copies and norms of gradients reach. Steps."""
PRODUCT_EFFICIENCY = 0.69
"""Fraction of the measured matmul rate that the products of Newton-Schulz iterations reach in a step, apart from
`PRODUCT_SECONDS`. With `MATRIX_SECONDS` from rows muon-t5-3b and muon-llama-3b of commit eee5c4c. Alone, with the clock
of a GPU that rested before, products reached 0.92.
"""
PRODUCT_SECONDS = 6e-6
"""Seconds of a product in a CUDA graph beyond its FLOPs: launch, first and last wave. 3072x3072 by 3072x8192 and
smaller products alone on an H100 (e6d494f).
"""
MATRIX_SECONDS = 1.4e-4
"""Seconds of a matrix's update by Muon beyond its products and bytes: operations that Python launches one by one. The
same rows as `PRODUCT_EFFICIENCY`.
"""
KERNEL_SECONDS = 4e-6
"""Seconds of an empty kernel. Steps."""

# ---- efficiency of the CPU and the disk relative to the measured rates ----------------------------------------------

CPU_EFFICIENCY: dict[Precision, float] = {"exact": 0.97, "compact": 0.91, "tiny": 0.87}
"""Fraction of the CPU step's measured rate that remains during copies and Python's work. Steps.

It is smaller for a precision that is bound by arithmetic.
"""
ADD_EFFICIENCY = 0.75
"""Rate of adding gradients in RAM while more gradients arrive, as a fraction of the CPU step's rate. Steps."""
NORM_EFFICIENCY = 0.48
"""Rate of computing the fp64 norm of gradients in RAM, as a fraction of the CPU step's rate. Steps."""
DISK_OVERLAP = 0.8
"""Time to read and write states concurrently, as a fraction of reading and then writing them. Row "disk"."""

# ---- bytes -----------------------------------------------------------------------------------------------------------

LOADED_LATER_BYTES = 128 << 20
"""Growth of a CUDA context after training has begun, because kernels are loaded when they first run: 0.1 GiB on an
H200. A VRAM budget and a plan hold it back.
"""

GRAPHS_DRIVER_BYTES = 64 << 20
"""What the driver takes for CUDA graphs of blocks. T5-base's 48 graphs took 8 to 20 MiB, T5-large's 96 took 16 (and 106
with kernels that were loaded then), on H100s.
"""
GRAPHS_WORKSPACE_BYTES = 64 << 20
"""cuBLAS's workspaces in the graphs' pool: 32 MiB on Hopper for each thread, of forward and of backward."""
GRAPHS_UNUSED = 0.05
"""Fraction of the graphs' pool that its tensors cannot use. T5-large with 8 x (512+128) tokens, recomputed, on an H100:
a pool of 388 MiB, planned 390 with the workspaces.
"""

# ---- several ranks --------------------------------------------------------------------------------------------------

NCCL_BYTES = 1408 << 20
"""VRAM of NCCL's buffers and kernels with NCCL's own number of thread blocks: 1.2 to 1.3 GiB between two H200s.

Derived from VRAM outside torch's tensors: 2,083 and 2,079 MiB for t5-3b-2x24 and -2x28 (e91ecd8), 1,334 and 1,326 with
`FEW_CTAS` (7633a8b), including 472 for NCCL; 2,109 and 2,147 for llama-8b-2x24 and -2x80 (e91ecd8), 1,369 and 1,365
with `FEW_CTAS` (07f6458), including 564 for NCCL. The largest direct count of NCCL's own choice was 1,152 MiB.
"""
NCCL_BYTES_EACH = 320 << 20
"""VRAM of NCCL for each further rank of a host: four H100s took 1,988 MiB (t5-11b-4x80, 95456de), and 1,408 + 2 * 320 =
2,048. Eight ranks were not measured."""
NCCL_FEW_BYTES = 576 << 20
"""VRAM of NCCL with `FEW_CTAS`, or over PCIe alone: 564 MiB between two H200s with NVLink, at most 474 MiB with
`FEW_CTAS` over PCIe. NCCL's own choice over PCIe, also few, was not measured.
"""
NCCL_FEW_BYTES_EACH = 48 << 20
"""The same for each further rank of a host: four H100s took at most 666 MiB (llama-8b-4x80, 95456de), and 576 + 2 * 48
= 672.
"""
FEW_CTAS = 4
"""NCCL thread blocks where few are enough. A block occupies one of the GPU's processors, even while it waits for
another rank. With all of T5-3B in VRAM of two H200s a step took 0.19 s with 4 blocks and 0.24 s with NCCL's own choice.
"""
CROWDED = 1.1
"""Largest planned step time with `FEW_CTAS`, relative to NCCL's own choice, for which the plan does not count the GPU
processors taken.
"""
EXCHANGE_EFFICIENCY = 0.34
"""Rate of an exchange of gradients beside backward, as a fraction of the link's rate between idle GPUs, with NCCL's own
number of thread blocks: T5-11B on four H100s received 17.0 GB in a backward of 0.215 s, 79 of 233 GB/s (t5-11b-4x80,
95456de).

Weights are gathered in forward at the whole rate: 17.0 GB in 0.098 s are 173 GB/s, and the plan counts 0.107 s.
"""
FEW_EXCHANGE_EFFICIENCY = 0.7
"""The same with `FEW_CTAS` or over PCIe alone. Traced steps on four H100s (95456de): at the link's rate the received
bytes take 0.122 of NCCL's 0.190 s (t5-3b-4x24), 0.122 of 0.173 (t5-3b-4x80), 0.239 of 0.332 (llama-8b-4x24) and 0.341
of 0.468 s (llama-8b-4x80): 0.64, 0.71, 0.72 and 0.73, because the kernels also wait for slower ranks.
"""
AGREE_SECONDS = 3e-4
"""Seconds of a gloo gather or sum of some thousand numbers, for each rank after the first, since each adds a step to
gloo's ring. Two processes on a host with two cores took at least 0.26 to 0.33 ms to sum 3,000 to 43,000 numbers, and
0.18 to 0.32 ms to gather them.
"""
EXCHANGE_SECONDS = 3e-5
"""Seconds of an empty exchange or all-gather: kernels start on all ranks and meet. Not measured."""

# ---- Python's time, in launches of a bare kernel -------------------------------------------------------------------

PYTHON_VARIES = 1.43
"""Factor within which Python's time lies in a run, apart from the spread that the timing of blocks shows. Backward of
steps with timed blocks that Python bounds on one GPU took 0.70 to 1.40 times its planned seconds in 14 of 15 rows, and
2.0 times in one row from a busy host (tests/engine/test_plan_launches.py).
"""
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 5.4, 6.0
"""Python's time for an operation of forward and of backward, including the engine's hooks. Launches.

Used if no block of the model was timed (`python_time`).
"""
ENGINE_LAUNCHES = 54
"""The engine's part of `FORWARD_LAUNCHES` for one block: hooks and waits. Launches.

It is added to the time of a timed block, which runs without the engine. Compiling does not reduce it. The value is the
difference to a loop without an engine for T5-large's blocks: rows "ours-on-gpu" of growth-t5-large-2 and -8, commit
e70d484, both bound by Python. In backward the difference is 103, but nothing is added, because the time of a block
alone includes the start of autograd, with the GPU idle. The median one-GPU row with timed blocks is then planned at
0.93 of the measured seconds of backward and 0.96 of the step (tests/engine/test_plan_launches.py).
"""
COMPILED_LAUNCHES = 0.44
"""Python's time for an operation of a compiled block, as a fraction of the uncompiled time. Launches."""
ATTENTION_LAUNCHES = 8
"""Launches of our attention kernel beyond the one that it counts as, in launches of an ordinary op.

The same in forward, backward and compiled blocks. Launches of commit e70d484, T5 and Llama.
"""
RECOMPUTED_LAUNCHES = (1.1, 2.2)
"""Python's overhead in forward and backward for each operation of a recomputed block's forward, without the launches of
the recomputation itself. Our attention counts as one operation. Launches.
"""
CHEAP_LAUNCHES = (11, 18)
"""The same for a block that keeps matmuls and attention, whose operations pass through a dispatch mode; without the
launches of the operations that backward computes again. Not measured beside a GPU: blocks of T5 and Llama on one core
gave 11 to 13 and 14 to 27, where a recomputed block gave 0.9 to 1.8 and 2.6 to 5.4.
"""
GRAPHED_LAUNCHES = (20, 22)
"""Python's time in forward and backward for a block that runs as a CUDA graph: guards, copies between graphs, gradients
of parameters. It is scaled as the blocks' timed Python is, like `OUTSIDE_LAUNCHES`.

With `GRAPH_CALLS` and `OUTSIDE_LAUNCHES` from T5 with 8 x (512+128) tokens on H200 hosts (7566f52, 3ce0a60): 18.8 ms
with 12 blocks, 28.2 with 24. Their proportions are as on a CPU, where graphs did nothing: forward took 97 us a block,
backward 104, the rest 2.8 ms (`benchmarks.python_step` with 12, 24 and 48 blocks). There eee5c4c took 160 and 155 us a
block; with constants larger by that, its 40.0 ms on an H100 are planned 40.1.
"""
GRAPH_CALLS = 18
"""CUDA's calls in each direction of such a block: replay, events, copies. Not scaled: with T5-base and older commits an
H100 host took 40 ms and an H200 host, whose Python was as fast and whose bare launch took 0.6 of the time, 33 ms.
"""
OUTSIDE_LAUNCHES = (535, 250)
"""Python's time in forward and backward that does not grow with the number of graphed blocks, beyond the operations
outside the blocks: the model's own code, the start of autograd, `step()`. The constants of eager blocks contain it.
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
"""Slowdown of Python in forward (fraction) by each working thread of the update (CPU step, and queueing of GPU steps of
states in RAM), because all share the interpreter's lock. Steps barely constrain it: with 0 to 0.5 about as many rows of
docs/results.md are planned within 15 %.
"""
RANKS_SLOW = 1.0
"""Slowdown of Python (fraction) by the CPU step if several ranks of a host run theirs at once and keep all cores and
the RAM busy. Two ranks with T5-3B on two H200s: a forward took 57 to 60 ms of the main thread's processor time without
a CPU step, and 115 to 142 ms with a CPU step during nearly all of it.
"""
