"""Pause Python's garbage collection while many objects are made, and collect at the same step on all ranks.

A collection takes tens of milliseconds in a process with torch. If each of a thousand ranks collected at a different
moment, every step would wait for some rank; if all collect at the same step, only that step waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc(freeze: bool = False) -> Iterator[None]:
    """Pause garbage collection while many objects are made; reference counts still free most of them.

    A collection would look at every object of torch and free none: tens of thousands of small objects are made ten
    times as fast without. freeze: later collections leave out everything that exists at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def collect_at_steps(interval: int) -> Iterator[Callable[[int], None]]:
    """Inside this context, collect after steps that are multiples of `interval`; yields what to call after a step.

    interval: 0 leaves collection to Python. What exists at the beginning is left out of all collections, so that one
    looks at what the steps since have made. Afterwards all is as before.
    """
    if not interval:
        yield lambda _: None
        return
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()

    def end_step(step: int) -> None:
        if step % interval == 0:
            gc.collect()

    try:
        yield end_step
    finally:
        if not was_frozen:  # who froze modules at the start of the process wants them to stay
            gc.unfreeze()
        if was_enabled:
            gc.enable()
