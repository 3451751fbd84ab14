"""A row of `nvidia-smi topo -m`: its link cells, and the CPU and NUMA cells whatever separates or hides them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.cluster.nvidia_smi_text import LINK

_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_TAB = 8


@dataclass(frozen=True)
class Columns:
    """What the header says."""

    names: tuple[str, ...]
    affinity: tuple[str, ...]
    """Of cpu, numa, gpu_numa: those that it has."""
    starts: tuple[int, ...] = ()
    """Where the affinity columns start, tabs expanded, from the edge of the text; () where lines were wrapped."""
    links: tuple[int, ...] = ()
    """Likewise where the columns of devices start."""


@dataclass(frozen=True)
class Row:
    """What one row says."""

    label: str
    kinds: tuple[str, ...]
    """Of its first columns; fewer than the header has where the row is partial."""
    tabbed: tuple[str, ...]
    """The cells as single tabs separate them; () where something else does."""
    cpus: str | None
    numa: int | str | None
    tail: tuple[str, ...] = ()
    """What stands behind the link cells."""


class NotARowError(ValueError):
    """Says what is wrong with it."""


def read_row(text: str, columns: Columns, edge: int = 0) -> Row:
    """`text` from its label on, which stands at column `edge`. Raises NotARowError."""
    label = _label(text, columns.names)
    kinds, spans, end = _links(text, len(label), len(columns.names))
    tail = tuple(text[end:].split())
    _check(label, tail, columns)
    if not label.startswith("GPU") or len(kinds) < len(columns.names):
        return Row(label, kinds, _tabbed(text), None, None)
    cpus, numa = _affinity(_Layout(text, len(label), spans, end, tail, edge), columns)
    return Row(label, kinds, (), _cpus(label, cpus), _numa(label, numa), tail)


def _label(text: str, names: tuple[str, ...]) -> str:
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name) and (text[len(name) :][:1].isspace() or LINK.match(text, len(name))):
            return name
    raise NotARowError(f"row {text.split()[0]} has no column in the header")


def _links(text: str, start: int, most: int) -> tuple[tuple[str, ...], list[tuple[int, int]], int]:
    """Cells may have lost what separated them (drivers do that beyond 30 NICs): a cell ends where its word does."""
    spans: list[tuple[int, int]] = []
    end = start
    while len(spans) < most:
        space = re.compile(r"\s*").match(text, end)
        begin = space.end() if space else end
        found = LINK.match(text, begin)
        if found is None or not _cell_ends(text, found, len(spans) + 1 == most):
            break
        spans.append(found.span())
        end = found.end()
    return tuple(text[a:b] for a, b in spans), spans, end


def _cell_ends(text: str, cell: re.Match[str], last: bool) -> bool:
    end = cell.end()
    if end == len(text) or text[end].isspace() or LINK.match(text, end):
        return True
    return last and text[end].isdigit() and not cell.group().startswith("NV")


def _check(label: str, tail: tuple[str, ...], columns: Columns) -> None:
    if len(tail) > len(columns.affinity):
        raise NotARowError(f"row {label}: unexpected {tail[0]!r}; expected a link kind (X, PIX, NV4, ...)")
    for token in tail:
        if token != "N/A" and not (token == "-1" or _is_list(token)):
            raise NotARowError(f"row {label}: {token!r} is neither a link kind nor a list of processors")


def _is_list(token: str) -> bool:
    if not _LIST.fullmatch(token) or len(token) > 4096:
        return False
    ranges = [it.partition("-") for it in token.split(",")]
    return all(not dash or int(low) <= int(high) for low, dash, high in ranges)


def _cpus(label: str, cell: str) -> str | None:
    if cell == "-1":
        raise NotARowError(f"row {label}: '-1' is no list of processors")
    return None if cell in ("", "N/A") else cell


def _numa(label: str, cell: str) -> int | str | None:
    if cell in ("", "N/A", "-1"):
        return None
    if cell.isdigit() and len(cell) > 6:
        raise NotARowError(f"row {label}: {cell!r} is no NUMA node")
    return int(cell) if cell.isdigit() else cell


@dataclass(frozen=True)
class _Layout:
    """A row and where its cells stand in it."""

    text: str
    label: int
    spans: list[tuple[int, int]]
    end: int
    tokens: tuple[str, ...]
    edge: int


def _affinity(row: _Layout, columns: Columns) -> tuple[str, str]:
    """The CPU and NUMA cells, "" where the row does not tell. Inside a small cgroup the CPU cell is blank; what stands
    alone then is told by its tab, its column, or (NUMA node or list) its shape, in this order: a long NIC name moves
    the header's columns, and not the rows'."""
    if len(row.tokens) == len(columns.affinity):
        cells = dict(zip(columns.affinity, row.tokens, strict=True))
        return cells.get("cpu", ""), cells.get("numa", "")
    if not row.tokens or not {"cpu", "numa"} <= set(columns.affinity):
        return (row.tokens[0], "") if row.tokens and columns.affinity[0] == "cpu" else ("", "")
    for told in (_by_tabs(row), _by_stops(row), _by_header(row, columns)):
        if told is not None:
            return told
    return _by_shape(row.tokens, columns.affinity)


def _by_tabs(row: _Layout) -> tuple[str, str] | None:
    """A tab between any two cells: the driver's own output."""
    edges = [row.label, *(at for span in row.spans for at in span)]
    gaps = [row.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=False)]
    if not all(re.fullmatch(r" *\t *", gap) for gap in gaps):
        return None
    return _driver_cells([it.strip() for it in row.text[row.end :].split("\t")[1:]])


