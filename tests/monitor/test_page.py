"""The drawings: well-formed, labelled for screen readers, and safe whatever the names."""

from __future__ import annotations

import io
import math
import re
import time
from base64 import b64decode
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from rich.console import Console

from offloadkit.monitor import words
from offloadkit.monitor.figures import Figures, History, Memory, figures
from offloadkit.monitor.notebook import last_view
from offloadkit.monitor.page import STYLE, WIDTH, log_ticks, loss_chart, page, switches, ticks
from offloadkit.monitor.picture import png
from offloadkit.monitor.terminal import sparks, view
from offloadkit.monitor.words import COLOURS, VERMILION, ink_on
from tests.monitor.records import GIB, record

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """<script>alert("1")</script>&'"""


def shown(number: int = 60, **changes: object) -> Figures:
    history = History()
    for step in range(1, number + 1):
        history.add(record(step, 3 / step))
    made = figures(history, total_steps=100, baseline_seconds=0.5)
    vram, ram = made.memory
    memory = (replace(vram, budget=11 * GIB), replace(ram, budget=500 * GIB))
    return replace(made, **({"memory": memory} | changes))  # type: ignore[arg-type]


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def words_in(element: ElementTree.Element) -> str:
    return " ".join(text for text in element.itertext() if text != STYLE)


def test_the_page_is_well_formed_and_has_every_figure() -> None:
    text = words_in(parsed(page(shown(), "a1", "a note")))
    for wanted in (
        "step 60 of 100",
        "2.00×",
        "measured baseline",
        "640",
        "time left",
        "learning rate",
        "gradient norm",
        "VRAM",
        "8 GiB used, 7 GiB planned, budget 11 GiB",
        "working weights",
        "other",
        "RAM",
        "budget 500 GiB →",
        "forward",
        "backward",
        "wait for bus",
        "wait for CPU step",
        "data and the rest",
        "CPU step",
        "RAM -> GPU",
        "GPU -> RAM",
        "600 ms busy",
        "Loss",
        "a note",
    ):
        assert wanted in text, wanted


def test_every_chart_has_a_role_a_title_and_a_description() -> None:
    charts = parsed(page(shown(), "a1")).findall(f".//{SVG}svg")
    assert len(charts) == 5, "loss, its logarithm, VRAM, RAM, a step"
    for chart in charts:
        assert chart.get("role") == "img"
        title, description = chart.find(f"{SVG}title"), chart.find(f"{SVG}desc")
        assert title is not None
        assert description is not None
        assert chart.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert len(title.text or "") > 5
        assert len(description.text or "") > 20


@pytest.mark.parametrize("last", [700, 1999, 2000, 2003, 100_000])
def test_no_step_below_the_loss_chart_is_cut_off(last: int) -> None:
    chart = loss_chart(shown(loss_curve=[(1, 2.0), (last, 1.0)], loss_trend=[], evaluations=[]), "a1")
    for number, anchor in re.findall(r'<text x="([0-9.]+)" y="205.0" text-anchor="(\w+)">', chart):
        assert float(number) + {"start": 40, "middle": 20, "end": 0}[anchor] <= WIDTH


def test_two_monitors_share_no_id() -> None:
    def ids(ident: str) -> set[str]:
        return set(re.findall(r' id="([^"]+)"', page(shown(), ident)))

    assert len(ids("a1")) == 1 + 5 * 2 + 2
    assert not ids("a1") & ids("b2")


def test_hostile_names_are_text() -> None:
    memory = (Memory(HOSTILE, ((HOSTILE, GIB),), GIB, GIB, None),)
    html = page(shown(memory=memory, split=((HOSTILE, 1.0),), why_no_slowdown=HOSTILE, slowdown=None), "a1", HOSTILE)
    root = parsed(html)
    assert not root.findall(".//script")
    assert words_in(root).count(HOSTILE) >= 5
    assert "<script" not in html


def test_nothing_is_fetched_and_nothing_runs() -> None:
    html = page(shown(), "a1")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|<img|<link|@import| on\w+=", html)
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {"#a1-m0-h", "#a1-m1-h"}


