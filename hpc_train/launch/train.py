"""`hpc-train train`: as a rank if a launcher started this process as one, else as the launcher of local ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from hpc_train.config.compose import compose
from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_REQUEUE, UserError
from hpc_train.launch.spec import JobSpec, make_spec
from hpc_train.parallel.support import check_support
from hpc_train.runtime.identity import Identity, identify
from hpc_train.runtime.stop import StopRequest
from hpc_train.training.folder import RunFolder, new_attempt, open_folder, prepare

if TYPE_CHECKING:
    from hpc_train.api import Task


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
    from hpc_train.launch.local import local_ranks, start_pool, threads_of
    from hpc_train.launch.watch import explain, watch

    ranks = local_ranks(config)
    folder = freeze(config, ranks).folder()
    attempt = new_attempt(folder)
    job = start_pool(folder, attempt, ranks, threads_of(config, ranks))
    code = watch(job, folder, attempt, config.train.log_every, stop)
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        why = explain(folder, attempt) or f"the ranks left no reason; see {folder.submitit}"
        print(f"hpc-train: {why}", file=sys.stderr)
    return code


def check_run(config: RunConfig, ranks: int) -> Degrees:
    """Everything that can be checked before any rank starts; returns the degrees."""
    from hpc_train.models.shape import check_shape

    degrees = check_support(config, ranks)
    check_shape(config.model)
    return degrees


def freeze(config: RunConfig, ranks: int, folder: RunFolder | None = None) -> JobSpec:
    """Check the run and write its directory with its job spec: from here on, nothing of conf/ is read again."""
    degrees = check_run(config, ranks)
    folder = folder or open_folder(config)
    spec = make_spec(config, folder, ranks, asdict(degrees))
    prepare(folder, spec.run_config())
    spec.write(folder.job)
    return spec


def _as_rank(config: RunConfig, me: Identity, stop: StopRequest) -> int:
    """One rank of srun, torchrun or mpirun. Process 0 decides the run directory, the others take it from the store."""
    import logging

    from hpc_train.runtime.start import join
    from hpc_train.training.failure import record_failure
    from hpc_train.training.rank import run_rank

    logging.basicConfig(level=logging.INFO if me.process == 0 else logging.WARNING, format="%(message)s")
    task = join(interface=config.cluster.fabric.interface, timeout=timedelta(seconds=config.launch.timeout_seconds))
    spec, attempt = _share_spec(config, task)
    folder = spec.folder()
    try:
        return run_rank(spec.run_config(), task, folder, attempt, stop)
    except BaseException as error:
        record_failure(folder.logs(attempt), me.process, me.host, error)
        if isinstance(error, UserError) and me.process != 0:
            return 2  # process 0 says it
        raise


def _share_spec(config: RunConfig, task: Task) -> tuple[JobSpec, int]:
    """Process 0 freezes the run; everybody gets its spec and attempt, or the reason why there is none."""
    assert task.store is not None
    if task.process == 0:
        try:
            spec = freeze(config, task.processes)
            answer = {"spec": asdict(spec), "attempt": new_attempt(spec.folder())}
        except UserError as error:
            answer = {"error": str(error)}
        task.store.set("spec", json.dumps(answer))
    answer = json.loads(task.store.get("spec"))
    if "error" in answer:
        if task.process == 0:
            raise UserError(answer["error"])
        sys.exit(2)
    return JobSpec(**answer["spec"]), int(answer["attempt"])
