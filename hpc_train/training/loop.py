"""Run the training loop: steps, evaluation, checkpoints, metrics, and requests to stop.

`train_step` in step.py is one step; evaluation.py and saving.py say what comes between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hpc_train.checkpoint.rank_consensus import run_on_rank_0
from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.garbage_collection import collect_at_steps
from hpc_train.training.evaluation import Evaluation, evaluate_if_due
from hpc_train.training.lost_copies import drop_lost_copies
from hpc_train.training.numerics.number_checks import RanksDisagree, check_numbers, mark_suspect_checkpoints
from hpc_train.training.saving import explain_missed_grace, report_saves, save_if_due
from hpc_train.training.step import StepResult, train_step

if TYPE_CHECKING:
    from hpc_train.training.training_run import TrainingRun


def run_training(run: TrainingRun) -> int:
    """Train to the last step, or until some rank is asked to stop; returns the exit code, the same on every rank."""
    try:
        return _stop(run) if run.evaluation.is_owed else _run_steps(run)
    except Exception as error:
        # The step that failed is not the step being saved: that checkpoint is sound, and worth the wait.
        report_saves(run, run.wait_for_saves())
        if isinstance(error, RanksDisagree) and run.world.rank == 0:
            mark_suspect_checkpoints(run, error)
        raise


def _run_steps(run: TrainingRun) -> int:
    with collect_at_steps(run.config.train.gc_every) as collect:
        return _run_steps_collecting(run, collect)


def _run_steps_collecting(run: TrainingRun, collect: Callable[[int], None]) -> int:
    """Run the steps; `collect` is called after each of them."""
    step_began = time.monotonic()
    while run.step < run.steps:
        # A request to stop came after the ranks had agreed, in the step before, that there was none.
        previous_began, step_began = step_began, time.monotonic()
        step = train_step(run)
        validation = evaluate_if_due(run, step.stop)
        drop_lost_copies(run)
        # The line comes first, so that metrics.jsonl has the step that ends a run. A save comes last: no checkpoint is
        # made of numbers that are known to be wrong.
        report_step(run, step, validation)
        check_numbers(run, lambda: report_saves(run, run.wait_for_saves()))
        stopping = step.stop or run.evaluation.is_owed
        if stopping:
            report_saves(run, run.saves.take_ended())  # how long a save takes is known from the last one
            run.saves.skip_reason = run_on_rank_0(
                run.world, partial(explain_missed_grace, run, time.monotonic() - previous_began)
            )
        saved = not run.saves.skip_reason and save_if_due(run, stopping)
        if run.observers.ledger is not None:
            run.observers.ledger.write(run.observers.heartbeat, run.step, due=saved)
        report_saves(run, run.saves.take_ended())
        collect(run.step)
        # After the last step only a skipped evaluation is a reason to come back, and only if there is a checkpoint.
        owed = run.evaluation.is_owed and run.config.checkpoint.every > 0
        if stopping and (run.step < run.steps or owed):
            report_saves(run, run.wait_for_saves())
            return _stop(run)
    report_saves(run, run.wait_for_saves())
    return EXIT_DONE


def report_step(run: TrainingRun, step: StepResult, validation: Evaluation | None) -> None:
    """Write the step's line of metrics.jsonl."""
    if validation is not None:
        run.evaluation.loss, run.evaluation.step = validation.loss, run.step
    record = {**step.record, **(validation.as_record() if validation is not None else {})}
    run.reporter.report_step(record)
    if run.observers.node_metrics is not None:
        run.observers.node_metrics.update(record, run.observers.heartbeat)


def _stop(run: TrainingRun) -> int:
    """Report a stop on purpose; returns the exit code, which tells the batch script whether to requeue."""
    saves = run.saves
    run.reporter.add_event("signal", step=run.step, signal=run.stop.signal_name, saved=saves.saved_at == run.step)
    if saves.saved_at == run.step:
        run.reporter.mark_requeue()
        run.reporter.say(f"stopped at step {run.step}, saved; run again with run_dir={run.directory.path} to continue")
        return EXIT_REQUEUE
    if saves.skip_reason:
        run.reporter.mark_requeue()
        resume_point = "the beginning" if saves.saved_at is None else f"step {saves.saved_at}"
        run.reporter.say(
            f"stopped at step {run.step}, NOT saved: {saves.skip_reason}; the run goes on from {resume_point}"
        )
        return EXIT_REQUEUE
    failed = saves.failures.get(False)
    # This process has saved before, so the next one of the job will save, too.
    if failed is not None and saves.saved_at not in (None, saves.resumed_from):
        run.reporter.mark_requeue()
        run.reporter.say(
            f"stopped at step {run.step}, NOT saved: {failed.why}; the run goes on from step {saves.saved_at}"
        )
        return EXIT_REQUEUE
    reason = (
        f" (checkpoint.every={run.config.checkpoint.every})" if failed is None else f", as no save before: {failed.why}"
    )
    run.reporter.say(f"stopped at step {run.step}, NOT saved{reason}", last=True)
    return EXIT_NO_REQUEUE
