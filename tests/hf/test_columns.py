"""The columns that training learns from: known names, names chosen by the user, and only the target of a decoder's
pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from offloadkit.errors import ConfigError, DataError
from offloadkit.hf.columns import ColumnOptions
from offloadkit.hf.data import PreparedData, load_dataset_like, prepare, prepare_both
from tests.hf import tiny

BYTES = ByT5Tokenizer()
WORDS = tiny.word_tokenizer()
OPENING = tiny.CHAT_TEMPLATE + "{% if add_generation_prompt %}assistant {% endif %}"
T5, LLAMA, BYTE_LLAMA = tiny.t5_config(), tiny.llama_config(), tiny.llama_config(vocab_size=384)
PROMPT, ANSWER = [{"role": "user", "content": "hello"}], [{"role": "assistant", "content": "the cat"}]


pytestmark = pytest.mark.usefixtures("datasets_cache")


def prepared(rows: Any, tokenizer: Any = BYTES, config: Any = T5, **options: Any) -> PreparedData:
    return prepare(load_dataset_like(rows), tokenizer, config, **options)


def learned(data: PreparedData, row: int = 0) -> list[int]:
    """The labels that count in the loss; all labels before them are -100."""
    ids, labels = data.dataset[row]["input_ids"], data.dataset[row]["labels"]
    first = next(index for index, label in enumerate(labels) if label != -100)
    assert labels == [-100] * first + ids[first:]
    return list(labels[first:])


def texts(data: PreparedData) -> tuple[str, str]:
    row = data.dataset[0]
    return tuple(BYTES.decode(row[name], skip_special_tokens=True) for name in ("input_ids", "labels"))


# -- pairs for decoders


@pytest.mark.parametrize("names", [("input", "target"), ("prompt", "completion")])
def test_a_decoder_learns_the_target_alone_and_to_end_it(names: tuple[str, str]) -> None:
    data = prepared([dict(zip(names, ("one", "1"), strict=True))], BYTES, BYTE_LLAMA)
    assert data.task == "causal"
    assert data.dataset[0]["input_ids"] == [*(byte + 3 for byte in b"one1"), 1]
    assert learned(data) == [ord("1") + 3, 1]


def test_a_target_whose_first_letters_would_merge_with_the_prompt_keeps_its_own_tokens() -> None:
    data = prepared([{"prompt": "the cat", "completion": "sat"}], WORDS, LLAMA)
    assert data.dataset[0]["input_ids"] == [1, 4, 6, 8, 2]
    assert learned(data) == [8, 2]


@pytest.mark.parametrize(
    ("template", "answer"), [(tiny.CHAT_TEMPLATE, "assistant the cat </s>"), (OPENING, "the cat </s>")]
)
@pytest.mark.parametrize("as_messages", [False, True])
def test_with_a_chat_template_what_it_writes_for_the_answer_is_learned(
    template: str, answer: str, as_messages: bool, tmp_path: Path
) -> None:
    """Including its end token. Text and messages give the same result, and so do a list and a file."""
    row = {"prompt": PROMPT, "completion": ANSWER} if as_messages else {"prompt": "hello", "completion": "the cat"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for rows in ([row], tmp_path / "rows.jsonl"):
        data = prepared(rows, tiny.word_tokenizer(chat_template=template), LLAMA)
        assert WORDS.decode(data.dataset[0]["input_ids"]) == "user hello </s> assistant the cat </s>"
        assert WORDS.decode(learned(data)) == answer


def test_a_chat_template_that_writes_the_prompt_otherwise_before_an_answer_is_refused() -> None:
    words = tiny.word_tokenizer(chat_template="{{ messages | length }} " + tiny.CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"row 0: .* the start of 'completion' is unknown"):
        prepared([{"prompt": "hello", "completion": "the cat"}], words, LLAMA)


def test_messages_as_prompts_need_a_chat_template() -> None:
    with pytest.raises(DataError, match="no chat template, so `prompt` cannot become text"):
        prepared([{"prompt": PROMPT, "completion": ANSWER}], WORDS, LLAMA)


def test_a_prompt_that_leaves_no_room_for_its_target_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "x" * length, "completion": "yyyy"} for length in (2, 9, 10, 6)]
    data = prepared(rows, BYTES, BYTE_LLAMA, max_input_length=9)
    assert [len(learned(data, row)) for row in range(2)] == [5, 3]
    assert "2 of 4 rows left out: their input alone takes all of max_input_length 9" in caplog.text
    assert "(rows 1, 2)" in caplog.text
    assert "1 of 4 rows are longer than max_input_length=9 and lose 2 of all 18 tokens" in caplog.text
    with pytest.raises(DataError, match=r"none of the 2 rows teaches anything: .*\(rows 0, 1\): raise max_input"):
        prepared(rows[1:3], BYTES, BYTE_LLAMA, max_input_length=9)


# -- known names


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"instruction": "add", "input": "1+1", "output": "2", "text": "all of it"}, ("add\n\n1+1", "2")),
        ({"instruction": "add", "input": "", "output": "2"}, ("add", "2")),
        ({"instruction": "add", "input": "1+1", "target": "2"}, ("add\n\n1+1", "2")),
        ({"instruction": "add", "context": None, "response": "2", "category": "qa"}, ("add", "2")),
        ({"question": "1+1", "answer": "2", "id": "7"}, ("1+1", "2")),
        ({"document": "long", "summary": "short"}, ("long", "short")),
        ({"text": "long", "summary": "short"}, ("long", "short")),
        ({"input": "a", "output": "b"}, ("a", "b")),
    ],
)
def test_known_names_make_pairs(row: dict[str, Any], pair: tuple[str, str]) -> None:
    assert texts(prepared([row, row])) == pair


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ("question", "options", "answer"),
            "'answer' can be the target, but the names leave open which columns are the input",
        ),
        (("question", "document", "answer"), "names leave open which columns are the input"),
        (("instruction", "history", "output"), "names leave open which columns are the input"),
        (("prompt", "output", "response"), "'output' and 'response' could each be the target"),
        (("source", "label"), "no column name says which is the input and which the target"),
    ],
)
def test_names_that_leave_a_doubt_are_refused_with_what_to_say(names: tuple[str, ...], says: str) -> None:
    with pytest.raises(DataError) as raised:
        prepared([dict.fromkeys(names, "a")])
    for part in (says, ", ".join(names), "input_column=", "target_column=", "template=", "input + target"):
        assert part in str(raised.value)


def test_what_is_learned_is_said_where_the_names_do_not_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    lengths: dict[str, Any] = {"max_input_length": None, "max_target_length": None}
    prepare_both([{"instruction": "a", "input": "b", "output": "c"}], None, BYTES, T5, **lengths)
    assert capsys.readouterr().out == "of each row the input is instruction + input, the target is output\n"
    prepare_both([{"input": "a", "target": "b", "id": "c"}], None, BYTES, T5, **lengths)
    assert capsys.readouterr().out == ""
    prepare_both([{"text": "a", "summary": "b"}], None, BYTES, BYTE_LLAMA, **lengths)
    said = "of each row the input is text, the target is summary; to learn `text` as a whole, leave 'summary' out of"
    assert capsys.readouterr().out == f"{said} the rows\n"
    prepare_both([{"text": "a", "output": "b", "response": "c"}], None, BYTES, BYTE_LLAMA, **lengths)
    said = "of each row the text is text (not read: output, response); to learn a target alone, pass input_column= and"
    assert capsys.readouterr().out.startswith(said)


def test_a_decoder_learns_the_target_of_a_pair_and_not_the_text_that_writes_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"instruction": "add", "input": "1+1", "output": "2", "text": "add 1+1: 2"}]
    assert learned(prepared(rows, BYTES, BYTE_LLAMA)) == [ord("2") + 3, 1]
    assert learned(prepared([{"text": "long", "summary": "s"}], BYTES, BYTE_LLAMA)) == [ord("s") + 3, 1]
    lengths: dict[str, Any] = {"max_input_length": None, "max_target_length": None}
    prepare_both(rows, None, BYTES, BYTE_LLAMA, **lengths)
    said = "of each row the input is instruction + input, the target is output (not read: text); to learn `text` as"
    assert capsys.readouterr().out == f"{said} a whole, pass input_column='text' (--input-column text)\n"
    whole = prepared(rows, BYTES, BYTE_LLAMA, column_options=ColumnOptions(input="text"))
    assert learned(whole) == [*(byte + 3 for byte in b"add 1+1: 2"), 1]


@pytest.mark.parametrize("in_a_file", [False, True])
def test_conversations_of_sharegpt_are_messages(in_a_file: bool, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "the cat"}]
    rows: Any = [{"id": 3, "conversations": turns}]
    if in_a_file:
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        rows = tmp_path / "rows.json"
    data = prepared(rows, tiny.word_tokenizer(chat_template=tiny.CHAT_TEMPLATE), LLAMA)
    assert WORDS.decode(data.dataset[0]["input_ids"]) == "user hello </s> assistant the cat </s>"


# -- columns named by the user


@pytest.mark.parametrize(
    ("wish", "pair"),
    [
        (ColumnOptions(input="frage", target="antwort"), ("7", "2.50")),
        (ColumnOptions(template="{thema}: {frage}?", target="antwort"), ("sums: 7?", "2.50")),
        (ColumnOptions(template="{frage}"), ("7", "x")),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_columns_that_are_named_make_the_pairs(
    wish: ColumnOptions, pair: tuple[str, str], suffix: str, tmp_path: Path
) -> None:
    """A file's other columns are not read, and its numbers stay text."""
    row = {"thema": "sums", "frage": "7", "antwort": "2.50", "answer": "x"}
    path = tmp_path / f"rows{suffix}"
    lines = [",".join(row), ",".join(row.values())] if suffix == ".csv" else [json.dumps(row | {"more": {"a": 1}})]
    path.write_text("\n".join(lines) + "\n")
    data = prepare(load_dataset_like(path, columns=wish.named), BYTES, T5, column_options=wish)
    assert texts(data) == pair


