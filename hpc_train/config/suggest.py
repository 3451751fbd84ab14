"""From an override that does not compose to one line: what is wrong, in which component of it, what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.store import GROUPS, SCHEMA_SUFFIX

Options = Callable[[str], list[str]]
"""Group name -> names of its options."""
_KINDS = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false", "String": "text"}


def close(word: str, choices: Iterable[str]) -> str:
    """'; did you mean X?' or, where nothing is near, the choices themselves."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"there are {', '.join(choices)}"


def parse(overrides: Sequence[str]) -> tuple[list[Override], str | None]:
    """(parsed overrides, None), or ([], what is wrong with the first that is not Hydra's syntax)."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except HydraException as error:
            reason = " ".join(str(error).splitlines()[0].split())
            return [], f"{text if text.strip() else repr(text)}: not a valid override ({reason}); write key=value"
        if parsed[-1].is_sweep_override():
            return [], f"{text}: several values for one run; give one value, or quote it if it is a text with commas"
    return parsed, None


def split_groups(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """(choices of a group such as model=llama_1b, values such as optim.lr=0.1)."""
    groups = [item for item in overrides if item.key_or_group.split("@")[0] in GROUPS]
    return groups, [item for item in overrides if item not in groups]


def wrong_choice(groups: Iterable[Override], options: Options) -> str | None:
    """The first group choice that does not exist."""
    for item in groups:
        have = [name for name in options(item.key_or_group) if not name.endswith(SCHEMA_SUFFIX)]
        value = item.value()
        if str(value) not in have and not item.is_delete() and (value is not None or item.key_or_group != "experiment"):
            return f"{item.input_line}: no such {item.key_or_group}; {close(str(value), have)}"
    return None


def wrong_key(values: Iterable[Override], config: DictConfig) -> str | None:
    """The first component of a key that the composed config does not have."""
    for item in values:
        if item.is_add() or item.key_or_group.startswith("hydra"):
            continue
        node: Any = config
        for depth, component in enumerate(item.key_or_group.split(".")):
            if isinstance(node, ListConfig):
                break
            if not isinstance(node, DictConfig):
                parent = ".".join(item.key_or_group.split(".")[:depth])
                return f"{item.input_line}: '{parent}' is a value and has no '{component}'"
            if component not in node:
                if node._metadata.object_type is dict:
                    return f"{item.input_line}: no key '{component}' yet; write +{item.input_line} to add it"
                return f"{item.input_line}: no key '{component}'; {close(component, map(str, node))}"
            node = node._get_node(component)
    return None


def unknown_field(config: Any, path: str = "") -> str | None:
    """The first attribute that is no field of its dataclass: what `+key=value` adds where nothing reads it."""
    names = {item.name for item in fields(config)}
    for name, value in vars(config).items():
        if name not in names:
            return f"+{path}{name}: nothing reads this key; {close(name, names)}"
        if is_dataclass(value) and (found := unknown_field(value, f"{path}{name}.")):
            return found
    return None


def composition_error(error: BaseException, overrides: Sequence[Override]) -> str:
    """One line for what Hydra or OmegaConf raised; names the override whose key it was, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    key = getattr(cause, "full_key", None) or ""
    reason = " ".join(str(cause or error).splitlines()[0].split())
    for type_name, words in _KINDS.items():
        if reason.endswith(f"could not be converted to {type_name}"):
            reason = f"must be {words}"
    for item in overrides:
        if key and (item.key_or_group == key or key.startswith(f"{item.key_or_group}.")):
            return f"{item.input_line}: {reason}"
    return f"{key}: {reason}" if key else reason
