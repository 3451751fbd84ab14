"""Decide after an attempt that failed whether and where its run goes on, from what it left in the run directory.

A batch script runs this module (`python -m hpc_train.launch.recovery.restarting RUN ATTEMPT CODE LOST`). Its exit code
says what to do: 0 start the ranks again in this job, 75 requeue it, 93 give up, 1 end as the ranks did. Files in the
attempt's log directory say the rest: DECISION why, NEXT_NODES where to start again, EXCLUDE which nodes a requeue
leaves out, and REQUEUE_NODES how many it asks for.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_FAILED, EXIT_NO_REQUEUE, EXIT_REQUEUE, EXIT_USER_ERROR
from hpc_train.launch.command_output import print_to_job_log
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.recovery.crashing_checkpoints import FailedLoad, list_unmarked_steps, respond_to_failed_load
from hpc_train.launch.recovery.elastic import find_smaller_size
from hpc_train.launch.recovery.failures import EXIT_CODES, NOT_STARTED, STOP_ASKED, FirstError, find_first_error
from hpc_train.launch.slurm.supervisor.time_limit import OUT_OF_TIME, PREEMPTED, SLURM_EARLY_SECONDS, read_time_left
from hpc_train.launch.state.attempts import read_attempt, read_tail_text
from hpc_train.launch.state.run_facts import read_events
from hpc_train.resilience.exclusion import (
    HARDWARE,
    SOFTWARE,
    Strike,
    append_strike,
    choose_excluded,
    read_doubtful,
    read_strikes,
    select_valid,
    write_requeue,
)
from hpc_train.resilience.incident import read_hang
from hpc_train.resilience.load_history import LOADING
from hpc_train.resilience.restart import Action, Cause, Decision, Fault, History, Policy, decide_after_fault
from hpc_train.training.records.run_records import REQUEUE_MARKER, append_event, read_first_failure
from hpc_train.training.run_directory import RunDirectory

RESTARTED = Action.RESTART.value
"""In a `restart` event: the ranks were started again in the same allocation."""
DECISION, NEXT_NODES = "decision", "next-nodes"
_EXIT_CODES = {
    Action.RESTART: 0,
    Action.REQUEUE: EXIT_REQUEUE,
    Action.GIVE_UP: EXIT_NO_REQUEUE,
    Action.END: EXIT_FAILED,
}
_KILLED_SRUN = 128 + signal.SIGKILL
"""Exit code of the ranks' srun if srun itself is killed; it says nothing about a killed task."""
_MEMORY = re.compile(r"out of memory|MemoryError|cannot allocate memory|oom-kill", re.IGNORECASE)
_NO_ANSWER = "does not answer"
"""Evidence against a node that is lost."""
_KILLED = re.compile(r"was killed by SIG|was ended from outside")


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job."""

    nodes: tuple[str, ...] = ()
    """All nodes, those to take first in front; () on a machine without Slurm."""
    lost: tuple[str, ...] = ()
    """Nodes that do not answer."""
    wanted: int = 1
    """Number of nodes that the ranks need."""
    can_requeue: bool = False
    """Whether Slurm may requeue the job or, in a chain, another job may go on."""
    enough_time: bool = True
    """See Policy.enough_time."""

    def usable(self, excluded: Iterable[str]) -> list[str]:
        """Return the nodes that the ranks may start on."""
        return [node for node in self.nodes if node not in {*self.lost, *excluded}]


@dataclass(frozen=True)
class NodeChoice:
    """The nodes on which ranks start again in this job, and the nodes that a requeue leaves out."""

    start: Sequence[str]
    """Nodes to start on; () if there are too few."""
    exclude: Sequence[str] = ()
    requeue_nodes: int = 0
    """Number of nodes that a requeue asks for; 0: as many as before."""


def decide_after_failure(
    config: RunConfig,
    folder: RunDirectory,
    attempt: int,
    code: int,
    first_attempt: int = 0,
    allocation: Allocation = Allocation(),
) -> Decision:
    """Decide what follows an attempt that failed, and record that in events.jsonl and nodes.jsonl.

    code: of the attempt. first_attempt: of those that were started by the same command or submission.
    """
    logs, events = folder.logs(attempt), read_events(folder.path)
    latest = {event["event"]: event for event in events if event["attempt"] == attempt}
    cancelled = "cancel" in latest
    fault = Fault(Cause.CANCELLED) if cancelled else find_fault(logs, code, _list_lost_in(logs, allocation.lost))
    fault = _read_reason_of_ranks(fault, latest)
    failed_load = respond_to_failed_load(config, folder, attempt, fault, events, first_attempt)
    saved = max(list_unmarked_steps(folder), default=None)
    # A checkpoint that is passed over is to blame, and not the node on which the ranks that loaded it died.
    at_fault = Fault(Cause.CHECKPOINT) if failed_load is not None and failed_load.passed_over else fault
    record_strikes(folder.path, attempt, at_fault, allocation)
    choice = choose_nodes(config, folder, allocation) if allocation.nodes else None
    stopping = _have_to_stop(logs, latest, fault, allocation)
    policy = _make_policy(config, allocation, choice, stopping, failed_load)
    decision = decide_after_fault(fault, read_history(events, attempt, first_attempt, saved), saved, policy)
    if failed_load is not None and failed_load.why:
        decision = replace(decision, why=f"{failed_load.why}; {decision.why}")
    if not {"restart", "gave_up"} & latest.keys():
        _record_decision(config, folder, attempt, fault, decision, failed_load)
    if choice is not None and decision.action is Action.REQUEUE and config.resilience.act:
        choice = fit_choice(config, folder, allocation.wanted, choice)
    if choice is not None and config.resilience.act:
        _write_nodes(logs, choice)
    return decision


def _have_to_stop(logs: Path, latest: Mapping[str, Any], fault: Fault, allocation: Allocation) -> bool:
    """Return whether the ranks were to stop, also if they failed before they had agreed on their last step.

    latest: the newest event of each kind of the attempt.
    """
    if "signal" in latest or (logs / REQUEUE_MARKER).exists():
        return True
    # If a node was lost, it may be the one that was announced to be taken away: a spare can take over.
    asked = (logs / STOP_ASKED).exists() or ("notice" in latest and fault.cause is not Cause.LOST_NODE)
    # A job that may not be requeued can still save before its time limit, which the signal may announce.
    return asked and bool(allocation.nodes) and (allocation.can_requeue or allocation.enough_time)


def _make_policy(
    config: RunConfig, allocation: Allocation, choice: NodeChoice | None, stopping: bool, failed_load: FailedLoad | None
) -> Policy:
    fewer = choice is not None and 0 < len(choice.start) < allocation.wanted
    return Policy(
        config.resilience.restarts,
        saves=config.checkpoint.every > 0,
        enough_nodes=choice is None or bool(choice.start),
        fewer_nodes=f"{len(choice.start)} of {allocation.wanted} nodes" if choice and fewer else "",
        can_requeue=allocation.can_requeue,
        by="in the next job of the chain" if config.launch.chain > 1 else "by a requeue",
        enough_time=allocation.enough_time,
        stopping=stopping,
        may_load_again=failed_load is not None and failed_load.may_load_again,
    )


def _list_lost_in(logs: Path, lost: Sequence[str]) -> list[str]:
    """Return the lost nodes that the attempt with these logs ran on; others were lost before it, or are spare.

    Returns all of them if the attempt's nodes are unknown.
    """
    begun = read_attempt(logs).begun
    nodes = expand_hostlist(begun.nodes) if begun is not None and begun.nodes else lost
    return [host for host in lost if host in nodes]


def _read_reason_of_ranks(fault: Fault, latest: Mapping[str, Mapping[str, Any]]) -> Fault:
    """Return the fault for which ranks ended the attempt themselves, and said so in an event; else the same fault.

    latest: the newest event of each kind of the attempt.
    """
    if fault.cause is Cause.INCOMPLETE and "rollback" in latest:
        return Fault(Cause.NUMBERS)
    if fault.cause is Cause.INCOMPLETE and "disagree" in latest:
        hosts = latest["disagree"]["hosts"]
        return Fault(Cause.DISAGREE, str(hosts[0]) if len(hosts) == 1 else "", str(latest["disagree"]["why"]))
    if fault.cause is Cause.INCOMPLETE and "slow_node" in latest:
        hosts = latest["slow_node"]["hosts"]
        return Fault(Cause.SLOW_NODE, str(hosts[0]) if hosts else "", str(latest["slow_node"]["why"]))
    return Fault(Cause.STOPPED) if fault.cause is Cause.REFUSED and "signal" in latest else fault


def fit_choice(config: RunConfig, folder: RunDirectory, wanted: int, choice: NodeChoice) -> NodeChoice:
    """Return what a requeue can ask Slurm for, and say in the log what it does without."""
    # Here, and below, as a restart in the same job does without what builds sbatch's options: it is waited for.
    from hpc_train.launch.slurm.waiting_time import fit_demand

    demand = fit_demand(config, folder, wanted, choice.exclude)
    for line in demand.concessions:
        print_to_job_log(f"hpc-train: {line}")
    return replace(choice, exclude=demand.exclude, requeue_nodes=demand.nodes if config.launch.spares else 0)


def choose_nodes(config: RunConfig, folder: RunDirectory, allocation: Allocation) -> NodeChoice:
    """Choose the nodes for the next attempt in this job, and those that a requeue leaves out."""
    wanted = allocation.wanted
    # All that are lost, however many: Slurm may not have noticed yet, and would give them to the job again.
    excluded = list(dict.fromkeys([*allocation.lost, *choose_excluded(read_strikes(folder.path), wanted)]))
    usable = allocation.usable(excluded)
    if len(usable) >= wanted:
        return NodeChoice(usable[:wanted], excluded)
    size = find_smaller_size(config, wanted, len(usable))
    if size and not (allocation.can_requeue and _has_nodes_soon(config, folder, allocation, excluded)):
        return NodeChoice(usable[:size], excluded)
    if not allocation.can_requeue and len(allocation.usable(())) >= wanted:  # better on a doubtful node than not at all
        return NodeChoice(allocation.usable(())[:wanted])
    return NodeChoice((), excluded)


def _has_nodes_soon(config: RunConfig, folder: RunDirectory, allocation: Allocation, excluded: list[str]) -> bool:
    """Return whether Slurm expects to have other nodes for those that the job lacks within elastic.queue_seconds."""
    from hpc_train.launch.slurm.waiting_time import estimate_wait

    missing = allocation.wanted - len(allocation.usable(excluded))
    seconds = estimate_wait(config, folder, missing, {*allocation.nodes, *excluded})
    return seconds is not None and seconds <= config.resilience.elastic.queue_seconds


def decide_on_this_machine(config: RunConfig, folder: RunDirectory, attempt: int, code: int, first: int) -> Decision:
    """Decide what follows an attempt of the local pool that failed; act on nothing where resilience.act=false.

    first: the first attempt that the same command has started.
    """
    if not (folder.logs(attempt) / EXIT_CODES).exists():
        return Decision(Action.END, "the process that held the ranks was killed, and they may still be saving")
    decision = decide_after_failure(config, folder, attempt, code, first)
    return decision if config.resilience.act else Decision(Action.END, "")


def _record_decision(
    config: RunConfig,
    folder: RunDirectory,
    attempt: int,
    fault: Fault,
    decision: Decision,
    failed_load: FailedLoad | None,
) -> None:
    acted = decision.action.value if config.resilience.act else "left alone: resilience.act=false"
    what: dict[str, Any] = {"cause": fault.cause.value, "signature": fault.signature, "host": fault.host}
    what |= {"why": decision.why, **({LOADING: failed_load.step} if failed_load is not None else {})}
    if decision.goes_on:
        append_event(folder.events, "restart", attempt, action=acted, **what)
    elif decision.action is Action.GIVE_UP:
        append_event(folder.events, "gave_up", attempt, action=acted, **what)


def _write_nodes(logs: Path, choice: NodeChoice) -> None:
    with suppress(OSError):
        (logs / NEXT_NODES).write_text(",".join(choice.start) + "\n")
    write_requeue(logs, choice.exclude, choice.requeue_nodes)


def record_strikes(run: Path, attempt: int, fault: Fault, allocation: Allocation) -> None:
    """Record what a fault says about nodes; on one machine there is nothing to choose between.

    A node that is lost gets one strike, however many attempts end while it is gone. A node gets one strike of a weight
    for an attempt, also where a process that decided about this attempt before was killed.
    """
    if not allocation.nodes:
        return
    before = read_strikes(run)
    lost = [host for host in allocation.lost if not _is_known_loss(run, host, attempt, before)]
    strikes = [Strike(host, HARDWARE, _NO_ANSWER, attempt) for host in lost]
    once, twice = (Cause.SLOW_NODE, Cause.DISAGREE), (Cause.HANG, Cause.KILLED, Cause.LAUNCH)
    if fault.cause in (*once, *twice) and fault.host:
        name = _find_full_name(fault.host, allocation.nodes)
        weight = HARDWARE if fault.cause in once else SOFTWARE
        if name is not None and name not in allocation.lost:
            strikes.append(Strike(name, weight, fault.text, attempt))
    recorded = {(strike.host, strike.weight, strike.attempt) for strike in before}
    for strike in strikes:
        if (strike.host, strike.weight, strike.attempt) not in recorded:
            append_strike(run, strike)


def _is_known_loss(run: Path, host: str, attempt: int, strikes: Sequence[Strike]) -> bool:
    """Return whether a node has a strike for this loss: one that counts, and no ranks have started there since.

    strikes: of the run so far.
    """
    losses = [strike for strike in select_valid(strikes) if strike.host == host and strike.evidence == _NO_ANSWER]
    last = max((strike.attempt for strike in losses), default=None)
    if last is None:
        return False
    return not any(_list_lost_in(run / "logs" / str(number), [host]) for number in range(last + 1, attempt + 1))


def _find_full_name(host: str, nodes: Iterable[str]) -> str | None:
    """Return the node that a host name means: Slurm's names may be shorter than those that the hosts give."""
    short = host.partition(".")[0]
    return next((node for node in nodes if node == host or node.partition(".")[0] == short), None)


