"""Hashes of several hundred plans, to compare two commits.

    cd OLD; PYTHONPATH=$PWD python NEW/benchmarks/same_plans.py > old.txt
    cd NEW; PYTHONPATH=$PWD python benchmarks/same_plans.py --compare old.txt > new.txt

Each line is `name what hash`. A fixed seed draws models, cards, budgets, ranks and precisions, for hosts
with assumed rates, so the plans do not depend on this machine:

- `plan/...`: the placements that a search finds, bytes of the run and of its phases, and seconds bit for bit;
- `placed/...`: the same for random placements of the layers;
- `words/...`: the plan's sentences and tables. `--explained` plans also search for remedies.

`--seconds` prints the CPU seconds of the searches, with the C library and without.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.plans import layers_and_work
from benchmarks.scaling import GIB, host
from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels import cpu
from offloadkit.planner import LayerShape, MicroBatch, Plan, make, make_plan, placed, possible
from offloadkit.planner.ranks import for_ranks

MODELS = {
    "t5-large": ("t5-large", 8, 512, 128),
    "t5-3b": ("t5-3b", 4, 512, 128),
    "llama-3.2-1b": ("llama-3.2-1b", 4, 1024, 0),
    "llama-3.2-3b": ("llama-3.2-3b", 2, 1024, 0),
    "llama-3.1-8b": ("llama-3.1-8b", 1, 2048, 0),
    "qwen3-4b": ("qwen3-4b", 2, 512, 0),
}
HOSTS = {
    "T4, 2 cores": ("T4", 2, 12, 15e9),
    "RTX 3090, 8 cores": ("RTX 3090", 8, 64, 45e9),
    "RTX 4090, 16 cores": ("RTX 4090", 16, 128, 80e9),
    "A100, 32 cores": ("A100", 32, 250, 160e9),
    "H100, 64 cores": ("H100", 64, 500, 300e9),
}
VRAM = (0.15, 0.3, 0.5, 0.8, 1.0)
"""Fractions of the card."""
RAM = (0.2, 0.5, 1.0)
"""Fractions of the host's."""
RANKS = (1, 1, 2, 4, 8, 16)
PRECISIONS = ("exact", "compact", "tiny")
OPTIONS: tuple[dict[str, Any], ...] = (
    *({} for _ in range(6)),
    {"gradient_accumulation": 4},
    {"gradient_accumulation": 4, "exchange": "step"},
    {"gradient_accumulation": 2, "activation_checkpointing": True},
    {"activation_checkpointing": True},
    {"compile_blocks": True},
    {"optimizer": "lion"},
)
LION = len(OPTIONS) - 1
DISK = {"disk_folder": "/states", "disk_free_bytes": 500 * GIB, "disk_read_bytes_per_second": 3e9}
DISK |= {"disk_write_bytes_per_second": 2e9}


class Case(NamedTuple):
    """One search."""

    model: str
    host: str
    vram: float
    ram: float
    num_ranks: int
    precision: str
    options: int
    """Index into `OPTIONS`."""
    disk: bool
    by_bus: bool
    few_ctas: bool
    """Whether the link was also measured with few thread blocks."""

    def __str__(self) -> str:
        options = ",".join(map(str, OPTIONS[self.options].values()))
        flags = [name for name in ("disk", "by_bus", "few_ctas") if getattr(self, name)]
        parts = [*map(str, self[:6]), options, *flags]
        return "/".join(part.replace(" ", "") for part in parts if part)

    def make(self) -> Plan:
        """Search the plan."""
        layers, work = model(self.model)
        machine = for_ranks(host(*HOSTS[self.host]), self.num_ranks)
        if self.disk:
            machine = replace(machine, **DISK)
        if self.num_ranks > 1:
            link = 2e10 if self.by_bus else 1e11
            machine = replace(machine, link_is_bus=self.by_bus, link_bytes_per_second=link)
            machine = replace(machine, few_ctas_link_bytes_per_second=link / 4 if self.few_ctas else 0.0)
        optimizer = OPTIONS[self.options].get("optimizer", "adamw")
        layers = [replace(layer, kind=replace(layer.kind, optimizer=optimizer)) for layer in layers]
        layers = [layer.shared_by(self.num_ranks) for layer in layers]
        budgets: Any = {
            "vram": int(self.vram * machine.vram_total_bytes),
            "ram": int(self.ram * HOSTS[self.host][2] * GIB),
        }
        config = OffloadConfig(
            precision="exact" if self.options == LION else self.precision,
            **OPTIONS[self.options],
            **budgets,
            **({"disk": "/states"} if self.disk else {}),
        )
        return make_plan(layers, config, work=work, hardware=machine, frozen_bytes=12345, assumed=True)


