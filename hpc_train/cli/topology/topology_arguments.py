"""Define the arguments of `hpc-train topology show|read|place`; what they do is imported when they run."""

from __future__ import annotations

import argparse
import os
import sys

from hpc_train.cli.arguments import add_command, add_examples, add_json, add_overrides

_OVERRIDES = "a setting as key=value, such as cluster=dgx_h100, cluster.nodes=64 or parallel.tp=8"
_PICTURE = "also draw it, as .svg, .png or .pdf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the sub-commands show, read and place; each sets `run`, a function of the parsed arguments."""
    commands = parser.add_subparsers(dest="topology", required=True, metavar="command")
    show = "show GPUs, NICs, links and switches of this machine, this job or a described cluster"
    read = "read a topology file of Slurm, nvidia-smi, rocm-smi, NCCL or InfiniBand tools"
    place = "place the ranks of a run on nodes, and compare the cost with the given order"
    _add_show(add_command(commands, "show", show))
    _add_read(add_command(commands, "read", read))
    _add_place(add_command(commands, "place", place))


def run_show(args: argparse.Namespace) -> int:
    """Print this machine, the job around it or a described cluster."""
    from hpc_train.cli.topology.show import show_topology_command

    return show_topology_command(args.overrides, args.config_dir, os.environ, args.json, args.picture)


def run_read(args: argparse.Namespace) -> int:
    """Print the cluster that a file describes."""
    from hpc_train.cli.topology.show import read_topology_command

    return read_topology_command(args.file, args.format, sys.stdin.buffer, args.json, args.picture)


def run_place(args: argparse.Namespace) -> int:
    """Print the placement of a run's ranks."""
    from hpc_train.cli.topology.place import PlaceOptions, place_command

    options = PlaceOptions(args.nodes, args.shuffle, args.axis, args.picture, args.json)
    return place_command(args.overrides, args.config_dir, os.environ, options)


def _add_show(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, _OVERRIDES)
    add_json(parser)
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    add_examples(
        parser,
        "hpc-train topology show",
        "hpc-train topology show cluster=dgx_h100 cluster.nodes=4 --picture cluster.svg",
    )
    parser.set_defaults(run=run_show)


def _add_read(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file to read; - for standard input")
    parser.add_argument("--format", metavar="FORMAT", help="format of the file (default: recognised by its content)")
    add_json(parser)
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    add_examples(
        parser,
        "hpc-train topology read /etc/slurm/topology.conf",
        "nvidia-smi topo -m | hpc-train topology read - --json",
    )
    parser.set_defaults(run=run_read)


def _add_place(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser, _OVERRIDES)
    parser.add_argument(
        "--nodes",
        metavar="HOSTLIST",
        help="nodes of the allocation, in order (default: those of the job, or of the cluster)",
    )
    parser.add_argument("--shuffle", metavar="SEED", type=int, help="first put the nodes into a random order")
    parser.add_argument("--axis", help="mesh axis whose groups colour the picture (default: the most expensive one)")
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    add_json(parser)
    add_examples(
        parser,
        "hpc-train topology place cluster=dgx_h100 cluster.nodes=64 model=llama_8b parallel.tp=8 --shuffle 1",
        "hpc-train topology place cluster=dgx_h100 cluster.nodes=8 model=llama_8b parallel=fsdp --picture ranks.svg",
    )
    parser.set_defaults(run=run_place)
