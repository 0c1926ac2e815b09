"""Every notebook runs from top to bottom with the tiny model, and shows what it promises."""

from __future__ import annotations

import base64
import io
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from tests.notebooks.kernels import NAMES, NOTEBOOKS, Watched, kernel_folder, shown_losses  # noqa: E402

Execute = Callable[[str], Watched]


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Execute:
    """Runs the notebook with this name in an empty folder; it may write only to its announced folders."""
    monkeypatch.setenv("JUPYTER_PATH", str(kernel_folder(tmp_path / "jupyter")))

    def run(name: str) -> Watched:
        ran = Watched(NOTEBOOKS / f"{name}.ipynb", tmp_path / name)
        ran.execute()
        assert errors_in(ran.nb) == []
        assert all(path.name.startswith("offloadkit-") for path in (tmp_path / name).iterdir())
        return ran

    return run


def errors_in(notebook: Any) -> list[Any]:
    """Outputs that a notebook shows as an error: raised ones, and text on stderr."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]


def test_there_are_six() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]


def test_the_first_notebook_ends_in_success() -> None:
    notebook = nbformat.read(NOTEBOOKS / "01_finetune_t5.ipynb", as_version=4)
    (train,) = (cell for cell in notebook.cells if cell.get("id") == "train")
    said = "".join(output.get("text", "") for output in train.outputs)
    (right,) = re.findall(r"([\d.]+)% of 256 held-out dates are right", said)
    assert float(right) > 95


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_is_seen_where_neither_svg_nor_html_is_trusted(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    bundles = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    for data in bundles:
        if "image/svg+xml" in data or 'class="okm"' in data.get("text/html", ""):
            assert "image/png" in data
            assert not data["text/plain"].startswith("<"), "a table, not an object's name"


def test_the_public_address_goes_to_the_first_cell_and_a_badge(tmp_path: Path) -> None:
    path = tmp_path / "01_finetune_t5.ipynb"
    shutil.copy(NOTEBOOKS / path.name, path)
    publish = runpy.run_path(str(NOTEBOOKS / "address.py"))["publish"]
    for address in ("https://github.com/first/one.git", "https://github.com/a/b"):
        publish(path, address)
    title, install = nbformat.read(path, as_version=4).cells[:2]
    assert install.source.startswith('REPOSITORY = "https://github.com/a/b"  # ')
    assert title.source.count("colab.research.google.com/github/") == 1
    assert "https://colab.research.google.com/github/a/b/blob/main/notebooks/01_finetune_t5.ipynb" in title.source


def test_the_readme_has_a_badge_of_colab_once_there_is_a_public_address(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    shutil.copy(NOTEBOOKS.parent / path.name, path)
    assert "Open in Colab" not in path.read_text(), "it would lead to a file"
    publish = runpy.run_path(str(NOTEBOOKS / "address.py"))["publish_readme"]
    for address in ("https://github.com/first/one.git", "https://github.com/a/b"):
        publish(path, address)
    text = path.read_text()
    assert text.count("](https://colab.research.google.com/github/a/b/blob/main/notebooks/01_finetune_t5.ipynb) ") == 1
    assert text.count("Open in Colab") == 1
    assert "\ngit clone https://github.com/a/b offloadkit && cd offloadkit\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_begins_with_the_same_installation_and_keeps_neither_bars_nor_errors(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first = nbformat.read(NOTEBOOKS / "01_finetune_t5.ipynb", as_version=4).cells[1]
    assert code[0].source == first.source
    assert "%pip install -q" in first.source
    assert "widgets" not in notebook.metadata
    outputs = [output for cell in code for output in cell.outputs]
    assert not any("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs)
    assert errors_in(notebook) == []


@pytest.mark.slow
def test_finetune_is_planned_watched_tried_and_saved(execute: Execute) -> None:
    ran = execute("01_finetune_t5")
    assert "968,704 parameters" in ran.text("plan")
    assert len(set(ran.values)) >= 3, "the monitor was drawn while it trained"
    losses = shown_losses(ran.values)
    assert losses[-1] < 0.8 * losses[0]
    assert " baseline" not in ran.values[-1], "on a CPU nothing is offloaded"
    (summary,) = (o["data"] for o in ran.outputs("train") if 'class="okm"' in o.get("data", {}).get("text/html", ""))
    assert "step 40 of 40" in summary["text/html"]
    assert "data:image/svg+xml;base64," in summary["text/html"]
    assert re.search(r"^  RAM +[\d.]+ [MG]iB used, [\d.]+ [MG]iB planned, budget", summary["text/plain"], re.MULTILINE)
    assert num_colours(summary["image/png"]) > 50
    assert not any("<progress" in o.get("data", {}).get("text/html", "") for o in ran.outputs("train")), "two bars"
    assert re.search(r"T4: about \d+\.\d minutes", ran.text("plan-t4"))
    assert re.search(r"[\d.]+% of 16 held-out dates are right", ran.text("train"))
    assert ran.text("generate").count(" -> ") == 4
    assert "model.safetensors" in ran.text("save")
    assert "writes the same: True" in ran.text("save")


@pytest.mark.slow(20)
def test_the_blog_chart_has_a_row_for_each_engine(execute: Execute) -> None:
    ran = execute("02_the_blog_chart")
    rows = re.findall(r"<tr>(.*?)</tr>", ran.data("table", "text/html"))
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert [row[:2] for row in cells[1:3]] == [["t5-tiny", "plain, on the CPU"], ["t5-tiny", "offloadkit"]]
    assert cells[3][1] == "DeepSpeed"
    for row in cells[1:3]:
        assert re.fullmatch(r"[\d.]+ m?s", row[3]), row
        assert re.fullmatch(r"[\d.]+ [MG]iB", row[6]), row
    assert float(cells[1][7]) == 1.0
    assert float(cells[2][7]) > 0.2
    chart = ran.data("chart", "image/svg+xml")
    for shown in ("plain, on the CPU", "offloadkit", "DeepSpeed", "time for 1,000 samples", "limit 11 GiB"):
        assert f"<!-- {shown}" in chart or f", {shown} -->" in chart, shown


@pytest.mark.slow(60)
def test_the_sweep_names_the_knee_and_what_bounds_each_side(execute: Execute) -> None:
    ran = execute("03_batch_size")
    words = ran.text("table")
    assert re.search(r"^ +1 +1 +[\d.]+ ms", words, re.MULTILINE)
    assert re.search(r"^ +8 +1 +[\d.]+ ms", words, re.MULTILINE)
    assert "bounds the step" in words
    assert re.search(r"has the knee at batch \d+.*: (the same size|one size away|2 sizes away)", words)
    assert re.search(r"largest batch that fits is (at least )?\d+ by the plan, and it runs in", words)
    learned = ran.text("learn-table")
    assert re.search(r"held-out loss is \d\.\d+ at 8 rows a step", learned)
    assert re.search(r"At 32 rows and the learning rate scaled \(sqrt\) it is \d+\.\d+ \([+-]", learned)
    assert "<!-- rows of a micro-batch -->" in ran.data("chart", "image/svg+xml")
    assert "held-out loss" in ran.data("learn-chart", "image/svg+xml")


@pytest.mark.slow
def test_a_step_its_memory_and_its_master_weights_are_shown(execute: Execute) -> None:
    ran = execute("04_how_offloading_works")
    for cell in ("timeline", "memory"):
        assert num_colours(ran.data(cell, "image/png")) > 50, f"{cell} is drawn"
    assert {"'forward'", "'cpu_step'", "'d2h'"} <= set(re.findall(r"'\w+'", ran.text("train")))
    split = ran.text("split")
    rows = re.findall(r"^ *(\S+)  ([0-9a-f]{8}) = +(\S+)  ([0-9a-f]{4}) +([+-]\d+) +(\S+)$", split, re.MULTILINE)
    assert len(rows) == 6
    for master, bits, _, high, rest, joined in rows:
        assert (int(high, 16) << 16) + int(rest) == int(bits, 16)
        assert joined == master
    (everything,) = re.findall(r"of ([\d,]+) weights come back bit for bit: ([\d,]+)", split)
    assert everything[0] == everything[1]
    assert re.search(r"moves [1-6] of these 6 masters, and\n0 of the 6 bf16 weights", split)


@pytest.mark.slow
def test_a_plain_module_learns_and_is_timed_every_ten_steps(execute: Execute) -> None:
    ran = execute("05_your_own_module")
    lines = re.findall(r"^step +(\d+)  loss (\d\.\d+) +([\d.]+) ms a step$", ran.text("loop"), re.MULTILINE)
    assert [int(step) for step, _, _ in lines] == [10, 20, 30, 40]
    assert all(float(milliseconds) > 0.1 for _, _, milliseconds in lines)
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    untrained, trained = re.findall(r"\d\.\d+", ran.text("after"))
    assert float(trained) < 0.9 * float(untrained)


@pytest.mark.slow
def test_a_chat_model_is_trained_on_functions_and_docstrings(execute: Execute) -> None:
    ran = execute("06_pretrained_model")
    assert re.search(r"[\d,]{5,} rows to learn, 32 held out", ran.text("data"))
    before, after = re.findall(r"held-out loss (\d\.\d+) before, (\d\.\d+) after", ran.text("train"))[0]
    assert float(after) < float(before)
    assert ran.text("generate").count("  author: ") == 4


def num_colours(png: str) -> int:
    """Number of colours in a picture, smoothed edges included."""
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(base64.b64decode(png)), format="png").reshape(-1, 4)
    return len({tuple(pixel) for pixel in pixels[::7].tolist()})
