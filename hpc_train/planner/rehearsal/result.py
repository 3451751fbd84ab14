"""The result of a rehearsal: what each rank holds, how the ranks' tensors tile the model, and what is wrong.

It is formatted here as JSON for scripts and as text for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train._torch import cut_dimension, shard_rectangle
from hpc_train.config.parallel import Degrees
from hpc_train.parallel.mesh_axes import EXPERT_SHARD_AXIS, SHARD_CP_AXIS
from hpc_train.planner.rehearsal.pipeline_order import OrderProof
from hpc_train.planner.rehearsal.start_up import StartUp
from hpc_train.units import MIB, choose_memory_unit, format_bytes

SHARED_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which the ranks of one stage differ."""

Interval = tuple[int, int]
"""(begin, length) along one dimension."""


@dataclass(frozen=True)
class Tiling:
    """How one tensor is split into rectangles over the ranks of one stage."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    """For each dimension, the mesh axes that split it."""
    intervals: tuple[tuple[Interval, ...], ...]
    """For each dimension, the intervals that ranks hold, in the order of their coordinates on these axes; the last axis
    varies fastest."""
    ep: int = 1
    """Degree of ep for a tensor of experts, which is split over (expert_shard, ep) in place of (dp_shard, cp)."""

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """Return the axes along which the ranks of one stage differ, as this tensor's mesh has them."""
        return SHARED_AXES if self.ep == 1 else ("dp_replicate", EXPERT_SHARD_AXIS, "ep", "tp")

    @property
    def split(self) -> set[str]:
        """Return all axes that split the tensor."""
        return {axis for axes in self.cuts for axis in axes}

    def copies(self, degrees: Degrees) -> int:
        """Return how many ranks hold the same rectangle."""
        return math.prod(self._place(axis, {}, degrees)[0] for axis in self.shared_axes if axis not in self.split)

    def copy(self, at: Mapping[str, int], degrees: Degrees) -> int:
        """Return the number of the copy, from 0, that the rank at these coordinates holds."""
        return self._flat([axis for axis in self.shared_axes if axis not in self.split], at, degrees)

    def find_rectangle(self, at: Mapping[str, int], degrees: Degrees) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, shape) of the rectangle that the rank at these coordinates holds."""
        pairs = zip(self.cuts, self.intervals, strict=True)
        found = [intervals[self._flat(axes, at, degrees)] for axes, intervals in pairs]
        return tuple(begin for begin, _ in found), tuple(length for _, length in found)

    def _flat(self, axes: Sequence[str], at: Mapping[str, int], degrees: Degrees) -> int:
        index = 0
        for axis in axes:
            size, own = self._place(axis, at, degrees)
            index = index * size + own
        return index

    def _place(self, axis: str, at: Mapping[str, int], degrees: Degrees) -> tuple[int, int]:
        """Return the degree of an axis and the index on it; ep is the inner part of dp_shard x cp."""
        if axis not in ("ep", EXPERT_SHARD_AXIS):
            return int(getattr(degrees, axis)), at.get(axis, 0)
        outer, inner = divmod(at.get("dp_shard", 0) * degrees.cp + at.get("cp", 0), self.ep)
        return (self.ep, inner) if axis == "ep" else (degrees.dp_shard * degrees.cp // self.ep, outer)

    @property
    def rectangles(self) -> int:
        """Number of different rectangles that are not empty."""
        return math.prod(sum(length > 0 for _, length in intervals) for intervals in self.intervals)

    def problem(self) -> str | None:
        """Return what is missing or held twice; None if the ranks hold every element once, not counting copies."""
        for dimension, (size, intervals) in enumerate(zip(self.shape, self.intervals, strict=True)):
            end = 0
            for begin, length in sorted(interval for interval in intervals if interval[1]):
                if begin != end:
                    what = "is on no rank" if begin > end else "is on two ranks"
                    return f"of dimension {dimension}, {min(begin, end)} to {max(begin, end)} {what}"
                end = begin + length
            if end != size:
                return f"of dimension {dimension}, only {end} of {size} are on any rank"
        return None


@dataclass(frozen=True)
class Tilings:
    """Makes tilings. Tensors with the same shape and layout share one object."""

    by_layout: dict[object, Tiling]

    def of(self, tensor: Tensor) -> Tiling:
        """Return the tiling of a parameter or buffer of a model that has been split."""
        if not isinstance(tensor, DTensor):
            return whole_tiling(tuple(tensor.shape))
        mesh = tensor.device_mesh
        key = (tensor.shape, tensor.placements, mesh.mesh_dim_names, mesh.shape)
        if key not in self.by_layout:
            self.by_layout[key] = _tiling(tensor)
        return self.by_layout[key]


def whole_tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the tiling of a tensor that every rank of a stage holds whole."""
    return Tiling(shape, ((),) * len(shape), tuple(((0, size),) for size in shape))


