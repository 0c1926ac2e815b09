"""Data sheets of GPUs, for plans on a GPU that this machine lacks.

A card's rates are its data sheet's times the fraction that an H200 reached (`fitted`). Cards with a low power limit (T4
and L4: 70 and 72 W) reach less under a long load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from offloadkit.errors import ConfigError, shown
from offloadkit.facts.fitted import (
    BOTH_WAYS_EFFICIENCY,
    BUS_EFFICIENCY,
    FP32_EFFICIENCY,
    HALF_EFFICIENCY,
    LINK_EFFICIENCY,
    VRAM_EFFICIENCY,
)

PCIE_BYTES_PER_SECOND = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""Bytes per second of 16 lanes in one direction, by generation: 8, 16 and 32 GT/s a lane; 128 of 130 bits are data
(PCI-SIG).
"""
_LANES = 16
NATIVE_BF16 = (8, 0)
"""Lowest compute capability whose tensor cores take bf16 (CUDA C++ Programming Guide, "Compute Capabilities")."""


@dataclass(frozen=True)
class Card:
    """The data sheet of a desktop or server card. Laptop cards of the same name differ."""

    name: str
    capability: tuple[int, int]
    memory_gb: int
    usable_gib: float
    """Memory that CUDA gives to all processes, as in torch's out-of-memory messages. Drivers differ by 0.2 GiB."""
    memory_gb_per_second: float
    half_tflops: float
    """Dense matmuls in fp16 (and bf16 if native), accumulated in fp32."""
    fp32_tflops: float
    """Without tensor cores."""
    pcie: int
    """PCIe generation."""
    source: str
    nvlink_gb_per_second: float = 0.0
    """NVLink to all other GPUs of the host, in one direction; 0 without NVLink. Bridges that join two cards do not
    count.
    """
    lanes: int = _LANES
    """PCIe lanes."""

    @property
    def supports_bf16(self) -> bool:
        return self.capability >= NATIVE_BF16

    def link_bytes_per_second(self) -> float:
        """Bytes per second that the GPU receives over NVLink in an exchange between all GPUs of a host; 0 without
        NVLink.
        """
        return LINK_EFFICIENCY * self.nvlink_gb_per_second * 1e9

    def rates(self) -> dict[str, float]:
        half = HALF_EFFICIENCY * self.half_tflops * 1e12
        bus = PCIE_BYTES_PER_SECOND[self.pcie] * self.lanes / _LANES
        return {
            "h2d_bytes_per_second": BUS_EFFICIENCY * bus,
            "d2h_bytes_per_second": BUS_EFFICIENCY * bus,
            "both_bytes_per_second": BOTH_WAYS_EFFICIENCY * 2 * bus,
            "vram_bytes_per_second": VRAM_EFFICIENCY * self.memory_gb_per_second * 1e9,
            "bf16_flops_per_second": half if self.supports_bf16 else FP32_EFFICIENCY * self.fp32_tflops * 1e12,
            "fp16_flops_per_second": half,
            "fp32_flops_per_second": FP32_EFFICIENCY * self.fp32_tflops * 1e12,
        }


