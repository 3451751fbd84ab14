"""Slurm's own commands, asked and never trusted to be there: argument lists, a time limit, everything captured."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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


def slurm_job(env: Mapping[str, str]) -> str | None:
    """The job that `env` is of, as users name it: `12`, or `12_3` of an array; None outside of Slurm."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return env.get("SLURM_JOB_ID")
