"""compose: from overrides to a checked, read-only RunConfig. The only place where Hydra composes a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config import suggest
from hpc_train.config.check import check
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import seal
from hpc_train.config.store import SCHEMA_SUFFIX, register
from hpc_train.errors import UserError

_COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError)


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> RunConfig:
    """The run that conf/ and the overrides describe, checked and read-only.

    config_dir: a folder laid out as conf/, whose options are added to the shipped ones.
    Raises UserError, in one line, for anything in the overrides or the files that is wrong.
    """
    return _typed(_compose(list(overrides), config_dir), overrides)


def from_container(container: dict[str, Any]) -> RunConfig:
    """The run that `to_container` wrote, checked and read-only: no file of conf/ is read again."""
    kinds = {
        "model": {"transformer": "transformer", "vit": "vit", "custom": "custom"},
        "data": {"tokens": "token", "images": "image"},
    }
    choices = [f"{group}={names[container[group]['kind']]}{SCHEMA_SUFFIX}" for group, names in kinds.items()]
    return _typed(OmegaConf.merge(_compose(choices, None), container), ())  # type: ignore[arg-type]


def to_container(config: RunConfig) -> dict[str, Any]:
    """Plain dictionaries, lists and scalars, for YAML or JSON."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def to_yaml(config: RunConfig) -> str:
    """The config as a YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_container(config)))


def options(group: str, config_dir: str | None = None) -> list[str]:
    """Names that `group=` accepts, the shipped ones and those of config_dir."""
    with _hydra():
        loader = GlobalHydra.instance().config_loader()
        names = set(loader.get_group_options(group, ObjectType.CONFIG))
    if config_dir is not None:
        names |= {path.stem for path in (Path(config_dir) / group).glob("*.yaml")}
    return sorted(name for name in names if not name.endswith(SCHEMA_SUFFIX))


def _hydra() -> initialize_config_module:
    register()
    GlobalHydra.instance().clear()
    return initialize_config_module("hpc_train.conf", version_base="1.3")


def _compose(overrides: list[str], config_dir: str | None) -> DictConfig:
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder")
        location = str(Path(config_dir).absolute()).replace("\\", "\\\\").replace("'", "\\'")
        extra = [f"hydra.searchpath=['file://{location}']"]
    with _hydra():
        try:
            return hydra_compose("config", overrides=[*extra, *overrides])
        except _COMPOSITION_ERRORS as error:
            raise UserError(_diagnose(error, overrides, extra, config_dir)) from error


def _diagnose(error: Exception, overrides: list[str], extra: list[str], config_dir: str | None) -> str:
    """Find the first override that is wrong by composing the group choices alone and walking the keys of the values."""
    parsed, wrong = suggest.parse(overrides)
    if wrong:
        return wrong
    groups, values = suggest.split_groups(parsed)
    wrong = suggest.wrong_choice(groups, lambda group: options(group, config_dir))
    if wrong:
        return wrong
    try:
        with _hydra():
            lines = [item.input_line for item in groups if item.input_line]
            base = hydra_compose("config", overrides=[*extra, *lines])
    except _COMPOSITION_ERRORS as broken:
        return suggest.composition_error(broken, groups)
    return suggest.wrong_key(values, base) or suggest.composition_error(error, values)


def _typed(composed: DictConfig, overrides: Sequence[str]) -> RunConfig:
    parsed: list[Override] = suggest.parse(overrides)[0]
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise UserError(suggest.composition_error(error, parsed)) from error
    assert isinstance(config, RunConfig)
    if wrong := suggest.unknown_field(config):
        raise UserError(wrong)
    return seal(check(config))
