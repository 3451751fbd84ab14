"""Reading past the page cache that a file system refuses, when a file is opened or only when it is read."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import State, holds, random_bits, save_alone, sharded
from faults import of_descriptor

from hpc_train.checkpoint import CheckpointError, load_step
from hpc_train.checkpoint.load import verified_reader
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

LARGE: State = {"w": random_bits((900, 1024), torch.float32), "small": random_bits((3,), torch.float64, 1)}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step that readers take for one that is not in memory."""
    save_alone(tmp_path, 1, LARGE)
    monkeypatch.setattr(verified_reader, "_is_cached", lambda descriptor: False)
    return tmp_path


def takes_direct(directory: Path) -> bool:
    """Whether this file system offers direct reads at all."""
    try:
        os.close(os.open(directory / "step-1/shards/000/000000.h5", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let every read past the page cache fail with this error; returns the names of the files, as they are refused."""
    refused: list[str] = []
    real = os.preadv

    def preadv(descriptor: int, *args: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(of_descriptor(descriptor).name)
            raise OSError(number, os.strerror(number))
        return real(descriptor, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    return refused


@pytest.mark.parametrize("name", ["EINVAL", "EOPNOTSUPP"])
def test_a_refused_read_is_made_through_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    refused = refuse(monkeypatch, getattr(errno, name))
    assert holds(directory, 1, LARGE)
    assert bool(refused) == takes_direct(directory)


def test_two_ranks_read_through_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EINVAL)

    def read(world: World) -> bool:
        wanted = sharded(LARGE, 0, world.rank, world.size)
        whole = [piece.local.clone() for piece in wanted]
        for piece in wanted:
            piece.local.zero_()
        load_step(directory, 1, wanted, world)
        as_bytes = zip((piece.local for piece in wanted), whole, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in as_bytes)

    assert run_ranks(read, 2) == [True, True]


def test_a_file_that_cannot_be_opened_for_direct_reads(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = os.open, []

    def refusing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    assert holds(directory, 1, LARGE)
    assert refused


def test_another_error_is_damage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if takes_direct(directory):
        refuse(monkeypatch, errno.EIO)
    else:
        (directory / "step-1/shards/000/000000.h5").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        holds(directory, 1, LARGE)
