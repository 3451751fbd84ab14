"""The shell around the ranks of a batch job: markers, modules, signals, and what happens at the end.

Every value in the script is quoted, or is a number. Batch scripts are no login shells, so `module` is looked for,
each of cluster.modules is loaded, and the attempt ends with exit code 93 where one cannot be.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE, UserError
from hpc_train.launch.failures import SRUN_ERRORS
from hpc_train.launch.slurm.containers import Container
from hpc_train.launch.state.attempts import ATTEMPT_MARKER, RESULT_MARKER
from hpc_train.parallel.rules.parameter_server import needs_mpi
from hpc_train.training.run_directory import RunDirectory

# A task that a stop signal ended before its handler was installed; Slurm's own requeue rules do not cover it.
_STOPPED_EARLY = (128 + 12, 128 + 15)


def cpus_per_rank(config: RunConfig) -> int | None:
    """CPUs a rank; None (Slurm's default) where the cores of a node are not known."""
    per_node = config.cluster.ranks_per_node
    if config.launch.cpus_per_rank:
        return config.launch.cpus_per_rank
    return config.cluster.node.cpus // per_node if config.cluster.node.cpus > per_node else None


def lines_before_ranks(config: RunConfig, folder: RunDirectory, python_path: Sequence[str] = ()) -> list[str]:
    """Shell lines before the ranks start: a log directory and a marker for this attempt, and the user's own set-up.

    python_path: where the code of the job is, before all that modules and the set-up add. Of an element of an array,
    the first line, which says which run it is, is another one (sweep/scripts.py).
    """
    return [
        f"run={shlex.quote(str(folder.path))}",
        *SHELL_FUNCTIONS,
        *JOB_ID_LINES,
        *ATTEMPT_LINES,
        'doing="" why="" then="" state="" stopped=""',
        "trap 'result $?' EXIT",
        "# The ranks save and stop at these signals; this shell has to outlive them to requeue the job.",
        "trap : TERM USR2",
        MARK_STARTED_LINE,
        *EXPORT_LINES,
        *setup_lines(config, python_path),
    ]


def setup_lines(config: RunConfig, python_path: Sequence[str]) -> list[str]:
    """Threads, modules, the user's own lines, and where the code is."""
    user = ["doing=launch.setup", "set -e", *config.launch.setup, "set +e"] if config.launch.setup else []
    # Ranks that all take every core of a node slow each other down by an order of magnitude.
    threads = str(config.launch.threads or "${SLURM_CPUS_PER_TASK:-1}")
    return [
        f'export OMP_NUM_THREADS="{threads}"',
        *module_lines(config.cluster),
        *user,
        *_python_path_lines(python_path),
    ]


JOB_ID_LINES = (
    'job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"',
    'job="${job:-$SLURM_JOB_ID}"',
)
ATTEMPT_LINES = (
    '[ -d "$run/logs" ] || refuse "$run/logs is not visible on $(hostname)"',
    "attempt=0",
    'until mkdir "$run/logs/$attempt" 2>/dev/null; do',
    '  [ -d "$run/logs/$attempt" ] || refuse "$run/logs cannot be written from $(hostname)"',
    "  attempt=$((attempt + 1))",
    "done",
    'logs="$run/logs/$attempt"',
)
"""Of `run`: the next attempt, and its log directory."""
MARK_STARTED_LINE = (
    f"put {ATTEMPT_MARKER} "
    '"{\\"job_id\\": \\"$job\\", \\"host\\": \\"$(hostname)\\", \\"nodes\\": \\"$SLURM_JOB_NODELIST\\",'
    ' \\"time\\": $(date +%s)}"'
)
EXPORT_LINES = ('export HPC_TRAIN_ATTEMPT="$attempt" HPC_TRAIN_RENDEZVOUS="$logs"',)


def _python_path_lines(python_path: Sequence[str]) -> list[str]:
    if not python_path:
        return []
    return [f'export PYTHONPATH={shlex.quote(":".join(python_path))}"${{PYTHONPATH:+:$PYTHONPATH}}"']


SHELL_FUNCTIONS = (
    f'refuse() {{ echo "$1"; exit {EXIT_NO_REQUEUE}; }}',
    """put() { printf '%s\\n' "$2" >"$logs/.$1" && mv "$logs/.$1" "$logs/$1"; }""",
    "result() {",
    f'  [ ! -e "$logs/{RESULT_MARKER}" ] || return 0',
    '  [ -z "$doing" ] || why="$doing failed"',
    f'  put {RESULT_MARKER} "{{\\"exit_code\\": $1, \\"then\\": \\"$then\\", \\"why\\": \\"$why\\",'
    ' \\"slurm\\": \\"$state\\", \\"time\\": $(date +%s)}"',
    "}",
)
"""result CODE: leave word of how this attempt ended; only the first time, also when the shell just ends."""


def srun_line(
    config: RunConfig,
    container: Container = Container(),  # noqa: B008 - it is frozen
    share: Sequence[str] = (),
) -> str:
    """The job step: one task a rank; a task that fails ends the others. Nothing starts in a job cancelled by then.

    share: srun's options for a step that has only a part of the job.
    """
    cpus = cpus_per_rank(config)
    options = ["--unbuffered", "--kill-on-bad-exit=1", "--wait=60", *share]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += ["--mpi=pmix"] if needs_mpi(config) else []
    options += container.srun
    inside = config.container.kind != "none"
    task = " ".join(
        [*container.words, shlex.join(python_command(config, inside, "-u", "-m", "hpc_train.launch.rank_entrypoint"))]
    )
    srun = f'srun {" ".join(options)} --output="${{logs//%/%%}}/srun.log" {task} "$run" 2>"$logs/{SRUN_ERRORS}"'
    return f'doing=""; if [ -e "$run/logs/cancel-$job" ]; then (exit {EXIT_REQUEUE}); else {srun}; fi'


def python_command(config: RunConfig, inside: bool, *words: str) -> list[str]:
    """A frozen job does not import from the folder that it runs in (-P)."""
    python = config.container.python if inside else sys.executable
    return [python, *(["-P"] if config.launch.snapshot != "off" else []), *words]


def lines_after_ranks(config: RunConfig) -> list[str]:
    """Shell lines after the ranks: go on if they stopped on purpose or lost a node; else say why they failed."""
    return [
        *verdict_lines(config),
        *_end_chain_lines(config),
        '[ -z "$requeue" ] || scontrol requeue "$job"',
        '[ "$then" != cancel ] || scancel "$job"',
        'exit "$code"',
    ]


def verdict_lines(config: RunConfig) -> list[str]:
    """Shell lines that find out how an attempt ended and leave word of it: `code`, and `requeue` for the job's end.

    Slurm itself requeues a job whose node dies, but only when SlurmdTimeout (300 s by default) has passed; the ranks on
    the other nodes fail long before that.
    """
    early = " || ".join(f'[ "$code" -eq {code} ]' for code in _STOPPED_EARLY)
    report = shlex.join(python_command(config, False, "-m", "hpc_train.launch.failures"))
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
        *_requeue_lines(config),
        "fi",
        'result "$code"',
        f'[ "$code" -eq 0 ] || {report} "$run" "$attempt" "$code" "$requeue"',
    ]


