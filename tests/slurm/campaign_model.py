"""The model of the fault campaign: small, as slow as asked for, and it does what files beside it ask for.

A file `<task>.<action>` in CAMPAIGN_FOLDER is obeyed at the next forward of training and removed: raise an exception,
take the lock of the interpreter for ever (gil), or return NaN once (nan). STEP_SECONDS is the time of a forward.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hpc_train.models.registry import register
from hpc_train.resilience.chaos import hold_interpreter_lock

FOLDER = os.environ.get("CAMPAIGN_FOLDER")
TASK = os.environ.get("SLURM_PROCID", "0")
SECONDS = float(os.environ.get("STEP_SECONDS", "0"))


def take_order() -> str | None:
    """Return what this rank is to do now, once."""
    if FOLDER is None:
        return None
    for path in Path(FOLDER).glob(f"{TASK}.*"):
        path.unlink()
        return path.suffix.removeprefix(".")
    return None


@register("campaign")
class CampaignModel(nn.Module):
    """Logits of the next byte from this one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(self.embed(tokens)))
        if not torch.is_grad_enabled():
            return logits
        time.sleep(SECONDS)
        order = take_order()
        if order == "raise":
            raise RuntimeError("ordered by the campaign")
        if order == "gil":
            hold_interpreter_lock()
        return logits * float("nan") if order == "nan" else logits