def test_segments_and_legend_have_the_same_numbers() -> None:
    root = parsed(page(shown(), "a1"))
    vram = root.findall(f".//{SVG}svg")[2]
    numbers = [text.text for text in vram.findall(f"{SVG}text") if (text.text or "").isdigit()]
    assert numbers == ["1", "2", "3", "4"]
    legend = root.findall(".//div[@class='okm-legend']")[1]
    assert [key.text for key in legend.iter("i")] == numbers


def test_marks_lie_where_their_sizes_are() -> None:
    vram, far = (replace(tier, used=5 * GIB) for tier in shown().memory)
    drawn = page(shown(memory=(vram,)), "a1")
    full = 11 * 1.02
    assert f"M{WIDTH * 11 / full:.1f} 5" in drawn
    assert f"M{WIDTH * 7 / full:.1f} 16" in drawn
    assert 'stroke-dasharray="4 3"' not in page(shown(memory=(far,)), "a1"), "a budget far away is named at the edge"


@pytest.mark.parametrize("number", [0, 1, 2, 3, 20])
def test_a_run_that_has_just_begun_can_be_drawn(number: int) -> None:
    history = History()
    for step in range(1, number + 1):
        history.add(record(step, bytes={}))
    made = figures(history)
    parsed(page(made, "a1"))
    assert words.line(made).startswith(f"step {number}")
    assert rendered(made)


@pytest.mark.parametrize("loss", [0.0, 1e-30, -5.0, 1e30])
def test_a_loss_that_does_not_move_can_be_drawn(loss: float) -> None:
    parsed(page(shown(loss_curve=((1, loss), (2, loss)), loss_trend=()), "a1"))


def test_ticks_are_few_and_round() -> None:
    assert ticks(0.13, 2.9, 4) == [1.0, 2.0]
    assert ticks(1, 420, 6) == [100, 200, 300, 400]
    assert len(ticks(0, 1, 5)) == 6
    assert ticks(1.55, 9.95, 4) == [2.5, 5, 7.5], "one number would tell no scale"
    assert all(2 <= len(ticks(0.7, 0.7 + 1.03**power, 4)) <= 5 for power in range(-200, 200))


def test_numbers_of_large_losses_stay_beside_the_axis() -> None:
    charts = [loss_chart(shown(loss_curve=((1, large), (2, -large))), "a1") for large in (9e4, 1e6, 3e8)]
    for chart in charts:
        numbers = [each.text or "" for each in parsed(chart).iter(f"{SVG}text") if each.get("x") == "52.0"]
        assert len(numbers) >= 2
        assert all(len(number) <= 6 for number in numbers), numbers
    assert ">1e6<" in charts[1]


def test_logarithmic_ticks_are_round_and_neither_one_nor_many() -> None:
    assert log_ticks(-2, 1) == pytest.approx([0.01, 0.1, 1, 10])
    assert log_ticks(math.log10(0.4), math.log10(7)) == pytest.approx([0.5, 1, 2, 5])
    for low, high in ((-0.1, 0.1), (0, 12), (2.3, 2.31), (-3, -2.5)):
        assert 2 <= len(log_ticks(low, high)) <= 7, (low, high)


def test_evaluations_are_a_line_of_their_own_and_the_epoch_a_figure() -> None:
    made = shown(evaluations=((20, 0.4), (60, 3.4)), epoch=1.25, num_epochs=3)
    text = words_in(parsed(page(made, "a1")))
    for wanted in ("evaluation 3.4", "1.25", "of 3", "evaluation"):
        assert wanted in text, wanted
    linear = parsed(page(made, "a1")).findall(f".//{SVG}svg")[0]
    (line,) = (each for each in linear.iter(f"{SVG}polyline") if each.get("class") == "okm-evaluation")
    assert len((line.get("points") or "").split()) == 2
    heights = [float(point.split(",")[1]) for point in (line.get("points") or "").split()]
    assert min(heights) >= 8, "an evaluation above all training losses is inside the chart"


