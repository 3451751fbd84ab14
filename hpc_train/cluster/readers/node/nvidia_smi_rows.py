"""Read the rows of `nvidia-smi topo -m`: find the matrix in a text, and the cells of each of its rows.

The text is cleaned first: escape codes, prompts, log prefixes, wrapped lines and legends. Then each row is read: its
link cells, and its CPU and NUMA cells, whatever separates or hides them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LINK_KIND = re.compile(r"X|SYS|SOC|NODE|PHB|PXB|PIX|NV[1-9]\d?|C2C|N/A")
"""Matches a cell of the matrix; SOC is the old name of SYS."""
_GLUED = rf"(?:{LINK_KIND.pattern})+(?!\S)"
_NAME = r"[A-Za-z][\w.+-]*\d"
_ROW = re.compile(rf"(?<!\S)(?:(?!N?V\d+\s){_NAME}[ \t]+(?={_GLUED})|(?:GPU|NIC)\d+(?={_GLUED}))")
_PEERS = re.compile(r"(?<!\S)GPU\d+(?:[ \t]+(?:X|OK|CNS|GNS|TNS|NS|DR|U))*[ \t]+(?:OK|CNS|GNS|TNS|NS|DR|U)(?!\S)")
_HEAD = re.compile(r"(?<!\S)GPU\d+(?=[ \t]*$|[ \t]+(?:[A-Za-z]\S*\d|CPU|NUMA|GPU|NIC|[A-Z]{1,3}$)|GPU\d|NIC\d|CPU)")
_AFFINITY = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID", re.IGNORECASE)
_MORE_NAMES = re.compile(r"[\w.+\- \t]+")
_MORE_CELLS = re.compile(r"[A-Z\d,/\- \t]+")
_ESCAPE = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]"
    r"|(?:\^\[|\\x1b|\\033|\\u001b|\\e|␛)?\[\d{0,3}(?:;\d{1,3})*m"
)
_INVISIBLE = dict.fromkeys(map(ord, "\ufeff\u200b\u200c\u200d\x00\x1b"), None) | dict.fromkeys(
    map(ord, "\u00a0\u2003\u2002\u3000|`"), " "
)
MAX_WRAPPED_LINES = 12
"""Maximum number of lines that a row may be wrapped to."""


@dataclass(frozen=True)
class WrappedLines:
    """One row, or the header, as it is in the text: one line, or more if a terminal wrapped it."""

    number: int
    """Number of the first line, from 1."""
    parts: tuple[str, ...]
    start: int
    """Index in the first line at which the row's label, or the header's first column, begins."""


@dataclass(frozen=True)
class TextMatrix:
    """The table of `nvidia-smi topo`: its header and its rows, with wrapped lines joined."""

    header: WrappedLines
    rows: tuple[WrappedLines, ...]
    peers: bool
    """A matrix of `topo -p2p`, which tells what GPUs may do and not how they are joined."""


def clean_lines(text: str) -> list[str]:
    """Split into lines without escape codes, invisible characters, quote and table marks; tabs stay."""
    plain = _ESCAPE.sub("", text).translate(_INVISIBLE)
    return plain.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def looks_like_matrix(text: str) -> bool:
    """Whether there is a header of GPUs with its CPU column, or with a row of link kinds below it."""
    return any(
        not matrix.peers and (matrix.rows or _has_affinity(matrix)) for matrix in find_matrices(clean_lines(text))
    )


def looks_like_peer_matrix(text: str) -> bool:
    """Whether there is a header of GPUs with a row of `topo -p2p` below it."""
    return any(matrix.peers for matrix in find_matrices(clean_lines(text)))


def find_matrices(lines: list[str]) -> Iterator[TextMatrix]:
    """Yield every header of GPUs with the rows below it, up to the next header."""
    index = 0
    while index < len(lines):
        header = _find_header(lines, index)
        if header is None:
            index += 1
            continue
        end = index + len(header.parts)
        while end < len(lines) and _find_header(lines, end) is None:
            end += 1
        below = range(index + len(header.parts), end)
        rows = tuple(_find_rows(lines, below))
        yield TextMatrix(header, rows, any(_PEERS.search(lines[number]) for number in below))
        index = end


def _find_header(lines: list[str], index: int) -> WrappedLines | None:
    line = lines[index]
    head = _HEAD.search(line) if "GPU" in line else None
    if head is None or _ROW.search(line) or _PEERS.search(line):
        return None
    parts, first = [line], line[head.start() :].split()[:1]
    for more in lines[index + 1 : index + MAX_WRAPPED_LINES]:
        again = more.split()[:1] in ([], first)
        # Stop at the first row: what looks like more of the header must consist of names of devices only.
        if again or _ROW.search(more) or _PEERS.search(more) or not _MORE_NAMES.fullmatch(more):
            break
        parts.append(more)
    else:
        parts = [line]
    return WrappedLines(index + 1, tuple(parts), head.start())


def _find_rows(lines: list[str], below: range) -> Iterator[WrappedLines]:
    for index in below:
        match = _ROW.search(lines[index])
        if match is None:
            continue
        parts = [lines[index]]
        while (
            (more := index + len(parts)) in below and len(parts) < MAX_WRAPPED_LINES and _is_continuation(lines[more])
        ):
            parts.append(lines[more])
        yield WrappedLines(index + 1, tuple(parts), match.start())


def _is_continuation(line: str) -> bool:
    return bool(line.strip()) and not _ROW.search(line) and _MORE_CELLS.fullmatch(line) is not None


def _has_affinity(matrix: TextMatrix) -> bool:
    return _AFFINITY.search(" ".join(matrix.header.parts)) is not None


def split_header(text: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]] | None:
    """Split a header, from its first GPU on; None if it is none.

    Returns the device names, the affinity columns (cpu, numa, gpu_numa) and where these start in `text`.
    """
    affinity_columns = list(_AFFINITY.finditer(text))
    names = _parse_names(text[: affinity_columns[0].start()] if affinity_columns else text)
    kinds = tuple({"C": "cpu", "N": "numa", "G": "gpu_numa"}[column.group()[0].upper()] for column in affinity_columns)
    rest = _AFFINITY.sub(" ", text[affinity_columns[0].start() :]) if affinity_columns else ""
    if (
        names is None
        or rest.strip()
        or kinds != tuple(column for column in ("cpu", "numa", "gpu_numa") if column in kinds)
    ):
        return None
    return names, kinds, tuple(column.start() for column in affinity_columns)


def _parse_names(text: str) -> tuple[str, ...] | None:
    names: list[str] = []
    for token in text.split():
        # Without separators, or after a cut, several names may be one word: GPU0GPU1.
        if re.fullmatch(r"(?:(?:GPU|NIC)\d+)+", token):
            names += re.findall(r"(?:GPU|NIC)\d+", token)
        elif re.fullmatch(_NAME, token) and not LINK_KIND.fullmatch(token):
            names.append(token)
        else:
            return None
    gpus = [name for name in names if re.fullmatch(r"GPU\d+", name)]
    complete = gpus and names[: len(gpus)] == gpus and len(set(names)) == len(names)
    return tuple(names) if complete else None


_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_TAB = 8


@dataclass(frozen=True)
class MatrixColumns:
    """The columns that a header names."""

    names: tuple[str, ...]
    affinity: tuple[str, ...]
    """Affinity columns that the header has, of cpu, numa and gpu_numa."""
    starts: tuple[int, ...] = ()
    """Columns at which the affinity columns start, with tabs expanded; () if lines were wrapped."""
    links: tuple[int, ...] = ()
    """Columns at which the columns of devices start, likewise."""


@dataclass(frozen=True)
class MatrixRow:
    """The cells of one row."""

    label: str
    kinds: tuple[str, ...]
    """Link kinds of its first columns; fewer than in the header if the row is cut."""
    tabbed: tuple[str, ...]
    """Cells that are separated by single tabs; () if something else separates them."""
    cpus: str | None
    numa: int | str | None
    tail: tuple[str, ...] = ()
    """Text behind the link cells."""


class NotARowError(ValueError):
    """A text is not a row of the matrix; the message says why."""


def read_row(text: str, columns: MatrixColumns, edge: int) -> MatrixRow:
    """Read a row from its label on, which is at column `edge` of its line. Raises NotARowError."""
    label = _parse_label(text, columns.names)
    kinds, spans, end = _read_links(text, len(label), len(columns.names))
    tail = tuple(text[end:].split())
    _check_kinds(label, tail, columns)
    if not label.startswith("GPU") or len(kinds) < len(columns.names):
        return MatrixRow(label, kinds, _split_tabs(text), None, None)
    cpus, numa = _read_affinity(_RowLayout(text, len(label), spans, end, tail, edge), columns)
    return MatrixRow(label, kinds, (), _parse_cpus(label, cpus), _parse_numa(label, numa), tail)


def _parse_label(text: str, names: tuple[str, ...]) -> str:
    # Longest name first: a row GPU10 also begins with GPU1.
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name) and (text[len(name) :][:1].isspace() or LINK_KIND.match(text, len(name))):
            return name
    raise NotARowError(f"row {text.split()[0]} has no column in the header")


def _read_links(text: str, start: int, limit: int) -> tuple[tuple[str, ...], list[tuple[int, int]], int]:
    """Read the link cells. Drivers drop the separators beyond 30 NICs, so a cell ends where its word does."""
    spans: list[tuple[int, int]] = []
    end = start
    while len(spans) < limit:
        space = re.compile(r"\s*").match(text, end)
        begin = space.end() if space else end
        match = LINK_KIND.match(text, begin)
        if match is None or not _find_cell_ends(text, match, len(spans) + 1 == limit):
            break
        spans.append(match.span())
        end = match.end()
    return tuple(text[a:b] for a, b in spans), spans, end


def _find_cell_ends(text: str, cell: re.Match[str], last: bool) -> bool:
    end = cell.end()
    if end == len(text) or text[end].isspace() or LINK_KIND.match(text, end):
        return True
    return last and text[end].isdigit() and not cell.group().startswith("NV")


def _check_kinds(label: str, tail: tuple[str, ...], columns: MatrixColumns) -> None:
    if len(tail) > len(columns.affinity):
        raise NotARowError(f"row {label}: unexpected {tail[0]!r}; expected a link kind (X, PIX, NV4, ...)")
    for token in tail:
        if token != "N/A" and not (token == "-1" or _is_list(token)):
            raise NotARowError(f"row {label}: {token!r} is neither a link kind nor a list of processors")


def _is_list(token: str) -> bool:
    if not _LIST.fullmatch(token) or len(token) > 4096:
        return False
    ranges = [part.partition("-") for part in token.split(",")]
    return all(not dash or int(low) <= int(high) for low, dash, high in ranges)


def _parse_cpus(label: str, cell: str) -> str | None:
    if cell == "-1":
        raise NotARowError(f"row {label}: '-1' is not a list of processors")
    return None if cell in ("", "N/A") else cell


def _parse_numa(label: str, cell: str) -> int | str | None:
    if cell in ("", "N/A", "-1"):
        return None
    if cell.isdigit() and len(cell) > 6:
        raise NotARowError(f"row {label}: {cell!r} is not a NUMA node")
    return int(cell) if cell.isdigit() else cell


@dataclass(frozen=True)
class _RowLayout:
    """A row and the positions of its cells."""

    text: str
    label: int
    spans: list[tuple[int, int]]
    end: int
    tokens: tuple[str, ...]
    edge: int


def _read_affinity(row: _RowLayout, columns: MatrixColumns) -> tuple[str, str]:
    """Read the CPU and NUMA cells, "" where the row does not tell.

    Inside a small cgroup the CPU cell is blank, and one cell stands alone. Which it is shows by its tab, else by its
    column, else (NUMA node or list) by its shape: in this order, because a long NIC name moves
    the header's columns but not the rows'.
    """
    if len(row.tokens) == len(columns.affinity):
        cells = dict(zip(columns.affinity, row.tokens, strict=True))
        return cells.get("cpu", ""), cells.get("numa", "")
    if not row.tokens or not {"cpu", "numa"} <= set(columns.affinity):
        return (row.tokens[0], "") if row.tokens and columns.affinity[0] == "cpu" else ("", "")
    # From the most to the least reliable evidence; each returns None if it does not apply to this text.
    for values in (_split_by_tabs(row), _split_by_stops(row), _split_by_header(row, columns)):
        if values is not None:
            return values
    return _split_by_shape(row.tokens, columns.affinity)


def _split_by_tabs(row: _RowLayout) -> tuple[str, str] | None:
    """Split the cells at tabs, as the driver prints them."""
    edges = [row.label, *(at for span in row.spans for at in span)]
    gaps = [row.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=False)]
    if not all(re.fullmatch(r" *\t *", gap) for gap in gaps):
        return None
    return _name_driver_cells([cell.strip() for cell in row.text[row.end :].split("\t")[1:]])


def _name_driver_cells(cells: list[str]) -> tuple[str, str] | None:
    """Return CPU, NUMA and, after a filling tab, the GPU's own NUMA node."""
    cells = [*cells, "", ""]
    if any(" " in cell for cell in cells) or (not any(cells[:2]) and any(cell != "N/A" for cell in cells if cell)):
        return None
    return cells[0], cells[1]


