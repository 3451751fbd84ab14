"""The feed-forward layer of a mixture of experts: a router, routed experts with stacked weights, and shared ones.

A token's router scores choose its experts; their outputs are added with the scores as weights. Softmax gates as in
Mixtral (arXiv:2401.04088), OLMoE (arXiv:2409.02060) and Qwen3 (arXiv:2505.09388); sigmoid gates, groups, shared experts
and bias balancing as in DeepSeek-V3 (arXiv:2412.19437). `Dispatch` and `WholeSequences` are separate modules, so that a
technique can replace them: `Dispatch` by one that sends tokens to the ranks that hold their experts, `WholeSequences`
by one that knows which other ranks have tokens of the same sequences.

Loads are recorded in backward, because it runs once for each training forward, even if activations are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.config.model import ExpertsConfig

WIDTH_DIMENSIONS = {"gate": 2, "up": 2, "down": 1}
"""Dimension of each stack of weights that is the width of an expert."""
HIDDEN_DIMENSIONS = {"gate": 1, "up": 1, "down": 2}


ExpertProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows (n, K), sorted by expert, by stacked weights (experts, K, N); counts: (experts,), rows of each."""


class Experts(nn.Module):
    """Routed experts: down(silu(gate(x)) * up(x)) of each, with weights stacked over experts."""

    grouped: bool | None = None
    """Whether to use torch's grouped products; None: on GPUs in bfloat16."""
    product: ExpertProduct | None = None
    """Computes the products, such as in 8 bits; None: they are computed in the format of the rows."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, hidden, width))
        self.up = nn.Parameter(torch.empty(count, hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: (rows, hidden), sorted by expert; counts: (experts,), int64, rows of each. Returns (rows, hidden)."""
        gate: Tensor = self.gate
        up: Tensor = self.up
        down: Tensor = self.down
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, gate, up, down = (tensor.to(dtype) for tensor in (x, gate, up, down))
        if self.product is not None:
            hidden = F.silu(self.product(x, gate, counts)) * self.product(x, up, counts)
            return self.product(hidden, down, counts)
        grouped = x.is_cuda and x.dtype == torch.bfloat16 if self.grouped is None else self.grouped
        if grouped:
            return _multiply_grouped(x, gate, up, down, counts)
        return _multiply_each(x, gate, up, down, counts.tolist())


