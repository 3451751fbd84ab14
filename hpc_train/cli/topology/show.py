"""`hpc-train topology show` and `topology read`: find the cluster, and print it as a tree or as JSON.

show: this machine, the Slurm job around it, or a described cluster. read: what a file of another tool describes.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from hpc_train.cli.output import print_rich
from hpc_train.cluster.readers.formats import MAX_FILE_BYTES, decode_text, read_topology_file, read_topology_text
from hpc_train.cluster.spec import Cluster, Switch, cluster_to_json
from hpc_train.cluster.tree_view import build_tree_view
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.placement.allocation import list_job_nodes
from hpc_train.placement.described_cluster import build_described_cluster


def show_topology_command(
    overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str], json: bool, picture: str | None
) -> int:
    """Print a described cluster (cluster=<name>), the surrounding Slurm job, or else this machine."""
    _print_cluster(_find_cluster(overrides, config_dir, env), json, picture)
    return 0


def read_topology_command(file: str, format: str | None, stdin: BinaryIO, json: bool, picture: str | None) -> int:
    """Print the cluster that a file describes. Raises UserError for a file that is not a topology."""
    cluster = (
        read_topology_text(_read_stdin(stdin), "standard input", format)
        if file == "-"
        else read_topology_file(Path(file), format)
    )
    _print_cluster(cluster, json, picture)
    return 0


def _read_stdin(stdin: BinaryIO) -> str:
    content = stdin.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"standard input: larger than {MAX_FILE_BYTES >> 20} MiB; not a topology file")
    return decode_text(content)


def _print_cluster(cluster: Cluster, json: bool, picture: str | None) -> None:
    if picture is not None:
        from hpc_train.placement.diagram.picture import draw_cluster

        draw_cluster(cluster, Path(picture))
    if json:
        print(json_module.dumps(cluster_to_json(cluster)))
    else:
        print_rich(build_tree_view(cluster))


def _find_cluster(overrides: Sequence[str], config_dir: str | None, env: Mapping[str, str]) -> Cluster:
    config = compose(overrides, config_dir)
    if config.cluster.topology:
        return read_topology_file(Path(config.cluster.topology))
    if config.cluster.node.gpus or config.cluster.nodes:
        return build_described_cluster(config)
    return _read_job(env) if "SLURM_JOB_ID" in env else _read_machine()


def _read_machine() -> Cluster:
    from hpc_train.cluster.this_machine import describe_this_node

    return describe_this_node()


def _read_job(env: Mapping[str, str]) -> Cluster:
    """Describe the job's nodes and the switches above them, and the devices of this node."""
    from hpc_train.cluster.readers.slurm.slurm_topology import query_topology

    machine, slurm, nodes = _read_machine(), query_topology(), set(list_job_nodes(env))
    [node] = machine.nodes
    name = env.get("SLURMD_NODENAME", node.name)
    return Cluster(
        kind="slurm_job",
        nodes=(replace(node, name=name),),
        links=tuple(replace(link, node=name) for link in machine.links),
        switches=_list_switches_above(slurm.switches, nodes) if slurm is not None else (),
    )


def _list_switches_above(switches: Sequence[Switch], nodes: set[str]) -> tuple[Switch, ...]:
    """Return the switches above these nodes, restricted to these nodes."""
    switches_above: dict[str, Switch] = {}
    for switch in sorted(switches, key=lambda switch: switch.level):
        nodes_below = tuple(node for node in switch.nodes if node in nodes)
        below = tuple(name for name in switch.switches if name in switches_above)
        if nodes_below or below:
            switches_above[switch.name] = replace(switch, nodes=nodes_below, switches=below)
    return tuple(switches_above.values())
