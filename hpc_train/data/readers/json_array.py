"""Files of one JSON array of objects, such as `train.json`: read as records, one object at a time in bounded memory.

Nothing says where in such a file an object begins, so it is one span. JSON Lines can be cut, and are read by several
workers.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.data.readers.json_lines import make_record
from hpc_train.data.readers.records import MAX_RECORD_BYTES, FileSample, Record, Span, open_records
from hpc_train.errors import UserError
from hpc_train.terminal import one_line

_CHUNK = 1 << 20
"""Minimum bytes that are read at a time."""
_LONGEST_TOKEN = 16
"""More characters than a literal or an escape has, at whose beginning a parser reports that it is cut off."""
_SPACE = re.compile(r"[ \t\n\r]*")


def matches_json_array(sample: FileSample) -> bool:
    """Return whether a .json file begins as an array; reading it says what else is wrong."""
    return is_named_json(sample.path) and _skip_mark(sample.head).startswith(b"[")


def is_named_json(path: Path) -> bool:
    """Whether the file's name ends in .json."""
    return path.suffix.lower() == ".json"


def explain_unread_json(path: Path, head: bytes) -> str | None:
    """Return why a .json file holds no records; None if it does, or is not JSON. head: the file's beginning."""
    start = _skip_mark(head)
    if not is_named_json(path) or not start.startswith((b"[", b"{")):
        return None
    if start.startswith(b"["):
        first = start[1:].lstrip()[:1]
        if first in (b"{", b""):
            return None
        return "is an empty JSON array: leave it out" if first == b"]" else _not_records("a JSON array of other values")
    line, end, _ = start.partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return _not_records("a JSON object over several lines") if end else None
    return None


def _not_records(what: str) -> str:
    return (
        f"is {what}: records are read from an array of objects, or from one object per line (jq -c . FILE > "
        "FILE.jsonl); to train on its text as it is, name it .txt"
    )


def split_json_array(path: Path) -> list[Span]:
    """Return the whole file as one span."""
    return [Span(0, path.stat().st_size)]


def read_json_array(path: Path, span: Span, column: str, beside: str | None = None) -> Iterator[Record]:
    """Read one column, and a second one if it is there. A record's place is its number in the array, from 0."""
    with open_records(path) as file:
        for place, (text, value) in enumerate(_ArrayParser(path, file).iterate_objects()):
            yield make_record(partial(describe_element, path, place), place, text, value, column, beside)


def describe_element(path: Path, place: int) -> str:
    """Return the file and the number of the object in it, counted from 1."""
    return f"{path} object {place + 1:,}"


class _ArrayParser:
    """Parses an array from the text of a file, of which no more than one object and one chunk are in memory."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._decode_bytes = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parser = json.JSONDecoder()
        self._text, self._at = "", 0
        """Text that was read, and where in it the next character is."""
        self._lines = 1
        """Line of the file in which the text begins."""
        self._ended = False

    def iterate_objects(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yield the text and the value of each object. Raises UserError for anything else than an array of objects."""
        self._expect("[")
        if self._peek() == "]":
            raise UserError(f"{self._path}: an empty JSON array: leave it out")
        while True:
            if self._peek() != "{":
                raise self._refuse("expected an object" if self._peek() else "the file ends within the array")
            yield self._parse_object()
            if self._peek() != ",":
                break
            self._at += 1
        self._expect("]")
        if self._peek():
            raise self._refuse("more text after the end of the array")

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._refuse(f"expected {character!r}" if self._peek() else "the file ends within the array")
        self._at += 1

    def _peek(self) -> str:
        """Return the next character that is not white space; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_more()

    def _parse_object(self) -> tuple[bytes, dict[str, Any]]:
        while True:
            try:
                value, end = self._parser.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Where the text that was read ends within the object, the error is at its end, or in its last string.
                cut = error.pos > len(self._text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self._ended and error.pos >= len(self._text.rstrip()):
                    raise self._refuse("the file ends within an object", error.pos) from error
                if self._ended or not cut:
                    raise self._refuse(f"not JSON ({error.msg})", error.pos) from error
                if len(self._text) - self._at > MAX_RECORD_BYTES:
                    raise self._refuse(
                        f"no object ends within {MAX_RECORD_BYTES >> 20} MiB; look for a quote or a brace that is "
                        "missing, or make the objects smaller"
                    ) from error
                self._read_more()
            except (ValueError, RecursionError) as error:
                raise self._refuse(f"cannot be read ({error})") from error
            else:
                begin, self._at = self._at, end
                return self._text[begin:end].encode(), value

    def _read_more(self) -> None:
        """Drop the text before the next character, and read as much again as is left, at least a chunk."""
        self._lines += self._text.count("\n", 0, self._at)
        self._text, self._at = self._text[self._at :], 0
        try:
            data = self._file.read(max(_CHUNK, len(self._text)))
            self._ended = not data
            self._text += self._decode_bytes(data, self._ended)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._path}: not in UTF-8 ({error.reason}): convert the file first (iconv -f ENCODING -t UTF-8)"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error.strerror or error}") from error

    def _refuse(self, problem: str, at: int | None = None) -> UserError:
        line = self._lines + self._text.count("\n", 0, self._at if at is None else at)
        return UserError(one_line(f"{self._path}:{line}: {problem}; expected one JSON array of objects"))


def _skip_mark(head: bytes) -> bytes:
    return head.removeprefix(codecs.BOM_UTF8).lstrip()
