"""Decide the state of a run from the facts about it, with pure functions; no other module decides it.

What a run itself recorded about its end counts more than what Slurm says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.slurm.job_records import JobRecord, parse_nodes
from hpc_train.launch.state.attempts import Attempt, AttemptResult
from hpc_train.launch.state.run_facts import RunFacts
from hpc_train.launch.state.state_names import SIGNAL_OUT_OF_MEMORY, RunStatus, State, describe_exit, from_slurm_state

_FORGOTTEN_REASON = "Slurm does not know the job any more"
_CANCELLED_REASON = "cancelled by hpc-train cancel"
_SIGN_OF_LIFE_SECONDS = 60.0
"""Seconds without a sign of life after which the state of a run on another machine is unknown."""
_EXIT_INTERRUPTED = 130
_OUT_OF_MEMORY_CODE = 128 + SIGNAL_OUT_OF_MEMORY


def decide_state(facts: RunFacts) -> RunStatus:
    """Decide the state of one point."""
    status = _decide_without_note(facts)
    if status.state is State.CANCELLED and facts.cancel_note:
        return replace(status, reason=": ".join(filter(None, (status.reason, facts.cancel_note))))
    return status


def _decide_without_note(facts: RunFacts) -> RunStatus:
    newest = facts.newest
    status = RunStatus(
        facts.point.name,
        facts.jobs[-1] if facts.jobs else None,
        newest.number if newest else None,
        State.UNKNOWN,
        nodes=_nodes_of_attempt(newest),
    )
    if newest and newest.result and newest.result.done:
        job = newest.begun.job_id if newest.begun else status.job_id
        return replace(status, job_id=job, state=State.DONE, exit_code=0)
    if facts.point.packed and newest and newest.result and not newest.result.goes_on:
        return _decide_by_result(facts, status, newest.result)  # whatever its neighbours make of their job
    if not facts.jobs or (_is_started_by_hand(newest) and (newest.result is not None or facts.alive is False)):
        return _decide_without_slurm(facts, status)
    return _decide_with_slurm(facts, status)


def _is_started_by_hand(newest: Attempt | None) -> TypeGuard[Attempt]:
    """Whether srun or mpirun inside of a job started the ranks; the job's state then says little about them."""
    return newest is not None and newest.begun is not None and newest.begun.launcher != "slurm"


def _decide_with_slurm(facts: RunFacts, status: RunStatus) -> RunStatus:
    """Return the status of a run whose job Slurm is asked about."""
    record = _find_relevant_record(facts)
    if record is None:
        return _decide_without_record(facts, status)
    status = replace(status, job_id=record.job_id, nodes=record.nodes or status.nodes)
    state, result = from_slurm_state(record.state), facts.newest.result if facts.newest else None
    began = any(attempt.begun is not None and attempt.begun.job_id == record.job_id for attempt in facts.attempts)
    if state is State.UNKNOWN:
        return replace(status, reason=f"Slurm calls it {record.state}")
    if state.waiting:
        # Not for the first time, if Slurm has put the job back or an earlier one of its chain has run.
        again = state is State.REQUEUED or began or _has_earlier_job_started(facts)
        where = () if record.state == "PENDING" else status.nodes
        return replace(status, state=State.REQUEUED if again else State.PENDING, reason=record.reason, nodes=where)
    if state is State.RUNNING:
        # The script has written how its ranks ended, and Slurm has yet to complete the job; or several points share a
        # job, which goes on for the others.
        if result is not None and began and (_ends_itself(record, result) or facts.point.packed):
            return _mark_requeued(status, result) if result.goes_on else _decide_by_result(facts, status, result)
        word = "" if record.state == "RUNNING" else record.state.lower()
        return replace(status, state=state, reason="asked to stop and save" if facts.cancelled and not word else word)
    return _decide_ended_job(facts, status, record, result if began else None)


