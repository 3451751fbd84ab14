"""Find the files of a corpus: which files of a folder are used, in which order, and which are left out."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.data.readers.arrow import is_saved_dataset, list_dataset_files
from hpc_train.data.readers.formats import RECORD_SUFFIXES
from hpc_train.errors import UserError

STDLIB = "stdlib"
"""The source that stands for the running Python's standard library."""
_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})
"""Folders inside that of the standard library that hold installed packages."""
_SURELY_RECORDS = tuple(suffix for suffix in RECORD_SUFFIXES if suffix not in (".csv", ".tsv"))
_JSON = (".json", ".json.gz", ".json.zst")
"""Suffixes of records in folders that have no other files of text or records."""
KINDS = (
    "text, JSON Lines (plain, gzip, zstd), JSON arrays of objects, CSV, Parquet, Arrow, folders saved by `datasets`, "
    "and images in folders or tars"
)
"""Kinds of files that a corpus can be made of, for messages."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """A file of text or of records, with the size and time that show whether it has changed."""

    path: Path
    size: int
    mtime_ns: int


def find_source_files(sources: Sequence[str], suffixes: Sequence[str]) -> list[SourceFile]:
    """Find the files of all `sources`, each once: sources in the given order, files of a folder sorted.

    A folder gives its files with one of the `suffixes` at any depth, or those with RECORD_SUFFIXES if there are none,
    or those in .json if there are none of these either, except hidden ones, __pycache__ and symbolic links to folders.
    A folder made by `datasets` gives its Arrow files. A file that is named itself may have any suffix. Raises UserError
    if a source is missing, unreadable or has no matching file.
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


def is_of_stdlib(path: Path) -> bool:
    """Return whether a file is in the running Python's standard library, judged by its path."""
    return path.is_relative_to(Path(os.__file__).parent) and not _NOT_STDLIB & set(path.parts)


def _expand(source: str, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files of a source: those of texts, by their suffixes, or those of records where there is no text."""
    if not source:
        raise UserError("a source is empty (an unset variable?): give text files, folders, or the word stdlib")
    if source == STDLIB:
        root, left_out = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    else:
        root, left_out = Path(source).expanduser(), frozenset()
    if root.is_file():
        return [root]
    if not root.is_dir():
        what = "is neither a regular file nor a folder" if root.exists() else "does not exist"
        raise UserError(f"source {source} {what}: give text files, folders, or the word {STDLIB}")
    if is_saved_dataset(root):
        return list_dataset_files(root)
    every = _walk(root, (*suffixes, *RECORD_SUFFIXES), left_out | {"__pycache__"})
    if files := [path for path in every if path.name.endswith(suffixes)]:
        if source != STDLIB:
            _warn_of_records(root, every, suffixes)
        return files
    # Beside other files, those in .json are rather descriptions of the data.
    every = every or _walk(root, _JSON, left_out)
    if not every:
        raise UserError(_explain_no_file(root, suffixes))
    return every


def _explain_no_file(root: Path, suffixes: tuple[str, ...]) -> str:
    if not any(names for _, _, names in os.walk(root)):
        return f"{root} holds no file: give files or folders of {KINDS}"
    ends = " ".join(suffixes) or "(no suffix given)"
    return f"no file under {root} ends in {ends}, and none is of records or images: give other suffixes"


def _warn_of_records(root: Path, every: list[Path], suffixes: tuple[str, ...]) -> None:
    """Warn that a folder has files of records that are not used: they may be the data, and the text just a README."""
    records = [path for path in every if path.name.endswith(_SURELY_RECORDS) and not path.name.endswith(suffixes)]
    if records:
        log.warning(
            "%s: %d files of records, such as %s, are left out because there is text beside them; to take them, "
            "give their suffix (data build --suffix, data.suffixes)",
            root,
            len(records),
            records[0].name,
        )


def _walk(root: Path, suffixes: tuple[str, ...], left_out: frozenset[str]) -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raise_error):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(suffixes) and not name.startswith("."))
        files.extend(path for path in paths if path.is_file())
    return files


def _raise_error(error: OSError) -> None:
    raise UserError(f"cannot read folder {error.filename}: {error.strerror}") from error


def _stat(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns)
