"""Runs with an adapter on a model of transformers: save one that changes the model, start from one, compare logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_helpers import save_alone

from hpc_train.config.plain_config import config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.parallel.adapters import attach_adapters
from hpc_train.parallel.apply import build
from hpc_train.training.adapter_start import load_adapter
from hpc_train.training.factory import make_pretrained_model
from hpc_train.training.optimizer import make_optimizer

INPUTS = torch.arange(24).view(2, 12) % 61


def save_adapted_run(run: Path, model: Any, config: RunConfig) -> Any:
    """Save a run's step with random adapters on `model`, and return the adapted model."""
    attach_adapters(model, config.adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter_parameter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_alone(run / "checkpoints", 8, state, {"consumed_samples": 64})
    (run / "config.yaml").write_text(config_to_yaml(config))
    return model


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    """Return the model's logits of INPUTS, or what it returns if that has none."""
    out = model(INPUTS)
    return getattr(out, "logits", out)  # type: ignore[no-any-return]


def start_from(world: World, config: RunConfig) -> Any:
    """Return the logits of a run that starts from adapter.path."""
    model, values = make_pretrained_model(config.model, config.train.seed)  # type: ignore[arg-type]
    engine = build(model, lambda split: make_optimizer(split, config.optim), config, world, values=values)
    load_adapter(config, engine, world)
    return compute_logits(engine.parts[0].eval()).numpy()
