"""Find the task of an attempt that failed first, and how: by its own report, else by its exit code or srun's messages.

A rank that gave up waiting is a consequence; the rank it waited for is the cause. A batch script runs this module
when its ranks did not end well (`python -m`), to record the failure and to explain it in the job's log.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.launch.command_output import print_to_job_log
from hpc_train.launch.state.attempts import read_attempt, read_rank_entries, read_tail_text
from hpc_train.regular_files import read_json
from hpc_train.resilience.incident import read_hang
from hpc_train.training.records.run_records import REQUEUE_MARKER, RankFailure, append_event, read_first_failure

EXIT_CODES = "exits.json"
"""File that the local pool writes in an attempt's log directory: [[task, exit code], ...] in the order in which tasks
ended."""
SRUN_ERRORS = "srun.err"
"""File in an attempt's log directory: what the ranks' srun has written to standard error."""
ENDED_TASKS = "ended-tasks.json"
"""File that the supervisor writes in an attempt's log directory: [[task, node], ...] of the tasks that had already
ended when it ended the others."""
LOST_NODES = "lost-nodes"
"""File that the supervisor writes in an attempt's log directory: the names of nodes that fell silent, a line each. The
batch script reads it, too."""
STOP_ASKED = "stop-asked"
"""File in an attempt's log directory: the job was asked to save and stop. The supervisor makes it, or the batch
script."""
_SRUN_LINE = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_OUT_OF_MEMORY = re.compile(r"srun: error: (?P<host>\S+): tasks? [\d,-]+: Out Of Memory")
"""Slurm prints this for all tasks of a node that end at that moment, so it does not tell which one ran out of memory.
"""
NOT_STARTED = "srun could not start the ranks"
"""How the text of an error begins where a slurmd has refused them. srun then kills those that run on other nodes."""
_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<host>[^ :]+): (?P<why>.+)")
_ABORTED = "Aborted"
_DEADLY_WORDS = (
    "Killed",
    "Segmentation fault",
    "Bus error",
    "Illegal instruction",
    "Floating point exception",
    "Out Of Memory",
    _ABORTED,
)
"""How srun's words for a task that a signal ended begin. "Terminated" is missing: it is how others end a rank."""
_DEADLY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""A task that was ended by one of these signals, or that left by os._exit, is the cause of its peers' failures."""
_EXITED = re.compile(r"Exited with exit code (?P<code>\d+)")


@dataclass(frozen=True)
class FirstError:
    """The task that failed first."""

    task: int
    text: str
    """The error as one line, or with the traceback after it."""
    host: str = ""
    traceback: str = ""
    """The traceback of the task; "" where it left none, or the user's input is wrong."""
    summary: tuple[str, ...] = ()
    """See training.records.run_records.RankFailure."""
    srun_note: str = ""
    """srun's messages about the step that the task was in."""

    @property
    def line(self) -> str:
        """Return the error as one line; of a traceback the exception."""
        text = ": ".join([self.text.splitlines()[0].rstrip(":"), *_find_exception_line(self.traceback)])
        return f"{text} ({self.srun_note})" if self.srun_note else text

    def brief(self, log: Path) -> str:
        """Format for a terminal: who and what, the user's own lines, and where to find the whole traceback."""
        if not self.traceback or not self.summary:
            return self.text
        first, *frames = self.summary
        lines = [f"task {self.task} on {self.host} failed first: {first}", *(f"  {frame}" for frame in frames)]
        return "\n".join([*lines, f"  the whole traceback: {log}"])


