"""Over gloo a reduce-scatter is an exchange of parts and a sum: gloo's numbers, the same bits in every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcome import Array
from torch import Tensor

from hpc_train._torch.process_groups import reduce_scatter
from hpc_train.config.parallel import ParallelConfig
from hpc_train.interfaces import World
from hpc_train.parallel.reduce_scatter import GradientExchange, exchanges_parts, sum_parts
from hpc_train.testing import run_ranks

RANKS, ROWS = 3, 5


def _draw_parts(rank: int, dtype: torch.dtype) -> Tensor:
    """A rank's parts for all ranks, (RANKS, ROWS, 2)."""
    return torch.randn(RANKS, ROWS, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def _reduce(world: World, dtype: torch.dtype) -> list[Array]:
    """(ours, gloo's, ours as fully_shard calls it: sum and mean)."""
    group, parts = world.mesh.get_group("dp_shard"), _draw_parts(world.rank, dtype)
    assert exchanges_parts(group, parts.device)
    ours, theirs = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    sum_parts(ours, parts, group)
    reduce_scatter(theirs, parts, group)
    found, exchange = [ours, theirs], GradientExchange()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        out = exchange.allocate((ours.numel(),), dtype=dtype, device=ours.device)
        exchange(output_tensor=out, input_tensor=parts.flatten(), group=group, op=op)
        found.append(out.view_as(ours))
    return [tensor.double().numpy() for tensor in found]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.bfloat16, 2**-7)])
def test_parts_are_added_in_the_order_of_ranks(dtype: torch.dtype, tolerance: float) -> None:
    parallel = ParallelConfig(strategy="zero3", dp_shard=RANKS)
    for rank, (ours, theirs, total, mean) in enumerate(run_ranks(_reduce, RANKS, dtype, parallel=parallel)):
        expected = torch.stack([_draw_parts(other, dtype)[rank] for other in range(RANKS)]).sum(0)
        np.testing.assert_array_equal(ours, expected.double())
        np.testing.assert_array_equal(total, expected.double())
        np.testing.assert_array_equal(mean, (expected / RANKS).double())
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(ours)
