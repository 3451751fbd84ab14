"""Tokenizers from outside: a `tokenizer.json`, or a folder as transformers saves one. No code of theirs is run.

Only JSON and the chat template are read: the template is text here, and runs only in transformers' sandbox (chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.data.readers.records import first_line
from hpc_train.data.token_store import Tokens
from hpc_train.data.tokenizers.tokenizer import END_OF_TEXT, BpeTokenizer, Tokenizer, encode_batch, import_tokenizers
from hpc_train.errors import UserError
from hpc_train.regular_files import read_regular
from hpc_train.terminal import one_line

_TOKENIZER, _CONFIG, _SPECIAL, _TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_TEXT_BYTES = 16 << 20
_SLOW = ("vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "vocab.txt")
"""Files of tokenizers that need code of their own to be read."""
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a folder's tokenizer from the files beside `tokenizer.json`."""

    special: dict[str, str] = field(default_factory=dict)
    """Role (bos_token, eos_token, ...) -> token."""
    chat_template: str | None = None
    """Jinja source."""
    tool_template: str | None = None
    """Jinja source for conversations with tools, where it is another."""
    begin: tuple[int, ...] = ()
    """Tokens before every document, as the tokenizer itself puts them."""
    end: tuple[int, ...] = ()
    """Tokens after every document: what the tokenizer itself puts, else its eos_token."""


@dataclass(frozen=True)
class FolderTokenizer:
    """A tokenizer of the package tokenizers. Text that spells out a special token stays text."""

    model: Any
    """tokenizers.Tokenizer"""
    settings: TokenizerSettings
    source: str
    """The `tokenizer.json` as it was read, so that its digest says whether two are the same."""
    name: str = "folder"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token: some vocabularies have gaps."""
        return 1 + max(map(int, self.model.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that are no text, such as those that begin and end a turn."""
        added = self.model.get_added_tokens_decoder()
        return frozenset(int(number) for number, token in added.items() if token.special)

    @property
    def begin(self) -> tuple[int, ...]:
        return self.settings.begin

    @property
    def end(self) -> tuple[int, ...]:
        return self.settings.end

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return encode_batch(self.model, texts, self.vocab_size)

    def decode(self, tokens: Tokens) -> str:
        return str(self.model.decode(tokens.tolist(), skip_special_tokens=False))

    def to_json(self) -> str:
        return self.source

    def settings_json(self) -> str:
        return json.dumps(asdict(self.settings), sort_keys=True)


_MAX_TOKENS = 1 << 24
"""Maximum size of a vocabulary: memory is reserved for a count of each token."""


def load_tokenizer_folder(path: str | Path, end_of_document: str | None = None) -> FolderTokenizer:
    """Load a tokenizer from a folder or a `tokenizer.json`.

    end_of_document: the token after every document; None: what the tokenizer itself adds, else its eos_token. Raises
    UserError if there is none, and for files that cannot be read.
    """
    path = Path(path).expanduser()
    folder, file = (path, path / _TOKENIZER) if path.is_dir() else (path.parent, path)
    if not file.exists():
        raise UserError(_explain_missing(path))
    source = _read_text(file, _MAX_TOKENIZER_BYTES)
    model = _parse_model(source, str(file))
    largest = max(model.get_vocab(with_added_tokens=True).items(), key=lambda entry: int(entry[1]), default=("", 0))
    if largest[1] >= _MAX_TOKENS:
        raise UserError(
            one_line(
                f"{file}: token {largest[0]!r} has the id {largest[1]:,}, more than the maximum of {_MAX_TOKENS:,}; "
                "it may be damaged: copy it again"
            )
        )
    config, special = _read_object(folder / _CONFIG), _read_object(folder / _SPECIAL)
    names = {
        role: name for role in _ROLES if (name := _get_token_text(config.get(role, special.get(role)))) is not None
    }
    begin, end = _find_frame(model)
    end = _choose_end(model, end, end_of_document or names.get("eos_token"), end_of_document is not None, path)
    model.encode_special_tokens = True  # after _find_frame; in text they are text
    templates = _read_template(folder, config), _read_tool_template(folder, config)
    return FolderTokenizer(model, TokenizerSettings(names, *templates, begin, end), source)


