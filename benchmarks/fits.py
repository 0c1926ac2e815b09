"""The README's table "Will it fit?": `python -m benchmarks fits` plans models for cards by their data sheets.

Only bytes decide, so the table is the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import offloadkit

README = Path(__file__).parent.parent / "README.md"
GIB = 1 << 30
CARDS = ("T4", "RTX 3060", "RTX 4090", "A100 80GB")
MODELS = (
    "t5-large",
    "llama-3.2-1b",
    "t5-3b",
    "llama-3.2-3b",
    "mistral-7b",
    "llama-3.1-8b",
    "t5-11b",
    "llama-2-13b",
    "llama-3.1-70b",
)
RAM_GIB = (8, 16, 32, 64, 96, 128, 192, 256)
"""RAM of ordinary machines."""
FREE = 0.9
"""Fraction of its RAM that a machine leaves to the training."""
WITHOUT_OFFLOADING_GIB = 4
"""RAM that Python, CUDA and the loading take at most where nothing is offloaded."""
BATCH_SIZE = 4


def answer(model: str, card: str) -> str:
    """ "yes" without offloading, the GiB of RAM that the machine needs, or "no"."""
    roomy = planned(model, card, RAM_GIB[-1])
    if not roomy.fits:
        return "no"
    if roomy.total_bytes("ram") <= WITHOUT_OFFLOADING_GIB * GIB:
        return "yes"
    return f"{_least(model, card, RAM_GIB)} GiB"


def _least(model: str, card: str, sizes: Sequence[int]) -> int:
    """The first of the ascending `sizes` that is enough; the last one is."""
    if len(sizes) == 1:
        return sizes[0]
    middle = (len(sizes) - 1) // 2
    enough = planned(model, card, sizes[middle]).fits
    return _least(model, card, sizes[: middle + 1] if enough else sizes[middle + 1 :])


def planned(model: str, card: str, ram_gib: int) -> offloadkit.Plan:
    return offloadkit.plan(model, gpu=card, ram=int(FREE * ram_gib * GIB), batch_size=BATCH_SIZE)


def table() -> str:
    lines = [["model", *CARDS], ["---"] * (len(CARDS) + 1)]
    lines += [[model, *(answer(model, card) for card in CARDS)] for model in MODELS]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def page() -> str:
    """The README with its table replaced."""
    return re.sub(MARKED, lambda found: f"{found[1]}\n{table()}\n{found[3]}", README.read_text(), flags=re.DOTALL)


MARKED = r"(<!-- fits -->)(.*?)(<!-- end of fits -->)"
