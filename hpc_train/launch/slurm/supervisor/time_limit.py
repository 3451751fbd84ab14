"""Notice that the time limit of a job is near, where Slurm's own signal came too early for the ranks that run now.

`sbatch --signal` has Slurm send one signal, to the job steps that are there at that moment. Ranks that start after it,
because others have failed meanwhile, would train into the limit, and the job would end as TIMEOUT instead of being
requeued. The same holds for the grace time of a job that is preempted: its limit is then the end of that time.
"""

from __future__ import annotations

import re
import subprocess
import time

from hpc_train.launch.slurm.slurm_cli import client_environment, run_client

SLURM_EARLY_SECONDS = 65.0
"""Seconds by which Slurm's signal may come before its time: up to 60 (sbatch(1), --signal), and some to be handled."""
OUT_OF_TIME = "out-of-time"
"""File in an attempt's log directory: its ranks were ended as they would not have trained before the time limit, or
before the end of the grace time, in which case it has the word PREEMPTED."""
PREEMPTED = "preempted"
_REQUEUE_SECONDS = 40.0
"""How long it takes to end ranks and to requeue the job, at most."""
_LAST_SECONDS = 20.0
"""As above where the machine is not overloaded: until then ranks may be busy with a save."""
_TIME_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_GRACE_SHARE = 1 / 3
"""Share of a grace time that is left to end the ranks and to requeue the job, if the above is longer."""
_SHORTENED_SECONDS = 30.0
"""How much earlier than its limit a job ends that is preempted, at least: Slurm may count in minutes."""
_AGAIN_SECONDS = 60.0
"""Between two questions where Slurm has not answered."""


def time_left_command(job: str) -> list[str]:
    """Return the squeue command whose output parse_time_left understands."""
    return ["squeue", "--noheader", f"--jobs={job}", "--format=%L %T %l %M %S %e"]


def parse_time_left(text: str) -> float | None:
    """Return seconds from squeue's `days-hours:minutes:seconds` and the state; None for UNLIMITED and other text.

    Also None for a job that does not run any more: it has no time left, but is not at its limit.
    """
    left, state, *_ = [*text.split(), "", ""]
    match = _TIME_LEFT.fullmatch(left)
    if match is None or state not in ("RUNNING", "SIGNALING", ""):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_grace(text: str) -> float | None:
    """Return the seconds until the end of a job that is preempted; None of any other.

    text: of the same command, with SLURM_TIME_FORMAT=%s. Slurm then changes the end of the job, and not its limit, from
    which squeue tells how much time is left.
    """
    try:
        _, state, limit, used, start, end = text.split()
        seconds, limited, elapsed = float(end) - float(start), parse_time_left(limit), parse_time_left(used)
    except ValueError:
        return None
    if state not in ("RUNNING", "SIGNALING") or elapsed is None:
        return None
    is_shorter = limited is None or seconds < limited - _SHORTENED_SECONDS
    return max(seconds - elapsed, 0.0) if is_shorter else None


def read_time_left(job: str) -> float | None:
    """Return the seconds until the job's time limit, as Slurm has it now; None without an answer, or a limit."""
    return parse_time_left(run_client(time_left_command(job)).out)


class TimeLimit:
    """Asks Slurm how much time a job has left: at first, and when it should be over, as limits may be changed."""

    def __init__(self, job: str, notice: float) -> None:
        """notice: seconds before the limit at which ranks are asked to stop (launch.signal_seconds)."""
        self._command, self._notice = time_left_command(job), notice
        self._next, self._end = 0.0, float("inf")
        self._question: subprocess.Popen[str] | None = None
        self._grace: float | None = None

    @property
    def is_preempted(self) -> bool:
        """Whether Slurm has given the job a time to end by that is before its limit, as it does to preempt it."""
        return self._grace is not None

    def ask_again(self) -> None:
        """Ask at once: the job was asked to stop, maybe as it is preempted."""
        self.close()
        self._question, self._next = None, 0.0

    def is_near(self) -> bool:
        """Return whether the ranks have to stop now; never waits for Slurm."""
        if self._question is None and time.monotonic() >= self._next:
            self._question = subprocess.Popen(
                self._command,
                env={**client_environment(), "SLURM_TIME_FORMAT": "%s"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        if self._question is None or self._question.poll() is None:
            return False
        text = self._question.communicate()[0]
        self._question = None
        grace = parse_grace(text)
        left = parse_time_left(text) if grace is None else grace
        self._grace = self._grace or grace
        self._end = time.monotonic() + left if left is not None else float("inf")
        self._next = time.monotonic() + (_AGAIN_SECONDS if left is None else max(left - self._notice, 1.0))
        return left is not None and left <= self._notice

    def leaves_time(self, saving: bool = False) -> bool:
        """Return whether ranks may go on: later, the job could not be requeued before its limit.

        saving: whether they may be busy with a save, for which they have longer than to start.
        """
        seconds = min(self._notice / 2, _LAST_SECONDS) if saving else min(self._notice, _REQUEUE_SECONDS)
        if saving and self._grace is not None:
            seconds = min(seconds, _GRACE_SHARE * self._grace)
        return time.monotonic() < self._end - seconds

    def close(self) -> None:
        """End a question that was not answered."""
        if self._question is not None:
            self._question.kill()
            self._question.communicate()