def _tiling(tensor: DTensor) -> Tiling:
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    cuts, intervals = [], []
    for dimension in range(tensor.ndim):
        axes = [axis for axis, how in enumerate(tensor.placements) if cut_dimension(how) == dimension]
        cuts.append(tuple(axis for index in axes for axis in _axis_parts(names[index])))
        intervals.append(tuple(_intervals(tensor, dimension, axes)))
    ep = tensor.device_mesh.size(names.index("ep")) if "ep" in names else 1
    return Tiling(tuple(tensor.shape), tuple(cuts), tuple(intervals), ep)


def _axis_parts(axis: str) -> tuple[str, ...]:
    return ("dp_shard", "cp") if axis == SHARD_CP_AXIS else (axis,)


def _intervals(tensor: DTensor, dimension: int, axes: list[int]) -> list[Interval]:
    mesh, found = tensor.device_mesh, []
    at = [0] * mesh.ndim
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, index in zip(axes, place, strict=True):
            at[axis] = index
        shape, offset = shard_rectangle(tensor, tuple(at))
        found.append((offset[dimension], shape[dimension]))
    return found


@dataclass(frozen=True)
class HeldShard:
    """A TensorShard without its data."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the rectangle."""
    replica: int
    bytes: int


@dataclass(frozen=True)
class CountedMemory:
    """Memory of one rank, in bytes, as counted in a rehearsal."""

    parameters: int
    """Parameters with buffers, and the padding of fully_shard's shards."""
    optimizer: int
    gradients: int | None = None
    """Gradients at the end of backward; None: no step was trained."""
    whole_gradients: int | None = None
    """Peak of gradients, which are whole until they are reduced."""
    activations: int | None = None
    """Peak of what forwards keep, for all micro-batches in flight, with logits."""
    gathered: int | None = None
    """Peak of whole parameters that fully_shard has gathered."""
    peak: int | None = None
    """Peak bytes on the device."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """Bytes at the peak, by memory_ledger.MEMORY_KINDS."""
    host: int | None = None
    """Peak bytes that are offloaded; not part of `peak`."""
    offloaded: tuple[str, ...] = ()
    """Parts of the state that are offloaded."""


@dataclass(frozen=True)
class MemoryFit:
    """Verdict on all ranks that trained a step."""

    within_plan: bool
    """Whether no rank's counted peak exceeds the plan by more than checks.TOLERANCE."""
    fits: bool | None
    """Whether all ranks fit on the device; None: its memory is unknown or no step was trained."""
    lines: tuple[str, ...]
    """Lines of the report: one for each rank that fails, or one that says that all ranks fit."""

    @property
    def ok(self) -> bool:
        return self.within_plan and self.fits is not False


@dataclass(frozen=True)
class RehearsedRank:
    """One rank that was built."""

    rank: int
    at: dict[str, int]
    """Index of the rank on every axis."""
    said: tuple[str, ...]
    """What the passes logged, in order."""
    pieces: tuple[HeldShard, ...]
    tilings: dict[str, Tiling]
    """Tiling of each parameter and buffer of its stages, by name."""
    counted: CountedMemory
    seconds: float
    rss: int
    """Peak resident memory of the process so far, in bytes."""
    unknown: str | None = None
    """Why no step could be trained."""


