"""A training step makes the host wait for the device once: counted on a pretended GPU, and on a real one if there is.

The pretended GPU also shows on which streams the collectives of fully_shard run, and what waits for them.
"""

from __future__ import annotations

import pytest
import torch
from pretend_gpu import DEFAULT_STREAM, Trace, pretend_gpu

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.experts import list_mixtures
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.runtime.init import init
from hpc_train.runtime.start import leave_process_group
from hpc_train.testing import pretend_ranks
from hpc_train.training.optimizer import make_optimizer
from hpc_train.training.step_numbers import read_step_numbers

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
}


def make_engine(world: World, config: RunConfig) -> Engine:
    with torch.device("meta"):
        model = build_model(config.model, 0)
    for mixture in list_mixtures(model).values():
        mixture.experts.grouped = True  # as on CUDA in bf16
    return build(model, lambda split: make_optimizer(split, config.optim, world), config, world, lambda _: None)


def train(engine: Engine, batch: StepBatch) -> None:
    """What training.loop.train_step asks of a device."""
    sums = engine.forward_backward(batch)
    read_step_numbers(sums, engine.clip(1.0))
    engine.update(1e-3)


def trace_step(world: World, config: RunConfig) -> Trace:
    """Trace a step after those that set up: stages vote in the first, and DDP makes its buckets anew in the second."""
    rows_from_a_rank = ROWS * LENGTH * TOP_K // EP
    with pretend_gpu(world, config.parallel, integer=rows_from_a_rank) as (gpu, trace):
        engine = make_engine(gpu, config)
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        batch = StepBatch([MicroBatch(tokens, tokens)] * MICRO)
        for _ in range(2 if config.parallel.strategy == "ddp" else 1):
            train(engine, batch)
        trace.clear()
        train(engine, batch)
        return trace


def trace(name: str) -> Trace:
    ranks, overrides = LAYOUTS[name]
    config = compose([*overrides, *SHAPE])
    return pretend_ranks(trace_step, [0], ranks, config, parallel=config.parallel)[0]


@pytest.mark.parametrize(
    "name", ["ddp", "fsdp", "tp", "pp", *(pytest.param(name, marks=pytest.mark.long) for name in ("async_tp", "cp"))]
)
def test_a_step_waits_for_the_device_once(name: str) -> None:
    found = trace(name)
    assert len(found.entries) > 1000, "the step ran on the device"
    assert found.waits == ["tolist"], "of the loss and the norm"
    gathers, scatters = found.streams_of("_allgather_base_"), found.streams_of("_reduce_scatter_base_")
    if name in ("fsdp", "pp"):  # no collectives but those of fully_shard
        assert len(gathers) == len(scatters) == 1
        assert DEFAULT_STREAM not in gathers | scatters
        assert gathers != scatters, "a gather does not wait for a reduction"
        assert found.count_waits(DEFAULT_STREAM, *gathers) == found.count("_allgather_base_")
        assert found.count_waits(*scatters, DEFAULT_STREAM) >= found.count("_reduce_scatter_base_")


def test_experts_wait_once_more_in_every_exchange() -> None:
    """all-to-all takes from the host how many rows go where."""
    assert trace("ep").waits == ["tolist"] * (1 + MICRO * LAYERS)


def test_the_trace_sees_what_waits() -> None:
    """One of each kind that has been in the code, or may come into it."""
    config = compose(SHAPE)
    (found,) = pretend_ranks(_wait_in_many_ways, [0], 1, config, parallel=config.parallel)
    assert found == 9


def _wait_in_many_ways(world: World, config: RunConfig) -> int:
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
        index.to(gpu.device, non_blocking=True)  # does not
        x.sum()
        return len(trace.waits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_step_on_a_gpu_waits_once(name: str) -> None:
    """torch itself counts: an operator that waits raises, but for the one place that may."""
    _, overrides = LAYOUTS[name]
    config = compose([*overrides, *SHAPE])
    world = init()
    try:
        engine = make_engine(world, config)
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64).pin_memory()
        batch = StepBatch([MicroBatch(tokens, tokens)] * MICRO)
        train(engine, batch)
        train(engine, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sums = engine.forward_backward(batch)
            norm = engine.clip(1.0)
            torch.cuda.set_sync_debug_mode("default")
            read_step_numbers(sums, norm)
            torch.cuda.set_sync_debug_mode("error")
            engine.update(1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        leave_process_group()
