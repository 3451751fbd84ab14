"""A rehearsal as text for a person, and as JSON for a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hpc_train.planner.rehearsal.result import Built, Rehearsal

_MIB, _GIB = 2**20, 2**30
_MOST_PROBLEMS = 20


def as_json(found: Rehearsal) -> dict[str, Any]:
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
        "not_rehearsed": list(found.not_rehearsed),
        "seconds": found.seconds,
        "processes": found.processes,
        "rss_bytes": found.rss,
    }


def _memory(found: Rehearsal, built: Built) -> dict[str, Any]:
    return {
        "rank": built.rank,
        "at": built.at,
        "counted": asdict(built.counted),
        "closed_form": found.closed_form.get(built.rank, {}),
        "planned": found.planned.get(built.rank, {}),
        "seconds": built.seconds,
    }


def lines(found: Rehearsal) -> Iterator[str]:
    """For a person."""
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
        sizes = ", ".join(f"{size / _MIB:,.1f}" for size in found.servers)
        yield f"servers: {sizes} MiB each, with the optimizer's state"
    yield from (f"not rehearsed: {line}" for line in found.not_rehearsed)
    rss = f"{found.processes} processes of up to {found.rss / _GIB:.2f} GiB"
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
    yield f"pipeline: {proof.schedule}, {size}: all {proof.actions:,} computations complete, no rank waits for ever"
    live = f"{min(proof.live)} to {max(proof.live)} activations of a stage at once"
    yield f"  bubble {proof.bubble:.1%} with stages that take equally long; a rank holds {live}"


_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "gathered", "peak")


def _table(found: Rehearsal) -> Iterator[str]:
    """A row for each rank that trained a step, and below it what `plan` says."""
    stepped = [built for built in found.ranks if built.counted.peak is not None]
    if not stepped:
        return
    step = f"a step of {found.micro_batches} micro-batches"
    unit, called = (_GIB, "GiB") if max(built.counted.peak or 0 for built in stepped) >= _GIB else (_MIB, "MiB")
    yield f"memory of a rank in {called}, counted over {step}, and as `hpc-train plan` reckons it:"
    offloaded = any(built.counted.host for built in stepped)
    yield _row("rank", "stage", (*_COLUMNS, "offloaded") if offloaded else _COLUMNS)
    for built in stepped:
        counted = _on_device(built)
        host = [_in(unit, built.counted.host)] if offloaded else []
        yield _row(str(built.rank), str(built.at["pp"]), [*(_in(unit, counted[name]) for name in _COLUMNS), *host])
        if plan := found.planned.get(built.rank):
            sums = {**plan, "activations": plan["activations"] + plan["logits"], "gathered": plan["buffers"]}
            sums["peak"] = sum(plan.values())
            yield _row("", "plan", [_in(unit, sums[name]) for name in _COLUMNS])


def _on_device(built: Built) -> dict[str, int | None]:
    """Format a rank's columns; offloaded memory does not count as the device's."""
    counted = {**asdict(built.counted), "gradients": built.counted.whole_gradients}
    return {**counted, **dict.fromkeys(built.counted.offloaded, 0)}


def _in(unit: int, size: float | None) -> str:
    return "-" if size is None else f"{size / unit:,.2f}"


def _row(rank: str, stage: str, cells: list[str] | tuple[str, ...]) -> str:
    return f"  {rank:>7} {stage:>5} " + " ".join(f"{cell:>11}" for cell in cells)
