"""What was read is seen to by other threads than those that read, in memory of its own.

Threads that did both would fall into step: the disk serves their reads alike, and then waits while all of them look at
what came.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

from hpc_train.checkpoint.source import pages


class Consumers:
    """Threads, and memory for what they have to do."""

    def __init__(self, threads: int, number: int, size: int) -> None:
        """number: of buffers of `size` bytes, in whole pages, that are made when they are first needed."""
        self._pool, self._size = ThreadPoolExecutor(threads), size
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        for _ in range(number):
            self._free.put(None)
        self._under_way: deque[Future[None]] = deque()
        self.failed = False
        """There is no use in more; `wait` tells why."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def memory(self) -> mmap.mmap:
        """That nobody else has; waits for it."""
        return self._free.get() or pages(self._size)

    def do(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        """In another thread; then the memory is free."""
        self._under_way.append(self._pool.submit(self._do, work, memory))

    def _do(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        try:
            work()
        except BaseException:
            self.failed = True
            raise
        finally:
            self._free.put(memory)

    def wait(self) -> None:
        """For all of it. Raises what the first that failed raised."""
        while self._under_way:
            self._under_way.popleft().result()