def test_the_slowdown_is_hidden_where_nothing_is_offloaded() -> None:
    made = shown()
    assert made.slowdown is not None
    predicted = replace(made.slowdown, baseline="predicted")
    resident = shown(is_offloaded=False, slowdown=predicted)
    for drawn in (words_in(parsed(page(resident, "a1"))), rendered(resident), words.line(resident)):
        assert "slowdown" not in drawn.lower()
        assert "offloading" not in drawn
    assert "2.00×" in words_in(parsed(page(shown(slowdown=predicted), "a1")))
    assert "2.00×" in words_in(parsed(page(shown(is_offloaded=False), "a1"))), "a measured baseline was asked for"


def test_switches_unfold_parts_of_a_page_that_is_redrawn() -> None:
    html = page(shown(), "a1")
    for ident in re.findall(r' id="([^"]+)"', switches("a1")):
        assert f"body:has(#{ident}[open]) #a1 " in html
    assert not parsed(html).findall(".//details"), "a redrawn page would close them"


def test_the_last_page_reads_well_where_styles_and_svg_are_not_trusted() -> None:
    root = parsed(page(shown(), "a1", is_last=True))
    assert not root.findall(f".//{SVG}svg")
    images = root.findall(".//img")
    assert len(images) == 5
    for image in images:
        assert len(image.get("alt") or "") > 20
        drawn = b64decode((image.get("src") or "").removeprefix("data:image/svg+xml;base64,")).decode()
        assert "prefers-color-scheme:dark" in drawn
        parsed(drawn)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert ["step", "1 s", "wall time"] in rows
    assert len(root.findall(".//details")) == 2, "the logarithm and the phases can be unfolded"


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(COLOURS.values())))
def test_numbers_stand_out_from_their_segments(colour: str) -> None:
    bright, dark = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 3


def test_the_slowdown_is_said_to_be_measured_or_predicted() -> None:
    made = shown()
    assert made.slowdown is not None
    assert "2.00× the 500 ms without offloading (measured)" in words.slowdown(made)
    predicted = replace(made.slowdown, baseline="predicted")
    assert "(predicted: the computing measured here, and AdamW in VRAM)" in words.slowdown(shown(slowdown=predicted))
    planned = replace(predicted, is_planned=True)
    assert words.slowdown(shown(slowdown=planned)).startswith("Planned: ")
    bound_by_python = replace(planned, step_range=(0.2, 0.28))
    assert words.slowdown(shown(slowdown=bound_by_python)).startswith("Planned: 200 to 280 ms, about ")
    assert "not known: because" in words.slowdown(shown(slowdown=None, why_no_slowdown="because"))


@pytest.mark.parametrize(("seconds", "said"), [(0.4, "0 s"), (59.7, "1:00"), (125, "2:05"), (3723, "1:02:03")])
def test_durations(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said


def rendered(made: Figures, width: int = 80, height: int = 60) -> str:
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(made, width, height))
    return console.export_text()


def test_the_last_view_is_a_table_in_plain_text_and_a_picture() -> None:
    shown_last = last_view(shown(), "a1")
    lines = shown_last["text/plain"].splitlines()
    assert lines[0] == "training: step 60 of 100"
    (vram,) = (line for line in lines if line.startswith("  VRAM"))
    (loss,) = (line for line in lines if line.startswith("  loss"))
    assert vram.index("8 GiB used") == loss.index(loss.split()[1]), "values stand in one column"
    picture = imread(io.BytesIO(b64decode(shown_last["image/png"])), format="png")
    assert picture.shape[1] == 1000
    assert len({tuple(pixel) for pixel in picture[::5, ::5].reshape(-1, 4).tolist()}) > 30


