"""The training loop. It knows engines only: what is parallel, and how, is theirs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch

from hpc_train.api import Engine, Piece, StepBatch, Sums, World
from hpc_train.checkpoint import CheckpointError, Saved, Saver, prune
from hpc_train.checkpoint.crew import Sharing
from hpc_train.checkpoint.incremental import Incremental
from hpc_train.checkpoint.origin import to_json
from hpc_train.checkpoint.retention import Also
from hpc_train.checkpoint.storage import LocalStage, Place, Striper
from hpc_train.checkpoint.weights import WEIGHTS, marked, weights_of
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import Loader
from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.parallel.axes import index
from hpc_train.runtime.stop import StopRequest
from hpc_train.training.evaluation import validation_loss
from hpc_train.training.folder import RunFolder
from hpc_train.training.mfu import peak_flops, utilisation
from hpc_train.training.noise_scale import NoiseScale
from hpc_train.training.origin import origin_of
from hpc_train.training.reporting import Reporter
from hpc_train.training.schedule import peak_rate, rate
from hpc_train.training.seeds import seed_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """What one step leaves behind."""

    record: dict[str, Any]
    """A line of metrics.jsonl."""
    stop: bool
    """A rank was asked to stop."""


@dataclass(frozen=True)
class SaveFailure:
    """A save that did not produce a checkpoint."""

    step: int
    why: str


@dataclass
class Run:
    """Everything of one run on one rank."""

    config: RunConfig
    world: World
    folder: RunFolder
    engine: Engine
    loader: Loader
    validation: Loader | None
    steps: int
    reporter: Reporter
    stop: StopRequest
    step: int = 0
    """Updates done so far."""
    noise: NoiseScale = field(init=False)
    peak_lr: float = field(init=False)
    """Scaled to the global batch."""
    peak_flops: float | None = field(init=False)
    """FLOP/s of this rank's device, where they are known."""
    saver: Saver = field(init=False)
    weights_saver: Saver = field(init=False)
    """Of checkpoint.weights_every: beside the other, so that neither waits for the other."""
    saved_at: int | None = None
    resumed_from: int | None = None
    """Step of this run's own checkpoint that it went on from; retention never removes it."""
    finite: bool = True
    """Since the last save no update was made from a loss or a gradient with NaN or infinity."""
    lost_since: int | None = None
    """Step from which each step has had NaN or infinity in its loss or its gradient; None: the last step had none."""
    save_failures: dict[bool, SaveFailure] = field(default_factory=dict)
    """Last save, if it failed; keyed by whether it is of the weights alone."""
    validated_at: int | None = None
    owes_validation: bool = False
    """A stop left out the evaluation that was due after this step."""
    last_loss: float | None = None
    last_validation: float | None = None

    def __post_init__(self) -> None:
        self.noise = NoiseScale(self.config.train.noise_scale.decay)
        self.peak_lr = peak_rate(self.config.optim, self.config.train.global_batch)
        checkpoint, device = self.config.checkpoint, self.world.device
        overlap = checkpoint.overlap == "always" or (checkpoint.overlap == "auto" and device.type == "cuda")
        saves = self.world.rank == 0 and (checkpoint.every > 0 or checkpoint.weights_every > 0)
        origin = origin_of(self.config, self.reporter.attempt) if saves else None
        level = checkpoint.compression_level if checkpoint.compression != "none" else 0
        sharing = Sharing(checkpoint.ranks_per_file, checkpoint.writers_per_node)
        self.saver = Saver(
            self.folder.checkpoints,
            self.world,
            background=checkpoint.background,
            after=lambda _: self.retain(),
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            place=Place(checkpoint.io, Striper(checkpoint.lustre)),
            overlap=overlap,
            local=LocalStage.named(checkpoint.stage_dir),
            sharing=replace(sharing, parallel_hdf5=checkpoint.parallel_hdf5),
            incremental=Incremental(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.weights_saver = Saver(
            self.folder.checkpoints / WEIGHTS,
            self.world,
            background=checkpoint.background,
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            place=Place(checkpoint.io, Striper(checkpoint.lustre)),
            overlap=overlap,
            sharing=sharing,
            incremental=Incremental(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.peak_flops = peak_flops(self.config, torch.cuda.get_device_name(device) if device.type == "cuda" else None)

    def retain(self) -> None:
        """Remove the checkpoints that are no longer wanted; on rank 0, after a commit."""
        it = self.config.checkpoint
        pinned = frozenset({self.resumed_from} - {None})
        also = Also(it.keep_every, it.keep_best, cast("frozenset[int]", pinned))
        prune(self.folder.checkpoints, it.keep, also, sole=self.saver.lock is not None)

    def ended_saves(self) -> list[Saved]:
        """The saves, of either kind, that have ended since the last call."""
        return self.saver.ended() + self.weights_saver.ended()

    def wait_for_saves(self) -> list[Saved]:
        """The same, once none is under way."""
        return self.saver.wait() + self.weights_saver.wait()

    def copied(self) -> float:
        """Return when parameters and optimizer state may change; the seconds that saves made it take."""
        return self.saver.copied() + self.weights_saver.copied()

    def close(self) -> None:
        """End the loaders and the records."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        self.reporter.close()

    @property
    def consumed_samples(self) -> int:
        """The only state of the data: position in the stream of samples."""
        return self.step * self.config.train.global_batch


def train(run: Run) -> int:
    """Train to the last step or until a stop is agreed on; returns the exit code, the same on every rank.

    A save that is under way when a step fails is of a sound step: it is waited for.
    """
    try:
        return _stopped(run) if run.owes_validation else _train(run)
    except Exception:
        _tell_of_saves(run, run.wait_for_saves())
        raise


def _train(run: Run) -> int:
    while run.step < run.steps:
        step = train_step(run)
        validation = _evaluate(run, step.stop)
        report(run, step, validation)
        stopping = step.stop or run.owes_validation
        _save_if_due(run, stopping)
        _tell_of_saves(run, run.ended_saves())
        owed = run.owes_validation and run.config.checkpoint.every > 0
        if stopping and (run.step < run.steps or owed):
            _tell_of_saves(run, run.wait_for_saves())
            return _stopped(run)
    _tell_of_saves(run, run.wait_for_saves())
    return EXIT_DONE


def train_step(run: Run) -> Step:
    """Everything of one step but evaluation, checkpoint and `report`; `hpc-train bench step` times just this."""
    config = run.config
    started = time.perf_counter()
    batch = _next_batch(run)
    fetched = time.perf_counter()
    seed_step(config.train.seed, run.step, run.world.dp_index + run.world.dp_size * index(run.world, "pp"))
    sums = run.engine.forward_backward(batch)
    waited = run.copied()
    norm = run.engine.clip(config.optim.max_norm)
    lr = rate(config.optim.schedule, run.peak_lr, run.step, run.steps)
    updated = run.engine.update(lr)
    run.step += 1
    if not updated:
        run.reporter.event("skipped", step=run.step)
    run.last_loss = float(sums.loss) / max(sums.tokens, 1)  # waits for the device, so that the time is that of the step
    seconds = time.perf_counter() - started - waited
    run.finite &= not updated or (math.isfinite(run.last_loss) and math.isfinite(norm))
    _note_loss(run, math.isfinite(run.last_loss) and (not updated or math.isfinite(norm)))
    _measure_noise(run, sums, norm)
    record = {
        "step": run.step,
        "loss": run.last_loss,
        "grad_norm": float(norm),
        "lr": lr,
        "tokens": sums.tokens,
        "tokens_per_second": sums.tokens / seconds,
        "step_seconds": seconds,
        "data_seconds": fetched - started,
        "mfu": utilisation(config, run.peak_flops, sums.tokens, seconds, run.world.size),
        "noise_scale": run.noise.value,
    }
    return Step(record, sums.stop)


def _note_loss(run: Run, finite: bool) -> None:
    if finite:
        run.lost_since = None
    elif run.lost_since is None:
        run.lost_since = run.step


def report(run: Run, step: Step, validation: float | None) -> None:
    """One line of metrics.jsonl, and a warning where the loss is lost."""
    if validation is not None:
        run.last_validation, run.validated_at = validation, run.step
    run.reporter.step({**step.record, "validation_loss": validation})
    if not math.isfinite(step.record["loss"]):
        log.warning("step %d: the loss is %s", run.step, step.record["loss"])


def _next_batch(run: Run) -> StepBatch:
    batch = run.loader.batch(run.consumed_samples)
    batch.stop, batch.step = run.stop.requested, run.step
    every = run.config.train.noise_scale.every
    batch.measure = every > 0 and (run.step + 1) % every == 0
    return batch


def _measure_noise(run: Run, sums: Sums, norm: torch.Tensor) -> None:
    sample, batch = sums.sample, run.config.train.global_batch
    if sample is None or sample.sequences >= batch or not math.isfinite(norm):
        return
    run.noise.add(float(sample.norm_square), sample.sequences, float(norm) ** 2, batch)
    critical = run.noise.value
    if critical is not None and run.noise.weight > 0.65:
        run.reporter.noise(critical, batch)


def _evaluate(run: Run, stop: bool) -> float | None:
    """Validation loss if it is due; if a stop was agreed on, before or meanwhile, it is owed."""
    train_config = run.config.train
    due = train_config.eval_every and (run.step % train_config.eval_every == 0 or run.step == run.steps)
    run.owes_validation = False
    if run.validation is None or not due:
        return None
    loss = None if stop else validation_loss(run.engine, run.validation, train_config.eval_batches, run.stop)
    run.owes_validation = loss is None
    return loss


def evaluate_late(run: Run) -> None:
    """What the attempt before owed, into its step's line; it stays owed if a stop is agreed on again.

    Before anybody follows the metrics of this attempt.
    """
    if not run.owes_validation:
        return
    loss = _evaluate(run, stop=False)
    if loss is not None:
        run.last_validation, run.validated_at = loss, run.step
        run.reporter.validated(run.step, loss)


def _save_if_due(run: Run, stopping: bool) -> None:
    every, weights_every = run.config.checkpoint.every, run.config.checkpoint.weights_every
    full = every and (stopping or run.step % every == 0 or run.step == run.steps)
    weights = weights_every and run.step % weights_every == 0
    pieces = list(run.engine.pieces()) if full or weights else []  # once: for some engines it is a collective
    if full:
        save_checkpoint(run, pieces)
    if weights:
        save_weights(run, pieces)


def save_checkpoint(run: Run, pieces: Sequence[Piece]) -> None:
    """Begin to save this step. What becomes of it is told after the step in which it ends."""
    extra: dict[str, Any] = {
        "consumed_samples": run.consumed_samples,
        "seed": run.config.train.seed,
        "noise_scale": run.noise.state(),
        "schema_version": run.config.schema_version,
        "owes_validation": run.owes_validation,
    }
    validation = run.last_validation if run.validated_at == run.step else None
    finite = run.finite and (validation is None or math.isfinite(validation))
    run.saver.save(run.step, pieces, extra, finite, validation)
    run.finite = True


def save_weights(run: Run, pieces: Sequence[Piece]) -> None:
    """The same without optimizer state, for others to use; it is kept for good."""
    extra = {"consumed_samples": run.consumed_samples, "schema_version": run.config.schema_version}
    run.weights_saver.save(run.step, weights_of(pieces), marked(extra), run.finite)


def _tell_of_saves(run: Run, ended: Iterable[Saved]) -> None:
    """A save that failed is reported and training goes on: the earlier checkpoints are untouched."""
    for saved in ended:
        of_weights = saved.path.parent.name == WEIGHTS
        run.save_failures.pop(of_weights, None)
        try:
            saved.wait()
        except CheckpointError as error:
            run.save_failures[of_weights] = SaveFailure(saved.step, str(error))
            run.reporter.event("checkpoint_failed", step=saved.step, why=str(error))
            log.error("%s", error)
            continue
        run.saved_at = run.saved_at if of_weights else saved.step
        kind = "weights" if of_weights else "checkpoint"
        times = {} if saved.times is None else to_json(replace(saved.times, stall=saved.stall))
        fields = {"seconds": saved.seconds, "stall": saved.stall, "bytes": saved.bytes, "shared": saved.shared}
        run.reporter.event(kind, step=saved.step, **{**times, **fields})
        if saved.warning is not None:
            run.reporter.event("warning", about="checkpoint", why=saved.warning)


def _stopped(run: Run) -> int:
    run.reporter.event("signal", step=run.step, signal=run.stop.signal_name, saved=run.saved_at == run.step)
    if run.saved_at == run.step:
        run.reporter.mark_requeue()
        run.reporter.say(f"stopped at step {run.step}, saved; run again with run_dir={run.folder.path} to go on")
        return EXIT_REQUEUE
    run.reporter.say(
        f"stopped at step {run.step}, NOT saved (checkpoint.every={run.config.checkpoint.every})", last=True
    )
    return EXIT_NO_REQUEUE
