"""Faults at any call of the operating system: the process is killed there, or the call fails.

Real processes, real files: only what the n-th call does is changed.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

CALLS = ("mkdir", "open", "posix_fallocate", "pwrite", "ftruncate", "fsync", "rename")
Fault = Callable[[str, tuple[Any, ...]], None]


def kill(call: str, args: tuple[Any, ...]) -> NoReturn:
    """SIGKILL before the call; half-way through it if it writes."""
    if call == "pwrite":
        descriptor, data, offset = args
        os.pwritev(descriptor, [data[: len(data) // 2]], offset)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived")


def disk_full(call: str, args: tuple[Any, ...]) -> NoReturn:
    """The call fails."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def at_call(number: int, fault: Fault) -> Iterator[list[str]]:
    """Let the `number`-th call (from 1; 0: none) of CALLS be met by `fault`; gives the calls made so far."""
    made: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            made.append(name)
            if len(made) == number:
                fault(name, args)
            return real(*args, **named)

        return call

    with patch.multiple(os, **{name: wrapped(name, getattr(os, name)) for name in CALLS}):
        yield made
