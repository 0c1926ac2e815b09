"""The plan for several GPUs: shared resources, communication, and the text about it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import (
    ADD_EFFICIENCY,
    AGREE_SECONDS,
    CPU_EFFICIENCY,
    EXCHANGE_EFFICIENCY,
    EXCHANGE_SECONDS,
    FEW_CTAS,
    FEW_EXCHANGE_EFFICIENCY,
    FORWARD_LAUNCHES,
    LINK_EFFICIENCY,
    LOADED_LATER_BYTES,
    NCCL_BYTES,
    NCCL_BYTES_EACH,
    NCCL_FEW_BYTES,
    NCCL_FEW_BYTES_EACH,
    NORM_EFFICIENCY,
    RANKS_SLOW,
    STEP_EFFICIENCY,
    THREAD_SLOWS,
)
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.units import format_bytes, rounded_up
from offloadkit.planner import LayerShape, MicroBatch, Pass, Plan, is_built, make_plan
from offloadkit.planner.cards import card_named
from offloadkit.planner.counts import Counts
from offloadkit.planner.layout import communicated_bytes, of_one
from offloadkit.planner.make import replanned, with_layers
from offloadkit.planner.ranks import NETWORK_BYTES_PER_SECOND, for_ranks
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import IN_VRAM, Seconds, StepModel, exchange_rate, link_rate
from tests.messages import has_facts
from tests.planner.machines import GIB, H200, shape, stage

N = 1 << 24
LARGE = 1e18
LATE = Placement(gradients="vram", step="cpu")


def layers_of(num_ranks: int, number: int = 4, numel: int = N, **changes: Any) -> list[LayerShape]:
    blocks = {"num_norm_blocks": numel >> 16, **changes}
    return [shape(f"block.{index}", numel, **blocks).shared_by(num_ranks) for index in range(number)]


def machine(**rates: float) -> Hardware:
    """Only the named rates take time."""
    names = [name for name in vars(H200) if name.endswith("_per_second")]
    every: dict[str, Any] = dict.fromkeys(names, LARGE) | {"launch_seconds": 0.0, "network_bytes_per_second": 0.0}
    return replace(H200, **every | rates)


def seconds(
    num_ranks: int, where: Placement, accumulation: int = 1, flops: int = 0, *, once: bool = False, **rates: float
) -> Seconds:
    """Seconds of a step of four equal blocks. Without `flops` nothing is computed. `once`: sums are exchanged."""
    layers, work = layers_of(num_ranks, exchanges_sums=once), Pass(flops=flops)
    stages = tuple(stage(layer.name, forward=work, backward=work) for layer in layers)
    made = StepModel(layers, MicroBatch(stages, 640), machine(**rates), accumulation)
    return made.seconds([where] * len(layers))


def plan(num_gpus: int = 1, hardware: Hardware = H200, numel: int = 1 << 26, **options: Any) -> Plan:
    layers = layers_of(num_gpus, 20, numel)
    work = Pass(flops=10**12)
    stages = tuple(stage(layer.name, kept=1 << 20, forward=work, backward=work) for layer in layers)
    hardware = for_ranks(hardware, num_gpus)
    return make_plan(layers, OffloadConfig(**options), work=MicroBatch(stages, 640), hardware=hardware)


def test_ranks_share_cores_and_dram_and_each_has_a_bus() -> None:
    two = for_ranks(H200, 2)
    assert (two.num_ranks, two.num_cores) == (2, 8)
    for name in ("dram", "cpu_adamw", "cpu_compact", "cpu_tiny", "cpu_and_bus"):
        assert getattr(two, f"{name}_bytes_per_second") == getattr(H200, f"{name}_bytes_per_second") / 2
    assert (two.h2d_bytes_per_second, two.both_bytes_per_second) == (55e9, 99e9)
    four = for_ranks(two, 4)
    assert four == replace(for_ranks(H200, 4), link_assumed=two.link_assumed)
    assert four.both_bytes_per_second == H200.cpu_and_bus_bytes_per_second / 4, "DRAM serves the copies of all ranks"
    assert two.ram_available_bytes == H200.ram_available_bytes
    assert for_ranks(H200, 1) is H200


def test_the_link_is_the_sheets_or_the_bus_and_says_so() -> None:
    sheet = for_ranks(H200, 2)
    assert sheet.link_bytes_per_second == LINK_EFFICIENCY * 450e9 == card_named("H200").link_bytes_per_second()
    assert has_facts(sheet.link_assumed, "2 GPUs", "NVLink", "234 GB/s")
    by_bus = for_ranks(replace(H200, gpu_name="NVIDIA GeForce RTX 4090"), 2)
    assert by_bus.link_bytes_per_second == H200.both_bytes_per_second / 2
    assert has_facts(by_bus.link_assumed, "2 GPUs", "bus", "49.5 GB/s")
    assert "NVLink" not in by_bus.link_assumed
    known = for_ranks(H200, 2, link=123e9)
    assert (known.link_bytes_per_second, known.link_assumed) == (123e9, "")
    assert [each.link_is_bus for each in (sheet, by_bus, known, for_ranks(H200, 2, link=12e9))] == [
        False,
        True,
        False,
        True,
    ], "no NVLink is slower than a bus"


def test_few_of_nccls_thread_blocks_are_chosen_where_the_link_is_fast_enough_with_them() -> None:
    """Few thread blocks leave more of the GPU for computing. A step of this plan computes for 0.1 s and exchanges 5.4
    GB."""
    for link, most_ctas in ((80e9, FEW_CTAS), (1e9, 0)):
        made = plan(2, replace(for_ranks(H200, 2, link=150e9), few_ctas_link_bytes_per_second=link), vram="60GiB")
        machine = made.basis.hardware
        assert machine is not None
        assert (machine.most_ctas, machine.link_bytes_per_second) == (most_ctas, link if most_ctas else 150e9)
        assert machine.few_ctas_link_bytes_per_second == 0, "the choice must not be repeated"
        assert not replanned(made, num_gpus=3).basis.hardware.link_is_bus, (
            "few thread blocks must not turn NVLink into a bus"
        )
        assert made.seconds == StepModel(made.layers, made.basis.work, machine, 1).seconds(made.placements)


def test_few_are_chosen_where_a_plan_fits_with_them_alone() -> None:
    """NCCL takes less VRAM with few thread blocks, but the link is so slow that the plan would prefer many."""
    slow = replace(for_ranks(H200, 2, link=150e9), few_ctas_link_bytes_per_second=1e9)
    least = plan(2, replace(H200, most_ctas=FEW_CTAS), vram="1GiB").needs()["vram"]
    for more, most_ctas in ((1 << 20, FEW_CTAS), (NCCL_BYTES - NCCL_FEW_BYTES + (1 << 20), 0)):
        made = plan(2, slow, vram=least + LOADED_LATER_BYTES + more)
        assert made.fits
        assert made.basis.hardware is not None
        assert made.basis.hardware.most_ctas == most_ctas


def test_python_is_slower_beside_the_cpus_steps_of_several_ranks() -> None:
    """Forward takes only Python's time here. A layer's forward waits for its step, so no step is left during the last
    one."""
    layers, work = layers_of(2), Pass(num_operations=1000)
    stages = tuple(stage(layer.name, forward=work, backward=Pass()) for layer in layers)
    for num_ranks, slower in ((1, THREAD_SLOWS), (2, RANKS_SLOW)):
        alike = replace(machine(launch_seconds=1e-3, cpu_adamw_bytes_per_second=1e5), num_ranks=num_ranks, num_cores=16)
        model = StepModel(layers, MicroBatch(stages, 640), alike, 1)
        alone, beside = (model.seconds([where] * 4).busy["launches"] for where in (IN_VRAM, LATE))
        forward = 4 * FORWARD_LAUNCHES * 1000 * 1e-3
        assert beside - alone == pytest.approx(slower * forward * 3 / 4, rel=1e-3)


def test_more_than_eight_are_on_several_hosts() -> None:
    made = for_ranks(H200, 16)
    assert (made.num_ranks, made.num_cores) == (8, 2)
    assert has_facts(made.link_assumed, "hosts of 8 ", "40 GB/s")
    took = 7 / made.link_bytes_per_second + 8 / NETWORK_BYTES_PER_SECOND
    assert link_rate(made, 16) == pytest.approx(15 / took)
    assert link_rate(made, 8) == made.link_bytes_per_second
    slowed = 7 / (EXCHANGE_EFFICIENCY * made.link_bytes_per_second) + 8 / NETWORK_BYTES_PER_SECOND
    assert exchange_rate(made, 16) == pytest.approx(15 / slowed), "the network is not slower beside backward"


@pytest.mark.parametrize("where", [IN_VRAM, Placement(), LATE])
def test_an_exchange_and_a_gather_take_what_the_link_takes(where: Placement) -> None:
    """Three ranks: each receives two other gradients of its third, and two thirds of the new weights."""
    rate = 1e9
    made = seconds(3, where, link_bytes_per_second=rate)
    exchange = 4 * (2 * 2 * layers_of(3)[0].own_numel / (EXCHANGE_EFFICIENCY * rate) + EXCHANGE_SECONDS)
    gather = 4 * (2 * (N - layers_of(3)[0].own_numel) / rate + EXCHANGE_SECONDS)
    assert made.busy["link"] == pytest.approx(exchange + gather)
    assert made.backward_phase == pytest.approx(exchange, rel=1e-3)
    assert made.update_phase == pytest.approx(gather + 2 * 2 * AGREE_SECONDS, rel=1e-3)
    more = seconds(3, where, accumulation=3, link_bytes_per_second=rate)
    assert more.busy["link"] == pytest.approx(3 * exchange + gather), "gradients of each micro-batch, weights once"
    assert "link" not in seconds(1, where).busy


@pytest.mark.parametrize("where", [IN_VRAM, LATE, Placement(gradients="vram", step="gpu")])
def test_sums_in_vram_are_exchanged_once_in_the_last_backward(where: Placement) -> None:
    """Three ranks: each receives two other sums of its third, in fp32. Exchange and addition of the last layer are not
    hidden."""
    rates = {"link_bytes_per_second": 1e9, "vram_bytes_per_second": 1e11, "bf16_flops_per_second": 1e12}
    own = layers_of(3)[0].own_numel
    exchange = 4 * (2 * 4 * own / (EXCHANGE_EFFICIENCY * 1e9) + EXCHANGE_SECONDS)
    adding = 4 * 3 * 12 * own / (1e11 * STEP_EFFICIENCY)
    for accumulation in (2, 4):
        made = seconds(3, where, accumulation, flops=10**12, once=True, **rates)
        alone = seconds(1, where, accumulation, flops=10**12, **rates)
        gather = 4 * (2 * (N - own) / 1e9 + EXCHANGE_SECONDS)
        assert made.busy["link"] == pytest.approx(exchange + gather)
        assert made.backward_phase - alone.backward_phase == pytest.approx(exchange / 4 + adding, rel=1e-3)
    once, each = (seconds(3, where, once=value, **rates) for value in (True, False))
    assert once == each, "with one micro-batch both exchanges are equal"


def test_sums_in_ram_are_added_there_before_the_norm() -> None:
    """The link carries only new weights. Each micro-batch goes to RAM whole, and is added to the whole sum."""
    own, dram = layers_of(3)[0].own_numel, 1e10
    rates = {"link_bytes_per_second": 1e9, "d2h_bytes_per_second": 1e9}
    made = seconds(3, Placement(), 2, once=True, cpu_adamw_bytes_per_second=dram, **rates)
    assert made.busy["link"] == pytest.approx(4 * (2 * (N - own) / 1e9 + EXCHANGE_SECONDS))
    assert made.busy["D2H"] == pytest.approx(2 * 4 * 2 * N / 1e9)
    traffic = layers_of(3)[0].step_bytes(2) / (CPU_EFFICIENCY["exact"] * dram)
    adding = (2 * 12 * N + (2 * 12 + 8) * own) / (ADD_EFFICIENCY * dram)
    norm = 4 * own / (NORM_EFFICIENCY * dram)
    assert made.busy["CPU step"] == pytest.approx(4 * (traffic + adding + norm))


def test_weights_in_ram_come_whole_over_each_bus_and_are_not_gathered() -> None:
    where = Placement("ram", gradients="vram", step="gpu")
    made = [seconds(number, where, h2d_bytes_per_second=1e9, link_bytes_per_second=1e9) for number in (1, 2)]
    own, bucket = layers_of(2)[0].own_numel, 2 * N
    states = [8 * numel + 2 * numel for numel in (N, own)]
    for each, passing, weights in zip(made, states, (N, own), strict=True):
        there = 4 * (bucket + passing + 2 * weights) + bucket  # one block is no longer in VRAM when backward begins
        assert each.busy["H2D"] == pytest.approx(there / 1e9)
    exchange = 4 * (2 * own / (EXCHANGE_EFFICIENCY * 1e9) + EXCHANGE_SECONDS)
    assert made[1].busy["link"] == pytest.approx(exchange), "gradients alone"


def test_copies_share_the_bus_with_a_link_that_goes_over_it() -> None:
    """With gradients and states in RAM, sums leave in backward and weights arrive in forward, together with the other
    ranks' data."""
    rates = {"d2h_bytes_per_second": 1e9, "h2d_bytes_per_second": 1e9, "link_bytes_per_second": 5e8}
    rates["most_ctas"] = FEW_CTAS  # which a bus always has
    own, received = 4 * N // 2, 4 * (N + EXCHANGE_SECONDS * 5e8)
    gradients = 4 * (N + EXCHANGE_SECONDS * FEW_EXCHANGE_EFFICIENCY * 5e8)
    for accumulation in (1, 2):
        apart = seconds(2, Placement(), accumulation, **rates)
        made = seconds(2, Placement(), accumulation, **rates, link_is_bus=True)
        assert made.busy["link"] == apart.busy["link"]
        assert made.busy["D2H"] - apart.busy["D2H"] == pytest.approx(accumulation * gradients / 1e9)
        assert made.busy["H2D"] - apart.busy["H2D"] == pytest.approx(received / 1e9), "new weights once"
    assert apart.busy["H2D"] == pytest.approx(2 * own / 1e9)
    streamed = Placement(gradients="vram", step="gpu")  # states travel in forward, like other ranks' new weights
    apart, made = (seconds(2, streamed, **rates, link_is_bus=value) for value in (False, True))
    for way in ("H2D", "D2H"):
        assert made.busy[way] - apart.busy[way] == pytest.approx(received / 1e9)
    assert seconds(2, IN_VRAM, **rates) == seconds(2, IN_VRAM, **rates, link_is_bus=True)


