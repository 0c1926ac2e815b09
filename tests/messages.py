"""What a message must say, whatever its words: names, numbers and options."""

from __future__ import annotations

import re


def check_says(message: str, *facts: str) -> None:
    """Fails unless `message` holds each of `facts` as whole words, so that "4" is not found in "42"."""
    for fact in facts:
        assert re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", message), f"{fact!r} is not in {message!r}"
