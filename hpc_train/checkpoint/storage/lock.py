"""Lock a checkpoint directory, so that only one job at a time writes to it; take over the lock of a dead job.

No clocks are compared: those of nodes and file servers differ and can go back. For an owner on this machine, the kernel
says whether it is alive. An earlier attempt of the same Slurm job is known to be over from the count of restarts or
attempts. Any other owner is judged by its heartbeat: a number in the file that it increases every few seconds, and that
a newcomer watches for a while. A new owner renames the temporary directories of former owners, so that none of them can
commit any more. Readers take no lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.rank_consensus import run_on_rank_0
from hpc_train.checkpoint.storage.file_system import (
    make_directory,
    write_at_offset,
    write_durable_file,
)
from hpc_train.checkpoint.storage.retention import withdraw_unfinished
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.processes import identify_machine, read_start_time
from hpc_train.regular_files import NotRegularError, read_regular

LOCK_FILE = "lock"
HEARTBEAT_SECONDS = 10.0
"""Seconds between heartbeats; an owner that misses six is dead."""
_BEATS_TO_WATCH = 6
_SECONDS_FOR_LAST_HEARTBEAT = 2.0
"""Time that a release gives a heartbeat that is being written."""
_TRIES = 20
"""How often the lock may go to another process, or be released, while this one tries to create it."""
_MAX_BYTES = 1 << 16
"""Maximum size of a lock file: whatever else has its name is not read whole."""
_log = logging.getLogger(__name__)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of link(2) if the file system has no hard links, or no more of them."""
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors that say that the user may not write there, or that something else has the name."""


@dataclass(frozen=True)
class LockOwner:
    """Identity of a process, unique over machines and time."""

    host: str
    machine: str
    """The boot of the machine and the process-id namespace, within which process ids are unique."""
    process: int
    started: str
    """Start of the process in ticks since the boot, because process ids are reused."""
    job: str | None
    """Slurm job id."""
    restarts: int
    """How often Slurm has restarted the job."""
    attempt: int
    """Attempt of the run, as its batch script counts; -1 outside of one. Attempts of a script never overlap."""
    token: str

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


@dataclass(frozen=True)
class _LockContent:
    """Content of a lock file; the owner is None if it cannot be parsed."""

    owner: LockOwner | None
    text: str

    def is_by(self, other: _LockContent) -> bool:
        return self.owner == other.owner and (self.owner is not None or self.text == other.text)


@dataclass
class Lock:
    """A lock that this process holds until `release`; a thread writes its heartbeats."""

    path: Path
    owner: LockOwner
    beat: float
    _stop: threading.Event = field(default_factory=threading.Event)
    _heartbeats: threading.Thread | None = None

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the lock; this process must then stop writing."""
        try:
            content = _read_lock(self.path)
        except NotRegularError as error:
            raise CheckpointError(f"this run no longer has the lock {self.path}: {error.strerror}") from error
        if content is None or content.owner != self.owner:
            reason = f"{content.owner} has taken it over" if content and content.owner else "it was removed"
            raise CheckpointError(f"this run no longer has the lock {self.path}: {reason}")

    def release(self) -> None:
        """Release the lock, if it is still ours."""
        self._stop.set()
        with suppress(OSError):
            content = _read_lock(self.path)
            if content is not None and content.owner == self.owner:
                _remove(self.path, content, self.owner)  # not a plain unlink: the lock may have a new owner by now
        if self._heartbeats is not None:
            # A process that forks next must not copy a running thread. A server that hangs may hold the last heartbeat.
            self._heartbeats.join(_SECONDS_FOR_LAST_HEARTBEAT)

    def start_beating(self) -> None:
        """Start the heartbeats, which last until `release` or the end of the process."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        self._heartbeats = threading.Thread(target=self._beat, args=(descriptor,), name="checkpoint-lock", daemon=True)
        self._heartbeats.start()

    def _beat(self, descriptor: int) -> None:
        """Write heartbeats into the open file, even if it was renamed; a lock that replaced it is not touched."""
        count = 0
        while not self._stop.wait(self.beat):
            count += 1
            with suppress(OSError):  # a lost heartbeat does no harm, and if the lock is lost `check` tells
                write_at_offset(descriptor, memoryview(_format_beats(count)), len(_format_owner(self.owner)))
                os.fsync(descriptor)
        os.close(descriptor)


@contextmanager
def hold_lock(directory: Path, world: World) -> Iterator[Lock | None]:
    """Hold the lock of a checkpoint directory on rank 0; yields it there, None on other ranks. A collective.

    Raises UserError, on all ranks, if another job writes there.
    """
    locks: list[Lock] = []
    run_on_rank_0(world, lambda: locks.append(take_lock(directory)))
    try:
        yield locks[0] if locks else None
    finally:
        for lock in locks:
            lock.release()


def take_lock(directory: Path, env: Mapping[str, str] = os.environ, beat: float = HEARTBEAT_SECONDS) -> Lock:
    """Take the lock of a directory, which is made if missing. May watch the heartbeat of an old lock for six beats.

    Raises UserError if another job has the lock or if the directory cannot be written; CheckpointError if the file
    system fails.
    """
    lock = Lock(directory / LOCK_FILE, describe_this_process(env), beat)
    try:
        make_directory(directory)
        _take_or_refuse(lock.path, lock.owner, beat)
        lock.start_beating()
        # A former owner that was only suspended may have checked its lock just before, and be about to commit.
        withdraw_unfinished(directory)
    except OSError as error:
        lock.release()
        if isinstance(error, NotRegularError):
            raise UserError(f"{lock.path}: {error.strerror}; remove it, if no job writes there") from error
        if error.errno in _NOT_OURS:
            raise UserError(
                f"checkpoint.dir={directory}: {error.strerror}; choose a directory that can be written"
            ) from error
        raise CheckpointError(f"the lock {lock.path} could not be taken: {error.strerror}") from error
    return lock


def refuse_if_locked(directory: Path, env: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if a live job of this machine has the lock; a quick check before anything is started."""
    with suppress(OSError):
        content = _read_lock(directory / LOCK_FILE)
        if content and _is_dead(content, describe_this_process(env)) is False:
            raise _explain_refusal(directory / LOCK_FILE, content)


