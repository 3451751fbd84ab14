"""Find nodes that are slower than the others, before a run starts on them.

Every rank computes a matrix product, then exchanges data with a rank of another node, twice:

1. Nodes in their order, in pairs. A pair is slow if one of its nodes is, or its link.
2. The slowest nodes with the fastest ones. A good node that had a bad partner is fast now; a bad node is slow again.
   So the better of its two results counts for a node.

A node is named only if its figure stands out among all nodes, or from an earlier attempt of the run, in two
measurements in a row, because other processes on a node come and go. With only two nodes, nothing tells which one is
the slow end of the link; then the pair is named instead of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hpc_train.messages import Codec, all_gather_values
from hpc_train.regular_files import read_json
from hpc_train.timing import time_calls

OUTLIER_SCORE = 3.5
"""Threshold of the modified z-score beyond which a value is an outlier (Iglewicz and Hoaglin 1993, section 3.3)."""
MIN_EXCESS = 0.5
"""Share of the median below which a slower node is left alone, however steady the others are."""
_EXCHANGE = "exchange with other nodes"


@dataclass(frozen=True)
class ProbeSizes:
    """How much a pre-flight measures."""

    matrix: int
    """Rows and columns of the matrices that are multiplied."""
    exchanged: int
    """Bytes that a rank sends to its partner, and receives from it, in each repetition."""
    copied: int
    """Bytes of a copy in the device's memory; 0: no copy."""
    repeats: int
    seconds: float
    """How long products, and copies, are repeated at least."""


SIZES = {
    ("quick", "cpu"): ProbeSizes(512, 1 << 22, 0, 5, 0.25),
    ("quick", "cuda"): ProbeSizes(8192, 1 << 27, 0, 5, 0.1),
    ("full", "cpu"): ProbeSizes(1024, 1 << 24, 1 << 27, 15, 1.0),
    ("full", "cuda"): ProbeSizes(16384, 1 << 29, 1 << 31, 15, 0.5),
}
"""By resilience.preflight and the kind of device. On an H100, "quick" takes well below a second."""


class RankPlace(Protocol):
    """Place of a rank in the job; a World has these fields."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def node(self) -> int:
        """Index among the nodes of the job."""
        ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class NodeFigures:
    """Seconds that one node took for one repetition; the slowest of its ranks counts."""

    host: str
    product: float
    copy: float = 0.0
    """0 where no copy was made."""
    exchange: float = 0.0
    """The better of both rounds; 0 in a job of one node."""
    partners: tuple[str, ...] = ()
    """Hosts that it exchanged data with."""


@dataclass(frozen=True)
class SlowNode:
    """A node that every step of the run would wait for."""

    host: str
    what: str
    """Measurement that is slow: matrix product, memory copy, exchange with other nodes."""
    seconds: float
    usual: float
    """Seconds on most nodes, or at an earlier attempt."""
    blamed: bool = True
    """False: either this node or its partner is slow."""

    def describe(self) -> str:
        """Return one line with the ratio."""
        ratio = self.seconds / self.usual
        usual = f"{ratio:.1f} x the usual {1e3 * self.usual:.3g} ms"
        return f"{self.host}: {self.what} takes {1e3 * self.seconds:.3g} ms, {usual}"


@dataclass(frozen=True)
class Preflight:
    """Result of a pre-flight, the same on every rank."""

    nodes: list[NodeFigures]
    slow: list[SlowNode] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the contents of preflight.json."""
        return {"nodes": [asdict(node) for node in self.nodes], "slow": [asdict(node) for node in self.slow]}


def run_preflight(place: RankPlace, host: str, sizes: ProbeSizes, earlier: Sequence[NodeFigures] = ()) -> Preflight:
    """Measure all nodes of the job, again if one stands out, and return those that stood out both times.

    host: name of this rank's node. earlier: figures of an earlier attempt of the run, of any nodes. A collective.
    """
    nodes = measure_nodes(place, host, sizes)
    slow = find_slow_nodes(nodes, earlier)
    if slow:
        nodes = measure_nodes(place, host, sizes)
        before = {(node.host, node.what) for node in slow}
        slow = [node for node in find_slow_nodes(nodes, earlier) if (node.host, node.what) in before]
    return Preflight(nodes, slow)


FILE = "preflight.json"
"""File in an attempt's log directory."""


def check_nodes(kind: str, place: RankPlace, host: str, logs: Path) -> Preflight:
    """Measure the job's nodes before its first step; the caller writes the result to FILE. A collective.

    kind: resilience.preflight, "quick" or "full". logs: log directory of the attempt; figures of earlier attempts of
    the run beside it are compared with.
    """
    sizes = SIZES[kind, place.device.type]
    earlier = _gather(read_earlier_figures(logs) if place.rank == 0 else [])[0]
    return run_preflight(place, host, sizes, earlier)


