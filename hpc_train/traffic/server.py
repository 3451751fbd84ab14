"""Parameter servers and peers (parallel/server): one-sided messages, given as the collectives that they amount to."""

from __future__ import annotations

from hpc_train.traffic.flow import Flow

Axes = tuple[str, ...]
_ADAM = 3
"""Parameters and the two moments of AdamW: what a worker fetches and puts back where it updates by itself."""


def served(axes: Axes, mode: str, size: float, servers: int, ranks: int) -> list[Flow]:
    """size: bytes of all parameters.

    synchronous: every rank adds its gradient to each server's share and reads the new parameters. asynchronous: it
    reads the parameters, then fetches each share with its state and puts it back. peer: it reads the parameters of the
    ranks before and after it. `parallel.server.hybrid` lets one rank of a node do it for all; not counted.
    """
    if not axes:
        return []
    share = size / servers
    if mode == "peer":
        return [Flow(axes, "send_recv", size, min(2, ranks - 1), "parameters")]
    if mode == "synchronous":
        return [
            Flow(axes, "reduce", share, servers, "gradients"),
            Flow(axes, "broadcast", share, servers, "parameters"),
        ]
    return [
        Flow(axes, "reduce", _ADAM * share, servers, "parameters and optimizer state"),
        Flow(axes, "broadcast", (1 + _ADAM) * share, servers, "parameters and optimizer state"),
    ]
