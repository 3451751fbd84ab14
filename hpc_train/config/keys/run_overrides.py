"""List the overrides that make a given configuration: with them, `train` or `submit` starts the same run again."""

from __future__ import annotations

from typing import Any

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import SCHEMAS, find_option_files, find_option_type, read_default_options
from hpc_train.config.keys.overrides import format_override_value
from hpc_train.config.model import HfModelConfig
from hpc_train.config.plain_config import config_to_dict, flatten_settings
from hpc_train.config.run import RunConfig

_NAMED_GROUPS = ("cluster", "model", "data")
"""Groups whose configuration has the name of the option."""
_LABELS = ("cluster.name", "cluster.source", "model.source", "data.name")
"""Describe an option and choose nothing, so that there is no override for them."""


def list_overrides(config: RunConfig) -> list[str]:
    """List the overrides that make a configuration, in Hydra's syntax, without its run directory.

    A group is chosen by its option where the project has that option, and by single settings where the option was a
    user's own. Of a user's own option the name is lost, and nothing else.
    """
    options = {group: _find_option(group, getattr(config, group)) for group in _NAMED_GROUPS}
    options["launch"] = config.launch.kind
    named = {"data": config.data.name, "model": getattr(config.model, "name", "")}
    # `submit` has another default for the cluster than `train`.
    always = {"cluster"} if config.launch.kind == "slurm" else set()
    default = read_default_options()
    choices = [f"{group}={option}" for group, option in options.items() if option != default[group] or group in always]
    # These have no value before somebody gives one.
    given = [f"{group}.name={format_override_value(named[group])}" for group in named if options[group] == "custom"]
    if isinstance(config.model, HfModelConfig):
        given.append(f"model.path={format_override_value(config.model.path)}")
    base = flatten_settings(config_to_dict(compose([*choices, *given])))
    wanted = flatten_settings(config_to_dict(config))
    return [*choices, *given, *_list_differences(base, wanted)]


def _find_option(group: str, chosen: Any) -> str:
    """Return the option of this name, else the first that builds on the same type."""
    options = find_option_files(group)
    same_type = [option for option in options if find_option_type(group, option) is type(chosen)]
    if group not in SCHEMAS:
        return chosen.name if chosen.name in options else read_default_options()[group]
    return next(iter([option for option in same_type if option == getattr(chosen, "name", None)] or same_type))


def _list_differences(base: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    overrides = []
    for key, value in wanted.items():
        if key in (*_LABELS, "run_dir") or base.get(key, _ABSENT) == value or value == {}:
            continue
        overrides.append(f"{'' if key in base else '+'}{key}={format_override_value(value)}")
    return overrides + [f"~{key}" for key, value in base.items() if key not in wanted and value != {}]


_ABSENT = object()
