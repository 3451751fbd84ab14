"""Turn the documents of one part of a corpus into blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.data.corpus.documents import Part, TextPiece, iterate_batches, read_pieces, read_records
from hpc_train.data.token_store import TokenBlock, Tokens
from hpc_train.data.tokenizers.tokenizer import Tokenizer
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer
from hpc_train.errors import UserError

_CHAT_BLOCK_TOKENS = 1 << 20


@dataclass
class LeftOut:
    """Documents of a corpus that are not in its store."""

    empty: int = 0
    """Documents and conversations without content."""
    unanswered: int = 0
    """Conversations without a turn of the assistant."""

    def add(self, other: LeftOut) -> None:
        """Add the counts of another part."""
        self.empty += other.empty
        self.unanswered += other.unanswered


@dataclass(frozen=True)
class Tokenization:
    """How a part becomes tokens."""

    tokenizer: Tokenizer
    column: str
    """Column of each record with the text, or with the messages of a chat."""
    chat: bool = False
    """Whether each record is a conversation, of which only the assistant's turns count."""

    def __post_init__(self) -> None:
        if self.chat and not isinstance(self.tokenizer, FolderTokenizer):
            raise UserError("a chat needs a tokenizer with a chat template: give --tokenizer FOLDER (data.tokenizer)")


def tokenize_part(part: Part, how: Tokenization, left_out: LeftOut) -> Iterator[TokenBlock]:
    """Yield the tokens of a part in order, and count in `left_out` what is not among them. Raises UserError."""
    if how.chat:
        yield from _tokenize_chats(part, how, left_out)
        return
    for batch in iterate_batches(read_pieces(part, how.column)):
        filled = [piece for piece in batch if not piece.empty]
        left_out.empty += len(batch) - len(filled)
        if filled:
            yield _make_block(how.tokenizer, filled, part)


def name_tools_column(column: str) -> str:
    """Return the column of a chat's tools: `tools`, in the object that the messages are in."""
    return f"{column.rpartition('.')[0]}.tools".removeprefix(".")


def describe_assistant_part(how: Tokenization) -> str:
    """Return how the assistant's part of a chat is found."""
    from hpc_train.data.tokenizers.chat import has_marks

    assert isinstance(how.tokenizer, FolderTokenizer)
    template = how.tokenizer.settings.chat_template or ""
    return "marked by the chat template" if has_marks(template) else "what a turn adds to the text of those before"


def _make_block(tokenizer: Tokenizer, batch: Sequence[TextPiece], part: Part) -> TokenBlock:
    """Tokenize a batch, with the tokenizer's frame around each document."""
    if tokenizer.name == "byte" and any(b"\0" in piece.text for piece in batch):
        _refuse_zero_bytes(batch, part)
    try:
        encoded = tokenizer.encode([piece.text for piece in batch])
    except UserError as error:
        raise UserError(f"{part[0].path}: {error}" if len(part) == 1 else str(error)) from error
    parts: list[Tokens] = []
    starts: list[int] = []
    length = 0
    begin, end = np.array(tokenizer.begin, np.uint32), np.array(tokenizer.end, np.uint32)
    for piece, tokens in zip(batch, encoded, strict=True):
        if piece.first:
            starts.append(length)
        framed: list[Tokens] = [begin] * piece.first + [tokens] + [end] * piece.last
        parts += framed
        length += sum(map(len, framed))
    return TokenBlock(np.concatenate(parts), np.array(starts, np.int64))


def _refuse_zero_bytes(batch: Sequence[TextPiece], part: Part) -> None:
    """Raise UserError if records have zero bytes in their text: they would end a document. Text files are exempt."""
    if all(piece.format is None for piece in part):
        return
    text = next(piece.text for piece in batch if b"\0" in piece.text)
    raise UserError(
        f"{part[0].path}: a text with a zero byte in it ({text[:40].decode(errors='replace')!a}...), with which "
        "the byte tokenizer ends documents: choose another tokenizer, or take the byte out"
    )


def _tokenize_chats(part: Part, how: Tokenization, left_out: LeftOut) -> Iterator[TokenBlock]:
    """Yield conversations in blocks. Empty ones, and those without an answer, are counted in `left_out`."""
    from hpc_train.data.tokenizers.chat import ASSISTANT, EncodedChat, make_chat_encoder

    assert isinstance(how.tokenizer, FolderTokenizer)
    encoder = make_chat_encoder(how.tokenizer)
    block: list[EncodedChat] = []
    size = 0
    for piece in part:
        if piece.format is None:
            raise UserError(f"{piece.path}: plain text, but a chat is read from records: give JSON Lines or Parquet")
        for where, (_, value, tools) in read_records(piece, how.column, name_tools_column(how.column)):
            if value is None or value == []:
                left_out.empty += 1
                continue
            chat = encoder.encode(value, where, tools)
            if not chat.counts.any():
                if any(message["role"] == ASSISTANT for message in value):
                    raise UserError(f"{where()}: the chat template marks nothing of the assistant's turns")
                left_out.unanswered += 1
                continue
            block.append(chat)
            size += len(chat.tokens)
            if size >= _CHAT_BLOCK_TOKENS:
                yield _join_chats(block)
                block, size = [], 0
    if block:
        yield _join_chats(block)


def _join_chats(chats: Sequence[tuple[Tokens, np.typing.NDArray[np.bool_]]]) -> TokenBlock:
    lengths = [len(tokens) for tokens, _ in chats]
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    return TokenBlock(
        np.concatenate([tokens for tokens, _ in chats]), starts, np.concatenate([counts for _, counts in chats])
    )
