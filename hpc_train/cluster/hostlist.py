"""Expand and compress Slurm's host lists: `rack[1-2]n[001-016],login` <-> names.

Order and duplicates are kept as Slurm keeps them. `list_task_hosts` deals tasks out to the names as srun does. The
functions at the end shorten names for a person to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from hpc_train.errors import UserError
from hpc_train.terminal import one_line

MAX_HOSTS = 1 << 18
"""Maximum number of names in a list; a longer list is refused before it is expanded."""
MAX_NAME_LENGTH = 255
"""Maximum number of characters of a name (RFC 1035)."""

_UNPRINTABLE = re.compile(r"[^\t\n\r -~]")
_SEPARATORS = re.compile(r"[\s,]+")
_ITEM = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_SINGLE = re.compile(r"[0-9]{1,20}(?:,[0-9]{1,20})*")
_FORBIDDEN = re.compile(r"[(){}\"'`<>=\\]")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,20})", re.DOTALL)


def expand_hostlist(text: str) -> list[str]:
    """Expand a host list to its names.

    Slurm's order: of two bracket groups the right one runs fastest; of more, the last runs fastest, then the first,
    the second and so on. Numbers are padded to the width of the low bound. Empty items count for nothing.
    Stricter than Slurm where Slurm guesses: `a[1-3`, `a]`, `a[1-]` and blanks inside brackets are refused.

    Raises UserError, one line, for anything else, for functions such as block{b1}, which only slurmctld can
    expand, and for more than MAX_HOSTS names.
    """
    _check_characters(text)
    if "[" not in text and "]" not in text:
        # Most lists are plain names, and there may be 100,000 of them: no parser needed.
        names = text.replace(",", " ").split()
        _check_length(text, max(map(len, names), default=0), len(names))
        return names
    parts = [_parse_item(item, text) for item in _parse_items(text)]
    _check_length(text, max((part.length for part in parts), default=0), sum(part.count for part in parts))
    return [name for part in parts for name in part.names()]


def compress_hostlist(names: Sequence[str]) -> str:
    """Write names as a host list that expands to exactly these, in this order. Names hold no bracket, comma or blank.

    Only neighbours are joined: `a1, a2, b1, a3` is `a[1-2],b1,a3`.
    """
    return ",".join(_write_run(prefix, numbers) for prefix, numbers in _find_runs(names))


def name_switch_group(names: Iterable[str]) -> str:
    """Name a set of switches, independent of the order in which a source lists them: `leaf[1-2,7]`."""
    return compress_hostlist(sorted(sorted(set(names)), key=natural_key))


@dataclass(frozen=True)
class _Range:
    """LOW-HIGH between brackets."""

    low: int
    high: int
    width: int
    """Characters to which numbers are padded with zeros."""

    def numbers(self) -> list[str]:
        return [f"{number:0{self.width}d}" for number in range(self.low, self.high + 1)]


@dataclass(frozen=True)
class _Group:
    """The text between two brackets: single numbers as written, or ranges where one of them is a range."""

    count: int
    width: int
    """Number of characters of its longest number."""
    single: tuple[str, ...] = ()
    ranges: tuple[_Range, ...] = ()

    def numbers(self) -> Sequence[str]:
        return self.single or [number for span in self.ranges for number in span.numbers()]


@dataclass(frozen=True)
class _Item:
    """One item of a list, cut at its brackets: literal, group, literal, ..., literal."""

    literals: tuple[str, ...]
    groups: tuple[_Group, ...]

    @property
    def count(self) -> int:
        return prod(group.count for group in self.groups)

    @property
    def length(self) -> int:
        return sum(map(len, self.literals)) + sum(group.width for group in self.groups)

    def names(self) -> Iterator[str]:
        # Slurm turns the last group fastest, then the first, the second,
        # ...: the outer groups in reverse give product that order.
        *outer, last = [group.numbers() for group in self.groups] or [("",)]
        after = "".join(self.literals[len(outer) + 1 :])
        for chosen in product(*reversed(outer)):
            before = "".join(chain.from_iterable(zip(self.literals, [*reversed(chosen), ""], strict=False)))
            yield from [before + number + after for number in last]


def _check_characters(text: str) -> None:
    if unprintable := _UNPRINTABLE.search(text):
        raise UserError(f"host list {_quote_shortened(text)}: {unprintable[0]!r} cannot be in a name")
    if forbidden := _FORBIDDEN.search(text):
        if forbidden[0] in "{}":
            what = "only slurmctld can expand {...}; give what `scontrol show hostnames` prints"
            raise UserError(f"host list {_quote_shortened(text)}: {what}")
        raise UserError(f"host list {_quote_shortened(text)}: {forbidden[0]} cannot be in a name")


def _parse_items(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        if match := _SEPARATORS.match(text, at):
            at = match.end()
        elif match := _ITEM.match(text, at):
            at = match.end()
            yield match[0]
        else:
            raise UserError(
                f"host list {_quote_shortened(text)}: a bracket without its partner; expected such as n[1-3,7]"
            )


def _parse_item(item: str, text: str) -> _Item:
    pieces = _GROUP.split(item)
    return _Item(tuple(pieces[0::2]), tuple(_parse_group(piece, text) for piece in pieces[1::2]))


def _parse_group(piece: str, text: str) -> _Group:
    pieces = piece.split(",")
    # Numbers without a range stay as written, however they are padded.
    if _SINGLE.fullmatch(piece):
        return _Group(len(pieces), max(map(len, pieces)), single=tuple(pieces))
    ranges = tuple(_parse_range(piece, text) for piece in pieces)
    widest = max(max(span.width, len(str(span.high))) for span in ranges)
    return _Group(sum(span.high - span.low + 1 for span in ranges), widest, ranges=ranges)


def _parse_range(piece: str, text: str) -> _Range:
    match = _RANGE.fullmatch(piece)
    if not match:
        raise UserError(
            f"host list {_quote_shortened(text)}: [{_quote_shortened(piece)[1:-1]}]; expected a number or LOW-HIGH"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise UserError(f"host list {_quote_shortened(text)}: [{piece}] runs backwards; expected LOW-HIGH")
    # The width of the low bound pads all numbers: [08-10] is 08, 09, 10.
    return _Range(low, high, len(match[1]))


def _check_length(text: str, longest: int, count: int) -> None:
    if count > MAX_HOSTS:
        raise UserError(f"host list {_quote_shortened(text)}: more than {MAX_HOSTS} names")
    if longest > MAX_NAME_LENGTH:
        raise UserError(f"host list {_quote_shortened(text)}: a name of more than {MAX_NAME_LENGTH} characters")


def _quote_shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _find_runs(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (prefix, numbers as written) of each run of names that differ in their number only."""
    numbers: list[str] = []
    before: str | None = None
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix = match[1] if match else name
        if numbers and (not match or prefix != before):
            yield before or "", numbers
            numbers = []
        if match:
            numbers.append(match[2])
        else:
            yield name, []
        before = prefix
    if numbers:
        yield before or "", numbers


