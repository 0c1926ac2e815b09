"""Rows of files reach training unchanged, and faults of files are reported once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from transformers import ByT5Tokenizer

from offloadkit.errors import DataError
from offloadkit.hf.data import load_dataset_like, prepare
from tests.hf import tiny

pytestmark = pytest.mark.usefixtures("datasets_cache")


def written(path: Path, rows: list[Any]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(json.dumps(rows, indent=1) if path.suffix == ".json" else lines)
    return path


AS_WRITTEN = [
    {"input": "3 May 1999", "target": "1999-05-03"},
    {"input": "2001-01-01T00:00:00", "target": "007"},
    {"input": "ä", "target": "None"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_texts_that_look_like_dates_or_numbers_stay_as_they_were_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    if "json" in suffix:
        written(path, AS_WRITTEN)
    elif suffix == ".csv":
        pd.DataFrame(AS_WRITTEN).to_csv(path, index=False)
    else:
        pd.DataFrame(AS_WRITTEN).to_parquet(path)
    assert load_dataset_like(path).to_list() == AS_WRITTEN


def test_numbers_in_a_csv_file_are_the_text_that_was_written_and_labels_stay_numbers(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("input,target,label\n1+1,2.50,10\n2,,2\n")
    assert load_dataset_like(path).to_list() == [
        {"input": "1+1", "target": "2.50", "label": 10},
        {"input": "2", "target": None, "label": 2},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "text\nhello, world\nfoo, bar\n",
            r"row 0 of .*data.csv' has 2 values, but the header has 1: write .* in quotes",
        ),
        ("input,target\n1,2,\n3,4,\n", "has 3 values, but the header has 2: drop the comma at the end of each row"),
        ("text,text\na,b\n", "has two columns 'text': rename one"),
        pytest.param(f"text,text\n{'a' * 200_000},b\n", "has two columns 'text': rename one", id="long row"),
        ("input;target\none, two;three\n", "has its columns separated by ';'"),
    ],
)
def test_a_csv_file_whose_columns_would_be_shifted_or_mixed_up_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_dataset_like(path)


def test_quoted_commas_line_breaks_and_columns_without_a_name_are_read(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('\ufeff\n,text,\n0,"hello, ""world""\nand all",\n')
    assert load_dataset_like(path)["text"][:] == ['hello, "world"\nand all']


@pytest.mark.parametrize("text", ["text,note,note\na,b,c\n", " \ntext,note\n \na,b\n"])
def test_two_columns_that_are_not_read_and_blank_lines_are_no_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    assert load_dataset_like(path)["text"][:] == ["a"]


def test_two_columns_of_one_name_are_refused_in_parquet_and_in_a_data_frame(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path)
    for data in (path, pd.DataFrame([["a", "b"]], columns=["text", "text"])):
        with pytest.raises(DataError, match="has two columns 'text'"):
            load_dataset_like(data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"row 0 has an int instead of a string in 'target': write it as text, such as '3'"),
        (2.5, r"row 0 has a float instead of a string in 'target': write it as text, such as '2\.5'"),
    ],
)
def test_a_number_where_text_belongs_says_how_to_write_it(value: Any, message: str, tmp_path: Path) -> None:
    rows = [{"input": "b", "target": value}]
    with pytest.raises(DataError, match=message):
        prepare(load_dataset_like(written(tmp_path / "data.jsonl", rows)), ByT5Tokenizer(), tiny.t5_config())


def test_messages_keep_what_differs_from_one_to_the_next(tmp_path: Path) -> None:
    """Dates, and tool calls: a column with one type would give every call the arguments of all calls."""
    template = "{% for m in messages %}{{ m['content'] }} {{ m['call'] | default(0) | tojson }} {% endfor %}"
    rows = [
        {"messages": [{"role": "assistant", "content": "1999-05-03", "call": {"day": 3}}]},
        {
            "messages": [
                {"role": "assistant", "content": "hello", "call": {"name": "x"}},
                {"role": "tool", "content": "a"},
            ]
        },
    ]
    words = ByT5Tokenizer()
    words.chat_template = template
    data = prepare(load_dataset_like(written(tmp_path / "data.jsonl", rows)), words, tiny.llama_config(vocab_size=384))
    texts = [words.decode(ids) for ids in data.dataset["input_ids"]]
    assert texts[0].startswith('1999-05-03 {"day": 3}')
    assert texts[1].startswith('hello {"name": "x"} a 0')
    for row in rows:
        row["messages"][0]["role"] = "user"
    with pytest.raises(DataError, match="no message has the role 'assistant'"):
        prepare(load_dataset_like(rows), words, tiny.llama_config(vocab_size=384))


def test_rows_of_many_forms_have_the_types_of_all_of_them(tmp_path: Path) -> None:
    """A field first appears in row 1500, and an unused column has no common type."""
    rows: list[dict[str, Any]] = [{"text": "a", "id": 1}] * 1500 + [{"text": "b", "id": "x", "label": 2}]
    dataset = load_dataset_like(written(tmp_path / "data.jsonl", rows))
    assert dataset.column_names == ["text", "id", "label"]
    assert (dataset[0]["label"], dataset[1500]["label"], dataset[1500]["text"]) == (None, 2, "b")


def test_token_ids_are_read_from_json(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 1], "labels": []}, {"input_ids": [5], "labels": [-100, 1]}]
    assert load_dataset_like(written(tmp_path / "data.jsonl", rows)).to_list() == rows


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "data.jsonl", [{"text": "a"}])
    assert load_dataset_like(path)[0] == {"text": "a"}
    assert load_dataset_like(written(path, [{"text": "b"}]))[0] == {"text": "b"}


READS = """
import os, sys
os.umask(0o022)
from offloadkit.hf.data import load_dataset_like
datasets = [load_dataset_like(path) for path in sys.argv[1:]]
assert [dataset[0]["text"] for dataset in datasets] == ["secret"] * 3, datasets
tops = [entry for entry in os.scandir(os.environ["HF_DATASETS_CACHE"]) if entry.is_dir()]
files = [os.path.join(at, name) for top in tops for at, _, names in os.walk(top) for name in names]
assert any(b"secret" in open(file, "rb").read() for file in files), files
print(*(oct(top.stat().st_mode & 0o777) for top in tops))
"""


@pytest.mark.slow
def test_nobody_else_may_read_the_rows_of_a_file_and_they_are_gone_afterwards(tmp_path: Path) -> None:
    paths, cache = [tmp_path / f"data{suffix}" for suffix in (".jsonl", ".csv", ".parquet")], tmp_path / "cache"
    frame = pd.DataFrame([{"text": "secret"}])
    written(paths[0], [{"text": "secret"}])
    frame.to_csv(paths[1], index=False)
    frame.to_parquet(paths[2])
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READS, *map(str, paths)]
    assert set(subprocess.check_output(command, env=environment, text=True).split()) == {"0o700"}
    left = [file for file in cache.rglob("*") if file.is_file()]
    assert not any(b"secret" in file.read_bytes() for file in left), left
    assert not any(file.is_dir() for file in cache.iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"file/cache'.*cannot be written .*set HF_DATASETS_CACHE to another one"):
        load_dataset_like(written(tmp_path / "data.jsonl", [{"text": "a"}]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b'{"text": "a"}\n\n["b"]\n', "line 3 is not a JSON object but a list"),
        ("data.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"line 2, column 13: Expecting ','"),
        ("data.json", b'[{"text": "a"},\n 3]', "item 1 is not a JSON object but an int"),
        ("data.json", b'[{"text": "a"},\n {"text"]', "line 2 column 9"),
        ("data.json", b"\n \n", "has no rows: at least one is needed"),
        ("data.jsonl", b'{"text": "\xe4"}\n', "not saved as UTF-8"),
        (
            "data.jsonl",
            b'{"text": "a"}\n{"text": 3}\n',
            r"column 'text' has values of types int \(row 1\) and str \(row 0\): give every row text",
        ),
        (
            "data.jsonl",
            b'{"text": {"a": 1}}\n',
            r"column 'text' has values of types dict \(row 0\): give every row text",
        ),
        ("data.jsonl", b'{"input_ids": ["a"], "labels": [1]}\n', "cannot be read as json"),
        ("data.json", b'{"data": [{"text": "a"}]}', "it is one object, with rows in 'data': save that list alone"),
        ("data.json", b'{\n "data": [\n  {"text": "a"}\n ]\n}\n', "it is one object, with rows in 'data'"),
        ("data.json", b'{"text": ["a", "b"]}', "it is one object of columns: save one object a line"),
        ("data.csv", b'text\n"a\n', "cannot be read as csv"),
        ("data.csv", b"text\n\xe4\n", "not saved as UTF-8"),
        ("data.csv", b"input;target\na;b\n", r"separated by ';': .*pandas\.read_csv\(.*, sep=';'\)"),
        ("data.csv", b"input\ttarget\na\tb\n", r"separated by '\\t'"),
        ("data.parquet", b"no parquet at all", "cannot be read as parquet"),
    ],
)
def test_a_broken_file_is_named_with_its_fault_and_nothing_else_is_printed(
    name: str, content: bytes, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        load_dataset_like(tmp_path / name)
    assert name in str(raised.value)
    assert caplog.text == ""
    assert "Failed" not in capfd.readouterr().err
