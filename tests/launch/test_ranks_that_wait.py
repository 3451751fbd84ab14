"""Ranks that wait for a missing rank blame it, not themselves; and the wait at the start ends."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import FAULTY, Workshop, processes

from hpc_train.launch.recovery.failures import find_first_error, is_timeout
from hpc_train.runtime.identity import ProcessIdentity
from hpc_train.runtime.rendezvous import find_missing_tasks, name_arrival_key
from hpc_train.training.records.run_records import record_failure

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation"
)
PAIR = "[/gloo/transport/tcp/pair.cc:538] Application timeout caused pair closure"
NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"


def test_the_rank_that_hangs_is_named_and_not_those_that_waited(workshop: Workshop) -> None:
    words = (*FAULTY, "train.steps=100000", "checkpoint.every=0", "launch.timeout_seconds=10")
    ended = workshop.train("run", *words, faults="1:train:3:hold")
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert "rank 0 stopped waiting after launch.timeout_seconds=10 for rank 1 (task 1 on " in line
    assert "which reported nothing: it hangs" in line
    assert processes(workshop.folder) == []


@pytest.mark.parametrize("message", [GLOO, PAIR, NCCL])
def test_several(tmp_path: Path, message: str) -> None:
    logs = tmp_path / "logs/0"
    logs.mkdir(parents=True)
    ranks = [{"rank": 3 - task, "process": task, "host": f"n{task}.site"} for task in range(4)]
    (logs / "rankmap.json").write_text(json.dumps({"ranks": ranks}))
    for task in (0, 2):
        record_failure(logs, task, f"n{task}", RuntimeError(message))
    error = find_first_error(logs)
    assert error is not None
    assert error.task == 1
    assert error.line.startswith("ranks 3, 1 stopped waiting for ranks 2 (task 1 on n1), 0 (task 3 on n3), which")
    for task in (1, 3):
        record_failure(logs, task, f"n{task}", RuntimeError(message))
    assert find_first_error(logs).line.startswith("task 0 on n0 failed first"), "all of them stopped waiting"  # type: ignore[union-attr]


def test_errors_of_other_things_that_take_long_are_no_timeouts_of_ranks() -> None:
    assert not is_timeout("HTTPSConnectionPool: Read timed out. (read timeout=10)")
    assert not is_timeout("a fault of the user's model")


def test_who_has_not_come_is_named_with_its_node() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    me = ProcessIdentity(0, 8, 0, 0, 4, "slurm", "n1", "key")
    for process in (1, 2, 3, 5):
        store.set(name_arrival_key(process), "")
    env = {"SLURM_JOB_NODELIST": "n[1-4]"}
    assert find_missing_tasks(store, me, env).describe() == "tasks 4, 6, 7 on n[3-4]"
    assert find_missing_tasks(store, me, {}).describe() == "tasks 4, 6, 7"
    for order, where in (("cyclic", " on n[1,3-4]"), ("arbitrary", "")):
        dealt = env | {"SLURM_DISTRIBUTION": order}
        assert find_missing_tasks(store, me, dealt).describe() == f"tasks 4, 6, 7{where}"
