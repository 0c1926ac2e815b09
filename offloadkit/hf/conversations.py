"""Which tokens of a conversation the assistant wrote, by the tokenizer's chat template.

A template with `{% generation %}` says it. With any other, a message of the assistant begins where the template opens
an answer (`add_generation_prompt`), and ends where the conversation up to it ends. A template that writes the last
message differently, as Qwen3's does, is asked with another text in the message's place: the message
is what differs, and the special token that follows.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from offloadkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSISTANT = ("assistant", "model")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_TEXT = "\ue000"
"""In place of a message. No text begins or ends with this character for private use."""


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], row: int
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and whether the assistant wrote each of them.

    Args:
        messages: dicts with role and content.
        row: its number, for messages of errors.

    Raises:
        DataError: the template does not show a message of the assistant.
    """
    template: Any = tokenizer.apply_chat_template
    if tokenizer.is_fast and _GENERATION.search(str(tokenizer.get_chat_template())):
        found = template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))
    whole = template(messages, tokenize=False)
    tokens = _ids(tokenizer, whole)
    learned = [False] * len(tokens)
    for at, message in enumerate(messages):
        if message["role"] in _ASSISTANT:
            begin, end = _place(tokenizer, messages, at, whole, row)
            first, last = (_num_equal(_ids(tokenizer, whole[:place]), tokens) for place in (begin, end))
            learned[first:last] = [True] * (last - first)
    return tokens, learned


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _num_equal(one: Any, other: Any) -> int:
    """Number of equal items at the start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _place(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], at: int, whole: str, row: int
) -> tuple[int, int]:
    """Begin and end of message `at` in the text `whole`."""
    opened = _start_of(tokenizer, messages[:at], whole, opens=True) or _start_of(tokenizer, messages[:at], whole)
    closed = _start_of(tokenizer, messages[: at + 1], whole)
    if opened and closed:
        return opened, closed
    other = [*messages]
    other[at] = {**messages[at], "content": _OTHER_TEXT}
    asked = _rendered(tokenizer, other)
    if asked is None or _OTHER_TEXT not in asked or not isinstance(messages[at]["content"], str):
        raise DataError(
            f"row {row}: the tokenizer's chat template changes message {at} of the assistant, so its place is "
            "unknown: set tokenizer.chat_template to one with {% generation %} around the assistant's messages"
        )
    begin, end = _num_equal(whole, asked), len(whole) - _num_equal(whole[::-1], asked[::-1])
    rest = whole[end:].lstrip()
    special = (token for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True) if rest.startswith(token))
    return opened or begin, len(whole) - len(rest) + len(token) if (token := next(special, "")) else end


def _start_of(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], whole: str, *, opens: bool = False
) -> int:
    """Length of the text of the first messages if `whole` begins with it, else 0."""
    text = _rendered(tokenizer, messages, add_generation_prompt=opens) if messages else None
    return len(text) if text is not None and whole.startswith(text) else 0


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None if the template refuses these messages."""
    from jinja2 import TemplateError

    try:
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TemplateError:
        return None
    return str(text)
