"""Colours that colour-blind people can tell apart (Okabe and Ito), on light and on dark."""

from __future__ import annotations

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
GREY, PALE = "#8C8C8C", "#BDBDBD"

COLOURS = {
    "working weights": BLUE,
    "weight buffers": SKY,
    "frozen weights": GREY,
    "gradients": VERMILION,
    "master weights": GREEN,
    "moments": ORANGE,
    "state buffers": YELLOW,
    "activations": PURPLE,
    "framework": PALE,
    "other": GREY,
    "forward": BLUE,
    "backward": SKY,
    "wait for bus": VERMILION,
    "wait for CPU step": ORANGE,
    "step on the GPU": GREEN,
    "data and the rest": PALE,
    "CPU step": ORANGE,
    "GPU step": GREEN,
    "H2D": VERMILION,
    "D2H": VERMILION,
}
"""Colours of the categories of memory and of the parts of a step. A resource has the colour of the wait for it."""

_WHITE_ON = {BLUE, GREEN, VERMILION, GREY}


def colour(name: str) -> str:
    """Colour of a category or a part; unknown ones are grey."""
    return COLOURS.get(name, GREY)


def ink_on(background: str) -> str:
    """Black or white, whichever is read more easily."""
    return "#FFFFFF" if background in _WHITE_ON else "#000000"