def find_fault(logs: Path, code: int, lost: Sequence[str] = ()) -> Fault:
    """Return what ended the attempt with these logs. code: its exit code. lost: nodes that do not answer."""
    if lost:
        return Fault(Cause.LOST_NODE, ",".join(lost), f"{', '.join(lost)}: {_NO_ANSWER}")
    hang = read_hang(logs)
    if hang is not None:
        return Fault(Cause.HANG, hang.host, hang.text)
    if (logs / OUT_OF_TIME).exists():
        return Fault(Cause.PREEMPTED if PREEMPTED in read_tail_text(logs / OUT_OF_TIME) else Cause.TIME_LIMIT)
    failure = read_first_failure(logs)
    if failure is not None and failure.missing_tasks:  # to those that wait for it, a rank that is stuck looks like this
        return Fault(Cause.HANG, failure.missing_hosts[0] if len(failure.missing_hosts) == 1 else "", failure.message)
    if code in (EXIT_USER_ERROR, EXIT_NO_REQUEUE):
        return Fault(_find_cause_of_refusal(logs, code))
    error = find_first_error(logs)
    if error is None:
        return Fault(Cause.KILLED, text="srun was killed") if code == _KILLED_SRUN else Fault(Cause.UNKNOWN)
    cause = _find_cause(logs, error)
    # A rank that reports a lost connection is no evidence against its own node.
    return Fault(cause, "" if cause is Cause.CONNECTION else error.host, error.line)


