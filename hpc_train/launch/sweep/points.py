"""Expand the overrides of `-m` into points, and freeze each of them.

read_grid understands Hydra's own grammar (a,b  choice()  range()  glob()). Each combination is composed, planned and
checked before anything is written or submitted. The id of a point is a few words of its swept values, followed by a
hash of everything that it was frozen with.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from hpc_train.config.compose import list_options
from hpc_train.config.keys import overrides
from hpc_train.config.keys.groups import GROUPS
from hpc_train.config.plain_config import config_to_dict, flatten_settings
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.files import check_files
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.launch.command_output import Report
from hpc_train.launch.freeze import find_token_store, read_schedule_file
from hpc_train.launch.job_spec import make_spec
from hpc_train.launch.sweep.compose_sweep import Composer
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory
from hpc_train.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from hpc_train.launch.snapshot.code_snapshot import Snapshot

MAX_POINTS = 100_000
_NOT_SWEEPABLE = {
    "run_dir": "it is the directory of the sweep, in which each point has its own",
    "launch.kind": "use `hpc-train submit -m` for Slurm and `hpc-train train -m` for this machine",
    "launch": "its options say where all of the sweep runs; sweep over single settings, such as launch.cpus_per_rank",
    "launch.parallel_points": "it is a setting of the whole sweep",
    "launch.points_per_job": "it is a setting of the whole sweep",
    "launch.chain": "it is a setting of single runs",
}
"""Settings that are the same for all points of a sweep, and why."""


@dataclass(frozen=True)
class Combination:
    """The overrides of one point."""

    words: tuple[str, ...]
    """All of them, as for a single run."""
    swept: tuple[str, ...]
    """The overrides in which points differ."""

    @property
    def name(self) -> str:
        """Return a name for error messages."""
        return " ".join(self.swept) or "the only point"


@dataclass(frozen=True)
class Grid:
    """All combinations of values; an override that is not swept has one value."""

    values: tuple[tuple[str, ...], ...]
    """The override's words, `key=value` each, for every override in order."""
    axes: tuple[int, ...]
    """Which of them are swept."""

    def __len__(self) -> int:
        return math.prod(map(len, self.values))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the swept keys, such as `optim.lr`."""
        return tuple(self.values[axis][0].partition("=")[0].lstrip("+") for axis in self.axes)

    def __iter__(self) -> Iterator[Combination]:
        """Yield every combination; the last axis varies fastest, as in Hydra's own sweeper."""
        for words in product(*self.values):
            yield Combination(words, tuple(words[axis] for axis in self.axes))


def read_grid(overrides: Sequence[str], config_dir: str | None = None) -> Grid:
    """Parse the overrides of a sweep into the grid of its points.

    Raises UserError, in one line, for what cannot be parsed, for an interval, which has no points by itself, and for
    settings of which a sweep has only one.
    """
    parser = OverridesParser.create(config_loader=_GroupOptions(config_dir))  # type: ignore[arg-type]
    values: dict[str, tuple[tuple[str, ...], bool]] = {}
    for text in overrides:
        item = _parse_override(text, parser)
        _check_sweepable(item, text)
        # If a key is given twice, the last value counts.
        values[item.get_key_element()] = (_expand_values(item, text, config_dir), item.is_sweep_override())
    grid = Grid(
        tuple(words for words, _ in values.values()),
        tuple(index for index, (_, swept) in enumerate(values.values()) if swept),
    )
    if len(grid) > MAX_POINTS:
        raise UserError(f"{len(grid):,} points: a sweep has at most {MAX_POINTS:,}; leave out some values")
    return grid


@dataclass(frozen=True)
class _GroupOptions:
    """Answers Hydra's parser, which expands globs: the options that a user can choose, without the schemas."""

    config_dir: str | None

    def get_group_options(self, group: str, **_: Any) -> list[str]:
        return list_options(group, self.config_dir)


def _parse_override(text: str, parser: OverridesParser) -> Override:
    try:
        (item,) = parser.parse_overrides([text])
    except (HydraException, ValueError):
        _, wrong = overrides.parse_overrides([text])
        raise UserError(wrong or f"{text}: cannot be read") from None
    if not item.is_sweep_override():
        _, wrong = overrides.parse_overrides([text])
        if wrong:
            raise UserError(wrong)
    return item


