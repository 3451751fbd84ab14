"""Number formats: what parameters are kept in, computed in and reduced in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def keep_parameters(model: nn.Module, config: PrecisionConfig) -> nn.Module:
    """Keep parameters in float64 for fp64, else in float32: low precision is for computing only.

    Complex buffers, such as rotary tables, stay as they are: Module.to would drop their imaginary part.
    """
    return model.double() if config.name == "fp64" else model.float()


def check_device(config: PrecisionConfig, device: torch.device) -> None:
    """Raise UserError for a number format that this rank's device does not compute in."""
    if device.type != "cuda" or config.name != "bf16" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    raise UserError(f"precision=bf16: {torch.cuda.get_device_name(device)} has no bfloat16; use precision=fp16 or fp32")


def cast_forward(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward over parameters that are kept whole: autocast for low precision."""
    if config.name in ("fp64", "fp32"):
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[config.name])


def sharded_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """The same for fully_shard, which casts the gathered parameters and the reduced gradients itself."""
    compute = None if config.name in ("fp64", "fp32") else _DTYPES[config.name]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=_DTYPES[config.reduce], output_dtype=None)
