"""From any data source of a user to padded batches, with errors for unusable data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from transformers import ByT5Tokenizer

from offloadkit.errors import DataError
from offloadkit.hf.data import PreparedData, load_dataset_like, longest_row, prepare, prepare_both
from offloadkit.hf.masks import Padding, padding_of
from offloadkit.hf.read import check_there, with_validation
from offloadkit.hf.source import resolve
from tests.hf import tiny

PAIRS = [{"input": "one", "target": "1"}, {"input": "eleven", "target": "11"}]
BYTES = ByT5Tokenizer()
WORDS = tiny.word_tokenizer(chat_template=tiny.CHAT_TEMPLATE)
T5, LLAMA, BERT = tiny.t5_config(), tiny.llama_config(), tiny.bert_config()


pytestmark = pytest.mark.usefixtures("datasets_cache")


def prepared(rows: Any, tokenizer: Any = BYTES, config: Any = T5, **options: Any) -> PreparedData:
    return prepare(load_dataset_like(rows), tokenizer, config, **options)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a file in the format of its extension."""
    frame = pd.DataFrame(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_file_gives_its_rows(tmp_path: Path, suffix: str) -> None:
    rows = [{"input": "a, b", "target": "ä"}, {"input": "c", "target": "d\ne"}]
    path = written(tmp_path / f"data{suffix}", rows)
    assert load_dataset_like(path).to_list() == rows
    assert load_dataset_like(str(path)).to_list() == rows


def test_a_share_of_the_rows_is_held_out_and_both_parts_keep_their_order() -> None:
    rows = [{"input": "abc", "target": str(number)} for number in range(10)]
    lengths: dict[str, Any] = {"max_input_length": None, "max_target_length": None}
    data, held = prepare_both(rows, 0.3, BYTES, T5, **lengths)
    assert held is not None
    parts = [[int(BYTES.decode(row[:1])) for row in each.dataset["labels"]] for each in (data, held)]
    assert [len(part) for part in parts] == [7, 3]
    assert sorted(parts[0] + parts[1]) == list(range(10))
    assert parts == [sorted(part) for part in parts]
    assert parts[1] != [7, 8, 9], "the held-out rows must be random"
    assert prepare_both(rows, 0.3, BYTES, T5, **lengths)[1].dataset["labels"] == held.dataset["labels"]
    with pytest.raises(DataError, match=r"eval_dataset=0.3 holds out all of the rows \(1\)"):
        prepare_both(rows[:1], 0.3, BYTES, T5, **lengths)


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("make", [list, tuple, columns, datasets.Dataset.from_list, pd.DataFrame])
def test_rows_in_memory_give_the_same_dataset(make: Any) -> None:
    assert load_dataset_like(make(PAIRS)).to_list() == PAIRS


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas"])
def test_a_dataset_that_hands_out_tensors_is_the_same_dataset(form: str) -> None:
    labelled = datasets.Dataset.from_list([{"text": "good", "label": 1}, {"text": "bad", "label": 0}])
    expected = prepared(labelled, WORDS, BERT)
    assert prepared(labelled.with_format(form), WORDS, BERT).dataset.to_list() == expected.dataset.to_list()


def test_dataset_dict_gives_the_split() -> None:
    whole = datasets.Dataset.from_list(PAIRS)
    assert load_dataset_like(datasets.DatasetDict(train=whole)) is whole
    with pytest.raises(DataError, match="no split 'train', it has validation"):
        load_dataset_like(datasets.DatasetDict(validation=whole))


def test_texts_are_rows_of_the_column_text() -> None:
    assert load_dataset_like(["one", "two"]).to_list() == [{"text": "one"}, {"text": "two"}]


def test_columns_of_different_lengths_are_named() -> None:
    with pytest.raises(DataError, match=r"\(input 2, target 1\)"):
        load_dataset_like({"input": ["a", "b"], "target": ["c"]})
    with pytest.raises(DataError, match=r"'train' is a Dataset in a dict.*DatasetDict"):
        load_dataset_like({"train": load_dataset_like(["a"])})


def test_a_pattern_gives_the_rows_of_all_its_files_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, row in (("b.jsonl", 1), ("a.csv", 0), ("deeper/c.jsonl", 2)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, [{"input": "x", "target": str(row)}])
    assert load_dataset_like(f"{tmp_path}/*.*")["target"][:] == ["0", "1"]
    assert "2 rows from 2 files" in capsys.readouterr().out
    assert load_dataset_like(tmp_path / "**" / "*.jsonl")["target"][:] == ["1", "2"]
    assert load_dataset_like([str(tmp_path / "b.jsonl"), str(tmp_path / "a.csv")])["target"][:] == ["1", "0"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "^None is not a dataset"),
        ({"a"}, "^a set is not a dataset"),
        (5, "^an int is not a dataset"),
        ([1], "^row 0 is an int, not a dict"),
        ([{"input": b"gr\xc3\xbc", "target": "1"}], "^row 0 has a bytes instead of a string in 'input': .* 'grü'$"),
        ([{"input": 7, "target": "1"}], "^row 0 has an int instead of a string in 'input': .* '7'$"),
    ],
)
def test_what_is_no_dataset_is_named(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(data)


def test_a_compressed_file_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"'rows\.jsonl\.gz' is compressed: unpack it, and pass the \.jsonl"):
        load_dataset_like(tmp_path / "rows.jsonl.gz")