def _find_exception_line(traceback: str) -> list[str]:
    """Return the line below the last frame; what libraries write after it may be anything."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    # Tracebacks end with the frame that raised; the exception is the first line after it that is not indented.
    frame = max((index for index, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    return [line for line in lines[frame + 1 :] if not line[0].isspace()][:1] or lines[-1:]


def find_first_error(logs: Path) -> FirstError | None:
    """Find the first failure of the attempt with this log directory; None if no rank left a trace of one."""
    # A watcher ended the ranks of a hang, so whatever they report was caused by that.
    hang = read_hang(logs)
    if hang is not None:
        return FirstError(hang.task or 0, hang.text, hang.host)
    failure = read_first_failure(logs)
    if failure is not None and is_timeout(failure.message) and (silent := list_ranks_without_report(logs)):
        return FirstError(silent[0], describe_timeout(logs, silent))
    # A rank that was killed by a signal wrote no report. Its peers did, but they only report a lost connection.
    dead = _find_in_exit_codes(logs, failure)
    if failure is None or failure.lost_peer:
        dead = dead or _find_lost_nodes(logs)
    if dead is None and (failure is None or failure.lost_peer):
        dead = _find_in_srun_errors(logs) or _find_unreported(logs)
    if dead is not None or failure is None:
        return dead
    # The kernel may have killed a child of the rank, such as a data loader: the rank then reports an error of its own.
    srun_note = "Out Of Memory" if _OUT_OF_MEMORY.search(_read_srun_errors(logs)) else ""
    trace = "" if failure.one_line else failure.traceback
    return FirstError(failure.task, failure.text().strip(), failure.host, trace, tuple(failure.summary), srun_note)


def explain_failure(logs: Path) -> str | None:
    """Explain why a local attempt failed, by the rank that failed first; None if no rank left a trace."""
    if not (logs / EXIT_CODES).exists():
        return "the process that held the ranks was killed; the ranks were told to save and stop"
    error = find_first_error(logs)
    return error.brief(logs / f"task-{error.task}.log") if error else None


def _read_exit_codes(logs: Path) -> list[tuple[int, int]]:
    """Return (task, exit code) in order of their ends; [] if the file is missing or damaged."""
    try:
        return [(int(task), int(code)) for task, code in read_json(logs / EXIT_CODES)]
    except (OSError, ValueError, TypeError):
        return []


def _has_no_report(logs: Path, task: int | str) -> bool:
    return not (logs / f"task-{task}.failure.json").exists()


def _find_in_exit_codes(logs: Path, failure: RankFailure | None) -> FirstError | None:
    exits = _read_exit_codes(logs)
    silent = [(task, code) for task, code in exits if code not in (0, EXIT_REQUEUE) and _has_no_report(logs, task)]
    dead = next((item for item in silent if _is_deadly(logs, *item, failure)), None)
    if dead is None and (failure is not None or not silent):
        return None
    task, code = dead or silent[0]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code} without a word"
    return FirstError(task, f"task {task} {how}; its log: {logs / f'task-{task}.log'}")


def _is_deadly(logs: Path, task: int, code: int, failure: RankFailure | None) -> bool:
    """Return whether a task with this exit code may have caused its peers' failures. failure: the first one of a peer.

    SIGABRT needs a closer look, because libraries also abort a rank whose peer is gone.
    """
    if -code == signal.SIGABRT:
        return (failure is None or failure.lost_peer) and not _has_given_up_waiting(logs, task)
    # SIGTERM is missing on purpose: it is how others end a rank.
    return code > 0 or -code in _DEADLY_SIGNALS


def _has_given_up_waiting(logs: Path, task: int) -> bool:
    """Return whether the end of a task's log says that it waited for another one, as NCCL's watchdog prints."""
    return is_timeout(read_tail_text(logs / f"task-{task}.log"))


def _find_lost_nodes(logs: Path) -> FirstError | None:
    """Find the nodes that fell silent: their ranks cannot report, and those of other nodes were ended for that."""
    hosts = read_tail_text(logs / LOST_NODES).split()
    if not hosts:
        return None
    entries = read_rank_entries(logs)
    tasks = [int(entry["process"]) for entry in entries if str(entry.get("host")).partition(".")[0] in hosts]
    answer = "does not answer" if len(hosts) == 1 else "do not answer"
    return FirstError(min(tasks, default=0), f"{', '.join(hosts)}: {answer} any more", hosts[0])


def _find_in_srun_errors(logs: Path) -> FirstError | None:
    """Find the first task that srun reports as killed by a signal or exited, and that recorded no error itself.

    Where srun has not started all of them, the node that has refused them is named, and task 0 stands for its tasks.
    """
    text, aborted = _read_srun_errors(logs), None
    if refused := _NOT_LAUNCHED.search(text):
        return FirstError(0, f"{NOT_STARTED} on {refused['host']}: {refused['why']}", refused["host"])
    for line in _SRUN_LINE.finditer(text):
        silent = [task for task in _expand_tasks(line["tasks"]) if _has_no_report(logs, task)]
        how = _describe_end(line["how"])
        if not silent or how is None:
            continue
        error = FirstError(silent[0], f"task {','.join(map(str, silent))} on {line['host']} {how}", line["host"])
        if line["how"].startswith(_ABORTED) and _has_given_up_waiting(logs, silent[0]):
            # NCCL's watchdog aborts ranks that waited in vain: only a last resort, if nobody died of anything else.
            aborted = aborted or error
        else:
            return error
    if aborted is not None:
        return aborted
    memory = _OUT_OF_MEMORY.search(text)
    return _find_out_of_memory(logs, memory["host"]) if memory else None


def _find_unreported(logs: Path) -> FirstError | None:
    """Find the first task that had ended without a report from srun, because a slurmstepd or srun itself failed."""
    try:
        ended = [(int(task), str(host)) for task, host in read_json(logs / ENDED_TASKS)]
    except (OSError, ValueError, TypeError):
        return None
    reported = {task for line in _SRUN_LINE.finditer(_read_srun_errors(logs)) for task in _expand_tasks(line["tasks"])}
    for task, host in ended:
        if task not in reported and _has_no_report(logs, task):
            text = f"task {task} on {host} was ended from outside: it is gone, and srun was not told how"
            return FirstError(task, text, host)
    return None


def list_exit_codes(srun_errors: str) -> list[int]:
    """Return the exit codes of the tasks that srun reports as failed; 128 for those ended by a signal.

    srun_errors: what srun has written to standard error, in whole lines.
    """
    ends = [_EXITED.match(line["how"]) for line in _SRUN_LINE.finditer(srun_errors)]
    return [int(exited["code"]) if exited else 128 for exited in ends]


def _expand_tasks(listed: str) -> list[int]:
    """Return the tasks of srun's list, such as 0,2-4."""
    tasks: list[int] = []
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        tasks += range(int(first), int(last or first) + 1)
    return tasks


