"""Explain exit codes and signals in plain words, as a shell, srun and Slurm's daemons use them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from hpc_train.launch.state.states import State

SETUP_FAILED = 53
"""Slurm's own "signal": slurmstepd could not set the job up, usually because it could not open the job's log."""
OUT_OF_MEMORY = 125
"""Slurm's own "signal" SIG_OOM (253), cut to the seven bits that wait(2) has for it."""
_SIGNALS = {
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
    signal.SIGPIPE: "whoever read its output is gone",
    signal.SIGHUP: "its terminal is gone",
}
_CODES = {
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
        return _signalled(code - 256, nodes)
    if code > 128 and code not in _CODES:
        return _signalled(code - 128, nodes)
    return f"exit code {code}" + (f" ({_CODES[code]})" if code in _CODES else "")


def _signalled(number: int, nodes: Sequence[str]) -> str:
    if number == SETUP_FAILED:
        where = f"node {nodes[0]}" if nodes else "the node"
        return (
            f"Slurm could not start it on {where} (its exit code 0:53): the run directory, where its log is written, "
            "does not exist or cannot be written there; use a file system that all nodes share"
        )
    if number == OUT_OF_MEMORY:
        return "out of memory (Slurm's exit code 0:125); ask for more with launch.memory_gib, or use less"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"killed by signal {number}, which is none of this system's"
    why = _SIGNALS.get(signal.Signals(number))
    return f"killed by signal {number} ({name}{': ' + why if why else ''})"


def parse_ending(text: str) -> State | None:
    """Parse what slurmstepd and srun wrote into the log about the job's end; None if they wrote nothing."""
    found = [match["why"] for match in _CANCELLED.finditer(text)] or [
        line for line in text.splitlines() if "slurmstepd: error:" in line or "srun: error:" in line
    ]
    for said in reversed(found):
        for words, state in _ENDINGS:
            if words in said:
                return state
    return None
