"""The engine of loosely synchronised copies: each copy has its own inner engine, and OuterOptimizer joins them.

In every step the copies add up three numbers and the loss, and then the square of the gradient norm, so that all ranks
agree on stops and on wrong numbers (about 40 bytes). `loss` is the loss of the global batch, of which each copy
computes its own share. The norm is the root mean square of the copies' norms, and each copy clips by its own norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.config.parallel import AXES, Degrees
from hpc_train.config.run import RunConfig, describe_one_copy
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, Report, StepBatch, Sums, TensorShard, World
from hpc_train.models.deferred import DeferredValues
from hpc_train.parallel.data_parallel.copy_group import CopyGroup
from hpc_train.parallel.data_parallel.loose_sync import Named, OuterOptimizer, OuterParameter, number_fragments
from hpc_train.parallel.engines.updating_engine import has_routers
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.parallel.optimizer_step import OptimizerFactory


class Build(Protocol):
    """See apply.build."""

    def __call__(
        self,
        model: nn.Module,
        make_optimizer: OptimizerFactory,
        config: RunConfig,
        world: World,
        say: Report,
        values: DeferredValues | None,
    ) -> Engine: ...


class LooseEngine:
    """interfaces.Engine of one copy among several, which meet at exchanges."""

    def __init__(
        self,
        engine: Engine,
        outer: OuterOptimizer,
        world: World,
        copy_world: World,
        copy_group: CopyGroup | None = None,
    ) -> None:
        """engine: of this copy, over copy_world. world: all copies. copy_group: them, if they may be lost."""
        self.copy_group = copy_group
        self.parts = engine.parts
        self._engine, self._outer, self._world, self._copy_world = engine, outer, world, copy_world
        self._group = world.mesh["dp_replicate"].get_group()
        self._copy, self._copies = get_axis_index(world, "dp_replicate"), dist.get_world_size(self._group)
        self._step = 0

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate this copy's gradient, of the mean loss over its own tokens; the sums are over all copies."""
        self._step = batch.step + 1
        return self._add_up(self._engine.forward_backward(self._place_samples(batch)))

    def evaluate(self, batch: StepBatch) -> Sums:
        """Compute the sums of a step with the anchors, without a gradient."""
        with self._outer.use_anchors():
            return self._add_up(self._engine.evaluate(self._place_samples(batch)))

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip this copy's gradient; return the root mean square of the norms of all copies."""
        square = self._engine.clip(max_norm).double().square()
        if self.copy_group is not None:
            return (self.copy_group.sum(square) / self.copy_group.counted).sqrt()
        dist.all_reduce(square, group=self._group)
        return (square / self._copies).sqrt()

    def update(self, lr: float) -> bool:
        """Step this copy's optimizer, then make the exchanges that are due after this step."""
        updated = self._engine.update(lr)
        self._outer.end_step(self._step)
        return updated

    def skip_update(self) -> None:
        """Leave this copy's parameters as they are; exchanges that are due take place all the same."""
        self._engine.skip_update()
        self._outer.end_step(self._step)

    def start_from_anchors(self) -> None:
        """Go on from weights that were loaded without the copies' own parameters."""
        self._outer.start_from_anchors()

    def shards(self) -> Iterator[TensorShard]:
        """List the anchors as the model's parameters, the outer momentum, and this copy's own state.

        The latter is `optim.copy<c>_parameter.<name>` and `optim.copy<c>_<state>.<name>`.
        """
        self._outer.finish_communication()
        # Copies are numbered without gaps in a checkpoint.
        copy = self._copy if self.copy_group is None else self.copy_group.index
        outers: dict[str, list[OuterParameter]] = {}  # two stages of this rank may have the same name
        for parameter in self._outer.parameters:
            outers.setdefault(parameter.name, []).append(parameter)
        for shard in self._engine.shards():
            # A copy's ranks write its own state; the first copy's what is the same on all.
            common = replace(shard, replica=shard.replica + copy * self._copy_world.size)
            if shard.name.startswith("optim."):
                yield replace(shard, name=f"optim.copy{copy}_{shard.name.removeprefix('optim.')}")
            elif shard.name in outers:
                outer = next(one for one in outers[shard.name] if _is_part(shard.local, one.local))
                yield replace(common, local=_view_part(outer.anchor, shard.local, outer.local))
                yield replace(shard, name=f"optim.copy{copy}_parameter.{shard.name}")
                for key, tensor in (("momentum", outer.momentum), ("delta", outer.delta)):
                    if tensor is not None:
                        part = _view_part(tensor, shard.local, outer.local)
                        yield replace(common, name=f"optim.outer_{key}.{shard.name}", local=part)
            else:
                yield common

    def _place_samples(self, batch: StepBatch) -> StepBatch:
        """Say which samples of the global batch these are: the copy's engine would count from its own first."""
        rows = sum(len(micro.targets) for micro in batch.micro)
        first = self._world.dp_index * rows if batch.first is None else batch.first
        return replace(batch, first=first, measure=False)

    def _add_up(self, sums: Sums) -> Sums:
        counts = torch.tensor([sums.tokens, int(sums.stop), int(not sums.agree)], dtype=torch.int64)
        if self.copy_group is not None:
            return _add_up_at_once(sums, counts, self.copy_group)
        totals = sums.loss.clone()
        metrics = None if sums.metrics is None else sums.metrics.clone()
        for tensor in (counts, totals, metrics):
            if tensor is not None:
                dist.all_reduce(tensor, group=self._group)
        tokens, stops, disagree = counts.tolist()
        return replace(sums, loss=totals, tokens=tokens, stop=stops > 0, agree=disagree == 0, metrics=metrics)