def test_the_link_works_beside_computing() -> None:
    """Only the last layer's exchange and the first layer's gather are not hidden."""
    flops = 10**12
    computing = {"bf16_flops_per_second": 1e12, "link_bytes_per_second": 1e9}
    made = seconds(2, IN_VRAM, flops=flops, **computing)
    exchange, gather = (N / (share * 1e9) + EXCHANGE_SECONDS for share in (EXCHANGE_EFFICIENCY, 1.0))
    assert made.backward_phase == pytest.approx(4 + exchange, rel=1e-4)
    assert made.update_phase == pytest.approx(4 + gather, rel=1e-3)


def test_the_bus_and_the_cores_have_a_ranks_part_to_move() -> None:
    """Half of the fp32 sum, states and stepped weights; received gradients of one micro-batch go to RAM whole."""
    d2h = seconds(2, Placement(), d2h_bytes_per_second=1e9).busy["D2H"]
    assert d2h == pytest.approx(4 * 4 * N / 2 / 1e9)
    added = seconds(2, Placement(), accumulation=2, d2h_bytes_per_second=1e9).busy["D2H"]
    assert added == pytest.approx(2 * 4 * 2 * N / 1e9)
    h2d = seconds(2, Placement(), h2d_bytes_per_second=1e9).busy["H2D"]
    assert h2d == pytest.approx(4 * 2 * N / 2 / 1e9)
    through = Placement(gradients="vram", step="gpu")
    assert seconds(2, through, h2d_bytes_per_second=1e9).busy["H2D"] == pytest.approx(4 * 10 * N / 2 / 1e9)


