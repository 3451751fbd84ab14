"""Muon over matrices that are split or copied in any way, equal to torch.optim.Muon on whole ones.

Jordan 2024, https://kellerjordan.github.io/posts/muon/. The momentum is sharded like the parameter. Newton-Schulz
iterations need the whole matrix: matrix_exchange.py decides which rank computes which matrix, and how parts are sent.
torch runs the iterations in bfloat16, so sending the parts in bfloat16 loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train._torch.tensors import orthogonalise
from hpc_train.config.optim import MuonConfig
from hpc_train.interfaces import World
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.parallel.optimizers.matrix_exchange import Matrix, MatrixExchange, Transfer, list_matrices


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters that are split or copied over the ranks of a stage.

    A parameter of three dimensions is a stack of matrices (in, out), as models.experts has them: each is updated as the
    weight (out, in) of a linear layer would be.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, weight_decay: float, config: MuonConfig, world: World
    ) -> None:
        """groups: `params` with further settings. Every rank of the job calls it, also one without parameters."""
        super().__init__([dict(group) for group in groups], {"lr": lr, "weight_decay": weight_decay})
        self._config = config
        matrices = list_matrices([p for group in self.param_groups for p in group["params"]], world)
        self._exchange = MatrixExchange(matrices, world, torch.bfloat16)
        self._rank = self._exchange.rank
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix. All ranks of the stage call it together.

        In order of time: the parts of round 0 start to travel; then for each round its parts arrive, those of the next
        start, this rank computes its own matrices, the results of the round before are applied, and these start back.
        """
        assert closure is None
        rates = {p: (group["lr"], group["weight_decay"]) for group in self.param_groups for p in group["params"]}
        self._update_momentum(list(rates))
        rounds = len(self._exchange.rounds)
        returning: Transfer | None = None
        gathering = self._exchange.start_gather(0, self._compute_direction) if rounds else None
        for number in range(rounds):
            assert gathering is not None
            matrices = self._exchange.finish_gather(number, gathering)
            if number + 1 < rounds:
                gathering = self._exchange.start_gather(number + 1, self._compute_direction)
            results = {matrix: self._orthogonalise(matrix, values) for matrix, values in matrices.items()}
            if returning is not None:
                self._apply(number - 1, returning, rates)
            returning = self._exchange.start_return(number, results)
        if returning is not None:
            self._apply(rounds - 1, returning, rates)

    def _update_momentum(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            momentum = get_local(self.state[parameter]["momentum_buffer"])
            momentum.lerp_(get_local(parameter.grad), 1 - self._config.momentum)

    def _compute_direction(self, matrix: Matrix) -> Tensor:
        """Return this rank's part of what is made orthogonal, in memory that may be changed."""
        assert matrix.parameter.grad is not None
        gradient = matrix.select_local(get_local(matrix.parameter.grad), self._rank)
        momentum = matrix.select_local(get_local(self.state[matrix.parameter]["momentum_buffer"]), self._rank)
        return gradient.lerp(momentum, self._config.momentum) if self._config.nesterov else momentum.clone()

    def _orthogonalise(self, matrix: Matrix, values: Tensor) -> Tensor:
        if matrix.index is None:
            return orthogonalise(values, self._config.ns_steps)
        return orthogonalise(values.mT.contiguous(), self._config.ns_steps).mT

    def _apply(self, number: int, transfer: Transfer, rates: dict[nn.Parameter, tuple[float, float]]) -> None:
        for matrix, update in self._exchange.finish_return(number, transfer):
            lr, decay = rates[matrix.parameter]
            weights = matrix.select_local(get_local(matrix.parameter), self._rank)
            weights.mul_(1 - lr * decay)
            weights.add_(update, alpha=-lr * self._adjust_rate(matrix))

    def _adjust_rate(self, matrix: Matrix) -> float:
        rows, columns = matrix.shape if matrix.index is None else matrix.shape[::-1]
        if self._config.adjust_lr == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups  # the very same, so that a rate that is set here counts there
        self._optimizers = list(optimizers)
        # One state for all, so that who saves, loads or offloads this optimizer's reaches theirs.
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        assert closure is None
        for optimizer in self._optimizers:
            optimizer.step()
