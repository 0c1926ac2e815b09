"""The facts of a text, whose sentences may be written anew."""

from __future__ import annotations


def has_facts(text: str, *facts: str) -> bool:
    """Whether the text has all facts, numbers and names, one after the other. Line breaks count as spaces."""
    text, at = " ".join(text.split()), 0
    for fact in facts:
        at = text.find(fact, at)
        if at < 0:
            return False
        at += len(fact)
    return True
