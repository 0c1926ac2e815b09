"""Impossible file names, endless files, bottomless JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from offloadkit.errors import ConfigError, ModelError, OffloadkitError, shown
from offloadkit.facts.files import DEEPEST_JSON, parse_json, path_of, read_json, why_not_plain


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\0b", "NUL"),
        ("a\ud800b", "lone surrogate"),
        ("x/" + "y" * 256, "256 bytes, but file systems allow 255"),
        ("é" * 130, "260 bytes"),
        ("a/" * 3000, "6,000 bytes"),
        ("gr\udcf6sse", "not UTF-8, which safetensors needs"),  # Latin-1 on disk
        ("~nobody-of-that-name/x", "no user 'nobody-of-that-name'"),
        (b"bytes", "must be a path"),
        (3, "must be a path"),
        (None, "must be a path"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused_by_its_option(name: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^output_dir .*{why}"):
        path_of(name, "output_dir")


def test_a_name_in_utf8_that_python_does_not_read_as_utf8_is_refused_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under LC_ALL=C without Python's coercion of it."""
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("ascii", "surrogateescape"))
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(ConfigError, match="as ascii here, not as UTF-8: set PYTHONUTF8=1"):
        path_of("größe".encode().decode("ascii", "surrogateescape"), "output_dir")


def test_a_name_that_a_file_can_have_is_a_path() -> None:
    assert path_of("a/b c\n", "disk") == Path("a/b c\n")
    assert path_of(Path("~"), "disk") == Path.home()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested deeper than 100"),
        ("[" * 500 + "]" * 500, "nested deeper than 100"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper than 100"),
        ('["\\ud800"]', "lone surrogate"),
        ('{"\\udc00": 1}', "lone surrogate"),
        (b"\xff", "utf-8"),
        ("9" * 5000, "4300 digits"),
        ("{", "Expecting"),
    ],
)
def test_json_that_cannot_be_used_is_a_value_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_json_as_deep_as_is_allowed_is_read() -> None:
    found = parse_json("[" * DEEPEST_JSON + "]" * DEEPEST_JSON)
    for _ in range(DEEPEST_JSON - 1):
        (found,) = found
    assert found == []
    assert parse_json('["\\ud83d\\ude00", "\\\\ud800"]') == ["😀", "\\ud800"]


def test_links_of_files_are_followed_and_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("[1]")
    (tmp_path / "link.json").symlink_to("file.json")
    assert read_json(tmp_path / "link.json") == [1]
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").symlink_to(".")
    for name in ("pipe.json", "device.json", "folder.json"):
        assert why_not_plain(tmp_path / name)
        with pytest.raises(OSError, match="not a file"):
            read_json(tmp_path / name)
    with pytest.raises(OSError, match="No such file"):
        read_json(tmp_path / "nothing.json")


def test_a_file_of_more_bytes_than_any_model_has_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_json(tmp_path / "large.json")


def test_every_message_can_be_printed_and_is_short() -> None:
    said = str(ModelError("no file 'a\ud800b' in /" + "x" * 100_000))
    assert said.encode()
    assert len(said) < 500
    assert str(OffloadkitError("as it is")) == "as it is"


def test_what_was_given_is_shown_whatever_it_is() -> None:
    deep: list[object] = []
    for _ in range(50_000):
        deep = [deep]
    assert shown(deep) == "a list that cannot be written out"
    assert shown(10**5000) == "a int that cannot be written out"
    assert len(shown("x" * 10**6)) < 250
    assert shown("8GiB") == "'8GiB'"