def test_a_pattern_without_files_and_a_column_of_two_types_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches 'none\*\.jsonl'"):
        check_there("none*.jsonl")
    with pytest.raises(DataError, match=r"there is no file 'missing\.jsonl'"):
        check_there(["missing.jsonl"])
    written(tmp_path / "a.jsonl", [{"text": "x", "label": "good"}])
    written(tmp_path / "b.jsonl", [{"text": "x", "label": 1}])
    with pytest.raises(DataError, match=r"'label' is string in '.*a\.jsonl' and int64 in '.*b\.jsonl'"):
        load_dataset_like(f"{tmp_path}/*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    assert load_dataset_like(written(tmp_path / "rows[1].jsonl", PAIRS)).to_list() == PAIRS


@pytest.mark.parametrize("name", ["validation", "dev"])
def test_the_validation_split_of_a_dataset_dict_is_taken_and_said(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = datasets.Dataset.from_list(PAIRS)
    splits = datasets.DatasetDict({"train": rows, name: rows.select([1])})
    assert with_validation(splits, None) is splits[name]
    assert f"'{name}' split of the DatasetDict (1 rows)" in capsys.readouterr().out
    assert with_validation(splits, 0.1) == 0.1
    assert with_validation(datasets.DatasetDict(train=rows, test=rows), None) is None
    assert with_validation(rows, None) is None
    assert capsys.readouterr().out == ""


def test_pairs_become_inputs_and_labels_with_their_end_tokens() -> None:
    data = prepared(PAIRS)
    assert data.task == "seq2seq"
    assert data.dataset[1]["input_ids"] == [*(byte + 3 for byte in b"eleven"), 1]
    assert data.dataset[1]["labels"] == [*(byte + 3 for byte in b"11"), 1]
    batch = data.collator([data.dataset[0], data.dataset[1]])
    assert batch["labels"].tolist() == [[52, 1, -100], [52, 52, 1]]
    assert batch["input_ids"].shape == (2, 7)
    assert batch["attention_mask"].sum(1).tolist() == [4, 7]


def test_long_rows_are_cut_with_their_end_token_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"input": "x" * length, "target": "y" * length} for length in (3, 9, 10, 40)]
    data = prepared(rows, max_input_length=10, max_target_length=5)
    assert [len(row) for row in data.dataset["input_ids"]] == [4, 10, 10, 10]
    assert [len(row) for row in data.dataset["labels"]] == [4, 5, 5, 5]
    assert all(row[-1] == 1 for column in ("input_ids", "labels") for row in data.dataset[column])
    assert "2 of 4 inputs are longer than max_input_length=10 and lose 32 of all 66 tokens" in caplog.text
    assert "3 of 4 targets are longer than max_target_length=5 and lose 47 of all 66 tokens" in caplog.text
    assert "(the longest has 41)" in caplog.text


def test_default_length_is_512_and_128_or_the_models_limit() -> None:
    long = prepared([{"input": "x" * 2000, "target": "y" * 2000}])
    assert (len(long.dataset[0]["input_ids"]), len(long.dataset[0]["labels"])) == (512, 128)
    limited = prepared([{"text": "the cat " * 100}], WORDS, LLAMA)
    assert len(limited.dataset[0]["input_ids"]) == LLAMA.max_position_embeddings == 48


