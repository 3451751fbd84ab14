"""Where the matrix of `nvidia-smi topo -m` stands in a text: escape codes, prompts, log prefixes and legends aside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LINK = re.compile(r"X|SYS|SOC|NODE|PHB|PXB|PIX|NV[1-9]\d?|C2C|N/A")
"""A cell of the matrix; SOC is what old drivers called SYS."""
_GLUED = rf"(?:{LINK.pattern})+(?!\S)"
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
WRAPPED = 12
"""Lines that one row may have been wrapped to."""


@dataclass(frozen=True)
class Lines:
    """One row, or the header, as it stands in the text: one line, more where a terminal wrapped it."""

    number: int
    """Of the first line, from 1."""
    parts: tuple[str, ...]
    start: int
    """Where in the first of them the row's label, or the header's first column, begins."""


@dataclass(frozen=True)
class Matrix:
    header: Lines
    rows: tuple[Lines, ...]
    peers: bool
    """A matrix of `topo -p2p`, which tells what GPUs may do and not how they are joined."""


def clean_lines(text: str) -> list[str]:
    """Lines without escape codes, invisible characters, quote and table marks; tabs are kept."""
    plain = _ESCAPE.sub("", text).translate(_INVISIBLE)
    return plain.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def looks_like_matrix(text: str) -> bool:
    """Whether there is a header of GPUs with its CPU column, or with a row of link kinds below it."""
    return any(matrix.rows or matrix.peers or _has_affinity(matrix) for matrix in matrices(clean_lines(text)))


def matrices(lines: list[str]) -> Iterator[Matrix]:
    """Every header of GPUs and the rows below it, up to the next header."""
    index = 0
    while index < len(lines):
        header = _header(lines, index)
        if header is None:
            index += 1
            continue
        end = index + len(header.parts)
        while end < len(lines) and _header(lines, end) is None:
            end += 1
        below = range(index + len(header.parts), end)
        rows = tuple(_rows(lines, below))
        yield Matrix(header, rows, any(_PEERS.search(lines[it]) for it in below))
        index = end


def _header(lines: list[str], index: int) -> Lines | None:
    line = lines[index]
    found = _HEAD.search(line) if "GPU" in line else None
    if found is None or _ROW.search(line) or _PEERS.search(line):
        return None
    parts, first = [line], line[found.start() :].split()[:1]
    for more in lines[index + 1 : index + WRAPPED]:
        again = more.split()[:1] in ([], first)
        if again or _ROW.search(more) or _PEERS.search(more) or not _MORE_NAMES.fullmatch(more):
            break
        parts.append(more)
    else:
        parts = [line]
    return Lines(index + 1, tuple(parts), found.start())


def _rows(lines: list[str], below: range) -> Iterator[Lines]:
    for index in below:
        found = _ROW.search(lines[index])
        if found is None:
            continue
        parts = [lines[index]]
        while (more := index + len(parts)) in below and len(parts) < WRAPPED and _continues(lines[more]):
            parts.append(lines[more])
        yield Lines(index + 1, tuple(parts), found.start())


def _continues(line: str) -> bool:
    return bool(line.strip()) and not _ROW.search(line) and _MORE_CELLS.fullmatch(line) is not None


def _has_affinity(matrix: Matrix) -> bool:
    return _AFFINITY.search(" ".join(matrix.header.parts)) is not None


def split_header(text: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]] | None:
    """Device names, the affinity columns (cpu, numa, gpu_numa) and where these start in `text`, a header from its first
    GPU on. None where that is no header."""
    found = list(_AFFINITY.finditer(text))
    names = _names(text[: found[0].start()] if found else text)
    kinds = tuple({"C": "cpu", "N": "numa", "G": "gpu_numa"}[it.group()[0].upper()] for it in found)
    rest = _AFFINITY.sub(" ", text[found[0].start() :]) if found else ""
    if names is None or rest.strip() or kinds != tuple(it for it in ("cpu", "numa", "gpu_numa") if it in kinds):
        return None
    return names, kinds, tuple(it.start() for it in found)


def _names(text: str) -> tuple[str, ...] | None:
    names: list[str] = []
    for token in text.split():
        if re.fullmatch(r"(?:(?:GPU|NIC)\d+)+", token):
            names += re.findall(r"(?:GPU|NIC)\d+", token)
        elif re.fullmatch(_NAME, token) and not LINK.fullmatch(token):
            names.append(token)
        else:
            return None
    gpus = [it for it in names if re.fullmatch(r"GPU\d+", it)]
    whole = gpus and names[: len(gpus)] == gpus and len(set(names)) == len(names)
    return tuple(names) if whole else None
