"""Text from elsewhere on a terminal: log files, names and reasons cannot steer it, only colour what they say."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_COLOUR = r"\x1b\[[0-9;:]{0,64}m"
_CONTROL = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what changes the direction of writing
    r"\ud800-\udfff]"  # bytes that are no text, as Python keeps them: raw C1 among them
)
_FOUND = re.compile(f"({_COLOUR})|\r(\n)|{_CONTROL}")
_EXTENDED = re.compile(r"[34]8[;:](?:5[;:]\d*|2(?:[;:]\d*){3})")
_CONCEAL = "8"


def escape_controls(text: str, colours: bool = False) -> str:
    """What would steer a terminal as a reader sees it in Python's source: `\\x1b` and so on; tabs and lines stay.

    colours: sequences that only colour text stay too, and are ended at its end. Those that hide text do not.
    """
    coloured = False

    def shown(match: re.Match[str]) -> str:
        nonlocal coloured
        if match[2]:
            return "\n"
        if match[1] and colours and not _hides(match[1]):
            coloured = True
            return match[1]
        return repr(match[0][0])[1:-1] + match[0][1:]

    found = _FOUND.sub(shown, text)
    return f"{found}\x1b[0m" if coloured else found


def one_line(text: str) -> str:
    """For a message: nothing in it is more than a character on that line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def for_stream(text: str, stream: TextIO) -> str:
    """The text as it is to be written to a stream: escaped on a terminal, unchanged elsewhere."""
    return escape_controls(text, colours=True) if stream.isatty() else text


@contextmanager
def escaping_stdout() -> Iterator[None]:
    """Within, what is printed to a terminal is escaped; nothing changes where stdout is a file or a pipe."""
    before = sys.stdout
    if before.isatty():
        sys.stdout = cast(TextIO, _Escaping(before))
    try:
        yield
    finally:
        sys.stdout = before


def _hides(colour: str) -> bool:
    return _CONCEAL in re.split("[;:]", _EXTENDED.sub("", colour[2:-1]))


class _Escaping:
    """A text stream that escapes what it is given."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escape_controls(text, colours=True))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
