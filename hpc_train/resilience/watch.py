"""Watch the ranks of one node, and tell when a job hangs, and which of its ranks holds up the others.

`NodeWatch.look` reads heartbeats and /proc; `find_hang` is a pure function of what all nodes have seen. A job hangs

- if every rank is past its own deadline: the one that is stuck, and those that wait for it in a collective. A rank that
  saves or evaluates, for which the others wait, has a deadline of its own;
- if one rank is past its deadline while others have gone on by several steps;
- if a rank is stopped, by SIGSTOP or a debugger, for longer than a step may take.

Silence is counted only while the watcher itself runs: after a machine was suspended, nobody is late.

Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.resilience.deadlines import Deadlines, HangLimits
from hpc_train.resilience.file_systems import ASK_AHEAD_SECONDS, Disk, DiskWatch
from hpc_train.resilience.heartbeat import Beat, Phase, read_beats

LOOK_SECONDS = 0.5
"""Seconds between two looks at the heartbeats."""
_SHORTEST_PAUSE = 0.02
"""Seconds between two looks at least, however soon the next rank may be late."""
_LONGEST_TICK = 1.0
"""Maximum seconds that one look adds."""
_STEPS_BEHIND = 5
"""Steps by which an overdue rank trails the foremost one before it alone is blamed; a few are normal in a pipeline."""
GONE, STOPPED, WAITS_FOR_DISK, NOT_BEGUN = "gone", "T", "D", "not begun"
"""States of a process: not there, stopped, in a system call that cannot be interrupted, not seen yet."""


class WatchClock:
    """Counts the seconds between two looks of a watcher.

    A pause of the watcher itself adds little, because ranks are not to blame for it.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def tick(self) -> float:
        """Return the seconds since the look before, at most 1."""
        now = time.monotonic()
        seconds, self._last = min(now - self._last, _LONGEST_TICK), now
        return seconds


@dataclass(frozen=True)
class RankView:
    """State of one rank, as a watcher sees it."""

    task: int
    phase: Phase
    step: int
    silent: float
    """Seconds since its last entry."""
    deadline: float
    """Seconds of silence from which on it counts as hung."""
    state: str = "R"
    """As in /proc/<pid>/stat, or GONE."""
    host: str = ""

    @property
    def overdue(self) -> bool:
        """Whether it is silent for longer than it may be."""
        return self.silent > self.deadline

    @property
    def ended(self) -> bool:
        """Whether the rank has finished or is gone; its launcher knows how it ended."""
        return self.state == GONE


@dataclass
class _Followed:
    """A rank between two looks: its latest entry, and for how long that has not changed."""

    beat: Beat
    silent: float = 0.0
    stopped: float = 0.0
    """Seconds for which it has been seen stopped since that entry, up to now."""
    forgiven: float = 0.0
    """Seconds of silence since that entry that no longer count, as a file system did not answer."""


