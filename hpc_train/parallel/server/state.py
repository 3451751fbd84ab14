"""What of a served model is saved: the servers' memory, and what no server holds."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hpc_train.api import Piece, World
from hpc_train.parallel.server.window import ShareWindow


def held_pieces(model: nn.Module, windows: list[ShareWindow], world: World) -> Iterator[Piece]:
    """Each share on the ranks that hold it; frozen parameters and persistent buffers on every rank."""
    for window in windows:
        if window.share is not None:
            for name, tensor in window.share.named():
                yield _whole(name, tensor.detach(), window.hosts.index(world.rank))
    served = [parameter for window in windows for parameter in window.parameters]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is parameter for parameter in served):
            yield _whole(name, tensor.detach(), world.rank)


def _whole(name: str, tensor: Tensor, replica: int) -> Piece:
    return Piece(name, tuple(tensor.shape), tensor.dtype, (0,) * tensor.ndim, tensor, replica)
