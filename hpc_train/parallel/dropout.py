"""Dropout in a model that is split over ranks: tell each layer which samples, positions and heads this rank has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Model, StepBatch, World
from hpc_train.models.dropout import Dropout, DropoutSite, SampleCounter, make_layer_key, make_step_key
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.parallel.mesh_axes import SequenceShare, get_axis_degree, get_axis_index, get_sequence_share

_TORCH = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""torch's dropout layers, which draw from the rank's own generator in the order the rank computes."""


def place_dropout(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Tell every dropout layer its name and which part of its input this rank has.

    This must run before a technique renames or replaces layers. Raises UserError if torch's own layers would draw the
    same mask for different tokens.
    """
    if get_axis_degree(world, "tp") > 1 or get_axis_degree(world, "cp") > 1:
        _refuse_torch_dropout(part)
    layers = {
        name: module
        for name, module in part.named_modules()
        if (isinstance(module, Dropout) and module.p > 0) or (isinstance(module, ScaledDotProduct) and module.dropout)
    }
    if not layers:
        return None
    counter, head_parts = SampleCounter(), _find_head_parts(part, config, world)
    for name, module in layers.items():
        positions = _make_positions(part, config, world, split=isinstance(module, Dropout))
        key = torch.tensor(make_layer_key(name), device=world.device)
        module.site = DropoutSite(counter, key, positions, head_parts.get(name, 0))
    return f"dropout: {len(layers)} layers, masks by sample and position"


@dataclass(frozen=True)
class DropoutPositions:
    """Positions of a rank that has a share of a sequence (cp) and a part of that share (tp); see models.dropout."""

    share: SequenceShare
    part: int
    parts: int

    def __call__(self, length: int, device: torch.device) -> Tensor:
        """Return the global positions (length,) of this rank's `length` tokens."""
        in_share = torch.arange(self.part * length, (self.part + 1) * length, device=device)
        share_length, rank, ranks = length * self.parts, self.share.rank, self.share.ranks
        if not self.share.balanced:
            return in_share + rank * share_length
        # Balanced: chunk `rank` of 2 x ranks chunks, then chunk 2 x ranks - 1 - rank; see mesh_axes.SequenceShare.
        half = share_length // 2
        return torch.where(in_share < half, in_share + rank * half, in_share + (2 * ranks - 2 - rank) * half)


def _make_positions(part: nn.Module, config: RunConfig, world: World, *, split: bool) -> DropoutPositions:
    """Make the positions that a layer of this rank sees.

    split: the layer sees activations between layers, whose positions tp may split; else it is an attention.
    """
    tp = get_axis_degree(world, "tp")
    if not split or tp == 1 or not config.parallel.tensor.sequence or "seq" not in getattr(part, "plan", {}).values():
        return DropoutPositions(get_sequence_share(config, world), 0, 1)
    return DropoutPositions(get_sequence_share(config, world), get_axis_index(world, "tp"), tp)


def _find_head_parts(part: nn.Module, config: RunConfig, world: World) -> dict[str, int]:
    """Map the name of each attention to the index of this rank's part of its heads, all parts being equal."""
    tp, cp = get_axis_degree(world, "tp"), get_axis_degree(world, "cp")
    over_cp = cp if config.parallel.context.method == "ulysses" else 1
    plan: dict[str, str] = {}
    if tp > 1 and isinstance(part, Model):
        from hpc_train.parallel.tensor.tensor_plan import read_tensor_plan

        plan = read_tensor_plan(part, whole_model=get_axis_degree(world, "pp") == 1)
    parents = {name.rpartition(".")[0] for name, split in plan.items() if split == "col"}
    head_parts = {}
    for name, module in part.named_modules():
        if isinstance(module, ScaledDotProduct):
            tp_part = get_axis_index(world, "tp") if name.rpartition(".")[0] in parents else 0
            head_parts[name] = tp_part * over_cp + (get_axis_index(world, "cp") if over_cp > 1 else 0)
    return head_parts


def _refuse_torch_dropout(part: nn.Module) -> None:
    for name, module in part.named_modules():
        draws = module.p if isinstance(module, _TORCH) else getattr(module, "dropout", 0)
        if isinstance(module, (*_TORCH, nn.MultiheadAttention, nn.RNNBase)) and draws > 0:
            raise UserError(
                f"model: {name} is torch's {type(module).__name__} with dropout {draws:g}, which draws the same mask "
                "for different tokens on the ranks of tp and cp; use hpc_train.models.dropout.Dropout between layers, "
                "dropout 0, or parallel.tp=1 and parallel.cp=1"
            )


class StepMasks:
    """Tells the dropout layers of some parts which samples of which step they see; does nothing without such layers."""

    def __init__(self, parts: Iterable[nn.Module], config: RunConfig, world: World) -> None:
        sites = [module.site for part in parts for module in part.modules() if hasattr(module, "site")]
        self._counters = list(
            {id(site.counter): site.counter for site in sites if isinstance(site, DropoutSite)}.values()
        )
        self._seed, self._world = config.train.seed, world
        self._key = 0
        self._starts: list[int] = []
        self._counts: list[int] = []

    def begin_step(self, batch: StepBatch, *, filled: bool = False) -> None:
        """Begin a step on this rank's samples. filled: short micro-batches are padded at their ends."""
        if not self._counters:
            return
        rows = [len(micro.targets) for micro in batch.micro]
        first = self._world.dp_index * sum(rows) if batch.first is None else batch.first
        self._key = make_step_key(self._seed, batch.step)
        self._starts = [first + sum(rows[:index]) for index in range(len(rows))]
        self._counts = [max(rows)] * len(rows) if filled else rows

    def select(self, micro: int) -> None:
        """Select a micro-batch; call this before any forward, or recomputation, of it."""
        for counter in self._counters:
            counter.begin(self._key, self._starts[micro], self._counts[micro], self._world.device)
