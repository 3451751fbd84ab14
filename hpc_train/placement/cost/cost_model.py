"""Model the cost of one step's communication on a fabric, with the ranks on given nodes.

The model is Hockney's (latency + bytes / bandwidth), with links that are shared. All groups of an axis run at the same
time, and the flows of a step one after the other:

    seconds of a flow = calls x sum over the phases of its collective of
                        hops [1] x latency [s] + bytes of an edge [B] x max over links of messages / bandwidth [B/s]

The maximum is over the links of every level: for each group, the messages that leave it, or that enter it, whichever
are more (links are full duplex), over its uplink; and inside a node, the messages that a rank sends or receives there
over `inside_bandwidth`. collective_phases.py says which messages a collective has, collective_messages.py what a hop
takes.

The traffic of other jobs is unknown, so every cost is computed twice: without any (`seconds`), and with other jobs
using their nodes' fair share of each uplink (`busy_seconds`). The truth lies between. Traffic out of an NVLink
domain that spans nodes leaves by the NICs of the sending node, so at that level each node has an equal share of the
uplink, and no more.

A message between two ranks (send_recv of NCCL) takes one NIC: it has that part of its node's uplink, and of a
rail-optimised leaf's, which belongs to its rail. Collectives are cut into channels over all NICs of a node.

The model knows no overlap with computation, and no hashing of flows onto parallel links (ECMP): it compares orders of
nodes, and predicts their ratio better than their seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost.collective_messages import MeasuredPhase, count_loads, measure_orders
from hpc_train.placement.cost.collective_phases import Backend, CollectivePhase, list_phases
from hpc_train.placement.cost.message_patterns import ListedMessages, MessagePattern, build_pattern, split_by_rail
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.mesh_groups import GroupRows, check_world, format_axes, list_groups, list_rows
from hpc_train.placement.placement_result import CommunicationCost
from hpc_train.traffic.axes import Flow

_ELEMENTS = 1 << 21
"""Orders times ranks that are computed at a time, to bound the memory of the arrays (16 MiB each)."""


@dataclass(frozen=True)
class CostTerm:
    """The cost of one phase of one flow."""

    flow: Flow
    phase: CollectivePhase
    pattern: int
    """Index of its pattern."""

    @property
    def moved(self) -> float:
        """Bytes per step on each edge."""
        return self.flow.calls * self.phase.fraction * self.flow.bytes

    def compute_seconds(self, measured: MeasuredPhase) -> NDArray[np.float64]:
        """Return [orders]: seconds per step."""
        return self.flow.calls * self.phase.hops * measured.latency + self.moved * measured.seconds

    def compute_seconds_beside(self, measured: MeasuredPhase) -> NDArray[np.float64]:
        """Return [orders]: seconds per step next to busy neighbours."""
        return self.flow.calls * self.phase.hops * measured.latency + self.moved * measured.busy_seconds


@dataclass(frozen=True)
class StepSums:
    """Totals of a step's flows under several orders of the nodes."""

    seconds: NDArray[np.float64]
    """[orders]: seconds with the full uplinks."""
    busy_seconds: NDArray[np.float64]
    """[orders]: seconds with the job's share of each uplink, next to busy neighbours."""
    crossings: NDArray[np.float64]
    """[orders]: bytes of a step times the levels above the node they cross."""


