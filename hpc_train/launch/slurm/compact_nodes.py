"""Decide whether a job asks Slurm for nodes that are close together (launch.compact_nodes), and say so.

Slurm gives a job the nodes that are free, on as few switches as these allow. `--switches=N@TIME` (topology/tree),
`--segment=N` (topology/block) and `--contiguous` (no topology, and a file of switches in cluster.topology) make it wait
for better ones. For each such request the gain is the difference of the modelled communication of a step on the nodes
that Slurm would choose now and on those that it would choose then, both in the order that the job would place its ranks
in; the price is the time until those nodes are free. Both are intervals: uplinks may carry other jobs or be tapered,
communication may be hidden behind computation, and running jobs may end before their limits. Jobs that wait in the
queue are not modelled: they delay both sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.readers.slurm.slurm_topology import SCONTROL_COMMAND, matches_scontrol, read_scontrol
from hpc_train.cluster.spec import Cluster
from hpc_train.config.model import CustomModelConfig, HfModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.command_output import Report
from hpc_train.launch.slurm.node_availability import (
    Floats,
    NodeAvailability,
    choose_first_free,
    order_nodes,
    read_availability,
)
from hpc_train.launch.slurm.request import JobRequest
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.units import format_seconds

OWN_OPTIONS = frozenset({"switches", "segment", "contiguous", "nodelist", "nodefile"})
"""sbatch options in launch.extra by which the user has decided already."""
_WORTH = 0.01
"""Smallest share of a job's time that is worth a request: the model is no more precise."""
_MAX_OPTIONS = 6
"""Numbers of switches, or sizes of segments, that are compared."""
_DEFAULT_MAX_WAIT = 300.0
"""Slurm's own max_switch_wait, seconds."""
_MAX_WAIT = re.compile(r"\bmax_switch_wait=(\d+)")


@dataclass(frozen=True)
class Interval:
    """A quantity that is known between two bounds."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        low, high = format_seconds(self.low), "an unknown time" if math.isinf(self.high) else format_seconds(self.high)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class NodeRequest:
    """One way to ask for close nodes, and what it brings."""

    option: str
    """Name of the sbatch option."""
    count: int
    """Switches, or nodes of a segment; 0: the option has no number."""
    where: str
    """The request in words, such as `1 leaf switch`."""
    communication: Interval | None
    """Seconds of a step on these nodes; None: only the model itself knows what its ranks exchange."""
    saved: Interval
    """Seconds of the job's time limit."""
    wait: Interval
    """Seconds that these nodes are free later than any others."""

    @property
    def net(self) -> float:
        return self.saved.middle - self.wait.middle


@dataclass(frozen=True)
class _NodeChoice:
    """Nodes for a job, as positions in NodeAvailability, and when they are free (expected, latest)."""

    nodes: tuple[int, ...]
    wait: tuple[float, float]


def ask_for_compact_nodes(config: RunConfig, request: JobRequest, report: Report, ask: RunClient) -> JobRequest:
    """Return the request, with the option for close nodes where it pays, or where launch.compact_nodes=ask.

    report: gets the decision and its reasons in one line, before anything is submitted. Slurm is not asked for a job of
    one node, nor where the user's own sbatch options or launch.compact_nodes=off decide.
    """
    mode, nodes = config.launch.compact_nodes, request.nodes + request.spares
    if mode == "off" or nodes < 2 or OWN_OPTIONS & config.launch.extra.keys():
        return request
    try:
        decision = _compare_requests(config, request, ask)
    except UserError as error:
        decision = str(error)
    if isinstance(decision, str):
        if mode == "ask":
            report(f"launch.compact_nodes=ask: nothing is asked for: {decision}")
        return request
    best, is_requested = decision.choose(mode)
    if best is None:
        if mode == "ask":
            report("launch.compact_nodes=ask: nothing is asked for: no request of Slurm's brings these nodes closer")
        return request
    report(decision.describe(best, is_requested))
    if not is_requested:
        return request
    extra = {**request.parameters["additional_parameters"], best.option: decision.format_value(best)}
    return replace(request, parameters={**request.parameters, "additional_parameters": extra})


