"""Import libraries without their warnings about optional parts that are not needed here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the logs of a library that comments, while it is imported, on compiled parts for devices not here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
