"""Read `nvidia-smi topo -m` of every driver era: the links between the GPUs and NICs of a node, and their processors.

Used for files that users provide, and as a fallback: NVML and sysfs give more, and inside small cgroups this text loses
its CPU column. Users also paste it from terminals that wrapped it, and the driver's columns have changed often:
nvidia_smi_rows.py finds the matrix and reads its rows; this file joins the wrapped lines, checks the cells against each
other, and counts NVLinks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from hpc_train.cluster.readers.node.nvidia_smi_rows import (
    LINK_KIND,
    MatrixColumns,
    MatrixRow,
    NotARowError,
    TextMatrix,
    WrappedLines,
    clean_lines,
    find_matrices,
    looks_like_matrix,
    read_row,
    split_header,
)
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Nic, Node
from hpc_train.errors import UserError

MAX_NVLINKS = 18
"""Maximum number of NVLinks of a GPU: V100 6, A100 12, H100 18."""
MAX_BOND_LINKS = 4
"""NVLinks between two GPUs of a board where each has several such neighbours and no switch; wider ones are also what a
pair behind an NVSwitch shows (6, 8, 12, 18)."""
_LEGEND = re.compile(r"(?<!\S)(NIC\d+)\s*[:=]\s*(\S+)\s*$")
_BROKEN = re.compile(r".*\D|mlx\d")
"""Matches a name of a device that is cut off: complete names end in a number."""
_OWN_ROCM = re.compile(r"between two GPUs|ROCm System Management Interface|\(Topology\)")

LinkCells = dict[tuple[str, str], tuple[str, int]]
"""Kind and line of (row, column)."""


def matches_nvidia_smi(text: str) -> bool:
    """Whether the text has a matrix of GPUs printed by `topo -m`."""
    return "GPU" in text and not _OWN_ROCM.search(text) and looks_like_matrix(text)


def read_nvidia_smi(text: str, name: str) -> Cluster:
    """Read the node of one `nvidia-smi topo -m`, whatever text is around it.

    `numa` is a list such as 0,3-9 where the driver prints one; `cpus` is None where the cell is blank. `nvlinks` is
    filled where the matrix tells it, see `infer_nvlinks`. NIC ids are NIC0, NIC1, ...; old drivers name the columns
    by device. Raises UserError for a missing GPU row, an unknown cell, or cells that contradict each other.
    """
    lines = clean_lines(text)
    matrices = list(find_matrices(lines))
    readable = [matrix for matrix in matrices if matrix.rows and not matrix.peers]
    if not readable:
        line = matrices[0].header.number if matrices else 1
        if any(matrix.peers for matrix in matrices):
            raise UserError(f"{name}:{line}: `nvidia-smi topo -p2p`; expected the output of `nvidia-smi topo -m`")
        raise UserError(f"{name}:{line}: no rows of GPUs; expected a header GPU0 GPU1 ... and one row a GPU")
    # A log may hold the same matrix several times, once for each rank: that is fine as long as all are equal.
    read_ones = [(matrix.header.number, _MatrixReader(name, lines, matrix).cluster()) for matrix in readable]
    for number, cluster in read_ones[1:]:
        if cluster != read_ones[0][1]:
            raise UserError(f"{name}:{number}: a second, different matrix; expected the output of one node")
    return read_ones[0][1]


def infer_nvlinks(counts: list[int], peers: int) -> int | None:
    """Infer a GPU's number of NVLinks from its NV# cells. counts: the cells' numbers, towards `peers` GPUs in all.

    Point to point, a GPU's links are spread over its peers, so their number is the sum of the cells. Behind NVSwitches
    every cell shows all links that both sides have, so it is the largest cell. The two are told apart by a sum that is
    more than a GPU has (a switch), or by narrow bonds (no switch); otherwise None. Links to devices that the matrix
    does not show (GPUs outside the job, POWER9's processors) do not count.
    """
    if len(counts) <= 1:
        return counts[0] if counts else 0
    if sum(counts) > MAX_NVLINKS:
        return max(counts)
    return sum(counts) if max(counts) <= MAX_BOND_LINKS or len(counts) < peers else None


class _MatrixReader:
    """Reads one matrix, with the file name and lines for messages."""

    def __init__(self, name: str, lines: list[str], matrix: TextMatrix):
        self.name = name
        self.lines = lines
        self.matrix = matrix
        self.last = max((number for number, line in enumerate(lines, 1) if line.strip()), default=0)
        self.cut = bool(lines[-1].strip())

    def cluster(self) -> Cluster:
        columns, rows = self._read_columns_and_rows()
        cells = self._collect_cells(columns.names, rows)
        gpus = tuple(name for name in columns.names if name.startswith("GPU"))
        nics = columns.names[len(gpus) :]
        ids = {gpu: gpu for gpu in gpus} | {
            nic: nic if _is_numbered(nic) else f"NIC{index}" for index, nic in enumerate(nics)
        }
        kinds = _list_kinds(columns.names, cells)
        links = tuple(Link(UNNAMED_HOST, ids[a], ids[b], kind) for (a, b), kind in kinds.items())
        node = Node(UNNAMED_HOST, _make_gpus(gpus, [row for _, row in rows], kinds), self._make_nics(nics, ids))
        return Cluster("nvidia_smi", (node,), links)

    def _make_error(self, line: int, what: str) -> UserError:
        return UserError(f"{self.name}:{line}: {what}")

    def _read_columns_and_rows(self) -> tuple[MatrixColumns, list[tuple[int, MatrixRow]]]:
        """Read header and rows. A wrapped header can be joined in several ways; the rows tell which is right."""
        header = self.matrix.header
        readings: dict[MatrixColumns, list[tuple[int, MatrixRow]]] = {}
        problem = self._make_error(header.number, "not a header; expected GPU0 GPU1 ... NIC0 ... CPU Affinity ...")
        for columns in dict.fromkeys(_read_headers(header)):
            try:
                readings[columns] = self._read_rows(columns)
            except UserError as error:
                problem = error
        if len(readings) > 1:
            raise self._make_error(
                header.number, "the wrapped lines can be joined in several ways; expected them unwrapped"
            )
        if not readings:
            raise problem
        return next(iter(readings.items()))

    def _read_rows(self, columns: MatrixColumns) -> list[tuple[int, MatrixRow]]:
        rows: dict[str, tuple[int, MatrixRow]] = {}
        for lines in self.matrix.rows:
            row = self._read_row(lines, columns)
            if row.label in rows:
                raise self._make_error(lines.number, f"a second row {row.label}; expected the output of one node")
            self._check_length(lines, row, len(columns.names))
            rows[row.label] = lines.number, row
        missing = [name for name in columns.names if name.startswith("GPU") and name not in rows]
        if missing:
            raise self._make_error(self.matrix.header.number, f"{missing[0]} has no row below; expected one row a GPU")
        self._check_end(columns, list(rows.values()))
        return list(rows.values())

    def _read_row(self, lines: WrappedLines, columns: MatrixColumns) -> MatrixRow:
        edge = len(lines.parts[0][: lines.start].expandtabs())
        if len(lines.parts) == 1:
            try:
                return read_row(lines.parts[0][lines.start :].rstrip(), columns, edge)
            except NotARowError as error:
                raise self._make_error(lines.number, str(error)) from None
        # The row is wrapped: read every way of joining its lines, and require that all agree on the links. Column
        # positions mean nothing in wrapped text.
        readings = dict.fromkeys(_read_joined_rows(lines, replace(columns, starts=()), edge))
        if not readings:
            return self._read_row(replace(lines, parts=lines.parts[:1]), columns)
        first = next(iter(readings))
        if len({reading.kinds for reading in readings}) > 1:
            raise self._make_error(lines.number, f"row {first.label}, wrapped, can be joined in several ways")
        # All readings agree on the links; where they differ on the processors, those stay unknown.
        return first if len(readings) == 1 else replace(first, cpus=None, numa=None)

    def _check_length(self, lines: WrappedLines, row: MatrixRow, expected: int) -> None:
        ends = lines.number + len(lines.parts) > self.last
        if len(row.kinds) < expected and (row.label.startswith("GPU") or ends):
            raise self._make_error(
                lines.number, f"row {row.label} has {len(row.kinds)} of {expected} link cells; expected one a column"
            )

    def _check_end(self, columns: MatrixColumns, rows: list[tuple[int, MatrixRow]]) -> None:
        """Refuse a text that is cut within the last row's processors: what remains of them looks complete."""
        line, row = rows[-1]
        if not self.cut or line != self.last or not row.label.startswith("GPU") or row.tail[-1:] == ("N/A",):
            return
        expected = len(columns.affinity) if row.tail else max(len(other.tail) for _, other in rows)
        nics_follow = columns.affinity == ("cpu",) and len(rows) < len(columns.names)
        if len(row.tail) < expected or nics_follow:
            raise self._make_error(line, f"the text ends inside row {row.label}; expected its CPU and NUMA affinity")

    def _collect_cells(self, names: tuple[str, ...], rows: list[tuple[int, MatrixRow]]) -> LinkCells:
        cells: LinkCells = {}
        # Complete rows first: a row that lacks cells can be read in two ways, and complete ones tell which is right.
        for line, row in sorted(rows, key=lambda numbered: len(numbered[1].kinds), reverse=True):
            # A row that is too short has lost cells at its end, or blank ones between tabs.
            options = [dict(zip(names, row.kinds, strict=False))]
            if len(row.kinds) < len(names):
                options.append(
                    {at: kind for at, kind in zip(names, row.tabbed, strict=False) if LINK_KIND.fullmatch(kind)}
                )
            problems = [self._find_contradiction(cells, line, row.label, option) for option in options]
            fitting = [option for option, problem in zip(options, problems, strict=True) if problem is None]
            if not fitting:
                raise self._make_error(line, problems[0] or "")
            cells |= {(row.label, column): (kind, line) for column, kind in fitting[0].items()}
        return cells

    def _find_contradiction(self, cells: LinkCells, line: int, label: str, row: dict[str, str]) -> str | None:
        for column, kind in row.items():
            if (kind == "X") != (column == label):
                return f"{label}-{column} is {kind}; expected X where a device meets itself and only there"
            other, where = cells.get((column, label), (kind, line))
            if other != kind:
                return f"{label}-{column} is {kind}, but {column}-{label} in line {where} is {other}; expected the same"
        return None

    def _make_nics(self, nics: tuple[str, ...], ids: dict[str, str]) -> tuple[Nic, ...]:
        devices: dict[str, str] = {}
        start = self.matrix.header.number
        for number, line in enumerate(self.lines[start:], start + 1):
            match = _LEGEND.search(line)
            if match is None or match[1] not in nics:
                continue
            if devices.setdefault(match[1], match[2]) != match[2] or list(devices.values()).count(match[2]) > 1:
                raise self._make_error(number, f"NIC legend: {match[1]} is {match[2]}; expected one device a NIC")
            if self.cut and number == self.last and (len(devices) < len(nics) or _BROKEN.fullmatch(match[2])):
                raise self._make_error(number, "the text ends inside the NIC legend; expected a device a NIC")
        return tuple(Nic(ids[nic], devices.get(nic) if _is_numbered(nic) else nic) for nic in nics)


def _is_numbered(column: str) -> bool:
    return re.fullmatch(r"NIC\d+", column) is not None


def _read_headers(header: WrappedLines) -> Iterator[MatrixColumns]:
    for text in _join_wrapped(header):
        split = split_header(text)
        if split is not None:
            names, affinity, starts = split
            unwrapped = len(header.parts) == 1
            line = header.parts[0]
            at = [len(line[: header.start + start].expandtabs()) for start in starts]
            first = [len(line[: header.start + start.start()].expandtabs()) for start in re.finditer(r"\S+", text)]
            yield MatrixColumns(
                names, affinity, tuple(at) if unwrapped else (), tuple(first[: len(names)]) if unwrapped else ()
            )


def _read_joined_rows(lines: WrappedLines, columns: MatrixColumns, edge: int) -> Iterator[MatrixRow]:
    for text in _join_wrapped(lines):
        try:
            yield read_row(text, columns, edge)
        except NotARowError:
            continue


def _join_wrapped(lines: WrappedLines) -> Iterator[str]:
    """Yield all ways to join wrapped lines.

    A terminal cuts anywhere, even inside a word, and may drop the spaces at the cut.
    """
    parts = [lines.parts[0][lines.start :], *lines.parts[1:]]
    few = len(parts) <= 6  # 2^5 ways at most; of longer texts only the two in which all cuts are alike
    for between in itertools.product(("", " "), repeat=len(parts) - 1) if few else _join_all_alike(len(parts) - 1):
        yield "".join(itertools.chain(*zip(parts, (*between, ""), strict=True))).rstrip()


def _join_all_alike(count: int) -> Iterator[tuple[str, ...]]:
    return iter((("",) * count, (" ",) * count))


def _list_kinds(names: tuple[str, ...], cells: LinkCells) -> dict[tuple[str, str], str]:
    """Map every pair with a known link to its kind, in the header's order."""
    kinds = {}
    for pair in itertools.combinations(names, 2):
        kind, _ = cells.get(pair) or cells.get(pair[::-1]) or ("N/A", 0)
        if kind != "N/A":
            kinds[pair] = kind
    return kinds


def _make_gpus(names: tuple[str, ...], rows: list[MatrixRow], kinds: dict[tuple[str, str], str]) -> tuple[Gpu, ...]:
    by_label = {row.label: row for row in rows}
    bonds: dict[str, list[int]] = {name: [] for name in names}
    for (a, b), kind in kinds.items():
        if kind.startswith("NV"):
            bonds[a].append(int(kind[2:]))
            bonds[b].append(int(kind[2:]))
    joined = any(bonds.values())
    return tuple(
        Gpu(
            name,
            by_label[name].numa,
            by_label[name].cpus,
            nvlinks=infer_nvlinks(bonds[name], len(names) - 1) if joined else None,
        )
        for name in names
    )
