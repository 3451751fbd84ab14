"""One rank of mpirun for test_parallel_hdf5.py: saves and loads by parallel HDF5."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from checkpoint_helpers import blank, same_pieces, sharded, state, whole
from sharing import LARGE

from hpc_train.checkpoint import Saver, load_step, verify_step
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.config.run import RunConfig
from hpc_train.runtime.start import join, leave_process_group, make_identity_map, start


def main(directory: Path) -> None:
    """Save and load rows of every rank, in another layout, with everything on the last rank, and without tensors."""
    torch.set_num_threads(1)
    task = join()
    world = start(task, make_identity_map(task), RunConfig())
    last = world.rank == world.size - 1
    steps = {1: LARGE, 2: state(2), 3: state(3), 4: {}}
    saver = Saver(directory, world, sharing=WriterSharing(parallel_hdf5=True))
    for step, tensors in steps.items():
        mine = sharded(tensors, 0, world.rank, world.size) if step != 3 else whole(tensors) if last else []
        saver.save(step, mine, {})
        assert [str(save.error or "") for save in saver.wait()] == [""]
        found = blank(mine)
        load_step(directory, step, found, world)
        assert same_pieces(found, mine), step
        assert verify_step(directory, step, world) == []
    print(f"rank {world.rank}: saved")
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