def _add_up_at_once(sums: Sums, counts: Tensor, copy_group: CopyGroup) -> Sums:
    """Add up in one message, so that all sums are of the same copies. counts: tokens, stops, disagreements, (3,)."""
    parts = [counts, sums.loss, *([] if sums.metrics is None else [sums.metrics])]
    total = copy_group.sum(torch.cat([part.detach().double().flatten().cpu() for part in parts]))
    tokens, stops, disagree = (round(count) for count in total[:3].tolist())
    metrics = None if sums.metrics is None else total[4:].view_as(sums.metrics).to(sums.metrics)
    loss = total[3].to(sums.loss)
    return replace(sums, loss=loss, tokens=tokens, stop=stops > 0, agree=disagree == 0, metrics=metrics)


def build_loose_engine(
    build: Build,
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    config: RunConfig,
    world: World,
    degrees: Degrees,
    say: Report,
    values: DeferredValues | None,
) -> LooseEngine:
    """Build the engine of this rank's copy, and join it to the others. A collective. build: apply.build.

    Raises UserError for models that keep statistics beside their parameters, which would differ between copies.
    """
    _check_buffers(model, config)
    copy_config, copy_degrees = describe_one_copy(config, degrees)
    copy_world = make_copy_world(world, copy_degrees)
    engine = build(model, make_optimizer, copy_config, copy_world, say, values)
    trained = [parameter for part in engine.parts for parameter in _list_trained(part)]
    sync, group = config.parallel.sync, world.mesh["dp_replicate"].get_group()
    copy_group = None if sync.lost_after_seconds is None else CopyGroup(world, copy_world, sync.lost_after_seconds)
    outer = OuterOptimizer(trained, number_fragments(_list_trained(model), sync.fragments), sync, group, copy_group)
    momentum = f"Nesterov {sync.outer_momentum:g}" if sync.outer_momentum else "no momentum"
    say(
        f"loose synchronisation: {degrees.dp_replicate} copies, every {sync.every} steps, {sync.fragments} fragments, "
        f"outer lr {sync.outer_lr:g}, {momentum}, compression {sync.compression}"
    )
    if copy_group is not None:
        say(f"a copy, but that of rank 0, is left behind if it ends or is silent for {sync.lost_after_seconds:g} s")
        if world.device.type == "cuda":
            say("the copies exchange through host memory; losing one has not been tried on GPUs")
    return LooseEngine(engine, outer, world, copy_world, copy_group)


def _list_trained(part: nn.Module) -> list[Named]:
    return [(name, parameter) for name, parameter in part.named_parameters() if parameter.requires_grad]


def make_copy_world(world: World, degrees: Degrees) -> World:
    """Make the World of this rank's copy of the model. degrees: of one copy. A collective of all ranks."""
    copies = world.mesh.mesh.unbind(AXES.index("dp_replicate"))
    copy_index = get_axis_index(world, "dp_replicate")
    meshes, groups = [], []
    for ranks in copies:  # every rank takes part in making every group, as torch demands
        kind = world.device.type
        meshes.append(DeviceMesh(kind, ranks.reshape(degrees.sizes), mesh_dim_names=AXES))
        groups.append(dist.new_group(ranks.flatten().tolist()))
    copy_ranks = copies[copy_index].flatten().tolist()
    index = get_axis_index(world, "dp_shard")
    return replace(
        world,
        rank=copy_ranks.index(world.rank),
        size=len(copy_ranks),
        mesh=meshes[copy_index],
        group=groups[copy_index],
        dp_index=index,
        dp_size=degrees.data_parallel,
    )


def _check_buffers(model: nn.Module, config: RunConfig) -> None:
    option = f"parallel.sync.every={config.parallel.sync.every}"
    if has_routers([model]):
        raise UserError(f"{option}: the loads of experts are balanced over all ranks in every step; use a dense model")
    names = _list_saved_buffers(model)
    if names:
        raise UserError(
            f"{option}: model: {names[0]} is a buffer that is saved; the copies would have different ones, and only "
            "one would be kept; use a layer without such statistics"
        )


def _list_saved_buffers(model: nn.Module) -> Sequence[str]:
    saved = set(model.state_dict(keep_vars=True))
    return [name for name, _ in model.named_buffers() if name in saved]


def _is_part(part: Tensor, whole: Tensor) -> bool:
    """Return whether the memory of `part` is in that of `whole`; nothing is in any."""
    begin = whole.data_ptr()
    return part.numel() == 0 or begin <= part.data_ptr() < begin + whole.nbytes


def _view_part(tensor: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """Return the view of a contiguous tensor that `part` is of `whole`: a rank has a fused matrix in several parts."""
    place = part.storage_offset() - whole.storage_offset()
    return tensor if part.shape == whole.shape else tensor.as_strided(part.shape, part.stride(), place)
