"""From the overrides of `-m` to the points of a sweep, in Hydra's own grammar: a,b  choice()  range()  glob()."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from hpc_train.config import suggest
from hpc_train.config.compose import options
from hpc_train.config.options import GROUPS
from hpc_train.errors import UserError

MOST_POINTS = 100_000
_OF_THE_SWEEP = {
    "run_dir": "it is the directory of the sweep, in which each point has its own",
    "launch.kind": "use `hpc-train submit -m` for Slurm and `hpc-train train -m` for this machine",
    "launch": "its options say where all of the sweep runs; sweep over single settings, such as launch.cpus_per_rank",
    "launch.parallel_points": "it is a setting of the whole sweep",
    "launch.points_per_job": "it is a setting of the whole sweep",
    "launch.chain": "it is a setting of single runs",
}
"""What one sweep has one of, and why."""


@dataclass(frozen=True)
class Combination:
    """The overrides of one point."""

    words: tuple[str, ...]
    """All of them, as for a single run."""
    swept: tuple[str, ...]
    """Those in which points differ."""

    @property
    def name(self) -> str:
        """For a message."""
        return " ".join(self.swept) or "the only point"


@dataclass(frozen=True)
class Grid:
    """All combinations of values: of an override that is not swept there is one."""

    values: tuple[tuple[str, ...], ...]
    """The override's words, `key=value` each, for every override in order."""
    axes: tuple[int, ...]
    """Which of them are swept."""

    def __len__(self) -> int:
        return math.prod(map(len, self.values))

    @property
    def keys(self) -> tuple[str, ...]:
        """The swept keys, `optim.lr`."""
        return tuple(self.values[axis][0].partition("=")[0].lstrip("+") for axis in self.axes)

    def __iter__(self) -> Iterator[Combination]:
        """The last axis varies fastest, as in Hydra's own sweeper."""
        for words in product(*self.values):
            yield Combination(words, tuple(words[axis] for axis in self.axes))


def read_grid(overrides: Sequence[str], config_dir: str | None = None) -> Grid:
    """The points that these overrides describe.

    Raises UserError, in one line, for what cannot be read, for what has no points by itself (interval), and for what
    one sweep has one of.
    """
    parser = OverridesParser.create(config_loader=_Groups(config_dir))  # type: ignore[arg-type]
    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    for text in overrides:
        item = _parsed(text, parser)
        _check(item, text)
        # Of two for the same key the last one counts.
        found[item.get_key_element()] = (_words(item, text, config_dir), item.is_sweep_override())
    grid = Grid(
        tuple(words for words, _ in found.values()),
        tuple(index for index, (_, swept) in enumerate(found.values()) if swept),
    )
    if len(grid) > MOST_POINTS:
        raise UserError(f"{len(grid):,} points: a sweep has at most {MOST_POINTS:,}; leave out some values")
    return grid


@dataclass(frozen=True)
class _Groups:
    """What Hydra's parser asks for a glob's names: those that a user can choose, without the schemas behind them."""

    config_dir: str | None

    def get_group_options(self, group: str, **_: Any) -> list[str]:
        return options(group, self.config_dir)


def _parsed(text: str, parser: OverridesParser) -> Override:
    try:
        (item,) = parser.parse_overrides([text])
    except (HydraException, ValueError):
        _, wrong = suggest.parse([text])
        raise UserError(wrong or f"{text}: cannot be read") from None
    if not item.is_sweep_override():
        _, wrong = suggest.parse([text])
        if wrong:
            raise UserError(wrong)
    return item


def _check(item: Override, text: str) -> None:
    if not item.is_sweep_override():
        return
    key = item.key_or_group
    if item.value_type is ValueType.INTERVAL_SWEEP:
        raise UserError(
            f"{text}: an interval has no points of its own; use range(start,stop,step) or choice(...), or a sweeper "
            "that draws from intervals, such as Optuna's with `hydra/launcher=hpc_slurm`"
        )
    if item.is_delete():
        raise UserError(f"{text}: a key that is left out has no values to sweep over")
    if key.partition("/")[0].partition(".")[0] == "hydra":
        raise UserError(f"{text}: settings of Hydra itself have no effect here")
    if why := _OF_THE_SWEEP.get(key):
        raise UserError(f"{text}: cannot be swept: {why}")
    if item.value_type is ValueType.GLOB_CHOICE_SWEEP and key not in GROUPS:
        raise UserError(f"{text}: glob finds options of a group, one of {', '.join(GROUPS)}; use choice(...)")


def _words(item: Override, text: str, config_dir: str | None) -> tuple[str, ...]:
    """`key=value` for each value, at most one more than a sweep can have."""
    key = item.get_key_element()
    if not item.is_sweep_override():
        return (text,)
    try:
        words = tuple(f"{key}={value}" for value in islice(item.sweep_string_iterator(), MOST_POINTS + 1))
    except (HydraException, ValueError, TypeError) as error:
        raise UserError(f"{text}: {' '.join(str(error).split())}") from None
    if words:
        return words
    if item.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{text}: matches none of {', '.join(options(item.key_or_group, config_dir))}")
    raise UserError(f"{text}: has no values")
