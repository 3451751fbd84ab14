"""The engine of a model in pipeline stages: torch's schedules, then one update of all stages of this rank.

It also handles tied parameters: an embedding and the head that shares its weight may be on two stages, under one name.
One stage owns the parameter; every copy gets the sum of the gradients of all copies, so that the copies stay bitwise
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, StepBatch, Sums, World
from hpc_train.parallel.data_parallel.fully_shard import free_gathered_parameters
from hpc_train.parallel.engines.updating_engine import UpdatingEngine
from hpc_train.parallel.loss import StepTotals, compute_first_loss_sum, compute_loss_sum, start_loss_sum
from hpc_train.parallel.mesh_axes import (
    count_averaged_ranks,
    get_axis_degree,
    get_axis_index,
    move_batch,
    select_local_tokens,
)
from hpc_train.parallel.metrics import EvaluationSums, load_metrics
from hpc_train.parallel.optimizer_step import OptimizerUpdates, get_local
from hpc_train.parallel.pipeline.measurement import Timeline
from hpc_train.parallel.pipeline.schedule import Pipeline, Schedule
from hpc_train.parallel.user_model import explain_first_call, require_one_input

if TYPE_CHECKING:
    from hpc_train.parallel.expert.balance import ExpertBalance

BetweenStages = Callable[[Tensor], Tensor]
"""Maps a micro-batch's inputs to the tensor that goes from stage to stage; both are on the meta device."""


class StepLoss:
    """The loss function of the last stage: adds up a step's losses, and scales each one for its backward."""

    def __init__(self, last_part: nn.Module | None, device: torch.device, timeline: Timeline, stage: int) -> None:
        self._last_part, self._device = last_part, device
        self._timeline, self._stage = timeline, stage
        self._get_scale: Callable[[], float] = lambda: 1.0
        self.sum = torch.zeros((), dtype=torch.float64, device=device)
        self._losses_seen = 0
        self._checked = False
        self.measured: EvaluationSums | None = None
        """Set during an evaluation."""

    def begin(self, scale: Callable[[], float]) -> None:
        """Begin a step. `scale` is called at the first loss, because it may have to wait for other ranks."""
        self.sum, self._get_scale, self._losses_seen = torch.zeros_like(self.sum), scale, 0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        """Compute one micro-batch's loss; see _torch.pipeline.PipelineLoss."""
        assert self._last_part is not None
        with self._timeline.record("L", self._stage, self._losses_seen):
            loss = (compute_loss_sum if self._checked else compute_first_loss_sum)(self._last_part, out, target)
            self._checked = True
            if self.measured is not None:
                self.measured.add(loss, out, target)
            self.sum += loss.detach()
            self._losses_seen += 1
            return loss * self._get_scale()


class PipelineEngine(UpdatingEngine):
    """interfaces.Engine for a model in stages, whose parameters fully_shard holds.

    The schedule runs a step's micro-batches. torch adds up their gradients on each rank and reduces them over the data
    axes once; then the gradients of tied parameters are added up over their copies.
    """

    _updates: OptimizerUpdates

    def __init__(
        self,
        pipeline: Pipeline,
        infer_output: BetweenStages,
        updates: OptimizerUpdates,
        ties: Sequence[TiedParameter],
        config: RunConfig,
        world: World,
        at_end: Sequence[Callable[[], None]],
        balance: ExpertBalance | None = None,
    ) -> None:
        """at_end: called at the end of each training step."""
        self._balance = balance
        self.parts = list(pipeline.parts.values())
        self.timeline = pipeline.timeline
        self._pipeline, self._infer_output, self._updates, self._ties = pipeline, infer_output, updates, ties
        self._config, self._world, self._at_end = config, world, at_end
        self._metrics = load_metrics(config.train)
        if config.precision.float8_gather:
            from hpc_train.parallel.data_parallel.float8_gather import WeightScales

            self._weight_scales = WeightScales(self.parts)
        self._first = 0 in pipeline.parts
        last = len(pipeline.ranks) - 1
        self._last = last in pipeline.parts
        self._loss = StepLoss(pipeline.parts.get(last), world.device, pipeline.timeline, last)
        self._schedules: dict[object, Schedule] = {}
        self._called = False

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate the gradient of one step; see interfaces.Engine. Returns no gradient sample: none is visible."""
        totals = StepTotals.start(batch, self._world)
        wait_for_totals = cache(totals.wait)  # the loss needs the count, and so does the result

        def get_scale() -> float:
            return self._updates.loss_scale * count_averaged_ranks(self._world) / max(wait_for_totals().tokens, 1)

        self._scale_weights()
        self._loss.begin(get_scale)
        if self._balance is not None:
            self._balance.begin_step(get_scale)
        schedule, inputs, target = self._prepare(batch, training=True)
        with nullcontext() if self._called else explain_first_call("in the first step of the pipeline"):
            schedule.step(*inputs, target=target, return_outputs=False)
        self._called = True
        reduction = start_loss_sum(self._loss.sum, self._world)  # meanwhile tied gradients are exchanged
        sum_tied_gradients(self._ties, self._world)
        for end in self._at_end:
            end()
        experts = None if self._balance is None else self._balance.end_step()
        if reduction is not None:
            reduction.wait()
        return Sums(self._loss.sum, *wait_for_totals(), experts=experts)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Sums:
        """Compute the sums of a step without a gradient."""
        totals = StepTotals.start(batch, self._world)
        self._loss.begin(lambda: 1.0)
        measured = self._loss.measured = EvaluationSums(self._metrics, self._world.device)
        with self._use_evaluation_weights(), evaluation_mode(self.parts):
            self._scale_weights()
            schedule, inputs, target = self._prepare(batch, training=False)
            schedule.eval(*inputs, target=target, return_outputs=False)
        self._loss.measured = None
        if (reduction := start_loss_sum(measured.values, self._world)) is not None:
            reduction.wait()
        return Sums(measured.loss, *totals.wait(), metrics=measured.metrics)

    def _prepare(self, batch: StepBatch, training: bool) -> tuple[Schedule, list[Tensor], Tensor | None]:
        """Return the schedule for this batch, the inputs of the first stage, and the targets of the last."""
        self._pipeline.masks.begin_step(batch, filled=True)
        # Moved, then cut and joined: on the host both would lose the pinned memory that copies to a GPU need.
        moved = [move_batch(micro, self._world.device, self.parts[0]) for micro in batch.micro]
        local_batches = [select_local_tokens(micro, self._config, self._world) for micro in moved]
        pp = get_axis_degree(self._world, "pp")
        tensors = [
            require_one_input(micro.inputs, f"parallel.pp={pp}", "stages pass on one tensor") for micro in local_batches
        ]
        inputs, targets = join_micro_batches(tensors, [micro.targets for micro in local_batches])
        schedule = self._get_schedule(inputs, len(batch.micro), training)
        return schedule, [inputs] if self._first else [], targets if self._last else None

    def _get_schedule(self, inputs: Tensor, count: int, training: bool) -> Schedule:
        shape = (len(inputs) // count, *inputs.shape[1:])
        # torch's stages remember the number and the shape of micro-batches, so each of them has a schedule of its own.
        key = (training, count, shape)
        if key not in self._schedules:
            example = torch.empty(shape, dtype=inputs.dtype, device="meta")
            pipeline = self._pipeline
            make = pipeline.make_training_schedule if training else pipeline.make_evaluation_schedule
            self._schedules[key] = make(count, example, self._infer_output(example), self._loss)
        return self._schedules[key]


def join_micro_batches(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join micro-batches into one batch; a short one is padded with sequences whose targets do not count.

    torch's stages take micro-batches of one shape only.
    """
    rows = max(len(batch) for batch in targets)
    joined = torch.cat([_pad(batch, rows, 0) for batch in inputs])
    return joined, torch.cat([_pad(batch, rows, IGNORED_TARGET) for batch in targets])