def describe_this_process(env: Mapping[str, str]) -> LockOwner:
    """Return the identity of this process for a lock."""
    restarts, attempt = env.get("SLURM_RESTART_COUNT", "0"), env.get("HPC_TRAIN_ATTEMPT", "")
    return LockOwner(
        host=socket.gethostname(),
        machine=identify_machine(),
        process=os.getpid(),
        started=read_start_time(os.getpid()) or "",
        job=env.get("SLURM_JOB_ID"),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        attempt=int(attempt) if attempt.isdecimal() else -1,
        token=secrets.token_hex(8),
    )


def _take_or_refuse(path: Path, owner: LockOwner, beat: float) -> None:
    for _ in range(_TRIES):
        if _create(path, owner):
            _remove_leftovers(path.parent)
            return
        content = _read_lock(path)
        if content is None:
            continue  # released in the meantime: try to create it again
        dead = _is_dead(content, owner)
        if dead is None:
            dead = _is_silent(path, content, beat)
        if not dead:
            raise _explain_refusal(path, content)
        _log.warning("checkpoint: the lock %s was left by %s, which is gone: taken over", path, content.owner)
        _remove(path, content, owner)
    raise UserError(f"{path}: several jobs want it at once; let one of them write there")


def _explain_refusal(path: Path, content: _LockContent) -> UserError:
    return UserError(
        f"checkpoint.dir={path.parent}: {content.owner or 'another job'} is writing checkpoints there; wait for its"
        " end, cancel it, or use another run_dir"
    )


