"""The demo's task: dates in many English spellings, each paired with its ISO form. Made from a seed.

Every spelling is unambiguous. With slashes, a day above 12 or a year in front tells the order. With dots, the day comes
first. A two-digit year behind an apostrophe is the one year from `FIRST_YEAR` to `LAST_YEAR` that ends so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, timedelta
from typing import NamedTuple

FIRST_YEAR, LAST_YEAR = 1950, 2049

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINAL_WORDS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth"),
    *("twenty-sixth", "twenty-seventh", "twenty-eighth", "twenty-ninth", "thirtieth", "thirty-first"),
)


class DatePair(NamedTuple):
    """One example: a spelling (input) and the date in ISO form, such as "2026-11-20" (target)."""

    input: str
    target: str


def _month(day: date) -> str:
    return _MONTHS[day.month - 1]


def _short_month(day: date) -> str:
    return _month(day)[:3]


def _weekday(day: date) -> str:
    return _WEEKDAYS[day.weekday()]


def _ordinal(day: date) -> str:
    suffix = "th" if 10 < day.day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return f"{day.day}{suffix}"


def _ordinal_word(day: date) -> str:
    return _ORDINAL_WORDS[day.day - 1]


def _slashes(day: date) -> str:
    """With a day above 12: month first in even years, day first in odd ones. Otherwise the year comes first."""
    if day.day <= 12:
        return f"{day.year}/{day.month}/{day.day}"
    first, second = (day.day, day.month) if day.year % 2 else (day.month, day.day)
    return f"{first}/{second}/{day.year}"


SPELLINGS: tuple[Callable[[date], str], ...] = (
    lambda day: f"{day.day} {_month(day)} {day.year}",
    lambda day: f"{_month(day)} {day.day}, {day.year}",
    lambda day: f"{_month(day)} {_ordinal(day)}, {day.year}",
    lambda day: f"{_ordinal(day)} {_short_month(day)} {day.year}",
    lambda day: f"the {_ordinal(day)} of {_month(day)}, {day.year}",
    lambda day: f"{_weekday(day)} the {_ordinal(day)} of {_month(day)}, {day.year}",
    lambda day: f"{_weekday(day)}, {_month(day)} {day.day}, {day.year}",
    lambda day: f"{_weekday(day)[:3]} {day.day} {_short_month(day)} {day.year}",
    lambda day: f"{_short_month(day)}. {day.day}, {day.year}",
    lambda day: f"{day.day}-{_short_month(day)}-{day.year}",
    lambda day: f"{day.year} {_short_month(day)} {day.day}",
    lambda day: f"{_month(day)} the {_ordinal_word(day)}, {day.year}",
    lambda day: f"{_ordinal_word(day)} of {_month(day)} {day.year}",
    lambda day: f"{day.day} {_month(day)} '{day.year % 100:02d}",
    lambda day: f"{_short_month(day)} {_ordinal(day)} '{day.year % 100:02d}",
    lambda day: f"{day.day}.{day.month}.{day.year}",
    _slashes,
)
"""The spellings, each a function from a date to text."""

_CASES: tuple[Callable[[str], str], ...] = (str, str, str.lower)


def spell(day: date, rng: random.Random) -> str:
    """A random spelling of `day` in a random case, drawn from `rng`."""
    return rng.choice(_CASES)(rng.choice(SPELLINGS)(day))


def date_pairs(num_train: int, num_held_out: int, *, seed: int = 0) -> tuple[list[DatePair], list[DatePair]]:
    """Training and held-out pairs. No date is in both sets, in any spelling.

    `num_held_out` dates are set aside and spelled once each; `num_train` dates are drawn from the rest.
    """
    rng = random.Random(seed)
    first = date(FIRST_YEAR, 1, 1)
    days = [first + timedelta(days=offset) for offset in range((date(LAST_YEAR + 1, 1, 1) - first).days)]
    rng.shuffle(days)
    held_out, rest = days[:num_held_out], days[num_held_out:]
    pairs = [DatePair(spell(day, rng), day.isoformat()) for day in (*rng.choices(rest, k=num_train), *held_out)]
    return pairs[:num_train], pairs[num_train:]
