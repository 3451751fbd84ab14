"""Find out what the ranks of a stuck run are doing: each writes its Python stack into its log on request.

The request is SIGUSR1, which faulthandler answers without the interpreter: a rank in an endless loop, or one that waits
in a collective, also answers. A rank that is stopped, or whose node is gone, does not.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_train.launch.state.attempts import read_rank_entries
from hpc_train.regular_files import read_json
from hpc_train.units import join_first

STACK_SIGNAL = signal.SIGUSR1
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+.*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_WAITS = re.compile(
    r"\b(?:wait|join|result|acquire|get|recv|select|poll|accept|barrier|all_reduce|all_gather\w*|reduce_scatter\w*)\("
)
"""Calls that return when another rank, or a thread that waits for one, has done its part."""
_WAITING_CODE = re.compile(
    r"/torch/|/hpc_train/runtime/store/|/python3[^/]*/(?:threading|queue|selectors|socket)\.py$|/python3[^/]*/concurrent/"
)
_ANSWER_BYTES = 1 << 16
"""How much of what a log has since the request is searched for the answer."""
_POLL_SECONDS = 0.1
_MAX_PLACES = 3
"""Groups of ranks shown in one line; each group lists only its first few ranks by number."""
_MAX_RANKS = 8


def answer_stack_requests() -> None:
    """Write the stacks of this process's threads into its log (stderr) at every SIGUSR1 from now on."""
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)


@dataclass(frozen=True)
class RankStack:
    """One rank's answer."""

    name: str
    """`rank 1 (task 1 on n2)`; `task 1` before the ranks have met."""
    place: str | None
    """Function and line the rank is in; None if it did not answer."""
    task: int = -1
    waits: bool = False
    """Whether it most likely waits there for another rank."""


class StackRequest:
    """Asks all tasks of an attempt for their stacks, and reads the answers later."""

    def __init__(self, logs: Path, send: Callable[[], None]) -> None:
        """send: signals every rank. logs: the attempt's log directory."""
        self._logs, self._tasks = logs, _list_expected_tasks(logs)
        # Answers are appended to the logs: whatever lies before these sizes is old.
        self._sizes = {task: _measure_file(_find_log(logs, task)) for task in self._tasks}
        self.sent = time.monotonic()
        send()

    def collect(self, deadline: float, unable: Collection[int] = ()) -> list[RankStack]:
        """Return the answers of all tasks, those that have none by `deadline` (as time.monotonic()) included.

        unable: tasks that cannot answer and are not waited for.
        """
        places: dict[int, _Frame | None] = {}
        while True:
            for task in self._tasks:
                # An answer is complete once its innermost frame can be read; others are read again.
                if places.get(task) is None:
                    places[task] = _find_innermost_frame(_find_log(self._logs, task), self._sizes[task])
            if time.monotonic() > deadline or all(place or task in unable for task, place in places.items()):
                break
            time.sleep(_POLL_SECONDS)
        names = _rank_names(self._logs)
        return [_make_stack(names.get(task, f"task {task}"), task, places[task]) for task in self._tasks]


def collect_stacks(logs: Path, send: Callable[[], None], seconds: float) -> list[RankStack]:
    """Ask all tasks of an attempt for their stacks by calling `send`, and wait up to `seconds` for the answers."""
    request = StackRequest(logs, send)
    return request.collect(time.monotonic() + seconds)


def _make_stack(name: str, task: int, frame: _Frame | None) -> RankStack:
    return RankStack(name, None, task) if frame is None else RankStack(name, frame.place, task, frame.waits)


def find_odd_task(stacks: Sequence[RankStack]) -> int | None:
    """Return the one task that did not answer, or is in code of its own while all others wait; None if none is."""
    silent = [stack.task for stack in stacks if stack.place is None]
    busy = [stack.task for stack in stacks if stack.place is not None and not stack.waits]
    odd = silent or busy
    return odd[0] if len(odd) == 1 and len(stacks) > 1 else None


def describe_stacks(stacks: Iterable[RankStack]) -> str:
    """Return one line: the ranks that did not answer; otherwise where the ranks are, outliers first."""
    stacks = list(stacks)
    silent = [stack.name for stack in stacks if stack.place is None]
    if silent:
        return f"{join_first(silent, _MAX_RANKS)} did not answer (stopped, or on a node that is gone)"
    groups: dict[str, list[str]] = {}
    for stack in stacks:
        groups.setdefault(str(stack.place), []).append(stack.name)
    waiting = {stack.place for stack in stacks if stack.waits}
    # Ranks that do not wait come first, then small groups: in a hang
    # most ranks wait in the same collective for one that does not.
    shown = sorted(groups.items(), key=lambda pair: (pair[0] in waiting, len(pair[1])))
    more = f"; and {len(shown) - _MAX_PLACES} more places" if len(shown) > _MAX_PLACES else ""
    return "; ".join(f"{join_first(names, _MAX_RANKS)} was in {place}" for place, names in shown[:_MAX_PLACES]) + more


class _Frame(NamedTuple):
    """The innermost function of a stack."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-3:])}:{self.line})"

    @property
    def waits(self) -> bool:
        """Whether it is in code of torch or of Python that waits, or at a line that calls what waits."""
        if _WAITING_CODE.search(self.file):
            return True
        return _WAITS.search(linecache.getline(self.file, self.line)) is not None


def _list_expected_tasks(logs: Path) -> list[int]:
    """Return the tasks the run was frozen for or, if that cannot be read, those that have a log."""
    try:
        return list(range(int(read_json(logs.parents[1] / "job.json")["ranks"])))
    except (OSError, ValueError, KeyError, TypeError):
        matches = (re.fullmatch(r"task-(\d+)\.log", path.name) for path in logs.glob("task-*.log"))
        return sorted(int(match[1]) for match in matches if match)


def _rank_names(logs: Path) -> dict[int, str]:
    named = {}
    for entry in read_rank_entries(logs):
        host = str(entry.get("host", "")).partition(".")[0]
        where = f" on {host}" if host else ""
        named[int(entry["process"])] = f"rank {entry['rank']} (task {entry['process']}{where})"
    return named


def _find_log(logs: Path, task: int) -> Path:
    return logs / f"task-{task}.log"


def _measure_file(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _find_innermost_frame(path: Path, since: int) -> _Frame | None:
    """Return where a rank is, from the stacks written after byte `since`; None if they are not there (yet).

    That is the innermost function of its main thread or, if that waits, of a thread that does not, such as one that
    saves.
    """
    try:
        # Without blocking: whoever looks into a stuck run must not get stuck at a pipe with a log's name.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # The stacks come at once after the request, so the first part of what is new is enough.
        text = os.pread(descriptor, _ANSWER_BYTES, since)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    frames = _parse_frames(text.decode(errors="replace"))
    main = frames.pop("Current thread", None)
    if main is None or not main.waits:
        return main
    return next((frame for frame in frames.values() if not frame.waits), main)


def _parse_frames(text: str) -> dict[str, _Frame]:
    """Return the innermost function of each thread, by the words before its stack; the current one comes last."""
    innermost: dict[str, _Frame] = {}
    headers = list(_THREAD.finditer(text))
    for number, header in enumerate(headers):
        end = headers[number + 1].start() if number + 1 < len(headers) else len(text)
        frame = _FRAME.search(text, header.end(), end)
        if frame is not None:
            name = header[1] if header[1] == "Current thread" else header[0]
            innermost[name] = _Frame(frame["file"], int(frame["line"]), frame["function"])
    return innermost
