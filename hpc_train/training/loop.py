"""Run the training loop: steps, evaluation, checkpoints, metrics, and requests to stop.

`run_training` is the loop and `train_step` one step of it. The loop sees an Engine only; what is parallel, and how, is
the engine's. Model FLOP utilisation (MFU) is null unless both the model's FLOPs and the GPU's peak are known. The
gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162) tells up to which size a larger batch pays.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hpc_train.checkpoint import CheckpointError, Saver, SaveResult, prune_steps
from hpc_train.checkpoint.provenance import Origin, encode_provenance, hash_file, hash_text, identify_code
from hpc_train.checkpoint.rank_consensus import run_on_rank_0
from hpc_train.checkpoint.save.file_writer import LocalStage
from hpc_train.checkpoint.save.incremental import IncrementalWriter
from hpc_train.checkpoint.save.shared_file import WriterSharing
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory, LustreStriper
from hpc_train.checkpoint.storage.retention import KeepRules
from hpc_train.checkpoint.storage.step_directory import WEIGHTS_FOLDER, mark_base, mark_weights_only, select_weights
from hpc_train.config.compose import config_to_yaml
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import BatchLoader
from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.interfaces import Engine, StepBatch, Sums, TensorShard, World
from hpc_train.models.shape import compute_flops_per_token
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.parallel.metrics import PERPLEXITY
from hpc_train.resilience.chaos import FaultInjector
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import LedgerFile
from hpc_train.runtime.processes import StopRequest
from hpc_train.runtime.step_collection import collect_at_steps
from hpc_train.step_clock import StepPart
from hpc_train.training.data_position import gather_positions
from hpc_train.training.numerics.anomalies import UpdateGuard
from hpc_train.training.numerics.number_checks import RanksDisagree, check_last_norm, check_numbers, distrust_steps
from hpc_train.training.numerics.replay import replay_step
from hpc_train.training.numerics.replica_check import ReplicaCheck
from hpc_train.training.numerics.rollback import ROLLBACKS, RollbackState
from hpc_train.training.optimizer import make_schedule, scale_peak_rate, seed_step
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.records.run_records import find_event_time
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.step_numbers import StepNumbers, read_step_numbers

if TYPE_CHECKING:
    from hpc_train.training.profiler import StepProfiler
    from hpc_train.training.records.node_metrics import NodeMetrics


def find_peak_flops(config: RunConfig, device_name: str | None) -> float | None:
    """Return the peak FLOP/s of one rank's device in this run's precision.

    None unless the cluster's configuration describes this very device: the peak of another GPU would give an MFU that
    looks like a fact.
    """
    gpu = config.cluster.gpu
    if device_name is None or gpu.name is None or gpu.name.lower() not in device_name.lower():
        return None
    teraflops = gpu.peak_tflops.get(config.precision.name)
    return teraflops * 1e12 if teraflops else None


def compute_mfu(config: RunConfig, peak: float | None, tokens: int, seconds: float, ranks: int) -> float | None:
    """Return which fraction of the peak the model's own FLOPs used in one step, recomputation not counted.

    peak: FLOP/s of one rank. None if the peak or the model's FLOPs are unknown.
    """
    if peak is None:
        return None
    flops = compute_flops_per_token(config.model, config.train.sequence_length)
    if flops is None:
        return None
    return flops * tokens / (seconds * ranks * peak)


@dataclass
class NoiseScale:
    """Estimate the gradient noise scale from gradient norms at two batch sizes (appendix A.1 of the paper).

    With G_B the mean gradient over B sequences, E|G_B|^2 = |G|^2 + tr(S) / B; two sizes give two equations for
    |G|^2 and tr(S). Both parts are averaged over steps before they are divided, since their ratio is biased.
    """

    decay: float
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def add(self, small_square: float, small: int, big_square: float, big: int) -> None:
        """Add one step's squared norms of the mean gradient over `small` and over `big` sequences; small < big."""
        assert 0 < small < big
        signal = (big * big_square - small * small_square) / (big - small)
        noise = (small_square - big_square) / (1 / small - 1 / big)
        self.signal = self.decay * self.signal + (1 - self.decay) * signal
        self.noise = self.decay * self.noise + (1 - self.decay) * noise
        self.weight = self.decay * self.weight + (1 - self.decay)

    @property
    def value(self) -> float | None:
        """B_simple = tr(S) / |G|^2 in sequences; None until the estimates of both parts are positive."""
        return self.noise / self.signal if self.weight > 0 and self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint holds."""
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what `state` returned."""
        self.signal, self.noise, self.weight = state["signal"], state["noise"], state["weight"]


