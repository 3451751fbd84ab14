"""Load a step into any layout, and choose the step that checkpoint.resume means.

Every rank reads only what it needs and verifies what it reads: `plan_reads` turns tensor shards into strips of files,
`exchange` passes on what several ranks need, `reader` reads and copies the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_layout import dtype_name
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, read_manifest
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage
from hpc_train.checkpoint.format.shard_layout import SavedTensor, SingleShardTensors
from hpc_train.checkpoint.load.exchange import plan_exchange
from hpc_train.checkpoint.load.read_schedule import (
    LoadDestinations,
    StripRow,
    Strips,
    copy_strips,
    cut_at_cells,
    make_single_strips,
    make_strips,
    sort_by_file,
    strip_sizes,
)
from hpc_train.checkpoint.load.reader import PieceReader
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.rank_consensus import gather_and_decide, run_on_rank_0
from hpc_train.checkpoint.storage.step_directory import (
    explain_bad_step,
    find_steps,
    holds_weights_only,
    locate_step,
    parse_step,
    select_weights,
    try_read_manifest,
)
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.runtime.processes import pause_gc

_BUDGET_BYTES = 1 << 40
"""Bytes of a step above which file sizes are checked before ranks share out the reads."""


def load_step(directory: Path, step: int, pieces: Iterable[TensorShard], world: World | None) -> dict[str, Any]:
    """Fill `piece.local` of every piece in place, bit for bit, from any layout it was saved in; returns `extra`.

    Every rank of `world` calls it, with its own pieces, copies (replica > 0) included; tensors of the checkpoint that
    nobody asks for are ignored. Every byte that is used is verified first. What several ranks want is read once and
    passed on (checkpoint.exchange), so all ranks together read little more than what they want of the files. No world
    means a single process.

    Raises, the same on every rank: UserError if the step is not there, or if it has no tensor of that name, shape and
    dtype; CheckpointError if it is damaged. Until then nothing is written, but after an error while the data is being
    read the content of `local` is undefined.
    """
    with pause_gc():  # to the end: what a manifest of thousands of tensors is made of is gone before the next look
        return _load_pieces(directory, step, list(pieces), world)


def _load_pieces(directory: Path, step: int, wanted: Sequence[TensorShard], world: World | None) -> dict[str, Any]:
    path, manifest = run_on_rank_0(world, lambda: _open_step(directory, step))
    where = f"checkpoint step {step} in {directory}"
    is_first = world is None or world.rank == 0
    plan: list[Strips] = []
    targets = LoadDestinations(wanted)
    with ShardReader(path, manifest) as source:

        def planned() -> None:
            try:
                plan.append(plan_reads(wanted, manifest, where))
            except UserError:
                if is_first:  # the manifest may be wrong, not the one who asks for that tensor
                    report_damage(where, source.check_all)
                raise
            report_damage(where, lambda: check_reads(plan[0], source, targets))
            if is_first and world is not None and world.size > 1 and sum(source.sizes) > _BUDGET_BYTES:
                report_damage(where, source.check_sizes)

        gather_and_decide(world, planned, lambda _: None)
        own, shared = plan_exchange(plan[0], source.sizes, world)
        reader = PieceReader(source, wanted, targets)
        gather_and_decide(world, lambda: report_damage(where, lambda: reader.run(own)), lambda _: None)
        if shared is not None:
            gather_and_decide(world, lambda: report_damage(where, lambda: shared.run(source, targets)), lambda _: None)
    targets.finish()
    return manifest.extra


def _open_step(directory: Path, step: int) -> tuple[Path, Manifest]:
    path = locate_step(directory, step)
    try:
        return path, read_manifest(path, step)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} is damaged: {MANIFEST_FILE}: {error}") from error


def check_reads(strips: Strips, source: ShardReader, targets: LoadDestinations) -> None:
    """Raise CheckpointError unless the files have all bytes to be read, and every byte of every piece comes once."""
    source.check(strips)
    last = strips["at"] + (strips["count"] - 1) * strips["step"] + strips["run"]
    outside = (strips["at"] < 0) | (last > targets.sizes[strips["piece"]])
    coming = np.zeros(len(targets.sizes), dtype=np.int64)
    np.add.at(coming, strips["piece"], strip_sizes(strips))
    if outside.any() or (coming != targets.sizes).any():
        raise CheckpointError("what the files hold is not what the tensors need")


def plan_reads(pieces: Sequence[TensorShard], manifest: Manifest, where: str) -> Strips:
    """Plan the strips that fill this rank's shards, in file order."""
    plain, others = _plan_single_shards(pieces, manifest.lone)
    rows = _plan_others(pieces, others, manifest, where) if others else []
    return sort_by_file(cut_at_cells(np.concatenate([plain, make_strips(rows)])))


