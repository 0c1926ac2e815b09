"""Plans for a machine measured earlier; nothing is trained, and the machine is not needed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import table
from benchmarks.cases import CASES, ENGINES, Case, config_of
from benchmarks.rank_cases import RANK_CASES
from benchmarks.run import git_commit, of_case
from benchmarks.table import Row
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.fitted import FEW_CTAS
from offloadkit.facts.hardware import Hardware
from offloadkit.planner import LayerShape, MicroBatch, make_plan
from offloadkit.planner.search import Counts, Search

NORMS_OF_SEVERAL_OPERATIONS = ("c9fd74b", "d6b17f7", "31ba1b9", "e91df0c", "80b4ada")
"""Commits before norms were one kernel."""
EAGER_ATTENTION = (*NORMS_OF_SEVERAL_OPERATIONS, "ba2139a", "c40b67e")
"""Commits before T5's attention ran in offloadkit's kernels."""
DECODER_KERNELS = "2026-11-27T16:30"
"""Rows of earlier dates ran gated activations and rotary embeddings in torch's operations."""
LOSS_KERNELS = "2026-11-27T19:40"
"""Rows of earlier dates computed the loss of a chunk in torch's operations."""
SLOWER_GRAPHS = ("eee5c4c",)
"""Commits whose graphed blocks took Python one and a half times as long."""
LINK_OF_SMALL_PIECES = {"e91ecd8": 251e9, "ad13262": 54e9}
"""Commits that measured the link with pieces of 32 MiB, which gave 136 and 34 to 37 GB/s. The pieces of later commits
gave these bytes per second between the same cards, with NCCL's own number of thread blocks and with few."""


def plan_cases(names: Sequence[str] = (), *, out: Path = table.PATH, commit: str | None = None) -> list[Row]:
    """Append a planned row for each case to `out`, replacing its older planned rows, and return the new rows.

    The rates come from the newest measured row of an H200 with as many cores as the case, the budgets from the case.

    Args:
        names: keys of `CASES`; none: all cases of claim "fit".

    Raises:
        ValueError: no row of `out` has rates of an H200 with as many cores, or a case does not fit.
    """
    commit = commit or git_commit()
    rows = table.read(out)
    rated = [row for row in rows if row["case"] in CASES and row["rates"] and "H200" in (row["gpu"] or "")]
    made = []
    for name in names or [name for name, case in CASES.items() if case.claim == "fit"]:
        case = CASES[name]
        of_cores = [row for row in rated if CASES[row["case"]].cores == case.cores]
        if not of_cores:
            cores = case.cores or "all its"
            raise ValueError(
                f"{out} has no row with rates of an H200 with {cores} cores: run a case of offloadkit's there first"
            )
        source = max(of_cores, key=lambda row: row["date"])
        made.append(_planned(name, case, source) | {"commit": commit})
        print(f"{name}: {made[-1]['planned_seconds']:.3f} s planned")
    fresh = {row["case"] for row in made}
    table.write([row for row in rows if row["status"] != "planned" or row["case"] not in fresh] + made, out)
    return made


def _planned(name: str, case: Case, source: Row) -> Row:
    setup = ENGINES["offloadkit"]
    limits = case.limits(setup)
    machine = hardware_of(source["rates"])
    vram = limits["vram"] or machine.vram_total_bytes
    machine = replace(machine, vram_total_bytes=vram, vram_free_bytes=vram)
    layers, work = layers_and_work(case.model, case.dtype, case.batch_size, case.input_length, case.target_length)
    layers = [replace(layer, kind=replace(layer.kind, precision=case.precision)) for layer in layers]
    config = OffloadConfig(
        precision=case.precision,
        gradient_accumulation=case.accumulation,
        working_dtype=case.dtype,
        vram=vram,
        ram=limits["ram"],
        max_grad_norm=1.0,
    )
    made = make_plan(layers, config, work=work, hardware=machine)
    if not made.fits or made.seconds is None:
        raise ValueError(f"{name} does not fit its budgets by the plan: {made.lacking()}")
    return of_case(name, case, setup) | {
        "engine": "offloadkit",
        "status": "planned",
        "date": table.now(),
        **{column: source[column] for column in ("gpu", "cpu", "cores", "ram_bytes", "torch", "transformers")},
        "offloadkit": source["offloadkit"],
        "num_parameters": made.num_parameters,
        "seconds": made.seconds.step,
        "planned_seconds": made.seconds.step,
        **{f"planned_{tier}_bytes": made.total_bytes(tier) for tier in ("vram", "ram", "disk")},
        "placements": {str(where): number for where, number in Counter(made.placements).items()},
        "figures": {"graphs": made.graphs.number} if made.graphs and made.is_graphed else None,
        "notes": f"rates of the H200 of {source['date'][:10]}",
    }


