"""Convert text to tokens and back: single bytes, byte pairs learned from the corpus, or a tokenizer from a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpc_train.data.readers.records import first_line
from hpc_train.data.token_store import Tokens, TokenStore, choose_token_dtype
from hpc_train.errors import UserError
from hpc_train.terminal import one_line

SEPARATOR = 0
"""Token after every document, in our own two tokenizers."""

BYTE_VOCAB = 256
END_OF_TEXT = "<|endoftext|>"
"""Name of the separator in a byte-pair encoding."""


class Tokenizer(Protocol):
    """Converts between text and tokens."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens before every document."""

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens after every document."""

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text, without those before and after a document."""

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def to_json(self) -> str:
        """Return everything that `load_tokenizer` needs; empty if the name is enough."""

    def settings_json(self) -> str:
        """Return what belongs to the tokenizer beside `to_json`; empty if there is nothing."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte. The separator is the zero byte, because text files hold none; a newline ends every line."""

    name: str = "byte"
    vocab_size: int = BYTE_VOCAB
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (SEPARATOR,)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Tokens) -> str:
        return bytes(tokens.astype(np.uint8)).decode(errors="replace")

    def to_json(self) -> str:
        return ""

    def settings_json(self) -> str:
        return ""


def encode_batch(model: Any, texts: Sequence[bytes], vocab_size: int) -> list[Tokens]:
    """Return the tokens of each text, without special tokens, in the smallest type. model: a tokenizers.Tokenizer.

    Raises UserError for text that the tokenizer has no token for.
    """
    try:
        encoded = model.encode_batch_fast([decode_text(text) for text in texts], add_special_tokens=False)
    except Exception as error:  # the package raises plain Exception
        raise UserError(
            one_line(
                f"the tokenizer has no token for some of the text ({first_line(error)}): give it an unknown token, or "
                "take another tokenizer"
            )
        ) from error
    return [np.array(encoding.ids, choose_token_dtype(vocab_size)) for encoding in encoded]


@dataclass(frozen=True)
class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2), so that every
    text can be written. A text that spells out the separator's name does not become the separator."""

    model: Any
    """tokenizers.Tokenizer"""
    name: str = "bpe"
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (SEPARATOR,)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_vocab_size())

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return encode_batch(self.model, texts, self.vocab_size)

    def decode(self, tokens: Tokens) -> str:
        return str(self.model.decode(tokens.tolist(), skip_special_tokens=False))

    def to_json(self) -> str:
        return str(self.model.to_str())

    def settings_json(self) -> str:
        return ""


_MAX_TRAINED = 1 << 22
"""Maximum entries of a vocabulary that is trained: memory is reserved for all, and the package aborts the process."""


def train_bpe(batches: Iterable[Sequence[bytes]], vocab_size: int) -> BpeTokenizer:
    """Train a byte-pair encoding of at most `vocab_size` entries; fewer if the texts have fewer pairs.

    The first entries are the separator and the 256 bytes. Raises UserError for fewer than 257 entries, or too many.
    """
    package = import_tokenizers()
    if vocab_size <= BYTE_VOCAB:
        raise UserError(
            f"vocab_size {vocab_size} is too small for the bpe tokenizer, which starts from {BYTE_VOCAB} bytes and a "
            f"separator: give at least {BYTE_VOCAB + 1}, such as 4096"
        )
    if vocab_size > _MAX_TRAINED:
        raise UserError(
            f"vocab_size {vocab_size} is too large to train the bpe tokenizer: give at most {_MAX_TRAINED}, such as "
            "32000"
        )
    model = package.Tokenizer(package.models.BPE())
    model.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(([decode_text(text) for text in texts] for texts in batches), trainer)
    assert model.token_to_id(END_OF_TEXT) == SEPARATOR
    return _make_bpe(model)


def load_tokenizer(store: TokenStore) -> Tokenizer:
    """Load the tokenizer that a store was built with, from the store alone."""
    if store.tokenizer not in ("byte", "bpe", "folder"):
        raise UserError(
            f"{store.path} was built with the tokenizer {store.tokenizer!r}, not known here: byte, bpe, folder"
        )
    return restore_tokenizer(store.tokenizer, store.tokenizer_json, store.tokenizer_settings)


def restore_tokenizer(name: str, tokenizer_json: str, settings_json: str) -> Tokenizer:
    """Make a tokenizer again from its name, `to_json` and `settings_json`."""
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return _make_bpe(import_tokenizers().Tokenizer.from_str(tokenizer_json))
    from hpc_train.data.tokenizers.tokenizer_folder import restore_folder_tokenizer

    return restore_folder_tokenizer(tokenizer_json, settings_json)


def _make_bpe(model: Any) -> BpeTokenizer:
    model.encode_special_tokens = True  # in text they are text; not part of the JSON, so set again after loading
    return BpeTokenizer(model)


def decode_text(data: bytes) -> str:
    """Decode UTF-8; bytes that are not valid become U+FFFD."""
    return data.decode(errors="replace")


def import_tokenizers() -> Any:
    """Import the package tokenizers. Raises UserError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "this tokenizer needs the package tokenizers: pip install 'hpc_train[bpe]', or use the byte tokenizer"
        ) from error
    return tokenizers
