"""Write and read the records of steps: what each rank spent the time of each step on.

Each node has one file per attempt, logs/<attempt>/steps-node-<n>.bin, to which its ranks append blocks. A block is a
header (magic, version, rank, number of records) and that many records of RECORD, all little-endian; each is one write,
so that blocks of ranks do not mix. A block that was not written to its end is skipped by looking for the next header.

A record has 200 bytes. The first 1,024 records of an attempt are of one step each, the next 1,024 of two, the next of
four, and so on: an attempt of a million steps has about 10,000 records per rank.

Imports neither torch nor omegaconf, because commands that look at runs import it.
"""

from __future__ import annotations

import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.regular_files import open_to_read
from hpc_train.step_clock import WAIT_BINS

log = logging.getLogger(__name__)

SECONDS = (
    "total",  # from the begin of the step to the begin of the next one
    "data",
    "forward",
    "backward",
    "clip",
    "update",
    "blocked_forward",
    "blocked_backward",
    "blocked_clip",
    "blocked_rest",
    "save",
    "evaluate",
    "cpu",  # processor time of the process, all threads
    "launch",  # estimate: operations of the model times what starting an operation costs here
)
"""Fields with seconds, added up over the steps of a record; NaN: not measured."""
LEVELS = (
    "resident",  # MiB
    "allocated",  # MiB of the device, the largest since the record before
    "reserved",
    "gpu_busy",  # percent
    "gpu_mhz",
    "gpu_watts",
    "io_stall",  # seconds since boot that some process of the node could only wait for its disks
    "memory_stall",  # the same for memory
)
"""Fields with the state at the end of a record; NaN: not known."""
COUNTS = ("tokens", "major_faults", "collectives")
RECORD = np.dtype(
    [
        ("step", "<u4"),
        ("steps", "<u4"),
        ("time", "<f8"),
        *((name, "<f4") for name in SECONDS),
        *((name, "<u4") for name in COUNTS),
        *((name, "<f4") for name in LEVELS),
        ("net_bytes", "<f8"),
        ("waits", "<f4", (WAIT_BINS,)),
    ]
)
"""A record: the last of its steps (from 1), how many, time.time() at their begin, and the fields above.

tokens: of the whole job. collectives: that this rank waited for.
net_bytes: bytes that the NICs of the node have moved since boot; NaN: not known."""
_RECORD = struct.Struct(f"<IId{len(SECONDS)}f{len(COUNTS)}I{len(LEVELS)}fd{WAIT_BINS}f")
"""RECORD for one record: packing values takes 3 us, an array of one 25."""
assert _RECORD.size == RECORD.itemsize
_BLOCK = struct.Struct("<8sIII")
_MAGIC, _VERSION = b"hpcsteps", 1
THIN_AFTER = 1024
"""Records after which twice as many steps share one."""
_FLUSH_SECONDS, _FLUSH_RECORDS = 5.0, 64
"""A block is written when it is so old, or has so many records."""
_READ_AT_ONCE = 64 << 20
PATTERN = "steps-node-*.bin"


