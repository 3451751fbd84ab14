"""Turn the points of a sweep into job arrays: one for each resource shape, or several where the site limits their size.

launch.parallel_points is shared out over the arrays. The batch script of an array lets each element find its
point, or the points that share its nodes (launch.points_per_job), in the frozen list.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.slurm import batch_script
from hpc_train.launch.slurm.array_size import split_evenly
from hpc_train.launch.slurm.containers import Container, make_container
from hpc_train.launch.slurm.request import JobRequest, make_request, node_count
from hpc_train.launch.snapshot.code_snapshot import Snapshot
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory
from hpc_train.training.run_directory import RunDirectory

_RESOURCE_SECTIONS = ("cluster", "launch", "parallel", "checkpoint", "container", "resilience", "data", "plan")
"""The parts of a config that what is asked of Slurm depends on."""


@dataclass(frozen=True)
class JobArray:
    """One call of sbatch."""

    request: JobRequest
    elements: tuple[tuple[str, ...], ...]
    """The points of each element."""
    config: RunConfig
    """The config of the job, to check its partition."""
    ranks: int
    """Number of ranks of one point."""
    packed: bool = False
    """Whether its elements have room for several points."""
    behind: int | None = None
    """The array (its place among all of them) that has to end first, so that the throttle is kept."""

    @property
    def points(self) -> list[str]:
        return [point for points in self.elements for point in points]

    def after(self, jobs: Sequence[str]) -> JobArray:
        return replace(self, request=self.request.after(jobs))


@dataclass(frozen=True)
class _ResourceShape:
    """Points that ask for the same."""

    config: RunConfig
    """The config of one point, with the CPUs that it has in its job."""
    job: RunConfig
    """The config of the whole job; it differs from `config` where points share a job."""
    base: JobRequest
    points: tuple[str, ...]


def make_arrays(
    points: Sequence[FrozenPoint],
    folder: SweepDirectory,
    code: Snapshot | None,
    max_elements: int,
    config_of: Callable[[FrozenPoint], RunConfig],
) -> list[JobArray]:
    """Group points into arrays of at most `max_elements` elements. Raises UserError naming the first bad point.

    config_of is called only once for points whose settings for Slurm are the same.
    """
    shapes = _group_by_shape(points, folder, code, config_of)
    launch = shapes[0].config.launch
    parts = [
        (shape, [shape.points[index] for index in part])
        for shape in shapes
        for part in _split_shape(len(shape.points), launch.points_per_job, max_elements)
    ]
    elements = [_group_points(points, launch.points_per_job) for _, points in parts]
    limits = share_throttle(
        _count_running_jobs(launch.parallel_points, launch.points_per_job), list(map(len, elements))
    )
    return [
        _make_array(shape, groups, folder, limit)
        for (shape, _), groups, limit in zip(parts, elements, limits, strict=True)
    ]


def share_throttle(limit: int | None, sizes: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Return how many elements of each array run at a time, and which array it waits for; at most `limit` run.

    The arrays share the limit by their sizes, and each has at least one; where there are more arrays than that, one
    follows another. None: no limit.
    """
    if limit is None:
        return [(None, None)] * len(sizes)
    if limit < len(sizes):
        return [(1, index - limit if index >= limit else None) for index in range(len(sizes))]
    shares = [1] * len(sizes)
    for _ in range(limit - len(sizes)):
        needy = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        if shares[needy] >= sizes[needy]:
            break
        shares[needy] += 1
    return [(share, None) for share in shares]


def _count_running_jobs(parallel: int | None, per_job: int) -> int | None:
    if parallel is None:
        return None
    if parallel < per_job:
        raise UserError(
            f"launch.parallel_points={parallel}: fewer than launch.points_per_job={per_job}; "
            f"use launch.points_per_job={parallel}"
        )
    return parallel // per_job


