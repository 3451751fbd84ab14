"""Compare placement's promised gains on a fabric with cables with link loads added up cable by cable.

The fabric is written as ibnetdiscover writes it and read back, so the whole way from cables to a rank map is checked.
The check knows nothing of placement's model: it sends every message over the cables, spread evenly, and takes the
busiest one.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from fake_fabric import FakeFabric

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.traffic.flows import compute_flows

NIC = 200e9 / 8
"""Bytes/s of a node's only NIC; cables between switches are as fast."""
RUN = (
    "cluster=slurm",
    "cluster.node.ranks=1",
    "cluster.node.nics=1",
    "cluster.node.nic_gbit_s=200",
    "model=llama_1b",
    "parallel=fsdp",
    "train.global_batch=96",
)


@dataclass(frozen=True)
class Leaves:
    """Hosts of every leaf, and its cables to the single spine."""

    hosts: tuple[int, ...]
    cables: tuple[int, ...]

    def dump(self) -> str:
        fabric = FakeFabric()
        spine = fabric.switch("MF0;spine:X/U1", ports=255)
        for number, (hosts, cables) in enumerate(zip(self.hosts, self.cables, strict=True)):
            leaf = fabric.switch(f"MF0;leaf{number}:X/U1", ports=255)
            for _ in range(cables):
                fabric.cable(leaf, spine)
            for host in range(hosts):
                fabric.cable(leaf, fabric.adapter(f"n{number}-{host} mlx5_0"))
        return fabric.dump()

    def leaf_of(self, name: str) -> int:
        return int(name[1:].partition("-")[0])


class Step:
    """Messages of one step of a run; one rank per node."""

    def __init__(self, nodes: int, *overrides: str) -> None:
        config = compose([*RUN, *overrides])
        sizes = asdict(resolve_degrees(config.parallel, nodes))
        self.flows = [(flow, _groups(sizes, flow.axes)) for flow in compute_flows(config, nodes)]

    def seconds(self, leaves: Leaves, order: Sequence[str]) -> float:
        """Return the seconds of the step's rings, flow by flow: the busiest cable decides."""
        total = 0.0
        for flow, groups in self.flows:
            load: dict[Any, float] = defaultdict(float)
            for group in groups:
                share = flow.bytes * (len(group) - 1) / len(group) * (2 if flow.collective == "all_reduce" else 1)
                for a, b in zip(group, (*group[1:], group[0]), strict=True) if len(group) > 1 else ():
                    source, target = leaves.leaf_of(order[a]), leaves.leaf_of(order[b])
                    load["out", order[a]] += share
                    load["in", order[b]] += share
                    if source != target:
                        load["up", source] += share / leaves.cables[source]
                        load["down", target] += share / leaves.cables[target]
            total += flow.calls * max(load.values(), default=0.0) / NIC
        return total


def _groups(sizes: dict[str, int], axes: Sequence[str]) -> list[list[int]]:
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, at in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
        where = dict(zip(sizes, at, strict=True))
        members[tuple(index for axis, index in where.items() if axis not in axes)].append(rank)
    return list(members.values())


