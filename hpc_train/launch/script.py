"""The shell around the ranks of a batch job: markers before and after, the signals, and who runs next.

Every value in it is quoted, or is a number.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.launch.containers import Container
from hpc_train.launch.failures import SRUN_ERRORS
from hpc_train.launch.modules import loading
from hpc_train.launch.state.attempts import BEGUN, RESULT
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.training.folder import RunFolder

# A task that a stop signal ended before its handler was installed; Slurm's own requeue rules do not cover it.
_STOPPED_EARLY = (128 + 12, 128 + 15)


def cpus_of(config: RunConfig) -> int | None:
    """CPUs a rank; None (Slurm's default) where the cores of a node are not known."""
    per_node = config.cluster.ranks_per_node
    if config.launch.cpus_per_rank:
        return config.launch.cpus_per_rank
    return config.cluster.node.cpus // per_node if config.cluster.node.cpus > per_node else None


def before(config: RunConfig, folder: RunFolder, python_path: Sequence[str] = ()) -> list[str]:
    """Shell lines before the ranks start: a log directory and a marker for this attempt, and the user's own set-up.

    python_path: where the code of the job is, before all that modules and the set-up add. Of an element of an array,
    the first line, which says which run it is, is another one (sweep/scripts.py).
    """
    return [
        f"run={shlex.quote(str(folder.path))}",
        *FUNCTIONS,
        *JOB,
        *ATTEMPT,
        'doing="" why="" then="" state="" stopped=""',
        "trap 'result $?' EXIT",
        "# The ranks save and stop at these signals; this shell has to outlive them to requeue the job.",
        "trap : TERM USR2",
        MARK,
        *EXPORTS,
        *set_up(config, python_path),
    ]


def set_up(config: RunConfig, python_path: Sequence[str]) -> list[str]:
    """Threads, modules, the user's own lines, and where the code is."""
    user = ["doing=launch.setup", "set -e", *config.launch.setup, "set +e"] if config.launch.setup else []
    # Ranks that all take every core of a node slow each other down by an order of magnitude.
    threads = str(config.launch.threads or "${SLURM_CPUS_PER_TASK:-1}")
    return [f'export OMP_NUM_THREADS="{threads}"', *loading(config.cluster), *user, *_searching(python_path)]


JOB = (
    'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"',
    'job="${job:-$SLURM_JOB_ID}"',
)
ATTEMPT = (
    '[ -d "$run/logs" ] || refuse "$run/logs is not visible on $(hostname)"',
    "attempt=0",
    'until mkdir "$run/logs/$attempt" 2>/dev/null; do',
    '  [ -d "$run/logs/$attempt" ] || refuse "$run/logs cannot be written from $(hostname)"',
    "  attempt=$((attempt + 1))",
    "done",
    'logs="$run/logs/$attempt"',
)
"""Of `run`: the next attempt, and its log directory."""
MARK = (
    f"put {BEGUN} "
    '"{\\"job_id\\": \\"$job\\", \\"host\\": \\"$(hostname)\\", \\"nodes\\": \\"$SLURM_JOB_NODELIST\\",'
    ' \\"time\\": $(date +%s)}"'
)
EXPORTS = ('export HPC_TRAIN_ATTEMPT="$attempt" HPC_TRAIN_RENDEZVOUS="$logs"',)


def _searching(python_path: Sequence[str]) -> list[str]:
    if not python_path:
        return []
    return [f'export PYTHONPATH={shlex.quote(":".join(python_path))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


FUNCTIONS = (
    f'refuse() {{ echo "$1"; exit {EXIT_NO_REQUEUE}; }}',
    """put() { printf '%s\\n' "$2" >"$logs/.$1" && mv "$logs/.$1" "$logs/$1"; }""",
    "result() {",
    f'  [ ! -e "$logs/{RESULT}" ] || return 0',
    '  [ -z "$doing" ] || why="$doing failed"',
    f'  put {RESULT} "{{\\"exit_code\\": $1, \\"then\\": \\"$then\\", \\"why\\": \\"$why\\",'
    ' \\"slurm\\": \\"$state\\", \\"time\\": $(date +%s)}"',
    "}",
)
"""result CODE: leave word of how this attempt ended; only the first time, also when the shell just ends."""


def step(
    config: RunConfig,
    container: Container = Container(),  # noqa: B008 - it is frozen
    share: Sequence[str] = (),
) -> str:
    """The job step: one task a rank; a task that fails ends the others. Nothing starts in a job cancelled by then.

    share: srun's options for a step that has only a part of the job.
    """
    cpus = cpus_of(config)
    options = ["--unbuffered", "--kill-on-bad-exit=1", "--wait=60", *share]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += ["--mpi=pmix"] if needs_mpi(config) else []
    options += container.srun
    inside = config.container.kind != "none"
    task = " ".join([*container.words, shlex.join(python_of(config, inside, "-u", "-m", "hpc_train.launch.task"))])
    srun = f'srun {" ".join(options)} --output="${{logs//%/%%}}/srun.log" {task} "$run" 2>"$logs/{SRUN_ERRORS}"'
    return f'doing=""; if [ -e "$run/logs/cancel-$job" ]; then (exit {EXIT_REQUEUE}); else {srun}; fi'


def python_of(config: RunConfig, inside: bool, *words: str) -> list[str]:
    """A frozen job does not import from the folder that it runs in (-P)."""
    python = config.container.python if inside else sys.executable
    return [python, *(["-P"] if config.launch.snapshot != "off" else []), *words]


def after(config: RunConfig) -> list[str]:
    """Shell lines after the ranks: go on if they stopped on purpose or lost a node; else say why they failed."""
    return [
        *verdict(config),
        *_end_of_chain(config),
        '[ -z "$requeue" ] || scontrol requeue "$job"',
        '[ "$then" != cancel ] || scancel "$job"',
        'exit "$code"',
    ]


def verdict(config: RunConfig) -> list[str]:
    """Shell lines that find out how an attempt ended and leave word of it: `code`, and `requeue` for the job's end.

    Slurm itself requeues a job whose node dies, but only when SlurmdTimeout (300 s by default) has passed; the ranks on
    the other nodes fail long before that.
    """
    early = " || ".join(f'[ "$code" -eq {code} ]' for code in _STOPPED_EARLY)
    report = shlex.join(python_of(config, False, "-m", "hpc_train.launch.report"))
    return [
        "code=$?",
        'requeue=""',
        "# srun says 0, too, when it gave up waiting for a step that was ended from outside.",
        '[ "$code" -ne 0 ] || [ -e "$logs/done" ] || { code=1 why="the ranks were ended before they were done"; }',
        f'if [ -e "$logs/requeue" ] || {early}; then',
        '  why="the ranks stopped on purpose" stopped=1',
        """elif [ "$code" -ne 0 ] && sinfo -h -N -n "$SLURM_JOB_NODELIST" -o %T | grep -Eq '[*]|^down|^fail'; then""",
        '  why="a node of the job does not answer" stopped=1',
        "fi",
        "# A job that was cancelled, or is requeued by Slurm, gets the same signals: it is no longer RUNNING.",
        """[ "$code" -eq 0 ] || state="$(squeue -h -j "$job" -o '%T %r' | head -n 1 | tr -cd 'A-Za-z_ ')\"""",
        'if [ "$code" -ne 0 ] && [ -e "$run/logs/cancel-$job" ]; then',
        '  why="stopped by hpc-train cancel" then=cancel',
        'elif [ -n "$stopped" ] && [ "${state%% *}" = RUNNING ]; then',
        *_next(config),
        "fi",
        'result "$code"',
        f'[ "$code" -eq 0 ] || {report} "$run" "$attempt" "$code" "$requeue"',
    ]


def _next(config: RunConfig) -> list[str]:
    """Who goes on after a stop: the next job of a chain, else this job."""
    if config.launch.chain > 1:
        return ["  then=chain"]
    most = config.launch.max_attempts
    return [
        f'  if [ "$((${{SLURM_RESTART_COUNT:-0}} + 1))" -lt {most} ]; then requeue="$why" then=requeue',
        f'  else why="launch.max_attempts={most}"; echo "not requeued: $why"; fi',
    ]


def _end_of_chain(config: RunConfig) -> list[str]:
    """The jobs that wait to go on with a run that is over, however it ended, have nothing to do."""
    if config.launch.chain < 2:
        return []
    others = 'scancel --quiet --state=PENDING --user="$(id -un)" --jobname="$SLURM_JOB_NAME"'
    return [f'[ "$then" = chain ] || {others}']
