"""Publish what a rank is doing in shared memory of its node, so that others can see it without asking the rank.

Each rank has a file of 64 bytes in a directory of /dev/shm that only its user can enter, named after the log directory
of the attempt. `Heartbeat.enter` writes phase, step and a counter: one call of struct.pack_into on mapped memory, less
than a microsecond, no system call. A rank that is stopped, stuck or dead leaves its last entry behind.

Standard library only.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
import signal
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_LAYOUT = struct.Struct("<IIqqqq")
"""Version, phase, process id, step, counter, monotonic nanoseconds."""
_VERSION = 1
_BYTES = 64
"""Size of a rank's file: that of _LAYOUT, rounded up to a cache line."""
_MEMORY = Path("/dev/shm")
_NAME_DIGITS = 20
"""Hexadecimal digits in a folder's name."""
_MAPPED = re.compile(rf"/(hpc_train-\d+-[0-9a-f]{{{_NAME_DIGITS}}})/\d+")


class Phase(IntEnum):
    """Phase of a rank's work, in the order in which a rank goes through them."""

    START = 1
    """Importing, meeting the other ranks, building the model."""
    LOAD = 2
    FIRST_STEP = 3
    """One of the first steps of the process, which compile."""
    STEP = 4
    DATA = 5
    """Waiting for the next batch."""
    EVALUATE = 6
    SAVE = 7
    """Waiting for a save."""
    END = 8
    """It has finished, and exits."""

    @property
    def text(self) -> str:
        """The phase as text."""
        return _TEXTS[self]


_FIRST_STEPS = 2
"""Steps of a process that count as Phase.FIRST_STEP: kernels are built and memory is reserved in them."""


def choose_step_phase(made: int) -> Phase:
    """Return the phase of a step. made: steps that the process has made before it."""
    return Phase.FIRST_STEP if made < _FIRST_STEPS else Phase.STEP


_TEXTS = {
    Phase.START: "starting",
    Phase.LOAD: "loading a checkpoint",
    Phase.FIRST_STEP: "in a first step",
    Phase.STEP: "in a step",
    Phase.DATA: "waiting for data",
    Phase.EVALUATE: "in an evaluation",
    Phase.SAVE: "waiting for a save",
    Phase.END: "ending",
}


@dataclass(frozen=True)
class Beat:
    """The last entry of a rank."""

    task: int
    process: int
    phase: Phase
    step: int
    counter: int
    """Grows by one with each entry."""
    seconds: float = 0.0
    """When it was written, as time.monotonic() of this node."""


class Heartbeat:
    """Publishes the phase and step of this rank in shared memory; does nothing if there is no memory to write to."""

    def __init__(self, logs: Path | None = None, task: int = 0) -> None:
        """Map the entry of `task`. logs: log directory of the attempt; None: this rank is not watched."""
        self._map: mmap.mmap | None = None
        self._process, self._counter, self.phase, self._step = os.getpid(), 0, Phase.START, 0
        self._nanoseconds = [0] * (max(Phase) + 1)
        # Imports came before this object; they belong to START.
        self._since = time.monotonic_ns() - _nanoseconds_since_start()
        self.failure: str | None = None
        """Why this rank cannot be watched; None if it can."""
        if logs is not None:
            try:
                self._map = _create_entry(find_folder(logs), task)
            except OSError as error:
                self.failure = f"{error.filename or find_folder(logs)}: {error.strerror}"
            remove_stale_entries(logs)
        self.enter(Phase.START)

    def enter(self, phase: Phase, step: int = 0) -> None:
        """Write that this rank has begun a phase, or is alive in it. step: updates made so far."""
        now = time.monotonic_ns()
        self._nanoseconds[self.phase] += now - self._since
        self.phase, self._since, self._step = phase, now, step
        self._counter += 1
        if self._map is not None:
            # Not atomic, but a watcher that reads between two fields only sees one stale field for one look, and the
            # counter says that the rank is alive.
            _LAYOUT.pack_into(self._map, 0, _VERSION, phase, self._process, step, self._counter, now)

    @property
    def training_step(self) -> int | None:
        """The step that this rank is in, or else the last one it has made, counted from 1; None before the first."""
        if self.phase in (Phase.FIRST_STEP, Phase.STEP, Phase.DATA):
            return self._step + 1
        return self._step or None

    def seconds(self) -> dict[Phase, float]:
        """Return how long this process has been in each phase, up to now."""
        now = time.monotonic_ns()
        self._nanoseconds[self.phase] += now - self._since
        self._since = now
        return {phase: self._nanoseconds[phase] / 1e9 for phase in Phase if self._nanoseconds[phase]}


def _nanoseconds_since_start() -> int:
    """Return for how long this process has been running; 0 where that cannot be found out."""
    try:
        # Field 22 of /proc/<pid>/stat: start of the process in clock ticks after boot (see proc(5)).
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return max(0, int((boot_seconds - ticks / os.sysconf("SC_CLK_TCK")) * 1e9))


