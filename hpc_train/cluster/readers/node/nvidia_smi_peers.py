"""Read `nvidia-smi topo -p2p r` (or w, n, a, p): which GPUs of a node may use each other's memory directly.

The matrix does not say which of these capabilities it shows, and not how GPUs are joined.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict

from hpc_train.cluster.readers.node.nvidia_smi import matches_nvidia_smi
from hpc_train.cluster.readers.node.nvidia_smi_rows import clean_lines, looks_like_peer_matrix
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Node
from hpc_train.errors import UserError
from hpc_train.units import join_first

MAX_GPUS = 64
_REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "disabled by a setting of the driver",
    "NS": "not supported",
    "U": "unknown",
}
"""Cells other than X and OK, as the legend of nvidia-smi explains them."""
_CELL = rf"(?:X|OK|{'|'.join(_REASONS)})"
_ROW = re.compile(rf"(?<!\S)(GPU\d{{1,3}})((?:[ \t]+{_CELL})+)[ \t]*$")
_ANY_ROW = re.compile(r"(?<!\S)(GPU\d{1,3})[ \t]+\S")
_HEADER = re.compile(r"(?<!\S)GPU\d{1,3}(?:[ \t]+GPU\d{1,3})*[ \t]*$")
_EXAMPLE = "the whole output of `nvidia-smi topo -p2p r`"


def matches_nvidia_smi_peers(text: str) -> bool:
    """Whether the text has a matrix of `topo -p2p`, and none of `topo -m`."""
    return "GPU" in text and looks_like_peer_matrix(text) and not matches_nvidia_smi(text)


def read_nvidia_smi_peers(text: str, name: str) -> Cluster:
    """Read the GPUs; the link of a pair that may reach each other is P2P, other pairs have none and a note says why.

    Raises UserError for a missing row or cell, and for two matrices that differ.
    """
    lines = clean_lines(text)
    matrices = [
        (index + 1, _read_matrix(lines, index, name))
        for index, line in enumerate(lines)
        if _HEADER.search(line) and not _ROW.search(line)
    ]
    if not matrices:
        raise UserError(f"{name}:1: no line with the names of the GPUs above the rows; expected {_EXAMPLE}")
    for number, matrix in matrices[1:]:
        if matrix != matrices[0][1]:
            raise UserError(f"{name}:{number}: a second, different matrix; expected the output of one command")
    cells = matrices[0][1]
    gpus = list(dict.fromkeys(row for row, _ in cells))
    node = Node(UNNAMED_HOST, tuple(Gpu(gpu) for gpu in gpus))
    pairs = list(itertools.combinations(gpus, 2))
    links = tuple(Link(UNNAMED_HOST, a, b, "P2P") for a, b in pairs if cells[a, b] == cells[b, a] == "OK")
    return Cluster("nvidia_smi_peers", (node,), links, notes=tuple(_list_notes(pairs, cells)))


def _read_matrix(lines: list[str], header: int, name: str) -> dict[tuple[str, str], str]:
    """Return the cells of one matrix by (row, column). header: index of its first line. Raises UserError if damaged."""
    match = _HEADER.search(lines[header])
    assert match is not None
    gpus = match[0].split()
    if len(set(gpus)) < len(gpus) or len(gpus) > MAX_GPUS:
        raise UserError(f"{name}:{header + 1}: {len(gpus)} columns; expected at most {MAX_GPUS}, each GPU once")
    cells: dict[tuple[str, str], str] = {}
    rows: list[str] = []
    for number, line in enumerate(lines[header + 1 :], header + 2):
        if len(rows) == len(gpus):
            break
        row, any_row = _ROW.search(line), _ANY_ROW.search(line)
        if row is None and any_row is None:
            continue
        label = row[1] if row is not None else any_row[1] if any_row is not None else ""
        values = row[2].split() if row is not None else []
        if (
            label != gpus[len(rows)]
            or len(values) != len(gpus)
            or (values.index("X") if "X" in values else -1) != len(rows)
        ):
            raise UserError(
                f"{name}:{number}: not the row of {gpus[len(rows)]} with {len(gpus)} cells "
                f"(X, OK, {', '.join(_REASONS)}); expected {_EXAMPLE}"
            )
        rows.append(label)
        cells |= {(label, column): value for column, value in zip(gpus, values, strict=True)}
    if len(rows) < len(gpus):
        raise UserError(f"{name}:{header + 1}: {len(rows)} of {len(gpus)} rows; expected {_EXAMPLE}")
    return cells


def _list_notes(pairs: list[tuple[str, str]], cells: dict[tuple[str, str], str]) -> list[str]:
    without: dict[str, list[str]] = defaultdict(list)
    for a, b in pairs:
        for value in {cells[a, b], cells[b, a]} - {"OK"}:
            without[value].append(f"{a}-{b}")
    notes = ["how the GPUs are joined is not in this output (nvidia-smi topo -m has it)"] if pairs else []
    for value, named in sorted(without.items()):
        notes.append(f"no direct access between {join_first(named)}: {value}, {_REASONS[value]}")
    return notes
