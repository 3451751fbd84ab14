"""`bench step --peers`: every strategy of ours and the libraries it competes with, sides of one interleaved run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hpc_train.api import World
from hpc_train.bench.sides import hand_written
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices
from hpc_train.parallel.memory.blocks import named_blocks


@dataclass(frozen=True)
class Ours:
    """A side of ours: what it changes of the configuration, and the peer that it is measured against."""

    name: str
    overrides: tuple[str, ...]
    against: str


SEVERAL = (
    Ours("ddp", ("parallel.strategy=ddp",), "torch_ddp"),
    Ours("zero1", ("parallel.strategy=zero1",), "deepspeed_1"),
    Ours("zero2", ("parallel.strategy=zero2",), "deepspeed_2"),
    Ours("zero3", ("parallel.strategy=zero3",), "torch_fully_shard"),
    Ours("zero3_again", ("parallel.strategy=zero3",), "deepspeed_3"),
)
"""On several ranks. The second zero3 is the same side once more: what differs between the two is noise."""

MPI = (
    Ours("ddp_mpi", ("parallel.strategy=ddp", "parallel.reduce_with=mpi"), "torch_ddp"),
    Ours("servers_synchronous", ("parallel.server.mode=synchronous",), "torch_ddp"),
    Ours("servers_asynchronous", ("parallel.server.mode=asynchronous",), "torch_ddp"),
    Ours("neighbours", ("parallel.server.mode=peer",), "torch_ddp"),
)
"""Where the ranks are MPI's."""

ALONE = (
    Ours("fp32", ("precision=fp32",), "torch_loop"),
    Ours("bf16", ("precision=bf16",), "torch_loop"),
    Ours("bf16_compile", ("precision=bf16", "parallel.compile=true"), "torch_loop"),
)
"""On one rank."""

Loop = Callable[[nn.Module, Iterable[Indices]], Iterator[float]]


def peers(data: Dataset, config: RunConfig, world: World) -> dict[str, Loop]:
    """The loops that others write, by name; DeepSpeed's where it is installed."""

    def torch_loop(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        return hand_written(model, data, order, config, world, tuned=False)

    def torch_fully_shard(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        return _fully_sharded(model, data, order, config, world)

    if world.size == 1:
        return {"torch_loop": torch_loop}
    found: dict[str, Loop] = {"torch_ddp": torch_loop, "torch_fully_shard": torch_fully_shard}
    if find_spec("deepspeed") is not None:
        for stage in (1, 2, 3):
            found[f"deepspeed_{stage}"] = _deepspeed_loop(data, config, world, stage)
    return found


def _fully_sharded(
    model: nn.Module, data: Dataset, order: Iterable[Indices], config: RunConfig, world: World
) -> Iterator[float]:
    """Plain fully_shard as its documentation shows it: each block, then the rest."""
    for block in named_blocks(model).values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    for indices in order:
        inputs, targets = data.get(indices)
        total = torch.zeros((), device=world.device)
        for x, y, share, last in _micro_batches(inputs.to(world.device), targets.to(world.device), config):
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        yield total.item()


def _deepspeed_loop(data: Dataset, config: RunConfig, world: World, stage: int) -> Loop:
    def loop(model: nn.Module, order: Iterable[Indices]) -> Iterator[float]:
        engine = _deepspeed_engine(model, config, world, stage)
        for indices in order:
            inputs, targets = data.get(indices)
            total = torch.zeros((), device=world.device)
            for x, y, share, _ in _micro_batches(inputs.to(world.device), targets.to(world.device), config):
                loss = F.cross_entropy(engine(x).flatten(0, -2), y.flatten())
                engine.backward(loss)
                engine.step()
                total += loss.detach() * share
            yield total.item()

    return loop


def _deepspeed_engine(model: nn.Module, config: RunConfig, world: World, stage: int):  # type: ignore[no-untyped-def]
    """DeepSpeed with its defaults, and torch's AdamW as its documentation names it."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))  # DeepSpeed asks for what its own launcher would set
    import deepspeed

    micro, batch = config.train.micro_batch, config.train.global_batch
    settings = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": max(1, batch // world.dp_size // micro),
        "gradient_clipping": config.optim.max_norm or 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": config.optim.lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def _micro_batches(inputs: Tensor, targets: Tensor, config: RunConfig) -> Iterator[tuple[Tensor, Tensor, float, bool]]:
    """(inputs, targets, share of the rank's batch, whether it is the last)."""
    size = config.train.micro_batch
    for cut in range(0, len(targets), size):
        x, y = inputs[cut : cut + size], targets[cut : cut + size]
        yield x, y, len(y) / len(targets), cut + size >= len(targets)
