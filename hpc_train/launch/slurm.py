"""The Slurm back end: from a request to a batch script, through submitit, and from the script to a job."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_train.errors import UserError
from hpc_train.launch.clients import ask
from hpc_train.launch.environment import job_environment
from hpc_train.launch.request import Request
from hpc_train.launch.task import main as run_task
from hpc_train.training.folder import RunFolder, make_submitit, private_files

_JOB = re.compile(r"Submitted batch job (\d+)")
_TOO_LATE = re.compile(r"timed out|Zero Bytes", re.IGNORECASE)


class BatchExecutor(SlurmExecutor):
    """submitit's Slurm executor with our command and environment: tasks read job.json, never a pickle."""

    def __init__(self, folder: RunFolder, request: Request) -> None:
        super().__init__(folder.submitit)
        self._command, self._environment = request.command, environment_of(request)
        self.update_parameters(**request.parameters)

    @property
    def _submitit_command_str(self) -> str:
        return self._command

    @classmethod
    def affinity(cls) -> int:
        """Always usable: a dry run needs no Slurm, and `submit` says itself when there is none."""
        return 2

    def script(self) -> str:
        """The batch script, as it is handed to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        return SlurmJob(folder=self.folder, job_id=self.send(), tasks=list(range(self._num_tasks())))

    def send(self, *options: str) -> str:
        """Hand the script, readable by its owner alone, to sbatch, in the environment that the job gets; the job id."""
        with private_files():  # Slurm runs a job with the umask of its submission
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"script-{uuid.uuid4().hex}.sh"
            path.touch(0o600)
            path.write_text(self.script())
            command, *rest = self._make_submission_command(path)
            job_id = _sbatch([command, *options, *rest], self._environment)
        path.rename(self.folder / f"{job_id}_submission.sh")
        return job_id


def environment_of(request: Request) -> dict[str, str]:
    """The variables that the job gets; what is in the snapshot of its code is looked for there alone."""
    found = job_environment(request.export)
    if request.code and (path := found.pop("PYTHONPATH", "")) and (rest := request.code.without_sources(path)):
        found["PYTHONPATH"] = rest
    return found


def render(folder: RunFolder, request: Request) -> str:
    """The batch script that `submit` would send."""
    return BatchExecutor(folder, request).script()


def submit(folder: RunFolder, request: Request) -> list[str]:
    """Hand the script to sbatch; returns the job id, or those of the chain, all or none of which are submitted.

    Raises UserError with sbatch's own reason if it refuses.
    """
    demand_sbatch()
    environment_of(request)  # before anything is written
    jobs: list[str] = []
    make_submitit(folder)
    there = set(folder.submitit.glob("*"))
    try:
        for _ in range(request.chain):
            with private_files():
                jobs.append(str(BatchExecutor(folder, request).submit(run_task, str(folder.path)).job_id))
    except UserError:
        if jobs:
            ask(["scancel", *jobs])
        for left in set(folder.submitit.glob("*")) - there:
            left.unlink()
        raise
    return jobs


def demand_sbatch() -> None:
    """Raise UserError where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH: submit from a login node of the cluster; --dry-run shows the script"
        )


def _sbatch(command: list[str], env: dict[str, str]) -> str:
    said = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    match = _JOB.search(said.stdout)
    if said.returncode or match is None:
        raise refusal(said.stderr or said.stdout)
    return match[1]


def refusal(text: str) -> UserError:
    """What sbatch said in place of a job id. A controller that answers too late may have taken the job all the same."""
    reason = sbatch_reason(text)
    if _TOO_LATE.search(reason):
        after = "if Slurm took the job all the same, it ends at once, for its files were taken back; submit again"
        return UserError(f"sbatch got no answer: {reason}; {after}")
    hint = "; leave its value empty (launch.extra.<option>=)" if "doesn't allow an argument" in reason else ""
    return UserError(f"sbatch refused the job: {reason}{hint}")


def sbatch_reason(text: str) -> str:
    """sbatch's first error, without its own name in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it gave no reason")
    return first.removeprefix("sbatch: ").removeprefix("error: ")
