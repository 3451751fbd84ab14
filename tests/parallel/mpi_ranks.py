"""One rank of mpirun for test_mpi_hook.py: trains with gloo and with MPI, and writes what it observed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import Outcome, engine_steps
from plain_setup import Layout, engine_of

from hpc_train.runtime.start import join, leave_process_group, make_identity_map, start

STEPS = (0, 1, 2)
KINDS = ("gpt2", "bare")
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6", "parallel.bucket_mib=0.01")


class Reductions:
    """Counts the bytes of gradients (without scalars and counts) that pass through torch's own all-reduce."""

    def __init__(self) -> None:
        self.bytes, self._real = 0, dist.all_reduce

    def __enter__(self) -> Reductions:
        dist.all_reduce = self._call
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._real

    def _call(self, tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.bytes += tensor.nbytes if tensor.ndim and tensor.is_floating_point() else 0
        return self._real(tensor, *args, **more)


def main(folder: Path, ranks: int) -> None:
    """Train every kind of model with both, in one process group."""
    layout = Layout(ranks, ("parallel=ddp",))
    configs = {how: layout.config(*OPTIM, f"parallel.reduce_with={how}") for how in ("torch", "mpi")}
    task = join()
    world = start(task, make_identity_map(task), configs["torch"])
    found: dict[tuple[str, str], tuple[Outcome, int]] = {}
    for how, config in configs.items():
        for kind in KINDS:
            engine = engine_of(kind, config, world)
            engine_steps(engine, world, config, kind, "two", (0,))  # where a backward may be thrown away
            with Reductions() as reductions:
                outcome = engine_steps(engine, world, config, kind, "two", STEPS)
            found[how, kind] = outcome, reductions.bytes
    (folder / f"{world.rank}.pickle").write_bytes(pickle.dumps(found))
    leave_process_group()