def test_text_is_learned_with_an_end_token_even_where_it_is_the_padding() -> None:
    tokenizer = resolve("unused").load_tokenizer(tiny.word_tokenizer(pad_token=None))
    data = prepared([{"text": "the cat sat"}, {"text": "hello"}], tokenizer, LLAMA)
    assert data.task == "causal"
    assert data.dataset[0]["input_ids"] == data.dataset[0]["labels"] == [1, 4, 6, 8, 2]
    batch = data.collator([data.dataset[0], data.dataset[1]])
    short = batch["labels"][1].tolist()
    assert sorted(short) == [-100, -100, 1, 2, 16]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_messages_go_through_the_chat_template() -> None:
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}]}
    data = prepared([row], WORDS, LLAMA)
    assert WORDS.decode(data.dataset[0]["input_ids"]) == "user hello </s> assistant the cat </s>"


def test_messages_without_a_chat_template_say_what_to_do() -> None:
    rows = [{"messages": [{"role": "user", "content": "hello"}]}]
    with pytest.raises(DataError, match=r"no chat template.*tokenizer\.chat_template"):
        prepared(rows, tiny.word_tokenizer(), LLAMA)


@pytest.mark.parametrize("messages", [None, [], [{"role": "user", "content": None}], [{"content": "hello"}]])
def test_broken_messages_name_the_row(messages: Any) -> None:
    good = [{"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match="row 1 has"):
        prepared([{"messages": good}, {"messages": messages}], WORDS, LLAMA)


def test_string_labels_get_ids_in_sorted_order() -> None:
    rows = [{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}, {"text": "a", "label": "pos"}]
    data = prepared(rows, WORDS, BERT)
    assert data.task == "classification"
    assert data.id2label == {0: "neg", 1: "pos"}
    assert data.dataset["labels"][:] == [1, 0, 1]
    batch = data.collator([data.dataset[0], data.dataset[1]])
    assert batch["labels"].tolist() == [1, 0]


def test_integer_labels_keep_their_order() -> None:
    rows = [{"text": "the", "label": label} for label in (10, 2, 2, 7)]
    data = prepared(rows, WORDS, BERT)
    assert data.id2label == {0: "2", 1: "7", 2: "10"}
    assert data.dataset["labels"][:] == [2, 0, 0, 1]


def test_class_label_feature_keeps_its_names() -> None:
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["z", "a", "unused"]))
    rows = datasets.Dataset.from_list([{"text": "the", "label": 0}, {"text": "a", "label": 1}], features=features)
    data = prepared(rows, WORDS, BERT)
    assert data.id2label == {0: "z", 1: "a", 2: "unused"}
    assert data.dataset["labels"][:] == [0, 1]


def test_model_trained_on_the_labels_keeps_its_ids() -> None:
    config = tiny.bert_config(id2label={0: "pos", 1: "neg"}, label2id={"pos": 0, "neg": 1})
    rows = [{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}]
    assert prepared(rows, WORDS, config).dataset["labels"][:] == [0, 1]


