"""The training loop. It knows engines only: what is parallel, and how, is theirs.

`train_step` is one step; around it evaluation, checkpoints, metrics and requests to stop. Model FLOP utilisation is
null unless both the model's FLOPs and the GPU's peak are known. The gradient noise scale (McCandlish et al. 2018,
arXiv:1812.06162) says how large a batch still pays.
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
from pathlib import Path
from typing import Any, cast

import torch

from hpc_train.checkpoint import CheckpointError, Saver, SaveResult, prune_steps
from hpc_train.checkpoint.provenance import Origin, encode_provenance, hash_file, hash_text, identify_code
from hpc_train.checkpoint.save.file_writer import LocalStage
from hpc_train.checkpoint.save.incremental import IncrementalWriter
from hpc_train.checkpoint.save.shared_file import WriterSharing
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory, LustreStriper
from hpc_train.checkpoint.storage.retention import KeepRules
from hpc_train.checkpoint.storage.step_directory import WEIGHTS_FOLDER, mark_weights_only, select_weights
from hpc_train.config.compose import config_to_yaml
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import Loader
from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.interfaces import Engine, StepBatch, Sums, TensorShard, World
from hpc_train.models.shape import compute_flops_per_token
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.runtime.processes import StopRequest
from hpc_train.training.optimizer import compute_learning_rate, scale_peak_rate, seed_step
from hpc_train.training.reporter import Reporter
from hpc_train.training.run_directory import RunDirectory


def find_peak_flops(config: RunConfig, device_name: str | None) -> float | None:
    """Peak FLOP/s of one rank's device in this run's precision.

    None unless the cluster's configuration describes just the device that is there: a figure of another GPU would look
    like a fact.
    """
    gpu = config.cluster.gpu
    if device_name is None or gpu.name is None or gpu.name.lower() not in device_name.lower():
        return None
    teraflops = gpu.peak_tflops.get(config.precision.name)
    return teraflops * 1e12 if teraflops else None


def compute_mfu(config: RunConfig, peak: float | None, tokens: int, seconds: float, ranks: int) -> float | None:
    """Fraction of the peak that the model's own FLOPs (no recomputation) used; tokens and seconds are of one step."""
    if peak is None:
        return None
    flops = compute_flops_per_token(config.model, config.train.sequence_length)
    if flops is None:
        return None
    return flops * tokens / (seconds * ranks * peak)


@dataclass
class NoiseScale:
    """Running estimate from pairs of gradient norms at two batch sizes (appendix A.1 of the paper).

    With G_B the mean gradient over B sequences, E|G_B|^2 = |G|^2 + tr(S) / B; two sizes give two equations for
    |G|^2 and tr(S). Both parts are averaged over steps before they are divided, since their ratio is biased.
    """

    decay: float
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def add(self, small_square: float, small: int, big_square: float, big: int) -> None:
        """Squared norms of the mean gradient over `small` and over `big` sequences of one step; small < big."""
        assert 0 < small < big
        signal = (big * big_square - small * small_square) / (big - small)
        noise = (small_square - big_square) / (1 / small - 1 / big)
        self.signal = self.decay * self.signal + (1 - self.decay) * signal
        self.noise = self.decay * self.noise + (1 - self.decay) * noise
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """B_simple = tr(S) / |G|^2 in sequences; None until both parts are known to be positive."""
        return self.noise / self.signal if self.weight > 0 and self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def restore(self, state: dict[str, float]) -> None:
        """The inverse of `state`."""
        self.signal, self.noise, self.weight = state["signal"], state["noise"], state["weight"]


def compute_validation_loss(engine: Engine, loader: Loader, batches: int, stop: StopRequest) -> float | None:
    """Mean loss a token over the first `batches` global batches of the validation split.

    None if any rank was asked to stop meanwhile: all ranks leave the evaluation at the same batch.
    """
    total, tokens = 0.0, 0
    for index in range(batches):
        batch = loader.batch(index * loader.global_batch)
        batch.stop = stop.requested
        sums = engine.evaluate(batch)
        if sums.stop:
            return None
        total += float(sums.loss)
        tokens += sums.tokens
    return total / max(tokens, 1)


def describe_origin(config: RunConfig, attempt: int) -> Origin:
    """Of this process, which has built the model."""
    version, code = identify_code()
    return Origin(version, code, hash_text(config_to_yaml(config)), _hash_model_file(config), attempt)


