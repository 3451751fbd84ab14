"""Ways to average ddp's gradients other than torch's all-reduce: compression, and the MPI library.

A method gets the buckets one after the other, in the same order on every rank, and may use several collectives for
each; it runs beside backward in a thread of its own (on a GPU: on a stream). To add a method, write a class with
`reduce(bucket)`, name it in make_compression and in the rules of ddp (parallel/rules/data_parallel.py).

- fp16, bf16: gradients travel in half the bytes of float32.
- topk: each rank sends its largest gradients only, and adds what it did not send to those of the next step. Stich,
  Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv:1809.07599, algorithm 1 (without the learning rate, which is
  the optimizer's; without the momentum correction and the clipping of Lin et al. 2017, arXiv:1712.01887).
- powersgd: each matrix as the product of two thin ones, by one step of power iteration that starts where the last one
  ended; what the product misses is added to the gradients of the next step. Vogels, Karimireddy, Jaggi 2019,
  arXiv:1905.13727, algorithms 1 and 2. torch's powerSGD_hook has the same method; with more than one bucket its chained
  collectives block each other on gloo for ever (2.13).
- parallel.reduce_with=mpi: Open MPI moves the data of ranks on one host through shared memory, gloo through sockets.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.parallel import CompressionConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of several parameters that travel together."""

    index: int
    """In the order of reduction: 0 holds the parameters whose gradients are ready first."""
    buffer: Tensor
    """All of them, (n,)."""
    gradients: list[Tensor]
    """The same memory, one tensor a parameter in its shape."""
    last: bool
    """No other bucket follows in this step."""

    @classmethod
    def copy_from(cls, bucket: dist.GradBucket) -> GradientBucket:
        """Copy what torch's object describes: that one is valid only inside the hook, this one in a thread too."""
        return cls(bucket.index(), bucket.buffer(), bucket.gradients(), bucket.is_last())


class ReductionMethod(Protocol):
    """A way to reduce gradients. Called for one bucket after the other, in the same order on every rank."""

    def reduce(self, bucket: GradientBucket) -> None:
        """Replace this rank's gradients by the mean over all ranks, in place; returns when that is done."""


ReductionJob = Callable[[], Tensor]
TensorFuture = torch.futures.Future[Tensor]


class ReductionQueue:
    """Takes jobs in the order they are given, which is the same on every rank, and so are their collectives.

    Callbacks of collectives would not do: gloo runs them on the few threads that also run the collectives, so two that
    wait for a further one wait for ever, and which of two comes first differs from rank to rank.
    On a GPU the host never waits for a collective, so jobs run where they are given, on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[tuple[ReductionJob, TensorFuture] | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is None:
            # A daemon, because one that waits for a rank that is gone must not keep this one from leaving.
            threading.Thread(target=_run_jobs, args=(self._jobs,), name="gradients", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: ReductionJob) -> TensorFuture:
        """Begin a job; the future has its result, or raises what it raised."""
        if self._stream is not None:
            return self._on_stream(job)
        future: TensorFuture = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def _on_stream(self, job: ReductionJob) -> TensorFuture:
        assert self._stream is not None
        future: TensorFuture = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            future.set_result(job())
        return future


def _run_jobs(jobs: SimpleQueue[tuple[ReductionJob, TensorFuture] | None]) -> None:
    while (given := jobs.get()) is not None:
        job, future = given
        try:
            with torch.no_grad():
                result = job()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(result)
        del given, job, future  # what they hold is not needed while this thread waits for the next


_LARGEST_SUM = 2.0**15
"""A sum of float16 numbers may become this large: half of what the format can hold."""


class Cast:
    """Every gradient rounded to `dtype`, added up in it.

    float16 holds 2^-14 to 2^16 in full precision, and gradients are smaller: the ranks first agree on the largest one
    of the bucket, 8 bytes more, and scale by a power of two, which loses nothing.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._dtype, self._group = dtype, group

    def reduce(self, bucket: GradientBucket) -> None:
        """See bucket.Method. A gradient that is not finite makes its mean not finite."""
        scale = self._scale(bucket.buffer) if self._dtype == torch.float16 else None
        mean = bucket.buffer / self._group.size()
        sent = (mean if scale is None else mean.mul_(scale)).to(self._dtype)
        dist.all_reduce(sent, group=self._group)
        bucket.buffer.copy_(sent)
        if scale is not None:
            bucket.buffer.div_(scale)

    def _scale(self, buffer: Tensor) -> Tensor:
        """A power of two, the same on every rank, on the device: nobody waits for it."""
        largest = torch.linalg.vector_norm(buffer, math.inf, dtype=torch.float32).double()
        largest = torch.where(largest.isfinite(), largest, math.inf)  # not every backend orders NaN
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        usable = largest.isfinite() & (largest > 0)
        exponent = torch.where(usable, (_LARGEST_SUM / largest).log2().floor(), 0.0)
        return torch.exp2(exponent.clamp(-126, 126)).to(buffer.dtype)


