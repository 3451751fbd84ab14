"""The product of a linear layer, whatever its weight is stored in: for layers whose forward a technique replaces."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.adapters.nf4 import Nf4Weight, multiply_nf4


def multiply_weight(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return W x without the bias, (..., outputs).

    A weight in 4 bits (NF4) is expanded for the product. A layer with an attribute `product` computes by that, such as
    in 8 bits: (x (..., inputs), weight) -> (..., outputs).
    """
    if isinstance(layer, Nf4Weight):
        return multiply_nf4(layer, x)
    product = getattr(layer, "product", F.linear)
    out: Tensor = product(x, layer.weight)
    return out
