"""Command line of the development cluster."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from . import cluster, network, nodes, packages
from .options import Options
from .processes import ClusterError, enter
from .state import State, default_directory, locked

HELP = """\
A real multi-node Slurm cluster on one Debian machine, for development and tests.

  sudo slurm/dev-cluster up --nodes 4 --switches 2     install what is missing and start
  eval "$(slurm/dev-cluster env)"                      point sbatch, srun, squeue, sacct at it
  srun -N 2 hostname
  sudo slurm/dev-cluster down                          stop everything; logs stay

Every compute node (node1, node2, ...) is a set of Linux namespaces with one real slurmd in it: its own hostname,
addresses, process table, /dev/shm and scratch ($SLURM_TMPDIR in a task), while the other files are shared as on a
parallel file system. munged, MariaDB, slurmdbd and slurmctld run on the host beside them. Partitions: batch (the
default; its jobs are requeued when preempted) and urgent (preempts batch).

Networks:  eth0  node1      management: Slurm itself, joined with the host
           hsn0  node1-hsn  data: one bridge for each leaf switch, joined by a spine

Faults:    node kill|boot|stop-slurmd|start-slurmd|sick|heal NODE     kill: power loss; sick: the health check drains it
           net NODE|LEAF up|down|rate 100mbit|loss PERCENT|clear      one cable, both directions (--mgmt: eth0)
           net LEAF delay MILLISECONDS                                the cable from a leaf switch to the spine

Needs root, Debian 12 or newer, no systemd. Packages it installs never start daemons of their own, and nothing in /etc
or /run is changed. All state is in $HPC_TRAIN_DEV_CLUSTER (default /var/lib/hpc_train-dev-cluster); only processes
recorded there with pid and start time are ever signalled. An executable hooks.d/prolog or hooks.d/epilog in it runs
with every job. Clusters in different directories do not disturb each other.
"""

LONGEST_SOCKET = 107
"""Most characters of a path in sockaddr_un (unix(7)). With longer ones jobs would be requeued for ever, without a
message to their user."""


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    arguments = parser().parse_args()
    try:
        return dispatch(arguments, default_directory())
    except ClusterError as error:
        print(f"dev-cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dev-cluster: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `dev-cluster status | head`
        sys.stderr.close()
        return 141


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that an interrupted `up` cleans up."""
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="dev-cluster", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_up(commands.add_parser("up", help="install what is missing, start, wait until all nodes are idle"))
    commands.add_parser("down", help="stop everything `up` started; logs stay")
    commands.add_parser("status", help="list processes; exit 0: all running, 1: something died, 3: down")
    commands.add_parser("env", help="print the shell exports that Slurm's clients need")
    execute = commands.add_parser("exec", help="run a command on a node, outside Slurm")
    execute.add_argument("node")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="command")
    install = commands.add_parser("install", help="only install Debian packages: the cluster's and those named")
    install.add_argument("packages", nargs="*", metavar="package")
    node = commands.add_parser("node", help="inject or mend a fault of a node")
    node.add_argument("verb", choices=nodes.VERBS)
    node.add_argument("name")
    net = commands.add_parser("net", help="change one cable, both directions")
    net.add_argument("target", help="a node, or a leaf switch such as leaf1")
    net.add_argument("verb", choices=("up", "down", "rate", "loss", "delay", "clear"))
    net.add_argument("value", nargs="?", help="100mbit, 5 (percent), 0.5 (milliseconds)")
    net.add_argument("--mgmt", action="store_true", help="the management network's cable instead of the data network's")
    return top


def add_up(up: argparse.ArgumentParser) -> None:
    default = Options()
    for name, text in (
        ("nodes", "compute nodes"),
        ("cpus_per_node", "claimed, not compared with this machine"),
        ("mem_per_node", "MiB, claimed"),
        ("gpus_per_node", "fake GPUs (gres/gpu)"),
        ("switches", "leaf switches (topology/tree); 0: one, and no topology"),
        ("mtu", "of the data network, bytes"),
        ("requeue_delay", "seconds that a requeued job is held back"),
        ("grace", "seconds a preempted job gets (GraceTime of partition batch)"),
    ):
        flag, preset = f"--{name.replace('_', '-')}", getattr(default, name)
        up.add_argument(flag, type=int, default=preset, metavar="N", help=f"{text} (default {preset})")
    up.add_argument("--gpu-type", default=default.gpu_type, metavar="NAME", help=f"(default {default.gpu_type})")
    up.add_argument("--private-tmp", action="store_true", help="give every node a /tmp of its own, as real ones have")
    up.add_argument("--cgroup", action="store_true", help="constrain jobs with cgroup v1 (memory, devices)")
    up.add_argument(
        "--subids", default="", metavar="USER", help="give a user subordinate ids on the nodes, for rootless containers"
    )
    up.add_argument("--no-accounting", dest="accounting", action="store_false", help="no slurmdbd: sacct will not work")
    up.add_argument("--no-install", dest="install", action="store_false", help="fail where a Debian package is missing")


def dispatch(arguments: argparse.Namespace, root: Path) -> int:
    if arguments.command == "env":
        return print_environment(State(root))
    if os.geteuid() != 0:
        raise ClusterError("must run as root (namespaces, network devices, slurmd)")
    if arguments.command == "exec":
        execute(State(root), arguments.node, arguments.argv)
    with locked(root) as state:
        return change(arguments, state)


def change(arguments: argparse.Namespace, state: State) -> int:
    command = arguments.command
    if command == "install":
        packages.install([*packages.needed(Options()), *arguments.packages])
    elif command == "up":
        cluster.up(state, options_from(arguments, state.root), arguments.install)
    elif command == "down":
        cluster.down(state)
    elif command == "status":
        return cluster.status(state)
    elif not state.is_up():
        raise ClusterError("no cluster is up: dev-cluster up")
    elif command == "node":
        nodes.change(state, arguments.verb, arguments.name)
    else:
        network.change_cable(state, arguments.target, arguments.verb, arguments.value, arguments.mgmt)
    return 0


def options_from(arguments: argparse.Namespace, root: Path) -> Options:
    options = Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})
    options.check()
    if options.private_tmp and root.is_relative_to("/tmp"):
        raise ClusterError("--private-tmp hides /tmp: set HPC_TRAIN_DEV_CLUSTER to a directory elsewhere")
    last = f"node{options.nodes}"
    if len(f"{root}/nodes/{last}/spool/{last}_1000000.4294967291") > LONGEST_SOCKET:
        raise ClusterError(f"{root}: too long a path for Slurm's sockets: set HPC_TRAIN_DEV_CLUSTER to a shorter one")
    return options


def print_environment(state: State) -> int:
    if not state.is_up():
        raise ClusterError("no cluster is up: dev-cluster up")
    print(f"export SLURM_CONF={state.slurm_conf}")
    return 0


def execute(state: State, node: str, command: list[str]) -> None:
    """Become `command` (default: a shell) in the namespaces of the node."""
    if not state.alive(node):
        raise ClusterError(f"{node} is not running")
    words = command[1:] if command[:1] == ["--"] else command
    whole = [*enter(state.processes[node]), *(words or ["bash"])]
    os.execvp(whole[0], whole)
