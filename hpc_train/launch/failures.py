"""Which task of an attempt failed first, and how: its own word, else what those who watched it saw."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.ranks import entries
from hpc_train.launch.state.reading import read_text
from hpc_train.launch.timeouts import describe_timeout, silent_ranks, stopped_waiting
from hpc_train.training.failure import Failure, first_failure

EXITS = "exits.json"
"""In an attempt's log directory, by the local pool: [[task, exit code], ...] in the order of their ends."""
SRUN_ERRORS = "srun.err"
_SRUN_LINE = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_OUT_OF_MEMORY = re.compile(r"srun: error: (?P<host>\S+): tasks? [\d,-]+: Out Of Memory")
"""With which of its tasks on a node this is said tells nothing: Slurm says it of all that end then."""
_DEADLY_WORDS = ("Killed", "Segmentation fault", "Bus error", "Illegal instruction", "Out Of Memory")
_DEADLY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
"""A task that one of these ended, or that left by os._exit, is why its peers fail, never the other way round."""


@dataclass(frozen=True)
class FirstError:
    """The task that failed first."""

    task: int
    text: str
    """For a person: one line, or with the traceback after it."""
    host: str = ""
    traceback: str = ""
    """Of the task's own failure; "" where it left no word, or only the user is to blame."""
    summary: tuple[str, ...] = ()
    """See training.failure.Failure."""
    besides: str = ""
    """What srun says of the step that the task was in."""

    @property
    def line(self) -> str:
        """All in one line: of a traceback the exception."""
        said = ": ".join([self.text.splitlines()[0].rstrip(":"), *_exception(self.traceback)])
        return f"{said} ({self.besides})" if self.besides else said

    def brief(self, log: Path) -> str:
        """Format for a terminal: who and what, the user's own lines, and where to find the whole traceback."""
        if not self.traceback or not self.summary:
            return self.text
        first, *frames = self.summary
        lines = [f"task {self.task} on {self.host} failed first: {first}", *(f"  {frame}" for frame in frames)]
        return "\n".join([*lines, f"  the whole traceback: {log}"])


def _exception(traceback: str) -> list[str]:
    """The line below the last frame; what libraries write after it may be anything."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    frame = max((index for index, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return [line for line in lines[frame + 1 :] if not line[0].isspace()][:1] or lines[-1:]


def first_error(logs: Path) -> FirstError | None:
    """The first failure of the attempt whose log directory this is; None if nobody left a trace of one.

    Only the local pool sees the order in which tasks end; srun does not tell it, so there a task that was ended from
    outside counts only if all others merely lost a peer.
    """
    failure = first_failure(logs)
    if failure is not None and stopped_waiting(failure.message) and (silent := silent_ranks(logs)):
        return FirstError(silent[0], describe_timeout(logs, silent))
    dead = _seen_by_the_pool(logs, failure)
    if dead is None and (failure is None or failure.lost_peer):
        dead = _seen_by_srun(logs)
    if dead is not None or failure is None:
        return dead
    besides = "Out Of Memory" if _OUT_OF_MEMORY.search(_srun_errors(logs)) else ""
    trace = "" if failure.user_error else failure.traceback
    return FirstError(failure.task, failure.text().strip(), failure.host, trace, tuple(failure.summary), besides)


def explain(logs: Path) -> str | None:
    """Why a local attempt failed, by the rank that failed first; None if no rank left a trace."""
    if not (logs / EXITS).exists():
        return "the process that held the ranks was killed; the ranks were told to save and stop"
    error = first_error(logs)
    return error.brief(logs / f"task-{error.task}.log") if error else None


def _is_silent(logs: Path, task: int | str) -> bool:
    return not (logs / f"task-{task}.failure.json").exists()


def _seen_by_the_pool(logs: Path, failure: Failure | None) -> FirstError | None:
    text = read_text(logs / EXITS)
    exits: list[tuple[int, int]] = json.loads(text) if text else []
    silent = [(task, code) for task, code in exits if code not in (0, EXIT_REQUEUE) and _is_silent(logs, task)]
    dead = next((item for item in silent if item[1] > 0 or -item[1] in _DEADLY), None)
    if dead is None and (failure is not None or not silent):
        return None
    task, code = dead or silent[0]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code} without a word"
    return FirstError(task, f"task {task} {how}; its log: {logs / f'task-{task}.log'}")


def _seen_by_srun(logs: Path) -> FirstError | None:
    """The first task that a signal ended, as srun reports it, with no word of its own: the one that its peers lost."""
    text = _srun_errors(logs)
    for line in _SRUN_LINE.finditer(text):
        task = re.split("[,-]", line["tasks"])[0]
        if line["how"].startswith(_DEADLY_WORDS) and _is_silent(logs, task):
            how = f"task {line['tasks']} on {line['host']} was ended from outside: {line['how']}"
            return FirstError(int(task), how, line["host"])
    memory = _OUT_OF_MEMORY.search(text)
    return _without_memory(logs, memory["host"]) if memory else None


def _srun_errors(logs: Path) -> str:
    return read_text(logs / SRUN_ERRORS)


def _without_memory(logs: Path, host: str) -> FirstError | None:
    """The task of this node that left no word; without a rank map, of any."""
    short = host.partition(".")[0]
    elsewhere = {int(it["process"]) for it in entries(logs) if str(it.get("host")).partition(".")[0] != short}
    there = {int(path.stem.removeprefix("task-")) for path in logs.glob("task-*.log")} - elsewhere
    silent = sorted(task for task in there if _is_silent(logs, task))
    if not silent:
        return None
    return FirstError(silent[0], f"task {silent[0]} on {host} was ended from outside: Out Of Memory", host)
