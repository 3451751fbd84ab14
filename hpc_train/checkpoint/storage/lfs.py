"""The command `lfs` of Lustre. It may be missing, hang, or say anything; what it does is never worth a failed save."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_train.checkpoint.storage.getstripe import Striped, parse
from hpc_train.checkpoint.storage.striping import Layout, setstripe_arguments

SECONDS = 20.0
"""After which it is taken to hang, as it does while a server is away."""
ALREADY_STRIPED = 17
"""EEXIST: a file that has a layout keeps it."""
ROOTS = (Path("/sys/fs/lustre/lov"), Path("/proc/fs/lustre/lov"))
"""Where the client in the kernel shows what it is connected to, in newer releases and in older ones."""
_OST = re.compile(r"\[OST:\d+\]")
_LONGEST = 200


class LfsError(Exception):
    """What went wrong, in one line."""

    def __init__(self, text: str, code: int | None = None, missing: bool = False) -> None:
        super().__init__(text)
        self.code = code
        """Exit code; None if it did not end by itself."""
        self.missing = missing
        """There is no such command."""


@dataclass(frozen=True)
class Answer:
    """What a run that ended with 0 wrote."""

    out: str
    warning: str
    """One line; empty if there was none."""


def lfs(arguments: list[str], seconds: float = SECONDS) -> Answer:
    """Run `lfs`. Raises LfsError.

    Its output goes to files, not pipes, and a hanging one is killed but not waited for: a process that waits for a
    server takes no signal, and neither may its children, who would hold a pipe open.
    """
    command = shutil.which("lfs")
    if command is None:
        raise LfsError("the command lfs is not on PATH", missing=True)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                [command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise LfsError(f"lfs cannot be run: {error.strerror}") from error
        code = _code(process, arguments[0], seconds)
        said, complained = (_text(file) for file in (out, err))
    line = _one_line(complained)
    if code:
        raise LfsError(f"lfs {arguments[0]}: exit {code}: {line or _one_line(said) or 'no reason given'}", code)
    return Answer(said, line)


def set_layout(path: Path, layout: Layout, seconds: float = SECONDS) -> str:
    """Set the layout of a new file, or what new files of a directory get; returns a warning, or nothing.

    Raises LfsError; its code is ALREADY_STRIPED for a file that has a layout, be it empty.
    """
    return lfs(["setstripe", *setstripe_arguments(layout), str(path.absolute())], seconds).warning


def get_layout(path: Path, seconds: float = SECONDS) -> Striped:
    """The layout of a file, or what new files of a directory get. Raises LfsError, also for output that is none."""
    flags = ["-d"] if path.is_dir() else []
    try:
        return parse(lfs(["getstripe", *flags, str(path.absolute())], seconds).out, str(path.absolute()))
    except ValueError as error:
        raise LfsError(f"lfs getstripe: {error}") from error


def count_osts(path: Path, source: str = "", pool: str | None = None, seconds: float = SECONDS) -> int | None:
    """OSTs that files there may be put on; None if nobody says.

    source: of the mount, `<servers>:/<name>`; it tells this file system from others where only the kernel is asked.
    """
    try:
        listed = lfs(["df", *(["-p", pool] if pool else []), str(path.absolute())], seconds).out
    except LfsError:
        return None if pool else _known_to_kernel(source.rpartition("/")[2])
    found = sum(1 for line in listed.splitlines() if _OST.search(line))
    return found or None


def _known_to_kernel(name: str) -> int | None:
    """lov.<name>-*.numobd, as `lctl get_param` reads it."""
    for root in ROOTS:
        for path in sorted(root.glob(f"{name}-*/numobd")) if name else ():
            with suppress(OSError, ValueError):
                return int(path.read_text()) or None
    return None


def _code(process: subprocess.Popen[bytes], what: str, seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        raise LfsError(f"lfs {what}: no answer in {seconds:g} s") from None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 24).decode(errors="replace")


def _one_line(text: str) -> str:
    """Printable, short, without the prefix that every line of it has."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(plain.split()).removeprefix("lfs setstripe: ").removeprefix("error: ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
