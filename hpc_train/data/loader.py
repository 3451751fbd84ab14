"""Load each rank's share of every step, one step ahead, on a thread of its own.

A `Loader` has no state: which samples a step has follows from the seed and the position in the run alone, so that a run
may go on with another number of ranks and see exactly the samples that are left.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from operator import itemgetter
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.datasets import Dataset
from hpc_train.data.images.image_samples import ImageSamples
from hpc_train.data.sample_order import order_samples
from hpc_train.data.samples.mixture import MixtureDataset
from hpc_train.errors import UserError
from hpc_train.interfaces import MicroBatch, StepBatch


class BatchLoader(Protocol):
    """Gives the training loop its batches, one step after the other."""

    global_batch: int

    def batch(self, step_start_sample: int) -> StepBatch:
        """Return this rank's share of the step that begins with this sample of all ranks."""

    def state(self) -> Any:
        """Return what a checkpoint must hold besides the number of samples, as JSON has it; None: nothing."""

    def close(self) -> None:
        """Release what the loader holds, such as its thread."""


class Loader:
    """Loads batches by the run's sample position, so that there is no state to save or restore."""

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        global_batch: int,
        micro_batch: int,
        dp_index: int,
        dp_size: int,
        augment: bool = False,
    ) -> None:
        """Start the thread.

        global_batch: samples of a step over all `dp_size` shares. micro_batch: samples of one part of this share.
        augment: draw a crop of each image, which depends on its position in the run; no effect on other data.
        """
        assert 0 <= dp_index < dp_size
        assert micro_batch > 0
        self.dataset = dataset
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.augment = augment
        # Samples of this rank in a step, and where they begin among those of all ranks.
        self.share = compute_share(global_batch, dp_size)
        self.offset = dp_index * self.share
        # Pinning happens on the thread, and would otherwise make a context on GPU 0 in every rank of a node.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None
        self._thread = start_loader_thread()

    def batch(self, step_start_sample: int) -> StepBatch:
        """Return this rank's contiguous share of the samples [step_start_sample, step_start_sample + global_batch).

        The next step's batch is then loaded in the background; an error there is raised when that batch is requested.
        """
        if self._next is not None and self._next[0] == step_start_sample:
            future = self._next[1]
        else:
            future = self._submit(step_start_sample)
        self._next = None
        micro = future.result()
        following = step_start_sample + self.global_batch
        self._next = (following, self._submit(following))
        return StepBatch(micro, first=self.offset)

    def state(self) -> None:
        """Return nothing: the position in the run decides everything."""

    def close(self) -> None:
        """End the thread; the loader cannot be used afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._next = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, start: int) -> Future[list[MicroBatch]]:
        return self._thread.submit(self._assemble, start)

    def _assemble(self, start: int) -> list[MicroBatch]:
        """Read this rank's share of a step, on the loader's thread. start: first sample of the step over all ranks."""
        first = start + self.offset
        samples = self._read(self.dataset, first)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            samples = samples.map(Tensor.pin_memory)
        return cut_micro_batches(samples, self.share, self.micro_batch)

    def _read(self, data: Dataset, first: int) -> MicroBatch:
        """Read this rank's share of a step, which begins at the position `first` of the run."""
        if isinstance(data, MixtureDataset):
            return MicroBatch(*data.get(data.order(self.seed, first, self.share)))
        indices = order_samples(self.seed, len(data), first, self.share)
        if isinstance(data, ImageSamples) and self.augment:
            return MicroBatch(*data.get_augmented(indices, self.seed, first))
        return MicroBatch(*data.get(indices))


class SequentialLoader:
    """Loads each sample of a data set once, in the order of their indices; the last batch may be smaller.

    For measuring a model on all of a data set. The order of training would begin again to fill its last batch.
    """

    def __init__(self, dataset: Dataset, global_batch: int, micro_batch: int) -> None:
        self.dataset, self.global_batch, self.micro_batch = dataset, global_batch, micro_batch

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-len(self.dataset) // self.global_batch)

    def batch(self, step_start_sample: int) -> StepBatch:
        """Return the samples from this one on, at most a global batch."""
        end = min(step_start_sample + self.global_batch, len(self.dataset))
        inputs, targets = self.dataset.get(np.arange(step_start_sample, end))
        return StepBatch(cut_micro_batches(MicroBatch(inputs, targets), end - step_start_sample, self.micro_batch))

    def state(self) -> None:
        """Return nothing: the index decides everything."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


def cut_micro_batches(samples: MicroBatch, count: int, size: int) -> list[MicroBatch]:
    """Cut `count` samples into micro-batches of `size`, of which the last may be smaller."""
    return [samples.map(itemgetter(slice(begin, begin + size))) for begin in range(0, count, size)]


def compute_share(global_batch: int, dp_size: int) -> int:
    """Return the samples in one of `dp_size` equal shares of a step. Raises UserError if there is a remainder."""
    if global_batch % dp_size == 0:
        return global_batch // dp_size
    below = global_batch // dp_size * dp_size
    divisible = " or ".join(str(value) for value in (below, below + dp_size) if value)
    raise UserError(
        f"train.global_batch={global_batch} does not divide over {dp_size} data-parallel ranks: set it to {divisible}"
    )


def start_loader_thread() -> ThreadPoolExecutor:
    """Start one thread with every signal blocked.

    Signals belong to the main thread: one that the kernel delivers to this thread would not interrupt the main thread's
    system calls, and Python would run its handler late.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="loader")
    with _block_signals():
        executor.submit(int).result()
    return executor


@contextmanager
def _block_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
