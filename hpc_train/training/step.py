"""Run one training step: batch, forward, backward, clip, update, and the numbers of the step.

The step sees only an Engine, which owns all parallelism.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from hpc_train.interfaces import StepBatch, Sums
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.resilience.heartbeat import Phase, choose_step_phase
from hpc_train.step_clock import StepPart
from hpc_train.training.numerics.number_checks import check_last_norm
from hpc_train.training.numerics.replay import replay_step
from hpc_train.training.numerics.rollback import ROLLBACKS
from hpc_train.training.numerics.step_numbers import StepNumbers, read_step_numbers
from hpc_train.training.optimizer import seed_step
from hpc_train.training.records.mfu import compute_mfu

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step, and whether to stop after it."""

    record: dict[str, Any]
    """Fields of the step's line in metrics.jsonl."""
    stop: bool
    """Some rank was asked to stop; the same on all ranks."""


def train_step(run: TrainingRun) -> StepResult:
    """Run one step: batch, forward, backward, clip, update, and the step's metrics.

    Evaluation, checkpoint and report come after it; `hpc-train bench step` times just this.
    """
    clock = run.world.clock
    _begin_step(run)
    started = time.perf_counter()
    batch = _fetch_batch(run)
    fetched = time.perf_counter()
    gradient = _compute_checked_gradient(run, batch)
    sums, numbers = gradient.sums, gradient.numbers
    run.last_loss = numbers.loss
    # With parameter servers every worker has a norm of its own.
    run.numbers.last_norm = numbers.norm if run.config.parallel.server.mode == "none" else 0.0
    lr = run.schedule(run.step)
    clock.enter(StepPart.UPDATE)
    updated = _update_unless_skipped(run, numbers, lr, gradient.replayed)
    clock.enter(StepPart.REST)
    run.steps_here += 1
    # A wait for a save is the save's: in the step it would look like a slow rank.
    seconds = time.perf_counter() - started - gradient.waited
    _end_step(run, sums, len(batch.micro))
    _track_finite(run, numbers, updated)
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
        "mfu": compute_mfu(run.token_flops, run.peak_flops, sums.tokens, seconds, run.world.size),
        "noise_scale": run.numbers.noise.value,
        "skipped": None if updated else True,
        **_describe_experts(sums, numbers),
    }
    return StepResult(record, sums.stop)


def _begin_step(run: TrainingRun) -> None:
    """Have profiler, heartbeat and recorder know that a step begins, with its batch."""
    observers = run.observers
    if observers.profiler is not None:
        observers.profiler.begin_step(run.step + 1)
    observers.heartbeat.enter(Phase.DATA, run.step)
    if observers.recorder is not None:
        observers.recorder.begin()


def _end_step(run: TrainingRun, sums: Sums, micro_batches: int) -> None:
    if run.observers.recorder is not None:
        run.observers.recorder.end(run.step, sums.tokens, micro_batches)
    if run.observers.profiler is not None:
        run.observers.profiler.end_step()


def _describe_experts(sums: Sums, numbers: StepNumbers) -> dict[str, float]:
    """Describe how evenly the step's tokens went to experts; empty for a dense model."""
    if sums.experts is None or numbers.experts is None:
        return {}
    return {
        "expert_imbalance": numbers.experts.imbalance,
        "expert_dropped": numbers.experts.dropped,
        "balance_loss": numbers.experts.loss / max(sums.tokens, 1) / len(sums.experts.tokens),
    }


@dataclass(frozen=True)
class _Gradient:
    """The clipped gradient of a step is in the parameters; this is what is known of it."""

    sums: Sums
    numbers: StepNumbers
    waited: float
    """Seconds for which a save was waited for."""
    replayed: bool
    """The first numbers were doubtful, and these are the second ones."""


def _compute_checked_gradient(run: TrainingRun, batch: StepBatch) -> _Gradient:
    """Compute and clip the gradient, and read the step's numbers; once more if they are doubtful (numerics.replay).

    Reading them is the only wait for the device in a step: the optimizer's work is part of the next step's time.
    """
    run.observers.heartbeat.enter(choose_step_phase(run.steps_here), run.step)
    run.world.clock.enter(StepPart.BACKWARD)
    if run.observers.injector is not None:
        run.observers.injector.before_step(run.step, run.engine.parts, run.engine.shards)
    sums, norm, waited = _compute_gradient(run, batch)
    numbers = read_step_numbers(sums, norm)
    if not run.numbers.guard.wants_replay(numbers.loss, numbers.norm, run.consumed_samples):
        return _Gradient(sums, numbers, waited, replayed=False)
    sums, norm = replay_step(run, sums, numbers.norm, lambda: _compute_gradient(run, batch)[:2])
    return _Gradient(sums, read_step_numbers(sums, norm), waited, replayed=True)


