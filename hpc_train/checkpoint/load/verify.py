"""Verify that a step is as it was committed, and find the newest step that is."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.format.block_digests import (
    BLOCK_BYTES,
    BlockDigests,
    digest_blocks,
    find_digest_table,
    find_first_mismatch,
)
from hpc_train.checkpoint.format.compressed_chunks import PartTable, list_stored_parts_within
from hpc_train.checkpoint.format.hdf5_index import find_index_problem
from hpc_train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFile,
    find_incomplete_tensor,
    read_manifest,
)
from hpc_train.checkpoint.format.shard_consistency import check_shard_file
from hpc_train.checkpoint.load.verified_reader import check_folders, read_digest_table
from hpc_train.checkpoint.rank_consensus import gather_and_decide, run_on_rank_0
from hpc_train.checkpoint.storage.step_directory import list_committed_steps, locate_step
from hpc_train.interfaces import World
from hpc_train.regular_files import open_regular

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20
"""Bytes that are read and digested at a time: few enough to stay in the processor's cache."""
_SPAN = (256 << 20) // BLOCK_BYTES
"""Blocks that one thread checks at a time."""


def verify_step(directory: Path, step: int, world: World | None = None) -> list[Problem]:
    """Read a whole step and return everything that differs from what was committed; an empty list if nothing does.

    With a world it is a collective: ranks share the files, and all get the whole answer. Raises UserError if there is
    no such step.
    """
    path, manifest, problems = run_on_rank_0(world, lambda: _open_step(directory, step))
    if manifest is None:
        return problems
    rank, size = (world.rank, world.size) if world else (0, 1)
    # Every size-th file: neighbouring files tend to be of one node and of one size.
    own_files = manifest.files[rank::size]

    def check_share() -> list[Problem]:
        return list_file_problems(path, manifest, own_files) + (
            list_index_problems(path, manifest) if rank == 0 else []
        )

    return problems + gather_and_decide(
        world, check_share, lambda ranks: [problem for of_rank in ranks for problem in of_rank]
    )


def verify_in_one_process(
    path: Path, step: int, jobs: int, on_bytes: Callable[[int], object]
) -> tuple[Manifest | None, list[Problem]]:
    """Verify a step in one process, given its directory; the returned manifest is None if it is damaged.

    jobs, on_bytes: as in list_file_problems.
    """
    manifest, problems = _read_manifest(path, step)
    if manifest is None:
        return None, problems
    return manifest, problems + list_file_problems(
        path, manifest, manifest.files, jobs, on_bytes
    ) + list_index_problems(path, manifest)


def list_index_problems(path: Path, manifest: Manifest) -> list[Problem]:
    """Return the problems of a step's index, if it has one."""
    problem = find_index_problem(path, manifest)
    return [problem] if problem else []


def find_newest_verified(directory: Path, world: World | None = None) -> int | None:
    """Return the last committed step that verifies; None if there is none. Logs why newer steps are skipped.

    With a world it is a collective, with the same answer on every rank.
    """
    for step in reversed(run_on_rank_0(world, lambda: list_committed_steps(directory))):
        problems = verify_step(directory, step, world)
        if not problems:
            return step
        if world is None or world.rank == 0:
            _log.warning("checkpoint step %d in %s is damaged and skipped: %s", step, directory, problems[0])
    return None


def list_file_problems(
    path: Path,
    manifest: Manifest,
    files: Sequence[ShardFile],
    jobs: int = 1,
    on_bytes: Callable[[int], object] = lambda done: None,
) -> list[Problem]:
    """Compare files of a step with its manifest; returns the first problem of each file that has one.

    jobs: threads; several may share a large file. on_bytes: called, by any thread, with the number of bytes just read.
    """

    def check(span: _BlockSpan) -> Problem | None:
        problem = _check_span(path, manifest, span)
        on_bytes(span.bytes)
        return problem

    spans_by_file = {file.name: _list_spans(path, file) for file in files}
    with ThreadPoolExecutor(jobs) as pool:
        checks = [
            (name, [spans] if isinstance(spans, Problem) else [pool.submit(check, span) for span in spans])
            for name, spans in spans_by_file.items()
        ]
        results = [
            (name, [outcome if isinstance(outcome, Problem) else outcome.result() for outcome in of_file])
            for name, of_file in checks
        ]
    damaged = {name: wrong[0] for name, of_file in results if (wrong := [problem for problem in of_file if problem])}
    # A file whose bytes are as they were written may still contradict the manifest: compare its HDF5 structure.
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    for name in spans_by_file.keys() - damaged.keys():
        if (problem := _find_contradiction(path, manifest, numbers[name])) is not None:
            damaged[name] = problem
    # In the order of the manifest, not in that of the threads.
    return [damaged[name] for name in spans_by_file if name in damaged]


