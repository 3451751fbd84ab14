"""Find a corpus's files, check that they are text, and read them in pieces of bounded size.

A file whose name says table or archive is refused; any other is judged by samples of its content: the beginning, and
windows at even distances. Without the check, training on binary data would run without an error and learn noise.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
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
    """One document, with the size and time that show whether it has changed."""

    path: Path
    size: int
    mtime_ns: int


class TextPiece(NamedTuple):
    """Consecutive bytes of a document, cut between characters."""

    text: bytes
    first: bool
    last: bool


def find_source_files(sources: Sequence[str], suffixes: Sequence[str]) -> list[SourceFile]:
    """Find the files of all `sources`, each once: sources in the given order, files of a folder sorted.

    A folder gives its files with one of the `suffixes` at any depth, except hidden ones, __pycache__ and symbolic links
    to folders; a file that is named itself may have any suffix. Raises UserError if a source is missing, unreadable or
    has no matching file.
    """
    if not sources:
        raise UserError("no sources: name text files or folders (data.sources=[FOLDER]), or a store (data.path=FILE)")
    files: dict[Path, SourceFile] = {}
    for source in sources:
        for path in _expand(source, tuple(suffixes)):
            resolved = path.resolve()
            if resolved not in files:
                files[resolved] = _stat(path)
    return list(files.values())


def iterate_batches(files: Sequence[SourceFile]) -> Iterator[list[TextPiece]]:
    """Yield the text of all files in order, in batches of at least BATCH_BYTES, except for the last one."""
    batch: list[TextPiece] = []
    size = 0
    for file in files:
        for piece in _iterate_pieces(file.path):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def is_of_stdlib(path: Path) -> bool:
    """Return whether a file is in the running Python's standard library, judged by its path."""
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
    for folder, folders, names in os.walk(root, onerror=_raise_error):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(suffixes) and not name.startswith("."))
        found.extend(path for path in paths if path.is_file())
    return found


def _raise_error(error: OSError) -> None:
    raise UserError(f"cannot read folder {error.filename}: {error.strerror}") from error


