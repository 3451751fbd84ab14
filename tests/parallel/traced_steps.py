"""Trace a training step of several layouts on a pretended GPU: `python traced_steps.py NAME ...` prints JSON.

It needs a process of its own because autograd looks for devices once in a process, in its first backward.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from pretend_gpu import Trace, pretend_gpu

from hpc_train._torch.process_groups import pretend_group
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.experts import list_mixtures
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.runtime.start import leave_process_group, make_world
from hpc_train.training.numerics.step_numbers import read_step_numbers
from hpc_train.training.optimizer import make_optimizer

ROWS, LENGTH, MICRO, LAYERS, EP, TOP_K = 2, 64, 2, 2, 2, 2
SHAPE = (
    f"train.sequence_length={LENGTH}",
    f"train.micro_batch={ROWS}",
    "train.global_batch=8",
    f"model.layers={LAYERS}",
)
# precision=fp32 for ddp: torch has no autocast on a device that is not its own.
LAYOUTS = {
    "ddp": (2, ("parallel=ddp", "precision=fp32")),
    "fsdp": (2, ("parallel=fsdp", "precision=bf16")),
    "tp": (4, ("parallel=fsdp", "parallel.tp=2", "precision=bf16")),
    "async_tp": (4, ("parallel=fsdp", "parallel.tp=2", "parallel.tensor.asynchronous=true", "precision=bf16")),
    "cp": (4, ("parallel=fsdp", "parallel.cp=2", "precision=bf16")),
    "pp": (4, ("parallel=fsdp", "parallel.pp=2", "precision=bf16")),
    "ep": (4, ("parallel=fsdp", f"parallel.ep={EP}", "model=llama_moe_tiny", "precision=bf16")),
    "window": (4, ("parallel=fsdp", "parallel.cp=2", "model.sliding_window=20", "precision=bf16")),
    "fp8": (2, ("parallel=fsdp", "precision=fp8")),
    "muon": (2, ("parallel=fsdp", "precision=bf16", "optim=muon")),
    "ema": (2, ("parallel=fsdp", "precision=bf16", "optim.ema.decay=0.99")),
    "chunks": (2, ("parallel=fsdp", "precision=bf16", "train.loss_chunk=32")),
    "recompute": (2, ("parallel=fsdp", "precision=bf16", "parallel.recompute.mode=full")),
    "diloco": (2, ("parallel=ddp", "precision=fp32", "parallel.sync.every=1")),
    "activations": (2, ("parallel=fsdp", "precision=bf16", "parallel.recompute.offload=true")),
    "optimizer": (2, ("parallel=fsdp", "precision=bf16", "parallel.offload.optimizer=cpu")),
    "parameters": (2, ("parallel=fsdp", "precision=bf16", "parallel.offload.parameters=cpu")),
}


def make_engine(world: World, config: RunConfig) -> Engine:
    with torch.device("meta"):
        model = build_model(config.model, 0)
    for mixture in list_mixtures(model).values():
        mixture.experts.grouped = True  # as on CUDA in bf16
    return build(model, lambda split: make_optimizer(split, config.optim, world), config, world, lambda _: None)


def train(engine: Engine, batch: StepBatch) -> None:
    """Train a step with the same requests to the device as training.step.train_step."""
    sums = engine.forward_backward(batch)
    read_step_numbers(sums, engine.clip(1.0))
    engine.update(1e-3)


def trace_step(world: World, config: RunConfig) -> Trace:
    """Trace a step after those that set up: stages vote in the first, and DDP rebuilds its buckets in the second."""
    rows_from_a_rank = ROWS * LENGTH * TOP_K // EP
    with pretend_gpu(world, config.parallel, integer=rows_from_a_rank) as (gpu, trace):
        engine = make_engine(gpu, config)
        trace.begin_steps()
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        batch = StepBatch([MicroBatch(tokens, tokens)] * MICRO)
        for _ in range(2 if config.parallel.strategy == "ddp" else 1):
            train(engine, batch)
        trace.clear()
        train(engine, batch)
        return trace


def trace_layout(name: str) -> Trace:
    """Trace rank 0 of a layout."""
    ranks, overrides = LAYOUTS[name]
    config = compose([*overrides, *SHAPE])
    pretend_group(0, ranks)
    try:
        world = make_world(0, ranks, 0, torch.device("cpu"), resolve_degrees(config.parallel, ranks))
        return trace_step(world, config)
    finally:
        leave_process_group()


def wait_in_many_ways() -> Trace:
    """Run one operator of each kind that waits, and two that do not."""
    config = compose(SHAPE)
    pretend_group(0, 1)
    world = make_world(0, 1, 0, torch.device("cpu"), resolve_degrees(config.parallel, 1))
    with pretend_gpu(world, config.parallel) as (gpu, trace):
        x = torch.ones(4, device=gpu.device)
        mask, index = x > 0, torch.tensor([0, 1])
        trace.clear()
        float(x[0])
        bool((x > 0).all())
        x.tolist()
        x.cpu()
        index.to(gpu.device)
        x[mask] = 0.0
        x[index]
        torch.equal(x, x)
        x.copy_(torch.ones(4))
        index.to(gpu.device, non_blocking=True)
        x.sum()
    leave_process_group()
    return trace


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: trace_layout(name) for name in sys.argv[1:]}
    print(json.dumps({name: asdict(trace) for name, trace in {"waits": wait_in_many_ways(), **found}.items()}))
