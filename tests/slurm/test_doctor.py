"""`hpc-train doctor` in a job: every node is measured, and each exchanges data with another one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slurm_client import SlurmCluster


def test_doctor_in_a_job_compares_its_nodes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "hpc_train", "doctor", "--json", "cluster=slurm", "launch=slurm")
    # The file by which the ranks meet is in the folder that they start in.
    words = ("srun", "-N3", "--ntasks-per-node=1", "--kill-on-bad-exit=0", f"--chdir={tmp_path}")
    shown = slurm_cluster.command(*words, *command, check=False)
    findings = {finding["name"]: finding for finding in json.loads(shown)["findings"]}
    assert findings["job"]["text"].startswith("3 ranks on 3 nodes")
    # Nodes of one machine: one of them may really be slower while other tests run.
    assert findings["nodes"]["status"] in ("ok", "warn")
    assert "matrix product" in findings["nodes"]["text"]
    assert "exchange with another node" in findings["nodes"]["text"]
