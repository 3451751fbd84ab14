"""Gradient compression of ddp: fewer bytes on the wire, one method a file."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpc_train.config.techniques import CompressionConfig
from hpc_train.parallel.ddp.bucket import Method
from hpc_train.parallel.ddp.compression.cast import Cast
from hpc_train.parallel.ddp.compression.powersgd import PowerSGD
from hpc_train.parallel.ddp.compression.topk import TopK
from hpc_train.parallel.ddp.compression.warm_up import WarmUp

ERROR_FEEDBACK = ("powersgd", "topk")
"""Methods that remember from step to step what they did not send."""


def make_compression(config: CompressionConfig) -> Method | None:
    """The method that the config names, over all ranks; None for none. A collective: every rank calls it.

    It gets a process group of its own: its collectives run beside those of backward.
    """
    if config.method == "none":
        return None
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    if config.method in ("fp16", "bf16"):
        return Cast(torch.float16 if config.method == "fp16" else torch.bfloat16, group)
    if config.method == "powersgd":
        return WarmUp(PowerSGD(config.rank, config.feedback, group), config.warmup_steps, group)
    return WarmUp(TopK(config.ratio, config.feedback, group), config.warmup_steps, group)
