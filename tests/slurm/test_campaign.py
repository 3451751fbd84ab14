"""Each kind of fault once, on a cluster of its own; random ones are long, and `make campaign` has an hour of them.

Takes minutes: a hang is noticed after ten seconds, and each start of the ranks imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_faults_of_jobs
from fault_kinds import KINDS
from fault_sequence import ELSEWHERE, IN_THE_START_AFTER, SEQUENCE, FaultSequence
from slurm_client import SlurmCluster, slurm_conf

CAMPAIGN = Path(__file__).with_name("campaign.py")


@pytest.fixture
def cluster(second_cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster with all nodes idle. No job outlives a test: one that failed would keep the nodes from the next."""
    conf = slurm_conf(second_cluster)
    monkeypatch.setenv("SLURM_CONF", str(conf))
    made = SlurmCluster(conf, second_cluster)
    made.wait_for_idle_nodes(timeout=300)  # a node on which Slurm cannot end a task is drained after 180 s
    yield made
    for job in made.squeue("-o", "%A"):
        made.scancel(job)


@pytest.mark.long
@pytest.mark.hangs
@pytest.mark.timeout(1500)
def test_a_run_of_random_faults_ends_as_one_without(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ["--minutes", "1", "--mttf", "30", "--seed", "4", "--folder", str(tmp_path / "campaign")]
    said = subprocess.run(
        [sys.executable, str(CAMPAIGN), *words],
        env={**os.environ, "HPC_TRAIN_DEV_CLUSTER": str(cluster.directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "bit for bit" in said.stdout
    faults = json.loads((tmp_path / "campaign/faults.json").read_text())
    assert len(faults) >= 2


@pytest.mark.hangs
@pytest.mark.timeout(2400)
def test_each_kind_of_fault_once_in_one_run(cluster: SlurmCluster, store: Path, tmp_path: Path) -> None:
    sequence = FaultSequence(cluster, tmp_path / "faults" / "run", store)
    sequence.submit()
    try:
        for fault, moment in SEQUENCE:
            print(sequence.meet(fault, moment), flush=True)
        sequence.finish()
    finally:
        sequence.repair()


def test_each_kind_of_fault_is_met_by_a_test() -> None:
    met = [*(fault for fault, _ in SEQUENCE), *IN_THE_START_AFTER.values()]
    assert sorted([*met, *ELSEWHERE]) == sorted(KINDS)
    assert [name for name in ELSEWHERE.values() if not hasattr(test_faults_of_jobs, name)] == []
