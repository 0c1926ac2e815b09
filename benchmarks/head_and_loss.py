"""What head and loss of a large vocabulary add to peak RAM, whole and in chunks, each in a fresh process (fp32, CPU).

python -m benchmarks.head_and_loss
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.run import ROOT, Row, write_results

GIB = 1 << 30
TOKENS, VOCABULARY, WIDTH = 2048, 128_256, 64
WAYS = ("whole", "in chunks")


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure both ways; print them, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_and_loss", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(measure(options.way, options.tokens)))
        return []
    options.mode, options.model = "head-and-loss", f"{options.tokens}x{VOCABULARY}"
    rows = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.head_and_loss", "--way", way, "--tokens", str(options.tokens)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{way:12}{rows[-1]['added_bytes'] / GIB:8.2f} GiB added, loss {rows[-1]['loss']:.6f}")
    write_results(options, rows)
    return rows


def measure(way: str, tokens: int) -> Row:
    """The row of one way, in this process: bytes by which forward and backward raised its peak RAM."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.measure import describe_machine, versions
    from offloadkit import hardware
    from offloadkit.hf.loss import compute_loss_in_chunks

    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape)).train()
    if way == "in chunks":
        compute_loss_in_chunks(model)
    few, many = (torch.randint(VOCABULARY, (1, number)) for number in (8, tokens))
    model(input_ids=few, labels=few).loss.backward()  # gradients have their memory, kernels are there
    before = hardware.process_ram_bytes()
    loss = model(input_ids=many, labels=many).loss
    loss.backward()
    return {
        "way": way,
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "width": WIDTH,
        "added_bytes": hardware.process_peak_ram_bytes() - before,
        "loss": loss.item(),
        "machine": describe_machine(torch.device("cpu")),
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
