"""Between ranks of one node a reduce-scatter over gloo is an exchange of parts and a sum: the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcome import Array
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from hpc_train._torch.process_groups import reduce_scatter
from hpc_train.config.parallel import ParallelConfig
from hpc_train.interfaces import World
from hpc_train.parallel.reduce_scatter import (
    AllToAllReduceScatter,
    choose_reduce_scatter,
    reduce_parts,
    reduces_by_all_to_all,
)
from hpc_train.testing import run_ranks

RANKS, ROWS = 3, 5


def _draw_parts(rank: int, dtype: torch.dtype) -> Tensor:
    """A rank's parts for all ranks, (RANKS, ROWS, 2)."""
    return torch.randn(RANKS, ROWS, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def _reduce(world: World, dtype: torch.dtype) -> list[Array]:
    """(ours, gloo's, ours as fully_shard calls it: sum and mean)."""
    group, parts = world.mesh.get_group("dp_shard"), _draw_parts(world.rank, dtype)
    assert reduces_by_all_to_all(group, world)
    ours, theirs = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    reduce_parts(ours, parts, group, by_all_to_all=True)
    reduce_scatter(theirs, parts, group)
    found, exchange = [ours, theirs], AllToAllReduceScatter()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        out = exchange.allocate((ours.numel(),), dtype=dtype, device=ours.device)
        exchange(output_tensor=out, input_tensor=parts.flatten(), group=group, op=op)
        found.append(out.view_as(ours))
    return [tensor.double().cpu().numpy() for tensor in found]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.bfloat16, 2**-7)])
def test_parts_are_added_in_the_order_of_ranks(dtype: torch.dtype, tolerance: float) -> None:
    parallel = ParallelConfig(strategy="zero3", dp_shard=RANKS)
    for rank, (ours, theirs, total, mean) in enumerate(run_ranks(_reduce, RANKS, dtype, parallel=parallel)):
        expected = torch.stack([_draw_parts(other, dtype)[rank] for other in range(RANKS)]).sum(0)
        np.testing.assert_array_equal(ours, expected.double())
        np.testing.assert_array_equal(total, expected.double())
        np.testing.assert_array_equal(mean, (expected / RANKS).double())
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(ours)


def test_ranks_of_several_nodes_keep_gloos() -> None:
    """With two ranks on each of two nodes, tp stays inside a node and dp_shard does not."""

    def ask(world: World) -> list[bool]:
        on_nodes = replace(world, node=world.rank // 2)
        return [reduces_by_all_to_all(world.mesh.get_group(axis), on_nodes) for axis in ("tp", "dp_shard", "pp")]

    parallel = ParallelConfig(strategy="zero3", dp_shard=2, tp=2)
    assert run_ranks(ask, 4, parallel=parallel) == [[True, False, False]] * 4


def test_groups_of_fully_shard_over_several_nodes_keep_gloos() -> None:
    def count(world: World, nodes: int) -> int:
        model = nn.Linear(4, 2)
        mesh = world.mesh["dp_shard"]
        fully_shard(model, mesh=mesh)
        choose_reduce_scatter([model], mesh, replace(world, node=world.rank * nodes // world.size))
        with CommDebugMode() as seen:
            model(torch.ones(1, 4)).sum().backward()
        return sum(calls for name, calls in seen.get_comm_counts().items() if "alltoall" in str(name))

    parallel = ParallelConfig(strategy="zero3", dp_shard=2)
    assert [run_ranks(count, 2, nodes, parallel=parallel) for nodes in (1, 2)] == [[1, 1], [0, 0]]