def test_what_a_gpu_receives_is_said_by_kind() -> None:
    made = plan(3, gradient_accumulation=4, exchange="micro_batch")
    layers = made.layers
    own = sum(layer.own_numel for layer in layers)
    exchange, gather, norm = 4 * 2 * 2 * own, 2 * (sum(layer.numel for layer in layers) - own), 8 * 20 * (1 << 10)
    assert made.communicated == {"exchange": exchange, "gather": gather, "norm": norm}
    assert made.to_dict()["communicated_bytes"] == made.communicated
    assert has_facts(made.details(), "receives", "exchange 6.67 GiB", "gather 1.67 GiB", "norm 160 KiB")
    assert max(map(len, made.details().splitlines())) <= 80
    alone = plan()
    assert (alone.communicated, alone.num_gpus) == ({}, 1)
    assert "receives" not in alone.details()
    streamed = [replace(where, weights="ram", gradients="ram", states="ram") for where in made.placements]
    assert communicated_bytes(layers, streamed, 1)["gather"] == 0, "ranks share the weights in RAM"


def test_an_equal_part_is_a_part_of_the_whole() -> None:
    whole = shape("block", 3 * 65536 + 256, num_norm_blocks=4)
    for number in (2, 3, 64):
        part = whole.shared_by(number)
        assert whole.numel <= number * part.own_numel < whole.numel + 256 * number
        assert part.own_numel % 256 == 0
        assert part.shared_by(5) == whole.shared_by(5)
        assert part.shared_by(1) == whole


