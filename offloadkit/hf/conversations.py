"""Which tokens of a conversation the assistant wrote, by the tokenizer's chat template.

A template with `{% generation %}` says it. With any other, a message of the assistant begins where the template opens
an answer (`add_generation_prompt`), and ends where the conversation up to it ends. A template that writes the last
message differently, as Qwen3's does, is asked with another text in the message's place: the message
is what differs, and the special token that follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from offloadkit.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = ("assistant", "model")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_TEXT = "\ue000"
"""In place of a message. No text begins or ends with this character for private use."""
_LAST = 8


def conversation(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], row: int, /, **options: Any
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and whether the assistant wrote each of them.

    Args:
        messages: dicts with role and content.
        row: its number, for messages of errors.
        options: arguments of the chat template, such as `tools`.

    Raises:
        DataError: the template refuses the messages, or does not show a message of the assistant.
    """
    write: Callable[..., str] = partial(rendered, tokenizer, **options)
    whole = write(messages, row)
    answers = [at for at, message in enumerate(messages) if message["role"] in ASSISTANT]
    if tokenizer.is_fast and _GENERATION.search(template_of(tokenizer, options)):
        for at in answers:
            if _called(messages[at]):
                begin, end = _place(tokenizer, write, messages, at, whole)
                check_calls(messages[at], whole[begin:end] if begin >= 0 else whole, row, at)
        template: Any = tokenizer.apply_chat_template
        found = template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options)
        return list(found["input_ids"]), list(map(bool, found["assistant_masks"]))
    tokens = _ids(tokenizer, whole)
    learned = [False] * len(tokens)
    for at in answers:
        message, (begin, end) = messages[at], _place(tokenizer, write, messages, at, whole)
        if begin >= 0:
            check_calls(message, whole[begin:end], row, at)
        if begin < 0 or _end_of(message) not in whole[begin:end]:
            raise DataError(
                f"row {row}: the tokenizer's chat template changes message {at} of the assistant, so its place is "
                "unknown: set tokenizer.chat_template to one with {% generation %} around the assistant's messages"
            )
        first, last = (_num_equal(_ids(tokenizer, whole[:place]), tokens) for place in (begin, end))
        learned[first:last] = [True] * (last - first)
    return tokens, learned


def _texts(message: dict[str, Any]) -> list[str]:
    """The texts of a message, whose content is a text, None or a list of parts; at least one."""
    content = message["content"]
    parts = content if isinstance(content, list) else [content]
    return [str(part.get("text") or "") if isinstance(part, dict) else str(part or "") for part in parts] or [""]


def _end_of(message: dict[str, Any]) -> str:
    """The last letters of the last word, which its place must hold: templates may remove a thought before it."""
    words = _texts(message)[-1].split()
    return words[-1][-_LAST:] if words else ""


def check_calls(message: dict[str, Any], written: str, row: int, at: int) -> None:
    """Raise `DataError` if the text that the template wrote for message `at` lacks a call of a tool."""
    if lost := [name for name in _called(message) if name not in written]:
        raise DataError(
            f"row {row}: the tokenizer's chat template does not write the call of the tool {lost[0]!r} in message "
            f"{at}: set tokenizer.chat_template to one that writes tool_calls, or drop the row"
        )


def _called(message: dict[str, Any]) -> list[str]:
    """Names of the tools that the message calls."""
    calls = message.get("tool_calls")
    found = (
        [call.get("function") or call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    return [str(call["name"]) for call in found if isinstance(call, dict) and "name" in call]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _num_equal(one: Any, other: Any) -> int:
    """Number of equal items at the start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _place(
    tokenizer: PreTrainedTokenizerBase, write: Callable[..., str], messages: list[dict[str, Any]], at: int, whole: str
) -> tuple[int, int]:
    """Begin and end of message `at` in the text `whole`; a begin of -1 if the template does not tell."""
    opened, closed = _begin(write, messages, at, whole), _length(write, messages[: at + 1], whole)
    if opened and closed:
        return opened, closed
    other = [*messages]
    has_parts = isinstance(messages[at]["content"], list)
    content = [{"type": "text", "text": _OTHER_TEXT}] if has_parts else _OTHER_TEXT
    other[at] = {"role": messages[at]["role"], "content": content}  # without calls of tools and thoughts, which differ
    asked = write(other)
    if _OTHER_TEXT not in asked:
        return -1, -1
    begin, end = _num_equal(whole, asked), len(whole) - _num_equal(whole[::-1], asked[::-1])
    rest = whole[end:].lstrip()
    special = (token for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True) if rest.startswith(token))
    return opened or begin, len(whole) - len(rest) + len(token) if (token := next(special, "")) else end


def _begin(write: Callable[..., str], messages: list[dict[str, Any]], at: int, whole: str) -> int:
    """Begin of message `at` in `whole`, as the template opens answers; 0 if the template does not tell. Some templates
    open an answer with a thought that earlier answers lack.
    """
    before = _length(write, messages[:at], whole)
    opened = write(messages[:at], add_generation_prompt=True)
    if whole.startswith(opened):
        return len(opened)
    text = whole.find(_texts(messages[at])[0].strip(), before)
    return min(max(before, _num_equal(whole, opened)), text if text > 0 else before) if before else 0


def _length(write: Callable[..., str], messages: list[dict[str, Any]], whole: str) -> int:
    """Length of the text of the first messages if `whole` begins with it, else 0."""
    text = write(messages)
    return len(text) if whole.startswith(text) else 0


def template_of(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> str:
    """The chat template that writes rows with these arguments: some tokenizers have one for rows with `tools`."""
    return str(options.get("chat_template") or tokenizer.get_chat_template(tools=options.get("tools")))


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], row: int | None = None, /, **options: Any
) -> str:
    """The text of some messages. It is empty if there are none, or if the template refuses them and `row` is None.

    Raises:
        DataError: the template refuses them.
    """
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options)) if messages else ""
    except (TemplateError, TypeError) as error:  # TypeError: no content
        if row is None:
            return ""
        raise DataError(f"row {row}: the tokenizer's chat template cannot write these messages: {error}") from error
