"""Rehearse one rank: build its part of the model as a run does, optionally train a step, and count its memory.

The world is simulated: collectives return at once and move no data, and tensors have no memory (_torch/rehearsal.py).
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hpc_train._torch.process_groups import pretend_group
from hpc_train._torch.rehearsal import (
    UNKNOWN_SHAPE_ERRORS,
    MemorylessMode,
    assume_known_shapes,
    gathered_parameters,
    unreduced_gradients,
    watch_storage_sizes,
)
from hpc_train.config.model import CustomDataConfig, ImageDataConfig, ImageFilesDataConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import open_dataset
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, TensorShard, World
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.memory.parameter_offload import get_optimizer_device, get_parameter_device
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.planner.rehearsal.even_loads import route_evenly
from hpc_train.planner.rehearsal.memory_ledger import MemoryLedger
from hpc_train.planner.rehearsal.result import CountedMemory, HeldShard, RehearsedRank
from hpc_train.planner.rehearsal.tiling import Tilings
from hpc_train.runtime.start import leave_process_group, make_world
from hpc_train.shard_rectangles import FusedParts, find_fused_parts
from hpc_train.training.optimizer import make_optimizer

_DIGITS = (1, 8, 8)
"""Channels, height and width of the images of data=digits, which a custom model may be trained on."""


def rehearse_rank(config: RunConfig, degrees: Degrees, rank: int, micro_batches: int) -> RehearsedRank:
    """Build one rank, and train a step of `micro_batches` micro-batches unless that is 0.

    Raises UserError if a pass refuses the run, and also, in one line, for any other failure.
    """
    started = time.perf_counter()
    try:
        with pretend_world(rank, degrees) as world:
            built = _rehearse(config, world, degrees, micro_batches, started)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"rank {rank} ({degrees}): fails with {reason[:300]}; see --debug") from error
    gc.collect()  # modules, their hooks and their groups refer to each other
    return built


def build_whole_model(config: RunConfig) -> nn.Module:
    """Build the whole model without memory. Raises UserError if a user's own model cannot be built like that."""
    try:
        with torch.device("meta"):
            return build_model(config.model, config.train.seed)
    except (*UNKNOWN_SHAPE_ERRORS, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.name={config.model.name}: cannot be built without memory, so it cannot be rehearsed ({reason})"
        ) from error


def _rehearse(config: RunConfig, world: World, degrees: Degrees, micro_batches: int, started: float) -> RehearsedRank:
    """Build the rank and count its memory, inside the contexts in which tensors have none. started: for the seconds."""
    ledger, remarks, tilings = MemoryLedger(), list[str](), Tilings({})
    batch = _make_batch(config, degrees, micro_batches)
    with watch_storage_sizes(ledger.resized), assume_known_shapes(), MemorylessMode(ledger.record):
        model = build_whole_model(config)
        engine = build(model, lambda split: make_optimizer(split, config.optim, world), config, world, remarks.append)
        for part in engine.parts:
            route_evenly(part, grouped=config.precision.name == "bf16")
        pieces = list(engine.shards())
        host = list_host_parts(config)
        parameters = ledger.label(_list_parameters(engine), "host" if "parameters" in host else "parameters")
        state = (piece.local for piece in pieces if piece.name.startswith("optim."))
        optimizer = ledger.label(state, "host" if "optimizer" in host else "optimizer")
        if "parameters" in host:  # buffers stay on the device
            ledger.label((get_local(buffer) for part in engine.parts for buffer in part.buffers()), "parameters")
        fused: dict[Any, FusedParts] = {}
        for part in engine.parts:
            fused.update(find_fused_parts(part))
        lie = {
            name: tilings.make_tiling(tensor, fused.get(tensor))
            for part in engine.parts
            for name, tensor in _list_named(part)
        }
        counted, unknown = CountedMemory(parameters, optimizer), None
        if micro_batches:
            counted, unknown = _train_step(engine, batch, ledger, counted, host)
        return RehearsedRank(
            rank=world.rank,
            at=degrees.find_coordinates(world.rank),
            said=tuple(remarks),
            pieces=tuple(_describe_piece(piece) for piece in pieces),
            tilings=lie,
            counted=counted,
            seconds=time.perf_counter() - started,
            rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            unknown=unknown,
        )


