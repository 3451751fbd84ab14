"""YAML read with the line of everything, so that a message can name it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]

from hpc_train.cluster.slurm.records import names, one_name
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Value:
    """A value of a YAML file; scalars stay text, so that a node called 0010 or 1e3 keeps its name."""

    file: str
    node: yaml.Node

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def error(self, what: str) -> UserError:
        return UserError(f"{self.file}:{self.line}: {what}")

    def mapping(self, known: Collection[str] | None = None) -> dict[str, Value]:
        """Its entries. UserError where it is no mapping, or has a key twice or one that is not `known`."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"expected a mapping{_among(known)}")
        entries: dict[str, Value] = {}
        for key, value in self.node.value:
            name = Value(self.file, key).text()
            if name in entries or (known is not None and name not in known):
                what = "stands there twice" if name in entries else f"is not known here{_among(known)}"
                raise Value(self.file, key).error(f"{name[:60]!r} {what}")
            entries[name] = Value(self.file, value)
        return entries

    def items(self) -> list[Value]:
        """UserError where it is no list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("expected a list")
        return [Value(self.file, it) for it in self.node.value]

    def text(self) -> str:
        """UserError where it is no scalar, or an empty one."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value:
            raise self.error("expected a name, a number or a host list")
        return str(self.node.value)

    def name(self) -> str:
        return one_name(self.text(), f"{self.file}:{self.line}: ")

    def number(self) -> int:
        if not re.fullmatch("[0-9]{1,9}", text := self.text()):
            raise self.error(f"{text[:60]!r}; expected a number")
        return int(text)

    def is_true(self) -> bool:
        text = self.text().lower()
        if text not in {"true", "yes", "on", "1", "false", "no", "off", "0"}:
            raise self.error(f"{text[:60]!r}; expected true or false")
        return text in {"true", "yes", "on", "1"}

    def names(self) -> tuple[str, ...]:
        """The names of a host list, or of a list of them, each once; () for nothing."""
        if isinstance(self.node, yaml.ScalarNode) and not self.node.value:
            return ()
        parts = self.items() if isinstance(self.node, yaml.SequenceNode) else [self]
        found = (name for it in parts for name in names(it.text(), f"{it.file}:{it.line}"))
        return tuple(dict.fromkeys(found))


def parse(text: str, file: str) -> Value:
    """The one document of a text. UserError `FILE:LINE: ...` for what is no YAML."""
    try:
        # libyaml's loader is faster, but a file of 100,000 brackets crashes the process in it.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{file}:{mark.line + 1 if mark else 1}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: not YAML ({str(error).splitlines()[0]})") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deep; not a topology") from None
    if root is None:
        raise UserError(f"{file}: nothing in it")
    return Value(file, root)


def _among(known: Collection[str] | None) -> str:
    return f"; expected {', '.join(sorted(known))}" if known else ""