def _ends_itself(record: JobRecord, result: AttemptResult) -> bool:
    """Whether a COMPLETING job will not run again; one that Slurm ends without a reason (`None`) may be requeued."""
    return record.state == "COMPLETING" and (bool(result.then) or result.slurm != "COMPLETING None")


def _find_relevant_record(facts: RunFacts) -> JobRecord | None:
    """Return the record of the job that runs, else of the next one of the chain, else of the newest attempt's."""
    for state in (State.RUNNING, State.REQUEUED, State.PENDING):
        for record in facts.records:
            if from_slurm_state(record.state) is state:
                return record
    newest = facts.newest
    job = newest.begun.job_id if newest and newest.begun else None
    return next(
        (record for record in facts.records if record.job_id == job), facts.records[-1] if facts.records else None
    )


def _has_earlier_job_started(facts: RunFacts) -> bool:
    """Whether an earlier job of the chain has begun."""
    return len(facts.jobs) > 1 and any(
        attempt.begun and attempt.begun.job_id in facts.jobs for attempt in facts.attempts
    )


def _mark_requeued(status: RunStatus, result: AttemptResult) -> RunStatus:
    return replace(status, state=State.REQUEUED, reason=result.why)


def _decide_ended_job(facts: RunFacts, status: RunStatus, record: JobRecord, result: AttemptResult | None) -> RunStatus:
    """Return the status of a job that Slurm says has ended; the run may know better why."""
    state = from_slurm_state(record.state)
    code = result.exit_code if result else record.exit_code or None  # Slurm's 0 says only that no code is known
    status = replace(status, state=state, exit_code=code)
    if state is State.DONE:
        # Our batch scripts end with the code of their ranks: a good end without a marker is a marker that was lost.
        return replace(status, exit_code=0)
    if state is State.FAILED and result is not None:
        return _decide_by_result(facts, status, result)
    if state is State.FAILED and code == _OUT_OF_MEMORY_CODE:
        return replace(status, state=State.OUT_OF_MEMORY, reason=facts.failure or describe_exit(code))
    return replace(status, reason=_explain_end(facts, result, record))


def _explain_end(facts: RunFacts, result: AttemptResult | None, record: JobRecord) -> str:
    reported = facts.failure or (result.why if result else "")
    state = from_slurm_state(record.state)
    if state is not State.FAILED:
        reason = record.reason or ("TimeLimit" if record.state == "TIMEOUT" else "")  # accounting may keep none
        if reason.startswith("RaisedSignal") and record.exit_code:
            reason = describe_exit(record.exit_code, record.nodes)
        return ": ".join(filter(None, (reason, reported))) or state.lower()
    if reported:
        return reported
    code = record.exit_code
    return f"{describe_exit(code, record.nodes)}; it left no result" if code else record.reason


def _decide_without_record(facts: RunFacts, status: RunStatus) -> RunStatus:
    """Return the status of a job that Slurm does not know, or about which it does not answer."""
    result = facts.newest.result if facts.newest else None
    if result is not None and not result.goes_on:
        return _decide_by_result(facts, status, result)
    if facts.slurm_error is not None:
        return replace(status, reason=facts.slurm_error)
    if facts.cancelled:
        return replace(status, state=State.CANCELLED, reason=_CANCELLED_REASON)
    if facts.newest is None:
        return replace(status, state=State.FAILED, reason=f"{_FORGOTTEN_REASON}, and it never started")
    if result is not None:
        return replace(
            status, state=State.FAILED, exit_code=result.exit_code, reason=f"{_FORGOTTEN_REASON}: {result.why}"
        )
    if facts.ending is not None:
        why = "TimeLimit" if facts.ending is State.TIMEOUT else facts.ending.lower()
        return replace(status, state=facts.ending, reason=": ".join(filter(None, (why, facts.failure))))
    return replace(status, state=State.FAILED, reason=f"{_FORGOTTEN_REASON}, and it left no result: it was killed")


