"""Start Python programs as forks of this process: new interpreters would each import torch anew."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

REAL_POPEN = subprocess.Popen


class ForkedProgram:
    """A forked process with the part of Popen's interface that the benchmarks use for `python -m MODULE WORDS`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        inside, outside = os.pipe()
        ready, prepared = os.pipe()
        start = multiprocessing.get_context("fork").Process
        self._process = start(target=_run_module, args=(command[2:], env, preexec_fn, inside, prepared))
        self._process.start()
        os.close(inside)
        os.close(prepared)
        os.read(ready, 1)  # as Popen does, return when preexec_fn has
        os.close(ready)
        self.stdin: BinaryIO | None = os.fdopen(outside, "wb")
        if stdin is None:
            self.stdin.close()
            self.stdin = None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def popen_by_fork(command: Sequence[str], **options: Any) -> Any:
    """Start a module of Python by a fork, and anything else as Popen does."""
    if list(command[:2]) == [sys.executable, "-m"]:
        return ForkedProgram(command, **options)
    return REAL_POPEN(command, **options)


def _run_module(
    words: Sequence[str],
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None,
    stdin: int,
    prepared: int,
) -> None:
    """Do what `python -m` does with these words."""
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    os.write(prepared, b"1")
    sys.stdin = os.fdopen(stdin)
    sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")  # not pytest's
    sys.argv = list(words)
    warnings.simplefilter("ignore")  # pytest makes errors of some
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
