"""compose: from overrides to a checked, read-only RunConfig. The only place where Hydra composes a run.

Whatever Hydra, OmegaConf or YAML raises becomes one line: which override or which file, which key, what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.checks.secret_variables import refuse_secret_variables
from hpc_train.config.keys import overrides as suggest
from hpc_train.config.keys.groups import GROUPS, SCHEMAS, find_option_files
from hpc_train.config.plain_config import check_and_seal, explain_value, make_run_config, read_first_line
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> RunConfig:
    """Compose the run that conf/ and the overrides describe, checked and read-only.

    config_dir: a folder laid out as conf/, whose options are added to the shipped ones.
    Raises UserError, in one line, for anything in the overrides or the files that is wrong.
    """
    return make_typed(compose_unchecked(list(overrides), config_dir), overrides, config_dir)


def list_options(group: str, config_dir: str | None = None) -> list[str]:
    """List the names that `group=` accepts, the shipped ones and those of config_dir."""
    return list(find_option_files(group, config_dir))


def _hydra() -> initialize_config_module:
    register()
    GlobalHydra.instance().clear()
    return initialize_config_module("hpc_train.conf", version_base="1.3")


def compose_unchecked(overrides: list[str], config_dir: str | None) -> DictConfig:
    """Compose the overrides into a config whose types and ranges are not checked yet. Raises UserError, in one line."""
    extra = _search_path(config_dir)
    groups, values = suggest.split_groups(_parsed(overrides))
    if wrong := suggest.find_wrong_choice(groups, partial(list_options, config_dir=config_dir)):
        raise UserError(wrong)
    with _hydra(), refuse_secret_variables():
        try:
            return hydra_compose("config", overrides=[*extra, *overrides])
        except COMPOSITION_ERRORS as error:
            raise UserError(_diagnose(error, groups, values, extra, config_dir)) from error


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parsed, wrong = suggest.parse_overrides(overrides)
    if wrong:
        raise UserError(wrong)
    return parsed


def _search_path(config_dir: str | None) -> list[str]:
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    location = str(Path(config_dir).absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{location}']"]


def _diagnose(
    error: Exception, groups: list[Override], values: list[Override], extra: list[str], config_dir: str | None
) -> str:
    """Find out what is wrong: the files, shown by composing the group choices alone, or one of the values."""
    if wrong_choice := suggest.find_wrong_group_of_user(values, config_dir, str(error)):
        return wrong_choice
    groups = [*groups, *(item for item in values if suggest.is_group_of_user(item, config_dir))]
    values = [item for item in values if item not in groups]
    try:
        lines = [item.input_line for item in groups if item.input_line]
        base = hydra_compose("config", overrides=[*extra, *lines])
    except COMPOSITION_ERRORS as broken:
        return explain_error(broken, groups, config_dir)
    return suggest.find_wrong_key(values, base) or explain_error(error, values, config_dir)


def make_typed(plain: DictConfig, overrides: Sequence[str], config_dir: str | None) -> RunConfig:
    """Convert a composed configuration to a checked, read-only RunConfig. Raises UserError, in one line."""
    try:
        config = make_run_config(plain)
    except OmegaConfBaseException as error:
        raise UserError(explain_error(error, _parsed(overrides), config_dir)) from error
    return check_and_seal(config, overrides, config_dir)


@cache  # registering takes a tenth of a second
def register() -> None:
    """Put the dataclasses into Hydra's ConfigStore; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store("run_schema", RunConfig)
    for group, types in SCHEMAS.items():
        for name, kind in types.items():
            store.store(name, kind, group=group)


COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
"""Exceptions that Hydra and OmegaConf raise for a wrong override or a wrong file."""


def explain_error(error: BaseException, overrides: Sequence[Override], config_dir: str | None) -> str:
    """Explain an error of COMPOSITION_ERRORS in one line; `overrides` are those that may be to blame."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: is not YAML: {error.problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"{_not_text(config_dir)}: is not a text file (UTF-8); write it again"
    if isinstance(error, MissingConfigException):
        return _missing(error, overrides)
    key, reason = explain_value(error)
    file = re.match(r"In '([\w/.-]+)': ", str(error))
    if file is not None and file[1] != "config":
        return _in_file(file[1], key, reason)
    return _of_override(key, reason, overrides)


def _in_file(file: str, key: str, reason: str) -> str:
    if file.startswith("experiment/") and key.split(".")[0] == "experiment":
        return f"{file}.yaml: must begin with the line '# @package _global_'"
    return f"{file}.yaml: {f'{key}: ' if key else ''}{reason}"


def _of_override(key: str, reason: str, overrides: Sequence[Override]) -> str:
    for item in reversed(overrides):
        item_key = item.key_or_group.replace("/", ".")
        if key == item_key or (key and key.startswith(f"{item_key}.")):
            where = "" if key == item_key or item_key not in GROUPS else f"{key}: "
            return f"{item.input_line}: {where}{reason}"
    return f"{key}: {reason}" if key else reason


def _missing(error: MissingConfigException, overrides: Sequence[Override]) -> str:
    """A defaults list names what does not exist: that of a file, or of an experiment, which Hydra calls 'config'."""
    named = re.match(r"In '([\w/.-]+)'", str(error))
    wanted = error.missing_cfg_file or read_first_line(error)
    experiment = next((item.input_line for item in overrides if item.key_or_group == "experiment"), None)
    where = f"{named[1]}.yaml" if named and named[1] != "config" else experiment or "config.yaml"
    names: Any = [name for name in error.options or () if name not in SCHEMAS.get(wanted.split("/")[0], {})]
    hint = f"; {suggest_names(wanted.split('/')[-1], names)}" if names else ""
    return f"{where}: its defaults name {wanted}, which does not exist{hint}"


def _not_text(config_dir: str | None) -> str:
    for file in sorted(Path(config_dir or ".").rglob("*.yaml")):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return str(file)
        except OSError:
            continue
    return f"--config-dir {config_dir}: a file of it"
