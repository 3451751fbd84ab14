"""The mesh has every axis at every layout, and each rank knows its share of the batch."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hpc_train.config.parallel import AXES, ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import RankMap, Task, World
from hpc_train.runtime.start import leave_process_group, start
from hpc_train.testing import run_ranks


def seen(world: World) -> dict[str, object]:
    return {
        "axes": world.mesh.mesh_dim_names,
        "sizes": tuple(world.mesh.shape),
        "at": tuple(world.mesh.get_coordinate() or ()),
        "rank": (world.rank, world.size),
        "dp": (world.dp_index, world.dp_size),
    }


def test_ddp_replicates_over_all_ranks() -> None:
    assert run_ranks(seen, 2) == [
        {"axes": AXES, "sizes": (1, 2, 1, 1, 1), "at": (0, rank, 0, 0, 0), "rank": (rank, 2), "dp": (rank, 2)}
        for rank in range(2)
    ]


def test_one_rank_has_all_axes_too() -> None:
    (only,) = run_ranks(seen, 1)
    assert only == {"axes": AXES, "sizes": (1, 1, 1, 1, 1), "at": (0, 0, 0, 0, 0), "rank": (0, 1), "dp": (0, 1)}


def test_a_rank_knows_its_node() -> None:
    def start_elsewhere(_: World) -> int:
        leave_process_group()
        task = Task(0, 1, 0, 3, 1, "testing", "localhost", dist.HashStore())
        return start(task, RankMap((0,)), RunConfig()).node

    assert run_ranks(start_elsewhere, 1) == [3]


def test_hybrid_sharding_counts_shares_over_both_axes() -> None:
    hybrid = ParallelConfig(strategy="zero3", dp_replicate=2, dp_shard=2)
    ranks = run_ranks(seen, 4, parallel=hybrid)
    assert [rank["sizes"] for rank in ranks] == [(1, 2, 2, 1, 1)] * 4
    assert [rank["at"] for rank in ranks] == [(0, 0, 0, 0, 0), (0, 0, 1, 0, 0), (0, 1, 0, 0, 0), (0, 1, 1, 0, 0)]
    assert [rank["dp"] for rank in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_ranks_of_one_tensor_group_share_their_part_of_the_batch() -> None:
    ranks = run_ranks(seen, 4, parallel=ParallelConfig(tp=2))
    assert [rank["sizes"] for rank in ranks] == [(1, 2, 1, 1, 2)] * 4
    assert [rank["dp"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_degrees_that_do_not_multiply_print_the_equation() -> None:
    config = RunConfig(parallel=ParallelConfig(tp=2, dp_replicate=2))
    task = Task(0, 2, 0, 0, 1, "testing", "localhost")
    with pytest.raises(UserError, match=r"pp 1 x dp_replicate 2 x dp_shard 1 x cp 1 x tp 2 = 4, but the world has 2"):
        start(task, RankMap((0, 1)), config)