def _find_cause(logs: Path, error: FirstError) -> Cause:
    if _MEMORY.search(error.line):
        return Cause.MEMORY
    if _KILLED.search(error.text):
        return Cause.KILLED
    if error.text.startswith(NOT_STARTED):
        return Cause.LAUNCH
    failure = read_first_failure(logs)
    if failure is None:
        return Cause.UNKNOWN
    if failure.incomplete:
        return Cause.INCOMPLETE
    if failure.user_error:
        return Cause.USER
    # A rank lost another one that left no reason for its end: the network may have failed for a moment.
    return Cause.CONNECTION if failure.lost_peer and error.task == failure.task else Cause.EXCEPTION


def _find_cause_of_refusal(logs: Path, code: int) -> Cause:
    """Return why ranks ended that do not want to run again. code: EXIT_USER_ERROR or EXIT_NO_REQUEUE.

    Ranks end with EXIT_NO_REQUEUE after an error of a checkpoint, after a stop without a save, and where they were
    never started, as on a node without the program of their container.
    """
    failure = read_first_failure(logs)
    if code == EXIT_USER_ERROR or (failure is not None and failure.user_error):
        return Cause.USER
    return Cause.CHECKPOINT if failure is not None else Cause.REFUSED


def read_history(events: Iterable[Mapping[str, Any]], attempt: int, first_attempt: int, newest: int | None) -> History:
    """Return the faults in a row before this attempt's, from the events of the run.

    A checkpoint and a submission reset the count. newest: the newest committed step, which counts as where the attempt
    began if it never came to training.
    """
    signatures: list[str] = []
    began = newest
    for event in events:
        kind = event["event"]
        if kind in ("checkpoint", "submit") or event["attempt"] < first_attempt:
            signatures = []
        elif kind == "restart" and event["attempt"] == attempt:
            continue  # by a process that decided about this attempt before, and was killed
        elif kind == "restart" and event.get("cause") == Cause.PREEMPTED.value:
            continue
        elif kind == "restart" and event.get("action") in (Action.RESTART.value, Action.REQUEUE.value):
            signatures.append(str(event.get("signature", event.get("cause"))))
        elif kind in ("start", "resume") and event["attempt"] == attempt:
            began = int(event["step"])
    return History(tuple(signatures), began)


