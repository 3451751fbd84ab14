"""Route the tokens of a rehearsal evenly: its router scores have no values, so every expert gets equally many.

A rank with the busiest experts needs more memory than is counted here (see `expert_imbalance` in the metrics).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpc_train.config.model import ExpertsConfig
from hpc_train.models.experts import list_mixtures
from hpc_train.parallel.expert.exchange import ExchangedDispatch


class EvenExperts(nn.Module):
    """Takes the place of models.experts.BestExperts: the next experts for each token, whatever the scores."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, scores: Tensor) -> Tensor:
        """scores (B, t, count) -> experts (B, t, K), int64, with values."""
        batch, length, _ = scores.shape
        places = torch.arange(batch * length * self.config.top_k)
        return (places % self.config.count).view(batch, length, self.config.top_k)


class AlikeDispatch(ExchangedDispatch):
    """Takes the place of ExchangedDispatch: all ranks of ep send alike, so that the numbers of rows are known."""

    def exchange_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """See ExchangedDispatch."""
        sent_counts = counts.view(self.group.size(), -1)
        return sent_counts, sent_counts[self.group.rank()].expand_as(sent_counts).clone()


def route_evenly(part: nn.Module, *, grouped: bool) -> None:
    """Let the mixtures of experts in `part` route without scores. grouped: multiply as GPUs do in bfloat16."""
    for mixture in list_mixtures(part).values():
        mixture.router.choice = EvenExperts(mixture.config)
        mixture.experts.grouped = grouped
        if isinstance(mixture.dispatch, ExchangedDispatch):
            mixture.dispatch = AlikeDispatch(mixture.dispatch.group)
