"""Write the batch script of a run: its settings, the functions of job.sh, batch.sh and others, and calls of them.

sbatch copies one file, so the functions stand whole in every script: what was submitted is what runs. Every value
is quoted, or is a number.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.recovery.elastic import check_elastic
from hpc_train.launch.slurm.containers import Container
from hpc_train.launch.slurm.supervisor.agent_reports import RANKS
from hpc_train.parallel.rules.parameter_server import find_mpi_setting
from hpc_train.training.run_directory import RunDirectory

_MODULE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/@=~-]*")


@cache
def shell_functions(kind: Literal["batch", "callables"] = "batch") -> str:
    """Return the text of job.sh and of the other files of the scripts of this kind."""
    names = ("job", "guard", "stop_listener", "batch") if kind == "batch" else ("job", "callables")
    files = [Path(__file__).with_name(f"{name}.sh") for name in names]
    return "\n\n".join(file.read_text().rstrip("\n") for file in files)


END_TOGETHER = ("--kill-on-bad-exit=1", "--wait=60")
"""srun's options by which a rank that fails ends the others."""
_SUPERVISOR_ENDS = ("--kill-on-bad-exit=0", "--wait=60")
"""The same where a supervisor ends them. Slurm's own way takes KillWait (30 s by default): the slurmstepd of each node
sends TERM, sleeps for so long before it sends KILL, and only then tells srun which ranks have ended. --wait is for
ranks whose supervisor is gone."""
_OTHERS_GO_ON = ("--kill-on-bad-exit=0", "--wait=0", "--no-kill")
"""srun's options for ranks that continue when others fail or lose their node (parallel.sync.lost_after_seconds)."""


def checked_lines(name: str, lines: Sequence[str]) -> list[str]:
    """Return shell lines of the user's, the first of which that fails ends the script and is reported by this name."""
    return [f"doing={name}", "set -e", *lines, "set +e"] if lines else []


def cpus_per_rank(config: RunConfig) -> int | None:
    """Return the CPUs of a rank; None (Slurm's default) where the cores of a node are not known."""
    per_node = config.cluster.ranks_per_node
    if config.launch.cpus_per_rank:
        return config.launch.cpus_per_rank
    # Slurm gives one CPU a task otherwise, and binds the task to it.
    return config.cluster.node.cpus // per_node if config.cluster.node.cpus > per_node else None


def lines_before_ranks(config: RunConfig, folder: RunDirectory, nodes: int, python_path: Sequence[str]) -> list[str]:
    """Return the shell lines of a script with one run, up to the start of its ranks.

    nodes: of the run. python_path: where the code of the job is. Raises UserError as setting_lines.
    """
    return [
        f"run={shlex.quote(str(folder.path))}",
        *setting_lines(config, python_path, nodes),
        shell_functions(),
        "begin_run",
        *setup_lines(config),
    ]


def setting_lines(config: RunConfig, python_path: Sequence[str], nodes: int) -> list[str]:
    """Return the assignments that these functions read. nodes: of the run, without spares.

    Raises UserError for text that cannot name a module.
    """
    cluster, launch = config.cluster, config.launch
    _check_spares(config)
    check_elastic(config, nodes)
    _check_module_names(cluster)
    act = config.resilience.act
    report = _module_command(config, "recovery.failures")
    watch = _module_command(config, "slurm.supervisor.supervise", config.resilience.watch)
    restart = _module_command(config, "recovery.restarting", bool(config.resilience.restarts))
    fit = _module_command(config, "slurm.waiting_time", act)
    guard = _module_command(config, "slurm.supervisor.lost_script", act)
    return [
        f"hpc_max_attempts={launch.max_attempts} hpc_chain={launch.chain} hpc_threads={launch.threads or ''}",
        f"hpc_report=({report})",
        f"hpc_python_path={shlex.quote(':'.join(python_path))}",
        f"hpc_modules=({shlex.join(cluster.modules)}) hpc_module_path=({shlex.join(cluster.module_path)})",
        f"hpc_module_purge={str(cluster.module_purge).lower()}",
        f"hpc_watch=({watch}) hpc_restart=({restart})",
        f"hpc_fit=({fit}) hpc_guard=({guard})",
        f"hpc_nodes={nodes} hpc_ranks={nodes * cluster.ranks_per_node} hpc_spares={launch.spares}",
        f"hpc_elastic={str(bool(config.resilience.elastic.min_nodes)).lower()}",
        f"hpc_losses={str(config.parallel.sync.lost_after_seconds is not None).lower()}",
        f"hpc_exclude={shlex.quote(launch.exclude or '')}",
    ]


