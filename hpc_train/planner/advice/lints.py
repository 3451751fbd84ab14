"""Run all lints on a configuration, and remove advice that the run could not follow.

To add a lint: write a function from RunFacts to Advice or None in the file of its subject, and list it in LINTS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml  # type: ignore[import-untyped]

from hpc_train.config.checks.check import check_config
from hpc_train.config.keys.overrides import get_value
from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import check_shape
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.advice import batch_size, layout, model_shape, operation
from hpc_train.planner.advice.facts import SEVERITIES, Advice, RunEstimate, RunFacts, collect_facts
from hpc_train.planner.constants import cluster_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.memory import FITS, NO, estimate_memory
from hpc_train.planner.settings import apply_settings, settings_to_overrides

Lint = Callable[[RunFacts], Advice | None]

LINTS: tuple[Lint, ...] = (
    model_shape.check_head_width,
    model_shape.check_hidden_width,
    model_shape.check_feed_forward_width,
    model_shape.check_vocabulary,
    model_shape.check_precision,
    model_shape.check_adapter_base,
    layout.check_tensor_divides,
    layout.check_kv_head_sharing,
    layout.check_tensor_domain,
    layout.check_uneven_stages,
    layout.check_interleaving_rounds,
    layout.check_bubble,
    layout.check_launch_bound,
    layout.check_needless_recompute,
    layout.check_needless_offload,
    batch_size.check_critical_batch,
    batch_size.check_scaling_warmup,
    batch_size.check_scaling_rule,
    batch_size.check_warmup,
    batch_size.check_learning_rate,
    operation.check_never_saves,
    operation.check_save_interval,
    operation.check_blocking_saves,
    operation.check_spares,
    operation.check_deadline,
    operation.check_budget,
    operation.check_spot_price,
)
"""Advice of one severity is printed in this order."""


def run_lints(config: RunConfig, figures: RunEstimate | None = None, world: int | None = None) -> list[Advice]:
    """Run all lints and return what to change, errors first.

    figures: the planner's estimate of the run; lints that need a missing figure are skipped. world: number of ranks;
    None: the configuration's. Raises UserError for degrees that do not multiply to the world and for invalid
    failure logs.
    """
    facts = collect_facts(config, figures, world)
    findings = [
        keep_runnable_advice(advice, config, facts.degrees.world)
        for advice in (lint(facts) for lint in LINTS)
        if advice is not None
    ]
    return sorted(findings, key=lambda advice: SEVERITIES.index(advice.severity))


NO_RUNNABLE_SETTING = "no single setting fixes this; fix fewer settings, so that `hpc-train plan` can choose them"
_OR = ", or "
_GROUPS = "model|adapter|parallel|train|optim|checkpoint|plan"
_SETTING = re.compile(rf"\b((?:{_GROUPS})(?:\.\w+)+)=([^\s,;()]+)((?: or [\d.e+-]+)*)")
"""Matches `key=value` and `key=value or value`."""
_MODEL_DEGREES = ("parallel.pp", "parallel.cp", "parallel.tp")


def keep_runnable_advice(advice: Advice, config: RunConfig, world: int) -> Advice:
    """Return the advice without the alternatives that would fail in this run. world: number of ranks.

    If an alternative changes a degree, the data-parallel degree that it requires is added to it.
    """
    texts: list[str] = []
    overrides: list[tuple[str, ...]] = []
    for alternative in advice.fix.split(_OR):
        matches = list(_SETTING.finditer(alternative))
        if not matches:
            texts.append(alternative)
            continue
        tried = [_complete_settings(config, settings, world) for settings in _list_variants(matches)]
        accepted = [settings for settings in tried if settings]
        if accepted:
            overrides += [tuple(settings_to_overrides(settings)) for settings in accepted]
            before, after = alternative[: matches[0].start()], alternative[matches[-1].end() :]
            texts.append(before + _format_settings(accepted) + after)
    return replace(advice, fix=_OR.join(texts) or NO_RUNNABLE_SETTING, overrides=tuple(overrides))


def _list_variants(matches: list[re.Match[str]]) -> Iterator[dict[str, Any]]:
    """Yield the variants: each value of a single setting, or several settings together."""
    if len(matches) > 1:
        yield {match[1]: yaml.safe_load(match[2]) for match in matches}
        return
    (variant,) = matches
    for value in (variant[2], *variant[3].split(" or ")[1:]):
        yield {variant[1]: _parse_value(value)}


def _parse_value(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)


def _format_settings(accepted: list[dict[str, Any]]) -> str:
    if len(accepted) > 1 and all(len(settings) == 1 for settings in accepted):
        (first, *others) = accepted
        more = "".join(f" or {settings_to_overrides(settings)[0].partition('=')[2]}" for settings in others)
        return settings_to_overrides(first)[0] + more
    return _OR.join(" ".join(settings_to_overrides(settings)) for settings in accepted)


def _complete_settings(config: RunConfig, settings: dict[str, Any], world: int) -> dict[str, Any] | None:
    """Add the data-parallel degree that the settings require; None: the run has them already, or would fail."""
    if all(get_value(config, key) == value for key, value in settings.items()):
        return None
    for data_parallel in ({}, *_list_data_parallel_choices(config, settings, world)):
        completed = {**settings, **data_parallel}
        if _can_run(config, completed, world):
            return completed
    return None


def _list_data_parallel_choices(config: RunConfig, settings: Mapping[str, Any], world: int) -> Iterator[dict[str, Any]]:
    """Yield the data-parallel degrees with which the changed degrees multiply to the world."""
    if not settings.keys() & set(_MODEL_DEGREES):
        return
    degrees = resolve_degrees(config.parallel, world)
    used = 1
    for key in _MODEL_DEGREES:
        used *= int(settings.get(key, getattr(degrees, key.partition(".")[2])))
    for name, other in (("dp_shard", degrees.dp_replicate), ("dp_replicate", degrees.dp_shard)):
        if world % (used * other) == 0:
            yield {f"parallel.{name}": world // (used * other)}


def _can_run(config: RunConfig, settings: Mapping[str, Any], world: int) -> bool:
    try:
        changed = apply_settings(config, dict(settings))
        check_config(changed)
        check_shape(changed.model)
        check_support(changed, world)
    except (UserError, TypeError):
        return False
    return not _exceeds_memory(changed, world) or _exceeds_memory(config, world)


def _exceeds_memory(config: RunConfig, world: int) -> bool:
    """Whether the estimate says for sure that the run does not fit; False if the GPU's memory is unknown."""
    if not config.cluster.gpu.memory_gib or not isinstance(config.model, (TransformerConfig, VisionTransformerConfig)):
        return False
    memory = estimate_memory(jobs_from_config(config, world), cluster_constants(config.cluster))
    return FITS[int(memory.fits.reshape(-1)[0])] == FITS[NO]
