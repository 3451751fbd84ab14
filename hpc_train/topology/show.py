"""`topology show` and `topology read`: find the cluster, and print it as a tree or as JSON."""

from __future__ import annotations

import json as json_module
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from rich.console import Console, RenderableType

from hpc_train.cluster.reading import LARGEST, decode, read_file, read_text
from hpc_train.cluster.spec import Cluster, Switch, as_json
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.topology.allocation import job_nodes
from hpc_train.topology.described import described_cluster
from hpc_train.topology.tree import tree_of

_PIPE_WIDTH = 160
"""Columns where the output is no terminal."""


def show(
    overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str], json: bool, picture: str | None
) -> int:
    """Print what a described cluster (cluster=<name>), the Slurm job around, or else this machine is made of."""
    _print(_shown(overrides, config_dir, env), json, picture)
    return 0


def read(file: str, format: str | None, stdin: BinaryIO, json: bool, picture: str | None) -> int:
    """Print the cluster that a file describes. Raises UserError for anything that is not a topology."""
    cluster = read_text(_stdin(stdin), "standard input", format) if file == "-" else read_file(Path(file), format)
    _print(cluster, json, picture)
    return 0


def print_rich(*parts: RenderableType) -> None:
    """On a terminal as wide as that is, else wide enough that lines do not break."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, highlight=False)
    for part in parts:
        console.print(part)


def _stdin(stdin: BinaryIO) -> str:
    content = stdin.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"standard input: larger than {LARGEST >> 20} MiB; not a topology file")
    return decode(content)


def _print(cluster: Cluster, json: bool, picture: str | None) -> None:
    if picture is not None:
        from hpc_train.topology.picture import draw_cluster

        draw_cluster(cluster, Path(picture))
    if json:
        print(json_module.dumps(as_json(cluster)))
    else:
        print_rich(tree_of(cluster))


def _shown(overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str]) -> Cluster:
    config = compose(overrides, config_dir)
    if config.cluster.topology:
        return read_file(Path(config.cluster.topology))
    if config.cluster.node.gpus or config.cluster.nodes:
        return described_cluster(config)
    return _job(env) if "SLURM_JOB_ID" in env else _here()


def _here() -> Cluster:
    from hpc_train.cluster.machine import this_node

    return this_node()


def _job(env: Mapping[str, str]) -> Cluster:
    """The job's nodes and the switches above them, and the devices of the node that asks."""
    from hpc_train.cluster.slurm.scontrol import show_topology

    here, slurm, nodes = _here(), show_topology(), set(job_nodes(env))
    [node] = here.nodes
    name = env.get("SLURMD_NODENAME", node.name)
    return Cluster(
        kind="slurm_job",
        nodes=(replace(node, name=name),),
        links=tuple(replace(link, node=name) for link in here.links),
        switches=_above(slurm.switches, nodes) if slurm is not None else (),
    )


def _above(switches: Sequence[Switch], nodes: set[str]) -> tuple[Switch, ...]:
    """The switches that hold these nodes, with these nodes only."""
    kept: dict[str, Switch] = {}
    for switch in sorted(switches, key=lambda it: it.level):
        held = tuple(node for node in switch.nodes if node in nodes)
        below = tuple(name for name in switch.switches if name in kept)
        if held or below:
            kept[switch.name] = replace(switch, nodes=held, switches=below)
    return tuple(kept.values())