def _decide_by_result(facts: RunFacts, status: RunStatus, result: AttemptResult) -> RunStatus:
    """Return the status of an attempt that recorded its own end."""
    status = replace(status, exit_code=result.exit_code)
    if result.then == "cancel":
        return replace(status, state=State.CANCELLED, reason=result.why)
    why = facts.failure or _explain_result(result)
    if facts.ending is not None:  # the batch script could not reach Slurm
        reason = "TimeLimit" if facts.ending is State.TIMEOUT else facts.ending.lower()
        return replace(status, state=facts.ending, reason=f"{reason}: {why}")
    word, _, reason = result.slurm.partition(" ")
    if word == "COMPLETING" or from_slurm_state(word).ended:
        state = _choose_state_while_completing(word, reason)
        return replace(status, state=state, reason=f"{reason}: {why}" if reason == "TimeLimit" else why)
    if "out of memory" in why.lower():
        return replace(status, state=State.OUT_OF_MEMORY, reason=why)
    return replace(status, state=State.FAILED, reason=why)


def _explain_result(result: AttemptResult) -> str:
    if result.then == "chain":
        return f"the chain of jobs came to its end before the run did ({result.why})"
    if result.then == "requeue":
        return f"it was to be requeued and was not ({result.why})"
    return result.why or describe_exit(result.exit_code)


def _choose_state_while_completing(word: str, reason: str) -> State:
    """Return why Slurm ended a job whose script still ran. A job that only fails is RUNNING until its script ends."""
    if word != "COMPLETING":
        return from_slurm_state(word)
    return {"TimeLimit": State.TIMEOUT, "OutOfMemory": State.OUT_OF_MEMORY}.get(reason, State.CANCELLED)


def _decide_without_slurm(facts: RunFacts, status: RunStatus) -> RunStatus:
    """Return the status of a run without Slurm, or started by hand inside of a job."""
    newest = facts.newest
    if newest is None:
        return _decide_not_started(facts, status)
    if newest.result is not None:
        return _decide_local_end(facts, status, newest.result)
    if newest.begun is None:
        return replace(status, reason="it left no word of who runs it")
    if facts.alive:
        return replace(status, state=State.RUNNING, reason="asked to stop and save" if facts.cancelled else "")
    if facts.alive is False and facts.cancelled:
        return replace(status, state=State.CANCELLED, reason=_CANCELLED_REASON)
    if facts.alive is False:
        return replace(status, state=State.FAILED, reason="the process that held the ranks was killed")
    host = newest.begun.host
    if facts.seconds_since_write is not None and facts.seconds_since_write < _SIGN_OF_LIFE_SECONDS:
        return replace(
            status, state=State.RUNNING, reason=f"on {host}, a sign of life {facts.seconds_since_write:.0f} s ago"
        )
    return replace(status, reason=f"runs or ran on {host}; ask there")


def _decide_not_started(facts: RunFacts, status: RunStatus) -> RunStatus:
    """Return the status of a point of a sweep on this machine that has not started."""
    if facts.point.placed is None or facts.alive is None:
        return replace(status, reason="it never started")
    if facts.alive:
        return replace(status, state=State.PENDING, reason="waits for its turn")
    return replace(status, state=State.CANCELLED, reason="the sweep was stopped before its turn came")


def _decide_local_end(facts: RunFacts, status: RunStatus, result: AttemptResult) -> RunStatus:
    status = replace(status, exit_code=result.exit_code)
    if result.exit_code == EXIT_REQUEUE:
        why = "stopped on purpose and saved; the same command continues it"
        return replace(status, state=State.CANCELLED, reason=why)
    if facts.cancelled or result.exit_code == _EXIT_INTERRUPTED:
        return replace(
            status, state=State.CANCELLED, reason=_CANCELLED_REASON if facts.cancelled else "killed by Ctrl-C"
        )
    return replace(status, state=State.FAILED, reason=facts.failure or result.why or describe_exit(result.exit_code))


def _nodes_of_attempt(newest: Attempt | None) -> tuple[str, ...]:
    begun = newest.begun if newest else None
    if begun is None:
        return ()
    return parse_nodes(begun.nodes) or (begun.host,)
