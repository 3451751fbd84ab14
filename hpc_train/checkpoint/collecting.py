"""Garbage collection, which has nothing to find while a plan is made, and looks at every object of torch for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """None meanwhile. Tens of thousands of small objects are made ten times as fast; references still free them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