def _check_sweepable(item: Override, text: str) -> None:
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
    if why := _NOT_SWEEPABLE.get(key):
        raise UserError(f"{text}: cannot be swept: {why}")
    if item.value_type is ValueType.GLOB_CHOICE_SWEEP and key not in GROUPS:
        raise UserError(f"{text}: glob finds options of a group, one of {', '.join(GROUPS)}; use choice(...)")


def _expand_values(item: Override, text: str, config_dir: str | None) -> tuple[str, ...]:
    """Return `key=value` for each value, at most one more than a sweep can have."""
    key = item.get_key_element()
    if not item.is_sweep_override():
        return (text,)
    try:
        words = tuple(f"{key}={value}" for value in islice(item.sweep_string_iterator(), MAX_POINTS + 1))
    except (HydraException, ValueError, TypeError) as error:
        raise UserError(f"{text}: {' '.join(str(error).split())}") from None
    if words:
        return words
    if item.value_type is ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{text}: matches none of {', '.join(list_options(item.key_or_group, config_dir))}")
    raise UserError(f"{text}: has no values")


RankCount = Callable[[RunConfig], int | None]
"""The ranks of a run; None: the planner may say how many nodes it takes."""


@dataclass
class FrozenSweep:
    """All points of a sweep, in order."""

    points: list[FrozenPoint] = field(default_factory=list)
    configs: dict[str, RunConfig] = field(default_factory=dict)
    """Point id to its typed config."""
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    """(combination that was left out, id of the point that is the same run)."""

    def config_of(self, point: FrozenPoint) -> RunConfig:
        return self.configs[point.id]


@dataclass
class PointFreezer:
    """Freezes points; what several points agree in, such as their token store, is looked up once."""

    folder: SweepDirectory
    known_ranks: RankCount
    """The number of ranks, as far as it is known before parallel=auto is decided."""
    ranks: Callable[[RunConfig], int]
    build_stores: bool = True
    """Whether token stores that are not there are built."""
    plans: Counter[str] = field(default_factory=Counter)
    _stores: dict[str, Path | None] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def freeze(self, combination: Combination, config: RunConfig) -> tuple[FrozenPoint, RunConfig, str]:
        """Freeze one point; return it, its config with its degrees, and the digest that tells it from others.

        Raises UserError for the first thing that is wrong with it.
        """
        config, why = self._decide_layout(config)
        ranks = self.ranks(config)
        degrees = check_run(config, ranks)
        run = self._locate_run(config, "x")
        self._check_files(config, run)
        store = self._find_store(config)
        container = config_to_dict(config)
        if store is not None and container["data"]["path"] is None:
            container["data"]["path"] = store.name  # one that is built is named by what is in it
        digest = digest_config(container)
        name = make_point_id(combination.swept, digest)
        spec = make_spec(config, self._locate_run(config, name), ranks, asdict(degrees), store, plain=container)
        schedule = read_schedule_file(config)
        files = {"plan.json": why, "schedule.csv": schedule}
        written = {file: text for file, text in files.items() if text is not None}
        return FrozenPoint(name, combination.swept, spec, written), config, digest

    def _decide_layout(self, config: RunConfig) -> tuple[RunConfig, str | None]:
        if not config.parallel.auto:
            return config, None
        from hpc_train.planner.auto import choose_parallel

        decision = choose_parallel(config, self.known_ranks(config))
        self.plans[decision.line] += 1
        return decision.config, decision.text

    def _locate_run(self, config: RunConfig, name: str) -> RunDirectory:
        path, chosen = self.folder.run(name), config.checkpoint.dir
        return RunDirectory(path, Path(chosen).expanduser().absolute() if chosen else path / "checkpoints")

    def _check_files(self, config: RunConfig, run: RunDirectory) -> None:
        """Check the files of a point, only once for settings that name the same files: a topology is read for it."""
        c = config
        named = (c.data, c.cluster.topology, c.cluster.calibration, c.parallel.offload.dir, c.checkpoint.resume)
        key = repr((named, bool(c.launch.setup), c.launch.kind))
        if key not in self._checked:
            check_files(config, run)
            self._checked.add(key)

    def _find_store(self, config: RunConfig) -> Path | None:
        key = repr((config.data, bool(config.launch.setup)))
        if key not in self._stores:
            self._stores[key] = find_token_store(config, self.build_stores)
        return self._stores[key]