def count_steps_per_record(written: int) -> int:
    """Return how many steps the next record covers. written: number of records of this attempt so far."""
    return 1 << min(written // THIN_AFTER, 20)


class StepRecordFile:
    """Appends the records of one rank to its node's file, from a thread of its own.

    A file system that hangs or is full does not stop the training: records wait, at most 4,096 of them, and those that
    come then are dropped, which is reported once.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._pending: list[bytes] = []
        self._next_flush = 0.0
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=64)
        self.failure: str | None = None
        """Why records are missing; None if none is."""
        self._thread = threading.Thread(target=self._write_blocks, name="step records", daemon=True)
        self._thread.start()

    def append(self, record: bytes, now: float) -> None:
        """Add a packed record; `now`, in seconds, decides whether a block is due."""
        self._pending.append(record)
        if now >= self._next_flush or len(self._pending) >= _FLUSH_RECORDS:
            self._next_flush = now + _FLUSH_SECONDS
            self.flush()

    def flush(self) -> None:
        """Hand the records that wait to the thread that writes them."""
        if not self._pending:
            return
        block = _BLOCK.pack(_MAGIC, _VERSION, self._rank, len(self._pending))
        try:
            self._queue.put_nowait(block + b"".join(self._pending))
        except queue.Full:
            self._fail(f"{self._path}: the file system does not take records of steps; some are missing")
        self._pending = []

    def close(self) -> None:
        """Write what waits, for at most two seconds."""
        self.flush()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout=2.0)

    def _write_blocks(self) -> None:
        while (block := self._queue.get()) is not None:
            try:
                _append(self._path, block)
            except OSError as error:
                self._fail(f"{self._path}: {error.strerror}; records of steps are missing")

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            log.warning("%s", reason)


def _append(path: Path, block: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, block)
    finally:
        os.close(descriptor)


def read_blocks(path: Path, newest_bytes: int | None = None) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Read a node's file: the rank and the records of each whole block; nothing that is damaged.

    newest_bytes: read only so much of the file, from its end. Holds a part of at most 64 MiB of the file in memory.
    Raises OSError if the file cannot be read.
    """
    with open_to_read(path) as file:
        if newest_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - newest_bytes))
        buffer = b""
        while piece := file.read(_READ_AT_ONCE):
            buffer += piece
            blocks, used = _split_blocks(buffer)
            buffer = buffer[used:]
            yield from blocks


def _split_blocks(data: bytes) -> tuple[list[tuple[int, np.ndarray[Any, Any]]], int]:
    """Return the whole blocks, and up to where the data was used."""
    blocks: list[tuple[int, np.ndarray[Any, Any]]] = []
    position = 0
    while (position := data.find(_MAGIC, position)) >= 0 and position + _BLOCK.size <= len(data):
        _, version, rank, count = _BLOCK.unpack_from(data, position)
        end = position + _BLOCK.size + count * RECORD.itemsize
        if version != _VERSION or not 0 < count <= _FLUSH_RECORDS:
            position += 1
            continue
        if end > len(data):
            # Cut short at the end of the file, or by a writer that was killed: then another header follows inside.
            following = data.find(_MAGIC, position + 1)
            if following < 0:
                return blocks, position
            position = following
            continue
        # A header inside: this block was not written to its end, and that of another rank follows.
        inside = data.find(_MAGIC, position + 1, end)
        if inside >= 0:
            position = inside
            continue
        blocks.append((rank, np.frombuffer(data, RECORD, count, position + _BLOCK.size)))
        position = end
    return blocks, position if position >= 0 else max(0, len(data) - len(_MAGIC) + 1)


def pack_record(values: Mapping[str, Any]) -> bytes:
    """Pack one record. Times and levels that are not given are NaN, counts and waits 0."""
    get = values.get
    return _RECORD.pack(
        values["step"],
        values["steps"],
        get("time", 0.0),
        *[get(name, _NAN) for name in SECONDS],
        *[get(name, 0) for name in COUNTS],
        *[get(name, _NAN) for name in LEVELS],
        get("net_bytes", _NAN),
        *get("waits", _NO_WAITS),
    )


_NAN = float("nan")
_NO_WAITS = (0.0,) * WAIT_BINS


class RecordSum:
    """Adds up the steps that share a record."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append = append
        self._written = 0
        self._open: dict[str, Any] | None = None

    def add(self, values: dict[str, Any]) -> None:
        """Add the values of one step."""
        self._open = values if self._open is None else _add_values(self._open, values)
        if self._open["steps"] >= count_steps_per_record(self._written):
            self.end()

    def end(self) -> None:
        """Append the open record, also if it is of fewer steps."""
        if self._open is not None:
            self._append(pack_record(self._open))
            self._written += 1
            self._open = None


def _add_values(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Add up what is summed; of levels and the step keep the later, of the time the earlier."""
    total = {**earlier, **later, "time": earlier.get("time", 0.0), "steps": earlier["steps"] + later["steps"]}
    for name in SECONDS:
        total[name] = earlier.get(name, _NAN) + later.get(name, _NAN)
    for name in COUNTS:
        total[name] = earlier.get(name, 0) + later.get(name, 0)
    pairs = zip(earlier.get("waits", _NO_WAITS), later.get("waits", _NO_WAITS), strict=True)
    total["waits"] = [earlier_wait + later_wait for earlier_wait, later_wait in pairs]
    return total
