"""Average ddp's gradients in other ways than torch's all-reduce: with compression, or through the MPI library.

A method gets one bucket after the other, in the same order on every rank, and may use several collectives for each. It
runs beside backward in a thread of its own (on a GPU: on a stream). To add a method, write a class with
`reduce(bucket)`, and name it in make_compression and in the rules of ddp (parallel/rules/data_parallel.py).

- fp16, bf16: gradients travel in half the bytes of float32.
- topk: each rank sends its largest gradients only, and adds the rest to those of the next step (error feedback). Stich,
  Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv:1809.07599, algorithm 1 (without the learning rate, which is
  the optimizer's; without the momentum correction and the clipping of Lin et al. 2017, arXiv:1712.01887).
- powersgd: each matrix is sent as a product of two thin ones, found by one step of power iteration from the last step's
  basis; the error is added to the gradients of the next step. Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727,
  algorithms 1 and 2. torch's powerSGD_hook is the same method, but with more than one bucket its chained collectives
  deadlock on gloo (2.13).
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
from hpc_train.runtime.mpi import require_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of several parameters that are reduced together."""

    index: int
    """Position in the order of reduction: 0 has the parameters whose gradients are ready first."""
    buffer: Tensor
    """All gradients, flat, (n,)."""
    gradients: list[Tensor]
    """Views of `buffer`, one per parameter, in its shape."""
    last: bool
    """The last bucket of this step."""

    @classmethod
    def copy_from(cls, bucket: dist.GradBucket) -> GradientBucket:
        """Copy what torch's object describes: that one is valid only inside the hook, this one in a thread too."""
        return cls(bucket.index(), bucket.buffer(), bucket.gradients(), bucket.is_last())


class ReductionMethod(Protocol):
    """A way to reduce gradients. Called for one bucket after the other, in the same order on every rank."""

    def reduce(self, bucket: GradientBucket) -> None:
        """Replace this rank's gradients by the mean over all ranks, in place; block until that is done."""


ReductionJob = Callable[[], Tensor]
TensorFuture = torch.futures.Future[Tensor]


class ReductionQueue:
    """Runs jobs in the order of submission, which is the same on every rank, so their collectives match.

    Callbacks of collectives would not do: gloo runs them on the few threads that also run the collectives, so two
    callbacks that wait for a third collective deadlock, and their order differs from rank to rank.
    On a GPU the host never waits for a collective, so jobs run at once, on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[tuple[ReductionJob, TensorFuture] | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is None:
            # A daemon: a thread that waits for a dead rank must not keep this process from exiting.
            threading.Thread(target=_run_jobs, args=(self._jobs,), name="gradients", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: ReductionJob) -> TensorFuture:
        """Submit a job; the future gets its result or its exception."""
        if self._stream is not None:
            return self._on_stream(job)
        future: TensorFuture = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def _on_stream(self, job: ReductionJob) -> TensorFuture:
        assert self._stream is not None
        future: TensorFuture = torch.futures.Future(devices=[self._device])
        # What fills the bucket is queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            future.set_result(job())  # inside: who waits for the future then waits for this stream
        return future


def _run_jobs(jobs: SimpleQueue[tuple[ReductionJob, TensorFuture] | None]) -> None:
    while (next_job := jobs.get()) is not None:
        job, future = next_job
        try:
            with torch.no_grad():
                result = job()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(result)
        del next_job, job, future  # free the bucket while this thread waits for the next one


_LARGEST_SUM = 2.0**15
"""Largest sum of float16 numbers to allow: half of the format's range."""


