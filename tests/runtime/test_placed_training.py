"""Training where a placement gave processes other ranks: rank 0 is not process 0, and the numbers are the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  every rank would import it by itself
from fact_helpers import backwards
from token_stores import build_store

import hpc_train.runtime.start  # noqa: F401  likewise
from hpc_train.cli.main import main
from hpc_train.config.run import RunConfig
from hpc_train.placement.placement_result import Placement
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.training import rank

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


def rank_environment(process: int, each: int, meeting: Path) -> dict[str, str]:
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
    }


def reverse_nodes(
    config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]], parameters: Callable[[], int] | None = None
) -> Placement:
    """Find a placement that always reverses the launcher's order of nodes."""
    return backwards(config, nodes)


def be_task(words: list[str], env: dict[str, str], log: Path, turned: bool) -> None:
    """Do what srun's task does: `hpc-train train` with this environment, in this forked process."""
    os.environ.clear()
    os.environ.update(env)
    with log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
        for target, source in enumerate((nothing, out, out)):
            os.dup2(source.fileno(), target)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    if turned:
        vars(rank)["search_placement"] = reverse_nodes
    sys.exit(main(words))


def train(
    each: int, run: Path, store: Path, *overrides: str, turned: bool = False
) -> tuple[list[int | None], list[str]]:
    """Train on 2 nodes with `each` processes; (exit codes, what each printed). turned: the nodes are reversed.

    The processes are forked from this one, so that they do not import torch anew.
    """
    run.mkdir(exist_ok=True, parents=True)
    words = ["train", f"run_dir={run}", f"data.path={store}", *SETTINGS, *overrides]
    meeting = run.parent / f"{run.name}-meeting-{time.monotonic_ns()}"
    meeting.mkdir()
    logs = [meeting.with_suffix(f".{process}.log") for process in range(2 * each)]
    context = multiprocessing.get_context("fork")
    tasks = [
        context.Process(target=be_task, args=(words, rank_environment(process, each, meeting), log, turned))
        for process, log in enumerate(logs)
    ]
    for task in tasks:
        task.start()
    try:
        for task in tasks:
            task.join(timeout=150)
        return [task.exitcode for task in tasks], [log.read_text() for log in logs]
    finally:
        for task in tasks:
            task.kill()
            task.join()


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
    build_store([str(Path(json.__file__).parent)], [".py"], "byte", 256, path)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """Six steps in the launcher's order, of two ranks: the numbers are those of four."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    codes, said = train(1, run, store, *SPLIT, "parallel.tp=1", "launch.placement=launcher")
    assert codes == [0] * 2, said
    return run


@pytest.mark.timeout(300)
def test_the_numbers_do_not_depend_on_who_is_which_rank(store: Path, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "turned"
    codes, said = train(2, run, store, *SPLIT, turned=True)
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
    codes, said = train(2, run, store, *SPLIT, "launch.placement=launcher", "checkpoint.resume=3")
    assert codes == [0] * 4, said
    assert "resumed at step 3" in said[0]
    assert_same(losses(run), losses(reference))


@pytest.mark.timeout(300)
def test_where_nothing_is_known_it_is_said_loudly(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "unknown"
    codes, said = train(1, run, store, "train.steps=1", "checkpoint.every=0")
    assert codes == [0] * 2, said
    why = "the launcher's order, not placed: no source says which switches the nodes are on"
    assert f"warning: placement: {why}" in said[0]
    (warned,) = [line for line in lines(run / "events.jsonl") if line["event"] == "warning"]
    assert warned["why"].startswith(why)
    assert json.loads((run / "rankmap.json").read_text())["warning"] == warned["why"]
