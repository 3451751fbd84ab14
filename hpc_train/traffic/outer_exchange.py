"""Compute what the copies of a loosely synchronised run exchange, and when."""

from __future__ import annotations

from hpc_train.config.parallel import SyncConfig
from hpc_train.traffic.axes import Flow

COMPRESSED_BITS = {"int8": 8, "int4": 4}


def list_exchange_steps(every: int, fragments: int) -> list[int]:
    """Return for each fragment the first step, from 1 to `every`, after which it is exchanged.

    They are spread evenly; the last fragment's is `every`. Needs fragments <= every.
    """
    return [(index + 1) * every // fragments for index in range(fragments)]


def count_message_bytes(elements: int, method: str, block: int) -> int:
    """Return the bytes of one copy's message: an integer for each element, and a float32 for each block."""
    return -(-elements * COMPRESSED_BITS[method] // 8) + 4 * -(-elements // block)


def list_outer_flows(sync: SyncConfig, elements: float, stored: int, copies: int) -> list[Flow]:
    """Return the flows of outer gradients in a mean step: each parameter is sent once in `every` steps.

    elements: parameters that a rank holds and trains. stored: bytes of one.
    """
    if copies == 1:
        return []
    assert sync.every is not None
    each, calls = elements / sync.fragments, sync.fragments / sync.every
    if sync.compression == "none":
        return [Flow(("dp_replicate",), "all_reduce", each * stored, calls, "outer gradients")]
    message = count_message_bytes(round(each), sync.compression, sync.block)
    return [Flow(("dp_replicate",), "all_gather", message * copies, calls, "compressed outer gradients")]


def count_bytes_sent(elements: int, stored: int, copies: int, sync: SyncConfig) -> float:
    """Return the bytes that a rank sends when all its `elements` are exchanged once, by a ring of the copies.

    A ring all-reduce sends 2 (copies - 1) / copies of the vector; gathering sends the message copies - 1 times.
    """
    if sync.compression == "none":
        return 2 * (copies - 1) / copies * elements * stored
    return (copies - 1) * count_message_bytes(elements, sync.compression, sync.block)