def _create(path: Path, owner: LockOwner) -> bool:
    """Create the lock with its content in one step; returns False if there is one already.

    Uses a hard link, or exclusive creation if the file system has no links.
    """
    text, private = encode_lock(owner), path.with_name(f".{LOCK_FILE}-{owner.token}")
    try:
        write_durable_file(private, text)
        os.link(private, path)
    except FileExistsError:
        return _is_linked(private)  # a network file system may repeat a request that had succeeded
    except FileNotFoundError:
        return False  # another process removed our file as a leftover
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_exclusively(path, text)
    finally:
        with suppress(OSError):
            private.unlink()
    return True


def _remove_leftovers(directory: Path) -> None:
    """Remove the files of processes that died while taking the lock; one that is still at it tries again."""
    with suppress(OSError):
        for leftover in directory.glob(f".{LOCK_FILE}-*"):
            leftover.unlink(missing_ok=True)


def _create_exclusively(path: Path, text: bytes) -> bool:
    try:
        write_durable_file(path, text)
    except FileExistsError:
        return False
    return True


def _is_linked(private: Path) -> bool:
    # Two names, `private` and the lock: the link was made.
    with suppress(OSError):
        return private.stat().st_nlink == 2
    return False


def _remove(path: Path, content: _LockContent, owner: LockOwner) -> None:
    """Remove the lock with this content; a lock that has replaced it stays, or is put back."""
    aside = path.with_name(f".{LOCK_FILE}-{owner.token}-old")
    with _become_only_remover(path.parent), suppress(FileNotFoundError):
        now = _read_lock(path)
        if now is None or not now.is_by(content):
            return
        path.rename(aside)
        now = _read_lock(aside)
        if now and not now.is_by(content):
            with suppress(OSError):  # if this fails, its owner finds out before it commits anything
                os.link(aside, path)
        aside.unlink(missing_ok=True)


@contextmanager
def _become_only_remover(directory: Path) -> Iterator[None]:
    """Let one process at a time remove a lock, if the file system has flock.

    Without flock a race may remove a live lock; its owner finds out at `check`.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            # The directory is locked, not the lock file: that is the file that may be removed.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_dead(content: _LockContent, this_process: LockOwner) -> bool | None:
    """Return whether the owner of a lock is gone; None if only its heartbeat can tell."""
    owner = content.owner
    if owner is None:
        return None
    if owner.machine == this_process.machine and owner.host == this_process.host:
        # Process ids are reused, so compare the start time, too. On this machine the answer is certain.
        return read_start_time(owner.process) != owner.started
    if owner.job is not None and owner.job == this_process.job:
        # Slurm starts a job again only after all its processes have ended; the same holds for attempts of one job.
        earlier = owner.restarts < this_process.restarts or -1 < owner.attempt < this_process.attempt
        return True if earlier else None
    return None


def _is_silent(path: Path, content: _LockContent, beat: float) -> bool:
    """Watch a lock for six beats; returns whether there was no heartbeat, or the lock is gone."""
    _log.info(
        "checkpoint: %s has the lock %s; up to %g s to see whether it lives",
        content.owner,
        path,
        _BEATS_TO_WATCH * beat,
    )
    until = time.monotonic() + _BEATS_TO_WATCH * beat
    while time.monotonic() < until:
        time.sleep(beat / 4)
        now = _read_lock(path)
        if now is None or not now.is_by(content):
            return True  # removed or taken by another process: the caller looks again
        if now.text != content.text:
            return False
    return True


def _read_lock(path: Path) -> _LockContent | None:
    """Read a lock; None if there is none. Raises NotRegularError for a pipe or a device, and OSError."""
    try:
        text = read_regular(path, _MAX_BYTES, follow=True).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    try:
        return _LockContent(LockOwner(**json.loads(text.partition("\n")[0])), text)
    except (ValueError, TypeError, RecursionError):
        return _LockContent(None, text)


def encode_lock(owner: LockOwner) -> bytes:
    """Encode a new lock: its owner in the first line, the number of heartbeats, 0, in the second."""
    return _format_owner(owner) + _format_beats(0)


def _format_owner(owner: LockOwner) -> bytes:
    return json.dumps(asdict(owner)).encode() + b"\n"


def _format_beats(count: int) -> bytes:
    # Always as long, because a heartbeat is written over the one before it.
    return b"%020d\n" % count
