"""What is compared: ways to put the tensors of this rank on the disk, durably, and to get them back into memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from hpc_train.bench.checkpoint.result import RAW_BUFFERED, RAW_DIRECT
from hpc_train.bench.checkpoint.state import State, bytes_of, flat
from hpc_train.checkpoint.files import opened, write_at

CHUNK = 16 << 20
_PAGE = 4096
_ARENA = 1 << 30
"""Bytes of memory that raw I/O uses, over and over if the state is larger; far more than any processor's cache."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Side:
    """One way. What it makes is under a folder of its own, which is empty before each save."""

    name: str
    save: Callable[[], object] | None = None
    """Ends when this rank's part is on the disk; where the ranks commit together, when they have."""
    begin: Callable[[], Callable[[], object]] | None = None
    """An asynchronous save: returns when the tensors may change, with what waits for the rest."""
    load: Callable[[], object] | None = None
    """Into the tensors of the state, which have what is there already."""
    verify: Callable[[], object] | None = None


def raw_direct(folder: Path, rank: int, state: State) -> Side:
    """As many bytes, past the page cache, by one thread; loading leaves them in an arena. Raises OSError without it."""
    path, size = folder / f"{rank}.raw", -(-bytes_of(state) // _PAGE) * _PAGE
    with opened(path, _NEW | os.O_DIRECT):
        path.unlink()
    arena = _filled(min(size, _ARENA), state)

    def chunk(begin: int) -> memoryview:
        at = begin % _ARENA
        return arena[at : at + min(CHUNK, size - begin)]

    def save() -> None:
        with opened(path, _NEW | os.O_DIRECT) as file:
            for begin in range(0, size, CHUNK):
                write_at(file, chunk(begin), begin)
            os.fsync(file)

    def load() -> None:
        with opened(path, os.O_RDONLY | os.O_DIRECT) as file:
            for begin in range(0, size, CHUNK):
                _read(file, chunk(begin), begin)

    return Side(RAW_DIRECT, save, load=load)


def _filled(size: int, state: State) -> memoryview:
    """Whole pages, huge ones where there are any, with the state's first bytes."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    arena, at = memoryview(memory), 0
    for tensor in state.values():
        count = min(tensor.nbytes, size - at)
        arena[at : at + count] = flat(tensor)[:count]
        at += count
    return arena


def raw_buffered(folder: Path, rank: int, state: State) -> Side:
    """The bytes of one tensor after the other, through the page cache, and fsync."""
    path = folder / f"{rank}.raw"

    def save() -> None:
        at = 0
        with opened(path, _NEW) as file:
            for tensor in state.values():
                write_at(file, flat(tensor), at)
                at += tensor.nbytes
            os.fsync(file)

    def load() -> None:
        at = 0
        with opened(path, os.O_RDONLY) as file:
            for tensor in state.values():
                _read(file, flat(tensor), at)
                at += tensor.nbytes

    return Side(RAW_BUFFERED, save, load=load)


def torch_save(folder: Path, rank: int, state: State) -> Side:
    """torch.save and fsync, a file a rank; torch.load with weights_only, and a copy."""
    path = folder / f"{rank}.pt"

    def save() -> None:
        torch.save(state, path)
        _sync(path)

    return Side("torch_save", save, load=lambda: _copy(torch.load(path, weights_only=True), state))


def safetensors(folder: Path, rank: int, state: State) -> Side:
    """save_file and fsync, a file a rank; load_file and a copy. Raises ImportError where it is not installed."""
    if find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed")
    from safetensors.torch import load_file, save_file

    path = folder / f"{rank}.safetensors"

    def save() -> None:
        save_file(state, path)
        _sync(path)

    return Side("safetensors", save, load=lambda: _copy(load_file(path), state))


def _copy(source: State, state: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(source[name])


def _read(file: int, memory: memoryview, begin: int) -> None:
    at = 0
    while at < len(memory):
        count = os.preadv(file, [memory[at:]], begin + at)
        assert count > 0, "the file is shorter than what was written"
        at += count


def _sync(path: Path) -> None:
    with opened(path, os.O_RDONLY) as file:
        os.fsync(file)
