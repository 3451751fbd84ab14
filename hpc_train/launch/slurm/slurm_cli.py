"""Run Slurm's command-line clients, and delay the signals that must not interrupt them.

Commands are argument lists with a time limit; a missing or silent command gives an Answer, too, with a reason.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

TIMEOUT_SECONDS = 30.0
"""Seconds for one answer; a controller under load may need some."""
_CLIENT_VARIABLES = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|PMI|PMIX)_|PMI")
_CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"})


@dataclass(frozen=True)
class Answer:
    """The answer of a command."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def reason(self) -> str:
        """Return its fatal error, else the first line that it printed, without the program's name."""
        # Warnings come first where a configuration has any; the line that ended the command is the one marked fatal.
        lines = [line.strip() for line in self.err.splitlines() if line.strip()] or [f"exit code {self.code}"]
        line = next((line for line in lines if re.match(r"(\w+: )?fatal: ", line)), lines[0])
        return re.sub(r"^(\w+:? )?(error|fatal): ", "", line)


RunClient = Callable[[Sequence[str]], Answer]


def client_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `env` without the variables of a surrounding job, or of a user's settings, that would change the output.

    The variables that say where the cluster is stay.
    """
    return {
        name: value for name, value in env.items() if name in _CLUSTER_VARIABLES or not _CLIENT_VARIABLES.match(name)
    }


def run_client(command: Sequence[str]) -> Answer:
    """Run one of Slurm's commands. If a command is missing or does not answer in time, the Answer says so."""
    try:
        done = subprocess.run(
            command,
            env=client_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return Answer(127, err=f"{command[0]} is not on the PATH")
    except subprocess.TimeoutExpired:
        return Answer(124, err=f"{command[0]} gave no answer within {TIMEOUT_SECONDS:g} s")
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Let `handler` handle these signals inside the context.

    Outside the main thread, Python allows no handlers: no effect.

    A handler that was not set by Python cannot be put back, and stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    # getsignal returns None for a handler that some C library has set.
    replaceable = {number: previous for number, previous in earlier.items() if previous is not None}
    try:
        for number in replaceable:
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in replaceable.items():
            signal.signal(number, previous)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals that would end this process, so that no job is submitted without being recorded.

    A terminal's Ctrl-C also ends sbatch itself, which then has submitted nothing.
    """
    received: list[int] = []
    try:
        with handle_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: received.append(number)):
            yield
    finally:
        # Once: a second Ctrl-C while sbatch ran means the same as the first.
        for number in received[:1]:
            signal.raise_signal(number)


def current_job_id(env: Mapping[str, str]) -> str | None:
    """Return the id of the job that `env` belongs to: `12`, or `12_3` for an array element; None outside of Slurm."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return env.get("SLURM_JOB_ID")