def _multiply_grouped(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """Multiply with all experts by torch's grouped products, which do not wait for the device to know the counts."""
    ends = counts.cumsum(0).to(torch.int32)
    hidden = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
    return F.grouped_mm(hidden, down, offs=ends)


def _multiply_each(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
    """Multiply with one expert after another.

    Without rows the first one computes nothing, so that every weight has a gradient.
    """
    outputs = []
    weights = zip(gate.unbind(), up.unbind(), down.unbind(), torch.split(x, counts), strict=True)
    for index, (gate_of, up_of, down_of, rows) in enumerate(weights):
        if len(rows) or (index == 0 and not len(x)):
            outputs.append((F.silu(rows @ gate_of) * (rows @ up_of)) @ down_of)
    return torch.cat(outputs)


class Dispatch(nn.Module):
    """Bring each token to its experts and back, where this process has all experts."""

    def forward(
        self, x: Tensor, chosen: Tensor, experts: Experts, config: ExpertsConfig, meanwhile: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the chosen experts of each token.

        x: (N, hidden). chosen: (N, K), int64, experts, or config.count where a token is dropped.
        meanwhile: computation that needs no routed expert; its result is returned too.
        Returns (N, K, hidden), zero where a token is dropped.
        """
        order, counts = sort_by_expert(chosen, config)
        rows = x[order // chosen.shape[1]]
        out = experts(rows, counts)
        return restore_order(out, order, chosen), None if meanwhile is None else meanwhile()


def sort_by_expert(chosen: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Return the places of `chosen` (N, K), flattened and without dropped ones, by expert; and the rows of each."""
    flat = chosen.flatten()
    order, counts = flat.argsort(stable=True), count_places(flat, config.count + 1)
    if config.capacity_factor is not None:  # waits for the device; dropless layers do not
        order = order[: flat.numel() - int(counts[config.count])]
    return order, counts[: config.count]


def count_places(chosen: Tensor, count: int) -> Tensor:
    """Count how often each of `count` experts occurs in `chosen` (n,), int64; returns (count,), int64.

    Not torch.bincount: on a GPU it reads the largest value to know the length of its result, so the host waits.
    """
    return torch.zeros(count, dtype=torch.int64, device=chosen.device).scatter_add_(0, chosen, torch.ones_like(chosen))


def restore_order(out: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """Put rows sorted by expert back to the places they came from: (N, K, hidden), zero elsewhere."""
    places = out.new_zeros(chosen.numel(), out.shape[-1])
    return places.index_copy(0, order, out).view(*chosen.shape, -1)


class WholeSequences(nn.Module):
    """The case that this process has all tokens of its sequences."""

    def gather(self, chosen: Tensor) -> Tensor:
        """Return the experts of all tokens of these sequences by position: (B, t, K) -> (B, T, K)."""
        return chosen

    def select(self, tensor: Tensor) -> Tensor:
        """Select this process's tokens: (B, T, ...) -> (B, t, ...)."""
        return tensor


class BestExperts(nn.Module):
    """Choose the experts with the highest scores. A module, so that a rehearsal can choose without scores."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, scores: Tensor) -> Tensor:
        """scores (B, t, count), with the bias -> chosen experts (B, t, K), int64."""
        config = self.config
        if config.groups > 1:
            scores = mask_groups(scores, config.groups, config.top_groups)
        # Not topk, which leaves open what comes first of equal scores.
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_k]


@dataclass
class BalanceState:
    """Data of one training step for the router, and the counts that the router collects in it."""

    loss_scale: Callable[[], float] = lambda: 1.0
    """The factor between the sum of losses and what backward starts from."""
    copies: int = 1
    """Processes that compute the same auxiliary loss, and whose gradients of the router are summed."""
    loads: Tensor | None = None
    """Tokens sent to each expert since the last reset, (experts + 1,), int64; the last are the dropped ones."""
    loss: Tensor | None = None
    """Sum of the auxiliary loss since then, without its coefficient, a scalar."""

    def reset(self) -> None:
        """Forget the loads."""
        self.loads, self.loss = None, None


class Router(nn.Module):
    """Choose the experts of each token, and weigh them."""

    bias: Tensor

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(hidden, config.count, bias=False)
        self.choice: nn.Module = BestExperts(config)
        self.sequences: WholeSequences = WholeSequences()
        self.balance = BalanceState()
        if config.balance_bias:
            self.register_buffer("bias", torch.zeros(config.count))

    def reset_buffers(self) -> None:
        """Write the initial value of the bias."""
        if self.config.balance_bias:
            self.bias.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, t, hidden) -> chosen experts, int64, and their weights, both (B, t, K).

        A dropped place has the expert `count` and the weight 0. Scores are in at least float32.
        """
        config = self.config
        logits = self.gate(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if config.gate == "softmax" else logits.sigmoid()
        # The bias only affects the choice; the weights come from the unbiased scores, through which gradients flow.
        biased = scores.detach()
        chosen = self.choice(biased + self.bias.to(biased.dtype) if config.balance_bias else biased)
        weights = scores.gather(-1, chosen)
        if config.normalise:
            # Sigmoid scores may all be 0; the epsilon is that of DeepSeek-V3's code, so that the numbers agree.
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if config.gate == "sigmoid" else 0.0))
        weights = weights * config.scale
        all_chosen = self.sequences.gather(chosen) if config.capacity_factor or config.balance_loss else chosen
        if config.capacity_factor is not None:
            drops = self.sequences.select(find_overflow(all_chosen, config))
            weights, placed = weights.masked_fill(drops, 0.0), chosen.masked_fill(drops, config.count)
        else:
            placed = chosen
        if self.training and torch.is_grad_enabled():
            weights = self._observe(weights, scores, all_chosen, placed)
        return placed, weights.to(x.dtype)

    def _observe(self, weights: Tensor, scores: Tensor, all_chosen: Tensor, placed: Tensor) -> Tensor:
        """Let the backward of the weights record loads, and start that of the auxiliary loss."""
        config = self.config
        loads = count_places(placed.flatten(), config.count + 1)
        loss = weights.new_zeros(())
        if config.balance_loss:
            loss = sum_balance_loss(scores, all_chosen, config) / self.balance.copies
        observed: Tensor = _Observe.apply(weights, loss, loads, self)  # type: ignore[no-untyped-call]
        return observed

    def record(self, loads: Tensor, loss: Tensor) -> None:
        """Add what one forward has routed."""
        sums = self.balance
        sums.loads = loads if sums.loads is None else sums.loads + loads
        sums.loss = loss if sums.loss is None else sums.loss + loss

    @torch.no_grad()
    def move_bias(self, loads: Tensor) -> None:
        """Move the bias one step towards equal loads. loads: (experts,), of the global batch."""
        loads = loads.to(self.bias.dtype)
        self.bias += self.config.balance_bias * (loads.mean() - loads).sign()


class _Observe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, loads: Tensor, router: Router) -> Tensor:
        ctx.router, ctx.loads, ctx.loss = router, loads, loss.detach()
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        router: Router = ctx.router
        router.record(ctx.loads, ctx.loss)
        scale = router.config.balance_loss * router.balance.loss_scale()
        return gradient, torch.full_like(ctx.loss, scale), None, None


def mask_groups(scores: Tensor, groups: int, top_groups: int) -> Tensor:
    """Set the scores of all experts outside a token's best groups to minus infinity."""
    grouped = scores.view(*scores.shape[:-1], groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best[..., :top_groups], True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)


def find_overflow(chosen: Tensor, config: ExpertsConfig) -> Tensor:
    """Find the places beyond an expert's capacity of each sequence: (B, T, K), bool.

    Places count in the order of positions, then of a token's scores. The capacity is
    ceil(capacity_factor T top_k / count).
    """
    assert config.capacity_factor is not None
    batch, length, top_k = chosen.shape
    capacity = math.ceil(config.capacity_factor * length * top_k / config.count)
    places = F.one_hot(chosen.flatten(1), config.count)
    index = (places.cumsum(1) * places).sum(-1)
    return (index > capacity).view(batch, length, top_k)


def sum_balance_loss(scores: Tensor, all_chosen: Tensor, config: ExpertsConfig) -> Tensor:
    """Sum over sequences of T sum_i f_i P_i, of which this is the part of the tokens here; a scalar.

    f_i is count / (top_k T) times the tokens of the sequence that chose expert i, P_i the mean over its T tokens of the
    share of i in the scores. scores: (B, t, count), tokens here; all_chosen: (B, T, K), choices of all tokens of the
    same sequences. T tokens of equal loads have a loss of T, so that dividing by all tokens gives 1.
    """
    batch, length, top_k = all_chosen.shape
    counts = scores.new_zeros(batch, config.count)
    counts.scatter_add_(1, all_chosen.flatten(1), counts.new_ones(batch, length * top_k))
    shares = scores if config.gate == "softmax" else scores / scores.sum(-1, keepdim=True)
    return (counts * (config.count / (top_k * length)) * shares.sum(1)).sum()


class MixtureOfExperts(nn.Module):
    """The sum of a token's routed experts, each with its weight, and of the shared expert."""

    def __init__(self, config: ExpertsConfig, hidden: int, width: int, shared: nn.Module | None) -> None:
        """width: of a routed expert. shared: the layer that computes every token."""
        super().__init__()
        self.config = config
        self.router = Router(config, hidden)
        self.experts = Experts(config.count, hidden, width)
        self.dispatch = Dispatch()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        if x.is_meta:
            return torch.empty_like(x)  # a pipeline asks for the shape; without values there is nothing to route by
        chosen, weights = self.router(x)
        shared = self.shared
        meanwhile = None if shared is None else lambda: shared(x)
        outputs, always = self.dispatch(x.flatten(0, 1), chosen.flatten(0, 1), self.experts, self.config, meanwhile)
        out: Tensor = (outputs * weights.flatten(0, 1).unsqueeze(-1).to(outputs.dtype)).sum(1).view_as(x)
        return out if always is None else out + always


def list_mixtures(module: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of experts in a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MixtureOfExperts)}
