"""Training where a placement gave processes other ranks: rank 0 is not process 0, and the numbers are the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TURNED = [sys.executable, str(HERE / "turned_round.py")]
PLAIN = [sys.executable, "-m", "hpc_train"]
LAUNCHERS = re.compile(r"SLURM|PMI|OMPI|MPI_|SUBMITIT|TORCHELASTIC|RANK$|WORLD_SIZE|LOCAL_|MASTER_|HPC_TRAIN_")
SETTINGS = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.feed_forward=64",
    "train.sequence_length=16",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.eval_every=0",
    "train.noise_scale.every=0",
    "train.tensorboard=false",
    "precision=fp64",
    "cluster.fabric.interface=lo",
    "launch.timeout_seconds=100",
    "checkpoint.every=3",
)
SPLIT = ("train.steps=6", "parallel.strategy=zero3", "parallel.dp_shard=2", "parallel.tp=2")


def rank_environment(process: int, each: int, meeting: Path, **more: str) -> dict[str, str]:
    """Of a task of srun with `each` tasks on each of 2 nodes, which are this machine twice."""
    clean = {key: value for key, value in os.environ.items() if not LAUNCHERS.search(key)}
    return clean | {
        "OMP_NUM_THREADS": "1",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process % each),
        "SLURM_NODEID": str(process // each),
        "SLURM_STEP_NUM_TASKS": str(2 * each),
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": ("alpha", "beta")[process // each],
        "HPC_TRAIN_RENDEZVOUS": str(meeting),
        **more,
    }


def train(
    command: list[str], each: int, run: Path, store: Path, *overrides: str, **env: str
) -> tuple[list[int], list[str]]:
    """Train on 2 nodes with `each` processes; (exit codes, what each printed)."""
    run.mkdir(exist_ok=True, parents=True)
    words = [*command, "train", f"run_dir={run}", f"data.path={store}", *SETTINGS, *overrides]
    meeting = run.parent / f"{run.name}-meeting-{time.monotonic_ns()}"
    meeting.mkdir()
    ranks = [
        subprocess.Popen(
            words,
            env=rank_environment(process, each, meeting, **env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2 * each)
    ]
    said = [rank.communicate(timeout=150)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(run / "metrics.jsonl")]


def assert_same(found: list[tuple[int, float, float]], expected: list[tuple[int, float, float]]) -> None:
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "text.h5"
    folder = str(Path(json.__file__).parent)
    subprocess.run([*PLAIN, "data", "build", str(path), folder], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """Six steps in the launcher's order, of two ranks: the numbers are those of four."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    codes, said = train(PLAIN, 1, run, store, *SPLIT, "parallel.tp=1", "launch.placement=launcher")
    assert codes == [0] * 2, said
    return run


@pytest.mark.timeout(300)
def test_the_numbers_do_not_depend_on_who_is_which_rank(store: Path, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "turned"
    codes, said = train(TURNED, 2, run, store, *SPLIT)
    assert codes == [0] * 4, said
    found = json.loads((run / "rankmap.json").read_text())
    assert [(it["process"], it["host"], it["local_rank"]) for it in found["ranks"]] == [
        (2, "beta", 0),
        (3, "beta", 1),
        (0, "alpha", 0),
        (1, "alpha", 1),
    ]
    assert [it["rank"] for it in found["ranks"]] == [0, 1, 2, 3]
    assert len(found["hash"]) == 64
    # Rank 0 speaks, wherever it is; process 0 says who that is.
    assert "placement: 2.00x less" in said[2]
    assert "rank 0, which speaks for all, is task 2" in said[0]
    assert [text.count("step 6/6") for text in said] == [0, 0, 1, 0]
    assert_same(losses(run), losses(reference))
    # Resumed in the other order: every rank is on another node now.
    codes, said = train(PLAIN, 2, run, store, *SPLIT, "launch.placement=launcher", "checkpoint.resume=3")
    assert codes == [0] * 4, said
    assert "resumed at step 3" in said[0]
    assert_same(losses(run), losses(reference))


@pytest.mark.timeout(300)
def test_where_nothing_is_known_it_is_said_loudly(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "unknown"
    codes, said = train(PLAIN, 1, run, store, "train.steps=1", "checkpoint.every=0")
    assert codes == [0] * 2, said
    why = "the launcher's order, not placed: no source says which switches the nodes are on"
    assert f"warning: placement: {why}" in said[0]
    (warned,) = [line for line in lines(run / "events.jsonl") if line["event"] == "warning"]
    assert warned["why"].startswith(why)
    assert json.loads((run / "rankmap.json").read_text())["warning"] == warned["why"]
