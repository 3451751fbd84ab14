"""Parse the overrides of a command line, tell which keys they set, and say in one line what is wrong and what is right.

Hydra's syntax that has no meaning for a run is refused, and so are labels that choose nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from hpc_train.config.keys.groups import GROUPS, find_option_files, read_default_options
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import SEALED_ATTRIBUTE, is_sealed
from hpc_train.errors import UserError
from hpc_train.near_names import MAX_SUGGESTIONS, did_you_mean, suggest_names

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

ListOptions = Callable[[str], list[str]]
"""Group name -> names of its options."""


def parse_overrides(overrides: Sequence[str]) -> tuple[list[Override], str | None]:
    """Parse overrides. Returns (parsed, None), or ([], what is wrong) for the first that a run cannot have."""
    # Here, as a frozen run needs other functions of this module, but not Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            item = parser.parse_overrides([text])[0] if text.strip() else None
        except HydraException:
            item = None
        if item is None:
            return [], _explain_malformed(text)
        if wrong := _explain_refused(item, text):
            return [], wrong
        parsed.append(item)
    return parsed, None


def _explain_malformed(text: str) -> str:
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


def _explain_refused(item: Override, text: str) -> str | None:
    """Explain Hydra's syntax that has no meaning for a run, or would change it silently."""
    group = item.key_or_group
    if item.is_sweep_override():
        quote = "give one value, or quote it if it is a text with commas"
        return f"{text}: several values for one run; {quote}; with -m it is a sweep"
    if not group:
        return f"{text}: has no key; write key=value"
    if group.replace("/", ".").split(".")[0] == "hydra":
        return f"{text}: settings of Hydra itself have no effect here"
    if item.package is not None and group in GROUPS:
        return f"{text}: '@{item.package}' has no effect here; write {group}=<option>"
    if group in GROUPS and item.is_delete():
        return f"{text}: a group cannot be left out; choose one of its options, {group}=<option>"
    if group in GROUPS and item.is_add():
        return f"{text}: the group is always there; write {text.lstrip('+')}"
    return None


def split_groups(overrides: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Return (choices of a group such as model=llama_1b, values such as optim.lr=0.1)."""
    groups = [item for item in overrides if item.key_or_group in GROUPS]
    return groups, [item for item in overrides if item not in groups]


def find_wrong_choice(groups: Iterable[Override], options: ListOptions) -> str | None:
    """Find the first group choice that does not exist."""
    for item in groups:
        names, value = options(item.key_or_group), item.value()
        if value is None and item.key_or_group == "experiment":
            continue
        name = "" if value is None else str(value)  # null resembles no option
        if name not in names:
            return f"{item.input_line}: no such {item.key_or_group}; {suggest_names(name, names)}"
    return None


def is_group_of_user(item: Override, config_dir: str | None) -> bool:
    """Return whether an override chooses in a group that only `config_dir` has."""
    group = item.key_or_group
    return config_dir is not None and group not in GROUPS and bool(group) and Path(config_dir, group).is_dir()


def find_wrong_group_of_user(values: Iterable[Override], config_dir: str | None, reason: str) -> str | None:
    """Find the first choice in a group that only `config_dir` has, such as encoder@model.args.encoder=big.

    reason: what Hydra says.
    """
    for item in values:
        if not is_group_of_user(item, config_dir):
            continue
        group, value = item.key_or_group, str(item.value())
        options = find_option_files(group, config_dir)
        if value not in options:
            return f"{item.input_line}: no such {group}; {suggest_names(value, options)}"
        if f"Could not override '{str(item.input_line).partition('=')[0]}'" in reason:
            meant = re.search(r"Did you mean to override (\S+)\?", reason)
            hint = f"write {meant[1]}={value}" if meant else "no defaults list of a chosen file names this group"
            return f"{item.input_line}: {hint}"
    return None


def find_wrong_key(values: Iterable[Override], config: DictConfig) -> str | None:
    """Find the first component of a key that the composed config does not have."""
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
                return f"{item.input_line}: no key '{component}'; {_suggest_key(component, node, config)}"
            node = node._get_node(component)
    return None


def _suggest_key(component: str, node: DictConfig, root: DictConfig) -> str:
    """Suggest a key of this name elsewhere (lr is optim.lr), else one like it here."""
    elsewhere = [key for key in _walk_keys(root) if key.split(".")[-1] == component]
    if elsewhere and len(elsewhere) <= MAX_SUGGESTIONS:
        return did_you_mean(elsewhere)
    return suggest_names(component, map(str, node))


def _walk_keys(node: DictConfig, path: str = "") -> Iterator[str]:
    for name in map(str, node):
        yield f"{path}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _walk_keys(child, f"{path}{name}.")


def find_unknown_field(config: Any, path: str = "") -> str | None:
    """Find the first attribute that is not a field of its dataclass: a `+key=value` that nothing reads."""
    names = {item.name for item in fields(config)}
    for name, value in vars(config).items():
        if name not in names and name != SEALED_ATTRIBUTE:
            return f"+{path}{name}: nothing reads this key; {suggest_names(name, names)}"
        if is_dataclass(value) and not is_sealed(value) and (unknown := find_unknown_field(value, f"{path}{name}.")):
            return unknown
    return None


MICRO_BATCH = "train.micro_batch"


def list_explicit_settings(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """List the keys below `parallel`, and train.micro_batch, that an override names or a file has changed; sorted.

    A degree of -1 counts as not given, so the planner chooses it.
    """
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    keys = {key for key in named if key.startswith("parallel.") or key == MICRO_BATCH}
    keys |= set(_list_changed(config.parallel, ParallelConfig(), "parallel."))
    keys -= {"parallel.auto", "parallel.fixed"}
    return sorted(key for key in keys if get_value(config, key) not in (-1, None))


def find_chosen_parallel_option(overrides: Sequence[str]) -> str | None:
    """Return the last option of the group `parallel` that the overrides choose."""
    options = [value for key, _, value in (text.partition("=") for text in overrides) if key == "parallel"]
    return options[-1] if options else None


def get_value(config: RunConfig, key: str) -> Any:
    """Return the value of a dotted key; None if there is no such key."""
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node


def _list_changed(config: Any, default: Any, path: str) -> Iterator[str]:
    for item in fields(config):
        value, plain = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(value):
            yield from _list_changed(value, plain, f"{path}{item.name}.")
        elif value != plain:
            yield f"{path}{item.name}"


def format_changed_setting(config: Any) -> str:
    """Format the first field of a config that is not at its default as `name=value`; there must be one."""
    default = type(config)()
    name = next(item.name for item in fields(config) if getattr(config, item.name) != getattr(default, item.name))
    return f"{name}={format_override_value(getattr(config, name))}"


def format_override_value(value: Any) -> str:
    """Format a value as an override has it: a text that Hydra would read as something else is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_override_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_override_value(item)}' for key, item in value.items())}}}"
    return _quote(value) if isinstance(value, str) else str(value)


