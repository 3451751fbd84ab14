"""Trace steps of this rank with torch.profiler, when the settings or `hpc-train profile RUN` ask for it.

A trace has the operators, ranges for the step, its phases and the modules of the model, and on a GPU its kernels. While
no step is traced, this only reads the clock in each step and checks for a request from time to time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from hpc_train._torch.observation import record_memory_history, write_memory_snapshot
from hpc_train.config.profile import ProfileConfig, parse_steps
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.step_clock import StepPart
from hpc_train.training.records.profile_files import (
    FOLDER,
    MODULE_PREFIX,
    PHASE_PREFIX,
    ProfileRequest,
    name_trace,
    read_request,
)
from hpc_train.training.records.recorder import watch_forward

log = logging.getLogger(__name__)
_PHASES = {
    StepPart.DATA: "data",
    StepPart.FORWARD: "forward",
    StepPart.BACKWARD: "backward",
    StepPart.CLIP: "gradient norm",
    StepPart.UPDATE: "update",
    StepPart.REST: "other",
}
_BETWEEN = "between steps"


class StepProfiler:
    """Traces the steps of one rank that are asked for."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        attempt: int,
        world: World,
        parts: list[nn.Module],
        step: int,
        report: Callable[[str], None],
    ) -> None:
        """run: the run directory. parts: of the model. step: updates made so far. report: prints a line."""
        settings = self._settings = config.profile
        self._run, self._attempt, self._world, self._report = run, attempt, world, report
        self._parts, self._recorder_marks_forwards = parts, config.train.record_steps
        # A hook inside a compiled module would make torch.compile compile it again.
        self._with_modules = settings.modules and not config.parallel.compile
        self._window: tuple[int, int] | None = None
        """First and last step of the next trace."""
        self._trace: Trace | None = None
        self._next_poll = time.monotonic() if settings.poll_seconds else float("inf")
        self._answered = _read_quietly(run)  # a request to an earlier attempt is not for this one
        if settings.steps is not None and world.rank in settings.ranks:
            first, last = parse_steps(settings.steps)
            if last > step:
                self._window = max(first, step + 1), last
            else:
                report(f"profile.steps={settings.steps}: no trace, since these steps were made before this attempt")

    def begin_step(self, step: int) -> None:
        """Note that a step begins. step: its number, counted from 1."""
        if self._trace is not None and step > self._trace.last:
            self._write(step - 1)
        if self._trace is not None:
            self._trace.begin_step()
        elif self._window is not None:
            self._start_if_due(step)
        elif time.monotonic() > self._next_poll:
            self._look_for_request(step)

    def end_step(self) -> None:
        """Note that the step's update is made; what follows is between steps."""
        if self._trace is not None:
            self._trace.enter_phase(_BETWEEN, marks=False)

    def close(self, step: int) -> None:
        """Write what has been traced. step: updates made so far."""
        if self._trace is not None:
            self._write(step)

    def _look_for_request(self, step: int) -> None:
        self._next_poll = time.monotonic() + self._settings.poll_seconds
        request = _read_quietly(self._run)
        if request is None or request == self._answered:
            return
        self._answered = request
        if self._world.rank in request.ranks:
            # Steps that are over by now cannot be traced: as many of the next ones take their place.
            delay = max(0, step - request.first)
            self._window = request.first + delay, request.last + delay
            self._start_if_due(step)

    def _start_if_due(self, step: int) -> None:
        assert self._window is not None
        first, last = self._window
        if step < first - 1:  # the step before is for warming up the profiler
            return
        self._window = None
        self._trace = Trace(self._settings, self._world, self._add_hooks(), step, first, last)

    def _add_hooks(self) -> ExitStack:
        undo = ExitStack()
        if not self._recorder_marks_forwards:
            for remove in watch_forward(self._parts, self._world.clock):
                undo.callback(remove)
        for part in self._parts if self._with_modules else []:
            for remove in mark_modules(part):
                undo.callback(remove)
        return undo

    def _write(self, last: int) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        trace.stop()
        if last < trace.first:
            return
        folder = self._run / FOLDER / str(self._attempt)
        path = folder / name_trace(self._world.rank, trace.first, last)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            trace.write(path)
        except (OSError, RuntimeError) as error:
            log.warning("%s: no trace: %s", path, error)
            return
        self._report(f"profile: steps {trace.first} to {last} of rank {self._world.rank}: {path}")