def test_the_verdict_says_what_each_gpu_and_what_all_of_them_take() -> None:
    made = plan(2, vram="8GiB", ram="100GiB")
    assert made.seconds is not None
    assert made.budgets["ram"] == 50 * GIB
    assert made.num_tokens == 2 * 640
    assert made.tokens_per_second == 2 * 640 / made.seconds.step
    ram = f"{2 * made.needs()['ram'] / GIB:.2g}"
    vram = f"{made.needs()['vram'] / GIB:.2g}"
    assert made.verdict.startswith("FITS")
    assert has_facts(made.verdict, "2 GPUs", f"{vram} of 8 GiB VRAM each", f"{ram} of 100 GiB RAM in all")
    short = plan(2, vram="1GiB", ram="2GiB")
    assert short.verdict.startswith("DOES NOT FIT")
    needs = rounded_up(2 * short.needs()["ram"]) / GIB
    assert has_facts(short.verdict, "2 GPUs", f"{needs:.3g} GiB of RAM", "2 GiB")
    assert re.search(r'vram="\S+GiB", ram="\S+GiB".* would fit', short.explain()), "a larger budget is named"


def test_a_larger_budget_that_is_named_fits() -> None:
    short = plan(2, vram=NCCL_BYTES + (7616 << 20), ram="4GiB", numel=1 << 28)
    assert short.lacking().keys() >= {"ram"}
    needs = {"vram": short.needs()["vram"], "ram": 2 * short.needs()["ram"]}
    assert replanned(short, **needs).fits
    assert not replanned(short, **needs | {"ram": needs["ram"] - 4}).fits


