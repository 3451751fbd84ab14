"""Ask the planner about a run: how much the advice would gain, and what the memory is used for.

It predicts nothing for machines and models that it does not know, or for settings that it does not model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.report.advice import Setting

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""Parts of a rank's device memory, in the planner's words."""


def rate_advice(advice: Sequence[Setting], config: RunConfig | None, ranks: int) -> tuple[Setting, ...]:
    """Keep the advice that this run could follow, and add what the planner expects of each.

    Left out is what the run has already, what would be refused, and what the planner expects to be slower. Without a
    configuration, all advice with overrides is left out.
    """
    rated = []
    for setting in advice:
        if not setting.override:
            rated.append(setting)
        elif config is not None and (changed := apply_overrides(setting.override, config, ranks)) is not None:
            gain = predict_gain(config, changed, ranks)
            if gain is None or gain >= 0:
                rated.append(replace(setting, planned_gain=gain))
    return tuple(rated)


def apply_overrides(overrides: str, config: RunConfig, ranks: int) -> RunConfig | None:
    """Return the configuration with overrides; None if they change nothing, or if so many ranks could not run it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from hpc_train.config.plain_config import config_from_dict, config_to_dict
    from hpc_train.launch.checks.run_checks import check_run

    values = config_to_dict(config)
    changes = False
    parser = OverridesParser.create()
    for override in parser.parse_overrides(overrides.split()):
        *path, last = override.key_or_group.split(".")
        node = values
        for part in path:
            node = node[part]
        if last not in node:
            return None
        value = override.value()
        changes = changes or node[last] != value
        node[last] = value
    if not changes:
        return None
    try:
        changed = config_from_dict(values)
        check_run(changed, ranks)
    except UserError:
        return None
    return changed


def predict_gain(config: RunConfig, changed: RunConfig, ranks: int) -> float | None:
    """Return the planner's tokens per second of `changed` over those of `config`, less 1.

    None for a machine or model that the planner does not know, where it sees no difference between the two, and where
    the change would not fit into the memory.
    """
    from hpc_train.planner.constants import cluster_constants
    from hpc_train.planner.model.from_config import jobs_from_config
    from hpc_train.planner.model.machine_columns import list_assumptions
    from hpc_train.planner.model.memory import NO
    from hpc_train.planner.model.step_time import estimate_jobs

    try:
        if list_assumptions(config.cluster, config.precision.name):
            return None
        before, after = jobs_from_config(config, ranks), jobs_from_config(changed, ranks)
        if all(np.array_equal(getattr(before, item.name), getattr(after, item.name)) for item in fields(before)):
            return None
        constants = cluster_constants(config.cluster)
        old, new = estimate_jobs(before, constants), estimate_jobs(after, constants)
    except UserError:
        return None
    if np.any(new.memory.fits == NO):
        return None
    gain = float(np.squeeze(new.tokens_per_second)) / float(np.squeeze(old.tokens_per_second)) - 1
    return round(gain, 4)


def predict_memory(config: RunConfig, ranks: int) -> dict[str, float]:
    """Return the planned bytes of each part of the device memory, on the stage that needs most.

    {} for a model that the planner does not know.
    """
    from hpc_train.planner.constants import cluster_constants
    from hpc_train.planner.model.from_config import jobs_from_config
    from hpc_train.planner.model.memory import estimate_memory

    try:
        memory = estimate_memory(jobs_from_config(config, ranks), cluster_constants(config.cluster))
    except UserError:
        return {}
    stage = int(np.argmax(np.reshape(memory.allocated, (3, -1))[:, 0]))
    return {name: float(np.reshape(getattr(memory, name), (3, -1))[stage, 0]) for name in MEMORY_PARTS}
