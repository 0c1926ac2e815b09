"""Errors of offloadkit in IPython: the message first, and few lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

import offloadkit
from offloadkit.errors import HangError, OffloadkitError

pytest.importorskip("IPython")


def shown(error: OffloadkitError) -> list[str]:
    """The lines that IPython prints for a raised error."""
    with pytest.raises(OffloadkitError) as caught:
        raise error
    return "\n".join(caught.value._render_traceback_()).splitlines()


def test_a_message_of_any_length_takes_at_most_ten_lines() -> None:
    for number in (1, 6, 7, 8, 80):
        lines = shown(HangError("\n".join(f"line {each}" for each in range(number))))
        assert len(lines) <= 10
        assert "HangError" in lines[0]
        assert lines[0].endswith("line 0")
        missing = number - sum(line.startswith("line ") for line in lines[1:]) - 1
        assert any(f"{missing} more" in line for line in lines) == (missing > 0)


def test_the_users_line_is_named() -> None:
    assert any("test_errors.py, line " in line and "raise error" in line for line in shown(HangError("late")))


def test_ipython_shows_the_message_and_not_the_package() -> None:
    code = "import offloadkit\noffloadkit.OffloadConfig(vram='eleven')"
    done = subprocess.run([sys.executable, "-m", "IPython", "-c", code], capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().splitlines()
    assert len(said) <= 10
    assert "ConfigError" in said[0]
    assert "eleven" in said[0]
    assert any("OffloadConfig(vram='eleven')" in line for line in said[1:]), "the user's own line"
    assert not any("/offloadkit/" in line for line in said)


def test_errors_are_found_by_completion() -> None:
    assert "errors" in dir(offloadkit)
    assert issubclass(offloadkit.errors.ConfigError, OffloadkitError)


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_warning_in_a_notebook_is_printed_once_and_not_as_an_error(is_configured: bool) -> None:
    """The user's own handler replaces the line."""
    code = f"""
import logging, types, IPython
IPython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
import offloadkit
if {is_configured}:
    logging.basicConfig()
logging.getLogger("offloadkit.hf.tokenize").warning("%d rows left out", 3)
logging.getLogger("another").warning("of another library")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("" if is_configured else "3 rows left out\n")
    assert ("3 rows left out" in done.stderr) is is_configured
    assert "of another library" in done.stderr
