"""One rank of `bench collectives`: check all cases, time them in rounds, fit the levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from hpc_train.api import World
from hpc_train.bench.collectives.backends import Backend
from hpc_train.bench.collectives.cases import CaseMaker, Cell, ProbeCell, cells_of, largest, probe_cells
from hpc_train.bench.collectives.groups import groups_of
from hpc_train.bench.collectives.job import Job, started
from hpc_train.bench.collectives.levels import probes, unprobed
from hpc_train.bench.collectives.options import Options
from hpc_train.bench.collectives.result import Result
from hpc_train.bench.collectives.summary import fit_of, measurement_of
from hpc_train.bench.collectives.timing import take_rounds, wrong_elements_of
from hpc_train.bench.collectives.with_mpi import MpiBackend, started_by_mpi
from hpc_train.bench.collectives.with_torch import TorchBackend
from hpc_train.config.run import RunConfig


def measure(config: RunConfig, options: Options) -> Result:
    """Measure on all ranks of this job; every rank gets the result. Raises UserError as a run would."""
    with started(config) as job:
        return measure_with(config, options, job, choose_backends(job.world, options.backends))


def measure_with(config: RunConfig, options: Options, job: Job, backends: Sequence[Backend]) -> Result:
    """The same with given backends, in a process group that is there."""
    cells = cells_of(options, groups_of(job.degrees, job.world.rank), backends)
    probed = probes(job.levels)
    probing = probe_cells(options, probed, backends)
    maker = CaseMaker(job.world.rank, job.world.size, largest([*cells, *probing]))
    cases = [*map(maker.case, cells), *map(maker.probe, probing)]
    wrong = wrong_elements_of(cases)
    maker.clear()
    seconds = take_rounds(cases, options.rounds, options.iterations)
    return _result(config, job, cells, probing, wrong, seconds, unprobed(job.levels, probed))


def choose_backends(world: World, wanted: Sequence[str]) -> list[Backend]:
    """torch, and MPI where the ranks are MPI's or it is asked for. Raises UserError if that cannot be had."""
    names = wanted or (["torch", "mpi"] if started_by_mpi() else ["torch"])
    made: dict[str, Callable[[World], Backend]] = {"torch": TorchBackend, "mpi": MpiBackend}
    return [made[name](world) for name in dict.fromkeys(names)]


def _result(
    config: RunConfig,
    job: Job,
    cells: Sequence[Cell],
    probing: Sequence[ProbeCell],
    wrong: Sequence[int],
    seconds: NDArray[np.float64],
    notes: Sequence[str],
) -> Result:
    columns = list(seconds.T)
    measured = zip(cells, columns[: len(cells)], wrong[: len(cells)], strict=True)
    fits = fit_of(probing, columns[len(cells) :])
    unknown = [f"{it.backend} {it.level}: these sizes tell no bandwidth" for it in fits if it.bandwidth is None]
    return Result(
        cluster=config.cluster.name,
        device=job.world.device.type,
        ranks=job.world.size,
        nodes=job.nodes,
        degrees=asdict(job.degrees),
        placement=job.placement,
        rounds=len(seconds),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        measurements=tuple(measurement_of(cell, times, count) for cell, times, count in measured),
        fits=tuple(fits),
        wrong=sum(wrong),
        notes=(*job.notes, *notes, *unknown),
    )
