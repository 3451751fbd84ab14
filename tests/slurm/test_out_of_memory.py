"""A job of which the kernel ends a rank for want of memory is OUT_OF_MEMORY, also where Slurm calls it FAILED."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from slurm_client import dev_cluster, slurm_conf
from sweep_client import Sweep, ended

sys.path.append(str(Path(__file__).parents[1] / "hydra_launchers"))
from sweeping import Sweeping, value

SHAPE = ("--nodes", "1", "--cpus-per-node", "4", "--cgroup", "--no-accounting")
CONTROLLER = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
EATS = "1:train:2:eat"


def test_what_the_kernel_ends_is_told_as_out_of_memory(
    one_more_cluster: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access(CONTROLLER, os.W_OK):
        pytest.skip("dev-cluster --cgroup needs the memory controller of cgroup v1, mounted and writable")
    up = dev_cluster("up", *SHAPE, directory=one_more_cluster)
    assert up.returncode == 0, up.stderr
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf(one_more_cluster)))
    said = sweep.submit("cluster.nodes=1", "cluster.node.ranks=2", "launch.memory_gib=1", faults=EATS)
    (returned,) = Sweeping(sweep.path.parent).launch("hpc_slurm", ["time_minutes=5", "memory_gib=0.3"], ["do=eat"])
    assert "OUT_OF_MEMORY" in str(value(returned)).splitlines()[0]
    sweep.wait("the end", ended)
    (row,) = sweep.rows().values()
    assert (row["state"], row["point"], row["exit_code"] != 0) == ("OUT_OF_MEMORY", said["points"][0], True), row
    assert "task 1 on node1 was ended from outside: Out Of Memory" in row["reason"]
    assert "Out Of Memory" in sweep.run("logs", "--first-error", str(sweep.point(row["point"])))