class NodeWatch:
    """Follows the ranks of this node that write heartbeats, and asks the file systems of those that are silent."""

    def __init__(
        self,
        logs: Path,
        limits: HangLimits,
        host: str = "",
        learned: Mapping[Phase, float] | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        """logs: of the attempt. host: name of this node. learned: seconds by phase, from earlier attempts.

        paths: files and folders that the ranks use.
        """
        self._logs, self._host = logs, host
        self._limits, self.deadlines = limits, Deadlines(limits, learned or {})
        self._followed: dict[int, _Followed] = {}
        self._clock = WatchClock()
        self._disk_watch = DiskWatch(logs, paths)
        self.disks: list[Disk] = []
        """The file systems of ranks that are about to be late."""

    def look(self) -> list[RankView]:
        """Read all heartbeats, learn from those that are new, and return what is seen now."""
        now, tick = time.monotonic(), self._clock.tick()
        if self._disk_watch.read_answers():
            self._forgive()
        beats = read_beats(self._logs)
        views = [self._follow(beat, now, tick) for beat in beats]
        late = [beat.process for beat, view in zip(beats, views, strict=True) if _is_nearly_late(view)]
        self.disks = self._disk_watch.look(late)
        return views

    def _forgive(self) -> None:
        """Give the ranks their whole deadlines again after a stall. In all, they may be silent as long as in a save."""
        for followed in self._followed.values():
            if followed.forgiven + followed.silent <= self._limits.save:
                followed.forgiven, followed.silent = followed.forgiven + followed.silent, 0.0

    def _follow(self, beat: Beat, now: float, tick: float) -> RankView:
        """Compare an entry with the last one of its rank. tick: seconds since the last look."""
        followed = self._followed.setdefault(beat.task, _Followed(beat))
        followed.silent += tick
        if beat.counter != followed.beat.counter or beat.process != followed.beat.process:
            # The time until this entry belongs to the phase that the entry before it announced.
            self.deadlines.observe(followed.beat.phase, followed.silent)
            # A rank that gets on between two stops, as under a tool that limits its CPU time by them, is merely slow.
            followed.beat, followed.silent, followed.stopped = beat, min(max(now - beat.seconds, 0.0), tick), 0.0
            followed.forgiven = 0.0
        state = read_process_state(beat.process)
        deadline = self.deadlines.seconds(beat.phase)
        followed.stopped = followed.stopped + tick if state == STOPPED else 0.0
        if state == STOPPED:  # counted from the stop on: before it, the rank may have been silent for as long as it may
            deadline = min(deadline, followed.silent - followed.stopped + self._limits.step)
        return RankView(
            task=beat.task,
            phase=beat.phase,
            step=beat.step,
            silent=followed.silent,
            deadline=deadline,
            state=state,
            host=self._host,
        )


def _is_nearly_late(view: RankView) -> bool:
    """Return whether a rank that is there will soon be late."""
    ahead = min(ASK_AHEAD_SECONDS, view.deadline / 2)
    return not view.ended and view.state != STOPPED and view.silent > view.deadline - ahead


def seconds_to_next_look(views: Iterable[RankView]) -> float:
    """Return after how long to look again: as soon as the next rank may be late, and after LOOK_SECONDS at most."""
    left = (view.deadline - view.silent for view in views if not view.overdue and not view.ended)
    return min(LOOK_SECONDS, max(min(left, default=LOOK_SECONDS), _SHORTEST_PAUSE))


def read_process_state(process: int) -> str:
    """Return the state letter of a process of this node; GONE if there is none."""
    try:
        # The name of the program stands in parentheses and may itself contain some, so the state follows the last one.
        # A zombie (Z) has ended: nobody has asked for its exit code yet.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", GONE)
    except (OSError, IndexError):
        return GONE


@dataclass(frozen=True)
class Hang:
    """A job that does not go on."""

    culprits: tuple[RankView, ...]
    """Ranks that hold up the others, as far as that can be seen from outside; () if they all look alike."""
    overdue: int
    """Ranks past their deadlines."""

    def describe(self) -> str:
        """Return one line: who, in which phase, for how long."""
        if not self.culprits:
            return f"all {self.overdue} ranks are silent past their deadlines"
        first = self.culprits[0]
        more = f" and {len(self.culprits) - 1} more" if len(self.culprits) > 1 else ""
        where = f" on {first.host}" if first.host else ""
        how = {
            STOPPED: ", stopped by a signal",
            GONE: ", and its process is gone",
            WAITS_FOR_DISK: ", in a system call that does not return",
            NOT_BEGUN: ", without a sign of life",
        }
        return (
            f"task {first.task}{where}{more} has been {first.phase.text} after step {first.step} for "
            f"{first.silent:.0f} s (deadline {first.deadline:.0f} s){how.get(first.state, '')}"
        )


def find_hang(views: Sequence[RankView], hosts: Sequence[str] = ()) -> Hang | None:
    """Return who holds up a job that hangs; None if it does not hang.

    views: of all ranks of the job that have been seen. hosts: the node of each task of the job, by task; () where that
    is unknown.
    """
    alive = [view for view in views if not view.ended]
    overdue = [view for view in alive if view.overdue]
    if not overdue:
        return None
    stopped = [view for view in overdue if view.state == STOPPED]
    front = max(view.step for view in alive)
    left_behind = [view for view in overdue if front - view.step >= _STEPS_BEHIND]
    # Some ranks are late and others are not: those others may still be on their way to the same collective.
    if len(overdue) < len(alive) and not stopped and not left_behind:
        return None
    # Whoever started the ranks notices one that is gone, unless it cannot: then the others may wait for it in vain.
    gone = [view for view in views if view.ended and view.phase is not Phase.END]
    return Hang(tuple(stopped or gone or left_behind or list_absent(views, hosts) or _stand_out(alive)), len(overdue))


def list_absent(views: Sequence[RankView], hosts: Sequence[str]) -> list[RankView]:
    """Return a view of each task that has not been seen, while all others still start and so may wait for it.

    It may be stuck before its first entry, for example in an import from a file system that does not answer. Once ranks
    have met, those without an entry are not stuck: they are in a container that shares no memory with the watcher.
    """
    if any(view.phase is not Phase.START for view in views):
        return []
    seen, silent = {view.task for view in views}, max((view.silent for view in views), default=0.0)
    deadline = max((view.deadline for view in views), default=0.0)
    absent = [(task, host) for task, host in enumerate(hosts) if task not in seen]
    return [
        RankView(task=task, phase=Phase.START, step=0, silent=silent, deadline=deadline, state=NOT_BEGUN, host=host)
        for task, host in absent
    ]


def _stand_out(alive: Sequence[RankView]) -> list[RankView]:
    """Return the ranks in a system call that does not return, else those at the lowest step; [] if none differs."""
    for chosen in (
        # From the strongest hint to the weakest. A hint that fits all ranks names nobody.
        [view for view in alive if view.state == WAITS_FOR_DISK],
        [view for view in alive if view.step == min(other.step for other in alive)],
        [view for view in alive if view.phase not in (Phase.STEP, Phase.FIRST_STEP)],
    ):
        if 0 < len(chosen) < len(alive):
            return chosen
    return list(alive) if len(alive) == 1 else []
