"""All messages of the assistant are learned, and no others, with templates of several kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
from transformers import ByT5Tokenizer

from offloadkit.errors import DataError
from offloadkit.hf.conversations import conversation
from offloadkit.hf.data import prepare_both
from offloadkit.hf.streams import NUM_FIRST
from offloadkit.hf.tokenize import messages_of
from tests.hf.test_data import LLAMA, prepared
from tests.hf.tiny import bert_config, llama_config, word_tokenizer

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "good"},
]
PLAIN = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
OPENED = PLAIN + "{% if add_generation_prompt %}assistant {% endif %}"
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant {% generation %}{{ m['content'] }} </s>"
    "{% endgeneration %} {% else %}{{ m['role'] }} {{ m['content'] }} </s> {% endif %}{% endfor %}"
)
THINKING = (  # like Qwen3's: the last message alone has a thought
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'assistant' and loop.last %}tree {% endif %}"
    "{{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def learned(template: str, messages: list[dict[str, Any]] = CHAT) -> list[str]:
    """The text of each run of learned tokens."""
    tokenizer = word_tokenizer(chat_template=template)
    tokens, marks = conversation(tokenizer, messages, 0)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(messages, tokenize=False).strip()
    runs: list[list[int]] = []
    for at, (token, mark) in enumerate(zip(tokens, marks, strict=True)):
        if mark:
            if not at or not marks[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (PLAIN, ["assistant the cat </s>", "assistant good </s>"]),
        (OPENED, ["the cat </s>", "good </s>"]),
        (MARKED, ["the cat </s>", "good </s>"]),
        (THINKING, ["the cat </s>", "tree good </s>"]),
    ],
)
def test_all_messages_of_the_assistant_are_learned(template: str, answers: list[str]) -> None:
    assert learned(template) == answers


def test_an_answer_begins_after_its_header_where_the_template_opens_answers_with_a_thought() -> None:
    opens = THINKING.replace("assistant {% endif %}", "assistant tree {% endif %}")
    assert learned(opens) == ["the cat </s>", "good </s>"]


def test_a_conversation_that_ends_with_a_question_or_begins_with_an_answer() -> None:
    assert learned(OPENED, CHAT[:3]) == ["the cat </s>"]
    assert learned(THINKING, CHAT[:3]) == ["the cat </s>"]
    assert learned(OPENED, CHAT[1:]) == ["the cat </s>", "good </s>"]


@pytest.mark.parametrize("template", [OPENED, THINKING, MARKED])
def test_calls_of_tools_are_learned(template: str) -> None:
    written = "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}sat on {{ call['name'] }}{% endfor %}"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "mat"}]}
    messages = messages_of([CHAT[0], calls, {"role": "tree", "content": "ran"}, CHAT[3]], "messages", 0)
    first, last = learned(template.replace("{{ m['content'] }}", written), messages)
    assert first == "sat on mat </s>"
    assert last.endswith("good </s>")
    with pytest.raises(DataError, match=r"row 7: .* does not write the call of the tool 'mat' in message 1"):
        conversation(word_tokenizer(chat_template=template), messages, 7)


def test_a_completion_that_calls_a_tool_is_learned_or_refused() -> None:
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"name": "mat"}]}]
    written = "{% for call in m['tool_calls'] or [] %}sat on {{ call['name'] }}{% endfor %}"
    tokenizer = word_tokenizer(chat_template=OPENED.replace("{{ m['content'] }}", "{{ m['content'] }}" + written))
    rows = [{"prompt": CHAT[:1], "completion": calls}]
    (row,) = prepared(rows, tokenizer, LLAMA).dataset
    assert tokenizer.decode([token for token in row["labels"] if token != -100]).endswith("sat on mat </s>")
    with pytest.raises(DataError, match=r"row 0: .* does not write the call of the tool 'mat' in message 1"):
        prepared(rows, word_tokenizer(chat_template=OPENED), LLAMA)


def test_a_thought_that_a_template_removes_may_precede_a_short_answer() -> None:
    removes = OPENED.replace("{{ m['content'] }}", "{{ m['content'].split('tree')[-1].strip() }}")
    assert learned(removes, [CHAT[0], {"role": "assistant", "content": "cat tree good"}]) == ["good </s>"]


def test_a_template_that_hides_an_answer_is_refused() -> None:
    hides = "{% for m in messages %}{{ m['role'] }} {% if loop.last %}{{ m['content'] }}{% endif %} </s> {% endfor %}"
    tokenizer = word_tokenizer(chat_template=hides)
    with pytest.raises(DataError, match=r"row 7: .* changes message 1 of the assistant"):
        conversation(tokenizer, CHAT, 7)
    parts = "{% for m in messages %}{{ m['role'] }} {% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"row 7: .* changes message 1 of the assistant"):
        conversation(word_tokenizer(chat_template=parts), CHAT, 7)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_messages_that_a_template_refuses_name_the_row(template: str) -> None:
    refuses = "{% if messages|length > 3 %}{{ raise_exception('too many turns') }}{% endif %}" + template
    with pytest.raises(DataError, match="row 7: the tokenizer's chat template cannot write these messages: too many"):
        conversation(word_tokenizer(chat_template=refuses), CHAT, 7)


def test_labels_are_the_assistants_tokens_and_rows_without_any_are_left_out(caplog: Any) -> None:
    tokenizer = word_tokenizer(chat_template=OPENED)
    rows = [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": [{**CHAT[0], "content": "hello " * 60}, CHAT[1]]}]
    data = prepared(rows, tokenizer, LLAMA)
    assert len(data.dataset) == 1
    (row,) = data.dataset
    kept = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(kept) == "the cat </s> good </s>"
    assert "their input alone takes all of max_input_length 48" in caplog.text


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer", "default": None}}}}
CALLED = "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}"
WITH_TOOLS = "{% if tools is not none and tools is defined %}{{ tools | tojson }}|{% endif %}" + OPENED.replace(
    "{{ m['content'] }}", CALLED
)
SHOUTS = WITH_TOOLS.replace("</s>", "{{ '!!' if loud else '</s>' }}")
BYTES, LONG = ByT5Tokenizer(), llama_config(vocab_size=384, max_position_embeddings=2048)


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]}


ASKED = [
    {"messages": [CHAT[0], called("weather", city="Paris"), CHAT[1]], "tools": [WEATHER, ADD]},
    {"messages": [CHAT[0], called("add", a=1)], "tools": [ADD]},
    {"messages": CHAT, "tools": []},
    {"messages": CHAT, "tools": None},
]


def ids(messages: Any, tools: Any, **options: Any) -> list[int]:
    text = BYTES.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return BYTES(text, add_special_tokens=False)["input_ids"]


def as_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def with_texts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "tools": json.dumps(row["tools"])} for row in rows]


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("kind", ["list", "texts", "file", "frame", "json feature", "columns"])
def test_tools_of_a_row_are_written_by_the_template(kind: str, tmp_path: Path) -> None:
    """No row gets a key of another row's tools and calls, as it would in a table."""
    made: dict[str, Callable[[], Any]] = {
        "list": lambda: ASKED,
        "texts": lambda: with_texts(ASKED),
        "file": lambda: as_file(tmp_path, ASKED),
        "frame": lambda: pandas.DataFrame(ASKED),
        "json feature": lambda: datasets.Dataset.from_list(ASKED, on_mixed_types="use_json"),
        "columns": lambda: {name: [row[name] for row in ASKED] for name in ASKED[0]},
    }
    BYTES.chat_template = WITH_TOOLS
    found = prepared(made[kind](), BYTES, LONG).dataset
    for row, asked in zip(found, ASKED, strict=True):
        given: Any = asked["tools"] or None
        assert row["input_ids"] == ids(asked["messages"], given)
        learns = BYTES.decode([token for token in row["labels"] if token != -100])
        assert "weather" not in learns if given != ASKED[0]["tools"] else '"city": "Paris"}' in learns


