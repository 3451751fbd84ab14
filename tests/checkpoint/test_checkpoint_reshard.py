"""`hpc-train checkpoint reshard`: the same bits in other files, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import State, holds, names, random_bits, save_alone, sharded, state
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint import save_step
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage, split_slabs
from hpc_train.checkpoint.storage.lock import take_lock
from hpc_train.checkpoint.storage.step_directory import explain_bad_step, mark_bad, try_read_manifest
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def tensors() -> State:
    """Some that are worth cutting, by rows or by columns, and small ones of every kind."""
    return {
        **state(0),
        "wide": random_bits((101, 1003), torch.bfloat16, 1),
        "deep": random_bits((30, 41, 29), torch.float32, 2),
        "empty": torch.zeros(0, 3),
        "flags": random_bits((70_001,), torch.bool, 3),
    }


@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (3, 0), (7, 0), (3, 1), (5, 2), (40, 0)])
def test_the_same_bits_in_other_files(tmp_path: Path, terminal: Terminal, ranks: int, dim: int) -> None:
    def rank(world: World) -> None:
        save_step(
            tmp_path / "in", 9, sharded(tensors(), 1, world.rank, world.size), {"consumed_samples": 72}, world
        ).wait()

    run_ranks(rank, 2)
    told = terminal.ok("reshard", tmp_path / "in", tmp_path / "out", "--ranks", ranks, "--dim", dim, "--json").json
    assert told["path"] == str(tmp_path / "out/step-9")
    assert holds(tmp_path / "out", 9, tensors())
    assert terminal.ok("verify", tmp_path / "out", "--json").json["ok"]
    facts = terminal.ok("inspect", tmp_path / "out", "--tensors", "--json").json
    assert (facts["world_size"], facts["extra"], len(facts["files"])) == (
        ranks,
        {"consumed_samples": 72},
        told["files"],
    )
    cuts = {it["name"]: it["cuts"] for it in facts["tensors"]}
    assert cuts["wide"] == [ranks if at == dim else 1 for at in range(2)]
    assert cuts["blocks.0.weight"] == [1, 1], "too small to be cut"
    assert names(tmp_path / "out") == ["step-9"]


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    offset=st.integers(0, 5),
    most=st.integers(1, 200),
)
@settings(max_examples=60)
def test_slabs_are_a_rectangle_in_the_order_of_its_memory(shape: list[int], offset: int, most: int) -> None:
    whole = Rectangle((offset,) * len(shape), tuple(shape))
    parts = list(split_slabs(whole, most))
    assert explain_coverage(whole, parts) is None
    assert all(part.volume <= most for part in parts)
    numbers = torch.arange(whole.volume).reshape(shape)
    cut = [numbers[tuple(slice(a, a + n) for a, n in zip(p.start_in(whole), p.shape, strict=True))] for p in parts]
    assert torch.cat([part.reshape(-1) for part in cut]).tolist() == list(range(whole.volume))


MEASURE = """
import json, resource, sys
from hpc_train.cli.main import main
import hpc_train.cli.checkpoint.convert
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
before = peak()
code = main(["checkpoint", "reshard", sys.argv[1], sys.argv[2], "--ranks", "3", "--json"])
print(json.dumps({"code": code, "grown": peak() - before}))
"""


def test_memory_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    large = {name: torch.full((16, 1 << 20), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    total = sum(tensor.nbytes for tensor in large.values())
    save_alone(tmp_path / "in", 1, large)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["code"] == 0
    assert measured["grown"] < total / 2, (measured, total)
    manifest = try_read_manifest(tmp_path / "out/step-1", 1)
    assert manifest is not None
    assert len(manifest.files) == 3


def test_a_damaged_step_is_not_copied(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, tensors())
    shard = tmp_path / "in/step-1/shards/000/000000.h5"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    printed = terminal.call("reshard", tmp_path / "in", tmp_path / "out", "--ranks", 2)
    assert (printed.code, printed.out) == (1, "")
    assert "step 1 in " in printed.err
    assert "is damaged: shards/000/000000.h5" in printed.err
    assert names(tmp_path / "out") == []


def test_what_is_bad_stays_bad(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, {"w": torch.tensor([1.0, float("nan")])})
    save_alone(tmp_path / "in", 2, {"w": torch.ones(2)})
    mark_bad(tmp_path / "in", 2, "diverged")
    for step, why in ((1, "NaN"), (2, "marked bad: diverged")):
        terminal.ok("reshard", tmp_path / f"in/step-{step}", tmp_path / "out", "--ranks", 1)
        path = tmp_path / f"out/step-{step}"
        assert why in str(explain_bad_step(path, try_read_manifest(path, step)))


def test_bad_requests(tmp_path: Path, terminal: Terminal) -> None:
    save_alone(tmp_path / "in", 1, state(0))
    assert "inside the checkpoint that is read" in terminal.refused(
        "reshard", tmp_path / "in", tmp_path / "in", "--ranks", 2
    )
    assert "not a number of 1 or more" in terminal.refused("reshard", tmp_path / "in", tmp_path / "out", "--ranks", 0)
    assert "no such directory" in terminal.refused("reshard", tmp_path / "none", tmp_path / "out", "--ranks", 2)
    lock = take_lock(tmp_path / "out")
    try:
        assert "is writing checkpoints there" in terminal.refused(
            "reshard", tmp_path / "in", tmp_path / "out", "--ranks", 2
        )
    finally:
        lock.release()
    assert names(tmp_path / "out") == []


def test_nothing_is_written_into_a_run_or_among_other_files(tmp_path: Path, terminal: Terminal) -> None:
    for run in ("run", "other"):
        save_alone(tmp_path / run / "checkpoints", 1, state(0))
        (tmp_path / run / "job.json").write_text("{}")
    save_alone(tmp_path / "other/checkpoints", 2, state(0))
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "link-inside").symlink_to("run/checkpoints")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for source in ("run", "link", "run/checkpoints", "run/checkpoints/step-1"):
        inside = ("run", "link", "run/checkpoints", "link-inside", "run/new", "link/new", "run/checkpoints/step-1/new")
        for out in (*inside, "run/../run/x", "other", "other/checkpoints", "full", "file"):
            said = terminal.refused("reshard", tmp_path / source, tmp_path / out, "--ranks", 2)
            assert said.count("\n") <= 1
            assert "choose a" in said, (source, out)
    assert sorted(tmp_path.rglob("*")) == before
    for out in ("empty", "new"):
        terminal.ok("reshard", tmp_path / "run", tmp_path / out, "--ranks", 2)
        terminal.ok("reshard", tmp_path / "other/checkpoints/step-2", tmp_path / out, "--ranks", 2)
        assert "has a step 1 already" in terminal.refused("reshard", tmp_path / "run", tmp_path / out, "--ranks", 2)