def freeze_points(grid: Grid, composer: Composer, freezer: PointFreezer) -> FrozenSweep:
    """Freeze every point of the grid; a combination that is the same run as an earlier one is left out, and recorded.

    Several combinations may well mean the same run: with parallel=auto, or two names of one option. Neither is wrong,
    and running it twice would bring nothing. Raises UserError naming the first point that is wrong.
    """
    sweep, ids = FrozenSweep(), dict[str, str]()
    for combination in grid:
        try:
            point, config, digest = freezer.freeze(combination, composer.compose(combination.words))
        except UserError as error:
            raise name_point(combination, error) from None
        if digest in ids:
            sweep.duplicates.append((combination.name, ids[digest]))
            continue
        ids[digest] = point.id
        sweep.points.append(point)
        sweep.configs[point.id] = config
    _check_checkpoint_directories(sweep)
    return sweep


def set_code(points: Sequence[FrozenPoint], code: Snapshot | None) -> list[FrozenPoint]:
    """Return the points with the snapshot that they run."""
    if code is None:
        return list(points)
    path, sources = str(code.path), list(code.sources)
    return [replace(point, spec=replace(point.spec, code=path, sources=sources)) for point in points]


def name_point(combination: Combination, error: UserError) -> UserError:
    """Prefix an error with the name of its point."""
    return UserError(f"point {combination.name}: {error}") if combination.swept else error


def _check_checkpoint_directories(sweep: FrozenSweep) -> None:
    """Refuse points that save into the same directory: they would take each other's checkpoints for their own."""
    places: dict[str, str] = {}
    for point in sweep.points:
        chosen = sweep.configs[point.id].checkpoint.dir
        if chosen is None or not sweep.configs[point.id].checkpoint.every:
            continue
        if chosen in places:
            raise UserError(
                f"checkpoint.dir={chosen}: points {places[chosen]} and {point.id} would both save there; leave it out, "
                "and each has its own in its run directory"
            )
        places[chosen] = point.id


def report_plans(freezer: PointFreezer, sweep: FrozenSweep, report: Report) -> None:
    """Report what parallel=auto has decided, a line for each decision, and which combinations are one run."""
    for line, count in freezer.plans.items():
        report(line + (f" ({count} points)" if count > 1 else ""))
    if sweep.duplicates:
        one, other = sweep.duplicates[0]
        more = f" and {len(sweep.duplicates) - 1} more" if len(sweep.duplicates) > 1 else ""
        report(f"{one} is the same run as {other}{more}: each is run once")


_NOT_HASHED = frozenset({"run_dir", "schema_version", "data.cache", "data.source", "model.source", "cluster.source"})
"""Settings without an effect on the numbers of a run. All others that can be swept are hashed: of the settings
that a continued run may change (training/run_directory.py) those that are swept are the very point of the sweep."""
_SWEEP_SETTINGS = frozenset({"launch.parallel_points", "launch.points_per_job", "launch.kind"})
_MAX_WORDS_LENGTH = 40
_DIGEST_DIGITS = 12


def make_point_id(swept: Sequence[str], digest: str) -> str:
    """Return an id such as `lr-0.1_seed-2-3f9a0c1d2b4e`. It depends on the overrides and the frozen config alone.

    digest: digest_config of the config.
    """
    words = "_".join(filter(None, map(_shorten_override, swept)))[:_MAX_WORDS_LENGTH].rstrip("-_.") or "point"
    return f"{words}-{digest[:_DIGEST_DIGITS]}"


def digest_config(container: dict[str, Any]) -> str:
    """Hash the frozen config: two points have the same digest if, and only if, they are the same run."""
    left_out = _NOT_HASHED | _SWEEP_SETTINGS
    hashed = {key: value for key, value in flatten_settings(container).items() if key not in left_out}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()


def _shorten_override(word: str) -> str:
    """Shorten `optim.lr=0.1` to `lr-0.1`."""
    key, _, value = word.partition("=")
    last = re.split(r"[./]", key.lstrip("+~"))[-1]
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{last}-{value}").strip("-.")