def read_earlier_figures(logs: Path) -> list[NodeFigures]:
    """Return the figures that the latest earlier attempt of the run measured; [] if there is none."""
    numbers = sorted((int(path.name) for path in logs.parent.glob("*/") if path.name.isdecimal()), reverse=True)
    for number in numbers:
        if number < int(logs.name):
            with suppress(OSError, ValueError, KeyError, TypeError):
                nodes = read_json(logs.parent / str(number) / FILE)["nodes"]
                return [NodeFigures(**{**node, "partners": tuple(node["partners"])}) for node in nodes]
    return []


# --- measure


def measure_nodes(place: RankPlace, host: str, sizes: ProbeSizes) -> list[NodeFigures]:
    """Measure every node once. A collective."""
    ranks: list[_RankFigures] = _gather(_RankFigures(place.node, place.local_rank, host, *_measure_alone(place, sizes)))
    members: dict[int, list[int]] = {}
    for rank, of_rank in sorted(enumerate(ranks), key=lambda pair: (pair[1].node, pair[1].local)):
        members.setdefault(of_rank.node, []).append(rank)
    nodes = sorted(members)
    exchange, partners = dict.fromkeys(nodes, 0.0), dict[int, set[int]]()
    if len(nodes) > 1:
        first = pair_neighbours(nodes)
        exchange = _exchange_in_pairs(place, first, members, sizes)
        second = pair_slow_with_fast(exchange, first)
        again = _exchange_in_pairs(place, second, members, sizes)
        # A good node was slow only beside a bad partner: its second partner shows that.
        exchange = {node: min(exchange[node], again[node]) for node in nodes}
        for one, other in [*first, *second]:
            partners.setdefault(one, set()).add(other)
            partners.setdefault(other, set()).add(one)
    hosts = {of_rank.node: of_rank.host for of_rank in ranks}
    return [
        NodeFigures(
            hosts[node],
            max(ranks[rank].product for rank in members[node]),
            max(ranks[rank].copy for rank in members[node]),
            exchange[node],
            tuple(hosts[partner] for partner in sorted(partners.get(node, ()))),
        )
        for node in nodes
    ]


@dataclass(frozen=True)
class _RankFigures:
    node: int
    local: int
    host: str
    product: float
    copy: float


def _gather(value: Any) -> list[Any]:
    return all_gather_values(value, codec=Codec((_RankFigures, NodeFigures)))


def _measure_alone(place: RankPlace, sizes: ProbeSizes) -> tuple[float, float]:
    """Return mean seconds of a matrix product and of a copy, while all ranks do the same."""
    dtype = torch.bfloat16 if place.device.type == "cuda" else torch.float32
    a, b = (torch.ones(sizes.matrix, sizes.matrix, dtype=dtype, device=place.device) for _ in range(2))
    dist.barrier()
    product = _mean_seconds(lambda: torch.mm(a, b), sizes, place.device)
    if not sizes.copied:
        return product, 0.0
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return product, _mean_seconds(lambda: target.copy_(source), sizes, place.device)


def _mean_seconds(work: Callable[[], object], sizes: ProbeSizes, device: torch.device) -> float:
    """Return the mean of as many calls as fit into sizes.seconds.

    It is the mean, not the median, because a rank that shares its core runs undisturbed for a time slice and then not
    at all.
    """
    work()
    seconds: list[float] = []
    while len(seconds) < sizes.repeats or sum(seconds) < sizes.seconds:
        seconds.append(time_calls(work, 1, device))
    return fmean(seconds)


def _median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    work()
    return median(time_calls(work, 1, device) for _ in range(repeats))


Pairs = list[tuple[int, int]]
"""Nodes that exchange data with each other. Where the number of nodes is odd, one of them is in two pairs."""


def pair_neighbours(nodes: Sequence[int]) -> Pairs:
    """Pair nodes in their order; the last goes with the first if their number is odd."""
    pairs = list(zip(nodes[0::2], nodes[1::2], strict=False))
    return [*pairs, (nodes[-1], nodes[0])] if len(nodes) % 2 else pairs


def pair_slow_with_fast(seconds: dict[int, float], before: Pairs) -> Pairs:
    """Pair the slowest node with the fastest, the second slowest with the second fastest, and so on.

    seconds: by node, from the first round. before: its pairs, of which none comes again where there are four nodes or
    more. If the number of nodes is odd, the middle one goes with the fastest.
    """
    order = sorted(seconds, key=lambda node: (-seconds[node], node))
    half = len(order) // 2
    slow, fast = order[:half], order[::-1][:half]
    met = {frozenset(pair) for pair in before}
    pairs: Pairs = []
    left = list(fast)
    for node in slow:
        partner = next((other for other in left if frozenset((node, other)) not in met), left[0])
        left.remove(partner)
        pairs.append((node, partner))
    if len(pairs) > 1 and frozenset(pairs[-1]) in met:  # the last had no choice: it takes the partner of another
        (one, other), (last, again) = pairs[-2:]
        pairs[-2:] = [(one, again), (last, other)]
    return [*pairs, (order[half], fast[0])] if len(order) % 2 else pairs


