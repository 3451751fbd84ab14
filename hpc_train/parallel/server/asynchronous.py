"""Asynchronous parameter servers: each worker updates the parameters by itself, not too far ahead of the slowest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpc_train.api import Piece, World
from hpc_train.parallel.server.clock import Clock
from hpc_train.parallel.server.layout import MakeOptimizer, Share
from hpc_train.parallel.server.ranks import Ranks
from hpc_train.parallel.server.state import held_pieces
from hpc_train.parallel.server.window import ShareWindow


class AsynchronousUpdates:
    """updates.Updating of one worker (or of one group of them, with `hybrid`): its own gradient, applied at once.

    A server does nothing: the worker fetches a share under its lock, updates it and puts it back.
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: nn.Module,
        windows: list[ShareWindow],
        make_optimizer: MakeOptimizer,
        clock: Clock,
        ranks: Ranks,
        world: World,
    ) -> None:
        self._model, self._windows, self._clock, self._ranks, self._world = model, windows, clock, ranks, world
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._shares = [Share([(names[p], p) for p in window.parameters], make_optimizer) for window in windows]
        self._scratch = torch.empty(max(window.bytes for window in windows), dtype=torch.uint8)
        self._gradients: list[Tensor] | None = None

    def begin(self, stop: bool) -> bool:
        """Wait for the slowest worker, and pull the parameters; whether this step is to be everybody's last."""
        last, stop = False, self._agree(stop)
        if self._ranks.leads:
            self._clock.wait()
            last = self._clock.last(stop)
        last = self._agree(last)
        for window in self._windows:
            window.pull()
        return last

    def _agree(self, mine: bool) -> bool:
        """Whether it is so on any rank of the group."""
        with self._ranks.calling:
            return bool(self._ranks.group.allreduce(int(mine)))

    def refresh(self) -> None:
        """Pull the parameters when every worker has done what it does now. A collective."""
        self._ranks.barrier()
        for window in self._windows:
            window.pull()

    def restart(self) -> None:
        """All workers begin together. A collective."""
        self._clock.restart()

    def norm(self) -> Tensor:
        """See updates.Updating: of this worker's (or group's) own gradient."""
        if self._gradients is None:
            self._gradients = [window.gradient().clone() for window in self._windows]
        return nn.utils.get_total_norm(self._gradients)

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine."""
        norm = self.norm()
        assert self._gradients is not None
        if max_norm is not None:
            for gradient in self._gradients:
                gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def update(self, lr: float) -> bool:
        """See api.Engine."""
        self.norm()
        assert self._gradients is not None
        if self._ranks.leads:
            for window, share, gradient in zip(self._windows, self._shares, self._gradients, strict=True):
                window.update_from_afar(share, self._scratch, gradient, lr)
            self._clock.tick()
        self.forget()
        return True

    def forget(self) -> None:
        """See updates.Updating."""
        self._gradients = None
        self._model.zero_grad(set_to_none=True)

    def pieces(self) -> Iterator[Piece]:
        """See api.Engine."""
        self._ranks.barrier()
        return held_pieces(self._model, self._windows, self._world)
