"""What every rank of our own jobs runs: `python -m hpc_train.launch.task RUN_DIR`.

The stop handlers come first, before torch is imported. submitit's own process entry is not used, because its handlers
serve rank 0 only and ignore SIGTERM; everything that a rank needs is in job.json.
"""

from __future__ import annotations

from hpc_train.runtime import stop

_request = stop.install() if __name__ == "__main__" else stop.StopRequest()  # whoever imports us has handlers already

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NoReturn  # noqa: E402

ATTEMPT_VARIABLE = "HPC_TRAIN_ATTEMPT"


def main(run_dir: str) -> int:
    """Run this process's rank; returns its exit code. What went wrong is recorded for whoever tells the user."""
    from hpc_train.launch.stacks import answer_stack_requests
    from hpc_train.runtime.identity import alone, identify

    me = identify(os.environ) or alone()
    logs = Path(run_dir) / "logs" / os.environ.get(ATTEMPT_VARIABLE, "0")
    _write_to(logs / f"task-{me.process}.log")
    answer_stack_requests()
    if me.launcher == "submitit":
        _stop_with_parent()
    try:
        return _run(Path(run_dir), me.process)
    except BaseException as error:
        return _failed(error, logs, me.process, me.host)


def _run(run_dir: Path, process: int) -> int:
    import logging
    from datetime import timedelta

    from hpc_train.launch.clients import slurm_job
    from hpc_train.launch.code.worker import enter
    from hpc_train.launch.imports import import_training
    from hpc_train.launch.share import take_share
    from hpc_train.launch.spec import read_spec
    from hpc_train.launch.state.attempts import cancel_marker

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    job = slurm_job(os.environ)
    if job is not None and cancel_marker(run_dir, job).exists():
        _request.ask("cancel")  # what the signal would have said, that came before there was a rank
    spec = read_spec(run_dir / "job.json")
    enter(spec, process == 0)
    config = spec.run_config()
    if config.launch.bind:
        take_share()
    import_training()

    from hpc_train.runtime.start import join
    from hpc_train.training.rank import run_rank

    launch = config.launch
    timeout, meeting = timedelta(seconds=launch.timeout_seconds), timedelta(seconds=launch.rendezvous_seconds)
    task = join(interface=config.cluster.fabric.interface, timeout=timeout, meeting=meeting)
    return run_rank(config, task, spec.folder(), int(os.environ.get(ATTEMPT_VARIABLE, "0")), _request)


def _failed(error: BaseException, logs: Path, process: int, host: str) -> int:
    import traceback

    from hpc_train.checkpoint.errors import CheckpointError
    from hpc_train.errors import EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_USER_ERROR, IncompleteRun, UserError
    from hpc_train.training.failure import record_failure

    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    record_failure(logs, process, host, error)
    if isinstance(error, (UserError, IncompleteRun)):
        print(f"hpc-train: {error}", flush=True)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED
    traceback.print_exception(error, file=sys.stdout)
    return EXIT_NO_REQUEUE if isinstance(error, CheckpointError) else 1


def _write_to(path: Path) -> None:
    """Send everything this process and its children print to `path` from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _stop_with_parent() -> None:
    """Save and stop also when the controller is killed, which then can tell nobody (prctl(2), PR_SET_PDEATHSIG)."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)


def leave(code: int) -> NoReturn:
    """Exit at once: a rank that failed must not wait in the exit handlers of libraries for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
