"""Facts that a message must state in any wording: names, numbers and options."""

from __future__ import annotations

import re


def check_says(message: str, *facts: str) -> None:
    """Fails unless `message` contains every fact as whole words, so "4" is not found in "42"."""
    for fact in facts:
        assert re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", message), f"{fact!r} is not in {message!r}"


def has_facts(text: str, *facts: str) -> bool:
    """Whether the text contains the facts in this order. Line breaks count as spaces."""
    text, at = " ".join(text.split()), 0
    for fact in facts:
        at = text.find(fact, at)
        if at < 0:
            return False
        at += len(fact)
    return True
