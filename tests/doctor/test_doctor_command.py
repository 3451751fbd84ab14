"""`hpc-train doctor` as a user runs it: alone, and in a job of two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "hpc_train", "doctor"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "NCCL_", "GLOO_"))}


def _run(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    options: dict[str, Any] = {"cwd": folder, "env": {**CLEAN, "OMP_NUM_THREADS": "1", **env}, "text": True}
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def _two_ranks(folder: Path, *arguments: str, env: tuple[dict[str, str], dict[str, str]] = ({}, {})) -> list[Any]:
    """(exit code, output, errors) of each."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [_run(folder, *arguments, **job, RANK=str(rank), LOCAL_RANK=str(rank), **env[rank]) for rank in range(2)]
    said = [process.communicate(timeout=120) for process in started]
    return [(process.returncode, *text) for process, text in zip(started, said, strict=True)]


def test_alone(tmp_path: Path) -> None:
    process = _run(tmp_path, "--json")
    out, errors = process.communicate(timeout=120)
    told = json.loads(out)
    names = {finding["name"] for finding in told["findings"]}
    assert {"python", "torch", "mpi", "gpus", "slurm", "/dev/shm", "run_dir", "interface", "environment"} <= names
    assert process.returncode == (0 if told["ok"] else 1), errors


def test_alone_as_text_with_something_broken(tmp_path: Path) -> None:
    process = _run(tmp_path, "launch=local", GLOO_SOCKET_IFNAME="nosuch0", NCCL_IB_DISABLE="1")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "BAD   environment" in out
    assert "NCCL_IB_DISABLE=1 is set" in out


def test_a_wrong_override_is_one_line(tmp_path: Path) -> None:
    process = _run(tmp_path, "train.stepz=3")
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert errors.count("\n") == 1


def test_two_ranks_examine_their_job(tmp_path: Path) -> None:
    first, second = _two_ranks(tmp_path, "--json", "parallel.tp=2")
    told = json.loads(first[1])
    found = {finding["name"]: finding for finding in told["findings"]}
    assert (first[0], second[0]) == ((0, 0) if told["ok"] else (1, 1)), first[2] + second[2]
    assert second[1] == "", "rank 0 prints for all"
    assert found["job"]["text"] == "2 ranks on 1 nodes, started by torchrun"
    assert {"order", "versions", "config", "network", "matrix product", "memory copy"} <= found.keys()
    assert "GB/s" in found["all-reduce tp"]["text"]


def test_two_ranks_that_disagree(tmp_path: Path) -> None:
    """On their configuration; and its degrees fit no job of two."""
    rows = _two_ranks(
        tmp_path, "--json", "parallel.tp=3", "optim.lr=${oc.env:RATE}", env=({"RATE": "0.1"}, {"RATE": "0.2"})
    )
    told = json.loads(rows[0][1])
    broken = {finding["name"]: finding["text"] for finding in told["findings"] if finding["status"] == "bad"}
    assert [row[0] for row in rows] == [1, 1]
    assert "1 of 2 ranks" in broken["config"]
    assert "do not divide by 3" in broken["parallel"]
