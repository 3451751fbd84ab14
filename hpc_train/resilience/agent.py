"""The agent of one node: watches its ranks and reports what it sees, a line of JSON each second on stdout.

`python -m hpc_train.resilience.agent LOGS HANG_SETTINGS`, started by the supervisor as a job step of its own on every
node. It opens no port and reads nothing from shared storage. It ends when its standard input does: then the supervisor
is gone or has no more need of it. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.resilience.deadlines import limits_from_settings
from hpc_train.resilience.heartbeat import Phase, remove_entries
from hpc_train.resilience.watch import LOOK_SECONDS, NodeWatch, RankView

REPORT_SECONDS = 1.0
"""Between two lines."""


def encode_report(host: str, views: Sequence[RankView]) -> str:
    """Return a report as one line."""
    rows = [
        [view.task, int(view.phase), view.step, round(view.silent, 1), round(view.deadline, 1), view.state]
        for view in views
    ]
    return json.dumps({"host": host, "ranks": rows}, separators=(",", ":"))


def decode_report(line: str) -> tuple[str, list[RankView]] | None:
    """Return the host and the views of a report; None for any other line."""
    try:
        value: dict[str, Any] = json.loads(line)
        host = str(value["host"])
        return host, [
            RankView(int(task), Phase(phase), int(step), float(silent), float(deadline), str(state), host)
            for task, phase, step, silent, deadline, state in value["ranks"]
        ]
    except (ValueError, KeyError, TypeError):
        return None


def run_agent(logs: Path, settings: dict[str, float]) -> None:
    """Report until standard input ends."""
    host, watch, due = socket.gethostname(), NodeWatch(logs, limits_from_settings(settings)), 0.0
    while True:
        views = watch.look()
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            os.write(1, encode_report(host, views).encode() + b"\n")
        readable, _, _ = select.select([0], [], [], LOOK_SECONDS)
        if readable and not os.read(0, 4096):
            remove_entries(logs)
            return


def main(logs: str, settings: str) -> int:
    """Watch until there is nobody to report to."""
    # These go to all steps of the job: they are meant for the ranks.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        run_agent(Path(logs), json.loads(settings))
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
