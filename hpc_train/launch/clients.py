"""Slurm's own commands, asked and never trusted to be there: argument lists, a time limit, everything captured."""

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

PATIENCE = 30.0
"""Seconds for one answer; a controller under load may need some."""
_STEERING = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|PMI|PMIX)_|PMI")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"})


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def reason(self) -> str:
        """Why it gave up, else its first line of complaint, without the names in front."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()] or [f"exit code {self.code}"]
        line = next((line for line in lines if re.match(r"(\w+: )?fatal: ", line)), lines[0])
        return re.sub(r"^(\w+:? )?(error|fatal): ", "", line)


Ask = Callable[[Sequence[str]], Said]


def client_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`env` without what a surrounding job, or a user's taste in formats, would make a client do differently.

    What says where the cluster is stays.
    """
    return {name: value for name, value in env.items() if name in _KEPT or not _STEERING.match(name)}


def ask(command: Sequence[str]) -> Said:
    """Run one of Slurm's commands. A command that is missing or does not answer in time is an answer, too."""
    try:
        done = subprocess.run(
            command,
            env=client_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        return Said(127, err=f"{command[0]} is not on the PATH")
    except subprocess.TimeoutExpired:
        return Said(124, err=f"{command[0]} gave no answer within {PATIENCE:g} s")
    return Said(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Inside, these signals are this handler's. Python lets only the main thread see to it: elsewhere nothing changes.

    A handler that was not set by Python cannot be put back, and stays.
    """
    here = threading.current_thread() is threading.main_thread()
    before = {it: known for it in numbers if here and (known := signal.getsignal(it)) is not None}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


@contextmanager
def answered() -> Iterator[None]:
    """Signals that would end this process wait, so that no job is submitted that nobody writes down.

    A terminal's Ctrl-C ends sbatch, which then has refused.
    """
    came: list[int] = []
    try:
        with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


def slurm_job(env: Mapping[str, str]) -> str | None:
    """The job that `env` is of, as users name it: `12`, or `12_3` of an array; None outside of Slurm."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return env.get("SLURM_JOB_ID")
