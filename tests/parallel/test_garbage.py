"""No tensor of a step waits for Python's collector, which train.gc_every lets run rarely: memory would grow."""

from __future__ import annotations

import gc

import pytest
import torch

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

LAYOUTS = {
    "zbv": ("parallel=pp", "parallel.pp=2", "parallel.pipeline.schedule=zbv"),
    "1f1b": ("parallel=pp", "parallel.pp=2"),
    "ddp": ("parallel=ddp",),
    "recomputed": ("parallel=fsdp", "parallel.recompute.mode=full"),
    "async_tp": ("parallel=fsdp", "parallel.tp=2", "parallel.tensor.asynchronous=true"),
    "cp": ("parallel=fsdp", "parallel.cp=2"),
    "ep": ("parallel=fsdp", "parallel.ep=2", "model=llama_moe_tiny"),
}


def count_tensors_in_cycles(world: World, config: RunConfig) -> int:
    """Count the tensors of a third step that only a collection finds; the steps before set up."""
    with torch.device("meta"):
        model = build_model(config.model, 0)
    engine = build(model, lambda split: make_optimizer(split, config.optim, world), config, world, lambda _: None)
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    batch = StepBatch([MicroBatch(tokens, tokens)] * 4)
    gc.disable()
    for step in range(3):
        if step == 2:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
        engine.forward_backward(batch)
        engine.clip(1.0)
        engine.update(1e-3)
    gc.collect()
    return sum(isinstance(found, torch.Tensor) for found in gc.garbage)


@pytest.mark.parametrize(
    "name", [name if name == "zbv" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_no_tensor_waits_for_the_collector(name: str) -> None:
    config = compose([*LAYOUTS[name], "train.sequence_length=32", "train.micro_batch=1", "train.global_batch=8"])
    assert run_ranks(count_tensors_in_cycles, 2, config, parallel=config.parallel) == [0, 0]
