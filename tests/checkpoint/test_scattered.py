"""What is read out of the page cache straight to where it belongs, hashed where it lies."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_helpers import alone, blank, random_bits, same_pieces, save_alone, whole
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint import CheckpointError, load_step
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, digest_blocks, digest_scattered_blocks
from hpc_train.checkpoint.load.reader import CopyRun, make_io_vector

SHARD = "shards/000/000000.h5"
LENGTHS = st.lists(
    st.one_of(st.integers(0, 300), st.integers(BLOCK_BYTES - 2, BLOCK_BYTES + 2), st.integers(0, 3 * BLOCK_BYTES))
)


@given(LENGTHS)
def test_digests_are_those_of_the_bytes_in_a_row(lengths: list[int]) -> None:
    data = memoryview(np.random.default_rng(len(lengths)).bytes(sum(lengths)))
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    parts = [data[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]
    assert digest_scattered_blocks(parts) == digest_blocks(data)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=30), st.integers(1, 64))
def test_every_byte_has_one_place(gaps: list[tuple[int, int]], step: int) -> None:
    """gaps: the bytes before each run, and those of it. step: of the file that are asked for at a time."""
    memory, runs, at = np.zeros(sum(size for _, size in gaps) + 1, dtype=np.uint8), list[CopyRun](), 0
    wanted = []
    for piece, (gap, size) in enumerate(gaps):
        begin = at + gap
        address = memory.ctypes.data + sum(size for _, size in gaps[:piece])
        runs.append([begin, begin + size, address - begin, piece])
        wanted += range(begin, begin + size)
        at = begin + size
    file, rest, between = np.random.default_rng(at).integers(1, 256, at + 7, dtype=np.uint8), deque(runs), bytearray(64)
    for low in range(0, len(file), step):
        high = min(low + step, len(file))
        to = make_io_vector(rest, low, high, memoryview(between))
        assert to is not None
        assert sum(map(len, to)) == high - low
        for it in to:
            memoryview(it).cast("B")[:] = file[low : low + len(it)].tobytes()
            low += len(it)
    assert memory[:-1].tolist() == file[wanted].tolist()
    assert memory[-1] == 0


@pytest.fixture(scope="module")
def tiny() -> dict[str, torch.Tensor]:
    """So many that their memory does not go into one call, between two that are read in several."""
    found = {f"a.{index}": random_bits((1 + index % 7,), torch.float32, index) for index in range(5000)}
    return {"before": random_bits((700_001,), torch.bfloat16)} | found | {"z": random_bits((700_001,), torch.uint8)}


def test_thousands_in_a_megabyte(tmp_path: Path, tiny: dict[str, torch.Tensor]) -> None:
    save_alone(tmp_path, 1, tiny)
    shard = tmp_path / "step-1" / SHARD
    content = bytearray(shard.read_bytes())
    pieces = blank(whole(tiny))
    load_step(tmp_path, 1, pieces, alone())
    assert same_pieces(pieces, whole(tiny))
    for name in ("before", "a.2500", "z"):
        at = content.index(tiny[name].view(torch.uint8).numpy().tobytes())
        shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=f"block at byte {at // BLOCK_BYTES * BLOCK_BYTES}"):
            load_step(tmp_path, 1, blank(whole(tiny)), alone())
