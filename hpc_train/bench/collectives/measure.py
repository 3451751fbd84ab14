"""Run one rank of `bench collectives`: join the job, check and time all cases, and fit the levels of the fabric.

The job is started and placed as a training is. Latency and bandwidth of a level are fitted to the times of several
sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_train.bench.collectives.backends import Backend, MpiBackend, TorchBackend, is_started_by_mpi
from hpc_train.bench.collectives.cases import (
    CaseMaker,
    MeasurementCell,
    ProbeCell,
    check_cases,
    find_largest_buffer,
    make_cells,
    make_probe_cells,
    time_cases,
)
from hpc_train.bench.collectives.collectives import CollectivesResult, LevelFit, Measurement
from hpc_train.bench.collectives.definitions import compute_algorithm_bandwidth
from hpc_train.bench.collectives.options import CollectivesOptions
from hpc_train.bench.collectives.rank_groups import (
    RankLevel,
    describe_unprobed,
    make_probes,
    make_rank_levels,
)
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Task, World
from hpc_train.messages import Codec, all_gather_values, broadcast_value
from hpc_train.placement.fabric import NamedLevel, build_levels
from hpc_train.placement.node_locations import locate_hosts
from hpc_train.runtime.arrange_ranks import arrange_ranks
from hpc_train.runtime.host_info import gather_process_info
from hpc_train.runtime.rank_assignment import NotPlacedError, group_by_node, make_hosts
from hpc_train.runtime.start import join, leave_process_group, start
from hpc_train.traffic.rank_groups import compute_bus_factor, list_groups_of_rank


def measure_collectives(config: RunConfig, options: CollectivesOptions) -> CollectivesResult:
    """Measure on all ranks of this job; every rank gets the result. Raises UserError as a run would."""
    with start_job(config) as job:
        return measure_with_backends(config, options, job, choose_backends(job.world, options.backends))


def measure_with_backends(
    config: RunConfig, options: CollectivesOptions, job: BenchJob, backends: Sequence[Backend]
) -> CollectivesResult:
    """Measure with the given backends, in an existing process group."""
    cells = make_cells(options, list_groups_of_rank(job.degrees, job.world.rank), backends)
    probed = make_probes(job.levels)
    probing = make_probe_cells(options, probed, backends)
    maker = CaseMaker(job.world.rank, job.world.size, find_largest_buffer([*cells, *probing]))
    cases = [*map(maker.case, cells), *map(maker.probe, probing)]
    wrong = check_cases(cases)
    maker.clear()
    seconds = time_cases(cases, options.rounds, options.iterations)
    return _make_result(config, job, cells, probing, wrong, seconds, describe_unprobed(job.levels, probed))


def choose_backends(world: World, wanted: Sequence[str]) -> list[Backend]:
    """Make the wanted backends; by default torch, and MPI if it started the ranks. Raises UserError if one fails."""
    names = wanted or (["torch", "mpi"] if is_started_by_mpi() else ["torch"])
    made: dict[str, Callable[[World], Backend]] = {"torch": TorchBackend, "mpi": MpiBackend}
    return [made[name](world) for name in dict.fromkeys(names)]


def _make_result(
    config: RunConfig,
    job: BenchJob,
    cells: Sequence[MeasurementCell],
    probing: Sequence[ProbeCell],
    wrong: Sequence[int],
    seconds: NDArray[np.float64],
    notes: Sequence[str],
) -> CollectivesResult:
    """Summarise the rounds. seconds: [rounds, cells and then probes]. wrong: elements with a wrong sum, by cell."""
    columns = list(seconds.T)
    measured = zip(cells, columns[: len(cells)], wrong[: len(cells)], strict=True)
    fits = fit_levels(probing, columns[len(cells) :])
    unknown = [f"{fit.backend} {fit.level}: no bandwidth fits these sizes" for fit in fits if fit.bandwidth is None]
    return CollectivesResult(
        cluster=config.cluster.name,
        device=job.world.device.type,
        ranks=job.world.size,
        nodes=job.nodes,
        degrees=asdict(job.degrees),
        placement=job.placement,
        rounds=len(seconds),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        measurements=tuple(summarise_cell(cell, times, count) for cell, times, count in measured),
        fits=tuple(fits),
        wrong=sum(wrong),
        notes=(*job.notes, *notes, *unknown),
    )


@dataclass(frozen=True)
class BenchJob:
    """This rank, and the hosts and levels of all ranks."""

    world: World
    degrees: Degrees
    nodes: int
    levels: tuple[RankLevel, ...]
    """Innermost first."""
    placement: str
    """How ranks were placed on nodes."""
    notes: tuple[str, ...] = ()
    """Facts that could not be found out."""


@contextmanager
def start_job(config: RunConfig) -> Iterator[BenchJob]:
    """Join the job and start as a run does. Raises UserError also for a job of one rank."""
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    task = join(interface=config.cluster.fabric.interface, timeout=timedelta(seconds=config.launch.timeout_seconds))
    if task.processes < 2:
        raise UserError("bench collectives: one rank cannot communicate; start more (launch.ranks=2, srun -n 2)")
    rank_map = arrange_ranks(task, config)
    world = start(task, rank_map, config)
    try:
        hosts = all_gather_values(task.host)
        nodes = list(dict.fromkeys(hosts))
        levels, note = _broadcast_levels(config, task, world, nodes)
        notes = tuple(text for text in (rank_map.warning, note) if text)
        ranked = tuple(make_rank_levels(hosts, nodes, levels))
        yield BenchJob(world, resolve_degrees(config.parallel, world.size), len(nodes), ranked, rank_map.reason, notes)
    finally:
        leave_process_group()


def _broadcast_levels(
    config: RunConfig, task: Task, world: World, nodes: Sequence[str]
) -> tuple[tuple[NamedLevel, ...], str | None]:
    """Return rank 0's levels and note on all ranks. A collective."""
    levels = find_levels(config, task, nodes) if world.rank == 0 else None
    return broadcast_value(levels, codec=Codec((NamedLevel,)))


