"""From the points of a sweep to what is asked of Slurm: one array for each resource shape, split where it must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch import script
from hpc_train.launch.arrays import split
from hpc_train.launch.code.snapshot import Snapshot
from hpc_train.launch.request import Request, make_request, nodes_of
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder
from hpc_train.launch.sweep.scripts import of_elements, of_packs
from hpc_train.training.folder import RunFolder

_ASKED = ("cluster", "launch", "parallel", "checkpoint", "container", "data", "plan")
"""The parts of a config that what is asked of Slurm depends on."""


@dataclass(frozen=True)
class Array:
    """One call of sbatch."""

    request: Request
    elements: tuple[tuple[str, ...], ...]
    """The points of each element."""
    config: RunConfig
    """Of the job, for a look at its partition."""
    ranks: int
    """Of one point."""
    packed: bool = False
    """Whether its elements have room for several points."""
    behind: int | None = None
    """The array (its place among all of them) that has to end first, so that the throttle is kept."""

    @property
    def points(self) -> list[str]:
        return [point for points in self.elements for point in points]

    def after(self, jobs: Sequence[str]) -> Array:
        return replace(self, request=self.request.after(jobs))


@dataclass(frozen=True)
class _Shape:
    """Points that ask for the same."""

    config: RunConfig
    """Of one point, with the CPUs that it has in its job."""
    job: RunConfig
    """Of the whole job: the same, but where points share one."""
    base: Request
    points: tuple[str, ...]


def make_arrays(
    points: Sequence[FrozenPoint],
    folder: SweepFolder,
    code: Snapshot | None,
    most: int,
    config_of: Callable[[FrozenPoint], RunConfig],
) -> list[Array]:
    """The arrays that run these points, of at most `most` elements each. Raises UserError naming the first bad point.

    config_of is asked only once for points whose settings for Slurm are the same.
    """
    shapes = _shapes(points, folder, code, config_of)
    launch = shapes[0].config.launch
    parts = [
        (shape, [shape.points[index] for index in part])
        for shape in shapes
        for part in _parts(len(shape.points), launch.points_per_job, most)
    ]
    elements = [_elements(points, launch.points_per_job) for _, points in parts]
    limits = throttle(_limit(launch.parallel_points, launch.points_per_job), list(map(len, elements)))
    return [_array(shape, its, folder, limit) for (shape, _), its, limit in zip(parts, elements, limits, strict=True)]


def throttle(most: int | None, sizes: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """(elements that run at a time, array that has to end first) of each array, so that never more than `most` run.

    The arrays share it, by their sizes, and each has at least one; where there are more arrays than that, one follows
    another. None: no limit.
    """
    if most is None:
        return [(None, None)] * len(sizes)
    if most < len(sizes):
        return [(1, index - most if index >= most else None) for index in range(len(sizes))]
    shares = [1] * len(sizes)
    for _ in range(most - len(sizes)):
        needy = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        if shares[needy] >= sizes[needy]:
            break
        shares[needy] += 1
    return [(share, None) for share in shares]


def _limit(parallel: int | None, per_job: int) -> int | None:
    if parallel is None:
        return None
    if parallel < per_job:
        raise UserError(
            f"launch.parallel_points={parallel}: fewer than launch.points_per_job={per_job}; "
            f"use launch.points_per_job={parallel}"
        )
    return parallel // per_job


def _parts(points: int, per_job: int, most: int) -> list[range]:
    """Of the points of one shape: whole elements, at most `most` of them a part."""
    jobs = split(-(-points // per_job), most)
    return [range(part.start * per_job, min(part.stop * per_job, points)) for part in jobs]


def _elements(points: Sequence[str], per_job: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(points[first : first + per_job]) for first in range(0, len(points), per_job))


def _shapes(
    points: Iterable[FrozenPoint],
    folder: SweepFolder,
    code: Snapshot | None,
    config_of: Callable[[FrozenPoint], RunConfig],
) -> list[_Shape]:
    alike: dict[str, _Shape] = {}
    found: dict[str, list[_Shape]] = {}
    for point in points:
        key = json.dumps([point.spec.config.get(name) for name in _ASKED], sort_keys=True)
        if key not in alike:
            alike[key] = _shape(point, config_of(point), folder, code)
        found.setdefault(repr(_comparable(alike[key].base)), []).append(replace(alike[key], points=(point.id,)))
    return [replace(same[0], points=tuple(it.points[0] for it in same)) for same in found.values()]


def _comparable(request: Request) -> object:
    return (request.nodes, request.ranks_per_node, request.command, sorted(request.parameters.items()), request.export)


def _shape(point: FrozenPoint, config: RunConfig, folder: SweepFolder, code: Snapshot | None) -> _Shape:
    try:
        job = _packed(config) if config.launch.points_per_job > 1 else config
        alone = _part_of(config, job) if job is not config else config
        base = make_request(job, RunFolder(folder.path, folder.path / "checkpoints"), code)
    except UserError as error:
        raise UserError(f"point {' '.join(point.overrides) or point.id}: {error}") from None
    return _Shape(alone, job, base, ())


def _packed(config: RunConfig) -> RunConfig:
    """The job that launch.points_per_job such points share: on the nodes of one, so many times its ranks a node."""
    count, cluster, node = config.launch.points_per_job, config.cluster, config.cluster.node
    ranks = cluster.ranks_per_node
    asked = f"launch.points_per_job={count}"
    if node.gpus and cluster.slurm.gpu_request == "none":
        raise UserError(f"{asked}: {cluster.name} gives nodes whole, GPUs are not shared out; leave it out")
    if node.gpus and ranks * count > node.gpus:
        raise UserError(
            f"{asked}: {count} points of {ranks} ranks a node need {ranks * count} GPUs, and a node has {node.gpus}; "
            f"use launch.points_per_job={node.gpus // ranks or 1}"
            + ("" if ranks * 2 <= node.gpus else " or fewer cluster.node.ranks")
        )
    memory = config.launch.memory_gib * count if config.launch.memory_gib else None
    return replace(
        config,
        cluster=replace(cluster, nodes=nodes_of(config), node=replace(node, ranks=ranks * count)),
        launch=replace(config.launch, memory_gib=memory),
    )


def _part_of(config: RunConfig, job: RunConfig) -> RunConfig:
    """One point's part of the job: its ranks, their CPUs (1: whatever the node turns out to have), a GPU for each."""
    node, cpus = config.cluster.node, script.cpus_of(job)
    gpus = config.cluster.ranks_per_node if node.gpus else 0
    mine = replace(node, ranks=config.cluster.ranks_per_node, gpus=gpus, cpus=1)
    return replace(
        config,
        cluster=replace(config.cluster, nodes=job.cluster.nodes, node=mine),
        launch=replace(config.launch, cpus_per_rank=cpus),
    )


def _array(
    shape: _Shape, elements: tuple[tuple[str, ...], ...], folder: SweepFolder, limit: tuple[int | None, int | None]
) -> Array:
    running, behind = limit
    per_job = shape.config.launch.points_per_job
    if per_job > 1:
        request = of_packs(shape.base, shape.config, folder.path, elements, per_job)
    else:
        request = of_elements(shape.base, shape.config, folder.path, elements)
    extra = request.parameters["additional_parameters"]
    pattern = f"0-{len(elements) - 1}" + (f"%{running}" if running else "")
    output = str(folder.logs).replace("%", "%%") + "/job-%A_%a.log"
    more = {**extra, "array": pattern, "output": output}
    request = replace(request, parameters={**request.parameters, "additional_parameters": more})
    ranks = shape.config.cluster.ranks_per_node * request.nodes
    return Array(request, elements, shape.job, ranks, per_job > 1, behind)
