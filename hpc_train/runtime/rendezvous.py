"""Where the processes of a job meet: a TCP store that process 0 opens on a free port and publishes.

Published by a file in a shared folder (Slurm, local), by a broadcast (MPI), or by the agent that is already there
(torchrun). No port is ever fixed or guessed: the kernel gives one, and the listening socket itself is handed over.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.errors import UserError
from hpc_train.runtime.arrivals import arrival_key, name_missing
from hpc_train.runtime.identity import Identity
from hpc_train.runtime.mpi import load_mpi
from hpc_train.runtime.network import own_address

if TYPE_CHECKING:
    from torch.distributed import Store

FOLDER_VARIABLE = "HPC_TRAIN_RENDEZVOUS"
"""Folder, private to one attempt of one job, that our launchers name to their ranks."""


def open_store(me: Identity, env: Mapping[str, str], interface: str | None, timeout: timedelta) -> Store:
    """The key-value store shared by all processes of the job. Blocks until process 0 has opened it.

    Process 0 waits for the others, so that it can take back what it published.
    Raises UserError if the environment makes no sense or a process cannot be met within `timeout`.
    """
    import torch.distributed as dist

    if me.processes == 1:
        return dist.HashStore()
    if me.launcher == "torchrun":
        return _agent_store(me, env, timeout)
    hosted = _host(me, interface, timeout) if me.process == 0 else None
    if me.launcher == "mpi" and FOLDER_VARIABLE not in env:
        address = _through_mpi((str(hosted.host), int(hosted.port)) if hosted else None, me)
        return dist.PrefixStore(me.attempt_key, hosted or _connect(*address, timeout))
    return _meet_at_file(hosted, Path(env.get(FOLDER_VARIABLE) or "."), me, timeout)


def _meet_at_file(
    hosted: dist.TCPStore | None,  # type: ignore[name-defined] # noqa: F821
    folder: Path,
    me: Identity,
    timeout: timedelta,
) -> Store:
    import torch.distributed as dist

    path = folder / f".rendezvous-{me.attempt_key}.json"
    if hosted is None:
        store = dist.PrefixStore(me.attempt_key, _connect(*_read(path, me, timeout), timeout))
        store.set(arrival_key(me.process), "")
        if store.add("met", 1) == me.processes - 1:
            store.set("all met", "")
        return store
    _publish(path, (str(hosted.host), int(hosted.port)))
    store = dist.PrefixStore(me.attempt_key, hosted)
    try:
        _wait_for_others(store, me, timeout)
    finally:
        path.unlink(missing_ok=True)
    return store


def _connect(host: str, port: int, timeout: timedelta, serve: bool = False) -> dist.TCPStore:  # type: ignore[name-defined] # noqa: F821
    import torch.distributed as dist

    try:
        return dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the job's store at {host}:{port} cannot be reached: {reason}") from error


def _wait_for_others(store: Store, me: Identity, timeout: timedelta) -> None:
    import torch.distributed as dist

    try:
        store.wait(["all met"], timeout)
    except dist.DistStoreError:
        here = store.add("met", 0) + 1
        raise UserError(
            f"{here} of {me.processes} processes came within {timeout.total_seconds():.0f} s; missing: "
            f"{name_missing(store, me)}; is its node gone, is it still starting (launch.rendezvous_seconds), or on a "
            "network that cannot reach this one?"
        ) from None


def _host(me: Identity, interface: str | None, timeout: timedelta) -> dist.TCPStore:  # type: ignore[name-defined] # noqa: F821
    """A store served by this process, listening on the job's own interface only."""
    import torch.distributed as dist

    address, _ = own_address(me.host, me.nodes, interface)
    listener = socket.create_server((address, 0), backlog=4096)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _agent_store(me: Identity, env: Mapping[str, str], timeout: timedelta) -> Store:
    """The store of the torchrun agent, or, for ranks started by hand with MASTER_ADDR, one that rank 0 serves."""
    import torch.distributed as dist

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            raise UserError(f"torchrun environment: {name} is not set; start the ranks with torchrun")
    serve = me.process == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port = env["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
        raise UserError(f"torchrun environment: MASTER_PORT={port[:40]!r} is not a port")
    store = _connect(env["MASTER_ADDR"], int(port), timeout, serve)
    # The agent's store outlives a restart: without a prefix, new ranks would read the addresses of dead ones.
    return dist.PrefixStore(me.attempt_key, store)


def _through_mpi(address: tuple[str, int] | None, me: Identity) -> tuple[str, int]:
    """Process 0's address, on all of them; a collective, so process 0 calls it too."""
    try:
        MPI = load_mpi()
    except ImportError:
        raise UserError("ranks were started by mpirun: install mpi4py (pip install 'hpc_train[mpi]')") from None
    if me.processes != MPI.COMM_WORLD.size:
        raise UserError(
            f"mpirun started {me.processes} processes but mpi4py sees {MPI.COMM_WORLD.size}: "
            "mpi4py loads another MPI library than mpirun's"
        )
    shared: tuple[str, int] = MPI.COMM_WORLD.bcast(address, root=0)
    return shared


def _publish(path: Path, address: tuple[str, int]) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    try:
        beside.write_text(json.dumps(address))
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path.absolute()}: {error.strerror}; the ranks meet through this file") from None


def _read(path: Path, me: Identity, timeout: timedelta) -> tuple[str, int]:
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            host, port = json.loads(path.read_text())
            return str(host), int(port)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process {me.process} on {me.host} waited {timeout.total_seconds():.0f} s for {path.absolute()}, "
                    "which process 0 writes: is that folder on a file system that all nodes share?"
                ) from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path.absolute()}: is not what process 0 of this job writes ({error})") from None
        time.sleep(0.02)
        # An NFS client may go on believing that the file is absent until it looks at the folder again.
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208
