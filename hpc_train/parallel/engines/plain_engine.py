"""The engine of a model that every rank runs whole: on one rank, with ddp, or sharded by fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import GradientSample, MicroBatch, StepBatch, Sums, World
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.engines.updating_engine import UpdatingEngine, has_routers
from hpc_train.parallel.loss import (
    StepTotals,
    Totals,
    compute_first_loss_sum,
    compute_loss_sum,
    start_loss_sum,
    start_sum,
)
from hpc_train.parallel.mesh_axes import count_averaged_ranks, get_axis_degree, move_batch, select_local_tokens
from hpc_train.parallel.metrics import EvaluationSums, load_metrics
from hpc_train.parallel.optimizer_step import GradientUpdate
from hpc_train.parallel.precision.number_formats import autocast_forward
from hpc_train.parallel.user_model import check_inputs, check_output_is_seen, explain_first_call, name_model


class WrappedModel(Protocol):
    """A model as data parallelism wraps it, and what that does around each micro-batch."""

    is_sharded: bool
    """Ranks hold shards: a gradient is visible only after its reduction, and gathering casts the parameters."""
    warmup_backwards: int
    """Backwards whose gradients are thrown away before the first step."""

    @property
    def module(self) -> nn.Module:
        """The module to call."""

    def accumulate(self, *, last: bool, measure: bool) -> AbstractContextManager[None]:
        """Run one micro-batch inside. last: of the step. measure: the norm of its gradient is needed."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Run one of the `warmup_backwards` inside."""

    def free_gathered_parameters(self) -> None:
        """Free what a forward without a backward has gathered."""

    def take_local_square(self) -> Tensor:
        """Return the squared norm of this rank's own gradient in the backward that was measured."""


class UnwrappedModel:
    """A model whose gradients no collective touches: one rank, or a worker of a parameter server."""

    is_sharded = False
    warmup_backwards = 0

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def accumulate(self, *, last: bool, measure: bool) -> AbstractContextManager[None]:
        """Run one micro-batch; there is nothing to reduce."""
        return nullcontext()

    def warm_up(self) -> AbstractContextManager[None]:
        """Never called: no buckets are reordered."""
        return nullcontext()

    def free_gathered_parameters(self) -> None:
        """Do nothing: parameters are never sharded."""

    def take_local_square(self) -> Tensor:
        """Never called: the gradient of one rank is that of the global batch."""
        raise NotImplementedError