_HYDRA_CONSTANTS = ("null", "true", "false", "nan", "inf")


def _quote(text: str) -> str:
    """Put a text between quotes, unless Hydra reads it as it is, also as an element of a list.

    Between double quotes, since a shell wants single ones around them.
    """
    if re.fullmatch(r"[A-Za-z]\w*", text, re.ASCII) and text.lower() not in _HYDRA_CONSTANTS:
        return text  # as most are: the parser takes a thousand times as long
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        if "$" not in text and OverridesParser.create().parse_override(f"key=[{text}]").value() == [text]:
            return text
    except HydraException:
        pass
    # A backslash counts before a quote only, and OmegaConf looks for ${...} inside of quotes, too.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return '"' + escaped.replace("${", "\\${") + '"'


_LABELLED = ("data", "model", "cluster")
"""Groups whose `name` and `kind` only label the option."""
_LABELS = ("name", "kind")
_OF_YOUR_OWN = {
    "data": "for text of your own data=text data.sources=[FILE], for a data set of your own data=custom",
    "model": "for a model of your own model=custom model.module=MODULE model.name=NAME",
    "cluster": "for a cluster of your own --config-dir DIR with a file in DIR/cluster/",
}


def check_overrides(config: RunConfig, overrides: Sequence[str], config_dir: str | None) -> None:
    """Raise UserError, in one line, for the first of these overrides that would mislead.

    config: the configuration they compose to. A frozen run has no overrides.
    """
    for text in overrides:
        key, equals, _ = text.lstrip("+").partition("=")
        if not equals or "." not in key:
            continue
        _check_label(config, overrides, text, key, config_dir)
        if key == "train.steps" and config.train.wanted_steps is not None and config.train.steps is None:
            raise UserError(f"{text}: is not a number of steps; give one, or train.epochs (the default is 200 steps)")


def _check_label(config: RunConfig, overrides: Sequence[str], text: str, key: str, config_dir: str | None) -> None:
    group, _, field = key.partition(".")
    if group not in _LABELLED or field not in _LABELS:
        return
    # The name of a user's own data set or model is the one it is registered under, so it does choose something.
    if field == "name" and group != "cluster" and getattr(config, group).kind == "custom":
        return
    if (group, field) == ("model", "name") and _changes_model(overrides):
        return
    option = _find_chosen_option(group, overrides)
    value, named = get_value(config, key), _get_declared_value(config, group, option, field, config_dir)
    if named is None or value == named:
        return
    options = find_option_files(group, config_dir)
    meant = f"write {group}={value}" if value in options else suggest_names(str(value), options)
    raise UserError(f"{text}: is only a label of {group}={option}, and chooses nothing; {meant}; {_OF_YOUR_OWN[group]}")


def _changes_model(overrides: Sequence[str]) -> bool:
    """Whether the overrides change the model's shape, so that it deserves another name."""
    keys = {text.lstrip("+").partition("=")[0] for text in overrides}
    return any(key.startswith("model.") for key in keys - {"model.name", "model.kind"})


def _find_chosen_option(group: str, overrides: Sequence[str]) -> str:
    chosen = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == group]
    return chosen[-1] if chosen else read_default_options()[group]


def _get_declared_value(config: RunConfig, group: str, option: str, field: str, config_dir: str | None) -> str | None:
    """Return an option's declared type or file; None if it declares none."""
    if field == "kind":
        kind = type(getattr(config, group)).__dataclass_fields__.get(field)
        return None if kind is None else str(kind.default)
    file = find_option_files(group, config_dir).get(option)
    if file is None:
        return None
    import yaml  # type: ignore[import-untyped]

    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return str(content[field]) if isinstance(content, dict) and content.get(field) not in (None, "???") else None