def placed(capsys: pytest.CaptureFixture[str], file: Path, nodes: Sequence[str], *overrides: str) -> dict[str, Any]:
    words = ["topology", "place", *RUN, *overrides, f"cluster.topology={file}", "--nodes", ",".join(nodes), "--json"]
    assert main(words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


HSDP = ("parallel.dp_replicate=3", "parallel.dp_shard=4")


def test_a_node_alone_on_its_leaf_does_not_switch_placement_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node alone on its leaf does not disable placement: the uplinks are the switches', not the job's.

    Twelve nodes are dealt over three leaves of 16 hosts and 4 cables, then the same with four more, each alone on a
    leaf.
    """
    leaves = Leaves((16,) * 7, (4,) * 7)
    file = tmp_path / "fabric"
    file.write_text(leaves.dump())
    dealt = [f"n{number % 3}-{number // 3}" for number in range(12)]
    lone = [f"n{leaf}-0" for leaf in range(3, 7)]
    for nodes, degrees in ((dealt, HSDP), ([*dealt, *lone], ("parallel.dp_replicate=4", "parallel.dp_shard=4"))):
        found = placed(capsys, file, nodes, *degrees)
        step = Step(len(nodes), *degrees)
        real = [step.seconds(leaves, order) for order in (nodes, found["nodes"])]
        assert real[1] <= real[0] * (1 + 1e-9)
        assert found["cost"]["placed"] / found["cost"]["identity"] == pytest.approx(real[1] / real[0], rel=0.04)
        assert found["straddling"]["dp_shard"]["leaf"]["placed"] < found["straddling"]["dp_shard"]["leaf"]["identity"]


@pytest.mark.parametrize("sizes", [(16, 4), (8, 2), (16, 2), (4, 1)], ids="{0[0]} hosts, {0[1]} cables".format)
def test_a_ring_through_a_node_alone_on_its_leaf_enters_each_leaf_once(
    sizes: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve nodes dealt over three leaves, and one on a fourth, in one ring: the lone one's uplink is no excuse.

    With a quarter of its uplink it is as slow as three rings through the other leaves are, so that seconds alone would
    leave the launcher's order.
    """
    hosts, cables = sizes
    leaves = Leaves((hosts,) * 4, (cables,) * 4)
    file = tmp_path / "fabric"
    file.write_text(leaves.dump())
    dealt = [*(f"n{number % 3}-{number // 3}" for number in range(12)), "n3-0"]
    degrees = ("parallel.dp_shard=13", "train.global_batch=104")
    found = placed(capsys, file, dealt, *degrees)
    order = found["nodes"]
    ring = zip(order, (*order[1:], order[0]), strict=True)
    assert sum(leaves.leaf_of(a) != leaves.leaf_of(b) for a, b in ring) == 4
    step = Step(13, *degrees)
    real = [step.seconds(leaves, each) for each in (dealt, order)]
    assert real[1] == pytest.approx(step.seconds(leaves, sorted(dealt)), rel=1e-9)
    assert found["cost"]["placed"] / found["cost"]["identity"] == pytest.approx(real[1] / real[0], rel=0.06)
    assert ("fewer bytes cross its switches" in found["reason"]) == (real[1] == pytest.approx(real[0]))


@pytest.mark.parametrize("seed", range(6))
def test_promised_gains_are_those_of_the_cables_and_near_the_best(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs of eight nodes are spread over leaves with one to three cables; brute force tries all orders of leaves."""
    draw = random.Random(seed)
    leaves = Leaves(tuple(draw.choice((6, 8)) for _ in range(5)), tuple(draw.choice((1, 2, 3)) for _ in range(5)))
    file = tmp_path / "fabric"
    file.write_text(leaves.dump())
    nodes = draw.sample([f"n{leaf}-{host}" for leaf in range(3) for host in range(leaves.hosts[leaf])], 8)
    degrees = ("parallel.dp_replicate=2", "parallel.dp_shard=4")
    found = placed(capsys, file, nodes, *degrees)
    step = Step(len(nodes), *degrees)
    real = [step.seconds(leaves, order) for order in (nodes, found["nodes"])]
    assert found["cost"]["placed"] / found["cost"]["identity"] == pytest.approx(real[1] / real[0], rel=0.04)
    best = min(step.seconds(leaves, draw.sample(nodes, len(nodes))) for _ in range(500))
    assert real[1] <= best * 1.01


def test_both_bounds_of_the_neighbours_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four of a leaf's sixteen nodes do not fill its four cables alone, but do so next to the twelve others."""
    leaves = Leaves((16, 16), (4, 4))
    file = tmp_path / "fabric"
    file.write_text(leaves.dump())
    found = placed(
        capsys, file, [f"n{n % 2}-{n // 2}" for n in range(8)], "parallel.dp_replicate=2", "parallel.dp_shard=4"
    )
    none, share = found["cases"]
    assert (none["neighbours"], share["neighbours"]) == ("none", "fair_share")
    assert none["identity"] == pytest.approx(none["placed"], rel=0.01)
    assert share["identity"] > 2 * share["placed"]
    assert "if no other job uses the uplinks" in found["reason"]
    assert "fair share" in found["reason"]


def test_a_taper_that_the_cables_show_is_used_and_one_that_nobody_tells_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dealt = [f"n{n % 2}-{n // 2}" for n in range(16)]
    degrees = ("parallel.dp_shard=16",)
    (tmp_path / "cables").write_text(Leaves((8, 8), (2, 2)).dump())
    (tmp_path / "conf").write_text(
        "SwitchName=l0 Nodes=n0-[0-7]\nSwitchName=l1 Nodes=n1-[0-7]\nSwitchName=s Switches=l[0-1]\n"
    )
    cabled = placed(capsys, tmp_path / "cables", dealt, *degrees)
    assert cabled["cost"]["identity"] > 3 * cabled["cost"]["placed"]
    assert cabled["unknown_tapers"] == []
    unknown = placed(capsys, tmp_path / "conf", dealt, *degrees)
    assert unknown["unknown_tapers"] == ["leaf"]
    assert "give cluster.fabric.oversubscription=" in unknown["reason"]
    assert [name[:2] for name in unknown["nodes"]] in (["n0"] * 8 + ["n1"] * 8, ["n1"] * 8 + ["n0"] * 8)
    gains = {case["taper"]: case["identity"] / case["placed"] for case in unknown["cases"]}
    assert gains[1.0] == pytest.approx(1, rel=0.01)
    assert gains[2.0] > 1.5
    stated = placed(capsys, tmp_path / "conf", dealt, *degrees, "cluster.fabric.oversubscription=4")
    assert stated["cost"]["identity"] == pytest.approx(cabled["cost"]["identity"], rel=1e-9)
    contradicted = placed(capsys, tmp_path / "cables", dealt, *degrees, "cluster.fabric.oversubscription=1")
    assert contradicted["cost"] == cabled["cost"]
    assert any("4:1 by the cables" in note for note in contradicted["notes"])


def test_slower_links_by_slurms_link_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of three leaves has a quarter of the speed: traffic that must cross leaves goes over the fast ones."""
    text = "SwitchName=l0 Nodes=n0-[0-3] LinkSpeed={}\nSwitchName=l1 Nodes=n1-[0-3] LinkSpeed=100\n"
    nodes = [f"n{n % 2}-{n // 2}" for n in range(8)]
    costs = {}
    for speed in (100, 25):
        (tmp_path / "conf").write_text(text.format(speed) + "SwitchName=s Switches=l[0-1] LinkSpeed=400\n")
        found = placed(capsys, tmp_path / "conf", nodes, "parallel.dp_shard=8", "cluster.fabric.oversubscription=2")
        costs[speed] = found["cost"]["identity"]
        assert any("LinkSpeed" in note for note in found["notes"]) == (speed == 25)
    assert costs[25] == pytest.approx(4 * costs[100], rel=0.03)


def test_servers_for_storage_get_no_ranks_and_join_no_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = FakeFabric()
    spine = fabric.switch("MF0;spine:X/U1", ports=255)
    leaves = [fabric.switch(f"MF0;leaf{n}:X/U1", ports=255) for n in range(2)]
    for number, leaf in enumerate(leaves):
        for server in range(3):
            fabric.cable(leaf, fabric.adapter(f"stor{server} mlx5_{number}", system=0xC000 + server))
        for host in range(8):
            fabric.cable(leaf, fabric.adapter(f"n{number}-{host} mlx5_0"))
        for _ in range(2):
            fabric.cable(leaf, spine)
    file = tmp_path / "fabric"
    file.write_text(fabric.dump())
    words = ["topology", "place", *RUN, f"cluster.topology={file}"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any(name.startswith("stor") for name in found["nodes"])
    assert any("3 hosts get no ranks" in note and "--nodes" in note for note in found["notes"])
    dealt = placed(capsys, file, [f"n{n % 2}-{n // 2}" for n in range(16)], "parallel.dp_shard=16")
    assert dealt["cost"]["identity"] > 3 * dealt["cost"]["placed"], "the leaves are two"
    assert main([*words, "cluster.nodes=17"]) == 2
    assert "has 16 nodes, and the run needs 17; 3 hosts get no ranks" in capsys.readouterr().err
