"""Which files a corpus is made of, and their text in pieces of bounded size."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

STDLIB = "stdlib"
"""The source that stands for the running Python's standard library."""

PIECE_BYTES = 1 << 20
"""A file is read in pieces of at most this size; nearly every source file is one piece."""
BATCH_BYTES = 1 << 22
"""Text held at a time, and given to the tokenizer in one call so that it can use several cores."""

_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})
"""Folders within the standard library's that hold what somebody installed."""


@dataclass(frozen=True)
class SourceFile:
    """One document, with what tells a changed file from an unchanged one."""

    path: Path
    size: int
    mtime_ns: int


class Piece(NamedTuple):
    """Consecutive bytes of a document, cut between characters."""

    text: bytes
    first: bool
    last: bool


def find_files(sources: Sequence[str], suffixes: Sequence[str]) -> list[SourceFile]:
    """The files of all `sources`, each once: the sources in the order given, each folder in sorted order.

    Of a folder, the files with one of the `suffixes` at any depth, leaving out hidden ones, __pycache__ and symbolic
    links to folders; a file that is named itself is taken whatever its suffix. A source that is missing, unreadable or
    without a matching file is a UserError.
    """
    if not sources:
        raise UserError("no sources: name text files or folders (data.sources=[FOLDER]), or a store (data.path=FILE)")
    found: dict[Path, SourceFile] = {}
    for source in sources:
        for path in _expand(source, tuple(suffixes)):
            resolved = path.resolve()
            if resolved not in found:
                found[resolved] = _stat(path)
    return list(found.values())


def batches(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    """The text of all files in order, at least BATCH_BYTES at a time but for the last batch."""
    batch: list[Piece] = []
    size = 0
    for file in files:
        for piece in _pieces(file.path):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def is_of_stdlib(path: Path) -> bool:
    """Whether a file is in the running Python's standard library, judged by its path."""
    return path.is_relative_to(Path(os.__file__).parent) and not _NOT_STDLIB & set(path.parts)


def _expand(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    if source == STDLIB:
        root, left_out = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    else:
        root, left_out = Path(source).expanduser(), frozenset()
    if root.is_file():
        return [root]
    if not root.is_dir():
        what = "is neither a regular file nor a folder" if root.exists() else "does not exist"
        raise UserError(f"source {source} {what}: give text files, folders, or the word {STDLIB}")
    files = _walk(root, suffixes, left_out | {"__pycache__"})
    if not files:
        raise UserError(
            f"no file under {root} ends in {' '.join(suffixes) or '(no suffix given)'}: give other suffixes"
        )
    return files


def _walk(root: Path, suffixes: tuple[str, ...], left_out: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(suffixes) and not name.startswith("."))
        found.extend(path for path in paths if path.is_file())
    return found


def _raise(error: OSError) -> None:
    raise UserError(f"cannot read folder {error.filename}: {error.strerror}") from error


def _stat(path: Path) -> SourceFile:
    facts = path.stat()
    return SourceFile(path, facts.st_size, facts.st_mtime_ns)


def _pieces(path: Path) -> Iterator[Piece]:
    try:
        with open_to_read(path) as file:
            text, first = file.read(PIECE_BYTES), True
            if text.startswith(codecs.BOM_UTF8) and not is_of_stdlib(path):
                text = text.removeprefix(codecs.BOM_UTF8)  # a byte order mark is not text
            while following := file.read(PIECE_BYTES - 4):
                cut = _character_boundary(text)
                yield Piece(text[:cut], first, False)
                text, first = text[cut:] + following, False
            if text:  # an empty file is no document
                yield Piece(text, first, True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _character_boundary(text: bytes) -> int:
    """Where the last UTF-8 character begins; the end where the last four bytes hold no first byte of one."""
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)
