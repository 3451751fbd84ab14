"""Read and replace files of a run, and open files that somebody else may have put there, without ever blocking.

Opening a named pipe blocks until there is a writer, reading a device may never end, and a link may lead anywhere. So a
file is opened without blocking, checked through its descriptor (regular, of bounded size), and only then read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hpc_train.errors import UserError

MAX_TEXT_BYTES = 1 << 30
"""Maximum bytes of a text file of a run (metrics, events, markers)."""
_SECONDS_OF_A_WRITE = 0.01
"""A line that another process is just writing is whole after this time."""
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class NotRegularError(OSError):
    """Not a regular file, or larger than allowed; `strerror` says what it is."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EINVAL, what, str(path))


def open_regular(path: Path, most: int | None = None, follow: bool = False, flags: int = 0) -> int:
    """Open a regular file for reading; returns its descriptor.

    most: maximum bytes of the file. follow: whether `path` may be a link; the directories above it always may be.
    flags: further flags of open(2). Raises NotRegularError for anything else, OSError as open(2) does.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise NotRegularError(path, "a name with a NUL in it")
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(text, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise NotRegularError(path, f"it is {_kind(path)}, not a regular file") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError(path, f"it is {_name(status.st_mode)}, not a regular file")
        if most is not None and status.st_size > most:
            raise NotRegularError(path, f"it has {status.st_size} bytes, more than the {most} that it may have")
        if not flags & os.O_DIRECT:  # with the flag some file systems do not wait for data either
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file of any size for reading, following links. Raises as `open_regular`."""
    return os.fdopen(open_regular(path, follow=True), "rb")


def read_regular(path: Path, most: int, follow: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises as `open_regular`."""
    with os.fdopen(open_regular(path, most, follow), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        content = bytearray()
        while len(content) <= most:  # a loop, because the file may grow while it is read
            part = file.read(max(size - len(content), 0) + 1)
            if not part:
                return bytes(content)
            content += part
    raise NotRegularError(path, f"it grew to more than the {most} bytes that it may have")


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file of a run, following links. Raises as `open_regular`, and UnicodeDecodeError."""
    return read_regular(path, MAX_TEXT_BYTES, follow=True).decode("utf-8", errors)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file of a run. Raises as `open_regular`, and ValueError for text that is not JSON."""
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_private_file(path: Path, content: str | bytes) -> None:
    """Put a file that only its owner may read in this place, in one rename. Raises OSError; nothing then changed."""
    replace_file(path, content, mode=0o600)


def check_private_file(path: Path, status: os.stat_result) -> None:
    """Raise UserError for a file that another user owns or may write: what it says runs as this user."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UserError(
            f"{path}: is not yours alone (owner {status.st_uid}, mode {status.st_mode & 0o777:o}), so that others "
            "could choose what runs; submit again, into a folder that only you can write"
        )


def replace_file(path: Path, content: str | bytes, mode: int | None = None, sync: bool = False) -> None:
    """Put a file in this place, in one rename: a reader sees the old content or the new one, never a part.

    mode: permissions of the file; None: those that the umask leaves. sync: return when the file and its name are on the
    disk. Raises OSError; nothing then changed.
    """
    data = content.encode() if isinstance(content, str) else content
    with publish_file(path, sync) as temporary:
        # O_EXCL: whoever else may write to the folder cannot have us write through a link of theirs.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # the umask, or an access list of the folder, may have set others
            file.write(data)


@contextmanager
def publish_file(path: Path, sync: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to; what is there is renamed to `path` if the block ends without an error.

    sync: synchronise the file before the rename, and its directory after it. After an error the temporary file is
    removed.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield temporary
        if sync:
            sync_file(temporary)
        temporary.replace(path)
    # BaseException, so that Ctrl-C leaves no temporary file either.
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk, if the file system can (some refuse with EINVAL)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append a line in one write, so that those of several processes do not mix. Raises OSError.

    sync: wait until it is on the disk.
    """
    text = f"{find_line_start(path)}{line}\n"
    # Without O_NONBLOCK a named pipe in its place would wait for a reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, text.encode())
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_line_start(path: Path) -> str:
    """Return what to write before the next line of a file: a line feed if its last line was not written to its end.

    Whoever wrote that line was killed, or the disk was full. It then stays a line of its own, which readers pass over.
    """
    try:
        if not _lacks_line_end(path):
            return ""
        time.sleep(_SECONDS_OF_A_WRITE)  # another process may be in the middle of a write
        return "\n" if _lacks_line_end(path) else ""
    except OSError:
        return ""


def _lacks_line_end(path: Path) -> bool:
    descriptor = open_regular(path, follow=True)
    try:
        size = os.fstat(descriptor).st_size
        return size > 0 and os.pread(descriptor, 1, size - 1) not in (b"\n", b"")
    finally:
        os.close(descriptor)


def parse_json_object(line: str | bytes) -> dict[str, Any]:
    """Return the object on a line of a .jsonl file; {} for a line that is torn, damaged or no object.

    A process that was killed, or a full disk, leaves such lines, and others may be appended after them.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_plain_directory(path: Path) -> bool:
    """Return whether the path is a directory, and not a link to one. Raises OSError if that cannot be determined."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _kind(path: Path) -> str:
    try:
        return _name(os.lstat(path).st_mode)
    except OSError:
        return "something else"


def _name(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")