def _read_quietly(run: Path) -> ProfileRequest | None:
    """Return the request in a run directory; None if there is none, or it is damaged."""
    try:
        return read_request(run)
    except (OSError, ValueError, KeyError) as error:
        log.debug("%s: %s", run / FOLDER, error)
        return None


class Trace:
    """A trace that is being made, with the hooks and marks that it needs."""

    def __init__(
        self, settings: ProfileConfig, world: World, hooks: ExitStack, step: int, first: int, last: int
    ) -> None:
        """hooks: removes them. step: the number of the step that begins now, `first` or the one before."""
        self.first, self.last, self._world, self._hooks = first, last, world, hooks
        self._range: Any = None
        self._marks = False
        """Whether the clock's marks begin a phase: not in an evaluation."""
        self._memory = settings.memory_snapshot and world.device.type == "cuda"
        if settings.memory_snapshot and not self._memory:
            log.warning("profile.memory_snapshot: there are snapshots of GPUs only, and this rank has none")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.device.type == "cuda" else [])]
        self._profiler = profile(
            activities=activities,
            schedule=lambda number: ProfilerAction.WARMUP if number < first else ProfilerAction.RECORD,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
        )
        self._profiler.step_num = step if step < first else step - 1  # so that its steps have our numbers
        self._profiler.start()
        if self._memory:
            record_memory_history(True)
        if step == first:
            self.begin_step()

    def begin_step(self) -> None:
        """Begin the next step."""
        self._leave_phase()
        self._profiler.step()
        if self._enter_part not in self._world.clock.observers:
            self._world.clock.observers.append(self._enter_part)
        self.enter_phase(_PHASES[StepPart.DATA], marks=True)

    def enter_phase(self, name: str, marks: bool) -> None:
        """Begin a phase, and end the one before. marks: whether the clock's marks begin the next."""
        self._leave_phase()
        self._marks = marks
        self._range = record_function(PHASE_PREFIX + name)
        self._range.__enter__()

    def stop(self) -> None:
        """Trace no more, and leave the model as it was."""
        self._leave_phase()
        if self._enter_part in self._world.clock.observers:
            self._world.clock.observers.remove(self._enter_part)
        # Ends the last step: the time in which the hooks are removed, up to 80 ms on a busy machine, is not the step's.
        self._profiler.stop()
        self._hooks.close()

    def write(self, path: Path) -> None:
        """Write the trace, and on a GPU the snapshot of its memory. Raises OSError, RuntimeError."""
        temporary = path.with_name(f".{path.name}")  # of the same suffix: torch compresses by it
        self._profiler.add_metadata_json("hpc_train", json.dumps({"rank": self._world.rank, "first": self.first}))
        self._profiler.export_chrome_trace(str(temporary))
        if self._memory:
            write_memory_snapshot(path.with_name(path.name.replace(".pt.trace.json.gz", ".memory.pickle")))
            record_memory_history(False)
        temporary.replace(path)

    def _enter_part(self, part: StepPart) -> None:
        if self._marks:
            self.enter_phase(_PHASES[part], marks=True)

    def _leave_phase(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def mark_modules(part: nn.Module) -> Iterator[Callable[[], None]]:
    """Put a range around the forward of each module inside a part of the model; yields what removes the hooks."""
    for name, module in part.named_modules():
        name = name.removeprefix("module").removeprefix(".")  # what DistributedDataParallel puts before
        if not name:
            continue
        ranges: list[Any] = []

        def begin(module: nn.Module, inputs: Any, name: str = name, ranges: list[Any] = ranges) -> None:
            ranges.append(record_function(MODULE_PREFIX + name))
            ranges[-1].__enter__()

        def end(module: nn.Module, inputs: Any, output: Any, ranges: list[Any] = ranges) -> None:
            if ranges:
                ranges.pop().__exit__(None, None, None)

        # The end before other hooks: ranges have to lie inside one another.
        yield module.register_forward_pre_hook(begin).remove
        yield module.register_forward_hook(end, prepend=True).remove