def test_evaluation_set_uses_the_ids_of_the_training_set() -> None:
    rows = [{"text": "good", "label": "pos"}]
    assert prepared(rows, WORDS, BERT, id2label={0: "neg", 1: "pos"}).dataset["labels"][:] == [1]
    with pytest.raises(DataError, match="row 0 has the label 'odd'; the model learns only neg, pos"):
        prepared([{"text": "good", "label": "odd"}], WORDS, BERT, id2label={0: "neg", 1: "pos"})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", 1], r"column 'label' mixes int \(row 1\) and str \(row 0\)"),
        (["a", None], "row 1 has no 'label'"),
        ([0.5, 1.5], "row 0 has the label 0.5"),
        (["a", "a"], "every row has the label 'a'"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared([{"text": "the", "label": label} for label in labels], WORDS, BERT)


def test_task_overrides_what_the_columns_suggest() -> None:
    rows = [{"text": "the cat", "label": "x"}]
    assert prepared(rows, WORDS, LLAMA, task="causal").task == "causal"
    with pytest.raises(DataError, match="for task 'seq2seq' no column set fits"):
        prepared(rows, WORDS, T5, task="seq2seq")


def test_tokenized_rows_are_taken_as_they_are() -> None:
    rows = [
        {"input_ids": [5, 6, 1], "labels": [7, -100, 1], "decoder_input_ids": [0, 7, 9]},
        {"input_ids": [5, 1], "labels": [1], "decoder_input_ids": [0]},
    ]
    data = prepared(rows)
    assert data.task == "seq2seq"
    batch = data.collator([data.dataset[0], data.dataset[1]])
    assert batch["labels"].tolist() == [[7, -100, 1], [1, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 7, 9], [0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("rows", "side", "mask"),
    [
        ([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}], "left", "full"),
        ([{"input_ids": [5, 6, 4]}, {"input_ids": [7, 8]}], "right", "unread"),
        ([{"input_ids": [5, 6, 4]}, {"input_ids": [7, 8]}], "left", "unread"),
        (
            [{"input_ids": [5, 6], "attention_mask": [1, 1]}, {"input_ids": [7, 0], "attention_mask": [1, 0]}],
            "right",
            "padded",
        ),
    ],
)
def test_rows_say_what_their_masks_may_mask(rows: Any, side: str, mask: str) -> None:
    tokenizer = tiny.word_tokenizer()
    tokenizer.padding_side = side
    data = prepared(rows, tokenizer, LLAMA)
    assert data.mask == mask
    assert longest_row(None, data)["mask"] == mask
    full = prepared([{"input_ids": [5, 6]}], WORDS, LLAMA)
    assert longest_row(full, data)["mask"] == mask
    unread = padding_of(*(data.collator(list(data.dataset))[name] for name in ("attention_mask", "labels")))
    assert unread is {"full": Padding.NONE, "unread": Padding.UNREAD, "padded": Padding.READ}[mask]
    assert tokenizer.padding_side == side


def test_tokenized_rows_of_a_causal_model_need_no_labels() -> None:
    data = prepared([{"input_ids": [1, 4, 6]}], WORDS, LLAMA)
    assert (data.task, data.dataset[0]["labels"]) == ("causal", [1, 4, 6])
    with pytest.raises(DataError, match="needs `labels` in addition to `input_ids`"):
        prepared([{"input_ids": [1, 4, 6]}], BYTES, T5)


def test_masks_of_trl_say_which_tokens_are_learned(tmp_path: Path) -> None:
    row = {"input_ids": [4, 5, 6, 7], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}
    (both,) = prepared([row], WORDS, LLAMA).dataset
    assert both["labels"] == [-100, 5, -100, 7]
    del row["assistant_masks"]
    (one,) = prepared([row], WORDS, LLAMA).dataset
    assert one["labels"] == [-100, 5, 6, 7]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (read,) = prepared(tmp_path / "rows.jsonl", WORDS, LLAMA).dataset
    assert read["labels"] == one["labels"]
    (own,) = prepared([row | {"labels": [4, 5, -100, 7]}], WORDS, LLAMA).dataset
    assert own["labels"] == [4, 5, -100, 7]
    with pytest.raises(DataError, match="row 0 has 2 numbers in 'completion_mask' but 4 in 'input_ids'"):
        prepared([row | {"completion_mask": [0, 1]}], WORDS, LLAMA)


def test_tokenized_rows_with_one_label_each_are_classification() -> None:
    data = prepared([{"input_ids": [4], "labels": 0}, {"input_ids": [5, 6], "labels": 1}], WORDS, BERT)
    assert (data.task, data.dataset["labels"][:]) == ("classification", [0, 1])


def test_unknown_columns_shows_those_found_and_those_accepted() -> None:
    with pytest.raises(DataError) as raised:
        prepared([{"source": "a", "answer": "b"}])
    says = ("'answer' can be the target", "source, answer", "input + target", "messages", "text + label", "input_ids")
    for part in (*says, "input_column=", "target_column=", "template="):
        assert part in str(raised.value)
    assert "rename" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "tokenizer", "config", "message"),
    [
        (PAIRS, BYTES, BERT, r"'bert' is an encoder and cannot generate text.* text \+ label"),
        ([{"text": "the"}], BYTES, T5, r"text trains a causal language model, but 't5' .* input \+ target"),
        ([{"text": "the"}], WORDS, BERT, r"'bert' is an encoder and cannot generate text.* text \+ label"),
    ],
)
def test_columns_for_another_kind_of_model_are_refused(rows: Any, tokenizer: Any, config: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(rows, tokenizer, config)


@pytest.mark.parametrize("rows", [[], datasets.Dataset.from_dict({"text": []}), pd.DataFrame({"text": []})])
def test_empty_dataset_is_refused(rows: Any) -> None:
    with pytest.raises(DataError, match="empty: at least one row is needed"):
        load_dataset_like(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    path.touch()
    with pytest.raises(DataError, match="is empty"):
        load_dataset_like(path)


def test_labels_all_masked_are_refused_and_single_rows_left_out(caplog: pytest.LogCaptureFixture) -> None:
    masked, learned = {"input_ids": [5, 1], "labels": [-100, -100]}, {"input_ids": [6, 1], "labels": [7, 1]}
    with pytest.raises(DataError, match="none of the 2 rows teaches anything: all labels are -100"):
        prepared([masked, masked])
    data = prepared([masked, learned])
    assert len(data.dataset) == 1
    assert data.dataset[0]["input_ids"] == [6, 1]
    assert "1 of 2 rows left out" in caplog.text


def test_causal_row_whose_only_label_is_its_first_token_teaches_nothing() -> None:
    with pytest.raises(DataError, match="teaches anything"):
        prepared([{"input_ids": [4, 5], "labels": [4, -100]}], WORDS, LLAMA)


@pytest.mark.parametrize("bad", [None, 3])
def test_missing_field_names_row_and_column(bad: Any) -> None:
    rows = datasets.Dataset.from_list([*PAIRS] * 700 + [{"input": "x", "target": None}])
    with pytest.raises(DataError, match=r"row 1400 has no value in 'target': .*\(the first is row 0\)"):
        prepared(rows)
    frame = pd.DataFrame({"input": ["a", "b"], "target": [bad, bad]})
    with pytest.raises(DataError, match=r"row 0 has .* in 'target'"):
        prepared(frame)


def test_field_that_only_later_rows_have_is_seen() -> None:
    with pytest.raises(DataError, match="row 0 has no value in 'target'"):
        prepared([{"input": "a"}, {"input": "b", "target": "c"}])


@pytest.mark.parametrize(
    ("texts", "share"),
    [(["the dog sat", "le chien dort"], "50%"), (["the dog sat on", "le chien dort"], None), (["le chat"], "100%")],
)
def test_text_that_the_tokenizer_mostly_does_not_know_is_refused(texts: list[str], share: str | None) -> None:
    rows = [{"text": text} for text in texts]
    if share is None:
        assert len(prepared(rows, WORDS, LLAMA).dataset) == 2
        return
    with pytest.raises(DataError, match=f"does not know {share} of the tokens in 'input_ids' .*[Pp]ass tokenizer="):
        prepared(rows, WORDS, LLAMA)


def test_an_end_token_that_is_the_unknown_one_too_is_no_unknown_word() -> None:
    words = tiny.word_tokenizer()
    words.unk_token = "</s>"
    assert prepared([{"text": "hello"}], words, LLAMA).dataset[0]["input_ids"] == [1, 16, 2]


@pytest.mark.parametrize("row", [{"input_ids": [5, 384], "labels": [1]}, {"input_ids": [5], "labels": [-1, 1]}])
def test_token_outside_the_vocabulary_names_the_row(row: dict[str, list[int]]) -> None:
    with pytest.raises(DataError, match=r"row 1 has the token id (384|-1) .* 0 \.\.\. 383"):
        prepared([{"input_ids": [5], "labels": [1]}, row])


def test_broken_line_of_a_jsonl_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a", "target": "b"}\n{"input": "c", \n')
    with pytest.raises(DataError, match="line 2, column 16: Expecting property name"):
        load_dataset_like(path)


def test_file_with_a_header_and_no_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("input,target\n")
    with pytest.raises(DataError, match="has no rows"):
        load_dataset_like(path)


def test_unreadable_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_dataset_like(path)


def test_file_that_is_missing_or_of_unknown_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file 'missing\.jsonl'"):
        load_dataset_like("missing.jsonl")
    (tmp_path / "data.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match=r"use \.jsonl, \.json, \.csv, \.parquet"):
        load_dataset_like(tmp_path / "data.xlsx")
    with pytest.raises(DataError, match=r"is a folder.*load_from_disk"):
        load_dataset_like(tmp_path)


@pytest.mark.parametrize("data", [3, {"input": "a"}, {"input": 3}, [["a", "b"]], ["a", 3], None])
def test_what_is_no_dataset_says_what_is_accepted(data: Any) -> None:
    with pytest.raises(DataError, match=r"a list of dicts, a pandas DataFrame, a path to a \.jsonl"):
        load_dataset_like(data)


def test_tokenising_writes_nothing_beside_the_users_files_and_leaves_caching_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    datasets.Dataset.from_list(PAIRS).save_to_disk(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    data = prepared(datasets.load_from_disk(folder))
    assert len(data.dataset) == 2
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not any(str(tmp_path) in file["filename"] for file in data.dataset.cache_files)
    assert datasets.is_caching_enabled()
    assert os.listdir(tmp_path) == ["mine"]


def test_batches_train_a_model() -> None:
    """The collated columns match the arguments of the model's forward."""
    from transformers import T5ForConditionalGeneration

    data = prepared(PAIRS)
    loss = T5ForConditionalGeneration(T5)(**data.collator([data.dataset[0], data.dataset[1]])).loss
    assert torch.isfinite(loss)