def _write_run(prefix: str, numbers: list[str]) -> str:
    if len(numbers) <= 1:
        return prefix + "".join(numbers)
    ranges: list[tuple[str, str]] = []
    for number in numbers:
        low, high = ranges[-1] if ranges else ("", "")
        # Only if it is padded alike: n9 and n10 are a range, n09 and n10 are another, n09 and n010 are none.
        if ranges and number == f"{int(high) + 1:0{len(low)}d}":
            ranges[-1] = (low, number)
        else:
            ranges.append((number, number))
    return f"{prefix}[{','.join(low if low == high else f'{low}-{high}' for low, high in ranges)}]"


def list_task_hosts(nodes: Sequence[str], counts: Sequence[int], env: Mapping[str, str]) -> list[str]:
    """Return the node of each task of a Slurm step, by task; "" for all of them if that cannot be known.

    nodes: of the step, in Slurm's order. counts: tasks on each of them. env: of srun or of a task, where
    SLURM_DISTRIBUTION names the order: node by node (block, the default), a task on each node in turn (cyclic), or
    SLURM_DIST_PLANESIZE tasks on each node in turn (plane).
    """
    order = env.get("SLURM_DISTRIBUTION", "").partition(":")[0].partition(",")[0]
    kind, _, size = order.partition("=")
    if kind in ("", "*", "block"):
        return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    size = size or env.get("SLURM_DIST_PLANESIZE", "")
    if kind == "cyclic":
        return _deal_tasks(nodes, counts, 1)
    if kind == "plane" and size.isdecimal() and int(size) > 0:
        return _deal_tasks(nodes, counts, int(size))
    return [""] * sum(counts)  # "arbitrary": the order is in a file of the user's


def _deal_tasks(nodes: Sequence[str], counts: Sequence[int], size: int) -> list[str]:
    """Deal out tasks to the nodes round-robin, `size` at a time, until each node has its number of tasks."""
    remaining, hosts = list(counts), []
    while any(remaining):
        for index, node in enumerate(nodes):
            dealt = min(size, remaining[index])
            remaining[index] -= dealt
            hosts += [node] * dealt
    return hosts


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares the numbers in names as numbers: leaf2 before leaf10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,18})", name) if part]


_HOSTLIST_SYNTAX = re.compile(r"[\[\],\s]")


def fold_names(names: Iterable[str]) -> str:
    """Write names compactly: as a host list, or joined by commas if a host list cannot hold such names."""
    given = list(names)
    plain = not any(_HOSTLIST_SYNTAX.search(name) for name in given)
    return one_line(compress_hostlist(given) if plain else ", ".join(given))


_MAX_NAMES_LENGTH = 100
"""Characters of a list of names; longer lists are shortened."""


def shorten_names(names: Sequence[str]) -> str:
    """Write names compactly; if the list is too long, only the first, the last and the count."""
    folded = fold_names(names)
    if len(folded) <= _MAX_NAMES_LENGTH:
        return folded
    return f"{one_line(names[0])} ... {one_line(names[-1])} ({len(names)} nodes)"
