"""`hpc-train bench placement`: measure and predict step times for several orders of a Slurm allocation's nodes.

The fabric is calibrated first. Then the same training runs as Slurm steps with the nodes ordered by leaf, dealt out
over the leaves, shuffled, and placed by hpc_train.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.bench.collectives.options import parse_size
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.allocation import find_allocation
from hpc_train.placement.cost.collective_phases import Backend
from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.fabric_from_config import build_located_fabric
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.traffic.flows import compute_flows, list_axis_sizes

_REFERENCE_ORDER = "by_leaf"
_WARM_UP_STEPS = 2
"""Steps at the start of a training that are not counted."""
SMALLEST_MESSAGE = 64 << 10
"""Bytes of the smallest message of the calibration: latency and bandwidth need two sizes."""
_ALLOCATION_VARIABLES = (
    "SLURM_DISTRIBUTION",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
"""Variables of the allocation that srun would take for its own options."""


@dataclass(frozen=True)
class NodeOrder:
    """An order of the nodes to measure."""

    name: str
    nodes: tuple[str, ...]
    """The nodes in the order in which the launcher starts ranks on them."""
    placement: str
    """launch.placement of its training."""
    what: str


@dataclass(frozen=True)
class OrderResult:
    """Measured and predicted times of one order of the nodes."""

    name: str
    what: str
    hosts: tuple[str, ...]
    """Hosts, in the order of the ranks."""
    seconds: float
    """Median over the rounds of the median step."""
    rounds: tuple[float, ...]
    communication: float
    """Modelled communication seconds of a step, without overlap."""
    predicted: float
    """Predicted seconds of a step: computation of the reference order plus communication of this order."""

    def error(self, reference: OrderResult) -> float:
        """Return the relative error of the predicted ratio to the reference order."""
        return (self.predicted / reference.predicted) / (self.seconds / reference.seconds) - 1


@dataclass(frozen=True)
class PlacementBenchOptions:
    """Options of `bench placement`."""

    rounds: int
    steps: int
    seed: int
    largest: str
    """Largest message of the calibration, such as 16M."""
    directory: str | None
    json: bool


def run_placement_command(overrides: Sequence[str], options: PlacementBenchOptions) -> int:
    """Measure and print. Raises UserError outside of an allocation, or if its nodes are all on one leaf."""
    _check_options(options)
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError("bench placement: run it in a Slurm allocation, as in: salloc -N4 hpc-train bench placement")
    config = compose(overrides)
    where = find_allocation(config, None, os.environ)
    if where.missing or len({tuple(where.paths[node]) for node in where.nodes}) < 2:
        raise UserError(f"bench placement: {where.source} must put the {len(where.nodes)} nodes on two leaves or more")
    with tempfile.TemporaryDirectory(prefix="bench-placement-", dir=options.directory or ".") as folder:
        sides = _measure_orders(Path(folder), config, where, list(overrides), options)
    print(json.dumps([asdict(side) for side in sides])) if options.json else _print_orders(sides)
    return 0


def _check_options(options: PlacementBenchOptions) -> None:
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: must be at least 1")
    if options.steps <= _WARM_UP_STEPS:
        raise UserError(f"--steps {options.steps}: must be at least {_WARM_UP_STEPS + 1}")
    if parse_size("--largest", options.largest) <= SMALLEST_MESSAGE:
        raise UserError(
            f"--largest {options.largest}: must be above the smallest message, of {SMALLEST_MESSAGE // 1024}K"
        )


def _measure_orders(
    folder: Path, config: RunConfig, where: NodeLocations, overrides: list[str], options: PlacementBenchOptions
) -> list[OrderResult]:
    ranks = config.cluster.ranks_per_node
    calibration = calibrate_fabric(folder, where.nodes, ranks, options.largest, overrides)
    overrides = [*overrides, f"cluster.calibration={calibration}", f"train.steps={options.steps}"]
    orders = make_orders(where.nodes, where.paths, options.seed)
    times: dict[str, list[float]] = {order.name: [] for order in orders}
    hosts: dict[str, list[str]] = {}
    for number in range(options.rounds):
        for order in orders:
            words = [*overrides, f"launch.placement={order.placement}"]
            seconds, hosts[order.name] = time_training(folder, f"{order.name}-{number}", order.nodes, ranks, words)
            times[order.name].append(seconds)
    cluster = replace(config.cluster, calibration=str(calibration))
    return _summarise_orders(replace(config, cluster=cluster), where, orders, times, hosts)


def _summarise_orders(
    config: RunConfig,
    where: NodeLocations,
    orders: Sequence[NodeOrder],
    times: Mapping[str, Sequence[float]],
    hosts: Mapping[str, Sequence[str]],
) -> list[OrderResult]:
    """Compare the time of each order with its prediction, which takes the computation from the reference order.

    times: seconds of a step in each round, by order. hosts: the host of each rank, by order.
    """
    ranks = config.cluster.ranks_per_node
    measured = {name: statistics.median(seconds) for name, seconds in times.items()}
    modelled = {name: predict_communication(config, where, of_ranks[::ranks]) for name, of_ranks in hosts.items()}
    # Only communication depends on the order, so one computation time is enough for all of them.
    computation = max(0.0, measured[_REFERENCE_ORDER] - modelled[_REFERENCE_ORDER])
    return [
        OrderResult(
            name=order.name,
            what=order.what,
            hosts=tuple(hosts[order.name]),
            seconds=measured[order.name],
            rounds=tuple(times[order.name]),
            communication=modelled[order.name],
            predicted=computation + modelled[order.name],
        )
        for order in orders
    ]


def predict_communication(config: RunConfig, where: NodeLocations, nodes: Sequence[str]) -> float:
    """Predict the communication seconds of a step with the nodes in this order."""
    ranks = config.cluster.ranks_per_node
    world = ranks * len(nodes)
    fabric = build_located_fabric(config, replace(where, nodes=tuple(nodes)), ranks)
    backend: Backend = "nccl" if config.cluster.node.gpus else "gloo"
    return estimate_cost(fabric, list_axis_sizes(config, world), compute_flows(config, world), backend=backend).total


def _print_orders(sides: Sequence[OrderResult]) -> None:
    reference = next(side for side in sides if side.name == _REFERENCE_ORDER)
    table = Table(title="step times of the same training on the same nodes", title_justify="left")
    for column in ("order", "nodes by rank", "measured", "ratio", "predicted", "ratio", "error"):
        table.add_column(column, justify="left" if column in ("order", "nodes by rank") else "right")
    for side in sides:
        table.add_row(
            f"{side.name}: {side.what}",
            " ".join(side.hosts),
            f"{side.seconds * 1e3:.0f} ms",
            f"{side.seconds / reference.seconds:.2f}",
            f"{side.predicted * 1e3:.0f} ms",
            f"{side.predicted / reference.predicted:.2f}",
            f"{side.error(reference):+.1%}",
        )
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table, highlight=False)
    console.print(
        "Ratios are to by_leaf, whose communication is modelled and whose computation is the rest of its step.",
        highlight=False,
    )


def make_orders(nodes: Sequence[str], paths: Mapping[str, Sequence[str]], seed: int) -> tuple[NodeOrder, ...]:
    """Make the orders to compare. paths: switches of each node, top to leaf. seed: of the random order."""
    by_leaf = tuple(sorted(nodes, key=lambda node: (tuple(paths[node]), nodes.index(node))))
    bad = deal_over_leaves(nodes, paths)
    mixed = list(nodes)
    random.Random(seed).shuffle(mixed)
    return (
        NodeOrder("by_leaf", by_leaf, "launcher", "nodes of a leaf next to one another"),
        NodeOrder("identity", bad, "launcher", "dealt out over the leaves, as a launcher may"),
        NodeOrder("random", tuple(mixed), "launcher", f"shuffled with seed {seed}"),
        NodeOrder("placed", bad, "strict", "the dealt order, placed by hpc_train"),
    )


def deal_over_leaves(nodes: Sequence[str], paths: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Deal the nodes out over the leaves round-robin: a bad order, in which neighbours are far apart."""
    leaves: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        leaves.setdefault(tuple(paths[node]), []).append(node)
    return tuple(node for row in zip_longest(*leaves.values()) for node in row if node is not None)