def test_what_another_gpu_and_more_micro_batches_would_bring_is_said() -> None:
    made = plan(2, replace(H200, gpu_name=None, both_bytes_per_second=30e9), vram="6GiB", ram="100GiB")
    third = replanned(made, num_gpus=3)
    assert third.num_gpus == third.num_on_host == 3
    assert third.budgets["ram"] == 100 * GIB // 3
    rarely = replanned(made, gradient_accumulation=4)
    said = made.explain()
    assert "exchange=" not in said, "with one micro-batch both orders are equal"
    assert third.tokens_per_second is not None
    assert f"3 such GPUs would train {third.tokens_per_second:,.0f} tokens/s, " in said
    assert rarely.tokens_per_second is not None
    then = format_bytes(sum(rarely.communicated.values()) // 4)
    assert f"gradient_accumulation=4 would communicate {then} a micro-batch instead of 2.5 GiB: " in said
    assert f"{rarely.tokens_per_second:,.0f} tokens/s" in said
    alone = plan(vram="5GiB", ram="100GiB").explain()
    assert "2 such GPUs would train " in alone
    assert "communicate" not in alone


def test_another_gpu_is_named_only_where_it_is_faster() -> None:
    alone = plan(1, replace(H200, gpu_name=None, both_bytes_per_second=1e9), vram="6GiB", ram="100GiB")
    two = replanned(alone, num_gpus=2)
    assert two.fits
    assert two.tokens_per_second is not None
    assert alone.tokens_per_second is not None
    assert two.tokens_per_second < alone.tokens_per_second
    assert "such GPUs" not in alone.explain()


def test_more_micro_batches_are_named_only_where_they_are_faster() -> None:
    """Their sums take VRAM from weights or activations."""
    made = plan(2, vram="6GiB", ram="100GiB")
    rarely = replanned(made, gradient_accumulation=4)
    assert rarely.fits
    assert made.tokens_per_second is not None
    assert rarely.tokens_per_second is not None
    assert rarely.tokens_per_second < made.tokens_per_second
    assert "gradient_accumulation" not in made.explain()


def test_another_gpu_is_named_where_it_makes_a_plan_fit() -> None:
    """One GPU lacks RAM for the states; two GPUs hold them in VRAM."""
    short = plan(vram="13.75GiB", ram="6GiB")
    assert not short.fits
    (line,) = [line for line in short.explain().splitlines() if "such GPUs would fit" in line]
    assert ". 2 such GPUs would fit: " in line
    assert line.endswith(" tokens/s")
    assert replanned(short, num_gpus=2).fits


@pytest.mark.parametrize("exchange", ["step", "micro_batch"])
def test_what_the_other_order_of_exchange_would_bring_is_said(exchange: Literal["step", "micro_batch"]) -> None:
    slow = replace(H200, gpu_name=None, both_bytes_per_second=10e9)
    made = plan(2, slow, vram="16GiB", ram="100GiB", gradient_accumulation=4, exchange=exchange)
    other = replanned(made, exchange="micro_batch" if exchange == "step" else "step")
    assert made.tokens_per_second is not None
    assert other.tokens_per_second is not None
    (line,) = [line for line in made.explain().splitlines() if line.startswith("exchange=")]
    then, now = (format_bytes(sum(each.communicated.values())) for each in (other, made))
    assert f"would communicate {then} a step instead of {now}: {other.tokens_per_second:,.0f} tokens/s, " in line
    assert f"{other.tokens_per_second / made.tokens_per_second:.3g}x as fast" in line
    once, each = (made, other) if exchange == "step" else (other, made)
    assert sum(once.communicated.values()) < sum(each.communicated.values())
    assert once.tokens_per_second > each.tokens_per_second


DISK = replace(H200, disk_read_bytes_per_second=1e9, disk_write_bytes_per_second=1e9, disk_free_bytes=999 * GIB)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": 2}])
def test_weights_that_no_vram_holds_are_in_ram_once_a_host(options: dict[str, Any]) -> None:
    """Twenty blocks of 128 MiB; VRAM holds three, and the gradients of two."""
    made = plan(3, vram="3.75GiB", ram="100GiB", **options)
    streamed = [layer for layer, where in zip(made.layers, made.placements, strict=True) if where.weights == "ram"]
    assert made.fits
    assert streamed
    of_all = 3 * made.tiers["ram"]["working weights"]  # including copies, for the CPU step, of resident weights
    assert sum(layer.weight_bytes() for layer in streamed) <= of_all <= 20 * (made.layers[0].weight_bytes() + 3 * 512)
    resident, living = made.layers[:2]
    sizes, codes = of_one([resident, living], [IN_VRAM, Placement("ram")], 1)
    moved = sizes.moved(codes, frozen=7)
    assert moved == 7 + resident.weight_bytes() + living.stepped_bytes(), "each rank copies its own resident weights"
    assert made.communicated["gather"] == sum(
        layer.gathered_bytes(where) for layer, where in zip(made.layers, made.placements, strict=True)
    )


def test_states_are_on_disk_where_the_ram_of_a_host_has_no_room() -> None:
    made = plan(3, DISK, vram="5.75GiB", ram="13GiB")
    assert made.fits
    on_disk = [layer for layer, where in zip(made.layers, made.placements, strict=True) if where.states == "disk"]
    assert made.total_bytes("disk") == sum(sum(layer.state_bytes().values()) for layer in on_disk) > 0
    assert for_ranks(DISK, 3).disk_read_bytes_per_second == 1e9 / 3, "ranks share the disk"


def test_several_hosts_share_no_ram() -> None:
    """Neither weights nor sums exchanged once are in RAM on several hosts."""
    far = {"vram": "6GiB", "ram": "400GiB", "gradient_accumulation": 2}
    made, near = plan(16, **far), plan(8, **far)
    for each in (made, near, plan(16, **far, exchange="micro_batch")):
        one_host = each.num_gpus == each.num_on_host
        placed = zip(each.layers, each.placements, strict=True)
        assert all(is_built(where, layer, each.accumulation, one_host=one_host) for layer, where in placed)
    layer = made.layers[0]
    for where in (Placement(), Placement("ram", gradients="vram", step="gpu")):
        assert is_built(where, layer, 2, one_host=True)
        assert not is_built(where, layer, 2, one_host=False)
    assert is_built(Placement(), layer, 1, one_host=False)
    search = Search(made.layers, made.basis.work, made.basis.hardware, 2)  # type: ignore[arg-type]
    found = search.placements(Counts(0, 0, 20, 3))
    assert {(where.weights, where.gradients) for where in found} == {("vram", "vram")}


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (replace(H200, num_ranks=2), NCCL_BYTES),
        (replace(H200, num_ranks=4), NCCL_BYTES + 2 * NCCL_BYTES_EACH),
        (replace(H200, num_ranks=4, most_ctas=FEW_CTAS), NCCL_FEW_BYTES + 2 * NCCL_FEW_BYTES_EACH),
        (replace(H200, most_ctas=FEW_CTAS), NCCL_FEW_BYTES),
        (replace(H200, link_is_bus=True), NCCL_FEW_BYTES),
        (replace(H200, link_is_bus=True, network_bytes_per_second=1e9), NCCL_BYTES),
    ],
)
def test_nccl_has_its_vram(machine: Hardware, expected: int) -> None:
    one, two = (make_plan(layers_of(number), OffloadConfig(), work=None) for number in (1, 2))
    assert "framework" not in one.tiers["vram"]
    work = MicroBatch(tuple(stage(layer.name) for layer in one.layers), 640)
    made = [make_plan(each.layers, OffloadConfig(), work=work, hardware=machine) for each in (one, two)]
    assert made[1].tiers["vram"]["framework"] - made[0].tiers["vram"]["framework"] == expected
    for each in made:
        in_vram = Counts(0, 0, 0, len(each.layers))
        assert Search(each.layers, work, machine, 1).needs(in_vram).vram == each.needs()["vram"]


def test_a_rank_has_its_own_part_of_the_plan_of_all() -> None:
    made = plan(2)
    own = [replace(layer, own=layer.own_numel + 65536) for layer in made.layers]
    found = with_layers(made, own)
    assert list(found.layers) == own
    assert (found.placements, found.budgets, found.basis) == (made.placements, made.budgets, made.basis)
    assert found.total_bytes("vram") > made.total_bytes("vram")
