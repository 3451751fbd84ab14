"""The Slurm back end: from a run to a batch script, through submitit, and from the script to a job."""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_train.config.degrees import smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.task import main as run_task
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.training.folder import RunFolder

# A task that a stop signal ended before its handler was installed; Slurm's own requeue rules do not cover it.
_STOPPED_EARLY = (128 + 12, 128 + 15)


@dataclass(frozen=True)
class Request:
    """What is asked of Slurm: the parameters of submitit's executor, and the command that runs in the job."""

    nodes: int
    ranks_per_node: int
    command: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class BatchExecutor(SlurmExecutor):
    """submitit's Slurm executor with our command: tasks read job.json, never a pickle."""

    def __init__(self, folder: RunFolder, request: Request) -> None:
        super().__init__(folder.submitit)
        self._command = request.command
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


def nodes_of(config: RunConfig) -> int:
    """cluster.nodes, else the fewest that the parallel degrees fit on. Raises UserError if the site has fewer."""
    cluster = config.cluster
    nodes = cluster.nodes or math.ceil(smallest_world(config.parallel) / cluster.ranks_per_node)
    if cluster.total_nodes and nodes > cluster.total_nodes:
        raise UserError(f"cluster.nodes={nodes}: {cluster.name} has {cluster.total_nodes}")
    return nodes


def make_request(config: RunConfig, folder: RunFolder) -> Request:
    """What this run asks of Slurm. Raises UserError for what the cluster cannot give."""
    nodes, per_node = nodes_of(config), config.cluster.ranks_per_node
    _check_time(config)
    options = _resources(config, folder, nodes, per_node)
    options["setup"] = _before(config, folder)
    options["teardown"] = _after(config)
    return Request(nodes, per_node, _srun(config, per_node), options)


def _file_pattern(path: Path) -> str:
    """A path as Slurm wants it where % introduces a pattern."""
    return str(path).replace("%", "%%")


def _check_options(options: dict[str, str]) -> None:
    for name in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(f"launch.extra: {name!r} is not the long name of an sbatch option, such as mail-type")


def _resources(config: RunConfig, folder: RunFolder, nodes: int, per_node: int) -> dict[str, Any]:
    launch, site, node = config.launch, config.cluster.slurm, config.cluster.node
    wanted = {
        "job_name": launch.name,
        "time": launch.time_minutes,
        "nodes": nodes,
        "ntasks_per_node": per_node,
        "cpus_per_task": _cpus(config, per_node),
        "partition": launch.partition or site.partition,
        "constraint": launch.constraint or site.constraint,
        "account": launch.account,
        "qos": launch.qos,
        "exclude": launch.exclude,
        "mem": f"{round(launch.memory_gib * 1024)}M" if launch.memory_gib else None,
        "exclusive": True if site.exclusive else None,
        "gpus_per_node": node.gpus if node.gpus and site.gpu_request == "gpus_per_node" else None,
        "gres": f"gpu:{node.gpus}" if node.gpus and site.gpu_request == "gres" else None,
        "signal_delay_s": launch.signal_seconds,
    }
    _check_options(launch.extra)
    extra = {"requeue": True, "output": _file_pattern(folder.path / "logs") + "/job-%j.log", **launch.extra}
    if launch.reservation:
        extra["reservation"] = launch.reservation
    fixed = {"wckey": None, "stderr_to_stdout": True, "use_srun": False, "additional_parameters": extra}
    return {key: value for key, value in wanted.items() if value is not None} | fixed


def _cpus(config: RunConfig, per_node: int) -> int | None:
    """CPUs a rank; None (Slurm's default) where the cores of a node are not known."""
    if config.launch.cpus_per_rank:
        return config.launch.cpus_per_rank
    return config.cluster.node.cpus // per_node if config.cluster.node.cpus > per_node else None


def _check_time(config: RunConfig) -> None:
    limit, asked = config.cluster.slurm.max_time_minutes, config.launch.time_minutes
    if limit is not None and asked > limit:
        raise UserError(
            f"launch.time_minutes={asked}: {config.cluster.name} allows {limit}; a job that stops is requeued"
        )
    if config.launch.signal_seconds >= asked * 60:
        raise UserError(
            f"launch.signal_seconds={config.launch.signal_seconds}: not before the end of a job of {asked} minutes; "
            "it would be told to stop at its start"
        )