def list_host_parts(config: RunConfig) -> tuple[str, ...]:
    """Return the parts of the state that a GPU rank keeps in host memory or files, by the run's own rules."""
    gpu, parts = torch.device("cuda"), []
    if get_parameter_device(config, gpu).type == "cpu":
        parts += ["parameters", "gradients"]
    if get_optimizer_device(config, gpu).type == "cpu":
        parts.append("optimizer")
    return tuple(parts)


def _train_step(
    engine: Engine, batch: StepBatch, ledger: MemoryLedger, at_rest: CountedMemory, host: Sequence[str] = ()
) -> tuple[CountedMemory, str | None]:
    """Run one step and count its memory; if it cannot run, return the reason. host: see list_host_parts."""
    since = ledger.begin_step(lambda: _list_of_groups(engine, unreduced_gradients))
    try:
        engine.forward_backward(batch)
        gradients_of_parts = [p.grad for part in engine.parts for p in part.parameters() if p.grad is not None]
        gradients = ledger.label(map(get_local, gradients_of_parts), "host" if "gradients" in host else "gradients")
        ledger.label(_list_of_groups(engine, gathered_parameters), "gathered")
        engine.clip(1.0)
        engine.update(1e-3)
    except UNKNOWN_SHAPE_ERRORS as error:
        reason = " ".join(str(error).split())
        return at_rest, f"the model's shapes depend on values of its tensors ({reason[:200]})"
    worst = ledger.worst(since)
    counted = CountedMemory(
        parameters=at_rest.parameters,
        optimizer=at_rest.optimizer,
        gradients=gradients,
        whole_gradients=ledger.most("gradients", since),
        activations=ledger.most("forward", since),
        gathered=ledger.most("gathered", since),
        peak=worst.total,
        at_peak=worst.bytes,
        host=ledger.most("host", since),
        offloaded=tuple(host),
    )
    return counted, None


def _make_batch(config: RunConfig, degrees: Degrees, micro_batches: int) -> StepBatch:
    """Make a batch of one data-parallel rank; only its shape matters."""
    rows, model = min(config.train.micro_batch, config.train.global_batch // degrees.data_parallel), config.model
    if isinstance(config.data, CustomDataConfig):
        inputs, targets = open_dataset(config.data, config.train.sequence_length, "train").get(np.zeros(rows, np.int64))
        micro_batch = MicroBatch(inputs, targets).map(torch.zeros_like)
    elif isinstance(model, VisionTransformerConfig) or isinstance(config.data, ImageDataConfig):
        shape = _DIGITS
        if isinstance(config.data, ImageFilesDataConfig):
            shape = (config.data.channels, config.data.image_size, config.data.image_size)
        elif isinstance(model, VisionTransformerConfig):
            shape = (model.channels, model.image_size, model.image_size)
        micro_batch = MicroBatch(torch.zeros(rows, *shape), torch.zeros(rows, dtype=torch.int64))
    else:
        tokens = torch.zeros(rows, config.train.sequence_length, dtype=torch.int64)
        micro_batch = MicroBatch(tokens, tokens)
    return StepBatch([micro_batch] * micro_batches)


def _list_named(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


def _list_parameters(engine: Engine) -> list[Tensor]:
    return [get_local(tensor) for part in engine.parts for _, tensor in _list_named(part)]


def _list_of_groups(engine: Engine, tensors: Callable[[FSDPModule], Iterable[Tensor]]) -> Iterator[Tensor]:
    for part in engine.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                yield from tensors(module)


def _describe_piece(piece: TensorShard) -> HeldShard:
    local, sizes = piece.local, (piece.shape, piece.offset, piece.local.shape)
    shape, offset, size = (tuple(int(number) for number in numbers) for numbers in sizes)
    return HeldShard(
        name=piece.name,
        shape=shape,
        dtype=str(piece.dtype),
        offset=offset,
        size=size,
        replica=piece.replica,
        bytes=local.nbytes,
    )


def list_tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter and persistent buffer."""
    saved_names: Sequence[str] = list(model.state_dict(keep_vars=True))
    named = dict(_list_named(model))
    return {name: tuple(named[name].shape) for name in saved_names if name in named}


@contextmanager
def pretend_world(rank: int, degrees: Degrees) -> Iterator[World]:
    """Enter the simulated world of `rank` for a block of code: collectives return at once and move no data.

    Its device is the CPU, where tensors take no memory inside MemorylessMode.
    """
    pretend_group(rank, degrees.world)
    try:
        yield make_world(rank, degrees.world, 0, torch.device("cpu"), degrees)
    finally:
        leave_process_group()
