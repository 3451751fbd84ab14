"""Submit small trainings, read the files that they leave, and find their processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.checkpoint import load_step
from hpc_train.checkpoint.convert.tensor_sources import make_blank_shard
from hpc_train.checkpoint.storage.step_directory import try_read_manifest

RANKS = ["cluster.nodes=2", "cluster.node.ranks=1"]
TINY = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.feed_forward=64", "train.sequence_length=32"]


def hpc_train(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_train", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def submit(run: Path, *overrides: str, **env: str) -> str:
    """Submit a run on two nodes of one rank each, as each rank imports torch; returns the job id."""
    said = hpc_train("submit", "--json", *RANKS, f"run_dir={run}", "launch.time_minutes=10", *overrides, **env)
    assert said.returncode == 0, said.stderr
    job_id = json.loads(said.stdout)["job_id"]
    assert isinstance(job_id, str)
    return job_id


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_done(run: Path) -> int:
    return max((line["step"] for line in lines(run / "metrics.jsonl")), default=0)


def kinds(run: Path) -> list[str]:
    return [event["event"] for event in lines(run / "events.jsonl")]


def wait_until(what: str, true: Callable[[], bool], timeout: float = 120, pause: float = 0.1) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(pause)


def tensors(run: Path, step: int) -> dict[str, np.ndarray]:
    """Return every tensor of a checkpoint, whole."""
    manifest = try_read_manifest(run / f"checkpoints/step-{step}", step)
    assert manifest is not None
    pieces = [make_blank_shard(tensor, tensor.rectangle) for tensor in manifest.step_layout.tensors]
    load_step(run / "checkpoints", step, pieces, None)
    return {piece.name: piece.local.numpy() for piece in pieces}


def assert_same_result(run: Path, reference: Path, step: int) -> None:
    """Check that two runs have the same parameters and optimizer state bit for bit, and every step once with the same
    loss.
    """
    expected, actual = tensors(reference, step), tensors(run, step)
    assert expected
    assert expected.keys() == actual.keys()
    different = [name for name in expected if expected[name].tobytes() != actual[name].tobytes()]
    assert different == []
    losses = [[(line["step"], line["loss"]) for line in lines(path / "metrics.jsonl")] for path in (reference, run)]
    assert losses[0] == losses[1]


def tasks_of(run: Path) -> dict[int, int]:
    """Return task -> process id on this machine, for the ranks of a run that are alive on any node."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                item.split(b"=", 1) for item in (process / "environ").read_bytes().split(b"\0") if b"=" in item
            )
        except OSError:
            continue
        if b"hpc_train.launch.rank_entrypoint" in words and str(run).encode() in words and b"SLURM_PROCID" in variables:
            found[int(variables[b"SLURM_PROCID"])] = int(process.name)
    return found


def pid_of_task(run: Path, task: int) -> int:
    wait_until(f"task {task}", lambda: task in tasks_of(run))
    return tasks_of(run)[task]


def parent_of(process: int) -> int:
    """Return the process that started this one."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def find_script(job: str) -> int:
    """Return the shell of a job's batch script, whose own subshells have the same command line."""
    scripts = processes_with("slurm_script", f"job{int(job):05}")
    return next(script for script in scripts if parent_of(script) not in scripts)


def variables_of(process: int) -> dict[str, str]:
    """Return the environment of a process; {} if it has ended by now."""
    try:
        items = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def processes_with(*words: str, srun: bool = False) -> list[int]:
    """Return the ids of the processes of this machine with these words on their command line: srun's own, or all
    others.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in command for word in words) and command.startswith("srun") == srun:
            found.append(int(entry.name))
    return found
