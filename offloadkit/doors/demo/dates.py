"""The demo's task: dates in many English spellings, each paired with its ISO form. Made from a seed.

Every spelling is unambiguous. With slashes, a day above 12 or a year in front tells the order. With dots, the day comes
first. A two-digit year behind an apostrophe is between `FIRST_YEAR` and `LAST_YEAR`.
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
    """A spelling (input) and the date in ISO form, such as "2026-11-20" (target)."""

    input: str
    target: str


def spellings(day: date) -> tuple[str, ...]:
    number, year, short_year = day.day, day.year, f"'{day.year % 100:02d}"
    month, weekday = _MONTHS[day.month - 1], _WEEKDAYS[day.weekday()]
    suffix = "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    ordinal, in_words, short_month = f"{number}{suffix}", _ORDINAL_WORDS[number - 1], month[:3]
    # With a day above 12: month first in even years, day first in odd ones. Otherwise the year comes first.
    slashes = f"{number}/{day.month}/{year}" if year % 2 else f"{day.month}/{number}/{year}"
    return (
        f"{number} {month} {year}",
        f"{month} {number}, {year}",
        f"{month} {ordinal}, {year}",
        f"{ordinal} {short_month} {year}",
        f"the {ordinal} of {month}, {year}",
        f"{weekday} the {ordinal} of {month}, {year}",
        f"{weekday}, {month} {number}, {year}",
        f"{weekday[:3]} {number} {short_month} {year}",
        f"{short_month}. {number}, {year}",
        f"{number}-{short_month}-{year}",
        f"{year} {short_month} {number}",
        f"{month} the {in_words}, {year}",
        f"{in_words} of {month} {year}",
        f"{number} {month} {short_year}",
        f"{short_month} {ordinal} {short_year}",
        f"{number}.{day.month}.{year}",
        slashes if number > 12 else f"{year}/{day.month}/{number}",
    )


def spell(day: date, rng: random.Random) -> str:
    """A random spelling of `day`, one in three in small letters."""
    in_case: Callable[[str], str] = rng.choice((str, str, str.lower))
    return in_case(rng.choice(spellings(day)))


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
