"""Load a step into any layout, and choose the step that checkpoint.resume names.

Every rank reads only what it needs and verifies what it reads: `plan_reads` turns tensor shards into strips of files,
`exchange` reads what several ranks need, `reader` reads and copies the rest.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

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
from hpc_train.checkpoint.load.reader import TensorReader
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.rank_consensus import gather_and_decide, run_on_rank_0
from hpc_train.checkpoint.storage.step_directory import (
    explain_bad_step,
    find_steps,
    holds_weights_only,
    locate_step,
    select_weights,
    try_read_manifest,
)
from hpc_train.checkpoint.storage.step_selection import find_named_step, open_step
from hpc_train.errors import UserError
from hpc_train.garbage_collection import pause_gc
from hpc_train.interfaces import TensorShard, World
from hpc_train.models.adapters.names import is_adapter_parameter

T = TypeVar("T")
_BUDGET_BYTES = 1 << 40
"""Bytes of a step above which rank 0 checks all file sizes first: a wrong manifest could ask for any memory."""


def load_step(directory: Path, step: int, shards: Iterable[TensorShard], world: World | None) -> dict[str, Any]:
    """Fill `shard.local` of every shard in place, bit for bit, from a step saved in any layout; returns its `extra`.

    A collective: every rank of `world` calls it with its own shards, including copies (replica > 0). Tensors of the
    checkpoint that no rank asks for are ignored. Every byte is verified before it is used. What several ranks need is
    read once and passed on (see exchange), so all ranks together read little more than what they need. No world means
    a single process.

    Raises the same error on every rank: UserError if there is no such step, or no tensor of that name, shape and dtype
    in it; CheckpointError if it is damaged. Errors found before reading leave the tensors as they were; after an error
    while reading, the content of `local` is undefined.
    """
    with pause_gc():  # for the whole load: the many objects of a manifest are freed before a collection could scan them
        return _load_shards(directory, step, list(shards), world)


def _load_shards(directory: Path, step: int, wanted: Sequence[TensorShard], world: World | None) -> dict[str, Any]:
    """Read what this rank wants of a step into its shards; returns rank 0's extra values. A collective."""
    path, manifest = run_on_rank_0(world, lambda: _open_step(directory, step))
    where = f"checkpoint step {step} in {directory}"
    is_first = world is None or world.rank == 0
    plan: list[Strips] = []  # filled by make_plan; what that returned would be sent to rank 0
    targets = LoadDestinations(wanted)
    with ShardReader(path, manifest) as source:

        def make_plan() -> None:
            try:
                plan.append(plan_reads(wanted, manifest, where))
            except UserError:
                if is_first:  # the cause may be a wrong manifest, not a wrong request
                    report_damage(where, source.check_all)
                raise
            report_damage(where, lambda: check_reads(plan[0], source, targets))
            if is_first and world is not None and world.size > 1 and sum(source.sizes) > _BUDGET_BYTES:
                report_damage(where, source.check_sizes)

        gather_and_decide(world, make_plan, lambda _: None)
        # What only this rank needs is read first, in parallel on all ranks; then the shared cells, in common rounds. An
        # error on any rank is gathered after each part, so that no rank waits in the next collective.
        local_plan, shared = plan_exchange(plan[0], source.sizes, world)
        reader = TensorReader(source, wanted, targets)
        gather_and_decide(world, lambda: report_damage(where, lambda: reader.run(local_plan)), lambda _: None)
        if shared is not None:
            gather_and_decide(world, lambda: report_damage(where, lambda: shared.run(source, targets)), lambda _: None)
    targets.finish()
    return manifest.extra


def _open_step(directory: Path, step: int) -> tuple[Path, Manifest]:
    opened = open_step(directory, step)
    return opened.path, opened.manifest  # which can be sent to the other ranks