def _describe_end(how: str) -> str | None:
    """Describe how a task without a recorded error ended; None if its end is not a failure of its own."""
    if how.startswith(_DEADLY_WORDS):
        return f"was ended from outside: {how}"
    exited = _EXITED.match(how)
    if exited is None or int(exited["code"]) in (0, EXIT_REQUEUE):
        return None
    return f"exited with code {exited['code']} without a word"


def _read_srun_errors(logs: Path) -> str:
    return read_tail_text(logs / SRUN_ERRORS)


def _find_out_of_memory(logs: Path, host: str) -> FirstError | None:
    """Find the task of this node that recorded nothing; without a rank map, a task of any node."""
    # srun prints short names of nodes, the rank map may have full ones.
    short = host.partition(".")[0]
    entries = read_rank_entries(logs)
    elsewhere = {int(entry["process"]) for entry in entries if str(entry.get("host")).partition(".")[0] != short}
    with_log = {int(path.stem.removeprefix("task-")) for path in logs.glob("task-*.log")} - elsewhere
    silent = sorted(task for task in with_log if _has_no_report(logs, task))
    if not silent:
        return None
    return FirstError(silent[0], f"task {silent[0]} on {host} was ended from outside: Out Of Memory", host)


_STOPPED_WAITING = re.compile(
    r"application timeout caused pair closure|timed out waiting \d+ ?ms for (recv|send)|collective operation timeout"
    r"|wait timeout after \d+ ?ms|timed out after \d+ ?m?s(econds)? waiting for|socket ?timeout",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL's watchdog, and torch's stores."""
_MAX_RANKS_SHOWN = 6


def is_timeout(message: str) -> bool:
    """Return whether an error says that its rank gave up waiting for another rank."""
    return _STOPPED_WAITING.search(message) is not None


def list_ranks_without_report(logs: Path) -> list[int]:
    """Return the tasks of an attempt that reported no error; [] if its rank map cannot be read."""
    tasks = sorted(int(entry["process"]) for entry in read_rank_entries(logs) if "process" in entry)
    return [task for task in tasks if not (logs / f"task-{task}.failure.json").exists()]


def describe_timeout(logs: Path, silent: Sequence[int]) -> str:
    """Say in one line which ranks gave up waiting, for which ranks, and after how long.

    silent: tasks without an error.
    """
    entries = {int(entry["process"]): entry for entry in read_rank_entries(logs)}
    waited = [task for task in sorted(entries) if task not in silent]
    which = "which reported nothing: it hangs" if len(silent) == 1 else "which reported nothing: one of them hangs"
    return (
        f"{_name_ranks(waited, entries, hosts=False)} stopped waiting{_format_time_limit(logs)} for "
        f"{_name_ranks(silent, entries, hosts=True)}, {which}, or is far slower than the others"
    )


def _name_ranks(tasks: Sequence[int], entries: dict[int, dict[str, object]], hosts: bool) -> str:
    names = []
    for task in tasks[:_MAX_RANKS_SHOWN]:
        host = str(entries[task].get("host", "")).partition(".")[0]
        names.append(f"{entries[task].get('rank', task)}" + (f" (task {task} on {host})" if hosts else ""))
    more = f" and {len(tasks) - _MAX_RANKS_SHOWN} more" if len(tasks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(tasks) > 1 else ''} {', '.join(names)}{more}"


def _format_time_limit(logs: Path) -> str:
    try:
        seconds = read_json(logs.parents[1] / "job.json")["config"]["launch"]["timeout_seconds"]
        return f" after launch.timeout_seconds={int(seconds)}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def main(run_dir: str, attempt: str, code: str, requeue: str) -> int:
    """Append a requeue or a failure event and print the first failure.

    code: srun's exit code. requeue: why the job is requeued; empty if it is not.
    """
    run = Path(run_dir)
    logs = run / "logs" / attempt
    if requeue:
        if error := _find_error_of_stop(logs):
            requeue = f"{requeue}; meanwhile {error.line}"
        append_event(run / "events.jsonl", "requeue", int(attempt), exit_code=int(code), why=requeue)
        print_to_job_log(f"requeued: {requeue}")
    elif int(code) != EXIT_REQUEUE:
        error = find_first_error(logs)
        why = error.text if error else _explain_by_batch_script(logs, code)
        line = error.line if error else why
        result = read_attempt(logs).result
        if int(code) == EXIT_NO_REQUEUE and error and result and result.why:
            line = f"{result.why} ({line})"
        append_event(run / "events.jsonl", "failure", int(attempt), exit_code=int(code), why=line)
        print_to_job_log(f"hpc-train: {why}")
    return 0


def _find_error_of_stop(logs: Path) -> FirstError | None:
    """Return the first failure among ranks that stopped on purpose, such as one that died in the save; else None."""
    return find_first_error(logs) if (logs / REQUEUE_MARKER).exists() else None


def _explain_by_batch_script(logs: Path, code: str) -> str:
    """Return the batch script's reason, for failures of which no rank recorded one."""
    result = read_attempt(logs).result
    return result.why if result and result.why else f"the ranks exited with {code} and left no reason; see {logs}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
