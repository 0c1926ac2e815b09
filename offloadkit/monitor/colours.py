"""Colours that colour-blind people can distinguish (Okabe and Ito), on light and dark backgrounds."""

from __future__ import annotations

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
GREY, PALE = "#8C8C8C", "#BDBDBD"

_NAMES = {
    BLUE: ("working weights", "forward"),
    SKY: ("weight buffers", "backward"),
    GREEN: ("master weights", "step on the GPU", "GPU step"),
    ORANGE: ("moments", "wait for CPU step", "CPU step"),
    VERMILION: ("gradients", "wait for bus", "RAM -> GPU", "GPU -> RAM"),
    PURPLE: ("activations",),
    YELLOW: ("state buffers",),
    GREY: ("frozen weights", "other"),
    PALE: ("framework", "data and the rest"),
}
COLOURS = {name: shade for shade, names in _NAMES.items() for name in names}
"""Colours of memory categories and of a step's parts. A resource has the same colour as waits for it."""

_WHITE_ON = {BLUE, GREEN, VERMILION, GREY}


def colour(name: str) -> str:
    """Colour of a category or part; grey if unknown."""
    return COLOURS.get(name, GREY)


def ink_on(background: str) -> str:
    """Black or white, whichever is more readable."""
    return "#FFFFFF" if background in _WHITE_ON else "#000000"
