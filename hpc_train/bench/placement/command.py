"""`bench placement`, inside a Slurm allocation: step times of several orders of its nodes, and their predictions."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.bench.collectives.options import parse_size
from hpc_train.bench.placement.orders import Order, orders
from hpc_train.bench.placement.steps import SMALLEST, calibrate, train
from hpc_train.config.compose import compose
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.algorithm import Backend
from hpc_train.placement.cost import cost
from hpc_train.placement.from_config import fabric_at
from hpc_train.placement.locate import Locations
from hpc_train.topology.allocation import allocation
from hpc_train.traffic.flows import flows

_REFERENCE = "by_leaf"


@dataclass(frozen=True)
class Side:
    """One order: what was measured, and what the model says."""

    name: str
    what: str
    hosts: tuple[str, ...]
    """In the order of the ranks."""
    seconds: float
    """Median over the rounds of the median step."""
    rounds: tuple[float, ...]
    communication: float
    """Seconds a step, modelled, nothing overlapping."""
    predicted: float
    """Seconds a step: what computation takes in the reference order, and this order's communication."""

    def error(self, reference: Side) -> float:
        """How far the predicted ratio to the reference is from the measured one, as a part of it."""
        return (self.predicted / reference.predicted) / (self.seconds / reference.seconds) - 1


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    rounds: int
    steps: int
    seed: int
    largest: str
    """Message of the calibration, such as 16M."""
    directory: str | None
    json: bool


def placement_command(overrides: Sequence[str], options: Options) -> int:
    """Measure and print. Raises UserError outside of an allocation, and for a topology with one leaf only."""
    for name in ("rounds", "steps"):
        if getattr(options, name) < (3 if name == "steps" else 1):
            raise UserError(f"--{name} {getattr(options, name)}: must be at least {3 if name == 'steps' else 1}")
    if parse_size("--largest", options.largest) <= SMALLEST:
        raise UserError(f"--largest {options.largest}: must be above the smallest message, of {SMALLEST // 1024}K")
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError("bench placement: run it in a Slurm allocation, as in: salloc -N4 hpc-train bench placement")
    config = compose(overrides)
    where = allocation(config, None, os.environ)
    if where.missing or len({tuple(where.paths[node]) for node in where.nodes}) < 2:
        raise UserError(f"bench placement: {where.source} must put the {len(where.nodes)} nodes on two leaves or more")
    with tempfile.TemporaryDirectory(prefix="bench-placement-", dir=options.directory or ".") as folder:
        sides = _measure(Path(folder), config, where, list(overrides), options)
    print(json.dumps([asdict(side) for side in sides])) if options.json else _show(sides)
    return 0


def _measure(folder: Path, config: RunConfig, where: Locations, overrides: list[str], options: Options) -> list[Side]:
    ranks = config.cluster.ranks_per_node
    calibration = calibrate(folder, where.nodes, ranks, options.largest, overrides)
    overrides = [*overrides, f"cluster.calibration={calibration}", f"train.steps={options.steps}"]
    given = orders(where.nodes, where.paths, options.seed)
    times: dict[str, list[float]] = {order.name: [] for order in given}
    hosts: dict[str, list[str]] = {}
    for number in range(options.rounds):
        for order in given:
            words = [*overrides, f"launch.placement={order.placement}"]
            seconds, hosts[order.name] = train(folder, f"{order.name}-{number}", order.nodes, ranks, words)
            times[order.name].append(seconds)
    cluster = replace(config.cluster, calibration=str(calibration))
    return _sides(replace(config, cluster=cluster), where, given, times, hosts)


def _sides(
    config: RunConfig,
    where: Locations,
    given: Sequence[Order],
    times: Mapping[str, Sequence[float]],
    hosts: Mapping[str, Sequence[str]],
) -> list[Side]:
    ranks = config.cluster.ranks_per_node
    measured = {name: statistics.median(of_side) for name, of_side in times.items()}
    modelled = {name: communication(config, where, of_side[::ranks]) for name, of_side in hosts.items()}
    computation = max(0.0, measured[_REFERENCE] - modelled[_REFERENCE])
    return [
        Side(
            order.name,
            order.what,
            tuple(hosts[order.name]),
            measured[order.name],
            tuple(times[order.name]),
            modelled[order.name],
            computation + modelled[order.name],
        )
        for order in given
    ]


def communication(config: RunConfig, where: Locations, nodes: Sequence[str]) -> float:
    """Modelled seconds a step of the nodes in this order."""
    ranks = config.cluster.ranks_per_node
    world = ranks * len(nodes)
    fabric = fabric_at(config, replace(where, nodes=tuple(nodes)), ranks)
    backend: Backend = "nccl" if config.cluster.node.gpus else "gloo"
    return cost(fabric, asdict(resolve(config.parallel, world)), flows(config, world), backend=backend).total


def _show(sides: Sequence[Side]) -> None:
    reference = next(side for side in sides if side.name == _REFERENCE)
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
