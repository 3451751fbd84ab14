"""Make foreign text safe to print: log files, names and reasons may colour a terminal but not control it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_COLOUR = r"\x1b\[[0-9;:]{0,64}m"
"""ECMA-48's SGR: colours, bold, underlined; nothing else ends in m."""
_CONTROL = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # characters that change the direction of writing
    r"\ud800-\udfff]"  # undecodable bytes as Python keeps them, raw C1 among them
)
_FOUND = re.compile(f"({_COLOUR})|\r(\n)|{_CONTROL}")
_EXTENDED = re.compile(r"[34]8[;:](?:5[;:]\d*|2(?:[;:]\d*){3})")
"""Colours by number or by red, green and blue, among whose parameters an 8 means no concealment."""
_CONCEAL = "8"
"""SGR's parameter for text that is not to be seen."""


def escape_controls(text: str, colours: bool = False) -> str:
    """Escape what would control a terminal, as in Python source (`\\x1b` and so on); tabs and line feeds stay.

    colours: sequences that only set colours stay too, and are reset at the end. Those that hide text are escaped.
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

    escaped = _FOUND.sub(shown, text)
    return f"{escaped}\x1b[0m" if coloured else escaped


def one_line(text: str) -> str:
    """Escape text for a message, so that it stays on one line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def for_stream(text: str, stream: TextIO) -> str:
    """Return the text to write to a stream: escaped on a terminal, unchanged elsewhere."""
    return escape_controls(text, colours=True) if stream.isatty() else text


def open_missing_streams() -> None:
    """Give a process that was started without standard input, output or error (`>&-`, some daemons) /dev/null for it.

    Otherwise the next file that is opened would take the free descriptor, and what a child prints would go into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


@contextmanager
def escaping_stdout() -> Iterator[None]:
    """Inside this context, output to a terminal is escaped; a file or a pipe gets it unchanged."""
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
    """A text stream that escapes what is written to it."""

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
