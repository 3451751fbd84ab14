"""Four minutes of random faults in a training job, on a cluster of its own; an hour of them is `make campaign`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_client import dev_cluster

CAMPAIGN = Path(__file__).with_name("campaign.py")


@pytest.fixture
def cluster_of_five() -> Iterator[Path]:
    """Directory of a cluster of four nodes and a spare. Its name is short, as those of Slurm's sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        directory = Path(folder) / "c"
        words = ("up", "--nodes", "5", "--cpus-per-node", "8", "--switches", "2")
        started = dev_cluster(*words, directory=directory)
        assert started.returncode == 0, started.stderr
        yield directory
        down = dev_cluster("down", directory=directory)
        assert down.returncode == 0, down.stderr


@pytest.mark.hangs
@pytest.mark.timeout(900)
def test_a_run_of_random_faults_ends_as_one_without(cluster_of_five: Path, tmp_path: Path) -> None:
    words = ["--minutes", "1.5", "--mttf", "40", "--seed", "4", "--folder", str(tmp_path / "campaign")]
    said = subprocess.run(
        [sys.executable, str(CAMPAIGN), *words],
        env={**os.environ, "HPC_TRAIN_DEV_CLUSTER": str(cluster_of_five)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "bit for bit" in said.stdout
    faults = json.loads((tmp_path / "campaign/faults.json").read_text())
    assert len(faults) >= 2
