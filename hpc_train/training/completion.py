"""Decide whether a run that has made all its steps is done: its loss is finite and its last checkpoint is saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpc_train.errors import IncompleteRun
from hpc_train.interfaces import World

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun


def find_shortfall(run: TrainingRun) -> str | None:
    """Return one line on why a run that made all its steps is not done; None if it is.

    A run that had nothing to do, because it was resumed at its last step, is done.
    """
    if run.last_loss is None:
        return None
    return _find_not_finite(run) or _find_not_saved(run)


def raise_if_any_incomplete(shortfall: str | None, world: World) -> None:
    """Raise IncompleteRun on all ranks if any rank has a reason. Every rank must call it; it is a barrier."""
    incomplete = torch.tensor(int(shortfall is not None))
    if world.size > 1:
        dist.all_reduce(incomplete, dist.ReduceOp.MAX, group=world.group)
        dist.barrier(group=world.group)  # a launcher may end the other ranks as soon as one exits with a nonzero code
    if incomplete.item():
        raise IncompleteRun(shortfall or "not done: another rank says so")


def _find_not_finite(run: TrainingRun) -> str | None:
    """Return a line if the last step's loss, gradient or evaluation is not finite."""
    assert run.last_loss is not None
    todo = f"lower optim.lr (now {run.config.optim.lr:g}), or look at the data of that step"
    lost_since, evaluation = run.numbers.lost_since, run.evaluation
    if lost_since is not None:
        description = f"is {run.last_loss}" if not math.isfinite(run.last_loss) else "or its gradient is not finite"
        return f"not done: the loss {description} at the last step ({run.step}), and since step {lost_since}; {todo}"
    if evaluation.step == run.step and evaluation.loss is not None and not math.isfinite(evaluation.loss):
        return f"not done: the validation loss is {evaluation.loss} at the last step ({run.step}); {todo}"
    return None


def _find_not_saved(run: TrainingRun) -> str | None:
    """Return a line if the last step's checkpoint was not saved, or the last weights if there are no others."""
    checkpoint, saved_at = run.config.checkpoint, run.saves.saved_at
    if checkpoint.every and saved_at != run.step:
        newest = f"the newest saved is of step {saved_at}" if saved_at is not None else "none was saved"
        return (
            f"not done: step {run.step}, the last, was not saved ({newest}): {_explain_failed_save(run, weights=False)}"
        )
    if not checkpoint.every and checkpoint.weights_every and (weights := run.saves.failures.get(True)):
        return f"not done: the weights of step {weights.step} were not saved: {_explain_failed_save(run, weights=True)}"
    return None


def _explain_failed_save(run: TrainingRun, weights: bool) -> str:
    failure = run.saves.failures.get(weights)
    reason = failure.why if failure else "no save of it has ended"
    return f"{reason}; make room or mend that, and `hpc-train resume` goes on"