def _pad(tensor: Tensor, rows: int, value: int) -> Tensor:
    missing = rows - len(tensor)
    return torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), value))) if missing else tensor


@contextmanager
def evaluation_mode(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Put the stages into evaluation mode; afterwards restore training and free gathered parameters."""
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
    """A parameter with a copy on several stages, as seen by a rank that has at least one of them."""

    stages: tuple[int, ...]
    """All stages with a copy; the first owns it."""
    ranks: tuple[int, ...]
    """The pp rank of each of them."""
    copies: Mapping[int, nn.Parameter]
    """This rank's copies by stage."""


def find_tied_parameters(
    names: Sequence[set[str]], ranks: Sequence[int], parts: Mapping[int, nn.Module]
) -> list[TiedParameter]:
    """Find the tied parameters of which this rank has a copy.

    names: trained or frozen parameters of each stage. ranks: pp rank of each stage. parts: this rank's stages.
    """
    ties = []
    for name, stages in _list_shared_names(names).items():
        copies = {stage: parts[stage].get_parameter(name) for stage in stages if stage in parts}
        if copies:
            ties.append(TiedParameter(stages, tuple(ranks[stage] for stage in stages), copies))
    return ties


def _list_shared_names(names: Sequence[set[str]]) -> dict[str, tuple[int, ...]]:
    """Return the names that several stages have, sorted, with these stages."""
    stages = {
        name: tuple(stage for stage, stage_names in enumerate(names) if name in stage_names)
        for name in sorted(set().union(*names))
    }
    return {name: having for name, having in stages.items() if len(having) > 1}


def select_borrowed(ties: Sequence[TiedParameter]) -> frozenset[nn.Parameter]:
    """Select this rank's copies of tied parameters that another stage owns."""
    return frozenset(p for tie in ties for stage, p in tie.copies.items() if stage != tie.stages[0])


@torch.no_grad()
def sum_tied_gradients(ties: Sequence[TiedParameter], world: World) -> None:
    """Give every copy the sum of the gradients of all copies, bitwise equal on every rank.

    Copies are sharded alike over the other axes, so each rank exchanges with its peers in its own pipeline only.
    """
    for tie in ties:
        gradients = _exchange_gradients(tie, world)
        # In the order of stages on every rank: another order could round differently. In place: a table is large.
        total, *other_gradients = (gradients[stage] for stage in tie.stages)
        for other in other_gradients:
            total.add_(other)
        for parameter in tie.copies.values():
            _get_local_gradient(parameter).copy_(total)


def _exchange_gradients(tie: TiedParameter, world: World) -> dict[int, Tensor]:
    """Exchange the gradients of all copies over pp; return them by stage."""
    group, rank = world.mesh["pp"].get_group(), get_axis_index(world, "pp")
    gradients = {stage: _get_local_gradient(parameter) for stage, parameter in tie.copies.items()}
    operations = []
    # By stage on every rank: only their order tells several messages between two ranks apart.
    for stage, source in zip(tie.stages, tie.ranks, strict=True):
        if stage in tie.copies:
            local_gradient = gradients[stage].contiguous()
            peers = sorted(set(tie.ranks) - {rank})
            operations += [dist.P2POp(dist.isend, local_gradient, group=group, group_peer=peer) for peer in peers]
        else:
            gradients[stage] = torch.empty_like(next(iter(gradients.values())), memory_format=torch.contiguous_format)
            operations.append(dist.P2POp(dist.irecv, gradients[stage], group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return gradients


def _get_local_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return get_local(parameter.grad)
