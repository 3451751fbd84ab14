"""The jobs of the cost study: 16,384 and 98,304 GPUs of a tapered Clos fabric, and racks of 72 GPUs with trays missing.

`python tests/placement/placement_study.py` prints the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from placement_fabrics import GB, reordered, tree_fabric

from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.fabric import Fabric, FabricLevel
from hpc_train.placement.node_orders import order_along_tree
from hpc_train.placement.placement_result import Placement
from hpc_train.placement.search import search_placement
from hpc_train.traffic.axes import Flow

Places = NDArray[np.int64]
"""[nodes, 2]: leaf (or rack) and group (or 0) of every node, in the order of the tree."""

MESH = {"pp": 16, "dp_shard": 128, "tp": 8}
FLOWS = [
    Flow(("pp",), "send_recv", 0.5 * GB, 1, "activations", ring=False),
    Flow(("dp_shard",), "all_reduce", 6.3 * GB, 1, "gradients"),
    Flow(("tp",), "all_reduce", 20 * GB, 1, "activations"),
]
LARGE_MESH = {"pp": 16, "dp_shard": 96, "cp": 8, "tp": 8}
LARGE_FLOWS = [*FLOWS, Flow(("cp",), "all_to_all", 8 * GB, 1, "tokens")]


@dataclass(frozen=True)
class Row:
    """The communication of a step in three orders, as multiples of the placed one."""

    oversubscription: float
    random: float
    tree: float
    placement: Placement
    """From the random order."""


def allocation(seed: int, pods: int, leaves: int, nodes: int, need: int, busy: float) -> Places:
    """Return the first `need` free nodes of pods x leaves x nodes, of which a share is busy."""
    everything = np.array(
        [(pod * leaves + leaf, pod) for pod in range(pods) for leaf in range(leaves) for _ in range(nodes)]
    )
    random = np.random.default_rng(seed)
    free = np.sort(random.choice(len(everything), int(len(everything) * (1 - busy)), replace=False))
    return everything[free][:need]


def clos(places: Places, oversubscription: float, inside: float = math.inf) -> Fabric:
    """Return a Clos fabric with eight NICs of 50 GB/s per node; leaves 1:1, pods as given."""
    taper = (1.0, oversubscription)
    return tree_fabric([tuple(place) for place in places.tolist()], 8, 8 * 50 * GB, taper, inside=inside)


def study(inside: float = math.inf, oversubscriptions: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0, 7.0)) -> list[Row]:
    """Compare 16,384 GPUs: nodes listed in a random order (mean of three), along the tree, and placed."""
    places, random, rows = allocation(3, 8, 16, 24, 2048, 0.05), np.random.default_rng(5), []
    for over in oversubscriptions:
        fabric = clos(places, over, inside)
        shuffled = [random.permutation(len(places)).tolist() for _ in range(3)]
        best = search_placement(reordered(fabric, shuffled[0]), MESH, FLOWS)
        mean = np.mean([estimate_cost(fabric, MESH, FLOWS, order).total for order in shuffled])
        tree = estimate_cost(fabric, MESH, FLOWS, order_along_tree(fabric).tolist()).total
        rows.append(Row(over, float(mean / best.placed.total), tree / best.placed.total, best))
    return rows


def racks(number: int) -> Fabric:
    """Study 0, 1 or 2: racks of one NVLink domain, each with some of its 18 trays of 4 GPUs; the job has the first
    so many trays.

    NVLink leaves a tray with 900 GB/s per GPU, and the trays' NICs leave a rack with 50 GB/s per GPU.
    """
    random = np.random.default_rng(11)
    drawn = [random.integers(fewest, 18 + 1, count) for count, fewest in ((18, 14), (36, 12), (72, 16))]
    trays, need = drawn[number], (256, 512, 1152)[number]
    rack = np.repeat(np.arange(len(trays)), trays)[:need]
    assert len(rack) == need
    node = FabricLevel("node", np.arange(need), np.full(need, 4 * 900 * GB), 0.0)
    domain = FabricLevel("domain", rack, np.bincount(rack) * 4 * 50 * GB, 0.0)
    return Fabric(tuple(f"tray{i}" for i in range(need)), 4, 900 * GB, 0.0, (node, domain))


def expert_mesh(world: int, experts: int) -> tuple[dict[str, int], list[Flow]]:
    """Return a mesh with pp 4, data, and experts over the inner axis."""
    flows = [
        Flow(("pp",), "send_recv", 0.5 * GB, 1, "activations", ring=False),
        Flow(("dp_shard",), "all_reduce", 2 * GB, 1, "gradients"),
        Flow(("cp",), "all_to_all", 6 * GB, 1, "tokens"),
    ]
    return {"pp": 4, "dp_shard": world // 4 // experts, "cp": experts}, flows


def print_table() -> None:
    """Compute and print the numbers of the study."""
    for inside, what in ((math.inf, "between nodes only"), (450 * GB, "with 450 GB/s inside nodes")):
        print(f"16,384 GPUs, {what}\n  pods   random   tree   placed   search")
        for row in study(inside):
            placed = row.placement
            print(
                f"  1:{row.oversubscription:<4g} {row.random:5.2f}x {row.tree:6.2f}x {placed.placed.total:7.3f} s"
                f" {placed.seconds:6.3f} s  {placed.reason}"
            )
    large = clos(allocation(3, 32, 16, 32, 12288, 0.1), 2.0)
    found = search_placement(
        reordered(large, np.random.default_rng(5).permutation(12288).tolist()), LARGE_MESH, LARGE_FLOWS
    )
    print(f"98,304 GPUs, 1:2: {found.reason}; search {found.seconds:.3f} s")
    fabric = racks(2)
    sizes, flows = expert_mesh(4608, 32)
    print(f"4,608 GPUs in racks of 16 to 18 trays: {search_placement(fabric, sizes, flows).reason}")


if __name__ == "__main__":
    print_table()
