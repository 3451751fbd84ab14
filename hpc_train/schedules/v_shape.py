"""Schedules over two stages a rank that go there and back, so that the last stage is on the first rank.

ZB-V: Qi et al. 2024, arXiv:2401.10241, section 6. DualPipeV: the cut-in-half form (Sea AI Lab, "Cut-in-half", 2025) of
DualPipe (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1), in the steps of github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import Counter, deque

from hpc_train.schedules.actions import Action, Kind, Overlap, Step


class _Row:
    """One rank's entries as they are written down; each kind of each of its two stages counts micro-batches itself."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.steps: list[Step] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._owed: deque[Action] = deque()

    def add(self, *words: str) -> None:
        """Entries such as F0: the forward of the first stage with its next micro-batch."""
        self.steps += [self._take(word) for word in words]

    def overlap(self, forward: str, backward: str) -> None:
        """The two as one entry."""
        self.steps.append(Overlap(self._take(forward), self._take(backward)))

    def add_owed_weights(self) -> None:
        """The W of the oldest I that has none, if there is one."""
        if self._owed:
            owed = self._owed.popleft()
            self.steps.append(Action(owed.stage, Kind.W, owed.micro_batch))

    def _take(self, word: str) -> Action:
        kind, local = Kind(word[0]), int(word[1])
        counted = local, Kind.I if kind is Kind.B else kind
        action = Action(self._stages[local], kind, self._next[counted])
        self._next[counted] += 1
        if kind is Kind.I:
            self._owed.append(action)
        return action


def zbv(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    """Without a bubble between a rank's first and last entry where F, I and W take the same time."""
    count = max(2 * ranks - 1, micro_batches)  # what fills the pipeline; those that do not exist are left out again
    row = _Row(ranks, rank)
    row.add(*["F0"] * (2 * (ranks - rank) - 1))
    row.add(*["F1", "F0"] * rank)
    row.add(*["F1", "I1", "W1"] * (ranks - rank))
    ahead = 2 * ranks - 1 - rank
    for more in range(count - ranks):
        row.add(*["F0"] * (ahead + more < count), "I0", "W0", "F1", "I1", "W1")
    row.add(*["I0", "I1"] * rank)
    row.add(*["I0", "W0"] * (ranks - rank))
    row.add(*["W1"] * rank, *["W0"] * rank)
    return [step for step in row.steps if isinstance(step, Action) and step.micro_batch < micro_batches]


def dualpipev(ranks: int, rank: int, micro_batches: int) -> list[Step]:
    """Forwards of one direction beside backwards of the other; needs 2 p micro-batches at least."""
    after = ranks - 1 - rank
    row = _Row(ranks, rank)
    row.add(*["F0"] * (2 * after))
    row.add(*["F0", "F1"] * (rank + 1))
    for _ in range(after):
        row.add("I1")
        row.add_owed_weights()
        row.add("F1")
    for turn in range(micro_batches - 2 * ranks + rank + 1):
        if turn == 0 and after == 0:
            row.add("F0", "B1")  # apart, so that the rank before gets its input sooner
        else:
            row.overlap("F0", "B1")
        row.overlap("F1", "B0")
    for _ in range(after):
        row.add("B1")
        row.overlap("F1", "B0")
    _drain(row, rank, after)
    return row.steps


def _drain(row: _Row, rank: int, after: int) -> None:
    """The backwards that are left: the later half puts its weights off, and these fill the waits at the end."""
    backwards = [f"{local}" for _ in range(rank + 1) for local in "10"]
    whole = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    row.add(*[f"{'B' if index < whole else 'I'}{local}" for index, local in enumerate(backwards)])
    for _ in range(after):
        row.add_owed_weights()
        row.add("I0")
    for _ in range(rank + 1):
        row.add_owed_weights()