def find_levels(config: RunConfig, task: Task, nodes: Sequence[str]) -> tuple[tuple[NamedLevel, ...], str | None]:
    """Return the levels of these nodes from cluster.topology, Slurm or NVLink; and why none is known above the node."""
    if len(nodes) == 1:
        return build_levels(nodes), None
    try:
        facts = gather_process_info(task, timedelta(seconds=config.launch.timeout_seconds))
        heads = [ranks[0] for ranks in group_by_node(facts, task.processes)]
        where = locate_hosts(config.cluster, make_hosts(heads), "SLURM_JOB_ID" in os.environ)
    except (NotPlacedError, UserError) as why:
        return build_levels(nodes), f"levels above the node are not known: {why}"
    if where.problem is not None:
        return build_levels(nodes), f"levels above the node are not known: {where.problem}"
    return build_levels(nodes, where.paths, where.domains), None


RoundSeconds = NDArray[np.float64]
"""[rounds]: seconds of the slowest rank."""


def summarise_cell(cell: MeasurementCell, times: RoundSeconds, wrong: int) -> Measurement:
    """Summarise the times of a cell."""
    shape, operation = cell.shape, cell.shape.operation
    low, median, high = (float(value) for value in np.quantile(times, (0.25, 0.5, 0.75)))
    algbw = compute_algorithm_bandwidth(shape.size, median) / 1e9
    return Measurement(
        axis=cell.group.axis,
        groups=cell.group.groups,
        ranks=shape.ranks,
        operation=operation.name,
        algorithm=cell.algorithm,
        backend=cell.backend.name,
        size=shape.size,
        count=shape.count,
        type="float",
        redop="sum" if operation.sums else "none",
        in_place=cell.in_place,
        seconds=median,
        quartiles=(low, high),
        algbw=algbw,
        busbw=algbw * compute_bus_factor(operation.name, shape.ranks),
        wrong=wrong,
    )


def fit_levels(cells: Sequence[ProbeCell], times: Sequence[RoundSeconds]) -> list[LevelFit]:
    """Fit the constants of every backend and level, to the slower of two probes of a level at each size."""
    seconds_by_size: dict[tuple[str, str], dict[int, float]] = {}
    pairs: dict[tuple[str, str], int] = {}
    for cell, rounds in zip(cells, times, strict=True):
        key, size = (cell.backend.name, cell.probe.level), cell.shape.size
        sizes = seconds_by_size.setdefault(key, {})
        # The slower probe: a job waits for its slowest pair.
        sizes[size] = max(sizes.get(size, 0.0), float(np.median(rounds)))
        pairs[key] = cell.probe.pairs
    return [_fit_level(key, pairs[key], sizes) for key, sizes in seconds_by_size.items()]


def _fit_level(key: tuple[str, str], pairs: int, medians: dict[int, float]) -> LevelFit:
    backend, level = key
    sizes, seconds = tuple(medians), tuple(medians.values())
    line = fit_latency_bandwidth([size * pairs for size in sizes], seconds)
    constants = (line.latency, line.bandwidth, line.error) if line else (None, None, None)
    return LevelFit(level, backend, pairs, sizes, seconds, *constants)


@dataclass(frozen=True)
class LatencyBandwidth:
    """Constants of the model t = latency + size / bandwidth."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes/s."""
    error: float
    """Maximum relative difference of the model from the measured times."""


def fit_latency_bandwidth(sizes: Sequence[int], seconds: Sequence[float]) -> LatencyBandwidth | None:
    """Fit by least squares of relative differences, with constants >= 0; None if the times determine no bandwidth.

    sizes: bytes; seconds: medians. Source of the model: Hockney, "The communication challenge for MPP", 1994.
    """
    if len(set(sizes)) < 2:
        return None
    from scipy.optimize import nnls  # half a second, which only rank 0 spends, after the measurement

    n, t = np.array(sizes, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scale = n.max()
    # Rows are divided by the time, so that the relative error counts: messages span six orders of magnitude. nnls keeps
    # both constants at or above zero; n is scaled to 1 for its conditioning.
    (latency, slope), _ = nnls(np.stack([1 / t, n / scale / t], axis=1), np.ones(len(n)))
    if slope <= 0:
        return None
    error = np.abs((latency + slope * n / scale) / t - 1).max()
    return LatencyBandwidth(float(latency), float(scale / slope), float(error))