def restore_folder_tokenizer(source: str, settings_json: str) -> FolderTokenizer:
    """Make a tokenizer again from its `to_json` and `settings_json`."""
    fields = json.loads(settings_json)
    fields |= {"begin": tuple(fields["begin"]), "end": tuple(fields["end"])}
    model = _parse_model(source, "the store's tokenizer")
    model.encode_special_tokens = True
    return FolderTokenizer(model, TokenizerSettings(**fields), source)


def write_tokenizer_folder(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write a tokenizer into a folder as transformers' AutoTokenizer loads it, and return the names of the files.

    The folder must exist. The byte tokenizer has no such form: nothing is written.
    """
    if isinstance(tokenizer, FolderTokenizer):
        settings = tokenizer.settings
    elif isinstance(tokenizer, BpeTokenizer):
        settings = TokenizerSettings({"eos_token": END_OF_TEXT})
    else:
        return []
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings.special}
    files = {_TOKENIZER: tokenizer.to_json(), _CONFIG: json.dumps(config, indent=2)}
    if settings.chat_template is not None:
        files[_TEMPLATE] = settings.chat_template
    if settings.tool_template is not None:
        files[_TOOL_TEMPLATE] = settings.tool_template
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return list(files)


def _parse_model(source: str, where: str) -> Any:
    package = import_tokenizers()
    try:
        model = package.Tokenizer.from_str(source)
    except Exception as error:  # the package raises plain Exception
        raise UserError(
            one_line(f"{where} is not a tokenizer of the package tokenizers ({first_line(error)})")
        ) from error
    model.no_truncation()  # as saved, some would silently cut every document
    model.no_padding()
    return model


def _find_frame(model: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer's own post-processor puts before and after a text."""
    text = _find_known_text(model)
    if text is None:
        return (), ()
    plain = model.encode(text, add_special_tokens=False).ids
    framed = model.encode(text, add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start]), tuple(framed[start + len(plain) :])
    return (), ()


def _find_known_text(model: Any) -> str | None:
    """Return a text that the tokenizer has tokens for, such as "a"; tokenizers of proteins do not have that."""
    special = {token.content for token in model.get_added_tokens_decoder().values()}
    for text in ("a", *model.get_vocab(with_added_tokens=False)):
        with suppress(Exception):  # the package raises plain Exception for what has no token
            if text not in special and model.encode(text, add_special_tokens=False).ids:
                return str(text)
    return None


def _choose_end(
    model: Any, template_end: tuple[int, ...], name: str | None, wanted: bool, path: Path
) -> tuple[int, ...]:
    if template_end and not wanted:
        return template_end
    if name is None:
        raise UserError(
            f"{path} does not say which token ends a document (no eos_token): name one with --end-of-document TOKEN "
            "(data.end_of_document)"
        )
    token = model.token_to_id(name)
    if token is None:
        raise UserError(one_line(f"{path}: the token {name!r} that ends a document is not in the vocabulary"))
    return (int(token),)


def _explain_missing(path: Path) -> str:
    if not path.exists():
        return f"tokenizer {path} does not exist: give byte, bpe, a tokenizer.json, or a folder with one"
    slow = [name for name in _SLOW if (path / name).exists()]
    if slow:
        return (
            f"{path} has {' and '.join(slow)} but no {_TOKENIZER}: write it with transformers, "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    return f"{path} has no {_TOKENIZER}: give a folder as transformers saves a tokenizer, or a tokenizer.json"


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: of its own file, or of the settings; of several, the one named default."""
    if (folder / _TEMPLATE).exists():
        return _read_text(folder / _TEMPLATE, _MAX_TEXT_BYTES)
    return _choose_template(folder, config, "default")


def _read_tool_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template of conversations with tools, where a folder has one of its own."""
    if (folder / _TOOL_TEMPLATE).exists():
        return _read_text(folder / _TOOL_TEMPLATE, _MAX_TEXT_BYTES)
    return None if (folder / _TEMPLATE).exists() else _choose_template(folder, config, "tool_use")


def _choose_template(folder: Path, config: dict[str, Any], name: str) -> str | None:
    """Return the chat template of the settings: of several, the one of this name; a single one is the default."""
    template = config.get("chat_template", _read_object(folder / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(name)
    elif name != "default":
        return None
    return template if isinstance(template, str) else None


def _get_token_text(value: Any) -> str | None:
    """Return a special token's text; it is given as such, or as an object with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path, _MAX_TEXT_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({first_line(error)})") from error
    return value if isinstance(value, dict) else {}


def _read_text(path: Path, most: int) -> str:
    try:
        return read_regular(path, most, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or first_line(error)}") from error
