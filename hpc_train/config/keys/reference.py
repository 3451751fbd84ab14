"""Describe every configuration key: type, default, legal range, meaning and the file that declares it.

The facts come from the schema's dataclasses: the meaning of a key is the string below its field. `hpc-train explain`
prints one key, and the reference page of the documentation lists all of them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from hpc_train.config.keys.groups import GROUPS, SCHEMAS, find_option_files, read_default_options
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import Range
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names

_CONTAINER_TYPES = (list, dict, tuple)


@dataclass(frozen=True)
class KeyReference:
    """One configuration key, as `hpc-train explain` and the reference pages describe it."""

    key: str
    """Dotted, as an override writes it: train.steps."""
    type: str
    default: str
    """The schema's default as an override would write it; empty where a value must be given."""
    range: str
    """Legal values, such as `>= 1, <= 9` or `one of cpu, file, none`; empty where the type says all."""
    meaning: str
    file: str
    """Python file that declares the key, from the root of the package."""
    variant: str = ""
    """The kind of model or data that has this key; empty where every run has it."""


def list_keys() -> list[KeyReference]:
    """List all keys of a run, in the order of the schema; those of one kind of model or data follow the common ones."""
    return list(_list_keys())


def describe_key(key: str) -> list[KeyReference]:
    """Find the keys named `key`, or all keys below a part such as `train`.

    A key of a model or data set is found once for each kind that declares it.
    Raises UserError with the nearest names for an unknown key.
    """
    key = key.partition("=")[0].lstrip("+~").replace("/", ".")
    keys = list_keys()
    matches = [item for item in keys if item.key == key] or [item for item in keys if item.key.startswith(f"{key}.")]
    if not matches:
        raise UserError(f"{key}: no such key; {_suggest_keys(key, keys)}")
    return matches


def _suggest_keys(key: str, keys: list[KeyReference]) -> str:
    """Suggest keys of the same last name, then similar ones; without any, the parts of the configuration."""
    same_name = list(dict.fromkeys(item.key for item in keys if item.key.rpartition(".")[2] == key.rpartition(".")[2]))
    if len(same_name) == 1:
        return f"did you mean {same_name[0]!r}?"
    names = same_name or list(dict.fromkeys(item.key for item in keys))
    if same_name:
        return suggest_names(key, names)
    parts = dict.fromkeys(item.key.partition(".")[0] for item in keys)
    return suggest_names(key, names, f"`hpc-train explain PART` lists those of {', '.join(parts)}")


def list_related_keys(item: KeyReference) -> list[str]:
    """List the keys that the meaning of `item` names, and keys whose meaning names `item`."""
    words = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", item.meaning)) | set(re.findall(r"`([a-z_.]+)`", item.meaning))
    parent = item.key.rpartition(".")[0]
    related = []
    for other in list_keys():
        named = other.key in words or (other.key.rpartition(".")[0] == parent and other.key.rpartition(".")[2] in words)
        if other.key != item.key and (named or item.key in other.meaning):
            related.append(other.key)
    return list(dict.fromkeys(related))


def list_group_options(key: str) -> list[str]:
    """List the names that `key=` accepts where it is a group of conf/, such as `model`; empty where it is none."""
    return list(find_option_files(key)) if key in GROUPS else []


def find_default_option(group: str) -> str | None:
    """Return the option of a group that a run has when nothing is chosen."""
    return read_default_options().get(group)


@cache
def _list_keys() -> tuple[KeyReference, ...]:
    return tuple(_walk_fields(RunConfig, ""))


def _walk_fields(cls: type, path: str, variant: str = "", only_own: bool = False) -> Iterator[KeyReference]:
    """Yield the keys of a dataclass and of those in it. only_own: leave out inherited fields."""
    meanings, types = _read_meanings(cls), get_type_hints(cls)
    for item in fields(cls):
        key, kind = f"{path}{item.name}", types[item.name]
        if only_own and item.name not in meanings.keys() & inspect.get_annotations(cls).keys():
            continue
        part = next(
            (option for option in (kind, *get_args(kind)) if isinstance(option, type) and is_dataclass(option)), None
        )
        if part is not None and not _is_container(kind):
            yield from _walk_fields(part, f"{key}.", variant)
            for name, special in SCHEMAS.get(key, {}).items():
                yield from _walk_fields(special, f"{key}.", name.removesuffix("_schema"), only_own=True)
            continue
        legal: Range | None = item.metadata.get("range")
        yield KeyReference(
            key=key,
            type=_format_type(kind),
            default=_format_default(item),
            range=_format_range(legal),
            meaning=meanings.get(item.name, ""),
            file=cls.__module__.replace(".", "/") + ".py",
            variant=variant,
        )


def _is_container(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) in _CONTAINER_TYPES or any(
        getattr(argument, "__origin__", None) in _CONTAINER_TYPES for argument in get_args(kind)
    )


@cache
def _read_meanings(cls: type) -> dict[str, str]:
    """Return the string below each field, by field, including those of the classes that `cls` extends."""
    meanings: dict[str, str] = {}
    for base in reversed([base_class for base_class in cls.__mro__ if is_dataclass(base_class)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                constant = text.value if isinstance(text, ast.Expr) else None
                meaning = constant.value if isinstance(constant, ast.Constant) else ""
                meanings[field.target.id] = re.sub(r"\bNone\b", "null", " ".join(str(meaning).split()))
    return meanings


def _format_type(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])", "", text).replace("NoneType", "null").replace("None", "null")


def _format_default(item: Any) -> str:
    value = item.default if item.default is not MISSING else None
    if item.default is MISSING and item.default_factory is not MISSING:
        value = item.default_factory()
    if value == "???":
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _format_range(legal: Range | None) -> str:
    if legal is None:
        return ""
    if legal.choices is not None:
        return f"one of {', '.join(legal.choices)}"
    limits = ((">=", legal.ge), (">", legal.gt), ("<=", legal.le), ("<", legal.lt))
    return ", ".join(f"{sign} {limit:,}" for sign, limit in limits if limit is not None)
