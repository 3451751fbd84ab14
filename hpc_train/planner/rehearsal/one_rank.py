"""One rank: the model built by parallel.apply.build as in a run, a step trained if asked, and what it takes counted."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc_train.api import Engine, MicroBatch, Piece, StepBatch, World
from hpc_train.compat_rehearsal import (
    UNKNOWN_SHAPE,
    Pretending,
    gathered,
    known_shapes,
    watching_sizes,
    whole_gradients,
)
from hpc_train.config.data import ImageDataConfig
from hpc_train.config.degrees import Degrees
from hpc_train.config.model import VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.registry import build as build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.zero.offload import optimizer_device, parameter_device
from hpc_train.planner.rehearsal.ledger import Ledger
from hpc_train.planner.rehearsal.result import Built, Counted, Held
from hpc_train.planner.rehearsal.tiling import Tilings
from hpc_train.planner.rehearsal.world import coordinates, pretended_world
from hpc_train.training.optimizer import make_optimizer

_DIGITS = (1, 8, 8)
"""Channels, height and width of the images of data=digits, which a custom model may read."""


def rehearse_rank(config: RunConfig, degrees: Degrees, rank: int, micro_batches: int) -> Built:
    """Build what a rank holds, and train a step of so many micro-batches unless that is 0.

    Raises UserError for what the passes refuse, and, in one line too, for anything else that fails.
    """
    started = time.perf_counter()
    try:
        with pretended_world(rank, degrees) as world:
            built = _rehearse(config, world, degrees, micro_batches, started)
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"rank {rank} ({degrees}): fails with {reason[:300]}; see --debug") from error
    gc.collect()  # modules, their hooks and their groups refer to each other
    return built


def whole_model(config: RunConfig) -> nn.Module:
    """The whole model without memory, inside of Pretending. Raises UserError where a user's own cannot be made so."""
    try:
        with torch.device("meta"):
            return build_model(config.model, config.train.seed)
    except (*UNKNOWN_SHAPE, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.name={config.model.name}: cannot be built without memory, so it cannot be rehearsed ({reason})"
        ) from error


def _rehearse(config: RunConfig, world: World, degrees: Degrees, micro_batches: int, started: float) -> Built:
    ledger, said, tilings = Ledger(), list[str](), Tilings({})
    batch = _batch(config, degrees, micro_batches)
    with watching_sizes(ledger.resized), known_shapes(), Pretending(ledger.see):
        model = whole_model(config)
        engine = build(model, lambda split: make_optimizer(split, config.optim), config, world, said.append)
        pieces = list(engine.pieces())
        host = host_parts(config)
        parameters = ledger.label(_parameters(engine), "host" if "parameters" in host else "parameters")
        state = (piece.local for piece in pieces if piece.name.startswith("optim."))
        optimizer = ledger.label(state, "host" if "optimizer" in host else "optimizer")
        if "parameters" in host:  # buffers stay on the device
            ledger.label((_local(it) for part in engine.parts for it in part.buffers()), "parameters")
        lie = {name: tilings.of(tensor) for part in engine.parts for name, tensor in _named(part)}
        counted, unknown = Counted(parameters, optimizer), None
        if micro_batches:
            counted, unknown = _step(engine, batch, ledger, counted, host)
        return Built(
            rank=world.rank,
            at=coordinates(world.rank, degrees),
            said=tuple(said),
            pieces=tuple(_held(piece) for piece in pieces),
            tilings=lie,
            counted=counted,
            seconds=time.perf_counter() - started,
            rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            unknown=unknown,
        )


def host_parts(config: RunConfig) -> tuple[str, ...]:
    """Return the parts of its state a GPU rank keeps in host memory or files, by the run's own rules."""
    gpu, found = torch.device("cuda"), []
    if parameter_device(config, gpu).type == "cpu":
        found += ["parameters", "gradients"]
    if optimizer_device(config, gpu).type == "cpu":
        found.append("optimizer")
    return tuple(found)


def _step(
    engine: Engine, batch: StepBatch, ledger: Ledger, at_rest: Counted, host: Sequence[str] = ()
) -> tuple[Counted, str | None]:
    """Run and count one step, or say why it cannot run. host: see host_parts."""
    since = ledger.begin_step(lambda: _of_groups(engine, whole_gradients))
    try:
        engine.forward_backward(batch)
        held = [p.grad for part in engine.parts for p in part.parameters() if p.grad is not None]
        gradients = ledger.label(map(_local, held), "host" if "gradients" in host else "gradients")
        ledger.label(_of_groups(engine, gathered), "gathered")
        engine.clip(1.0)
        engine.update(1e-3)
    except UNKNOWN_SHAPE as error:
        reason = " ".join(str(error).split())
        return at_rest, f"the model's shapes depend on values of its tensors ({reason[:200]})"
    worst = ledger.worst(since)
    counted = Counted(
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


def _batch(config: RunConfig, degrees: Degrees, micro_batches: int) -> StepBatch:
    """Of one data-parallel rank; what is in it does not matter."""
    rows, model = min(config.train.micro_batch, config.train.global_batch // degrees.data_parallel), config.model
    if isinstance(model, VisionTransformerConfig) or isinstance(config.data, ImageDataConfig):
        shape = _DIGITS
        if isinstance(model, VisionTransformerConfig):
            shape = (model.channels, model.image_size, model.image_size)
        one = MicroBatch(torch.zeros(rows, *shape), torch.zeros(rows, dtype=torch.int64))
    else:
        tokens = torch.zeros(rows, config.train.sequence_length, dtype=torch.int64)
        one = MicroBatch(tokens, tokens)
    return StepBatch([one] * micro_batches)


def _named(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


def _parameters(engine: Engine) -> list[Tensor]:
    return [_local(tensor) for part in engine.parts for _, tensor in _named(part)]


def _of_groups(engine: Engine, tensors: Callable[[FSDPModule], Iterable[Tensor]]) -> Iterator[Tensor]:
    for part in engine.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                yield from tensors(module)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(piece: Piece) -> Held:
    local, sizes = piece.local, (piece.shape, piece.offset, piece.local.shape)
    shape, offset, size = (tuple(int(number) for number in numbers) for numbers in sizes)
    return Held(piece.name, shape, str(piece.dtype), offset, size, piece.replica, local.nbytes)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter and persistent buffer."""
    kept: Sequence[str] = list(model.state_dict(keep_vars=True))
    named = dict(_named(model))
    return {name: tuple(named[name].shape) for name in kept if name in named}