def check_reads(strips: Strips, source: ShardReader, targets: LoadDestinations) -> None:
    """Raise CheckpointError unless the files have all bytes to be read, and they fill every shard exactly once."""
    source.check(strips)
    last = strips["at"] + (strips["count"] - 1) * strips["step"] + strips["run"]
    outside = (strips["at"] < 0) | (last > targets.sizes[strips["shard"]])
    # Strips of one tensor do not overlap, so if their bytes add up to its size they fill it completely.
    coming = np.zeros(len(targets.sizes), dtype=np.int64)
    np.add.at(coming, strips["shard"], strip_sizes(strips))
    if outside.any() or (coming != targets.sizes).any():
        raise CheckpointError("the bytes in the files do not fill the tensors exactly")


def plan_reads(shards: Sequence[TensorShard], manifest: Manifest, where: str) -> Strips:
    """Plan the strips that fill this rank's shards, in file order."""
    plain, others = _plan_single_shards(shards, manifest.single_shard_tensors)
    rows = _plan_others(shards, others, manifest, where) if others else []
    return sort_by_file(cut_at_cells(np.concatenate([plain, make_strips(rows)])))


def _plan_single_shards(shards: Sequence[TensorShard], tensors: SingleShardTensors) -> tuple[Strips, list[int]]:
    """Return strips of the shards that were saved with the same rectangle, and the indices of the others."""
    matches = tensors.match_shards(shards)
    plain = np.flatnonzero(matches >= 0)
    rows = matches[plain]
    columns = np.stack([tensors.files[rows], tensors.places[rows], tensors.sizes[tensors.form[rows]], plain], axis=1)
    return make_single_strips(columns), np.flatnonzero(matches < 0).tolist()


def _plan_others(shards: Sequence[TensorShard], which: Sequence[int], manifest: Manifest, where: str) -> list[StripRow]:
    tensors = {tensor.name: tensor for tensor in manifest.step_layout.tensors}
    missing = [shards[index].name for index in which if shards[index].name not in tensors]
    if missing:
        more = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(
            f"{where} has no tensor {missing[0]!r}{more}; it is of another model or optimizer: choose another"
        )
    return [
        row
        for index in which
        for row in _plan_shard(index, shards[index], tensors[shards[index].name], manifest, where)
    ]


def _plan_shard(index: int, shard: TensorShard, tensor: SavedTensor, manifest: Manifest, where: str) -> list[StripRow]:
    _check_kind(shard, tensor, where)
    target = Rectangle(tuple(shard.offset), tuple(shard.local.shape))
    item = shard.dtype.itemsize
    parts = manifest.step_layout.find_overlapping_parts(shard.name, target)
    # The same rectangle was saved, as in most loads: nothing to intersect.
    if len(parts) == 1 and parts[0].rectangle == target:
        return copy_strips(parts[0].file, parts[0].place, target, index, target, target, item)
    overlaps = [(part, target.overlap(part.rectangle)) for part in parts]
    overlapping = [(part, common) for part, common in overlaps if common]
    why = explain_coverage(target, [common for _, common in overlapping])
    if why:
        raise CheckpointError(f"{where} is damaged: tensor {shard.name!r}: {why}")
    return [
        row
        for part, common in overlapping
        for row in copy_strips(part.file, part.place, part.rectangle, index, target, common, item)
    ]