def _plan_single_shards(pieces: Sequence[TensorShard], lone: SingleShardTensors) -> tuple[Strips, list[int]]:
    """Return (strips of the shards that are just what was saved, indices of the others)."""
    found = lone.equal(pieces)
    plain = np.flatnonzero(found >= 0)
    rows = found[plain]
    whole = np.stack([lone.files[rows], lone.places[rows], lone.sizes[lone.form[rows]], plain], axis=1)
    return make_single_strips(whole), np.flatnonzero(found < 0).tolist()


def _plan_others(pieces: Sequence[TensorShard], which: Sequence[int], manifest: Manifest, where: str) -> list[StripRow]:
    tensors = {tensor.name: tensor for tensor in manifest.holdings.tensors}
    missing = [pieces[index].name for index in which if pieces[index].name not in tensors]
    if missing:
        more = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(
            f"{where} has no tensor {missing[0]!r}{more}; it is of another model or optimizer: choose another"
        )
    return [
        row
        for index in which
        for row in _plan_piece(index, pieces[index], tensors[pieces[index].name], manifest, where)
    ]


def _plan_piece(index: int, piece: TensorShard, tensor: SavedTensor, manifest: Manifest, where: str) -> list[StripRow]:
    _check_kind(piece, tensor, where)
    held = Rectangle(tuple(piece.offset), tuple(piece.local.shape))
    item = piece.dtype.itemsize
    parts = manifest.holdings.touching(piece.name, held)
    if len(parts) == 1 and parts[0].rectangle == held:
        return copy_strips(parts[0].file, parts[0].place, held, index, held, held, item)
    overlaps = [(part, held.overlap(part.rectangle)) for part in parts]
    found = [(part, common) for part, common in overlaps if common]
    why = explain_coverage(held, [common for _, common in found])
    if why:
        raise CheckpointError(f"{where} is damaged: tensor {piece.name!r}: {why}")
    return [
        row
        for part, common in found
        for row in copy_strips(part.file, part.place, part.rectangle, index, held, common, item)
    ]


def _check_kind(piece: TensorShard, saved: SavedTensor, where: str) -> None:
    here, there = (tuple(piece.shape), dtype_name(piece.dtype)), (saved.shape, saved.dtype)
    if here != there:
        raise UserError(
            f"{where}: tensor {piece.name!r} is {there[1]} of shape {there[0]}, this run wants {here[1]} of shape"
            f" {here[0]}; choose another checkpoint or the configuration it was saved with"
        )


def report_damage(where: str, work: Callable[[], None]) -> None:
    """Call `work`, and turn errors of the files into one CheckpointError that says which step is damaged."""
    try:
        work()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumedStep:
    """The step that was loaded."""

    directory: Path
    step: int
    extra: dict[str, Any]
    weights_only: bool = False
    """Only weights were loaded: optimizer state and position are those of a new training."""
    origin: Origin | None = None
    """The code and config that made it, if known."""


