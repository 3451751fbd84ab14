"""Hand a request to sbatch through submitit, in the environment that the job gets."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from typing import Any

from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpc_train.errors import UserError
from hpc_train.launch.rank_entrypoint import main as run_task
from hpc_train.launch.slurm.job_environment import job_environment
from hpc_train.launch.slurm.request import JobRequest
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.training.run_directory import RunDirectory, make_files_private, make_submitit_directory

_SUBMITTED = re.compile(r"Submitted batch job (\d+)")
_NO_ANSWER = re.compile(r"timed out|Zero Bytes", re.IGNORECASE)


class BatchExecutor(SlurmExecutor):
    """submitit's Slurm executor with our command and environment: tasks read job.json, never a pickle."""

    def __init__(self, folder: RunDirectory, request: JobRequest) -> None:
        super().__init__(folder.submitit)
        self._command, self._environment = request.command, submission_environment(request)
        self.update_parameters(**request.parameters)

    @property
    def _submitit_command_str(self) -> str:
        return self._command

    @classmethod
    def affinity(cls) -> int:
        """Return a number above zero: usable everywhere.

        A dry run needs no Slurm, and `submit` checks for sbatch itself.
        """
        return 2

    def script(self) -> str:
        """Return the batch script, as it is handed to sbatch."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        return SlurmJob(folder=self.folder, job_id=self.send(), tasks=list(range(self._num_tasks())))

    def send(self, *options: str) -> str:
        """Hand the script to sbatch in the environment that the job gets, and return the job id.

        options: more options of sbatch. The script is readable by its owner alone.
        """
        with make_files_private():  # Slurm runs a job with the umask of its submission
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"script-{uuid.uuid4().hex}.sh"
            path.touch(0o600)
            path.write_text(self.script())
            # Options on the command line override those of the script, so they come before it.
            command, *rest = self._make_submission_command(path)
            job_id = _run_sbatch([command, *options, *rest], self._environment)
        # The name by which submitit finds the script of a job.
        path.rename(self.folder / f"{job_id}_submission.sh")
        return job_id


def submission_environment(request: JobRequest) -> dict[str, str]:
    """Return the variables that the job gets, without PYTHONPATH entries whose code is in the snapshot."""
    variables = job_environment(request.export)
    if request.code and (path := variables.pop("PYTHONPATH", "")) and (rest := request.code.without_sources(path)):
        variables["PYTHONPATH"] = rest
    return variables


def render_script(folder: RunDirectory, request: JobRequest) -> str:
    """Return the batch script that `submit` would send."""
    return BatchExecutor(folder, request).script()


def submit_job(folder: RunDirectory, request: JobRequest) -> list[str]:
    """Hand the script to sbatch, and return the job id, or those of the chain, all or none of which are submitted.

    Raises UserError with sbatch's own reason if it refuses.
    """
    require_sbatch()
    submission_environment(request)  # before anything is written
    jobs: list[str] = []
    make_submitit_directory(folder)
    # submitit writes its files before it calls sbatch: where that refuses, what is new is removed.
    earlier = set(folder.submitit.glob("*"))
    try:
        for _ in range(request.chain):
            with make_files_private():
                jobs.append(str(BatchExecutor(folder, request).submit(run_task, str(folder.path)).job_id))
    except UserError:
        if jobs:
            run_client(["scancel", *jobs])
        for path in set(folder.submitit.glob("*")) - earlier:
            path.unlink()
        raise
    return jobs


def require_sbatch() -> None:
    """Raise UserError where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH: submit from a login node of the cluster; --dry-run shows the script"
        )


def _run_sbatch(command: list[str], env: dict[str, str]) -> str:
    process = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    match = _SUBMITTED.search(process.stdout)
    if process.returncode or match is None:
        raise explain_refusal(process.stderr or process.stdout)
    return match[1]


def explain_refusal(text: str) -> UserError:
    """Turn what sbatch printed in place of a job id into an error.

    Where the controller answered too late, it may have taken the job all the same.
    """
    reason = parse_sbatch_error(text)
    if _NO_ANSWER.search(reason):
        after = "if Slurm took the job all the same, it ends at once, for its files were taken back; submit again"
        return UserError(f"sbatch got no answer: {reason}; {after}")
    hint = "; leave its value empty (launch.extra.<option>=)" if "doesn't allow an argument" in reason else ""
    return UserError(f"sbatch refused the job: {reason}{hint}")


def parse_sbatch_error(text: str) -> str:
    """Return sbatch's first error, without its own name in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Sites print announcements and warnings of plugins before the reason.
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it gave no reason")
    return first.removeprefix("sbatch: ").removeprefix("error: ")
