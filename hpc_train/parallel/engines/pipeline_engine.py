"""The engine of a model in stages: torch's pipeline schedules, and one update of all the stages of a rank.

With it the tied parameters: an embedding and the head that uses it may lie on two stages under one name. One stage owns
the parameter; every copy gets the sum of the gradients of all copies, so that the copies stay the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, MicroBatch, StepBatch, Sums, TensorShard, World
from hpc_train.parallel.data_parallel.fully_shard import free_gathered_parameters
from hpc_train.parallel.loss import StepTotals, compute_first_loss_sum, compute_loss_sum, start_loss_sum
from hpc_train.parallel.mesh_axes import get_axis_degree, get_axis_index, select_own_tokens
from hpc_train.parallel.optimizer_step import OptimizerUpdates, get_local
from hpc_train.parallel.pipeline.measurement import Timeline
from hpc_train.parallel.pipeline.schedule import Pipeline, Schedule
from hpc_train.parallel.user_model import explain_first_call

BetweenStages = Callable[[Tensor], Tensor]
"""From a micro-batch's inputs to what goes from stage to stage, both on the meta device."""


class StepLoss:
    """The loss function of the last stage: sums a step's losses, and scales what backward begins with."""

    def __init__(self, last: nn.Module | None, device: torch.device, timeline: Timeline, stage: int) -> None:
        self._last, self._device = last, device
        self._timeline, self._stage = timeline, stage
        self._scale: Callable[[], float] = lambda: 1.0
        self.sum = torch.zeros((), dtype=torch.float64, device=device)
        self._seen = 0
        self._checked = False

    def begin(self, scale: Callable[[], float]) -> None:
        """A new step. `scale` is asked when the first loss is there: it may have to wait for other ranks."""
        self.sum, self._scale, self._seen = torch.zeros_like(self.sum), scale, 0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        """See compat.PipelineLoss."""
        assert self._last is not None
        with self._timeline.record("L", self._stage, self._seen):
            loss = (compute_loss_sum if self._checked else compute_first_loss_sum)(self._last, out, target)
            self._checked = True
            self.sum += loss.detach()
            self._seen += 1
            return loss * self._scale()


class PipelineEngine:
    """api.Engine for a model in stages, whose parameters fully_shard holds.

    A step's micro-batches are those of the schedule. torch adds up the gradients of all of them on each rank and
    reduces them over the data axes once; then the copies of tied parameters are added up.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        hidden: BetweenStages,
        updates: OptimizerUpdates,
        ties: Sequence[TiedParameter],
        config: RunConfig,
        world: World,
        at_end: Sequence[Callable[[], None]],
    ) -> None:
        """at_end: called at the end of each step of training."""
        self.parts = list(pipeline.parts.values())
        self.timeline = pipeline.timeline
        self._pipeline, self._hidden, self._updates, self._ties = pipeline, hidden, updates, ties
        self._config, self._world, self._at_end = config, world, at_end
        self._first = 0 in pipeline.parts
        last = len(pipeline.ranks) - 1
        self._last = last in pipeline.parts
        self._loss = StepLoss(pipeline.parts.get(last), world.device, pipeline.timeline, last)
        self._schedules: dict[object, Schedule] = {}
        self._called = False

    def forward_backward(self, batch: StepBatch) -> Sums:
        """See api.Engine. Never sees a gradient of less than the global batch."""
        totals = StepTotals.start(batch, self._world)
        counted = cache(totals.wait)
        self._loss.begin(lambda: self._updates.loss_scale * self._reducing / max(counted()[0], 1))
        schedule, inputs, target = self._ready(batch, training=True)
        with nullcontext() if self._called else explain_first_call("in the first step of the pipeline"):
            schedule.step(*inputs, target=target, return_outputs=False)
        self._called = True
        reduction = start_loss_sum(self._loss.sum, self._world)
        sum_tied_gradients(self._ties, self._world)
        for end in self._at_end:
            end()
        if reduction is not None:
            reduction.wait()
        return Sums(self._loss.sum, *counted())

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Sums:
        """See api.Engine."""
        totals = StepTotals.start(batch, self._world)
        self._loss.begin(lambda: 1.0)
        with evaluation_mode(self.parts):
            schedule, inputs, target = self._ready(batch, training=False)
            schedule.eval(*inputs, target=target, return_outputs=False)
        if (reduction := start_loss_sum(self._loss.sum, self._world)) is not None:
            reduction.wait()
        return Sums(self._loss.sum, *totals.wait())

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """See api.Engine."""
        return self._updates.update(lr)

    def shards(self) -> Iterator[TensorShard]:
        """See api.Engine."""
        return self._updates.shards()

    def _ready(self, batch: StepBatch, training: bool) -> tuple[Schedule, list[Tensor], Tensor | None]:
        """The schedule for this batch, the inputs of the first stage, and the targets of the last."""
        self._pipeline.masks.begin_step(batch, filled=True)
        whole = join_micro_batches([select_own_tokens(micro, self._config, self._world) for micro in batch.micro])
        schedule = self._schedule(whole.inputs, len(batch.micro), training)
        dtype, device = next(self.parts[0].parameters()).dtype, self._world.device
        inputs = whole.inputs.to(device, dtype if whole.inputs.is_floating_point() else None, non_blocking=True)
        target = whole.targets.to(device, non_blocking=True) if self._last else None
        return schedule, [inputs] if self._first else [], target

    def _schedule(self, inputs: Tensor, count: int, training: bool) -> Schedule:
        shape = (len(inputs) // count, *inputs.shape[1:])
        key = (training, count, shape)
        if key not in self._schedules:
            one = torch.empty(shape, dtype=inputs.dtype, device="meta")
            make = self._pipeline.training if training else self._pipeline.evaluation
            self._schedules[key] = make(count, one, self._hidden(one), self._loss)
        return self._schedules[key]

    @property
    def _reducing(self) -> int:
        """Ranks whose gradients are averaged, where they are to be added up."""
        return self._world.dp_size * get_axis_degree(self._world, "cp")


def join_micro_batches(micro: Sequence[MicroBatch]) -> MicroBatch:
    """Micro-batches as one batch; a short one is filled up with sequences whose targets do not count.

    torch's stages take micro-batches of one shape only.
    """
    rows = max(len(one.targets) for one in micro)
    filled = [MicroBatch(_filled(one.inputs, rows, 0), _filled(one.targets, rows, IGNORED_TARGET)) for one in micro]
    inputs, targets = (torch.cat(tensors) for tensors in zip(*filled, strict=True))
    return MicroBatch(inputs, targets)


def _filled(tensor: Tensor, rows: int, value: int) -> Tensor:
    missing = rows - len(tensor)
    return torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), value))) if missing else tensor


@contextmanager
def evaluation_mode(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode; afterwards what was training trains again, and nothing stays gathered."""
    training = [module for part in parts for module in part.modules() if module.training]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for part in parts:
            free_gathered_parameters(part)


