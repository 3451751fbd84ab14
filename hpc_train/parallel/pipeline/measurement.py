"""Measure a pipeline: a timeline of every computation, and the time of each block.

parallel.pipeline.timeline records when each rank did what and writes a trace that a browser shows; from it comes the
bubble. parallel.pipeline.resplit times the forward of each block in a few steps and keeps the times in the run
directory, from which a resumed run splits its stages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from hpc_train.errors import UserError
from hpc_train.interfaces import Model, World
from hpc_train.messages import all_gather_values
from hpc_train.parallel.rules.pipeline import TIMED_STEPS, TIMELINE_STEPS
from hpc_train.regular_files import read_text, write_private_file
from hpc_train.traffic.stages import BlockCosts


@dataclass(frozen=True)
class TimelineEvent:
    """A computation of one stage."""

    start: float
    """Seconds of a clock that the ranks of a node share."""
    end: float
    kind: str
    """F forward, B backward, I that of the stage's input alone, W that of its weights, L loss."""
    stage: int
    micro: int
    step: int


@dataclass
class Timeline:
    """This rank's events of training. On a GPU each event waits for the device, so that its time is exact."""

    device: torch.device
    enabled: bool = False
    file: Path | None = None
    """File to write the events to after the last recorded step."""
    rank: int = 0
    events: list[TimelineEvent] = field(default_factory=list)
    step: int = 0
    mark: Callable[[str], AbstractContextManager[object]] | None = None
    """Marks each computation, by its name, for a profiler around the process."""

    @contextmanager
    def record(self, kind: str, stage: int, micro: int) -> Iterator[None]:
        """Record the time of the code inside."""
        with nullcontext() if self.mark is None else self.mark(f"{kind}{micro} of stage {stage}"):
            if not self.enabled or not torch.is_grad_enabled():
                yield
                return
            start = self._now()
            yield
            self.events.append(TimelineEvent(start, self._now(), kind, stage, micro, self.step))

    def end_step(self) -> None:
        """End a step; after the last recorded one, write the file."""
        self.step += 1
        if not self.enabled or self.step < TIMELINE_STEPS:
            return
        self.enabled = False
        if self.file is not None:
            self.file.parent.mkdir(exist_ok=True, parents=True)
            self.file.write_text(format_chrome_trace(self.events, self.rank))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()


def measure_bubble(ranks: Sequence[Sequence[TimelineEvent]]) -> list[float]:
    """Return the idle share of each rank between the first start and the last end of a step; steps are averaged.

    ranks: the events of each rank of one pipeline, by the same clock. In theory (p - 1) / (n + p - 1) for GPipe and
    1F1B over p ranks with n micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.1).
    """
    steps = sorted({event.step for events in ranks for event in events})
    idle = [_sum_idle_time([[e for e in events if e.step == step] for events in ranks]) for step in steps]
    return [sum(shares) / len(steps) for shares in zip(*idle, strict=True)]


def _sum_idle_time(ranks: Sequence[Sequence[TimelineEvent]]) -> list[float]:
    begin = min(event.start for events in ranks for event in events)
    end = max(event.end for events in ranks for event in events)
    return [1 - sum(event.end - event.start for event in events) / (end - begin) for events in ranks]


def format_chrome_trace(events: Iterable[TimelineEvent], rank: int) -> str:
    """Format events for chrome://tracing and Perfetto (Trace Event Format): a row for each stage, in microseconds."""
    rows = [
        {
            "name": f"{event.kind}{event.micro}",
            "cat": event.kind,
            "ph": "X",
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "pid": rank,
            "tid": event.stage,
            "args": {"stage": event.stage, "micro_batch": event.micro, "step": event.step},
        }
        for event in events
    ]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"})


FIRST_TIMED_STEP, LAST_TIMED_STEP = 1, TIMED_STEPS
"""First measured step and one past the last, from 0; the first step of all also sets up, and is not measured."""
_BEFORE, _AFTER = "before", "after"


def get_times_path(run_dir: str) -> Path:
    """Return the file with the block times of a run."""
    return Path(run_dir) / "stage_times.json"


def read_block_times(path: Path, blocks: list[str]) -> BlockCosts | None:
    """Read the block times of an earlier attempt; None if there are none. Raises UserError for a damaged file."""
    if not path.exists():
        return None
    try:
        seconds = json.loads(read_text(path))
        return BlockCosts(
            float(seconds[_BEFORE]), tuple(float(seconds[name]) for name in blocks), float(seconds[_AFTER])
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"parallel.pipeline.resplit=true: {path} does not hold the times of this model's blocks; remove it"
        ) from error


class BlockTimes:
    """Times the forward of each block of this rank in a few training steps; backward is taken to be proportional.

    On a GPU every block waits for the device in these steps.
    """

    def __init__(self, parts: Mapping[int, nn.Module], last: int, world: World, file: Path) -> None:
        """parts: this rank's stages. last: number of the last stage of the model."""
        self._parts, self._last, self._world, self._file = parts, last, world, file
        self._step = 0
        self._started: dict[str, float] = {}
        self._seconds: dict[str, list[float]] = {}
        self._hooks: list[Any] = []

    def end_step(self) -> None:
        """End a step: start measuring, or gather the times and write them. A collective."""
        self._step += 1
        if self._step == FIRST_TIMED_STEP:
            for stage, part in self._parts.items():
                assert isinstance(part, Model)
                self._watch(str(stage), part)
                for name, block in part.blocks().items():
                    self._watch(name, block)
        if self._step == LAST_TIMED_STEP:
            for hook in self._hooks:
                hook.remove()
            self._write()

    def _watch(self, name: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            self._started[name] = self._now()

        def end(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._seconds.setdefault(name, []).append(self._now() - self._started[name])

        self._hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def _write(self) -> None:
        """Gather the times of all stages; the first rank of the job writes them. A collective."""
        group = self._world.mesh["pp"].get_group()
        times_of_ranks = all_gather_values(self._compute_median_times(), group)
        if self._world.rank:
            return
        seconds_of_blocks = {name: seconds for times in times_of_ranks for name, seconds in times.items()}
        write_private_file(self._file, json.dumps(seconds_of_blocks, indent=1))

    def _compute_median_times(self) -> dict[str, float]:
        """Return median times; the rest of the first stage is the embedding, that of the last stage the head."""
        seconds = {name: median(values) for name, values in self._seconds.items()}
        for stage, part in self._parts.items():
            assert isinstance(part, Model)
            remainder = max(0.0, seconds.pop(str(stage)) - sum(seconds[name] for name in part.blocks()))
            if stage in (0, self._last):
                seconds[_BEFORE if stage == 0 else _AFTER] = remainder
        return seconds
