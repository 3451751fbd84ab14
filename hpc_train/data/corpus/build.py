"""Build token stores from text and records, on request or at the first use of a config that names its sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import xxhash

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.documents import Part, iterate_batches, plan_parts, read_pieces
from hpc_train.data.corpus.part_files import (
    Progress,
    TokenizationRecipe,
    list_part_files,
    open_parts_folder,
    write_part_files,
)
from hpc_train.data.corpus.sources import SourceFile, find_source_files
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.data.corpus.tokenize import LeftOut, Tokenization, describe_assistant_part, tokenize_part
from hpc_train.data.store_file import TOKEN_STORE, check_new_store, make_cache
from hpc_train.data.token_store import VERSION, StoreHeader, TokenBlock, TokenStore, write_store
from hpc_train.data.tokenizers.tokenizer import BYTE_VOCAB, ByteTokenizer, Tokenizer, train_bpe
from hpc_train.data.tokenizers.tokenizer_folder import load_tokenizer_folder
from hpc_train.errors import UserError

BPE_TRAINING_BYTES = 1 << 28
"""Maximum text to train the byte-pair encoding on; of a longer text, batches at even distances of about this size."""


@dataclass(frozen=True)
class StoreRecipe:
    """Settings that determine a store's content, together with the files themselves."""

    sources: tuple[str, ...]
    suffixes: tuple[str, ...]
    tokenizer: str = "byte"
    """byte, bpe, or the path of a tokenizer.json or of a folder with one."""
    vocab_size: int = BYTE_VOCAB
    """Vocabulary of the bpe tokenizer; 256 for byte, and for a tokenizer that has its own."""
    column: str = "text"
    """Column of records with the text, or with the messages of a chat."""
    chat: bool = False
    """Whether records are conversations; only the assistant's turns then count as targets."""
    end_of_document: str | None = None
    """Token after every document, for a tokenizer from a folder; None: its own choice."""

    def __post_init__(self) -> None:
        if self.tokenizer != "bpe" and self.vocab_size != BYTE_VOCAB:
            what = (
                f"the byte tokenizer, whose vocabulary is {BYTE_VOCAB}"
                if self.tokenizer == "byte"
                else "a tokenizer that is read"
            )
            raise UserError(
                f"vocab_size {self.vocab_size} has no effect on {what}: leave it out, or choose the bpe tokenizer"
            )
        if self.end_of_document is not None and self.tokenizer in ("byte", "bpe"):
            raise UserError(
                f"end_of_document {self.end_of_document!r} has no effect on the {self.tokenizer} tokenizer, which has "
                "its own: leave it out, or give a tokenizer from a folder"
            )


def choose_default_column(chat: bool) -> str:
    """Return the column that is read if none is named."""
    return "messages" if chat else "text"


