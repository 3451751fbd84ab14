"""When each rank of a pipeline did what: recorded, written as a trace that a browser shows, and its bubble."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpc_train.parallel.support.pipeline import TIMELINE_STEPS


@dataclass(frozen=True)
class Event:
    """One computation of one stage."""

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
    """This rank's events of training. On a GPU each of them waits for the device, so that it has its real time."""

    device: torch.device
    on: bool = False
    file: Path | None = None
    """Where they are written when the last step that is recorded has ended."""
    rank: int = 0
    events: list[Event] = field(default_factory=list)
    step: int = 0

    @contextmanager
    def record(self, kind: str, stage: int, micro: int) -> Iterator[None]:
        """Of what is done inside."""
        if not self.on or not torch.is_grad_enabled():
            yield
            return
        start = self._now()
        yield
        self.events.append(Event(start, self._now(), kind, stage, micro, self.step))

    def end_step(self) -> None:
        """What follows belongs to the next step."""
        self.step += 1
        if not self.on or self.step < TIMELINE_STEPS:
            return
        self.on = False
        if self.file is not None:
            self.file.parent.mkdir(exist_ok=True, parents=True)
            self.file.write_text(chrome_trace(self.events, self.rank))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()


def bubble(ranks: Sequence[Sequence[Event]]) -> list[float]:
    """Idle share of each rank between the first start and the last end on any rank of one step; several are averaged.

    ranks: the events of each rank of one pipeline, by the same clock. In theory (p - 1) / (n + p - 1) for GPipe and
    1F1B over p ranks with n micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.1).
    """
    steps = sorted({event.step for events in ranks for event in events})
    idle = [_idle([[e for e in events if e.step == step] for events in ranks]) for step in steps]
    return [sum(shares) / len(steps) for shares in zip(*idle, strict=True)]


def _idle(ranks: Sequence[Sequence[Event]]) -> list[float]:
    begin = min(event.start for events in ranks for event in events)
    end = max(event.end for events in ranks for event in events)
    return [1 - sum(event.end - event.start for event in events) / (end - begin) for events in ranks]


def chrome_trace(events: Iterable[Event], rank: int) -> str:
    """The Trace Event Format that chrome://tracing and Perfetto open: a row for each stage, times in microseconds."""
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
