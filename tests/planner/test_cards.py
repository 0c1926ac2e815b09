"""Plans for absent cards."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import offloadkit
from benchmarks import table
from offloadkit.device import measure as measuring
from offloadkit.doors import planning
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError
from offloadkit.facts import hardware
from offloadkit.facts.units import parse_bytes
from offloadkit.planner import Plan
from offloadkit.planner.cards import CARDS, card_named
from tests.messages import has_facts
from tests.planner.machines import GIB

HOST = {
    "cpu_adamw_bytes_per_second": 12e9,
    "cpu_compact_bytes_per_second": 11e9,
    "cpu_tiny_bytes_per_second": 6e9,
    "dram_bytes_per_second": 15e9,
    "cpu_and_bus_bytes_per_second": 13e9,
}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("t4", "T4"),
        ("a100-80gb", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("A10 24GB", "A10"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060"),
        ("3060 12GB", "RTX 3060"),
        ("4060 Ti 16GB", "RTX 4060 Ti 16GB"),
        ("4070", "RTX 4070"),
        ("rtx4080", "RTX 4080"),
        ("5080", "RTX 5080"),
        ("5090", "RTX 5090"),
        ("A6000", "RTX A6000"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
    ],
)
def test_names_are_forgiven(given: str, name: str) -> None:
    assert card_named(given).name == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *((each, "") for each in ("", "RTX", "RTX 4090 Laptop GPU", "A10G", "RTX 3080", "a100-16gb", "H20")),
        ("4060 Ti", r"did you mean RTX 4060 Ti 16GB\? "),
        ("6000", r"did you mean RTX A6000 or RTX PRO 6000\? "),
    ],
)
def test_other_cards_are_refused_with_those_that_are_known(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"no card .* is known: {meant}gpu takes T4, L4, .*, H200, .*vram='12GiB'"):
        card_named(given)


@pytest.mark.parametrize(("given", "capability"), [("Tesla V100-SXM2-16GB", "7.0"), ("v100", "7.0"), ("P100", "6.0")])
def test_cards_that_torch_has_left_are_refused_by_name(given: str, capability: str) -> None:
    with pytest.raises(ConfigError) as refused:
        card_named(given)
    assert has_facts(str(refused.value), given[-4:] if given[0] == "P" else "V100", capability, "7.5", "T4")


def test_a_card_of_half_the_lanes_copies_half_as_fast() -> None:
    narrow, wide = card_named("4060 Ti 16GB").rates(), card_named("RTX 4070").rates()
    assert 2 * narrow["h2d_bytes_per_second"] == wide["h2d_bytes_per_second"]


def test_the_sheets_rates_are_what_an_h200_reached_of_its_own() -> None:
    alone = [row for row in table.read() if "beside other cases" not in (row["notes"] or "")]
    rows = [row["rates"] for row in alone if row["rates"] and row["gpu"] == "NVIDIA H200" and row["cores"] == 16]
    for name, rate in card_named("H200").rates().items():
        assert rate == pytest.approx(median(rates[name] for rates in rows), rel=0.01), name
    assert card_named("H200").usable_gib * GIB == pytest.approx(rows[-1]["vram_total_bytes"], rel=1e-3)


def test_usable_memory_is_less_than_the_sheets() -> None:
    for card in CARDS:
        assert 0.86 * card.memory_gb < card.usable_gib < card.memory_gb, card.name


@pytest.fixture(scope="module")
def plan() -> Callable[..., Plan]:
    shape = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))

    def made(gpu: str, **options: Any) -> Plan:
        return offloadkit.plan(model, gpu=gpu, batch_size=8, ram="16GiB", **options)

    return made


def test_each_card_has_its_own_rates() -> None:
    for card in CARDS:
        machine = planning.machine_with(card.name, offloadkit.OffloadConfig())
        assert machine.vram_total_bytes == int(card.usable_gib * GIB)
        assert machine.compute_capability == card.capability
        assert has_facts(machine.assumed, "not here", card.name, "data sheet")
    half = {card.name: card.rates()["fp16_flops_per_second"] for card in CARDS}
    order = ["RTX 3060", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4080", "RTX 5080", "RTX A6000", "L40S", "RTX PRO 6000"]
    assert sorted([*order, "B200"], key=half.__getitem__) == [*order, "B200"]


def test_a_plan_counts_the_cards_rates(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "host_rates", dict)
    names = ["T4", "L4", "RTX 4090", "H100", "B200"]
    gpu_seconds = []
    for card in map(card_named, names):
        made = plan(card.name)
        assert made.fits
        assert made.seconds is not None
        assert {layer.dtype for layer in made.layers} == ({"bf16"} if card.supports_bf16 else {"fp16", "fp32"})
        assert max(map(len, str(made).splitlines()[1:])) <= 80
        gpu_seconds.append(made.seconds.busy["forward"] + made.seconds.busy["backward"])
    assert gpu_seconds == sorted(gpu_seconds, reverse=True)
    assert len(set(gpu_seconds)) == len(names)


def test_a_t4_computes_attention_without_our_kernels(plan: Callable[..., Plan]) -> None:
    """The kernels need bf16 tensor cores. Without them, scores take VRAM."""
    t4, l4 = plan("T4"), plan("L4")
    assert t4.tiers["vram"]["activations"] > 2 * l4.tiers["vram"]["activations"]
    assert t4.basis.work is not None
    assert l4.basis.work is not None
    assert not any(stage.forward.num_attention for stage in t4.basis.work.stages)
    assert any(stage.forward.num_attention for stage in l4.basis.work.stages)


def test_the_host_is_this_one_if_it_was_measured(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "host_rates", dict)
    assumed = plan("T4")
    assert has_facts(str(assumed), "assumed", "8 cores")
    monkeypatch.setattr(planning, "host_rates", lambda: HOST)
    monkeypatch.setattr(hardware, "num_cores", lambda: 3)
    made = plan("T4")
    machine = made.basis.hardware
    assert machine is not None
    assert has_facts(str(made), "this machine", "3 cores", "measured")
    assert (machine.num_cores, machine.cpu_adamw_bytes_per_second) == (3, 12e9)
    assert machine.cpu_and_bus_bytes_per_second == machine.both_bytes_per_second > HOST["cpu_and_bus_bytes_per_second"]


def test_what_was_measured_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "own_rates", {})
    assert measuring.host_rates() == {}
    monkeypatch.setattr(measuring, "machine_rates", lambda device, meet: dict.fromkeys(measuring.RATES, 7.0))
    measuring.measure("cpu")
    assert measuring.host_rates() == dict.fromkeys(HOST, 7.0)


def test_vram_is_a_part_of_the_card(plan: Callable[..., Plan]) -> None:
    assert plan("H200", vram="2GiB").budgets["vram"] == parse_bytes("2GiB")
    with pytest.raises(ConfigError, match=r"a T4 has 14\.6 GiB of VRAM, less than vram='15GiB'"):
        plan("T4", vram="15GiB")


def test_without_a_card_the_first_line_says_which_is_assumed() -> None:
    verdict, rest = str(offloadkit.plan("t5-small", vram="8GiB", ram="8GiB", batch_size=1)).split("\n", 1)
    assert verdict.startswith("FITS (assumed card of 8 GiB): ")
    assert has_facts(rest, "no GPU here", "assumed", "gpu=", "RTX 4090", f"{len(CARDS)} cards")
    refused = offloadkit.plan("t5-small", vram="100MiB", ram="8GiB", batch_size=1)
    assert refused.verdict.startswith("DOES NOT FIT (assumed card of 100 MiB): needs ")


def test_the_command_takes_a_card(plan: Callable[..., Plan]) -> None:
    done = CliRunner().invoke(app, ["plan", "t5-small", "--gpu", "tesla t4", "--batch-size", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].startswith("  Planned for a card that is not here, T4,")
    assert plan("T4").to_dict()["assumed"].startswith("Planned for a card that is not here, T4,")
    refused = CliRunner().invoke(app, ["plan", "t5-small", "--gpu", "voodoo2"])
    assert refused.exit_code == 1
    assert "no card 'voodoo2' is known" in refused.stderr
