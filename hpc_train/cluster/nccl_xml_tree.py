"""Elements of an XML text with their lines, read safely: no document type, no entities, bounded depth and size."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from hpc_train.errors import UserError

LARGEST = 32 << 20
DEEPEST = 64
MOST = 100_000
"""Bytes, levels and elements; a node of 72 GPUs has under 2,000 elements."""


@dataclass
class Element:
    """One element; text between elements means nothing here and is dropped."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def of(self, tag: str) -> list[Element]:
        """Children with a tag."""
        return [it for it in self.children if it.tag == tag]


def root_tag(text: str) -> str | None:
    """Name of the first element, or of the document type where one is declared; None where there is none."""
    at = 0
    while (at := text.find("<", at)) >= 0:
        if text.startswith("<!--", at):
            at = text.find("-->", at)
            if at < 0:
                return None
        elif text.startswith("<?", at):
            at += 2
        else:
            found = re.compile(r"<(?:!DOCTYPE\s+)?([A-Za-z_][\w.-]*)").match(text, at)
            return found[1] if found else None
    return None


def parse(text: str, name: str) -> Element:
    """The root element. Raises UserError, one line, for what is not well-formed or beyond the bounds."""
    if len(text) > LARGEST:
        raise UserError(f"{name}:1: larger than {LARGEST >> 20} MiB; not a topology of one system")
    body = text.lstrip("\ufeff \t\r\n")
    builder = _Builder(name, text[: len(text) - len(body)].count("\n"))
    try:
        builder.parser.Parse(body.encode(), True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise UserError(f"{name}:{error.lineno + builder.skipped}: XML: {what}; expected a whole file") from None
    except ValueError:
        raise UserError(f"{name}:1: characters that XML cannot have; expected a whole NCCL topology") from None
    assert builder.root is not None
    return builder.root


class _Builder:
    def __init__(self, name: str, skipped: int):
        self.name = name
        self.skipped = skipped
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0
        self.parser = expat.ParserCreate(encoding="utf-8")
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, self.skipped + self.parser.CurrentLineNumber)
        self.count += 1
        if self.count > MOST or len(self.open) >= DEEPEST:
            raise UserError(f"{self.name}:{element.line}: more than {MOST} elements, or {DEEPEST} in one another")
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _end(self, tag: str) -> None:
        self.open.pop()

    def _doctype(self, *about: object) -> None:
        line = self.skipped + self.parser.CurrentLineNumber
        raise UserError(f"{self.name}:{line}: a document type is refused here; expected plain <system version=...>")
