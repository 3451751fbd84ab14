"""Names as a person writes them: node[33-48,50]. Order kept, and nothing but what can be printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpc_train.cluster.slurm.hostlist import compress

_SPECIAL = re.compile(r"[\[\],\s]")


def fold(names: Iterable[str]) -> str:
    """Neighbours of one prefix together, as Slurm writes a host list; names that it could not have are just joined."""
    given = list(names)
    plain = not any(_SPECIAL.search(name) for name in given)
    return printable(compress(given) if plain else ", ".join(given))


def heading(names: Sequence[str], longest: int = 100) -> str:
    """The same, or the first and last name and how many there are, where that is longer."""
    folded = fold(names)
    return (
        folded if len(folded) <= longest else f"{printable(names[0])} ... {printable(names[-1])} ({len(names)} nodes)"
    )


def printable(text: str) -> str:
    """One line that cannot steer a terminal, whatever names a file holds."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def plural(level: str) -> str:
    """Of a level's name, as a heading."""
    known = {"domain": "NVLink domains", "all": "no switch is known", "leaf": "leaves"}
    return known.get(level, f"{level} switches" if level.startswith("level") else f"{level}s")