def _split_by_header(row: _RowLayout, columns: MatrixColumns) -> tuple[str, str] | None:
    """Take the cells under their columns, as someone who retypes the text with spaces puts them."""
    expanded = _expand_tabs(row)
    if not columns.starts or expanded is None or "\t" in row.text:
        return None
    spans, tail = expanded
    links = [start + row.edge for start, _ in spans]
    under = all(at - column in (0, 1) for at, column in zip(links, columns.links, strict=True))
    cells = {start + row.edge: token for start, token in tail}
    if not under or not set(cells) <= set(columns.starts):
        return None
    values = {name: cells[at] for name, at in zip(columns.affinity, columns.starts, strict=True) if at in cells}
    return values.get("cpu", ""), values.get("numa", "")


def _split_by_stops(row: _RowLayout) -> tuple[str, str] | None:
    """Split at spaces where a terminal expanded the driver's tabs: from stop to stop, how many tabs there were."""
    expanded = _expand_tabs(row)
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
    values = _name_driver_cells(cells)
    return ("", "") if values is not None and not values[0] and not values[1].isdigit() else values


def _expand_tabs(row: _RowLayout) -> tuple[list[tuple[int, int]], list[tuple[int, str]]] | None:
    """Return the columns of the link cells and of the tokens after them, from the label on, with tabs of eight."""

    def column(at: int) -> int:
        return len(row.text[:at].expandtabs(_TAB))

    spans = [(column(a), column(b)) for a, b in row.spans]
    tail = [(column(row.end + token.start()), token.group()) for token in re.finditer(r"\S+", row.text[row.end :])]
    return (spans, tail) if spans else None


def _split_by_shape(tokens: tuple[str, ...], columns: tuple[str, ...]) -> tuple[str, str]:
    """Tell the processors from the NUMA node by their shape.

    No driver is known to print the processors and not the NUMA node: a cell that is alone is a NUMA node if it can be
    one. A list could be either (0,3-9,11-17 is a real NUMA cell), so it is taken for neither.
    """
    if columns[-1] == "gpu_numa" and tokens[-1] == "N/A":
        tokens, columns = tokens[:-1], columns[:-1]
    if len(tokens) == len(columns):
        return tokens[0], tokens[1]
    alone = tokens[0] if len(tokens) == 1 and len(columns) == 2 else ""
    return "", alone if alone.isdigit() else ""


def _split_tabs(text: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in text.split("\t")[1:]) if "\t" in text else ()