def _create_entry(folder: Path, task: int) -> mmap.mmap:
    _make_private_folder(folder)
    # O_NOFOLLOW: /dev/shm is open to everybody, and a link could point at a file of ours.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / str(task), flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _BYTES)  # where the memory is full, the first write would be SIGBUS
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def _make_private_folder(folder: Path) -> None:
    """Make the folder, or accept an existing one. Raises PermissionError if another user owns it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    _check_owner(folder)


def _check_owner(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(0, "belongs to somebody else, or others may enter", str(folder))


def find_folder(logs: Path) -> Path:
    """Return the folder of this node with the entries of an attempt."""
    name = hashlib.sha256(str(logs.absolute()).encode()).hexdigest()[:_NAME_DIGITS]
    return _MEMORY / f"hpc_train-{os.getuid()}-{name}"


def read_beats(logs: Path) -> list[Beat]:
    """Return the last entry of every rank of this node, by task; [] if there is none."""
    folder = find_folder(logs)
    try:
        _check_owner(folder)
        tasks = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except OSError:
        return []
    return list(_read_entries(folder, tasks))


def _read_entries(folder: Path, tasks: list[int]) -> Iterator[Beat]:
    for task in tasks:
        with suppress(OSError, ValueError, struct.error):
            # Read without mapping: a file that is truncated meanwhile would end a reader of mapped memory by SIGBUS.
            descriptor = os.open(folder / str(task), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                version, phase, process, step, counter, nanoseconds = _LAYOUT.unpack(
                    os.pread(descriptor, _LAYOUT.size, 0)
                )
            finally:
                os.close(descriptor)
            if version == _VERSION:
                yield Beat(task, process, Phase(phase), step, counter, nanoseconds / 1e9)


def signal_ranks(logs: Path, number: signal.Signals) -> None:
    """Signal the ranks of this node, but not what they have forked."""
    folder = f"/{find_folder(logs).name}/"
    for beat in read_beats(logs):
        with suppress(OSError):
            # The number may belong to another process by now, which does not map an entry of this attempt.
            if folder in Path(f"/proc/{beat.process}/maps").read_text(errors="replace"):
                os.kill(beat.process, number)


def kill_ranks(logs: Path) -> list[int]:
    """Send SIGKILL to the ranks of this node, which are the processes that map an entry; returns their tasks.

    Processes that a rank has forked map it, too, and have its sockets and memory of devices. Some outlive their rank,
    and Slurm finds them only where it tracks processes by cgroups.
    """
    folder, killed = f"/{find_folder(logs).name}/", set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The numbers of ranks may belong to other processes by now. Only those of this attempt map its entries.
            maps = (process / "maps").read_text(errors="replace")
            if folder in maps:
                killed.add(int(maps.partition(folder)[2].split(maxsplit=1)[0]))
                os.kill(int(process.name), signal.SIGKILL)
    return sorted(killed)


_STALE_SECONDS = 3600.0
"""Age of the last entry of another run from which on its watchers have long done what they do about dead ranks."""


def remove_stale_entries(logs: Path | None = None) -> int:
    """Remove entries of this user's dead ranks on this node that no watcher has removed; returns how many folders.

    That is where the watchers died, too. Removed are the folders of earlier attempts of the run of `logs`, and those of
    other runs whose last entry is older than _STALE_SECONDS; never one that a process still maps.
    """
    earlier = set()
    if logs is not None and logs.name.isdecimal():
        earlier = {find_folder(logs.parent / str(attempt)).name for attempt in range(int(logs.name))}
    stale = [folder for folder in _list_folders() if folder.name in earlier or _measure_age(folder) > _STALE_SECONDS]
    mapped = _find_mapped_folders() if stale else set()
    removed = [folder for folder in stale if folder.name not in mapped]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return len(removed)


def _list_folders() -> list[Path]:
    """List the folders with entries of this user, of all attempts on this node."""
    folders = []
    with suppress(OSError):
        for folder in _MEMORY.glob(f"hpc_train-{os.getuid()}-{'[0-9a-f]' * _NAME_DIGITS}"):
            with suppress(OSError):
                _check_owner(folder)
                folders.append(folder)
    return folders


def _measure_age(folder: Path) -> float:
    """Return the seconds since a rank last wrote an entry; since the folder was changed, if it has none."""
    try:
        tasks = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        written = [beat.seconds for beat in _read_entries(folder, tasks)]
        return time.monotonic() - max(written) if written else time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0


def _find_mapped_folders() -> set[str]:
    """Return the names of the folders whose entries are mapped by a process of this user."""
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            mapped.update(_MAPPED.findall((process / "maps").read_text(errors="replace")))
    return mapped


def remove_entries(logs: Path) -> None:
    """Remove the entries of an attempt whose ranks are gone."""
    shutil.rmtree(find_folder(logs), ignore_errors=True)
