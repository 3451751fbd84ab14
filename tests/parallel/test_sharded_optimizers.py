"""AdamW and SGD over shards have the bits of torch's over DTensors, and none of these reach their kernels."""

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
from hpc_train.parallel.optimizer_step import get_local, initialise_optimizer_state
from hpc_train.parallel.optimizers.sharded import ShardedAdamW, ShardedSGD
from hpc_train.testing import run_ranks


class SeenTypes(TorchDispatchMode):
    """Types of all tensors of the lists that operators are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[type] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], (list, tuple)):
            self.types |= {type(tensor) for tensor in args[0]}
        return func(*args, **(kwargs or {}))


def train(world: World, kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> tuple[list[Tensor], set[type]]:
    """Train on shards of unequal size; returns what this rank has of parameters and state, and the types seen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))  # 5 rows on 3 ranks: 2, 2 and 1
    for module in (model[0], model):
        fully_shard(module, mesh=world.mesh["dp_shard"])
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.2, **settings)
    initialise_optimizer_state(optimizer)
    seen = SeenTypes()
    for step in range(3):
        model(torch.full((2, 5), 1.0 + step + world.rank)).square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        with seen:
            optimizer.step()
        optimizer.zero_grad()
    states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    assert len(optimizer.state) in (0, 6), "state belongs to the parameters, and not to what a rank has of them"
    assert all(isinstance(value, DTensor) for value in states if value.ndim)
    return [get_local(tensor).detach() for tensor in (*model.parameters(), *states)], seen.types


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (ShardedAdamW, torch.optim.AdamW, {"fused": True}),
        (ShardedAdamW, torch.optim.AdamW, {"foreach": True}),
        (ShardedSGD, torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (ShardedSGD, torch.optim.SGD, {"foreach": True}),
    ],
)
def test_bits_are_those_of_torch_over_dtensors(
    ours: type[torch.optim.Optimizer], theirs: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    def compare(world: World) -> None:
        expected, expected_types = train(world, theirs, settings)
        results, types = train(world, ours, settings)
        assert [tensor.tolist() for tensor in results] == [tensor.tolist() for tensor in expected]
        assert DTensor in expected_types, "what these classes are there to avoid"
        assert types
        assert DTensor not in types

    run_ranks(compare, 3, parallel=ParallelConfig(strategy="zero3"))


def test_sgd_has_a_fused_kernel_over_shards_too() -> None:
    """torch has none over DTensors; the numbers are those of the one for lists, but for rounding."""

    def compare(world: World) -> None:
        momentum = {"momentum": 0.9, "nesterov": True}
        expected, _ = train(world, torch.optim.SGD, {"foreach": True, **momentum})
        results, _ = train(world, ShardedSGD, {"fused": True, **momentum})
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    run_ranks(compare, 3, parallel=ParallelConfig(strategy="zero3"))
