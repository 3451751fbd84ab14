"""Programs of a cluster: Slurm's and whether its controller answers, Lustre's, environment modules."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

from hpc_train.doctor.finding import Finding, ok, warn

SLURM = ("sbatch", "srun", "squeue", "sinfo", "sacct", "scontrol")
_SECONDS = 20.0

Which = Callable[[str], str | None]
Run = Callable[[list[str]], tuple[int, str]]
"""A command -> its exit code and what it said, in one text."""


def tools(env: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Every check of this file."""
    env = os.environ if env is None else env
    yield slurm_client(shutil.which)
    if shutil.which("scontrol"):
        yield controller(run)
    yield lustre(shutil.which)
    yield modules(env)


def run(command: list[str]) -> tuple[int, str]:
    """Run a command that may hang; 124 where it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {_SECONDS:.0f} s"
    except OSError as error:
        return 127, error.strerror or "cannot be run"
    return done.returncode, " ".join((done.stderr + done.stdout).split())


def slurm_client(which: Which) -> Finding:
    """What `hpc-train submit` and `status` call."""
    there = [name for name in SLURM if which(name)]
    missing = [name for name in SLURM if name not in there]
    if not there:
        return ok("slurm", "no Slurm here; launch=local runs on this machine")
    if missing:
        advice = "submit and status need them all: add Slurm's bin folder to PATH, or load its module"
        return warn("slurm", f"{', '.join(there)}, but no {', '.join(missing)}", advice)
    return ok("slurm", ", ".join(there))


def controller(ask: Run) -> Finding:
    """Whether slurmctld answers."""
    code, said = ask(["scontrol", "ping"])
    if code == 0 and " is UP" in said:
        return ok("slurmctld", said[:120])
    advice = "jobs cannot be submitted now: look at `scontrol ping` and munge, or ask the site"
    return warn("slurmctld", f"does not answer: {said[:120]}", advice)


def lustre(which: Which) -> Finding:
    """lfs, which lays out checkpoints on Lustre."""
    if which("lfs"):
        return ok("lfs", "Lustre's lfs is here")
    return ok("lfs", "no lfs: checkpoints on Lustre, if there are, get the folder's own striping")


def modules(env: Mapping[str, str]) -> Finding:
    """Environment modules, and what is loaded."""
    kind = "Lmod" if "LMOD_VERSION" in env else "environment modules" if "MODULESHOME" in env else None
    if kind is None:
        return ok("modules", "no environment modules")
    loaded = env.get("LOADEDMODULES", "").replace(":", ", ") or "none"
    return ok("modules", f"{kind}; loaded: {loaded}")
