"""Find out which file systems do not answer while ranks of this node are silent.

A rank that reads data, saves or writes its records on a file system that stalls looks as if it hung, and all others
wait for it. So the file systems on which a silent rank has files are asked, each by a process of its own: it waits for
as long as the file system does not answer, and this process never. Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

STALL_SECONDS = 3.0
"""How long a file system that stalls has not answered, at least. Those that are busy take up to a second or two."""
ASK_AHEAD_SECONDS = 4.0
"""How long before the deadline of a silent rank its file systems are asked, so that the answer is there by then."""
_AGAIN_SECONDS = 1.0
"""Seconds between two questions to a file system that answers."""
_MOST = 16
"""How many file systems are asked, at most."""
_FILES = 4
"""How many of the files that a rank has open on a file system are read."""
_IN_MEMORY = ("tmpfs", "proc", "sysfs", "devtmpfs", "devpts", "ramfs", "hugetlbfs", "mqueue", "cgroup", "cgroup2")
"""Types of file systems that are on no disk."""
_ESCAPED = re.compile(r"\\(\d{3})")


@dataclass(frozen=True)
class Disk:
    """A file system that has been asked, and for how long it has not answered."""

    mount: str
    """Where it is mounted."""
    kind: str
    """Its type, such as nfs4."""
    path: str
    """A file, or the folder, that was asked for."""
    seconds: float
    """Seconds without an answer; 0.0 if it has answered."""

    @property
    def answers(self) -> bool:
        """Whether it has answered; neither this nor `stalls` where it was asked a moment ago."""
        return self.seconds == 0.0

    @property
    def stalls(self) -> bool:
        """Whether it does not answer."""
        return self.seconds >= STALL_SECONDS

    def describe(self) -> str:
        """Return one line: which file system, and for how long it has not answered."""
        return f"{self.mount} ({self.kind}) has not answered for {self.seconds:.0f} s (asked for {self.path})"


@dataclass
class _Question:
    """A process that asks a file system."""

    process: int
    disk: Disk
    since: float


class DiskWatch:
    """Asks the file systems of silent ranks."""

    def __init__(self, folder: Path, paths: Sequence[str] = ()) -> None:
        """folder: one that the ranks write to, of the run. paths: others that they use."""
        self._folder, self._paths = folder, paths
        self._questions: dict[str, _Question] = {}
        self._answered: dict[str, tuple[Disk, float]] = {}
        self._due = 0.0

    def read_answers(self) -> bool:
        """Return whether a file system has answered at last, after a stall. Never waits."""
        now, is_over = time.monotonic(), False
        for mount, question in list(self._questions.items()):
            with suppress(ChildProcessError):
                if os.waitpid(question.process, os.WNOHANG)[0] == 0:
                    continue
            del self._questions[mount]
            self._answered[mount] = question.disk, now
            is_over = is_over or now - question.since >= STALL_SECONDS
        return is_over

    def look(self, processes: Sequence[int]) -> list[Disk]:
        """Return what is known of the file systems of these ranks, by process id; [] if none is silent. Never waits."""
        now = time.monotonic()
        if not processes:
            return []
        if now >= self._due:
            self._due = now + _AGAIN_SECONDS
            for mount, (kind, paths) in list_file_systems(processes, self._folder, self._paths).items():
                if mount not in self._questions:
                    path = str(self._folder) if str(self._folder) in paths else paths[0]
                    self._ask(Disk(mount, kind, path, 0.0), paths)
        recent = {mount: disk for mount, (disk, at) in self._answered.items() if now - at < 2 * _AGAIN_SECONDS}
        waiting = {
            mount: replace(question.disk, seconds=max(now - question.since, 0.001))
            for mount, question in self._questions.items()
        }
        # One that has just been asked again has not failed to answer yet.
        waiting = {
            mount: disk for mount, disk in waiting.items() if disk.seconds > _AGAIN_SECONDS or mount not in recent
        }
        return list({**recent, **waiting}.values())

    def _ask(self, disk: Disk, paths: Sequence[str]) -> None:
        with warnings.catch_warnings(), suppress(OSError):
            # Without exec, which would read a program from a disk. The child makes system calls only.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
            if process == 0:
                _ask_and_exit(paths, self._folder)
            self._questions[disk.mount] = _Question(process, disk, time.monotonic())


def _ask_and_exit(paths: Sequence[str], folder: Path) -> None:
    """Use these files, which takes as long as their file system does not answer. Any error is an answer, too."""
    try:
        os.closerange(0, 256)  # nobody who reads from this node's agent waits for this process
        for path in paths:
            with suppress(OSError):
                _write(path) if path == str(folder) else _read(path)
    finally:
        os._exit(0)


def _write(folder: str) -> None:
    path = f"{folder}/.disk-check-{os.uname().nodename}-{os.getpid()}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, b"\n")
        os.fsync(descriptor)
    finally:
        Path(path).unlink()


def _read(path: str) -> None:
    """Read the begin of a file, and not what of it is still in memory; of a folder, ask how full its disk is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.fstatvfs(descriptor)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.posix_fadvise(descriptor, 0, 4096, os.POSIX_FADV_DONTNEED)
        os.pread(descriptor, 1, 0)


def list_file_systems(
    processes: Iterable[int], folder: Path, paths: Sequence[str] = ()
) -> dict[str, tuple[str, list[str]]]:
    """Return type and files by mount point: of files that these ranks use, by process id, of `paths`, and of `folder`.

    Only names are read: nothing here asks a file system.
    """
    mounts = _read_mounts()
    found: dict[str, tuple[str, list[str]]] = {}
    processes = [process for rank in processes for process in (rank, *_list_children(rank))]
    opened = [path for process in processes for path in _list_open_files(process)]
    mapped = [path for process in processes for path in _list_mapped_files(process)]
    most = [(opened, _FILES), (mapped, 1), ([*paths, str(folder)], _FILES + len(paths) + 1)]
    for path, count in ((path, count) for group, count in most for path in group):
        mount = find_mount(path, mounts)
        if mount is None or mounts[mount] in _IN_MEMORY:
            continue
        files = found.setdefault(mount, (mounts[mount], []))[1]
        if path not in files and len(files) < count:
            files.append(path)
    return dict(list(found.items())[-_MOST:])


def find_mount(path: str, mounts: Mapping[str, str]) -> str | None:
    """Return the mount point of a path; None if there is none. mounts: types by mount point."""
    return next((str(parent) for parent in (Path(path), *Path(path).parents) if str(parent) in mounts), None)


def _read_mounts() -> dict[str, str]:
    """Return the types of the file systems that this process sees, by mount point."""
    mounts = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            with suppress(IndexError):
                mounts[_ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields.split()[4])] = rest.split()[0]
    return mounts


def _list_children(process: int) -> list[int]:
    """Return the processes that a rank has started, such as those that load its data."""
    with suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _list_open_files(process: int) -> list[str]:
    """Return the files that a process has open, those that it has opened last first."""
    paths: list[str] = []
    with suppress(OSError):
        for link in sorted(Path(f"/proc/{process}/fd").iterdir(), key=lambda link: int(link.name), reverse=True):
            with suppress(OSError):
                paths.append(str(link.readlink()))
    return list(filter(_is_file, paths))


def _list_mapped_files(process: int) -> list[str]:
    with suppress(OSError):
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        return list(dict.fromkeys(filter(_is_file, (line[line.find("/") :] for line in lines if "/" in line))))
    return []


def _is_file(path: str) -> bool:
    return (
        path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/")) and not path.endswith(" (deleted)")
    )
