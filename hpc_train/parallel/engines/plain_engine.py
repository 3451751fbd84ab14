"""The engine of models that every rank runs whole: plain, ddp, and sharded (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import GradientSample, MicroBatch, StepBatch, Sums, TensorShard, World
from hpc_train.parallel.context.context_parallel import select_own_tokens
from hpc_train.parallel.data_parallel.ddp import (
    GradientHook,
    accumulate_micro_batch,
    count_settling_backwards,
    discard_backward,
)
from hpc_train.parallel.data_parallel.fully_shard import free_gathered_parameters, set_gradient_sync
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.loss import StepTotals, compute_first_loss_sum, compute_loss_sum, start_loss_sum, start_sum
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.optimizer_step import GradientUpdate
from hpc_train.parallel.precision import autocast_forward
from hpc_train.parallel.user_model import explain_first_call, name_model


class PlainEngine:
    """api.Engine for data parallelism.

    In the order of time, a step is: start the reduction of the token count; forward; wait for it, so that the loss can
    be divided once, by the global token count; start the reduction of the loss; backward, which reduces the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        updates: GradientUpdate,
        config: RunConfig,
        world: World,
        hook: GradientHook | None = None,
    ) -> None:
        self.parts = [model]
        self._model, self._wrapped = model, wrapped
        self._config, self._world, self._hook = config, world, hook
        self._to_settle = count_settling_backwards(wrapped, hook, world)
        self._updates = updates
        self._masks = StepMasks([model], config, world)
        self._called = False
        """Whether the model has been called once and its output checked."""

    def forward_backward(self, batch: StepBatch) -> Sums:
        """See api.Engine."""
        self._settle(batch.micro[0])
        totals = StepTotals.start(batch, self._world)
        local = torch.zeros((), dtype=torch.float64, device=self._world.device)
        scale, reduction, sample = 0.0, None, None
        tokens, stop = 0, False
        measure = batch.measure and self._can_measure(batch)
        self._masks.begin_step(batch)
        for index, micro in enumerate(batch.micro):
            self._masks.select(index)
            last = index == len(batch.micro) - 1
            with self._synchronising(last, early=measure and index == 0):
                loss = self._loss(micro)
                if index == 0:
                    tokens, stop = totals.wait()
                    scale = self._updates.loss_scale * self._reducing / max(tokens, 1)
                local += loss.detach()
                if last:
                    reduction = start_loss_sum(local, self._world)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            if measure and index == 0:
                sample = self._sample(batch, scale)
        if reduction is not None:
            reduction.wait()
        return Sums(local, tokens, stop, sample)

    @torch.no_grad()
    def evaluate(self, batch: StepBatch) -> Sums:
        """See api.Engine."""
        totals = StepTotals.start(batch, self._world)
        local = torch.zeros((), dtype=torch.float64, device=self._world.device)
        with self._evaluating():
            for micro in batch.micro:
                local += self._loss(micro)
        if (reduction := start_loss_sum(local, self._world)) is not None:
            reduction.wait()
        return Sums(local, *totals.wait())

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """See api.Engine."""
        return self._updates.update(lr)

    def shards(self) -> Iterator[TensorShard]:
        """See api.Engine."""
        return self._updates.shards()

    def _settle(self, micro: MicroBatch) -> None:
        """Backwards that are thrown away, once, so that a resumed run rounds as one that was never stopped."""
        devices = [self._world.device] if self._world.device.type == "cuda" else []
        while self._to_settle:
            with torch.random.fork_rng(devices), self._evaluating(), discard_backward(self._wrapped, self._hook):
                (self._loss(micro) * 0.0).backward()  # type: ignore[no-untyped-call]
            self._updates.forget()
            self._to_settle -= 1

    def _loss(self, micro: MicroBatch) -> Tensor:
        if self._called:
            return self._computed(micro, compute_loss_sum)
        with explain_first_call(f"in the first call of {name_model(self._model)}"):
            loss = self._computed(micro, compute_first_loss_sum)
        self._called = True
        return loss

    def _computed(self, micro: MicroBatch, sum_up: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Tensor:
        device = self._world.device
        mine = select_own_tokens(micro, self._config, self._world)
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in mine)
        inputs = inputs.to(next(self._model.parameters()).dtype) if inputs.is_floating_point() else inputs
        with self._cast():
            out = self._wrapped(inputs)
        return sum_up(self._model, out, targets)

    def _cast(self) -> AbstractContextManager[object]:
        if isinstance(self._wrapped, FSDPModule):
            return nullcontext()
        return autocast_forward(self._config.precision, self._world.device)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Leaves the model as it was: what a user has put into evaluation mode for good stays there."""
        training = [module for module in self._wrapped.modules() if module.training]
        self._wrapped.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True
            free_gathered_parameters(self._wrapped)

    @contextmanager
    def _synchronising(self, last: bool, early: bool) -> Iterator[None]:
        """Only the last micro-batch of a step reduces gradients (and a sharded first one that is being measured)."""
        if isinstance(self._wrapped, FSDPModule):
            set_gradient_sync(self._wrapped, self._config.parallel, 1, last, measured=early)
            yield
            return
        if self._hook is not None:
            self._hook.norm.active = early and last
        with accumulate_micro_batch(self._wrapped, last, self._hook):
            yield

    @property
    def _reducing(self) -> int:
        """Ranks whose gradients are averaged, where they are to be added up."""
        return self._world.dp_size * get_axis_degree(self._world, "cp")

    def _can_measure(self, batch: StepBatch) -> bool:
        """A gradient of less than the global batch must be visible: a rank's own, or that of the first micro-batch."""
        sharded = isinstance(self._wrapped, FSDPModule)
        if get_axis_degree(self._world, "cp") > 1 and not sharded:
            return False  # a rank's own gradient is that of parts of sequences
        return len(batch.micro) > 1 or (self._world.size > 1 and not sharded)

    def _sample(self, batch: StepBatch, scale: float) -> GradientSample:
        """Squared norm of the mean gradient over part of the batch, averaged over ranks that see different parts."""
        share = [len(micro.targets) for micro in batch.micro]
        fraction = share[0] / sum(share)
        sharded = isinstance(self._wrapped, FSDPModule)
        if len(share) == 1:
            assert self._hook is not None
            square = self._hook.norm.take() / self._updates.loss_scale**2
        else:
            square = self._updates.norm().double().square() / fraction**2
        if not sharded and (work := start_sum(square, self._world)) is not None:
            work.wait()
            square = square / self._world.size
        ranks = self._world.dp_size if sharded else 1
        return GradientSample(square, sequences=share[0] * ranks)