def make_update_guard(config: RunConfig) -> UpdateGuard:
    """Make what decides on skipped updates.

    fp16's loss scaling skips by itself. With parameter servers each worker has a loss and a norm of its own, so that
    ranks would disagree.
    """
    able = config.precision.name != "fp16" and config.parallel.server.mode == "none"
    return UpdateGuard(config.resilience.numbers, config.resilience.act, able)


@dataclass(frozen=True)
class Evaluation:
    """Means over the targets of an evaluation, the same on all ranks."""

    loss: float
    """Nats per target."""
    metrics: dict[str, float]
    """Those of train.metrics, by name."""
    targets: int = 0
    """Targets that count."""

    def as_record(self) -> dict[str, float]:
        """Return the fields of the step's line in metrics.jsonl."""
        return {"validation_loss": self.loss, **{f"validation_{name}": value for name, value in self.metrics.items()}}


def evaluate_batches(
    engine: Engine,
    loader: BatchLoader,
    batches: int,
    metrics: Sequence[str],
    stop: StopRequest,
    beat: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Return the mean loss per token and `metrics` over the first `batches` global batches of the validation split.

    None if any rank was asked to stop meanwhile; all ranks leave the evaluation at the same batch.
    beat: called before each batch.
    """
    total, tokens = 0.0, 0
    added = [name for name in dict.fromkeys(metrics) if name != PERPLEXITY]
    measured = torch.zeros(len(added), 2, dtype=torch.float64)
    for index in range(batches):
        beat()
        batch = loader.batch(index * loader.global_batch)
        batch.stop = stop.requested
        sums = engine.evaluate(batch)
        if sums.stop:
            return None
        total += float(sums.loss)
        tokens += sums.tokens
        if sums.metrics is not None:
            measured += sums.metrics.cpu()
    loss = total / max(tokens, 1)
    pairs = zip(added, measured.tolist(), strict=True)
    means = {name: value / weight if weight else math.nan for name, (value, weight) in pairs}
    if PERPLEXITY in metrics:
        means[PERPLEXITY] = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss, {name: means[name] for name in dict.fromkeys(metrics)}, tokens)


def describe_origin(config: RunConfig, attempt: int) -> Origin:
    """Describe the code and configuration that checkpoints of this process come from. Call it with the model built."""
    version, code = identify_code()
    return Origin(version, code, hash_text(config_to_yaml(config)), _hash_model_file(config), attempt)


def describe_code_change(saved: Origin | None, own: Origin | None) -> str | None:
    """Return one line if a checkpoint was saved by other code than this; None if by the same, or if that is unknown.

    This does not stop a run: it may continue with a corrected program.
    """
    differ = own.differs(saved) if saved is not None and own is not None else []
    return f"the checkpoint was saved by other code: now {' and '.join(differ)}" if differ else None


def _hash_model_file(config: RunConfig) -> str | None:
    """Hash the file that model.module names, without what it imports; None for a built-in model."""
    if not isinstance(config.model, CustomModelConfig) or config.model.module is None:
        return None
    file = getattr(sys.modules.get(config.model.module), "__file__", None)
    with suppress(OSError):
        return hash_file(Path(file)) if file else None
    return None


log = logging.getLogger(__name__)
_FIRST_STEPS = 2
"""Steps of a process that compile and warm up."""


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step, and whether to stop after it."""

    record: dict[str, Any]
    """Fields of the step's line in metrics.jsonl."""
    stop: bool
    """Some rank was asked to stop; the same on all ranks."""


@dataclass(frozen=True)
class SaveFailure:
    """A save that did not produce a checkpoint."""

    step: int
    why: str


@dataclass
class TrainingRun:
    """State of one run on one rank: its parts, its position, and what its end is judged by."""

    config: RunConfig
    world: World
    directory: RunDirectory
    engine: Engine
    loader: BatchLoader
    validation: BatchLoader | None
    steps: int
    reporter: Reporter
    stop: StopRequest
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Says where this rank is, to those who watch it."""
    injector: FaultInjector | None = None
    """Breaks this rank when ordered to (resilience.chaos)."""
    recorder: StepRecorder | None = None
    """Records what each step of this rank goes into."""
    profiler: StepProfiler | None = None
    """Traces single steps of this rank when asked to."""
    ledger: LedgerFile | None = None
    """Of rank 0: what its time went into."""
    node_metrics: NodeMetrics | None = None
    """Of the first rank of each node: writes its file for Prometheus."""
    step: int = 0
    """Updates done so far."""
    steps_here: int = 0
    """Updates done by this process."""
    noise: NoiseScale = field(init=False)
    guard: UpdateGuard = field(init=False)
    rollback: RollbackState = field(init=False)
    schedule: Callable[[int], float] = field(init=False)
    """Learning rate of each update."""
    peak_flops: float | None = field(init=False)
    """FLOP/s of this rank's device, where they are known."""
    saver: Saver = field(init=False)
    weights_saver: Saver = field(init=False)
    """Saves weights alone (checkpoint.weights_every); apart from `saver`, so that neither waits for the other."""
    saved_at: int | None = None
    resumed_from: int | None = None
    """Step of this run's own checkpoint that it was resumed from; retention never removes it."""
    finite: bool = True
    """No update since the last save was made from a loss or a gradient with NaN or infinity."""
    lost_since: int | None = None
    """First of the latest steps that all had NaN or infinity in loss or gradient; None if the last step had none."""
    save_seconds: float | None = None
    """Seconds that the last whole checkpoint of this process took, from its beginning to its commit."""
    unsaved: str = ""
    """Why a stop does not save, if so; the same on all ranks."""
    base_digest: str | None = None
    """Digest of the files that the base in 4 bits was read from; its weights are not saved."""
    save_failures: dict[bool, SaveFailure] = field(default_factory=dict)
    """Last save, if it failed; keyed by whether it is of the weights alone."""
    validated_at: int | None = None
    owes_validation: bool = False
    """A request to stop skipped the evaluation that was due after this step."""
    last_loss: float | None = None
    replicas: ReplicaCheck | None = None
    equal_at: int = 0
    """The latest step after which copies of parameters were compared and equal; at first where the run began."""
    equal_checkpoint: int | None = None
    """The newest checkpoint up to there; retention keeps it."""
    last_norm: float = 0.0
    """Gradient norm of the latest step that is the same on all ranks; 0 if none is."""
    last_validation: float | None = None

    def __post_init__(self) -> None:
        self.noise = NoiseScale(self.config.train.noise_scale.decay)
        self.guard = make_update_guard(self.config)
        self.rollback = RollbackState(self.config.resilience.numbers.good_after)
        peak = scale_peak_rate(self.config.optim, self.config.train.global_batch)
        self.schedule = make_schedule(self.config.optim, peak, self.steps)
        checkpoint, device = self.config.checkpoint, self.world.device
        overlap = checkpoint.overlap == "always" or (checkpoint.overlap == "auto" and device.type == "cuda")
        saves = self.world.rank == 0 and (checkpoint.every > 0 or checkpoint.weights_every > 0)
        origin = describe_origin(self.config, self.reporter.attempt) if saves else None
        level = checkpoint.compression_level if checkpoint.compression != "none" else 0
        sharing = WriterSharing(checkpoint.ranks_per_file, checkpoint.writers_per_node)
        self.saver = Saver(
            self.directory.checkpoints,
            self.world,
            background=checkpoint.background,
            on_commit=lambda _: self.prune_checkpoints(),
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            storage=CheckpointDirectory(checkpoint.io, LustreStriper(checkpoint.lustre)),
            overlap=overlap,
            local_stage=LocalStage.from_setting(checkpoint.stage_dir),
            sharing=replace(sharing, parallel_hdf5=checkpoint.parallel_hdf5),
            incremental=IncrementalWriter(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.weights_saver = Saver(
            self.directory.checkpoints / WEIGHTS_FOLDER,
            self.world,
            background=checkpoint.background,
            timeout=timedelta(seconds=self.config.launch.timeout_seconds),
            storage=CheckpointDirectory(checkpoint.io, LustreStriper(checkpoint.lustre)),
            overlap=overlap,
            sharing=sharing,
            incremental=IncrementalWriter(whole_every=checkpoint.whole_every) if checkpoint.incremental else None,
            level=level,
            origin=origin,
        )
        self.peak_flops = find_peak_flops(
            self.config, torch.cuda.get_device_name(device) if device.type == "cuda" else None
        )

    def prune_checkpoints(self) -> None:
        """Remove the checkpoints that the retention rules do not keep; called on rank 0 after a commit."""
        config = self.config.checkpoint
        pinned = frozenset({self.resumed_from, self.rollback.good, self.equal_checkpoint} - {None})
        also = KeepRules(config.keep_every, config.keep_best, cast("frozenset[int]", pinned))
        prune_steps(self.directory.checkpoints, config.keep, also, sole=self.saver.lock is not None)

    def take_ended_saves(self) -> list[SaveResult]:
        """Return the saves, of checkpoints and of weights, that have ended since the last call."""
        return self.saver.take_finished() + self.weights_saver.take_finished()

    def wait_for_saves(self) -> list[SaveResult]:
        """Wait for pending saves; return those that have ended since the last call."""
        self.heartbeat.enter(Phase.SAVE, self.step)
        return self.saver.wait() + self.weights_saver.wait()

    def wait_until_copied(self) -> float:
        """Block until pending saves have copied parameters and optimizer state; returns the seconds it took."""
        phase = self.heartbeat.phase
        self.heartbeat.enter(Phase.SAVE, self.step)
        seconds = self.saver.wait_for_copy() + self.weights_saver.wait_for_copy()
        self.heartbeat.enter(phase, self.step)
        return seconds

    def write_skip_list(self) -> None:
        """Write skipped.json from rank 0."""
        if self.world.rank == 0:
            try:
                self.guard.skipped.write(self.directory.skipped)
            except OSError as error:  # every checkpoint holds the list, too
                log.warning("%s: %s; it lacks the latest skipped steps", self.directory.skipped, error.strerror)

    def close(self) -> None:
        """Close the loaders and the files of metrics and events."""
        if self.profiler is not None:
            self.profiler.close(self.step)
        if self.recorder is not None:
            self.recorder.close()
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        self.reporter.close()
        if self.node_metrics is not None:
            self.node_metrics.close()

    @property
    def consumed_samples(self) -> int:
        """Position in the stream of samples: the only state of the data."""
        return self.step * self.config.train.global_batch


def run_training(run: TrainingRun) -> int:
    """Train to the last step, or until some rank is asked to stop; returns the exit code, the same on every rank."""
    try:
        return _stop(run) if run.owes_validation else _run_steps(run)
    except Exception as error:
        # The step that failed is not the step being saved: that checkpoint is sound, and worth the wait.
        _report_saves(run, run.wait_for_saves())
        if isinstance(error, RanksDisagree) and run.world.rank == 0:
            distrust_steps(run, error)
        raise


def _run_steps(run: TrainingRun) -> int:
    with collect_at_steps(run.config.train.gc_every) as collect:
        return _run_steps_collecting(run, collect)


def _run_steps_collecting(run: TrainingRun, collect: Callable[[int], None]) -> int:
    """Run the steps; `collect` is called after each of them."""
    while run.step < run.steps:
        step = train_step(run)
        validation = _evaluate_if_due(run, step.stop)
        report_step(run, step, validation)
        check_numbers(run, lambda: _report_saves(run, run.wait_for_saves()))
        stopping = step.stop or run.owes_validation
        if stopping:
            _report_saves(run, run.take_ended_saves())  # how long a save takes is known from the last one
            run.unsaved = run_on_rank_0(run.world, lambda: explain_too_late(run))
        saved = not run.unsaved and _save_if_due(run, stopping)
        if run.ledger is not None:
            run.ledger.write(run.heartbeat, run.step, due=saved)
        _report_saves(run, run.take_ended_saves())
        collect(run.step)
        owed = run.owes_validation and run.config.checkpoint.every > 0
        if stopping and (run.step < run.steps or owed):
            _report_saves(run, run.wait_for_saves())
            return _stop(run)
    _report_saves(run, run.wait_for_saves())
    return EXIT_DONE


def train_step(run: TrainingRun) -> StepResult:
    """Run one step: batch, forward, backward, clip, update, and the step's metrics.

    Evaluation, checkpoint and report come after it; `hpc-train bench step` times just this.
    """
    config = run.config
    clock = run.world.clock
    if run.profiler is not None:
        run.profiler.begin_step(run.step + 1)
    run.heartbeat.enter(Phase.DATA, run.step)
    if run.recorder is not None:
        run.recorder.begin()
    started = time.perf_counter()
    batch = _next_batch(run)
    fetched = time.perf_counter()
    run.heartbeat.enter(Phase.STEP if run.steps_here >= _FIRST_STEPS else Phase.FIRST_STEP, run.step)
    clock.enter(StepPart.BACKWARD)
    if run.injector is not None:
        run.injector.before_step(run.step, run.engine.parts, run.engine.shards)
    sums, norm, waited = _compute_gradient(run, batch)
    lr = run.schedule(run.step)
    # The only wait for the device in a step. The optimizer's work on it is part of the next step's time.
    numbers = read_step_numbers(sums, norm)
    replayed = run.guard.wants_replay(numbers.loss, numbers.norm, run.consumed_samples)
    if replayed:
        sums, norm = replay_step(run, sums, numbers.norm, lambda: _compute_gradient(run, batch)[:2])
        numbers = read_step_numbers(sums, norm)
    run.last_loss = numbers.loss
    # With parameter servers every worker has a norm of its own.
    run.last_norm = numbers.norm if config.parallel.server.mode == "none" else 0.0
    clock.enter(StepPart.UPDATE)
    updated = _update_unless_skipped(run, numbers.loss, numbers.norm, lr, replayed)
    clock.enter(StepPart.REST)
    run.steps_here += 1
    seconds = time.perf_counter() - started - waited
    if run.recorder is not None:
        run.recorder.end(run.step, sums.tokens, len(batch.micro))
    if run.profiler is not None:
        run.profiler.end_step()
    run.finite &= not updated or (math.isfinite(numbers.loss) and math.isfinite(numbers.norm))
    # An update that fp16 loss scaling skips has an infinite gradient by design: only its loss counts.
    scaled = config.precision.name == "fp16" and not updated
    finite = math.isfinite(numbers.loss) and (scaled or math.isfinite(numbers.norm))
    _track_lost_steps(run, finite)
    if run.rollback.count_step(run.step, finite) and run.world.rank == 0:
        run.rollback.write(run.directory.path / ROLLBACKS)  # if it cannot be, a rollback goes further back
    _measure_noise(run, sums, numbers)
    record = {
        "step": run.step,
        "loss": numbers.loss,
        "grad_norm": numbers.norm,
        "lr": lr,
        "tokens": sums.tokens,
        "tokens_per_second": sums.tokens / seconds,
        "step_seconds": seconds,
        "data_seconds": fetched - started,
        "mfu": compute_mfu(config, run.peak_flops, sums.tokens, seconds, run.world.size),
        "noise_scale": run.noise.value,
        "skipped": None if updated else True,
        **_describe_experts(sums, numbers),
    }
    return StepResult(record, sums.stop)


def _describe_experts(sums: Sums, numbers: StepNumbers) -> dict[str, float]:
    """Describe how evenly the step's tokens went to experts; empty for a dense model."""
    if sums.experts is None or numbers.experts is None:
        return {}
    return {
        "expert_imbalance": numbers.experts.imbalance,
        "expert_dropped": numbers.experts.dropped,
        "balance_loss": numbers.experts.loss / max(sums.tokens, 1) / len(sums.experts.tokens),
    }


def _compute_gradient(run: TrainingRun, batch: StepBatch) -> tuple[Sums, torch.Tensor, float]:
    """Compute and clip the gradient of a step; returns its sums, its norm, and the seconds waited for a save."""
    # Ranks that share samples must draw the same dropout; pipeline stages and data-parallel shares different ones.
    share = run.world.dp_index + run.world.dp_size * get_axis_index(run.world, "pp")
    seed_step(run.config.train.seed, run.step, share)
    sums = run.engine.forward_backward(batch)
    check_last_norm(run, sums.agree)
    if run.injector is not None:
        run.injector.after_backward(run.engine.parts)
    run.world.clock.enter(StepPart.REST)
    waited = run.wait_until_copied()  # a save may still be copying what `clip` and `update` change
    run.world.clock.enter(StepPart.CLIP)
    return sums, run.engine.clip(run.config.optim.max_norm), waited


def _update_unless_skipped(run: TrainingRun, loss: float, norm: float, lr: float, replayed: bool) -> bool:
    """Update the parameters, unless the step's numbers are wrong; returns whether they were updated.

    Counts the step either way, and records what was skipped. replayed: these numbers are the second ones.
    """
    first_sample = run.consumed_samples
    kind, reason, skip = run.guard.judge(loss, norm, first_sample)
    if kind is not None and replayed:
        reason = f"{reason}, also when computed again"
    if skip:
        run.engine.skip_update()
    updated = not skip and run.engine.update(lr)
    run.step += 1
    if kind is None and updated:
        return True
    samples, reason = run.config.train.global_batch, reason or "the gradient overflows at this loss scale"
    where = {"step": run.step, "first_sample": first_sample, "samples": samples, "why": reason}
    if skip:
        run.guard.skipped.add(run.step, first_sample, samples, reason)
        run.write_skip_list()
    run.reporter.event("skipped" if not updated else cast("str", kind), **where)
    if run.world.rank == 0 and (skip or updated):  # the loss scale of fp16 has said so itself
        done = "skipped the update" if not updated else "the update was made all the same"
        log.warning("step %d: %s; %s", run.step, reason, done)
    return updated


def _track_lost_steps(run: TrainingRun, finite: bool) -> None:
    """Remember since which step the loss or the gradient has not been finite."""
    if finite:
        run.lost_since = None
    elif run.lost_since is None:
        run.lost_since = run.step


def report_step(run: TrainingRun, step: StepResult, validation: Evaluation | None) -> None:
    """Write the step's line of metrics.jsonl."""
    if validation is not None:
        run.last_validation, run.validated_at = validation.loss, run.step
    record = {**step.record, **(validation.as_record() if validation is not None else {})}
    run.reporter.step(record)
    if run.node_metrics is not None:
        run.node_metrics.update(record, run.heartbeat)


def _next_batch(run: TrainingRun) -> StepBatch:
    batch = run.loader.batch(run.consumed_samples)
    batch.stop, batch.step, batch.norm = run.stop.requested, run.step, run.last_norm
    every = run.config.train.noise_scale.every
    batch.measure = every > 0 and (run.step + 1) % every == 0
    return batch


def _measure_noise(run: TrainingRun, sums: Sums, numbers: StepNumbers) -> None:
    sample, batch = sums.sample, run.config.train.global_batch
    if sample is None or numbers.sample_square is None or sample.sequences >= batch or not math.isfinite(numbers.norm):
        return
    run.noise.add(numbers.sample_square, sample.sequences, numbers.norm**2, batch)
    critical = run.noise.value
    if critical is not None and run.noise.weight > 0.65:
        run.reporter.noise(critical, batch)


def _evaluate_if_due(run: TrainingRun, stop: bool) -> Evaluation | None:
    """Return the evaluation if it is due; if a stop was agreed on, before or meanwhile, the run owes it."""
    train_config = run.config.train
    due = train_config.eval_every and (run.step % train_config.eval_every == 0 or run.step == run.steps)
    run.owes_validation = False
    if run.validation is None or not due:
        return None
    if not stop:
        beat = partial(run.heartbeat.enter, Phase.EVALUATE, run.step)
        batches, metrics = train_config.eval_batches, train_config.metrics
        result = evaluate_batches(run.engine, run.validation, batches, metrics, run.stop, beat)
    else:
        result = None
    run.owes_validation = result is None
    return result


def evaluate_owed(run: TrainingRun) -> None:
    """Make up for the evaluation that a stop skipped in the attempt before, and add it to its step's line.

    Call it before anybody reads the metrics of this attempt. If a stop is agreed on again, the run still owes it.
    """
    if not run.owes_validation:
        return
    result = _evaluate_if_due(run, stop=False)
    if result is not None:
        run.last_validation, run.validated_at = result.loss, run.step
        run.reporter.validated(run.step, result.as_record())


def explain_too_late(run: TrainingRun) -> str:
    """Return why a save would not end before the machine is taken away; empty if it would, or nobody knows."""
    grace, needed = run.config.resilience.grace_seconds, run.save_seconds
    if grace is None or needed is None:
        return ""
    noticed = find_event_time(run.directory.events, "notice", run.reporter.attempt)
    if noticed is None:
        return ""
    left = grace - (time.time() - noticed)
    if needed <= left:
        return ""
    return f"the last save took {needed:.0f} s, and {max(left, 0):.0f} s are left of resilience.grace_seconds={grace:g}"


def _save_if_due(run: TrainingRun, stopping: bool) -> bool:
    """Begin the saves that are due after this step; returns whether there are any."""
    every, weights_every = run.config.checkpoint.every, run.config.checkpoint.weights_every
    full = every and (stopping or run.step % every == 0 or run.step == run.steps)
    weights = weights_every and run.step % weights_every == 0
    if full or weights:
        run.heartbeat.enter(Phase.SAVE, run.step)
    pieces = list(run.engine.shards()) if full or weights else []  # once for both: a collective in some engines
    if full:
        save_checkpoint(run, pieces)
    if weights:
        save_weights(run, pieces)
    return bool(full or weights)


def save_checkpoint(run: TrainingRun, pieces: Sequence[TensorShard]) -> None:
    """Begin to save this step; its result is reported after the step during which it ends."""
    extra: dict[str, Any] = {
        "consumed_samples": run.consumed_samples,
        "seed": run.config.train.seed,
        "noise_scale": run.noise.state(),
        "schema_version": run.config.schema_version,
        "owes_validation": run.owes_validation,
        "numbers": run.guard.state(),
        "data": gather_positions(run.loader, run.world),
    }
    validation = run.last_validation if run.validated_at == run.step else None
    # With the latest update skipped the parameters may be what makes the loss infinite.
    finite = run.finite and run.lost_since is None and (validation is None or math.isfinite(validation))
    run.saver.save(run.step, pieces, mark_base(extra, run.base_digest), finite, validation)
    if finite:
        run.rollback.add_checkpoint(run.step)
    run.finite = True


def save_weights(run: TrainingRun, pieces: Sequence[TensorShard]) -> None:
    """Begin to save the weights of this step, without optimizer state. Retention never removes them."""
    extra = {"consumed_samples": run.consumed_samples, "schema_version": run.config.schema_version}
    extra = mark_base(extra, run.base_digest)
    run.weights_saver.save(run.step, select_weights(pieces), mark_weights_only(extra), run.finite)


def _report_saves(run: TrainingRun, ended: Iterable[SaveResult]) -> None:
    """Report saves that have ended. After a failed one training goes on: the earlier checkpoints are untouched."""
    for saved in ended:
        weights_only = saved.path.parent.name == WEIGHTS_FOLDER
        run.save_failures.pop(weights_only, None)
        try:
            saved.wait()
        except CheckpointError as error:
            run.save_failures[weights_only] = SaveFailure(saved.step, str(error))
            run.reporter.event("checkpoint_failed", step=saved.step, why=str(error))
            log.error("%s", error)
            continue
        if not weights_only:
            run.saved_at, run.save_seconds = saved.step, saved.seconds
        kind = "weights" if weights_only else "checkpoint"
        times = {} if saved.times is None else encode_provenance(replace(saved.times, stall=saved.stall))
        fields = {"seconds": saved.seconds, "stall": saved.stall, "bytes": saved.bytes, "shared": saved.shared}
        run.reporter.event(kind, step=saved.step, **{**times, **fields})
        if saved.warning is not None:
            run.reporter.event("warning", about="checkpoint", why=saved.warning)


def _stop(run: TrainingRun) -> int:
    """Report a stop on purpose; returns the exit code, which tells the batch script whether to requeue."""
    run.reporter.event("signal", step=run.step, signal=run.stop.signal_name, saved=run.saved_at == run.step)
    if run.saved_at == run.step:
        run.reporter.mark_requeue()
        run.reporter.say(f"stopped at step {run.step}, saved; run again with run_dir={run.directory.path} to continue")
        return EXIT_REQUEUE
    if run.unsaved:
        run.reporter.mark_requeue()
        place = "the beginning" if run.saved_at is None else f"step {run.saved_at}"
        run.reporter.say(f"stopped at step {run.step}, NOT saved: {run.unsaved}; the run goes on from {place}")
        return EXIT_REQUEUE
    failed = run.save_failures.get(False)
    if failed is not None and run.saved_at not in (None, run.resumed_from):  # the next run of the job will save, too
        run.reporter.mark_requeue()
        run.reporter.say(
            f"stopped at step {run.step}, NOT saved: {failed.why}; the run goes on from step {run.saved_at}"
        )
        return EXIT_REQUEUE
    why = (
        f" (checkpoint.every={run.config.checkpoint.every})" if failed is None else f", as no save before: {failed.why}"
    )
    run.reporter.say(f"stopped at step {run.step}, NOT saved{why}", last=True)
    return EXIT_NO_REQUEUE
