"""AdamW over the parameters that this rank keeps."""

from __future__ import annotations

import torch
from torch import nn

from hpc_train.config.optim import OptimConfig
from hpc_train.errors import UserError


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only. Raises UserError if the model has nothing to train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("model: no parameter requires a gradient; there is nothing to train")
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        **_implementation(config.implementation, trained[0].device),
    )


def _implementation(name: str, device: torch.device) -> dict[str, bool]:
    if name == "auto":
        name = "fused" if device.type in ("cpu", "cuda") else "foreach"
    return {"fused": name == "fused", "foreach": name == "foreach"}
