"""Build image stores from folders and tars, on request or at the first use of a config that names them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from hpc_train.config.model import ImageFilesDataConfig
from hpc_train.data.corpus.part_files import Progress, open_parts_folder
from hpc_train.data.images.decoding import ImageError, check_image, import_pillow
from hpc_train.data.images.image_entries import ImageEntry, find_folder_entry, list_files, number_labels
from hpc_train.data.images.image_store import VERSION, ImageStore, write_image_store
from hpc_train.data.images.webdataset_tar import read_tar_entries
from hpc_train.data.store_file import IMAGE_STORE, check_new_store, make_cache
from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read
from hpc_train.units import join_first

LABEL_KEY = "label"
"""Key of a .json in a tar, if no other is named."""
_MAX_NAMED = 4
_DIGEST_BYTES = 16
_NOTED_TOGETHER = 256
"""Images that are written down as checked in one go."""


def build_image_store(
    sources: Sequence[str],
    out: str | Path,
    *,
    label_key: str = LABEL_KEY,
    overwrite: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> ImageStore:
    """Build the image store `out`, and open it. Every image is decoded once, so that none fails in a run.

    The result does not depend on the number of workers, which are threads. A build that was killed does not decode
    again what it had decoded. Raises UserError for images that are damaged or not images, with the first few, and if
    `out` exists, unless it is a store and `overwrite` is set.
    """
    out = check_new_store(out, overwrite, IMAGE_STORE)
    try:
        with open_parts_folder(out) as folder, CheckedImages(folder / "images.checked") as checked:
            _write_images(sources, label_key, out, checked, workers, progress)
    except OSError as error:
        raise UserError(f"cannot write image store {out}: {error.strerror or error}") from error
    return ImageStore.open(out)


def ensure_image_store(config: ImageFilesDataConfig) -> Path:
    """Return the path of a config's image store; build it in the cache if the config names sources and has none."""
    if config.path is not None:
        return Path(config.path).expanduser()
    out = locate_image_store(config)
    if not out.exists():  # two jobs may do so at once: both write the same bytes
        make_cache(config.cache)
        try:
            _write_images(config.sources, config.label_key, out, None, config.decode_threads, None)
        except OSError as error:
            raise UserError(f"cannot write image store {out}: {error.strerror or error}") from error
    return out


def locate_image_store(config: ImageFilesDataConfig) -> Path:
    """Return where the store of a config's sources is or will be: files count by path, size and modification time."""
    if not config.sources:
        raise UserError("data.path or data.sources: give an image store, or folders or tars of images")
    stamps = []
    for path, _ in list_files(config.sources):
        status = path.stat()
        stamps.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
    content = json.dumps([VERSION, config.label_key, stamps])
    return Path(config.cache).expanduser() / f"images-{xxhash.xxh3_64_hexdigest(content.encode())}.h5"


def list_entries(sources: Sequence[str], label_key: str) -> list[ImageEntry]:
    """List all images with their labels, in an order of the sources and the names alone. Raises UserError."""
    entries: list[ImageEntry] = []
    for path, root in list_files(sources):
        if root is None:
            entries += read_tar_entries(path, label_key)
        else:
            entries.append(find_folder_entry(path, root))
    return entries


def _write_images(
    sources: Sequence[str],
    label_key: str,
    out: Path,
    checked: CheckedImages | None,
    workers: int,
    progress: Progress | None,
) -> None:
    """Find, check and write all images. Raises UserError for bad ones, OSError if the store cannot be written."""
    import_pillow()
    entries = list_entries(sources, label_key)
    labels, classes = number_labels(entries)
    sizes = [entry.size for entry in entries]
    source = json.dumps({"sources": list(sources), "images": len(entries), "bytes": sum(sizes)})
    write_image_store(out, _read_checked(entries, checked, workers, progress), sizes, labels, classes, source)


class CheckedImages:
    """The images that builds of a store have checked, in a file with which a later build continues."""

    def __init__(self, path: Path) -> None:
        """path: of the file, which holds a digest for each image and may end in a part of one."""
        content = path.read_bytes() if path.exists() else b""
        complete_bytes = len(content) - len(content) % _DIGEST_BYTES
        self._known = {content[start : start + _DIGEST_BYTES] for start in range(0, complete_bytes, _DIGEST_BYTES)}
        self._stamps: dict[Path, int] = {}
        self._new: list[bytes] = []
        self._file = path.open("r+b" if path.exists() else "wb", buffering=0)
        self._file.truncate(complete_bytes)
        self._file.seek(complete_bytes)

    def __enter__(self) -> CheckedImages:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, entry: ImageEntry) -> bool:
        """Return whether this image of a file that has not changed since was decoded. Raises OSError."""
        return bool(self._known) and self._hash(entry) in self._known

    def add(self, entry: ImageEntry) -> None:
        """Note that the image is sound; notes are written in batches."""
        self._new.append(self._hash(entry))
        if len(self._new) == _NOTED_TOGETHER:
            self._file.write(b"".join(self._new))
            self._new = []

    def _hash(self, entry: ImageEntry) -> bytes:
        if entry.path not in self._stamps:
            if len(self._stamps) > _NOTED_TOGETHER:  # a tar holds many images, and a folder a file for each
                self._stamps.clear()
            self._stamps[entry.path] = entry.path.stat().st_mtime_ns
        content = [VERSION, str(entry.path.absolute()), entry.offset, entry.size, self._stamps[entry.path]]
        return xxhash.xxh3_128_digest(json.dumps(content).encode())


def _read_checked(
    entries: Sequence[ImageEntry], checked: CheckedImages | None, workers: int, progress: Progress | None
) -> Iterator[bytes]:
    """Yield the bytes of each image. Raises UserError after the last one if any cannot be decoded."""
    if progress is not None:
        progress.start(sum(entry.size for entry in entries), 0)
    problems: list[str] = []
    width = 4 * workers  # images in memory at a time
    with ThreadPoolExecutor(workers, thread_name_prefix="images") as pool:  # Pillow decodes outside of Python's lock
        for start in range(0, len(entries), width):
            group = entries[start : start + width]
            were_checked = [checked is not None and checked.has(entry) for entry in group]
            for entry, was_checked, (data, problem) in zip(
                group, were_checked, pool.map(_read_entry, group, were_checked), strict=True
            ):
                if problem is not None:
                    problems.append(f"{entry.name} {problem}")
                elif checked is not None and not was_checked:
                    checked.add(entry)
                if progress is not None:
                    progress.advance(entry.size)
                yield data
    if problems:
        count = f"{len(problems)} of {len(entries)} images cannot be used: " if len(entries) > 1 else ""
        raise UserError(f"{count}{join_first(problems, _MAX_NAMED, '; ')}")


def _read_entry(entry: ImageEntry, is_checked: bool) -> tuple[bytes, str | None]:
    """Return the bytes of an image, and what is wrong with it."""
    try:
        with open_to_read(entry.path) as file:
            file.seek(entry.offset)
            data = file.read(entry.size)
    except OSError as error:
        return bytes(entry.size), f"cannot be read ({error.strerror or error})"
    if len(data) != entry.size:
        return bytes(entry.size), "changed while it was read"
    if is_checked:
        return data, None
    try:
        check_image(data)
    except ImageError as error:
        return data, str(error)
    return data, None
