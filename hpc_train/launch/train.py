"""`hpc-train train`: as a rank if a launcher started this process as one, else as the launcher of local ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import (
    EXIT_DONE,
    EXIT_NO_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USER_ERROR,
    UserError,
)
from hpc_train.launch.command_output import CommandOutput, Report
from hpc_train.launch.freeze import describe_finished_run, freeze_run, makes_new_directory
from hpc_train.launch.train_as_rank import train_as_rank
from hpc_train.parallel.rules.parameter_server import find_mpi_setting
from hpc_train.runtime.identity import identify_process
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.run_directory import (
    RunDirectory,
    check_owner,
    locate_run_directory,
    make_attempt,
    remove_refused_run,
)

if TYPE_CHECKING:
    from hpc_train.launch.local.rank_pool import WarningPrinter


def train_here(overrides: Sequence[str], config_dir: str | None, stop: StopRequest, output: CommandOutput) -> int:
    """Train on this machine, or as one rank of the job that this process belongs to; returns the exit code."""
    identity = identify_process(os.environ)
    config = compose(overrides, config_dir)
    if identity is not None:
        return train_as_rank(config, identity, stop, output)
    if config.launch.kind != "local":
        raise UserError(f"launch={config.launch.kind}: `hpc-train train` runs here; use `hpc-train submit` for Slurm")
    return train_local_ranks(config, stop, output).code


@dataclass(frozen=True)
class LocalRun:
    """A run of this machine's own ranks that has ended."""

    folder: RunDirectory
    code: int
    failure: str | None
    """The first error of the ranks, if they did not end well and one of them left a reason."""


def train_local_ranks(config: RunConfig, stop: StopRequest, output: CommandOutput) -> LocalRun:
    """Freeze a run and train it by ranks of this machine. A new directory is removed if the ranks refuse the run.

    Raises UserError for what is wrong with the run, or if another one is going on in the directory.
    """
    from hpc_train.launch.recovery.failures import explain_failure
    from hpc_train.launch.state.attempts import read_attempts

    is_new = makes_new_directory(config)
    folder, ranks = _freeze_local_run(config, output.report)
    code = run_local_ranks(config, folder, ranks, stop, output)
    failure = None
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        failure = explain_failure(folder.logs(read_attempts(folder.path)[-1].number))
    if code == EXIT_USER_ERROR and is_new:
        remove_refused_run(folder, dated=config.run_dir is None)
    return LocalRun(folder, code, failure)


def _freeze_local_run(config: RunConfig, report: Report) -> tuple[RunDirectory, int]:
    """Freeze a run of this machine's own ranks in its run directory; returns the directory and the number of ranks.

    Raises UserError for what is wrong with the run, or if another one is going on in the directory.
    """
    from hpc_train.launch.local.rank_pool import check_wrap, count_local_ranks

    check_wrap(config.launch.wrap)
    if mpi := find_mpi_setting(config):
        raise UserError(f"{mpi}: MPI must start the ranks; use mpirun -n RANKS hpc-train train ..., or srun --mpi=pmix")
    ranks = count_local_ranks(config)
    folder = locate_run_directory(config)
    check_owner(folder.path)
    _refuse_second_run(folder)
    freeze_run(config, ranks, report, folder)
    return folder, ranks


def run_local_ranks(
    config: RunConfig, folder: RunDirectory, ranks: int, stop: StopRequest, output: CommandOutput
) -> int:
    """Run what is frozen in this folder by ranks of this machine, unless it is done; returns the exit code.

    After a fault that may not come again the ranks are started again, as an attempt of their own.
    """
    from hpc_train.launch.local.rank_pool import EXIT_KILLED, WarningPrinter
    from hpc_train.launch.recovery.failures import explain_failure
    from hpc_train.launch.recovery.restarting import decide_on_this_machine
    from hpc_train.resilience.restart import Action

    printer = WarningPrinter(output)
    with printer.listening():
        done = describe_finished_run(config, folder)
    if done:
        output.print_result(done)
        return EXIT_DONE
    # How often a run may start again is counted from here: a user who calls the command once more has decided anew.
    first_attempt = None
    while True:
        attempt = make_attempt(folder)
        first_attempt = attempt if first_attempt is None else first_attempt
        code = _run_attempt(config, folder, attempt, ranks, stop, output, printer)
        if code in (EXIT_DONE, EXIT_REQUEUE):
            return code
        if code == EXIT_KILLED:
            output.report("killed; what was not saved is lost")
            return code
        why = explain_failure(folder.logs(attempt)) or f"the ranks left no reason; see {folder.logs(attempt)}"
        output.report(why)
        decision = decide_on_this_machine(config, folder, attempt, code, first_attempt)
        if stop.requested or decision.action is Action.END:
            return code
        output.report(decision.why)
        if not decision.goes_on:
            return EXIT_NO_REQUEUE


def _run_attempt(
    config: RunConfig,
    folder: RunDirectory,
    attempt: int,
    ranks: int,
    stop: StopRequest,
    output: CommandOutput,
    printer: WarningPrinter,
) -> int:
    """Start the ranks once and follow them to their end; returns the exit code of the attempt."""
    from hpc_train.launch.local.rank_pool import count_threads_per_rank, follow_ranks, start_ranks
    from hpc_train.launch.state.attempts import write_result_marker

    job = start_ranks(folder, attempt, ranks, count_threads_per_rank(config, ranks), wrap=config.launch.wrap)
    code = follow_ranks(job, folder, attempt, config.train.log_every, stop, output, printer)
    # The controller of the ranks writes it, too, unless it was killed.
    write_result_marker(folder.logs(attempt), code)
    return code


def _refuse_second_run(folder: RunDirectory) -> None:
    """Raise UserError if another run is active in this directory, before anything in it is changed.

    The checkpoint lock of the ranks decides for certain, also across machines. A Slurm job that waits there would run
    what is frozen now.
    """
    if (folder.checkpoints / "lock").exists():  # rare; and this import takes a second
        from hpc_train.checkpoint.storage.lock import refuse_if_locked

        refuse_if_locked(folder.checkpoints)
    if folder.submitit.is_dir():
        from hpc_train.launch.slurm.slurm_cli import run_client
        from hpc_train.launch.submit import refuse_unfinished_job

        refuse_unfinished_job(folder.path, run_client)
