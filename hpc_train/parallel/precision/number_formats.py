"""Choose the number formats in which parameters are stored, computed and reduced, and scale the loss for fp16.

Dynamic loss scaling is that of Micikevicius et al. 2018, arXiv:1710.03740, section 3.2. The scale is the same on every
rank and is saved with the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World

_FLOAT8_CAPABILITY = (8, 9)
_MXFP8_CAPABILITIES = ((10, 0), (10, 3))
"""Compute capability of the first NVIDIA GPUs with products of 8 bits (Ada Lovelace)."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's number formats, by their names in the settings."""


def cast_parameters(model: nn.Module, config: PrecisionConfig) -> nn.Module:
    """Cast parameters to float64 for fp64, else to float32: low precision is for computing only.

    Complex buffers, such as rotary tables, stay as they are: Module.to would drop their imaginary part.
    """
    return model.double() if config.name == "fp64" else model.float()


def check_precision_device(config: PrecisionConfig, device: torch.device) -> None:
    """Raise UserError for a number format that this rank's device does not compute in."""
    if device.type == "cuda" and config.float8 != "none":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < _FLOAT8_CAPABILITY:
            raise UserError(f"precision.float8: {name} has no products of 8 bits; use precision=bf16")
        if config.float8.startswith("mxfp8") and (torch.version.hip or capability not in _MXFP8_CAPABILITIES):
            raise UserError(
                f"precision.float8={config.float8}: {name} has no such products, which need compute capability 10.0 or "
                "10.3 (B200, B300); use precision=fp8"
            )
        if config.name == "fp64":
            raise UserError("precision.float8: with precision=fp64 is emulated on CPUs only; use precision=fp8")
    if device.type != "cuda" or config.name != "bf16" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    raise UserError(f"precision=bf16: {torch.cuda.get_device_name(device)} has no bfloat16; use precision=fp16 or fp32")


def autocast_forward(config: PrecisionConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward over unsharded parameters: autocast for low precision."""
    if config.name in ("fp64", "fp32"):
        return nullcontext()
    return torch.autocast(device.type, DTYPES[config.name])


def make_mixed_precision_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """Make fully_shard's policy; it casts the gathered parameters and the reduced gradients itself."""
    compute = None if config.name in ("fp64", "fp32") else DTYPES[config.name]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=DTYPES[config.reduce], output_dtype=None)


log = logging.getLogger(__name__)

INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""The defaults of torch.amp.GradScaler."""
_SMALLEST, _LARGEST = 2.0**-24, 2.0**126
"""Below the one not even the smallest number of fp16 would be left of a 1; twice the other is too much for float32."""


def _make_scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


@dataclass
class LossScale:
    """Factor on the loss that keeps small gradients from vanishing in fp16; the same on every rank."""

    scale: Tensor = field(default_factory=lambda: _make_scalar(INITIAL_SCALE))
    finite_steps: Tensor = field(default_factory=lambda: _make_scalar(0))
    """Updates since the scale last changed."""

    @property
    def factor(self) -> float:
        """The current scale."""
        return float(self.scale)

    def adjust(self, finite: bool) -> None:
        """Halve the scale after a gradient that was not finite; double it after GROWTH_INTERVAL finite ones in a row.

        Raises UserError if halving has not helped for so long that it will not help any more.
        """
        if not finite:
            self._back_off()
            return
        self.finite_steps.add_(1)
        if float(self.finite_steps) >= GROWTH_INTERVAL:
            self.scale.mul_(GROWTH_FACTOR).clamp_(max=_LARGEST)
            self.finite_steps.zero_()

    def _back_off(self) -> None:
        self.scale.mul_(BACKOFF_FACTOR)
        self.finite_steps.zero_()
        log.warning("the gradient is not finite in fp16: step skipped, loss scale %g from here", self.factor)
        if self.factor < _SMALLEST:
            raise UserError(
                f"precision=fp16: the gradient is not finite even at a loss scale of {_SMALLEST:g}; lower optim.lr, or "
                "use precision=bf16 or fp32"
            )

    def shards(self, world: World) -> Iterator[TensorShard]:
        """List the scale and its counter, to save and load; every rank has a copy."""
        for name, value in (("scaler.scale", self.scale), ("scaler.good", self.finite_steps)):
            yield TensorShard(name, (), value.dtype, (), value, replica=world.rank)


def make_loss_scale(config: PrecisionConfig) -> LossScale | None:
    """Make a loss scale for fp16; bfloat16 has the range of float32 and needs none."""
    return LossScale() if config.name == "fp16" else None
