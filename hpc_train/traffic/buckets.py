"""How gradients and parameters are grouped into the collectives that carry them."""

from __future__ import annotations

from collections.abc import Iterable

MIB = 2**20
FIRST_BUCKET = 1 * MIB
"""Bytes of the first bucket of DistributedDataParallel where the user names no size, so that it leaves early."""
BUCKET = 25
"""MiB of the others, and of what fully_shard groups where parameters stay gathered."""


def buckets(sizes: Iterable[float], limit_mib: float | None) -> list[float]:
    """Bytes of each bucket of DistributedDataParallel.

    sizes: bytes of every gradient in the order in which they are ready. limit_mib: parallel.bucket_mib. A bucket is
    closed by the gradient that fills it.
    """
    limits = [FIRST_BUCKET, BUCKET * MIB] if limit_mib is None else [limit_mib * MIB]
    found: list[float] = []
    filled = 0.0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(found), len(limits) - 1)]:
            found.append(filled)
            filled = 0.0
    return [*found, filled] if filled else found


def groups(block: float, blocks: int, ends: float, limit_mib: float | None) -> int:
    """Groups of whole blocks that fully_shard gathers together, of a part of the model whose parameters stay gathered.

    block, ends: bytes of one block and of what is in none. 0: everything is one group, together with the ends.
    """
    limit = (BUCKET if limit_mib is None else limit_mib) * MIB
    if block * blocks + ends <= limit:
        return 0
    each = max(1, int(limit // block)) if block else blocks
    return -(-blocks // each)
