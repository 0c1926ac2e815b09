"""CPU milliseconds of the threads that launch forward, backward and `step()` of a T5 whose blocks run as graphs.

    python -m benchmarks.python_step                 # this checkout, without a GPU; two minutes on two cores
    python -m benchmarks.python_step /tmp/old .      # several checkouts, with kernels built, in alternating turns
    python -m benchmarks.python_step --functions     # the functions that take the time
    python -m benchmarks.python_step --device cuda   # the same on a GPU

Cases have as many blocks as T5-base and T5-3B, and tiny widths. On the CPU a replay does nothing: what remains is
Python, and small operations of torch. On a GPU, CUDA's calls are in the figures, but kernels are so short that no call
waits for room in a queue, which takes CPU time too. Backward has its own thread there.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

CASES = {
    "t5-base, resident": (12, {"gradients": "vram", "states": "vram", "step": "gpu"}),
    "t5-base, states in RAM": (12, {}),
    "t5-3b, weights in RAM, recomputed": (24, {"weights": "ram", "activations": "checkpoint"}),
}
"""Blocks of the encoder and of the decoder, and the placement."""
SETTLING, STEPS, TURNS, PROFILED = 6, 4, 12, 10


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.python_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--functions", action="store_true", help="profile this checkout instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.device)
    elif options.functions:
        for case in CASES:
            print(case, flush=True)
            serve(case, options.device, profiled=True)
    else:
        for case in CASES:
            compare(case, options.checkouts, options.device)


def compare(case: str, checkouts: list[Path], device: str) -> None:
    processes = []
    for tree in checkouts:
        environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "--serve", case, "--device", device]
        processes.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    found: list[list[list[float]]] = [[] for _ in processes]
    for turn in range(TURNS):
        for at in range(len(processes))[:: 1 if turn % 2 else -1]:
            process: Any = processes[at]
            process.stdin.write("\n")
            process.stdin.flush()
            found[at] += json.loads(process.stdout.readline())
    for tree, process, steps in zip(checkouts, processes, found, strict=True):
        process.communicate()
        parts = [median(part) for part in zip(*steps, strict=True)]
        names = zip(("forward", "backward", "step"), parts, strict=True)
        total, least = median(map(sum, steps)), min(map(sum, steps))
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in names)
        print(f"{case}: {tree}: {total:.1f} ms, least {least:.1f} ({phases})", flush=True)


def serve(case: str, device: str, *, profiled: bool = False) -> None:
    """Answer each line of stdin with [forward, backward, step] of some steps, or profile some steps."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    from offloadkit.device.graphs import _Function
    from offloadkit.engine.engine import OffloadEngine
    from offloadkit.facts import graphs
    from offloadkit.facts.config import OffloadConfig, Placement

    graphs.device_types.add(device)
    num_blocks, where = CASES[case]
    placement: Any = Placement(**where)  # type: ignore[arg-type]
    width, length = (8, 12) if device == "cpu" else (64, 64)  # the kernels of attention take no less than 16
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 2 * width,
        "d_kv": width,
        "d_ff": 4 * width,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    shape: Any = T5Config(num_layers=num_blocks, num_decoder_layers=num_blocks, dropout_rate=0.1, **sizes)
    ids = torch.randint(3, 60, (2, length), device=device)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, : length // 2].contiguous()}
    config = OffloadConfig(placement=placement, working_dtype="bf16", max_grad_norm=1.0)
    with OffloadEngine(T5ForConditionalGeneration(shape).train(), config, device=device) as engine:
        threads = {threading.get_ident()}

        def seconds() -> float:
            return sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in threads)

        def step(in_backward: Callable[[], None] | None = None) -> list[float]:
            times = [seconds()]
            loss = engine(**batch).loss
            times.append(seconds())
            if in_backward is not None:
                loss.register_hook(lambda _: in_backward())
            engine.backward(loss)
            times.append(seconds())
            engine.step()
            times.append(seconds())
            return [1e3 * (end - begin) for begin, end in pairwise(times)]

        for _ in range(SETTLING):
            step(lambda: threads.add(threading.get_ident()))
        engine.synchronize()
        _Function.replay = lambda self: None  # type: ignore[method-assign]
        if profiled:
            one_by_one = len(threads) > 1 and sys.version_info < (3, 12)  # since then one profile has all threads
            of_backward = cProfile.Profile(time.thread_time)
            step(of_backward.enable if one_by_one else None)
            with cProfile.Profile(time.thread_time) as profile:
                for _ in range(PROFILED):
                    step()
            stats = pstats.Stats(profile)
            if one_by_one:
                stats.add(of_backward)
            stats.sort_stats("tottime").print_stats(40)
            return
        step()
        for _ in sys.stdin:
            print(json.dumps([step() for _ in range(1 + STEPS)][1:]), flush=True)
            engine.synchronize()


if __name__ == "__main__":
    main()