def resume_from_checkpoint(
    directory: Path, how: str, pieces: Iterable[TensorShard], world: World | None
) -> ResumedStep | None:
    """Load the checkpoint that checkpoint.resume chooses; None to start from the beginning. Every rank calls it.

    directory: where this run keeps its checkpoints.
    how: `auto` (the newest that is sound), `never`, a step in `directory`, or the path of `step-<n>`, of a directory
    of checkpoints or of a run (the newest in it that is sound). Of a step that has weights only, these are loaded.

    A damaged checkpoint shows while it is loaded; then the next one is, and a warning says so. One with NaN in it, or
    marked bad, is passed over too, unless its step is given. Raises UserError for a step or a path that is not there,
    or is of another model; CheckpointError if there are checkpoints but all are damaged or no good, because starting
    over would look like a success, or if the directory cannot be read.
    """
    if how == "never":
        return None
    wanted = list(pieces)
    where, step = run_on_rank_0(world, lambda: _resolve_setting(directory, how))
    if step is not None:
        return _load_resumed(where, step, wanted, world)
    steps = run_on_rank_0(world, lambda: _list_candidates(where))
    for candidate, poison in steps:
        try:
            if poison is not None:
                raise CheckpointError(f"checkpoint step {candidate} in {where} {poison}")
            return _load_resumed(where, candidate, wanted, world)
        except CheckpointError as error:
            if world is None or world.rank == 0:
                _log.warning("%s; it is skipped", error)
    if steps:
        raise CheckpointError(
            f"every checkpoint in {where} is damaged{_describe_bad(steps)} (`hpc-train checkpoint verify` tells how);"
            " checkpoint.resume=never starts over"
        )
    return None


def _load_resumed(directory: Path, step: int, wanted: list[TensorShard], world: World | None) -> ResumedStep:
    weights_only, origin = run_on_rank_0(world, lambda: _read_about(directory, step))
    extra = load_step(directory, step, select_weights(wanted) if weights_only else wanted, world)
    return ResumedStep(directory, step, extra, weights_only, origin)


def _read_about(directory: Path, step: int) -> tuple[bool, Origin | None]:
    """(whether it has weights only, what made it); of a damaged manifest nothing, as loading will say."""
    manifest = try_read_manifest(locate_step(directory, step), step)
    return (False, None) if manifest is None else (holds_weights_only(manifest.extra), manifest.origin)


def _list_candidates(directory: Path) -> list[tuple[int, str | None]]:
    """(step, why it is not to be gone on from): those that cannot be ordered first, then the newest first.

    Each manifest is read once: one that can be read only at the second look must not pass for the newest.
    """
    whole: list[tuple[int, int, str | None]] = []
    strange: list[tuple[int, str | None]] = []
    for step, path in find_steps(directory).items():
        try:
            manifest = read_manifest(path, step)
            whole.append((manifest.sequence, step, explain_bad_step(path, manifest)))
        except CheckpointError as error:
            strange.append((step, f"is damaged: {MANIFEST_FILE}: {error}"))
        except OSError as error:
            strange.append((step, f"cannot be read: {error.strerror}"))
    return sorted(strange, reverse=True) + [(step, poison) for _, step, poison in sorted(whole, reverse=True)]


def _describe_bad(steps: list[tuple[int, str | None]]) -> str:
    return " or no good, as the warnings say" if any(poison for _, poison in steps) else ""


def _resolve_setting(directory: Path, how: str) -> tuple[Path, int | None]:
    """(directory, step), or without a step the newest there that is sound."""
    if how == "auto":
        return directory, None
    if how.isdecimal():
        locate_step(directory, int(how))
        return directory, int(how)
    path = Path(how).expanduser().absolute()
    for it in (path, path.resolve()):  # follow a link that the user names
        step = parse_step(it)
        if step is not None and find_steps(it.parent).get(step) == it:
            return it.parent, step
    for place in (path, path / "checkpoints"):
        if find_steps(place):
            return place, None
    raise UserError(f"checkpoint.resume={path}: there is no checkpoint; give the path of a step-<n>, or a step")
