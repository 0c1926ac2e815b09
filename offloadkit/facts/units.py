"""Parse and format sizes, times and rates: "8GiB", "1.23 GiB", "45.6 ms", "52.5 GB/s"."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from offloadkit.errors import ConfigError, shown

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


_MOST_DIGITS = 100
_LARGEST = 2**60
"""Bytes, more than any machine has."""


def parse_bytes(size: int | str, option: str = "a size") -> int:
    """Parse a size in bytes: an int, or a string such as "8GiB", "512 MB" or "8589934592". `option` is for messages.

    Raises:
        ConfigError: it is not a size, is below 64 KiB (a unit is missing), or is more than any machine has.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{option} must be bytes, a string such as '8GiB', or None; got {shown(size)}")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{option}: cannot read {shown(size)} as a size: write bytes (8589934592) or a string such as '8GiB' "
                "or '8GB'"
            )
        is_read = len(match[1]) <= _MOST_DIGITS
        num_bytes = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if is_read else _LARGEST + 1
    if num_bytes <= 0:
        raise ConfigError(f"{option}: a size must be positive, got {shown(size)}")
    if num_bytes < 1 << 16:
        meant = f"did you mean '{str(size).strip()}GiB'?" if str(size).strip().isdigit() else "nothing fits that"
        raise ConfigError(f"{option}: {shown(size)} is {num_bytes:,} bytes, less than 64 KiB: {meant}")
    if num_bytes > _LARGEST:
        raise ConfigError(f"{option}: {shown(size)} is more than any machine has: write a size such as '8GiB'")
    return num_bytes


def kind_of(value: object) -> str:
    """Its class in a sentence: "a list", "an int", "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def counted(number: int, what: str) -> str:
    """ "1 row" or "2,000 rows"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def format_bytes(num_bytes: int) -> str:
    """ "1.23 GiB", "45.6 MiB" or "789 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.9995 * size:
            return f"{rounded(num_bytes / size)} {unit}"
    return f"{rounded(num_bytes / 1024)} KiB"


def rounded_up(num_bytes: int) -> int:
    size = next((size for size in (2**30, 2**20) if num_bytes >= 0.9995 * size), 1024)
    shift = 10.0 ** max(0, 2 - math.floor(math.log10(max(num_bytes, size) / size)))
    return int(math.ceil(num_bytes / size * shift) / shift * size)


def rounded(number: float, digits: int = 3) -> str:
    """Format with at least this many digits: 1.23, 12.3, 123, 1234, 0.000123, 1.23e-6. Whole numbers have no exponent,
    up to 10^9.
    """
    if 10**digits - 0.5 <= abs(number) < 1e9:
        return f"{number:.0f}"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].strip("+"), f"{number:.{digits}g}")


def format_rate(per_second: float, unit: str = "B/s") -> str:
    """ "1.23 TB/s" or "52.5 GB/s"; `unit` may be "FLOP/s"."""
    prefix, size = ("T", 1e12) if per_second >= 0.9995e12 else ("G", 1e9)
    return f"{rounded(per_second / size)} {prefix}{unit}"


def format_range(least: float, most: float, digits: int = 3) -> str:
    """ "1.23 to 1.45 s" or "45.6 to 51.2 ms"."""
    unit, size = ("s", 1.0) if most >= 0.9995 else ("ms", 1e-3)
    return f"{rounded(least / size, digits)} to {rounded(most / size, digits)} {unit}"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """ "1.23 s" or "45.6 ms"."""
    return f"{rounded(seconds, digits)} s" if seconds >= 0.9995 else f"{rounded(1000 * seconds, digits)} ms"