@dataclass(frozen=True)
class CompactDecision:
    """The compared requests, and what the job gets without one."""

    requests: tuple[NodeRequest, ...]
    without: Interval | None
    """Seconds of communication of a step on the nodes that Slurm would choose; None: not known."""
    limit: float
    """Time limit of the job, seconds."""
    max_wait: float
    """Seconds that this Slurm waits at most for switches."""
    used_share: float | None

    def choose(self, mode: str) -> tuple[NodeRequest | None, bool]:
        """Return (the best request, whether it is made); None if none is worth a word."""
        worth = [request for request in self.requests if request.saved.high >= _WORTH * self.limit]
        if mode == "ask":
            return max(worth or self.requests, key=lambda request: request.net, default=None), True
        best = max(worth, key=lambda request: request.net, default=None)
        # A request without an end to its wait is never made unasked: nothing bounds what it costs.
        return best, best is not None and best.net > 0 and (best.option == "switches" or math.isfinite(best.wait.high))

    def format_value(self, best: NodeRequest) -> str | bool:
        """Return the value of the sbatch option. Slurm waits no longer for switches than they save."""
        if best.option != "switches":
            return str(best.count) if best.count else True
        if not best.saved.middle:  # nothing to measure the wait by: Slurm's own longest wait holds
            return str(best.count)
        minutes, seconds = divmod(math.ceil(max(60.0, min(best.saved.middle, self.max_wait))), 60)
        return f"{best.count}@{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"

    def describe(self, best: NodeRequest, asked: bool) -> str:
        """Describe the decision in one line."""
        value = self.format_value(best)
        option = f"--{best.option}" if value is True else f"--{best.option}={value}"
        head = f"nodes: asks Slurm for {best.where} ({option})" if asked else f"nodes: {option} is not asked for"
        history = (
            "no history says when running jobs end"
            if self.used_share is None
            else f"recent jobs used {self.used_share:.0%} of their limits"
        )
        saves = (
            f"a step's communication is {self.without} on the nodes that Slurm would choose and {best.communication} "
            f"on {best.where}, which saves {best.saved} of the job's {format_seconds(self.limit)}"
            if best.communication is not None
            else "what that saves is not known, as only the model itself knows its shape"
        )
        later = f"{best.wait} later than any others ({history})" if best.wait.high else "as soon as any others"
        return f"{head}: {saves}; they are free {later}; launch.compact_nodes=off|auto|ask"


def _compare_requests(config: RunConfig, request: JobRequest, ask: RunClient) -> CompactDecision | str:
    """Return the requests that this Slurm takes, or why there is none."""
    shown = _read_topology(ask)
    if shown is None and not config.cluster.topology:
        return "Slurm shows no switches (scontrol show topology), and cluster.topology is not given"
    if shown is not None and shown.kind != "slurm_block" and len(_list_leaves(shown)) < 2:
        return "Slurm shows one leaf switch, which has all nodes"
    available = read_availability(request.parameters.get("partition"), request.parameters.get("constraint"), ask)
    count = request.nodes + request.spares
    if available is None or len(available.nodes) < count:
        return "sinfo and squeue name too few nodes that are up"
    compare = _Comparison(config, request.nodes, available, shown)
    usual = compare.choose_usual(count)
    before = compare.cost(usual)
    requests = []
    always = config.launch.compact_nodes == "ask"  # even if the nodes that are free now happen to be close together
    leaves = len(set((compare.group if always else compare.group[list(usual.nodes)]).tolist()))
    for named, choice in compare.list_requests(count, leaves):
        after, wait = compare.cost(choice), _subtract_waits(choice.wait, usual.wait)
        if before is None or after is None:
            requests.append(NodeRequest(*named, None, Interval(0.0, 0.0), wait))
        elif always or after.high < before.high:
            requests.append(NodeRequest(*named, after, compare.save(before, after), wait))
    # How long Slurm waits for switches at most is asked only if a request could wait for any.
    max_wait = (
        _read_max_wait(ask) if any(candidate.option == "switches" for candidate in requests) else _DEFAULT_MAX_WAIT
    )
    limit = 60.0 * config.launch.time_minutes
    return CompactDecision(tuple(requests), before, limit, max_wait, available.used_share)


def _subtract_waits(later: tuple[float, float], sooner: tuple[float, float]) -> Interval:
    waits = [max(0.0, a - b) if math.isfinite(b) else 0.0 for a, b in zip(later, sooner, strict=True)]
    return Interval(min(waits), max(waits))


def _read_topology(ask: RunClient) -> Cluster | None:
    answer = ask(SCONTROL_COMMAND)
    if answer.code or not matches_scontrol(answer.out):
        return None
    return read_scontrol(answer.out, " ".join(SCONTROL_COMMAND))


def _read_max_wait(ask: RunClient) -> float:
    match = _MAX_WAIT.search(ask(["scontrol", "show", "config"]).out)
    return float(match[1]) if match else _DEFAULT_MAX_WAIT


