"""Record which checkpoint the ranks are loading, and which ones have ended them while they did.

Damage shows in the digests of a checkpoint, and an older one is loaded at once. But a load can also end the ranks, with
an exception of a library or by a signal, and then every start ends at the same checkpoint. So the ranks leave a file
while they load, from which the process that decides after a fault sees what they were doing when they died
(hpc_train.launch.recovery.crashing_checkpoints). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.regular_files import parse_json_object, read_text, write_private_file

LOADING = "loading"
"""File in an attempt's log directory while its ranks load a checkpoint of the run: the step. In a `restart` event: the
step whose load ended the ranks."""
PASSED_OVER = "passed_over"
"""Event: what was done about a checkpoint whose load has ended the ranks."""
MARKED, MARK_REMOVED = "marked bad", "mark removed"
"""What a PASSED_OVER event says was done."""


def note_load(logs: Path, step: int) -> None:
    """Record that the ranks of an attempt begin to load this step. A full disk is ignored: loading needs no room."""
    with suppress(OSError):
        write_private_file(logs / LOADING, f"{step}\n")


def end_load(logs: Path) -> None:
    """Record that the ranks of an attempt have loaded what they wanted."""
    with suppress(OSError):
        (logs / LOADING).unlink(missing_ok=True)


def read_load(logs: Path) -> int | None:
    """Return the step that the ranks of an attempt were loading when they ended; None if they were not loading."""
    try:
        return int(read_text(logs / LOADING))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class LoadHistory:
    """Loads of checkpoints that ended the ranks, since the last one that did not."""

    ended: tuple[int, ...] = ()
    """Steps whose loads ended the starts before, oldest first."""
    passed_over: frozenset[int] = frozenset()
    """Steps that were marked bad for that."""


def read_load_history(events: Iterable[Mapping[str, Any]], attempt: int, first_attempt: int) -> LoadHistory:
    """Return what has become of loads before this attempt's; a submission begins a new history.

    events: of the run. Those of this attempt are by a process that decided about it before, and was killed.
    first_attempt: of those that were started by the same command or submission.
    """
    history = LoadHistory()
    for event in events:
        if event["event"] in ("start", "resume") or event["attempt"] < first_attempt:
            history = LoadHistory()
        elif event["attempt"] == attempt:
            continue
        elif event["event"] == "restart" and type(event.get(LOADING)) is int:
            history = LoadHistory((*history.ended, event[LOADING]), history.passed_over)
        elif event["event"] == PASSED_OVER:
            history = LoadHistory(history.ended, _apply_event(history.passed_over, event))
    return history


def find_passed_over(events: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """Return the steps that are passed over: marked bad as their loads ended the ranks, and not saved again since."""
    steps: frozenset[int] = frozenset()
    for event in events:
        if event["event"] == "checkpoint":
            steps -= _read_step(event)
        elif event["event"] == PASSED_OVER:
            steps = _apply_event(steps, event)
    return steps


def _apply_event(steps: frozenset[int], event: Mapping[str, Any]) -> frozenset[int]:
    """Return the steps that are marked after a PASSED_OVER event. steps: those that were marked before it."""
    if event.get("action") == MARKED:
        return steps | _read_step(event)
    return steps - _read_step(event) if event.get("action") == MARK_REMOVED else steps


def _read_step(event: Mapping[str, Any]) -> frozenset[int]:
    """Return the step of an event, as a set; the empty set for a value that is no step."""
    step = event.get("step")
    return frozenset({step}) if type(step) is int else frozenset()


def read_passed_over(path: Path) -> frozenset[int]:
    """Return what find_passed_over finds in a file of events; nothing if it cannot be read."""
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return frozenset()
    return find_passed_over(event for event in map(parse_json_object, lines) if "event" in event)
