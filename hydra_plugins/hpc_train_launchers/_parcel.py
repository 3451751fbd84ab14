"""One file with what the points of a sweep share and what each has for itself: a node reads its own part alone.

Pickles, because that is what Hydra hands over: a task function, resolvers, structured configurations of the user's.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.launch.callables.calls import check_private_file, pickle_value, write_private


def pack(path: Path, shared: Any, points: Sequence[bytes]) -> None:
    """Write a parcel. points: each already pickled."""
    folders = [str(Path(entry).absolute()) for entry in sys.path]
    blobs = [json.dumps(folders).encode(), pickle_value(shared), *points]
    sizes = struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs))
    write_private(b"".join([sizes, *blobs]), path)


@dataclass(frozen=True)
class Parcel:
    """A parcel on disk."""

    path: Path

    def shared(self) -> Any:
        """What all points share. The modules that it names are looked for where the submitting process did."""
        known = json.loads(self._blob(0))
        sys.path[:] = [*known, *(entry for entry in sys.path if entry not in known)]
        return pickle.loads(self._blob(1))

    def point(self, index: int) -> Any:
        """What belongs to one point; after `shared`."""
        return pickle.loads(self._blob(2 + index))

    def _blob(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            check_private_file(self.path, os.fstat(file.fileno()))
            (count,) = struct.unpack("<Q", file.read(8))
            sizes = struct.unpack(f"<{count}Q", file.read(8 * count))
            file.seek(8 * (1 + count) + sum(sizes[:index]))
            return file.read(sizes[index])