def _compute_gradient(run: TrainingRun, batch: StepBatch) -> tuple[Sums, torch.Tensor, float]:
    """Compute and clip the gradient of a step; returns its sums, its norm, and the seconds waited for a save."""
    # Ranks that share samples must draw the same dropout; pipeline stages and data-parallel shares different ones.
    share = run.world.dp_index + run.world.dp_size * get_axis_index(run.world, "pp")
    seed_step(run.config.train.seed, run.step, share)
    sums = run.engine.forward_backward(batch)
    check_last_norm(run, sums.agree)
    if run.observers.injector is not None:
        run.observers.injector.after_backward(run.engine.parts)
    run.world.clock.enter(StepPart.REST)
    waited = run.wait_until_copied()  # a save may still be copying what `clip` and `update` change
    run.world.clock.enter(StepPart.CLIP)
    return sums, run.engine.clip(run.config.optim.max_norm), waited


def _update_unless_skipped(run: TrainingRun, numbers: StepNumbers, lr: float, replayed: bool) -> bool:
    """Update the parameters, unless the step's numbers are wrong; returns whether they were updated.

    Counts the step either way, and records what was skipped. replayed: these numbers are the second ones.
    """
    first_sample = run.consumed_samples
    kind, reason, skip = run.numbers.guard.judge(numbers.loss, numbers.norm, first_sample)
    if kind is not None and replayed:
        reason = f"{reason}, also when computed again"
    if skip:
        run.engine.skip_update()
    updated = not skip and run.engine.update(lr)
    run.step += 1
    if kind is None and updated:
        return True
    samples, reason = run.config.train.global_batch, reason or "the gradient overflows at this loss scale"
    fields = {"step": run.step, "first_sample": first_sample, "samples": samples, "why": reason}
    if skip:
        run.numbers.guard.skipped.add(run.step, first_sample, samples, reason)
        run.write_skip_list()
    run.reporter.add_event("skipped" if not updated else cast("str", kind), **fields)
    if run.world.rank == 0 and (skip or updated):  # the loss scale of fp16 has said so itself
        outcome = "skipped the update" if not updated else "the update was made all the same"
        log.warning("step %d: %s; %s", run.step, reason, outcome)
    return updated


def _track_finite(run: TrainingRun, numbers: StepNumbers, updated: bool) -> None:
    """Remember whether the updates since the last save, and the latest steps, had finite numbers."""
    state = run.numbers
    both_finite = math.isfinite(numbers.loss) and math.isfinite(numbers.norm)
    state.finite_since_save &= both_finite or not updated
    # An update that fp16 loss scaling skips has an infinite gradient by design: only its loss counts.
    scaled = run.config.precision.name == "fp16" and not updated
    finite = math.isfinite(numbers.loss) if scaled else both_finite
    if finite:
        state.lost_since = None
    elif state.lost_since is None:
        state.lost_since = run.step
    if state.rollback.count_step(run.step, finite) and run.world.rank == 0:
        state.rollback.write(run.directory.path / ROLLBACKS)  # if it cannot be, a rollback goes further back


def _fetch_batch(run: TrainingRun) -> StepBatch:
    batch = run.loader.batch(run.consumed_samples)
    # These go along with the count of targets, in a sum over ranks that every step makes anyway (loss.StepTotals): so
    # all ranks learn of a request to stop, and of a rank whose gradient was wrong, one step later and at no cost.
    batch.stop, batch.step, batch.norm = run.stop.requested, run.step, run.numbers.last_norm
    measure_every = run.config.train.noise_scale.every
    batch.measure = measure_every > 0 and (run.step + 1) % measure_every == 0
    return batch


def _measure_noise(run: TrainingRun, sums: Sums, numbers: StepNumbers) -> None:
    """Add the step's measurement, if it has one, to the gradient noise scale, and warn of a batch beyond it."""
    sample, batch = sums.sample, run.config.train.global_batch
    if sample is None or numbers.sample_square is None or sample.sequences >= batch or not math.isfinite(numbers.norm):
        return
    noise = run.numbers.noise
    noise.add(numbers.sample_square, sample.sequences, numbers.norm**2, batch)
    critical = noise.value
    # The weight is 1 - decay^n after n measurements: 0.65 once the average covers about 1 / (1 - decay) of them.
    if critical is not None and noise.weight > 0.65:
        run.reporter.warn_of_large_batch(critical, batch)
