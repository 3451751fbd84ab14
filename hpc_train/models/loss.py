"""The loss of every model here: cross entropy, summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.api import IGNORED_TARGET


def cross_entropy_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Sum of the cross entropy in nats over all targets that are not IGNORED_TARGET, a scalar in at least float32.

    logits: (..., classes). target: (...), int64.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), target.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
