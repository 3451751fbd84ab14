"""Inject a fault at any system call that touches the disk: the process is killed there, or the call fails.

The processes and files are real, and only the n-th call is changed. It does not need ptrace, so it runs anywhere.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

CALLS = ("mkdir", "open", "posix_fallocate", "pwrite", "ftruncate", "fsync", "rename")
"""What a save does to make things."""
EVERY = (*CALLS, "replace", "link", "unlink", "rmdir", "scandir", "listdir", "stat", "preadv", "io.open")
"""All that the room does to a disk, reading and removing too."""
_BY_DESCRIPTOR = ("posix_fallocate", "pwrite", "ftruncate", "fsync", "preadv")
Fault = Callable[[str, tuple[Any, ...]], tuple[Any, ...] | None]
"""Raises, or gives other arguments for the call; None: it is made as it is."""


def kill(call: str, args: tuple[Any, ...]) -> NoReturn:
    """Send SIGKILL before the call; half-way through it if it writes."""
    if call == "pwrite":
        descriptor, data, offset = args
        os.pwritev(descriptor, [data[: len(data) // 2]], offset)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived")


def fails(number: int) -> Fault:
    """Return a fault: the call fails with this errno."""

    def fault(call: str, args: tuple[Any, ...]) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fault


disk_full = fails(errno.ENOSPC)


def torn(call: str, args: tuple[Any, ...]) -> None:
    """Put half of the bytes of a write on the disk and fail; another call just fails."""
    if call == "pwrite":
        os.pwritev(args[0], [args[1][: len(args[1]) // 2]], args[2])
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def short(call: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments with which a write or a read does only part of what was asked for."""
    if call == "pwrite" and len(args[1]) > 1:
        return (args[0], args[1][: len(args[1]) // 3 + 1], *args[2:])
    if call == "preadv":
        return (args[0], _third([memoryview(buffer) for buffer in args[1]]), *args[2:])
    return None


def _third(buffers: list[memoryview]) -> list[memoryview]:
    """Return a third of the bytes, or a little more than a page."""
    left = max(4097, sum(map(len, buffers)) // 3 + 1)
    found = []
    for buffer in buffers:
        found.append(buffer[: max(left, 0)])
        left -= len(buffer)
    return found


def is_killed(work: Callable[[], object]) -> bool:
    """Return whether a process that calls this function is killed while it does."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


@contextmanager
def at_call(
    number: int, fault: Fault, calls: tuple[str, ...] = CALLS, under: Path | None = None, lasting: bool = False
) -> Iterator[list[str]]:
    """Apply `fault` to the `number`-th call (from 1; 0: none) of `calls`; yields the calls made so far.

    under: count only calls on files below this folder. lasting: apply the fault to all later calls, too.
    """
    made: list[str] = []
    counting = threading.Lock()

    def meet(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if under is not None and not path_of(name, args, named).is_relative_to(under):
            return args
        with counting:
            made.append(name)
            mine = len(made)
        if mine == number or (lasting and 0 < number < mine):
            return fault(name, args) or args
        return args

    with _wrapped(calls, meet):
        yield made


@contextmanager
def at_all(calls: tuple[str, ...], fault: Fault) -> Iterator[list[str]]:
    """Apply `fault`, which may let the call pass, to every call of `calls`; yields the calls that were made."""
    with at_call(1, fault, calls, lasting=True) as made:
        yield made


def path_of(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Path:
    """Return the file or directory that a call is about."""
    what: Any = args[0] if args else "."
    if name in _BY_DESCRIPTOR or isinstance(what, int):
        return of_descriptor(what)
    at = named.get("dir_fd")
    return Path(os.path.abspath((of_descriptor(at) if at is not None else Path()) / os.fspath(what)))  # noqa: PTH100


def of_descriptor(descriptor: int) -> Path:
    """Return the present path of an open file."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()


@contextmanager
def _wrapped(
    calls: tuple[str, ...], meet: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]
) -> Iterator[None]:
    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: real(*meet(name, args, named), **named)

    with ExitStack() as stack:
        for name in calls:
            module, attribute = (io, "open") if name == "io.open" else (os, name)
            stack.enter_context(patch.object(module, attribute, wrap(name, getattr(module, attribute))))
        yield
