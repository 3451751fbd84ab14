"""Cache file layouts between saves: an unchanged layout is neither sent to rank 0 nor encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_index import build_index
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile, find_incomplete_tensor
from hpc_train.checkpoint.format.manifest_encoding import encode_columns
from hpc_train.checkpoint.format.shard_layout import FileLayout, StepLayout, gather_layouts

FileUpdates = tuple[tuple[ShardFile, FileLayout | None], ...]
"""Files that one rank wrote, each with its layout; None: the layout of its only file in the last save."""


@dataclass
class LayoutCache:
    """File layouts that each rank and rank 0 cache between saves.

    A rank whose only file has the layout of the last committed save sends None in place of the layout. Both sides cache
    what was sent only once the save is committed: after a failed save neither can know what the other received.
    """

    _layout: FileLayout | None = None
    """Layout of this rank's only file in its last committed save."""
    _pending_layout: FileLayout | None = None
    """Layout of this rank's only file in the save that is being written."""
    _rank_layouts: dict[int, FileLayout] = field(default_factory=dict)
    """On rank 0, the layout of each rank's only file in the last committed save."""
    _pending_rank_layouts: dict[int, FileLayout] = field(default_factory=dict)
    _file_layouts: Sequence[FileLayout] = ()
    _step_layout: StepLayout | None = None
    _encoded_columns: tuple[StepLayout, dict[str, bytes]] | None = None
    _encoded_index: tuple[StepLayout, list[str], bytes] | None = None

    def omit_unchanged(self, files: FileUpdates) -> FileUpdates:
        """Return what to send to rank 0: the files, without a layout that has not changed."""
        # Forget the layout until confirm_sent: if this save fails, nobody knows what rank 0 has cached.
        previous, self._layout, self._pending_layout = self._layout, None, None
        if len(files) != 1:
            return files
        # Layouts are compared by identity: a stager reuses the object as long as tensors keep their shapes.
        (file, layout), self._pending_layout = files[0], files[0][1]
        # None travels as a few bytes; a layout of a large model takes megabytes, from every rank at once.
        return ((file, None if layout is previous else layout),)

    def confirm_sent(self) -> None:
        """Cache the layout that was sent, when the save is committed."""
        self._layout = self._pending_layout

    def restore_unchanged(self, ranks: Sequence[FileUpdates]) -> list[tuple[ShardFile, FileLayout]]:
        """On rank 0, return the files of all ranks, with the layouts that they omitted."""
        files_of_ranks: list[tuple[tuple[ShardFile, FileLayout], ...]] = [
            tuple((file, self._rank_layouts[rank] if layout is None else layout) for file, layout in files)
            for rank, files in enumerate(ranks)
        ]
        self._pending_rank_layouts = {rank: files[0][1] for rank, files in enumerate(files_of_ranks) if len(files) == 1}
        return [file for files in files_of_ranks for file in files]

    def confirm_received(self) -> None:
        """On rank 0, cache the layouts that were received, when the save is committed."""
        self._rank_layouts = self._pending_rank_layouts

    def build_step_layout(self, layouts: Sequence[FileLayout]) -> StepLayout:
        """On rank 0, gather the layouts of all files, or return the last result if they are the same.

        Raises CheckpointError if the files do not hold every tensor exactly once.
        """
        if self._step_layout is None or list(self._file_layouts) != list(layouts):
            self._file_layouts, self._step_layout = (), None  # so that the cache is empty if this raises
            step_layout = gather_layouts(layouts)
            wrong = find_incomplete_tensor(step_layout)
            if wrong:
                raise CheckpointError(f"tensor {wrong[0]!r}: {wrong[1]}")
            self._file_layouts, self._step_layout = layouts, step_layout
        return self._step_layout

    def encode_manifest(self, manifest: Manifest) -> bytes:
        """Return the content of manifest.json. Raises as Manifest.to_bytes."""
        if self._encoded_columns is None or self._encoded_columns[0] is not manifest.step_layout:
            self._encoded_columns = manifest.step_layout, encode_columns(manifest.step_layout)
        return manifest.to_bytes(self._encoded_columns[1])

    def encode_index(self, manifest: Manifest) -> bytes:
        """Return the content of index.h5. Raises as build_index."""
        names = [file.name for file in manifest.files]
        index = self._encoded_index
        if index is None or index[0] is not manifest.step_layout or index[1] != names:
            index = self._encoded_index = manifest.step_layout, names, build_index(manifest)
        return index[2]