def hardware_of(rates: dict[str, Any]) -> Hardware:
    """A machine from a row's rates."""
    found = {"cpu_and_bus_bytes_per_second": rates["cpu_adamw_bytes_per_second"]} | rates  # the first rows lack it
    return Hardware(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


def inputs_of(row: Row) -> tuple[list[LayerShape], MicroBatch, Hardware, bool]:
    """Layers, work and machine of a measured row, and whether its blocks were compiled."""
    compiled = row["engine"].endswith("-compiled")
    layers, work = layers_and_work(
        *(row[name] for name in ("model", "dtype", "batch_size", "input_length", "target_length")),
        norms=row["commit"] not in NORMS_OF_SEVERAL_OPERATIONS and not compiled,
        attention=row["commit"] not in EAGER_ATTENTION,
        decoders=row["date"] >= DECODER_KERNELS and not compiled,
        loss=row["date"] >= LOSS_KERNELS,
    )
    case = RANK_CASES.get(row["case"])
    layers = [
        replace(layer, kind=replace(layer.kind, precision=row["precision"]), exchanges_sums=True).shared_by(
            case.num_gpus if case else 1
        )
        for layer in layers
    ]
    machine = hardware_of(row["rates"])
    if row["commit"] in LINK_OF_SMALL_PIECES and machine.num_ranks > 1:
        most_ctas = FEW_CTAS if row["commit"] == "ad13262" else 0
        machine = replace(machine, link_bytes_per_second=LINK_OF_SMALL_PIECES[row["commit"]], most_ctas=most_ctas)
    figures = row["figures"] or {}
    timed = figures.get("operation_launches")
    launches, spread = tuple(timed) if timed else None, figures.get("python_spread", 1.0)
    return layers, replace(work, operation_launches=launches, python_spread=spread), machine, compiled


def ran_as_graphs(row: Row) -> bool:
    """Whether blocks of a measured row ran as CUDA graphs."""
    return bool((row["figures"] or {}).get("graphs"))


def as_placed(row: Row) -> tuple[Search, Counts]:
    """The placements that the plan of a row chose, with a search for the machine as measured in that run.

    Raises:
        ValueError: the present search has no such placements.
    """
    layers, work, machine, compiled = inputs_of(row)
    search = Search(layers, work, machine, row["accumulation"], compiled=compiled, graphed=ran_as_graphs(row))
    number: dict[str, int] = row["placements"]

    def count(*words: str) -> int:
        return sum(times for where, times in number.items() if all(word in where for word in words))

    offloaded = count("'offload'")
    counts = Counts(
        recomputed=count("'checkpoint'") + offloaded,
        offloaded=offloaded,
        streamed=count("weights='ram'"),
        states_in_vram=count("states='vram'"),
        gpu_steps=count("states='ram'", "step='gpu'"),
        cheap=count("'cheap'"),
    )
    on_disk = range(len(layers) + 1) if "disk" in str(number) else [0]
    for kept, states_on_disk in product(("none", "gpu", "all"), on_disk):
        found = counts._replace(gradients_in_vram=kept, states_on_disk=states_on_disk)
        if Counter(map(str, search.placements(found))) == number:
            return search, found
    raise ValueError(f"no placements are these: {number}")


@functools.cache
def layers_and_work(
    model: str,
    dtype: Any,
    rows: int,
    tokens: int,
    targets: int,
    *,
    norms: bool = True,
    attention: bool = True,
    decoders: bool = True,
    loss: bool = True,
) -> tuple[list[LayerShape], MicroBatch]:
    """Layers and traced micro-batch of a case's model as offloadkit trains it on a GPU.

    Args:
        rows, tokens, targets: shape of the micro-batch; targets 0: a model without a decoder's targets.
        norms, attention, decoders, loss: whether offloadkit's kernels run them; older rows were measured without these
            kernels.
    """
    from offloadkit.engine.tracing import trace_micro_batch
    from offloadkit.hf.load import auto_class_of, infer_task
    from offloadkit.hf.loss import compute_loss_in_chunks
    from offloadkit.hf.patches import fuse_attention, fuse_decoders, fuse_norms
    from offloadkit.offload.layers import flat_layers

    config = config_of(model)
    config.use_cache = False
    if config.model_type == "t5":
        config._attn_implementation = "eager"
    with torch.device("meta"):
        built: Any = auto_class_of(config, infer_task(config)).from_config(config).bfloat16().train()
    layers = flat_layers(built, OffloadConfig(working_dtype=dtype))
    for layer in layers:
        for view in layer.views:
            view.parameter.data = view.parameter.data.to(layer.dtype)
    compute_loss_in_chunks(built, fused=loss)
    if norms:
        fuse_norms(built)
    if attention:
        fuse_attention(built)
    shapes = {"input_ids": (rows, tokens), "labels": (rows, targets or tokens)}
    batch = {name: torch.empty(size, dtype=torch.int64, device="meta") for name, size in shapes.items()}
    undo = fuse_decoders(built) if decoders else lambda: None
    work = trace_micro_batch(built, batch)
    undo()
    return [layer.shape() for layer in layers], work
