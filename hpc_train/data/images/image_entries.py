"""Find labelled images in folders, one per class, and in WebDataset tars; the kind is recognised by the content."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hpc_train.data.corpus.sources import STDLIB
from hpc_train.data.readers.arrow import is_saved_dataset
from hpc_train.data.readers.formats import RECORD_SUFFIXES
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read
from hpc_train.terminal import one_line

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
KINDS = "JPEG, PNG, WebP, BMP and GIF"
_OTHER_IMAGES = (".tif", ".tiff", ".jpe", ".jfif", ".avif", ".heic", ".heif", ".jp2", ".ppm", ".pgm")
_TAR = ".tar"
_MAX_SAMPLED_NAMES = 10_000
"""Files of a folder that are looked at to see what it holds."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})
_NOTE_PREFIXES = ("readme", "license", "licence", "notice", "changelog")
"""Prefixes of the names of files that describe a data set and are not part of its data."""
_IMAGES_PER_OTHER_FILE = 10
"""A folder with this many images for each file of text holds images: those files are lists and notes."""
_MAX_EMPTY = 1000
"""Classes for each one that has an image: with more, the largest number does not stand for a class."""
_MAX_NAMED = 4
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """Where the bytes of an image are, and its label as the source has it."""

    path: Path
    """The image, or the tar that holds it."""
    offset: int
    size: int
    label: int | str
    name: str
    """For messages, fit for a terminal."""


def are_images(sources: Sequence[str], suffixes: Sequence[str]) -> bool:
    """Return whether the sources are images: tars, or folders that hold images or tars and hardly any text or records.

    suffixes: of text. Raises UserError if some sources are images and others are not, because one store has one kind.
    """
    answers = {
        source: _holds_images(Path(source).expanduser(), tuple(suffixes)) for source in sources if source != STDLIB
    }
    if len(answers) == len(sources) and all(answers.values()):
        return bool(answers)
    if images := [source for source, has_images in answers.items() if has_images]:
        raise UserError(f"{images[0]} holds images and other sources do not; build a store of each")
    return False


def list_files(sources: Sequence[str]) -> list[tuple[Path, Path | None]]:
    """List the tars, and the images each with the folder whose sub-folders are its classes, in a fixed order.

    Raises UserError for a source that is missing or has neither.
    """
    files: list[tuple[Path, Path | None]] = []
    for source in sources:
        root = Path(source).expanduser()
        if root.is_file():
            files.append((root, None))
            continue
        if not root.is_dir():
            raise UserError(f"source {source} does not exist: give folders of images, or tars of WebDataset")
        files_of_root = [(path, None if path.name.endswith(_TAR) else root) for path in _walk(root)]
        if not files_of_root:
            raise UserError(f"no image under {root} ({KINDS}), and no tar of WebDataset")
        if all(folder is not None for _, folder in files_of_root):
            _check_classes(root, [path for path, _ in files_of_root])
        files += files_of_root
    return files


def find_folder_entry(path: Path, root: Path) -> ImageEntry:
    """Return the entry of an image in a folder of classes: its label is the name of the folder below `root`."""
    parts = path.relative_to(root).parts
    if len(parts) < 2:
        raise UserError(f"{path} is in no folder of a class: give a folder in which each sub-folder is a class")
    if parts[0].lower() in _SPLITS:
        raise UserError(
            f"{root} has sub-folders of splits, not of classes: build a store of each, such as {root / parts[0]}"
        )
    return ImageEntry(path, 0, path.stat().st_size, one_line(parts[0]), one_line(str(path)))


def number_labels(entries: Sequence[ImageEntry]) -> tuple[list[int], list[str]]:
    """Return the label of each entry as a number, and the names of the classes.

    Numbers stay as they are; names are numbered in alphabetical order. Raises UserError if there are both, and for a
    number that is far beyond the others.
    """
    kinds = {type(entry.label) for entry in entries}
    if len(kinds) > 1:
        number = next(entry for entry in entries if isinstance(entry.label, int))
        name = next(entry for entry in entries if isinstance(entry.label, str))
        raise UserError(
            f"labels are numbers and names: {number.name} has {number.label}, {name.name} has {name.label!r}; give "
            "one kind"
        )
    if kinds == {int}:
        numbers = [int(entry.label) for entry in entries]
        _check_gaps(entries, numbers)
        return numbers, [str(number) for number in range(max(numbers) + 1)]
    names = sorted({str(entry.label) for entry in entries})
    order = {name: number for number, name in enumerate(names)}
    return [order[str(entry.label)] for entry in entries], names


def _check_gaps(entries: Sequence[ImageEntry], numbers: Sequence[int]) -> None:
    """Warn of numbers without an image, since each is a class of the model. Raises UserError if nearly all are."""
    used, classes = len(set(numbers)), max(numbers) + 1
    if used == classes:
        return
    largest = f"{entries[numbers.index(classes - 1)].name} has the label {classes - 1:,}"
    if classes > _MAX_EMPTY * used:
        raise UserError(
            f"{largest}, but only {used:,} classes have an image: number the classes from 0 without large gaps, and "
            "leave out images without a class"
        )
    log.warning("%s: of %s classes %s have no image", largest, f"{classes:,}", f"{classes - used:,}")


def _check_classes(root: Path, images: Sequence[Path]) -> None:
    """Raise UserError if a folder of a class has no image, which would number the others in another way."""
    used = {path.relative_to(root).parts[0] for path in images}
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__")))
    if empty := [name for name in folders if name not in used]:
        shown = ", ".join(empty[:_MAX_NAMED]) + (", ..." if len(empty) > _MAX_NAMED else "")
        raise UserError(
            one_line(f"{root}: no image ({KINDS}) in {shown}: each folder is a class; fill it, or move it away")
        )
    if other := [name for name in _iterate_names(root) if name.lower().endswith(_OTHER_IMAGES)]:
        count, example = len(other), one_line(other[0])
        log.warning("%s: %d images, such as %s, are left out: convert them (known: %s)", root, count, example, KINDS)


def _holds_images(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a source is one of images: a tar, or a folder in which they far outnumber text and tables."""
    if path.is_file():
        return _is_tar(path)
    if not path.is_dir() or is_saved_dataset(path):
        return False
    images, others = 0, []
    # A folder may have millions of files, so only the first ones decide.
    for name in islice(_iterate_names(path), _MAX_SAMPLED_NAMES):
        if name.lower().endswith((*IMAGE_SUFFIXES, _TAR)):
            images += 1
        elif name.endswith((*suffixes, *RECORD_SUFFIXES)) and not name.lower().startswith(_NOTE_PREFIXES):
            others.append(name)
    if not others or images <= len(others):
        return images > 0 and not others
    example = one_line(others[0])
    if images >= _IMAGES_PER_OTHER_FILE * len(others):
        log.warning("%s: text and tables, such as %s, are left out because most files are images", path, example)
        return True
    log.warning("%s: %d images are left out because there is text or a table beside them: %s", path, images, example)
    return False


def _is_tar(path: Path) -> bool:
    if path.name.lower().endswith(_TAR):
        return True
    try:
        with open_to_read(path) as file:
            return file.read(262)[257:] == b"ustar"
    except OSError:
        return False  # whoever reads it says why


def _walk(root: Path) -> Iterator[Path]:
    """Yield the images and tars below a folder, without hidden ones, in an order of their names alone."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.lower().endswith((*IMAGE_SUFFIXES, _TAR)) and not name.startswith(".") and path.is_file():
                yield path


def _iterate_names(root: Path) -> Iterator[str]:
    for _, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (name for name in names if not name.startswith("."))
