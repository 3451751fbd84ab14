"""What a placement gains is measured: a training whose groups straddle two leaf switches waits for their uplinks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_client import SlurmCluster, dev_cluster

RUN = (
    "parallel.strategy=zero3",
    "parallel.dp_replicate=2",
    "parallel.dp_shard=2",
    "cluster.node.ranks=1",
    "cluster.fabric.interface=hsn0",
    "launch.threads=1",
    "model.layers=2",
    "model.hidden=256",
    "model.heads=4",
    "model.kv_heads=4",
    "model.feed_forward=512",
    "train.sequence_length=32",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.eval_every=0",
    "train.tensorboard=false",
    "checkpoint.every=0",
)


@pytest.fixture
def slow_uplinks(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """The two leaves are joined by a tenth of what their nodes could send."""
    limits = {**{f"node{n}": "500mbit" for n in range(1, 5)}, "leaf1": "100mbit", "leaf2": "100mbit"}
    try:
        for target, rate in limits.items():
            assert dev_cluster("net", target, "rate", rate).returncode == 0
        yield
    finally:
        for target in limits:
            dev_cluster("net", target, "clear")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_bad_order_of_the_nodes_costs_time_and_placement_takes_it_back(
    slurm_cluster: SlurmCluster, slow_uplinks: None, tmp_path: Path
) -> None:
    data = tmp_path / "text.h5"
    program = f"{sys.executable} -m hpc_train"
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash -e\n"
        f"{program} data build {data} {Path(json.__file__).parent}\n"
        f"{program} bench placement --json --rounds 1 --steps 4 --largest 2M --directory {tmp_path} data=text "
        + f"data.path={data} {' '.join(RUN)} > {tmp_path}/result.json\n"
    )
    out = tmp_path / "job.log"
    job = slurm_cluster.sbatch("-N4", "--ntasks-per-node=1", "-c2", "-t15", "-o", str(out), str(script))
    assert slurm_cluster.wait_for_state(job, {"COMPLETED", "FAILED"}, timeout=800) == "COMPLETED", out.read_text()
    sides = {side["name"]: side for side in json.loads((tmp_path / "result.json").read_text())}
    assert sides["identity"]["hosts"] == ["node1", "node3", "node2", "node4"]
    leaves = [{"node1", "node2"}, {"node3", "node4"}]
    for name in ("by_leaf", "placed"):
        hosts = sides[name]["hosts"]
        assert set(hosts[:2]) in leaves
        assert set(hosts[2:]) in leaves
    measured = {name: side["seconds"] for name, side in sides.items()}
    predicted = {name: side["predicted"] for name, side in sides.items()}
    assert predicted["placed"] == pytest.approx(predicted["by_leaf"])
    for seconds in (measured, predicted):
        assert seconds["identity"] > 1.5 * seconds["placed"], "the uplinks, not the processors, decide"