class Cast:
    """Rounds every gradient to `dtype` and adds them up in it.

    float16 has full precision from 2^-14 to 2^16, and gradients are smaller: the ranks first agree on the largest one
    of the bucket (8 bytes more) and scale by a power of two, which is exact.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._dtype, self._group = dtype, group

    def reduce(self, bucket: GradientBucket) -> None:
        """See ReductionMethod. A gradient that is not finite makes the mean not finite."""
        scale = self._find_scale(bucket.buffer) if self._dtype == torch.float16 else None
        mean = bucket.buffer / self._group.size()
        message = (mean if scale is None else mean.mul_(scale)).to(self._dtype)
        dist.all_reduce(message, group=self._group)
        bucket.buffer.copy_(message)
        if scale is not None:
            bucket.buffer.div_(scale)

    def _find_scale(self, buffer: Tensor) -> Tensor:
        """Return a power of two, the same on every rank, on the device, so that the host does not wait for it."""
        largest = torch.linalg.vector_norm(buffer, math.inf, dtype=torch.float32).double()
        largest = torch.where(largest.isfinite(), largest, math.inf)  # not every backend orders NaN
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        usable = largest.isfinite() & (largest > 0)
        exponent = torch.where(usable, (_LARGEST_SUM / largest).log2().floor(), 0.0)
        return torch.exp2(exponent.clamp(-126, 126)).to(buffer.dtype)


class TopK:
    """Sends a fraction of the entries of each bucket, the largest by absolute value; at least one."""

    def __init__(self, ratio: float, feedback: bool, group: dist.ProcessGroup) -> None:
        self._ratio, self._feedback, self._group = ratio, feedback, group
        self._unsent: dict[int, Tensor] = {}

    def reduce(self, bucket: GradientBucket) -> None:
        """See ReductionMethod."""
        local_gradient = bucket.buffer / self._group.size()
        if bucket.index in self._unsent:
            local_gradient += self._unsent[bucket.index]
        indices = local_gradient.abs().topk(self._count(local_gradient), sorted=False).indices
        self._add_up(bucket.buffer, local_gradient[indices], indices)
        # A step with a gradient that is not finite is skipped, so its error must not be remembered.
        if self._feedback and bool(bucket.buffer.isfinite().all()):
            self._unsent[bucket.index] = local_gradient.index_fill_(0, indices, 0.0)

    def _count(self, buffer: Tensor) -> int:
        return max(1, round(self._ratio * buffer.numel()))

    def _add_up(self, buffer: Tensor, values: Tensor, indices: Tensor) -> None:
        """Add into `buffer` what all ranks sent, in the order of ranks, so that the sums are equal on each."""
        short = indices.to(torch.int32) if buffer.numel() < 1 << 31 else indices
        gathered = [self._gather(tensor) for tensor in (values, short)]
        buffer.zero_()
        for sent_values, sent_indices in zip(*gathered, strict=True):
            buffer[sent_indices.long()] += sent_values

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered


class PowerSGD:
    """Sends a rank-r approximation of each matrix for which that is smaller, and everything else in full."""

    def __init__(self, rank: int, feedback: bool, group: dist.ProcessGroup) -> None:
        self._rank, self._feedback, self._group = rank, feedback, group
        self._bases: dict[int, list[Tensor]] = {}
        self._missed: dict[int, list[Tensor]] = {}

    def reduce(self, bucket: GradientBucket) -> None:
        """See ReductionMethod. Two collectives: P with the uncompressed tensors, then Q."""
        matrices, uncompressed = self._select_matrices(bucket.gradients)
        bucket.buffer.div_(self._group.size())
        if bucket.index in self._missed:
            for matrix, missed in zip(matrices, self._missed[bucket.index], strict=True):
                matrix += missed
        bases = self._bases.get(bucket.index) or [self._make_first_basis(matrix) for matrix in matrices]
        products = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        self._add_up([*products, *uncompressed])
        left_factors = [torch.linalg.qr(product).Q for product in products]
        right_factors = [matrix.T @ p for matrix, p in zip(matrices, left_factors, strict=True)]
        unsent = [
            torch.addmm(m, p, q.T, alpha=-1) for m, p, q in zip(matrices, left_factors, right_factors, strict=True)
        ]
        self._add_up(right_factors)
        for matrix, p, q in zip(matrices, left_factors, right_factors, strict=True):
            torch.mm(p, q.T, out=matrix)
        # A step with a gradient that is not finite is skipped, so its error must not be remembered.
        if all(bool(q.isfinite().all()) for q in right_factors):
            self._remember(bucket.index, right_factors, unsent)

    def _select_matrices(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return (matrices to approximate, as views (rows, all other dimensions); tensors to send in full)."""
        matrices = [gradient.view(len(gradient), -1) for gradient in gradients if gradient.ndim > 1]
        uncompressed = [gradient for gradient in gradients if gradient.ndim < 2]
        compressed = [matrix for matrix in matrices if self._is_smaller(*matrix.shape)]
        return compressed, uncompressed + [matrix for matrix in matrices if not self._is_smaller(*matrix.shape)]

    def _is_smaller(self, rows: int, columns: int) -> bool:
        return self._rank * (rows + columns) < rows * columns

    def _make_first_basis(self, matrix: Tensor) -> Tensor:
        """Draw an orthonormal basis (columns of the matrix, r), the same on every rank."""
        generator = torch.Generator().manual_seed(matrix.numel())
        drawn = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        basis: Tensor = torch.linalg.qr(drawn).Q.to(matrix)
        return basis

    def _add_up(self, tensors: list[Tensor]) -> None:
        """Add the tensors up over all ranks, in place, in one collective."""
        if not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=self._group)
        for tensor, added in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(added.view_as(tensor))

    def _remember(self, index: int, right: list[Tensor], missed: list[Tensor]) -> None:
        # Orthonormal again: after a gradient of 0 the basis would stay 0 for ever.
        self._bases[index] = [torch.linalg.qr(q).Q for q in right]
        if self._feedback:
            self._missed[index] = missed


