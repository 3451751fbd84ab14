"""From what Hydra, OmegaConf or YAML raised to one line: which override or which file, which key, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.options import GROUPS, SCHEMAS
from hpc_train.config.suggest import close

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError)
"""What composing raises for a wrong override or a wrong file."""

_REASONS = (
    (r"could not be converted to Float", "must be a number"),
    (r"could not be converted to Integer", "must be a whole number"),
    (r"is not a valid bool|could not be converted to Boolean", "must be true or false"),
    (r"Cannot convert '\w+' to string", "must be text"),
    (r"is not Optional", "cannot be null"),
    (r"is not a ListConfig, list or tuple", "must be a list, such as [a,b]"),
    (r"is not a subclass of (?!str|int|float|bool)\w+|Cannot assign .* to ", "settings (key: value) belong here"),
    (r"list index out of range", "the list has no such index"),
    (r"not a valid type|is incompatible with type hint|not supported", "must be a number, text, true, false or null"),
)
"""OmegaConf's words, and ours."""


def explain(error: BaseException, overrides: Sequence[Override], config_dir: str | None) -> str:
    """One line for an error of COMPOSITION_ERRORS; `overrides` are those that may be to blame."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: is not YAML: {error.problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"{_not_text(config_dir)}: is not a text file (UTF-8); write it anew"
    if isinstance(error, MissingConfigException):
        return _missing(error, overrides)
    cause = _cause(error)
    key, reason = (_key(cause), _reason(cause)) if cause else ("", _first_line(error))
    file = re.match(r"In '([\w/.-]+)': ", str(error))
    if file is not None and file[1] != "config":
        return _in_file(file[1], key, reason)
    return _of_override(key, reason, overrides)


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    return cause


def _key(cause: OmegaConfBaseException) -> str:
    """Dotted, as an override has it: optim.betas[1] is optim.betas.1."""
    return re.sub(r"\[(\w+)\]", r".\1", str(getattr(cause, "full_key", None) or ""))


def _reason(cause: OmegaConfBaseException) -> str:
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", _first_line(cause))
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
    return f"no key '{name}'; {close(name, (item.name for item in fields(kind)))}"


def _in_file(file: str, key: str, reason: str) -> str:
    if file.startswith("experiment/") and key.split(".")[0] == "experiment":
        return f"{file}.yaml: must begin with the line '# @package _global_'"
    return f"{file}.yaml: {f'{key}: ' if key else ''}{reason}"


def _of_override(key: str, reason: str, overrides: Sequence[Override]) -> str:
    for item in reversed(overrides):
        mine = item.key_or_group.replace("/", ".")
        if key == mine or (key and key.startswith(f"{mine}.")):
            where = "" if key == mine or mine not in GROUPS else f"{key}: "
            return f"{item.input_line}: {where}{reason}"
    return f"{key}: {reason}" if key else reason


def _missing(error: MissingConfigException, overrides: Sequence[Override]) -> str:
    """A defaults list names what does not exist: that of a file, or of an experiment, which Hydra calls 'config'."""
    named = re.match(r"In '([\w/.-]+)'", str(error))
    wanted = error.missing_cfg_file or _first_line(error)
    experiment = next((item.input_line for item in overrides if item.key_or_group == "experiment"), None)
    where = f"{named[1]}.yaml" if named and named[1] != "config" else experiment or "config.yaml"
    names: Any = [name for name in error.options or () if name not in SCHEMAS.get(wanted.split("/")[0], {})]
    hint = f"; {close(wanted.split('/')[-1], names)}" if names else ""
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


def _first_line(error: BaseException) -> str:
    return " ".join((str(error).splitlines() or [type(error).__name__])[0].split())
