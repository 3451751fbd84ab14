"""Save checkpoints and weights when they are due, and report how those saves ended.

checkpoint.Saver writes the files beside the training steps. This file decides when, and which state of the run goes
into a checkpoint.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpc_train.checkpoint import CheckpointError, Saver, SaveResult, prune_steps
from hpc_train.checkpoint.provenance import Origin, encode_provenance, hash_file, hash_text, identify_code
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
from hpc_train.checkpoint.save.local_stage import LocalStage
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory, LustreStriper
from hpc_train.checkpoint.storage.retention import KeepRules
from hpc_train.checkpoint.storage.step_directory import WEIGHTS_FOLDER, mark_base, mark_weights_only, select_weights
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.plain_config import config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.data.stream_loader import gather_positions
from hpc_train.interfaces import TensorShard, World
from hpc_train.resilience.heartbeat import Phase
from hpc_train.training.records.run_records import find_event_time

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun


log = logging.getLogger(__name__)


def describe_origin(config: RunConfig, attempt: int) -> Origin:
    """Describe the code and configuration that checkpoints of this process come from. Call it with the model built."""
    version, code = identify_code()
    return Origin(version, code, hash_text(config_to_yaml(config)), _hash_model_file(config), attempt)


def describe_code_change(saved: Origin | None, current: Origin | None) -> str | None:
    """Return one line if a checkpoint was saved by other code than this; None if by the same, or if that is unknown.

    This does not stop a run: it may continue with a corrected program.
    """
    differ = current.differs(saved) if saved is not None and current is not None else []
    return f"the checkpoint was saved by other code: now {' and '.join(differ)}" if differ else None


def _hash_model_file(config: RunConfig) -> str | None:
    """Hash the file that model.module names, without what it imports; None for a built-in model."""
    if not isinstance(config.model, CustomModelConfig) or config.model.module is None:
        return None
    file = getattr(sys.modules.get(config.model.module), "__file__", None)
    with suppress(OSError):
        return hash_file(Path(file)) if file else None
    return None


@dataclass(frozen=True)
class SaveFailure:
    """A save that did not produce a checkpoint."""

    step: int
    why: str


@dataclass
class SaveState:
    """The savers of a run, and how their saves have gone."""

    saver: Saver
    """Saves whole checkpoints: parameters, optimizer state and position."""
    weights_saver: Saver
    """Saves weights alone (checkpoint.weights_every); separate from `saver`, so that neither waits for the other."""
    saved_at: int | None = None
    """Step of the newest whole checkpoint of this run; None before the first."""
    resumed_from: int | None = None
    """Step of this run's own checkpoint that it was resumed from; retention never removes it."""
    passed_over: frozenset[int] = frozenset()
    """On rank 0: steps that were passed over as their load ended the ranks; retention never removes them."""
    seconds: float | None = None
    """Seconds that the last whole checkpoint of this process took, from its beginning to its commit."""
    skip_reason: str = ""
    """Why a stop does not save, if so; the same on all ranks."""
    base_digest: str | None = None
    """Digest of the files that the base in 4 bits was read from; its weights are not saved."""
    failures: dict[bool, SaveFailure] = field(default_factory=dict)
    """Last save, if it failed; keyed by whether it is of the weights alone."""

    def change_world(self, world: World) -> None:
        """Go on with the ranks of `world`, since others are lost."""
        self.saver.change_world(world)
        self.weights_saver.change_world(world)

    def take_ended(self) -> list[SaveResult]:
        """Return the saves, of checkpoints and of weights, that have ended since the last call."""
        return self.saver.take_finished() + self.weights_saver.take_finished()

    def wait(self) -> list[SaveResult]:
        """Wait for pending saves; return those that have ended since the last call."""
        return self.saver.wait() + self.weights_saver.wait()

    def wait_until_copied(self) -> float:
        """Block until pending saves have copied parameters and optimizer state; returns the seconds it took."""
        return self.saver.wait_for_copy() + self.weights_saver.wait_for_copy()


def explain_missed_grace(run: TrainingRun, longest: float) -> str:
    """Return why a save would not end before the machine is taken away; empty if it would, or if that is unknown.

    longest: seconds that may have passed since the notice at most, whatever the clocks say: another node has written
    its time, and each clock may be set meanwhile.
    """
    grace, needed = run.config.resilience.grace_seconds, run.saves.seconds
    if grace is None or needed is None:
        return ""
    noticed = find_event_time(run.directory.events, "notice", run.reporter.attempt)
    if noticed is None:
        return ""
    seconds_left = grace - min(max(time.time() - noticed, 0.0), longest)
    if needed <= seconds_left:
        return ""
    return (
        f"the last save took {needed:.0f} s, and {max(seconds_left, 0):.0f} s are left of "
        f"resilience.grace_seconds={grace:g}"
    )


def save_if_due(run: TrainingRun, stopping: bool) -> bool:
    """Begin the saves that are due after this step; returns whether there are any."""
    save_every, weights_every = run.config.checkpoint.every, run.config.checkpoint.weights_every
    full = save_every and (stopping or run.step % save_every == 0 or run.step == run.steps)
    weights = weights_every and run.step % weights_every == 0
    if full or weights:
        run.observers.heartbeat.enter(Phase.SAVE, run.step)
    shards = list(run.engine.shards()) if full or weights else []  # once for both: a collective in some engines
    if full:
        save_checkpoint(run, shards)
    if weights:
        save_weights(run, shards)
    return bool(full or weights)