class WarmUp:
    """Reduces plainly for some steps, then by another method."""

    def __init__(self, method: ReductionMethod, steps: int, group: dist.ProcessGroup) -> None:
        self._method, self._steps_left, self._group = method, steps, group

    def reduce(self, bucket: GradientBucket) -> None:
        """See ReductionMethod."""
        if self._steps_left == 0:
            self._method.reduce(bucket)
            return
        bucket.buffer.div_(self._group.size())
        dist.all_reduce(bucket.buffer, group=self._group)
        self._steps_left -= bucket.last


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
"""Seconds between two tests of whether all ranks have arrived."""


class MpiReduction:
    """MPI's all-reduce, in place in the memory of the bucket.

    MPI libraries wait by spinning, which takes the core away from backward where a rank has only one. So a rank sleeps
    until all have their gradients, and only then calls the reduction, which no longer waits.
    """

    def __init__(self, ranks: MPI.Intracomm) -> None:
        self._ranks = ranks

    def reduce(self, bucket: GradientBucket) -> None:
        """See ReductionMethod."""
        from mpi4py import MPI

        bucket.buffer.div_(self._ranks.size)
        arrival = self._ranks.Ibarrier()
        while not arrival.Test():
            time.sleep(_MPI_POLL_SECONDS)
        self._ranks.Allreduce(MPI.IN_PLACE, bucket.buffer.numpy())


def make_mpi_reduction(world: World) -> MpiReduction:
    """Make the reduction over all ranks, on a communicator of its own. A collective: every rank calls it.

    Raises UserError if mpi4py is not installed, the ranks were not started by MPI, the library cannot be called from a
    second thread, or the gradients are on a GPU.
    """
    if world.device.type != "cpu":
        raise UserError(f"parallel.reduce_with=mpi: gradients are on {world.device}; use parallel.reduce_with=torch")
    MPI = require_mpi("parallel.reduce_with=mpi", world.size)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UserError("parallel.reduce_with=mpi: this MPI library is built without threads; use reduce_with=torch")
    # Split sorts by our ranks; MPI's own order may differ from them.
    return MpiReduction(MPI.Intracomm(MPI.COMM_WORLD.Split(0, world.rank)))
