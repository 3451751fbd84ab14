"""Direct reads that other threads verify: a failure anywhere ends the load with an error."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, blank, random_bits, same_pieces, save_alone, whole
from faults import at_call, fails

from hpc_train.checkpoint import CheckpointError, load_step
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.load import reader
from hpc_train.checkpoint.load.read_schedule import CELL_BYTES

READS = 10
SHARD = "shards/000/000000.h5"
TENSORS = {"w": random_bits((READS * CELL_BYTES // 4 - CELL_BYTES // 8,), torch.float32)}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """More reads than there is memory for at a time."""
    monkeypatch.setattr(reader, "WIDE_READ_BYTES", CELL_BYTES)
    save_alone(tmp_path, 1, TENSORS)
    put_out_of_the_cache(tmp_path / "step-1" / SHARD)
    return tmp_path


def put_out_of_the_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def loaded(directory: Path) -> bool:
    pieces = blank(whole(TENSORS))
    load_step(directory, 1, pieces, alone())
    return same_pieces(pieces, whole(TENSORS))


def test_all_of_it_comes(directory: Path) -> None:
    assert loaded(directory)


@pytest.mark.timeout(120)
def test_any_read_that_fails_ends_the_load(directory: Path) -> None:
    before, shard = threading.active_count(), directory / "step-1" / SHARD
    with at_call(0, fails(errno.EIO), ("preadv",), shard) as made:
        assert loaded(directory)
    assert len(made) >= READS
    for number in range(len(made) - READS + 1, len(made) + 1):  # the first only look whether it is in the page cache
        put_out_of_the_cache(shard)
        with (
            at_call(number, fails(errno.EIO), ("preadv",), shard),
            pytest.raises(CheckpointError, match="Input/output"),
        ):
            loaded(directory)
    assert threading.active_count() == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("of_read", [0, 4, READS - 1])
def test_damage_in_any_read_ends_the_load(directory: Path, of_read: int) -> None:
    shard, at = directory / "step-1" / SHARD, of_read * CELL_BYTES + 3 * BLOCK_BYTES
    before = threading.active_count()
    with shard.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    put_out_of_the_cache(shard)
    with pytest.raises(CheckpointError, match=f"tensor 'w'.*block at byte {at}"):
        loaded(directory)
    assert threading.active_count() == before