def test_a_stream_and_a_prompt_with_tools() -> None:
    BYTES.chat_template = WITH_TOOLS
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:], "tools": row["tools"]} for row in ASKED]
    lengths: dict[str, Any] = {"max_input_length": 1024, "max_target_length": None}
    stream, _ = prepare_both(lambda: iter(rows), None, BYTES, LONG, **lengths)
    for found in (prepared(rows, BYTES, LONG).dataset, islice(stream.dataset, len(rows))):
        for row, asked in zip(found, ASKED, strict=True):
            given: Any = asked["tools"] or None
            assert row["input_ids"] == ids(asked["messages"], given)
            start = ids(asked["messages"][:1], given, add_generation_prompt=True)
            assert row["labels"][: len(start)] == [-100] * len(start)
            assert -100 not in row["labels"][len(start) :]


def test_tools_that_only_late_rows_of_a_stream_have_are_written() -> None:
    BYTES.chat_template = WITH_TOOLS
    rows = [{"messages": CHAT}] * NUM_FIRST + [{"messages": CHAT, "tools": [ADD]}]
    lengths: dict[str, Any] = {"max_input_length": 1024, "max_target_length": None}
    stream, _ = prepare_both(lambda: iter(rows), None, BYTES, LONG, **lengths)
    *_, last = islice(stream.dataset, len(rows))
    assert last["input_ids"] == ids(CHAT, [ADD])