def _requeue_lines(config: RunConfig) -> list[str]:
    """Who goes on after a stop: the next job of a chain, else this job."""
    if config.launch.chain > 1:
        return ["  then=chain"]
    most = config.launch.max_attempts
    return [
        f'  if [ "$((${{SLURM_RESTART_COUNT:-0}} + 1))" -lt {most} ]; then requeue="$why" then=requeue',
        f'  else why="launch.max_attempts={most}"; echo "not requeued: $why"; fi',
    ]


def _end_chain_lines(config: RunConfig) -> list[str]:
    """The jobs that wait to go on with a run that is over, however it ended, have nothing to do."""
    if config.launch.chain < 2:
        return []
    others = 'scancel --quiet --state=PENDING --user="$(id -un)" --jobname="$SLURM_JOB_NAME"'
    return [f'[ "$then" = chain ] || {others}']


LOADED_MODULES_FILE = "modules.txt"
"""In an attempt's folder: what was loaded."""
_MODULE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/@=~-]*")

_MODULE_FUNCTIONS = f"""\
no_module() {{
  why="$1: $(tr -s '[:space:]' ' ' <<<"$2" | tr -cd 'A-Za-z0-9 ._/:,()+@=-' | cut -c 1-300)" doing=""
  echo "hpc-train: $why"
  exit {EXIT_NO_REQUEUE}
}}
know_module() {{
  local init
  type module >/dev/null 2>&1 && return
  for init in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{{lmod,z00_lmod,modules}}.sh \\
    /usr/share/lmod/{{lmod,*}}/init/bash /usr/share/{{modules,Modules}}/init/bash /opt/cray/pe/lmod/lmod/init/bash; do
    [ ! -r "$init" ] || . "$init" >/dev/null 2>&1
    type module >/dev/null 2>&1 && return
  done
  no_module cluster.modules "neither Lmod nor Environment Modules is on $(hostname)"
}}
use_modules() {{
  [ -d "$1" ] || no_module "cluster.module_path" "$1 is not there on $(hostname)"
  module use "$1"
}}
is_loaded() {{
  module is-loaded "$1" >/dev/null 2>&1 && return
  case ":$LOADEDMODULES:" in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac
}}
load_module() {{
  local said="$logs/.module" before="$LOADEDMODULES"
  module load "$1" >"$said" 2>&1 || no_module "cluster.modules: $1 cannot be loaded" "$(cat "$said")"
  cat "$said"
  if is_loaded "$1"; then
    loaded+=("$1")
  elif [ "$before" = "$LOADEDMODULES" ]; then
    no_module "cluster.modules: $1 was not loaded" "$(cat "$said")"
  fi
  rm -f "$said"
}}
keep_modules() {{
  local name
  for name in "${{loaded[@]}}"; do
    is_loaded "$name" || no_module "cluster.modules: $name" "a later one of the list has unloaded it"
  done
  module -t list >"$logs/{LOADED_MODULES_FILE}" 2>&1
}}"""
"""What is said on failure is put where a JSON string and a status line can hold it. An alias has no name of its own in
what is loaded, so that for it the change of the list tells."""


def module_lines(cluster: ClusterConfig) -> list[str]:
    """Shell lines for a script whose `$logs` is the attempt's folder; they end it with 93 where a module is missing.

    Raises UserError for a name that is none.
    """
    _check_module_names(cluster)
    if not (cluster.modules or cluster.module_path or cluster.module_purge):
        return []
    return [
        *_MODULE_FUNCTIONS.splitlines(),
        "loaded=()",
        "know_module",
        *(["module purge"] if cluster.module_purge else []),
        *(f"use_modules {path}" for path in _quote_all(cluster.module_path)),
        *(f"load_module {name}" for name in _quote_all(cluster.modules)),
        "keep_modules",
    ]


def _quote_all(names: Sequence[str]) -> list[str]:
    return [shlex.quote(name) for name in names]


def _check_module_names(cluster: ClusterConfig) -> None:
    for name in cluster.modules:
        if not _MODULE_NAME.fullmatch(name):
            raise UserError(f"cluster.modules: {name!r} is not the name of a module, such as cuda/12.4")
    for path in cluster.module_path:
        if not path.startswith("/") or ":" in path or not path.isprintable():
            raise UserError(f"cluster.module_path: {path!r} is not the absolute path of a folder of modulefiles")