class PlainEngine(UpdatingEngine):
    """interfaces.Engine for data parallelism.

    A step, in order of time: start the reduction of the token count; forward; wait for the count, so that the loss is
    divided once, by the global number of tokens; start the reduction of the loss; backward, which reduces gradients.
    """

    def __init__(
        self, model: nn.Module, wrapped: WrappedModel, updates: GradientUpdate, config: RunConfig, world: World
    ) -> None:
        self.parts = [model]
        self._model, self._wrapped, self._updates = model, wrapped, updates
        self._config, self._world = config, world
        self._warmup_backwards = wrapped.warmup_backwards
        self._masks = StepMasks([model], config, world)
        self._metrics = load_metrics(config.train)
        if config.precision.float8_gather:
            from hpc_train.parallel.data_parallel.float8_gather import WeightScales

            self._weight_scales = WeightScales(self.parts)
        self._output_checked = False
        if has_routers([model]):
            from hpc_train.parallel.expert.balance import ExpertBalance, list_routers

            self._balance = ExpertBalance([model], list_routers([model]), world)

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate the gradient of one step; see interfaces.Engine."""
        self._scale_weights()
        self._warm_up(batch.micro[0])
        totals = StepTotals.start(batch, self._world)
        # In float64, so that the order in which micro-batches and ranks are added does not show in the loss.
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
        rank_loss = loss_sum
        scale, reduction, sample, experts = 0.0, None, None, None
        step_totals = Totals(0, False, True)
        measure = batch.measure and self._can_measure(batch)
        self._masks.begin_step(batch)
        if self._balance is not None:
            self._balance.begin_step(lambda: scale)  # a function: the scale is known after the first forward
        for index, micro in enumerate(batch.micro):
            self._masks.select(index)
            last = index == len(batch.micro) - 1
            with self._wrapped.accumulate(last=last, measure=measure and index == 0):
                loss = self._compute_loss(micro)
                if index == 0:
                    step_totals = totals.wait()
                    # Collectives average gradients; the mean over tokens needs their sum.
                    scale = self._updates.loss_scale * count_averaged_ranks(self._world) / max(step_totals.tokens, 1)
                loss_sum += loss.detach()
                if last:
                    rank_loss = loss_sum.clone()  # what is started here adds up `local` over ranks, in place
                    reduction = start_loss_sum(loss_sum, self._world)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            if measure and index == 0:
                sample = self._sample_gradient(batch)
        if self._balance is not None:
            experts = self._balance.end_step()
        if reduction is not None:
            reduction.wait()
        return Sums(loss_sum, *step_totals, rank_loss, sample=sample, experts=experts)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Sums:
        """Compute the sums of a step without a gradient."""
        totals = StepTotals.start(batch, self._world)
        measured = EvaluationSums(self._metrics, self._world.device)
        with self._use_evaluation_weights(), self._evaluation_mode():
            self._scale_weights()
            for micro in batch.micro:
                self._compute_loss(micro, measured)
        if (reduction := start_loss_sum(measured.values, self._world)) is not None:
            reduction.wait()
        return Sums(measured.loss, *totals.wait(), metrics=measured.metrics)

    def _warm_up(self, micro: MicroBatch) -> None:
        """Run the backwards that are thrown away, once, so that a resumed run rounds as one that never stopped.

        They must leave no other trace: neither in the random numbers nor in running statistics. Why they are needed is
        in data_parallel/ddp.py.
        """
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        while self._warmup_backwards:
            with torch.random.fork_rng(devices), self._evaluation_mode(), self._wrapped.warm_up():
                (self._compute_loss(micro) * 0.0).backward()  # type: ignore[no-untyped-call]
            self._updates.clear_gradients()
            self._warmup_backwards -= 1

    def _compute_loss(self, micro: MicroBatch, measured: EvaluationSums | None = None) -> Tensor:
        if self._output_checked:
            return self._run_forward(micro, measured)
        with explain_first_call(f"in the first call of {name_model(self._model)}"):
            loss = self._run_forward(micro, measured, first=True)
        self._output_checked = True
        return loss

    def _run_forward(self, micro: MicroBatch, measured: EvaluationSums | None, *, first: bool = False) -> Tensor:
        """Run the model on a micro-batch and sum its loss. first: check what the model takes and returns.

        measured: gets the loss and what the model returned, in an evaluation.
        """
        # Moved whole, then cut: a cut on the host would lose the pinned memory that copies to a GPU need.
        moved = move_batch(micro, self._world.device, self._model)
        inputs, targets = select_local_tokens(moved, self._config, self._world)
        if first:
            check_inputs(self._model, inputs)
        with self._use_autocast():
            out = self._wrapped.module(**inputs) if isinstance(inputs, dict) else self._wrapped.module(inputs)
        if first and self._wrapped.is_sharded:
            check_output_is_seen(self._model, out)
        loss = (compute_first_loss_sum if first else compute_loss_sum)(self._model, out, targets)
        if measured is not None:
            measured.add(loss, out, targets)
        return loss

    def _use_autocast(self) -> AbstractContextManager[object]:
        if self._wrapped.is_sharded:
            return nullcontext()  # fully_shard casts the parameters that it gathers
        return autocast_forward(self._config.precision, self._world.device)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Put the model into evaluation mode; afterwards only the modules that were training train again."""
        training = [module for module in self._wrapped.module.modules() if module.training]
        self._wrapped.module.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            self._wrapped.free_gathered_parameters()

    def _can_measure(self, batch: StepBatch) -> bool:
        """Whether a gradient of less than the global batch is visible: this rank's own, or the first micro-batch's."""
        sharded = self._wrapped.is_sharded
        if get_axis_degree(self._world, "cp") > 1 and not sharded:
            return False  # a rank's own gradient covers only parts of sequences
        return len(batch.micro) > 1 or (self._world.size > 1 and not sharded)

    def _sample_gradient(self, batch: StepBatch) -> GradientSample:
        """Average the squared norm of the mean gradient of part of the batch over ranks that see different parts.

        With one micro-batch that is this rank's own gradient before its reduction; with several it is the first one's,
        which is scaled as a part of the global batch and therefore divided by its share of it.
        """
        rows = [len(micro.targets) for micro in batch.micro]
        fraction = rows[0] / sum(rows)
        sharded = self._wrapped.is_sharded
        if len(rows) == 1:
            square = self._wrapped.take_local_square() / self._updates.loss_scale**2
        else:
            square = self._updates.norm().double().square() / fraction**2
        if not sharded and (work := start_sum(square, self._world)) is not None:
            work.wait()
            square = square / self._world.size
        ranks = self._world.dp_size if sharded else 1
        return GradientSample(square, sequences=rows[0] * ranks)
