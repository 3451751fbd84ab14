"""The outcome of a reader: a Cluster, or a refusal of one line; anything else is a fault of the reader."""

from collections.abc import Callable

from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

NAME = "topo.txt"


def outcome(read: Callable[[str, str], Cluster], text: str) -> Cluster | str:
    try:
        return read(text, NAME)
    except UserError as error:
        return str(error)


def check(result: Cluster | str) -> Cluster | None:
    """Return the outcome, after checking that a cluster refers only to devices and nodes that it holds."""
    if isinstance(result, str):
        assert "\n" not in result
        assert result.startswith(NAME + ":")
        return None
    for node in result.nodes:
        ids = [device.id for device in (*node.gpus, *node.nics)]
        pairs = [(link.a, link.b) for link in result.links if link.node == node.name]
        assert len(set(ids)) == len(ids)
        assert len(set(pairs)) == len(pairs)
        assert all(ids.index(a) < ids.index(b) for a, b in pairs)
    return result
