"""compose: from overrides to a checked, read-only RunConfig. The only place where Hydra composes a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config import suggest
from hpc_train.config.check import check
from hpc_train.config.explain import COMPOSITION_ERRORS, explain
from hpc_train.config.given import given
from hpc_train.config.hybrid import fill_hybrid
from hpc_train.config.options import SCHEMAS, option_files
from hpc_train.config.overridden import check_overrides
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import seal
from hpc_train.config.secrets import refusing_secrets
from hpc_train.config.store import register
from hpc_train.errors import UserError


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> RunConfig:
    """The run that conf/ and the overrides describe, checked and read-only.

    config_dir: a folder laid out as conf/, whose options are added to the shipped ones.
    Raises UserError, in one line, for anything in the overrides or the files that is wrong.
    """
    return typed(composed(list(overrides), config_dir), overrides, config_dir)


def from_container(container: dict[str, Any]) -> RunConfig:
    """The run that `to_container` wrote, checked and read-only: no file of conf/ is read again."""
    kinds = {group: {kind.kind: kind for kind in types.values()} for group, types in SCHEMAS.items()}
    schema = OmegaConf.structured(RunConfig)
    chosen = {group: kinds[group][container[group]["kind"]] for group in SCHEMAS}
    return typed(OmegaConf.merge(schema, chosen, container), (), None)  # type: ignore[arg-type]


def to_container(config: RunConfig) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, for YAML or JSON."""
    plain = asdict(config)
    if "${" in repr(plain):  # built in Python, with defaults that refer to the environment
        with refusing_secrets():
            resolved = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
        assert isinstance(resolved, dict)
        return resolved  # type: ignore[return-value]
    return plain


def to_yaml(config: RunConfig) -> str:
    """The config as a YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_container(config)))


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Names that `group=` accepts, the shipped ones and those of config_dir."""
    return list(option_files(group, config_dir))


def _hydra() -> initialize_config_module:
    register()
    GlobalHydra.instance().clear()
    return initialize_config_module("hpc_train.conf", version_base="1.3")


def composed(overrides: list[str], config_dir: str | None) -> DictConfig:
    """The same before its types and ranges are checked. Raises UserError, in one line."""
    extra = _search_path(config_dir)
    groups, values = suggest.split_groups(_parsed(overrides))
    if wrong := suggest.wrong_choice(groups, partial(options, config_dir=config_dir)):
        raise UserError(wrong)
    with _hydra(), refusing_secrets():
        try:
            return hydra_compose("config", overrides=[*extra, *overrides])
        except COMPOSITION_ERRORS as error:
            raise UserError(_diagnose(error, groups, values, extra, config_dir)) from error


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parsed, wrong = suggest.parse(overrides)
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
    """Which is wrong: the files, shown by composing the group choices alone, or one of the values."""
    try:
        lines = [item.input_line for item in groups if item.input_line]
        base = hydra_compose("config", overrides=[*extra, *lines])
    except COMPOSITION_ERRORS as broken:
        return explain(broken, groups, config_dir)
    return suggest.wrong_key(values, base) or explain(error, values, config_dir)


def typed(plain: DictConfig, overrides: Sequence[str], config_dir: str | None) -> RunConfig:
    """From what `composed` gave to a checked, read-only RunConfig. Raises UserError, in one line."""
    try:
        with refusing_secrets():
            config = OmegaConf.to_object(plain)
    except OmegaConfBaseException as error:
        raise UserError(explain(error, _parsed(overrides), config_dir)) from error
    assert isinstance(config, RunConfig)
    return checked(config, overrides, config_dir)


def checked(config: RunConfig, overrides: Sequence[str], config_dir: str | None = None) -> RunConfig:
    """The same config, checked, with what it leaves to the cluster filled in, and sealed. Raises UserError."""
    if wrong := suggest.unknown_field(config):
        raise UserError(wrong)
    check(config)
    check_overrides(config, overrides, config_dir)
    if config.parallel.auto and config.parallel.fixed is None:
        config.parallel.fixed = given(config, overrides)
    fill_hybrid(config)
    return seal(config)
