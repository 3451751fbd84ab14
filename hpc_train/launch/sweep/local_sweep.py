"""`hpc-train train -m`: the points of a sweep on this machine, a few at a time, each with its own CPUs and GPUs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpc_train import __version__
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.freeze import describe_finished_run
from hpc_train.launch.local.node_sharing import (
    SHARE_VARIABLE,
    format_share,
    list_visible_gpus,
    make_gpu_share_environment,
)
from hpc_train.launch.local.process_pool import ProcessPool
from hpc_train.launch.local.rank_pool import EXIT_KILLED, count_local_ranks, start_ranks
from hpc_train.launch.recovery.failures import explain_failure
from hpc_train.launch.recovery.restarting import decide_on_this_machine
from hpc_train.launch.state.attempts import write_result_marker
from hpc_train.launch.submit import transact_submission
from hpc_train.launch.sweep import sweep_directory
from hpc_train.launch.sweep.compose_sweep import Composer
from hpc_train.launch.sweep.point_entrypoint import make_run_directory
from hpc_train.launch.sweep.points import PointFreezer, freeze_points, read_grid, report_plans
from hpc_train.launch.sweep.submit_sweep import choose_sweep_directory, compose_first, write_sweep_directory
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory
from hpc_train.parallel.rules.parameter_server import find_mpi_setting
from hpc_train.processes import identify_machine, read_start_time
from hpc_train.resilience.restart import Action
from hpc_train.runtime.identity import identify_process
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.terminal import one_line
from hpc_train.training.records.warning_files import NewWarnings
from hpc_train.training.run_directory import RunDirectory, make_attempt


def train_sweep(overrides: Sequence[str], config_dir: str | None, stop: StopRequest, output: CommandOutput) -> int:
    """Run all points of a sweep here; returns the exit code, 0 only if all are done."""
    if identify_process(os.environ) is not None:
        raise UserError("train -m: starts ranks of its own; call it without srun, torchrun or mpirun around it")
    grid = read_grid(overrides, config_dir)
    composer = Composer(frozenset(grid.keys), config_dir)
    first = compose_first(grid, composer)
    if first.launch.kind != "local":
        raise UserError(f"launch={first.launch.kind}: `hpc-train train` runs here; use `hpc-train submit -m` for Slurm")
    if first.launch.points_per_job > 1:
        raise UserError("launch.points_per_job: is for jobs of Slurm; here it is launch.parallel_points")
    folder = choose_sweep_directory(first)
    freezer = PointFreezer(folder, count_local_ranks, _count_ranks_of_point)
    frozen = freeze_points(grid, composer, freezer)
    report_plans(freezer, frozen, output.report)
    command = {"overrides": list(overrides), "swept": list(grid.keys)}
    with transact_submission(folder.path):
        write_sweep_directory(folder, frozen.points)
        sweep_directory.append_ledger_event(
            folder.ledger, "sweep", points=len(frozen.points), version=__version__, **command
        )
    output.print_result(f"{len(frozen.points)} points, sweep directory {folder.path}")
    return run_points(folder, frozen.points, stop, output)


def _count_ranks_of_point(config: RunConfig) -> int:
    """Return the ranks of a point. Raises UserError for one whose ranks only mpirun can start."""
    if mpi := find_mpi_setting(config):
        raise UserError(f"{mpi}: MPI must start the ranks; run these points one by one with mpirun")
    return count_local_ranks(config)


_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class MachineShare:
    """The resources of this machine, and the number of points that share them."""

    slots: int
    """Points at a time."""
    cores: int
    gpus: Sequence[str]

    def threads_per_rank(self, point: FrozenPoint) -> int:
        """Return the CPU threads of one rank."""
        return _read_launch_setting(point, "threads") or max(1, self.cores // self.slots // point.spec.ranks)

    def environment(self, slot: int, point: FrozenPoint) -> dict[str, str]:
        """Return the variables that tell the ranks their part of this machine; {} where one point has all of it."""
        if self.slots == 1:
            return {}
        return {
            SHARE_VARIABLE: format_share(slot, self.slots),
            **make_gpu_share_environment(slot, point.spec.ranks, self.gpus, os.environ),
        }


def plan_slots(points: Sequence[FrozenPoint]) -> MachineShare:
    """Share this machine out: launch.parallel_points slots, or as many as its cores or GPUs are enough for."""
    cores, gpus = len(os.sched_getaffinity(0)), list_visible_gpus()
    ranks = max(point.spec.ranks for point in points)
    threads = max(_read_launch_setting(point, "threads") or 1 for point in points)
    fitting = len(gpus) // ranks if gpus else cores // (ranks * threads)
    return MachineShare(
        min(_read_launch_setting(points[0], "parallel_points") or max(1, fitting), len(points)), cores, gpus
    )


def _read_launch_setting(point: FrozenPoint, name: str) -> int | None:
    value: int | None = point.spec.config["launch"][name]
    return value


def run_points(folder: SweepDirectory, points: Sequence[FrozenPoint], stop: StopRequest, output: CommandOutput) -> int:
    """Run these points, and return the exit code: 0 if all are done, 75 if they were stopped and have saved.

    The first Ctrl-C or stop signal is passed on to all points that run, and no other point begins. A second Ctrl-C
    kills them.
    """
    process = os.getpid()
    identity = {"process": process, "started": read_start_time(process) or "", "machine": identify_machine()}
    sweep_directory.append_ledger_event(folder.ledger, "local", points=[point.id for point in points], **identity)
    runner = _PointRunner(folder, plan_slots(points), stop, output)
    try:
        runner.run(points)
    except KeyboardInterrupt:
        runner.kill()
        output.report("killed; what was not saved is lost")
        return EXIT_KILLED
    count, resume = len(points), f"`hpc-train resume {one_line(shlex.quote(str(folder.path)))}`"
    if runner.failed:
        output.report(f"{len(runner.failed)} of {count} points failed; {resume} runs them again")
        return EXIT_FAILED
    if runner.done < count:
        output.report(f"stopped: {runner.done} of {count} points are done; {resume} goes on")
        return EXIT_REQUEUE
    return EXIT_DONE


@dataclass
class _RunningPoint:
    """The ranks of one attempt at a point."""

    point: FrozenPoint
    run: RunDirectory
    attempt: int
    process: subprocess.Popen[bytes]
    warnings: NewWarnings

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # every controller began a session of its own
        self.process.wait()
        write_result_marker(self.run.logs(self.attempt), EXIT_KILLED)


class _PointRunner:
    """Runs points through the pool, and counts how they end."""

    def __init__(self, folder: SweepDirectory, share: MachineShare, stop: StopRequest, output: CommandOutput) -> None:
        self.done = 0
        self.failed: list[str] = []
        self._folder, self._share, self._stop, self._output = folder, share, stop, output
        self._pool: ProcessPool[FrozenPoint, _RunningPoint] = ProcessPool(share.slots, self._start_point)
        self._first_attempts: dict[str, int] = {}

    def run(self, points: Sequence[FrozenPoint]) -> None:
        """Run these points until all have ended; after a stop request, those that run by then."""
        pool, asked_to_stop = self._pool, False
        pool.waiting.extend(points)
        while pool.running or pool.waiting:
            if self._stop.requested and not asked_to_stop:
                asked_to_stop = True
                self._ask_to_stop()
            pool.start_waiting()
            ended = pool.remove_ended()
            # Those that ended, too: their last warnings have been written by now.
            for running in [*pool.running.values(), *ended]:
                for warning in running.warnings.read():
                    self._report(running.point, str(warning))
            for running in ended:
                self._finish_point(running)
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """End the ranks of all points at once."""
        for running in self._pool.running.values():
            running.kill()

    def _ask_to_stop(self) -> None:
        self._pool.waiting.clear()
        running = list(self._pool.running.values())
        if running:
            self._output.report(f"{self._stop.signal_name}: asking {len(running)} points to save and stop")
        for ranks in running:
            ranks.process.send_signal(signal.SIGUSR2)

    def _start_point(self, point: FrozenPoint, slot: int) -> _RunningPoint | None:
        """Start the ranks of a point; None if it is done already, or if the sweep is to stop."""
        if self._stop.requested:
            return None
        make_run_directory(self._folder, point)
        run = point.spec.folder()
        if describe_finished_run(point.spec.run_config(), run):
            self._count_done(point)
            return None
        attempt = make_attempt(run)
        self._first_attempts.setdefault(point.id, attempt)
        threads, environment = self._share.threads_per_rank(point), self._share.environment(slot, point)
        job = start_ranks(run, attempt, point.spec.ranks, threads, environment, point.spec.run_config().launch.wrap)
        assert job._process is not None
        return _RunningPoint(point, run, attempt, job._process, NewWarnings(run.logs(attempt)))

    def _finish_point(self, running: _RunningPoint) -> None:
        code = running.process.returncode
        code = 128 - code if code < 0 else code
        logs = running.run.logs(running.attempt)
        write_result_marker(logs, code)  # a controller that was killed has not written it
        if code == EXIT_DONE:
            self._count_done(running.point)
        elif code != EXIT_REQUEUE:
            why = (explain_failure(logs) or f"the ranks left no reason; see {logs}").strip().splitlines()
            self._report(running.point, why[0])
            if not self._start_again(running, code):
                self.failed.append(running.point.id)

    def _start_again(self, running: _RunningPoint, code: int) -> bool:
        """Queue a point again, before all others, if its fault may not recur; returns whether it was queued."""
        if self._stop.requested:
            return False
        config, first = running.point.spec.run_config(), self._first_attempts[running.point.id]
        decision = decide_on_this_machine(config, running.run, running.attempt, code, first)
        if decision.action is not Action.END:
            self._report(running.point, decision.why)
        if decision.goes_on:
            self._pool.waiting.appendleft(running.point)
        return decision.goes_on

    def _count_done(self, point: FrozenPoint) -> None:
        self.done += 1
        self._output.print_result(f"{point.id}: done ({self.done})")

    def _report(self, point: FrozenPoint, text: str) -> None:
        self._output.report(f"{point.id}: {one_line(text)}")
