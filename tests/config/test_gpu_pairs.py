"""Links between the GPUs of a node: what contradicts itself is refused, and a mesh is slower for small groups."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest

from hpc_train.config.cluster import parse_gpu_pairs
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.described_cluster import name_described_nodes
from hpc_train.placement.fabric_from_config import build_located_fabric
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.jobs import Jobs
from hpc_train.planner.model.machine_columns import make_machine_columns
from hpc_train.planner.model.network import make_rank_group, send_seconds
from hpc_train.traffic.axes import Flow

NODE = ["cluster=slurm", "cluster.node.gpus=4", "cluster.node.gpu_link_gb_s=300"]
REFUSED = {
    "cluster.node.gpu_pair_gb_s=301": "more than gpu_link_gb_s=300",
    "+cluster.node.gpu_pairs_gb_s={0-4: 1}": "'0-4' is not a pair of two of 4 GPUs",
    "+cluster.node.gpu_pairs_gb_s={1-1: 1}": "'1-1' is not a pair",
    "+cluster.node.gpu_pairs_gb_s={x: 1}": "'x' is not a pair",
    "+cluster.node.gpu_pairs_gb_s={0-1: 0}": "0-1 has 0; expected more than 0",
    "+cluster.node.gpu_pairs_gb_s={0-1: 2, 1-0: 2}": "0-1 is there twice",
    "+cluster.environment={PATH: /bin}": "'PATH' is not a variable of a communication library",
    "cluster.gpu.name='Google TPU v5e'": "TPUs are not supported",
}


@pytest.mark.parametrize("override", list(REFUSED))
def test_what_cannot_be_is_refused_in_one_line(override: str) -> None:
    with pytest.raises(UserError) as raised:
        compose([*NODE, override])
    assert REFUSED[override] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_pairs_are_read_in_any_order() -> None:
    node = compose([*NODE, "+cluster.node.gpu_pairs_gb_s={3-2: 200, 0-1: 100.5}"]).cluster.node
    assert parse_gpu_pairs(node) == {(2, 3): 200, (0, 1): 100.5}


@pytest.mark.parametrize(("ranks", "links"), [(2, 1), (4, 3), (8, 7)])
def test_a_group_on_a_mesh_has_the_links_between_its_own_ranks(ranks: int, links: int) -> None:
    """MI300X: 64 GB/s to each of seven; brute force over the pairs that a group's ranks have."""
    config = compose(["cluster=mi300x"])
    fabric = build_located_fabric(config, NodeLocations(tuple(name_described_nodes(1))), 8)
    seconds = (
        estimate_cost(
            fabric, {"tp": ranks, "dp_shard": 8 // ranks}, [Flow(("tp",), "all_gather", 1e9, 1, "parameters")]
        ).total
        - (ranks - 1) * fabric.inside_latency
    )
    pairs = [pair for pair in itertools.permutations(range(ranks), 2) if pair[0] == 0]
    assert len(pairs) == links
    assert seconds == pytest.approx((ranks - 1) / ranks * 1e9 / (len(pairs) * 64e9))


def test_the_planner_knows_the_mesh() -> None:
    constants = default_constants()
    machine = make_machine_columns(compose(["cluster=mi300x"]).cluster, "bf16", 8)
    columns = {field.name: np.array(1.0) for field in fields(Jobs)}
    columns |= {name: np.array(float(value)) for name, value in machine.items()}
    jobs = Jobs(**columns)
    shares = [make_rank_group(jobs, constants, np.array(float(n)), np.array(1.0)).link for n in (2, 4, 8)]
    assert np.asarray(shares) / shares[2] == pytest.approx([7, 7 / 3, 1])
    single = make_rank_group(jobs, constants, np.array(8.0), np.array(1.0), np.array(1.0)).link
    assert single == pytest.approx(shares[0])
    size = np.array(1e9)
    sent = send_seconds(jobs, constants, size, np.array(1.0)) - constants.link_latency
    assert sent == pytest.approx(size * shares[0])
