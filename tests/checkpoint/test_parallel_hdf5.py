"""checkpoint.parallel_hdf5: the file of all ranks by way of HDF5's own MPI-IO driver.

The driver is that of Debian's python3-h5py-mpi, which has no torch; where this Python's own h5py has MPI, whole saves
go through it as well.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import h5py
import mpio_ranks
import parallel_hdf5_ranks
import pytest
from checkpoint_helpers import alone, holds, sharded, state
from sharing import LARGE, files

from hpc_train.checkpoint import Saver, list_committed_steps, verify_step
from hpc_train.checkpoint.format.block_digests import digest_blocks
from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.format.shard_layout import gather_layouts
from hpc_train.checkpoint.save import parallel_hdf5
from hpc_train.checkpoint.save.commit_step import commit_step
from hpc_train.checkpoint.save.shard_file import ShardStager
from hpc_train.checkpoint.save.shared_file import SharedFile, list_datasets, make_section
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.checkpoint.storage.file_system import DEFAULT_POLICY
from hpc_train.checkpoint.storage.step_directory import shard_file_name
from hpc_train.errors import UserError

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n")
PYTHON = "/usr/bin/python3"
"""Of Debian, whose h5py this is about."""
REFUSED = (
    "checkpoint.parallel_hdf5=true: this h5py is built without MPI; build it over a parallel HDF5 (pip "
    "install cython pkgconfig && CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py --no-build-isolation "
    "--force-reinstall --no-deps h5py), or set checkpoint.ranks_per_file=0, which shares files without MPI"
)


def mpirun(ranks: int, *words: str | Path) -> str:
    """What the ranks print."""
    here = Path(__file__).parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    command = [*MPIRUN, str(ranks), *map(str, words)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, f"{ended.stderr}\n(Debian's h5py: apt-get install python3-h5py-mpi python3-mpi4py)"
    return ended.stdout


def test_a_step_whose_data_hdf5_has_written_with_mpi(tmp_path: Path) -> None:
    """All but the driver is here: the structure before it, digests, manifest and commit after it."""
    temporary, name, ranks = tmp_path / "step-1.tmp-1", shard_file_name(0, range(3)), range(3)
    path = temporary / name
    path.parent.mkdir(parents=True)
    pieces = [[piece for piece in sharded(LARGE, 0, rank, 3) if not piece.replica] for rank in ranks]
    staged = [ShardStager(make_layout=make_section).stage(of_rank) for of_rank in pieces]
    file = SharedFile()
    spots = file.create(path, [it.layout for it in staged], DEFAULT_POLICY)
    for rank, spot, it in zip(ranks, spots, staged, strict=True):
        mine = [(data.name, bytes(data.bytes)) for data in list_datasets(spot, it)]
        Path(f"{tmp_path}/{rank}").write_bytes(pickle.dumps(mine))
    said = mpirun(3, PYTHON, mpio_ranks.__file__, parallel_hdf5.__file__, path, tmp_path)
    assert sorted(re.findall("rank . of .", said)) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    file.restore_size(path)
    ((shard, held),) = file.write_digests(temporary, name, [digest_blocks(it.image[: it.size]) for it in staged])
    commit_step(temporary, tmp_path / "step-1", Manifest(1, 0, 3, gather_layouts([held]), (shard,), {}))
    assert verify_step(tmp_path, 1) == []
    assert holds(tmp_path, 1, LARGE)


def test_whole_saves_where_this_h5py_has_mpi_and_one_line_where_it_has_not(tmp_path: Path) -> None:
    if not h5py.get_config().mpi:
        with pytest.raises(UserError) as caught:
            Saver(tmp_path, alone(), sharing=WriterSharing(parallel_hdf5=True))
        assert str(caught.value) == REFUSED
        return
    said = mpirun(3, sys.executable, parallel_hdf5_ranks.__file__, tmp_path).splitlines()
    assert sorted(said) == [f"rank {rank}: saved" for rank in range(3)]
    assert list_committed_steps(tmp_path) == [1, 2, 3, 4]
    assert [files(tmp_path, step) for step in list_committed_steps(tmp_path)] == [["000000-000002.h5"]] * 3 + [[]]
    assert holds(tmp_path, 1, LARGE)
    assert holds(tmp_path, 3, state(3))
