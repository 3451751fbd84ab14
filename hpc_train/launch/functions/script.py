"""The shell around the ranks of a job of functions: where the call lies, and whether the job runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import EXIT_NO_REQUEUE
from hpc_train.launch.functions.call import ELEMENT, SHARED
from hpc_train.launch.functions.stopping import SIGNAL_SECONDS, requeue_marker

_STOPPED_EARLY = (128 + 12, 128 + 15)
"""srun's exit code where a stop signal came before there was a handler for it."""


def worker_command(python: str, folder: Path) -> str:
    """What a rank runs, as shell words. python: the words that start Python, quoted."""
    return f"{python} -u -m hpc_train.launch.functions.worker {shlex.quote(str(folder))}"


def before(folder: Path, setup: Sequence[str], signal_seconds: int) -> list[str]:
    """Shell lines before the ranks: what the worker has to know, and the user's own set-up."""
    user = ["doing=setup", "set -e", *setup, "set +e", 'doing=""'] if setup else []
    return [
        f"calls={shlex.quote(str(folder))}",
        'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"',
        'job="${job:-$SLURM_JOB_ID}"',
        f'[ -d "$calls" ] || {{ echo "hpc_train: $calls is not visible on $(hostname)"; exit {EXIT_NO_REQUEUE}; }}',
        'doing=""',
        """trap '[ -z "$doing" ] || echo "hpc_train: $doing failed"' EXIT""",
        "# The ranks act on these signals; this shell has to outlive them to requeue the job.",
        "trap : TERM USR2",
        '[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || echo "hpc_train: run $((SLURM_RESTART_COUNT + 1)) of job $job"',
        f'export {ELEMENT}="${{SLURM_ARRAY_TASK_ID:-0}}" {SIGNAL_SECONDS}={signal_seconds}',
        f'export {SHARED}="$calls/${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}_submitted.pkl"',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        *user,
    ]


def srun_options(cpus: int | None) -> list[str]:
    """A rank that fails ends the others."""
    return ["--kill-on-bad-exit=1", "--wait=60", *([f"--cpus-per-task={cpus}"] if cpus else [])]


def after(max_attempts: int) -> list[str]:
    """Shell lines after the ranks: run again if they stopped on purpose or lost a node; end with their exit code."""
    early = " || ".join(f'[ "$code" -eq {code} ]' for code in _STOPPED_EARLY)
    marker = f'"$calls/{requeue_marker("${job}")}"'
    left = 'ls "$calls/${job}_"*"_result.pkl" >/dev/null 2>&1'
    return [
        "code=$?",
        'again=""',
        "# srun says 0, too, when it gave up waiting for a step that was ended from outside.",
        f'[ "$code" -ne 0 ] || {left} || code=1',
        f"if [ -e {marker} ] || {{ {{ {early}; }} && ! {left}; }}; then",
        f'  rm -f {marker}; again="the ranks stopped on purpose"',
        f'elif [ "$code" -ne 0 ] && ! {left} &&',
        """  sinfo -h -N -n "$SLURM_JOB_NODELIST" -o %T | grep -Eq '[*]|^down|^fail'; then""",
        '  again="a node of the job does not answer"',
        "fi",
        "# A job that was cancelled, or is requeued by Slurm, gets the same signals: it is no longer RUNNING.",
        """[ -z "$again" ] || state="$(squeue -h -j "$job" -o %T | head -n 1)\"""",
        'if [ -n "$again" ] && [ "$state" = RUNNING ]; then',
        f'  if [ "$((${{SLURM_RESTART_COUNT:-0}} + 1))" -lt {max_attempts} ]; then',
        '    echo "hpc_train: requeued: $again"; scontrol requeue "$job"',
        f'  else echo "hpc_train: not run again: {max_attempts} runs were allowed"; fi',
        "fi",
        'exit "$code"',
    ]
