"""Connect a job's processes to its store, which process 0 serves on a free port and protects with a secret.

Process 0 publishes address and secret in a file of a shared directory that only the job's user can read (Slurm, local),
or by a broadcast (MPI). Under torchrun the store is the agent's own, without a secret. No port is fixed or guessed: the
kernel picks one. Processes that do not come are named, with their nodes if Slurm tells them.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cluster.hostlist import compress_hostlist, expand_hostlist, list_task_hosts
from hpc_train.errors import MissingRanksError, UserError
from hpc_train.regular_files import write_private_file
from hpc_train.runtime.identity import ProcessIdentity, find_local_address
from hpc_train.runtime.mpi import load_mpi
from hpc_train.runtime.store.exchange import arrive_at_gate, count_arrived, wait_for_gate
from hpc_train.units import join_first

if TYPE_CHECKING:
    from torch.distributed import Store

    from hpc_train.runtime.store.client import JobStore

RENDEZVOUS_VARIABLE = "HPC_TRAIN_RENDEZVOUS"
"""Folder, private to one attempt of one job, that our launchers name to their ranks."""
_LARGEST_FILE = 4096
"""Bytes of the file with address and secret; a longer one is not ours."""
_GLOO_ASKS_ONCE = "GLOO_ENABLE_STORE_V2_API"
"""With it gloo asks for the addresses of a whole group in one message, not in two for each rank of it."""
_MEETING_GATE = "met"
"""Gate of the store that the processes arrive at once they are connected."""
_SHOWN = 8
"""Missing tasks that a message names."""


def name_arrival_key(process: int) -> str:
    """Return the store key that a process sets when it arrives."""
    return f"met/{process}"


@dataclass(frozen=True)
class MissingTasks:
    """The tasks that did not come to the rendezvous."""

    tasks: Sequence[int]
    hosts: Sequence[str]
    """Their nodes in order, each once, as far as Slurm tells."""

    def describe(self) -> str:
        """Return their names, such as `tasks 3, 7 on node2`."""
        hosts = f" on {compress_hostlist(self.hosts)}" if self.hosts else ""
        return f"task{'s' if len(self.tasks) > 1 else ''} {join_first(self.tasks, _SHOWN)}{hosts}"


def find_missing_tasks(store: Store, identity: ProcessIdentity, env: Mapping[str, str] = os.environ) -> MissingTasks:
    """Return the tasks that have not set their arrival key yet. Only process 0 asks."""
    missing = [process for process in range(1, identity.processes) if not store.check([name_arrival_key(process)])]
    return MissingTasks(missing, _find_hosts(missing, identity, env))


def _find_hosts(processes: Sequence[int], identity: ProcessIdentity, env: Mapping[str, str]) -> list[str]:
    """Return the nodes of these tasks in order, each once; unknown ones are left out."""
    names = _list_nodes(env)
    if not names or identity.processes % len(names):
        return []
    hosts = list_task_hosts(names, [identity.processes // len(names)] * len(names), env)
    return sorted({hosts[process] for process in processes if hosts[process]})


def _list_nodes(env: Mapping[str, str]) -> Sequence[str]:
    try:
        return list(expand_hostlist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""))
    except UserError:
        return []


@dataclass(frozen=True)
class _Meeting:
    """Address of the job's store, and the secret that proves a process belongs to the job."""

    host: str
    port: int
    secret: str
    """Hexadecimal digits of the secret."""


def open_job_store(
    identity: ProcessIdentity, env: Mapping[str, str], interface: str | None, timeout: timedelta
) -> Store:
    """Open the key-value store that all processes of the job share. Blocks until process 0 serves it.

    Process 0 blocks until all others are connected, so that it can remove the file with the secret.
    Raises UserError if the environment makes no sense or a process does not come within `timeout`.
    """
    import torch.distributed as dist

    if identity.processes == 1:
        return dist.HashStore()
    os.environ.setdefault(_GLOO_ASKS_ONCE, "1")
    if identity.launcher == "torchrun":
        return _open_agent_store(identity, env, timeout)
    if identity.launcher == "mpi" and RENDEZVOUS_VARIABLE not in env:
        return _meet_through_mpi(identity, interface, timeout)
    return _meet_at_file(Path(env.get(RENDEZVOUS_VARIABLE) or "."), identity, interface, timeout)


def _meet_at_file(folder: Path, identity: ProcessIdentity, interface: str | None, timeout: timedelta) -> Store:
    path = folder / f".rendezvous-{identity.attempt_key}.json"
    if identity.process != 0:
        store = _connect(_read_meeting(path, identity, timeout), timeout)
        store.set(name_arrival_key(identity.process), "")
        arrive_at_gate(store, _MEETING_GATE, identity.processes - 1)
        return store
    store, meeting = _host_store(identity, interface, timeout)
    try:
        _publish_meeting(path, meeting)
        _wait_for_others(store, identity, timeout)
    except BaseException:
        store.close()
        raise
    finally:
        with suppress(OSError):
            path.unlink()
    return store


def _meet_through_mpi(identity: ProcessIdentity, interface: str | None, timeout: timedelta) -> Store:
    if identity.process != 0:
        return _connect(_broadcast_meeting(None, identity), timeout)
    store, meeting = _host_store(identity, interface, timeout)
    _broadcast_meeting(meeting, identity)
    return store


