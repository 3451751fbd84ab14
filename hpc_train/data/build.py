"""Build token stores from text files, on request or at the first use of a config that names its sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.text_files import SourceFile, TextPiece, check_text_files, find_source_files, iterate_batches
from hpc_train.data.token_store import VERSION, StoreHeader, TokenBlock, Tokens, TokenStore, write_store
from hpc_train.data.tokenizer import BYTE_VOCAB, SEPARATOR, ByteTokenizer, Tokenizer, train_bpe
from hpc_train.errors import UserError

BPE_TRAINING_BYTES = 1 << 28
"""Maximum text to train the byte-pair encoding on; of a longer text, batches at even distances of about this size."""


@dataclass(frozen=True)
class StoreRecipe:
    """Settings that determine a store's content, together with the files themselves."""

    sources: tuple[str, ...]
    suffixes: tuple[str, ...]
    tokenizer: str
    vocab_size: int

    def __post_init__(self) -> None:
        if self.tokenizer == "byte" and self.vocab_size != BYTE_VOCAB:
            raise UserError(
                f"vocab_size {self.vocab_size} has no effect on the byte tokenizer, whose vocabulary is {BYTE_VOCAB}: "
                "leave it out, or choose the bpe tokenizer"
            )


def build_store(
    sources: Sequence[str],
    suffixes: Sequence[str],
    tokenizer: str,
    vocab_size: int,
    out: str | Path,
    *,
    overwrite: bool = False,
) -> TokenStore:
    """Build the token store `out` from text files and folders, and open it.

    sources, suffixes: see find_source_files. tokenizer: byte or bpe. vocab_size: of the bpe; 256 for byte.
    Raises UserError if `out` exists, unless it is a store and `overwrite` is set; jobs that read the old one keep it.
    """
    out = Path(out).expanduser()
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists: give another name, or --overwrite")
    if out.exists():
        TokenStore.open(out)  # refuses to replace what is not a store, such as a source named first by mistake
    recipe = StoreRecipe(tuple(sources), tuple(suffixes), tokenizer, vocab_size)
    _write_tokens(recipe, find_source_files(sources, suffixes), out)
    return TokenStore.open(out)


def ensure_store(config: TokenDataConfig) -> Path:
    """Return the path of a config's token store; build it in the cache if the config names sources and it is missing.

    The cached name is a hash of everything that determines the content; files count by path, size and modification
    time. Processes that come here together each build the same bytes, and the last one renames over an equal file.
    """
    if config.path is not None:
        return Path(config.path).expanduser()
    recipe, files = _make_recipe(config)
    path = _locate_cached_store(config, recipe, files)
    if not path.exists():
        _write_tokens(recipe, files, path)
    return path


def locate_store(config: TokenDataConfig) -> Path:
    """Return the path that `ensure_store` returns, without building anything."""
    if config.path is not None:
        return Path(config.path).expanduser()
    return _locate_cached_store(config, *_make_recipe(config))


def _make_recipe(config: TokenDataConfig) -> tuple[StoreRecipe, list[SourceFile]]:
    recipe = StoreRecipe(tuple(config.sources), tuple(config.suffixes), config.tokenizer, config.vocab_size)
    return recipe, find_source_files(recipe.sources, recipe.suffixes)


def _locate_cached_store(config: TokenDataConfig, recipe: StoreRecipe, files: Sequence[SourceFile]) -> Path:
    name = f"{recipe.tokenizer}-{recipe.vocab_size}-{_hash_recipe(recipe, files)}.h5"
    return Path(config.cache).expanduser() / name


def _hash_recipe(recipe: StoreRecipe, files: Sequence[SourceFile]) -> str:
    content = [VERSION, asdict(recipe), [(str(file.path.absolute()), file.size, file.mtime_ns) for file in files]]
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def _write_tokens(recipe: StoreRecipe, files: Sequence[SourceFile], out: Path) -> None:
    check_text_files(files)
    tokenizer = _make_tokenizer(recipe, files)
    source = {
        "sources": recipe.sources,
        "suffixes": recipe.suffixes,
        "files": len(files),
        "bytes": sum(file.size for file in files),
    }
    header = StoreHeader(tokenizer.vocab_size, tokenizer.name, tokenizer.to_json(), json.dumps(source))
    write_store(out, (_make_block(tokenizer, batch) for batch in iterate_batches(files)), header)


def _make_tokenizer(recipe: StoreRecipe, files: Sequence[SourceFile]) -> Tokenizer:
    if recipe.tokenizer == "byte":
        return ByteTokenizer()
    stride = max(1, sum(file.size for file in files) // BPE_TRAINING_BYTES)
    return train_bpe(_iterate_texts(islice(iterate_batches(files), 0, None, stride)), recipe.vocab_size)


def _iterate_texts(parts: Iterable[list[TextPiece]]) -> Iterator[list[bytes]]:
    return ([piece.text for piece in part] for part in parts)


def _make_block(tokenizer: Tokenizer, batch: Sequence[TextPiece]) -> TokenBlock:
    """Tokenize a batch, with a separator after each document that ends in it."""
    parts: list[Tokens] = []
    starts: list[int] = []
    length = 0
    separator = np.array([SEPARATOR], np.uint8)
    for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
        if piece.first:
            starts.append(length)
        parts += [tokens, separator] if piece.last else [tokens]
        length += len(tokens) + piece.last
    return TokenBlock(np.concatenate(parts), np.array(starts, np.int64))