_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_GEFORCE = "specifications: 2 FLOPS x CUDA cores x boost clock; tensor cores twice that, as in the whitepaper"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, PCIe (SXM's 80 GB: 2039 GB/s)"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, half of its FLOPS with sparsity"
_H200 = "NVIDIA H200 data sheet, half of its FLOPS with sparsity"
_A6000 = "NVIDIA RTX A6000 data sheet, half of its tensor FLOPS with sparsity"
_L40S = "NVIDIA L40S data sheet"
_PRO = "NVIDIA RTX PRO 6000 Blackwell data sheet, tensor FLOPS of the RTX Blackwell PRO whitepaper"
_B200 = "NVIDIA HGX B200 data sheet, an eighth of the board, half of its FLOPS with sparsity"

CARDS = (
    Card("T4", (7, 5), 16, 14.56, 320, 65, 8.1, 3, "NVIDIA T4 Tensor Core GPU data sheet"),
    Card("L4", (8, 9), 24, 22.03, 300, 121, 30.3, 4, "NVIDIA L4 data sheet, half of its FLOPS with sparsity"),
    Card("A10", (8, 6), 24, 22.06, 600, 125, 31.2, 4, "NVIDIA A10 Tensor Core GPU data sheet"),
    Card("RTX 3060", (8, 6), 12, 11.76, 360, 25.5, 12.7, 4, f"GeForce RTX 3060 {_GEFORCE} of Ampere"),
    Card("RTX 3090", (8, 6), 24, 23.68, 936, 71, 35.6, 4, _AMPERE),
    Card("RTX 4060 Ti 16GB", (8, 9), 16, 15.60, 288, 44.1, 22.1, 4, f"GeForce RTX 4060 Ti {_GEFORCE} of Ada", lanes=8),
    Card("RTX 4070", (8, 9), 12, 11.73, 504, 58.3, 29.1, 4, f"GeForce RTX 4070 {_GEFORCE} of Ada"),
    Card("RTX 4080", (8, 9), 16, 15.69, 716.8, 97.5, 48.7, 4, _ADA),
    Card("RTX 4090", (8, 9), 24, 23.64, 1008, 165.2, 82.6, 4, _ADA),
    Card("RTX 5080", (12, 0), 16, 15.47, 960, 112.6, 56.3, 5, _BLACKWELL),
    Card("RTX 5090", (12, 0), 32, 31.36, 1792, 209.5, 104.8, 5, _BLACKWELL),
    Card("RTX A6000", (8, 6), 48, 47.54, 768, 154.8, 38.7, 4, _A6000),
    Card("L40S", (8, 9), 48, 44.52, 864, 362, 91.6, 4, _L40S),
    Card("RTX PRO 6000", (12, 0), 96, 94.97, 1792, 503.8, 125, 5, _PRO),
    Card("A100 40GB", (8, 0), 40, 39.39, 1555, 312, 19.5, 4, _A100),
    Card("A100", (8, 0), 80, 79.15, 1935, 312, 19.5, 4, _A100),
    Card("H100", (9, 0), 80, 79.10, 3350, 989, 67, 5, f"{_H100}, SXM", 450),
    Card("H100 PCIe", (9, 0), 80, 79.10, 2000, 756, 51, 5, f"{_H100}, PCIe"),
    Card("H200", (9, 0), 141, 139.80, 4800, 989, 67, 5, _H200, 450),
    Card("B200", (10, 0), 180, 178.36, 8000, 2250, 75, 5, _B200, 900),
)
_TOO_OLD = {"v100": "7.0", "p100": "6.0"}
"""Cards that torch's builds for CUDA 13 have left, with their compute capabilities (CUDA 13.0 release notes)."""
_SAYS_NO_MORE = re.compile(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d?e?|blackwell|(workstation|server) edition|[^a-z0-9]")


def card_named(name: str) -> Card:
    """A card by a name such as "RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090" or "a100-80gb".

    Raises `ConfigError` if the card is unknown, or older than torch's builds.
    """
    wanted = _plain(name) if isinstance(name, str) else ""
    for given in (wanted, wanted.replace("pcie", "")):
        for card in CARDS:
            if given in (_plain(card.name), f"{_plain(card.name)}{card.memory_gb}gb"):
                return card
    for old, capability in _TOO_OLD.items():
        if wanted.startswith(old):
            raise ConfigError(
                f"a {old.upper()} has compute capability {capability}, and torch's builds begin at 7.5: gpu takes "
                f"cards from the T4 on, such as {CARDS[0].name}, {CARDS[1].name} or RTX 3060"
            )
    names = [card.name for card in CARDS]
    near = [each for each in names if wanted in _plain(each)] if len(wanted) > 3 else []  # other digits: another card
    meant = f"did you mean {' or '.join(near)}? gpu" if near else "gpu"
    raise ConfigError(
        f"no card {shown(name)} is known: {meant} takes {', '.join(names)}. For another card leave "
        "gpu out and give its memory, such as vram='12GiB': its rates are assumed then"
    )


def _plain(name: str) -> str:
    return _SAYS_NO_MORE.sub("", name.lower())
