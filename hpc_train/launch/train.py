"""`hpc-train train`: as a rank if a launcher started this process as one, else as the launcher of local ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.compose import compose
from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR, IncompleteRun, UserError
from hpc_train.launch.precheck import check_agreement, check_files
from hpc_train.launch.spec import JobSpec, make_spec
from hpc_train.parallel.support import check_support
from hpc_train.parallel.support.pipeline import from_file
from hpc_train.parallel.support.server import needs_mpi
from hpc_train.regular_files import TEXT, read_regular
from hpc_train.runtime.identity import Identity, identify
from hpc_train.runtime.stop import StopRequest
from hpc_train.terminal import for_stream
from hpc_train.training.folder import RunFolder, check_owner, new_attempt, open_folder, prepare, write_private
from hpc_train.training.records import read_metrics

if TYPE_CHECKING:
    from hpc_train.api import Task
    from hpc_train.launch.code.snapshot import Snapshot


def train_here(overrides: Sequence[str], config_dir: str | None, stop: StopRequest) -> int:
    """Train on this machine, or as one rank of the job that this process belongs to; returns the exit code."""
    me = identify(os.environ)
    config = compose(overrides, config_dir)
    if me is not None:
        return _as_rank(config, me, stop)
    if config.launch.kind != "local":
        raise UserError(f"launch={config.launch.kind}: `hpc-train train` runs here; use `hpc-train submit` for Slurm")
    return _as_launcher(config, stop)


def _as_launcher(config: RunConfig, stop: StopRequest) -> int:
    from hpc_train.launch.local import local_ranks

    if mpi := needs_mpi(config):
        raise UserError(f"{mpi}: MPI must start the ranks; use mpirun -n RANKS hpc-train train ..., or srun --mpi=pmix")
    ranks = local_ranks(config)
    folder = open_folder(config)
    check_owner(folder.path)
    _refuse_a_second(folder)
    freeze(config, ranks, folder)
    return run_here(config, folder, ranks, stop)


def run_here(config: RunConfig, folder: RunFolder, ranks: int, stop: StopRequest) -> int:
    """Run what is frozen in this folder by ranks of this machine, unless it is done; returns the exit code."""
    from hpc_train.launch.failures import explain
    from hpc_train.launch.local import start_pool, threads_of
    from hpc_train.launch.state.attempts import mark_result
    from hpc_train.launch.watch import KILLED, WarningPrinter, watch

    printer = WarningPrinter()
    with printer.listening():
        done = finished(config, folder)
    if done:
        print(done)
        return EXIT_DONE
    attempt = new_attempt(folder)
    job = start_pool(folder, attempt, ranks, threads_of(config, ranks))
    code = watch(job, folder, attempt, config.train.log_every, stop, printer)
    mark_result(folder.logs(attempt), code)  # where the controller was killed it could not
    if code == KILLED:
        print("hpc-train: killed; what was not saved is lost", file=sys.stderr)
    elif code not in (EXIT_DONE, EXIT_REQUEUE):
        why = explain(folder.logs(attempt)) or f"the ranks left no reason; see {folder.logs(attempt)}"
        print(f"hpc-train: {for_stream(why, sys.stderr)}", file=sys.stderr)
    return code


def _refuse_a_second(folder: RunFolder) -> None:
    """Before anything in the run directory is changed. The ranks see to it for certain, also across machines.

    A job of Slurm that still waits there would run what is frozen now.
    """
    if (folder.checkpoints / "lock").exists():  # rare; and this import takes a second
        from hpc_train.checkpoint.lock import refuse_if_locked

        refuse_if_locked(folder.checkpoints)
    if folder.submitit.is_dir():
        from hpc_train.launch.clients import ask
        from hpc_train.launch.whole import refuse_open

        refuse_open(folder.path, ask)


def check_run(config: RunConfig, ranks: int) -> Degrees:
    """Everything that can be checked before any rank starts; returns the degrees."""
    from hpc_train.models.shape import check_shape

    degrees = check_support(config, ranks)
    check_shape(config.model)
    check_agreement(config)
    return degrees


def freeze(
    config: RunConfig,
    ranks: int,
    folder: RunFolder | None = None,
    why: str | None = None,
    code: Snapshot | None = None,
) -> JobSpec:
    """Check the run and write its directory with its job spec: from here on, nothing of conf/ is read again.

    why: of `planned`, where that was asked before. code: the snapshot that the job runs.
    """
    config, told = planned(config, ranks)
    why = why or told
    degrees = check_run(config, ranks)
    folder = folder or open_folder(config)
    check_files(config, folder)
    spec = make_spec(config, folder, ranks, asdict(degrees), store_of(config), code)
    schedule = schedule_text(config)
    prepare(folder, spec.run_config())
    if schedule is not None:
        write_private(folder.schedule, schedule)
    if why is not None:
        write_private(folder.plan, why)
    spec.write(folder.job)
    return spec


def planned(config: RunConfig, ranks: int | None) -> tuple[RunConfig, str | None]:
    """(the run with parallel=auto decided, why at length); a run that says all itself stays, and there is no why.

    ranks: of the job; None where the planner may say how many nodes it takes.
    """
    if not config.parallel.auto:
        return config, None
    from hpc_train.planner.auto import decide

    decision = decide(config, ranks)
    print(f"hpc-train: {decision.line}", file=sys.stderr)
    return decision.config, decision.text


def schedule_text(config: RunConfig) -> str | None:
    """The text of the pipeline's order, where it is in a file, of which the run has its own copy."""
    pipeline = config.parallel.pipeline
    return _schedule_file(Path(pipeline.schedule).expanduser()) if from_file(pipeline) else None


