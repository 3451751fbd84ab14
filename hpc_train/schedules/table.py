"""Orders as text, in torch's compute-only CSV format: a line for each rank, a cell for each action, such as 0F0.

A cell may be empty, which is a pause that nothing waits for, or (0F1;3B0)OVERLAP_F_B.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.regular_files import TEXT, read_regular
from hpc_train.schedules.actions import Action, Kind, Order, Overlap, Step, parts

_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def rows(order: Order) -> list[list[str]]:
    """The cells of each rank."""
    return [[str(step) for step in row] for row in order.rows]


def write(order: Order, path: Path) -> None:
    """Write the order to a file that `read`, and torch's own reader, read. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows(order))


def read(path: Path) -> Order:
    """The order in a file, each stage on the rank that has its first action.

    Raises UserError with the file, the line and the column (of cells, both from 1) of what is no action. Whether the
    order trains is asked of `validate`.
    """
    try:
        with io.StringIO(read_regular(path, TEXT, follow=True).decode("utf-8-sig"), newline="") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: {why}; give a file of comma-separated actions, such as 0F0, a line a rank") from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    steps = tuple(_row(path, number, cells) for number, cells in enumerate(lines, 1))
    return Order(steps, _placement(path, steps))


def parse(text: str) -> Step | None:
    """One cell as `str` writes it; None if it is no action."""
    if together := _OVERLAP.fullmatch(text):
        first, second = (_action(half.strip()) for half in together.groups())
        if not first or not second or first.kind is not Kind.F or second.kind not in (Kind.I, Kind.B):
            return None
        return Overlap(first, second)
    return _action(text)


def _action(text: str) -> Action | None:
    match = _ACTION.fullmatch(text)
    return Action(int(match[1]), Kind(match[2]), int(match[3])) if match else None


def _row(path: Path, line: int, cells: list[str]) -> tuple[Step, ...]:
    steps = []
    for column, cell in enumerate((cell.strip() for cell in cells), 1):
        step = parse(cell)
        if step is not None:
            steps.append(step)
        elif cell:
            raise UserError(f"{path}, line {line}, column {column}: {cell!r} {_why_not(cell)}")
    return tuple(steps)


def _why_not(cell: str) -> str:
    if _LOWERED.fullmatch(cell):
        return "is not a computation; leave communication and gathering out, they are added"
    return "is no action; write <stage><F, I, W or B><micro-batch>, such as 0F0"


def _placement(path: Path, rows: tuple[tuple[Step, ...], ...]) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in (action for step in row for action in parts(step)):
            ranks.setdefault(action.stage, rank)
    if not ranks:
        raise UserError(f"{path}: has no actions; give a line a rank of actions such as 0F0")
    gap = next((stage for stage in range(len(ranks)) if stage not in ranks), None)
    if gap is not None:
        raise UserError(f"{path}: has stage {max(ranks)}, but no action of stage {gap}")
    return tuple(ranks[stage] for stage in range(len(ranks)))
