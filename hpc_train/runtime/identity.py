"""Identify this process in its job from any launcher's environment, and find the address at which others reach it.

Everything here is local: processes have not communicated yet. Imports the standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc_train.errors import UserError

Environment = Mapping[str, str]
_SIOCGIFADDR = 0x8915
"""The call of ioctl that returns the address of a network interface, from linux/sockios.h."""
_DIGITS = 12
"""Longest number that is read: more than any cluster has ranks, less than what Python refuses to convert."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Place of a process in its job, as its launcher tells it."""

    process: int
    processes: int
    local: int
    node: int
    nodes: int
    launcher: str
    host: str
    attempt_key: str
    """Names this attempt of this job, so that its processes never meet those of another job, step or restart."""


@dataclass(frozen=True)
class _Variables:
    """The numbers in a launcher's environment."""

    env: Environment
    launcher: str

    def read_number(self, name: str, default: int | None = None, minimum: int = 0) -> int:
        """Return the whole number in variable `name`. Raises UserError if it is less than `minimum`, or no number.

        default: for a variable that is not set; without one that is a UserError too.
        """
        text = self.env.get(name)
        if text is None:
            if default is None:
                raise UserError(
                    f"{self.launcher} environment: {name} is not set; start the ranks with the launcher itself"
                )
            return default
        if not text.isdecimal() or len(text) > _DIGITS:
            raise UserError(f"{self.launcher} environment: {name}={text[:40]!r} is not a whole number")
        if int(text) < minimum:
            raise UserError(f"{self.launcher} environment: {name}={text} must be at least {minimum}")
        return int(text)


def _read_submitit(env: Environment) -> ProcessIdentity:
    get = _Variables(env, "submitit").read_number
    return ProcessIdentity(
        process=get("SUBMITIT_LOCAL_GLOBALID"),
        processes=get("SUBMITIT_LOCAL_NTASKS"),
        local=get("SUBMITIT_LOCAL_LOCALID"),
        node=get("SUBMITIT_LOCAL_NODEID", 0),
        nodes=get("SUBMITIT_LOCAL_JOB_NUM_NODES", 1),
        launcher="submitit",
        host=socket.gethostname(),
        attempt_key=f"submitit-{env.get('SUBMITIT_LOCAL_JOB_ID', '0')}",
    )