def test_named_columns_are_text_and_label_of_a_classifier() -> None:
    rows = [{"sentence": "good", "mood": mood} for mood in ("10", "9")]
    data = prepared(rows, WORDS, tiny.bert_config(), column_options=ColumnOptions(input="sentence", target="mood"))
    assert (data.task, data.id2label, data.dataset["labels"][:]) == ("classification", {0: "9", 1: "10"}, [1, 0])


def test_an_input_alone_is_the_text_of_a_decoder_and_lacks_a_target_elsewhere() -> None:
    wish = ColumnOptions(template="{a} {b}")
    rows = [{"a": "the", "b": "cat"}]
    assert prepared(rows, WORDS, LLAMA, column_options=wish).dataset[0]["labels"] == [1, 4, 6, 2]
    with pytest.raises(DataError, match=r"the input is a \+ b, and the target is missing: pass target_column="):
        prepared(rows, column_options=wish)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (ColumnOptions(input="c"), "there is no column 'c'. Columns found: a, b"),
        (ColumnOptions(template="{a} {c}", target="b"), "there is no column 'c'"),
        (ColumnOptions(target="b"), "the target is 'b', but no name of the other columns .a. says which is the input"),
        (ColumnOptions(input="b", target="b"), "'b' cannot be both input and target"),
        (ColumnOptions(template="{a:d}", target="b"), "cannot be filled with row 0"),
    ],
)
def test_options_that_the_columns_cannot_fulfil_are_refused(wish: ColumnOptions, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared([{"a": "x", "b": "y"}], column_options=wish)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"template": "no column"}, "must contain column names in braces"),
        ({"template": "{a"}, "cannot be read .*: braces of the text itself are doubled: {{ }}"),
        ({"template": "{}"}, "must contain column names in braces"),
        ({"template": "{a}", "input": "a"}, "pass one of them"),
        ({"target": 3}, "target_column must be the name of a column, got 3"),
    ],
)
def test_wishes_without_a_meaning_are_refused(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ColumnOptions(**wish)