def _module_command(config: RunConfig, module: str, is_on: bool = True) -> str:
    """Return the words of the shell that run a module of hpc_train.launch in the batch step; none if it is off."""
    return shlex.join(python_command(config, False, "-m", f"hpc_train.launch.{module}")) if is_on else ""


def setup_lines(config: RunConfig) -> list[str]:
    """Return the lines that set threads, load modules, run the user's own lines, and say where the code is."""
    # The user's lines stand outside of any function: what they declare is there for the ranks' command.
    user = checked_lines("launch.setup", config.launch.setup)
    return ["set_threads", "load_modules", *user, "prepend_python_path"]


def srun_line(
    config: RunConfig,
    container: Container,
    share: Sequence[str] = (),
) -> str:
    """Return the line that starts the ranks: one task a rank; a task that fails ends the others.

    share: srun's options for a step that has only a part of the job, which nobody watches.
    """
    # srun does not inherit --cpus-per-task from sbatch since Slurm 22.05.
    cpus = cpus_per_rank(config)
    watched = config.resilience.watch and not share
    # Unbuffered: the last line of a rank that is killed is the one that matters.
    losses = config.parallel.sync.lost_after_seconds is not None
    options = ["--unbuffered", *(_OTHERS_GO_ON if losses else _SUPERVISOR_ENDS if watched else END_TOGETHER)]
    # A step without a name has that of its program, as may others that a user starts in the job.
    options += share or [f"--job-name={RANKS}"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    options += ["--mpi=pmix"] if find_mpi_setting(config) else []
    options += container.srun
    inside = config.container.kind != "none"
    python = python_command(config, inside, "-u", "-m", "hpc_train.launch.rank_entrypoint")
    task = " ".join([*container.words, shlex.join([*config.launch.wrap, *python])])
    return f'run_ranks srun {" ".join(options)} --output="${{logs//%/%%}}/srun.log" {task} "$run"'


def python_command(config: RunConfig, inside: bool, *words: str) -> list[str]:
    """Return the words that start Python, for a shell.

    inside: in the container. A frozen job does not import from the folder that it runs in (-P).
    """
    python = config.container.python if inside else sys.executable
    return [python, *(["-P"] if config.launch.snapshot != "off" else []), *words]


START_RANKS = "start_ranks"
"""Shell function of each script that starts the ranks, at first and again."""


def define_start(command: str) -> list[str]:
    """Return the lines that define START_RANKS. command: as srun_line returns it."""
    return [f"{START_RANKS}() {{", f"  {command}", "}"]


LINE_AFTER_RANKS = "finish_run $?"
"""Right after the ranks: `$?` is their exit code."""


def _check_spares(config: RunConfig) -> None:
    """Raise UserError for spare nodes that could never take over."""
    spares, watched = f"launch.spares={config.launch.spares}", config.resilience
    if not config.launch.spares:
        return
    if config.launch.points_per_job > 1:
        raise UserError(f"{spares}: points that share a job are not started again in it; use launch.points_per_job=1")
    if not (watched.watch and watched.act and watched.restarts):
        raise UserError(
            f"{spares}: a node is replaced by a restart, and those are off; use resilience.watch=true, "
            "resilience.act=true and resilience.restarts of 1 or more"
        )


def _check_module_names(cluster: ClusterConfig) -> None:
    """Raise UserError for what is not the name of a module, or not the path of a folder of modulefiles."""
    for name in cluster.modules:
        if not _MODULE_NAME.fullmatch(name):
            raise UserError(f"cluster.modules: {name!r} is not the name of a module, such as cuda/12.4")
    for path in cluster.module_path:
        if not path.startswith("/") or ":" in path or not path.isprintable():
            raise UserError(f"cluster.module_path: {path!r} is not the absolute path of a folder of modulefiles")
