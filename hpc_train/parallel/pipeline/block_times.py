"""Measured times of the blocks of a pipeline, kept in the run directory, from which a resumed run splits its stages."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from hpc_train.api import Model, World
from hpc_train.collectives import all_gather_values
from hpc_train.errors import UserError
from hpc_train.parallel.pipeline.stages import Costs
from hpc_train.parallel.support.pipeline import TIMED_STEPS
from hpc_train.regular_files import read_text

FIRST, LAST = 1, TIMED_STEPS
"""Steps that are measured, counted from 0, the last not included: the very first one also sets up."""
_BEFORE, _AFTER = "before", "after"


def times_file(run_dir: str) -> Path:
    """Where the times of a run are kept."""
    return Path(run_dir) / "stage_times.json"


def read_times(path: Path, blocks: list[str]) -> Costs | None:
    """What an earlier attempt has measured; None if there was none. Raises UserError for a damaged file."""
    if not path.exists():
        return None
    try:
        seconds = json.loads(read_text(path))
        return Costs(float(seconds[_BEFORE]), tuple(float(seconds[name]) for name in blocks), float(seconds[_AFTER]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"parallel.pipeline.resplit=true: {path} does not hold the times of this model's blocks; remove it"
        ) from error


class BlockTimes:
    """Seconds of the forward of each block of this rank, in a few steps of training; backward is taken to follow them.

    On a GPU every block waits for the device in these steps.
    """

    def __init__(self, parts: Mapping[int, nn.Module], last: int, world: World, file: Path) -> None:
        """parts: this rank's stages; last: the last stage of the model."""
        self._parts, self._last, self._world, self._file = parts, last, world, file
        self._step = 0
        self._started: dict[str, float] = {}
        self._seconds: dict[str, list[float]] = {}
        self._hooks: list[Any] = []

    def end_step(self) -> None:
        """At the end of each step, on every rank: begin, or gather what was measured and write it."""
        self._step += 1
        if self._step == FIRST:
            for stage, part in self._parts.items():
                assert isinstance(part, Model)
                self._watch(str(stage), part)
                for name, block in part.blocks().items():
                    self._watch(name, block)
        if self._step == LAST:
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
        """All stages' times, by the first rank of the job."""
        group = self._world.mesh["pp"].get_group()
        everybody = all_gather_values(self._mine(), group)
        if self._world.rank:
            return
        beside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        beside.write_text(json.dumps({name: seconds for mine in everybody for name, seconds in mine.items()}, indent=1))
        beside.replace(self._file)

    def _mine(self) -> dict[str, float]:
        """Medians; what a stage takes beside its blocks is the embedding in the first one, and the head in the last."""
        seconds = {name: median(values) for name, values in self._seconds.items()}
        for stage, part in self._parts.items():
            assert isinstance(part, Model)
            rest = max(0.0, seconds.pop(str(stage)) - sum(seconds[name] for name in part.blocks()))
            if stage in (0, self._last):
                seconds[_BEFORE if stage == 0 else _AFTER] = rest
        return seconds
