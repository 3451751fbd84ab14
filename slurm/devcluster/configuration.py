"""Writes the cluster's configuration files from its options."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from pathlib import Path
from string import Template

from . import addresses
from .options import Options
from .state import State

HERE = Path(__file__).resolve().parent
NVIDIA_DEVICE_MAJOR = 195


def write_all(state: State) -> None:
    etc = state.root / "etc"
    for hook in (HERE / "hooks").iterdir():
        shutil.copy(hook, etc / "hooks" / hook.name)
    values = slurm_values(state)
    fill("slurm.conf", etc, values)
    fill("slurmdbd.conf", etc, values)
    (etc / "slurmdbd.conf").chmod(0o600)
    (etc / "plugstack.conf").touch()
    (etc / "hosts").write_text(hosts(state))
    (etc / "cgroup.conf").write_text(cgroup(state.options))
    if state.options.subids:
        (etc / "subids").write_text(f"{state.options.subids}:100000:65536\n")
    if state.options.switches:
        (etc / "topology.conf").write_text(topology(state.options))
    if state.options.gpus_per_node:
        (etc / "gres.conf").write_text(fake_gpus(state.root, state.options))


def fill(name: str, directory: Path, values: dict[str, object]) -> None:
    template = Template((HERE / "templates" / name).read_text())
    (directory / name).write_text(template.substitute(values))


def slurm_values(state: State) -> dict[str, object]:
    options = state.options
    slurmctld_port, slurmdbd_port = addresses.free_ports(state.network, 2)
    tracker = "cgroup" if options.cgroup else "linux"
    return {
        "root": state.root,
        "host": socket.gethostname(),
        "host_address": addresses.host_address(state.network),
        "slurmctld_port": slurmctld_port,
        "slurmdbd_port": slurmdbd_port,
        "requeue_delay": options.requeue_delay,
        "proctrack": "cgroup" if options.cgroup else "linuxproc",
        "task": "cgroup" if options.cgroup else "none",
        "gather": tracker,
        "mem_per_cpu": max(1, options.mem_per_node // options.cpus_per_node),
        "topology": "tree" if options.switches else "none",
        "accounting": accounting(state, slurmdbd_port),
        "nodes": node_lines(state),
        "every_node": every_node(options),
        "grace": options.grace,
    }


def accounting(state: State, slurmdbd_port: int) -> str:
    if not state.options.accounting:
        return f"JobCompType=jobcomp/filetxt\nJobCompLoc={state.root}/log/jobcomp.txt"
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={slurmdbd_port}",
        f"AccountingStoragePass={state.root}/run/munge.sock",
    ]
    if state.options.gpus_per_node:
        lines.append("AccountingStorageTRES=gres/gpu")
    return "\n".join(lines)


def node_lines(state: State) -> str:
    options = state.options
    hardware = f"CPUs={options.cpus_per_node} RealMemory={options.mem_per_node}"
    lines = [] if not options.gpus_per_node else ["GresTypes=gpu"]
    if options.gpus_per_node:
        hardware += f" Gres=gpu:{options.gpu_type}:{options.gpus_per_node}"
    for name in options.node_names():
        address = addresses.management(state.network, name)
        lines.append(f"NodeName={name} NodeAddr={address} Port={addresses.SLURMD_PORT} {hardware} State=UNKNOWN")
    return "\n".join(lines)


def every_node(options: Options) -> str:
    return f"node[1-{options.nodes}]" if options.nodes > 1 else "node1"


def hosts(state: State) -> str:
    lines = ["127.0.0.1 localhost", f"{addresses.host_address(state.network)} {socket.gethostname()}"]
    for name in state.options.node_names():
        lines.append(f"{addresses.management(state.network, name)} {name}")
        lines.append(f"{addresses.data(state.network, name)} {name}-hsn")
    return "\n".join(lines) + "\n"


def cgroup(options: Options) -> str:
    devices = "yes" if options.cgroup else "no"
    return (
        "CgroupAutomount=no\nConstrainRAMSpace=yes\nAllowedRAMSpace=100\nConstrainSwapSpace=no\n"
        f"ConstrainCores=no\nConstrainDevices={devices}\n"
    )


def topology(options: Options) -> str:
    leaves = options.leaves()
    lines = [f"SwitchName=leaf{number} Nodes={','.join(names)}" for number, names in enumerate(leaves, 1)]
    if len(leaves) > 1:
        lines.append(f"SwitchName=spine Switches=leaf[1-{len(leaves)}]")
    return "\n".join(lines) + "\n"


def fake_gpus(root: Path, options: Options) -> str:
    """Make device files with NVIDIA's device numbers and return gres.conf. No driver answers, but Slurm can count, name
    and constrain them.
    """
    (root / "dev").mkdir(exist_ok=True)
    for index in range(options.gpus_per_node):
        device = os.makedev(NVIDIA_DEVICE_MAJOR, index)
        os.mknod(root / f"dev/fakegpu{index}", 0o666 | stat.S_IFCHR, device)
    last = options.gpus_per_node - 1
    files = f"{root}/dev/fakegpu[0-{last}]" if last else f"{root}/dev/fakegpu0"
    return f"AutoDetect=off\nNodeName={every_node(options)} Name=gpu Type={options.gpu_type} File={files}\n"
