"""Points on this machine: a few at a time, each with its own processors and GPUs, until all have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hpc_train.errors import EXIT_DONE, EXIT_REQUEUE
from hpc_train.launch.failures import explain
from hpc_train.launch.local import gpus_here, start_pool
from hpc_train.launch.share import SHARE, gpu_share, share_of
from hpc_train.launch.state.attempts import mark_result
from hpc_train.launch.sweep import ledger
from hpc_train.launch.sweep.begin import enter
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder
from hpc_train.launch.train import finished
from hpc_train.launch.watch import KILLED
from hpc_train.runtime.alive import machine, start_of
from hpc_train.runtime.stop import StopRequest
from hpc_train.terminal import one_line
from hpc_train.training.folder import RunFolder, new_attempt
from hpc_train.training.warning_files import NewWarnings

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Room:
    """What this machine has for points."""

    slots: int
    """Points at a time."""
    cores: int
    gpus: int

    def threads(self, point: FrozenPoint) -> int:
        """Of one rank."""
        return _launch(point, "threads") or max(1, self.cores // self.slots // point.spec.ranks)

    def environment(self, slot: int, point: FrozenPoint) -> dict[str, str]:
        """What tells the ranks of a point which part of this machine is theirs; of a single one, all of it is."""
        if self.slots == 1:
            return {}
        return {SHARE: share_of(slot, self.slots), **gpu_share(slot, point.spec.ranks, os.environ, self.gpus)}


def room_for(points: Sequence[FrozenPoint]) -> Room:
    """launch.parallel_points, else as many as have a core for every thread, and a GPU for every rank where there are
    GPUs.
    """
    cores, gpus = len(os.sched_getaffinity(0)), gpus_here()
    ranks = max(point.spec.ranks for point in points)
    threads = max(_launch(point, "threads") or 1 for point in points)
    fitting = gpus // ranks if gpus else cores // (ranks * threads)
    return Room(min(_launch(points[0], "parallel_points") or max(1, fitting), len(points)), cores, gpus)


def _launch(point: FrozenPoint, name: str) -> int | None:
    value: int | None = point.spec.config["launch"][name]
    return value


def run_points(folder: SweepFolder, points: Sequence[FrozenPoint], stop: StopRequest) -> int:
    """Run these points; returns the exit code: 0 if all are done, 75 if they were stopped and have saved.

    The first Ctrl-C, and the first stop signal, are passed on to all that run, and no other one begins. A second Ctrl-C
    kills them.
    """
    own = os.getpid()
    mine = {"process": own, "started": start_of(own) or "", "machine": machine()}
    ledger.append(folder.ledger, "local", points=[point.id for point in points], **mine)
    pool = _Pool(folder, room_for(points), deque(points), stop)
    try:
        pool.run()
    except KeyboardInterrupt:
        pool.kill()
        _say("killed; what was not saved is lost")
        return KILLED
    return _verdict(pool, len(points))


def _verdict(pool: _Pool, count: int) -> int:
    again = f"`hpc-train resume {pool.folder.path}`"
    if pool.failed:
        _say(f"{len(pool.failed)} of {count} points failed; {again} runs them again")
        return 1
    if pool.done < count:
        _say(f"stopped: {pool.done} of {count} points are done; {again} goes on")
        return EXIT_REQUEUE
    return EXIT_DONE


@dataclass
class _Running:
    """A point under way."""

    point: FrozenPoint
    run: RunFolder
    attempt: int
    process: subprocess.Popen[bytes]
    warnings: NewWarnings

    def show_warnings(self) -> None:
        """Print what its ranks have warned of since the last call."""
        for warning in self.warnings.read():
            _say(f"{self.point.id}: {warning}")


@dataclass
class _Pool:
    """The points and where they are at."""

    folder: SweepFolder
    room: Room
    waiting: deque[FrozenPoint]
    stop: StopRequest
    running: dict[int, _Running] = field(default_factory=dict)
    """By slot."""
    done: int = 0
    failed: list[str] = field(default_factory=list)

    def run(self) -> None:
        told = False
        while self.running or self.waiting:
            if self.stop.requested and not told:
                told = True
                self._ask_to_stop()
            self._start()
            for slot, it in list(self.running.items()):
                ended = it.process.poll() is not None  # before reading, so that its last words are read
                it.show_warnings()
                if ended:
                    del self.running[slot]
                    self._ended(it)
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        for it in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(it.process.pid, signal.SIGKILL)  # every controller began a session of its own
            it.process.wait()
            mark_result(it.run.logs(it.attempt), KILLED)

    def _ask_to_stop(self) -> None:
        self.waiting.clear()
        if self.running:
            _say(f"{self.stop.signal_name}: asking {len(self.running)} points to save and stop")
        for it in self.running.values():
            it.process.send_signal(signal.SIGUSR2)

    def _start(self) -> None:
        for slot in range(self.room.slots):
            while self.waiting and slot not in self.running and not self.stop.requested:
                self._begin(slot, self.waiting.popleft())

    def _begin(self, slot: int, point: FrozenPoint) -> None:
        enter(self.folder, point)
        run = point.spec.folder()
        if finished(point.spec.run_config(), run):
            self._tell_done(point)
            return
        attempt = new_attempt(run)
        job = start_pool(run, attempt, point.spec.ranks, self.room.threads(point), self.room.environment(slot, point))
        assert job._process is not None
        self.running[slot] = _Running(point, run, attempt, job._process, NewWarnings(run.logs(attempt)))

    def _ended(self, it: _Running) -> None:
        code = it.process.returncode
        code = 128 - code if code < 0 else code
        logs = it.run.logs(it.attempt)
        mark_result(logs, code)  # where the controller was killed it could not
        if code == EXIT_DONE:
            self._tell_done(it.point)
        elif code != EXIT_REQUEUE:
            self.failed.append(it.point.id)
            why = (explain(logs) or f"the ranks left no reason; see {logs}").strip().splitlines()
            _say(f"{it.point.id}: {why[0]}")

    def _tell_done(self, point: FrozenPoint) -> None:
        self.done += 1
        print(f"{point.id}: done ({self.done})", flush=True)


def _say(line: str) -> None:
    print(f"hpc-train: {one_line(line)}", file=sys.stderr, flush=True)