def build_from_recipe(
    recipe: StoreRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> TokenStore:
    """Build the token store `out`, and open it. The result does not depend on the number of workers.

    A build that was killed goes on with the parts that are missing. Raises UserError if `out` exists, unless it is a
    store and `overwrite` is set; jobs that read the old one keep it.
    """
    out = check_new_store(out, overwrite, TOKEN_STORE)
    corpus = _open_corpus(recipe, find_source_files(recipe.sources, recipe.suffixes))
    how = corpus.make_tokenization()
    try:
        with open_parts_folder(out) as folder:
            files = list_part_files(folder, corpus.parts, TokenizationRecipe.of(how))
            write_part_files(files, how, workers, progress)
            left_out = LeftOut()
            blocks = (block for file in files for block in file.read(how, left_out))
            corpus.write(out, how, blocks, left_out)
    except OSError as error:
        raise UserError(f"cannot write token store {out}: {error.strerror or error}") from error
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
        make_cache(config.cache)
        _write_tokens(recipe, files, path)
    return path


def locate_store(config: TokenDataConfig) -> Path:
    """Return the path that `ensure_store` returns, without building anything."""
    if config.path is not None:
        return Path(config.path).expanduser()
    return _locate_cached_store(config, *_make_recipe(config))


def _make_recipe(config: TokenDataConfig) -> tuple[StoreRecipe, list[SourceFile]]:
    recipe = StoreRecipe(
        sources=tuple(config.sources),
        suffixes=tuple(config.suffixes),
        tokenizer=config.tokenizer,
        vocab_size=config.vocab_size,
        column=config.column or choose_default_column(config.chat),
        chat=config.chat,
        end_of_document=config.end_of_document,
    )
    return recipe, find_source_files(recipe.sources, recipe.suffixes)


def _locate_cached_store(config: TokenDataConfig, recipe: StoreRecipe, files: Sequence[SourceFile]) -> Path:
    name = recipe.tokenizer if recipe.tokenizer in ("byte", "bpe") else "folder"
    return Path(config.cache).expanduser() / f"{name}-{recipe.vocab_size}-{_hash_recipe(recipe, files)}.h5"


def _hash_recipe(recipe: StoreRecipe, files: Sequence[SourceFile]) -> str:
    settings = asdict(recipe)
    if recipe.tokenizer not in ("byte", "bpe"):
        settings["tokenizer"] = "folder"  # which may move: its content says what it is
    content = [VERSION, settings, [(str(file.path.absolute()), file.size, file.mtime_ns) for file in files]]
    if recipe.chat:
        content.append("with tools")  # a store of the same chats without them must not be taken for it
    if recipe.tokenizer not in ("byte", "bpe"):
        tokenizer = load_tokenizer_folder(recipe.tokenizer, recipe.end_of_document)
        content.append([tokenizer.to_json(), tokenizer.settings_json()])
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def _write_tokens(recipe: StoreRecipe, files: Sequence[SourceFile], out: Path) -> None:
    """Write a store in this process, without part files."""
    corpus, left_out = _open_corpus(recipe, files), LeftOut()
    how = corpus.make_tokenization()
    corpus.write(out, how, (block for part in corpus.parts for block in tokenize_part(part, how, left_out)), left_out)


@dataclass(frozen=True)
class Corpus:
    """The files of a store that is to be built, checked and cut into parts."""

    recipe: StoreRecipe
    files: tuple[SourceFile, ...]
    parts: tuple[Part, ...]

    def make_tokenization(self) -> Tokenization:
        """Load or train the tokenizer."""
        return Tokenization(self._make_tokenizer(), self.recipe.column, self.recipe.chat)

    def write(self, out: Path, how: Tokenization, blocks: Iterator[TokenBlock], left_out: LeftOut) -> None:
        """Write the store. left_out: filled while the blocks are read."""
        tokenizer = how.tokenizer
        header = StoreHeader(
            tokenizer.vocab_size, tokenizer.name, tokenizer.to_json(), "", tokenizer.settings_json(), how.chat
        )
        write_store(out, _require_answers(blocks, left_out), header, lambda: json.dumps(self._describe(how, left_out)))

    def _make_tokenizer(self) -> Tokenizer:
        if self.recipe.tokenizer == "byte":
            return ByteTokenizer()
        if self.recipe.tokenizer != "bpe":
            return load_tokenizer_folder(self.recipe.tokenizer, self.recipe.end_of_document)
        stride = max(1, sum(file.size for file in self.files) // BPE_TRAINING_BYTES)
        batches = iterate_batches(piece for part in self.parts for piece in read_pieces(part, self.recipe.column))
        texts = ([piece.text for piece in batch] for batch in islice(batches, 0, None, stride))
        return train_bpe(texts, self.recipe.vocab_size)

    def _describe(self, how: Tokenization, left_out: LeftOut) -> dict[str, object]:
        facts: dict[str, object] = {
            "sources": self.recipe.sources,
            "suffixes": self.recipe.suffixes,
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
        }
        if any(piece.format is not None for part in self.parts for piece in part):
            facts["column"] = self.recipe.column
        if how.chat:
            facts["assistant_part"] = describe_assistant_part(how)
        counts = {"empty_documents": left_out.empty, "conversations_without_answer": left_out.unanswered}
        return facts | {name: count for name, count in counts.items() if count}


def _require_answers(blocks: Iterator[TokenBlock], left_out: LeftOut) -> Iterator[TokenBlock]:
    """Pass blocks on. Raises UserError at the end if all of the conversations were left out."""
    has_answers = False
    for block in blocks:
        has_answers = has_answers or len(block.tokens) > 0
        yield block
    if not has_answers and left_out.unanswered:
        raise UserError(f"none of {left_out.unanswered:,} conversations has a turn of the assistant to learn from")


def _open_corpus(recipe: StoreRecipe, files: Sequence[SourceFile]) -> Corpus:
    return Corpus(recipe, tuple(files), tuple(plan_parts(recognise_files(files))))
