"""ddp: every rank holds the whole model; gradients are averaged in buckets while backward goes on."""

# No `from __future__ import annotations`: torch checks the annotations of a communication hook by identity.

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.data_parallel.gradient_reduction import (
    ERROR_FEEDBACK,
    GradientBucket,
    ReductionMethod,
    ReductionQueue,
    make_compression,
    make_mpi_reduction,
)


@dataclass
class LocalNorm:
    """Squared norm of this rank's own gradient, taken from the buckets before they are reduced."""

    active: bool = False
    parts: list[Tensor] = field(default_factory=list)

    def see(self, buffer: Tensor) -> None:
        """Take account of a bucket."""
        if self.active:
            self.parts.append(torch.linalg.vector_norm(buffer, dtype=torch.float64).square())

    def take(self) -> Tensor:
        """The squared norm of the backward that just ended; ready for the next one."""
        total = torch.stack(self.parts).sum()
        self.parts = []
        return total


@dataclass
class GradientHook:
    """What happens to each bucket on its way: it is measured, then reduced."""

    norm: LocalNorm = field(default_factory=LocalNorm)
    method: ReductionMethod | None = None
    """None: torch's own all-reduce."""
    background: ReductionQueue | None = None
    """Where `method` works."""
    remembers: bool = False
    """The method carries something from step to step."""
    settling: bool = False
    """This backward is thrown away."""
    complete: bool = False
    """All buckets of the newest backward have come."""


def wrap_ddp(model: nn.Module, config: ParallelConfig, world: World) -> tuple[nn.Module, GradientHook]:
    """The model wrapped for data parallelism, and what its gradients go through.

    Raises UserError where parallel.reduce_with=mpi and the ranks are not MPI's.
    """
    if world.size == 1:
        return model, GradientHook()
    method = make_mpi_reduction(world) if config.reduce_with == "mpi" else make_compression(config.compression)
    remembers = config.compression.method in ERROR_FEEDBACK
    hook = GradientHook(LocalNorm(), method, ReductionQueue(world.device) if method else None, remembers)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mib,
        gradient_as_bucket_view=True,
        static_graph=config.static_graph,
        find_unused_parameters=config.unused_parameters,
    )
    wrapped.register_comm_hook(hook, _reduce_bucket)
    return wrapped, hook


def describe_options(config: ParallelConfig) -> list[str]:
    """What ddp was asked to do in another way than its usual one, for the log."""
    flags = [name.replace("_", " ") for name in ("static_graph", "unused_parameters") if getattr(config, name)]
    if config.reduce_with != "torch":
        flags.append(f"gradients reduced by {config.reduce_with}")
    if config.compression.method != "none":
        flags.append(f"gradients compressed by {config.compression.method}")
    return flags


def _reduce_bucket(hook: GradientHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    hook.norm.see(bucket.buffer())
    hook.complete = bucket.is_last()
    if hook.method is None or hook.background is None or hook.settling:
        return _average_bucket(bucket.buffer())
    method, kept = hook.method, GradientBucket.of(bucket)

    def job() -> Tensor:
        method.reduce(kept)
        return kept.buffer

    return hook.background.submit(job)


def _average_bucket(buffer: Tensor) -> torch.futures.Future[Tensor]:
    buffer.div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None

    def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        future.value()  # raises what went wrong; what it holds is the backend's choice
        return buffer

    reduced: torch.futures.Future[Tensor] = work.get_future().then(done)
    return reduced


def count_settling_backwards(wrapped: nn.Module, hook: GradientHook | None, world: World) -> int:
    """How many backwards have to be thrown away before the first step.

    DistributedDataParallel reorders its buckets after its first backward, and after the second one of a static graph,
    whose first one must moreover be one that reduces. Where a gradient lies in a bucket decides in which order more
    than two ranks add it, and where a method remembers something of it.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return 0
    if wrapped.static_graph:
        return 2
    return int(world.size > 2 or (hook is not None and hook.remembers))


@contextmanager
def discard_backward(wrapped: nn.Module, hook: GradientHook | None) -> Iterator[None]:
    """The context of a backward that is thrown away: it is reduced plainly and nothing is remembered of it."""
    if hook is None:
        yield
        return
    hook.settling = True
    try:
        with accumulate_micro_batch(wrapped, True, hook):
            yield
    finally:
        hook.settling = False


@contextmanager
def accumulate_micro_batch(wrapped: nn.Module, last: bool, hook: GradientHook | None = None) -> Iterator[None]:
    """The context of one micro-batch: only the last one of a step communicates.

    Raises UserError if gradients are missing after it, which torch would notice a step too late.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        yield
        return
    if hook is not None:
        hook.complete = False
    try:
        with nullcontext() if last else wrapped.no_sync():
            yield
    except RuntimeError as error:
        explained = _explain_error(error, wrapped.module)
        if explained is None:
            raise
        raise explained from error
    if last and hook is not None and not hook.complete:
        raise _make_changed_graph_error() if wrapped.static_graph else _make_missing_gradient_error(wrapped.module)


def _explain_error(error: RuntimeError, model: nn.Module) -> UserError | None:
    """One line where torch's many are about what a user can set."""
    if "Expected to have finished reduction in the prior iteration" in str(error):
        return _make_missing_gradient_error(model)
    if "Your training graph has changed in this iteration" in str(error):
        return _make_changed_graph_error()
    return None


def _make_changed_graph_error() -> UserError:
    return UserError("parallel.static_graph=true: this step used other parameters than the first; leave it out")


def _make_missing_gradient_error(model: nn.Module) -> UserError:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [name for name, parameter in trained if parameter.grad is None]
    shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
    subject = shown or "a parameter that an earlier micro-batch used"
    return UserError(
        f"model: {subject} took no part in the loss of a step, and ddp waits for every gradient; "
        "set parallel.unused_parameters=true, or freeze what is not used"
    )
