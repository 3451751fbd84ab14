"""Check that files are text, by their content: the beginning, and samples at even distances.

A file whose name says database or archive is refused. Without the check, training on binary data would run without an
error and learn noise.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.data.corpus.sources import KINDS, SourceFile, is_of_stdlib
from hpc_train.data.readers.formats import recognise_format
from hpc_train.data.readers.json_array import explain_unread_json
from hpc_train.data.readers.records import FileSample
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read
from hpc_train.units import join_first

_HEAD_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 14
_WINDOWS = 8
_MAX_INVALID_BYTES, _MAX_INVALID_SHARE = 8, 0.1
"""Bytes of a file, or share of them if that is more, that may be invalid UTF-8: source code has a few lines in older
encodings."""
_MAX_NAMED = 4
_UNPACK = "unpack it first"
_COLUMN = "write the text that is in it to JSON Lines or Parquet, a document a record"
_MAGIC = (
    (b"\x1f\x8b", f"is compressed (gzip) and not JSON Lines: {_UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"is compressed (zstd) and not JSON Lines: {_UNPACK}"),
    (b"\xfd7zXZ\0", f"is compressed (xz): {_UNPACK}"),
    (b"BZh", f"is compressed (bzip2): {_UNPACK}"),
    (b"\x04\x22\x4d\x18", f"is compressed (lz4): {_UNPACK}"),
    (b"7z\xbc\xaf\x27\x1c", f"is an archive (7z): {_UNPACK}"),
    (b"Rar!\x1a\x07", f"is an archive (rar): {_UNPACK}"),
    (b"PK\x03\x04", f"is an archive (zip; .npz, .pt and office files are, too): {_UNPACK}"),
    (b"PK\x05\x06", "is an empty archive (zip)"),
    (b"PAR1", "begins as a Parquet file but is not one"),
    (b"FEA1", f"is a table (Feather): {_COLUMN}"),
    (b"ORC", f"is a table (ORC): {_COLUMN}"),
    (b"Obj\x01", f"is a table (Avro): {_COLUMN}"),
    (b"SQLite format 3\0", f"is a database (SQLite): {_COLUMN}"),
    (b"\x89HDF\r\n\x1a\n", "is HDF5: a token store is given as data.path=FILE"),
    (b"\x93NUMPY", "is a NumPy array: tokens are given as data.path=FILE"),
    (b"MMIDIDX\0", "is a Megatron token index: tokens are given as data.path=FILE"),
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
    **dict.fromkeys((".csv", ".tsv", ".psv"), "is named as a table but is binary or empty"),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".feather", ".orc", ".avro"), f"is a table: {_COLUMN}"),
    ".parquet": "is named as a Parquet file but does not begin as one: damaged?",
    ".arrow": "is named as an Arrow file but does not begin as one: damaged?",
    **dict.fromkeys((".jsonl", ".ndjson"), "is named as JSON Lines but its first lines are not JSON objects"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), f"is a database: {_COLUMN}"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "is a Python pickle"),
    **dict.fromkeys((".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors"), "is an array or a checkpoint"),
    **dict.fromkeys(
        (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip", ".7z", ".rar", ".tar", ".tgz"), f"is packed: {_UNPACK}"
    ),
}
_TEXT_ENDINGS = frozenset({".csv", ".tsv", ".psv", ".jsonl", ".ndjson", ".json"})
_WIDE = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


@dataclass(frozen=True)
class KnownFile:
    """A file of a corpus and its format."""

    file: SourceFile
    format: str | None
    """Name of its format of records; None for text."""


def recognise_files(files: Iterable[SourceFile]) -> list[KnownFile]:
    """Find the format of each file: of records, or text.

    Raises UserError, in one line that names the first few, if any is neither. Python's own library is text: some of its
    files use other encodings on purpose.
    """
    recognised: list[KnownFile] = []
    problems: list[str] = []
    for file in files:
        format, problem = (None, None) if is_of_stdlib(file.path) else _recognise(file.path)
        recognised.append(KnownFile(file, format))
        if problem:
            problems.append(f"{file.path} {problem}")
    if not problems:
        return recognised
    count = f"{len(problems)} of {len(recognised)} files are not readable text: " if len(recognised) > 1 else ""
    raise UserError(f"{count}{join_first(problems, _MAX_NAMED, '; ')} (known: {KINDS})")


def _recognise(path: Path) -> tuple[str | None, str | None]:
    """Return a file's format of records, or why it is not a text."""
    head, windows = _read_samples(path)
    if path.suffix.lower() in _TEXT_ENDINGS and (encoding := _find_wide(head)) is not None:
        return None, encoding  # before the formats: Python's json guesses encodings, and fails at the end of a line
    if (problem := explain_unread_json(path, head)) is not None:
        return None, problem
    if (format := recognise_format(FileSample(path, head, tuple(windows)))) is not None:
        return format.name, None
    ending = _ENDINGS.get(path.suffix.lower())
    if ending is not None and not head:
        return None, "is empty: leave it out"
    if ending is not None:
        return None, ending
    packed = _find_packed(head, windows) or _find_wide(head)
    return None, packed or _find_undecodable([head, *windows])


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
    if invalid > max(_MAX_INVALID_BYTES, _MAX_INVALID_SHARE * total):
        return (
            f"is not in UTF-8 ({invalid / total:.0%} of its bytes): binary, or text in another encoding, which "
            "`iconv -f ENCODING -t UTF-8` converts"
        )
    return None


UTF8_CONTINUATION = bytes(range(128, 192))
"""Bytes of a UTF-8 character other than its first."""


def _count_invalid_bytes(sample: bytes) -> int:
    """Count bytes that are not UTF-8, ignoring a character cut off at either end of the sample."""
    if sample.isascii():
        return 0
    decoder, last = codecs.getincrementaldecoder("utf-8")("surrogateescape"), sample.lstrip(UTF8_CONTINUATION)
    text = decoder.decode(last)  # a character cut off at the end stays in the decoder
    try:
        text.encode()
    except UnicodeEncodeError:
        return sum("\udc80" <= character <= "\udcff" for character in text)
    return 0
