"""AdamW over shards has the bits of torch's over DTensors, and asks nothing of DTensor's planning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.config.parallel import ParallelConfig
from hpc_train.interfaces import World
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.optimizer_step import get_local, initialise_optimizer_state
from hpc_train.parallel.optimizers.sharded_adamw import ShardedAdamW
from hpc_train.testing import run_ranks


class _Kinds(TorchDispatchMode):
    """The types of the tensors that AdamW's kernels are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[type] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adamw_" in str(func):
            self.seen |= {type(tensor) for tensor in args[0]}
        return func(*args, **(kwargs or {}))


def _train(world: World, optimizer_class: type[torch.optim.AdamW], fused: bool) -> tuple[list[Tensor], list[type]]:
    assert get_axis_degree(world, "dp_shard") == 3
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))  # 5 rows on 3 ranks: 2, 2 and 1
    for module in (model[0], model):
        fully_shard(module, mesh=world.mesh["dp_shard"])
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.2, fused=fused, foreach=not fused)
    initialise_optimizer_state(optimizer)
    kinds = _Kinds()
    for step in range(3):
        model(torch.full((2, 5), 1.0 + step + world.rank)).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        with kinds:
            optimizer.step()
        optimizer.zero_grad()
    states = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    assert sum(isinstance(state, DTensor) for state in states) == 2 * 6, "two moments of six parameters"
    return [get_local(tensor).detach() for tensor in (*model.parameters(), *states)], sorted(kinds.seen, key=str)


@pytest.mark.parametrize("fused", [True, False])
def test_bits_are_those_of_torchs_adamw_over_dtensors(fused: bool) -> None:
    def compare(world: World) -> None:
        expected, torch_kinds = _train(world, torch.optim.AdamW, fused)
        results, kinds = _train(world, ShardedAdamW, fused)
        assert [x.tolist() for x in results] == [x.tolist() for x in expected]
        if fused:
            assert DTensor in torch_kinds, "what this class is there for"
            assert kinds
            assert DTensor not in kinds

    run_ranks(compare, 3, parallel=ParallelConfig(strategy="zero3"))
