"""Render conversations with a tokenizer's chat template, and mark the tokens of the assistant's turns.

Templates run in the sandbox of transformers (jinja2.sandbox). A template that marks the assistant's part itself, with
`{% generation %}`, decides what counts; for any other, a turn is what the template adds to the text of the turns before
it and the prompt for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hpc_train.data.readers.records import first_line
from hpc_train.data.token_store import Tokens, token_dtype
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer
from hpc_train.errors import UserError
from hpc_train.terminal import one_line

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Where = Callable[[], str]
Message = dict[str, Any]


class EncodedChat(NamedTuple):
    """A conversation as tokens."""

    tokens: Tokens
    counts: npt.NDArray[np.bool_]
    """(tokens,): whether the token is the assistant's, and so a target that counts."""


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and tokenizes conversations."""

    renderer: Any
    """transformers.PreTrainedTokenizerFast"""
    marked: bool
    """Whether the template itself marks the assistant's part."""
    vocab_size: int

    def encode(self, value: Any, where: Where) -> EncodedChat:
        """Encode one conversation, a list of messages. where: says which one it is. Raises UserError, one line."""
        messages = check_messages(value, where)
        ids, counts = self._encode_marked(messages, where) if self.marked else self._encode_by_prefixes(messages, where)
        return EncodedChat(np.array(ids, token_dtype(self.vocab_size)), np.array(counts, np.bool_))

    def _encode_marked(self, messages: list[Message], where: Where) -> tuple[list[int], list[bool]]:
        encoded = self._apply(messages, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]

    def _encode_by_prefixes(self, messages: list[Message], where: Where) -> tuple[list[int], list[bool]]:
        text = self._apply(messages, where, tokenize=False)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where()}: has half of a character in it (\\ud800 to \\udfff alone)") from error
        spans = [
            self._find_turn(messages, index, text, where)
            for index, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        encoded = self.renderer(text, add_special_tokens=False, return_offsets_mapping=True)
        counts = [
            begin < end and any(first <= begin < last for first, last in spans)
            for begin, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), counts

    def _find_turn(self, messages: list[Message], index: int, text: str, where: Where) -> tuple[int, int]:
        """Return the characters of `text` that are the answer `index`."""
        before = self._apply(messages[:index], where, tokenize=False, add_generation_prompt=True) if index else ""
        through = self._apply(messages[: index + 1], where, tokenize=False)
        if not (text.startswith(through) and through.startswith(before)):
            raise UserError(
                f"{where()}: the chat template writes message {index + 1} differently once others follow, so that the "
                "assistant's part cannot be found: put {% generation %} and {% endgeneration %} around it there"
            )
        return len(before), len(through)

    def _apply(self, messages: list[Message], where: Where, **options: Any) -> Any:
        try:
            return self.renderer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may fail in any way, and says so itself with raise_exception
            raise UserError(one_line(f"{where()}: the chat template refuses it ({first_line(error)})")) from error


def make_chat_encoder(tokenizer: FolderTokenizer) -> ChatEncoder:
    """Make the encoder of a tokenizer's chat template. Raises UserError if it has none, or transformers is missing."""
    template = tokenizer.settings.chat_template
    if template is None:
        raise UserError(
            "this tokenizer has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
            "take the tokenizer of a chat model, or write one"
        )
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise UserError("chats need the package transformers: pip install 'hpc_train[hf]'") from error
    from hpc_train.data.tokenizers.tokenizer import import_tokenizers

    # A model of its own: transformers changes how it treats special tokens, which in a template are meant.
    model = import_tokenizers().Tokenizer.from_str(tokenizer.source)
    model.no_truncation()
    model.no_padding()
    renderer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model, chat_template=template, clean_up_tokenization_spaces=False, **tokenizer.settings.special
    )
    return ChatEncoder(renderer, has_marks(template), tokenizer.vocab_size)


def has_marks(template: str) -> bool:
    """Return whether a chat template marks the assistant's part itself."""
    return _MARK.search(template) is not None


def check_messages(value: Any, where: Where) -> list[Message]:
    """Return the messages of a conversation. Raises UserError for what is none, without or with unknown roles.

    Keys without a value are left out: tables have each key in each message, and templates ask whether one is there.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise UserError(
            f'{where()}: not a conversation; expected a list such as [{{"role": "user", "content": "..."}}]'
        )
    roles = ", ".join(ROLES)
    for index, message in enumerate(value, 1):
        role, content = message.get("role"), message.get("content")
        if "role" not in message:
            keys = ", ".join(map(str, message)) or "none"
            raise UserError(one_line(f"{where()}: message {index} has no role (its keys: {keys}); one of {roles}"))
        if role not in ROLES:
            raise UserError(one_line(f"{where()}: message {index} has the role {role!r}; known are {roles}"))
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise UserError(f"{where()}: message {index} ({role}) has no text as its content")
    return [{key: item for key, item in one.items() if item is not None or key == "content"} for one in value]