def _check_kind(shard: TensorShard, saved: SavedTensor, where: str) -> None:
    wanted, stored = (tuple(shard.shape), dtype_name(shard.dtype)), (saved.shape, saved.dtype)
    if wanted != stored:
        raise UserError(
            f"{where}: tensor {shard.name!r} is {stored[1]} of shape {stored[0]}, this run wants {wanted[1]} of shape"
            f" {wanted[0]}; choose another checkpoint or the configuration it was saved with"
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
    """A step that was loaded to resume from."""

    directory: Path
    step: int
    extra: dict[str, Any]
    weights_only: bool = False
    """Only weights were loaded: the optimizer state and the position in the data are those of a new training."""
    origin: Origin | None = None
    """The code and config that made it, if known."""
    lacks_adapters: bool = False
    """The run has adapters and the step has none: they have their initial values."""


def resume_from_checkpoint(
    directory: Path,
    how: str,
    shards: Iterable[TensorShard],
    world: World | None,
    announce: Callable[[int], None] = lambda step: None,
    report_unusable: Callable[[int, str], None] = lambda step, why: None,
) -> ResumedStep | None:
    """Load the checkpoint that checkpoint.resume chooses; None to start from the beginning. A collective.

    directory: checkpoint directory of this run.
    how: `auto` (the newest sound step), `never`, a step in `directory`, or the path of `step-<n>`, of a checkpoint
    directory or of a run (its newest sound step). From a step with weights only, the weights are loaded.
    announce: called on rank 0 with each step of `directory` that `auto` is about to load.
    report_unusable: called on rank 0 with each step that is skipped, and why.

    Damage shows while a step is loaded; then a warning says so and the next older step is loaded. A step with NaN, or
    marked bad, is skipped too, unless it is given by number. Raises UserError for a step or a path that does not exist
    or is of another model; CheckpointError if there are checkpoints but none is sound, because starting over would look
    like a success, or if the directory cannot be read.
    """
    if how == "never":
        return None
    wanted = list(shards)
    where, step = run_on_rank_0(world, lambda: _resolve_setting(directory, how))
    if step is not None:
        return _load_resumed(where, step, wanted, world)

    def load(candidate: int) -> ResumedStep:
        if how == "auto" and (world is None or world.rank == 0):
            announce(candidate)
        return _load_resumed(where, candidate, wanted, world)

    return load_newest_sound(where, world, load, report_unusable)


def load_newest_sound(
    directory: Path,
    world: World | None,
    load: Callable[[int], T],
    report_unusable: Callable[[int, str], None] = lambda step, why: None,
) -> T | None:
    """Return `load(step)` of the newest step that is sound; None if there are no steps. A collective.

    load: raises CheckpointError, on every rank, if a step is damaged; then a warning says so and the next older one is
    loaded. report_unusable: called on rank 0 with each step that is skipped, and why. Raises CheckpointError if there
    are steps but none is sound.
    """
    steps = run_on_rank_0(world, lambda: _list_candidates(directory))
    for candidate, defect in steps:
        try:
            if defect is not None:
                raise CheckpointError(f"checkpoint step {candidate} in {directory} {defect}")
            return load(candidate)
        except CheckpointError as error:
            if world is None or world.rank == 0:
                _log.warning("%s; it is skipped", error)
                report_unusable(candidate, str(error))
    if steps:
        raise CheckpointError(
            f"every checkpoint in {directory} is damaged{_describe_bad(steps)} (`hpc-train checkpoint verify` shows "
            "how); checkpoint.resume=never starts over"
        )
    return None


def _load_resumed(directory: Path, step: int, wanted: list[TensorShard], world: World | None) -> ResumedStep:
    has_adapters = any(is_adapter_parameter(shard.name) for shard in wanted)
    # The slice is a plain tuple, which ranks can send.
    content = _StepContent(*run_on_rank_0(world, lambda: _read_content(directory, step, has_adapters)[:]))
    chosen = select_weights(wanted) if content.weights_only else rename_copies(wanted, content.copies)
    if content.lacks_adapters:
        chosen = [shard for shard in chosen if not is_adapter_parameter(shard.name)]
        if not any(shard.dtype.is_floating_point for shard in chosen):
            raise UserError(
                f"checkpoint step {step} in {directory} has no adapters, and this run reads its base from model.path: "
                "export the step (`hpc-train checkpoint export RUN FOLDER --format hf`) and give model.path=FOLDER"
            )
    loaded = [_widen_base(shard, content.float32_names) for shard in chosen]
    extra = load_step(directory, step, loaded, world)
    for shard, read in zip(chosen, loaded, strict=True):
        if read is not shard:
            shard.local.copy_(read.local)
    return ResumedStep(directory, step, extra, content.weights_only, content.origin, content.lacks_adapters)


class _StepContent(NamedTuple):
    """Which tensors of a step a resuming run loads, and from what kind of run they come."""

    weights_only: bool = False
    """Only weights are to be loaded: the step has no others, or the optimizer state of another training."""
    lacks_adapters: bool = False
    """The run trains adapters, and the step has none."""
    origin: Origin | None = None
    copies: int = 0
    """Copies of a loosely synchronised run, else 0."""
    float32_names: frozenset[str] = frozenset()
    """Weights in float32 of a step without adapters, which the run may keep in bfloat16 (adapter.base)."""


def _widen_base(shard: TensorShard, float32_names: frozenset[str]) -> TensorShard:
    """Return a float32 shard in CPU memory for a weight that the step has in float32 and this run in bfloat16."""
    if shard.name not in float32_names or shard.dtype != torch.bfloat16:
        return shard
    return replace(shard, dtype=torch.float32, local=torch.empty(shard.local.shape))


def _read_content(directory: Path, step: int, has_adapters: bool) -> _StepContent:
    """Read what a step has. has_adapters: the run trains some. A damaged manifest has nothing: the load will fail.

    Raises UserError for a step with adapters if the run has none, because their training would be lost silently.
    """
    manifest = try_read_manifest(locate_step(directory, step), step)
    if manifest is None:
        return _StepContent()
    saved = next((tensor.name for tensor in manifest.step_layout.tensors if is_adapter_parameter(tensor.name)), None)
    if saved is not None and not has_adapters:
        raise UserError(
            f"checkpoint step {step} in {directory} has adapters ({saved}), and this run has none; use adapter=lora or "
            "adapter=dora as it was trained, or start from `hpc-train checkpoint export --merged`"
        )
    lacks_adapters = has_adapters and saved is None
    copies = count_copies(tensor.name for tensor in manifest.step_layout.tensors)
    weights = manifest.step_layout.tensors if lacks_adapters else ()
    float32_names = frozenset(tensor.name for tensor in weights if tensor.dtype == "float32")
    weights_only = holds_weights_only(manifest.extra) or lacks_adapters
    return _StepContent(weights_only, lacks_adapters, manifest.origin, copies, float32_names)


_COPY = re.compile(r"optim\.copy(\d+)_")


def count_copies(names: Iterable[str]) -> int:
    """Return how many copies of the model a step has state of (loose synchronisation); 0 if it has none."""
    return max((int(match[1]) + 1 for match in map(_COPY.match, names) if match), default=0)


def rename_copies(shards: Sequence[TensorShard], saved: int) -> list[TensorShard]:
    """Let copies beyond the saved ones start from the saved ones, round-robin; returns the shards to load."""

    def rename(shard: TensorShard) -> TensorShard:
        match = _COPY.match(shard.name)
        if not saved or match is None or int(match[1]) < saved:
            return shard
        return replace(shard, name=f"optim.copy{int(match[1]) % saved}_{shard.name[match.end() :]}")

    return [rename(shard) for shard in shards]


def _list_candidates(directory: Path) -> list[tuple[int, str | None]]:
    """Return (step, why not to resume from it or None): steps that cannot be ordered first, then the newest first.

    Each manifest is read once: one that becomes readable between two reads would count as the newest.
    """
    readable: list[tuple[int, int, str | None]] = []
    unreadable: list[tuple[int, str | None]] = []
    for step, path in find_steps(directory).items():
        try:
            manifest = read_manifest(path, step)
            readable.append((manifest.sequence, step, explain_bad_step(path, manifest)))
        except CheckpointError as error:
            unreadable.append((step, f"is damaged: {MANIFEST_FILE}: {error}"))
        except OSError as error:
            unreadable.append((step, f"cannot be read: {error.strerror}"))
    return sorted(unreadable, reverse=True) + [(step, defect) for _, step, defect in sorted(readable, reverse=True)]


def _describe_bad(steps: list[tuple[int, str | None]]) -> str:
    return " or no good, as the warnings say" if any(defect for _, defect in steps) else ""


def _resolve_setting(directory: Path, how: str) -> tuple[Path, int | None]:
    """Return (directory, step); without a step, the newest sound one in the directory is meant."""
    if how == "auto":
        return directory, None
    if how.isdecimal():
        locate_step(directory, int(how))
        return directory, int(how)
    path = Path(how).expanduser().absolute()
    if named := find_named_step(path):
        return named
    for place in (path, path / "checkpoints"):
        if find_steps(place):
            return place, None
    raise UserError(f"checkpoint.resume={path}: there is no checkpoint; give the path of a step-<n>, or a step")
