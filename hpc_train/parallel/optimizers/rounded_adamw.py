"""AdamW whose two moments are stored in bfloat16 and rounded stochastically: half the state of AdamW.

With rounding to nearest, a moment would stop changing once a change is below half a unit in its last place, as small
changes of the second moment are. Rounding up with the probability given by the discarded bits keeps the mean (Gupta et
al. 2015, arXiv:1502.02551). The random bits are a hash of the parameter's name, the update's number and the element's
index in the whole parameter, so they are the same in every layout. The update itself uses the moments before rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.models.dropout import hash_text, mix_bits
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.shard_rectangles import FusedParts, list_rectangles

_CUT_BITS = 16
"""Bits of a float32 that bfloat16 does not have."""


class RoundedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with moments in bfloat16."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        fused: Mapping[nn.Parameter, FusedParts] | None = None,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """names: of the parameters in the model, from which the random bits come. fused: parts of fused matrices."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._fused = fused or {}
        self._keys = {parameter: hash_text(name) for parameter, name in names.items()}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.bfloat16),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.bfloat16),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        count = float(state["step"])
        values, gradient = get_local(parameter), get_local(parameter.grad)  # type: ignore[arg-type]
        first, second = get_local(state["exp_avg"]), get_local(state["exp_avg_sq"])
        mean = first.to(values.dtype).lerp_(gradient, 1 - beta1)
        square = second.to(values.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bits = make_random_bits(parameter, self._keys[parameter] ^ int(count), self._fused.get(parameter))
        first.copy_(round_stochastically(mean, bits & 0xFFFF))
        second.copy_(round_stochastically(square, (bits >> _CUT_BITS) & 0xFFFF))
        values.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = square.sqrt_().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        values.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**count))


def make_random_bits(parameter: Tensor, key: int, fused: FusedParts | None = None) -> Tensor:
    """Return 64 random bits for each element that this rank has of a parameter, int64, shaped as its local tensor."""
    places = []
    for offset, local in list_rectangles(parameter, fused):
        place = torch.zeros((), dtype=torch.int64, device=local.device)
        for begin, length, full_length in zip(offset, local.shape, parameter.shape, strict=True):
            row = torch.arange(begin, begin + length, device=local.device)
            place = place.unsqueeze(-1) * full_length + row
        places.append(place)
    place = places[0] if fused is None else torch.cat(places, fused.dim)
    return mix_bits(mix_bits(place) ^ key)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Round to bfloat16, up with the probability of what is cut off. bits: 0 to 65535, int64, shaped as x."""
    x_fp32 = x.to(torch.float32)
    raised = (x_fp32.view(torch.int32) + bits.to(torch.int32)) & ~0xFFFF
    return torch.where(x_fp32.isfinite(), raised.view(torch.float32), x_fp32).to(torch.bfloat16)
