"""Mark the parts of each step, and the computations of pipeline stages, as NVTX ranges for Nsight Systems.

They are visible only to a profiler that runs around the rank: `launch.wrap=[nsys,profile,"--trace=cuda,nvtx"]`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, World
from hpc_train.step_clock import StepPart


class Ranges(Protocol):
    """The part of torch.cuda.nvtx that is used here."""

    def range_push(self, msg: str) -> object:
        """Begin a range inside the current one."""

    def range_pop(self) -> object:
        """End the range that began last."""


class PartRanges:
    """Keeps one range open: that of the part of the step which began last."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._open = ranges, False

    def enter(self, part: StepPart) -> None:
        """End the range of the part before, and begin this one's; what lies between two steps has none."""
        if self._open:
            self._ranges.range_pop()
        self._open = part is not StepPart.REST
        if self._open:
            self._ranges.range_push(part.name.lower())


def mark_parts(engine: Engine, world: World) -> None:
    """Mark what this rank does from here on. Raises UserError without an NVIDIA GPU, where nothing could see it."""
    if world.device.type != "cuda" or torch.version.cuda is None:
        raise UserError("profile.nvtx=true: NVTX ranges are for NVIDIA GPUs, and this rank has none; leave it out")
    world.clock.observers.append(PartRanges(torch.cuda.nvtx).enter)
    timeline = getattr(engine, "timeline", None)
    if timeline is not None:
        timeline.mark = torch.cuda.nvtx.range
