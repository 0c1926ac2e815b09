"""All messages of the assistant are learned, and no others, with templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from offloadkit.errors import DataError
from offloadkit.hf.conversations import conversation
from offloadkit.hf.tokenize import messages_of
from tests.hf.test_data import LLAMA, prepared
from tests.hf.tiny import word_tokenizer

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
