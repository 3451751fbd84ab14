"""Random numbers as a pure function of (seed, step, data index): nothing to save, the same after any resume."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_step(seed: int, step: int, index: int) -> None:
    """Seed every generator that a model may draw from (dropout, say) for one step of one share of the batch."""
    words = np.random.SeedSequence([seed, step, index]).generate_state(2, np.uint64)
    # Not torch.manual_seed: it reaches for every GPU, and where there is none keeps a stack trace of each call.
    torch.random.default_generator.manual_seed(int(words[0]))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(int(words[0]))
    np.random.seed(int(words[1]) & 0xFFFFFFFF)  # users' modules may draw from the legacy generator
    random.seed(int(words[1]))


def be_deterministic() -> None:
    """Make torch refuse operations that are not reproducible bit by bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses every matrix product on a GPU
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
