"""Follow a job that runs elsewhere by what it writes: progress while it goes on, the first failure when it ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.local.local import LocalJob

from hpc_train.launch.state.reading import open_regular
from hpc_train.runtime.stop import StopRequest
from hpc_train.terminal import one_line
from hpc_train.training.folder import RunFolder
from hpc_train.training.progress import Progress, progress
from hpc_train.training.warning_files import NewWarnings, describe_record

KILLED = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C."""
_POLL_SECONDS = 0.1


class Tail:
    """New whole lines of a growing file, as JSON."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """What was appended since the last call."""
        file = open_regular(self._path)
        if file is None:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


class WarningPrinter(logging.Handler):
    """Prints warnings to stderr, each text once: those of the ranks, and those of this process itself."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning of this process."""
        self.print("error" if record.levelno >= logging.ERROR else "warning", describe_record(record))

    def print(self, level: str, text: str) -> None:
        """Print one line, unless the same text was printed before."""
        if text not in self._shown:
            self._shown.add(text)
            print(f"hpc-train: {level}: {one_line(text)}", file=sys.stderr, flush=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside this context, warnings that hpc_train logs in this process are printed."""
        logger = logging.getLogger("hpc_train")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


class Follower:
    """Shows one attempt of a run as its files grow: the words of its rank 0, all ranks' warnings, and its progress."""

    def __init__(self, folder: RunFolder, attempt: int, log_every: int, printer: WarningPrinter | None = None) -> None:
        self._attempt, self._every = attempt, log_every
        self._warnings, self._printer = NewWarnings(folder.logs(attempt)), printer or WarningPrinter()
        self._events, self._metrics = Tail(folder.events), Tail(folder.metrics)
        self._bar: Progress | None = None
        self._from = 0

    def show(self) -> None:
        """Everything new since the last call."""
        for event in self._events.records():
            if event["attempt"] == self._attempt:
                self._show_event(event)
        for warning in self._warnings.read():
            self._printer.print(warning.level, warning.text)
        self._show_steps()

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_steps(self) -> None:
        for record in self._metrics.records() if self._bar is not None else ():
            if record["step"] > self._from and self._bar is not None:
                self._bar.show(record)

    def _show_event(self, event: dict[str, Any]) -> None:
        self._show_steps()  # those before the event; the last word of a run would otherwise hide its last step
        if event["event"] == "note":
            if event.get("last"):
                self.close()
            print(event["text"], flush=True)
        elif event["event"] in ("start", "resume"):
            # Only now are the lines of steps that are done again gone from metrics.jsonl.
            self._from = event["step"]
            self._bar = progress(event["steps"], self._every)


def watch(
    job: LocalJob[int],
    folder: RunFolder,
    attempt: int,
    log_every: int,
    stop: StopRequest,
    printer: WarningPrinter | None = None,
) -> int:
    """Show a local job until it ends; returns its exit code.

    The first Ctrl-C and the first stop signal are passed on to the ranks. A second Ctrl-C kills them.
    """
    process, follower = job._process, Follower(folder, attempt, log_every, printer)
    assert process is not None
    try:
        _follow(process, follower, stop)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)  # the controller began a session of its own
        process.wait()
        return KILLED
    finally:
        follower.close()
    code = process.wait()
    return 128 - code if code < 0 else code


def _follow(process: subprocess.Popen[bytes], follower: Follower, stop: StopRequest) -> None:
    forwarded = False
    while process.poll() is None:
        follower.show()
        if stop.requested and not forwarded:
            forwarded = True
            print(f"{stop.signal_name}: asking the ranks to save and stop", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGUSR2)
        time.sleep(_POLL_SECONDS)
    follower.show()
