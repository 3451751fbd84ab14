"""Estimate how long a job takes to start, for any number of ranks, from parts measured on this machine.

All ranks connect to one store, which process 0 serves in one thread. So the store's work for one rank is multiplied by
the number of ranks, and this is the part of the start that grows with the job:

    join    a connection, with the proof that both sides know the secret, and the requests of rendezvous and rank map
    groups  the requests of gloo: an address given, and, unless ranks connect on demand, those of the whole group asked
            for; for the default group and for each axis of the mesh that is no copy of it
    mesh    every rank for itself: coordinates and groups of a mesh of so many ranks

Requests of gloo are counted in tests/runtime/test_job_store.py; seconds are CPU time of client and server together,
so that they are an upper bound of the server's. What depends on the machine is left out: reading Python's packages from
shared storage, CUDA's start, NCCL's connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from hpc_train.config.parallel import Degrees
from hpc_train.runtime.device_settings import LAZY_GLOO_FROM
from hpc_train.runtime.store.client import JobStore
from hpc_train.runtime.store.protocol import make_secret
from hpc_train.runtime.store.server import StoreServer
from hpc_train.units import format_seconds

JOIN_REQUESTS = 8
"""Requests of one rank: two for the rendezvous, six for the rank map (runtime/rank_assignment.py)."""
_CONNECTIONS, _REQUESTS = 32, 256
"""How many of each are timed."""


@dataclass(frozen=True)
class StoreSpeed:
    """CPU seconds of the job's store, client and server together, measured over loopback."""

    connection: float
    request: float


@dataclass(frozen=True)
class StartUp:
    """The start of a job. Seconds until all ranks have done it."""

    ranks: int
    speed: StoreSpeed
    groups: int
    """Process groups of a rank."""
    group_requests: int
    """Requests of a rank for all of them."""
    sockets: int
    """Connections between ranks that gloo makes at the start; 0: on demand."""
    join_seconds: float
    group_seconds: float
    mesh_seconds: float
    """Every rank makes its own mesh, at the same time as the others."""

    @property
    def seconds(self) -> float:
        return self.join_seconds + self.group_seconds + self.mesh_seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}

    def describe(self) -> str:
        """Return one line for the report."""
        connects = "ranks connect on demand" if not self.sockets else f"{self.sockets:,} connections between ranks"
        return (
            f"start: about {format_seconds(self.seconds)} from {self.ranks:,} running processes to the mesh (join "
            f"{format_seconds(self.join_seconds)}, {self.groups} groups {format_seconds(self.group_seconds)}, mesh "
            f"{format_seconds(self.mesh_seconds)}; {connects}); without imports, CUDA and NCCL"
        )


def estimate_start_up(degrees: Degrees, speed: StoreSpeed, mesh_seconds: float) -> StartUp:
    """Estimate the start of a job. mesh_seconds: to make the mesh of so many ranks, on one of them."""
    ranks = degrees.world
    sizes = [ranks, *(size for size in degrees.sizes if size != ranks)]  # an axis of all ranks is the default group
    at_once = 0 < ranks < LAZY_GLOO_FROM
    requests = len(sizes) * (2 if at_once else 1)
    pairs = sum(ranks * (size - 1) // 2 for size in sizes)
    return StartUp(
        ranks=ranks,
        speed=speed,
        groups=len(sizes),
        group_requests=requests,
        sockets=pairs if at_once else 0,
        join_seconds=ranks * (speed.connection + JOIN_REQUESTS * speed.request),
        group_seconds=ranks * requests * speed.request,
        mesh_seconds=mesh_seconds,
    )


def measure_store() -> StoreSpeed:
    """Measure the job's store in this process: connections, and requests over one of them."""
    secret, limit = make_secret(), timedelta(minutes=1)
    server = StoreServer("127.0.0.1", secret, _CONNECTIONS)
    stores: list[JobStore] = []
    try:
        connection = _measure_calls(lambda: stores.append(JobStore(server.address, secret, limit)), _CONNECTIONS)
        request = _measure_calls(lambda: stores[0].set("start-up", "x" * 128), _REQUESTS)
    finally:
        for store in stores:
            store.close()
        server.close()
    return StoreSpeed(connection, request)


def _measure_calls(call: Callable[[], object], count: int) -> float:
    """Return CPU seconds of a call, of all threads of this process: a busy machine changes wall time."""
    started = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - started) / count
