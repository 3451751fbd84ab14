"""Reject overrides that have no effect: labels that choose nothing, and zero steps."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.config.given import value_of
from hpc_train.config.model import CustomModelConfig
from hpc_train.config.options import default_options, option_files
from hpc_train.config.run import RunConfig
from hpc_train.config.suggest import close
from hpc_train.errors import UserError

_LABELLED = ("data", "model", "cluster")
"""Groups whose `name` and `kind` only label the option."""
_LABELS = ("name", "kind")
_OF_YOUR_OWN = {
    "data": "for text of your own data=text data.sources=[FILE]",
    "model": "for a model of your own model=custom model.module=MODULE model.name=NAME",
    "cluster": "for a cluster of your own --config-dir DIR with a file in DIR/cluster/",
}


def check_overrides(config: RunConfig, overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Raise UserError, in one line, for the first of these overrides that would mislead.

    config: the configuration they compose to. A frozen run has no overrides.
    """
    for text in overrides:
        key, equals, _ = text.lstrip("+").partition("=")
        if not equals or "." not in key:
            continue
        _check_label(config, overrides, text, key, config_dir)
        if key == "train.steps" and config.train.wanted_steps is not None and config.train.steps is None:
            raise UserError(f"{text}: is no number of steps; give one, or train.epochs (the default is 200 steps)")


def _check_label(config: RunConfig, overrides: Sequence[str], text: str, key: str, config_dir: str | None) -> None:
    group, _, field = key.partition(".")
    if group not in _LABELLED or field not in _LABELS:
        return
    if (group, field) == ("model", "name") and (_is_custom(config) or _changes_model(overrides)):
        return
    option = _option(group, overrides)
    value, named = value_of(config, key), _said(config, group, option, field, config_dir)
    if named is None or value == named:
        return
    options = option_files(group, config_dir)
    meant = f"write {group}={value}" if value in options else close(str(value), options)
    raise UserError(
        f"{text}: only labels what {group}={option} is, and chooses nothing; {meant}; {_OF_YOUR_OWN[group]}"
    )


def _is_custom(config: RunConfig) -> bool:
    return isinstance(config.model, CustomModelConfig)


def _changes_model(overrides: Sequence[str]) -> bool:
    """Whether the overrides change the model's shape, so that it deserves another name."""
    keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    return any(key.startswith("model.") for key in keys - {"model.name", "model.kind"})


def _option(group: str, overrides: Sequence[str]) -> str:
    chosen = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == group]
    return chosen[-1] if chosen else default_options()[group]


def _said(config: RunConfig, group: str, option: str, field: str, config_dir: str | None) -> str | None:
    """Return an option's declared type or file; None if it declares none."""
    if field == "kind":
        kind = type(getattr(config, group)).__dataclass_fields__.get(field)
        return None if kind is None else str(kind.default)
    file = option_files(group, config_dir).get(option)
    if file is None:
        return None
    import yaml  # type: ignore[import-untyped]

    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return str(content[field]) if isinstance(content, dict) and content.get(field) not in (None, "???") else None
