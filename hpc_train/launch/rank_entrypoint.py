"""The entry point of every rank of our own jobs: `python -m hpc_train.launch.rank_entrypoint RUN_DIR`.

The stop handlers come first, before torch is imported. submitit's own process entry is not used, because its
handlers serve rank 0 only and ignore SIGTERM; everything that a rank needs is in job.json.
"""

from __future__ import annotations

from hpc_train.runtime import stop_request

# Whoever imports this module has handlers already.
_stop_request = stop_request.install_stop_handlers() if __name__ == "__main__" else stop_request.StopRequest()

import io  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any, NoReturn  # noqa: E402

from hpc_train.garbage_collection import pause_gc  # noqa: E402
from hpc_train.processes import signal_at_parent_end  # noqa: E402

if TYPE_CHECKING:
    from hpc_train.resilience.heartbeat import Heartbeat
    from hpc_train.training.records.rank_log import RankLog, StreamLines


def import_training() -> None:
    """Import torch and all that training needs, and keep the garbage collector away from these modules.

    During the import, collections would scan all modules loaded so far again and again, which takes a quarter of a
    rank's start. Later collections, in the middle of a step, would scan all modules, too.
    """
    with pause_gc(freeze=True):
        import torch._dynamo  # noqa: F401  the first optimizer asks for it

        import hpc_train.training.rank  # noqa: F401


ATTEMPT_VARIABLE = "HPC_TRAIN_ATTEMPT"
"""Environment variable: number of the attempt that this rank belongs to."""


def main(run_dir: str) -> int:
    """Run this process's rank, and return its exit code. A failure is recorded for the process that tells the user."""
    from hpc_train.launch.rank_stacks import answer_stack_requests
    from hpc_train.runtime.identity import identify_process, make_single_identity
    from hpc_train.training.records.rank_log import RankLog

    identity = identify_process(os.environ) or make_single_identity()
    logs = Path(run_dir) / "logs" / os.environ.get(ATTEMPT_VARIABLE, "0")
    lines = RankLog(logs / f"task-{identity.process}.jsonl")
    _redirect_output(logs / f"task-{identity.process}.log", lines)
    answer_stack_requests()
    if identity.launcher == "submitit":
        # If the controller of the local pool is killed it cannot signal the ranks: they then save and stop.
        signal_at_parent_end(signal.SIGTERM)
    try:
        return _run_rank(Path(run_dir), identity.process, lines)
    except BaseException as error:
        return _report_failure(error, logs, identity.process, identity.host, lines.read_job_clock())


def _run_rank(run_dir: Path, process: int, lines: RankLog) -> int:
    import logging
    from datetime import timedelta

    from hpc_train.launch.job_spec import read_spec
    from hpc_train.launch.local.node_sharing import bind_to_share
    from hpc_train.launch.recovery.elastic import shrink_config
    from hpc_train.launch.slurm.slurm_cli import current_job_id
    from hpc_train.launch.snapshot.import_guard import guard_imports
    from hpc_train.launch.state.attempts import cancel_marker_path
    from hpc_train.resilience.chaos import FaultInjector
    from hpc_train.training.records.rank_log import LevelHandler

    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[LevelHandler(sys.stdout, lines)])
    job = current_job_id(os.environ)
    if job is not None and cancel_marker_path(run_dir, job).exists():
        _stop_request.ask("cancel")  # what the signal would have said, that came before there was a rank
    spec = read_spec(run_dir / "job.json")
    guard_imports(spec, process == 0)
    config = spec.run_config()
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    # Before the imports: a rank can be stuck in them, too.
    heartbeat = _start_heartbeat(run_dir / "logs" / str(attempt) if config.resilience.watch else None, process, lines)
    # Also before them: the threads that torch starts inherit the CPUs of the process.
    if config.launch.bind:
        bind_to_share()
    import_training()

    from hpc_train.runtime.start import join
    from hpc_train.runtime.store.client import JobStore
    from hpc_train.training.rank import run_rank

    if config.resilience.chaos:
        FaultInjector(run_dir, process).before_meeting()
    launch = config.launch
    timeout, meeting = timedelta(seconds=launch.timeout_seconds), timedelta(seconds=launch.rendezvous_seconds)
    task = join(interface=config.cluster.fabric.interface, timeout=timeout, meeting=meeting)
    if isinstance(task.store, JobStore):
        lines.record_clock(task.store.read_clock)
    config = shrink_config(config, spec.ranks, task.processes)
    return run_rank(config, task, spec.folder(), attempt, _stop_request, heartbeat, lines)


def _start_heartbeat(logs: Path | None, process: int, lines: RankLog) -> Heartbeat:
    """Begin to tell the agent of this node where this rank is; logs: None if nobody is to watch."""
    import logging

    from hpc_train.resilience.heartbeat import Heartbeat

    heartbeat = Heartbeat(logs, process)
    if heartbeat.failure:
        logging.getLogger("hpc_train.launch").warning("nobody watches task %d: %s", process, heartbeat.failure)
    lines.heartbeat = heartbeat
    return heartbeat


def _report_failure(error: BaseException, logs: Path, process: int, host: str, at: float) -> int:
    import traceback

    from hpc_train.checkpoint.errors import CheckpointError
    from hpc_train.errors import EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_USER_ERROR, IncompleteRun, UserError
    from hpc_train.training.records.run_records import record_failure

    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    _keep_stop_request(error, logs)
    record_failure(logs, process, host, error, at)
    if isinstance(error, (UserError, IncompleteRun)):
        print(f"hpc-train: {error}", flush=True)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
    traceback.print_exception(error, file=sys.stdout)
    return EXIT_NO_REQUEUE if isinstance(error, CheckpointError) else 1


def _keep_stop_request(error: BaseException, logs: Path) -> None:
    """Let a rank that was asked to stop while it waited for others say so: the next start does not get the signal.

    Where another rank has failed before, the signal may be that of a launcher that ends the rest.
    """
    from contextlib import suppress

    from hpc_train.errors import MissingRanksError
    from hpc_train.training.records.run_records import REQUEUE_MARKER, read_first_failure

    if _stop_request.requested and isinstance(error, MissingRanksError) and read_first_failure(logs) is None:
        with suppress(OSError):
            (logs / REQUEUE_MARKER).touch(mode=0o600)


def _redirect_output(path: Path, lines: RankLog) -> None:
    """Send all that this process and its children print to `path` from now on; lines of Python also to `lines`."""
    from hpc_train.training.records.rank_log import StreamLines

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    # The descriptors themselves: libraries in C, child processes and faulthandler do not write through sys.stdout.
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _open_lossy(1, StreamLines(lines)), _open_lossy(2, StreamLines(lines))


class _LossyFile(io.FileIO):
    """A log that drops output that cannot be written, so that no disk ends the training: full, read-only, or gone."""

    def __init__(self, descriptor: int, lines: StreamLines) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lines = lines

    def write(self, data: Any, /) -> int:
        self._lines.add(data)
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_lossy(descriptor: int, lines: StreamLines) -> io.TextIOWrapper:
    # Like Python's own streams under `-u`, which keep nothing back.
    file = io.BufferedWriter(_LossyFile(descriptor, lines), buffer_size=1)
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", write_through=True)


def exit_now(code: int) -> NoReturn:
    """Exit at once: a rank that failed must not wait in the exit handlers of libraries for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main(sys.argv[1]))