def _schedule_file(path: Path) -> str:
    try:
        return read_regular(path, TEXT, follow=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"parallel.pipeline.schedule={path}: {why}; give a file with a pipeline's order") from error


def store_of(config: RunConfig, build: bool = True) -> Path | None:
    """The token store that the run reads, built now if it must be: text that changes later changes nothing of the run.

    Where set-up lines of the batch script may be what brings the text to the node, the ranks build it. build: False
    only says where it will be.
    """
    from hpc_train.config.data import TokenDataConfig

    if not isinstance(config.data, TokenDataConfig) or config.launch.setup:
        return None
    from hpc_train.data.build import ensure, store_path

    return ensure(config.data) if build else store_path(config.data)


def finished(config: RunConfig, folder: RunFolder) -> str | None:
    """A line that says so if the run in this folder has all its steps; None if there is something left to do.

    Only for a number of steps: how many an epoch has is known once the data is open. A last checkpoint that is damaged,
    or has NaN in it, is for the ranks to notice.
    """
    wanted, saved = config.train.wanted_steps, folder.steps()
    if config.checkpoint.resume != "auto" or wanted is None or not saved or saved[-1] < wanted:
        return None
    from hpc_train.checkpoint import committed, verify

    newest = committed(folder.checkpoints)[-1]  # after a rollback this is not the highest
    if newest < wanted or verify(folder.checkpoints, newest) or not _is_good(folder, newest):
        return None
    return f"already done: {folder.path} has its {wanted} steps; more of them with train.steps, or use a new run_dir"


def _is_good(folder: RunFolder, step: int) -> bool:
    """Whether the last step is sound, and its evaluation was not skipped by a stop or has been made up for."""
    from hpc_train.checkpoint.catalogue import locate
    from hpc_train.checkpoint.manifest import read
    from hpc_train.checkpoint.poison import poison_of

    path = locate(folder.checkpoints, step)
    manifest = read(path, step)
    if poison_of(path, manifest) is not None:
        return False
    if not manifest.extra.get("owes_validation", False):
        return True
    told = read_metrics(folder.metrics)
    return bool(told) and told[-1]["step"] == step and "validation_loss" in told[-1]