def calibrate_fabric(
    folder: Path, nodes: Sequence[str], ranks_per_node: int, largest: str, overrides: Sequence[str]
) -> Path:
    """Measure the levels of the fabric with `bench collectives`; returns the calibration file."""
    path = folder / "calibration.json"
    sizes = ["--min", str(SMALLEST_MESSAGE), "--max", largest, "--rounds", "3", "--operation", "all_reduce", "--plain"]
    _run_step(
        folder, "calibrate", nodes, ranks_per_node, ["bench", "collectives", *sizes, "--out", str(path), *overrides]
    )
    return path


def time_training(
    folder: Path, name: str, nodes: Sequence[str], ranks_per_node: int, overrides: Sequence[str]
) -> tuple[float, list[str]]:
    """Train in a new run directory; returns (median seconds of a step, hosts in the order of the ranks)."""
    run = folder / name
    _run_step(folder, name, nodes, ranks_per_node, ["train", *overrides, f"run_dir={run}"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = json.loads((run / "rankmap.json").read_text())["ranks"]
    hosts = [str(rank["host"]) for rank in sorted(ranks, key=lambda rank: int(rank["rank"]))]
    return statistics.median(float(line["step_seconds"]) for line in lines[_WARM_UP_STEPS:]), hosts


def _run_step(folder: Path, name: str, nodes: Sequence[str], ranks_per_node: int, words: Sequence[str]) -> None:
    """Run `hpc-train` on the nodes in this order (srun --distribution=arbitrary, SLURM_HOSTFILE)."""
    hosts = folder / f"{name}.hosts"
    # arbitrary distribution: srun starts task i on line i of this file.
    hosts.write_text("".join(f"{node}\n" for node in nodes for _ in range(ranks_per_node)))
    srun = ["srun", "--distribution=arbitrary", f"--ntasks={len(nodes) * ranks_per_node}"]
    env = {key: value for key, value in os.environ.items() if key not in _ALLOCATION_VARIABLES}
    done = subprocess.run(
        [*srun, sys.executable, "-m", "hpc_train", *words],
        env={**env, "SLURM_HOSTFILE": str(hosts)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / f"{name}.log").write_text(done.stdout)
    if done.returncode:
        message = next((line for line in done.stdout.splitlines() if line.startswith("hpc-train:")), None)
        raise UserError(f"{name}: {message or f'srun ended with {done.returncode}'}; see {folder / f'{name}.log'}")
