"""`hpc-train bench submit` on the real Slurm: every point is handed over, counted, and taken back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurm_client import SlurmCluster


def test_a_sweep_is_submitted_measured_and_taken_back(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hpc_train", "bench", "submit", "--points", "3", "--rounds", "1", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (ours,) = said["rounds"]
    assert (said["points"], ours["side"], ours["files"]) == (3, "hpc-train submit -m", 3)
    assert ours["wall_seconds"] > 0 < ours["cpu_seconds"]
    assert slurm_cluster.squeue("--name=bench-ours", "-t", "PENDING,RUNNING") == []
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("bench-submit-")]
