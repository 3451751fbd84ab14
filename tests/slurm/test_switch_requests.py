"""A job that asks for one switch waits for it while two nodes on two switches are free."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurm_client import SlurmCluster

RUN = (
    "model=llama_tiny",
    "parallel=ddp",
    "cluster.nodes=2",
    "cluster.node.ranks=1",
    "cluster.node.nics=1",
    "cluster.node.nic_gbit_s=1",
    "cluster.fabric.oversubscription=4",
    "train.steps=1",
    "checkpoint.every=0",
    "launch.compact_nodes=ask",
)


def submit(run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "hpc_train", "submit", f"run_dir={run}", *RUN, *more]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def test_a_job_waits_for_the_switch_that_it_asks_for(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    busy = slurm_cluster.sbatch(
        *("-w", "node1,node3", "-N2", "--exclusive", "-t5", "-o", "/dev/null", "--wrap", "srun sleep 200")
    )
    slurm_cluster.wait_for_state(busy, {"RUNNING"}, timeout=60)
    shown = submit(tmp_path / "shown", "--dry-run")
    assert "#SBATCH --switches=1@" in shown.stdout, shown.stderr
    assert "nodes: asks Slurm for 1 leaf switch" in shown.stderr
    said = submit(tmp_path / "run", "--json")
    assert said.returncode == 0, said.stderr
    job = json.loads(said.stdout)["job_id"]
    # The free nodes, node2 and node4, are on two switches.
    record = slurm_cluster.command("scontrol", "show", "job", job)
    assert "Switches=1@00:0" in record
    slurm_cluster.command("scancel", busy)
    assert slurm_cluster.wait_for_state(job, {"COMPLETED", "FAILED"}, timeout=200) == "COMPLETED"
    nodes = slurm_cluster.command("sacct", "-X", "-n", "-o", "NodeList%40", "-j", job).strip()
    assert nodes in {"node[1-2]", "node[3-4]"}
