"""Filter advice down to what can run: settings this toolkit accepts for this run, and that fit if the run fits.

A lint knows one rule. Its suggestion may break another one: compilation with a schedule that splits backward, a larger
micro-batch when memory is full, a degree that leaves the ranks unaccounted for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml  # type: ignore[import-untyped]

from hpc_train.config.check import check
from hpc_train.config.degrees import resolve
from hpc_train.config.given import value_of
from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import check_shape
from hpc_train.parallel.support import check_support
from hpc_train.planner.advice.result import Advice
from hpc_train.planner.constants import of_cluster
from hpc_train.planner.estimate import FITS, NO, memory
from hpc_train.planner.from_config import jobs_of
from hpc_train.planner.settings import overrides_of, with_settings

NOTHING = "no setting of this run by itself mends it; leave more of it for `hpc-train plan` to choose"
_OR = ", or "
_SETTING = re.compile(r"\b((?:model|parallel|train|optim|checkpoint|plan)(?:\.\w+)+)=([^\s,;()]+)((?: or [\d.e+-]+)*)")
"""key=value, or key=value or value."""
_SPLITS = ("parallel.pp", "parallel.cp", "parallel.tp")


def only_runnable(advice: Advice, config: RunConfig, world: int) -> Advice:
    """Return the advice without the alternatives that the run cannot have; world: ranks.

    If a degree changes, data parallelism takes the remaining ranks, and the advice says so.
    """
    texts: list[str] = []
    overrides: list[tuple[str, ...]] = []
    for way in advice.fix.split(_OR):
        found = list(_SETTING.finditer(way))
        if not found:
            texts.append(way)
            continue
        tried = [_accepted(config, settings, world) for settings in _variants(found)]
        accepted = [settings for settings in tried if settings]
        if accepted:
            overrides += [tuple(overrides_of(settings)) for settings in accepted]
            texts.append(way[: found[0].start()] + _written(accepted) + way[found[-1].end() :])
    return replace(advice, fix=_OR.join(texts) or NOTHING, overrides=tuple(overrides))


def _variants(found: list[re.Match[str]]) -> Iterator[dict[str, Any]]:
    """Yield the variants: each value of a single setting, or several settings together."""
    if len(found) > 1:
        yield {match[1]: yaml.safe_load(match[2]) for match in found}
        return
    (one,) = found
    for value in (one[2], *one[3].split(" or ")[1:]):
        yield {one[1]: _number(value)}


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)


def _written(accepted: list[dict[str, Any]]) -> str:
    if len(accepted) > 1 and all(len(settings) == 1 for settings in accepted):
        (first, *others) = accepted
        more = "".join(f" or {overrides_of(settings)[0].partition('=')[2]}" for settings in others)
        return overrides_of(first)[0] + more
    return _OR.join(" ".join(overrides_of(settings)) for settings in accepted)


def _accepted(config: RunConfig, settings: dict[str, Any], world: int) -> dict[str, Any] | None:
    """Return the settings plus the data-parallel degree they need; None: the run cannot have them."""
    if all(value_of(config, key) == value for key, value in settings.items()):
        return None
    for more in ({}, *_shared(config, settings, world)):
        both = {**settings, **more}
        if _runs(config, both, world):
            return both
    return None


def _shared(config: RunConfig, settings: Mapping[str, Any], world: int) -> Iterator[dict[str, Any]]:
    """Yield the data-parallel degrees that fit when other degrees change."""
    if not settings.keys() & set(_SPLITS):
        return
    degrees = resolve(config.parallel, world)
    used = 1
    for key in _SPLITS:
        used *= int(settings.get(key, getattr(degrees, key.partition(".")[2])))
    for name, other in (("dp_shard", degrees.dp_replicate), ("dp_replicate", degrees.dp_shard)):
        if world % (used * other) == 0:
            yield {f"parallel.{name}": world // (used * other)}


def _runs(config: RunConfig, settings: Mapping[str, Any], world: int) -> bool:
    try:
        changed = with_settings(config, dict(settings))
        check(changed)
        check_shape(changed.model)
        check_support(changed, world)
    except (UserError, TypeError):
        return False
    return not _too_large(changed, world) or _too_large(config, world)


def _too_large(config: RunConfig, world: int) -> bool:
    """Whether the memory is known not to fit."""
    if not config.cluster.gpu.memory_gib or not isinstance(config.model, (TransformerConfig, VisionTransformerConfig)):
        return False
    found = memory(jobs_of(config, world), of_cluster(config.cluster))
    return FITS[int(found.fits.reshape(-1)[0])] == FITS[NO]
