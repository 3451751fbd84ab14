"""The order of a pipeline: for each rank, which stage it computes with which micro-batch, one action after another.

Actions and orders as values, and as text in torch's compute-only CSV format: a line for each rank, a cell for each
action, such as 0F0. A schedule from a file is read here; shipped ones are made in generate.py.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from hpc_train.errors import UserError
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular


class Kind(StrEnum):
    """Kind of computation."""

    F = "F"
    """Forward."""
    I = "I"  # noqa: E741  the field's letter
    """Backward for the inputs: the gradient that the stage before waits for."""
    W = "W"
    """Backward for the weights, any time after I (Qi et al. 2024, arXiv:2401.10241)."""
    B = "B"
    """The whole backward: I and W at once."""


class Action(NamedTuple):
    """One computation; str() is torch's notation, such as 2F0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def results(self) -> tuple[Action, ...]:
        """The results of this computation, as F, I and W: B is split into I and W."""
        if self.kind is not Kind.B:
            return (self,)
        return Action(self.stage, Kind.I, self.micro_batch), Action(self.stage, Kind.W, self.micro_batch)

    def list_inputs(self, stages: int) -> tuple[Action, ...]:
        """List the results (F or I) that this computation needs. stages: number of stages of the whole pipeline."""
        if self.kind is Kind.F:
            return (Action(self.stage - 1, Kind.F, self.micro_batch),) if self.stage else ()
        if self.kind is Kind.W:
            return (Action(self.stage, Kind.I, self.micro_batch),)
        own = Action(self.stage, Kind.F, self.micro_batch)
        return (own,) if self.stage == stages - 1 else (own, Action(self.stage + 1, Kind.I, self.micro_batch))


@dataclass(frozen=True)
class Overlap:
    """A forward and a backward of one rank, scheduled as one entry so that each hides the other's communication.

    torch computes the forward, then the backward, and sends both results at the end.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


OrderEntry = Action | Overlap
"""One entry of a rank's list."""


def list_actions(step: OrderEntry) -> tuple[Action, ...]:
    """Return the computations of an entry, in the order in which they run."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


@dataclass(frozen=True)
class Order:
    """A complete pipeline schedule: what every rank computes, in order."""

    rows: tuple[tuple[OrderEntry, ...], ...]
    """The entries of each rank."""
    placement: tuple[int, ...]
    """The rank of each stage."""

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches, if they are numbered without a gap."""
        seen = (action.micro_batch for rank in range(self.ranks) for action in self.actions(rank))
        return max(seen, default=-1) + 1

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.kind is Kind.W for rank in range(self.ranks) for action in self.actions(rank))

    def actions(self, rank: int) -> Iterator[Action]:
        """Return all computations of a rank, in order."""
        for step in self.rows[rank]:
            yield from list_actions(step)


def make_looped_placement(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage if the stages go round the ranks.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    return tuple(range(ranks)) * virtual_stages


def make_v_shaped_placement(ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage if the stages go down the ranks and back up, two stages per rank.

    Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    return (*range(ranks), *reversed(range(ranks)))


_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def format_rows(order: Order) -> list[list[str]]:
    """Return the order as text: one row for each rank, one cell for each entry."""
    return [[str(step) for step in row] for row in order.rows]


def read_order(path: Path) -> Order:
    """Read an order from a CSV file; a stage belongs to the first rank that has an action of it.

    Raises UserError with file, line and cell (both counted from 1) for a cell that is no action. Does not check
    whether the order can train: see validate_order.
    """
    try:
        with io.StringIO(read_regular(path, MAX_TEXT_BYTES, follow=True).decode("utf-8-sig"), newline="") as file:
            lines = list(csv.reader(file, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path}: {why}; give a file of comma-separated actions, such as 0F0, one line per rank"
        ) from error
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    steps = tuple(_parse_row(path, number, cells) for number, cells in enumerate(lines, 1))
    return Order(steps, _find_placement(path, steps))


def parse_action(text: str) -> OrderEntry | None:
    """Parse one cell as `str` writes it; None if it is no action."""
    if together := _OVERLAP.fullmatch(text):
        first, second = (_parse_plain_action(half.strip()) for half in together.groups())
        if not first or not second or first.kind is not Kind.F or second.kind not in (Kind.I, Kind.B):
            return None
        return Overlap(first, second)
    return _parse_plain_action(text)


def _parse_plain_action(text: str) -> Action | None:
    match = _ACTION.fullmatch(text)
    return Action(int(match[1]), Kind(match[2]), int(match[3])) if match else None


def _parse_row(path: Path, line: int, cells: list[str]) -> tuple[OrderEntry, ...]:
    steps = []
    for column, cell in enumerate((cell.strip() for cell in cells), 1):
        step = parse_action(cell)
        if step is not None:
            steps.append(step)
        elif cell:
            raise UserError(f"{path}, line {line}, column {column}: {cell!r} {_explain_bad_cell(cell)}")
    return tuple(steps)


def _explain_bad_cell(cell: str) -> str:
    if _LOWERED.fullmatch(cell):
        return "is not a computation; leave communication and gathering out, they are added"
    return "is not an action; write <stage><F, I, W or B><micro-batch>, such as 0F0"


def _find_placement(path: Path, rows: tuple[tuple[OrderEntry, ...], ...]) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in (action for step in row for action in list_actions(step)):
            ranks.setdefault(action.stage, rank)
    if not ranks:
        raise UserError(f"{path}: has no actions; give one line of actions, such as 0F0, per rank")
    gap = next((stage for stage in range(len(ranks)) if stage not in ranks), None)
    if gap is not None:
        raise UserError(f"{path}: has stage {max(ranks)}, but no action of stage {gap}")
    return tuple(ranks[stage] for stage in range(len(ranks)))
