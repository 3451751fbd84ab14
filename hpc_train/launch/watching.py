"""Handle hanging ranks in the launcher: collect their stacks, record the incident, and end them."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.launch.rank_stacks import StackRequest, describe_stacks, find_odd_task
from hpc_train.launch.state.attempts import read_tail_text
from hpc_train.regular_files import parse_json_object, read_json
from hpc_train.resilience.deadlines import HangLimits, make_hang_limits, read_learned, write_learned
from hpc_train.resilience.file_systems import Disk
from hpc_train.resilience.heartbeat import Phase, remove_entries
from hpc_train.resilience.incident import Incident, mark_hang, write_incident
from hpc_train.resilience.restart import SAME_FAULTS, Cause
from hpc_train.resilience.watch import (
    GONE,
    LOOK_SECONDS,
    NOT_BEGUN,
    STOPPED,
    WAITS_FOR_DISK,
    Hang,
    NodeWatch,
    RankView,
    find_hang,
)
from hpc_train.training.records.run_records import append_event

_STACK_SECONDS = 3.0
"""Seconds that ranks have to answer with their stacks. They are also asked this long before the deadline."""
_UNABLE = (STOPPED, WAITS_FOR_DISK, GONE, NOT_BEGUN)
"""States in which a process answers no signal."""
LATE_END_SECONDS = 10.0
"""Seconds of silence after a job was asked to end, from which on the supervisor records which rank delays the end."""
_STEP_PHASES = (Phase.FIRST_STEP, Phase.STEP, Phase.EVALUATE)
"""Phases that ranks complete before they obey a stop request, and in which they wait for each other."""
_COMPUTES = (STOPPED, GONE, "R")
"""States of a process that waits for no file system."""
_HELD_UP_SECONDS = 8.0
"""How long it may take to write down a hang, before what was seen of the ranks is too old to end them for it."""
_EARLIEST_SHARE = 0.75
"""Share of a deadline that passes before any rank is asked, however short the deadline is."""


@dataclass(frozen=True)
class WatchSettings:
    """The part of a frozen configuration that watching needs."""

    limits: HangLimits
    act: bool
    notice: Mapping[str, Any] = field(default_factory=dict)
    """The `resilience.notice` part."""
    last_try: bool = False
    """Whether one more hang would end the run."""
    paths: Sequence[str] = ()
    """Files and folders that the configuration names."""


def read_watch_settings(logs: Path) -> WatchSettings | None:
    """Read the settings of the run whose attempt has these logs; None if it is not to be watched, or does not say."""
    try:
        config = read_json(logs.parents[1] / "job.json")["config"]
        settings = config["resilience"]
        last_try = is_last_try(logs.parents[1])
        limits = make_hang_limits(settings["hang"], bool(config["parallel"]["compile"]), last_try)
        watch = WatchSettings(limits, bool(settings["act"]), settings["notice"], last_try, list_paths(config))
        return watch if settings["watch"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_paths(config: object) -> list[str]:
    """Return the absolute paths among the values of a configuration, such as those of its data and checkpoints."""
    if isinstance(config, Mapping):
        config = list(config.values())
    if isinstance(config, list):
        return list(dict.fromkeys(path for value in config for path in list_paths(value)))
    return [config] if isinstance(config, str) and config.startswith("/") else []


def is_last_try(run: Path) -> bool:
    """Return whether one more hang on a node would end the run: it has had all but one that it may have there.

    Hangs count from the newest checkpoint or submission on.
    """
    hangs = Counter[str]()
    for event in map(parse_json_object, read_tail_text(run / "events.jsonl").splitlines()):
        if event.get("event") in ("checkpoint", "submit"):
            hangs.clear()
        elif event.get("event") == "restart" and event.get("cause") == Cause.HANG.value:
            hangs[str(event.get("host"))] += 1
    return max(hangs.values(), default=0) >= SAME_FAULTS - 1


@dataclass(frozen=True)
class Stall:
    """A file system that does not answer, so that ranks wait for it which look as if they hung."""

    disk: Disk
    hosts: tuple[str, ...]
    """Nodes on which it does not answer."""
    answers: tuple[str, ...]
    """Nodes with silent ranks on which it does."""

    def describe(self) -> str:
        """Return one line: which file system, where, and for how long."""
        where = ", ".join(filter(None, self.hosts))
        others = f", but answers on {', '.join(self.answers)}" if self.answers else ""
        return f"the file system {self.disk.describe()}{f' on {where}' if where else ''}{others}"


def find_stall(hang: Hang, disks: Mapping[str, Sequence[Disk]]) -> Stall | None:
    """Return the file system that ranks wait for which seem to hang; None if there is none.

    disks: what nodes with silent ranks know of their file systems, by host.
    """
    stalled = [disk for found in disks.values() for disk in found if disk.stalls]
    if not stalled or (hang.culprits and all(view.state in _COMPUTES for view in hang.culprits)):
        return None
    longest = max(stalled, key=lambda disk: disk.seconds)
    same = [(host, disk) for host, found in disks.items() for disk in found if disk.mount == longest.mount]
    hosts = tuple(host for host, disk in same if disk.stalls)
    return Stall(longest, hosts, tuple(host for host, disk in same if disk.answers))


class HangResponse:
    """Watches the ranks of this machine, and responds once to each hang."""

    def __init__(
        self, logs: Path, settings: WatchSettings, request_stacks: Callable[[], None], hosts: Sequence[str] = ()
    ) -> None:
        """logs: log directory of the attempt. request_stacks: sends STACK_SIGNAL to every rank.

        hosts: the node of each task, as for `find_hang`.
        """
        self._logs, self._settings, self._request_stacks, self._hosts = logs, settings, request_stacks, hosts
        learned = read_learned(logs.parents[1])
        self._watch = NodeWatch(logs, settings.limits, socket.gethostname(), learned, settings.paths)
        self._next = 0.0
        self._reported = self._reported_stall = False
        self._request: StackRequest | None = None

    def must_end(self) -> bool:
        """Look, at most every half second; return whether the ranks hang and are to be ended."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOOK_SECONDS
        views = self._watch.look()
        return self.respond(views, disks={"": self._watch.disks})

    def respond(
        self,
        views: Sequence[RankView],
        machines: Mapping[str, Any] | None = None,
        disks: Mapping[str, Sequence[Disk]] = {},
    ) -> bool:
        """Find out whether these ranks hang; if so, write it down. Returns whether they are to be ended.

        machines: what their nodes say of themselves, by host; None: this machine is asked. disks: as find_stall.
        """
        hang = find_hang(views, self._hosts)
        if hang is None:
            self._reported = self._reported_stall = False
            self._ask_early(views)
            return False
        stall = find_stall(hang, disks)
        if stall is not None and not stall.answers and stall.disk.seconds < self._settings.limits.save:
            self._report_stall(stall)
            return False
        if not self._reported:
            self._reported = self._report(hang, views, machines, stall)
        return self._settings.act and self._reported

    def _report_stall(self, stall: Stall) -> None:
        """Write down once that ranks are left alone which wait for a file system: it is no node that is to blame."""
        if self._reported_stall:
            return
        self._reported_stall = True
        patience = f"the ranks wait for it, up to resilience.hang.save_seconds={self._settings.limits.save:g}"
        self._append_event("stall", why=stall.describe(), action=patience)

    def _append_event(self, kind: str, **fields: Any) -> None:
        append_event(self._logs.parents[1] / "events.jsonl", kind, int(self._logs.name), **fields)

    def _ask_early(self, views: Sequence[RankView]) -> None:
        """Ask for stacks shortly before the ranks count as hung, so that no time is lost afterwards.

        A rank that is starting is not asked: it may not handle the signal yet, and would die of it.
        """
        sooner = [
            replace(view, deadline=max(view.deadline - _STACK_SECONDS, _EARLIEST_SHARE * view.deadline))
            for view in views
        ]
        if find_hang(sooner) is None:
            self._request = None
        elif self._request is None and all(view.phase is not Phase.START for view in views):
            self._request = StackRequest(self._logs, self._request_stacks)

    def report_late_end(
        self,
        views: Sequence[RankView],
        seconds: float,
        request_stacks: Callable[[], None],
        machines: Mapping[str, Any] | None = None,
    ) -> str:
        """Record which rank delays the end of a job. seconds: since it was asked to end.

        Slurm kills ranks after KillWait, long before some deadlines. Returns the text of the incident, "" if ranks have
        done something in the last LATE_END_SECONDS, or start, load or save, which may take longer.
        """
        if any(view.phase is Phase.START for view in views):  # it may not handle the signal yet, and would die of it
            return ""
        late = [
            replace(view, deadline=min(view.deadline, LATE_END_SECONDS)) if view.phase in _STEP_PHASES else view
            for view in views
        ]
        hang = find_hang(late, self._hosts)
        if hang is None:
            return ""
        as_seen = {view.task: view for view in views}
        hang = replace(hang, culprits=tuple(as_seen.get(view.task, view) for view in hang.culprits))
        who = hang.describe() if hang.culprits else f"all {hang.overdue} are silent"
        text = f"asked to end {seconds:.0f} s ago, the ranks have not: {who}"
        incident = self._examine("late end", text, hang, views, StackRequest(self._logs, request_stacks))
        folder = write_incident(self._logs, incident, machines)
        self._append_event("late_end", why=incident.text, folder=folder.name)
        return incident.text

    def _examine(self, kind: str, text: str, hang: Hang, views: Sequence[RankView], request: StackRequest) -> Incident:
        """Wait for the stacks of the ranks, and find out which of them is to blame. text: what is known before."""
        unable = {view.task for view in (*views, *hang.culprits) if view.state in _UNABLE}
        answers = request.collect(request.sent + _STACK_SECONDS, unable)
        stacks, odd = describe_stacks(answers), find_odd_task(answers)
        # Heartbeats may not tell the ranks apart; then the one whose stack differs from all others is to blame.
        culprits = hang.culprits or [view for view in views if view.task == odd]
        culprit = culprits[0] if culprits else None
        task, host = (culprit.task, culprit.host) if culprit else (None, "")
        return Incident(kind, f"{text}; {stacks}", task, host, views, stacks)

    def _report(
        self, hang: Hang, views: Sequence[RankView], machines: Mapping[str, Any] | None, stall: Stall | None
    ) -> bool:
        """Write down a hang: the stacks of the ranks, an incident with a folder of its own, and an event.

        Returns whether what was seen of the ranks still holds: the file system of the run may stall, too.
        """
        began = time.monotonic()
        text = f"the ranks hang: {hang.describe()}"
        if stall is not None:
            waiting = [view for view in views if view.overdue and view.host in stall.hosts] if stall.answers else []
            hang = replace(hang, culprits=tuple(waiting))
            text = f"the ranks wait for a file system: {stall.describe()}"
        request, self._request = self._request or StackRequest(self._logs, self._request_stacks), None
        incident = self._examine("hang", text, hang, views, request)
        if stall is not None and not stall.answers:
            incident = replace(incident, task=None, host="")  # no node is to blame, whatever their stacks look like
        folder = write_incident(self._logs, incident, machines)
        if (seconds := time.monotonic() - began) > _HELD_UP_SECONDS:
            why = f"the file system of the run directory has held up the watcher for {seconds:.0f} s"
            self._append_event("stall", why=why, action="the ranks are looked at again")
            return False
        if self._settings.act:
            mark_hang(self._logs, incident)
        acted = "ended" if self._settings.act else "left alone: resilience.act=false"
        self._append_event("hang", why=incident.text, action=acted, folder=folder.name)
        return True

    def close(self) -> None:
        """Save the learned deadlines for the next attempt, and remove the entries of the ended ranks."""
        write_learned(self._logs.parents[1], self._watch.deadlines.learned())
        remove_entries(self._logs)


def report_notice(logs: Path, host: str, notice: str) -> None:
    """Write down that a machine is about to be taken away, for which the ranks are asked to save and stop."""
    text = f"{host} is about to be taken away: {notice}"
    append_event(logs.parents[1] / "events.jsonl", "notice", int(logs.name), why=text, action="asked to save and stop")


def describe_blindness(host: str, why: str) -> str:
    """Return one line about a node that cannot see whether it is about to be taken away."""
    return f"nobody sees whether {host} is about to be taken away: {why} (resilience.notice)"


def report_watch(logs: Path, text: str) -> None:
    """Write down what was not watched for some seconds, or cannot be."""
    append_event(logs.parents[1] / "events.jsonl", "watch", int(logs.name), why=text)