@dataclass(frozen=True)
class CoverageResult:
    """How all ranks together cover the model."""

    tensors: int
    elements: int
    """Number of elements of the model."""
    pieces: int
    """Rectangles of a checkpoint, each written by one rank: parameters, buffers, optimizer state."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Rehearsal:
    """The report of a rehearsal."""

    degrees: Degrees
    ranks: tuple[RehearsedRank, ...]
    coverage: CoverageResult
    proof: OrderProof | None
    """Proof that the pipeline's order completes; None: no pipeline."""
    micro_batches: int
    """Number of micro-batches in a rehearsed step."""
    closed_form: dict[int, dict[str, int]]
    """Bytes of parameters, gradients and optimizer, from the model's shape alone, by rank that trained a step."""
    planned: dict[int, dict[str, float]]
    """Bytes by part that `plan` estimates for what was rehearsed, by rank that trained a step; empty: no estimate."""
    fit: MemoryFit
    """Whether the ranks stay within the plan and fit on their device."""
    servers: tuple[int, ...]
    """Bytes of each parameter server's share, with its optimizer state."""
    start_up: StartUp
    """Estimate of the start of the job, from parts measured here."""
    not_rehearsed: tuple[str, ...]
    seconds: float
    processes: int

    @property
    def rss(self) -> int:
        """Peak resident memory of any of the processes, in bytes."""
        return max(built.rss for built in self.ranks)

    @property
    def ok(self) -> bool:
        """Whether the layout is right and its memory stays within the plan and the device."""
        return not self.problems and self.fit.ok

    @property
    def problems(self) -> tuple[str, ...]:
        """List what is wrong with the layout, and counts that differ from the closed forms."""
        return (*self.coverage.problems, *self._miscounted())

    def _miscounted(self) -> list[str]:
        found = []
        for built in self.ranks:
            for part, wanted in self.closed_form.get(built.rank, {}).items():
                counted = getattr(built.counted, part)
                if counted is not None and counted != wanted:
                    message = f"{counted:,} bytes of {part}, where the model's shape says {wanted:,}"
                    found.append(f"rank {built.rank}: {message}")
        return found


_MOST_PROBLEMS = 20


def rehearsal_to_json(found: Rehearsal) -> dict[str, Any]:
    """Return a report as JSON, with sizes in bytes per rank.

    ok: nothing is wrong, and what ranks need keeps to the plan and fits on the device. fits: null if the device's
    memory is unknown.
    """
    stepped = [built for built in found.ranks if built.counted.peak is not None]
    return {
        "ok": found.ok,
        "fits": found.fit.fits,
        "within_plan": found.fit.within_plan,
        "verdict": list(found.fit.lines),
        "world": found.degrees.world,
        "degrees": asdict(found.degrees),
        "built": [built.rank for built in found.ranks],
        "model": {"tensors": found.coverage.tensors, "elements": found.coverage.elements},
        "pieces": found.coverage.pieces,
        "problems": list(found.problems),
        "pipeline": None if found.proof is None else asdict(found.proof),
        "micro_batches": found.micro_batches,
        "memory": [_memory(found, built) for built in stepped or found.ranks],
        "servers": list(found.servers),
        "start_up": found.start_up.to_json(),
        "not_rehearsed": list(found.not_rehearsed),
        "seconds": found.seconds,
        "processes": found.processes,
        "rss_bytes": found.rss,
    }


def _memory(found: Rehearsal, built: RehearsedRank) -> dict[str, Any]:
    return {
        "rank": built.rank,
        "at": built.at,
        "counted": asdict(built.counted),
        "closed_form": found.closed_form.get(built.rank, {}),
        "planned": found.planned.get(built.rank, {}),
        "seconds": built.seconds,
    }