_Choose = Callable[[NDArray[np.int64]], list[int]]
"""Chooses positions of nodes among those that are free; [] if they do not suffice."""


class _Comparison:
    """Chooses nodes as Slurm does, and costs the communication on them."""

    def __init__(self, config: RunConfig, nodes: int, available: NodeAvailability, shown: Cluster | None) -> None:
        """nodes: of the ranks, without spares. shown: Slurm's own topology; None: it has none."""
        self.config, self._nodes, self._available, self._shown = config, nodes, available, shown
        of_node = {name: at for at, switch in enumerate(_list_leaves(shown)) for name in switch}
        # A node that the topology does not name is on a switch of its own.
        keys = [of_node.get(name, -1 - at) for at, name in enumerate(available.nodes)]
        self.group: NDArray[np.int64] = np.unique(keys, return_inverse=True)[1].reshape(-1)
        self._step = _estimate_step(config, nodes)

    def choose_usual(self, count: int) -> _NodeChoice:
        """Choose the nodes that Slurm would choose: those free first, on the fewest leaves that these allow."""
        waits = tuple(choose_first_free(free, count) for free in self._free)
        free = np.flatnonzero(self._available.expected <= waits[0])
        return _NodeChoice(tuple(_fill_leaves(free, self.group, count)), (waits[0], waits[1]))

    def list_requests(self, count: int, leaves: int) -> Iterator[tuple[tuple[str, int, str], _NodeChoice]]:
        """Yield ((option, number, words), nodes). leaves: more than are asked for."""
        if self._shown is None:
            if (choice := self._choose_contiguous(count)) is not None:
                yield ("contiguous", 0, "nodes in a row"), choice
        elif self._shown.kind == "slurm_block":
            largest = int(np.bincount(self.group).max())
            sizes = [size for size in range(min(count, largest), 1, -1) if count % size == 0]
            for size in sizes[:_MAX_OPTIONS]:
                if (choice := self._choose_segments(count, size)) is not None:
                    yield ("segment", size, f"whole segments of {size} nodes in a block"), choice
        else:
            fewest = _count_fewest(np.bincount(self.group), count)
            for number in range(fewest, min(leaves, fewest + _MAX_OPTIONS)):
                if (choice := self._choose_leaves(count, number)) is not None:
                    what = "1 leaf switch" if number == 1 else f"at most {number} leaf switches"
                    yield ("switches", number, what), choice

    @property
    def _free(self) -> tuple[Floats, Floats]:
        return self._available.expected, self._available.latest

    def _choose_leaves(self, count: int, most: int) -> _NodeChoice | None:
        """Choose `count` nodes on at most `most` leaves, as early as possible."""

        def choose(free: NDArray[np.int64]) -> list[int]:
            sizes = np.bincount(self.group[free], minlength=self.group.max() + 1)
            best = np.argsort(-sizes, kind="stable")[:most]
            return [] if sizes[best].sum() < count else _fill_leaves(free, self.group, count)

        return self._find_earliest(choose)

    def _choose_segments(self, count: int, size: int) -> _NodeChoice | None:
        def choose(free: NDArray[np.int64]) -> list[int]:
            blocks = _split_by_leaf(free, self.group)
            in_full_segments = [at for members in blocks for at in members[: len(members) // size * size]]
            return in_full_segments[:count] if len(in_full_segments) >= count else []

        return self._find_earliest(choose)

    def _choose_contiguous(self, count: int) -> _NodeChoice | None:
        def choose(free: NDArray[np.int64]) -> list[int]:
            rows = (free[at : at + count] for at in range(len(free) - count + 1))
            return next((row.tolist() for row in rows if row[-1] - row[0] == count - 1), [])

        return self._find_earliest(choose)

    def _find_earliest(self, choose: _Choose) -> _NodeChoice | None:
        """Return the nodes that are expected to be free first, and how long that takes by either estimate."""
        earliest = [_find_first(free, choose) for free in self._free]
        if earliest[0] is None or earliest[1] is None:
            return None
        return _NodeChoice(tuple(earliest[0][1]), (earliest[0][0], earliest[1][0]))

    def cost(self, choice: _NodeChoice) -> Interval | None:
        """Return the seconds of communication of a step, from empty uplinks to busy ones.

        Uplinks of unknown taper count as whole; for launch.compact_nodes=ask, the second number has them tapered. None
        if only the model itself knows its shape.
        """
        if isinstance(self.config.model, (CustomModelConfig, HfModelConfig)):
            return None
        from hpc_train.placement.cost.cost_model import build_cost_model
        from hpc_train.placement.node_locations import JobHost, locate_hosts
        from hpc_train.placement.search import make_placement_job, place_nodes

        names = order_nodes(self._available.nodes, choice.nodes)[: self._nodes]
        where = locate_hosts(self.config.cluster, [JobHost(name) for name in names], True, lambda: self._shown)
        job = make_placement_job(self.config, where, self.config.cluster.ranks_per_node)
        order = range(len(names)) if self.config.launch.placement == "launcher" else place_nodes(job).nodes
        # What auto decides on its own rests on known figures: an assumed taper would make jobs wait for nothing.
        worst = job.tapered if job.tapered is not None and self.config.launch.compact_nodes == "ask" else job.fabric
        sums = [
            build_cost_model(fabric, job.sizes, job.flows, len(names), job.backend).compute_sums(
                np.array([list(order)])
            )
            for fabric in (job.fabric, worst)
        ]
        return Interval(float(sums[0].seconds[0]), float(sums[1].busy_seconds[0]))

    def save(self, before: Interval, after: Interval) -> Interval:
        """Return the seconds that a job saves if its steps communicate as fast as `after`, in place of `before`.

        At least the share of communication that no computation hides gets shorter; at most all of it does.
        """
        step, exposed = self._step or (0.0, 0.0)
        share = min(1.0, exposed / after.low) if after.low else 0.0
        least, most = share * max(0.0, before.low - after.low), max(0.0, before.high - after.high)
        limit = 60.0 * self.config.launch.time_minutes
        low = least / (step + least) if least else 0.0
        high = most / (max(step, after.high) + most) if most else 0.0
        return Interval(limit * min(low, high), limit * high)


def _find_first(free_in: Floats, choose: _Choose) -> tuple[float, list[int]] | None:
    """Return (seconds, nodes) of the first moment at which the free nodes suffice; None if they never do."""
    moments = np.unique(free_in)
    low, high = 0, len(moments)
    # More nodes are free at each later moment, so the first good one is found by halving.
    while low < high:
        middle = (low + high) // 2
        if choose(np.flatnonzero(free_in <= moments[middle])):
            high = middle
        else:
            low = middle + 1
    if low == len(moments):
        return None
    return float(moments[low]), choose(np.flatnonzero(free_in <= moments[low]))


def _split_by_leaf(nodes: NDArray[np.int64], group: NDArray[np.int64]) -> list[list[int]]:
    """Return the nodes of each leaf, the leaf with most nodes first."""
    leaves: dict[int, list[int]] = {}
    for at in nodes.tolist():
        leaves.setdefault(int(group[at]), []).append(at)
    return sorted(leaves.values(), key=len, reverse=True)


def _fill_leaves(free: NDArray[np.int64], group: NDArray[np.int64], count: int) -> list[int]:
    """Choose `count` free nodes on the fewest leaves: the smallest leaf that holds them all, else the fullest first."""
    leaves = _split_by_leaf(free, group)
    holding = [members for members in leaves if len(members) >= count]
    return (holding[-1] if holding else [at for members in leaves for at in members])[:count]


def _count_fewest(sizes: NDArray[np.int64], count: int) -> int:
    """Return the fewest leaves of these sizes that hold `count` nodes."""
    return int(np.searchsorted(np.cumsum(np.sort(sizes)[::-1]), count)) + 1


def _list_leaves(shown: Cluster | None) -> list[tuple[str, ...]]:
    return [switch.nodes for switch in shown.switches if switch.level == 0] if shown is not None else []


def _estimate_step(config: RunConfig, nodes: int) -> tuple[float, float] | None:
    """Return (seconds of a step, seconds of it that wait for communication); None without figures of the machine."""
    from hpc_train.planner.constants import cluster_constants
    from hpc_train.planner.model.from_config import jobs_from_config
    from hpc_train.planner.model.step_time import estimate_step_time
    from hpc_train.planner.plan import known_figures

    if isinstance(config.model, (CustomModelConfig, HfModelConfig)) or not known_figures(config).speed:
        return None
    jobs = jobs_from_config(config, nodes * config.cluster.ranks_per_node)
    time = estimate_step_time(jobs, cluster_constants(config.cluster))
    parts = (time.tensor, time.context, time.experts, time.data, time.pipeline)
    return float(np.ravel(time.step)[0]), float(sum(np.ravel(part)[0] for part in parts))
