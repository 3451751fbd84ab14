"""Read the XML of topology files safely: bounded depth and size, no entities, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from hpc_train.errors import UserError

MAX_BYTES = 32 << 20
MAX_DEPTH = 64
MAX_ELEMENTS = 100_000
"""Limits on bytes, depth and elements of a file; a node of 72 GPUs has under 2,000 elements."""
MAX_TEXT = 1 << 20
"""Characters of text that are kept of an element."""
_FIRST_TAG = re.compile(r"<(?:!DOCTYPE\s+)?([A-Za-z_][\w.-]*)")


@dataclass
class XmlElement:
    """One element."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[XmlElement] = field(default_factory=list)
    text: str = ""
    """Text directly in the element."""

    def list_children(self, tag: str) -> list[XmlElement]:
        """Return the children with a tag."""
        return [child for child in self.children if child.tag == tag]


def read_root_tag(text: str) -> str | None:
    """Return the name of the first element, or of the document type if one is declared; None if there is neither."""
    at = 0
    while (at := text.find("<", at)) >= 0:
        if text.startswith("<!--", at):
            at = text.find("-->", at)
            if at < 0:
                return None
        elif text.startswith("<?", at):
            at += 2
        else:
            match = _FIRST_TAG.match(text, at)
            return match[1] if match else None
    return None


def parse_xml(text: str, name: str, document_type: str | None = None) -> XmlElement:
    """Return the root element of an XML text. name: of the file, for errors.

    document_type: the one DOCTYPE that may be declared; it must not define anything, and nothing is loaded for it.
    Raises UserError, one line with file and line number, for text that is not well-formed or beyond the bounds.
    """
    if len(text) > MAX_BYTES:
        raise UserError(f"{name}:1: larger than {MAX_BYTES >> 20} MiB; not a topology of one system")
    body = text.lstrip("\ufeff \t\r\n")
    builder = _XmlBuilder(name, text[: len(text) - len(body)].count("\n"), document_type)
    try:
        builder.parser.Parse(body.encode(), True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise UserError(f"{name}:{error.lineno + builder.skipped}: XML: {what}; expected a whole file") from None
    except ValueError:
        raise UserError(f"{name}:1: characters that XML cannot have; expected a whole file") from None
    assert builder.root is not None
    return builder.root


class _XmlBuilder:
    """Builds the tree of elements from the events of a parser, and refuses what is beyond the bounds."""

    def __init__(self, name: str, skipped: int, document_type: str | None):
        """name: of the file, for errors. skipped: lines before the text that the parser gets."""
        self.name = name
        self.skipped = skipped
        self.root: XmlElement | None = None
        self.open: list[XmlElement] = []
        self.count = 0
        self.document_type = document_type
        self.parser = expat.ParserCreate(encoding="utf-8")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._on_start
        self.parser.EndElementHandler = self._on_end
        self.parser.CharacterDataHandler = self._on_text
        self.parser.StartDoctypeDeclHandler = self._on_doctype

    def _on_start(self, tag: str, attributes: dict[str, str]) -> None:
        element = XmlElement(tag, attributes, self.skipped + self.parser.CurrentLineNumber)
        self.count += 1
        if self.count > MAX_ELEMENTS or len(self.open) >= MAX_DEPTH:
            raise UserError(
                f"{self.name}:{element.line}: more than {MAX_ELEMENTS} elements, or {MAX_DEPTH} in one another"
            )
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _on_end(self, tag: str) -> None:
        self.open.pop()

    def _on_text(self, text: str) -> None:
        if self.open and len(self.open[-1].text) < MAX_TEXT:
            self.open[-1].text += text

    def _on_doctype(self, name: str, system: str | None, public: str | None, has_definitions: bool) -> None:
        if name != self.document_type or has_definitions:
            line = self.skipped + self.parser.CurrentLineNumber
            raise UserError(f"{self.name}:{line}: a document type is refused here; expected plain elements")
