"""The process that holds the ranks of a local job: submitit's controller, but if one fails or hangs, all end.

Ranks that go on when some of them are lost (parallel.sync.lost_after_seconds) say so by a file; then a rank that fails
ends alone.

Started as `python -m hpc_train.launch.local.controller FOLDER LOGS LAUNCHER`, with stop signals blocked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from submitit.local.local import Controller

from hpc_train.errors import EXIT_FAILED, EXIT_REQUEUE
from hpc_train.launch.rank_stacks import STACK_SIGNAL
from hpc_train.launch.recovery.failures import EXIT_CODES
from hpc_train.launch.state.attempts import write_result_marker
from hpc_train.launch.watching import (
    HangResponse,
    describe_blindness,
    read_watch_settings,
    report_notice,
    report_watch,
)
from hpc_train.resilience.notices import NoticeWatch
from hpc_train.runtime.stop_request import STOP_SIGNALS, unblock_stop_signals
from hpc_train.training.records.run_records import LOSS_ALLOWED

_GRACE_SECONDS = 2.0
"""How long the other tasks have, once one has failed, to end by themselves and to write down what they saw of that."""
_POLL_SECONDS = 0.05


class RankController(Controller):
    """Starts the tasks, forwards stop signals to them, and ends all of them when one fails."""

    def __init__(self, folder: Path, logs: Path, launcher: int) -> None:
        """Install the stop handlers.

        launcher: process id of the parent, which may be gone already: getppid would come too late.
        """
        super().__init__(folder)
        self._logs = logs
        self._parent = launcher
        self._exits: list[tuple[int, int]] = []
        settings = read_watch_settings(logs)
        self._watcher = HangResponse(logs, settings, self._request_stacks) if settings else None
        self._notices = NoticeWatch(**settings.notice) if settings else None
        self._hung = self._reported_blind = False
        for number in STOP_SIGNALS:
            signal.signal(number, lambda sent, _frame: self._forward_signal(signal.Signals(sent)))

    def run(self, max_retry: int = 1) -> int:  # type: ignore[override]
        """Run all tasks once; returns the job's exit code: that of the first task that did not end well."""
        try:
            self.start_tasks()  # with the signals still blocked, for them and for us
            unblock_stop_signals()
            self._wait_for_tasks()
        finally:
            self.kill_tasks()
            if self._watcher:
                self._watcher.close()
            if self._notices:
                self._notices.close()
        with suppress(OSError):  # a full disk: the exit code has to do
            (self._logs / EXIT_CODES).write_text(json.dumps(self._exits))
        if self._hung:
            return EXIT_FAILED
        codes = dict(self._exits)
        # Task 0 serves the store, without which no rank goes on: it ends as the job does.
        if self._allows_losses() and codes.get(0) in (0, EXIT_REQUEUE):
            return codes[0]
        return _shell_exit_code(next((code for _, code in self._exits if code != 0), 0))

    def _wait_for_tasks(self) -> None:
        """Return when every task has ended, or a moment after the first that failed, or when they hang."""
        deadline = None
        while True:
            self._collect_exits()
            if len(self._exits) == len(self.tasks):
                return
            # Ranks agree on a stop, so after one that ended with it the others are about to.
            failed = any(code not in (0, EXIT_REQUEUE) for _, code in self._exits)
            if failed and deadline is None and not self._allows_losses():
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
            if os.getppid() != self._parent:  # whoever asked for this job is gone: save and stop
                self._parent = os.getppid()
                self._forward_signal(signal.SIGTERM)
            self._handle_notice()
            if deadline is None and self._watcher and self._watcher.must_end():
                self._hung = True
                return
            time.sleep(_POLL_SECONDS)

    def _allows_losses(self) -> bool:
        return (self._logs / LOSS_ALLOWED).exists()

    def _handle_notice(self) -> None:
        """Ask the ranks to save and stop if this machine is about to be taken away."""
        if self._notices is None:
            return
        notice = self._notices.poll()
        if self._notices.failure and not self._reported_blind:
            self._reported_blind = True
            report_watch(self._logs, describe_blindness(socket.gethostname(), self._notices.failure))
        if not notice:
            return
        self._notices.close()
        self._notices = None
        report_notice(self._logs, socket.gethostname(), notice)
        self._forward_signal(signal.SIGUSR2)

    def _request_stacks(self) -> None:
        self._forward_signal(STACK_SIGNAL)

    def _collect_exits(self) -> None:
        exited = {task for task, _ in self._exits}
        for index, task in enumerate(self.tasks):
            code = task.poll()
            if code is not None and index not in exited:
                self._exits.append((index, code))


def _shell_exit_code(code: int) -> int:
    """Convert Popen's return code to a shell's: 128 + n for a task that signal n ended."""
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    logs = Path(sys.argv[2])
    code = RankController(Path(sys.argv[1]), logs, int(sys.argv[3])).run()
    write_result_marker(logs, code)
    sys.exit(code)