def test_other_arguments_of_a_template_are_those_of_the_row() -> None:
    BYTES.chat_template = SHOUTS
    rows = [{"messages": CHAT, "chat_template_kwargs": {"loud": True}}, {"messages": CHAT}]
    loud, plain = (BYTES.decode(row["input_ids"]) for row in prepared(rows, BYTES, LONG).dataset)
    assert ("!!" in loud, "!!" in plain) == (True, False)
    with pytest.raises(DataError, match="row 1 has 'loud' in 'chat_template_kwargs': write a dict"):
        prepared([{"messages": CHAT}, {"messages": CHAT, "chat_template_kwargs": "loud"}], BYTES, LONG)


@pytest.mark.parametrize("template", [SHOUTS, SHOUTS.replace("m['content']", "m['content'] ~ row")])
@pytest.mark.parametrize("as_pair", [False, True])
def test_arguments_of_a_template_may_have_names_that_our_functions_have(template: str, as_pair: bool) -> None:
    BYTES.chat_template = template
    row: dict[str, Any] = {"prompt": CHAT[:1], "completion": CHAT[1:2]} if as_pair else {"messages": CHAT[:2]}
    given = {"loud": True, "row": "A", "tokenizer": "B"}
    (found,) = prepared([{**row, "chat_template_kwargs": given}], BYTES, LONG).dataset
    assert found["input_ids"] == ids(CHAT[:2], None, **given)
    for name in ("add_generation_prompt", "messages", "return_assistant_tokens_mask", "tokenize"):
        with pytest.raises(DataError, match=f"row 0 has '{name}' in 'chat_template_kwargs', which finetune sets"):
            prepared([{**row, "chat_template_kwargs": {name: True}}], BYTES, LONG)


def test_tools_that_are_no_schemas_are_refused_and_tools_that_no_template_writes_are_named(caplog: Any) -> None:
    tokenizer = word_tokenizer(chat_template=OPENED)
    with pytest.raises(DataError, match=r"row 0 has 'hammer' in 'tools': write a list of JSON schemas, such as"):
        prepared([{"messages": CHAT, "tools": "hammer"}], tokenizer, LLAMA)
    prepared([{"messages": CHAT, "tools": [WEATHER]}, {"messages": CHAT}], tokenizer, LLAMA)
    assert "1 of 2 rows have `tools` that the tokenizer's chat template does not write" in caplog.text


def test_a_template_for_rows_with_tools() -> None:
    BYTES.chat_template = {"default": PLAIN, "tool_use": "{{ tools | tojson }}" + PLAIN}
    tokens, learns = conversation(BYTES, CHAT, 0, tools=[ADD])
    assert BYTES.decode(tokens).startswith('[{"type": "function"')
    learned_text = BYTES.decode([token for token, own in zip(tokens, learns, strict=True) if own])
    assert learned_text == "assistant the cat</s>assistant good</s>"


def test_a_column_of_tools_beside_texts_is_left_alone() -> None:
    rows = [{"text": "the cat", "label": "good", "tools": "hammer"}, {"text": "a", "label": "bad", "tools": "saw"}]
    assert len(prepared(rows, word_tokenizer(), bert_config()).dataset) == 2
    pairs = [{"prompt": "the cat", "completion": "sat", "tools": "hammer"}]
    assert len(prepared(pairs, word_tokenizer(chat_template=OPENED), LLAMA).dataset) == 1
