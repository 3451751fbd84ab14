"""Evaluate the model on the validation split when an evaluation is due.

If a stop request prevents one, the next attempt catches up on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from hpc_train.data.loader import BatchLoader
from hpc_train.interfaces import Engine
from hpc_train.parallel.metrics import PERPLEXITY
from hpc_train.resilience.heartbeat import Phase
from hpc_train.runtime.stop_request import StopRequest

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun


@dataclass(frozen=True)
class Evaluation:
    """Means over the targets of an evaluation, the same on all ranks."""

    loss: float
    """Nats per target."""
    metrics: dict[str, float]
    """Values of train.metrics, by name."""
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
    before_batch: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Return the mean loss per token and `metrics` over the first `batches` global batches of the validation split.

    None if any rank was asked to stop meanwhile; all ranks leave the evaluation at the same batch.
    before_batch: called before each batch.
    """
    total, tokens = 0.0, 0
    added = [name for name in dict.fromkeys(metrics) if name != PERPLEXITY]
    measured = torch.zeros(len(added), 2, dtype=torch.float64)
    for index in range(batches):
        before_batch()
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
        means[PERPLEXITY] = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
    return Evaluation(loss, {name: means[name] for name in dict.fromkeys(metrics)}, tokens)


def evaluate_if_due(run: TrainingRun, stop: bool) -> Evaluation | None:
    """Return the evaluation if it is due; if a stop was agreed on, before or meanwhile, the run owes it."""
    train_config = run.config.train
    due = train_config.eval_every and (run.step % train_config.eval_every == 0 or run.step == run.steps)
    run.evaluation.is_owed = False
    if run.validation is None or not due:
        return None
    if not stop:
        before_batch = partial(run.observers.heartbeat.enter, Phase.EVALUATE, run.step)
        batches, metrics = train_config.eval_batches, train_config.metrics
        result = evaluate_batches(run.engine, run.validation, batches, metrics, run.stop, before_batch)
    else:
        result = None
    run.evaluation.is_owed = result is None
    return result


def make_up_evaluation(run: TrainingRun) -> None:
    """Make up for the evaluation that a stop skipped in the attempt before, and add it to its step's line.

    Call it before anybody reads the metrics of this attempt. If a stop is agreed on again, the run still owes it.
    """
    if not run.evaluation.is_owed:
        return
    result = evaluate_if_due(run, stop=False)
    if result is not None:
        run.evaluation.loss, run.evaluation.step = result.loss, run.step
        run.reporter.report_evaluation(run.step, result.as_record())