@dataclass(frozen=True)
class TiedParameter:
    """One such parameter, as a rank that holds at least one copy of it sees it."""

    stages: tuple[int, ...]
    """All stages with a copy; the first owns it."""
    ranks: tuple[int, ...]
    """The pp rank of each of them."""
    mine: Mapping[int, nn.Parameter]
    """This rank's copies by stage."""


def find_tied_parameters(
    names: Sequence[set[str]], ranks: Sequence[int], parts: Mapping[int, nn.Module]
) -> list[TiedParameter]:
    """What this rank shares. names: the trained parameters of each stage; ranks: of each stage; parts: this rank's."""
    found = []
    for name in sorted({name for stage in names for name in stage}):
        stages = tuple(stage for stage, held in enumerate(names) if name in held)
        mine = {stage: parts[stage].get_parameter(name) for stage in stages if stage in parts}
        if len(stages) > 1 and mine:
            found.append(TiedParameter(stages, tuple(ranks[stage] for stage in stages), mine))
    return found


def select_borrowed(ties: Sequence[TiedParameter]) -> frozenset[nn.Parameter]:
    """This rank's copies that another stage owns."""
    return frozenset(p for tie in ties for stage, p in tie.mine.items() if stage != tie.stages[0])


@torch.no_grad()
def sum_tied_gradients(ties: Sequence[TiedParameter], world: World) -> None:
    """Give every copy the sum of the gradients of all copies, bit by bit the same on every rank.

    Copies are sharded alike over the other axes, so each rank talks to its peers in its own pipeline.
    """
    for tie in ties:
        gradients = _exchange_gradients(tie, world)
        total = torch.stack([gradients[stage] for stage in tie.stages]).sum(0)
        for parameter in tie.mine.values():
            _get_local_gradient(parameter).copy_(total)


def _exchange_gradients(tie: TiedParameter, world: World) -> dict[int, Tensor]:
    """The gradient of each copy, by stage."""
    group, rank = world.mesh["pp"].get_group(), get_axis_index(world, "pp")
    have = {stage: _get_local_gradient(parameter) for stage, parameter in tie.mine.items()}
    operations = []
    for stage, peer in zip(tie.stages, tie.ranks, strict=True):
        if stage in tie.mine:
            sent = have[stage].contiguous()
            others = sorted(set(tie.ranks) - {rank})
            operations += [dist.P2POp(dist.isend, sent, group=group, group_peer=other) for other in others]
        else:
            have[stage] = torch.empty_like(next(iter(have.values())), memory_format=torch.contiguous_format)
            operations.append(dist.P2POp(dist.irecv, have[stage], group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return have


def _get_local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return get_local(parameter.grad)
