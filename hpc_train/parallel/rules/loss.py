"""Rules of the loss in chunks."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError

_NEEDS_NO_LOGITS = ("perplexity",)


def check_loss_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what a loss in chunks cannot be combined with."""
    train = config.train
    if not train.loss_chunk:
        return
    option = f"train.loss_chunk={train.loss_chunk}"
    if not isinstance(config.model, TransformerConfig):
        raise UserError(
            f"{option}: model={config.model.name} is none of our transformers, whose output layer and loss are known; "
            "use train.loss_chunk=0"
        )
    if train.loss is not None:
        raise UserError(f"{option}: train.loss={train.loss} takes all logits; use train.loss_chunk=0")
    needing = [name for name in train.metrics if name not in _NEEDS_NO_LOGITS]
    if needing:
        raise UserError(f"{option}: the metric {needing[0]} takes all logits; leave it out, or use train.loss_chunk=0")
    if config.parallel.unused_parameters:
        raise UserError(
            f"{option}: uses the output layer after the model's forward, where parallel.unused_parameters=true does "
            "not see it; leave one of them out"
        )
