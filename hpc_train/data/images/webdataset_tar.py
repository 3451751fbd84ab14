"""Read tars as WebDataset writes them: files of one sample follow each other and share their name up to the first dot.

Nothing is unpacked: an image is read later from its place in the tar. The label is in `NAME.cls`, or a key of
`NAME.json`.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.data.images.image_entries import IMAGE_SUFFIXES, ImageEntry
from hpc_train.data.readers.compressed import is_compressed
from hpc_train.data.readers.records import MAX_RECORD_BYTES, first_line, refuse_missing_column
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read
from hpc_train.terminal import one_line

_BLOCK = 512
"""Bytes of a block of tar, to which headers and members are padded."""
_MAX_LABEL_BYTES = 1 << 20
_MAX_NAME = 200
"""Characters of a name or a label that a message shows at most."""
_NUMBER = re.compile(r"\d{1,6}")
_ANY_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
"""Text that no one means as a name: -1 often stands for an image without a class."""
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


def read_tar_entries(path: Path, label_key: str) -> Iterator[ImageEntry]:
    """Yield the images of a tar with their labels. label_key: of .json files; .cls goes first.

    Raises UserError, in one line, for a damaged tar, members that are no plain files, and images without a label.
    """
    try:
        with open_to_read(path) as file:
            if is_compressed(file.read(4)):
                raise UserError(
                    f"{path} is a compressed tar: unpack its gzip or zstd first; images are compressed already"
                )
            file.seek(0)
            members = _iterate_members(path, file)
            has_images = False
            for key, group in groupby(members, lambda member: _split_name(member.name)[0]):
                entry = _make_entry(path, key, list(group), file, label_key)
                if entry is not None:
                    has_images = True
                    yield entry
            if not has_images:
                raise UserError(f"{path} holds no images ({' '.join(IMAGE_SUFFIXES)}): it is not a tar of images")
    except tarfile.TarError as error:
        raise UserError(f"{path} is a damaged tar, or cut short ({first_line(error)})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or first_line(error)}") from error


class _BoundedReads:
    """A file that limits the size of each read, because a header of a tar may ask for any amount of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int) -> bytes:
        """Read as the file does. Raises tarfile.ReadError for more than a header may have."""
        if not 0 <= count <= _MAX_LABEL_BYTES:
            raise tarfile.ReadError(f"a header of {count} bytes")
        return self._file.read(count)


def _iterate_members(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    size = os.fstat(file.fileno()).st_size
    with tarfile.open(fileobj=_BoundedReads(file), mode="r:") as archive:  # type: ignore[call-overload]
        while (member := _read_next(archive)) is not None:
            archive.members.clear()  # tarfile would hold every header in memory
            if member.isdir() or Path(member.name).name.startswith("."):
                continue
            _check_member(path, member, size)
            yield member
        # tarfile ends without a word at a damaged header; the end of a whole tar is a block of zeros.
        file.seek(archive.offset)
        if file.read(_BLOCK) != bytes(_BLOCK):
            raise UserError(f"{path} is damaged or cut short at byte {archive.offset:,}: it has no end mark there")


def _read_next(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return archive.next()
    except (ValueError, OverflowError, RecursionError) as error:  # numbers in headers that are none
        raise tarfile.ReadError(first_line(error)) from error


def _check_member(path: Path, member: tarfile.TarInfo, size: int) -> None:
    where = one_line(f"{path}: member {member.name[:_MAX_NAME]!r}")
    if not member.isreg() or member.issparse():
        kind = _KINDS.get(tarfile.GNUTYPE_SPARSE if member.issparse() else member.type, "of an unknown type")
        raise UserError(f"{where} is {kind}: pack plain files only")
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise UserError(f"{where} leads out of the folder: pack names without .. and without a leading /")
    if member.size < 0 or member.offset_data + member.size > size:
        raise UserError(f"{where} ends behind the end of the file: the tar is cut short")


def _make_entry(
    path: Path, key: str, members: list[tarfile.TarInfo], file: BinaryIO, label_key: str
) -> ImageEntry | None:
    """Make the entry of one sample; None if no image is in it."""
    by_ending = {_split_name(member.name)[1]: member for member in members}
    images = [member for member in members if member.name.lower().endswith(IMAGE_SUFFIXES)]
    if not images:
        return None
    where = one_line(f"{path}:{key[:_MAX_NAME]}")
    if len(images) > 1:
        raise UserError(
            f"{where} has {len(images)} images: a sample is one, and its name, up to the first dot, is unique among "
            "its neighbours"
        )
    image = images[0]
    if image.size > MAX_RECORD_BYTES:
        raise UserError(f"{where}: an image of {image.size:,} bytes; at most {MAX_RECORD_BYTES >> 20} MiB are read")
    if "cls" in by_ending:
        label = _parse_label(where, _read_member(where, file, by_ending["cls"]).decode("utf-8", "replace").strip())
    elif "json" in by_ending:
        label = _parse_label(where, _read_json_label(where, _read_member(where, file, by_ending["json"]), label_key))
    else:
        raise UserError(f"{where} has no label: give each image a .cls or a .json with the key {label_key!r} beside it")
    return ImageEntry(path, image.offset_data, image.size, label, where)


def _read_member(where: str, file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    if member.size > _MAX_LABEL_BYTES:
        raise UserError(
            f"{where}: a label file of {member.size:,} bytes; at most {_MAX_LABEL_BYTES >> 20} MiB are read"
        )
    file.seek(member.offset_data)
    return file.read(member.size)


def _read_json_label(where: str, text: bytes, key: str) -> Any:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(one_line(f"{where}.json: not JSON ({error})")) from error
    if not isinstance(record, dict):
        raise UserError(f"{where}.json: not an object; expected one with the key {key!r}")
    if key not in record:
        raise refuse_missing_column(f"{where}.json", key, record)
    return record[key]


def _parse_label(where: str, value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UserError(
            f"{where}: its label is {one_line(repr(value)[:_MAX_NAME])}; give the number or name of a class"
        )
    text = str(value)
    if _NUMBER.fullmatch(text):
        return int(text)
    if _ANY_NUMBER.fullmatch(text):
        raise UserError(
            f"{where}: its label is {text[:_MAX_NAME]}; classes are whole numbers from 0 to 999,999: leave out images "
            "without a class"
        )
    if not text or len(text) > _MAX_NAME or not text.isprintable():
        raise UserError(f"{where}: its label is {one_line(repr(value)[:_MAX_NAME])}; give the name of a class")
    return text


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name into the sample's and its ending, at the first dot after the last slash."""
    folder, _, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending.lower()
