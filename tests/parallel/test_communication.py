"""Only the last micro-batch of a step communicates gradients, each byte of them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from plain_setup import LAYOUTS, engine_of, global_batch, model, share
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_train.api import Engine, World
from hpc_train.config.run import RunConfig
from hpc_train.testing import run_ranks

LAYERS = 2
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


@dataclass(frozen=True)
class Call:
    """One collective over gradients or parameters."""

    name: str
    micro: int
    """Micro-batches whose forward had begun."""
    bytes: int
    """Of the largest of its tensors."""


class Recorder(TorchDispatchMode):
    """Sees every operation of torch; keeps the collectives. Scalars are sums of losses, int64 are counts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.micro = 0
        engine.parts[0].register_forward_pre_hook(self._forward)

    def _forward(self, *_: Any) -> None:
        self.micro += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if all(tensor.ndim and tensor.is_floating_point() for tensor in tensors):
                name = func.overloadpacket.__name__
                self.calls.append(Call(name, self.micro, max(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def _one_step(world: World, config: RunConfig, accumulation: str, measure: bool) -> list[Call]:
    """Of the second step: the first one also sets up."""
    engine = engine_of("untied", config, world)
    batch = share(global_batch("untied", 0), world, accumulation)
    engine.forward_backward(batch)
    engine.update(0.0)
    batch.measure = measure
    with Recorder(engine) as recorder:
        engine.forward_backward(batch)
    return recorder.calls


def _calls(name: str, *more: str, accumulation: str = "two", measure: bool = False) -> list[Call]:
    layout = LAYOUTS[name]
    config = layout.config(*more)
    ranks = run_ranks(_one_step, layout.ranks, config, accumulation, measure, parallel=config.parallel)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.mark.parametrize(("accumulation", "micro"), [("one", 1), ("two", 2), ("short_last", 2)])
def test_ddp_reduces_the_bytes_of_its_parameters_once_in_the_last_micro_batch(accumulation: str, micro: int) -> None:
    calls = _calls("ddp-2", "parallel.bucket_mib=0.01", accumulation=accumulation)
    assert len(calls) > 1, "several buckets, so that they travel while backward goes on"
    assert {(call.name, call.micro) for call in calls} == {(REDUCE, micro)}
    assert sum(call.bytes for call in calls) == _parameter_bytes()


def _parameter_bytes() -> int:
    return sum(parameter.nbytes for parameter in model("untied").double().parameters())


@pytest.mark.parametrize("name", ["zero3-2", "zero3-2-kept", "hsdp-2x2"])
def test_zero3_reduces_every_group_once_in_the_last_micro_batch(name: str) -> None:
    calls = [call for call in _calls(name) if call.name != GATHER]
    assert {call.micro for call in calls} == {2}
    scattered = [call for call in calls if call.name == SCATTER]
    assert len(scattered) == LAYERS + 1
    padding = 1.1  # rows are filled up to a multiple of the ranks
    assert _parameter_bytes() <= sum(call.bytes for call in scattered) < padding * _parameter_bytes()
    assert len(calls) - len(scattered) == (LAYERS + 1 if name.startswith("hsdp") else 0), "all-reduces over replicas"


def test_zero3_reduces_the_first_micro_batch_too_where_it_is_measured() -> None:
    scattered = [call.micro for call in _calls("zero3-2", measure=True) if call.name == SCATTER]
    assert scattered == [1] * (LAYERS + 1) + [2] * (LAYERS + 1)


@pytest.mark.parametrize(("name", "gathers"), [("zero3-2", 2 * LAYERS + 1), ("zero3-2-kept", LAYERS + 1)])
def test_keeping_the_gathered_parameters_saves_the_gathers_of_backward(name: str, gathers: int) -> None:
    calls = _calls(name, accumulation="one")
    assert sum(call.name == GATHER for call in calls) == gathers