def _as_rank(config: RunConfig, me: Identity, stop: StopRequest) -> int:
    """One rank of srun, torchrun or mpirun. Process 0 decides the run directory, the others take it from the store."""
    import logging

    from hpc_train.launch.clients import slurm_job
    from hpc_train.launch.imports import import_training
    from hpc_train.launch.state.attempts import mark_begun, mark_result
    from hpc_train.launch.task import leave

    import_training()

    from hpc_train.runtime.start import join
    from hpc_train.training.rank import run_rank

    logging.basicConfig(level=logging.INFO if me.process == 0 else logging.WARNING, format="%(message)s")
    for handler in logging.getLogger().handlers:  # all ranks print here: what one has reported is enough
        handler.addFilter(lambda record: not getattr(record, "repeated", False))
    os.umask(0o077)
    logs = None
    try:
        timeout = timedelta(seconds=config.launch.timeout_seconds)
        meeting = timedelta(seconds=config.launch.rendezvous_seconds)
        task = join(interface=config.cluster.fabric.interface, timeout=timeout, meeting=meeting)
        answer = share_spec(config, task)
        if answer.spec is None:
            return EXIT_DONE
        logs = answer.spec.folder().logs(answer.attempt)
        if me.process == 0:
            mark_begun(logs, me.launcher, os.getpid(), slurm_job(os.environ))
        code = run_rank(answer.spec.run_config(), task, answer.spec.folder(), answer.attempt, stop)
        if me.process == 0:
            mark_result(logs, code)
        return code
    except BaseException as error:
        # Libraries' exit handlers (MPI_Finalize is one) would wait for peers that may never come.
        leave(_tell(error, me, logs))


def _tell(error: BaseException, me: Identity, logs: Path | None) -> int:
    """Say why this rank ends, once for all ranks; returns its exit code.

    The whole traceback is in the log of the rank.
    """
    from hpc_train.launch.state.attempts import mark_result

    if isinstance(error, _ToldElsewhere):
        return EXIT_USER_ERROR
    code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
    if logs is None:
        print(_before_the_run(error), file=sys.stderr)
        return code
    first = _is_first(logs)
    text = _record(error, me, logs)
    mark_result(logs, code)
    if first:
        print(f"hpc-train: {text}", file=sys.stderr)
    return code


def _before_the_run(error: BaseException) -> str:
    """Return what to print while no log can be written yet."""
    import traceback

    if isinstance(error, (UserError, IncompleteRun)):
        return f"hpc-train: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


def _is_first(logs: Path) -> bool:
    """Whether no other rank of this attempt has reported its failure yet."""
    try:
        os.close(os.open(logs / "told", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _record(error: BaseException, me: Identity, logs: Path) -> str:
    """Record the failure, and its traceback in the rank's log; returns what to print."""
    from hpc_train.launch.failures import FirstError
    from hpc_train.training.failure import record_failure

    failure = record_failure(logs, me.process, me.host, error)
    if failure.user_error:
        return failure.message
    log = logs / f"task-{me.process}.log"
    log.touch(0o600)
    with log.open("a") as file:
        file.write(failure.traceback)
    found = FirstError(me.process, failure.text(), me.host, failure.traceback, tuple(failure.summary))
    return found.brief(log)


class _ToldElsewhere(Exception):
    """Process 0 tells the user what is wrong."""


@dataclass(frozen=True)
class Answer:
    """What process 0 tells the others: what to run, or that there is nothing to do."""

    spec: JobSpec | None
    attempt: int = 0


def share_spec(config: RunConfig, task: Task) -> Answer:
    """Process 0 freezes the run; everybody gets its spec and attempt, or an exception where it could not."""
    assert task.store is not None
    if task.process != 0:
        text = task.store.get("spec").decode()
        if task.store.add("heard", 1) == task.processes - 1:
            task.store.set("all heard", "")
        return _understood(json.loads(text))
    error: UserError | None = None
    message: dict[str, Any] = {}
    try:
        message = _decide(config, task.processes)
    except UserError as wrong:
        error, message = wrong, {"refused": True}
    task.store.set("spec", json.dumps(message))
    if task.processes > 1:
        task.store.wait(["all heard"])  # the store ends with this process
    if error is not None:
        raise error
    return _understood(message)


def _decide(config: RunConfig, processes: int) -> dict[str, Any]:
    spec = freeze(config, processes)
    if done := finished(config, spec.folder()):
        print(done)
        return {}
    return {"spec": asdict(spec), "attempt": new_attempt(spec.folder())}


def _understood(message: dict[str, Any]) -> Answer:
    if "refused" in message:
        raise _ToldElsewhere
    return Answer(JobSpec(**message["spec"]), message["attempt"]) if message else Answer(None)
