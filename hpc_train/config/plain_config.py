"""Turn the configuration of a run into plain values, as a file has them, and back, checked and read-only.

Without Hydra, whose import takes as long as all else that reads a frozen run: each rank does, and each decision after a
fault.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.checks.check import check_config
from hpc_train.config.checks.secret_variables import refuse_secret_variables
from hpc_train.config.keys.groups import SCHEMAS
from hpc_train.config.keys.overrides import check_overrides, find_unknown_field, list_explicit_settings
from hpc_train.config.model import DataConfig, ModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import seal_config
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names


def config_from_dict(container: dict[str, Any]) -> RunConfig:
    """Return the run that `config_to_dict` wrote, checked and read-only: no file of conf/ is read again.

    Raises UserError for one that is cut off, or was changed into something else.
    """
    schema = OmegaConf.structured(RunConfig)
    chosen = {group: _find_schema(group, container.get(group)) for group in SCHEMAS}
    try:
        config = make_run_config(OmegaConf.merge(schema, chosen, container))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key, reason = explain_value(error)
        raise UserError(f"{key}: {reason}" if key else reason) from error
    return check_and_seal(config)


def _find_schema(group: str, section: Any) -> type[ModelConfig | DataConfig]:
    """Return the type of a model's or a data set's part of a configuration."""
    kind = section.get("kind") if isinstance(section, dict) else None
    schema = next((one for one in SCHEMAS[group].values() if one.kind == kind), None)
    if schema is None:
        raise UserError(f"{group}.kind: is {kind!r}, which is no {group}; the file is cut off, or was changed")
    return schema


def make_run_config(plain: DictConfig) -> RunConfig:
    """Convert a configuration to a RunConfig that is not checked yet. Raises OmegaConfBaseException, and UserError."""
    with refuse_secret_variables():
        config = OmegaConf.to_object(plain)
    assert isinstance(config, RunConfig)
    return config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return a config as plain dictionaries, lists and scalars, for YAML or JSON."""
    plain: dict[str, Any] = _make_plain(config)
    if "${" in repr(plain):  # built in Python, with defaults that refer to the environment
        with refuse_secret_variables():
            resolved = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)
        assert isinstance(resolved, dict)
        return resolved  # type: ignore[return-value]
    return plain


def _make_plain(value: Any) -> Any:
    """Return what dataclasses.asdict does, in a third of its time, which for a sweep of 1,000 points is seconds."""
    if names := _field_names(type(value)):  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable
        return {name: _make_plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: _make_plain(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_make_plain, value))
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else ()


def flatten_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted key, as {"optim.lr": 0.1}. Lists and empty dictionaries are values."""
    leaves: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves |= {f"{name}.{key}": leaf for key, leaf in flatten_settings(value).items()}
        else:
            leaves[str(name)] = value
    return leaves


def config_to_yaml(config: RunConfig) -> str:
    """Return the config as a YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))


def check_and_seal(
    config: RunConfig, overrides: Sequence[str] = (), config_dir: str | None = None, checked: Collection[str] = ()
) -> RunConfig:
    """Fill in what a config leaves to the cluster, check it, and make it read-only. Raises UserError.

    checked: names of groups whose values were found in range before.
    """
    if wrong := find_unknown_field(config):
        raise UserError(wrong)
    check_config(config, checked)
    check_overrides(config, overrides, config_dir)
    if config.parallel.auto and config.parallel.fixed is None:
        config.parallel.fixed = list_explicit_settings(config, overrides)
    fill_hybrid_sharding(config)
    return seal_config(config)


def fill_hybrid_sharding(config: RunConfig) -> None:
    """Write the number of dp_shard into `config` if a zero strategy has dp_replicate=-1 and no dp_shard.

    It is the ranks of one NVLink domain, or of one node where there is no NVLink, divided by tp x cp. Raises UserError
    where these do not divide or leave nothing to shard over.
    """
    parallel = config.parallel
    if parallel.strategy == "ddp" or parallel.dp_replicate != -1 or parallel.dp_shard is not None:
        return
    ranks, place = _fast_neighbours(config)
    if ranks is None:  # all ranks are on this machine: one copy
        parallel.dp_replicate, parallel.dp_shard = 1, -1
        return
    inner = parallel.tp * parallel.cp
    if inner < 1 or ranks % inner or ranks == inner:
        raise UserError(
            f"parallel.dp_replicate=-1: one copy of the model in {place} of {ranks} ranks needs a dp_shard of "
            f"{ranks} / (tp {parallel.tp} x cp {parallel.cp}), not a whole number above 1; give parallel.dp_shard"
        )
    parallel.dp_shard = ranks // inner


def _fast_neighbours(config: RunConfig) -> tuple[int | None, str]:
    """Return (ranks that reach each other fast, what holds them); None: all."""
    node = config.cluster.node
    if node.nvlink_domain_gpus:
        return node.nvlink_domain_gpus * config.cluster.ranks_per_node // max(node.gpus, 1), "an NVLink domain"
    return (None, "") if config.launch.kind == "local" else (config.cluster.ranks_per_node, "a node")


_REASONS = (
    (r"could not be converted to Float", "must be a number"),
    (r"could not be converted to Integer", "must be a whole number"),
    (r"is not a valid bool|could not be converted to Boolean", "must be true or false"),
    (r"Cannot convert '\w+' to string", "must be text"),
    (r"is not Optional|NoneType is not a subclass", "cannot be null"),
    (r"is not a ListConfig, list or tuple", "must be a list, such as [a,b]"),
    (r"is not a subclass of (?!str|int|float|bool)\w+|Cannot assign .* to ", "settings (key: value) belong here"),
    (r"list index out of range", "the list has no such index"),
    (r"not a valid type|is incompatible with type hint|not supported", "must be a number, text, true, false or null"),
)
"""OmegaConf's words, and ours."""


def explain_value(error: BaseException) -> tuple[str, str]:
    """Return the key of a value that OmegaConf refuses, with dots, and why; ("", the message) of any other error."""
    cause = _cause(error)
    return (_key(cause), _reason(cause)) if cause else ("", read_first_line(error))


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    return cause


def _key(cause: OmegaConfBaseException) -> str:
    """Return a key with dots, as an override has it: optim.betas[1] is optim.betas.1."""
    return re.sub(r"\[(\w+)\]", r".\1", str(getattr(cause, "full_key", None) or ""))


def _reason(cause: OmegaConfBaseException) -> str:
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", read_first_line(cause))
    if "missing mandatory value" in text:
        return "has no value; give it one"
    if re.match(r"Key '.*' (not in|is not in struct)", text):
        return _no_key(cause)
    return next((words for pattern, words in _REASONS if re.search(pattern, text)), text)


def _no_key(cause: OmegaConfBaseException) -> str:
    name, kind = str(cause.key), cause.object_type
    if kind is None or not is_dataclass(kind):
        return f"no key '{name}' yet; write +{_key(cause)}=<value> to add it"
    bases = {base: group for group, kinds in SCHEMAS.items() for base in next(iter(kinds.values())).__bases__}
    if kind in bases:
        return f"no key '{name}'; begin the file with defaults: [{' | '.join(SCHEMAS[bases[kind]])}, _self_]"
    return f"no key '{name}'; {suggest_names(name, (item.name for item in fields(kind)))}"


def read_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or else the name of its class."""
    return " ".join((str(error).splitlines() or [type(error).__name__])[0].split())
