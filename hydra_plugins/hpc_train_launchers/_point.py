"""What runs in the job of a point: Hydra's own run_job, on the configuration that was composed at submission."""

from __future__ import annotations

import logging
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from submitit.core.utils import DelayedSubmission

from hpc_train.launch.callables.calls import array_element, pickle_value
from hydra_plugins.hpc_train_launchers._parcel import Parcel


@dataclass(frozen=True)
class Shared:
    """What all points of a sweep have in common."""

    context: HydraContext
    task_function: TaskFunction
    singletons: Any


@dataclass(frozen=True)
class RunPoint:
    """A call for all elements of an array: the element n runs point `points[n]` of the parcel."""

    parcel: Path
    points: tuple[int, ...]

    def __call__(self) -> JobReturn:
        """Run the task function on this rank; what it raises is in what is returned."""
        parcel, env = Parcel(self.parcel), submitit.JobEnvironment()
        shared: Shared = parcel.shared()
        Singleton.set_state(shared.singletons)
        setup_globals()
        config: DictConfig = parcel.point(self.points[array_element()])
        with open_dict(config):
            config.hydra.job.id = env.job_id
            if not (first := env.global_rank == 0):
                config.hydra.output_subdir = None  # the first rank writes it
        if not first:
            logging.basicConfig(level=logging.INFO, stream=sys.stdout)  # in place of the first rank's log file
        returned = run_job(
            hydra_context=shared.context,
            task_function=shared.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            configure_logging=first,
        )
        return _portable(returned)

    def checkpoint(self) -> DelayedSubmission:
        """submitit's: what to call after a requeue; the task function sees to its own checkpoints."""
        return DelayedSubmission(self)

    def fails(self, returned: JobReturn) -> bool:
        """So that Slurm knows, too."""
        return returned.status is not JobStatus.COMPLETED

    def keeps(self, rank: int, returned: JobReturn) -> bool:
        """What the other ranks return is nobody's."""
        return rank == 0


def _portable(returned: JobReturn) -> JobReturn:
    """With the traceback of an exception, and nothing that could not be read where the sweep was started."""
    value = returned._return_value
    text = ""
    if returned.status is JobStatus.FAILED:
        text = "".join(traceback.format_exception(value))
        print(text, flush=True)
        value.add_note(f"\nin the job of the point:\n{text}")
    try:
        pickle.loads(pickle_value(returned))
    except Exception as error:
        what = text or f"it returned a {type(value).__name__}"
        returned.status = JobStatus.FAILED
        returned.return_value = RuntimeError(f"{what}, which cannot be pickled: {error}")
    return returned
