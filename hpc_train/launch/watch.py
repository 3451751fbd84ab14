"""Follow a job that runs elsewhere by what it writes: progress while it goes on, the first failure when it ends."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from submitit.local.local import LocalJob

from hpc_train.launch.controller import EXITS
from hpc_train.runtime.stop import StopRequest
from hpc_train.training.failure import Failure, first_failure
from hpc_train.training.folder import RunFolder
from hpc_train.training.progress import Progress, progress

_POLL_SECONDS = 0.1


class Tail:
    """New whole lines of a growing file, as JSON."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """What was appended since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


class Follower:
    """Shows one attempt of a run as its files grow: the words of its rank 0, and its progress."""

    def __init__(self, folder: RunFolder, attempt: int, log_every: int) -> None:
        self._attempt, self._every = attempt, log_every
        self._events, self._metrics = Tail(folder.events), Tail(folder.metrics)
        self._bar: Progress | None = None
        self._from = 0

    def show(self) -> None:
        """Everything new since the last call."""
        for event in self._events.records():
            if event["attempt"] == self._attempt:
                self._show_event(event)
        for record in self._metrics.records() if self._bar is not None else ():
            if record["step"] > self._from and self._bar is not None:
                self._bar.show(record)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "note":
            if event.get("last"):
                self.close()
            print(event["text"], flush=True)
        elif event["event"] in ("start", "resume"):
            # Only now are the lines of steps that are done again gone from metrics.jsonl.
            self._from = event["step"]
            self._bar = progress(event["steps"], self._every)


def watch(job: LocalJob[int], folder: RunFolder, attempt: int, log_every: int, stop: StopRequest) -> int:
    """Show a local job until it ends; returns its exit code. Ctrl-C and stop signals are passed on to the ranks."""
    process, follower, forwarded = job._process, Follower(folder, attempt, log_every), False
    assert process is not None
    signal.signal(signal.SIGINT, lambda *_: stop.ask("SIGINT"))
    while process.poll() is None:
        follower.show()
        if stop.requested and not forwarded:
            forwarded = True
            print(f"{stop.signal_name}: asking the ranks to save and stop", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGUSR2)
        time.sleep(_POLL_SECONDS)
    follower.show()
    follower.close()
    return int(process.returncode)


def explain(folder: RunFolder, attempt: int) -> str | None:
    """Why an attempt failed, by the rank that failed first; None if no rank left a trace."""
    logs = folder.logs(attempt)
    killed = _killed(logs)
    if killed is not None:
        task, number = killed
        return f"task {task} was killed by {signal.Signals(number).name}; its log: {folder.log(attempt, task)}"
    failure: Failure | None = first_failure(logs)
    return failure.text() if failure else None


def _killed(logs: Path) -> tuple[int, int] | None:
    """(task, signal) of the first task that a signal ended: its peers fail because of it, never the other way round."""
    if not (logs / EXITS).exists():
        return None
    exits: list[tuple[int, int]] = json.loads((logs / EXITS).read_text())
    deadly = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
    return next(((task, -code) for task, code in exits if -code in deadly), None)
