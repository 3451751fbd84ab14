"""From an override that is wrong to one line: which component of it, and what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig

from hpc_train.config.options import GROUPS
from hpc_train.config.schema import SEALED

Options = Callable[[str], list[str]]
"""Group name -> names of its options."""
_SHOWN = 3
"""Suggestions in one line."""


def close(word: str, choices: Iterable[str]) -> str:
    """Did you mean X (or Y, where both are as near); where nothing is near, the choices themselves."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=_SHOWN, cutoff=0.5)
    if not near:
        return f"there are {', '.join(choices)}" if choices else "there is none"
    ratios = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in near}
    return did_you_mean([name for name in sorted(near) if ratios[name] == max(ratios.values())])


def did_you_mean(names: Sequence[str]) -> str:
    """did you mean 'a', 'b' or 'c'?"""
    *first, last = (f"'{name}'" for name in names)
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


def parse(overrides: Sequence[str]) -> tuple[list[Override], str | None]:
    """(parsed overrides, None), or ([], what is wrong with the first that is not of a form that a run can have)."""
    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            item = parser.parse_overrides([text])[0] if text.strip() else None
        except HydraException:
            item = None
        if item is None:
            return [], _malformed(text)
        if wrong := _refused(item, text):
            return [], wrong
        parsed.append(item)
    return parsed, None


def _malformed(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not text.strip():
        return f"{text!r}: an empty override; write key=value"
    if not text.isprintable():
        return f"{text!r}: control characters (newlines too) are refused; write it in one plain line"
    if not equals:
        return f"{text}: is not an override; write key=value"
    if not key.strip("+~"):
        return f"{text}: has no key; write key=value"
    quoted = f"'{key}=\"...\"'"
    return f"{text}: cannot be read; close its quotes and brackets, and put a value of special characters in {quoted}"


def _refused(item: Override, text: str) -> str | None:
    """Forms of Hydra's that mean nothing for a run, or would change it without a word."""
    group = item.key_or_group
    if item.is_sweep_override():
        quote = "give one value, or quote it if it is a text with commas"
        return f"{text}: several values for one run; {quote}; with -m it is a sweep"
    if not group:
        return f"{text}: has no key; write key=value"
    if group.replace("/", ".").split(".")[0] == "hydra":
        return f"{text}: settings of Hydra itself have no effect here"
    if item.package is not None:
        return f"{text}: '@{item.package}' has no effect here; write {group}=<option>"
    if group in GROUPS and item.is_delete():
        return f"{text}: a group cannot be left out; choose one of its options, {group}=<option>"
    if group in GROUPS and item.is_add():
        return f"{text}: the group is always there; write {text.lstrip('+')}"
    return None


def split_groups(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """(choices of a group such as model=llama_1b, values such as optim.lr=0.1)."""
    groups = [item for item in overrides if item.key_or_group in GROUPS]
    return groups, [item for item in overrides if item not in groups]


def wrong_choice(groups: Iterable[Override], options: Options) -> str | None:
    """The first group choice that does not exist."""
    for item in groups:
        have, value = options(item.key_or_group), item.value()
        if value is None and item.key_or_group == "experiment":
            continue
        if str(value) not in have:
            return f"{item.input_line}: no such {item.key_or_group}; {close(str(value), have)}"
    return None


def wrong_key(values: Iterable[Override], config: DictConfig) -> str | None:
    """The first component of a key that the composed config does not have."""
    for item in values:
        if item.is_add():
            continue
        node: Any = config
        for depth, component in enumerate(item.key_or_group.replace("/", ".").split(".")):
            if isinstance(node, ListConfig):
                break
            if not isinstance(node, DictConfig):
                parent = ".".join(item.key_or_group.split(".")[:depth])
                return f"{item.input_line}: '{parent}' is a value and has no '{component}'"
            if component not in map(str, node):  # which has those without a value yet, too
                if node._metadata.object_type is dict:
                    return f"{item.input_line}: no key '{component}' yet; write +{item.input_line} to add it"
                return f"{item.input_line}: no key '{component}'; {_meant(component, node, config)}"
            node = node._get_node(component)
    return None


def _meant(component: str, node: DictConfig, root: DictConfig) -> str:
    """A key of this name elsewhere (lr is optim.lr), else one like it here."""
    elsewhere = [key for key in _keys(root) if key.split(".")[-1] == component]
    if elsewhere and len(elsewhere) <= _SHOWN:
        return did_you_mean(elsewhere)
    return close(component, map(str, node))


def _keys(node: DictConfig, path: str = "") -> Iterator[str]:
    for name in map(str, node):
        yield f"{path}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _keys(child, f"{path}{name}.")


def unknown_field(config: Any, path: str = "") -> str | None:
    """The first attribute that is no field of its dataclass: what `+key=value` adds where nothing reads it."""
    names = {item.name for item in fields(config)}
    for name, value in vars(config).items():
        if name not in names and name != SEALED:
            return f"+{path}{name}: nothing reads this key; {close(name, names)}"
        if is_dataclass(value) and (found := unknown_field(value, f"{path}{name}.")):
            return found
    return None
