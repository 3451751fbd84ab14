"""Record a user's own training loop, so that `hpc-train report`, `top` and `status` work on it.

    with hpc_train.LoopRecorder("runs/mine", model=model, optimizer=optimizer, steps=1000) as recorder:
        for step in range(first, 1000):
            with recorder.step(step + 1, tokens=4096) as line:
                ...
                line["loss"] = loss.item()

The directory has what a run of `hpc-train train` has: metrics.jsonl, events.jsonl, rankmap.json, step records and the
markers of each attempt. Checkpoints go beside them, into its `checkpoints`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from hpc_train._torch.observation import make_device_clock
from hpc_train.checkpoint.checkpointer import describe_ranks
from hpc_train.checkpoint.optimizer_state import Optimizers
from hpc_train.checkpoint.wrapped_optimizers import unwrap_optimizers
from hpc_train.errors import EXIT_DONE, EXIT_FAILED, UserError
from hpc_train.interfaces import World
from hpc_train.launch.state.attempts import write_attempt_marker, write_result_marker
from hpc_train.near_names import suggest_names
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.heartbeat import Heartbeat, Phase, choose_step_phase, remove_entries
from hpc_train.resilience.ledger import GOODPUT, LedgerFile
from hpc_train.runtime.consensus import Consensus
from hpc_train.runtime.identity import ProcessIdentity, identify_process, make_single_identity
from hpc_train.step_clock import HostClock, SilentClock, StepPart
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.run_records import MetricsFile, append_event
from hpc_train.training.run_directory import RunDirectory, check_owner

_CONSENSUS = Consensus()
PHASES = {"load": Phase.LOAD, "evaluate": Phase.EVALUATE, "save": Phase.SAVE}


@dataclass
class _Parts:
    """The part of an engine's interface that the step recorder reads."""

    parts: list[nn.Module]


