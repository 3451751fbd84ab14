"""Image stores: one HDF5 file with the images as they were, one after another, and their labels, mapped into memory.

One large file instead of many small ones is what parallel file systems read well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.data.store_file import IMAGE_STORE, compute_digest, map_dataset, open_store
from hpc_train.errors import UserError
from hpc_train.regular_files import publish_file

VERSION = IMAGE_STORE.version
IMAGES = "images"
"""uint8, contiguous: the encoded images (JPEG, PNG, ...) one after another."""
OFFSETS = "offsets"
"""int64, one more than there are images: where each begins in IMAGES, and the end."""
LABELS = "labels"
"""int64, one an image."""
CLASSES = "classes"
"""uint8, JSON: the names of the classes by their number."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageStore:
    """An open image store. Reading an image reads its pages of the file and nothing more."""

    path: Path
    images: Bytes
    """(bytes,), a read-only memory map."""
    offsets: npt.NDArray[np.int64]
    """(images + 1,), a read-only memory map."""
    labels: npt.NDArray[np.int64]
    """(images,), a read-only memory map."""
    classes: tuple[str, ...]
    source: str
    """JSON: what the store was built from."""
    digest: str
    """XXH3-128 of images, offsets and labels, hexadecimal."""

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of one image."""
        return self.images[self.offsets[index] : self.offsets[index + 1]].tobytes()

    @classmethod
    def open(cls, path: str | Path) -> ImageStore:
        """Open a store. Raises UserError if it is missing, cut short, of another kind or of a later format."""
        return open_store(Path(path).expanduser(), IMAGE_STORE, _read_store)


def verify_image_store(store: ImageStore) -> bool:
    """Return whether images and labels still have the digest with which they were written; reads the whole file."""
    return compute_digest([store.images, store.offsets, store.labels]) == store.digest


def write_image_store(
    path: Path,
    images: Iterable[bytes],
    sizes: Sequence[int],
    labels: Sequence[int],
    classes: Sequence[str],
    source: str,
) -> None:
    """Write a store, replacing an old one by one rename; the same input gives the same bytes.

    sizes: of each image in bytes, in the order of `images`. Raises OSError; nothing is left behind then.
    """
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])
    state = xxhash.xxh3_128()
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish_file(path, sync=True) as temporary, h5py.File(temporary, "w", locking=False) as file:
        file.attrs["format"], file.attrs["version"], file.attrs["source"] = IMAGE_STORE.format, VERSION, source
        target = file.create_dataset(IMAGES, (int(offsets[-1]),), np.uint8)
        for number, image in enumerate(images):
            assert len(image) == sizes[number]
            target[offsets[number] : offsets[number + 1]] = np.frombuffer(image, np.uint8)
            state.update(image)
        file[CLASSES] = np.frombuffer(json.dumps(list(classes)).encode(), np.uint8)
        for name, values in ((OFFSETS, offsets), (LABELS, np.array(labels, np.int64))):
            file[name] = values
            state.update(values.data)
        file.attrs["xxh3_128"] = state.hexdigest()


def _read_store(file: h5py.File, path: Path) -> ImageStore:
    arrays: dict[str, Any] = {name: map_dataset(file[name], path) for name in (IMAGES, OFFSETS, LABELS)}
    store = ImageStore(
        path,
        **arrays,
        classes=tuple(json.loads(bytes(file[CLASSES][:]))),
        source=str(file.attrs["source"]),
        digest=str(file.attrs["xxh3_128"]),
    )
    if len(store.offsets) != len(store) + 1 or store.offsets[-1] != len(store.images):
        raise UserError(f"{path} is damaged: its offsets do not fit its images; build it again")
    return store
