"""Arguments of `hpc-train topology show|read|place`."""

from __future__ import annotations

import argparse
import os
import sys

_OVERRIDES = "key=value as in conf/, such as cluster=dgx_h100 cluster.nodes=64 model=llama_8b parallel.tp=8"
_PICTURE = "also draw it: FILE.svg, FILE.png or FILE.pdf"
_JSON = "print JSON"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the sub-commands show, read and place; each sets `run`, a function of the parsed arguments."""
    commands = parser.add_subparsers(dest="topology", required=True, metavar="command")
    _add_show(_add_command(commands, "show", "what this machine, this Slurm job or a described cluster is made of"))
    _add_read(
        _add_command(commands, "read", "what a file says: of Slurm, nvidia-smi, rocm-smi, NCCL or InfiniBand tools")
    )
    _add_place(
        _add_command(commands, "place", "which rank goes where, what that costs, and what the given order costs")
    )


def run_show(args: argparse.Namespace) -> int:
    """Print the machine, the job or the described cluster."""
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


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary)


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_config_options(parser)
    parser.add_argument("--json", action="store_true", help=_JSON)
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    parser.set_defaults(run=run_show)


def _add_read(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file; - for standard input")
    parser.add_argument("--format", metavar="FORMAT", help="which format it is; told by its content if not given")
    parser.add_argument("--json", action="store_true", help=_JSON)
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    parser.set_defaults(run=run_read)


def _add_place(parser: argparse.ArgumentParser) -> None:
    _add_config_options(parser)
    parser.add_argument(
        "--nodes", metavar="HOSTLIST", help="the allocation in its order, on cluster.topology or the described cluster"
    )
    parser.add_argument("--shuffle", metavar="SEED", type=int, help="put the nodes into a random order first")
    parser.add_argument("--axis", help="mesh axis whose groups colour the picture (default: the one that costs most)")
    parser.add_argument("--picture", metavar="FILE", help=_PICTURE)
    parser.add_argument("--json", action="store_true", help=_JSON)
    parser.set_defaults(run=run_place)


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    parser.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")
