"""A sweep on the real Slurm as its user sees it, for the tests of sweeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cli.run.status import read_statuses
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.run_lookup import find_points

FAULTY = Path(__file__).parents[1] / "launch"
TINY = (
    *("model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16"),
    *("train.global_batch=4", "train.micro_batch=1", "train.eval_every=0", "train.noise_scale.every=0"),
    *("train.tensorboard=false", "train.steps=3", "checkpoint.every=50000", "launch.time_minutes=5"),
    *("cluster.node.ranks=1", "cluster.slurm.exclusive=false", "launch.export=[FAULTS,FAULT_FOLDER,STEP_SECONDS]"),
)
ENDLESS = "train.steps=100000"
LATER = "+launch.extra.begin=now+2hours"


@dataclass(frozen=True)
class Sweep:
    """The sweep of one test."""

    path: Path
    store: Path

    def run(self, *words: str, faults: str = "", code: int = 0, **env: str) -> str:
        """What a command of ours prints; it ends with `code`. What it says on stderr where it ends with another."""
        (self.path.parent / "faults").mkdir(exist_ok=True)
        python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
        own = {"PYTHONPATH": python, "FAULTS": faults, "FAULT_FOLDER": str(self.path.parent / "faults")}
        own |= {"STEP_SECONDS": "0"}
        said = subprocess.run(
            [sys.executable, "-m", "hpc_train", *words],
            env={**os.environ, **own, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == code, said.stderr
        return said.stdout if code == 0 else said.stderr

    def submit(self, *overrides: str, **options: Any) -> Any:
        data = ("data=text", f"data.path={self.store}")
        words = ("submit", "-m", "--json", *TINY, *data, f"run_dir={self.path}", *overrides)
        said = self.run(*words, **options)
        return json.loads(said) if not options.get("code") else said

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["point"]: row for row in json.loads(self.run("status", "--json", str(self.path)))}

    def states(self) -> list[str]:
        return [row["state"] for row in self.rows().values()]

    def wait(self, what: str, true: Callable[[dict[str, dict[str, Any]]], bool], timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not true(rows := look_at(self.path)):
            assert time.monotonic() < end, f"not within {timeout:g} s: {what}: {rows}"
            time.sleep(0.3)

    def point(self, name: str) -> Path:
        return self.path / "points" / name

    def code_of_nobody(self) -> Path:
        """Make a snapshot of the code in this sweep's store, of a run that no longer exists."""
        path = self.path.parent / f".hpc_train-code-{os.getuid()}" / ("a" * 40)
        path.mkdir(mode=0o700, parents=True)
        path.parent.chmod(0o700)
        line = {"event": "use", "time": 0.0, "code": path.name, "run": str(self.path.parent / "gone")}
        (path.parent / "users.jsonl").write_text(json.dumps(line) + "\n")
        return path

    def steps(self, name: str) -> int:
        path = self.point(name) / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def look_at(path: Path) -> dict[str, dict[str, Any]]:
    """Return what `hpc-train status --json` would print, by point, without a command, which takes a third of a second
    of a core: for waits that look again and again.
    """
    return {row["point"]: row for row in (status.row() for status in read_statuses(find_points(str(path), run_client)))}


def waits_for_its_time(rows: dict[str, dict[str, Any]]) -> bool:
    """Return whether a job waits for its begin time, as LATER makes it, once Slurm has looked at it."""
    return {(row["state"], row["reason"]) for row in rows.values()} == {("PENDING", "BeginTime")}


def ended(rows: dict[str, dict[str, Any]]) -> bool:
    return not {"RUNNING", "PENDING", "REQUEUED"} & {row["state"] for row in rows.values()}
