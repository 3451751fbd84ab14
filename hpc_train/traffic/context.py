"""The axis cp: keys and values round a ring, or heads for positions (parallel/context)."""

from __future__ import annotations

from hpc_train.traffic.flow import Flow

AXES = ("cp",)


def ring(cp: int, keys: float, item: int, forwards: int, backwards: int) -> list[Flow]:
    """Ring attention (Liu et al. 2023, arXiv:2310.01889).

    keys: numbers in the keys of a rank's positions, and as many in the values. item: bytes of one; gradients travel in
    four bytes at least. forwards, backwards: attentions of a step, those that are recomputed counted as forwards.
    """
    gradient = max(item, 4)
    return [
        Flow(AXES, "send_recv", 2 * keys * item, (cp - 1) * (forwards + backwards), "keys and values"),
        Flow(AXES, "send_recv", 2 * keys * gradient, (cp - 1) * backwards, "gradients of keys and values"),
    ]


def ulysses(queries: float, keys: float, item: int, passes: int) -> list[Flow]:
    """All-to-all around attention (Jacobs et al. 2023, arXiv:2309.14509).

    queries, keys: numbers in what a rank has of each, heads that go to several ranks as often as they go. passes:
    forwards and backwards of a step, each four exchanges: q, k, v and the result.
    """
    return [
        Flow(AXES, "all_to_all", queries * item, 2 * passes, "queries and results"),
        Flow(AXES, "all_to_all", keys * item, 2 * passes, "keys and values"),
    ]