def _find_contradiction(path: Path, manifest: Manifest, number: int) -> Problem | None:
    """Return how a file whose bytes are intact contradicts the manifest, if it does."""
    file = manifest.files[number]
    try:
        with os.fdopen(open_regular(path / file.name), "rb", buffering=0) as opened:

            def read(begin: int, end: int) -> bytes:
                return os.pread(opened.fileno(), end - begin, begin)

            check_shard_file(manifest.step_layout, number, file, read_digest_table(path, file), read, thorough=True)
    except OSError as error:
        return Problem(file.name, f"it cannot be read: {error.strerror}")
    except CheckpointError as error:
        return Problem(file.name, str(error))
    return None


@dataclass(frozen=True)
class _BlockSpan:
    """Consecutive blocks of a file, and their digests."""

    file: ShardFile
    first: int
    table: BlockDigests
    parts: PartTable | None

    @property
    def bytes(self) -> int:
        begin = self.first * BLOCK_BYTES
        return min(begin + len(self.table) * BLOCK_BYTES, self.file.bytes) - begin


def _open_step(directory: Path, step: int) -> tuple[Path, Manifest | None, list[Problem]]:
    path = locate_step(directory, step)
    return path, *_read_manifest(path, step)


def _read_manifest(path: Path, step: int) -> tuple[Manifest | None, list[Problem]]:
    try:
        manifest = read_manifest(path, step)
    except CheckpointError as error:
        return None, [Problem(MANIFEST_FILE, str(error))]
    wrong = find_incomplete_tensor(manifest.step_layout)
    return manifest, [Problem(MANIFEST_FILE, wrong[1], tensor=wrong[0])] if wrong else []


def _list_spans(path: Path, file: ShardFile) -> list[_BlockSpan] | Problem:
    """Return spans of all blocks of a file, or the problem if they cannot be spans_by_file at all."""
    try:
        check_folders(path, file.name)
        size = (path / file.name).lstat().st_size
        if size != file.bytes:
            return Problem(file.name, f"it has {size} bytes, {file.bytes} were committed")
        table = read_digest_table(path, file)
    except FileNotFoundError:
        return Problem(file.name, "it is missing")
    except CheckpointError as error:
        return Problem(find_digest_table(Path(file.name)).as_posix(), str(error).partition(": ")[2])
    except OSError as error:
        return Problem(file.name, f"it cannot be read: {error.strerror}")
    starts = range(0, len(table.digests), _SPAN)
    return [_BlockSpan(file, first, table.digests[first : first + _SPAN], table.parts) for first in starts]


def _check_span(path: Path, manifest: Manifest, span: _BlockSpan) -> Problem | None:
    name = span.file.name
    try:
        wrong = _find_first_wrong_block(path / name, span.first, span.table)
    except OSError as error:
        return Problem(name, f"it cannot be read: {error.strerror}")
    except CheckpointError as error:
        return Problem(name, str(error))
    if wrong is None:
        return None
    what = "its content is not what was committed"
    return Problem(name, what, tensor=_find_tensor_at(manifest, span, wrong * BLOCK_BYTES), offset=wrong * BLOCK_BYTES)


def _find_first_wrong_block(path: Path, first: int, table: BlockDigests) -> int | None:
    """Return the index of the first damaged block; None if there is none. first: index of the table's first block."""
    # mmap gives page-aligned memory, which is reused for all chunks.
    buffer = memoryview(mmap.mmap(-1, _CHUNK))
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        for begin in range(0, len(table), _CHUNK // BLOCK_BYTES):
            expected = table[begin : begin + _CHUNK // BLOCK_BYTES].tolist()
            count = _fill(file.fileno(), buffer[: len(expected) * BLOCK_BYTES], (first + begin) * BLOCK_BYTES)
            if -(-count // BLOCK_BYTES) < len(expected):
                raise CheckpointError("it became shorter while it was read")
            wrong = find_first_mismatch(digest_blocks(buffer[:count]), expected)
            if wrong is not None:
                return first + begin + wrong
    return None


def _fill(file: int, buffer: memoryview, begin: int) -> int:
    """Fill the buffer from byte `begin` of the file; returns the bytes read, fewer only at its end."""
    at = 0
    while at < len(buffer) and (count := os.preadv(file, [buffer[at:]], begin + at)):
        at += count
    return at


def _find_tensor_at(manifest: Manifest, span: _BlockSpan, begin: int) -> str | None:
    """Return a tensor with bytes in the block at `begin`; None if it holds only HDF5 structure."""
    index, end = manifest.files.index(span.file), begin + BLOCK_BYTES
    if span.parts is not None:
        hit = list_stored_parts_within(span.parts, begin, end)
        if not len(hit):
            return None
        # The block is of the compressed file; the layout knows places in the uncompressed image.
        begin, end = int(hit["begin"][0]), int(hit["begin"][0]) + 1
    tensors = {tensor.name: tensor for tensor in manifest.step_layout.tensors}
    for name, parts in manifest.step_layout.parts().items():
        for part in parts:
            last = part.place + part.rectangle.volume * tensors[name].itemsize
            if part.file == index and part.place < end and last > begin:
                return name
    return None
