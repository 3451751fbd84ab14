"""Make torch's pipeline schedules for this rank's parts, one for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from hpc_train._torch.pipeline import (
    PipelineLoss,
    make_pipeline_runtime,
    take_over_gathering,
)
from hpc_train.config.parallel import ParallelConfig
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.pipeline.measurement import Timeline
from hpc_train.parallel.pipeline.stage import Stage
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Action, Kind, Order, format_rows, parse_action
from hpc_train.schedules.validate import validate_order
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_parameters

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_SINGLE_STAGE_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI_STAGE_SCHEDULES: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of stages, from which each number of micro-batches gets its schedule."""

    name: str
    """Name of the schedule, or its file."""
    order: Order | None
    """The order in that file; None with a name."""
    ranks: tuple[int, ...]
    """The pp rank of each stage."""
    parts: Mapping[int, nn.Module]
    """This rank's stages."""
    group: dist.ProcessGroup
    device: torch.device
    timeline: Timeline
    masks: StepMasks
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Options of fully_shard, if it holds the parts."""

    def make_training_schedule(
        self, micro_batches: int, inputs: Tensor, hidden: Tensor, loss: PipelineLoss
    ) -> Schedule:
        """Make a training schedule. inputs, hidden: one micro-batch of the first stage and between stages, on meta.

        Raises UserError for an order that is incomplete or deadlocks, and ValueError for a number of micro-batches that
        the schedule does not support.
        """
        stages: list[Any] = self._make_stages(inputs, hidden)
        if self.name in _SINGLE_STAGE_SCHEDULES:
            validate_order(generate_order(self.name, len(self.ranks), micro_batches), micro_batches)
            # Gradients are not scaled: StepLoss has divided by the targets of the global batch.
            return _SINGLE_STAGE_SCHEDULES[self.name](stages[0], micro_batches, loss_fn=loss, scale_grads=False)
        if self.name in _MULTI_STAGE_SCHEDULES:
            schedule = _MULTI_STAGE_SCHEDULES[self.name](stages, micro_batches, loss_fn=loss, scale_grads=False)
            validate_order(read_torch_order(schedule, self.ranks), micro_batches)
            return self._take_over_gathering(schedule)
        order = self.order or generate_order(self.name, len(self.ranks), micro_batches)
        validate_order(order, micro_batches)
        return self._take_over_gathering(
            make_pipeline_runtime(stages, self.ranks, format_rows(order), micro_batches, loss)
        )

    def make_evaluation_schedule(
        self, micro_batches: int, inputs: Tensor, hidden: Tensor, loss: PipelineLoss
    ) -> Schedule:
        """Make a schedule of forwards only, whatever the training schedule; run it by `eval`."""
        rows = format_rows(make_forward_order(self.ranks, micro_batches))
        return self._take_over_gathering(
            make_pipeline_runtime(self._make_stages(inputs, hidden), self.ranks, rows, micro_batches, loss)
        )

    def _take_over_gathering(self, schedule: PipelineScheduleMulti) -> PipelineScheduleMulti:
        """Let fully_shard gather the parameters of stages; ahead of their use if they stay gathered afterwards."""
        keeps = keeps_parameters(
            ZERO_STAGE[self.parallel.strategy], self.parallel.reshard_after_forward, len(self.ranks)
        )
        take_over_gathering(schedule, gather_ahead=keeps)
        return schedule

    def _make_stages(self, inputs: Tensor, hidden: Tensor) -> list[PipelineStage]:
        """Make new stages: torch's stages remember the number of micro-batches and their shapes."""
        stages: list[PipelineStage] = []
        for index, part in self.parts.items():
            stage = Stage(
                part,
                index,
                len(self.ranks),
                self.device,
                input_args=hidden if index else inputs,
                output_args=hidden,  # torch does not ask for those of the last stage
                group=self.group,
            )
            stage.timeline, stage.masks, stage.parallel = self.timeline, self.masks, self.parallel
            stages.append(stage)
        return stages


def make_forward_order(ranks: tuple[int, ...], micro_batches: int) -> Order:
    """Make an order of forwards only, with as many micro-batches at a time as there are ranks.

    ranks: the pp rank of each stage.
    """
    pp = max(ranks) + 1
    groups = [range(first, min(first + pp, micro_batches)) for first in range(0, micro_batches, pp)]
    stages_of_ranks = [[stage for stage, rank in enumerate(ranks) if rank == pp_rank] for pp_rank in range(pp)]
    rows = [
        [Action(stage, Kind.F, micro) for group in groups for stage in stages for micro in group]
        for stages in stages_of_ranks
    ]
    return Order(tuple(map(tuple, rows)), ranks)


def read_torch_order(schedule: PipelineScheduleMulti, ranks: tuple[int, ...]) -> Order:
    """Read the order of computations from one of torch's schedules."""
    order = schedule.pipeline_order
    cells = [[parse_action(str(action)) for action in order[rank] if action is not None] for rank in sorted(order)]
    return Order(tuple(tuple(step for step in row if step is not None) for row in cells), ranks)