def format_rehearsal(found: Rehearsal) -> Iterator[str]:
    """Format a report for a person."""
    degrees, model = found.degrees, found.coverage
    yield f"world: {degrees.world:,} ranks = {degrees}; built {len(found.ranks)} of them: {_numbers(found)}"
    yield from (f"  {line}" for line in found.ranks[0].said)
    for problem in found.problems[:_MOST_PROBLEMS]:
        yield f"WRONG: {problem}"
    if len(found.problems) > _MOST_PROBLEMS:
        yield f"WRONG: and {len(found.problems) - _MOST_PROBLEMS} more"
    if not found.problems:
        what = f"{model.tensors:,} tensors, {model.elements:,} numbers"
        yield f"model: {what}: over all {degrees.world:,} ranks each is held once, copies aside, and has one writer"
        yield f"checkpoint: {model.pieces:,} pieces with the optimizer's state"
    yield from _pipeline(found)
    yield from _table(found)
    if found.servers:
        sizes = ", ".join(f"{size / MIB:,.1f}" for size in found.servers)
        yield f"servers: {sizes} MiB each, with the optimizer's state"
    yield found.start_up.describe()
    yield from (f"not rehearsed: {line}" for line in found.not_rehearsed)
    rss = f"{found.processes} processes of up to {format_bytes(found.rss)}"
    yield f"{found.seconds:.1f} s, {rss}"
    yield from (line if found.fit.ok else f"WRONG: {line}" for line in found.fit.lines)


def _numbers(found: Rehearsal) -> str:
    ranks = [built.rank for built in found.ranks]
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _pipeline(found: Rehearsal) -> Iterator[str]:
    proof = found.proof
    if proof is None:
        return
    size = f"{proof.stages} stages on {proof.ranks} ranks, {proof.micro_batches} micro-batches"
    yield f"pipeline: {proof.schedule}, {size}: all {proof.actions:,} computations complete, no deadlock"
    live = f"{min(proof.live)} to {max(proof.live)} activations of a stage at once"
    yield f"  bubble {proof.bubble:.1%} with stages that take equally long; a rank holds {live}"


_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "gathered", "peak")


def _table(found: Rehearsal) -> Iterator[str]:
    """Format a row for each rank that trained a step, and below it the estimate of `plan`."""
    stepped = [built for built in found.ranks if built.counted.peak is not None]
    if not stepped:
        return
    step = f"a step of {found.micro_batches} micro-batches"
    unit, unit_name = choose_memory_unit(max(built.counted.peak or 0 for built in stepped))
    yield f"memory of a rank in {unit_name}, counted over {step}, and as `hpc-train plan` estimates it:"
    offloaded = any(built.counted.host for built in stepped)
    yield _row("rank", "stage", (*_COLUMNS, "offloaded") if offloaded else _COLUMNS)
    for built in stepped:
        counted = _on_device(built)
        sizes = [counted[name] for name in _COLUMNS] + ([built.counted.host] if offloaded else [])
        yield _row(str(built.rank), str(built.at["pp"]), [_format_cell(unit, size) for size in sizes])
        if plan := found.planned.get(built.rank):
            sums = {**plan, "activations": plan["activations"] + plan["logits"], "gathered": plan["buffers"]}
            sums["peak"] = sum(plan.values())
            yield _row("", "plan", [_format_cell(unit, sums[name]) for name in _COLUMNS])


def _on_device(built: RehearsedRank) -> dict[str, int | None]:
    """Format a rank's columns; offloaded memory does not count as the device's."""
    counted = {**asdict(built.counted), "gradients": built.counted.whole_gradients}
    return {**counted, **dict.fromkeys(built.counted.offloaded, 0)}


def _format_cell(unit: int, size: float | None) -> str:
    return "-" if size is None else f"{size / unit:,.2f}"


def _row(rank: str, stage: str, cells: list[str] | tuple[str, ...]) -> str:
    return f"  {rank:>7} {stage:>5} " + " ".join(f"{cell:>11}" for cell in cells)
