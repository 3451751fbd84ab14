"""From a grid to frozen points: each composed, planned and checked before anything is written or submitted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.config.compose import to_container
from hpc_train.config.compose_many import Composer
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.precheck import check_files
from hpc_train.launch.spec import make_spec
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder
from hpc_train.launch.sweep.grammar import Combination, Grid
from hpc_train.launch.sweep.identity import digest, point_id
from hpc_train.launch.train import check_run, schedule_text, store_of
from hpc_train.training.folder import RunFolder

if TYPE_CHECKING:
    from hpc_train.launch.code.snapshot import Snapshot

Ranks = Callable[[RunConfig], int | None]
"""The ranks of a run; None: the planner may say how many nodes it takes."""


@dataclass
class Frozen:
    """All points of a sweep, in order."""

    points: list[FrozenPoint] = field(default_factory=list)
    configs: dict[str, RunConfig] = field(default_factory=dict)
    """Of each point by its id, with its types."""
    same: list[tuple[str, str]] = field(default_factory=list)
    """(what was left out, the point that is the same run)."""

    def config_of(self, point: FrozenPoint) -> RunConfig:
        return self.configs[point.id]


@dataclass
class Freezer:
    """What is looked up once for all points that agree in it."""

    folder: SweepFolder
    ranks_before: Ranks
    """As far as known before parallel=auto is decided."""
    ranks: Callable[[RunConfig], int]
    build: bool = True
    """Whether token stores that are not there are built."""
    plans: Counter[str] = field(default_factory=Counter)
    _stores: dict[str, Path | None] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def freeze(self, combination: Combination, config: RunConfig) -> tuple[FrozenPoint, RunConfig, str]:
        """(the point, its config as planned, what tells it from all others).

        Raises UserError for the first thing that is wrong with it.
        """
        config, why = self._planned(config)
        ranks = self.ranks(config)
        degrees = check_run(config, ranks)
        run = self._folder(config, "x")
        self._check_files(config, run)
        store = self._store(config)
        container = to_container(config)
        if store is not None and container["data"]["path"] is None:
            container["data"]["path"] = store.name  # one that is built is named by what is in it
        own = digest(container)
        name = point_id(combination.swept, own)
        spec = make_spec(config, self._folder(config, name), ranks, asdict(degrees), store)
        schedule = schedule_text(config)
        files = {"plan.json": why, "schedule.csv": schedule}
        kept = {file: text for file, text in files.items() if text is not None}
        return FrozenPoint(name, combination.swept, spec, kept), config, own

    def _planned(self, config: RunConfig) -> tuple[RunConfig, str | None]:
        if not config.parallel.auto:
            return config, None
        from hpc_train.planner.auto import decide

        decision = decide(config, self.ranks_before(config))
        self.plans[decision.line] += 1
        return decision.config, decision.text

    def _folder(self, config: RunConfig, name: str) -> RunFolder:
        path, chosen = self.folder.run(name), config.checkpoint.dir
        return RunFolder(path, Path(chosen).expanduser().absolute() if chosen else path / "checkpoints")

    def _check_files(self, config: RunConfig, run: RunFolder) -> None:
        """Only once for settings that name the same files: a topology is read for it."""
        c = config
        named = (c.data, c.cluster.topology, c.cluster.calibration, c.parallel.offload.dir, c.checkpoint.resume)
        key = repr((named, bool(c.launch.setup), c.launch.kind))
        if key not in self._checked:
            check_files(config, run)
            self._checked.add(key)

    def _store(self, config: RunConfig) -> Path | None:
        key = repr((config.data, bool(config.launch.setup)))
        if key not in self._stores:
            self._stores[key] = store_of(config, self.build)
        return self._stores[key]


def freeze_all(grid: Grid, composer: Composer, freezer: Freezer) -> Frozen:
    """Every point of the grid; one that is the same run as another is left out, and said.

    Several combinations may well mean the same run: with parallel=auto, or two names of one option. None of them is
    wrong, and running it twice would bring nothing. Raises UserError naming the point for the first that is wrong.
    """
    found, known = Frozen(), dict[str, str]()
    for combination in grid:
        try:
            point, config, own = freezer.freeze(combination, composer.compose(combination.words))
        except UserError as error:
            raise of_point(combination, error) from None
        if own in known:
            found.same.append((combination.name, known[own]))
            continue
        known[own] = point.id
        found.points.append(point)
        found.configs[point.id] = config
    _check_checkpoints(found)
    return found


def with_code(points: Sequence[FrozenPoint], code: Snapshot | None) -> list[FrozenPoint]:
    """The same points, to run this code."""
    if code is None:
        return list(points)
    path, sources = str(code.path), list(code.sources)
    return [replace(point, spec=replace(point.spec, code=path, sources=sources)) for point in points]


def of_point(combination: Combination, error: UserError) -> UserError:
    return UserError(f"point {combination.name}: {error}") if combination.swept else error


def _check_checkpoints(found: Frozen) -> None:
    """Points that save into one directory would take each other's checkpoints for their own."""
    places: dict[str, str] = {}
    for point in found.points:
        chosen = found.configs[point.id].checkpoint.dir
        if chosen is None or not found.configs[point.id].checkpoint.every:
            continue
        if chosen in places:
            raise UserError(
                f"checkpoint.dir={chosen}: points {places[chosen]} and {point.id} would both save there; leave it out, "
                "and each has its own in its run directory"
            )
        places[chosen] = point.id


def tell_plans(freezer: Freezer, found: Frozen) -> None:
    """What parallel=auto has decided, a line each decision, and which combinations are one run."""
    for line, count in freezer.plans.items():
        print(f"hpc-train: {line}" + (f" ({count} points)" if count > 1 else ""), file=sys.stderr)
    if found.same:
        one, other = found.same[0]
        more = f" and {len(found.same) - 1} more" if len(found.same) > 1 else ""
        print(f"hpc-train: {one} is the same run as {other}{more}: each is run once", file=sys.stderr)
