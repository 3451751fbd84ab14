"""Run an hpc-train command as several local ranks, each told its rank by environment variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.05


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that cleanup code runs."""
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def postpone_sigterm() -> Iterator[None]:
    """Let SIGTERM wait until the code inside has run.

    `exit_on_sigterm` raises wherever the signal arrives. Inside Popen that would be after the process has started and
    before the caller has a handle to end it.
    """
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    # Deliver the postponed signal to the handler that was installed before.
    if arrived:
        signal.raise_signal(signal.SIGTERM)


def run_local_ranks(arguments: Sequence[str], ranks: int, threads: int) -> int:
    """Run `hpc-train <arguments>` as `ranks` processes; return the first exit code that is not 0.

    Their output is this process's. None of them outlives the failure of another or a stop of this process.
    """
    command = [sys.executable, "-m", "hpc_train", *arguments]
    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as meeting:
        return run_processes((command, _make_environment(rank, ranks, threads, meeting)) for rank in range(ranks))


def run_processes(calls: Iterable[tuple[Sequence[str], Mapping[str, str]]]) -> int:
    """Run one process for each (command, environment); return the first exit code that is not 0.

    None of them outlives the failure of another, or a SIGTERM inside of exit_on_sigterm.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, environment in calls:
            with postpone_sigterm():
                processes.append(subprocess.Popen(command, env=environment))
        return wait_for_ranks(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _make_environment(rank: int, ranks: int, threads: int, meeting: str) -> dict[str, str]:
    return {
        **os.environ,
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
        "SUBMITIT_LOCAL_NTASKS": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        RENDEZVOUS_VARIABLE: meeting,
    }


def wait_for_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended, or until shortly after the first failure, so that others can still report why.

    Returns the first exit code that is not 0.
    """
    failed, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        codes = [process.returncode for process in processes]
        if not failed and any(codes):
            failed, deadline = next(filter(None, codes)), time.monotonic() + _GRACE_SECONDS
        time.sleep(_POLL_SECONDS)
    failed = failed or next((process.returncode for process in processes if process.returncode), 0)
    return 128 - failed if failed < 0 else failed
