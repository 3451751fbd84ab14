"""Many small tensors among a few large ones: read together and copied by every way there is to their memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, blank, random_bits, same_pieces, save_alone, whole

from hpc_train.checkpoint import CheckpointError, load_step
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.load import reader
from hpc_train.checkpoint.load.read_schedule import CELL_BYTES, LoadDestination

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
SHARD = "shards/000/000000.h5"


def put_in_the_cache(path: Path) -> None:
    path.read_bytes()


def put_out_of_the_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


WAYS = {"cached": put_in_the_cache, "not cached": put_out_of_the_cache}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """12 MiB: sizes of a few bytes to several blocks that end anywhere, and two of several cells."""
    found = {
        f"small.{index}": random_bits((1 + index * 7919 % 40_000,), DTYPES[index % 4], index) for index in range(130)
    }
    return found | {
        f"large.{index}": random_bits((5 * BLOCK_BYTES + index,), torch.bfloat16, index) for index in (1, 2)
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    made = tmp_path_factory.mktemp("small_tensors")
    save_alone(made, 1, tensors)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_is_what_it_was(directory: Path, tensors: dict[str, torch.Tensor], way: str) -> None:
    WAYS[way](directory / "step-1" / SHARD)
    pieces = blank(whole(tensors))
    pieces[5].local.requires_grad_()
    pieces[6] = replace(pieces[6], local=torch.zeros(pieces[6].local.numel(), 2, dtype=pieces[6].dtype)[:, 0])
    load_step(directory, 1, pieces, alone())
    assert not pieces[6].local.is_contiguous()
    assert same_pieces(pieces, whole(tensors))


@pytest.mark.parametrize("way", WAYS)
def test_in_several_reads(
    directory: Path, tensors: dict[str, torch.Tensor], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And some that are wanted twice, by rows of their own: runs that overlap."""
    monkeypatch.setattr(reader, "WIDE_READ_BYTES", CELL_BYTES)
    WAYS[way](directory / "step-1" / SHARD)
    long = [piece for piece in whole(tensors)[1::3] if piece.local.numel() > 12]
    more = [replace(it, offset=(7,), local=it.local[7 : 12 if at % 2 else -5].clone()) for at, it in enumerate(long)]
    assert {it.name for it in more} & {"large.1", "large.2"}
    pieces = blank([*whole(tensors), *more])
    load_step(directory, 1, pieces, alone())
    assert same_pieces(pieces, [*whole(tensors), *more])


def test_a_few_elements_of_what_another_piece_has_all_of(tmp_path: Path) -> None:
    tensor = random_bits((9 * BLOCK_BYTES,), torch.float32)
    save_alone(tmp_path, 1, {"w": tensor})
    (piece,) = whole({"w": tensor})
    wanted = [
        piece,
        *(
            replace(piece, offset=(at,), local=tensor[at : at + 3].clone())
            for at in (0, 4 * BLOCK_BYTES, 9 * BLOCK_BYTES - 3)
        ),
    ]
    for put in WAYS.values():
        put(tmp_path / "step-1" / SHARD)
        pieces = blank(wanted)
        load_step(tmp_path, 1, pieces, alone())
        assert same_pieces(pieces, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_by_the_way_that_gpus_take(
    directory: Path, tensors: dict[str, torch.Tensor], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadDestination, "address", 0)
    monkeypatch.setattr(LoadDestination, "memory", None)
    WAYS[way](directory / "step-1" / SHARD)
    pieces = blank(whole(tensors))
    load_step(directory, 1, pieces, alone())
    assert same_pieces(pieces, whole(tensors))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_damage_names_a_tensor_of_its_block(
    directory: Path, tensors: dict[str, torch.Tensor], way: Callable[[Path], None]
) -> None:
    shard = directory / "step-1" / SHARD
    content = shard.read_bytes()
    for name in ("small.3", "small.77", "large.2"):
        at = content.index(tensors[name].view(torch.uint8).numpy().tobytes())
        damaged = bytearray(content)
        damaged[at] ^= 1
        shard.write_bytes(damaged)
        way(shard)
        with pytest.raises(CheckpointError, match=f"block at byte {at // BLOCK_BYTES * BLOCK_BYTES}\\b") as error:
            load_step(directory, 1, blank(whole(tensors)), alone())
        named = tensors[str(error.value).split("tensor '")[1].split("'")[0]]
        begin = content.index(named.view(torch.uint8).numpy().tobytes())
        assert begin < (at // BLOCK_BYTES + 1) * BLOCK_BYTES
        assert begin + named.nbytes > at // BLOCK_BYTES * BLOCK_BYTES
    shard.write_bytes(content)
