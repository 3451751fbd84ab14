"""What follows a fault: all rules, case by case, and what holds for any sequence of faults."""

from __future__ import annotations

import random

import pytest

from hpc_train.launch.recovery.restarting import read_history
from hpc_train.resilience.restart import (
    SAME_FAULTS,
    Action,
    Cause,
    Fault,
    History,
    Policy,
    decide_after_fault,
)

KILLED = Fault(Cause.KILLED, "n1", "task 1 was killed by SIGKILL")
EXCEPTION = Fault(Cause.EXCEPTION, "n1", "RuntimeError: step 17 of /home/me/x.py at 0x7f00")


@pytest.mark.parametrize(
    ("fault", "saved", "policy", "action"),
    [
        (KILLED, 10, Policy(3), Action.RESTART),
        (KILLED, 0, Policy(3), Action.RESTART),
        (KILLED, None, Policy(3), Action.RESTART),
        (Fault(Cause.HANG), 10, Policy(3), Action.RESTART),
        (Fault(Cause.LOST_NODE, "n2"), 10, Policy(3), Action.RESTART),
        (Fault(Cause.LOST_NODE, "n2"), 10, Policy(3, enough_nodes=False, can_requeue=True), Action.REQUEUE),
        (Fault(Cause.LOST_NODE, "n2"), 10, Policy(3, enough_nodes=False), Action.END),
        (KILLED, 10, Policy(3, can_requeue=True, enough_time=False), Action.REQUEUE),
        (KILLED, 10, Policy(3, enough_time=False), Action.RESTART),
        (KILLED, 10, Policy(3, can_requeue=True, stopping=True), Action.REQUEUE),
        (KILLED, 10, Policy(3, stopping=True), Action.END),
        (EXCEPTION, 10, Policy(3, can_requeue=True, stopping=True), Action.REQUEUE),
        (EXCEPTION, 20, Policy(3), Action.RESTART),
        (EXCEPTION, 10, Policy(3), Action.END),
        (Fault(Cause.MEMORY), 10, Policy(3), Action.END),
        (Fault(Cause.MEMORY), 20, Policy(3), Action.RESTART),
        (Fault(Cause.UNKNOWN), 10, Policy(3), Action.END),
        (Fault(Cause.USER), 20, Policy(3), Action.END),
        (Fault(Cause.CANCELLED), 20, Policy(3), Action.END),
        (Fault(Cause.INCOMPLETE), 20, Policy(3), Action.END),
        (Fault(Cause.CHECKPOINT), 20, Policy(3), Action.END),
        (Fault(Cause.STOPPED), 20, Policy(3), Action.END),
        (Fault(Cause.REFUSED), 20, Policy(3), Action.END),
        (Fault(Cause.CONNECTION), 10, Policy(3), Action.RESTART),
        (Fault(Cause.TIME_LIMIT), 10, Policy(3, can_requeue=True, enough_time=False), Action.REQUEUE),
        (Fault(Cause.TIME_LIMIT), 10, Policy(3, enough_time=False), Action.END),
        (Fault(Cause.PREEMPTED), 10, Policy(3, can_requeue=True), Action.REQUEUE),
        (Fault(Cause.PREEMPTED), 10, Policy(3), Action.END),
        (KILLED, 20, Policy(3, saves=False), Action.END),
        (KILLED, 20, Policy(0), Action.END),
    ],
)
def test_what_follows_a_first_fault(fault: Fault, saved: int | None, policy: Policy, action: Action) -> None:
    assert decide_after_fault(fault, History((), 10), saved, policy).action is action


def test_the_same_fault_three_times_without_a_save_is_the_last() -> None:
    before = (KILLED.signature,) * (SAME_FAULTS - 1)
    last = decide_after_fault(KILLED, History(before, 10), 10, Policy(100))
    assert (last.action, last.why) == (
        Action.GIVE_UP,
        "3 times in a row without a newer checkpoint: a rank was killed on n1",
    )
    assert decide_after_fault(KILLED, History(before, 10), 11, Policy(100)).action is Action.RESTART
    elsewhere = Fault(Cause.KILLED, "n2")
    assert decide_after_fault(elsewhere, History(before, 10), 10, Policy(100)).action is Action.RESTART


def test_a_preemption_is_no_fault_however_often_it_comes() -> None:
    """A job that is preempted while it loads has saved nothing since, each time."""
    before = (KILLED.signature,) * 3
    policy = Policy(3, can_requeue=True)
    assert decide_after_fault(Fault(Cause.PREEMPTED), History(before, 10), 10, policy).action is Action.REQUEUE
    events = [
        {"event": "restart", "attempt": at, "cause": Cause.PREEMPTED.value, "action": "requeued"} for at in range(9)
    ]
    assert read_history(events, 9, 0, 10) == History((), 10)


def test_numbers_and_paths_do_not_make_another_error() -> None:
    other = Fault(Cause.EXCEPTION, "n2", "RuntimeError: step 18 of /scratch/other.py at 0x7fff")
    assert other.signature == EXCEPTION.signature
    assert Fault(Cause.EXCEPTION, "n1", "ValueError: step 17").signature != EXCEPTION.signature


@pytest.mark.parametrize("seed", range(50))
def test_any_sequence_of_faults_ends_or_advances(seed: int) -> None:
    """However faults come: between two newer checkpoints there are no more starts than resilience.restarts."""
    draw = random.Random(seed)
    limit, saved = draw.randint(1, 6), draw.choice([None, 0])
    history, starts, counts = History((), saved), 0, 0
    for _ in range(200):
        fault = Fault(draw.choice(list(Cause)), draw.choice(["n1", "n2", "n3"]), draw.choice(["a 1", "a 2", "b"]))
        if draw.random() < 0.3:
            saved, counts = (saved or 0) + 5, 0
        decision = decide_after_fault(fault, history, saved, Policy(limit, True, draw.random() < 0.7, True))
        if not decision.goes_on:
            history, starts, counts = History((), saved), 0, 0
            continue
        counts += 1
        starts += 1
        assert counts <= limit
        history = History((*history.after(saved).signatures, fault.signature), saved)
        assert max(history.signatures.count(name) for name in history.signatures) < SAME_FAULTS
