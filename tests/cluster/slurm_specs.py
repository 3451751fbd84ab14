"""Random clusters for the property tests of Slurm's formats."""

from __future__ import annotations

from hypothesis import strategies as st
from slurm_texts import Spec


@st.composite
def trees(draw: st.DrawFn) -> Spec:
    """Draw trees with several roots, uneven depth, leaves without nodes, and names with dots."""
    leaves, count = {}, 0
    for leaf in range(draw(st.integers(1, 6))):
        size = draw(st.integers(0, 4))
        leaves[f"leaf.{leaf}"] = [f"n{count + node:03d}.local" for node in range(size)]
        count += size
    free, upper = list(leaves), {}
    for number in range(draw(st.integers(0, 5))):
        take = draw(st.integers(1, 3))
        below, free = free[:take], free[take:]
        upper[f"sw{number}"] = below
        free.append(f"sw{number}")
    return Spec(leaves, {name: below for name, below in upper.items() if below})
