"""Which key and value heads a rank of the tp axis computes. No torch here."""

from __future__ import annotations


def attended(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """The key and value heads that the query heads of a rank attend to, each for equally many of them in turn.

    One is listed again where that is the only way.
    """
    own = heads // ranks
    wanted = [(rank * own + head) * kv_heads // heads for head in range(own)]
    distinct = sorted(set(wanted))
    each = own // len(distinct)
    even = [head for head in distinct for _ in range(each)]
    return tuple(distinct if even == wanted else wanted)
