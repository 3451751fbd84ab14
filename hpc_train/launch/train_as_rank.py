"""Train as one rank of srun, torchrun or mpirun. Process 0 freezes the run and decides its directory for all."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.run import RunConfig
from hpc_train.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    IncompleteRun,
    MissingRanksError,
    UserError,
)
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.freeze import describe_finished_run, freeze_run, makes_new_directory
from hpc_train.launch.job_spec import JobSpec
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.run_directory import (
    RunDirectory,
    make_attempt,
    remove_refused_run,
)

if TYPE_CHECKING:
    from hpc_train.interfaces import Task

_SECONDS_FOR_REFUSALS = 10
"""Time that the processes of a job have to report the same refusal, once the first one has."""


def train_as_rank(config: RunConfig, identity: ProcessIdentity, stop: StopRequest, output: CommandOutput) -> int:
    """Train as one rank of srun, torchrun or mpirun: process 0 decides the run directory, the others get it from it."""
    from hpc_train.launch.rank_entrypoint import exit_now, import_training
    from hpc_train.launch.slurm.slurm_cli import current_job_id
    from hpc_train.launch.state.attempts import write_attempt_marker, write_result_marker

    import_training()

    from hpc_train.runtime.start import join
    from hpc_train.training.rank import run_rank

    _print_log_lines(identity.process)
    # srun and mpirun start ranks with a umask of the site.
    os.umask(0o077)
    logs = remove_refused = None
    try:
        timeout = timedelta(seconds=config.launch.timeout_seconds)
        meeting = timedelta(seconds=config.launch.rendezvous_seconds)
        task = join(interface=config.cluster.fabric.interface, timeout=timeout, meeting=meeting)
        answer = share_spec(config, task, output)
        if answer.spec is None:
            return EXIT_DONE
        logs = answer.spec.folder().logs(answer.attempt)
        if answer.new_directory:
            remove_refused = partial(_remove_if_all_refuse, task, answer.spec.folder(), dated=config.run_dir is None)
        if identity.process == 0:
            write_attempt_marker(logs, identity.launcher, os.getpid(), current_job_id(os.environ))
        code = run_rank(answer.spec.run_config(), task, answer.spec.folder(), answer.attempt, stop)
        if identity.process == 0:
            write_result_marker(logs, code)
        return code
    except BaseException as error:
        code = _report_failure(error, identity, logs, output)
        if remove_refused is not None and isinstance(error, UserError) and not isinstance(error, MissingRanksError):
            remove_refused()
        # Libraries' exit handlers (MPI_Finalize is one) would wait for peers that may never come.
        exit_now(code)


def _print_log_lines(process: int) -> None:
    """Print log lines to the terminal or file that all ranks of the launcher share: warnings, and all of process 0."""
    import logging

    logging.basicConfig(level=logging.INFO if process == 0 else logging.WARNING, format="%(message)s")
    for handler in logging.getLogger().handlers:  # what one rank has reported is enough
        handler.addFilter(lambda record: not getattr(record, "repeated", False))


def _remove_if_all_refuse(task: Task, folder: RunDirectory, dated: bool) -> None:
    """Remove the new directory of a run that every process has refused.

    It stays if one of them has another reason, or is late: its log then says more. dated: see remove_refused_run.
    """
    from hpc_train.runtime.store.exchange import arrive_at_gate, wait_for_gate

    assert task.store is not None
    with suppress(RuntimeError):  # the store has ended, with the process that held it
        arrive_at_gate(task.store, "refusal", task.processes)
        if task.process == 0 and wait_for_gate(task.store, "refusal", timedelta(seconds=_SECONDS_FOR_REFUSALS)):
            remove_refused_run(folder, dated)


def _report_failure(error: BaseException, identity: ProcessIdentity, logs: Path | None, output: CommandOutput) -> int:
    """Report why this rank ends, unless another rank has reported it; returns its exit code.

    The whole traceback is in the log of the rank.
    """
    from hpc_train.launch.state.attempts import write_result_marker

    if isinstance(error, _ReportedByRank0):
        return EXIT_USER_ERROR
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
    if logs is None:
        output.print_message(_format_early_error(error))
        return code
    is_first = _is_first_report(logs)
    text = _record_rank_failure(error, identity, logs)
    write_result_marker(logs, code)
    if is_first:
        output.report(text)
    return code


def _format_early_error(error: BaseException) -> str:
    """Return what to print while no log can be written yet."""
    import traceback

    if isinstance(error, (UserError, IncompleteRun)):
        return f"hpc-train: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _is_first_report(logs: Path) -> bool:
    """Whether no other rank of this attempt has reported its failure yet."""
    try:
        # O_EXCL is atomic across nodes, also on NFS: exactly one rank makes the file.
        os.close(os.open(logs / "reported", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _record_rank_failure(error: BaseException, identity: ProcessIdentity, logs: Path) -> str:
    """Record the failure, and its traceback in the rank's log; returns what to print."""
    from hpc_train.launch.recovery.failures import FirstError
    from hpc_train.training.records.run_records import record_failure

    failure = record_failure(logs, identity.process, identity.host, error)
    if failure.one_line:
        return failure.message
    log = logs / f"task-{identity.process}.log"
    log.touch(0o600)
    with log.open("a") as file:
        file.write(failure.traceback)
    first_error = FirstError(identity.process, failure.text(), identity.host, failure.traceback, tuple(failure.summary))
    return first_error.brief(log)


class _ReportedByRank0(Exception):
    """Raised on the other processes where process 0 reports the error."""


@dataclass(frozen=True)
class SharedSpec:
    """The message of process 0 to the others: what to run, or that there is nothing to do."""

    spec: JobSpec | None
    attempt: int = 0
    new_directory: bool = False
    """Whether the run directory was made for this run."""


def share_spec(config: RunConfig, task: Task, output: CommandOutput) -> SharedSpec:
    """Freeze the run on process 0; every process gets its spec and attempt.

    Raises UserError on process 0 if it cannot be frozen, and _ReportedByRank0 on the others. A collective.
    """
    from hpc_train.runtime.consensus import decide_on_process_0, leave_together

    try:
        message = decide_on_process_0(task, "spec", lambda: _freeze_on_rank_0(config, task.processes, output))
    except UserError:
        if task.process == 0:
            raise
        raise _ReportedByRank0 from None
    if not message:
        leave_together(task, "spec/done")
        return SharedSpec(None)
    return SharedSpec(JobSpec(**message["spec"]), message["attempt"], message["new_directory"])


def _freeze_on_rank_0(config: RunConfig, processes: int, output: CommandOutput) -> dict[str, Any]:
    is_new = makes_new_directory(config)
    spec = freeze_run(config, processes, output.report)
    if done := describe_finished_run(config, spec.folder()):
        output.print_result(done)
        return {}
    return {"spec": asdict(spec), "attempt": make_attempt(spec.folder()), "new_directory": is_new}