def _exchange_in_pairs(
    place: RankPlace, pairs: Pairs, members: dict[int, list[int]], sizes: ProbeSizes
) -> dict[int, float]:
    """Exchange data within every pair at the same time; returns seconds a repetition, by node.

    Rank i of a node exchanges with rank i of the other. A node in two pairs has its second exchange afterwards; the
    better one counts.
    """
    sent = torch.zeros(sizes.exchanged, dtype=torch.uint8, device=place.device)
    received = torch.empty_like(sent)
    best: dict[int, float] = {}
    for disjoint in _split_into_disjoint(pairs):
        partner = _find_partner(place, disjoint, members)
        dist.barrier()
        seconds = 0.0
        if partner is not None:
            seconds = _median_seconds(partial(_exchange, sent, received, partner), sizes.repeats, place.device)
        slowest: dict[int, float] = {}
        for node, took in _gather((place.node, seconds)):
            slowest[node] = max(slowest.get(node, 0.0), took)
        for pair in disjoint:
            took = max(slowest[node] for node in pair)
            best |= {node: min(best.get(node, took), took) for node in pair}
    return best


def _split_into_disjoint(pairs: Pairs) -> list[Pairs]:
    """Split into two lists, where a node is in two pairs: that of the last pair comes afterwards."""
    nodes = [node for pair in pairs for node in pair]
    return [pairs] if len(nodes) == len(set(nodes)) else [pairs[:-1], pairs[-1:]]


def _find_partner(place: RankPlace, pairs: Pairs, members: dict[int, list[int]]) -> int | None:
    """Return the rank to exchange data with; None for a rank without one, if nodes have unequal numbers."""
    pair = next((pair for pair in pairs if place.node in pair), None)
    if pair is None:
        return None
    other = members[pair[1] if pair[0] == place.node else pair[0]]
    index = members[place.node].index(place.rank)
    return other[index] if index < len(other) else None


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    # Both directions in one batch: two ranks that each send first would wait for one another.
    operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# --- judge


def find_slow_nodes(nodes: Sequence[NodeFigures], earlier: Sequence[NodeFigures] = ()) -> list[SlowNode]:
    """Return the nodes that stand out, each with what is slow. earlier: see run_preflight."""
    slow = [
        *_find_slow("matrix product", nodes, [node.product for node in nodes], [node.product for node in earlier]),
        *_find_slow("memory copy", nodes, [node.copy for node in nodes], [node.copy for node in earlier]),
    ]
    # A node that computes slowly is slow in an exchange too: it is named once.
    named = {node.host for node in slow}
    exchange = [node.exchange for node in nodes]
    links = _find_slow(_EXCHANGE, nodes, exchange, [node.exchange for node in earlier])
    if len(nodes) < 3:
        links = [] if named else [replace(node, blamed=False) for node in links]
    return [*slow, *(node for node in links if node.host not in named)]


def _find_slow(
    what: str, nodes: Sequence[NodeFigures], seconds: Sequence[float], earlier: Sequence[float]
) -> list[SlowNode]:
    if not any(seconds):
        return []
    usual = median(seconds)
    outliers = set(find_outliers(seconds, MIN_EXCESS))
    past = [value for value in earlier if value > 0]
    if past and median(past) * (1 + MIN_EXCESS) < max(seconds):
        # All nodes may have become slow together, as after a change of a driver: then only the past shows it.
        usual = min(usual, median(past))
        outliers |= {index for index, value in enumerate(seconds) if value > median(past) * (1 + MIN_EXCESS)}
    return [SlowNode(nodes[index].host, what, seconds[index], usual) for index in sorted(outliers)]


def find_outliers(seconds: Sequence[float], min_excess: float) -> list[int]:
    """Return the indices of slow outliers: 0.6745 (x - median) / MAD > 3.5, and `min_excess` above the median.

    min_excess: a share of the median. MAD is the median absolute deviation. Two values have no outlier.
    """
    # 0.6745 is the MAD of a standard normal variable: the score counts standard deviations (Iglewicz and Hoaglin 1993).
    # If two nodes differ, either of them may be the odd one.
    if len(seconds) < 3:
        return []
    middle = median(seconds)
    spread = median(abs(value - middle) for value in seconds)
    return [
        index
        for index, value in enumerate(seconds)
        if value > middle * (1 + min_excess) and 0.6745 * (value - middle) > OUTLIER_SCORE * spread
    ]
