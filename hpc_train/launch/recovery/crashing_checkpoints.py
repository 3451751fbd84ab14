"""Pass over a checkpoint whose load has ended the ranks twice, so that the next start loads an older one.

The step is marked bad, as by `hpc-train checkpoint mark`, and stays where it is. If the load of the older one ends the
ranks, too, it is not the checkpoint that is at fault, and the mark is removed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.resilience.load_history import MARK_REMOVED, MARKED, PASSED_OVER, read_load, read_load_history
from hpc_train.resilience.restart import Cause, Fault
from hpc_train.training.records.run_records import append_event
from hpc_train.training.run_directory import RunDirectory

_ENDED_LOADS = 2
"""Number of starts that must end while they load a checkpoint before it is passed over: one may be an accident."""


@dataclass(frozen=True)
class FailedLoad:
    """A load that has ended the ranks, and what was done about its checkpoint."""

    step: int
    may_load_again: bool
    """Whether another start is of use: it loads the same checkpoint once more, or an older one."""
    passed_over: bool = False
    why: str = ""
    """One line: how the checkpoint was treated, or the error that prevented that; "" if nothing was to be done."""


def respond_to_failed_load(
    config: RunConfig,
    folder: RunDirectory,
    attempt: int,
    fault: Fault,
    events: Sequence[Mapping[str, Any]],
    first_attempt: int,
) -> FailedLoad | None:
    """Pass over the checkpoint that an attempt was loading if its load has ended the ranks before.

    Returns None if the attempt did not end in a load.

    events, first_attempt: see read_load_history. Damage in a checkpoint, lost nodes, hangs and a lack of memory are
    other faults, after which an older checkpoint would be no better.
    """
    step = read_load(folder.logs(attempt))
    if step is None or fault.cause not in (Cause.EXCEPTION, Cause.KILLED):
        return None
    history = read_load_history(events, attempt, first_attempt)
    # True if an earlier process was killed after it had recorded this very decision.
    recorded = any(event["event"] == PASSED_OVER and event["attempt"] == attempt for event in events)
    try:
        if others := sorted(history.passed_over - {step}):
            return _remove_marks(config, folder, attempt, step, others, recorded)
        if history.ended.count(step) + 1 < _ENDED_LOADS:
            return FailedLoad(step, may_load_again=True)
        # Without another checkpoint the run would start from nothing, which is worse than to end.
        if any(other != step for other in list_unmarked_steps(folder)):
            return _pass_over(config, folder, attempt, step, fault, recorded)
    except (CheckpointError, UserError) as error:  # the mark cannot be written, or the step is gone
        return FailedLoad(step, may_load_again=False, why=str(error))
    return FailedLoad(step, may_load_again=False)


def list_unmarked_steps(folder: RunDirectory) -> list[int]:
    """Return the steps with a committed checkpoint that is not marked bad, sorted."""
    return [step for step in folder.steps() if not (folder.checkpoints / f"step-{step}/bad").exists()]


def _pass_over(
    config: RunConfig, folder: RunDirectory, attempt: int, step: int, fault: Fault, recorded: bool
) -> FailedLoad:
    """Mark a checkpoint bad, and record that. recorded: by a process that was killed in the same decision."""
    from hpc_train.checkpoint.storage.step_directory import mark_bad

    why = f"{_ENDED_LOADS} starts in a row ended while they loaded it, the last by {fault.signature}"
    if config.resilience.act:
        mark_bad(folder.checkpoints, step, why)
    if not recorded:
        action = MARKED if config.resilience.act else "left alone: resilience.act=false"
        append_event(folder.events, PASSED_OVER, attempt, step=step, why=why, action=action)
    return FailedLoad(step, may_load_again=True, passed_over=True, why=f"checkpoint step {step} is passed over: {why}")


def _remove_marks(
    config: RunConfig, folder: RunDirectory, attempt: int, step: int, marked: Sequence[int], recorded: bool
) -> FailedLoad:
    """Remove the marks of checkpoints that are not at fault, as the load of another one, `step`, ended the ranks.

    recorded: as for _pass_over.
    """
    from hpc_train.checkpoint.storage.step_directory import unmark_bad

    why = f"the load of step {step} ended the ranks, too"
    for other in marked if config.resilience.act else ():
        unmark_bad(folder.checkpoints, other)
        if not recorded:
            append_event(folder.events, PASSED_OVER, attempt, step=other, why=why, action=MARK_REMOVED)
    names = ", ".join(map(str, marked))
    return FailedLoad(step, may_load_again=False, why=f"checkpoint step {names} is not passed over any more: {why}")