@dataclass(frozen=True)
class CostModel:
    """A fabric, a mesh and its flows, prepared to cost many orders of nodes."""

    fabric: Fabric
    groups: dict[str, GroupRows]
    """Groups of each flow's axes, by label; axes of degree 1 are left out."""
    patterns: tuple[MessagePattern, ...]
    terms: tuple[CostTerm, ...]
    labels: tuple[str, ...]
    """Labels of all flows, also of axes of degree 1."""

    def compute_seconds(self, orders: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [orders]: seconds of communication a step. orders: [orders, positions], the node at each position."""
        return self.compute_sums(orders).seconds

    def compute_sums(self, orders: NDArray[np.int64]) -> StepSums:
        """Compute the totals of many orders. orders: [orders, positions], the node at each position."""
        # Arrays are [orders, messages], and there are about as many messages as ranks.
        step = max(1, _ELEMENTS // (orders.shape[1] * self.fabric.ranks_per_node))
        parts = [self._compute_part(orders[start : start + step]) for start in range(0, len(orders), step)]
        return StepSums(
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.busy_seconds for part in parts]),
            np.concatenate([part.crossings for part in parts]),
        )

    def compute_cost(self, order: Sequence[int]) -> CommunicationCost:
        """Compute the cost of one order, in total and by axis."""
        measured = self._measure(np.asarray(order, np.int64)[None])
        per_axis = dict.fromkeys(self.labels, 0.0)
        for term in self.terms:
            per_axis[format_axes(term.flow.axes)] += float(term.compute_seconds(measured[term.pattern])[0])
        return CommunicationCost(sum(per_axis.values()), per_axis)

    def compute_link_bytes(self, order: Sequence[int]) -> dict[str, NDArray[np.float64]]:
        """Map each level to [groups]: bytes per step that leave a group, or enter it, whichever are more."""
        orders = np.asarray(order, np.int64)[None]
        return {
            level.name: self._compute_level_bytes(number, orders) for number, level in enumerate(self.fabric.levels)
        }

    def _compute_level_bytes(self, number: int, orders: NDArray[np.int64]) -> NDArray[np.float64]:
        level = self.fabric.levels[number]
        both = np.zeros((2, len(level.uplink)))  # bytes that leave each group, and bytes that enter it
        for term in self.terms:
            both += term.moved * np.concatenate(count_loads(self.patterns[term.pattern], level, orders))
        larger: NDArray[np.float64] = both.max(axis=0)
        return larger

    def measure_pattern(self, pattern: MessagePattern, orders: NDArray[np.int64]) -> MeasuredPhase:
        """Measure the load of one of the patterns. orders: [orders, positions]."""
        return measure_orders(pattern, self.fabric, orders)

    def _measure(self, orders: NDArray[np.int64]) -> list[MeasuredPhase]:
        return [self.measure_pattern(pattern, orders) for pattern in self.patterns]

    def _compute_part(self, orders: NDArray[np.int64]) -> StepSums:
        measured = self._measure(orders)
        seconds, busy_seconds, crossed = (np.zeros(len(orders)) for _ in range(3))
        for term in self.terms:
            seconds += term.compute_seconds(measured[term.pattern])
            busy_seconds += term.compute_seconds_beside(measured[term.pattern])
            crossed += term.moved * measured[term.pattern].crossings
        return StepSums(seconds, busy_seconds, crossed)


def build_cost_model(
    fabric: Fabric, sizes: Mapping[str, int], flows: Sequence[Flow], nodes: int, backend: Backend = "nccl"
) -> CostModel:
    """Build the cost model of a mesh on `nodes` of the fabric's nodes.

    Raises UserError if the degrees do not fill them.
    """
    check_world(fabric, sizes, nodes)
    groups = {format_axes(flow.axes): list_rows(sizes, flow.axes, fabric.ranks_per_node) for flow in flows}
    groups = {name: group for name, group in groups.items() if group.position.shape[1] > 1}
    index: dict[tuple[object, ...], int] = {}
    patterns: list[MessagePattern] = []
    terms = []
    for flow in flows:
        name = format_axes(flow.axes)
        for phase in _list_group_phases(flow, groups.get(name), backend):
            # Flows of one axis share the pattern, which is expensive to measure; only bytes and calls differ.
            key = (name, phase.edges, phase.round, phase.hops == 1)
            if key not in index:
                index[key] = len(patterns)
                pattern = build_pattern(groups[name], phase)
                if backend == "nccl" and phase.hops == 1 and isinstance(pattern, ListedMessages):
                    ranks, rails = list_groups(sizes, flow.axes), max(level.rails for level in fabric.levels)
                    pattern = split_by_rail(pattern, phase, ranks, fabric.ranks_per_node, rails)
                patterns.append(pattern)
            terms.append(CostTerm(flow, phase, index[key]))
    labels = tuple(dict.fromkeys(format_axes(flow.axes) for flow in flows))
    return CostModel(fabric, groups, tuple(patterns), tuple(terms), labels)


def _list_group_phases(flow: Flow, groups: GroupRows | None, backend: Backend) -> tuple[CollectivePhase, ...]:
    if groups is None:
        return ()
    return list_phases(flow, groups.position.shape[1], backend, inside=int(groups.spread.max()) == 1)


def estimate_cost(
    fabric: Fabric,
    sizes: Mapping[str, int],
    flows: Sequence[Flow],
    nodes: Sequence[int] | None = None,
    backend: Backend = "nccl",
) -> CommunicationCost:
    """Estimate the seconds of a step's communication, in total and by axis, with the ranks on `nodes`.

    sizes: mesh axis -> degree; ranks are row-major over AXES. nodes: index of the fabric's node that holds each next
    `ranks_per_node` ranks (default: the launcher's order); fewer than the fabric has leave spares.
    Raises UserError where the degrees do not fill the nodes.
    """
    # Without a placement the launcher fills nodes in the order in which Slurm lists them.
    order = range(len(fabric.nodes)) if nodes is None else nodes
    assert len(set(order)) == len(order), "a node holds two places"
    return build_cost_model(fabric, sizes, flows, len(order), backend).compute_cost(order)