def describe_code_change(saved: Origin | None, own: Origin | None) -> str | None:
    """A line for a person, where a checkpoint was made by other code than this; None where it was not, or nobody knows.

    It is no reason to stop: a run may go on with a mended program.
    """
    differ = own.differs(saved) if saved is not None and own is not None else []
    return f"the checkpoint was saved by other code: now {' and '.join(differ)}" if differ else None


def _hash_model_file(config: RunConfig) -> str | None:
    """Of the one file that model.module names; what that imports is not in it."""
    if not isinstance(config.model, CustomModelConfig) or config.model.module is None:
        return None
    file = getattr(sys.modules.get(config.model.module), "__file__", None)
    with suppress(OSError):
        return hash_file(Path(file)) if file else None
    return None


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
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
class TrainingRun:
    """Everything of one run on one rank."""

    config: RunConfig
    world: World
    folder: RunDirectory
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
        self.peak_lr = scale_peak_rate(self.config.optim, self.config.train.global_batch)
        checkpoint, device = self.config.checkpoint, self.world.device
        overlap = checkpoint.overlap == "always" or (checkpoint.overlap == "auto" and device.type == "cuda")
        saves = self.world.rank == 0 and (checkpoint.every > 0 or checkpoint.weights_every > 0)
        origin = describe_origin(self.config, self.reporter.attempt) if saves else None
        level = checkpoint.compression_level if checkpoint.compression != "none" else 0
        sharing = WriterSharing(checkpoint.ranks_per_file, checkpoint.writers_per_node)
        self.saver = Saver(
            self.folder.checkpoints,
            self.world,
            background=checkpoint.background,
            after=lambda _: self.retain(),
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            place=CheckpointDirectory(checkpoint.io, LustreStriper(checkpoint.lustre)),
            overlap=overlap,
            local=LocalStage.named(checkpoint.stage_dir),
            sharing=replace(sharing, parallel_hdf5=checkpoint.parallel_hdf5),
            incremental=IncrementalWriter(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.weights_saver = Saver(
            self.folder.checkpoints / WEIGHTS_FOLDER,
            self.world,
            background=checkpoint.background,
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            place=CheckpointDirectory(checkpoint.io, LustreStriper(checkpoint.lustre)),
            overlap=overlap,
            sharing=sharing,
            incremental=IncrementalWriter(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.peak_flops = find_peak_flops(
            self.config, torch.cuda.get_device_name(device) if device.type == "cuda" else None
        )

    def retain(self) -> None:
        """Remove the checkpoints that are no longer wanted; on rank 0, after a commit."""
        it = self.config.checkpoint
        pinned = frozenset({self.resumed_from} - {None})
        also = KeepRules(it.keep_every, it.keep_best, cast("frozenset[int]", pinned))
        prune_steps(self.folder.checkpoints, it.keep, also, sole=self.saver.lock is not None)

    def ended_saves(self) -> list[SaveResult]:
        """The saves, of either kind, that have ended since the last call."""
        return self.saver.ended() + self.weights_saver.ended()

    def wait_for_saves(self) -> list[SaveResult]:
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


def run_training(run: TrainingRun) -> int:
    """Train to the last step or until a stop is agreed on; returns the exit code, the same on every rank.

    A save that is under way when a step fails is of a sound step: it is waited for.
    """
    try:
        return _stop(run) if run.owes_validation else _run_steps(run)
    except Exception:
        _report_saves(run, run.wait_for_saves())
        raise


def _run_steps(run: TrainingRun) -> int:
    while run.step < run.steps:
        step = train_step(run)
        validation = _evaluate_if_due(run, step.stop)
        report_step(run, step, validation)
        stopping = step.stop or run.owes_validation
        _save_if_due(run, stopping)
        _report_saves(run, run.ended_saves())
        owed = run.owes_validation and run.config.checkpoint.every > 0
        if stopping and (run.step < run.steps or owed):
            _report_saves(run, run.wait_for_saves())
            return _stop(run)
    _report_saves(run, run.wait_for_saves())
    return EXIT_DONE


def train_step(run: TrainingRun) -> StepResult:
    """Everything of one step but evaluation, checkpoint and `report`; `hpc-train bench step` times just this."""
    config = run.config
    started = time.perf_counter()
    batch = _next_batch(run)
    fetched = time.perf_counter()
    seed_step(config.train.seed, run.step, run.world.dp_index + run.world.dp_size * get_axis_index(run.world, "pp"))
    sums = run.engine.forward_backward(batch)
    waited = run.copied()
    norm = run.engine.clip(config.optim.max_norm)
    lr = compute_learning_rate(config.optim.schedule, run.peak_lr, run.step, run.steps)
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
        "mfu": compute_mfu(config, run.peak_flops, sums.tokens, seconds, run.world.size),
        "noise_scale": run.noise.value,
    }
    return StepResult(record, sums.stop)


def _note_loss(run: TrainingRun, finite: bool) -> None:
    if finite:
        run.lost_since = None
    elif run.lost_since is None:
        run.lost_since = run.step


def report_step(run: TrainingRun, step: StepResult, validation: float | None) -> None:
    """One line of metrics.jsonl, and a warning where the loss is lost."""
    if validation is not None:
        run.last_validation, run.validated_at = validation, run.step
    run.reporter.step({**step.record, "validation_loss": validation})
    if not math.isfinite(step.record["loss"]):
        log.warning("step %d: the loss is %s", run.step, step.record["loss"])


def _next_batch(run: TrainingRun) -> StepBatch:
    batch = run.loader.batch(run.consumed_samples)
    batch.stop, batch.step = run.stop.requested, run.step
    every = run.config.train.noise_scale.every
    batch.measure = every > 0 and (run.step + 1) % every == 0
    return batch


def _measure_noise(run: TrainingRun, sums: Sums, norm: torch.Tensor) -> None:
    sample, batch = sums.sample, run.config.train.global_batch
    if sample is None or sample.sequences >= batch or not math.isfinite(norm):
        return
    run.noise.add(float(sample.norm_square), sample.sequences, float(norm) ** 2, batch)
    critical = run.noise.value
    if critical is not None and run.noise.weight > 0.65:
        run.reporter.noise(critical, batch)


def _evaluate_if_due(run: TrainingRun, stop: bool) -> float | None:
    """Validation loss if it is due; if a stop was agreed on, before or meanwhile, it is owed."""
    train_config = run.config.train
    due = train_config.eval_every and (run.step % train_config.eval_every == 0 or run.step == run.steps)
    run.owes_validation = False
    if run.validation is None or not due:
        return None
    loss = None if stop else compute_validation_loss(run.engine, run.validation, train_config.eval_batches, run.stop)
    run.owes_validation = loss is None
    return loss


def evaluate_owed(run: TrainingRun) -> None:
    """What the attempt before owed, into its step's line; it stays owed if a stop is agreed on again.

    Before anybody follows the metrics of this attempt.
    """
    if not run.owes_validation:
        return
    loss = _evaluate_if_due(run, stop=False)
    if loss is not None:
        run.last_validation, run.validated_at = loss, run.step
        run.reporter.validated(run.step, loss)


def _save_if_due(run: TrainingRun, stopping: bool) -> None:
    every, weights_every = run.config.checkpoint.every, run.config.checkpoint.weights_every
    full = every and (stopping or run.step % every == 0 or run.step == run.steps)
    weights = weights_every and run.step % weights_every == 0
    pieces = list(run.engine.shards()) if full or weights else []  # once: for some engines it is a collective
    if full:
        save_checkpoint(run, pieces)
    if weights:
        save_weights(run, pieces)


def save_checkpoint(run: TrainingRun, pieces: Sequence[TensorShard]) -> None:
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


def save_weights(run: TrainingRun, pieces: Sequence[TensorShard]) -> None:
    """The same without optimizer state, for others to use; it is kept for good."""
    extra = {"consumed_samples": run.consumed_samples, "schema_version": run.config.schema_version}
    run.weights_saver.save(run.step, select_weights(pieces), mark_weights_only(extra), run.finite)


def _report_saves(run: TrainingRun, ended: Iterable[SaveResult]) -> None:
    """A save that failed is reported and training goes on: the earlier checkpoints are untouched."""
    for saved in ended:
        of_weights = saved.path.parent.name == WEIGHTS_FOLDER
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
        times = {} if saved.times is None else encode_provenance(replace(saved.times, stall=saved.stall))
        fields = {"seconds": saved.seconds, "stall": saved.stall, "bytes": saved.bytes, "shared": saved.shared}
        run.reporter.event(kind, step=saved.step, **{**times, **fields})
        if saved.warning is not None:
            run.reporter.event("warning", about="checkpoint", why=saved.warning)


def _stop(run: TrainingRun) -> int:
    run.reporter.event("signal", step=run.step, signal=run.stop.signal_name, saved=run.saved_at == run.step)
    if run.saved_at == run.step:
        run.reporter.mark_requeue()
        run.reporter.say(f"stopped at step {run.step}, saved; run again with run_dir={run.folder.path} to go on")
        return EXIT_REQUEUE
    run.reporter.say(
        f"stopped at step {run.step}, NOT saved (checkpoint.every={run.config.checkpoint.every})", last=True
    )
    return EXIT_NO_REQUEUE
