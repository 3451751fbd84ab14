"""Metrics of an evaluation besides the loss: sums over the targets that count, divided once, over all ranks.

A metric is a function (out, target): `out` is what the model returned, `target` is IGNORED_TARGET where nothing counts.
It returns the sum over the targets that count, or the pair (sum, weight) of a ratio with another denominator. Sums are
added in float64 over micro-batches and ranks, so a metric of counts is exact at any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.components import METRICS, explain_user_code
from hpc_train.config.train import TrainConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET

Metric = Callable[[Any, Tensor], Any]
PERPLEXITY = "perplexity"
"""exp of the mean loss: it needs no sum of its own."""


def count_correct(out: Any, target: Tensor) -> Tensor:
    """Count the targets whose logit is the largest: the metric `accuracy`."""
    logits = out.get("logits") if isinstance(out, Mapping) else out
    if not isinstance(logits, Tensor) or logits.shape[:-1] != target.shape:
        raise UserError(
            "train.metrics: accuracy needs logits (*targets, classes), which this model does not return; leave it out, "
            "or register a metric of your own"
        )
    all_logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return ((all_logits.argmax(-1) == target) & (target != IGNORED_TARGET)).sum()


def load_metrics(config: TrainConfig) -> dict[str, Metric]:
    """Return the metrics to add up, by name. Raises UserError for one that is not registered."""
    built_in = {"accuracy": count_correct, PERPLEXITY: None}
    metrics = {
        name: built_in[name] if name in built_in else METRICS.find(name, config.module, built_in)
        for name in dict.fromkeys(config.metrics)
    }
    return {name: metric for name, metric in metrics.items() if metric is not None}


class EvaluationSums:
    """Adds up the loss and the metrics of one evaluation on this rank."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self.values = torch.zeros(1 + 2 * len(metrics), dtype=torch.float64, device=device)
        """Loss, then sum and weight of each metric: reduced over ranks in one message."""

    @torch.no_grad()
    def add(self, loss: Tensor, out: Any, target: Tensor) -> None:
        """Add a micro-batch."""
        self.values[0] += loss.detach()
        for index, (name, metric) in enumerate(self._metrics.items()):
            with explain_user_code(f"in the metric {name}"):
                result = metric(out, target)
            pair = result if isinstance(result, tuple) else (result, (target != IGNORED_TARGET).sum())
            if len(pair) != 2 or not all(isinstance(number, Tensor) and number.ndim == 0 for number in pair):
                raise UserError(
                    f"train.metrics: {name} returned a {type(result).__name__}; return the sum over the targets that "
                    "count, a scalar tensor, or a pair of such sums"
                )
            for place, number in enumerate(pair):
                self.values[1 + 2 * index + place] += number

    @property
    def loss(self) -> Tensor:
        """The sum of the loss, a scalar."""
        return self.values[0]

    @property
    def metrics(self) -> Tensor:
        """(metrics, 2): sum and weight of each."""
        return self.values[1:].view(-1, 2)
