"""ddp: every rank holds the whole model; gradients are averaged in buckets while backward runs.

A step of M micro-batches on R ranks, in order of time:

    1 ... M - 1   each rank adds up its own gradients (no_sync); nothing is sent
    M             as soon as all gradients of a bucket (parallel.bucket_mib) are there, its all-reduce starts, and the
                  rest of backward computes meanwhile
    then          wait for the last buckets: every gradient is the mean over the ranks

So a rank sends about 2 P (R - 1) / R bytes per step for P bytes of gradients, however many micro-batches there are.

torch's DistributedDataParallel does the work. Its communication hook adds three things: the norm of this rank's own
gradient (for the gradient noise scale), other ways to reduce (gradient_reduction.py), and a check that every gradient
arrived.
"""

# No `from __future__ import annotations`: torch compares the annotations of a communication hook by identity.

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.rules.data_parallel import ERROR_FEEDBACK_METHODS
from hpc_train.step_clock import SilentClock, StepClock
from hpc_train.units import join_first

ReduceBucket = Callable[[dist.GradBucket], torch.futures.Future[Tensor]]
"""Starts to average a bucket over all ranks, in place; the future holds its buffer."""


@dataclass
class LocalNorm:
    """Squared norm of this rank's own gradient, taken from the buckets before they are reduced."""

    active: bool = False
    bucket_squares: list[Tensor] = field(default_factory=list)

    def add_bucket(self, buffer: Tensor) -> None:
        """Add the squared norm of one bucket, if this backward is measured."""
        if self.active:
            self.bucket_squares.append(torch.linalg.vector_norm(buffer, dtype=torch.float64).square())

    def take(self) -> Tensor:
        """Return the squared norm of the backward that just ended, and start over."""
        total = torch.stack(self.bucket_squares).sum()
        self.bucket_squares = []
        return total


@dataclass
class GradientHook:
    """State of the communication hook, through which each bucket of gradients passes."""

    reduce: ReduceBucket
    norm: LocalNorm = field(default_factory=LocalNorm)
    discard: bool = False
    """The running backward only warms up: reduce it plainly, so that no error feedback remembers it."""
    complete: bool = False
    """Whether every bucket of the last backward has arrived."""
    clock: StepClock = field(default_factory=SilentClock)
    group: dist.ProcessGroup | None = None


class ReplicatedModel:
    """A model wrapped in DistributedDataParallel; implements engines.plain_engine.WrappedModel."""

    is_sharded = False

    def __init__(self, model: nn.Module, config: ParallelConfig, world: World) -> None:
        """A collective. Raises UserError if parallel.reduce_with=mpi and MPI did not start the ranks."""
        self._hook = GradientHook(_choose_reduction(config, world), clock=world.clock, group=world.group)
        self.module = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mib,
            gradient_as_bucket_view=True,
            process_group=world.group,
            static_graph=config.static_graph,
            find_unused_parameters=config.unused_parameters,
        )
        self.module.register_comm_hook(self._hook, _reduce_bucket)
        self.warmup_backwards = _count_warmup_backwards(config, world)

    @contextmanager
    def accumulate(self, *, last: bool, measure: bool) -> Iterator[None]:
        """Run one micro-batch; only the last one of a step communicates.

        Raises UserError if gradients are missing after it, which torch would notice one step too late.
        """
        self._hook.norm.active = measure and last
        self._hook.complete = False
        try:
            with nullcontext() if last else self.module.no_sync():
                yield
            if last:
                # What follows is waiting for the collectives of the last buckets.
                self._hook.clock.end_backward()
        except RuntimeError as error:
            explained = _explain_error(error, self.module.module)
            if explained is None:
                raise
            raise explained from error
        if last and not self._hook.complete:
            static = self.module.static_graph
            raise _make_changed_graph_error() if static else _make_missing_gradient_error(self.module.module)

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Run a backward whose gradients are thrown away."""
        self._hook.discard = True
        try:
            with self.accumulate(last=True, measure=False):
                yield
        finally:
            self._hook.discard = False

    def free_gathered_parameters(self) -> None:
        """Do nothing: every rank keeps all parameters."""

    def take_local_square(self) -> Tensor:
        """Return the squared norm of this rank's own gradient in the backward that was measured."""
        return self._hook.norm.take()


def _choose_reduction(config: ParallelConfig, world: World) -> ReduceBucket:
    if config.reduce_with == "torch" and config.compression.method == "none":
        return partial(_average_bucket, group=world.group)
    from hpc_train.parallel.data_parallel.gradient_reduction import (
        make_background_reduction,
        make_compression,
        make_mpi_reduction,
    )

    method = make_mpi_reduction(world) if config.reduce_with == "mpi" else make_compression(config.compression)
    return make_background_reduction(method, world.device)


def _count_warmup_backwards(config: ParallelConfig, world: World) -> int:
    """Count the backwards to throw away before the first step.

    DistributedDataParallel reorders its buckets after its first backward, and with a static graph after the second,
    whose first one must moreover be one that reduces. A gradient's place in its bucket decides in which order more than
    two ranks add it, and what error feedback remembers of it: without the warm-up a resumed run would round differently
    from one that was never stopped.
    """
    if config.static_graph:
        return 2
    return int(world.size > 2 or config.compression.method in ERROR_FEEDBACK_METHODS)


def describe_options(config: ParallelConfig) -> list[str]:
    """Describe the options of ddp that are not at their defaults, for the log."""
    options = [name.replace("_", " ") for name in ("static_graph", "unused_parameters") if getattr(config, name)]
    if config.reduce_with != "torch":
        options.append(f"gradients reduced by {config.reduce_with}")
    if config.compression.method != "none":
        options.append(f"gradients compressed by {config.compression.method}")
    return options


def _reduce_bucket(hook: GradientHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    hook.norm.add_bucket(bucket.buffer())
    hook.complete = bucket.is_last()
    hook.clock.mark_bucket()
    return _average_bucket(bucket, hook.group) if hook.discard else hook.reduce(bucket)


def _average_bucket(bucket: dist.GradBucket, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Average a bucket by torch's all-reduce."""
    buffer = bucket.buffer()
    # Before the sum, as torch's own hook does: in float16 the sum of all ranks could overflow.
    buffer.div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None

    def unpack(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        future.value()  # raises the collective's error; which tensors it holds depends on the backend
        return buffer

    reduced: torch.futures.Future[Tensor] = work.get_future().then(unpack)
    return reduced


def _explain_error(error: RuntimeError, model: nn.Module) -> UserError | None:
    """Put torch's long message into one line if it is about an option the user can set; else return None."""
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
    subject = join_first(unused, 3) or "a parameter that an earlier micro-batch used"
    return UserError(
        f"model: {subject} took no part in the loss of a step, and ddp waits for every gradient; "
        "set parallel.unused_parameters=true, or freeze what is not used"
    )
