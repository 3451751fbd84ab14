"""Time checkpoints in a user's own training loop: hpc_train.Checkpointer and torch.distributed.checkpoint (DCP).

The model is sharded by fully_shard and has an AdamW state. Both sides take turns to save and load the same modules in
the same processes, each the way its documentation shows: DCP through get_state_dict and set_state_dict. DCP does not
synchronise its files by itself; here its writer does (sync_files), as ours does.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from hpc_train.bench.local_ranks import run_local_ranks
from hpc_train.checkpoint.checkpointer import Checkpointer
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.interfaces import World
from hpc_train.messages import all_gather_values
from hpc_train.runtime.identity import identify_process
from hpc_train.runtime.start import init
from hpc_train.timing import interleave_rounds

OPERATIONS = ("save", "stall", "load")
_LAYERS = 8


@dataclass(frozen=True)
class LoopCheckpointOptions:
    """Options of `bench loop-checkpoint`."""

    ranks: int
    mib: int
    """Parameters and optimizer state of all ranks together."""
    rounds: int
    directory: str | None
    """On the file system to be measured; None: the temporary directory."""


class _Side:
    """One way to save and load a model and an optimizer."""

    def __init__(self, name: str, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name, self.folder, self.model, self.optimizer = name, folder, model, optimizer

    def save(self) -> None:
        """Save; returns when everything is on the disk."""
        raise NotImplementedError

    def start(self) -> Callable[[], object]:
        """Start a save; returns when the model may change, with a function that waits for the end."""
        raise NotImplementedError

    def load(self) -> None:
        """Load what was saved last."""
        raise NotImplementedError


class _Ours(_Side):
    """hpc_train.Checkpointer."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        super().__init__("Checkpointer", folder, model, optimizer)
        self.checkpointer = Checkpointer(folder, world)

    def save(self) -> None:
        self.checkpointer.save(1, model=self.model, optimizer=self.optimizer)

    def start(self) -> Callable[[], object]:
        return self.checkpointer.save_async(1, model=self.model, optimizer=self.optimizer).result

    def load(self) -> None:
        self.checkpointer.load(1, model=self.model, optimizer=self.optimizer)


class _Dcp(_Side):
    """torch.distributed.checkpoint."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__("DCP", folder, model, optimizer)

    def _collect(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _make_writer(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.folder, sync_files=True)

    def save(self) -> None:
        dcp.save(self._collect(), storage_writer=self._make_writer())

    def start(self) -> Callable[[], object]:
        future = dcp.async_save(self._collect(), storage_writer=self._make_writer())
        assert isinstance(future, Future)
        return future.result

    def load(self) -> None:
        state = self._collect()
        dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def run_loop_checkpoint_command(options: LoopCheckpointOptions, as_json: bool) -> int:
    """Start the ranks, or measure as one of srun, torchrun or mpirun; rank 0 prints. Returns the exit code.

    Raises UserError for invalid numbers and for a missing directory.
    """
    for name, value in (("ranks", options.ranks), ("mib", options.mib), ("rounds", options.rounds)):
        if value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if options.directory is not None and not Path(options.directory).is_dir():
        raise UserError(f"--dir {options.directory}: no such directory")
    if identify_process(os.environ) is None:
        numbers = ["--ranks", str(options.ranks), "--mib", str(options.mib), "--rounds", str(options.rounds)]
        others = [*(["--dir", options.directory] if options.directory else []), *(["--json"] if as_json else [])]
        return run_local_ranks(["bench", "loop-checkpoint", *numbers, *others], options.ranks, threads=1)
    warnings.filterwarnings("ignore")  # DCP warns about how it is called
    world = init()
    try:
        table = measure_sides(world, options)
        if world.rank == 0:
            print(json.dumps(table) if as_json else format_table(table))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return EXIT_DONE


def measure_sides(world: World, options: LoopCheckpointOptions) -> dict[str, Any]:
    """Time all operations in interleaved rounds; medians of the slowest rank in seconds. A collective."""
    temporary = tempfile.mkdtemp(prefix="loop-checkpoint-", dir=options.directory) if world.rank == 0 else ""
    folder = Path(all_gather_values(temporary)[0])
    try:
        model, optimizer = _make_model(options.mib)
        sides: list[_Side] = [
            _Ours(folder / "ours", model, optimizer, world),
            _Dcp(folder / "dcp", model, optimizer),
        ]
        for side in sides:  # untimed: buffers and process groups are made
            side.save()
            side.start()()
            side.load()
        seconds: dict[str, dict[str, list[float]]] = {o: {side.name: [] for side in sides} for o in OPERATIONS}
        for _, index in interleave_rounds(options.rounds, len(sides)):
            for operation in OPERATIONS:
                seconds[operation][sides[index].name].append(_time_operation(sides[index], operation))
        size = sum(p.numel() * p.element_size() for p in model.parameters()) * 3 / 2**20
        medians = {o: {name: statistics.median(values) for name, values in by.items()} for o, by in seconds.items()}
        ratios = {o: _summarise_ratios(by["DCP"], by["Checkpointer"]) for o, by in seconds.items()}
        for side in sides:
            if isinstance(side, _Ours):
                side.checkpointer.close()
        return {"ranks": world.size, "mib": round(size), "seconds": medians, "dcp_over_ours": ratios}
    finally:
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _summarise_ratios(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Return the median, smallest and largest ratio of the rounds."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _make_model(mib: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a sharded model of linear layers that has about `mib` MiB with its AdamW state, after one step."""
    width = max(8, int((mib * 2**20 / (12 * _LAYERS)) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _time_operation(side: _Side, operation: str) -> float:
    """Return the seconds of the slowest rank. An asynchronous save is timed until the model may change."""
    dist.barrier()
    started = time.perf_counter()
    finish = side.start() if operation == "stall" else None
    if operation != "stall":
        getattr(side, operation)()
    seconds = time.perf_counter() - started
    if finish is not None:
        finish()
    return max(all_gather_values(seconds))


def format_table(table: dict[str, Any]) -> str:
    """Format the result for a terminal."""
    lines = [
        f"{table['mib']} MiB of parameters and AdamW state, {table['ranks']} ranks, medians in seconds",
        f"{'':8}{'Checkpointer':>14}{'DCP':>10}{'DCP / ours':>12}{'of the rounds':>16}",
    ]
    for operation in OPERATIONS:
        own_seconds, dcp_seconds = table["seconds"][operation]["Checkpointer"], table["seconds"][operation]["DCP"]
        ratio = table["dcp_over_ours"][operation]
        lines.append(
            f"{operation:8}{own_seconds:>14.3f}{dcp_seconds:>10.3f}{ratio['median']:>12.2f}"
            f"{ratio['least']:>9.2f} - {ratio['most']:.2f}"
        )
    return "\n".join(lines)
