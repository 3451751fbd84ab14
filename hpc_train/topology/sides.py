"""The two panels of a placement's picture: the launcher's order, and the one that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.placement.cost import Model
from hpc_train.placement.levels import NamedLevel
from hpc_train.placement.mesh import groups
from hpc_train.placement.result import Placement
from hpc_train.topology.colours import seconds
from hpc_train.topology.panel import Panel
from hpc_train.traffic.flow import Flow


@dataclass(frozen=True)
class Sides:
    """What both panels are drawn from."""

    model: Model
    sizes: Mapping[str, int]
    """Mesh axis -> degree."""
    levels: tuple[NamedLevel, ...]
    axes: tuple[str, ...]
    """Whose groups colour the GPUs."""

    def panels(self, placement: Placement) -> list[Panel]:
        """Before and after; one where both are the same."""
        identity = tuple(range(len(self.model.fabric.nodes)))
        before = self._panel("before", "launcher's order", identity, placement.identity.total)
        if placement.nodes == identity:
            return [before]
        return [before, self._panel("after", "placed", placement.nodes, placement.placed.total)]

    def _panel(self, key: str, title: str, order: Sequence[int], total: float) -> Panel:
        """order[i]: node that holds ranks i * ranks_per_node and following."""
        fabric = self.model.fabric
        colour, place = self._of_ranks()
        place_of = np.full(len(fabric.nodes), 0, np.int64)
        place_of[np.asarray(order)] = np.arange(len(order))
        moved = self.model.link_bytes(order)
        return Panel(
            key=key,
            title=f"{title}: {seconds(total)} of communication a step",
            levels=self.levels,
            gpus=fabric.ranks_per_node,
            colour=colour[place_of],
            place=place[place_of],
            first_rank=place_of * fabric.ranks_per_node,
            load={level.name: moved[level.name] / level.uplink for level in fabric.levels},
        )

    def _of_ranks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(group, place in it) of every rank: [nodes, ranks a node], nodes in the order of ranks."""
        members = groups(self.sizes, self.axes)
        group, place = np.empty(members.size, np.int64), np.empty(members.size, np.int64)
        group[members] = np.arange(len(members))[:, None]
        place[members] = np.arange(members.shape[1])
        shape = (-1, self.model.fabric.ranks_per_node)
        return group.reshape(shape), place.reshape(shape)


def chosen_axes(
    wanted: str | None, sizes: Mapping[str, int], flows: Sequence[Flow], placement: Placement
) -> tuple[str, ...]:
    """Axes to colour by: those of --axis, such as tp or dp_shard+cp; else those that gain most, or move most.

    Raises UserError for an axis that is none, or has one rank.
    """
    if wanted is not None:
        return _given(wanted, sizes)
    before, after = placement.identity.per_axis, placement.placed.per_axis
    gained = {axis: before[axis] - after[axis] for axis in before}
    moved: dict[str, float] = {}
    for flow in flows:
        name = "+".join(flow.axes)
        moved[name] = moved.get(name, 0.0) + flow.bytes * flow.calls
    large = {axis for axis, size in sizes.items() if size > 1}
    several = [axis for axis in before if _several(axis, sizes)]
    # A group of all ranks has one colour.
    candidates = [axis for axis in several if not large <= set(axis.split("+"))] or several
    if not candidates:
        return ("dp_replicate",)
    best = max(candidates, key=lambda axis: (gained[axis] if gained[axis] > 0 else 0.0, moved.get(axis, 0.0)))
    return tuple(best.split("+"))


def _given(wanted: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    axes = tuple(wanted.split("+"))
    large = [axis for axis, size in sizes.items() if size > 1]
    if unknown := [axis for axis in axes if axis not in sizes]:
        raise UserError(f"--axis {wanted}: {unknown[0]!r} is no mesh axis; choose of {', '.join(sizes)}")
    if not _several(wanted, sizes):
        raise UserError(f"--axis {wanted}: has one rank in this mesh; choose of {', '.join(large) or 'none'}")
    return axes


def _several(label: str, sizes: Mapping[str, int]) -> bool:
    return any(sizes.get(axis, 1) > 1 for axis in label.split("+"))