def _connect(meeting: _Meeting, timeout: timedelta) -> JobStore:
    import torch.distributed as dist

    from hpc_train.runtime.store.client import JobStore

    try:
        return JobStore((meeting.host, meeting.port), bytes.fromhex(meeting.secret), timeout)
    except dist.DistError as error:
        raise _make_unreachable_error(meeting.host, meeting.port, error) from error


def _make_unreachable_error(host: str, port: int, error: Exception) -> UserError:
    reason = str(error).splitlines()[0].removeprefix(f"{host}:{port}: ")
    return UserError(f"the job's store at {host}:{port} cannot be reached: {reason}")


def _wait_for_others(store: Store, identity: ProcessIdentity, timeout: timedelta) -> None:
    if not wait_for_gate(store, _MEETING_GATE, timeout):
        missing = find_missing_tasks(store, identity)
        raise MissingRanksError(
            f"{count_arrived(store, _MEETING_GATE) + 1} of {identity.processes} processes came within "
            f"{timeout.total_seconds():.0f} s; missing: {missing.describe()}; is its node gone, is it still "
            "starting (launch.rendezvous_seconds), or on a network that cannot reach this one?",
            missing.tasks,
            missing.hosts,
        )


def _host_store(identity: ProcessIdentity, interface: str | None, timeout: timedelta) -> tuple[JobStore, _Meeting]:
    """Serve a store from this process, listening on the job's interface only."""
    from hpc_train.runtime.store.client import JobStore
    from hpc_train.runtime.store.protocol import make_secret
    from hpc_train.runtime.store.server import StoreServer

    address, _ = find_local_address(identity.host, identity.nodes, interface)
    secret = make_secret()
    server = StoreServer(address, secret, identity.processes)
    return JobStore(server.address, secret, timeout, server), _Meeting(*server.address, secret.hex())


def _open_agent_store(identity: ProcessIdentity, env: Mapping[str, str], timeout: timedelta) -> Store:
    """Connect to the torchrun agent's store; for ranks started by hand with MASTER_ADDR, rank 0 serves one."""
    import torch.distributed as dist

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise UserError(f"torchrun environment: {name} is not set; start the ranks with torchrun")
    serve = identity.process == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = env["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise UserError(f"torchrun environment: MASTER_PORT={port[:40]!r} is not a port")
    host = env["MASTER_ADDR"]
    try:
        store = dist.TCPStore(host, int(port), is_master=serve, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise _make_unreachable_error(host, int(port), error) from error
    # The agent's store outlives a restart: without a prefix, new ranks would read the addresses of dead ones.
    return dist.PrefixStore(identity.attempt_key, store)


def _broadcast_meeting(meeting: _Meeting | None, identity: ProcessIdentity) -> _Meeting:
    """Broadcast process 0's meeting to all processes; a collective, so process 0 calls it too."""
    try:
        MPI = load_mpi()
    except ImportError:
        raise UserError("ranks were started by mpirun: install mpi4py (pip install 'hpc_train[mpi]')") from None
    if identity.processes != MPI.COMM_WORLD.size:
        raise UserError(
            f"mpirun started {identity.processes} processes but mpi4py sees {MPI.COMM_WORLD.size}: "
            "mpi4py loads another MPI library than mpirun's"
        )
    buffer = bytearray(_LARGEST_FILE)
    if meeting is not None:
        text = _format_meeting(meeting).encode()
        buffer[: len(text)] = text
    MPI.COMM_WORLD.Bcast(buffer, root=0)  # bytes: mpi4py would unpickle an object
    return _parse_meeting(buffer.rstrip(b"\0").decode())


def _publish_meeting(path: Path, meeting: _Meeting) -> None:
    """Publish a meeting in a file that only this user can read; it is complete as soon as it has its name."""
    try:
        write_private_file(path, _format_meeting(meeting))
    except OSError as error:
        raise UserError(f"{path.absolute()}: {error.strerror}; the ranks meet through this file") from None


def _read_meeting(path: Path, identity: ProcessIdentity, timeout: timedelta) -> _Meeting:
    """Read the meeting once process 0 has published it. Raises UserError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return _parse_meeting(_read_private_text(path))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise MissingRanksError(
                    f"process {identity.process} on {identity.host} waited {timeout.total_seconds():.0f} s for "
                    f"{path.absolute()}, which process 0 writes: is that folder on a file system that all nodes share?",
                    (0,),
                    _find_hosts((0,), identity, os.environ),
                ) from None
        except (OSError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path.absolute()}: is not what process 0 of this job writes ({reason})") from None
        time.sleep(0.02)
        # An NFS client may go on believing that the file is absent until it looks at the folder again.
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208


def _read_private_text(path: Path) -> str:
    """Read a small file that belongs to this user and that no other user can read.

    Raises ValueError for any other file, and OSError.
    """
    # O_NONBLOCK: opening somebody's pipe would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(f"it is not this user's alone: owner {status.st_uid}, mode {status.st_mode & 0o777:o}")
        text = file.read(_LARGEST_FILE + 1)
    if len(text) > _LARGEST_FILE:
        raise ValueError("it is too long")
    return text.decode("ascii")


def _format_meeting(meeting: _Meeting) -> str:
    return json.dumps([meeting.host, meeting.port, meeting.secret])


def _parse_meeting(text: str) -> _Meeting:
    """Parse a meeting. Raises ValueError or TypeError if the text is not one."""
    host, port, secret = json.loads(text)
    if not isinstance(host, str) or not isinstance(port, int) or len(bytes.fromhex(secret)) < 16:
        raise ValueError("no address and secret")
    return _Meeting(host, port, secret)
