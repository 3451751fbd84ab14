"""Lines of `Key=Value Key=Value`, as Slurm's configuration files and scontrol write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpc_train.cluster.slurm.hostlist import expand
from hpc_train.errors import UserError

_PAIR = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*=\s*(?:\"([^\"]*)\"(?!\S)|([^\s\"]+))")
_PROMPT = re.compile(r"[^=]*\bscontrol\s[^=]*\bshow\s+topo[^=]*")


@dataclass(frozen=True)
class Record:
    """One line; keys are lower case, as Slurm takes them in any."""

    file: str
    line: int
    first: str
    """The key that the line begins with."""
    values: dict[str, str]

    def name(self) -> str:
        """What the first key names: one plain name."""
        return one_name(self.values[self.first], f"{self.file}:{self.line}: {self.first}=")

    def list(self, key: str) -> tuple[str, ...]:
        """The names of a host list, each once; () where the key is absent."""
        text = self.values.get(key, "")
        return () if text == "(null)" else names(text, f"{self.file}:{self.line}: {key}=")

    def number(self, key: str) -> int:
        """A count. UserError where it is absent or no number."""
        text = self.values.get(key)
        if text is None or not re.fullmatch("[0-9]{1,9}", text):
            raise self.error(f"{key}={text or ''}; expected {key}=NUMBER (is the line cut short?)")
        return int(text)

    def error(self, what: str) -> UserError:
        return UserError(f"{self.file}:{self.line}: {what}")


@dataclass(frozen=True)
class Grammar:
    """What the lines of one format may hold; all keys in lower case."""

    kinds: Mapping[str, str]
    """First key of a line -> kind of cluster; all lines of a text are of one kind."""
    keys: Mapping[str, frozenset[str]]
    """Kind -> keys that its lines may have."""


def records(text: str, file: str, grammar: Grammar) -> Iterator[Record]:
    """Every line that is not empty, a comment or a shell's prompt; a backslash at its end continues a line.

    Raises UserError `file:line: ...` for a line of another form and for a key that the grammar has not.
    """
    kind: str | None = None
    for number, line in _lines(text):
        if _PROMPT.fullmatch(line):
            continue
        pairs = _pairs(line)
        if pairs is None:
            raise UserError(f"{file}:{number}: {line.strip()[:60]!r}; expected KEY=VALUE KEY=VALUE ...")
        record = Record(file, number, pairs[0][0], dict(pairs))
        if record.first not in grammar.kinds:
            raise record.error(f"begins with {record.first}=; expected {_keys(grammar.kinds)}")
        kind = kind or grammar.kinds[record.first]
        if strange := next((key for key in record.values if key not in grammar.keys[kind]), None):
            raise record.error(f"{strange}= in a {kind}; expected {_keys(grammar.keys[kind])}")
        if len(record.values) < len(pairs):
            raise record.error("a key stands there twice")
        yield record


def _keys(known: Iterable[str]) -> str:
    return ", ".join(f"{key}=" for key in sorted(known))


def names(text: str, where: str) -> tuple[str, ...]:
    """A host list's names, each once, in order. `where` goes before the message of a wrong one."""
    try:
        return tuple(dict.fromkeys(expand(text)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def one_name(text: str, where: str) -> str:
    """A name that stands for one thing: no brackets, no list."""
    found = names(text, where)
    if found != (text,):
        raise UserError(f"{where}{text[:60]}; expected one name")
    return text


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, line without comment) of each line that holds something."""
    held, start = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):
            held += line[:-1] + " "
            continue
        if (held + line).strip():
            yield start, held + line
        held, start = "", 0
    if held.strip():
        yield start, held


def _pairs(line: str) -> list[tuple[str, str]] | None:
    pairs, at = [], 0
    line = line.rstrip()
    while at < len(line):
        found = _PAIR.match(line, at)
        if not found:
            return None
        pairs.append((found[1].lower(), found[2] if found[3] is None else found[3]))
        at = found.end()
    return pairs
