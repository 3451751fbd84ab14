"""Compute nodes: each is a set of namespaces (pid, net, uts, mount, ipc) with one real slurmd in it.

A node has a hostname, addresses, a process table, /dev/shm and scratch of its own; the rest of the file system is
shared, as on a cluster with a parallel file system. SIGKILL of its first process is a power loss: the kernel kills all
the others.
"""

from __future__ import annotations

import signal

from . import network
from .processes import ClusterError, enter, only_child, run, spawn, wait_for
from .state import State

NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")
VERBS = ("kill", "boot", "stop-slurmd", "start-slurmd", "sick", "heal")


def boot(state: State, node: str) -> None:
    folder = state.root / "nodes" / node
    for name in ("spool", "local", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    booted = folder / "booted"
    booted.unlink(missing_ok=True)
    init = state.root / "etc/hooks/node-init"
    tmp = "private" if state.options.private_tmp else "shared"
    wrapper = state.launch(f"{node}-wrapper", ["unshare", *NAMESPACES, init, state.root, node, tmp])
    state.record(node, only_child(wrapper.pid, node))
    wait_for(node, booted.exists, 30, state.log(f"{node}-wrapper"), wrapper)
    network.connect_node(state, node)
    start_slurmd(state, node)


def start_slurmd(state: State, node: str) -> None:
    conf = state.slurm_conf
    inside = enter(state.processes[node])
    wrapper = spawn([*inside, "slurmd", "-D", "-N", node, "-f", conf], state.log(node), {"SLURM_CONF": str(conf)})
    state.record(f"{node}-slurmd", only_child(wrapper, f"slurmd on {node}"))


def kill(state: State, node: str) -> None:
    state.processes.pop(f"{node}-slurmd", None)
    state.stop(node, signal.SIGKILL)
    state.stop(f"{node}-wrapper", signal.SIGKILL)


def slurm_states(state: State) -> dict[str, str]:
    listed = run("sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T", check=False, env=state.client_environment())
    return dict(line.split() for line in listed.splitlines())


def change(state: State, verb: str, node: str) -> None:
    """Apply one of VERBS to one node. Raises ClusterError if there is no such node, or if it is not in a state for
    that.
    """
    if node not in state.options.node_names():
        raise ClusterError(f"no node {node}: there are {', '.join(state.options.node_names())}")
    if verb == "kill":
        kill(state, node)
    elif verb == "boot":
        if state.alive(node):
            raise ClusterError(f"{node} is running already")
        kill(state, node)
        boot(state, node)
    elif not state.alive(node):
        raise ClusterError(f"{node} is not running: dev-cluster node boot {node}")
    else:
        change_running(state, verb, node)


def change_running(state: State, verb: str, node: str) -> None:
    sick = state.root / "nodes" / node / "sick"
    if verb == "stop-slurmd":
        state.stop(f"{node}-slurmd")
    elif verb == "start-slurmd":
        if state.alive(f"{node}-slurmd"):
            raise ClusterError(f"slurmd on {node} is running already")
        start_slurmd(state, node)
    elif verb == "sick":
        sick.write_text("injected fault\n")
    else:
        sick.unlink(missing_ok=True)
