"""Jobs that run one after the other beside backward: reductions of more than one collective."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

Job = Callable[[], Tensor]
Future = torch.futures.Future[Tensor]


class Background:
    """Takes jobs in the order they are given, which is the same on every rank, and so are their collectives.

    Callbacks of collectives would not do: gloo runs them on the few threads that also run the collectives, so two that
    wait for a further one wait for ever, and which of two comes first differs from rank to rank.
    On a GPU the host never waits for a collective, so jobs run where they are given, on a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[tuple[Job, Future] | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is None:
            # A daemon, because one that waits for a rank that is gone must not keep this one from leaving.
            threading.Thread(target=_work, args=(self._jobs,), name="gradients", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job) -> Future:
        """Begin a job; the future has its result, or raises what it raised."""
        if self._stream is not None:
            return self._on_stream(job)
        future: Future = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def _on_stream(self, job: Job) -> Future:
        assert self._stream is not None
        future: Future = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            future.set_result(job())
        return future


def _work(jobs: SimpleQueue[tuple[Job, Future] | None]) -> None:
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
