"""The seconds in which demands can be moved at once over directed links, by a linear program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

Ends = tuple[object, object]


def solve_concurrent_flow(demands: Mapping[Ends, float], capacity: Mapping[Ends, float]) -> float:
    """Return the seconds in which all demands can be moved at once, each over any paths of the directed links.

    Demands of one source are one flow, which gives the same optimum as one flow each.
    """
    links, points = list(capacity), sorted({end for link in capacity for end in link}, key=repr)
    at = {point: number for number, point in enumerate(points)}
    sources = sorted({start for start, _ in demands}, key=repr)
    # Variables: the flow of each source on each link, then the share of all demands that moves in a second.
    share = len(sources) * len(links)
    cells: list[tuple[int, int, float]] = []
    room: list[tuple[int, int, float]] = []
    for number, source in enumerate(sources):
        first = number * len(points)
        for link, (a, b) in enumerate(links):
            column = number * len(links) + link
            cells += [(first + at[a], column, 1.0), (first + at[b], column, -1.0)]
            room.append((link, column, 1.0))
        for (start, end), amount in demands.items():
            if start == source:
                cells += [(first + at[start], share, -amount), (first + at[end], share, amount)]
    goal = np.zeros(share + 1)
    goal[share] = -1
    found = linprog(
        goal,
        A_ub=_matrix(room, len(links), share + 1),
        b_ub=np.array([capacity[link] for link in links]),
        A_eq=_matrix(cells, len(sources) * len(points), share + 1),
        b_eq=np.zeros(len(sources) * len(points)),
        method="highs",
    )
    assert found.status == 0, found.message
    return 1 / float(found.x[share])


def _matrix(cells: list[tuple[int, int, float]], rows: int, columns: int) -> coo_array:
    row, column, value = (np.array(part) for part in zip(*cells, strict=True))
    return coo_array((value, (row.astype(int), column.astype(int))), shape=(rows, columns))