def _driver_cells(cells: list[str]) -> tuple[str, str] | None:
    """CPU, NUMA and, after a filling tab, the GPU's own NUMA node."""
    cells = [*cells, "", ""]
    if any(" " in it for it in cells) or (not any(cells[:2]) and any(it != "N/A" for it in cells if it)):
        return None
    return cells[0], cells[1]


def _by_header(row: _Layout, columns: Columns) -> tuple[str, str] | None:
    """Every cell under its column, as one who retypes it with spaces puts them."""
    expanded = _expanded(row)
    if not columns.starts or expanded is None or "\t" in row.text:
        return None
    spans, tail = expanded
    links = [start + row.edge for start, _ in spans]
    under = all(at - column in (0, 1) for at, column in zip(links, columns.links, strict=True))
    cells = {start + row.edge: token for start, token in tail}
    if not under or not set(cells) <= set(columns.starts):
        return None
    told = {name: cells[at] for name, at in zip(columns.affinity, columns.starts, strict=True) if at in cells}
    return told.get("cpu", ""), told.get("numa", "")


def _by_stops(row: _Layout) -> tuple[str, str] | None:
    """Spaces where a terminal expanded the driver's tabs: from stop to stop, how many tabs there were."""
    expanded = _expanded(row)
    if expanded is None:
        return None
    spans, tail = expanded
    on_stops = [start // _TAB == index and start % _TAB <= 1 for index, (start, _) in enumerate(spans, 1)]
    if not all(on_stops) or any(start % _TAB for start, _ in tail):
        return None
    cells, end = [], spans[-1][1]
    for start, token in tail:
        cells += [""] * (start // _TAB - end // _TAB - 1) + [token]
        end = start + len(token)
    told = _driver_cells(cells)
    return ("", "") if told is not None and not told[0] and not told[1].isdigit() else told


def _expanded(row: _Layout) -> tuple[list[tuple[int, int]], list[tuple[int, str]]] | None:
    """Columns of the link cells and of the tokens after them, from the label on, with tabs of eight."""

    def column(at: int) -> int:
        return len(row.text[:at].expandtabs(_TAB))

    spans = [(column(a), column(b)) for a, b in row.spans]
    tail = [(column(row.end + it.start()), it.group()) for it in re.finditer(r"\S+", row.text[row.end :])]
    return (spans, tail) if spans else None


def _by_shape(tokens: tuple[str, ...], columns: tuple[str, ...]) -> tuple[str, str]:
    """No driver is known to print the processors and not the NUMA node: what is alone is a NUMA node where it can be
    one. A list could be either (0,3-9,11-17 is a real NUMA cell): neither is told then."""
    if columns[-1] == "gpu_numa" and tokens[-1] == "N/A":
        tokens, columns = tokens[:-1], columns[:-1]
    if len(tokens) == len(columns):
        return tokens[0], tokens[1]
    alone = tokens[0] if len(tokens) == 1 and len(columns) == 2 else ""
    return "", alone if alone.isdigit() else ""


def _tabbed(text: str) -> tuple[str, ...]:
    return tuple(it.strip() for it in text.split("\t")[1:]) if "\t" in text else ()
