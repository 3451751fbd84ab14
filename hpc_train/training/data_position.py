"""Save and restore the position of a streamed data set: one per data-parallel rank, restored to the same rank.

A data set with an index does not need this: the number of consumed samples is enough.
"""

from __future__ import annotations

from typing import Any

from hpc_train.data.loader import BatchLoader
from hpc_train.data.stream_loader import StreamLoader
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.messages import gather_values


def gather_positions(loader: BatchLoader, world: World) -> dict[str, Any] | None:
    """Return, on rank 0, the position of each share of a stream; None where there is none to save. A collective."""
    if not isinstance(loader, StreamLoader) or not loader.saves_position:
        return None
    rank_position = [world.dp_index, loader.state()]
    gathered = gather_values(rank_position) if world.size > 1 else [rank_position]
    if gathered is None:
        return None
    positions = dict(gathered)
    return {"dp_size": world.dp_size, "positions": [positions[index] for index in range(world.dp_size)]}


def restore_position(
    loader: BatchLoader, saved: dict[str, Any] | None, consumed: int, exact: bool, world: World
) -> str:
    """Continue a stream where it was; returns a line to print if it begins again, else an empty one.

    saved: what gather_positions returned. exact: data.resume. Raises UserError where a position is of another number of
    data-parallel ranks.
    """
    if not isinstance(loader, StreamLoader):
        return ""
    if saved is None or not exact:
        loader.restore(None, consumed)
        reason = "data.resume=beginning" if not exact else "it has no state_dict and load_state_dict"
        return f"data: the stream starts at its beginning again, because {reason}"
    if saved["dp_size"] != world.dp_size:
        raise UserError(
            f"data: the position of this stream was saved on {saved['dp_size']} data-parallel ranks, and there are "
            f"{world.dp_size} now; use as many, or set data.resume=beginning to start the stream again"
        )
    loader.restore(saved["positions"][world.dp_index], consumed)
    return ""