def _stat(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def _iterate_pieces(path: Path) -> Iterator[TextPiece]:
    try:
        with open_to_read(path) as file:
            text, first = file.read(PIECE_BYTES), True
            if text.startswith(codecs.BOM_UTF8) and not is_of_stdlib(path):
                text = text.removeprefix(codecs.BOM_UTF8)  # a byte order mark is not text
            while following := file.read(PIECE_BYTES - 4):
                cut = _character_boundary(text)
                yield TextPiece(text[:cut], first, False)
                text, first = text[cut:] + following, False
            if text:  # an empty file is no document
                yield TextPiece(text, first, True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _character_boundary(text: bytes) -> int:
    """Return where the last UTF-8 character begins; the length if none of the last four bytes begins one."""
    for back in range(1, min(4, len(text)) + 1):
        if text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)


_HEAD_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 14
_WINDOWS = 8
_FEW, _MOST_INVALID = 8, 0.1
"""Bytes, and share of bytes, that may be invalid UTF-8: source code has a few lines in older encodings."""
_SHOWN = 4
_TABLE_ROWS, _TABLE_COLUMNS = 5, 2
"""Fewest lines and columns that make text a table, if all its lines have equal columns; whatever its name."""
_MAY_BE_TABLES = frozenset({"", ".txt", ".text", ".dat", ".data", ".tab", ".json", ".log"})
"""File name extensions that may hide tables; source code and markup are left out, since they may look like columns."""
_UNPACK = "unpack it first"
_COLUMN = "write the text that is in it to .txt files, one a document"
_MAGIC = (
    (b"\x1f\x8b", f"is compressed (gzip): {_UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"is compressed (zstd): {_UNPACK}"),
    (b"\xfd7zXZ\0", f"is compressed (xz): {_UNPACK}"),
    (b"BZh", f"is compressed (bzip2): {_UNPACK}"),
    (b"\x04\x22\x4d\x18", f"is compressed (lz4): {_UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"is an archive (7z): {_UNPACK}"),
    (b"Rar!\x1a\x07", f"is an archive (rar): {_UNPACK}"),
    (b"PK\x03\x04", f"is an archive (zip; .npz, .pt and office files are, too): {_UNPACK}"),
    (b"PK\x05\x06", "is an empty archive (zip)"),
    (b"PAR1", f"is a table (Parquet): {_COLUMN}"),
    (b"ARROW1", f"is a table (Arrow): {_COLUMN}"),
    (b"FEA1", f"is a table (Feather): {_COLUMN}"),
    (b"ORC", f"is a table (ORC): {_COLUMN}"),
    (b"Obj\x01", f"is a table (Avro): {_COLUMN}"),
    (b"SQLite format 3\0", f"is a database (SQLite): {_COLUMN}"),
    (b"\x89HDF\r\n\x1a\n", "is HDF5: a token store is given as data.path=FILE"),
    (b"\x93NUMPY", "is a NumPy array"),
    (b"MMIDIDX\0", "is a Megatron token index"),
    (b"%PDF-", "is a PDF: take its text out first (pdftotext)"),
    (b"\x7fELF", "is a program"),
    (b"\x89PNG", "is an image (PNG)"),
    (b"\xff\xd8\xff", "is an image (JPEG)"),
    (b"GIF8", "is an image (GIF)"),
    (b"RIFF", "is sound, video or an image (RIFF)"),
    (b"OggS", "is sound (Ogg)"),
    (b"fLaC", "is sound (FLAC)"),
    (b"ID3", "is sound (MP3)"),
    (b"{\\rtf", "is RTF: save it as plain text first"),
)
_BINARY_START = frozenset({b"ORC", b"RIFF", b"BZh", b"GIF8", b"ID3", b"FEA1", b"PAR1"})
"""Magic bytes that text may begin with too; they count only if the rest is not text."""
_ENDINGS = {
    **dict.fromkeys((".csv", ".tsv", ".psv", ".xls", ".xlsx", ".ods"), f"is a table: {_COLUMN}"),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".orc", ".avro"), f"is a table: {_COLUMN}"),
    **dict.fromkeys((".jsonl", ".ndjson"), f"is JSON Lines: {_COLUMN}"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), f"is a database: {_COLUMN}"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "is a Python pickle"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors"), "is an array or a checkpoint"),
    **dict.fromkeys(
        (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".rar", ".tar", ".tgz"), f"is packed: {_UNPACK}"
    ),
}
_WIDE = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def check_text_files(files: Iterable[SourceFile]) -> None:
    """Raise UserError, in one line that names the first few, if any of the files is not UTF-8 text.

    Python's own library is exempt: some of its files use other encodings on purpose.
    """
    files = [file for file in files if not is_of_stdlib(file.path)]
    problems = [(file.path, problem) for file in files if (problem := find_text_problem(file.path))]
    if not problems:
        return
    said = "; ".join(f"{path} {problem}" for path, problem in problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    count = f"{len(problems)} of {len(files)} files are no text that can be read: " if len(files) > 1 else ""
    raise UserError(f"{count}{said}{more}")


def find_text_problem(path: Path) -> str | None:
    """Return why a file is not UTF-8 text and what to do, as the end of a sentence; None if it is. Raises UserError."""
    if (ending := _ENDINGS.get(path.suffix.lower())) is not None:
        return ending
    head, windows = _read_samples(path)
    if problem := _find_packed(head, windows) or _find_wide(head) or _find_undecodable([head, *windows]):
        return problem
    return _find_table(head) if path.suffix.lower() in _MAY_BE_TABLES else None


def _read_samples(path: Path) -> tuple[bytes, list[bytes]]:
    """Return the beginning of the file and samples at even distances after it."""
    try:
        with open_to_read(path) as file:
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, io.SEEK_END)
            places = [size * index // _WINDOWS for index in range(1, _WINDOWS)] if size > len(head) else []
            windows = []
            for place in (*places, max(0, size - _WINDOW_BYTES)) if places else ():
                file.seek(place)
                windows.append(file.read(_WINDOW_BYTES))
            return head, windows
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _find_packed(head: bytes, windows: list[bytes]) -> str | None:
    for magic, problem in _MAGIC:
        if head.startswith(magic) and (magic not in _BINARY_START or _find_undecodable([head, *windows])):
            return problem
    if head[257:262] == b"ustar":
        return f"is an archive (tar): {_UNPACK}"
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "is a Python pickle"
    return None


def _find_wide(head: bytes) -> str | None:
    """Detect encodings of two and four bytes, with and without a byte order mark."""
    name = next((name for mark, name in _WIDE if head.startswith(mark)), None)
    if name is None and len(head) >= 8:
        even, odd = head[0::2].count(0) / len(head[0::2]), head[1::2].count(0) / len(head[1::2])
        name = "UTF-16" if max(even, odd) > 0.4 and min(even, odd) < 0.05 else None
    return None if name is None else f"is {name}: convert it first (iconv -f {name} -t UTF-8)"


def _find_undecodable(samples: list[bytes]) -> str | None:
    if any(b"\0" in sample for sample in samples):
        return "is binary: it has zero bytes"
    total = sum(map(len, samples))
    invalid = sum(map(_count_invalid_bytes, samples))
    if invalid > max(_FEW, _MOST_INVALID * total):
        return (
            f"is not in UTF-8 ({invalid / total:.0%} of its bytes): binary, or text in another encoding, which "
            "`iconv -f ENCODING -t UTF-8` converts"
        )
    return None


_CONTINUATION = bytes(range(128, 192))


def _count_invalid_bytes(sample: bytes) -> int:
    """Count bytes that are not UTF-8, ignoring a character cut off at either end of the sample."""
    if sample.isascii():
        return 0
    decoder, last = codecs.getincrementaldecoder("utf-8")("surrogateescape"), sample.lstrip(_CONTINUATION)
    text = decoder.decode(last)  # a character cut off at the end stays in the decoder
    try:
        text.encode()
    except UnicodeEncodeError:
        return sum("\udc80" <= character <= "\udcff" for character in text)
    return 0


def _find_table(head: bytes) -> str | None:
    """Detect comma- and tab-separated columns and JSON records, whatever the file's name."""
    lines = head.decode("utf-8", errors="replace").splitlines()
    complete = [line for line in (lines if len(head) < _HEAD_BYTES else lines[:-1]) if line.strip()]
    if len(complete) >= 2 and all(map(_is_record, complete[:3])):
        return f"is JSON Lines: {_COLUMN}"
    if len(complete) < _TABLE_ROWS:
        return None
    for delimiter in ",\t;|":
        rows = list(csv.reader(complete[:200], delimiter=delimiter))
        columns = {len(row) for row in rows}
        if len(columns) != 1 or min(columns) < _TABLE_COLUMNS:
            continue
        # A line of prose may contain one comma followed by a space.
        if min(columns) > _TABLE_COLUMNS or not any(cell.startswith(" ") for row in rows for cell in row[1:]):
            return f"is a table ({min(columns)} columns by {delimiter!r}): {_COLUMN}"
    return None


def _is_record(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
