"""What `lfs getstripe` prints, with or without -y, by old releases and new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hpc_train.checkpoint.storage.striping import Component, Layout

_PAIR = re.compile(r"([A-Za-z_.]+):\s*(\{|\S*)")
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+0x[0-9a-f]+\s+(?:0x[0-9a-f]+|\d+)\s*\*?\s*")
"""obdidx, objid twice, group, and a mark at the OST that was asked for."""
_OST = re.compile(r"l_ost_idx:\s*(\d+)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FIELDS = {
    "lmm_stripe_count": "count",
    "lmm_stripe_size": "size",
    "lmm_stripe_offset": "offset",
    "lmm_pattern": "pattern",
    "lmm_pool": "pool",
    "stripe_count": "count",
    "stripe_size": "size",
    "stripe_offset": "offset",
    "pattern": "pattern",
    "pool": "pool",
    "lcme_flags": "flags",
    "lcme_extent.e_end": "end",
}
_MDT = ("mdt", "2")


@dataclass(frozen=True)
class Placed:
    """A component and where it is."""

    component: Component
    osts: tuple[int, ...] = ()
    """Indices of the OSTs it has objects on, in the order of the stripes; none before its first byte is written."""
    first: int | None = None
    """The OST that it begins on; None: any."""
    overstriped: bool = False
    """An OST may have several of its stripes (Lustre 2.13)."""
    released: bool = False
    """The data is on tape or elsewhere (HSM)."""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Striped:
    """The layout of a file, or what new files of a directory get."""

    parts: tuple[Placed, ...]

    @property
    def layout(self) -> Layout:
        """Without what was made of it."""
        return tuple(part.component for part in self.parts)


@dataclass
class _Found:
    """The texts of one component, as they were printed."""

    texts: dict[str, str] = field(default_factory=dict)
    osts: list[int] = field(default_factory=list)


def parse(text: str, path: str = "") -> Striped:
    """The layout of the one path that was asked for. Raises ValueError, in one line, for what is none.

    path: as it was given to the command, which most dialects print first; it may look like anything.
    """
    found = _components(text.removeprefix(f"{path}\n").splitlines())
    if not found or not all("count" in it.texts for it in found):
        raise ValueError("it printed no layout")
    return Striped(tuple(_placed(it) for it in found))


def _components(lines: list[str]) -> list[_Found]:
    found = [_Found()]
    for line in lines:
        row, ost = _ROW.fullmatch(line), _OST.search(line)
        if row or ost:
            found[-1].osts.append(int((row or ost)[1]))  # type: ignore[index]
            continue
        for name, value in _pairs(line):
            if name == "lcme_id" and (found[-1].texts or found[-1].osts):
                found.append(_Found())
            if name in _FIELDS:
                found[-1].texts[_FIELDS[name]] = value
    return [it for it in found if it.texts]


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    """Names and values of a line; most have one pair, that of a directory has them all."""
    for match in _PAIR.finditer(line):
        yield match[1], match[2]


def _placed(it: _Found) -> Placed:
    texts = it.texts
    pattern = set(texts.get("pattern", "raid0").split(","))
    on_mdt = bool(pattern & set(_MDT))
    component = Component(
        end=None if texts.get("end", "EOF") == "EOF" else _number(texts["end"]),
        count=_number(texts["count"]),
        size=(_number(texts.get("size", "0")) or None) if not on_mdt else None,
        pool=texts.get("pool") or None,
        on_mdt=on_mdt,
    )
    first = _number(texts["offset"]) if "offset" in texts else -1
    flags = tuple(flag for flag in texts.get("flags", "").split(",") if flag not in ("", "0", "N/A"))
    placed = Placed(component, tuple(it.osts), first if first >= 0 else None, flags=flags)
    return replace(placed, overstriped="overstriped" in pattern, released="released" in pattern)


def _number(text: str) -> int:
    """Plain, or with a unit (`1M`), or signed; -1 also as it looks in 16 or 32 unsigned bits."""
    match = re.fullmatch(r"(-?\d+)([KMGT]?)", text)
    if not match:
        raise ValueError(f"{text!r} is not a number")
    value = int(match[1]) * _UNITS[match[2]]
    return -1 if value in (0xFFFF, 0xFFFFFFFF) else value