def _before(config: RunConfig, folder: RunFolder) -> list[str]:
    """Shell lines before the ranks start: a log directory for this attempt, and the user's own set-up."""
    user = ["set -e", *config.launch.setup, "set +e"] if config.launch.setup else []
    # Ranks that all take every core of a node slow each other down by an order of magnitude.
    threads = str(config.launch.threads or "${SLURM_CPUS_PER_TASK:-1}")
    return [
        f"run={shlex.quote(str(folder.path))}",
        '[ -d "$run/logs" ] || { echo "$run/logs is not visible on $(hostname)"; exit 93; }',
        "attempt=0",
        'until mkdir "$run/logs/$attempt" 2>/dev/null; do attempt=$((attempt + 1)); done',
        'logs="$run/logs/$attempt"',
        'export HPC_TRAIN_ATTEMPT="$attempt" HPC_TRAIN_RENDEZVOUS="$logs"',
        f'export OMP_NUM_THREADS="{threads}"',
        "# The ranks save and stop at these signals; this shell has to outlive them to requeue the job.",
        "trap : TERM USR2",
        *user,
    ]


def _srun(config: RunConfig, per_node: int) -> str:
    """The job step: one task a rank; a task that fails ends the others."""
    cpus = _cpus(config, per_node)
    options = ["--unbuffered", "--kill-on-bad-exit=1", "--wait=60"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += ["--mpi=pmix"] if needs_mpi(config) else []
    task = shlex.join([sys.executable, "-u", "-m", "hpc_train.launch.task"])
    return f'srun {" ".join(options)} --output="${{logs//%/%%}}/srun.log" {task} "$run" 2>"$logs/srun.err"'


def _after(config: RunConfig) -> list[str]:
    """Shell lines after the ranks: requeue if they stopped on purpose or lost a node; else say why they failed.

    Slurm itself requeues a job whose node dies, but only when SlurmdTimeout (300 s by default) has passed; the ranks on
    the other nodes fail long before that.
    """
    early = " || ".join(f'[ "$code" -eq {code} ]' for code in _STOPPED_EARLY)
    report = shlex.join([sys.executable, "-m", "hpc_train.launch.report"])
    most = config.launch.max_attempts
    return [
        "code=$?",
        'why="" requeue=""',
        f'if [ -e "$logs/requeue" ] || {early}; then',
        '  why="the ranks stopped on purpose"',
        """elif [ "$code" -ne 0 ] && sinfo -h -N -n "$SLURM_JOB_NODELIST" -o %T | grep -Eq '[*]|^down|^fail'; then""",
        '  why="a node of the job does not answer"',
        "fi",
        "# A job that was cancelled, or is requeued by Slurm, gets the same signals: it is no longer RUNNING.",
        'if [ -n "$why" ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then',
        f'  if [ "$((${{SLURM_RESTART_COUNT:-0}} + 1))" -lt {most} ]; then requeue="$why"',
        f'  else echo "not requeued: launch.max_attempts={most}"; fi',
        "fi",
        f'[ "$code" -eq 0 ] || {report} "$run" "$attempt" "$code" "$requeue"',
        '[ -z "$requeue" ] || scontrol requeue "$SLURM_JOB_ID"',
        'exit "$code"',
    ]


def render(folder: RunFolder, request: Request) -> str:
    """The batch script that `submit` would send."""
    return BatchExecutor(folder, request).script()


def submit(folder: RunFolder, request: Request) -> str:
    """Hand the script to sbatch; returns the job id. Raises UserError with sbatch's own reason if it refuses."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH: submit from a login node of the cluster; --dry-run shows the script"
        )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # submitit echoes what sbatch prints
            return str(BatchExecutor(folder, request).submit(run_task, str(folder.path)).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(f"sbatch refused the job: {_reason(said.getvalue() or str(error))}") from error


def _reason(text: str) -> str:
    """sbatch's first error, without its own name in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it gave no reason")
    return first.removeprefix("sbatch: ").removeprefix("error: ")
