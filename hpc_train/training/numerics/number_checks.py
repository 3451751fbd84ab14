"""Check after each step whether a run's numbers can still be trusted, and end the attempt if they cannot.

If the loss or gradient stays infinite, the run goes back to a good checkpoint (training.numerics.rollback). If copies
of parameters are no longer equal, it goes back to the last checkpoint at which they were
(training.numerics.replica_check). All ranks come to the same conclusion and raise; launch.recovery.restarting then has
them started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpc_train.checkpoint import list_committed_steps, mark_bad
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.rank_consensus import run_on_rank_0
from hpc_train.errors import IncompleteRun
from hpc_train.regular_files import read_json
from hpc_train.training.numerics.anomalies import SkippedSteps
from hpc_train.training.numerics.replica_check import ReplicaCheck
from hpc_train.training.numerics.rollback import MAX_ROLLBACKS, ROLLBACKS, WentBack, mark_newer_bad

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun

log = logging.getLogger(__name__)
_FIRST_COMPARISON = 3
"""Steps of an attempt after which copies of parameters that are not equal show that they never are."""


def check_numbers(run: TrainingRun, finish_saves: Callable[[], None]) -> None:
    """Raise WentBack or RanksDisagree on all ranks where the run must not go on. Called after each step.

    finish_saves: waits for the saves under way.
    """
    _roll_back_if_lost(run, finish_saves)
    _compare_replicas_if_due(run)


def _roll_back_if_lost(run: TrainingRun, finish_saves: Callable[[], None]) -> None:
    """Raise WentBack on all ranks after too many steps in a row without finite numbers; see training.numerics.rollback.

    Raises LostNumbers where going back has not been possible for much longer.
    """
    limits, rollback = run.config.resilience.numbers, run.numbers.rollback
    count = run.numbers.guard.nonfinite_in_a_row
    if limits.give_up_after and count >= limits.give_up_after:
        finish_saves()
        raise LostNumbers(
            f"gave up at step {run.step}: the loss or the gradient of {count} steps in a row was not finite, "
            "and there is no good checkpoint to go back to (resilience.numbers.give_up_after)"
        )
    can_go_back = run.config.checkpoint.every > 0 and run.config.resilience.restarts > 0 and rollback.good is not None
    if not can_go_back or not limits.rollback_after or count < limits.rollback_after:
        return
    finish_saves()
    reason = f"the numbers of {count} steps in a row, up to step {run.step}, were not finite"
    if run_on_rank_0(run.world, lambda: _prepare_rollback(run, reason)):
        raise WentBack(
            f"{reason}; going back to the checkpoint of step {rollback.good}, without the samples of these steps"
        )


def _prepare_rollback(run: TrainingRun, reason: str) -> bool:
    """Mark checkpoints and record samples, on rank 0; returns whether the run can go back."""
    rollback, count = run.numbers.rollback, run.numbers.guard.nonfinite_in_a_row
    assert rollback.good is not None
    # The same samples were left out before and it happened again: something else is wrong.
    if rollback.times >= MAX_ROLLBACKS:
        if count == run.config.resilience.numbers.rollback_after:
            log.warning("%s, as after %d returns to step %d: not again", reason, rollback.times, rollback.good)
        return False
    try:
        marked = mark_newer_bad(run.directory.checkpoints, rollback.good, reason)
    except (CheckpointError, OSError) as error:
        log.warning("%s, but the run does not return to step %d: %s", reason, rollback.good, error)
        return False
    if marked is None:
        return False
    batch = run.config.train.global_batch
    # The position has moved past the skipped steps already.
    first = run.consumed_samples - count * batch
    rollback.entries.append(SkippedSteps(run.step - count + 1, run.step, first, count * batch, reason))
    rollback.times += 1
    if not rollback.write(run.directory.path / ROLLBACKS):  # the next attempt would meet the same samples again
        rollback.entries.pop()
        return False
    run.reporter.add_event("rollback", step=run.step, to=rollback.good, marked=marked, why=reason)
    return True


class LostNumbers(IncompleteRun):
    """Raised on all ranks when a run no longer has finite numbers and has no checkpoint to go back to."""


class RanksDisagree(IncompleteRun):
    """Raised on the ranks that see that they have, or had, different numbers where these have to be equal."""

    def __init__(self, text: str, since: int, ranks: Sequence[int] = ()) -> None:
        """since: the last step after which they were equal. ranks: those at fault, if that can be said."""
        super().__init__(text)
        self.since, self.ranks = since, ranks


def check_last_norm(run: TrainingRun, agree: bool) -> None:
    """Raise RanksDisagree if ranks had different gradient norms in the step before, where all have to be equal."""
    if not agree:
        text = f"the ranks did not get the same gradient norm in step {run.step} (here: {run.numbers.last_norm:.6g})"
        _raise_or_warn(run, RanksDisagree(f"{text}: the memory or the device of one of them is at fault", run.step - 1))


def _raise_or_warn(run: TrainingRun, error: RanksDisagree) -> None:
    if run.config.resilience.act:
        raise error
    if run.world.rank == 0:
        log.warning("%s; left alone: resilience.act=false", error)


def mark_suspect_checkpoints(run: TrainingRun, error: RanksDisagree) -> None:
    """Record what was seen, and mark the checkpoints that may have been made from it."""
    marked = [step for step in list_committed_steps(run.directory.checkpoints) if step > error.since]
    for step in marked:
        mark_bad(run.directory.checkpoints, step, str(error))
    hosts = {entry["rank"]: entry["host"] for entry in read_json(run.directory.rank_map)["ranks"]}
    named = [hosts[rank] for rank in error.ranks]
    run.reporter.add_event("disagree", step=run.step, why=str(error), marked=marked, hosts=named)


def _compare_replicas_if_due(run: TrainingRun) -> None:
    """Raise RanksDisagree on all ranks where copies of parameters differ that were equal before."""
    compare_every, numbers = run.config.resilience.numbers.compare_every, run.numbers
    if not compare_every or run.config.parallel.server.mode != "none":
        return
    first = run.steps_here == _FIRST_COMPARISON
    if first:
        numbers.replicas = ReplicaCheck(run.engine, run.world)
    if numbers.replicas is None or not (first or run.step % compare_every == 0):
        return
    differing, is_certain = numbers.replicas.find_differing_ranks()
    if differing and first and not numbers.replicas.has_same_rounding():
        numbers.replicas = None
        if run.world.rank == 0:
            log.warning("copies of parameters are not compared: devices of different kinds round differently")
    elif differing:
        which = f"rank {', '.join(map(str, differing[:8]))}" + ("" if is_certain else ", which differ from each other")
        text = f"copies of parameters are no longer equal, as they were after step {numbers.equal_at}: those of {which}"
        _raise_or_warn(run, RanksDisagree(text, numbers.equal_at, differing if is_certain else ()))
    else:
        numbers.equal_at = run.step
        if numbers.lost_since is None:  # equal copies of NaN are nothing to go back to
            numbers.equal_checkpoint = run.saves.saved_at