def save_checkpoint(run: TrainingRun, shards: Sequence[TensorShard]) -> None:
    """Begin to save this step; its result is reported after the step during which it ends."""
    extra: dict[str, Any] = {
        "consumed_samples": run.consumed_samples,
        "seed": run.config.train.seed,
        "noise_scale": run.numbers.noise.state(),
        "schema_version": run.config.schema_version,
        "owes_validation": run.evaluation.is_owed,
        "numbers": run.numbers.guard.state(),
        "data": gather_positions(run.loader, run.world),
    }
    validation = run.evaluation.loss if run.evaluation.step == run.step else None
    numbers = run.numbers
    # With the latest update skipped the parameters may be what makes the loss infinite.
    finite = numbers.finite_since_save and numbers.lost_since is None
    finite = finite and (validation is None or math.isfinite(validation))
    run.saves.saver.save(run.step, shards, mark_base(extra, run.saves.base_digest), finite, validation)
    if finite:
        numbers.rollback.add_checkpoint(run.step)
    numbers.finite_since_save = True


def save_weights(run: TrainingRun, shards: Sequence[TensorShard]) -> None:
    """Begin to save the weights of this step, without optimizer state. Retention never removes them."""
    extra = {"consumed_samples": run.consumed_samples, "schema_version": run.config.schema_version}
    extra = mark_base(extra, run.saves.base_digest)
    finite = run.numbers.finite_since_save
    run.saves.weights_saver.save(run.step, select_weights(shards), mark_weights_only(extra), finite)


def report_saves(run: TrainingRun, ended: Iterable[SaveResult]) -> None:
    """Report saves that have ended. After a failed save training continues: the earlier checkpoints are untouched."""
    for saved in ended:
        weights_only = saved.path.parent.name == WEIGHTS_FOLDER
        run.saves.failures.pop(weights_only, None)
        try:
            saved.wait()
        except CheckpointError as error:
            run.saves.failures[weights_only] = SaveFailure(saved.step, str(error))
            run.reporter.add_event("checkpoint_failed", step=saved.step, why=str(error))
            log.error("%s", error)
            continue
        if not weights_only:
            run.saves.saved_at, run.saves.seconds = saved.step, saved.seconds
        kind = "weights" if weights_only else "checkpoint"
        times = {} if saved.times is None else encode_provenance(replace(saved.times, stall=saved.stall))
        fields = {"seconds": saved.seconds, "stall": saved.stall, "bytes": saved.bytes, "shared": saved.shared}
        run.reporter.add_event(kind, step=saved.step, **{**times, **fields})
        if saved.warning is not None:
            run.reporter.add_event("warning", about="checkpoint", why=saved.warning)


def make_save_state(run: TrainingRun) -> SaveState:
    """Make the savers of checkpoints and of weights alone, before their first save."""
    checkpoint, world = run.config.checkpoint, run.world
    saves = world.rank == 0 and (checkpoint.every > 0 or checkpoint.weights_every > 0)
    sharing = WriterSharing(checkpoint.ranks_per_file, checkpoint.writers_per_node)
    make = partial(
        Saver,
        world=world,
        background=checkpoint.background,
        timeout=timedelta(seconds=run.config.launch.timeout_seconds),
        storage=CheckpointDirectory(checkpoint.io, LustreStriper(checkpoint.lustre)),
        overlap=checkpoint.overlap == "always" or (checkpoint.overlap == "auto" and world.device.type == "cuda"),
        level=checkpoint.compression_level if checkpoint.compression != "none" else 0,
        origin=describe_origin(run.config, run.reporter.attempt) if saves else None,
    )
    checkpoints = make(
        run.directory.checkpoints,
        on_commit=lambda _: prune_checkpoints(run),
        local_stage=LocalStage.from_setting(checkpoint.stage_dir),
        sharing=replace(sharing, parallel_hdf5=checkpoint.parallel_hdf5),
        incremental=_make_incremental_writer(run.config),
    )
    weights = make(
        run.directory.checkpoints / WEIGHTS_FOLDER, sharing=sharing, incremental=_make_incremental_writer(run.config)
    )
    return SaveState(checkpoints, weights)


def _make_incremental_writer(config: RunConfig) -> IncrementalWriter | None:
    checkpoint = config.checkpoint
    return IncrementalWriter(whole_every=checkpoint.whole_every) if checkpoint.incremental else None


def prune_checkpoints(run: TrainingRun) -> None:
    """Remove the checkpoints that the retention rules do not keep; called on rank 0 after a commit."""
    config = run.config.checkpoint
    saves, numbers = run.saves, run.numbers
    steps = {saves.resumed_from, numbers.rollback.good, numbers.equal_checkpoint, *saves.passed_over}
    pinned = frozenset(steps - {None})
    also = KeepRules(config.keep_every, config.keep_best, cast("frozenset[int]", pinned))
    prune_steps(run.directory.checkpoints, config.keep, also, sole=run.saves.saver.lock is not None)