class TopK:
    """A share of the entries of each bucket, by absolute value; at least one."""

    def __init__(self, ratio: float, feedback: bool, group: dist.ProcessGroup) -> None:
        self._ratio, self._feedback, self._group = ratio, feedback, group
        self._unsent: dict[int, Tensor] = {}

    def reduce(self, bucket: GradientBucket) -> None:
        """See bucket.Method."""
        own = bucket.buffer / self._group.size()
        if bucket.index in self._unsent:
            own += self._unsent[bucket.index]
        indices = own.abs().topk(self._count(own), sorted=False).indices
        self._add_up(bucket.buffer, own[indices], indices)
        # A step whose gradient is not finite is not taken; the memory must outlive it.
        if self._feedback and bool(bucket.buffer.isfinite().all()):
            self._unsent[bucket.index] = own.index_fill_(0, indices, 0.0)

    def _count(self, buffer: Tensor) -> int:
        return max(1, round(self._ratio * buffer.numel()))

    def _add_up(self, buffer: Tensor, values: Tensor, indices: Tensor) -> None:
        """Into `buffer` what all ranks sent, in the order of ranks, so that the sums are the same on each."""
        short = indices.to(torch.int32) if buffer.numel() < 1 << 31 else indices
        gathered = [self._gather(tensor) for tensor in (values, short)]
        buffer.zero_()
        for theirs, where in zip(*gathered, strict=True):
            buffer[where.long()] += theirs

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self._group.size())]
        dist.all_gather(everyone, tensor, group=self._group)
        return everyone