class LoopRecorder:
    """Writes the records of one attempt of a loop. Every rank enters, makes the same steps, and leaves it."""

    def __init__(
        self,
        directory: str | Path,
        *,
        model: nn.Module,
        steps: int,
        optimizer: Optimizers | None = None,
        world: World | None = None,
        first_step: int = 0,
        compiled: bool = False,
    ) -> None:
        """directory: of this run, on a file system that all ranks see. steps: of the whole run.

        optimizer: whose step is timed apart; any that a Checkpointer takes. first_step: number of updates made before,
        from which the loop continues; later lines of metrics.jsonl are dropped. compiled: torch.compile has traced the
        model, so waits in it are not told apart.
        """
        path = Path(directory).expanduser().absolute()
        self._directory = RunDirectory(path, path / "checkpoints")
        self._model, self._steps, self._compiled = model, steps, compiled
        self._optimizers, self._groups = ([], []) if optimizer is None else unwrap_optimizers(optimizer)
        world = world or describe_ranks()
        if isinstance(world.clock, SilentClock):
            on_gpu = next(model.parameters()).device.type == "cuda"
            world = replace(world, clock=make_device_clock() if on_gpu else HostClock())
        self._world = world
        rank, size = self._world.rank, self._world.size
        # Ranks that no launcher started (a pool, a debugger) are tasks of one node, each with a heartbeat of its own.
        single = replace(make_single_identity(), process=rank, processes=size, local=rank)
        self._identity = identify_process(os.environ) or single
        self._first_step, self._made, self._last = first_step, 0, first_step
        self._undo: list[Callable[[], None]] = []
        self._attempt = 0

    def __enter__(self) -> Self:
        """Begin an attempt. Raises UserError, on all ranks, if the directory is another's or cannot be written."""
        self._attempt = _CONSENSUS.run_on_rank_0(self._world, self._begin_attempt)
        logs = self._directory.logs(self._attempt)
        self._heartbeat = Heartbeat(logs, self._identity.process)
        ranks = _CONSENSUS.gather_and_decide(self._world, self._describe_rank, lambda ranks: ranks)
        self._metrics: MetricsFile | None = None
        self._ledger: LedgerFile | None = None
        if self._world.rank == 0:
            self._write_rank_map(ranks)
            nodes = len({entry["node"] for entry in ranks})
            self._ledger = LedgerFile(self._directory.path / GOODPUT, self._attempt, nodes)
            self._metrics = MetricsFile(self._directory.metrics, self._first_step)
        file = self._directory.step_records(self._attempt, self._identity.node)
        self._recorder = StepRecorder(
            _Parts([self._model]),  # type: ignore[arg-type]  # it asks an engine for its parts alone
            self._world,
            self._heartbeat,
            file,
            self._compiled,
        )
        self._watch_parts()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the attempt, done or failed, with the exit code of a SystemExit."""
        for undo in self._undo:
            undo()
        self._heartbeat.enter(Phase.END, self._last)
        self._recorder.close()
        if self._ledger is not None:
            self._ledger.write(self._heartbeat, self._last, ended=True)
        if self._metrics is not None:
            self._metrics.close()
            self._end_attempt(kind, error)
        if self._identity.local == 0:
            remove_entries(self._directory.logs(self._attempt))

    @contextmanager
    def step(self, step: int, *, tokens: int = 0) -> Iterator[dict[str, Any]]:
        """Record what runs inside as step `step`, counted from 1. tokens: of the whole job in this step.

        Yields the line of metrics.jsonl, to which rank 0 may add `loss`, `grad_norm`, `lr`, `validation_loss`.
        """
        lr = self._groups[0].get("lr") if self._groups else None
        line: dict[str, Any] = {"step": step, "loss": None, "grad_norm": None, "lr": float(lr or 0.0)}
        self._recorder.begin()
        started = time.perf_counter()
        self._heartbeat.enter(Phase.DATA, step - 1)
        data_before = self._heartbeat.seconds().get(Phase.DATA, 0.0)
        yield line
        seconds = time.perf_counter() - started
        self._recorder.end(step, tokens, 1)
        self._heartbeat.enter(Phase.STEP, step)
        self._made, self._last = self._made + 1, step
        if self._metrics is not None:
            line |= {
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "step_seconds": seconds,
                "data_seconds": self._heartbeat.seconds().get(Phase.DATA, 0.0) - data_before,
                "mfu": None,
            }
            self._metrics.write(line)
        if self._ledger is not None:
            self._ledger.write(self._heartbeat, step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `load`, `evaluate` or `save`."""
        if name not in PHASES:
            raise UserError(f"LoopRecorder: no phase {name!r}; {suggest_names(name, PHASES)}")
        before = self._heartbeat.phase
        self._heartbeat.enter(PHASES[name], self._last)
        try:
            yield
        finally:
            self._heartbeat.enter(before, self._last)

    def _watch_parts(self) -> None:
        """Mark where the wait for data ends and where the optimizer begins and ends."""
        clock = self._world.clock

        def begin_forward(*_: Any) -> None:
            if self._heartbeat.phase == Phase.DATA:
                self._heartbeat.enter(choose_step_phase(self._made), self._last)

        self._undo.append(self._model.register_forward_pre_hook(begin_forward, prepend=True).remove)
        for optimizer in self._optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: clock.enter(StepPart.UPDATE))
            after = optimizer.register_step_post_hook(lambda *_: clock.enter(StepPart.REST))
            self._undo += [before.remove, after.remove]

    def _begin_attempt(self) -> int:
        """Make the directories of the next attempt on rank 0 and say who runs it; returns its number."""
        run, logs = self._directory.path, self._directory.path / "logs"
        check_owner(run)
        try:
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
            logs.mkdir(mode=0o700, exist_ok=True)
            numbers = [int(entry.name) for entry in logs.iterdir() if entry.name.isdecimal()]
            attempt = max(numbers, default=-1) + 1
            self._directory.logs(attempt).mkdir(mode=0o700)
            job = os.environ.get("SLURM_JOB_ID")
            write_attempt_marker(self._directory.logs(attempt), self._identity.launcher, os.getpid(), job)
        except OSError as error:
            raise UserError(f"{run}: {error.strerror}; choose a directory that can be written") from error
        kind = "resume" if self._first_step else "start"
        world = self._world.size
        append_event(self._directory.events, kind, attempt, step=self._first_step, steps=self._steps, world=world)
        return attempt

    def _describe_rank(self) -> dict[str, Any]:
        return _describe_location(self._world.rank, self._identity)

    def _write_rank_map(self, ranks: list[dict[str, Any]]) -> None:
        content = {"reason": "launcher order", "mesh": {}, "ranks": ranks}
        logs = self._directory.logs(self._attempt)
        for path in (self._directory.rank_map, logs / self._directory.rank_map.name):
            write_private_file(path, json.dumps(content, indent=1) + "\n")

    def _end_attempt(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        """Write how the attempt ended; rank 0 only."""
        code = EXIT_DONE if kind is None else EXIT_FAILED
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else EXIT_DONE if error.code is None else EXIT_FAILED
        if code == EXIT_DONE and self._last >= self._steps:
            self._directory.done_marker(self._attempt).touch()
            append_event(self._directory.events, "end", self._attempt, step=self._last)
        why = f"{kind.__name__}: {' '.join(str(error).split())}" if kind is not None and code == EXIT_FAILED else ""
        write_result_marker(self._directory.logs(self._attempt), code, why)


def _describe_location(rank: int, identity: ProcessIdentity) -> dict[str, Any]:
    return {
        "rank": rank,
        "process": identity.process,
        "host": identity.host,
        "node": identity.node,
        "local_rank": identity.local,
    }
