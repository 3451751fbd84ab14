"""The cluster as a whole: up, down, status."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from . import configuration, network, nodes, packages, services
from .options import Options
from .processes import ClusterError, wait_for
from .state import State

READY = 0
SOMETHING_DIED = 1
DOWN = 3


def up(state: State, options: Options, may_install: bool) -> None:
    """Start the cluster and wait until every node is idle; if anything fails, all of it is stopped again."""
    if state.is_up() and len(state.dead()) == len(state.processes):
        down(state)  # the machine was restarted
    if state.is_up():
        confirm_same(state, options)
        boot_missing(state)
        print(f"already up: {options.nodes} nodes")
        return
    packages.install(packages.needed(options), may_install)
    began = time.monotonic()
    state.prepare()
    state.options = options
    try:
        start(state)
    except BaseException:
        with contextlib.suppress(ClusterError):
            down(state)
        raise
    print(f"up: {options.nodes} nodes idle after {time.monotonic() - began:.1f} s")


def confirm_same(state: State, options: Options) -> None:
    dead = state.dead()
    if dead:
        raise ClusterError(f"the cluster is half up ({', '.join(dead)} died): run `dev-cluster down` first")
    if state.options != options:
        raise ClusterError(f"a cluster with other options is up ({state.options}): run `dev-cluster down` first")


def boot_missing(state: State) -> None:
    for name in state.options.node_names():
        if name not in state.processes:
            print(f"booting {name}, which was off")
            nodes.boot(state, name)


def start(state: State) -> None:
    network.start_fabric(state)
    configuration.write_all(state)
    services.start_munge(state)
    if state.options.accounting:
        services.start_accounting(state)
    services.start_slurmctld(state)
    names = state.options.node_names()
    for name in names:
        nodes.boot(state, name)
    idle = dict.fromkeys(names, "idle")
    wait_for("nodes", lambda: nodes.slurm_states(state) == idle, 90, state.log("slurmctld"))


def down(state: State) -> None:
    """Stop everything `up` started and remove all but the logs. It also works after a crash, and when nothing is up."""
    for name in reversed(state.options.node_names()):
        nodes.kill(state, name)
    relays = [name for name in state.processes if name.endswith("-relay")]
    for name in (*relays, "slurmctld", "slurmdbd"):
        state.stop(name)
    state.stop("mariadbd", signal.SIGKILL)  # its data goes too
    state.stop("munged")
    network.stop_fabric(state)
    if state.options.cgroup:
        remove_cgroups(state.options.node_names())
    state.clean()


def remove_cgroups(names: list[str]) -> None:
    for name in names:
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{name}"):
            for group in sorted((top, *top.rglob("*/")), key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    group.rmdir()


def status(state: State) -> int:
    """Print every process and return READY, SOMETHING_DIED or DOWN."""
    if not state.is_up():
        print("down")
        return DOWN
    dead, states = state.dead(), nodes.slurm_states(state)
    for name, process in state.processes.items():
        if not name.endswith("-wrapper"):
            life = "dead" if name in dead else "running"
            print(f"{name:16} {process.pid:>8} {life:8} {states.get(name, '')}".rstrip())
    for name in state.options.node_names():
        if name not in state.processes:
            print(f"{name:16} {'-':>8} {'killed':8} {states.get(name, '')}".rstrip())
    return SOMETHING_DIED if dead else READY