def test_the_picture_shows_evaluations_and_is_as_wide_as_all_key_figures() -> None:
    full = shown(learning_rate=3e-5, grad_norm=1.183, epoch=1.24, num_epochs=3, evaluations=((20, 1.2), (40, 0.9)))
    picture = imread(io.BytesIO(png(full)), format="png")
    assert (picture[:, -4:] == 1).all(), "nothing is cut off at the right"
    vermilion = [int(VERMILION[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    left = picture[:, :500, :3]
    assert (abs(left - vermilion).max(axis=2) < 0.01).sum() > 50


@pytest.mark.parametrize("changes", [{"loss_curve": (), "loss_trend": ()}, {"memory": ()}])
def test_a_picture_can_be_drawn_of_half_the_figures(changes: dict[str, object]) -> None:
    assert png(shown(**changes)).startswith(b"\x89PNG")


def test_a_plan_of_weights_and_states_alone_says_so() -> None:
    tiers = tuple(replace(tier, planned_whole=False) for tier in shown().memory)
    html = words_in(parsed(page(shown(memory=tiers), "a1")))
    assert html.count("planned 7 GiB without activations and framework") == 1
    assert "21 GiB planned without activations and framework" in html
    assert "7 GiB planned without activations and framework" in rendered(shown(memory=tiers), 100)
    assert "without activations and framework" not in words_in(parsed(page(shown(), "a1")))


def test_a_line_does_not_end_between_a_name_and_its_number() -> None:
    space = "\N{NO-BREAK SPACE}"
    said = words.unbroken("D2H 65.2 ms, wait for bus +210 ms, budget 11 GiB.")
    assert said == f"D2H{space}65.2{space}ms, wait for bus{space}+210{space}ms, budget{space}11{space}GiB."
    assert f"bus{space}+210{space}ms" in page(shown(), "a1")


@pytest.mark.parametrize("width", range(40, 101))
def test_a_terminals_lines_end_between_entries(width: int) -> None:
    beside = (("CPU step", 0.6), ("GPU step", 0.4), ("RAM -> GPU", 0.0652), ("GPU -> RAM", 0.0652))
    lines = [line.strip() for line in rendered(shown(beside=beside), width).splitlines()]
    assert sum("GPU -> RAM 65.2 ms" in line for line in lines) == 1
    assert not [line for line in lines if line.startswith(("ms", "s ", "s,", "GiB", "65.2", "+210"))]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_terminal_marks_budget_and_plan(width: int) -> None:
    lines = rendered(shown(), width).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("VRAM"))
    bar, below, said = lines[at : at + 3]
    room = width - 6
    assert bar.index("┃") == below.index("┃") == width - 1, "the budget is what the bar could grow to"
    assert below.index("▲") == 6 + round(room * 7 / 11) - 1
    assert bar.count("·") == room - round(room * 8 / 11) - 1
    assert said.strip() == "8 GiB used, ▲ 7 GiB planned, ┃ budget 11 GiB"
    ram = next(number for number, line in enumerate(lines) if line.startswith("RAM"))
    assert "┃" not in lines[ram]
    assert lines[ram + 1].endswith("▲→"), "a budget far away is named at the edge"
    over = rendered(shown(memory=(replace(shown().memory[0], budget=4 * GIB, planned=4 * GIB),)), width).splitlines()
    bar, below = over[at], over[at + 1]
    assert bar.index("┃") == below.index("┃") == below.index("▲") + 1 == 6 + round(room / 2) - 1


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_terminal_shows_the_same_figures(width: int) -> None:
    text = rendered(shown(), width)
    for wanted in (
        "step 60 of 100",
        "2.00×",
        "measured baseline",
        "VRAM",
        "8 GiB used",
        "wait for CPU step",
        "RAM -> GPU",
    ):
        assert wanted in text, wanted
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= width
    bar = next(line for line in text.splitlines() if line.startswith("VRAM"))
    assert [character for character in bar if character.isdigit()] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("height", [8, 15, 23, 40])
def test_a_terminals_view_fits_its_height_and_keeps_the_loss(height: int) -> None:
    lines = rendered(shown(evaluations=((60, 0.5),)), 80, height).splitlines()
    assert len(lines) <= height
    (loss,) = (line for line in lines if line.startswith("loss  "))
    assert loss.endswith(" 0.05 to 3"), "the bars have a range"
    assert lines.index(loss) < 5, "the loss is above the bars of memory"
    assert any(line.startswith("VRAM") for line in lines) == (height > 8)


def test_sparks_go_from_low_to_high() -> None:
    assert sparks([3.0, 2.0, 1.0], 10) == "█▄▁"
    assert len(sparks([1.0] * 95, 10)) <= 10


def test_drawing_takes_a_few_milliseconds() -> None:
    made = shown(2000)
    best = min(_seconds(made) for _ in range(20))
    assert best < 0.006, f"{1e3 * best:.1f} ms"


def _seconds(made: Figures) -> float:
    began = time.thread_time()
    page(made, "a1")
    return time.thread_time() - began
