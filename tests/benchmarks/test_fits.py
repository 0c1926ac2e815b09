"""The README's table "Will it fit?"."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from benchmarks import fits


def shown() -> list[list[str]]:
    """The cells of the README's table, without its line of dashes."""
    found = re.search(fits.MARKED, fits.README.read_text(), re.DOTALL)
    assert found
    lines = [line.strip("|").split("|") for line in found[2].strip().splitlines()]
    return [lines[0], *lines[2:]]


def test_the_table_has_every_model_and_card() -> None:
    titles, *lines = shown()
    assert tuple(titles[1:]) == fits.CARDS
    assert tuple(line[0] for line in lines) == fits.MODELS


@pytest.mark.slow(60)
def test_each_cell_is_what_the_plan_says_now() -> None:
    """The RAM shown is enough, and the next smaller machine is not."""
    smaller = {f"{above} GiB": below for below, above in pairwise(fits.RAM_GIB)}
    for model, *cells in shown()[1:]:
        for card, cell in zip(fits.CARDS, cells, strict=True):
            about = f"{model} on {card}: {cell}; run `python -m benchmarks fits`"
            if cell in ("yes", "no"):
                roomy = fits.planned(model, card, fits.RAM_GIB[-1])
                assert roomy.fits == (cell == "yes"), about
                assert cell == "no" or roomy.total_bytes("ram") <= fits.WITHOUT_OFFLOADING_GIB * fits.GIB, about
            else:
                assert fits.planned(model, card, int(cell.split()[0])).fits, about
                assert cell not in smaller or not fits.planned(model, card, smaller[cell]).fits, about
