"""Load a user's iterable data set, one step ahead, on a thread, and save where it is.

The order is the data set's own. A position is saved only through its state_dict, which belongs to one part of the
stream: it is exact on the same number of data-parallel ranks. At its end the data set is iterated again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hpc_train.components import explain_user_code
from hpc_train.data.loader import BatchLoader, compute_share, cut_micro_batches, start_loader_thread
from hpc_train.data.own_dataset import OwnStream, collate_samples
from hpc_train.errors import UserError
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.messages import gather_values


class StreamLoader:
    """Loads batches in the order of a stream; implements loader.BatchLoader."""

    def __init__(self, stream: OwnStream, global_batch: int, micro_batch: int, dp_index: int, dp_size: int) -> None:
        """Start the thread. global_batch: samples over all `dp_size` shares. micro_batch: samples of this share."""
        self.global_batch = global_batch
        self._stream, self._micro_batch = stream, micro_batch
        self._share = compute_share(global_batch, dp_size)
        self._offset = dp_index * self._share
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        """First sample of the batch that comes next."""
        self._next: Future[tuple[list[MicroBatch], Any]] | None = None
        self._state: Any = None
        with explain_user_code(f"state_dict of data.name={stream.name}"):
            self._start = self._save_position()
        """Position at the beginning: a data set that knows its position does not start again by itself."""
        self._thread = start_loader_thread()

    def batch(self, step_start_sample: int) -> StepBatch:
        """Return the next batch; with a start of 0 the first one again, as each evaluation wants it.

        The following batch is then loaded in the background; an error there is raised when that batch is requested.
        """
        if step_start_sample != self._position:
            assert step_start_sample == 0, "a stream goes forward only"
            self._restart()
        future = self._next or self._thread.submit(self._assemble)
        self._next = None
        micro, self._state = future.result()
        self._position = step_start_sample + self.global_batch
        self._next = self._thread.submit(self._assemble)
        return StepBatch(micro, first=self._offset)

    @property
    def saves_position(self) -> bool:
        """Whether the data set can save where it is."""
        return self._stream.saves_position

    def state(self) -> Any:
        """Return the position after the batch that was returned last, as JSON has it; None if it cannot be saved."""
        return self._state

    def restore(self, state: Any, position: int) -> None:
        """Continue after `position` samples of all ranks. state: what `state` returned; None: from the beginning."""
        self._restart()
        self._position = position
        if state is not None:
            with explain_user_code(f"load_state_dict of data.name={self._stream.name}"):
                self._stream.source.load_state_dict(state)  # type: ignore[attr-defined]
            self._state = state

    def close(self) -> None:
        """End the thread; the loader cannot be used afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._next = None

    def _restart(self) -> None:
        if self._next is not None:
            self._next.exception()  # the thread must not read any more
        self._next, self._iterator, self._position = None, None, 0
        with explain_user_code(f"load_state_dict of data.name={self._stream.name}"):
            self._rewind()

    def _rewind(self) -> None:
        """Let the data set begin at its start. One that was resumed may otherwise begin each pass where it resumed."""
        if self._stream.saves_position:
            self._stream.source.load_state_dict(self._start)  # type: ignore[attr-defined]

    def _assemble(self) -> tuple[list[MicroBatch], Any]:
        with explain_user_code(f"reading data.name={self._stream.name}"):
            samples = [self._read_sample() for _ in range(self._share)]
            inputs, targets = collate_samples(self._stream.name, self._stream.source, samples)
            state = self._save_position()
        batch = MicroBatch(inputs, targets)
        if self._device is not None:
            torch.cuda.set_device(self._device)
            batch = batch.map(Tensor.pin_memory)
        return cut_micro_batches(batch, self._share, self._micro_batch), state

    def _read_sample(self) -> Any:
        # Twice, as one pass may end here and the next begin; a whole pass without a sample is the user's mistake.
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._iterate_part()
            for sample in self._iterator:
                return sample
            self._iterator = None
            self._rewind()
        raise UserError(f"data.name={self._stream.name}: yields no sample for this rank; give it some")

    def _iterate_part(self) -> Iterator[Any]:
        """Yield this rank's samples of one pass over the data set.

        All ranks read the same groups of samples, one for each rank, to their end: a position that is saved then lies
        between two groups on every rank.
        """
        part, source = self._stream.part, iter(self._stream.source)
        while group := list(islice(source, part.count)):
            if len(group) > part.index:
                yield group[part.index]

    def _save_position(self) -> Any:
        if not self._stream.saves_position:
            return None
        state = self._stream.source.state_dict()  # type: ignore[attr-defined]
        try:
            same: Any = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.name={self._stream.name}: its state_dict holds what JSON does not have ({error}); use numbers, "
                "strings, lists and dictionaries"
            ) from error
        return same


# The position of a stream in a checkpoint: one for each data-parallel rank, restored to the same rank. A data set with
# an index does not need it: the number of consumed samples is enough.


def gather_positions(loader: BatchLoader, world: World) -> dict[str, Any] | None:
    """Return, on rank 0, the position of each share of a stream; None where there is none to save. A collective."""
    if not isinstance(loader, StreamLoader) or not loader.saves_position:
        return None
    rank_position = [world.dp_index, loader.state()]
    gathered = gather_values(rank_position) if world.size > 1 else [rank_position]
    if gathered is None:
        return None
    positions = dict(gathered)
    return {"dp_size": world.dp_size, "positions": [positions[index] for index in range(world.dp_size)]}


def restore_position(
    loader: BatchLoader, saved: dict[str, Any] | None, consumed: int, exact: bool, world: World
) -> str:
    """Continue a stream where it was; returns a line to print if it begins again, else an empty one.

    saved: what gather_positions returned. exact: data.resume. Raises UserError where a position is of another number of
    data-parallel ranks.
    """
    if not isinstance(loader, StreamLoader):
        return ""
    if saved is None or not exact:
        loader.restore(None, consumed)
        reason = "data.resume=beginning" if not exact else "it has no state_dict and load_state_dict"
        return f"data: the stream starts at its beginning again, because {reason}"
    if saved["dp_size"] != world.dp_size:
        raise UserError(
            f"data: the position of this stream was saved on {saved['dp_size']} data-parallel ranks, and there are "
            f"{world.dp_size} now; use as many, or set data.resume=beginning to start the stream again"
        )
    loader.restore(saved["positions"][world.dp_index], consumed)
    return ""
