"""One stage of a pipeline: torch's PipelineStage, with less memory and with each strategy's sharding.

The contract with torch, whose schedules call these methods of a stage in order of time:

    once, before the first step
        _setup_forward_recv_info      describe what each micro-batch receives     private
        _setup_backward_recv_info     the same for gradients                      private
    for each micro-batch
        get_fwd_recv_ops              the receives of its forward
        forward_one_chunk             its forward
          _retrieve_recv_activations  take what was received                      private
        get_bwd_recv_ops              the receives of its backward
        backward_one_chunk            its backward, or that of the inputs alone
          _retrieve_recv_grads        take what was received                      private
        backward_weight_one_chunk     its backward of the weights, if apart
          backward_maybe_with_nosync  one run of autograd; both backwards call it

The override of a private method calls the original one and changes only the memory around it. A torch that renames the
method never calls the override: results stay the same, and receive buffers live for the whole step again. One more is
private: _recv_meta, by which torch would unpickle another stage's description. Ours give shapes, so that none is sent.
_torch/versions.py names the releases that this was tested on.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from hpc_train._torch.fully_shard import finish_backward
from hpc_train._torch.pipeline import (
    PendingWeights,
    allocate_received,
    compute_gradients,
    compute_input_gradients,
    compute_weight_gradients,
    defer_receive_memory,
    drop_last_output,
    release_received,
)
from hpc_train.config.parallel import ParallelConfig
from hpc_train.parallel.data_parallel.fully_shard import GradientSync
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.pipeline.measurement import Timeline


class Stage(PipelineStage):
    """A stage that records its computations, selects each micro-batch's dropout masks, and shards as its strategy does.

    torch's own stage would keep receive buffers, whole gradients, and parameters that a backward has gathered, until
    the end of the step.
    """

    timeline: Timeline
    """Records when each computation ran."""
    masks: StepMasks
    """Dropout masks, selected before each computation: a micro-batch has the same ones in every layout."""
    parallel: ParallelConfig
    """Options of fully_shard, if it holds the parameters."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one micro-batch."""
        self.masks.select(fwd_chunk_id)
        with self.timeline.record("F", self.stage_index, fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if self.is_last:  # torch would keep the logits of every micro-batch; only its loss is used again
            drop_last_output(self, fwd_chunk_id)
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of one micro-batch. full_backward: of inputs and weights, else of the inputs alone."""
        self.masks.select(bwd_chunk_id)  # for recomputation
        with self.timeline.record("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward and not loss._is_view():  # a view cannot be detached in place
            loss.detach_()  # its graph would keep the stage's input, and that one's gradient, until the end of the step

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward of the weights that backward_one_chunk has put off."""
        with self.timeline.record("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return a forward's receives. torch's version keeps buffers for every micro-batch from the first step on."""
        allocate_received(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a backward; see get_fwd_recv_ops."""
        if bwd_chunk_id in self.grad_recv_info:
            allocate_received(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        activations: tuple[Tensor, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        release_received(self.args_recv_info[fwd_chunk_id])
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        release_received(self.grad_recv_info[bwd_chunk_id])
        return gradients

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with defer_receive_memory(self):
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with defer_receive_memory(self):
            super()._setup_backward_recv_info(num_microbatches)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], PendingWeights | None]:
        """Run autograd once, and reduce and free fully_shard's groups as soon as their gradients are there.

        backward_type: full, input (its weights follow later) or weight. last_backward: the stage's last of the step,
        which is where strategies that reduce once a step do so.
        """
        if not isinstance(self.submod, FSDPModule):
            result: tuple[tuple[Tensor | None, ...], PendingWeights | None]
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            return result
        self._gradient_sync.prepare(last=last_backward)
        if backward_type == "weight":
            compute_weight_gradients(self.submod, bwd_kwargs["param_groups"], self.parallel.prefetch)
            return (), None
        graph = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        if backward_type == "input":
            return compute_input_gradients(*graph, self.submod)
        gradients = compute_gradients(*graph)
        finish_backward(self.submod)
        return gradients, None

    @cached_property
    def _gradient_sync(self) -> GradientSync:
        return GradientSync(self.submod, self.parallel, self.group_size)

    def _recv_meta(self, src_stage: int) -> Any:
        """Refuse what torch would unpickle from the network: our stages know what they exchange and never ask."""
        raise RuntimeError(
            f"stage {self.stage_index} was sent a description by stage {src_stage} that none of ours sends"
        )
