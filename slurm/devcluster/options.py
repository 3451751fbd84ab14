"""The options of `up`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from .processes import ClusterError

MAX_NODES = 200


@dataclass(frozen=True)
class Options:
    """The shape of the cluster; two `up` with equal options mean the same cluster."""

    nodes: int = 4
    cpus_per_node: int = 8
    mem_per_node: int = 8192
    gpus_per_node: int = 0
    gpu_type: str = "fake"
    switches: int = 0
    mtu: int = 9000
    requeue_delay: int = 5
    grace: int = 0
    private_tmp: bool = False
    cgroup: bool = False
    subids: str = ""
    accounting: bool = True

    def check(self) -> None:
        """Raise ClusterError for the first option out of its range."""
        for name, low, high in (
            ("nodes", 1, MAX_NODES),
            ("cpus_per_node", 1, 1024),
            ("mem_per_node", 1, 2**24),
            ("gpus_per_node", 0, 16),
            ("switches", 0, self.nodes),
            ("mtu", 1280, 65535),
            ("requeue_delay", 1, 3600),
            ("grace", 0, 3600),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ClusterError(f"--{name.replace('_', '-')} is {value}: must be {low} to {high}")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.gpu_type):
            raise ClusterError(f"--gpu-type is {self.gpu_type!r}: use lower-case letters, digits and _")
        if not re.fullmatch(r"[a-z0-9_-]*", self.subids):
            raise ClusterError(f"--subids is {self.subids!r}: give the name of a user")

    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def leaves(self) -> list[list[str]]:
        """Return the names of the nodes under each leaf switch, distributed as evenly as possible; one leaf when there
        are no switches.
        """
        count = max(1, self.switches)
        cuts = [round(k * self.nodes / count) for k in range(count + 1)]
        names = self.node_names()
        return [names[low:high] for low, high in pairwise(cuts)]

    def leaf_of(self, node: str) -> int:
        """Return the number (from 1) of the leaf switch above `node`."""
        return next(number for number, names in enumerate(self.leaves(), 1) if node in names)
