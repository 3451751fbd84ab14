"""The points of a sweep: composed once at submission, handed over in one file, and run in their jobs.

Pickles, because that is what Hydra hands over: a task function, resolvers, structured configurations of the user's.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import submitit
from hydra.core.config_loader import ConfigLoader
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from submitit.core.utils import DelayedSubmission

from hpc_train.launch.callables.calls import array_element, pickle_value
from hpc_train.regular_files import check_private_file, write_private_file


class CachingConfigLoader:
    """Hydra's config loader, but a point that has been composed is not composed a second time.

    Sweepers compose every point to see whether it can be, and throw away what they got.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self._master: DictConfig | None = None
        self._pickled: dict[tuple[str, ...], bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of one point (Hydra's method)."""
        if master_config is not self._master:
            self._master, self._pickled = master_config, {}
        point = tuple(sweep_overrides)
        if point in self._pickled:  # each is asked for twice, so it need not be kept any longer
            again: DictConfig = pickle.loads(self._pickled.pop(point))
            return again
        composed = self.loader.load_sweep_config(master_config, list(sweep_overrides))
        self._pickled[point] = pickle_value(composed)  # pickled, it takes a tenth of the memory
        return composed


def cache_composed_points(context: HydraContext) -> ConfigLoader:
    """Let all that use this Hydra context compose through a CachingConfigLoader; return Hydra's own loader."""
    loader: Any = context.config_loader
    if isinstance(loader, CachingConfigLoader):
        return loader.loader
    context.config_loader = cast("ConfigLoader", CachingConfigLoader(loader))
    original: ConfigLoader = loader
    return original


def write_points_file(path: Path, shared: Any, pickled_points: Sequence[bytes]) -> None:
    """Write what the points of a sweep share, and what each has for itself."""
    # Layout: the number of blobs and their sizes as little-endian uint64; then sys.path, `shared`, the points.
    folders = [str(Path(entry).absolute()) for entry in sys.path]
    blobs = [json.dumps(folders).encode(), pickle_value(shared), *pickled_points]
    sizes = struct.pack(f"<{len(blobs) + 1}Q", len(blobs), *map(len, blobs))
    write_private_file(path, b"".join([sizes, *blobs]))


@dataclass(frozen=True)
class PointsFile:
    """A file of write_points_file, of which a node reads only the parts that it needs."""

    path: Path

    def read_shared(self) -> Any:
        """Read what all points share. The modules that it names are looked for where the submitting process did."""
        folders = json.loads(self._read_blob(0))
        sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
        return pickle.loads(self._read_blob(1))

    def read_point(self, index: int) -> Any:
        """Read one point; only after read_shared, which lets its modules be found."""
        return pickle.loads(self._read_blob(2 + index))

    def _read_blob(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            check_private_file(self.path, os.fstat(file.fileno()))
            (count,) = struct.unpack("<Q", file.read(8))
            sizes = struct.unpack(f"<{count}Q", file.read(8 * count))
            file.seek(8 * (1 + count) + sum(sizes[:index]))
            return file.read(sizes[index])


@dataclass(frozen=True)
class SharedState:
    """The state that all points of a sweep share."""

    context: HydraContext
    task_function: TaskFunction
    singletons: Any


@dataclass(frozen=True)
class RunPoint:
    """The call of every element of an array: element n runs point `points[n]` of the file by Hydra's run_job."""

    file: Path
    points: tuple[int, ...]

    def __call__(self) -> JobReturn:
        """Run the task function on this rank; an exception that it raises is in what is returned."""
        file, env = PointsFile(self.file), submitit.JobEnvironment()
        shared: SharedState = file.read_shared()
        Singleton.set_state(shared.singletons)
        setup_globals()
        config: DictConfig = file.read_point(self.points[array_element()])
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
        return _make_portable(returned)

    def checkpoint(self) -> DelayedSubmission:
        """Return what to call after a requeue (submitit's method); the task function sees to its own checkpoints."""
        return DelayedSubmission(self)

    def fails(self, returned: JobReturn) -> bool:
        """Whether the job is to end with an exit code that tells Slurm of a failure, too."""
        return returned.status is not JobStatus.COMPLETED

    def keeps(self, rank: int, returned: JobReturn) -> bool:
        """Whether what this rank returned is written down: only the first rank's counts."""
        return rank == 0


def _make_portable(returned: JobReturn) -> JobReturn:
    """Add the traceback of an exception, and leave nothing that the process of the sweep could not unpickle."""
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