@cache
def model(name: str) -> tuple[list[LayerShape], MicroBatch]:
    """Layers and work of a model of `MODELS`."""
    of, rows, tokens, targets = MODELS[name]
    layers, work = layers_and_work(of, "bf16", rows, tokens, targets)
    return layers, work


def cases(number: int) -> list[Case]:
    """A fixed sample of all combinations."""
    every = product(MODELS, HOSTS, VRAM, RAM, RANKS, PRECISIONS, range(len(OPTIONS)), *[(False, True)] * 3)
    return list(dict.fromkeys(random.Random(37).sample([Case(*values) for values in every], number)))


def random_placements(plan: Plan, seed: str) -> tuple[Placement, ...]:
    """Placements drawn from three kinds, as far as each layer takes them."""
    draw, kinds = random.Random(seed), []
    machine = plan.basis.hardware
    on_disk = ("disk",) if machine and machine.disk_read_bytes_per_second else ()
    values = {"weights": ("vram", "ram"), "gradients": ("vram", "ram"), "states": ("vram", "ram", *on_disk)}
    for weights, gradients, states, activations, step in product(
        *values.values(), ("keep", "checkpoint", "offload"), ("cpu", "gpu")
    ):
        try:
            kinds.append(Placement(weights, gradients, states, activations, step))
        except ConfigError:
            continue
    some = draw.sample(kinds, 3)
    return tuple(possible(draw.choice(some), layer) for layer in plan.layers)


def digest(value: Any) -> str:
    """A short hash of a value whose repr is exact."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def numbers(plan: Plan) -> dict[str, str]:
    seconds = plan.seconds
    assert seconds is not None
    times = [seconds.step, seconds.update_phase, seconds.backward_phase, sorted(seconds.busy.items())]
    return {
        "placements": digest(plan.placements),
        "bytes": digest([plan.tiers, plan.phases, plan.lacking(), plan.checkpoint_peak_bytes, plan.communicated]),
        "seconds": digest([times, plan.large_gpu_seconds]),
    }


def words(plan: Plan, *, explained: bool) -> dict[str, str]:
    """Hash the sentences and tables of the plan."""
    said = {"words": digest([str(plan), repr(plan), plan.details()])}
    if explained:
        said["explained"] = digest([plan.explain(), plan._repr_html_(), plan.to_dict()])
    return said


def lines(number: int, *, explained: int) -> Iterator[str]:
    """Yield the lines of all plans."""
    for at, case in enumerate(cases(number)):
        made = case.make()
        found = {f"plan/{case} {what}": value for what, value in numbers(made).items()}
        if at % 4 == 0:
            other = placed(made, random_placements(made, str(case)))
            found |= {f"placed/{case} {what}": value for what, value in numbers(other).items()}
        said = words(made, explained=at < explained)
        found |= {f"words/{case} {what}": value for what, value in said.items()}
        yield from (f"{name} {value}" for name, value in found.items())


@contextmanager
def without_library() -> Iterator[None]:
    """Hide the C library."""
    found = cpu.c_library
    cpu.c_library = lambda: None
    try:
        yield
    finally:
        cpu.c_library = found


def seconds(number: int) -> None:
    """Print the CPU seconds of all searches, of the slowest one, and of a replan; with and without the C library."""
    some = cases(number)
    for case in some:
        model(case.model)
    for title, context in (("with the C library", nullcontext()), ("without", without_library())):
        with context:
            took = {}
            for case in some:
                make._kept_search.cache_clear()
                before = time.process_time()
                made = case.make()
                took[case] = time.process_time() - before
            slowest = max(took, key=lambda case: took[case])
            before = time.process_time()
            make.replanned(made, vram=int(0.9 * made.budgets["vram"]))
            again = time.process_time() - before
        print(f"{title}: {sum(took.values()):.2f} s for {number} searches, at most {took[slowest]:.2f} s ({slowest})")
        print(f"{title}: a replan with another budget {again:.3f} s")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", type=Path, help="a file of lines: exit 1 if one differs")
    parser.add_argument("--number", type=int, default=640)
    parser.add_argument("--explained", type=int, default=0, help="of how many plans the remedies are hashed too")
    parser.add_argument("--seconds", action="store_true")
    options = parser.parse_args()
    if options.seconds:
        seconds(options.number)
        return
    old = set(options.compare.read_text().splitlines()) if options.compare else None
    differing = total = 0
    for line in lines(options.number, explained=options.explained):
        print(line, flush=True)
        total += 1
        if old is not None and line not in old:
            differing += 1
            print(f"differs: {line}", file=sys.stderr)
    print(f"{total} lines, {differing} differ", file=sys.stderr)
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