class PowerSGD:
    """A rank-r approximation of each matrix for which that is less to send; everything else in full."""

    def __init__(self, rank: int, feedback: bool, group: dist.ProcessGroup) -> None:
        self._rank, self._feedback, self._group = rank, feedback, group
        self._bases: dict[int, list[Tensor]] = {}
        self._missed: dict[int, list[Tensor]] = {}

    def reduce(self, bucket: GradientBucket) -> None:
        """See bucket.Method. Two collectives: (P and what goes in full), (Q)."""
        matrices, rest = self._divide(bucket.gradients)
        bucket.buffer.div_(self._group.size())
        if bucket.index in self._missed:
            for matrix, missed in zip(matrices, self._missed[bucket.index], strict=True):
                matrix += missed
        bases = self._bases.get(bucket.index) or [self._begin(matrix) for matrix in matrices]
        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        self._add_up([*products, *rest])
        left = [torch.linalg.qr(product).Q for product in products]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        unsent = [torch.addmm(m, p, q.T, alpha=-1) for m, p, q in zip(matrices, left, right, strict=True)]
        self._add_up(right)
        for matrix, p, q in zip(matrices, left, right, strict=True):
            torch.mm(p, q.T, out=matrix)
        # A step whose gradient is not finite is not taken; the memory must outlive it.
        if all(bool(q.isfinite().all()) for q in right):
            self._remember(bucket.index, right, unsent)

    def _divide(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(the matrices that are approximated, as views (rows, all other dimensions); what goes in full)."""
        matrices = [gradient.view(len(gradient), -1) for gradient in gradients if gradient.ndim > 1]
        rest = [gradient for gradient in gradients if gradient.ndim < 2]
        chosen = [matrix for matrix in matrices if self._pays(*matrix.shape)]
        return chosen, rest + [matrix for matrix in matrices if not self._pays(*matrix.shape)]

    def _pays(self, rows: int, columns: int) -> bool:
        return self._rank * (rows + columns) < rows * columns

    def _begin(self, matrix: Tensor) -> Tensor:
        """Orthonormal columns (columns of the matrix, r), the same on every rank."""
        generator = torch.Generator().manual_seed(matrix.numel())
        drawn = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn).Q.to(matrix)
        return basis

    def _add_up(self, tensors: list[Tensor]) -> None:
        """Add up over all ranks, in place, all in one collective."""
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        for tensor, added in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(added.view_as(tensor))

    def _remember(self, index: int, right: list[Tensor], missed: list[Tensor]) -> None:
        # Orthonormal again: a gradient of 0 must not end the iteration.
        self._bases[index] = [torch.linalg.qr(q).Q for q in right]
        if self._feedback:
            self._missed[index] = missed


class WarmUp:
    """Another method after some steps without one."""

    def __init__(self, method: ReductionMethod, steps: int, group: dist.ProcessGroup) -> None:
        self._method, self._left, self._group = method, steps, group

    def reduce(self, bucket: GradientBucket) -> None:
        """See bucket.Method."""
        if self._left == 0:
            self._method.reduce(bucket)
            return
        bucket.buffer.div_(self._group.size())
        dist.all_reduce(bucket.buffer, group=self._group)
        self._left -= bucket.last


def make_background_reduction(
    method: ReductionMethod, device: torch.device
) -> Callable[[dist.GradBucket], TensorFuture]:
    """Return a function that starts to reduce a bucket by `method`, beside backward; its future holds the buffer."""
    queue = ReductionQueue(device)

    def start(torch_bucket: dist.GradBucket) -> TensorFuture:
        bucket = GradientBucket.copy_from(torch_bucket)

        def reduce() -> Tensor:
            method.reduce(bucket)
            return bucket.buffer

        return queue.submit(reduce)

    return start


def make_compression(config: CompressionConfig) -> ReductionMethod:
    """Make the compression method that the config names, over all ranks. A collective: every rank calls it.

    It gets a process group of its own, because its collectives run beside those of backward.
    """
    assert config.method != "none"
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    if config.method in ("fp16", "bf16"):
        return Cast(torch.float16 if config.method == "fp16" else torch.bfloat16, group)
    if config.method == "powersgd":
        return WarmUp(PowerSGD(config.rank, config.feedback, group), config.warmup_steps, group)
    return WarmUp(TopK(config.ratio, config.feedback, group), config.warmup_steps, group)


_MPI_POLL_SECONDS = 1e-4
"""Seconds between two looks at whether the other ranks have come."""
_MPI_START_HINT = "start the ranks with mpirun, or srun --mpi=pmix"


class MpiReduction:
    """All-reduce in place, in the memory of the bucket.

    MPI libraries wait by spinning, which takes the core away from backward where a rank has but one. So a rank sleeps
    until all have their gradients, and only then calls a reduction, which then waits for nobody.
    """

    def __init__(self, ranks: MPI.Intracomm) -> None:
        self._ranks = ranks

    def reduce(self, bucket: GradientBucket) -> None:
        """See bucket.Method."""
        from mpi4py import MPI

        bucket.buffer.div_(self._ranks.size)
        arrival = self._ranks.Ibarrier()
        while not arrival.Test():
            time.sleep(_MPI_POLL_SECONDS)
        self._ranks.Allreduce(MPI.IN_PLACE, bucket.buffer.numpy())


def make_mpi_reduction(world: World) -> MpiReduction:
    """The reduction over all ranks, on a communicator of its own. A collective: every rank calls it.

    Raises UserError if mpi4py is not installed, the ranks were not started by MPI, the library does not let a thread
    beside the main one call it, or the gradients are on a GPU.
    """
    if world.device.type != "cpu":
        raise UserError(f"parallel.reduce_with=mpi: gradients are on {world.device}; use parallel.reduce_with=torch")
    try:
        MPI = load_mpi()
    except ImportError:
        raise UserError("parallel.reduce_with=mpi: install mpi4py (pip install 'hpc_train[mpi]')") from None
    if MPI.COMM_WORLD.size != world.size:
        raise UserError(
            f"parallel.reduce_with=mpi: MPI knows of {MPI.COMM_WORLD.size} processes, the job has {world.size} ranks; "
            f"{_MPI_START_HINT}"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UserError("parallel.reduce_with=mpi: this MPI library is built without threads; use reduce_with=torch")
    # In the order of our ranks, which the launcher of the MPI processes need not have.
    return MpiReduction(MPI.Intracomm(MPI.COMM_WORLD.Split(0, world.rank)))