def _split_shape(points: int, per_job: int, max_elements: int) -> list[range]:
    """Split the points of one shape into parts of whole elements, at most `max_elements` of them a part."""
    jobs = split_evenly(-(-points // per_job), max_elements)
    return [range(part.start * per_job, min(part.stop * per_job, points)) for part in jobs]


def _group_points(points: Sequence[str], per_job: int) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(points[first : first + per_job]) for first in range(0, len(points), per_job))


def _group_by_shape(
    points: Iterable[FrozenPoint],
    folder: SweepDirectory,
    code: Snapshot | None,
    config_of: Callable[[FrozenPoint], RunConfig],
) -> list[_ResourceShape]:
    shapes: dict[str, _ResourceShape] = {}
    groups: dict[str, list[_ResourceShape]] = {}
    # By settings first, so that points with the same ones share one request; then by request, because points with other
    # settings may still ask for the same.
    for point in points:
        key = json.dumps([point.spec.config.get(name) for name in _RESOURCE_SECTIONS], sort_keys=True)
        if key not in shapes:
            shapes[key] = _find_shape_of_point(point, config_of(point), folder, code)
        groups.setdefault(repr(_request_key(shapes[key].base)), []).append(replace(shapes[key], points=(point.id,)))
    return [replace(same[0], points=tuple(shape.points[0] for shape in same)) for same in groups.values()]


def _request_key(request: JobRequest) -> object:
    return (request.nodes, request.ranks_per_node, request.command, sorted(request.parameters.items()), request.export)


def _find_shape_of_point(
    point: FrozenPoint, config: RunConfig, folder: SweepDirectory, code: Snapshot | None
) -> _ResourceShape:
    try:
        job = _find_shared_job_config(config) if config.launch.points_per_job > 1 else config
        part = _make_config_of_part(config, job) if job is not config else config
        base = make_request(job, RunDirectory(folder.path, folder.path / "checkpoints"), code)
    except UserError as error:
        raise UserError(f"point {' '.join(point.overrides) or point.id}: {error}") from None
    return _ResourceShape(part, job, base, ())


def _find_shared_job_config(config: RunConfig) -> RunConfig:
    """Return the config of the job that launch.points_per_job points share: one's nodes, all ranks."""
    count, cluster, node = config.launch.points_per_job, config.cluster, config.cluster.node
    ranks = cluster.ranks_per_node
    setting = f"launch.points_per_job={count}"
    if node.gpus and cluster.slurm.gpu_request == "none":
        raise UserError(f"{setting}: {cluster.name} gives nodes whole, GPUs are not shared out; leave it out")
    if node.gpus and ranks * count > node.gpus:
        raise UserError(
            f"{setting}: {count} points of {ranks} ranks per node need {ranks * count} GPUs, and a node has "
            f"{node.gpus}; use launch.points_per_job={node.gpus // ranks or 1}"
            + ("" if ranks * 2 <= node.gpus else " or fewer cluster.node.ranks")
        )
    memory = config.launch.memory_gib * count if config.launch.memory_gib else None
    return replace(
        config,
        cluster=replace(cluster, nodes=node_count(config), node=replace(node, ranks=ranks * count)),
        launch=replace(config.launch, memory_gib=memory),
    )


def _make_config_of_part(config: RunConfig, job: RunConfig) -> RunConfig:
    """Return one point's part of the job: its ranks, their CPUs, and a GPU for each.

    node.cpus is 1: what the node turns out to have is shared out in the job.
    """
    node, cpus = config.cluster.node, batch_script.cpus_per_rank(job)
    gpus = config.cluster.ranks_per_node if node.gpus else 0
    part = replace(node, ranks=config.cluster.ranks_per_node, gpus=gpus, cpus=1)
    return replace(
        config,
        cluster=replace(config.cluster, nodes=job.cluster.nodes, node=part),
        launch=replace(config.launch, cpus_per_rank=cpus),
    )


def _make_array(
    shape: _ResourceShape,
    elements: tuple[tuple[str, ...], ...],
    folder: SweepDirectory,
    limit: tuple[int | None, int | None],
) -> JobArray:
    running, behind = limit
    per_job = shape.config.launch.points_per_job
    if per_job > 1:
        request = make_packed_array_request(shape.base, shape.config, folder.path, elements, per_job)
    else:
        request = make_array_request(shape.base, shape.config, folder.path, elements)
    extra = request.parameters["additional_parameters"]
    pattern = f"0-{len(elements) - 1}" + (f"%{running}" if running else "")
    output = str(folder.logs).replace("%", "%%") + "/job-%A_%a.log"
    more = {**extra, "array": pattern, "output": output}
    request = replace(request, parameters={**request.parameters, "additional_parameters": more})
    ranks = shape.config.cluster.ranks_per_node * request.nodes
    return JobArray(request, elements, shape.job, ranks, per_job > 1, behind)


ArrayElements = Sequence[Sequence[str]]
"""The points of each element of an array."""


def make_array_request(base: JobRequest, config: RunConfig, sweep: Path, elements: ArrayElements) -> JobRequest:
    """Return the request for an array with one point an element. base: of one of its points, as if it were alone."""
    container = _make_container(base, config, sweep)
    setup = [
        *_list_setting_lines(base, config, sweep, elements),
        batch_script.shell_functions(),
        'point="${points[$SLURM_ARRAY_TASK_ID]}"',
        'enter_point "$point"',
        "begin_run",
        *batch_script.setup_lines(config),
        *container.before,
        *batch_script.define_start(batch_script.srun_line(config, container)),
        'freeze_points "$point"',
    ]
    return replace(base, parameters={**base.parameters, "setup": setup})


def make_packed_array_request(
    base: JobRequest, config: RunConfig, sweep: Path, elements: ArrayElements, size: int
) -> JobRequest:
    """Return the request for an array with up to `size` points an element, each a job step beside the others.

    base: for all of them together. config: of one of them, with the CPUs that it has there.
    """
    container = _make_container(base, config, sweep)
    setup = [
        *_list_setting_lines(base, config, sweep, elements),
        f"hpc_points_per_job={size} hpc_ranks_per_node={size * config.cluster.ranks_per_node}",
        # The watcher ends all steps of a job: one point that hangs must not end the others.
        "hpc_watch=() hpc_restart=()",
        batch_script.shell_functions(),
        *batch_script.define_start(batch_script.srun_line(config, container, _make_share_options(base, config, size))),
        # shell words: the ids of an element, which have neither spaces nor patterns
        "begin_points ${points[$SLURM_ARRAY_TASK_ID]}",
        *batch_script.setup_lines(config),
        *container.before,
        'freeze_points "${open[@]}"',
    ]
    parameters = {**base.parameters, "setup": setup, "teardown": ["finish_points"]}
    return replace(base, command="run_points", parameters=parameters)


def _list_setting_lines(base: JobRequest, config: RunConfig, sweep: Path, elements: ArrayElements) -> list[str]:
    """Return the assignments that batch.sh reads. The ids of points are letters, digits, dots and dashes."""
    begin = batch_script.python_command(config, False, "-m", "hpc_train.launch.sweep.point_entrypoint")
    return [
        f"sweep={shlex.quote(str(sweep))}",
        "points=(",
        *(f"  '{' '.join(points)}'" for points in elements),
        ")",
        *batch_script.setting_lines(config, base.code.python_path if base.code else (), base.nodes),
        f"hpc_begin_points=({shlex.join(begin)})",
    ]


def _make_container(base: JobRequest, config: RunConfig, sweep: Path) -> Container:
    return make_container(config, RunDirectory(sweep, sweep / "checkpoints"), base.code.path if base.code else None)


def _make_share_options(base: JobRequest, config: RunConfig, size: int) -> list[str]:
    """Return srun's options for one of `size` points: all nodes of the job, its own ranks, CPUs and GPUs."""
    ranks, node = config.cluster.ranks_per_node, config.cluster.node
    # --exact: else each step gets all CPUs of its nodes, and the next one waits until it has ended.
    options = ["--exact", f"--nodes={base.nodes}", f"--ntasks={base.nodes * ranks}", f"--ntasks-per-node={ranks}"]
    if not batch_script.cpus_per_rank(config):
        options.append('--cpus-per-task="$cpus"')
    if "gpus_per_node" in base.parameters:
        options.append(f"--gpus-per-node={node.gpus}")
    if "gres" in base.parameters:
        options.append(f"--gres=gpu:{node.gpus}")
    # A step that does not say asks for the memory of the whole job, and the next one then waits for it.
    options.append(f"${{SLURM_MEM_PER_NODE:+--mem=$((SLURM_MEM_PER_NODE / {size}))M}}")
    return [*options, '--job-name="$point"']
