"""Which GPU a local rank takes: against brute force written down plainly, and on the nodes that are known."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest

from hpc_train.cli.main import main
from hpc_train.cluster.spec import Link
from hpc_train.config.compose import compose
from hpc_train.placement.node.gpu_links import (
    NVLINK_BANDWIDTH,
    PCIE_BANDWIDTH,
    GpuLinks,
    build_described_links,
    build_listed_links,
)
from hpc_train.placement.node.gpu_order import MIN_GAIN, order_gpus
from hpc_train.traffic.axes import Flow

GB = 1e9
RING = ("all_gather", "all_reduce", "reduce_scatter")


def group_seconds(links: GpuLinks, flow: Flow, gpus: list[int], whole: bool) -> float:
    """One call of a flow in a group on `gpus`, by loops over sets and pairs and nothing of the module under test."""

    def rate(a: int, b: int) -> float:
        return links.direct[a, b] or links.port * links.share[a, b]

    n = len(gpus)
    if flow.collective == "send_recv":
        edges = list(itertools.pairwise(gpus)) + ([(gpus[-1], gpus[0])] if flow.ring and whole else [])
        return max(flow.bytes / rate(a, b) for a, b in edges)
    if flow.collective == "all_to_all":
        worst = 0.0
        for a in gpus:
            port = 0.0
            for b in gpus:
                if a != b and links.direct[a, b]:
                    worst = max(worst, flow.bytes / n / links.direct[a, b])
                elif a != b:
                    port += flow.bytes / n / (links.port * links.share[a, b])
            worst = max(worst, port)
        return worst
    worst = 0.0
    for chosen in itertools.product((False, True), repeat=n):
        inside = [gpu for gpu, is_in in zip(gpus, chosen, strict=True) if is_in]
        outside = [gpu for gpu in gpus if gpu not in inside]
        if inside and outside:
            direct = sum(links.direct[a, b] for a in inside for b in outside)
            share = {(a, b): 0.0 if links.direct[a, b] else links.share[a, b] for a in inside for b in outside}
            into = sum(max(share[a, b] for b in outside) for a in inside)
            out = sum(max(share[a, b] for a in inside) for b in outside)
            bytes_in = len(outside) / n * flow.bytes * (2 if flow.collective == "all_reduce" else 1)
            worst = max(worst, bytes_in / (direct + links.port * min(into, out)))
    return worst


def step_seconds(links: GpuLinks, sizes: dict[str, int], flows: list[Flow], order: tuple[int, ...]) -> float:
    """tp innermost, then dp_shard; one node."""
    tp, total = sizes["tp"], 0.0
    for flow in flows:
        if flow.axes == ("tp",):
            groups = [list(range(start, start + tp)) for start in range(0, len(order), tp)]
        else:
            groups = [list(range(start, len(order), tp)) for start in range(tp)]
        if len(groups[0]) > 1:
            total += flow.calls * max(
                group_seconds(links, flow, [order[rank] for rank in group], True) for group in groups
            )
    return total


def random_links(draw: random.Random, gpus: int) -> GpuLinks:
    direct = np.zeros((gpus, gpus))
    share = np.ones((gpus, gpus))
    for a, b in itertools.combinations(range(gpus), 2):
        direct[a, b] = direct[b, a] = draw.choice([0, 0, 25, 50, 200]) * GB
        share[a, b] = share[b, a] = draw.choice([1.0, 1.0, 0.5])
    return GpuLinks(direct, 25 * GB, share)


def draw_flows(draw: random.Random) -> list[Flow]:
    collectives = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "send_recv")
    return [
        Flow(
            axes, draw.choice(collectives), draw.choice([1, 5, 40]) * 1e6, draw.choice([1, 3]), "x", draw.random() < 0.5
        )  # type: ignore[arg-type]
        for axes in draw.choice([[("tp",)], [("dp_shard",)], [("tp",), ("dp_shard",)]])
    ]


@pytest.mark.parametrize("seed", range(24))
def test_no_order_is_better_than_the_chosen_one(seed: int) -> None:
    draw = random.Random(seed)
    gpus = draw.choice([2, 4, 4, 6])
    tp = draw.choice([size for size in (1, 2, 3, 4, 6) if gpus % size == 0])
    links, flows, sizes = random_links(draw, gpus), draw_flows(draw), {"tp": tp, "dp_shard": gpus // tp}
    found = order_gpus(links, sizes, flows)
    assert sorted(found.gpus) == list(range(gpus))
    every = {order: step_seconds(links, sizes, flows, order) for order in itertools.permutations(range(gpus))}
    identity, best = every[tuple(range(gpus))], min(every.values())
    if links.is_uniform:
        assert found.is_identity
    elif best < identity * (1 - MIN_GAIN):
        assert every[found.gpus] == pytest.approx(best)
        assert (found.identity, found.placed) == (pytest.approx(identity), pytest.approx(best))
        equal = [order for order, seconds in every.items() if seconds <= best * (1 + 1e-9)]
        moved = {order: sum(gpu != rank for rank, gpu in enumerate(order)) for order in equal}
        assert moved[found.gpus] == min(moved.values())
    else:
        assert found.is_identity
        assert found.identity == pytest.approx(identity)


TP2 = {"tp": 2, "dp_shard": 2}
TP_FLOWS = [Flow(("tp",), "all_reduce", 1e9, 10, "activations"), Flow(("dp_shard",), "all_gather", 1e9, 1, "weights")]


def test_bridges_between_other_cards_than_neighbours() -> None:
    """Bridges join 0 and 2, and 1 and 3, as in servers that number cards by socket."""
    links = build_listed_links(
        [f"GPU{n}" for n in range(4)],
        [
            Link("n", "GPU0", "GPU2", "NV12"),
            Link("n", "GPU1", "GPU3", "NV12"),
            *(Link("n", f"GPU{a}", f"GPU{b}", "SYS") for a, b in ((0, 1), (0, 3), (1, 2), (2, 3))),
        ],
    )
    assert links.direct[0, 2] == 12 * NVLINK_BANDWIDTH
    assert links.share[0, 1] == 0.5
    found = order_gpus(links, TP2, TP_FLOWS)
    assert {frozenset(found.gpus[:2]), frozenset(found.gpus[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert found.placed < found.identity / 5
    assert "x faster" in found.reason


@pytest.mark.parametrize("name", ["mi250x", "h100_nvl"])
def test_described_pairs_are_already_neighbours(name: str) -> None:
    """Halves of a module and bridged cards are 0 and 1, 2 and 3, ...: the launcher's order is best for tp of 2."""
    node = compose([f"cluster={name}"]).cluster.node
    links = build_described_links(node)
    assert links is not None
    sizes = {"tp": 2, "dp_shard": node.gpus // 2}
    assert order_gpus(links, sizes, TP_FLOWS).is_identity


def test_a_hybrid_cube_mesh() -> None:
    """V100s of a DGX-1: two NVLinks to some peers, one to others; the groups of four that are fully joined win."""
    doubles = {(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)}
    singles = {(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)}
    kinds = {
        (f"GPU{a}", f"GPU{b}"): "NV2" if (a, b) in doubles else "NV1" if (a, b) in singles else "SYS"
        for a, b in itertools.combinations(range(8), 2)
    }
    links = build_listed_links([f"GPU{n}" for n in range(8)], kinds)
    found = order_gpus(links, {"tp": 2, "dp_shard": 4}, TP_FLOWS)
    pairs = [tuple(sorted(found.gpus[start : start + 2])) for start in range(0, 8, 2)]
    assert set(pairs) <= doubles, "each pair of tp has two links"
    assert found.identity / found.placed > 1.3


@pytest.mark.parametrize("kind", ["NV18", "PIX", "XGMI"])
def test_where_all_are_joined_alike_nothing_moves(kind: str) -> None:
    gpus = [f"GPU{n}" for n in range(8)]
    links = build_listed_links(gpus, [Link("n", a, b, kind) for a, b in itertools.combinations(gpus, 2)])
    assert order_gpus(links, {"tp": 8}, [Flow(("tp",), "all_reduce", 1e9, 1, "x")]).is_identity
    assert build_described_links(compose(["cluster=mi300x"]).cluster.node) is None


def test_a_group_that_reaches_into_other_nodes_counts_with_its_part() -> None:
    """dp_shard over two nodes of four GPUs: each node's part of it is all four."""
    gpus = [f"GPU{n}" for n in range(4)]
    links = build_listed_links(gpus, {("GPU0", "GPU3"): "NV4"})
    assert links.port == PCIE_BANDWIDTH
    found = order_gpus(links, {"pp": 4, "dp_shard": 2}, [Flow(("pp",), "send_recv", 1e9, 1, "activations", False)])
    assert sorted(found.gpus) == [0, 1, 2, 3]
    pair = order_gpus(links, {"dp_shard": 4, "tp": 2}, [Flow(("tp",), "all_reduce", 1e9, 1, "x")])
    assert pair.is_identity, "one pair of tp has the bridge, the other is as slow as before"


def test_the_preview_names_the_gpus_of_described_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    four = ["cluster.nodes=1", "cluster.node.gpus=4", "cluster.node.gpu_link=pcie", "cluster.node.gpu_link_gb_s=31.5"]
    run = ["cluster=slurm", *four, "parallel.tp=2", "model=llama_1b", "train.global_batch=256"]
    for pairs, expected in (("{0-2: 300, 1-3: 300}", [0, 2, 1, 3]), ("{0-1: 300, 2-3: 300}", [0, 1, 2, 3])):
        assert main(["topology", "place", *run, f"+cluster.node.gpu_pairs_gb_s={pairs}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["gpus"] == expected
        assert any("local ranks take GPUs 0, 2, 1, 3" in note for note in found["notes"]) == (expected[1] == 2)
