"""The states of a run, Slurm's states in terms of them, and exit codes and signals in plain words."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The state of a run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"
    DONE = "DONE"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"

    @property
    def waiting(self) -> bool:
        """Whether it has not started, or is to be started again."""
        return self in (State.PENDING, State.REQUEUED)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self not in (State.PENDING, State.RUNNING, State.REQUEUED, State.UNKNOWN)


@dataclass(frozen=True)
class RunStatus:
    """The state and the progress of one point of a sweep, or of a single run."""

    point: str
    job_id: str | None
    """`12`, or `12_3` of an array; None of a run without Slurm."""
    attempt: int | None
    """The newest that began; None before the first."""
    state: State
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    """None until it ended; 128 + n where signal n ended it."""
    step: int | None = None
    """Last step made; None before the first."""
    steps: int | None = None
    """Steps of the whole run; None until its ranks have reported them."""
    loss: float | None = None
    """Loss of the last step; None also if it is not finite."""
    seconds_since_step: float | None = None
    """Seconds since the last step of a running run, or since its attempt began."""

    warnings: tuple[str, ...] = ()
    """Warnings of the newest attempt's ranks, each text once."""
    faults: tuple[str, ...] = ()
    """Faults from which the run recovered automatically, since its last submission."""
    skipped_steps: int = 0
    """Steps whose update was skipped because their numbers were wrong."""
    passed_over: tuple[int, ...] = ()
    """Steps whose checkpoints are passed over, as their load ended the ranks."""

    def row(self) -> dict[str, Any]:
        """Return the fields as `hpc-train status --json` prints them."""
        return {
            **asdict(self),
            "state": str(self.state),
            "nodes": list(self.nodes),
            "warnings": list(self.warnings),
            "faults": list(self.faults),
            "passed_over": list(self.passed_over),
        }


# Slurm's words of any version (squeue(1), JOB STATE CODES); those of a job that holds nodes count as running.
_FROM_SLURM = {
    "PENDING": State.PENDING,
    "CONFIGURING": State.PENDING,
    "POWER_UP_NODE": State.PENDING,
    "RESV_DEL_HOLD": State.PENDING,
    "REQUEUED": State.REQUEUED,
    "REQUEUE_FED": State.REQUEUED,
    "REQUEUE_HOLD": State.REQUEUED,
    "SPECIAL_EXIT": State.REQUEUED,
    "EXPEDITING": State.REQUEUED,
    "RUNNING": State.RUNNING,
    "COMPLETING": State.RUNNING,
    "RESIZING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "STAGE_OUT": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SUSPENDED": State.RUNNING,
    "UPDATE_DB": State.RUNNING,
    "COMPLETED": State.DONE,
    "FAILED": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "TIMEOUT": State.TIMEOUT,
    "DEADLINE": State.TIMEOUT,
    "NODE_FAIL": State.NODE_FAIL,
    "BOOT_FAIL": State.NODE_FAIL,
    "OUT_OF_MEMORY": State.OUT_OF_MEMORY,
    "PREEMPTED": State.PREEMPTED,
    "CANCELLED": State.CANCELLED,
    "REVOKED": State.CANCELLED,
}


def from_slurm_state(word: str) -> State:
    """Translate Slurm's word for a state, also sacct's `CANCELLED by 1000` and `CANCELLED+`; UNKNOWN for a new one."""
    return _FROM_SLURM.get(word.split(" ")[0].split(",")[0].rstrip("+"), State.UNKNOWN)


SIGNAL_SETUP_FAILED = 53
"""Slurm's own "signal": slurmstepd could not set the job up, usually because it could not open the job's log."""
SIGNAL_OUT_OF_MEMORY = 125
"""Slurm's own "signal" SIG_OOM (253), cut to the seven bits that wait(2) has for it."""
_SIGNAL_MEANINGS = {
    signal.SIGKILL: "often the kernel or the site, as the node ran out of memory",
    signal.SIGSEGV: "segmentation fault, in a library or an extension",
    signal.SIGBUS: "bus error, often a full /dev/shm or a file that was cut off while it was mapped",
    signal.SIGILL: "illegal instruction: a package was built for another processor",
    signal.SIGABRT: "abort, by a library that gave up; its last words are in the log",
    signal.SIGFPE: "arithmetic error in a library",
    signal.SIGTERM: "asked to end, by Slurm or by a person",
    signal.SIGINT: "Ctrl-C",
    signal.SIGXCPU: "the limit of processor time, ulimit -t",
    signal.SIGXFSZ: "the limit of file size, ulimit -f",
    signal.SIGPIPE: "the reader of its output has ended",
    signal.SIGHUP: "its terminal is gone",
}
_CODE_MEANINGS = {
    126: "a command could not be executed: not a program, or no right to",
    127: "a command was not found: it is not on the PATH of that node",
    255: "ssh or srun lost the connection, or a program returned -1",
}
_ENDINGS = (
    ("DUE TO TIME LIMIT", State.TIMEOUT),
    ("DUE TO PREEMPTION", State.PREEMPTED),
    ("DUE TO NODE FAILURE", State.NODE_FAIL),
    ("oom_kill event", State.OUT_OF_MEMORY),
    ("oom-kill event", State.OUT_OF_MEMORY),
    ("Out Of Memory", State.OUT_OF_MEMORY),
)
_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ (?P<why>DUE TO [A-Z ]+?)(?: \*\*\*|,)")


def describe_exit(code: int, nodes: Sequence[str] = ()) -> str:
    """Describe how a job or a rank ended. code: as a shell reports it, 128 + n for signal n. nodes: of the job."""
    if code > 255:  # batch systems other than Slurm count this way
        return _describe_signal(code - 256, nodes)
    if code > 128 and code not in _CODE_MEANINGS:
        return _describe_signal(code - 128, nodes)
    return f"exit code {code}" + (f" ({_CODE_MEANINGS[code]})" if code in _CODE_MEANINGS else "")


def _describe_signal(number: int, nodes: Sequence[str]) -> str:
    if number == SIGNAL_SETUP_FAILED:
        where = f"node {nodes[0]}" if nodes else "the node"
        return (
            f"Slurm could not start it on {where} (its exit code 0:53): the run directory, where its log is written, "
            "does not exist or cannot be written there; use a file system that all nodes share"
        )
    if number == SIGNAL_OUT_OF_MEMORY:
        return "out of memory (Slurm's exit code 0:125); ask for more with launch.memory_gib, or use less"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"killed by signal {number}, which this system does not have"
    why = _SIGNAL_MEANINGS.get(signal.Signals(number))
    return f"killed by signal {number} ({name}{': ' + why if why else ''})"


def parse_ending(text: str) -> State | None:
    """Parse what slurmstepd and srun wrote into the log about the job's end; None if they wrote nothing."""
    reasons = [match["why"] for match in _CANCELLED.finditer(text)] or [
        line for line in text.splitlines() if "slurmstepd: error:" in line or "srun: error:" in line
    ]
    for reason in reversed(reasons):
        for words, state in _ENDINGS:
            if words in reason:
                return state
    return None
