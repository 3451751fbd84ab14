"""ddp: only the last micro-batch of a step communicates gradients, each byte of them once (zero: test_zero.py)."""

from __future__ import annotations

import pytest
from plain_setup import LAYOUTS, engine_of, global_batch, model, share
from recorder import REDUCE, Call, Recorder

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks


def _one_step(world: World, config: RunConfig, accumulation: str) -> list[Call]:
    """Of the second step: the first one also sets up."""
    engine = engine_of("untied", config, world)
    batch = share(global_batch("untied", 0), world, accumulation)
    engine.forward_backward(batch)
    engine.update(0.0)
    with Recorder(engine) as recorder:
        engine.forward_backward(batch)
    return recorder.calls


def _calls(name: str, *more: str, accumulation: str = "two") -> list[Call]:
    layout = LAYOUTS[name]
    config = layout.config(*more)
    ranks = run_ranks(_one_step, layout.ranks, config, accumulation, parallel=config.parallel)
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