def read_allocation(
    config: RunConfig, env: Mapping[str, str], lost: str, wanted: int, doubtful: Collection[str] = ()
) -> Allocation:
    """Return the nodes of the job that this process belongs to.

    lost: names, separated by spaces. doubtful: nodes that come last.
    """
    nodes = tuple(sorted(expand_hostlist(env["SLURM_JOB_NODELIST"]), key=lambda host: host in doubtful))
    last = int(env.get("SLURM_RESTART_COUNT", "0")) + 1 >= config.launch.max_attempts
    names = (_find_full_name(host, nodes) for host in lost.split())
    can_requeue = not last or config.launch.chain > 1
    left = read_time_left(env["SLURM_JOB_ID"])
    enough_time = left is None or left > config.launch.signal_seconds + SLURM_EARLY_SECONDS
    # Slurm and the host itself may have given two names of one node.
    return Allocation(nodes, tuple(dict.fromkeys(name for name in names if name)), wanted, can_requeue, enough_time)


def main(run: str, attempt: str, code: str, lost: str = "") -> int:
    """Decide, say so, and return what the batch script has to do."""
    spec = read_spec(Path(run) / "job.json")
    config, folder = spec.run_config(), spec.folder()
    wanted, doubtful = spec.ranks // config.cluster.ranks_per_node, read_doubtful(folder.logs(int(attempt)))
    allocation = read_allocation(config, os.environ, lost, wanted, doubtful)
    decision = decide_after_failure(config, folder, int(attempt), int(code), 0, allocation)
    with suppress(OSError):  # a full disk: the exit code and the log say it, too
        (folder.logs(int(attempt)) / DECISION).write_text(decision.why + "\n")
    left = "" if config.resilience.act else "left alone (resilience.act=false): "
    print_to_job_log(f"hpc-train: {left}{decision.why}")
    return _EXIT_CODES[decision.action] if config.resilience.act else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
