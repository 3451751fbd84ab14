"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from hpc_train.config.optim import OptimConfig, ScheduleConfig


def peak_rate(config: OptimConfig, global_batch: int) -> float:
    """optim.lr scaled from the batch it was tuned at to this one.

    linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014 (arXiv:1404.5997).
    """
    if config.lr_scaling == "none":
        return config.lr
    assert config.base_batch is not None
    ratio = global_batch / config.base_batch
    return config.lr * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Learning rate of update number `step` (0-based) of `steps`: linear warm-up, then the named decay.

    The first update already has peak / warmup_steps, the last one min_ratio * peak (constant: peak).
    """
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (config.min_ratio + (1 - config.min_ratio) * _shape(config, step, warmup, steps))


def _shape(config: ScheduleConfig, step: int, warmup: int, steps: int) -> float:
    """From 1 at the end of the warm-up to 0 at the last update."""
    if config.name == "constant":
        return 1.0
    start = warmup
    if config.name == "wsd":
        start = max(warmup, steps - round(steps * config.decay_fraction))
        if step < start:
            return 1.0
    done = (step - start + 1) / max(steps - start, 1)
    return 0.5 * (1 + math.cos(math.pi * done)) if config.name == "cosine" else 1 - done
