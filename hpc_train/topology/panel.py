"""Panel: everything that one side of a picture shows, without saying where on the paper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.levels import NamedLevel


@dataclass(frozen=True)
class Panel:
    """One order of ranks on one fabric."""

    key: str
    """Prefix of its SVG ids: before, after or here."""
    title: str
    levels: tuple[NamedLevel, ...]
    """Innermost first, as placement.levels gives them; the first is `node`."""
    gpus: int
    """Cells of a node."""
    colour: NDArray[np.int64] | None = None
    """[nodes, gpus]: number of the axis' group that the GPU's rank is in."""
    place: NDArray[np.int64] | None = None
    """[nodes, gpus]: which of its group's ranks it is."""
    first_rank: NDArray[np.int64] | None = None
    """[nodes]: lowest rank on the node."""
    load: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Level -> [groups]: seconds a step that the link out of a group is busy."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.levels[0].labels

    @cached_property
    def order(self) -> list[int]:
        """Nodes so that those of one group stand together at every level, and groups by name: no lines cross."""
        names = [[_natural(label, number) for number, label in enumerate(it.labels)] for it in reversed(self.levels)]
        groups = [level.group.tolist() for level in reversed(self.levels)]
        keys = [
            tuple(name[group[node]] for name, group in zip(names, groups, strict=True)) for node in range(self.nodes)
        ]
        return sorted(range(self.nodes), key=keys.__getitem__)

    @property
    def nodes(self) -> int:
        return len(self.names)

    @property
    def heaviest(self) -> float:
        """Seconds of the busiest link."""
        return max((float(load.max()) for load in self.load.values() if load.size), default=0.0)

    def load_of(self, level: NamedLevel, group: int) -> float | None:
        """None where it is not known, as on a picture of a machine without a run."""
        load = self.load.get(level.name)
        return None if load is None else float(load[group])

    def members(self, level: NamedLevel) -> list[list[int]]:
        """[groups]: its nodes, in drawing order."""
        held: list[list[int]] = [[] for _ in level.labels]
        for node in self.order:
            held[int(level.group[node])].append(node)
        return held


def _natural(label: str, number: int) -> tuple[list[tuple[str, int]], int]:
    """leaf2 before leaf10; number tells groups of one name apart."""
    pieces = re.findall(r"(\D*)(\d{0,18})", label)
    return [(text, int(digits or -1)) for text, digits in pieces], number
