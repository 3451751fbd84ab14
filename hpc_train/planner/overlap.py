"""What is left to wait for of communication that runs beside computation."""

from __future__ import annotations

import numpy as np

from hpc_train.planner.jobs import Column


def exposed(communication: Column, window: Column, share: Column, edge: Column) -> Column:
    """Seconds that a rank waits.

    window: seconds of the computation that it runs beside; share: how much of the window hides it, 0 to 1. edge: the
    part that nothing can hide, as the first gather and the last reduction; counted once, within communication.
    """
    return np.maximum(communication - share * window, np.minimum(edge, communication))
