"""The pages of the documentation: their code runs, their links lead somewhere, and their messages are the package's."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Seq2SeqTrainingArguments, T5ForConditionalGeneration

import offloadkit
from tests.hf.tiny import llama_config, t5_config

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUN = ("index", "engine", "trainer", "moving", "precision-and-budget")
"""Pages whose code is run, with tiny models in place of the models of the hub."""
OF_SEVERAL_PROCESSES = ("from-deepspeed",)
"""Pages whose code needs DeepSpeed, or is cut short by dots."""
SITE = ROOT / "mkdocs.yml"


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pages use without defining it. `finetune` gets a tiny model in place of each named model."""
    trains = offloadkit.finetune

    def tiny_finetune(model: str, data: Any, **options: Any) -> Any:
        options |= {"tokenizer": "byte", "batch_size": 2, "max_steps": 1, "use_cpu": True, "monitor": False}
        small: Any = LlamaForCausalLM(llama_config(vocab_size=384))
        if "t5" in model:
            small = T5ForConditionalGeneration(t5_config(vocab_size=384))
        else:
            data = [{"text": str(row)} for row in data]  # a byte tokenizer has no chat template
        return trains(small, data, output_dir=tmp_path / model.replace("/", "-"), **options)

    monkeypatch.setitem(vars(offloadkit), "finetune", tiny_finetune)
    row = {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}

    def collator(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([each[name] for each in rows]) for name in row}

    usual: Any = {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    args = Seq2SeqTrainingArguments(str(tmp_path / "run"), **usual)
    return {"args": args, "data": [row] * 8, "collator": collator, "batches": [collator([row, row])] * 2}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, names: dict[str, Any]) -> None:
    blocks = blocks_of(ROOT / "docs" / f"{page}.md")
    assert blocks
    for block in blocks:
        names["model"] = LlamaForCausalLM(llama_config())
        exec(compile(block, page, "exec"), names)


def test_no_page_has_code_that_is_not_run() -> None:
    assert {page.stem for page in PAGES if blocks_of(page)} == {*RUN, *OF_SEVERAL_PROCESSES}
    for name in OF_SEVERAL_PROCESSES:
        for block in blocks_of(ROOT / "docs" / f"{name}.md"):
            ast.parse(block.replace(", ...)", ")"))


def test_links_lead_to_files() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)|(?:src|srcset)=\"([^\"]+)\"", text):
            path = "".join(target)
            assert "://" in path or (page.parent / path).exists(), f"{page.name}: {path}"


def test_tables_have_no_escaped_pipes() -> None:
    """A code host reads them as pipes, and the site shows the backslash."""
    assert [page.name for page in (ROOT / "docs").glob("*.md") if "\\|" in page.read_text()] == []


def test_every_page_is_in_the_menu_of_the_site() -> None:
    shown = set(re.findall(r"[\w-]+\.md", SITE.read_text()))
    assert shown == {page.name for page in PAGES}


def test_messages_of_the_troubleshooting_page_are_in_the_package() -> None:
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 10
    sources = [path.read_text() for path in (ROOT / "offloadkit").rglob("*.py")]
    for heading in headings:
        assert any(heading in source for source in sources), f"no message has {heading!r}"


def test_public_names_are_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    paths = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for path in paths[:-1]:
        module, _, name = path.rpartition(".")
        assert name == "Plan" or offloadkit._HOME[name] == module.removeprefix("offloadkit."), path
