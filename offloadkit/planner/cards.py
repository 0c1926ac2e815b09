"""Cards by their data sheets: what a plan for a GPU that is not here is made for.

The rates are the sheet's, times what an H200 reached of its own sheet (`fitted`). Cards that their power limits, such
as a T4 of 70 W, reach less under a long load.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from offloadkit.errors import ConfigError
from offloadkit.hardware import Hardware
from offloadkit.planner.fitted import (
    BOTH_WAYS_EFFICIENCY,
    BUS_EFFICIENCY,
    FP32_EFFICIENCY,
    HALF_EFFICIENCY,
    VRAM_EFFICIENCY,
)

GIB = 1 << 30
PCIE_BYTES_PER_SECOND = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
"""One direction of 16 lanes, by generation: 8, 16 and 32 GT/s a lane, of which 128 of 130 bits are data (PCI-SIG)."""


@dataclass(frozen=True)
class Card:
    """A card's data sheet. Boards for desktops and servers; laptops' cards of the same name are others."""

    name: str
    capability: tuple[int, int]
    usable_gib: float
    """What CUDA lets processes have of its memory in all. Drivers differ by about 0.2 GiB."""
    gigabytes_per_second: float
    """Of its memory."""
    half_tflops: float
    """Dense matmuls in fp16, and in bf16 from capability 8.0 on, summed in fp32 (GeForce cards sum in fp16 at twice
    that). Sheets often name twice as much, "with sparsity"."""
    fp32_tflops: float
    """Without tensor cores."""
    pcie: int
    """Generation; all have 16 lanes."""
    source: str

    def rates(self) -> dict[str, float]:
        """The fields of `Hardware` that are the card's."""
        half, bus = HALF_EFFICIENCY * self.half_tflops * 1e12, PCIE_BYTES_PER_SECOND[self.pcie]
        return {
            "vram_bytes_per_second": VRAM_EFFICIENCY * self.gigabytes_per_second * 1e9,
            "bf16_flops_per_second": half,
            "fp16_flops_per_second": half,
            "fp32_flops_per_second": FP32_EFFICIENCY * self.fp32_tflops * 1e12,
            "h2d_bytes_per_second": BUS_EFFICIENCY * bus,
            "d2h_bytes_per_second": BUS_EFFICIENCY * bus,
            "both_bytes_per_second": 2 * BOTH_WAYS_EFFICIENCY * bus,
        }


_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet (June 2021)"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet (2023), half of what it names with sparsity"

CARDS = (
    Card("T4", (7, 5), 14.56, 320, 65, 8.1, 3, "NVIDIA T4 data sheet (March 2019)"),
    Card("L4", (8, 9), 22.03, 300, 121, 30.3, 4, "NVIDIA L4 data sheet (2023), half of what it names with sparsity"),
    Card("A10", (8, 6), 22.06, 600, 125, 31.2, 4, "NVIDIA A10 data sheet (March 2021)"),
    Card("RTX 3090", (8, 6), 23.68, 936, 71, 35.6, 4, "NVIDIA Ampere GA102 whitepaper, table of GeForce cards"),
    Card("RTX 4090", (8, 9), 23.64, 1008, 165.2, 82.6, 4, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    Card("RTX 5090", (12, 0), 31.36, 1792, 209.5, 104.8, 5, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
    Card("A100 40GB", (8, 0), 39.39, 1555, 312, 19.5, 4, _AMPERE),
    Card("A100 80GB", (8, 0), 79.15, 1935, 312, 19.5, 4, f"{_AMPERE}, PCIe's; SXM's memory has 2039 GB/s"),
    Card("H100", (9, 0), 79.1, 3350, 989, 67, 5, f"{_HOPPER}: SXM"),
    Card("H100 PCIe", (9, 0), 79.1, 2000, 756, 51, 5, f"{_HOPPER}: PCIe"),
    Card("H200", (9, 0), 139.8, 4800, 989, 67, 5, "NVIDIA H200 data sheet, half of what it names with sparsity"),
)
"""`usable_gib` is `total_memory` as torch prints it in public reports; the H200's was read from one."""

_SHORTEST = {"a100": "A100 80GB"}
"""What a name means that several cards begin with."""
_LEFT_OUT = ("nvidia", "geforce", "tesla", "rtx", "sxm2", "sxm4", "sxm5", "sxm", "gpu", "tensorcore", "hbm3e", "hbm3")


def card_named(name: str) -> Card:
    """The card of a name such as "RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090" or "a100-80gb".

    Raises:
        ConfigError: no such card is known.
    """
    wanted = _plain(name)
    by_name = {_plain(card.name): card for card in CARDS}
    found = by_name.get(wanted) or next((card for card in CARDS if wanted and card.name == _SHORTEST.get(wanted)), None)
    if found is None:
        short = {key.removesuffix("gb").rstrip("0123456789"): key for key in ()}
        del short
        found = by_name.get(re.sub(r"\d+gb$", "", wanted))
    if found is None:
        known = ", ".join(card.name for card in CARDS)
        raise ConfigError(f"no card {name!r} is known; gpu may be {known}. For another card give its size: vram='12GiB'")
    return found
