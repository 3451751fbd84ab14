"""Read a site's history of failures from text files that the user names: output of sacct, or events.jsonl of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.planner.reliability.failure_rate import DAY, FailureHistory
from hpc_train.regular_files import parse_json_object, read_text
from hpc_train.resilience.ledger import GOODPUT, LedgerLine, parse_ledger

SACCT_COMMAND = (
    "sacct --allusers --allocations --duplicates --parsable2 --format=JobID,State,NNodes,ElapsedRaw --starttime=..."
)
"""The command with which a site exports its history; --duplicates lists each run of a requeued job."""
_NODE_STATES = {"NODE_FAIL", "BOOT_FAIL"}
"""Slurm's states of jobs that ended because of a node (man sacct, JOB STATE CODES)."""
_OTHER_FAILURES = {"FAILED", "OUT_OF_MEMORY"}
"""States after which the program or a node may be at fault: Slurm does not say."""
_STATES = (
    _NODE_STATES
    | _OTHER_FAILURES
    | {
        "CANCELLED",
        "COMPLETED",
        "COMPLETING",
        "CONFIGURING",
        "DEADLINE",
        "PENDING",
        "PREEMPTED",
        "REQUEUED",
        "RESIZING",
        "REVOKED",
        "RUNNING",
        "SUSPENDED",
        "TIMEOUT",
    }
)
_ELAPSED = re.compile(r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?")
_LOST_NODE = "does not answer"
"""Part of the reason that the batch script records for a requeue after a node failure (launch/slurm/batch.sh)."""
_RESTARTED = "restarted"
"""Action of a `restart` event after which the ranks start again in the same job."""
_REQUEUED = "requeued"
"""Action of a `restart` event after which the job goes back to the queue."""
_NOTICES = ("hang", "lost_node", "failure")
"""Kinds of events whose time is when a fault of an attempt was noticed."""
_ENDINGS = ("end", "signal", "requeue", "failure")
"""Kinds of events that say how an attempt ended."""


@dataclass(frozen=True)
class FailureLog:
    """Failures counted in one or several log files."""

    node_days: float
    by_node: int
    """Jobs that ended because of a node, according to the log."""
    unexplained: int
    """Jobs that failed for an unrecorded reason, program or node. Not counted as node failures."""
    preempted: int
    runs: int
    """Slurm jobs, or attempts of our runs."""
    restarts: tuple[float, ...] = ()
    """Seconds from each decision to start ranks again, in the same job, to their first step."""
    detections: tuple[float, ...] = ()
    """Seconds from the last sign of life of ranks that died or hung until that was noticed."""

    @property
    def history(self) -> FailureHistory:
        """Return the counts that update a FailureRate."""
        return FailureHistory(self.by_node, self.node_days)

    @property
    def most(self) -> FailureHistory:
        """Return the counts if every unexplained failure was a node's fault."""
        return FailureHistory(self.by_node + self.unexplained, self.node_days)

    def __add__(self, other: FailureLog) -> FailureLog:
        return FailureLog(
            node_days=self.node_days + other.node_days,
            by_node=self.by_node + other.by_node,
            unexplained=self.unexplained + other.unexplained,
            preempted=self.preempted + other.preempted,
            runs=self.runs + other.runs,
            restarts=self.restarts + other.restarts,
            detections=self.detections + other.detections,
        )


def read_logs(paths: Sequence[str], ranks_per_node: int = 1) -> FailureLog:
    """Read all log files and add them up. ranks_per_node: converts the ranks in events.jsonl to nodes.

    Raises UserError with file and line number for a file of another format, and for logs without any node time.
    """
    log = sum((read_log(Path(path).expanduser(), ranks_per_node) for path in paths), FailureLog(0.0, 0, 0, 0, 0))
    if log.node_days <= 0:
        raise UserError(
            f"plan.failure_logs={','.join(paths)}: no job in these logs ran for any time; give a longer history"
        )
    return log


def read_log(path: Path, ranks_per_node: int = 1) -> FailureLog:
    """Read one log file: events.jsonl if it begins with a brace, else output of sacct.

    A run directory: its events, and goodput.jsonl, which tells how long faults were not noticed.
    """
    ledger: list[LedgerLine] = []
    if path.is_dir():
        with suppress(OSError):  # runs of one step, or with resilience.watch=false, have none
            ledger = parse_ledger(read_text(path / GOODPUT, errors="replace"))
        path = path / "events.jsonl"
    try:
        text = read_text(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give the output of `{SACCT_COMMAND}`") from None
    if text.lstrip().startswith("{"):
        log = read_events(text, str(path), ranks_per_node)
        return replace(log, detections=tuple(_measure_detections(text, str(path), ledger)))
    return read_sacct(text, str(path))


def read_sacct(text: str, name: str) -> FailureLog:
    """Read the output of sacct --parsable2 (or --parsable), header first.

    Needs the columns State, NNodes (or AllocNodes) and ElapsedRaw (or Elapsed). Job steps, with a dot in JobID, are
    skipped.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"{name}: empty; give the output of `{SACCT_COMMAND}`")
    columns = [column.strip().lower() for column in lines[0][1].split("|")]
    indices = _ColumnIndices.find(columns, f"{name}:{lines[0][0]}")
    rows = (_parse_job(line, len(columns), indices, f"{name}:{number}") for number, line in lines[1:])
    return sum((row for row in rows if row is not None), FailureLog(0.0, 0, 0, 0, 0))


@dataclass(frozen=True)
class _ColumnIndices:
    """Index of each column in a line."""

    state: int
    nodes: int
    elapsed: int
    raw: bool
    """The elapsed column is in seconds."""
    job: int | None

    @staticmethod
    def find(columns: Sequence[str], where: str) -> _ColumnIndices:
        """Find the columns by name. where: file and line, for errors."""
        index_of = {column: index for index, column in enumerate(columns) if column}
        nodes = index_of.get("nnodes", index_of.get("allocnodes"))
        elapsed = index_of.get("elapsedraw", index_of.get("elapsed"))
        wanted = {"State": index_of.get("state"), "NNodes": nodes, "ElapsedRaw": elapsed}
        if missing := [column for column, index in wanted.items() if index is None]:
            raise UserError(
                f"{where}: no column {', '.join(missing)}; give the output of `{SACCT_COMMAND}`, header included"
            )
        assert nodes is not None
        assert elapsed is not None
        return _ColumnIndices(index_of["state"], nodes, elapsed, "elapsedraw" in index_of, index_of.get("jobid"))


def _parse_job(line: str, width: int, indices: _ColumnIndices, place: str) -> FailureLog | None:
    """Parse the line of one job; None for a job step. place: file and line, for errors."""
    cells = [cell.strip() for cell in line.split("|")]
    if len(cells) != width:
        raise UserError(f"{place}: {len(cells)} columns where the header has {width}; is the file cut off?")
    if indices.job is not None and "." in cells[indices.job]:
        return None
    state = cells[indices.state].split(" ")[0].rstrip("+").upper()  # CANCELLED by 1000
    if state not in _STATES:
        raise UserError(f"{place}: unknown job state {cells[indices.state]!r}; expected COMPLETED, NODE_FAIL, ...")
    seconds = _parse_elapsed(cells[indices.elapsed], indices.raw, place)
    days = _parse_nodes(cells[indices.nodes], place) * seconds / DAY
    by_node, unexplained = state in _NODE_STATES, state in _OTHER_FAILURES
    return FailureLog(days, int(by_node), int(unexplained), int(state == "PREEMPTED"), 1)


def _parse_nodes(text: str, place: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{place}: {text!r} nodes; expected a whole number")
    return int(text)


def _parse_elapsed(text: str, raw: bool, place: str) -> float:
    if raw and text.isdecimal():
        return float(text)
    match = None if raw else _ELAPSED.fullmatch(text)
    if match is None:
        raise UserError(f"{place}: elapsed {text!r}; expected {'seconds' if raw else '[days-]hours:minutes:seconds'}")
    days, hours, minutes, seconds = (float(match[part] or 0) for part in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def read_events(text: str, name: str, ranks_per_node: int = 1) -> FailureLog:
    """Read events.jsonl of one run: each attempt counts from its start or resume to its last event.

    An attempt failed because of a node if the batch script recorded that one does not answer. Other failures are
    unexplained, and so is an attempt without an end event that was followed by another attempt.
    """
    attempts: dict[int, _Attempt] = {}
    restarts: list[float] = []
    decided: float | None = None
    for number, event in _parse_events(text, name):
        attempts.setdefault(int(event["attempt"]), _Attempt()).add(event, f"{name}:{number}")
        if event["event"] == "restart":
            decided = float(event["time"]) if event.get("action") == _RESTARTED else None
        elif event["event"] in ("start", "resume") and decided is not None:
            restarts.append(float(event["time"]) - decided)
            decided = None
    newest = max(attempts, default=0)
    begun = {number: attempt for number, attempt in attempts.items() if attempt.begun is not None}
    logs = (attempt.make_log(ranks_per_node, number < newest) for number, attempt in begun.items())
    return sum(logs, FailureLog(0.0, 0, 0, 0, 0, tuple(restarts)))


def _measure_detections(text: str, name: str, ledger: Sequence[LedgerLine]) -> Iterator[float]:
    """Yield, for each fault after which ranks were started again, the seconds until it was noticed.

    They begin with the attempt's last line in the ledger, which rank 0 wrote up to five seconds before the fault.
    """
    last: dict[int, float] = {}
    for line in ledger:
        last[line.attempt] = max(line.time, last.get(line.attempt, 0.0))
    noticed: dict[int, float] = {}
    for _, event in _parse_events(text, name):
        attempt, at = int(event["attempt"]), float(event["time"])
        if event["event"] in (*_NOTICES, "restart"):
            noticed.setdefault(attempt, at)
        if event["event"] == "restart" and event.get("action") in (_RESTARTED, _REQUEUED) and attempt in last:
            yield max(0.0, noticed[attempt] - last[attempt])


def _parse_events(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, event). A torn last line, of a run that was killed, is skipped."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = parse_json_object(line)
            float(event["time"]), str(event["event"]), int(event["attempt"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                return
            raise UserError(f"{name}:{number}: not an event; expected events.jsonl of a run directory") from None
        yield number, event


@dataclass
class _Attempt:
    """One attempt of a job, as its events record it."""

    begun: float | None = None
    last: float = 0.0
    ranks: int = 0
    ended: bool = False
    lost_node: bool = False
    failed: bool = False

    def add(self, event: dict[str, Any], place: str) -> None:
        kind, self.last = event["event"], max(self.last, float(event["time"]))
        if kind in ("start", "resume") and self.begun is None:
            self.begun = float(event["time"])
            world = event.get("world")
            if not isinstance(world, int) or world < 1:
                raise UserError(f"{place}: {kind} without its world size; expected events.jsonl of a run directory")
            self.ranks = world
        self.ended |= kind in _ENDINGS
        self.failed |= kind == "failure"
        self.lost_node |= kind in ("requeue", "failure") and _LOST_NODE in str(event.get("why"))
        self.lost_node |= kind == "lost_node"

    def make_log(self, ranks_per_node: int, followed: bool) -> FailureLog:
        """Return the counts of this attempt. followed: a later attempt exists."""
        assert self.begun is not None
        days = -(-self.ranks // ranks_per_node) * (self.last - self.begun) / DAY
        unexplained = not self.lost_node and (self.failed or (followed and not self.ended))
        return FailureLog(max(0.0, days), int(self.lost_node), int(unexplained), 0, 1)
