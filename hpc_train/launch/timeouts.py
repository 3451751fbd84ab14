"""Recognise ranks that gave up waiting: their error is a consequence, and the rank they waited for is the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from hpc_train.launch.ranks import entries
from hpc_train.regular_files import read_text

_STOPPED_WAITING = re.compile(
    r"application timeout caused pair closure|timed out waiting \d+ ?ms for (recv|send)|collective operation timeout"
    r"|wait timeout after \d+ ?ms|timed out after \d+ ?m?s(econds)? waiting for|socket ?timeout",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL's watchdog, and torch's stores."""
_SHOWN = 6


def stopped_waiting(message: str) -> bool:
    """Whether an error says that its rank gave up waiting for another rank."""
    return _STOPPED_WAITING.search(message) is not None


def silent_ranks(logs: Path) -> list[int]:
    """Return the tasks of an attempt that reported no error; [] if its rank map cannot be read."""
    tasks = sorted(int(entry["process"]) for entry in entries(logs) if "process" in entry)
    return [task for task in tasks if not (logs / f"task-{task}.failure.json").exists()]


def describe_timeout(logs: Path, silent: Sequence[int]) -> str:
    """Say in one line who gave up waiting, for whom, and after how long. silent: tasks without an error."""
    known = {int(entry["process"]): entry for entry in entries(logs)}
    waited = [task for task in sorted(known) if task not in silent]
    which = "which reported nothing: it hangs" if len(silent) == 1 else "which reported nothing: one of them hangs"
    return (
        f"{_named(waited, known, hosts=False)} stopped waiting{_seconds(logs)} for "
        f"{_named(silent, known, hosts=True)}, {which}, or is far slower than the others"
    )


def _named(tasks: Sequence[int], known: dict[int, dict[str, object]], hosts: bool) -> str:
    names = []
    for task in tasks[:_SHOWN]:
        host = str(known[task].get("host", "")).partition(".")[0]
        names.append(f"{known[task].get('rank', task)}" + (f" (task {task} on {host})" if hosts else ""))
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return f"rank{'s' if len(tasks) > 1 else ''} {', '.join(names)}{more}"


def _seconds(logs: Path) -> str:
    try:
        seconds = json.loads(read_text(logs.parents[1] / "job.json"))["config"]["launch"]["timeout_seconds"]
        return f" after launch.timeout_seconds={int(seconds)}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
