"""A damaged checkpoint is noticed, named, passed over, and never loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, blank, holds, save_alone, sharded, state, whole
from drawn import draw

from hpc_train.checkpoint import CheckpointError, find_newest_verified, load_step, save_step, verify_step
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile, parse_manifest
from hpc_train.checkpoint.format.shard_layout import gather_layouts
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def first_data_byte(shard: Path) -> int:
    """Inside the matrix: its bytes are in the file just as they are in memory."""
    return shard.read_bytes().index(state(2)["blocks.0.weight"].numpy().tobytes())


def swap_two_rows(shard: Path) -> None:
    data, begin = bytearray(shard.read_bytes()), first_data_byte(shard)
    data[begin : begin + 40] = data[begin + 20 : begin + 40] + data[begin : begin + 20]
    shard.write_bytes(data)


def put_another_step_in_its_place(shard: Path) -> None:
    shard.write_bytes((shard.parents[3] / "step-1" / shard.relative_to(shard.parents[2])).read_bytes())


def edit_manifest(step: Path, change: Callable[[dict[str, object]], object]) -> None:
    body = json.loads((step / "manifest.json").read_text())
    change(body)
    (step / "manifest.json").write_text(json.dumps(body))


SHARD_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit in the data": (lambda shard: flip(shard, first_data_byte(shard)), "not what was committed"),
    "flipped bit in the header": (lambda shard: flip(shard, 20), "not what was committed"),
    "flipped bit in the last byte": (lambda shard: flip(shard, -1), "not what was committed"),
    "rows swapped": (swap_two_rows, "not what was committed"),
    "older state of the same tensors": (put_another_step_in_its_place, "not what was committed"),
    "truncated": (lambda shard: shard.write_bytes(shard.read_bytes()[:-7]), "bytes"),
    "longer": (lambda shard: shard.write_bytes(shard.read_bytes() + b"\0"), "bytes"),
    "tail lost, size kept": (
        lambda shard: shard.write_bytes(
            shard.read_bytes()[: first_data_byte(shard)].ljust(shard.stat().st_size, b"\0")
        ),
        "not what was committed",
    ),
    "missing": (lambda shard: shard.unlink(), "missing"),
}
DIGESTS_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda table: flip(table, -1), "not what was committed"),
    "truncated": (lambda table: table.write_bytes(table.read_bytes()[:-8]), "not what was committed"),
    "of another step": (put_another_step_in_its_place, "not what was committed"),
    "missing": (lambda table: table.unlink(), "No such file"),
}


def two_steps(directory: Path) -> Path:
    save_alone(directory, 1, state(1))
    save_alone(directory, 2, state(2))
    return directory / "step-2"


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_a_damaged_shard(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    do, what = SHARD_DAMAGE[damage]
    do(two_steps(tmp_path) / "shards/000/000000.h5")
    (problem,) = verify_step(tmp_path, 2)
    assert problem.file == "shards/000/000000.h5"
    assert what in problem.what
    with caplog.at_level(logging.WARNING):
        assert find_newest_verified(tmp_path) == 1
    assert "step 2" in caplog.text
    assert str(problem) in caplog.text
    pieces = blank(whole(state(2)))
    with pytest.raises(CheckpointError, match=r"step 2 .* is damaged: shards/000/000000\.h5"):
        load_step(tmp_path, 2, pieces, alone())
    assert holds(tmp_path, 1, state(1))


@pytest.mark.parametrize("damage", DIGESTS_DAMAGE)
def test_a_damaged_table_of_digests(tmp_path: Path, damage: str) -> None:
    do, what = DIGESTS_DAMAGE[damage]
    do(two_steps(tmp_path) / "shards/000/000000.h5.digests")
    (problem,) = verify_step(tmp_path, 2)
    assert problem.file == "shards/000/000000.h5.digests"
    assert what in problem.what
    assert find_newest_verified(tmp_path) == 1
    with pytest.raises(CheckpointError, match=r"step 2 .* is damaged: shards/000/000000\.h5\.digests: .*" + what):
        load_step(tmp_path, 2, blank(whole(state(2))), alone())


MANIFEST_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda step: (step / "manifest.json").unlink(), "missing"),
    "empty": (lambda step: (step / "manifest.json").write_text(""), "not JSON"),
    "not text": (lambda step: (step / "manifest.json").write_bytes(b"\xff\xfe\x00"), "not JSON"),
    "not an object": (lambda step: (step / "manifest.json").write_text("[]"), "not a JSON object"),
    "one number changed": (
        lambda step: edit_manifest(step, lambda body: body["extra"].update(consumed_samples=8)),  # type: ignore[attr-defined]
        "own checksum",
    ),
    "older format": (
        lambda step: edit_manifest(step, lambda body: body.update(format_version=4)),
        "format 4 is not read by this release, which reads 5; load it with the release that wrote it",
    ),
    "newer format": (lambda step: edit_manifest(step, lambda body: body.update(format_version=99)), "newer"),
    "of another step": (
        lambda step: (step / "manifest.json").write_bytes((step.parent / "step-1" / "manifest.json").read_bytes()),
        "manifest of step 1",
    ),
}


@pytest.mark.parametrize("damage", MANIFEST_DAMAGE)
def test_a_damaged_manifest(tmp_path: Path, damage: str) -> None:
    do, what = MANIFEST_DAMAGE[damage]
    do(two_steps(tmp_path))
    (problem,) = verify_step(tmp_path, 2)
    assert problem.file == "manifest.json"
    assert what in problem.what
    assert find_newest_verified(tmp_path) == 1
    with pytest.raises(CheckpointError, match=f"step 2 .* is damaged: manifest.json: .*{what}"):
        load_step(tmp_path, 2, [], alone())


@pytest.mark.parametrize("third", draw(range(3), [0]))
def test_no_bit_of_a_small_shard_can_flip_unseen(tmp_path: Path, third: int) -> None:
    save_alone(tmp_path, 1, {"w": torch.ones(3)})
    (tmp_path / "step-1" / "index.h5").unlink()  # it would be checked each of thousands of times
    shard = tmp_path / "step-1" / "shards/000/000000.h5"
    good = shard.read_bytes()
    for at in range(29 * third, len(good), 3 * 29):
        flip(shard, at)
        assert verify_step(tmp_path, 1) != []
        shard.write_bytes(good)
    assert verify_step(tmp_path, 1) == []


@pytest.mark.parametrize("name", ["../step-1/shards/000/000000.h5", "/etc/passwd", "shards/../../x.h5", "./x.h5"])
def test_a_manifest_cannot_point_outside_of_its_directory(name: str) -> None:
    manifest = Manifest(1, 1, 1, gather_layouts([]), (ShardFile(name, 1, "xxh3_128:0"),), {})
    with pytest.raises(CheckpointError, match="not the name of a file of a step"):
        parse_manifest(manifest.to_bytes())


def test_all_ranks_hear_of_one_damaged_shard(tmp_path: Path) -> None:
    def save_by_rows(world: World, step: int) -> None:
        save_step(tmp_path, step, sharded(state(step), 0, world.rank, world.size), {}, world).wait()

    def load_or_fail(world: World) -> tuple[str, int | None, int]:
        with pytest.raises(CheckpointError) as error:
            load_step(tmp_path, 2, blank(sharded(state(2), 0, world.rank, world.size)), world)
        return str(error.value), find_newest_verified(tmp_path, world), len(verify_step(tmp_path, 2, world))

    for step in (1, 2):
        run_ranks(save_by_rows, 3, step)
    flip(tmp_path / "step-2" / "shards/000/000001.h5", -1)
    answers = run_ranks(load_or_fail, 3)
    assert len(set(answers)) == 1
    assert "shards/000/000001.h5" in answers[0][0]
    assert answers[0][1:] == (1, 1)


def test_all_ranks_hear_of_a_tensor_that_one_of_them_misses(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, {"w": torch.ones(2)})

    def load_or_fail(world: World) -> str:
        name = "w" if world.rank == 0 else "v"
        with pytest.raises(UserError) as error:
            load_step(tmp_path, 1, [TensorShard(name, (2,), torch.float32, (0,), torch.zeros(2))], world)
        return str(error.value)

    first, second = run_ranks(load_or_fail, 2)
    assert first == second
    assert "'v'" in first


def test_nothing_there_is_nothing_newest(tmp_path: Path) -> None:
    assert find_newest_verified(tmp_path) is None
    assert find_newest_verified(tmp_path / "absent") is None
    with pytest.raises(UserError, match=r"step 3 .* it has none"):
        verify_step(tmp_path, 3)
