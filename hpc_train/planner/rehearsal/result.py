"""The result of a rehearsal: what each rank holds, how the ranks' tensors tile the model, and what is wrong.

It is formatted here as JSON for scripts and as text for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_train.config.parallel import Degrees
from hpc_train.planner.rehearsal.pipeline_order import OrderProof
from hpc_train.planner.rehearsal.start_up import StartUp
from hpc_train.planner.rehearsal.tiling import Tiling
from hpc_train.units import MIB, choose_memory_unit, format_bytes


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
        return (*self.coverage.problems, *self._list_miscounts())

    def _list_miscounts(self) -> list[str]:
        lines = []
        for built in self.ranks:
            for part, wanted in self.closed_form.get(built.rank, {}).items():
                counted = getattr(built.counted, part)
                if counted is not None and counted != wanted:
                    message = f"{counted:,} bytes of {part}, where the model's shape says {wanted:,}"
                    lines.append(f"rank {built.rank}: {message}")
        return lines


_MAX_PROBLEMS = 20


def rehearsal_to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return a report as JSON, with sizes in bytes per rank.

    ok: nothing is wrong, and what ranks need keeps to the plan and fits on the device. fits: null if the device's
    memory is unknown.
    """
    stepped = [built for built in rehearsal.ranks if built.counted.peak is not None]
    return {
        "ok": rehearsal.ok,
        "fits": rehearsal.fit.fits,
        "within_plan": rehearsal.fit.within_plan,
        "verdict": list(rehearsal.fit.lines),
        "world": rehearsal.degrees.world,
        "degrees": asdict(rehearsal.degrees),
        "built": [built.rank for built in rehearsal.ranks],
        "model": {"tensors": rehearsal.coverage.tensors, "elements": rehearsal.coverage.elements},
        "pieces": rehearsal.coverage.pieces,
        "problems": list(rehearsal.problems),
        "pipeline": None if rehearsal.proof is None else asdict(rehearsal.proof),
        "micro_batches": rehearsal.micro_batches,
        "memory": [_memory_to_json(rehearsal, built) for built in stepped or rehearsal.ranks],
        "servers": list(rehearsal.servers),
        "start_up": rehearsal.start_up.to_json(),
        "not_rehearsed": list(rehearsal.not_rehearsed),
        "seconds": rehearsal.seconds,
        "processes": rehearsal.processes,
        "rss_bytes": rehearsal.rss,
    }


def _memory_to_json(rehearsal: Rehearsal, built: RehearsedRank) -> dict[str, Any]:
    return {
        "rank": built.rank,
        "at": built.at,
        "counted": asdict(built.counted),
        "closed_form": rehearsal.closed_form.get(built.rank, {}),
        "planned": rehearsal.planned.get(built.rank, {}),
        "seconds": built.seconds,
    }


def format_rehearsal(rehearsal: Rehearsal) -> Iterator[str]:
    """Format a report for a person."""
    degrees, model = rehearsal.degrees, rehearsal.coverage
    chosen = f"built {len(rehearsal.ranks)} of them: {_list_numbers(rehearsal)}"
    yield f"world: {degrees.world:,} ranks = {degrees}; {chosen}"
    yield from (f"  {line}" for line in rehearsal.ranks[0].said)
    for problem in rehearsal.problems[:_MAX_PROBLEMS]:
        yield f"WRONG: {problem}"
    if len(rehearsal.problems) > _MAX_PROBLEMS:
        yield f"WRONG: and {len(rehearsal.problems) - _MAX_PROBLEMS} more"
    if not rehearsal.problems:
        what = f"{model.tensors:,} tensors, {model.elements:,} numbers"
        yield f"model: {what}: over all {degrees.world:,} ranks each is held once, copies aside, and has one writer"
        yield f"checkpoint: {model.pieces:,} pieces with the optimizer's state"
    yield from _format_pipeline(rehearsal)
    yield from _format_table(rehearsal)
    if rehearsal.servers:
        sizes = ", ".join(f"{size / MIB:,.1f}" for size in rehearsal.servers)
        yield f"servers: {sizes} MiB each, with the optimizer's state"
    yield rehearsal.start_up.describe()
    yield from (f"not rehearsed: {line}" for line in rehearsal.not_rehearsed)
    rss = f"{rehearsal.processes} processes of up to {format_bytes(rehearsal.rss)}"
    yield f"{rehearsal.seconds:.1f} s, {rss}"
    yield from (line if rehearsal.fit.ok else f"WRONG: {line}" for line in rehearsal.fit.lines)


def _list_numbers(rehearsal: Rehearsal) -> str:
    ranks = [built.rank for built in rehearsal.ranks]
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _format_pipeline(rehearsal: Rehearsal) -> Iterator[str]:
    proof = rehearsal.proof
    if proof is None:
        return
    size = f"{proof.stages} stages on {proof.ranks} ranks, {proof.micro_batches} micro-batches"
    yield f"pipeline: {proof.schedule}, {size}: all {proof.actions:,} computations complete, no deadlock"
    live = f"{min(proof.live)} to {max(proof.live)} activations of a stage at once"
    yield f"  bubble {proof.bubble:.1%} with stages that take equally long; a rank holds {live}"


_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "gathered", "peak")


def _format_table(rehearsal: Rehearsal) -> Iterator[str]:
    """Format a row for each rank that trained a step, and below it the estimate of `plan`."""
    stepped = [built for built in rehearsal.ranks if built.counted.peak is not None]
    if not stepped:
        return
    step = f"a step of {rehearsal.micro_batches} micro-batches"
    unit, unit_name = choose_memory_unit(max(built.counted.peak or 0 for built in stepped))
    yield f"memory of a rank in {unit_name}, counted over {step}, and as `hpc-train plan` estimates it:"
    offloaded = any(built.counted.host for built in stepped)
    yield _format_row("rank", "stage", (*_COLUMNS, "offloaded") if offloaded else _COLUMNS)
    for built in stepped:
        counted = _select_device_memory(built)
        sizes = [counted[name] for name in _COLUMNS] + ([built.counted.host] if offloaded else [])
        yield _format_row(str(built.rank), str(built.at["pp"]), [_format_cell(unit, size) for size in sizes])
        if plan := rehearsal.planned.get(built.rank):
            sums = {**plan, "activations": plan["activations"] + plan["logits"], "gathered": plan["buffers"]}
            sums["peak"] = sum(plan.values())
            yield _format_row("", "plan", [_format_cell(unit, sums[name]) for name in _COLUMNS])


def _select_device_memory(built: RehearsedRank) -> dict[str, int | None]:
    """Format a rank's columns; offloaded memory does not count as the device's."""
    counted = {**asdict(built.counted), "gradients": built.counted.whole_gradients}
    return {**counted, **dict.fromkeys(built.counted.offloaded, 0)}


def _format_cell(unit: int, size: float | None) -> str:
    return "-" if size is None else f"{size / unit:,.2f}"


def _format_row(rank: str, stage: str, cells: list[str] | tuple[str, ...]) -> str:
    return f"  {rank:>7} {stage:>5} " + " ".join(f"{cell:>11}" for cell in cells)