def _read_torchrun(env: Environment) -> ProcessIdentity:
    get = _Variables(env, "torchrun").read_number
    local_size = get("LOCAL_WORLD_SIZE", 1, minimum=1)
    size = get("WORLD_SIZE")
    return ProcessIdentity(
        process=get("RANK"),
        processes=size,
        local=get("LOCAL_RANK", 0),
        node=get("GROUP_RANK", get("RANK") // local_size),
        nodes=get("GROUP_WORLD_SIZE", -(-size // local_size)),
        launcher="torchrun",
        host=socket.gethostname(),
        attempt_key=f"torchrun-{env.get('TORCHELASTIC_RUN_ID', 'none')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _read_slurm(env: Environment) -> ProcessIdentity:
    get = _Variables(env, "slurm").read_number
    restart = env.get("SLURM_RESTART_COUNT", "0")
    return ProcessIdentity(
        process=get("SLURM_PROCID"),
        processes=get("SLURM_STEP_NUM_TASKS", get("SLURM_NTASKS", 1)),
        local=get("SLURM_LOCALID"),
        node=get("SLURM_NODEID", 0),
        nodes=get("SLURM_STEP_NUM_NODES", get("SLURM_NNODES", 1)),
        launcher="slurm",
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        attempt_key=f"slurm-{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_STEP_ID', '0')}.{restart}",
    )


def _read_open_mpi(env: Environment) -> ProcessIdentity:
    get = _Variables(env, "Open MPI").read_number
    size, local_size = get("OMPI_COMM_WORLD_SIZE"), get("OMPI_COMM_WORLD_LOCAL_SIZE", 1, minimum=1)
    return ProcessIdentity(
        process=get("OMPI_COMM_WORLD_RANK"),
        processes=size,
        local=get("OMPI_COMM_WORLD_LOCAL_RANK", 0),
        node=get("OMPI_COMM_WORLD_RANK") // local_size,  # OMPI_COMM_WORLD_NODE_RANK is an index within the node
        nodes=-(-size // local_size),
        launcher="mpi",
        host=socket.gethostname(),
        attempt_key=f"mpi-{env.get('OMPI_MCA_ess_base_jobid', env.get('PMIX_NAMESPACE', '0'))}",
    )


def _read_mpich(env: Environment) -> ProcessIdentity:
    get = _Variables(env, "MPICH").read_number
    size, local_size = get("PMI_SIZE"), get("MPI_LOCALNRANKS", 1, minimum=1)
    return ProcessIdentity(
        process=get("PMI_RANK"),
        processes=size,
        local=get("MPI_LOCALRANKID", 0),
        node=get("PMI_RANK") // local_size,
        nodes=-(-size // local_size),
        launcher="mpi",
        host=socket.gethostname(),
        attempt_key=f"mpi-{env.get('PMI_JOBID', '0')}",
    )


_READERS: tuple[tuple[str, Callable[[Environment], ProcessIdentity]], ...] = (
    # The innermost launcher wins: torchrun and mpirun may themselves run inside a Slurm step.
    ("SUBMITIT_LOCAL_GLOBALID", _read_submitit),
    ("TORCHELASTIC_RUN_ID", _read_torchrun),
    ("OMPI_COMM_WORLD_RANK", _read_open_mpi),
    ("MPI_LOCALRANKID", _read_mpich),
    ("SLURM_STEP_ID", _read_slurm),
    ("RANK", _read_torchrun),
)


def identify_process(env: Environment) -> ProcessIdentity | None:
    """Return this process's place in its job; None if no launcher started it as a rank.

    Neither a batch script, which has SLURM_PROCID=0 but no SLURM_STEP_ID, nor a person's `srun --pty` shell is a rank.
    Raises UserError if the launcher's variables contradict each other.
    """
    for variable, read in _READERS:
        if variable not in env:
            continue
        identity = read(env)
        # A step of several tasks that was started from such a shell inherits SLURM_PTY_PORT, and is one of ranks.
        if read is _read_slurm and "SLURM_PTY_PORT" in env and identity.processes == 1:
            continue
        _check_identity(identity)
        return identity
    return None


def _check_identity(identity: ProcessIdentity) -> None:
    """Raise UserError if the numbers contradict each other."""
    wrong = None
    if identity.process >= identity.processes:
        wrong = f"process {identity.process} of {identity.processes}"
    elif identity.node >= identity.nodes:
        wrong = f"node {identity.node} of {identity.nodes}"
    elif identity.local >= identity.processes:
        wrong = f"local index {identity.local} among {identity.processes} processes"
    elif identity.nodes > identity.processes:
        wrong = f"{identity.processes} processes on {identity.nodes} nodes"
    if wrong:
        raise UserError(
            f"{identity.launcher} environment: {wrong} cannot be; are variables of another job left in the environment?"
        )


def make_single_identity() -> ProcessIdentity:
    """Return the identity of the only process of a job."""
    return ProcessIdentity(
        process=0,
        processes=1,
        local=0,
        node=0,
        nodes=1,
        launcher="single",
        host=socket.gethostname(),
        attempt_key="single-0",
    )


def find_interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface of this host; None if it has none."""
    # struct ifreq: a name of at most 15 bytes and a zero, then the sockaddr_in, whose address is at bytes 4 to 8.
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def list_interfaces() -> dict[str, str]:
    """Return the interfaces of this host that have an IPv4 address: name -> address."""
    addresses = ((name, find_interface_address(name)) for _, name in socket.if_nameindex())
    return {name: address for name, address in addresses if address}


def find_local_address(host: str, nodes: int, interface: str | None) -> tuple[str, str]:
    """Return the (IPv4 address, interface) by which the job's other processes reach this host.

    interface: the one that the cluster's configuration names. Without one: the loopback in a job of one node, else the
    interface of the address that `host` resolves to. Raises UserError rather than return an address that other nodes
    cannot reach.
    """
    interfaces = list_interfaces()
    if interface is not None:
        if interface not in interfaces:
            raise UserError(f"cluster.fabric.interface={interface}: {host} has {', '.join(sorted(interfaces))}")
        return interfaces[interface], interface
    if nodes == 1:
        return "127.0.0.1", next((name for name, address in interfaces.items() if address == "127.0.0.1"), "lo")
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise UserError(f"{host} does not resolve on itself: name the network with cluster.fabric.interface") from None
    by_address = {address: name for name, address in interfaces.items()}
    if ipaddress.ip_address(address).is_loopback or address not in by_address:
        raise UserError(
            f"{host} resolves to {address} on itself, which other nodes cannot reach: "
            f"name the network with cluster.fabric.interface (one of {', '.join(sorted(set(interfaces) - {'lo'}))})"
        )
    return address, by_address[address]
